#!/usr/bin/env python3
"""Rounds of a head on cached outputs of a frozen encoder, against a bare torch loop.

    bench_head.py [--folder WHISPER] [--clients 300] [--rounds 16] [--turns 3]

Processor seconds of whole commands, start of Python included. The bare loop is the simplest
correct one: it reads the same outputs, trains a torch.nn.Linear for one client after the other with
torch's fused AdamW, and averages. Its batches are drawn by other random numbers. First, the seconds
in which the outputs are computed. Without a folder the model is a random one of tiny's size.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "bench")]

import keywords  # noqa: E402
from bench_adapters import tiny  # noqa: E402

STEPS, BATCH, CLASSES, CLIPS = 5, 16, 8, 6
CONFIG = {
    "task": "kws",
    "clients_per_round": 0,
    "evaluate_every": 1000,
    "keep_updates": False,
    "training": {
        "batch_size": BATCH,
        "stack": 64,
        "optim": "adamw",
        "optim_conf": {"lr": 0.01},
        "augment": {"time_shift_ms": 0, "noise_volume": 0.0},
    },
    "method_conf": {"local_steps": STEPS},
}
BARE = """
import sys
from pathlib import Path
import numpy as np, torch
torch.set_num_threads(1)
data, rounds, steps, batch, classes = Path(sys.argv[1]), *map(int, sys.argv[2:])
(file,) = data.glob("frozen/*.npy")
values = torch.from_numpy(np.load(file)[:, 0])
labels = torch.from_numpy(np.load(data / "labels.npy"))
sizes = [int(line.split("\\t")[1]) for line in (data / "clients.tsv").read_text().splitlines()[1:]]
edges = np.cumsum([0, *sizes])
state = {k: v.clone() for k, v in torch.nn.Linear(values.shape[1], classes).state_dict().items()}
for number in range(rounds):
    total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in state.items()}
    for client, (first, last) in enumerate(zip(edges, edges[1:])):
        random = np.random.default_rng((number, client))
        head = torch.nn.Linear(values.shape[1], classes)
        head.load_state_dict(state)
        optimizer = torch.optim.AdamW(head.parameters(), lr=0.01, fused=True)
        for _ in range(steps):
            index = first + random.permutation(last - first)[:batch]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(head(values[index]), labels[index]).backward()
            optimizer.step()
        for name, value in head.state_dict().items():
            total[name] += value
    state = {name: (value / len(sizes)).float() for name, value in total.items()}
"""


def seconds(*command: str | Path) -> float:
    """Return the processor seconds of a command that must succeed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*map(str, command)], check=True, capture_output=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", help="folder of a Whisper; random weights without one")
    parser.add_argument("--clients", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    fedtools = (sys.executable, "-m", "fedtools")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        folder = Path(options.folder) if options.folder else tiny(root / "tiny")
        labels = [f"w{label}" for label in range(CLASSES)]
        counts = [1] * CLIPS + [0] * (CLASSES - CLIPS)
        clients = {f"c{client:04d}": counts for client in range(options.clients)}
        data = keywords.pack(root / "clips", clients, labels)
        model = {"network": "hf", "path": str(folder.resolve()), "cache_frozen": True}
        config = CONFIG | {"model": {**model, "adapt": {"kind": "head"}}, "rounds": options.rounds}
        config["clients_per_round"] = options.clients
        (root / "config.yaml").write_text(yaml.safe_dump(config))
        ours, bare = [], []
        for turn in range(-1, options.turns):
            path = root / f"exp{turn}"
            init = ("init", path, "--config", root / "config.yaml", "--method", "fedavg")
            seconds(*fedtools, *init, "--data", f"train={data}")
            spent = seconds(*fedtools, "rounds", path, *(("--to", "1") if turn < 0 else ()))
            if turn < 0:
                clips = options.clients * CLIPS
                print(f"outputs of {clips} clips and one round: {spent:.1f} s")
                continue
            ours.append(spent)
            shape = (options.rounds, STEPS, BATCH, CLASSES)
            bare.append(seconds(sys.executable, "-c", BARE, data, *map(str, shape)))
        ratio = statistics.median(b / o for b, o in zip(bare, ours, strict=True))
        own, theirs = statistics.median(ours), statistics.median(bare)
        rounds = f"{options.rounds} rounds of {options.clients} clients"
        print(f"{rounds}: {own:.1f} s, the bare loop {theirs:.1f} s")
        print(f"{ratio:.1f} times as fast as the bare loop")


if __name__ == "__main__":
    main()
