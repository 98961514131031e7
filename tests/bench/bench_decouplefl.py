#!/usr/bin/env python3
"""Cost of DecoupleFL's stages for client and server, relative to FedAvg; cost of a teacher.

    python tests/bench/bench_decouplefl.py [--config conf/commonvoice/mini.yaml] [--device cuda]

One epoch of one client's random features, as rounds do it, checkpoints and all. Zhu et al. count
1.0 for a client's epoch of stage 1 relative to FedAvg's, and 0.5 for one of stage 2 at the server.
What is compared takes turns, so that a busy machine slows all; the first turn is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from bench_train import make_data  # noqa: E402

from fedtools.core.tables import format_table  # noqa: E402
from fedtools.data.datadir import DataDir  # noqa: E402
from fedtools.exchange.sent_features import write_features  # noqa: E402
from fedtools.federation.federation import Federation  # noqa: E402
from fedtools.federation.init import init, read_config  # noqa: E402
from fedtools.federation.steps import aggregate, sample, train_local  # noqa: E402
from fedtools.models.acoustic.asr import log_posteriors  # noqa: E402

METHODS = {
    "FedAvg, transcripts": ("fedavg", ("training.labels=transcripts",)),
    "FedAvg": ("fedavg", ()),
    "stage 1": ("decouplefl", ("method_conf.stage1=1", "method_conf.stage2=1")),
    "stage 2": ("decouplefl", ("method_conf.stage1=0", "method_conf.stage2=1")),
}


def make_federation(root: Path, name: str, config: Path, data: DataDir, device: str) -> Federation:
    """Make an experiment of one client; for "stage 2", with its features sent."""
    method, settings = METHODS[name]
    options = read_config(config, [f"methods.{method}?"], settings)
    init(
        root / name,
        method=method,
        config=options,
        where=config,
        data={"train": str(data.path)},
        assets={"tokens": str(root / "tokens")},
    )
    federation = Federation(root / name, device)
    if name == "stage 2":
        sample(federation.experiment, federation.method, 1, 1)
        train_local(federation, 1, 1)
        aggregate(federation, 1)
    return federation


def job_of(federation: Federation, name: str) -> Callable[[], None]:
    """Return a job of one epoch, which always starts from the beginning."""

    def run() -> None:
        number = 2 if name == "stage 2" else 1
        phase = federation.method.phase(number)
        if phase.server_trains:
            shared = federation.states.shared_spec
            federation.learner(number).train(epochs=1, only=shared.__contains__)
        else:
            phase.client_update(federation.client(["bench"], number))
        for path in federation.experiment.path.rglob("checkpoint.safetensors"):
            path.unlink()

    return run


def forward(federation: Federation) -> None:
    """Run a forward pass over all audio, in batches."""
    utterances = federation.task.corpus.utterances("train", "bench")
    federation.load_result(None, 0)
    with torch.no_grad():
        for batch in utterances.stream(utterances.batches(), federation.task.device):
            log_posteriors(federation.task.models.build().eval(), batch)


def send(federation: Federation, folder: Path) -> None:
    """Write all features into the files that are sent."""
    (sent,) = federation.client(["bench"], 1).send_features()
    write_features(folder, "bench", sent.features, bits=16)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=ROOT / "conf/commonvoice/mini.yaml")
    parser.add_argument("--utterances", type=int, default=120)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "data").mkdir()
        made = make_data(root / "data", options.utterances, 120_000)
        data = DataDir(root / "data", utt2spk=dict.fromkeys(made.names, "s"))
        data.text = dict(zip(made.names, made.texts, strict=True))
        data.feats_scp = dict(made._reader.scp)
        data.utt2client = dict.fromkeys(made.names, "bench")
        data.write()
        (root / "tokens").mkdir()
        (root / "tokens" / "tokens.txt").write_text("\n".join([*made.tokenizer.tokens, ""]))
        opened = {
            what: make_federation(root, what, options.config, data, options.device)
            for what in METHODS
        }
        jobs = {what: job_of(federation, what) for what, federation in opened.items()}
        jobs["forward pass"] = lambda: forward(opened["stage 1"])
        jobs["features sent"] = lambda: send(opened["stage 1"], root)
        seconds: dict[str, list[float]] = {what: [] for what in jobs}
        for turn in range(options.turns + 1):
            for what, job in jobs.items():
                begun = time.perf_counter()
                job()
                if options.device != "cpu":
                    torch.cuda.synchronize()
                if turn:
                    seconds[what].append(time.perf_counter() - begun)
    print_ratios(seconds)


def print_ratios(seconds: dict[str, list[float]]) -> None:
    """Print ratios of seconds, turn by turn."""
    rows = []
    for what, beside in (
        ("FedAvg", "FedAvg, transcripts"),
        ("stage 1", "FedAvg"),
        ("stage 2", "FedAvg"),
        ("features sent", "forward pass"),
    ):
        ratios = [a / b for a, b in zip(seconds[what], seconds[beside], strict=True)]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append((what, beside, f"{statistics.median(seconds[what]):.2f}", ratio))
    print(format_table(("seconds of", "over those of", "median s", "ratio"), rows), end="")


if __name__ == "__main__":
    main()
