#!/usr/bin/env python3
"""Clients trained in stacks against a bare torch loop over the same work, for each network.

    python tests/bench/bench_stack.py                          # mini.yaml's networks
    python tests/bench/bench_stack.py --full --networks dscnn  # the paper's
    python tests/bench/bench_stack.py --clients 200 --steps 50 --stacks 8 --brief
    python tests/bench/bench_stack.py --device cuda --clients 200 --steps 50 --stacks 1 16 64

The bare loop is the straightforward implementation: torch's own layers and fused optimiser, one
client after the other; it shares our MFCC, augmentation and precision (float32, or TF32 with
--tf32, which on a GPU is torch's default for convolutions). Like with like: both have as many
processes (--nj) of one thread, the same clients, and as many clips in a batch. All take turns, so
that a busy machine slows all; the first turn does not count (with --brief there is none: long
rounds need none). Times of rounds are without starting Python, files and aggregation, which
bench_round.py measures.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import keywords  # noqa: E402
from bare_networks import BARE  # noqa: E402

from fedtools.audio.augment import apply  # noqa: E402
from fedtools.audio.mfcc import Mfcc  # noqa: E402
from fedtools.core.config import read_yaml  # noqa: E402
from fedtools.core.tables import format_table  # noqa: E402
from fedtools.data.clips import Clips  # noqa: E402
from fedtools.federation.federation import Federation  # noqa: E402
from fedtools.federation.init import init, read_config  # noqa: E402
from fedtools.models.keywords import NETWORKS  # noqa: E402
from fedtools.tasks.kws.clips import ClipFeatures  # noqa: E402

BATCH, CLASSES, CLIPS = 32, 35, 40
BARE_OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


@cache
def bare_data(folder: Path, device: str) -> tuple[Clips, Mfcc, Tensor]:
    """Return the data that the bare loop reads before the first round."""
    clips = Clips.read(folder)
    return clips, Mfcc().to(device), torch.from_numpy(np.array(clips.noise)).to(device)


class Times(NamedTuple):
    """Seconds of a round, of its features, and processor seconds over all threads."""

    all: float
    features: float
    processors: float


def bare_round(
    config: Mapping, folder: Path, steps: int, job: int, jobs: int, device: str
) -> Times:
    """Train one job's clients, one after the other."""
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = config["training"]["use_tf32"]
    torch.backends.cuda.matmul.allow_tf32 = config["training"]["use_tf32"]
    clips, mfcc, noise = bare_data(folder, device)
    random = np.random.default_rng(0)
    model = config["model"]
    network = BARE[model["network"]](CLASSES, **model["network_conf"]).to(device)
    start = {name: value.clone() for name, value in network.state_dict().items()}
    make = BARE_OPTIMIZERS[config["training"]["optim"]]
    begun, processors, features = now(device), time.process_time(), 0.0
    for client in clips.clients[job::jobs]:
        network.load_state_dict(start)
        optimizer = make(network.parameters(), fused=True, **config["training"]["optim_conf"])
        rows = np.arange(len(clips.labels))[clips.rows(client)]
        for _ in range(steps):
            before = now(device)
            index = np.sort(random.choice(rows, BATCH, replace=False))
            waves = torch.from_numpy(clips.waves[index]).to(device)
            shift = torch.from_numpy(random.integers(-1600, 1601, BATCH)).to(device)
            place = random.integers(0, len(noise) - 16000, BATCH)
            place = torch.from_numpy(np.where(random.random(BATCH) < 0.8, place, -1)).to(device)
            volume = torch.from_numpy(random.uniform(0, 0.1, BATCH).astype("f4")).to(device)
            with torch.no_grad():
                batch = (mfcc(apply(waves, shift, place, volume, noise)) - 50) / 16
            features += now(device) - before
            labels = torch.from_numpy(clips.labels[index]).to(device)
            optimizer.zero_grad()
            F.cross_entropy(network(batch), labels).backward()
            optimizer.step()
    return Times(now(device) - begun, features, time.process_time() - processors)


@cache
def opened(path: Path, device: str) -> Federation:
    """Return a worker's federation, opened before its first round."""
    return Federation(path, device)


def our_round(path: Path, job: int, jobs: int, device: str) -> Times:
    """Train one job's clients by our engine."""
    federation = opened(path, device)
    torch.set_num_threads(federation.task.training.num_threads)
    spent = [0.0]
    plain = ClipFeatures.batch

    def timed(*arguments: object) -> object:
        begun = now(device)
        found = plain(*arguments)
        spent[0] += now(device) - begun
        return found

    ClipFeatures.batch = timed
    begun, processors = now(device), time.process_time()
    for unit in federation.task.units(federation.experiment.clients, 1)[job::jobs]:
        federation.work(unit, 1, federation.method.phase(1))
    ClipFeatures.batch = plain
    return Times(now(device) - begun, spent[0], time.process_time() - processors)


