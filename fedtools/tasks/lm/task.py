"""Federated fine-tuning of the neural language model, which FMP is meant to replace.

Each client trains the model on the first pass' best hypotheses for a round's utterances, and
rescores the next ones with the server's aggregate of all models.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path

import torch

from fedtools.core.config import from_mapping, read_yaml
from fedtools.core.errors import UserError
from fedtools.exchange.experiment import Experiment
from fedtools.exchange.options import Options
from fedtools.lm.nbest_scoring import score
from fedtools.lm.nnlm import Nnlm
from fedtools.lm.nnlm_network import NnlmOptions, build_nnlm
from fedtools.lm.reweighting import Lists, ListWeights, warn_of_no_lm
from fedtools.lm.stream import Stream, open_stream, spoken
from fedtools.lm.word_scores import NBEST
from fedtools.methods.base import Method, Phase
from fedtools.models.training import check_optimizer, load_model
from fedtools.tasks.base import NewExperiment, State, Task, as_configured, not_supported
from fedtools.tasks.begin import begin_with
from fedtools.tasks.lm.model import LmModels, LmTraining, SentenceSource
from fedtools.tasks.rescore.spoken import check_planned, check_split, measure_text

# Utterances whose lists are scored together.
_AT_ONCE = 16


class LmTask(Task[Method]):
    """Clients fine-tune a language model on their own utterances."""

    needs_torch = True

    def __init__(self, experiment: Experiment, method: Method, device: str = "cpu"):
        super().__init__(experiment, method, device)
        options = experiment.options.training
        self.training = from_mapping(LmTraining, options, f"{self.where}: training")
        self.device, self._number = torch.device(device), 0
        self._weights = _read_weights(experiment.path)

    @staticmethod
    def begin(new: NewExperiment[Method]) -> tuple[State, State]:
        where = new.where
        training = from_mapping(LmTraining, new.options.training, f"{where}: training")
        if new.start is None:
            remedy = "give --start NNLM/model.safetensors"
            raise UserError("fine-tuning needs a model to begin with", path=where, remedy=remedy)
        options = from_mapping(NnlmOptions, new.options.model, f"{where}: model")
        rescored = open_stream(new.data["train"]).rescored
        weights = _read_weights(new.assets.get("weights"))
        warn_of_no_lm(rescored, weights, new.data["train"] / NBEST)
        model = build_nnlm(options, len(rescored.vocabulary))
        check_optimizer(training, f"{where}: training")
        return begin_with(new, model, model.state_dict())

    @staticmethod
    def kinds(options: Options) -> dict[str, type]:
        return {"training": LmTraining, "model": NnlmOptions}

    @cached_property
    def models(self) -> LmModels:
        options = from_mapping(NnlmOptions, self.experiment.options.model, self.where)
        words = len(self._stream.rescored.vocabulary)
        return LmModels(options, words, self.training, self.device)

    def settings(self) -> AbstractContextManager[None]:
        return self.training.settings()

    def source(self, clients: Sequence[str], number: int, phase: Phase) -> SentenceSource:
        if not clients:
            raise not_supported(self, "data at a server")
        (client,) = clients
        check_planned(self.experiment, number)
        key, sentences = (self.experiment.seed, number, client), self._sentences(client, number)
        words, size = len(self._stream.rescored.vocabulary), self.training.batch_sentences
        return SentenceSource(sentences, words, key, self.method.local_epochs, size, self.device)

    def load(self, state: State, number: int) -> None:
        load_model(self.models.build().state_dict(), state)
        self._number = number

    def measure(self, split: str, client: str) -> dict[str, object]:
        """Measure the group after the loaded round, rescored with that round's model."""
        check_split(split, self.experiment)
        return measure_text(self.rescored(client), self._text)

    def rescored(self, client: str) -> dict[str, str]:
        """Return utterance -> words, for a client's group after the loaded round."""
        return self._rescored(self._group(client, self._number + 1))

    def _group(self, client: str, number: int) -> slice:
        return self._stream.groups(client, self.experiment.options.rounds)[number - 1]

    def _sentences(self, client: str, number: int) -> list[list[int]]:
        """Return the first pass' best hypotheses for a round's utterances, as word ids."""
        group, rescored = self._group(client, number), self._stream.rescored
        first = rescored.first_hypothesis[group]
        starts, ends = rescored.first_word[first], rescored.first_word[first + 1]
        return [rescored.word_ids[at:to].tolist() for at, to in zip(starts, ends, strict=True)]

    @as_configured
    def _rescored(self, group: slice) -> dict[str, str]:
        """Return utterance -> words, rescored with the loaded model."""
        rescored = self._stream.rescored
        nnlm = Nnlm(self.models.build().eval(), rescored.vocabulary, rescored.unigram)
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


def _read_weights(folder: Path | None) -> ListWeights:
    """Read the weights in a folder; return the defaults if it has none."""
    path = (folder or Path()) / "weights.yaml"
    there = folder is not None and path.exists()
    return from_mapping(ListWeights, read_yaml(path) if there else {}, path)
