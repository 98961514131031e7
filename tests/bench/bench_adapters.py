#!/usr/bin/env python3
"""Adapters of a pretrained encoder for keyword spotting, on clips of one second.

    bench_adapters.py [--folder WHISPER] [--clients 8] [--clips 8] [--turns 5] [--device cpu]
                      [--dtype float32]

"lora": one step with adapters on all layers over one of full fine-tuning; peak memory in addition
to the base, each in a process of its own. "kept bottom": a step of the head alone on what the
frozen encoder made, read from a file as a federation reads it, over one that computes it; the same
with adapters of the upper half of the layers. "stack": a step of many clients' adapters as one
batch over the same steps one by one. All with AdamW, in one process of one thread on a CPU. Without
a folder the model is a random one of tiny's size.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers

from fedtools.audio.log_mel import LogMel
from fedtools.exchange.layer_cache import Place
from fedtools.models.keywords import build_network
from fedtools.models.keywords.base import Network
from fedtools.models.keywords.clip_batch import ClipBatch
from fedtools.tasks.kws.memory import keep_freed_memory
from fedtools.tasks.kws.model import cross_entropy

CLASSES, MEGABYTE = 8, 2**20
LORA, HEAD, FULL = {"kind": "lora", "rank": 8}, {"kind": "head"}, {"kind": "full"}


def tiny(folder: Path) -> Path:
    """Return a random model of the size of Whisper tiny.en."""
    sizes = {"d_model": 384, "encoder_layers": 4, "decoder_layers": 4}
    heads = {"encoder_attention_heads": 6, "decoder_attention_heads": 6}
    inner = {"encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536}
    config = transformers.WhisperConfig(**sizes, **heads, **inner)
    transformers.WhisperForConditionalGeneration(config).save_pretrained(folder)
    return folder


def build(
    folder: Path, adapt: dict, clients: int, device: str, whole: bool = False, **more: object
) -> Network:
    config = {"network": "hf", "path": str(folder), "adapt": adapt, **more}
    network = build_network(config, CLASSES, "bench", clients=clients, whole=whole)
    return network.to(device).train()


def stepper(network: Network, given: Callable[[], torch.Tensor], device: str) -> Callable[[], None]:
    """Return a function that takes one step of the optimiser on a batch `given`, (K, B, ...)."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        values = given()
        labels = torch.zeros(values.shape[:2], dtype=torch.long, device=device)
        weights = torch.full(values.shape[:2], 1 / values.shape[1], device=device)
        cross_entropy(network, ClipBatch(values, labels, weights, None)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(work: Callable[[], None], device: str, least: float = 0.5) -> float:
    """Return the seconds of one call, averaged over several calls where one is short."""
    count, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < least or not count:
        work()
        count += 1
        if device != "cpu":
            torch.cuda.synchronize()
    return (time.perf_counter() - begun) / count


def ratios(
    first: Callable[[], None], second: Callable[[], None], turns: int, device: str
) -> list[float]:
    """Return the ratios of the first's time to the second's, measured in turns."""
    first(), second()
    return [seconds(first, device) / seconds(second, device) for _ in range(turns)]


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def peak(folder: Path, kind: str, options: argparse.Namespace) -> float:
    """Return the megabytes that two steps add to the model's memory, in a process of its own."""
    command = [sys.executable, __file__, "--folder", folder, "--peak-of", kind]
    command += ["--clips", options.clips, "--device", options.device, "--dtype", options.dtype]
    done = subprocess.run([str(word) for word in command], check=True, capture_output=True)
    return float(done.stdout.split()[-1])


def print_peak(options: argparse.Namespace) -> None:
    frames = torch.randn(1, options.clips, 100, 80, device=options.device)
    adapt = {"lora": LORA, "full": FULL}[options.peak_of]
    network = build(Path(options.folder), adapt, 1, options.device)
    step = stepper(network, lambda: frames, options.device)
    if options.device != "cpu":
        before = torch.cuda.memory_allocated()
        step(), step()
        print((torch.cuda.max_memory_allocated() - before) / MEGABYTE)
        return
    # Loading briefly takes more memory than it leaves in use, so the peak is reset here.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    step(), step()
    print(resident("VmHWM") - before)


def resident(what: str) -> float:
    """Return the megabytes of this process, now or at most; available on Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024


def lora(folder: Path, options: argparse.Namespace) -> None:
    device = options.device
    frames = torch.randn(1, options.clips, 100, 80, device=device)
    steps = [stepper(build(folder, how, 1, device), lambda: frames, device) for how in (FULL, LORA)]
    found = ratios(*steps, options.turns, device)
    print(f"full fine-tuning takes {spread(found)} times as long as LoRA")
    full, own = peak(folder, "full", options), peak(folder, "lora", options)
    print(f"memory of its steps in addition to the model: {full:.0f} MB and {own:.0f} MB")


def kept(folder: Path, options: argparse.Namespace) -> None:
    device, clips = options.device, options.clips
    layers = len(build(folder, HEAD, 1, device).encoder.layers)
    upper = {**LORA, "targets": [f"layers.{n}.*" for n in range(layers // 2, layers)]}
    waves = torch.randint(-3000, 3000, (clips, 16000), device=device)
    front = LogMel().to(device)
    for name, how in (("the head", HEAD), ("LoRA on the upper half", upper)):
        plain = build(folder, how, 1, device)
        above = build(folder, how, 1, device, cache_frozen=True)
        whole = build(folder, how, 1, device, whole=True, cache_frozen=True)
        read = reader(whole.lower(front(waves.float())), Path(options.place) / name, device)
        without = stepper(plain, lambda: front(waves.float())[None], device)
        found = ratios(without, stepper(above, read, device), options.turns, device)
        print(f"{name} on a stored bottom: {spread(found)} times as fast")


def reader(values: torch.Tensor, folder: Path, device: str) -> Callable[[], torch.Tensor]:
    """Store a bottom's outputs and return a function that reads them in another order."""
    place = Place(folder, "0", "0", tuple(values.shape), "float32")
    place.make([[(0, len(values))]], lambda left: [[values.cpu().numpy()]])
    index = np.random.default_rng(0).permutation(len(values))

    def read() -> torch.Tensor:
        outputs = place.open()
        outputs.check(index)
        return torch.from_numpy(outputs.values)[torch.from_numpy(index)][None].to(device)

    return read


def stack(folder: Path, options: argparse.Namespace) -> None:
    device, clients = options.device, options.clients
    frames = torch.randn(clients, options.clips, 100, 80, device=device)
    together = stepper(build(folder, LORA, clients, device), lambda: frames, device)
    alone = stepper(build(folder, LORA, 1, device), lambda: frames[:1], device)

    def one_by_one() -> None:
        for _ in range(clients):
            alone()

    found = ratios(one_by_one, together, options.turns, device)
    print(f"a stack of {clients} is {spread(found)} times as fast as one by one")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", help="folder of a Whisper; random weights without one")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--clips", type=int, default=8, help="clips in a client's step")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--peak-of", choices=("lora", "full"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # The task does the same.
    keep_freed_memory()
    lower = torch.autocast(options.device, torch.bfloat16, enabled=options.dtype == "bfloat16")
    if options.peak_of:
        with lower:
            print_peak(options)
        return
    with lower, tempfile.TemporaryDirectory() as place:
        folder = Path(options.folder) if options.folder else tiny(Path(place) / "tiny")
        options.place = place
        for part in (lora, kept, stack):
            part(folder, options)


if __name__ == "__main__":
    main()
