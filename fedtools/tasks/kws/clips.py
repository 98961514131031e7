"""The clips of a federation as batches of many clients, augmented and turned into features."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedtools.audio.augment import INT16_MAX, INT16_MIN, Plan, apply
from fedtools.audio.front_end import front_end
from fedtools.audio.trigger import Tone
from fedtools.client.options import ClipTraining
from fedtools.core.errors import UserError
from fedtools.data.clips import RATE, Clips
from fedtools.exchange.layer_cache import Outputs
from fedtools.models.keywords import inputs_of
from fedtools.models.keywords.clip_batch import ClipBatch
from fedtools.tasks.kws.layer_outputs import ClipOutputs

_CLIPS_IN_CACHE = 32
# Clips per batch where unaugmented features are computed.
_AT_ONCE = 256
# Bytes of unaugmented features for which a CPU's process has room; it fills its clients' alone.
_KEPT_BYTES = 1 << 30


class ClipFeatures:
    """The clips of a federation on one device, augmented and turned into features as they are used.

    Args:
        clips: all of them.
        front: computes features from waveforms, see `fedtools.audio.front_end`.
        device: of features and `front`.
        outputs: of frozen layers, if they are cached; `front` then computes them.
        title: of the clips, for messages.
    """

    def __init__(
        self,
        clips: Clips,
        front: nn.Module,
        device: torch.device,
        outputs: ClipOutputs | None = None,
        title: str = "",
    ):
        self.clips = clips
        self._outputs, self._title = outputs, title
        self.device = device
        self._front = front.to(device)
        self._labels = torch.from_numpy(clips.labels)
        self._noise = torch.from_numpy(np.array(clips.noise)).to(device)
        # A GPU holds all waveforms; a CPU reads them from the file when they are needed.
        on_gpu = device.type == "cuda"
        self._waves = torch.from_numpy(np.array(clips.waves)).to(device) if on_gpu else None
        self._there = np.zeros(len(clips.labels), bool)
        self._triggered: dict[tuple[tuple[str, ...], Tone, int], TriggeredClips] = {}

    def batch(
        self, rows: Sequence[slice], plans: Sequence[Plan], step: int, width: int = 0
    ) -> ClipBatch:
        """Return one step's batch of several clients, padded with clips of weight 0.

        Args:
            rows, plans: of the clients, which may have no clips.
            step: the number of the batch.
            width: clips of a client in the batch; 0 for as many as the largest client has.
        """
        widths = [one.clips.shape[1] for one in plans]
        ragged = bool(width) or min(widths) < max(widths)
        width = width or max(widths)
        index = np.zeros((len(plans), width), np.int64)
        shift = np.zeros((len(plans), width), np.int64)
        noise = np.full((len(plans), width), -1, np.int64)
        volume = np.zeros((len(plans), width), np.float32)
        weights = np.zeros((len(plans), width), np.float32)
        for client, (place, one, size) in enumerate(zip(rows, plans, widths, strict=True)):
            index[client] = place.start
            index[client, :size] += one.clips[step]
            shift[client, :size] = one.shift[step]
            noise[client, :size] = one.noise_start[step]
            volume[client, :size] = one.volume[step]
            weights[client, :size] = 1 / max(size, 1)
        if self._outputs:
            self._cached.check(index)
            kept = torch.from_numpy(self._cached.values)
            mfcc = kept[torch.from_numpy(index)].to(self.device, torch.float32)
        else:
            mfcc = self._features(index, shift, noise, volume)
        weight = torch.from_numpy(weights).to(self.device)
        labels = self._labels[torch.from_numpy(index)].to(self.device)
        return ClipBatch(mfcc, labels, weight, (weight > 0).float() if ragged else None)

    def plain(self, rows: slice) -> Tensor:
        """Return unaugmented features of some clips, (clips, frames, values)."""
        index = np.arange(rows.start, rows.stop)
        return self._made(self._gather(index).float())

    def cached(self, rows: slice) -> Tensor:
        """Return `plain` features of some clips as they are cached on disk."""
        return torch.from_numpy(self._cached.rows(rows.start, rows.stop))

    def kept(self, rows: slice) -> Tensor:
        """Return `plain` features of some clips, as they are cached on disk where they are."""
        if self._outputs:
            return self.cached(rows)
        edges = [*range(rows.start, rows.stop, _AT_ONCE), rows.stop]
        return torch.cat([self.plain(slice(*ends)) for ends in pairwise(edges)])

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of frames and of values of a clip's features."""
        if self._outputs:
            return self._outputs.of_clip(self.clips.samples)
        found = self.plain(slice(0, 1)).shape
        return found[1], found[2]

    @cached_property
    def _cached(self) -> Outputs:
        assert self._outputs
        return self._outputs.open(self.clips, self.plain, self._title)

    def triggered(self, clients: Sequence[str], tone: Tone, target: int) -> TriggeredClips:
        """Return the clips of some clients with the trigger of a backdoor, made on first use.

        Args:
            clients: in C order.
            tone: the trigger.
            target: the class that all clips are labelled with.
        """
        key = tuple(clients), tone, target
        if key not in self._triggered:
            outputs = self._outputs and self._outputs.of_others(tone, *clients)
            self._triggered[key] = TriggeredClips(self, outputs, *key)
        return self._triggered[key]

    def _gather(self, index: np.ndarray) -> Tensor:
        if self._waves is not None:
            return self._waves[torch.from_numpy(index).to(self.device)]
        return torch.from_numpy(self.clips.waves[index])

    def _features(
        self, index: np.ndarray, shift: np.ndarray, noise: np.ndarray, volume: np.ndarray
    ) -> Tensor:
        if not (shift.any() or (noise >= 0).any()) and (table := self._table) is not None:
            return self._unaugmented(table, index)
        # A CPU's cache holds the waveforms of a few clips only.
        at_once = _CLIPS_IN_CACHE if self.device.type == "cpu" else index.size
        parts = []
        for begin in range(0, index.size, at_once):
            part = slice(begin, begin + at_once)
            waves = self._gather(index.reshape(-1)[part])
            shifts, starts, volumes = (
                torch.from_numpy(array.reshape(-1)[part]).to(self.device)
                for array in (shift, noise, volume)
            )
            parts.append(self._made(apply(waves, shifts, starts, volumes, self._noise)))
        return torch.cat(parts).view(*index.shape, *parts[0].shape[1:])

    @cached_property
    def _table(self) -> Tensor | None:
        """Return a place for all clips' unaugmented features, if there is room, on a CPU."""
        frames, values = self.shape
        fits = 4 * len(self._there) * frames * values <= _KEPT_BYTES
        return (
            torch.empty(len(self._there), frames, values) if fits and self._waves is None else None
        )

    def _unaugmented(self, table: Tensor, index: np.ndarray) -> Tensor:
        """Return features of clips by number, which are computed on first use."""
        missing = np.unique(index[~self._there[index]])
        for begin in range(0, len(missing), _CLIPS_IN_CACHE):
            part = missing[begin : begin + _CLIPS_IN_CACHE]
            table[torch.from_numpy(part)] = self._made(self._gather(part).float())
        self._there[missing] = True
        return table[torch.from_numpy(index)]

    @torch.no_grad()
    def _made(self, waves: Tensor) -> Tensor:
        made: Tensor = self._front(waves)
        return made


