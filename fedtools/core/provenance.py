"""The code and packages with which an experiment or a report was made."""

from __future__ import annotations

import json
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote

from fedtools import __version__
from fedtools.core.config import read_yaml, write_yaml

# The file in an experiment's folder, written by `fedtools init`.
RECORD = "software.yaml"
PACKAGES = ("torch", "espnet")
# Reports write these files, so that they do not make the code count as changed.
_REPORTS = ":(exclude,top,glob)egs/*/*/RESULTS*"


def record(folder: Path, own: Iterable[Path] = ()) -> None:
    """Write the commit of this code and the versions of its dependencies.

    Args:
        own: files of the user's own code; the versions of the packages that installed them, if pip
            did, are written, too.
    """
    here = Path(__file__)
    # An installed copy may lie in a checkout of other code.
    tracked = _git(here.parent, "ls-files", "--error-unmatch", here.name) is not None
    git = git_hash(here.parent, _REPORTS) if tracked else _built_from(here.parents[1])
    write_yaml(folder / RECORD, {"git": git, **software(), **_packages_of(own)})


def _built_from(package: Path) -> str:
    """Return the commit that a package was built from, which setup.py wrote, or "unknown"."""
    written = package / "commit.txt"
    return written.read_text("utf-8").strip() if written.is_file() else "unknown"


def _packages_of(files: Iterable[Path]) -> dict[str, str]:
    """Return name -> version of the packages that pip installed some files from."""
    paths, found = [file.resolve() for file in files], dict[str, str]()
    for one in metadata.distributions() if paths else ():
        # As long as torch's, a list of files is searched faster than it is parsed.
        home, listed = Path(str(one.locate_file(""))).resolve(), one.read_text("RECORD") or ""
        source = json.loads(one.read_text("direct_url.json") or "{}")
        # What is installed with --editable stays where it is.
        where = unquote(str(source.get("url", "")).removeprefix("file://"))
        linked = where if source.get("dir_info", {}).get("editable") else None
        for path in paths:
            inside = path.is_relative_to(home) and f"\n{path.relative_to(home)}," in f"\n{listed}"
            if inside or (linked and path.is_relative_to(linked)):
                found[one.metadata["Name"]] = one.version
    return dict(sorted(found.items()))


def records(folders: Iterable[Path]) -> str:
    """Return the software of some experiments, and how many began with each, on one line."""
    found: Counter[str] = Counter()
    for folder in folders:
        known = read_yaml(folder / RECORD) if (folder / RECORD).exists() else {}
        found[", ".join(f"{name} {known[name]}" for name in known) or "not recorded"] += 1
    return "; ".join(f"{text} ({count})" for text, count in found.most_common()) or "none"


def software() -> dict[str, str]:
    """Return the versions of the software that figures depend on, without local build tags."""
    found = {"fedtools": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name).split("+")[0]
    return found


@cache
def computing() -> Mapping[str, str]:
    """Return the versions and the type of processor that the bytes of results depend on."""
    kind = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text("utf-8", "replace").splitlines() if info.is_file() else ():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            kind = value.strip()
            break
    return {**software(), "processor": kind}


def git_hash(folder: Path, *written: str) -> str:
    """Return a checkout's commit, with "-dirty" if files differ from it, or "unknown".

    Args:
        folder: any folder of the checkout.
        written: git's path specifications of files whose changes are ignored.
    """
    head = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--", ":/", *written)
    if head is None or changed is None:
        return "unknown"
    return f"{head}-dirty" if changed else head


def _git(folder: Path, *arguments: str) -> str | None:
    """Return git's output, or None if git fails."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
