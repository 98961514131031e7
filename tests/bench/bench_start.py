#!/usr/bin/env python3
"""Start-up times of commands: `fedtools --help`, and `train-local` to its first step.

    python tests/bench/bench_start.py [--runs 5]

Against `python -c pass` and `python -c "import torch"`, which are lower bounds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import simulated  # noqa: E402

from fedtools.core.tables import format_table  # noqa: E402

# The real command, ended at the end of its first optimiser step.
FIRST_STEP = """
import os, sys
from fedtools.core.progress import Progress
Progress.advance = lambda *arguments: os._exit(0)
sys.argv = ["fedtools", "train-local", sys.argv[1]]
from fedtools.cli import main
main()
"""


def seconds(*command: str | Path) -> float:
    """Return the wall time of a command that must succeed."""
    begun = time.perf_counter()
    subprocess.run([*map(str, command)], check=True, capture_output=True, cwd=ROOT)
    return time.perf_counter() - begun


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    python = sys.executable
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        simulated.data_dir(root / "train", ["au"], 10)
        simulated.config_file(root / "config.yaml")
        fedtools = (python, "-m", "fedtools")
        text = root / "train" / "text"
        seconds(*fedtools, "train-tokens", text, root / "tokens", "--token-type", "char")
        seconds(
            *fedtools, "init", root / "exp", "--config", root / "config.yaml", "--method", "fedavg",
            "--data", f"train={root / 'train'}", "--asset", f"tokens={root / 'tokens'}",
        )  # fmt: skip
        seconds(*fedtools, "sample", root / "exp")
        commands = {
            "python -c pass": (python, "-c", "pass"),
            "fedtools --help": (*fedtools, "--help"),
            "python -c 'import torch'": (python, "-c", "import torch"),
            "fedtools train-local, to its first step": (python, "-c", FIRST_STEP, root / "exp"),
        }
        times: dict[str, list[float]] = {what: [] for what in commands}
        for _ in range(runs):
            for what, command in commands.items():
                times[what].append(seconds(*command))
    rows = [
        (what, *(f"{value:.2f}" for value in (min(t), statistics.median(t), max(t))))
        for what, t in times.items()
    ]
    print(format_table(("seconds", "min", "median", "max"), rows), end="")


if __name__ == "__main__":
    main()
