"""Footprints of personalised models: how their hidden layers differ from the global model's.

N. Tomashenko, S. Mdhaffar, M. Tommasi, Y. Estève, J.-F. Bonastre: Privacy attacks for automatic
speech recognition acoustic models in a federated learning framework, ICASSP 2022, section 3.2.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedtools.attack.speakers.layers import Layer, hidden_layers, lowest_layers, watched
from fedtools.attack.victims import Probe, State
from fedtools.models.training import load_model


class Moments:
    """Mean and standard deviation of vectors that come in parts, in float64 (Chan et al. 1979)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor | None = None
        self.squares: Tensor | None = None

    def add(self, values: Tensor) -> None:
        """Add some vectors, (N, D)."""
        values, count = values.double(), len(values)
        mean = values.mean(0)
        squares = (values - mean).square().sum(0)
        if self.mean is None:
            self.count, self.mean, self.squares = count, mean, squares
            return
        total, apart = self.count + count, mean - self.mean
        self.squares += squares + apart.square() * (self.count * count / total)
        self.mean = self.mean + apart * (count / total)
        self.count = total

    def result(self) -> np.ndarray:
        """Return mean and standard deviation as two rows, (2, D); equations 2 and 3."""
        deviation = (self.squares / self.count).sqrt()
        return torch.stack([self.mean, deviation]).cpu().numpy()


@torch.no_grad()
def footprints(
    probe: Probe,
    states: Iterator[tuple[str, State]],
    part: str,
    highest: int | None = None,
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Compute equations 1 to 3 for many models, with one pass over the Indicator per group held.

    Args:
        probe: its first model has the global model's tensors; all other models are overwritten.
        states: names and tensors of personalised models; missing tensors are the global model's.
        part: see `fedtools.attack.options.Part`.
        highest: the number of the last layer, from 1; all by default. Higher layers are not
            computed.

    Yields:
        a model's name, and layer -> (2, D), mean and standard deviation of the differences.

    Raises:
        UserError: if there are fewer layers than `highest`.
    """
    first = next(probe.inputs())

    def run(model: nn.Module) -> Any:
        return probe.run(model, first)

    layers = [
        lowest_layers(model.eval(), run, part, highest)
        if highest
        else hidden_layers(model.eval(), run, part)
        for model in probe.models
    ]
    names = [layer.name for layer in layers[0]]
    for group in held(probe, states):
        found = [[Moments() for _ in names] for _ in group]
        for given in probe.inputs():
            seen = _activations(probe, 0, layers, given)
            for number, moments in enumerate(found, 1):
                own = _activations(probe, number, layers, given)
                for one, values, before in zip(moments, own, seen, strict=True):
                    one.add(values - before)
        for name, moments in zip(group, found, strict=True):
            yield name, {layer: one.result() for layer, one in zip(names, moments, strict=True)}


def held(probe: Probe, states: Iterator[tuple[str, State]]) -> Iterator[list[str]]:
    """Load personalised models into a probe, as many at a time as it holds; yield their names."""
    whole, others = probe.tensors(probe.models[0]), probe.models[1:]
    while group := list(islice(states, len(others))):
        for model, (_, state) in zip(others, group, strict=False):
            load_model(probe.tensors(model), {**whole, **state})
        yield [name for name, _ in group]


def _activations(
    probe: Probe, number: int, layers: Sequence[Sequence[Layer]], given: Any
) -> list[Tensor]:
    """Return the activations of one model's layers for an input, (frames, values) each."""
    seen: list[Tensor] = []
    with watched(layers[number], lambda _, values: seen.append(values)):
        probe.run(probe.models[number], given)
    return seen
