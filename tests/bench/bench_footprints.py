#!/usr/bin/env python3
"""Footprints of personalised TDNNs of the paper's size: ours over bare forward passes and hooks.

    bench_footprints.py [--models 8] [--utterances 10] [--seconds 4] [--turns 3]

"ours": mean and deviation of the differences in all 13 layers, in one pass for as many models as
are held. "bare": the same models' forward passes, of which nothing is kept. "layer by layer": a
pass for each layer, model and global model, as one would write it first. Random weights.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch

from fedtools.attack.speakers.footprints import Moments, Probe, footprints
from fedtools.models.acoustic.tdnn import TdnnEncoder

BINS = 140


def ours(probe: Probe, states: list) -> None:
    for _ in footprints(probe, iter(states), "relu"):
        pass


@torch.no_grad()
def bare(probe: Probe, states: list) -> None:
    for model in probe.models[1:]:
        for given in probe.inputs():
            probe.run(model, given)


@torch.no_grad()
def layer_by_layer(probe: Probe, states: list) -> None:
    for model in probe.models[1:]:
        for number in range(len(model.layers)):
            moments, kept = Moments(), []
            hooks = [
                one.layers[number].relu.register_forward_hook(
                    lambda _, __, out, kept=kept: kept.append(out[0].T)
                )
                for one in (probe.models[0], model)
            ]
            for given in probe.inputs():
                kept.clear()
                probe.run(probe.models[0], given)
                probe.run(model, given)
                moments.add(kept[1] - kept[0])
            for hook in hooks:
                hook.remove()
            moments.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("models", 8), ("utterances", 10), ("seconds", 4), ("turns", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = TdnnEncoder(BINS).eval()
    speech = [torch.randn(1, 100 * options.seconds, BINS) for _ in range(options.utterances)]
    probe = Probe(
        [copy.deepcopy(model) for _ in range(1 + options.models)],
        lambda one: one.state_dict(),
        lambda one, given: one(given, torch.tensor([given.shape[1]])),
        lambda: iter(speech),
    )
    states = [(str(n), model.state_dict()) for n in range(options.models)]
    found: dict[str, list[float]] = {}
    ways: dict[str, Callable] = {"ours": ours, "bare": bare, "layer by layer": layer_by_layer}
    for _ in range(options.turns):
        for name, way in ways.items():
            begun = time.perf_counter()
            way(probe, states)
            found.setdefault(name, []).append(time.perf_counter() - begun)
    print(f"{options.models} models, {options.utterances} utterances of {options.seconds} s")
    for name in ("bare", "layer by layer"):
        ratios = [other / own for own, other in zip(found["ours"], found[name], strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"ours is {spread} times as fast as {name}")


if __name__ == "__main__":
    main()
