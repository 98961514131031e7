"""A pretrained encoder that tells keywords apart, for many clients at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fedtools.files.config import from_mapping
from fedtools.files.errors import UserError
from fedtools.models.keywords.base import Network
from fedtools.models.keywords.layers import Linear
from fedtools.models.pretrained.encoders import build_encoder
from fedtools.models.pretrained.folder import Folder, open_known
from fedtools.models.pretrained.options import Pretrained


class PretrainedNetwork(Network):
    """A linear head on the mean over time of what an encoder makes of a clip.

    Args:
        folder: of the encoder.
        options: what of it is trained.
        clients: of the stack.
        classes: of the head.
    """

    def __init__(self, folder: Folder, options: Pretrained, clients: int, classes: int):
        super().__init__()
        self.encoder, self._rows = build_encoder(folder, options.adaptation, clients)
        self.head = Linear(clients, self.encoder.size, classes)

    def features(self, mfcc: Tensor, valid: Tensor | None = None) -> Tensor:
        """(K, B, frames, bins) -> (K, B, D)."""
        self._rows.clients = len(mfcc)
        hidden, _ = self.encoder(mfcc.flatten(0, 1))
        return hidden.mean(1).view(*mfcc.shape[:2], -1)

    def train(self, mode: bool = True) -> PretrainedNetwork:
        """Work as in training; what is frozen always works as in testing."""
        super().train(mode)
        self.encoder.eval()
        return self


def build_pretrained(
    config: Mapping[str, Any], classes: int, where: str | Path, clients: int
) -> PretrainedNetwork:
    """Build a network of its section of a configuration; errors as of `build_network`."""
    options = from_mapping(Pretrained, config, where)
    folder = open_known(options.path, options.sum)
    try:
        network = PretrainedNetwork(folder, options, clients, classes)
        if options.head_share:
            network.split_head(clients, options.head_share)
    except ValueError as error:
        raise UserError(str(error), path=where) from None
    return network
