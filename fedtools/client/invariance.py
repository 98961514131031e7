"""Training that takes the speaker out of features: Zhu et al. 2022, equation 3.

A classifier of the client's own speakers learns to tell them by the features; its gradient, turned
round, makes the extractor unlearn what it finds (Ganin and Lempitsky, ICML 2015). The classifier
stays at the client. It sees an utterance as mean and standard deviation over its frames, each value
of which is normalised over the batch: without, it stays at chance, and nothing is unlearned. What
it tells in a round is printed: if that is chance from the beginning, it is no adversary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtools.client.client import Client
from fedtools.client.objective import Objective
from fedtools.client.unit import Trained
from fedtools.files.seeds import seed64
from fedtools.models.asr import losses
from fedtools.models.extractor import Cut
from fedtools.models.pooling import pooled

_NAME = "speakers"
Weight = Callable[[float], float]


def speaker_invariant(
    client: Client, is_extractor: Callable[[str], bool], weight: Weight, units: int
) -> list[Trained]:
    """Train a client's extractor on its labels and against a classifier of its speakers.

    Args:
        is_extractor: which parameters of the model are trained.
        weight: lambda of equation 3, after so large a share of this round's steps.
        units: width of the hidden layer of the classifier.
    """
    unit, cut, speakers = client.unit, client.models.cut(), int(client.facts["speakers"][0])
    if speakers < 2:
        who = f"round {unit.number}, {unit.names[0]}"
        print(f"{who}: one speaker, so nothing to be invariant to", file=sys.stderr)
        return client.train(only=is_extractor, fix_statistics=True, keep_optimizer=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed64(unit.seed, _NAME, unit.names[0]))
        classifier = SpeakerClassifier(cut.size, units, speakers)
    device = next(client.model.parameters()).device
    both = nn.ModuleDict({"model": client.model, _NAME: classifier.to(device)})
    client.recall(_NAME, classifier)
    classifier.heard.zero_()

    def loss(_: nn.Module, batch: Any) -> Tensor:
        return loss_of(objective, cut, weight(objective.done), both, batch)

    # The labels stay the task's, and so does their teacher.
    objective = client.objective.replaced(loss)
    trained = client.train(
        objective,
        model=both,
        only=lambda name: name.startswith(f"{_NAME}.") or is_extractor(name.removeprefix("model.")),
        fix_statistics=True,
        keep_optimizer=True,
    )
    if not trained[0].reason:
        client.keep(_NAME, classifier)
    print(f"round {unit.number}, {unit.names[0]}: {classifier.told}", file=sys.stderr)
    return trained


def loss_of(
    objective: Objective, cut: Cut, weight: float, both: nn.ModuleDict, batch: Any
) -> Tensor:
    """The model's loss and the speaker classifier's, its gradient turned round, nats, (1,).

    CTC's loss of an utterance is a sum over its frames, and so is the speaker's whose gradient is
    turned round: that of the utterance, as often as it has frames of features. The classifier
    itself learns from each utterance once.

    Args:
        objective: says what utterances are labelled with.
        cut: where the extractor ends.
        weight: lambda.
        both: the model, and the classifier.
    """
    model, batch = both["model"], objective.labelled(batch)
    features, lengths = cut.extract(model, batch)
    found = cut.classify(model, features, lengths)
    own = losses(model, found, lengths, batch).mean()
    weights = weight * lengths.to(features.device, features.dtype)[:, None, None]
    speakers: Any = both[_NAME]
    logits = speakers(turned_round(features, weights), lengths)
    speakers.count(logits, batch["speakers"])
    return (own + F.cross_entropy(logits, batch["speakers"]))[None]


class SpeakerClassifier(nn.Module):
    """Utterances' features to logits of speakers.

    Args:
        size: values of a frame.
        units: width of the hidden layer.
        speakers: how many there are.

    Attributes:
        heard: (2, speakers), of a round's utterances of each speaker: told rightly, and all. Kept
            with the parameters, so that a round that goes on after a kill counts them once.
    """

    mean: Tensor
    variance: Tensor
    heard: Tensor

    def __init__(self, size: int, units: int, speakers: int):
        super().__init__()
        # BatchNorm without parameters; no layer of torch's, whose statistics stage 1 would fix.
        self.register_buffer("mean", torch.zeros(2 * size))
        self.register_buffer("variance", torch.ones(2 * size))
        self.register_buffer("heard", torch.zeros(2, speakers, dtype=torch.long))
        self.hidden = nn.Linear(2 * size, units)
        self.output = nn.Linear(units, speakers)

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        """(B, T, D) and (B,) to (B, speakers)."""
        vectors = pooled(features, lengths).to(self.mean.dtype)
        # One utterance has no deviation: it is normalised by those before it.
        several = self.training and len(vectors) > 1
        vectors = F.batch_norm(vectors, self.mean, self.variance, training=several)
        logits: Tensor = self.output(self.hidden(vectors).relu())
        return logits

    def count(self, logits: Tensor, speakers: Tensor) -> None:
        """Count the utterances whose speakers are told rightly."""
        own = F.one_hot(speakers, self.heard.shape[1])
        right = (logits.detach().argmax(1) == speakers)[:, None]
        self.heard += torch.stack([(own * right).sum(0), own.sum(0)])

    @property
    def told(self) -> str:
        """What it told in the round, in words."""
        right, heard = self.heard.tolist()
        share, most = (100 * count / max(1, sum(heard)) for count in (sum(right), max(heard)))
        return f"its speaker classifier tells {share:.0f} % of utterances, chance {most:.0f} %"


def turned_round(features: Tensor, weights: Tensor) -> Tensor:
    """The same values; their gradient is turned round, and scaled by `weights`."""
    turned = features.view_as(features)
    # torch gives this no types.
    turned.register_hook(lambda gradient: -weights * gradient)  # type: ignore[no-untyped-call]
    return turned
