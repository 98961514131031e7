#!/usr/bin/env python3
"""Rounds with user-level privacy, against the same rounds of FedAvg.

    bench_private.py [--clients 1398] [--batch 8] [--rounds 5] [--turns 3] [--only head|transformer]

Processor seconds of a round, without the start of the process, of a head on cached outputs of a
frozen encoder with tiny's size, and of a Transformer of 23 k parameters; one process. Clients have
five clips each. With privacy all batches are padded to the batch size, so that --batch 5 shows the
cost of privacy alone, and --batch 8 also that of padding.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "bench")]

import keywords  # noqa: E402
from bench_adapters import tiny  # noqa: E402
from bench_head import seconds  # noqa: E402

CLIPS, CLASSES = 5, 9
PLAIN = {"time_shift_ms": 0, "noise_volume": 0.0, "noise_probability": 0.0}
CONFIG = {
    "task": "kws",
    "evaluate_every": 1000,
    "keep_updates": False,
    "training": {"batch_size": 8, "stack": 64, "optim": "sgd", "optim_conf": {"lr": 0.1}},
    "method_conf": {"local_steps": 1},
}
TRANSFORMER = {
    "network": "transformer",
    "network_conf": {"layers": 2, "width": 32, "feedforward": 64},
}


def models(folder: Path) -> dict[str, dict]:
    """Return the sections model and training of each network."""
    head = {"network": "hf", "path": str(folder), "cache_frozen": True, "adapt": {"kind": "head"}}
    return {
        "head": {"model": head, "training": {**CONFIG["training"], "augment": PLAIN}},
        "transformer": {"model": TRANSFORMER},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=1398)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", choices=("head", "transformer"))
    options = parser.parse_args()
    fedtools = (sys.executable, "-m", "fedtools")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        labels = [f"w{label}" for label in range(CLASSES)]
        counts = [1] * CLIPS + [0] * (CLASSES - CLIPS)
        clients = {f"c{client:04d}": counts for client in range(options.clients)}
        data = keywords.pack(root / "clips", clients, labels)
        for network, own in models(tiny(root / "tiny")).items():
            if options.only not in (None, network):
                continue
            config = CONFIG | own | {"rounds": options.rounds + 1}
            config["training"] = {**config["training"], "batch_size": options.batch}
            (root / "config.yaml").write_text(yaml.safe_dump(config))
            found: dict[str, list[float]] = {"fedavg": [], "dpfedavg": []}
            # The first one computes the frozen layers' outputs.
            for turn in range(-1, options.turns):
                for method, spent in found.items():
                    path = root / f"{network}-{method}-{turn}"
                    private = ("--set", "method_conf.epsilon=8") if method == "dpfedavg" else ()
                    init = ("init", path, "--config", root / "config.yaml", "--method", method)
                    seconds(*fedtools, *init, "--data", f"train={data}", *private)
                    first = seconds(*fedtools, "rounds", path, "--to", "1")
                    if turn >= 0:
                        # Both processes start once.
                        later = seconds(*fedtools, "rounds", path)
                        spent.append((later - first) / (options.rounds - 1))
            ratios = [b / a for a, b in zip(*found.values(), strict=True)]
            plain, with_noise = (statistics.median(one) for one in found.values())
            print(
                f"{network}: a round of {options.clients} clients {plain:.2f} s, with privacy "
                f"{with_noise:.2f} s: {statistics.median(ratios):.2f} times as long "
                f"({min(ratios):.2f} to {max(ratios):.2f})"
            )


if __name__ == "__main__":
    main()
