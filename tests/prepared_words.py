"""Prepared Speech Commands data, shared by several test files."""

from __future__ import annotations

import sys
from pathlib import Path

from conftest import ROOT, Result, run

SCRIPTS = ROOT / "local" / "speechcommands"
ENVIRONMENT = {"PYTHONPATH": str(ROOT)}


def prepare(*arguments: str | Path) -> Result:
    return run(sys.executable, SCRIPTS / "prepare.py", *arguments, env=ENVIRONMENT)