def now(device: str) -> float:
    """Return the time in seconds after all work started on the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Runs:
    """The compared implementations and their times.

    Each runs in processes of its own, since it sets their threads and C library.

    Attributes:
        times: implementation -> times of each turn.
    """

    def __init__(self, device: str, bare: ProcessPoolExecutor, ours: ProcessPoolExecutor, nj: int):
        self.times: dict[str, list[Times]] = {}
        self._device, self._bare, self._ours, self._nj = device, bare, ours, nj
        self._work: dict[str, Callable[[], Times]] = {}

    def add_bare(self, what: str, config: Mapping, folder: Path, steps: int) -> None:
        """Add the bare loop."""
        self._add(what, self._bare, bare_round, config, folder, steps)

    def add_ours(self, what: str, path: Path) -> None:
        """Add one of our experiments."""
        self._add(what, self._ours, our_round, path)

    def _add(self, what: str, pool: ProcessPoolExecutor, run: Callable, *arguments: object) -> None:
        def work() -> Times:
            begun = time.perf_counter()
            done = [
                pool.submit(run, *arguments, job, self._nj, self._device) for job in range(self._nj)
            ]
            parts = [one.result() for one in done]
            seconds = time.perf_counter() - begun
            features = sum(part.features for part in parts) / len(parts)
            return Times(seconds, features, sum(part.processors for part in parts))

        self._work[what] = work

    def take_turns(self, turns: int, uncounted: int) -> None:
        """Run everything `turns` times, in turns."""
        for turn in range(uncounted + turns):
            for what, work in self._work.items():
                times = work()
                if turn >= uncounted:
                    self.times.setdefault(what, []).append(times)

    def table(self, title: str, steps: int) -> str:
        """Return rows of milliseconds per client step and speed over the bare loop, by turn."""
        rows = []
        for what, turns in self.times.items():
            ratios = [b.all / t.all for b, t in zip(self.times["bare loop"], turns, strict=True)]
            milliseconds = [1000 * turn.all / steps for turn in turns]
            processors = statistics.median(1000 * turn.processors / steps for turn in turns)
            share = statistics.median(turn.features / turn.all for turn in turns)
            rows.append(
                (
                    what,
                    f"{statistics.median(milliseconds):.1f}",
                    f"{min(milliseconds):.1f}-{max(milliseconds):.1f}",
                    f"{processors:.1f}",
                    f"{100 * share:.0f} %",
                    f"{statistics.median(ratios):.2f}",
                    f"{min(ratios):.2f}-{max(ratios):.2f}",
                )
            )
        header = (title, "ms/step", "from-to", "CPU ms", "features", "x bare loop", "from-to")
        return format_table(header, rows)


def measure(
    network: str, options: argparse.Namespace, root: Path, pools: tuple[ProcessPoolExecutor, ...]
) -> str:
    """Measure one network and return its table."""
    conf = ROOT / "conf/speechcommands" / ("paper.yaml" if options.full else "mini.yaml")
    runs = Runs(options.device, *pools, options.nj)

    def experiment(stack: int, dtype: str) -> Path:
        path = root / f"{network}-{stack}-{dtype}"
        settings = [f"training.stack={stack}", f"training.train_dtype={dtype}"]
        settings += [f"training.batch_size={BATCH}", "training.stack_mb=100000"]
        settings += [f"method_conf.local_steps={options.steps}"]
        settings += [f"clients_per_round={options.clients}"]
        settings += [f"training.use_tf32={str(options.tf32).lower()}"]
        config = read_config(conf, [f"networks.{network}"], settings)
        data = {"train": str(root / "clips")}
        init(path, method="fedavg", config=config, where=conf, data=data, seed=0)
        return path

    first = experiment(options.stacks[0], "float32")
    work = read_yaml(first / "config.yaml"), root / "clips", options.steps
    runs.add_bare("bare loop", *work)
    for dtype in options.dtypes:
        for stack in options.stacks:
            runs.add_ours(f"stack of {stack}, {dtype}", experiment(stack, dtype))
    runs.take_turns(options.turns, uncounted=0 if options.brief else 1)
    return runs.table(network, options.clients * options.steps)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="the paper's networks, not mini.yaml's")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS.names(), default=NETWORKS.names())
    parser.add_argument("--brief", action="store_true", help="for long rounds: no first turn")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--stacks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--nj", type=int, default=1, help="single-threaded processes")
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tf32", action="store_true", help="on a GPU: products of 10 bits")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        # Equally many clips of each client in each class: all take batches of the full size.
        counts = [CLIPS // 2, CLIPS - CLIPS // 2] + [0] * (CLASSES - 2)
        labels = [f"w{label:02d}" for label in range(CLASSES)]
        names = {f"c{client:04d}": counts for client in range(options.clients)}
        keywords.pack(root / "clips", names, labels)
        print(
            f"{options.clients} clients, {options.steps} steps of {BATCH} clips, "
            f"{options.nj} process(es) of one thread"
        )
        spawn = multiprocessing.get_context("spawn")
        pools = tuple(ProcessPoolExecutor(options.nj, spawn) for _ in range(2))
        for network in options.networks:
            print(measure(network, options, root, pools), flush=True)


if __name__ == "__main__":
    main()
