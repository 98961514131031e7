"""Training that takes the speaker out of features: Zhu et al. 2022, equation 3.

A classifier of the client's own speakers learns to tell them by the features; its gradient, turned
round, makes the extractor unlearn what it finds (Ganin and Lempitsky, ICML 2015). The classifier
stays at the client. It sees an utterance as mean and standard deviation over its frames.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtools.client.fit import Fitted, Objective, State
from fedtools.client.objectives import Transcripts
from fedtools.client.place import Place
from fedtools.client.utterances import Batch
from fedtools.files.keyed import seed64
from fedtools.models.asr import ctc_losses
from fedtools.models.cut import Cut
from fedtools.models.pooling import pooled

_NAME = "speakers"


def speaker_invariant(
    client: Place, is_extractor: Callable[[str], bool], weight: float, units: int
) -> list[Fitted]:
    """Train a client's extractor on its labels and against a classifier of its speakers.

    Args:
        is_extractor: which parameters of the model are trained.
        weight: lambda of equation 3 in this round.
        units: width of the hidden layer of the classifier.
    """
    speakers = int(client.facts["speakers"][0])
    if speakers < 2:
        said = (
            f"round {client.number}, {client.names[0]}: one speaker, so nothing to be invariant to"
        )
        print(said, file=sys.stderr)
        return client.fit(only=is_extractor, keep_optimizer=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed64(client.seed, _NAME, client.names[0]))
        classifier = SpeakerClassifier(client.cut.size, units, speakers)
    both = nn.ModuleDict({"model": client.model, _NAME: classifier.to(client.device)})
    client.load_own(classifier, _NAME)
    fitted = client.fit(
        SpeakerInvariant(client.objective, client.cut, weight),
        network=both,
        only=lambda name: name.startswith(f"{_NAME}.") or is_extractor(name.removeprefix("model.")),
        keep_optimizer=True,
    )
    if not fitted[0].reason:
        client.save_own(classifier, _NAME)
    return fitted


class SpeakerInvariant(Objective):
    """CTC, and the speaker classifier's cross-entropy with its gradient turned round.

    Args:
        asr: says what utterances are labelled with.
        cut: where the extractor ends.
        weight: lambda.
    """

    def __init__(self, asr: Transcripts, cut: Cut, weight: float):
        super().__init__(self._loss)
        self.keep = asr.keep
        self._asr, self._cut, self._weight = asr, cut, weight

    def _loss(self, both: nn.ModuleDict, batch: Batch) -> Tensor:
        """Nats, (1,); the gradient is that of equation 3 in the extractor."""
        model, batch = both["model"], self._asr.labelled(batch)
        features, lengths = self._cut.extract(model, batch)
        log_probs = self._cut.classify(model, features, lengths)
        ctc = ctc_losses(log_probs, lengths, batch).mean()
        logits = both[_NAME](turned_round(features, self._weight), lengths)
        return (ctc + F.cross_entropy(logits, batch["speakers"]))[None]

    def after_step(self, model: nn.Module, active: int) -> None:
        self._asr.after_step(model, active)

    @property
    def empty_labels(self) -> float:
        return self._asr.empty_labels

    def new_round(self) -> None:
        self._asr.new_round()

    def state(self) -> State:
        return self._asr.state()

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        self._asr.load(state)


class SpeakerClassifier(nn.Module):
    """Utterances' features to logits of speakers.

    Args:
        size: values of a frame.
        units: width of the hidden layer.
        speakers: how many there are.
    """

    def __init__(self, size: int, units: int, speakers: int):
        super().__init__()
        self.hidden = nn.Linear(2 * size, units)
        self.output = nn.Linear(units, speakers)

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        """(B, T, D) and (B,) to (B, speakers)."""
        return self.output(self.hidden(pooled(features, lengths)).relu())


class _TurnedRound(torch.autograd.Function):
    @staticmethod
    def forward(context, features: Tensor, weight: float) -> Tensor:
        context.weight = weight
        return features.view_as(features)

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor, None]:
        return -context.weight * gradient, None


def turned_round(features: Tensor, weight: float) -> Tensor:
    """The same values; their gradient is turned round, and scaled by `weight`."""
    return _TurnedRound.apply(features, weight)
