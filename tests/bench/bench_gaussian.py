"""Rounded Gaussian noise: processor seconds for a million values, against numpy's own.

    python tests/bench/bench_gaussian.py [--exponents 20 27 35] [--size 1000000] [--turns 5]

The deviations are powers of two. Numpy's noise is the insecure baseline: floats, without a secret,
rounded. The last column counts the values that are decided to 60 digits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from fedtools.core.tables import format_table
from fedtools.privacy.gaussian import rounded_gaussian
from fedtools.privacy.noise import Stream


class Counted(Stream):
    """A stream that counts the values that need more than their first eight bytes."""

    exact = 0

    def take(self, label: bytes, number: int, size: int) -> bytes:
        if label == b"rest":
            self.exact += size // 16
        return super().take(label, number, size)


def seconds(work: Callable[[], object], turns: int) -> list[float]:
    """Return the processor seconds of each of `turns` turns."""
    found = []
    for _ in range(turns):
        begun = time.process_time()
        work()
        found.append(time.process_time() - begun)
    return found


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--exponents", type=int, nargs="+", default=[20, 27, 35])
    parser.add_argument("--size", type=int, default=1000000)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    random, million = np.random.default_rng(1), 1000000 / options.size
    # Imports are not measured.
    rounded_gaussian(Stream(bytes(32)), 2.0**44, 100)
    rows = []
    for exponent in options.exponents:
        deviation, stream = 2.0**exponent, Counted(bytes(32))
        works: dict[str, Callable[[], object]] = {
            "rounded_gaussian": lambda s=stream, d=deviation: rounded_gaussian(s, d, options.size),
            "numpy's": lambda d=deviation: np.rint(random.normal(0, d, options.size)).astype(int),
        }
        for name, work in works.items():
            found = [million * one for one in seconds(work, options.turns)]
            times = (f"{one:.3f}" for one in (statistics.median(found), min(found), max(found)))
            exact = million * stream.exact / options.turns if name == "rounded_gaussian" else 0
            rows.append((f"2^{exponent}", name, *times, f"{exact:.0f}"))
    header = ("deviation", "what", "s per million", "least", "most", "exact")
    print(format_table(header, rows), end="")


if __name__ == "__main__":
    main()
