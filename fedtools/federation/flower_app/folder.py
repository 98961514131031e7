"""A flat folder of files as a record of arrays, and what this machine has in its configuration.

    $FEDTOOLS             the program; default: the fedtools on PATH
    $FEDTOOLS_FLOWER      a TOML file of this machine; paths in it are relative to its folder

Nothing that comes over the network becomes a path, a program or an option: names of files are
checked against a pattern, and words for the program come from the TOML file alone.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomllib
from flwr.app import Array, ArrayRecord

# As fedtools names files: of letters, digits and five more characters, and not hidden.
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,249}")
MOST_FILES = 100_000
# Of a message to people, in characters.
LINE = 500


class Problem(Exception):
    """What is wrong, in one line."""

    def __init__(self, text: object):
        super().__init__(one_line(text))


def one_line(text: object) -> str:
    """Return a text as one line that a terminal shows as it is."""
    words = " ".join(str(text).split())
    return "".join(one if one.isprintable() else "?" for one in words)[:LINE]


def read_folder(folder: Path, most: int) -> ArrayRecord:
    """Return the files of a folder, each as an array of bytes.

    Args:
        folder: it has files alone.
        most: the most bytes of all files.

    Raises:
        Problem: if there is a folder in it, or a name that the other side would refuse, or too
            many bytes or files.
    """
    files = {path.name: path for path in sorted(folder.iterdir())}
    _check({name: path.stat().st_size for name, path in files.items()}, most)
    found = {}
    for name, path in files.items():
        if path.is_symlink() or not path.is_file():
            raise Problem(f"{name} is no file")
        # Arrays, since Flower sends them in parts; the bytes of a configuration have to fit one.
        found[name] = Array(np.fromfile(path, np.uint8))
    return ArrayRecord(found)


def write_folder(record: Mapping[str, Array], folder: Path, most: int) -> list[str]:
    """Write what `read_folder` has read, and return the names of the files.

    Args:
        record: as it was received.
        folder: an empty folder.
        most: the most bytes of all files.

    Raises:
        Problem: if a name is not one of a file in a flat folder, an array is not one of bytes, or
            there are too many of either.
    """
    _check({name: len(array.data) for name, array in record.items()}, most)
    for name, array in record.items():
        values = _values(name, array)
        with open(folder / name, "xb") as file:
            file.write(values.data)
            file.flush()
            os.fsync(file.fileno())
    return sorted(record)


def _values(name: str, array: Array) -> np.ndarray[Any, Any]:
    try:
        values: np.ndarray[Any, Any] = array.numpy()
    except (ValueError, TypeError, EOFError, SyntaxError):
        raise Problem(f"{name} is no array") from None
    if values.dtype != np.uint8 or values.ndim != 1:
        raise Problem(f"{name} is no array of bytes")
    return values


def _check(sizes: Mapping[str, int], most: int) -> None:
    if len(sizes) > MOST_FILES:
        raise Problem(f"{len(sizes)} files, more than {MOST_FILES}")
    if wrong := [name for name in sizes if not NAME.fullmatch(name)]:
        raise Problem(f"{wrong[0][:80]!r} cannot be the name of a file")
    if (total := sum(sizes.values())) > most:
        raise Problem(f"{total} bytes, more than {most}")


def settings(*needed: str) -> dict[str, Any]:
    """Return this machine's configuration, with its folder as `folder`.

    Raises:
        Problem: if it cannot be read, or lacks what is needed.
    """
    path = Path(os.environ.get("FEDTOOLS_FLOWER", ""))
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise Problem(f"$FEDTOOLS_FLOWER={path}: {error}") from None
    if missing := [name for name in needed if not isinstance(found.get(name), str)]:
        raise Problem(f"{path}: no {missing[0]}")
    return found | {"folder": path.absolute().parent}


def words(found: Mapping[str, Any], name: str) -> list[str]:
    """Return a list of more words for the program, by default none."""
    given = found.get(name, [])
    if not isinstance(given, list) or not all(isinstance(word, str) for word in given):
        raise Problem(f"$FEDTOOLS_FLOWER: {name} is no list of words")
    return given


def fedtools(arguments: Sequence[str | Path], folder: Path) -> str:
    """Run the program in a folder, and return its standard output.

    Raises:
        Problem: with the last line that it wrote, if it fails.
    """
    program = os.environ.get("FEDTOOLS", "fedtools")
    command = [program, *map(str, arguments)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=folder
        )
    except OSError as error:
        raise Problem(f"$FEDTOOLS={program}: {error.strerror}") from None
    said = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:
        raise Problem(said[-1] if said else f"{arguments[0]}: exit status {done.returncode}")
    for line in said:
        print(one_line(line), flush=True)
    return done.stdout
