#!/usr/bin/env python3
"""Personalised TDNNs of the paper's size: fine-tuning many at a time, and comparing all of them.

    bench_personal.py [--models 8] [--frames 300] [--batch 4] [--turns 3] [--device cpu]

"stacked": one step of all models together, each layer one convolution of as many groups as there
are models (`torch.func.vmap` makes the same of it). "one by one": the same steps, one model after
the other. Both with CTC and SGD, in one process of one thread on a CPU. What the recipe does is one
by one, in as many processes as there are cores: this shows what stacks would gain. Then attack A1's
scores of all pairs of 2,379 models' footprints of one layer.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtools.attack.speakers.a1 import rho

BINS, WIDTH, TOKENS, CONTEXTS = 140, 512, 30, (1,) * 6 + (3,) * 7
PAIRS = 2379


class Stack(nn.Module):
    """As many TDNNs as groups: (B, groups x BINS, T) to CTC's log posteriors."""

    def __init__(self, groups: int):
        super().__init__()
        self.groups, sizes = groups, [BINS] + [WIDTH] * len(CONTEXTS)
        self.layers, self.norms = nn.ModuleList(), nn.ModuleList()
        for number, context in enumerate(CONTEXTS):
            below = CONTEXTS[number + 1 : number + 2] == (3,) and context == 1
            wide = context if context == 1 else 1
            self.layers.append(
                nn.Conv1d(
                    *(groups * sizes[number], groups * WIDTH, 3),
                    stride=3 if below else 1,
                    dilation=wide,
                    padding=wide,
                    groups=groups,
                )
            )
            self.norms.append(nn.BatchNorm1d(groups * WIDTH, affine=False))
        self.out = nn.Conv1d(groups * WIDTH, groups * TOKENS, 1, groups=groups)

    def loss(self, speech: Tensor, targets: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            speech = norm(layer(speech).relu())
        scores = self.out(speech).unflatten(1, (self.groups, TOKENS)).flatten(0, 1)
        scores = scores.log_softmax(1).permute(2, 0, 1)
        frames = torch.full((scores.shape[1],), len(scores))
        lengths = torch.full((scores.shape[1],), targets.shape[1])
        return F.ctc_loss(scores, targets, frames, lengths, reduction="sum")


def step(model: Stack, speech: Tensor, targets: Tensor) -> None:
    model.zero_grad()
    model.loss(speech, targets).backward()
    with torch.no_grad():
        for value in model.parameters():
            value.sub_(value.grad, alpha=1e-6)


def seconds(work, device: str) -> float:
    begun = time.perf_counter()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("models", 8), ("frames", 300), ("batch", 4), ("turns", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stack, single = (Stack(groups).to(options.device) for groups in (options.models, 1))
    speech = torch.randn(options.batch, BINS, options.frames, device=options.device)
    targets = torch.randint(1, TOKENS, (options.batch, 20), device=options.device)
    whole = speech.repeat(1, options.models, 1), targets.repeat_interleave(options.models, 0)
    ratios = []
    for turn in range(options.turns + 1):
        together = seconds(lambda: step(stack, *whole), options.device)
        apart = seconds(
            lambda: [step(single, speech, targets) for _ in range(options.models)], options.device
        )
        if turn:
            ratios.append(apart / together)
    size = f"{options.models} models, {options.batch} utterances of {options.frames} frames"
    print(f"{size}: stacked is {spread(ratios)} times as fast as one by one")
    footprints = np.random.default_rng(0).normal(size=(PAIRS, 2, WIDTH))
    taken = [seconds(lambda: rho(footprints), "cpu") for _ in range(options.turns)]
    print(f"A1's scores of all pairs of {PAIRS:,} models, one layer: {spread(taken)} s")


if __name__ == "__main__":
    main()
