"""One training over the data of all clients, with an extractor for each and one classifier.

What DecoupleFL would be if nothing had to stay at a client: Zhu et al. 2022, table 4, "- decouple".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedtools.client.fit import Fitted
from fedtools.client.place import Place
from fedtools.client.utterances import Batch
from fedtools.models.extractor import Cut


class Joint(nn.Module):
    """Models that have all but their extractors in common.

    Args:
        models: one for each client; the first one's classifier becomes everybody's.
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

    def posteriors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """CTC log posteriors (B, T, tokens), and numbers of frames (B,); `clients` says whose."""
        parts = []
        owners = batch["clients"]
        for client in owners.unique().tolist():
            rows = (owners == client).nonzero()[:, 0]
            lengths = batch["speech_lengths"][rows]
            speech = batch["speech"][rows, : int(lengths.max())]
            part = {"speech": speech, "speech_lengths": lengths}
            parts.append((rows, *self._cut.extract(self.models[client], part)))
        longest = max(features.shape[1] for _, features, _ in parts)
        first = parts[0][1]
        features = first.new_zeros(len(owners), longest, first.shape[2])
        frames = torch.zeros_like(batch["speech_lengths"])
        for rows, values, lengths in parts:
            features[rows, : values.shape[1]] = values
            frames[rows] = lengths.to(frames)
        return self._cut.classify(self.models[0], features, frames), frames


class JointPlace(Place):
    """A server that trains a `Joint`.

    Args:
        joint: the models with what the round begins with; `model` is its first one.
        keep: told, after a training that did not diverge, each client's number and its model.
        options: those of `Place`.
    """

    def __init__(self, joint: Joint, keep: Callable[[int, nn.Module], None], **options: Any):
        super().__init__(joint.models[0], **options)
        self._joint, self._keep = joint, keep

    def fit(self, *objective: Any, **options: Any) -> list[Fitted]:
        """As of `Place`; what is trained are all models."""
        fitted = super().fit(*objective, network=self._joint, **options)
        if not fitted[0].reason:
            for client, model in enumerate(self._joint.models):
                self._keep(client, model)
        return fitted
