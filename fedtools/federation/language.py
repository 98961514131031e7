"""Federated fine-tuning of the neural language model: what FMP is there to replace.

Each client trains the model on the first pass' best hypotheses of a round's utterances, and
rescores the next ones with what the server makes of all models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from fedtools.client.fit import Objective
from fedtools.client.options import Training, check_optimizer
from fedtools.client.place import Place
from fedtools.federation.base import Beginning, State, as_configured
from fedtools.federation.model import ModelFederation, begin_with
from fedtools.federation.rescore import check_planned, check_split, measure_text
from fedtools.files.config import Positive, from_mapping, read_yaml
from fedtools.files.errors import UserError
from fedtools.files.keyed import generator
from fedtools.lm.nnlm import Nnlm
from fedtools.lm.rescored import NBEST
from fedtools.lm.rescoring import score
from fedtools.lm.reweighting import Lists, Weights, warn_of_no_lm
from fedtools.lm.stream import Stream, open_stream, spoken
from fedtools.models.nnlm import NnlmOptions, build_nnlm, losses, pad

# Utterances whose lists are scored together.
_AT_ONCE = 16


@dataclass(frozen=True)
class LmTraining(Training):
    """The section `training`.

    Attributes:
        batch_sentences: of a step.
    """

    batch_sentences: Positive = 16


@dataclass(frozen=True)
class Sentences:
    """A batch: inputs and targets (B, T), as `fedtools.models.nnlm.pad` makes them."""

    inputs: Tensor
    targets: Tensor
    amount: int
    frames: int


class SentenceBatches:
    """The batches of some epochs over sentences, shuffled anew in each.

    Args:
        sentences: ids of each, with the end.
        words: V, of the vocabulary.
        epochs: how often each comes.
        size: sentences of a batch.
        key: (seed, ...) of the order.
    """

    def __init__(
        self,
        sentences: Sequence[list[int]],
        words: int,
        epochs: int,
        size: int,
        key: tuple[int | str, ...],
        device: torch.device,
    ):
        self._sentences, self._words, self._device = sentences, words, device
        self._plan = []
        for epoch in range(epochs):
            order = generator(key[0], "batches", *key[1:], epoch).permutation(len(sentences))
            self._plan += [order[at : at + size] for at in range(0, len(order), size)]
        self.steps = [len(self._plan)]

    def stream(self, first: int) -> Iterator[list[Sentences]]:
        """The batches from number `first`."""
        for chosen in self._plan[first:]:
            some = [self._sentences[index] for index in chosen]
            inputs, targets = (part.to(self._device) for part in pad(some, self._words))
            yield [Sentences(inputs, targets, sum(map(len, some)), len(some))]


def mean_loss(model: nn.Module, batch: Sentences) -> Tensor:
    """Cross-entropy in nats per word, (1,)."""
    return losses(model, batch.inputs, batch.targets).mean()[None]


class LmFederation(ModelFederation):
    """Clients fine-tune a language model on what they have said."""

    def __init__(self, path, device: str = "cpu"):
        super().__init__(path, device)
        options = self.experiment.options
        self.training = from_mapping(LmTraining, options.training, f"{self.where}: training")
        self._weights = _read_weights(self.experiment.path)

    @staticmethod
    def begin(beginning: Beginning) -> tuple[State, State]:
        options, where = beginning.options, beginning.where
        training = from_mapping(LmTraining, options.training, f"{where}: training")
        if beginning.start is None:
            remedy = "give --start NNLM/model.safetensors"
            raise UserError("fine-tuning wants a model to begin with", path=where, remedy=remedy)
        network = from_mapping(NnlmOptions, options.model, f"{where}: model")
        rescored = open_stream(beginning.data["train"]).rescored
        weights = _read_weights(beginning.assets.get("weights"))
        warn_of_no_lm(rescored, weights, beginning.data["train"] / NBEST)
        model = build_nnlm(network, len(rescored.vocabulary))
        check_optimizer(training, f"{where}: training")
        return begin_with(beginning, model, model.state_dict())

    @cached_property
    def model(self) -> nn.Module:
        options = from_mapping(NnlmOptions, self.experiment.options.model, self.where)
        return build_nnlm(options, len(self._stream.rescored.vocabulary)).to(self.device)

    def tensors(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    def units(self, clients: Sequence[str], number: int) -> list[list[str]]:
        return [[client] for client in clients]

    def place(self, clients: Sequence[str], number: int) -> Place:
        (client,) = clients
        check_planned(self.experiment, number)
        self.load_shared(number)
        self.load(self.personal_state(client, number))
        seed, training = self.experiment.seed, self.training
        said = self._said(client, number)

        def batches(epochs: int | None, steps: object, purpose: str) -> SentenceBatches:
            key = (seed, number, client, *([purpose] if purpose != "train" else []))
            return SentenceBatches(
                said,
                len(self._stream.rescored.vocabulary),
                epochs or self.method.local_epochs,
                training.batch_sentences,
                key,
                self.device,
            )

        return Place(
            self.model,
            names=[client],
            number=number,
            stacked=False,
            training=training,
            objective=Objective(mean_loss),
            batches=batches,
            sizes=[len(said)],
            own=[self.experiment.own(client, number)],
            seed=seed,
        )

    def load_result(self, client: str | None, number: int) -> None:
        super().load_result(client, number)
        self._number = number

    def measure(self, split: str, client: str) -> dict[str, object]:
        """The group after the round that is loaded, rescored with that round's model."""
        check_split(split, self.experiment)
        group = self._group(client, self._number + 1)
        return measure_text(self._rescored(group), self._text)

    def best_text(self) -> dict[str, str]:
        """What every client makes of all its utterances, the last group included."""
        found = {}
        for number in range(self.experiment.last_round() + 1):
            for client in self.experiment.clients:
                self.load_result(client, number)
                found |= self._rescored(self._group(client, number + 1))
        return found

    def _group(self, client: str, number: int) -> slice:
        return self._stream.groups(client, self.experiment.options.rounds)[number - 1]

    def _said(self, client: str, number: int) -> list[list[int]]:
        """The first pass' best hypotheses of a round's utterances."""
        group, rescored = self._group(client, number), self._stream.rescored
        first = rescored.first_hypothesis[group]
        starts, ends = rescored.first_word[first], rescored.first_word[first + 1]
        return [rescored.word_ids[at:to].tolist() for at, to in zip(starts, ends, strict=True)]

    @as_configured
    def _rescored(self, group: slice) -> dict[str, str]:
        """Utterance -> words, by the model as it is loaded."""
        rescored = self._stream.rescored
        nnlm = Nnlm(self.model.eval(), rescored.vocabulary, rescored.unigram)
        first, found = rescored.first_hypothesis, {}
        for begin in range(group.start, group.stop, _AT_ONCE):
            some = range(begin, min(begin + _AT_ONCE, group.stop))
            sentences = {
                rescored.utterances[index]: [
                    rescored.word_ids[at:to].tolist()
                    for at, to in zip(
                        rescored.first_word[first[index] : first[index + 1]],
                        rescored.first_word[first[index] + 1 : first[index + 1] + 1],
                        strict=True,
                    )
                ]
                for index in some
            }
            for index, (name, scores) in zip(some, score(nnlm, sentences), strict=True):
                best = self._lists.best(slice(index, index + 1), None, scores)[0]
                found[name] = rescored.hypotheses[best]
        return found

    @cached_property
    def _lists(self) -> Lists:
        return Lists(self._stream.rescored, self._weights, self._stream.covered())

    @cached_property
    def _stream(self) -> Stream:
        return open_stream(self.data_path("train"))

    @cached_property
    def _text(self) -> dict[str, str]:
        return spoken(self.data_path("train"), self._stream.rescored.utterances)


def _read_weights(folder: Path | None) -> Weights:
    """The weights in a folder; the defaults where it has none."""
    path = (folder or Path()) / "weights.yaml"
    there = folder is not None and path.exists()
    return from_mapping(Weights, read_yaml(path) if there else {}, path)
