"""A pretrained encoder with a head for keywords, for many clients at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtools.core.config import from_mapping, option_error
from fedtools.models.keywords.base import Network
from fedtools.models.keywords.projection import make_normalisation
from fedtools.models.pretrained.build import build_encoder, depth_of
from fedtools.models.pretrained.folder import Folder, open_known
from fedtools.models.pretrained.options import Pretrained
from fedtools.models.stacked import Linear


class PretrainedNetwork(Network):
    """A linear head on the mean over time of an encoder's output, normalised or as it is.

    If outputs of frozen layers are cached, these are the network's inputs; see `lower`.

    Args:
        folder: the encoder's folder.
        options: options of the pretrained model.
        clients: number of clients in the stack.
        classes: number of classes of the head.
        where: source of the options, for messages.
        projection: see `build_network`.
    """

    def __init__(
        self,
        folder: Folder,
        options: Pretrained,
        clients: int,
        classes: int,
        where: str | Path,
        projection: Path | None = None,
    ):
        super().__init__()
        self.encoder: Any
        self.window = options.seconds(folder.kind, where)
        self.encoder, self._rows = build_encoder(folder, options.adaptation, clients, self.window)
        self.longest: int | None = self.encoder.longest
        self.depth = depth_of(self.encoder, options, where)
        kind = options.normalise
        normalise, inputs = make_normalisation(kind, self.encoder.size, projection, where)
        self.head = Linear(clients, inputs, classes)
        self.normalise = normalise
        self.has_fixed_head = options.adaptation.kind == "none"

    def features(self, mfcc: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return features (K, B, R) of clips (K, B, frames, bins)."""
        self._rows.clients = len(mfcc)
        frames = mfcc.flatten(0, 1)
        if self.depth is None:
            hidden, _ = self.encoder(frames)
        else:
            hidden = self.encoder.upper(frames, _lengths(frames), self.depth)
        return self.normalise(hidden.mean(1).view(*mfcc.shape[:2], -1))

    @torch.no_grad()
    def lower(self, frames: Tensor) -> Tensor:
        """Return the output of the frozen bottom layers: (N, frames, bins) -> (N, positions, D).

        If all but the head is frozen, there is a single position: the mean over time.
        """
        assert self.depth is not None
        hidden: Tensor = self.encoder.lower(frames, None, self.depth)[0]
        return hidden.mean(1, keepdim=True) if self.depth > len(self.encoder.layers) else hidden

    def outputs(self, frames: int) -> tuple[int, int]:
        """Return the numbers of positions and of values that `lower` makes of a clip's frames."""
        assert self.depth is not None
        whole = self.depth > len(self.encoder.layers)
        return 1 if whole else int(self.encoder.positions(frames)), self.encoder.size

    def train(self, mode: bool = True) -> PretrainedNetwork:
        """Set training mode for all but the encoder."""
        super().train(mode)
        self.encoder.eval()
        return self


class FrozenHead(Network):
    """The head of a `PretrainedNetwork` whose whole encoder is frozen, on the encoder's outputs.

    It has the same state as that network, and needs neither transformers nor the encoder's weights.

    Args:
        folder, options, clients, classes, where, projection: see `PretrainedNetwork`.
    """

    # Stands for the number of all layers, see `depth_of`.
    depth = "all"

    def __init__(
        self,
        folder: Folder,
        options: Pretrained,
        clients: int,
        classes: int,
        where: str | Path,
        projection: Path | None = None,
    ):
        super().__init__()
        self.window = options.seconds(folder.kind, where)
        self._size, self.longest = folder.size, folder.longest
        kind = options.normalise
        normalise, inputs = make_normalisation(kind, self._size, projection, where)
        self.head = Linear(clients, inputs, classes)
        self.normalise = normalise
        self.has_fixed_head = options.adaptation.kind == "none"

    def features(self, mfcc: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return features (K, B, R) of the encoder's outputs (K, B, 1, D)."""
        return self.normalise(mfcc[:, :, 0])

    def outputs(self, frames: int) -> tuple[int, int]:
        """Return the numbers of positions and of values of a clip's outputs."""
        return 1, self._size


def _lengths(frames: Tensor) -> Tensor:
    return torch.full((len(frames),), frames.shape[1])


def build_pretrained(
    config: Mapping[str, Any],
    classes: int,
    where: str | Path,
    clients: int,
    projection: Path | None,
    whole: bool,
) -> PretrainedNetwork | FrozenHead:
    """Build a network from its section of a configuration; arguments as in `build_network`."""
    options = from_mapping(Pretrained, config, where)
    folder = open_known(options.path, options.sum)
    kind = FrozenHead if options.is_head_on_cache and not whole else PretrainedNetwork
    try:
        network = kind(folder, options, clients, classes, where, projection)
    except ValueError as error:
        raise option_error(f"adapt: {error}", where, "adapt") from None
    network.requires_grad_()
    return network