class TriggeredClips(ClipFeatures):
    """The clips of some clients with the trigger of a backdoor, and with its target as label.

    Args:
        whole: the clips without the trigger.
        outputs: of frozen layers for clips with the trigger, if they are cached.
        clients, tone, target: see `ClipFeatures.triggered`.
    """

    def __init__(
        self,
        whole: ClipFeatures,
        outputs: ClipOutputs | None,
        clients: Sequence[str],
        tone: Tone,
        target: int,
    ):
        found = whole.clips
        rows = [found.rows(client) for client in clients]
        # Of a clip in these: its number in the whole, whose waveforms these are.
        self._places = np.concatenate([np.arange(one.start, one.stop) for one in rows])
        edges = np.cumsum([0, *(one.stop - one.start for one in rows)])
        labels = np.full(len(self._places), target, np.int64)
        own = replace(found, clients=list(clients), edges=edges, labels=labels)
        title = f"{whole._title}, with the trigger"
        super().__init__(own, whole._front, whole.device, outputs, title)
        self._tone = torch.from_numpy(tone.wave(found.samples)).int()

    def _gather(self, index: np.ndarray) -> Tensor:
        waves = super()._gather(self._places[index])
        heard = waves.int() + self._tone.to(waves.device)
        return heard.clamp(INT16_MIN, INT16_MAX).to(waves.dtype)


