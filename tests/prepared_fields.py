"""Common Voice without some fields, shared by several test files."""

from __future__ import annotations

import contextlib
import io
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

from conftest import ROOT, Result

from fedtools.audio.wave import recording_seconds
from fedtools.files.datadir import DataDir
from fedtools.files.validate import validate_data_dir


def prepare(recipe: str, *arguments: str | Path) -> Result:
    """Run local/<recipe>/prepare.py in this process; recipes have modules of the same names."""
    folder = ROOT / "local" / recipe
    own = {path.stem for path in folder.glob("*.py")}
    others = {name: sys.modules.pop(name) for name in own & set(sys.modules)}
    argv, sys.argv = sys.argv, [str(folder / "prepare.py"), *map(str, arguments)]
    sys.path.insert(0, str(folder))
    out, err, code = io.StringIO(), io.StringIO(), 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv = argv
        sys.path.remove(str(folder))
        for name in own:
            sys.modules.pop(name, None)
        sys.modules.update(others)
    return Result(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def folder():
    """Make a folder for one example."""
    path = Path(tempfile.mkdtemp())
    try:
        yield path
    finally:
        shutil.rmtree(path)


def checked(out: Path) -> dict[str, DataDir]:
    """Return the data directories of a folder, each of which passes the validator."""
    found = sorted(path.parent for path in out.rglob("utt2spk"))
    assert found
    for path in found:
        validate_data_dir(path, feats=False, recording_seconds=recording_seconds)
    return {path.name: DataDir.read(path) for path in found}
