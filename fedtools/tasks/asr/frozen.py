"""Outputs of a pretrained model's frozen layers for utterances, computed once and kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fedtools.client.options import UtteranceTraining
from fedtools.files.ark import FeatureReader
from fedtools.files.datadir import DataDir
from fedtools.methods.base import Method
from fedtools.models.asr import shortest_input
from fedtools.tasks.asr.data import Utterances, Zeros, frames_of
from fedtools.tasks.asr.model import AsrModels
from fedtools.tasks.base import NewExperiment
from fedtools.tasks.facts import ALL
from fedtools.tasks.frozen import FrozenOutputs, check_size


def keep_hidden(
    frozen: FrozenOutputs, split: str, client: str, data: Utterances, models: AsrModels
) -> None:
    """Make utterances load as the frozen layers' outputs, which are computed if they are missing.

    Args:
        client: the client of the utterances, or `ALL`.
    """
    # A `PretrainedCtc` or `Whisper`.
    model: Any = models.build()
    encoder, depth = model.encoder, model.depth
    edges = [0, *np.cumsum(encoder.positions(data.frames)).tolist()]

    @torch.no_grad()
    def parts() -> Iterator[tuple[int, np.ndarray]]:
        # The batches depend on these utterances alone, so every process computes the same outputs.
        for indices in data.batches():
            batch = data.load(indices)
            speech = batch["speech"].to(models.device)
            hidden, lengths = encoder.lower(speech, batch["speech_lengths"], depth)
            for index, values, length in zip(indices, hidden, lengths.tolist(), strict=True):
                yield edges[index], values[:length].cpu().numpy()

    owner = None if client == ALL else client
    what = [data.names, data.frames.tolist()]
    place = frozen.make(split, owner, what, edges[-1], parts)
    data.hidden = lambda index: place.rows(edges[index], edges[index + 1])


def check_frozen(new: NewExperiment[Method], model: Any, training: UtteranceTraining) -> None:
    """Raise a `UserError` if the kept outputs of a model's frozen layers would be too large."""
    if getattr(model, "depth", None) is None:
        return
    zeros, rows = Zeros(training.end_frames, shortest_input(model)), {}
    for split, folder in new.data.items():
        places = DataDir.read(folder, "feats.scp").feats_scp
        frames = frames_of(FeatureReader(places), list(places), zeros)
        rows[split] = int(model.encoder.positions(frames).sum())
    check_size(new.options.model, f"{new.where}: model", model.encoder.size, rows)
