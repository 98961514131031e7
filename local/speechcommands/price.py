#!/usr/bin/env python3
"""Time a round of each row of a list of experiments, and print the time that all of them take.

    price.py LIST --config YAML [--nj N]

LIST is the output of utils/waves.py for experiments.py's lines. One experiment of each row
(experiments that differ only in the seed) is begun in a temporary folder, and runs two rounds, of
which the second is timed, and one evaluation of the test clips. The estimate holds for this machine
while nothing else runs on it. It does not include stages 5 to 7 and figure 4.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from options import whole

from fedtools.cli.federation import device_of
from fedtools.federation.evaluate import evaluate
from fedtools.federation.federation import Federation
from fedtools.federation.init import init, read_config
from fedtools.federation.steps import aggregate, sample, train_local
from fedtools.files.errors import UserError, exit_with_message
from fedtools.files.tables import format_table
from fedtools.files.text_files import read_lines

# The second round is timed: the first also reads clips, and fills caches.
TIMED = 2


@dataclass(frozen=True)
class Row:
    """Experiments that differ only in the seed: their folder, and the options of one of them."""

    name: str
    words: list[str]
    seeds: int


@dataclass(frozen=True)
class Price:
    """A row's cost: rounds, seconds per round, evaluations, seconds per evaluation, seeds."""

    rounds: int
    round: float
    evaluations: int
    evaluation: float
    seeds: int

    @property
    def hours(self) -> float:
        """Return the hours of all seeds, one after the other."""
        each = self.rounds * self.round + self.evaluations * self.evaluation
        return self.seeds * each / 3600


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


def price_of(row: Row, config: Path, folder: Path, device: str) -> Price:
    """Run two rounds of a row in a folder, and time the second and an evaluation."""
    parser = argparse.ArgumentParser()
    for name in ("--section", "--set", "--data"):
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
        seed=int(given.seed),
    )
    federation = Federation(folder, device)
    experiment = federation.experiment
    for number in range(1, TIMED + 1):
        began = time.monotonic()
        sampled = sample(experiment, federation.method, number, 1)
        for job in range(experiment.round(number).jobs() if sampled else 0):
            train_local(federation, number, job + 1)
        aggregate(federation, number)
        seconds = time.monotonic() - began
    # The first evaluation is not timed either, because it reads the clips.
    evaluate(federation, [0], "test")
    began = time.monotonic()
    evaluate(federation, [TIMED], "test")
    measured = time.monotonic() - began
    rounds = experiment.options.rounds
    evaluations = sum(map(experiment.is_measured, range(rounds + 1)))
    return Price(rounds, seconds, evaluations, measured, row.seeds)


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
        rows, found = rows_of(options.list), {}
        device = device_of(options.ngpu)
        for row in rows:
            with tempfile.TemporaryDirectory(dir=options.list.parent) as folder:
                found[row.name] = price_of(row, options.config, Path(folder) / "exp", device)
            print(f"{row.name}: {found[row.name].round:.2f} s a round", file=sys.stderr)
    cells = [
        [name, one.seeds, one.rounds, f"{one.round:.2f}", f"{one.evaluation:.2f}",
         f"{one.hours:.2f}"]
        for name, one in found.items()
    ]  # fmt: skip
    header = ["row", "seeds", "rounds", "s a round", "s an evaluation", "hours"]
    print(format_table(header, cells, "lrrrrr"), end="")
    total = sum(one.hours for one in found.values())
    parallel = f", {total / options.nj:.1f} with {options.nj} in parallel" * (options.nj > 1)
    print(f"all of the list: {total:.1f} hours{parallel}")


if __name__ == "__main__":
    main()
