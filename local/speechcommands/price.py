#!/usr/bin/env python3
"""Time a round of each row of a list of experiments, and print the time that all of them take.

    price.py LIST --config YAML [--nj N]

LIST is the output of utils/waves.py for experiments.py's lines. One experiment of each row
(experiments that differ only in the seed) is begun in a temporary folder, and its time estimated as
by `fedtools rounds --estimate`. The estimate holds for this machine while nothing else runs on it.
It does not include stages 5 to 7 and figure 4.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from options import whole

from fedtools.cli.federation import device_of
from fedtools.core.errors import UserError, exit_with_message
from fedtools.core.tables import format_table
from fedtools.core.text_files import read_lines
from fedtools.federation.estimate import Estimate, estimate
from fedtools.federation.init import init, read_config


@dataclass(frozen=True)
class Row:
    """Experiments that differ only in the seed: their folder, and the options of one of them."""

    name: str
    words: list[str]
    seeds: int


def rows_of(path: Path) -> list[Row]:
    """Read the rows of a list, in its order."""
    found: dict[str, list[list[str]]] = {}
    for line, text in enumerate(read_lines(path, "run stage 3"), 1):
        words = text.split("\t")
        if len(words) < 4:
            raise UserError("no experiment", path=path, line=line, remedy="run stage 3 again")
        found.setdefault("/".join(Path(words[1]).parts[-4:-1]), []).append(words[3:])
    if not found:
        raise UserError("no experiments", path=path, remedy="run stage 3")
    return [Row(name, lines[0], len(lines)) for name, lines in found.items()]


def price_of(row: Row, config: Path, folder: Path, device: str) -> Estimate:
    """Begin an experiment of a row in a folder, and estimate its time."""
    parser = argparse.ArgumentParser()
    for name in ("--section", "--set", "--data", "--asset"):
        parser.add_argument(name, action="append", default=[])
    for name in ("--method", "--seed"):
        parser.add_argument(name, required=True)
    given = parser.parse_args(row.words)
    init(
        folder,
        method=given.method,
        config=read_config(config, given.section, given.set),
        where=config,
        data=dict(one.split("=", 1) for one in given.data),
        assets=dict(one.split("=", 1) for one in given.asset),
        seed=int(given.seed),
    )
    return estimate(folder, device=device, split="test")


def main() -> None:
    """Run the command: 0 done, 1 bad input (one line on stderr), 2 wrong usage."""
    parser = argparse.ArgumentParser(description="Time a round of each row of a list.")
    add = parser.add_argument
    add("list", type=Path, metavar="LIST", help="list of experiments, from utils/waves.py")
    config = "configuration of the experiments"
    add("--config", type=Path, required=True, metavar="YAML", help=config)
    add("--nj", type=whole, default=1, metavar="N", help="experiments in parallel (default: 1)")
    add("--ngpu", type=int, choices=(0, 1), default=0, help="1: compute on a GPU")
    options = parser.parse_args()
    with exit_with_message("price.py"):
        cells, total = list[list[object]](), 0.0
        device = device_of(options.ngpu)
        for row in rows_of(options.list):
            with tempfile.TemporaryDirectory(dir=options.list.parent) as folder:
                one = price_of(row, options.config, Path(folder) / "exp", device)
            hours = row.seeds * one.seconds / 3600
            total += hours
            cells.append([row.name, row.seeds, one.rounds, f"{one.round:.2f}",
                          f"{one.evaluation:.2f}", f"{hours:.2f}"])  # fmt: skip
            print(f"{row.name}: {one.round:.2f} s a round", file=sys.stderr)
    header = ["row", "seeds", "rounds", "s a round", "s an evaluation", "hours"]
    print(format_table(header, cells, "lrrrrr"), end="")
    parallel = f", {total / options.nj:.1f} with {options.nj} in parallel" * (options.nj > 1)
    print(f"all of the list: {total:.1f} hours{parallel}")


if __name__ == "__main__":
    main()
