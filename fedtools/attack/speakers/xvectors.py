"""Attack A2: speaker embeddings of the differences between personalised and global models.

Tomashenko et al. (ICASSP 2022), section 3.2.2 and figure 3: an x-vector network (Snyder et
al., ICASSP 2018) of seven layers, with statistics pooling after the fifth, on the frame-by-frame
differences of a hidden layer (equation 1). Differences are computed on the fly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtools.attack.options import A2
from fedtools.attack.speakers.footprints import held
from fedtools.attack.speakers.layers import Layer, lowest_layers, watched
from fedtools.attack.victims import Probe, State
from fedtools.core.errors import UserError
from fedtools.core.progress import Lines
from fedtools.core.seeds import generator, seed64

# Context of the five layers below the pooling: width of the kernel in frames, and its dilation.
_CONTEXTS = ((5, 1), (3, 2), (3, 3), (1, 1), (1, 1))
_LEAST_VARIANCE = 1e-8


@dataclass(frozen=True)
class Training:
    """Layer, options and seed for training the network.

    Attributes:
        layer: h, the hidden layer of the acoustic model, from 1.
        options: options of the network and its training.
        part: see `fedtools.attack.options.Part`.
        seed: random seed.
    """

    layer: int
    options: A2 = field(default_factory=A2)
    part: str = "relu"
    seed: int = 0


class XVectors(nn.Module):
    """X-vector network, which maps differences to speakers.

    Args:
        size: values of a frame.
        width: width of the layers.
        speakers: number of speakers.
    """

    def __init__(self, size: int, width: int, speakers: int):
        super().__init__()
        # Differences are small, and their scale is arbitrary.
        self.scale = nn.BatchNorm1d(size, affine=False)
        sizes = [size, *[width] * 4, 3 * width]
        self.frames = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(before, after, kernel, dilation=dilation, padding="same"),
                nn.ReLU(),
                nn.BatchNorm1d(after),
            )
            for before, after, (kernel, dilation) in zip(sizes, sizes[1:], _CONTEXTS, strict=False)
        )
        self.embedding = nn.Linear(2 * 3 * width, width)
        self.last = nn.Sequential(
            nn.ReLU(), nn.BatchNorm1d(width), nn.Linear(width, width), nn.ReLU(),
            nn.BatchNorm1d(width), nn.Linear(width, speakers),
        )  # fmt: skip

    def embed(self, differences: Tensor) -> Tensor:
        """Map (B, T, size) to embeddings, (B, width), the affine output of the sixth layer."""
        hidden = self.scale(differences.transpose(1, 2))
        for layer in self.frames:
            hidden = layer(hidden)
        variance = hidden.var(2, unbiased=False)
        return self.embedding(torch.cat([hidden.mean(2), (variance + _LEAST_VARIANCE).sqrt()], 1))

    def forward(self, differences: Tensor) -> Tensor:
        """Map (B, T, size) to logits, (B, speakers)."""
        return self.last(self.embed(differences))


class Differences:
    """Differences of equation 1 for the models that a probe holds.

    Args:
        probe: its first model is the global one.
        layer: the hidden layer, from 1.
        part: see `fedtools.attack.options.Part`.

    Raises:
        UserError: if there are fewer layers.
    """

    def __init__(self, probe: Probe, layer: int, part: str):
        self._probe, self.inputs = probe, list(probe.inputs())
        self._layers = [
            lowest_layers(model.eval(), lambda one: probe.run(one, self.inputs[0]), part, layer)
            for model in probe.models
        ]
        self.size = self._activation(0, self.inputs[0]).shape[1]

    def of(self, models: int, given: Any) -> Tensor:
        """Return differences of the first `models` models on one input, (models, T, D)."""
        before = self._activation(0, given)
        found = [self._activation(number, given) - before for number in range(1, models + 1)]
        return torch.stack(found)

    @torch.no_grad()
    def _activation(self, number: int, given: Any) -> Tensor:
        seen: list[Tensor] = []
        layers: Sequence[Layer] = self._layers[number]

        def see(at: int, values: Tensor) -> None:
            if at == len(layers) - 1:
                seen.append(values)

        with watched(layers, see):
            self._probe.run(self._probe.models[number], given)
        return seen[0]


class View(NamedTuple):
    """Models of a round, whose differences are from one global model.

    Attributes:
        probe: holds the models that are processed together.
        states: reads models by name.
        speakers: model -> its speaker, for all models of the view.
    """

    probe: Probe
    states: Callable[[Sequence[str]], Iterator[tuple[str, State]]]
    speakers: Mapping[str, str]


def train_xvectors(views: Sequence[View], training: Training) -> XVectors:
    """Train the network to classify the speakers of models, over all rounds.

    Args:
        views: the view of each round.

    Raises:
        UserError: if there are fewer layers than `training.layer`, or only one input.
    """
    differences = [Differences(view.probe, training.layer, training.part) for view in views]
    if len(differences[0].inputs) < 2:
        raise UserError("the Indicator has only one utterance", remedy="give at least two")
    speakers = sorted({speaker for view in views for speaker in view.speakers.values()})
    known = {speaker: number for number, speaker in enumerate(speakers)}
    device = next(views[0].probe.models[0].parameters()).device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed64(training.seed, "a2"))
        network = XVectors(differences[0].size, training.options.width, len(known)).to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=training.options.rate)
    epochs = Lines(f"attack A2, layer {training.layer}", "epoch", training.options.epochs)
    for epoch in range(training.options.epochs):
        random = generator(training.seed, "a2", epoch)
        for view, of_view in zip(views, differences, strict=True):
            order = random.permutation(sorted(view.speakers)).tolist()
            for group in held(view.probe, view.states(order)):
                own = [known[view.speakers[name]] for name in group]
                labels = torch.tensor(own, device=device)
                for batch in _batches(of_view, len(group), training, random):
                    loss = F.cross_entropy(network(batch), labels.repeat(len(batch) // len(group)))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
        epochs.done(epoch + 1, f"loss {loss.item():.3g}")
        if not loss.isfinite():
            remedy = "lower a2.rate, or leave out outlier models"
            raise UserError(f"attack A2, layer {training.layer}: the loss is {loss}", remedy=remedy)
    return network.eval()


@torch.no_grad()
def embeddings(
    view: View, network: XVectors, training: Training
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each model's embeddings of the Indicator's utterances, (utterances, width).

    A model whose embeddings are not finite, which finite weights can have, is left out and reported
    on stderr.
    """
    differences = Differences(view.probe, training.layer, training.part)
    for group in held(view.probe, view.states(sorted(view.speakers))):
        found = [network.embed(differences.of(len(group), one)) for one in differences.inputs]
        for name, rows in zip(group, torch.stack(found, 1).cpu().numpy(), strict=True):
            if np.isfinite(rows).all():
                yield name, rows
            else:
                print(f"{name}: refused: embeddings are not finite", file=sys.stderr)


def _batches(
    differences: Differences, models: int, training: Training, random: np.random.Generator
) -> Iterator[Tensor]:
    """Yield pieces of models' differences on some utterances, (utterances x models, T, D)."""
    order = random.permutation(len(differences.inputs))
    # BatchNorm needs more than one piece: a single last piece joins the batch before it.
    size = max(training.options.utterances, 1 if models > 1 else 2)
    starts = list(range(0, len(order), size))
    if models * (len(order) - starts[-1]) == 1 and len(starts) > 1:
        starts.pop()
    for start, stop in pairwise([*starts, len(order)]):
        chosen = order[start:stop]
        whole = [differences.of(models, differences.inputs[index]) for index in chosen]
        frames = min(training.options.frames, *(part.shape[1] for part in whole))
        firsts = [int(random.integers(part.shape[1] - frames + 1)) for part in whole]
        pieces = zip(whole, firsts, strict=True)
        yield torch.cat([part[:, first : first + frames] for part, first in pieces])
