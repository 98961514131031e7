"""Scripts of a recipe's local/ folder, run in this process without a second import of torch."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path

from conftest import ROOT, Result

LOCAL = ROOT / "local" / "speechcommands"
# A script finds the modules in its folder, and so do the tests of these modules.
sys.path.append(str(LOCAL))


def script(name: str, *arguments: str | Path) -> Result:
    """Run local/speechcommands/<name> with arguments, like a command line."""
    out, err, code, argv = io.StringIO(), io.StringIO(), 0, sys.argv
    sys.argv = [str(LOCAL / name), *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            err.write(f"{stop.code}\n")
    finally:
        sys.argv = argv
    return Result(code, out.getvalue(), err.getvalue())
