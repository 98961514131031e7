#!/usr/bin/env python3
"""A toy round on which other simulators were measured: ours, a bare loop's, torch.func.vmap's.

    python tests/bench/bench_toy.py                                   # 66 k parameters, one process
    python tests/bench/bench_toy.py --network tiny --nj 2
    python tests/bench/bench_toy.py --package . --package ../before   # two versions, in turns

2,434 clients with sizes like those of Speech Commands, 200 of them a round, one local epoch of SGD
in batches of 16. The networks are convolutions over time of 66 k parameters, and a hidden layer of
3.4 k. Clips are rows of a table of random features in memory (no waveforms), as for the others.

Like with like: all have as many processes of one thread, train the same clients and the same
number of batches, each of the full size (ours begins the next shuffle where an epoch leaves the
last batch short, and so do the others here), with torch's fused SGD. Our round is a whole one with
its files; the others keep nothing but the sum of models. "train" is the share of our round without
sampling and aggregation. All take turns, each in processes of its own; the first turn does not
count. Times are for a client's step, since versions may sample other clients. CPU seconds are more
reliable where the machine is shared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

ROOT = Path(__file__).resolve().parent.parent.parent

# The fedtools to measure; the workers of a process get this path from it.
sys.path[:0] = [os.environ.get("TOY_PACKAGE", str(ROOT)), str(Path(__file__).parent)]

from toy_networks import BARE, CLASSES, register  # noqa: E402

CLIENTS, SAMPLED, BATCH, RATE = 2434, 200, 16, 0.05
# Clips share this many distinct features; more would not fit in the memory of a small machine.
TABLE = 4096


def table() -> Tensor:
    """Return random features (TABLE, 98, 40); clip number n has those of row n modulo TABLE."""
    return torch.randn(TABLE, 98, 40, generator=torch.Generator().manual_seed(0))


def labels_of(classes: int) -> np.ndarray:
    """Return the label of each row."""
    return np.random.default_rng(1).integers(classes, size=TABLE)


def draw_sizes() -> np.ndarray:
    """Draw the number of clips of each client: average 43, largest 316, as in Speech Commands."""
    drawn = np.random.default_rng(0).lognormal(3.22, 1.13, CLIENTS)
    return drawn.clip(1, 316).astype(int)


def steps_of(clients: Sequence[int]) -> int:
    """Return the number of batches of some clients in a round."""
    return int((-(-draw_sizes()[clients] // BATCH)).sum())


# --- ours ---------------------------------------------------------------------------------------


def patch() -> None:
    """Register the networks, and use the table in place of waveforms and MFCC."""
    from fedtools.tasks.kws.clips import ClipFeatures

    register()
    found: list[Tensor] = []

    def look_up(self: ClipFeatures, index: np.ndarray, *unused: np.ndarray) -> Tensor:
        if not found:
            found.append(table())
        return found[0][torch.from_numpy(index % TABLE)]

    ClipFeatures._features = look_up


# At import, so that the workers are patched too.
patch()


def make_clips(folder: Path, classes: int) -> Path:
    """Write packed clips with labels, and a hole in the file in place of waveforms."""
    from fedtools.data.clips import COLUMNS, sum_line

    folder.mkdir()
    sizes, labels = draw_sizes(), labels_of(classes)
    total = int(sizes.sum())
    np.lib.format.open_memmap(folder / "clips.npy", "w+", "<i2", (total, 16000))
    np.save(folder / "noise.npy", np.zeros(0, "<i2"))
    np.save(folder / "labels.npy", labels[np.arange(total) % TABLE].astype("<i8"))
    names = [f"c{client:04d}" for client in range(CLIENTS)]
    clients = [f"{name}\t{size}" for name, size in zip(names, sizes, strict=True)]
    rows = [
        f"{name}-{clip:06d}\t{name}\tw{labels[clip % TABLE]:02d}\t16000"
        for clip, name in enumerate(np.repeat(names, sizes))
    ]
    tables = {
        "classes.txt": [f"w{word:02d}" for word in range(classes)],
        "clients.tsv": ["client\tclips", *clients],
        "clips.tsv": ["\t".join(COLUMNS), *rows],
    }
    for name, lines in tables.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    # Nothing mistakes these clips for others, so the checksum of a hole of gigabytes is not needed.
    lines = [sum_line(folder / name, name) for name in (*tables, "labels.npy")]
    (folder / "sha256sums").write_text("".join(f"{line}\n" for line in lines))
    return folder


def begin(folder: Path, network: str, stack: int, dtype: str) -> Path:
    """Make the experiment by the command line."""
    from fedtools.cli import main as command

    training = {
        "optim": "sgd",
        "optim_conf": {"lr": RATE},
        "batch_size": BATCH,
        "stack": stack,
        "augment": {"time_shift_ms": 0, "noise_volume": 0.0},
    }
    if dtype != "float32":
        training["train_dtype"] = dtype
    config = {
        "task": "kws",
        "clients_per_round": SAMPLED,
        "keep_updates": False,
        "model": {"network": network},
        "training": training,
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    clips = make_clips(folder / "clips", CLASSES[network])
    sys.argv = ["fedtools", "init", str(folder / "exp"), "--config", str(folder / "config.yaml")]
    sys.argv += ["--method", "fedavg", "--data", f"train={clips}"]
    with contextlib.suppress(SystemExit):
        command()
    return folder / "exp"


def our_rounds(network: str, nj: int, stack: int, dtype: str) -> Iterator[dict]:
    """Run our rounds; yield the figures of each."""
    from fedtools.federation.rounds import Federation, trainer
    from fedtools.federation.steps import aggregate, sample

    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(begin(Path(folder), network, stack, dtype))
        with trainer(federation, nj, "cpu") as train:
            for number in range(1, 10**9):
                clients = sample(federation.experiment, federation.method, number, nj)
                begun = time.perf_counter()
                train(number, nj)
                seconds = time.perf_counter() - begun
                aggregate(federation, number)
                numbers = [int(client[1:]) for client in clients]
                yield {"clients": numbers, "train": seconds}


# --- bare loop and vmap -------------------------------------------------------------------------


class Work:
    """State that a process of the bare loop or of vmap keeps in memory."""

    def __init__(self, network: str, dtype: str):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.network, self.features = BARE[network](), table()
        self.labels = torch.from_numpy(labels_of(CLASSES[network]))
        self.sizes = draw_sizes()
        self.ends = np.cumsum(self.sizes)
        self.half = dtype == "bfloat16"

    def batches(self, client: int) -> Tensor:
        """Return a client's rows of the table in a round, (steps, batch)."""
        size = int(self.sizes[client])
        steps, width = -(-size // BATCH), min(size, BATCH)
        order = torch.cat([torch.randperm(size), torch.randperm(size)])[: steps * width]
        return ((self.ends[client] - size + order) % TABLE).view(steps, width)

    def autocast(self) -> torch.autocast:
        """Return the autocast context of their forward pass, the same as ours."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.half)


def bare_loop(work: Work, start: dict, clients: Sequence[int]) -> dict[str, Tensor]:
    """Train one client after the other; return the sum of the models."""
    network, sums = work.network, {name: torch.zeros_like(value) for name, value in start.items()}
    network.train()
    for client in clients:
        network.load_state_dict(start)
        optimizer = torch.optim.SGD(network.parameters(), lr=RATE, fused=True)
        for rows in work.batches(client):
            optimizer.zero_grad()
            with work.autocast():
                logits = network(work.features[rows])
            F.cross_entropy(logits.float(), work.labels[rows]).backward()
            optimizer.step()
        for name, value in network.state_dict().items():
            sums[name] += value
    return sums


def vmap_loop(work: Work, start: dict, clients: Sequence[int]) -> dict[str, Tensor]:
    """Train stacks of 32 clients by torch.func.vmap; return the sum of the models."""

    def loss(parameters: dict, features: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        with work.autocast():
            logits = functional_call(work.network, parameters, (features,))
        return (F.cross_entropy(logits.float(), labels, reduction="none") * weights).sum()

    gradient = vmap(grad(loss))
    sums = {name: torch.zeros_like(value) for name, value in start.items()}
    order = sorted(clients, key=lambda client: -work.sizes[client])
    for begin_at in range(0, len(order), 32):
        stack = [work.batches(client) for client in order[begin_at : begin_at + 32]]
        stacked = {
            name: value.expand(len(stack), *value.shape).clone() for name, value in start.items()
        }
        for step in range(len(stack[0])):
            now = [rows[step] for rows in stack if len(rows) > step]
            width = max(map(len, now))
            rows = torch.stack([F.pad(one, (0, width - len(one))) for one in now])
            weights = torch.stack(
                [F.pad(torch.full((len(one),), 1 / len(one)), (0, width - len(one))) for one in now]
            )
            active = {name: value[: len(now)] for name, value in stacked.items()}
            found = gradient(active, work.features[rows], work.labels[rows], weights)
            for name, value in active.items():
                value.sub_(found[name], alpha=RATE)
        for name, value in stacked.items():
            sums[name] += value.sum(0)
    return sums


_work: Work | None = None


def _begin_work(network: str, dtype: str) -> None:
    global _work
    _work = Work(network, dtype)


def _part(loop: Callable, start: dict[str, np.ndarray], clients: Sequence[int]) -> dict:
    tensors = {name: torch.from_numpy(value) for name, value in start.items()}
    return {name: value.numpy() for name, value in loop(_work, tensors, clients).items()}


def their_rounds(network: str, nj: int, loop: Callable, dtype: str) -> Iterator[dict | None]:
    """Run rounds of the bare loop or vmap, which receives each round's clients by `send`."""
    _begin_work(network, dtype)
    state = {name: value.numpy().copy() for name, value in _work.network.state_dict().items()}
    with contextlib.ExitStack() as stack:
        run = map
        if nj > 1:
            spawn = multiprocessing.get_context("spawn")
            arguments = nj, spawn, _begin_work, (network, dtype)
            run = stack.enter_context(ProcessPoolExecutor(*arguments)).map
        clients = yield None
        while True:
            order = sorted(clients, key=lambda client: -_work.sizes[client])
            parts = [order[job::nj] for job in range(nj)]
            found = list(run(_part, [loop] * nj, [state] * nj, parts))
            state = {name: sum(part[name] for part in found) / len(clients) for name in state}
            clients = yield {"clients": clients, "train": 0.0}


# --- turns --------------------------------------------------------------------------------------


def processors() -> float:
    """Return the CPU seconds of this process and its workers so far."""
    me = psutil.Process()
    times = [each.cpu_times() for each in (me, *me.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def serve(kind: str, network: str, nj: int, stack: int, dtype: str) -> None:
    """Run a round for every line of stdin, which lists its clients; answer with its figures."""
    talk, sys.stdout = sys.stdout, sys.stderr
    if kind == "ours":
        rounds = our_rounds(network, nj, stack, dtype)
    else:
        rounds = their_rounds(network, nj, {"bare": bare_loop, "vmap": vmap_loop}[kind], dtype)
        next(rounds)
    for line in sys.stdin:
        begun, before = time.perf_counter(), processors()
        found = next(rounds) if kind == "ours" else rounds.send(json.loads(line))
        found |= {"wall": time.perf_counter() - begun, "cpu": processors() - before}
        print(json.dumps(found), file=talk, flush=True)


class Contender:
    """One way to run a round, in a process of its own."""

    def __init__(self, title: str, package: str, *arguments: object):
        self.title, self.turns = title, []
        command = [sys.executable, __file__, "--serve", *map(str, arguments)]
        environment = {**os.environ, "TOY_PACKAGE": package, "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)

    def round(self, clients: list[int]) -> dict:
        """Run one round, with these clients unless it is ours."""
        self.process.stdin.write(json.dumps(clients) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.title}: no answer")
        found = json.loads(answer)
        steps = steps_of(found["clients"])
        return found | {name: 1000 * found[name] / steps for name in ("wall", "cpu", "train")}


def contenders(options: argparse.Namespace) -> list[Contender]:
    """Return the contenders, ours first, which samples the clients of a round."""
    found, network, nj = [], options.network, options.nj
    here = str(Path(options.package[0]).resolve())
    for package in options.package:
        path = str(Path(package).resolve())
        name = f" ({Path(path).name})" if len(options.package) > 1 else ""
        for dtype in options.dtypes:
            if dtype != "float32" and not (Path(path) / "fedtools/client/fit.py").exists():
                continue
            for stack in options.stacks:
                title = f"stack of {stack}, {dtype}{name}"
                found.append(Contender(title, path, "ours", network, nj, stack, dtype))
    for dtype in options.dtypes:
        found.append(Contender(f"vmap of 32, {dtype}", here, "vmap", network, nj, 0, dtype))
        found.append(Contender(f"bare loop, {dtype}", here, "bare", network, nj, 0, dtype))
    return found


def show(found: Sequence[Contender], network: str) -> None:
    """Print the table; ratios are relative to the bare loop in float32, turn by turn."""
    base = next(one for one in found if one.title == "bare loop, float32")
    rows = []
    for one in found:
        wall = [turn["wall"] for turn in one.turns]
        ratios = {
            name: [b[name] / t[name] for b, t in zip(base.turns, one.turns, strict=True)]
            for name in ("wall", "cpu")
        }
        share = statistics.median(turn["train"] / turn["wall"] for turn in one.turns)
        rows.append(
            (
                one.title,
                f"{statistics.median(wall):.2f}",
                f"{min(wall):.2f}-{max(wall):.2f}",
                f"{100 * share:.0f} %" if share else "-",
                f"{statistics.median(ratios['wall']):.2f}",
                f"{min(ratios['wall']):.2f}-{max(ratios['wall']):.2f}",
                f"{statistics.median(ratios['cpu']):.2f}",
            )
        )
    header = network, "ms/step", "from-to", "train", "x bare loop", "from-to", "by CPU time"
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        print("  ".join(cell.ljust(wide) for cell, wide in zip(row, widths, strict=True)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=list(BARE), default="tcn")
    parser.add_argument("--nj", type=int, default=1, help="single-threaded processes")
    parser.add_argument("--stacks", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--package", action="append", help="folder of our package; repeatable")
    parser.add_argument("--serve", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        kind, network, nj, stack, dtype = options.serve
        serve(kind, network, int(nj), int(stack), dtype)
        return
    options.package = options.package or [str(ROOT)]
    parameters = sum(value.numel() for value in BARE[options.network]().parameters())
    print(
        f"{CLIENTS} clients, {SAMPLED} a round, {parameters} parameters, "
        f"{options.nj} process(es) of one thread, median of {options.turns} turns"
    )
    found = contenders(options)
    clients: list[int] = []
    for turn in range(options.turns + 1):
        for one in found:
            result = one.round(clients)
            clients = result["clients"]
            if turn:
                one.turns.append(result)
    show(found, options.network)


if __name__ == "__main__":
    main()
