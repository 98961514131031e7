"""The shell blocks of Markdown pages, and a checkout to run them in."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from commands import ROOT, Result
from forked import forked

CONTRIBUTING, OWN_CORPUS = ROOT / "CONTRIBUTING.md", ROOT / "egs" / "README.md"
SITES = ROOT / "egs" / "SITES.md"
# The section of commands that are only tried with --help.
SET_UP = "Set-up and tests"


def blocks(page: Path, heading: str = "") -> str:
    """Return the shell blocks of a page, or of its section with a heading, as one script."""
    text = page.read_text(encoding="utf-8")
    if heading:
        text = text[text.index(f"\n## {heading}\n") + 1 :].partition("\n## ")[0]
    return "".join(re.findall(r"```sh\n(.*?)```", text, flags=re.S))


def make_checkout(folder: Path) -> Path:
    """Make a checkout whose path has blanks, with copies of the recipes' folders."""
    root = folder / "a checkout"
    for name in ("egs", "conf", "local"):
        ignored = shutil.ignore_patterns(
            "data", "dump", "exp", "downloads", "*.png", "*.opus", "RESULTS.md"
        )
        shutil.copytree(ROOT / name, root / name, symlinks=True, ignore=ignored)
    for name in ("fedtools", "utils", "setup.py"):
        (root / name).symlink_to(ROOT / name)
    return root


def bash(script: str, folder: Path) -> Result:
    """Run a script as a user would type it, in bash, up to the first command that fails."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("FEDTOOLS_PATH", None)
    done = subprocess.run(
        ["bash", "-e", "-u", "-o", "pipefail", "-c", script],
        capture_output=True,
        text=True,
        cwd=folder,
        env=forked(environment),
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)
