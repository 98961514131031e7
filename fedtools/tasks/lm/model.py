"""The language models of a federation: how they are built, and what they minimise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fedtools.client.objective import Objective
from fedtools.client.unit import Key, Models, Source
from fedtools.core.config import Positive
from fedtools.core.seeds import generator
from fedtools.lm.nnlm_network import (
    IGNORED,
    NnlmOptions,
    build_nnlm,
    entropies,
    losses,
    pad,
    represent,
)
from fedtools.models.training import Training


@dataclass(frozen=True)
class LmTraining(Training):
    """The options in the section `training`.

    Attributes:
        batch_sentences: sentences per step.
    """

    batch_sentences: Positive = 16


@dataclass(frozen=True)
class Sentences:
    """A batch: inputs and targets (B, T), as `fedtools.lm.nnlm_network.pad` makes them."""

    inputs: Tensor
    targets: Tensor
    amount: int
    frames: int

    # Not for a stack of models.
    active: ClassVar[None] = None


class SentenceBatches:
    """The batches of some epochs over sentences, shuffled anew in each.

    Args:
        sentences: word ids of each, with the end.
        words: V, the size of the vocabulary.
        epochs: the number of epochs.
        size: sentences per batch.
        key: (seed, ...) for the order.
    """

    def __init__(
        self,
        sentences: Sequence[list[int]],
        words: int,
        epochs: int,
        size: int,
        key: Key,
        device: torch.device,
    ):
        self._sentences, self._words, self._device = sentences, words, device
        self._plan: list[np.ndarray] = []
        for epoch in range(epochs):
            order = generator(key[0], "batches", *key[1:], epoch).permutation(len(sentences))
            self._plan += [order[at : at + size] for at in range(0, len(order), size)]
        self.steps = [len(self._plan)]

    def stream(self, first: int) -> Iterator[list[Sentences]]:
        """Yield the batches, from number `first` on."""
        for chosen in self._plan[first:]:
            some = [self._sentences[index] for index in chosen]
            inputs, targets = (part.to(self._device) for part in pad(some, self._words))
            yield [Sentences(inputs, targets, sum(map(len, some)), len(some))]


class SentenceSource(Source):
    """A client's sentences of one round.

    Args:
        sentences: word ids of each, with the end.
        words: V, the size of the vocabulary.
        key: (seed, round, client) for the order.
        epochs: a client's epochs in a round.
        size: sentences per batch.
        device: where the batches go.
    """

    def __init__(
        self,
        sentences: Sequence[list[int]],
        words: int,
        key: tuple[int, int, str],
        epochs: int,
        size: int,
        device: torch.device,
    ):
        self.sizes, self.facts = [len(sentences)], {}
        self._sentences, self._words, self._key = sentences, words, key
        self._epochs, self._size, self._device = epochs, size, device

    def batches(
        self, epochs: int | None, steps: int | Sequence[int] | None, purpose: str
    ) -> SentenceBatches:
        """Return the batches of some epochs, by default those of a round."""
        if steps is not None:
            raise NotImplementedError("sentences are trained on for epochs, not steps")
        key: Key = self._key if purpose == "train" else (*self._key, purpose)
        count = epochs or self._epochs
        return SentenceBatches(self._sentences, self._words, count, self._size, key, self._device)


class LmModels(Models):
    """Models of one experiment; see `fedtools.client.unit.Models`.

    Args:
        options: of the network.
        words: V, the size of the vocabulary.
        training: the options.
        device: of the models.
    """

    training: LmTraining
    stacked = False

    def __init__(
        self, options: NnlmOptions, words: int, training: LmTraining, device: torch.device
    ):
        self.training, self.device = training, device
        self._options, self._words = options, words
        self._built: dict[str, nn.Module] = {}

    def build(self, clients: int = 1, use: str = "") -> nn.Module:
        """Return a model, built once for each use."""
        if use not in self._built:
            self._built[use] = build_nnlm(self._options, self._words).to(self.device)
        return self._built[use]

    def tensors(self, model: nn.Module, client: int = 0) -> dict[str, Tensor]:
        """Return the parameters and buffers."""
        return model.state_dict()

    def objective(self, model: nn.Module, source: object) -> Objective:
        """Return cross-entropy as the objective."""
        return Objective(mean_loss)

    def represent(self, model: nn.Module, batch: Sentences) -> Tensor:
        """Return the last layer's input for each word, (B, T, size)."""
        return represent(model, batch.inputs)

    def classify(self, model: nn.Module, features: Tensor) -> tuple[nn.Module, Tensor]:
        """Return model and features: `loss_of` applies the last layer to words, not to padding."""
        return model, features

    def loss_of(self, found: tuple[nn.Module, Tensor], batch: Sentences) -> Tensor:
        """Return cross-entropy in nats per word, (1,)."""
        return entropies(*found, batch.targets).mean()[None]

    def vectors(self, features: Tensor, batch: Sentences) -> tuple[Tensor, Tensor]:
        """Return the mean over each sentence's words, (1, B, size), and equal weights."""
        own = (batch.targets != IGNORED)[..., None]
        vectors = ((features * own).sum(1) / own.sum(1))[None]
        return vectors, vectors.new_full(vectors.shape[:2], 1 / vectors.shape[1])


def mean_loss(model: nn.Module, batch: Sentences) -> Tensor:
    """Return cross-entropy in nats per word, (1,)."""
    return losses(model, batch.inputs, batch.targets).mean()[None]