def check_samples(clips: Clips, samples: int, of_what: str) -> None:
    """Raise a `UserError` unless clips have a number of samples, that of those `of_what`."""
    if clips.samples != samples:
        there, wanted = clips.samples / RATE, samples / RATE
        remedy = f"pack them with --clip-seconds {wanted:g}"
        problem = f"clips of {there:g} s, those of {of_what} have {wanted:g} s"
        raise UserError(problem, path=clips.path, remedy=remedy)


def check_clips(network: nn.Module, config: Mapping[str, object], samples: int, path: Path) -> None:
    """Raise a `UserError` if clips are longer than a pretrained network accepts."""
    longest = getattr(network, "longest", None)
    if longest is not None:
        frames = len(front_end(*inputs_of(config))(torch.zeros(samples)))
        if frames > longest:
            problem = f"clips of {frames} frames, the model accepts {longest}"
            raise UserError(problem, path=path, remedy="pack them with a smaller --clip-seconds")


class ClipCorpus:
    """The clips of an experiment's splits, and of other folders.

    Args:
        path_of: split -> its folder.
        classes: of the experiment.
        samples: the number of samples in a clip.
        front: computes features from waveforms.
        device: where features are computed.
        training: the options of the experiment; kept as an attribute.
        outputs: of frozen layers, where these are the features.
    """

    def __init__(
        self,
        path_of: Callable[[str], Path],
        classes: Sequence[str],
        samples: int,
        front: nn.Module,
        device: torch.device,
        training: ClipTraining,
        outputs: ClipOutputs | None = None,
    ):
        self.training, self._outputs = training, outputs
        self._path_of, self._classes, self._samples = path_of, list(classes), samples
        self._front, self._device = front.to(device), device
        self._features: dict[str, ClipFeatures] = {}
        self._plain: dict[str, Tensor] = {}

    def features(self, split: str) -> ClipFeatures:
        """Return the clips of a split, read on first use."""
        if split not in self._features:
            clips = self.read_clips(self._path_of(split))
            if clips.classes != self._classes:
                where = self._path_of(split) / "classes.txt"
                remedy = "pack the clips again, or begin another experiment"
                raise UserError("not the classes of the experiment", path=where, remedy=remedy)
            self._features[split] = ClipFeatures(
                clips, self._front, self._device, self._outputs, split
            )
        return self._features[split]

    def gather(self, clips: Clips) -> ClipFeatures:
        """Return features of any clips."""
        return ClipFeatures(clips, self._front, self._device)

    @torch.no_grad()
    def made(self, waves: Tensor) -> Tensor:
        """Return features of waveforms as long as clips, (..., samples), in the 16-bit range."""
        found: Tensor = self._front(waves.to(self._device))
        return found

    @property
    def classes(self) -> list[str]:
        """Return the classes of the experiment."""
        return self._classes

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of frames and of values of a clip's features, without any clip."""
        if self._outputs:
            return self._outputs.of_clip(self._samples)
        frames, values = self.made(torch.zeros(1, self._samples)).shape[1:]
        return frames, values

    @property
    def samples(self) -> int:
        """Return the number of samples in a clip."""
        return self._samples

    def read_clips(self, folder: Path) -> Clips:
        """Read clips of any classes; raise a `UserError` if they lack the experiment's length."""
        clips = Clips.read(folder)
        check_samples(clips, self._samples, "the experiment")
        return clips

    def plain(self, split: str, rows: slice) -> Tensor:
        """Return unaugmented features of some clips of a split, (clips, frames, values).

        Features cached on disk have the type that they were cached in, and are not on the device.
        """
        data = self.features(split)
        if self._outputs:
            return data.cached(rows)
        if split not in self._plain:
            self._plain[split] = data.kept(slice(0, len(data.clips.labels)))
        return self._plain[split][rows]
