"""Noise for word counts: seconds for each release, against numpy's own Laplace noise.

    python tests/bench/bench_privacy.py [--words 50000] [--releases 20] [--clients 30]

Numpy's noise is the insecure baseline: floats, without a secret. Releases by the server are one for
each round; by clients, as many as there are clients.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from fedtools.core.tables import format_table
from fedtools.methods.fmp import FMP
from fedtools.privacy.bounds import Utterances
from fedtools.privacy.key import NoiseKey
from fedtools.privacy.options import Privacy
from fedtools.privacy.plan import Plan


def seconds(work: Callable[[int], object], turns: int) -> list[float]:
    """Return the processor seconds of each of `turns` turns."""
    found = []
    for turn in range(turns):
        begun = time.process_time()
        work(turn)
        found.append(time.process_time() - begun)
    return found


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--words", type=int, default=50000)
    parser.add_argument("--releases", type=int, default=20)
    parser.add_argument("--clients", type=int, default=30)
    options = parser.parse_args()
    random = np.random.default_rng(1)
    words = options.words
    # A client's round: 100 utterances of 60 different words in their N-best lists.
    new = Utterances.entries(
        np.repeat(np.arange(100), 60),
        (words * random.random(6000) ** 8).astype(int),
        random.random(6000) * 6,
        100,
        words,
    )
    plan, key = Plan(Privacy(mechanism="laplace"), options.releases, False), NoiseKey(bytes(32))
    counts, _ = plan.bound(new)
    flat = np.full(words, 1 / words)

    def release(number: int) -> np.ndarray:
        return plan.release(counts, key, experiment="bench", number=number, sender="")

    works = {
        "bound a client's 100 utterances": lambda turn: plan.bound(new),
        "release": release,
        "numpy's Laplace": lambda turn: counts + random.laplace(0, plan.scale, words),
        "make a distribution": lambda turn: FMP().global_distribution(counts, flat),
    }
    rows = []
    for name, work in works.items():
        found = seconds(work, options.releases)
        times = (f"{1000 * one:.1f}" for one in (statistics.median(found), min(found), max(found)))
        rows.append((name, *times, f"{sum(found):.2f}", f"{options.clients * sum(found):.1f}"))
    header = ("what", "ms", "least", "most", f"s, {options.releases} releases")
    print(format_table((*header, f"s, {options.clients} clients'"), rows), end="")


if __name__ == "__main__":
    main()
