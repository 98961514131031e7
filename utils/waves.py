#!/usr/bin/env python3
"""Order a list of experiments by their dependencies, in as few waves as possible.

    experiments.py ... | waves.py LIST

An input line has, separated by tabs, an experiment's folder, the folders that it waits for,
separated by spaces ("-": none), and any further words, which are copied. LIST gets the same lines,
each after the number of its wave. Experiments of wave 1 wait for nothing; one of wave 3 waits for
at least one of wave 2. Within a wave, lines stay in the order of the input.

Exit status: 1, with a message of one line and no list, if there is no such order.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PROGRAM = Path(sys.argv[0]).name
NOTHING = "-"


class ListError(Exception):
    """An error in a list, described in one line."""


def waves(awaited: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Sort names into waves, in each of which nothing waits for another.

    Args:
        awaited: name -> the names that it waits for.

    Raises:
        ListError: if a name waits for an unknown name, or directly or indirectly for itself.
    """
    for name, others in awaited.items():
        for other in others:
            if other not in awaited:
                raise ListError(f"{name} waits for {other}, which is not in the list")
    sorter = TopologicalSorter(awaited)
    try:
        sorter.prepare()
    except CycleError as error:
        raise ListError(f"circular dependency: {' > '.join(error.args[1])}") from None
    order, found = {name: index for index, name in enumerate(awaited)}, []
    while sorter.is_active():
        ready = sorter.get_ready()
        found.append(sorted(ready, key=order.__getitem__))
        sorter.done(*ready)
    return found


def ordered(lines: Sequence[str]) -> list[str]:
    """Return the lines of the ordered list.

    Raises:
        ListError: if there is no order, a line has fewer than two words, or an experiment appears
            twice.
    """
    known: dict[str, str] = {}
    awaited: dict[str, list[str]] = {}
    for number, line in enumerate(lines, 1):
        name, *words = line.split("\t")
        if not name or not words or not words[0]:
            raise ListError(f"line {number}: not a folder, a tab, and awaited folders: {line!r}")
        if name in known:
            raise ListError(f"line {number}: {name} appears twice")
        known[name] = line
        awaited[name] = [] if words[0] == NOTHING else words[0].split(" ")
    if not known:
        raise ListError("no experiments")
    found = waves(awaited)
    return [f"{number}\t{known[name]}" for number, wave in enumerate(found, 1) for name in wave]


def main() -> None:
    if len(sys.argv) != 2:
        print(f"{PROGRAM}: usage: {PROGRAM} LIST, the unordered one on stdin", file=sys.stderr)
        sys.exit(2)
    path = Path(sys.argv[1])
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        text = "".join(f"{line}\n" for line in ordered(sys.stdin.read().split("\n")[:-1]))
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except ListError as error:
        sys.exit(f"{PROGRAM}: {path}: {error}")
    except OSError as error:
        sys.exit(f"{PROGRAM}: {error.filename}: {error.strerror}")


if __name__ == "__main__":
    main()
