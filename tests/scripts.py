"""Scripts of local/ and utils/, run in this process: no interpreter starts, nothing heavy loads."""

from __future__ import annotations

import contextlib
import importlib
import io
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from commands import ROOT, Result

# So do tests of the modules of this folder.
sys.path.append(str(ROOT / "local" / "speechcommands"))


@contextlib.contextmanager
def modules_of(folder: Path) -> Iterator[None]:
    """Import modules from a script's folder and the one above; recipes share their names."""
    folders = [folder, folder.parent]
    own = {path.stem for each in folders for path in each.glob("*.py")}
    others = {name: sys.modules.pop(name) for name in own & set(sys.modules)}
    paths = sys.path.copy()
    sys.path[:0] = map(str, folders)
    try:
        yield
    finally:
        sys.path[:] = paths
        for name in own:
            sys.modules.pop(name, None)
        sys.modules.update(others)


def load(recipe: str, *names: str) -> list[ModuleType]:
    """Import modules of local/<recipe>, which know each other, and nothing else knows."""
    with modules_of(ROOT / "local" / recipe):
        return [importlib.import_module(name) for name in names]


def program(path: str, *arguments: str | Path | float) -> Result:
    """Run a script of this repository with arguments, like a command line."""
    script = ROOT / path
    out, err, code, argv = io.StringIO(), io.StringIO(), 0, sys.argv
    sys.argv = [str(script), *map(str, arguments)]
    try:
        with (
            modules_of(script.parent),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            err.write(f"{stop.code}\n")
    finally:
        sys.argv = argv
    return Result(code, out.getvalue(), err.getvalue())


def prepare(recipe: str, *arguments: str | Path | float) -> Result:
    """Run local/<recipe>/prepare.py."""
    return program(f"local/{recipe}/prepare.py", *arguments)


def script(name: str, *arguments: str | Path | float) -> Result:
    """Run local/speechcommands/<name>."""
    return program(f"local/speechcommands/{name}", *arguments)
