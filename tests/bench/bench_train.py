#!/usr/bin/env python3
"""Local training against a bare torch loop over the same batches, in utterances per second.

    python tests/bench/bench_train.py [--config conf/commonvoice/mini.yaml] [--utterances 240]

Both have the same model, features in memory, optimiser and clipping; the bare loop has no keyed
random numbers, no progress, no sums of loss, no checkpoints. They take turns, so that a busy
machine slows both; the first turn of each is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from fedtools.client.options import UtteranceTraining  # noqa: E402
from fedtools.client.trainer import Trainer  # noqa: E402
from fedtools.client.unit import Unit  # noqa: E402
from fedtools.core.config import from_mapping, read_yaml  # noqa: E402
from fedtools.core.tables import format_table  # noqa: E402
from fedtools.data.ark import write_ark  # noqa: E402
from fedtools.data.datadir import DataDir  # noqa: E402
from fedtools.exchange.private import Private  # noqa: E402
from fedtools.lm.tokens import Tokenizer  # noqa: E402
from fedtools.models.acoustic.asr import build_model, losses, outputs  # noqa: E402
from fedtools.models.training import make_optimizer  # noqa: E402
from fedtools.tasks.asr.data import UtteranceBatches, Utterances  # noqa: E402
from fedtools.tasks.asr.labels import Transcripts  # noqa: E402

CPU = torch.device("cpu")


def make_data(folder: Path, utterances: int, batch_bins: int) -> Utterances:
    """Make random features of 1.5 to 3.5 s with random transcripts of characters."""
    random = np.random.default_rng(0)
    matrices = []
    data = DataDir(folder)
    for number in range(utterances):
        name = f"s-{number:05d}"
        matrices.append((name, random.normal(size=(random.integers(150, 350), 80)).astype("f4")))
        data.utt2spk[name] = "s"
        text = "".join(random.choice(list("abcdefgh "), 30))
        data.text[name] = " ".join(text.split()) or "a"
    data.feats_scp = write_ark(folder / "feats.ark", matrices)
    tokens = Tokenizer(["<blank>", "<unk>", "<space>", *"abcdefgh", "<sos/eos>"])
    found = Utterances(data, list(data.utt2spk), tokens, batch_bins)
    found.keep = True
    return found


def bare_loop(model, data: Utterances, training: UtteranceTraining) -> None:
    """Train by a straightforward loop of ten lines."""
    optimizer = make_optimizer(model, training)
    model.train()
    for indices in data.batches(np.random.default_rng(1)):
        batch = data.load(indices)
        losses(model, *outputs(model, batch), batch).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=ROOT / "conf/commonvoice/mini.yaml")
    parser.add_argument("--utterances", type=int, default=240)
    parser.add_argument("--turns", type=int, default=6)
    options = parser.parse_args()
    config = read_yaml(options.config)
    training = from_mapping(UtteranceTraining, config["training"], options.config)
    torch.set_num_threads(training.num_threads)
    with tempfile.TemporaryDirectory() as name:
        data = make_data(Path(name), options.utterances, training.batch_bins)
        torch.manual_seed(0)
        model = build_model(config["model"], data.tokenizer.tokens)

        def ours(turn: int) -> None:
            # A new directory for each turn, since finished training is not repeated.
            home = Private(Path(name) / str(turn), 1)
            unit = Unit(["bench"], 1, 0, home, [home])
            batches = UtteranceBatches(data, 1, training.accum_grad, CPU, (0, 1))
            Trainer(model, Transcripts(), training, unit, stacked=False).train(batches)

        seconds: dict[str, list[float]] = {"bare loop": [], "fedtools": []}
        for turn in range(options.turns + 1):
            for what in ("bare loop", "fedtools"):
                begun = time.perf_counter()
                bare_loop(model, data, training) if what == "bare loop" else ours(turn)
                if turn:
                    seconds[what].append(time.perf_counter() - begun)
    rows = [
        (
            what,
            *(
                f"{options.utterances / value:.1f}"
                for value in (max(t), statistics.median(t), min(t))
            ),
        )
        for what, t in seconds.items()
    ]
    print(format_table(("utterances/s", "min", "median", "max"), rows), end="")
    pairs = [b / f for b, f in zip(seconds["bare loop"], seconds["fedtools"], strict=True)]
    print(
        f"speed of fedtools / bare loop, turn by turn: median {statistics.median(pairs):.2f} "
        f"({min(pairs):.2f} to {max(pairs):.2f})"
    )


if __name__ == "__main__":
    main()
