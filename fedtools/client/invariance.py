"""Training that takes the speaker out of features: Zhu et al. 2022, equation 3.

A classifier of the client's own speakers learns to tell them by the features; its gradient, turned
round, makes the extractor unlearn what it finds (Ganin and Lempitsky, ICML 2015). The classifier
stays at the client. It sees an utterance as mean and standard deviation over its frames.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtools.client.fit import Fitted
from fedtools.client.objectives import Transcripts
from fedtools.client.place import Place
from fedtools.client.utterances import Batch
from fedtools.files.seeds import seed64
from fedtools.models.asr import ctc_losses
from fedtools.models.extractor import Cut
from fedtools.models.pooling import pooled

_NAME = "speakers"
Weight = Callable[[float], float]


def speaker_invariant(
    client: Place, is_extractor: Callable[[str], bool], weight: Weight, units: int
) -> list[Fitted]:
    """Train a client's extractor on its labels and against a classifier of its speakers.

    Args:
        is_extractor: which parameters of the model are trained.
        weight: lambda of equation 3, after so large a share of this round's steps.
        units: width of the hidden layer of the classifier.
    """
    speakers = int(client.facts["speakers"][0])
    if speakers < 2:
        said = (
            f"round {client.number}, {client.names[0]}: one speaker, so nothing to be invariant to"
        )
        print(said, file=sys.stderr)
        return client.fit(only=is_extractor, fix_statistics=True, keep_optimizer=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed64(client.seed, _NAME, client.names[0]))
        classifier = SpeakerClassifier(client.cut.size, units, speakers)
    both = nn.ModuleDict({"model": client.model, _NAME: classifier.to(client.device)})
    client.load_own(classifier, _NAME)
    # The labels stay the objective's, and so does their teacher.
    client.objective.loss = partial(loss_of, client.objective, client.cut, weight)
    fitted = client.fit(
        network=both,
        only=lambda name: name.startswith(f"{_NAME}.") or is_extractor(name.removeprefix("model.")),
        fix_statistics=True,
        keep_optimizer=True,
    )
    if not fitted[0].reason:
        client.save_own(classifier, _NAME)
    return fitted


def loss_of(
    asr: Transcripts, cut: Cut, weight: Weight, both: nn.ModuleDict, batch: Batch
) -> Tensor:
    """CTC and the speaker classifier's cross-entropy with its gradient turned round, nats, (1,).

    Args:
        asr: says what utterances are labelled with, and how much of the round is done.
        cut: where the extractor ends.
        weight: lambda, by that share.
        both: the model, and the classifier.
    """
    model, batch = both["model"], asr.labelled(batch)
    features, lengths = cut.extract(model, batch)
    log_probs = cut.classify(model, features, lengths)
    ctc = ctc_losses(log_probs, lengths, batch).mean()
    logits = both[_NAME](turned_round(features, weight(asr.done)), lengths)
    return (ctc + F.cross_entropy(logits, batch["speakers"]))[None]


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
