"""One training over the data of all clients, with an extractor for each and one classifier.

This is DecoupleFL if data did not have to stay at clients: Zhu et al. 2022, table 4, "- decouple".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedtools.models.acoustic.extractor import Cut
from fedtools.models.criteria import Criterion
from fedtools.tasks.asr.data import Batch


class Joint(nn.Module):
    """Models that share all parameters but those of their extractors.

    Args:
        models: one for each client; the first one's classifier becomes the shared one.
        shared: the names of parameters and buffers of the classifier.
        cut: where the extractors end.
    """

    def __init__(self, models: Sequence[nn.Module], shared: Iterable[str], cut: Cut):
        super().__init__()
        self.models = nn.ModuleList(models)
        self._cut = cut
        for name in shared:
            path, _, last = name.rpartition(".")
            own = getattr(models[0].get_submodule(path), last)
            for model in models[1:]:
                setattr(model.get_submodule(path), last, own)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return what `asr.outputs` does; `clients` selects the extractors."""
        parts = []
        owners = batch["clients"]
        for client in torch.unique(owners).tolist():
            rows = (owners == client).nonzero()[:, 0]
            lengths = batch["speech_lengths"][rows]
            # Kept outputs of frozen layers take the place of speech.
            kind = "hidden" if "hidden" in batch else "speech"
            speech = batch[kind][rows, : int(lengths.max())]
            part = {kind: speech, "speech_lengths": lengths}
            parts.append((rows, *self._cut.extract(self.models[client], part)))
        longest = max(features.shape[1] for _, features, _ in parts)
        first = parts[0][1]
        features = first.new_zeros(len(owners), longest, first.shape[2])
        frames = torch.zeros_like(batch["speech_lengths"])
        for rows, values, lengths in parts:
            features[rows, : values.shape[1]] = values
            frames[rows] = lengths.to(frames)
        return self._cut.classify(self.models[0], features, frames), frames

    @property
    def criterion(self) -> Criterion:
        """Return the shared criterion."""
        first: Any = self.models[0]
        found: Criterion = first.criterion
        return found
