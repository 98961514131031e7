"""Prepared Common Voice data, shared by several test files."""

from __future__ import annotations

import sys
from pathlib import Path

from conftest import ROOT, Result, run

SCRIPTS = ROOT / "local" / "commonvoice"
ENVIRONMENT = {"PYTHONPATH": str(ROOT)}
ACCENTS = "au=australia,en=england,in=indian"


def prepare(*arguments: str | Path) -> Result:
    return run(sys.executable, SCRIPTS / "prepare.py", *arguments, env=ENVIRONMENT)


def content(folder: Path) -> dict[str, bytes]:
    """Return everything below a folder, including hidden files: relative path -> bytes."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
