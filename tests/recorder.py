"""Shadow fedtools on PATH, and record the arguments that recipes call it with."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

RECORDER = """\
#!/bin/sh
words=$(printf '%s\\t' "$@")
printf '%s\\n' "$words" >>{listed}
exec {program} "$@"
"""


def record(folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """Return an environment in which every call of fedtools is listed in a folder; see `calls`."""
    folder.mkdir(exist_ok=True)
    named = {
        "listed": folder / "calls",
        "program": shutil.which("fedtools", path=environment["PATH"]),
    }
    quoted = {name: shlex.quote(str(path)) for name, path in named.items()}
    (folder / "fedtools").write_text(RECORDER.format(**quoted))
    (folder / "fedtools").chmod(0o755)
    return environment | {"PATH": f"{folder}:{environment['PATH']}"}


def calls(folder: Path) -> dict[str, list[list[str]]]:
    """Return command -> the arguments of each call."""
    found: dict[str, list[list[str]]] = {}
    for line in (folder / "calls").read_text().splitlines():
        name, *words = line.removesuffix("\t").split("\t")
        found.setdefault(name, []).append(words)
    return found
