"""Speaker-invariant training of the extractor: Zhu et al. 2022, equation 3.

A classifier learns to identify the client's own speakers from the features, and its reversed
gradient removes speaker information from the extractor (Ganin and Lempitsky, ICML 2015). The
classifier stays at the client. Its input is the mean and standard deviation of an utterance's
frames, normalised over the batch; without this normalisation it stays at chance and removes
nothing. Its accuracy in each round is printed: an adversary that is at chance from the start has no
effect.
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
from fedtools.core.seeds import seed64
from fedtools.models.acoustic.asr import losses
from fedtools.models.acoustic.extractor import Cut
from fedtools.models.pooling import pooled

_NAME = "speakers"
Weight = Callable[[float], float]


def speaker_invariant(
    client: Client, is_extractor: Callable[[str], bool], weight: Weight, units: int
) -> list[Trained]:
    """Train a client's extractor on its labels and against a classifier of its speakers.

    Args:
        client: the client.
        is_extractor: selects the model's parameters to train by name.
        weight: function from the share of the round's steps taken to lambda of equation 3.
        units: width of the classifier's hidden layer.
    """
    unit, cut, speakers = client.unit, client.models.cut(), int(client.facts["speakers"][0])
    if speakers < 2:
        who = f"round {unit.number}, {unit.names[0]}"
        print(f"{who}: only one speaker, trained without speaker invariance", file=sys.stderr)
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

    # Only the loss is replaced; labels and teacher remain those of the task.
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
    print(f"round {unit.number}, {unit.names[0]}: {classifier.summary}", file=sys.stderr)
    return trained


def loss_of(
    objective: Objective, cut: Cut, weight: float, both: nn.ModuleDict, batch: Any
) -> Tensor:
    """Compute the sum of the model's loss and the speaker classifier's, in nats, (1,).

    The CTC loss of an utterance is a sum over its frames. To match, the speaker loss whose reversed
    gradient reaches the extractor counts an utterance once per feature frame; the classifier itself
    learns from each utterance once.

    Args:
        objective: labels the utterances.
        cut: where the extractor ends.
        weight: lambda.
        both: the model and the classifier.
        batch: the utterances.
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
    """Classifier from the features of an utterance to speaker logits.

    Args:
        size: values per frame.
        units: width of the hidden layer.
        speakers: number of speakers.

    Attributes:
        heard: (2, speakers), utterances of each speaker in this round: correctly classified, and
            all. A buffer, so that a round resumed from a checkpoint counts each of them once.
    """

    mean: Tensor
    variance: Tensor
    heard: Tensor

    def __init__(self, size: int, units: int, speakers: int):
        super().__init__()
        # BatchNorm without parameters. Not torch's layer, whose statistics stage 1 would freeze.
        self.register_buffer("mean", torch.zeros(2 * size))
        self.register_buffer("variance", torch.ones(2 * size))
        self.register_buffer("heard", torch.zeros(2, speakers, dtype=torch.long))
        self.hidden = nn.Linear(2 * size, units)
        self.output = nn.Linear(units, speakers)

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Compute logits (B, speakers) from features (B, T, D) and lengths (B,)."""
        vectors = pooled(features, lengths).to(self.mean.dtype)
        # A single utterance has no variance, so it is normalised by the running statistics.
        several = self.training and len(vectors) > 1
        vectors = F.batch_norm(vectors, self.mean, self.variance, training=several)
        logits: Tensor = self.output(self.hidden(vectors).relu())
        return logits

    def count(self, logits: Tensor, speakers: Tensor) -> None:
        """Count all utterances and those whose speaker was identified."""
        own = F.one_hot(speakers, self.heard.shape[1])
        right = (logits.detach().argmax(1) == speakers)[:, None]
        self.heard += torch.stack([(own * right).sum(0), own.sum(0)])

    @property
    def summary(self) -> str:
        """Return a message with the classifier's accuracy in this round."""
        right, heard = self.heard.tolist()
        share, most = (100 * count / max(1, sum(heard)) for count in (sum(right), max(heard)))
        return f"speaker classifier accuracy {share:.0f} %, chance {most:.0f} %"


def turned_round(features: Tensor, weights: Tensor) -> Tensor:
    """Return the features, with a gradient that is reversed and scaled by `weights`."""
    turned = features.view_as(features)
    # torch does not annotate this method.
    turned.register_hook(lambda gradient: -weights * gradient)  # type: ignore[no-untyped-call]
    return turned
