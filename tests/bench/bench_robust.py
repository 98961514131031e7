"""Robust rules against the mean of the same updates, in processor time, and peak memory in models.

    OMP_NUM_THREADS=1 python tests/bench/bench_robust.py [--clients 100] [--parameters 1000000]

The mean is that of `Server.mean`, with the bound on norms. Rules and mean take turns, each in a
process of its own, with files that were read once; ratios are of the least processor time of all
turns, and of the median. With `--rule NAME` one computation runs alone, for other timers.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_aggregate import ORIGIN, make_spec, peak, write_files

from fedtools.exchange.messages import Payload, read_messages
from fedtools.exchange.states import Spec, load_state, save_state
from fedtools.server.aggregate import Bound, combine
from fedtools.server.by_rule import Given, combine_by_rule
from fedtools.server.products import Adapters
from fedtools.server.robust import make_rule

# Options of each rule, and the most times of the mean that it may take.
RULES = {
    "mean": ({}, 1.0),
    # Nobody clipped; half of the clients clipped.
    "clip none": ({"rule": "clip", "norm": 1e9}, 1.0),
    "clip half": ({"rule": "clip"}, 1.0),
    "multi_krum": ({"rule": "multi_krum"}, 2.0),
    "median": ({"rule": "median"}, 10.0),
    "geometric_median": ({"rule": "geometric_median", "iterations": 10}, 15.0),
    "fltrust": ({"rule": "fltrust"}, 0.0),
}


def child(name: str, folder: Path, clients: list[str], jobs: int, spec: Spec) -> None:
    """Run one rule; print processor seconds, seconds and peak memory."""
    cut = [clients[job::jobs] for job in range(jobs)]
    messages, refusals = read_messages(folder, cut, clients, Payload(spec), ORIGIN)
    assert not refusals, refusals
    weights, out = [1.0] * len(messages), folder / "next.safetensors"
    # Wide enough for models that are shifted by the client's number.
    bound = Bound(folder / "base", 1e9)
    rule = make_rule(RULES[name][0], "bench")
    root = folder / "root" if rule.root_in(1) else None
    given = Given(rule, bound, Adapters("mean", folder / "base", "bench"), root)
    before, begun, spent = peak(), time.perf_counter(), time.process_time()
    if name == "mean":
        assert not combine(messages, weights, out, spec, bound=bound)
    else:
        assert not combine_by_rule(messages, weights, out, spec, given).refusals
    print(time.process_time() - spent, time.perf_counter() - begun, peak() - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rule", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    spec = make_spec(options.parameters)
    clients = [f"{number:05}" for number in range(options.clients)]
    if options.rule:
        child(options.rule[0], Path(options.rule[1]), clients, options.jobs, spec)
        return
    found: dict[str, list[list[float]]] = {name: [] for name in RULES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, clients, options.jobs, spec)
        base = load_state(folder / "base")
        save_state(folder / "root", {tensor: value + 1 for tensor, value in base.items()})
        command = [sys.executable, __file__, *sys.argv[1:], "--rule"]
        for _ in range(options.turns):
            for rule, rows in found.items():
                line = subprocess.check_output([*command, rule, name], text=True)
                rows.append([float(word) for word in line.split()])
    least = {rule: min(row[0] for row in rows) for rule, rows in found.items()}
    model = 4 * options.parameters
    print(f"{options.clients} updates of {options.parameters} parameters")
    print(f"{'':16}  CPU s  ratio  median of ratios  wall s  peak, models  limit")
    for rule, rows in found.items():
        ratios = [row[0] / mean[0] for row, mean in zip(rows, found["mean"], strict=True)]
        wall, memory = min(row[1] for row in rows), max(row[2] for row in rows) / model
        limit = RULES[rule][1]
        print(
            f"{rule:16}  {least[rule]:5.2f}  {least[rule] / least['mean']:5.2f}  "
            f"{statistics.median(ratios):16.2f}  {wall:6.2f}  {memory:12.2f}  {limit or '-':>5}"
        )


if __name__ == "__main__":
    main()
