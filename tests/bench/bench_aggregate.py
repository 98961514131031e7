"""Aggregation against reading: bytes per second, and peak memory in models.

    python tests/bench/bench_aggregate.py [--clients 200] [--parameters 10000000] [--jobs 4]

Both figures read the same files, with the same sizes of reads and as many threads, each in a
process of its own, after the files were read once (warm) or pushed out of the page cache (--cold).
The best of several runs counts; bytes per second of processor time hold on a busy machine too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np

from fedtools.exchange.messages import Message, MessageWriter, Payload, Report, read_messages
from fedtools.exchange.origin import Origin
from fedtools.exchange.states import Spec, save_state
from fedtools.server import aggregate

ORIGIN = Origin("f" * 64, 1, "0" * 64)
NAMES = {
    "read": "reading alone",
    "plain": "plain mean",
    "weighted": "weighted mean",
    "bounded": "plain, bounded",
}


def make_spec(parameters: int) -> Spec:
    """Return a spec like a transformer's: square matrices of 512 with biases, and a remainder."""
    spec = {}
    for layer in range(parameters // (512 * 512 + 512)):
        spec[f"layer{layer:03}.weight"] = ((512, 512), "float32")
        spec[f"layer{layer:03}.bias"] = ((512,), "float32")
    spec["rest"] = ((parameters % (512 * 512 + 512),), "float32")
    return spec


def write_files(folder: Path, clients: list[str], jobs: int, spec: Spec) -> None:
    """Write one update per client: the same random model, shifted by the client's number."""
    random = np.random.default_rng(1)
    model = {name: random.standard_normal(shape, "float32") for name, (shape, _) in spec.items()}
    for job in range(1, jobs + 1):
        part = clients[job - 1 :: jobs]
        with MessageWriter(folder, job, part, Payload(spec), ORIGIN) as writer:
            for client in part:
                rows = {
                    name: tensor[None] + np.float32(int(client)) for name, tensor in model.items()
                }
                writer.send([Report(client, 1 + int(client), 1)], rows)
    save_state(folder / "base", model)


def read_only(messages: list[Message], spec: Spec) -> None:
    """Make the reads of `combine` without aggregating."""
    threads = min(4, len(os.sched_getaffinity(0)))

    def work(first: int) -> None:
        runs, buffer = aggregate.runs_of(messages), np.empty(aggregate._CHUNK)
        with aggregate.Opened() as files:
            for piece in islice(aggregate.pieces(spec), first, None, threads):
                for start, stop in aggregate.blocks(runs, piece):
                    block = aggregate.as_rows(buffer.view(piece.kind), stop - start, piece.size)
                    assert files.read(messages[start], piece.name, piece.skip, block)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))


def peak() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def child(what: str, folder: Path, clients: list[str], jobs: int, spec: Spec) -> None:
    """Run one of four measurements; print seconds, processor seconds and peak memory."""
    before = peak()
    cut = [clients[job::jobs] for job in range(jobs)]
    messages, refusals = read_messages(folder, cut, clients, Payload(spec), ORIGIN)
    assert not refusals, refusals
    start, processor = time.perf_counter(), time.process_time()
    if what == "read":
        read_only(messages, spec)
    else:
        weights = [m.utterances if what == "weighted" else 1 for m in messages]
        # Wide enough for models that are shifted by the client's number.
        bound = aggregate.Bound(folder / "base", 1e9) if what == "bounded" else None
        out = folder / "mean.safetensors"
        assert not aggregate.combine(messages, weights, out, spec, bound=bound)
    print(time.perf_counter() - start, time.process_time() - processor, peak() - before)


def evict(folder: Path) -> None:
    """Push the files out of the page cache."""
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    spec = make_spec(options.parameters)
    clients = [f"{number:05}" for number in range(options.clients)]
    if options.child:
        child(options.child[0], Path(options.child[1]), clients, options.jobs, spec)
        return
    size, model = 4 * options.parameters * options.clients, 4 * options.parameters
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), clients, options.jobs, spec)
        command = [sys.executable, __file__, *sys.argv[1:], "--child"]
        best = dict.fromkeys(NAMES, (0.0, 0.0))
        memory = 0
        for _ in range(options.repeat):
            for what, (speed, by_processor) in best.items():
                if options.cold:
                    evict(Path(folder))
                line = subprocess.check_output([*command, what, folder], text=True)
                seconds, spent, more = map(float, line.split())
                best[what] = max(speed, size / seconds), max(by_processor, size / spent)
                memory = max(memory, more) if what != "read" else memory
    print(f"{options.clients} updates of {options.parameters} parameters, {size / 1e9:.2f} GB")
    print("                GB/s  ratio  GB per processor second  ratio")
    for what, name in NAMES.items():
        speed, by_processor = best[what]
        ratio, by_ratio = speed / best["read"][0], by_processor / best["read"][1]
        figures = f"{speed / 1e9:5.2f}  {ratio:5.2f}  {by_processor / 1e9:23.2f}  {by_ratio:5.2f}"
        print(f"{name:14}  {figures}")
    print(f"peak memory beyond the imports: {memory / model:.2f} models ({memory / 1e6:.0f} MB)")


if __name__ == "__main__":
    main()
