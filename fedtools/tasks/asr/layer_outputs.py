"""Outputs of a pretrained model's frozen layers for utterances, computed once and cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from fedtools.client.options import UtteranceTraining
from fedtools.data.ark import FeatureReader
from fedtools.data.datadir import DataDir
from fedtools.exchange.layer_cache import Part, Place
from fedtools.methods.base import Method
from fedtools.models.acoustic.asr import shortest_input
from fedtools.models.pretrained.options import Pretrained
from fedtools.tasks.asr.data import Utterances, Zeros, frames_of
from fedtools.tasks.asr.model import AsrModels
from fedtools.tasks.base import NewExperiment
from fedtools.tasks.layer_outputs import check_size, make_outputs, options_of


def keep_hidden(
    data: Utterances,
    place: Callable[..., Place],
    options: Pretrained,
    models: AsrModels,
    title: str,
) -> None:
    """Make utterances load as the frozen layers' outputs, which are computed if they are missing.

    Args:
        place: `place_of`, with folder, owner and sum of the data.
        options: of the model.
        title: of the utterances, for messages.
    """
    # A `PretrainedCtc` or `Whisper`.
    model: Any = models.build()
    encoder, depth, training = model.encoder, model.depth, models.training
    edges = [0, *np.cumsum(encoder.positions(data.frames)).tolist()]
    parts = list(pairwise(edges))
    # The batches depend on these utterances alone, so every process computes the same outputs.
    batches = data.batches()
    numbers = {part: index for index, part in enumerate(parts)}

    @torch.no_grad()
    def compute(left: Sequence[Sequence[Part]]) -> Iterator[list[np.ndarray]]:
        for batch in left:
            loaded = data.load([numbers[part] for part in batch])
            speech = loaded["speech"].to(models.device)
            hidden, lengths = encoder.lower(speech, loaded["speech_lengths"], depth)
            yield [
                values[:length].cpu().numpy()
                for values, length in zip(hidden, lengths.tolist(), strict=True)
            ]

    what = [options.sum, encoder.window, depth, models.device.type, data.names, batches]
    what += [data.frames.tolist(), training.num_threads, training.use_tf32]
    found = place(what, (edges[-1], encoder.size), options.cache_dtype)
    by_batch = [[parts[index] for index in batch] for batch in batches]
    make_outputs(found, by_batch, compute, title, "positions")

    def hidden(index: int) -> np.ndarray:
        return np.array(found.open().rows(*parts[index]), "f4")

    data.hidden = hidden


def check_outputs(new: NewExperiment[Method], model: Any, training: UtteranceTraining) -> None:
    """Raise a `UserError` if the cached outputs of a model's frozen layers would be too large."""
    config, where = new.options.model, f"{new.where}: model"
    options = options_of(config, where)
    if options is None:
        return
    zeros, sizes = Zeros(training.end_frames, shortest_input(model)), {}
    each = model.encoder.size * np.dtype(options.cache_dtype).itemsize
    for split, folder in new.data.items():
        places = DataDir.read(folder, "feats.scp").feats_scp
        frames = frames_of(FeatureReader(places), list(places), zeros)
        sizes[split] = int(model.encoder.positions(frames).sum()) * each
    check_size(config, where, sizes)
