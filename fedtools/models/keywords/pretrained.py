"""A pretrained encoder that tells keywords apart, for many clients at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtools.files.config import from_mapping
from fedtools.files.errors import UserError
from fedtools.models.keywords.base import Network
from fedtools.models.pretrained.build import build_encoder, depth_of
from fedtools.models.pretrained.folder import Folder, open_known
from fedtools.models.pretrained.options import Pretrained
from fedtools.models.stacked import Linear


class PretrainedNetwork(Network):
    """A linear head on the mean over time of what an encoder makes of a clip.

    Args:
        folder: of the encoder.
        options: what of it is trained.
        clients: of the stack.
        classes: of the head.
        where: what the options were read from, for messages.

    Where outputs of frozen layers are kept, these are its inputs: see `lower`.
    """

    def __init__(
        self, folder: Folder, options: Pretrained, clients: int, classes: int, where: str | Path
    ):
        super().__init__()
        self.encoder: Any
        window = options.seconds(folder.kind, where)
        self.encoder, self._rows = build_encoder(folder, options.adaptation, clients, window)
        self.depth = depth_of(self.encoder, options, where)
        self.head = Linear(clients, self.encoder.size, classes)
        self.has_fixed_head = options.adaptation.kind == "none"

    def features(self, mfcc: Tensor, valid: Tensor | None = None) -> Tensor:
        """(K, B, frames, bins) -> (K, B, D)."""
        self._rows.clients = len(mfcc)
        frames = mfcc.flatten(0, 1)
        if self.depth is None:
            hidden, _ = self.encoder(frames)
        else:
            hidden = self.encoder.upper(frames, _lengths(frames), self.depth)
        return hidden.mean(1).view(*mfcc.shape[:2], -1)

    @torch.no_grad()
    def lower(self, frames: Tensor) -> Tensor:
        """What the frozen bottom makes of clips: (N, frames, bins) -> (N, positions, D).

        There is a single position where all is frozen but the head: the mean over time.
        """
        assert self.depth is not None
        hidden: Tensor = self.encoder.lower(frames, None, self.depth)[0]
        return hidden.mean(1, keepdim=True) if self.depth > len(self.encoder.layers) else hidden

    def train(self, mode: bool = True) -> PretrainedNetwork:
        """Work as in training; what is frozen always works as in testing."""
        super().train(mode)
        self.encoder.eval()
        return self


def _lengths(frames: Tensor) -> Tensor:
    return torch.full((len(frames),), frames.shape[1])


def build_pretrained(
    config: Mapping[str, Any], classes: int, where: str | Path, clients: int
) -> PretrainedNetwork:
    """Build a network of its section of a configuration; errors as of `build_network`."""
    options = from_mapping(Pretrained, config, where)
    folder = open_known(options.path, options.sum)
    try:
        network = PretrainedNetwork(folder, options, clients, classes, where)
        if options.head_share:
            network.split_head(clients, options.head_share)
    except ValueError as error:
        raise UserError(str(error), path=where) from None
    network.requires_grad_()
    return network
