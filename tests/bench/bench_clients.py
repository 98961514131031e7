#!/usr/bin/env python3
"""Many clients: seconds and memory to open their packed clips and to index them.

    python tests/bench/bench_clients.py [--clients 100000] [--turns 5] [--sampled-from 1000000]

Each client has 43 clips of 35 classes; a hole in the file stands in place of waveforms. Every turn
is a process of its own. `fedtools sample` draws 1,000 clients; its start-up is what it takes with
1,000 in all. An experiment is open when it knows the stacks of a round of 1,000 clients. Memory is
anonymous (RssAnon), so without mapped files, which processes share; what Python and its modules
take before is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from fedtools.core.atomic import write_text  # noqa: E402
from fedtools.core.tables import format_table  # noqa: E402
from fedtools.data.clips import CLIENT_COLUMNS, COLUMNS, INDEX, sum_line  # noqa: E402

CLIPS, CLASSES = 43, 35

# Prints what was measured as JSON; `peak` is looked up every five milliseconds.
OPENING = """
import json, sys, threading, time
from fedtools.data.clips import Clips

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024

def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.005)

start = peak = anonymous()
threading.Thread(target=watch, daemon=True).start()
begun = time.perf_counter()
clips = Clips.read(sys.argv[1])
read = time.perf_counter()
sizes, entropies = clips.sizes, clips.entropies()
known = time.perf_counter()
assert len(sizes) == len(entropies) == len(clips.clients)
print(json.dumps({
    "Clips.read, s": read - begun,
    "sizes and entropies, s": known - read,
    "memory at the peak, MB": peak - start,
    "memory kept, MB": anonymous() - start,
}))
"""


def make_clips(folder: Path, sizes: Sequence[int]) -> Path:
    """Write packed clips with labels, and a hole in the file in place of waveforms."""
    folder.mkdir()
    labels = np.random.default_rng(1).integers(CLASSES, size=sum(sizes))
    np.lib.format.open_memmap(folder / "clips.npy", "w+", "<i2", (len(labels), 16000))
    np.save(folder / "noise.npy", np.zeros(0, "<i2"))
    np.save(folder / "labels.npy", labels)
    words = [f"w{word:02d}" for word in range(CLASSES)]
    write_text(folder / "classes.txt", "".join(f"{word}\n" for word in words))
    width = len(str(len(sizes) - 1))
    names = [f"c{client:0{width}d}" for client in range(len(sizes))]
    with open(folder / "clients.tsv", "w") as table:
        rows = [CLIENT_COLUMNS, *zip(names, sizes, strict=True)]
        table.writelines(f"{name}\t{size}\n" for name, size in rows)
    with open(folder / "clips.tsv", "w") as table:
        table.write("\t".join(COLUMNS) + "\n")
        owners = (name for name, size in zip(names, sizes, strict=True) for _ in range(size))
        for number, (name, label) in enumerate(zip(owners, labels.tolist(), strict=True)):
            table.write(f"{name}-{number:08d}\t{name}\t{words[label]}\t16000\n")
    # Nothing mistakes these clips for others, so the checksum of a hole of gigabytes is not needed.
    lines = [sum_line(folder / name, name) for name in (*INDEX, "clips.tsv")]
    write_text(folder / "sha256sums", "".join(f"{line}\n" for line in lines))
    return folder


def opening(folder: Path, turns: int) -> dict[str, list[float]]:
    """Open the clips once a turn; return quantity -> one figure for each turn."""
    found: dict[str, list[float]] = {}
    for _ in range(turns):
        command = [sys.executable, "-c", OPENING, str(folder)]
        result = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
        for what, figure in json.loads(result.stdout).items():
            found.setdefault(what, []).append(figure)
    return found


OPENED = """
import sys, time
import fedtools.tasks.kws.task, fedtools.cli.federation
from fedtools.federation.federation import Federation
begun = time.perf_counter()
federation = Federation(sys.argv[1])
federation.task.units(federation.experiment.clients[:1000], 1)
print(time.perf_counter() - begun)
"""
CONFIG = """\
task: kws
clients_per_round: 1000
model: {network: dscnn, network_conf: {channels: 8, blocks: 1}}
training: {optim_conf: {lr: 0.1}}
"""


def seconds_of(*arguments: object) -> float:
    """Return the seconds of a `fedtools` command."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "fedtools", *map(str, arguments)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def begin(folder: Path, clips: Path) -> float:
    """Make an experiment of these clips and return the seconds that it took."""
    config = folder.with_suffix(".yaml")
    config.write_text(CONFIG)
    options = ("--config", config, "--method", "fedavg", "--data", f"train={clips}")
    return seconds_of("init", folder, *options)


def experiment(folder: Path, clips: Path, turns: int) -> dict[str, list[float]]:
    """Begin and open an experiment; return quantity -> seconds of each turn."""
    found = {"fedtools init, s": [begin(folder, clips)], "an experiment is open, s": []}
    for _ in range(turns):
        command = [sys.executable, "-c", OPENED, str(folder)]
        result = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
        found["an experiment is open, s"].append(float(result.stdout))
    return found


def sampling(folder: Path, clients: int, turns: int) -> dict[str, list[float]]:
    """Return the extra seconds of drawing 1,000 of `clients` clients over 1,000 of 1,000."""
    for name, count in (("few", 1000), ("many", clients)):
        begin(folder / name, make_clips(folder / f"{name}-clips", [1] * count))
    beyond = []
    for _ in range(turns):
        # A round that is already sampled is drawn again identically.
        beyond.append(seconds_of("sample", folder / "many") - seconds_of("sample", folder / "few"))
    return {f"fedtools sample of {clients}, s beyond start-up": beyond}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--sampled-from", type=int, default=1_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = make_clips(Path(name) / "clips", [CLIPS] * options.clients)
        found = opening(folder, options.turns)
        found |= experiment(Path(name) / "exp", folder, options.turns)
        found |= sampling(Path(name), options.sampled_from, options.turns)
    print(f"{options.clients} clients of {CLIPS} clips")
    rows = [
        (what, *(f"{value:.3f}" for value in (min(t), statistics.median(t), max(t))))
        for what, t in found.items()
    ]
    print(format_table(("", "min", "median", "max"), rows), end="")


if __name__ == "__main__":
    main()
