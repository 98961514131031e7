"""With which code and packages something was made."""

from __future__ import annotations

import platform
import subprocess
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from fedtools import __version__
from fedtools.files.config import read_yaml, write_yaml

# Of an experiment: written by `fedtools init`.
RECORD = "software.yaml"
PACKAGES = ("torch", "espnet")
# Written by reports, and so no reason to call the code changed.
_REPORTS = ":(exclude,top,glob)egs/*/*/RESULTS*"


def record(folder: Path) -> None:
    """Write the commit of this code and the versions of what it stands on."""
    here = Path(__file__)
    # An installed copy is not what is checked out around it.
    tracked = _git(here.parent, "ls-files", "--error-unmatch", here.name) is not None
    git = git_hash(here.parent, _REPORTS) if tracked else "unknown"
    write_yaml(folder / RECORD, {"git": git, **software()})


def records(folders: Iterable[Path]) -> str:
    """What experiments were begun with, and how many with each, on one line."""
    found: Counter[str] = Counter()
    for folder in folders:
        known = read_yaml(folder / RECORD) if (folder / RECORD).exists() else {}
        found[", ".join(f"{name} {known[name]}" for name in known) or "not recorded"] += 1
    return "; ".join(f"{text} ({count})" for text, count in found.most_common()) or "none"


def software() -> dict[str, str]:
    """Names and versions of what figures depend on, without the builds of one machine."""
    found = {"fedtools": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name).split("+")[0]
    return found


def git_hash(folder: Path, *written: str) -> str:
    """The commit that a folder stands at, "-dirty" if files differ from it, or "unknown".

    Args:
        folder: any folder of the checkout.
        written: git's path specifications of what does not count as differing.
    """
    head = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--", ":/", *written)
    if head is None or changed is None:
        return "unknown"
    return f"{head}-dirty" if changed else head


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says; None if it fails."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
