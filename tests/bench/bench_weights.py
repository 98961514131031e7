#!/usr/bin/env python3
"""The attack on updates: products of all pairs of models, from files, over reading the files.

    bench_weights.py [--folder DIR] [--models 50 200] [--turns 3] [--jobs 4]

Models are TDNNs of the paper's size, 13.8 M parameters, as written by the clients of several jobs;
they lie in a folder of their own, which is removed at the end (11 GB for 200). "plain" reads the
same files from end to end, in pieces of 4 MiB. The system is asked to forget the files before each
turn, but the disk of a virtual machine may still cache them. Peak memory is of a process that
does nothing else, beyond what it had when it began. "processor" is the amount read per second of
processor time (two threads), which stays comparable on a busy machine. What 2,400
models would take is extrapolated: reading grows as their number, products as its square.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedtools.attack.updates import Update, multiply, parts_of
from fedtools.exchange.messages import Message, stacked
from fedtools.exchange.states import Spec, make_header, read_layout

MANY = 2400


def paper_spec() -> Spec:
    """Return the spec of thirteen hidden layers of 512 and two output branches of 3,664."""
    shapes: dict[str, tuple[int, ...]] = {}
    for number in range(13):
        name = f"encoder.layers.{number}"
        shapes[f"{name}.affine.weight"] = (512, 140 if number == 0 else 512, 3)
        shapes[f"{name}.affine.bias"] = (512,)
        shapes |= {f"{name}.norm.running_{kind}": (512,) for kind in ("mean", "var")}
    for branch in range(2):
        shapes[f"output.{branch}.hidden.weight"] = (512, 512)
        shapes[f"output.{branch}.last.weight"] = (3664, 512)
    return {name: (shape, "float32") for name, shape in sorted(shapes.items())}


def write_models(path: Path, spec: Spec, models: int, seed: int) -> None:
    """Write a job's file; each tensor's values are random, piece by piece."""
    header, layout = make_header(stacked(spec, models))
    random, left = np.random.default_rng(seed), layout.size - len(header)
    with open(path, "wb") as file:
        file.write(header)
        while left:
            values = random.standard_normal(min(left // 4, 1 << 22), np.float32)
            file.write(values.tobytes())
            left -= values.nbytes
        file.flush()
        os.fsync(file.fileno())


def forget(paths: Sequence[Path]) -> None:
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain(paths: Sequence[Path]) -> float:
    buffer, begun = bytearray(1 << 22), time.perf_counter()
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begun


def attack(paths: Sequence[Path], models: int) -> tuple[float, float, float]:
    """Measure the products of models: seconds, processor seconds, and MiB added."""
    updates = []
    for path in paths:
        layout = read_layout(path)
        for row in range(next(iter(layout.spec.values()))[0][0]):
            numbers = 1, 1, 0.0, 0.0, 1
            name = f"{path.stem}-{row}"
            updates.append(Update(Message(name, *numbers, path, layout, row), {}, name, 1))
    updates = updates[:models]
    start = {name: np.zeros(shape, kind) for name, (shape, kind) in paper_spec().items()}
    updates = [Update(one.message, start, one.client, 1) for one in updates]
    before, begun, worked = peak(), time.perf_counter(), time.process_time()
    for _ in multiply(updates, parts_of(paper_spec())):
        pass
    return time.perf_counter() - begun, time.process_time() - worked, peak() - before


def peak() -> float:
    """Return the peak memory of this process; getrusage would include its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def in_child(paths: Sequence[Path], models: int) -> tuple[float, ...]:
    command = [sys.executable, __file__, "--child", str(models), *map(str, paths)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return tuple(map(float, said))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--models", type=int, nargs="+", default=[50, 200])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        models, *paths = options.child
        print(*attack([Path(path) for path in paths], int(models)))
        return
    spec = paper_spec()
    one = sum(int(np.prod(shape)) * 4 for shape, _ in spec.values())
    print(f"{one / 4e6:.1f} M values a model")
    taken: dict[int, list[float]] = {}
    for models in sorted(options.models):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            paths = [Path(folder) / f"update.{job}.safetensors" for job in range(options.jobs)]
            for job, path in enumerate(paths):
                begin, end = (models * (job + part) // options.jobs for part in (0, 1))
                write_models(path, spec, end - begin, job)
            rates: dict[str, list[float]] = {"plain": [], "attack": [], "processor": []}
            ratios, memory = [], []
            for _ in range(options.turns):
                forget(paths)
                reading = plain(paths)
                forget(paths)
                ours, worked, more = in_child(paths, models)
                taken.setdefault(models, []).append(ours)
                memory.append(more)
                ratios.append(reading / ours)
                for name, seconds in zip(rates, (reading, ours, worked), strict=True):
                    rates[name].append(models * one / seconds / 1e6)
        said = ", ".join(f"{name} {spread(values)} MB/s" for name, values in rates.items())
        print(f"{models} models: {said}; {spread(ratios, 2)} of the plain speed; ", end="")
        print(f"{max(memory):.0f} MiB of memory")
    extrapolate(taken)


def spread(values: Sequence[float], digits: int = 0) -> str:
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def extrapolate(taken: dict[int, list[float]]) -> None:
    """Extrapolate to `MANY` models by a x models + b x models^2 through two measurements."""
    if len(taken) < 2:
        return
    (few, short), *_, (some, long) = ((n, min(seconds)) for n, seconds in sorted(taken.items()))
    square = max((long / some - short / few) / (some - few), 0)
    linear = short / few - square * few
    total = linear * MANY + square * MANY**2
    print(f"{MANY} models would take {total / 60:.0f} minutes, ", end="")
    print(f"{linear * MANY / 60:.0f} of which are reading")


if __name__ == "__main__":
    main()
