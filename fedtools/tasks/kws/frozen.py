"""Outputs of a pretrained network's frozen layers for clips, computed once and kept."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedtools.audio.front_end import front_end
from fedtools.client.options import ClipTraining
from fedtools.files.clips import Clips
from fedtools.files.config import option_error
from fedtools.methods.base import Method
from fedtools.models.keywords import inputs_of
from fedtools.models.keywords.base import Network
from fedtools.models.keywords.pretrained import PretrainedNetwork
from fedtools.tasks.base import NewExperiment
from fedtools.tasks.frozen import check_size


class AboveFrozen(nn.Module):
    """A front end followed by the frozen layers of a network.

    Args:
        front: computes features from waveforms.
        build: returns the network.
    """

    def __init__(self, front: nn.Module, build: Callable[[], Network]):
        super().__init__()
        self._front, self._build = front, build

    def forward(self, waves: Tensor) -> Tensor:
        """Map (N, samples) to (N, positions, D), see `PretrainedNetwork.lower`."""
        network = self._build()
        assert isinstance(network, PretrainedNetwork)
        return network.lower(self._front(waves))


def check_frozen(new: NewExperiment[Method], network: Network, training: ClipTraining) -> None:
    """Raise a `UserError` if kept outputs would be of augmented clips, or too large."""
    if not isinstance(network, PretrainedNetwork) or network.depth is None:
        return
    augment, where = training.augmentation, f"{new.where}: training"
    if augment.noise_volume and augment.noise_probability:
        problem = f"model.cache_frozen excludes augment.noise_volume {augment.noise_volume}"
        raise option_error(f"{problem}: set it to 0", where, "noise_volume")
    if augment.time_shift_ms:
        problem = f"model.cache_frozen excludes augment.time_shift_ms {augment.time_shift_ms}"
        raise option_error(f"{problem}: set it to 0", where, "time_shift_ms")
    rows = {}
    front = AboveFrozen(front_end(*inputs_of(new.options.model)), lambda: network)
    for split, folder in new.data.items():
        clips = Clips.read(folder)
        positions = front(torch.zeros(1, clips.samples)).shape[1]
        rows[split] = len(clips.labels) * positions
    check_size(new.options.model, f"{new.where}: model", network.encoder.size, rows)
