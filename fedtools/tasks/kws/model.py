"""The keyword networks of a federation: how they are built, and what they minimise."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtools.client.objective import Objective
from fedtools.client.options import ClipTraining
from fedtools.client.unit import Models
from fedtools.models.adapt.adaptation import BASE, has_base
from fedtools.models.adapt.copies import copy_of
from fedtools.models.keywords import build_network
from fedtools.models.keywords.base import Network
from fedtools.models.keywords.clip_batch import ClipBatch
from fedtools.models.keywords.pretrained import FrozenHead
from fedtools.models.pretrained.options import PROJECTION, is_pretrained
from fedtools.models.stacked import held_once


class KwsModels(Models):
    """Networks of one experiment, each a stack; see `fedtools.client.unit.Models`.

    Args:
        config: of the network.
        classes: the number of classes.
        frames: the number of frames in a clip.
        training: the options.
        where: where the options were read from.
        device: of the networks.
        folder: of the experiment, with the files of what is frozen.
    """

    training: ClipTraining
    stacked = True

    def __init__(
        self,
        config: Mapping[str, Any],
        classes: int,
        frames: int,
        training: ClipTraining,
        where: str,
        device: torch.device,
        folder: Path | None = None,
    ):
        self.training, self.device = training, device
        self._make = partial(
            build_network,
            *(config, classes, where),
            frames=frames,
            base=folder / BASE if folder and has_base(config) else None,
            projection=folder / PROJECTION if folder else None,
        )
        self._has_frozen = is_pretrained(config) or has_base(config)
        self._built: dict[tuple[int, str], Network] = {}
        self._whole: Network | None = None

    def build(self, clients: int = 1, use: str = "") -> Network:
        """Return a network for the given number of clients, built once for each use."""
        if (clients, use) not in self._built:
            self._built[clients, use] = self._new(clients)
        return self._built[clients, use].requires_grad_(True)

    def whole(self) -> Network:
        """Return a network for one client with all frozen layers, also if their outputs are cached.

        Its trained part is not loaded.
        """
        first = self.build()
        if not isinstance(first, FrozenHead):
            return first
        if self._whole is None:
            self._whole = self._make(whole=True).to(self.device)
        return self._whole

    def _new(self, clients: int) -> Network:
        if self._built and self._has_frozen:
            return copy_of(next(iter(self._built.values())), clients)
        return self._make(clients=clients).to(self.device)

    def tensors(self, model: nn.Module, client: int = 0) -> dict[str, Tensor]:
        """Return views of one client's parameters and buffers, without the leading dimension."""
        return tensors_of(model, client)

    def objective(self, model: nn.Module, source: object) -> Objective:
        """Return cross-entropy as the objective."""
        return Objective(cross_entropy)

    def represent(self, model: Network, batch: ClipBatch) -> Tensor:
        """Return the head's input, (K, B, D)."""
        return model.features(batch.mfcc, batch.valid)

    def classify(self, model: Network, features: Tensor) -> Tensor:
        """Return logits, (K, B, classes)."""
        logits: Tensor = model.head(features)
        return logits

    def loss_of(self, found: Tensor, batch: ClipBatch) -> Tensor:
        """Return each client's mean cross-entropy, (K,)."""
        return entropy_of(found, batch)

    def vectors(self, features: Tensor, batch: ClipBatch) -> tuple[Tensor, Tensor]:
        """Return the features unchanged, and the clips' weights."""
        return features, batch.weights


def cross_entropy(network: nn.Module, batch: ClipBatch) -> Tensor:
    """Return each client's mean cross-entropy, (K,)."""
    return entropy_of(network(batch.mfcc, batch.valid), batch)


def entropy_of(logits: Tensor, batch: ClipBatch) -> Tensor:
    """Return each client's mean cross-entropy, (K,), for logits (K, B, classes)."""
    log_probs = F.log_softmax(logits, -1)
    return batch.mean(-log_probs.gather(2, batch.labels[..., None])[..., 0])


def tensors_of(network: nn.Module, client: int = 0) -> dict[str, Tensor]:
    """Return views of one client's parameters and buffers, without the leading dimension.

    Clients share the views of tensors that are held once.
    """
    once, state = held_once(network), network.state_dict()
    return {name: value[0 if name in once else client] for name, value in state.items()}
