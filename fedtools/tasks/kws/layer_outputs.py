"""Outputs of a pretrained network's frozen layers for all clips of a folder, computed once."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedtools.audio.front_end import front_end
from fedtools.client.options import ClipTraining
from fedtools.core.config import option_error
from fedtools.data.clips import Clips, check_sums
from fedtools.exchange.layer_cache import Outputs, Part, Place, place_of
from fedtools.methods.base import Method
from fedtools.models.keywords import inputs_of
from fedtools.models.keywords.base import Network
from fedtools.models.keywords.pretrained import FrozenHead, PretrainedNetwork
from fedtools.models.pretrained.options import Pretrained
from fedtools.models.training import torch_settings
from fedtools.tasks.base import NewExperiment
from fedtools.tasks.identity import of_clips
from fedtools.tasks.layer_outputs import check_size, make_outputs, options_of

# The most clips of a batch, which are of one client. Values depend to the last bit on the size of a
# batch, and so on no other client's clips, as user-level privacy needs.
_AT_ONCE = 64


class AboveFrozen(nn.Module):
    """A front end followed by the frozen layers of a network.

    Args:
        front: computes features from waveforms.
        build: returns the network, with its frozen layers.
    """

    def __init__(self, front: nn.Module, build: Callable[[], Network]):
        super().__init__()
        self._front, self._build = front, build

    def forward(self, waves: Tensor) -> Tensor:
        """Map (N, samples) to (N, positions, D), see `PretrainedNetwork.lower`."""
        network = self._build()
        assert isinstance(network, PretrainedNetwork)
        return network.lower(self._front(waves))


class ClipOutputs:
    """The outputs of frozen layers for folders of clips; see `fedtools.exchange.layer_cache`.

    Args:
        options: of the model.
        network: the network above the frozen layers; need not have them.
        front: computes features from waveforms.
        device: where outputs are computed.
        of: what else the values depend on, if they are not of all clips as they were packed.
    """

    def __init__(
        self,
        options: Pretrained,
        network: FrozenHead | PretrainedNetwork,
        front: nn.Module,
        device: torch.device,
        of: Sequence[object] = (),
    ):
        self._options, self._network, self._device = options, network, device
        self._front, self._of = front, of

    def of_others(self, *of: object) -> ClipOutputs:
        """Return outputs for other clips that are made of the same; see `of`."""
        return ClipOutputs(self._options, self._network, self._front, self._device, of)

    def shape(self, clips: Clips) -> tuple[int, int, int]:
        """Return the numbers of clips, of positions of each, and of values of a position."""
        return len(clips.labels), *self.of_clip(clips.samples)

    def of_clip(self, samples: int) -> tuple[int, int]:
        """Return the numbers of positions of a clip of some samples, and of values of each."""
        frames = len(self._front(torch.zeros(samples, device=self._device)))
        positions, values = self._network.outputs(frames)
        return positions, values

    def place(self, clips: Clips) -> Place:
        """Return where the outputs of a folder's clips lie."""
        network, options = self._network, self._options
        # The frozen layers compute on another device what differs in the last bit.
        how = f"{_AT_ONCE} of a client"
        what = [options.sum, network.window, network.depth, how, self._device.type, *self._of]
        data = of_clips(clips.path, False)["sha256sums"]
        return place_of(clips.path, None, data, what, self.shape(clips), options.cache_dtype)

    def open(self, clips: Clips, compute: Callable[[slice], Tensor], title: str) -> Outputs:
        """Return the outputs of all clips of a folder; compute them if they are missing.

        Args:
            compute: returns those of some clips.
            title: of the clips, for messages.
        """
        place = self.place(clips)
        if not place.is_complete():
            check_sums(clips.path, ("clips.npy",))
        edges = clips.edges.tolist()
        batches = [[part] for part in _parts(edges)]

        def by_client(part: slice) -> Tensor:
            return torch.cat([compute(one) for one in _of_clients(part, edges)])

        def outputs(left: Sequence[Sequence[Part]]) -> Iterator[list[np.ndarray]]:
            # One thread a batch: values do not depend on the number of threads.
            with torch_settings(1):
                for found in _ahead(by_client, left, self._device):
                    yield [found]

        return make_outputs(place, batches, outputs, title, "clips")


def _parts(edges: Sequence[int]) -> Iterator[Part]:
    """Yield the rows of whole clients, of a batch's clips or more, from the clients' edges."""
    first = edges[0]
    for last in edges[1:]:
        if last - first >= _AT_ONCE or last == edges[-1]:
            yield first, last
            first = last


def _of_clients(part: slice, edges: Sequence[int]) -> Iterator[slice]:
    """Yield the batches of a part of whole clients, each of one client's clips."""
    own = edges[bisect_left(edges, part.start) : bisect_right(edges, part.stop)]
    for first, last in pairwise(own):
        for begin in range(first, last, _AT_ONCE):
            yield slice(begin, min(begin + _AT_ONCE, last))


def _ahead(
    compute: Callable[[slice], Tensor], batches: Sequence[Sequence[Part]], device: torch.device
) -> Iterator[np.ndarray]:
    """Yield the outputs of batches in order, several of which are computed at a time on a CPU."""
    threads = len(os.sched_getaffinity(0)) if device.type == "cpu" else 1

    def work(part: Part) -> np.ndarray:
        found: np.ndarray = compute(slice(*part)).cpu().numpy()
        return found

    # Alone: the first batch loads the model, and transformers cannot load one in two threads.
    yield work(*batches[0])
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[np.ndarray]] = deque()
        try:
            for (part,) in batches[1:]:
                waiting.append(pool.submit(work, part))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def open_outputs(
    config: Mapping[str, Any], where: str | Path, network: Network, device: torch.device
) -> ClipOutputs | None:
    """Return the outputs of a model's frozen layers; None if they are not cached.

    Args:
        config: the section `model`.
        where: what it was read from.
        network: see `ClipOutputs`.
        device: where outputs are computed.
    """
    options = options_of(config, where)
    if options is None:
        return None
    assert isinstance(network, FrozenHead | PretrainedNetwork)
    return ClipOutputs(options, network, front_end(*inputs_of(config)).to(device), device)


def check_outputs(
    new: NewExperiment[Method],
    network: Network,
    training: ClipTraining,
    whole: Callable[[], Network],
) -> None:
    """Raise a `UserError` if cached outputs would be of augmented clips, or too large.

    Args:
        whole: returns the network with its frozen layers. It is called if there are no outputs of
            any split, so that a model that cannot be loaded is found now; others have been loaded
            before.
    """
    model, where = new.options.model, f"{new.where}: model"
    outputs = open_outputs(model, where, network, torch.device("cpu"))
    if outputs is None:
        return
    augment, training_is = training.augmentation, f"{new.where}: training"
    if augment.noise_volume and augment.noise_probability:
        problem = f"model.cache_frozen excludes augment.noise_volume {augment.noise_volume}"
        raise option_error(f"{problem}: set it to 0", training_is, "noise_volume")
    if augment.time_shift_ms:
        problem = f"model.cache_frozen excludes augment.time_shift_ms {augment.time_shift_ms}"
        raise option_error(f"{problem}: set it to 0", training_is, "time_shift_ms")
    places = {split: outputs.place(Clips.read(folder)) for split, folder in new.data.items()}
    if not any(place.is_complete() for place in places.values()):
        whole()
    sizes = {split: place.size for split, place in places.items()}
    check_size(model, where, sizes, complete=all(one.is_complete() for one in places.values()))
