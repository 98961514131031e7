"""Labels of features that clients have sent, made once by the server's own search.

    EXP/server/labels/<client>.<key>   Kaldi's text: sent utterances, and the words recognised

One utterance at a time goes through the classifier of the round in which it was sent, and a beam
search with the experiment's n-gram (with Whisper, its own decoder). The key is a hash of all that
the words depend on. The files may be removed while nothing runs: missing ones are made again, with
the same words. A reset leaves them.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fedtools.client.options import UtteranceTraining
from fedtools.core.atomic import remove
from fedtools.core.config import from_mapping, option_error, read_yaml
from fedtools.core.errors import UserError
from fedtools.core.progress import Count
from fedtools.data.datadir import read_table, write_table
from fedtools.data.nbest import Hypothesis, best_text
from fedtools.decode.beam import BeamOptions, CtcBeamDecoder
from fedtools.decode.lists import TunedWeights
from fedtools.decode.repetition import repeats
from fedtools.exchange.experiment import Experiment
from fedtools.exchange.private import make_private
from fedtools.exchange.sent_features import feature_paths
from fedtools.exchange.states import load_state
from fedtools.lm.tokens import Tokenizer
from fedtools.lm.whisper_tokens import WhisperTokens
from fedtools.methods.base import Method
from fedtools.models.acoustic.asr import as_posteriors
from fedtools.models.pretrained.options import Generation
from fedtools.models.training import load_model
from fedtools.tasks.asr import SERVER_WEIGHTS
from fedtools.tasks.asr.data import Batch, Utterances
from fedtools.tasks.asr.model import AsrModels, posteriors_of_features
from fedtools.tasks.asr.search import generate
from fedtools.tasks.base import NewExperiment

_FOLDER, _DIGITS = "labels", 16
# To be raised by changes that make other words.
_VERSION = 1
# (the classifier's output for an utterance, its batch) -> hypotheses, the best one first.
Hear = Callable[[tuple[Tensor, Tensor], Batch], list[Hypothesis]]


class ServerLabels:
    """The labels of an experiment's features.

    Args:
        experiment: the opened experiment.
        models: of the task.
        tokenizer: has the tokens that the models output.
    """

    def __init__(
        self, experiment: Experiment, models: AsrModels, tokenizer: Tokenizer | WhisperTokens
    ):
        self._experiment, self._models, self._tokenizer = experiment, models, tokenizer
        self._training, self._where = (
            models.training,
            f"{experiment.path / 'config.yaml'}: training",
        )

    def of(self, number: int, client: str, data: Utterances) -> dict[str, str]:
        """Return the labels of a client's features in a round, utterance -> text, no empty ones.

        Args:
            data: the features.
        """
        path = self._path(number, client, data)
        if not path.exists():
            make_private(path.parent.parent)
            make_private(path.parent)
            write_table(path, self._heard(number, client, data))
            for other in path.parent.glob(f"{client}.{'?' * _DIGITS}"):
                if other != path:
                    remove(other)
        found = read_table(path, values="optional")
        if found.keys() != set(data.names):
            remedy = "remove it, and run the same command again"
            problem = "not the labels of the features that were sent"
            raise UserError(problem, path=path, remedy=remedy)
        if empty := sum(not text for text in found.values()):
            effect = f"{empty} of {len(found)} labels are empty: left out"
            print(f"round {number}, {client}: {effect}", file=sys.stderr)
        return {name: text for name, text in found.items() if text}

    def _path(self, number: int, client: str, data: Utterances) -> Path:
        folder, begun = self._experiment.round(number), sorted(self._experiment.sums.items())
        sent = [folder.sums().get(path.name) for path in feature_paths(folder.path, client)]
        inputs = [_VERSION, begun, folder.recorded_start_sum(), sent, sorted(data.names)]
        key = hashlib.sha256(repr(inputs).encode()).hexdigest()[:_DIGITS]
        return self._experiment.path / "server" / _FOLDER / f"{client}.{key}"

    def _heard(self, number: int, client: str, data: Utterances) -> dict[str, str]:
        model, cut, hear = self._models.build(use="labels"), self._models.cut(), self._search()
        state = load_state(self._experiment.init) | self._experiment.round(number).shared_state()
        load_model(model.state_dict(), state)
        lists, singles = dict[str, list[Hypothesis]](), [[index] for index in range(len(data))]
        bar = Count(f"label features of {client}", len(data), "utterances")
        with bar, torch.no_grad(), self._training.settings(threads=1):
            stream = data.stream(singles, next(model.parameters()).device)
            for name, batch in zip(data.names, stream, strict=True):
                lists[name] = hear(posteriors_of_features(cut, model.eval(), batch), batch)
                bar.advance()
        return dict(sorted(best_text(lists, **self._weights()).items()))

    def _search(self) -> Hear:
        model = self._models.build(use="labels")
        if isinstance(self._tokenizer, WhisperTokens):
            tokens, how = self._tokenizer, _generation(self._training, self._where)

            def write(found: tuple[Tensor, Tensor], batch: Batch) -> list[Hypothesis]:
                ((ids, score), *_), *_ = generate(model, tokens, found, batch, how)
                text = tokens.decode(ids)
                # A decoder that has lost its way repeats itself: no label.
                return [Hypothesis(1, score, 0.0, "" if repeats(text) else text)]

            return write
        options = _beam(self._training, self._where)
        decoder = CtcBeamDecoder.load(self._tokenizer, self._experiment.path, options)

        def search(found: tuple[Tensor, Tensor], batch: Batch) -> list[Hypothesis]:
            return decoder.decode(as_posteriors(model, *found)[0].cpu().numpy())

        return search

    def _weights(self) -> dict[str, float]:
        """Return the weights for re-ranking lists; {} if they keep their own order."""
        path = self._experiment.path / SERVER_WEIGHTS
        if SERVER_WEIGHTS not in self._experiment.sums:
            return {}
        return dict(from_mapping(TunedWeights, read_yaml(path), path).values)


def check_server_labels(
    new: NewExperiment[Method], training: UtteranceTraining, tokenizer: Tokenizer | WhisperTokens
) -> None:
    """Raise a `UserError` unless an experiment can have the labels that its options ask for.

    An n-gram that does not fit the tokens is reported now, not after stage 1.
    """
    kind, where = training.server_labels, f"{new.where}: training"
    phases = map(new.method.phase, range(1, (new.method.rounds or new.options.rounds) + 1))
    if kind != "continuous" and not any(phase.on_features for phase in phases):
        problem = "needs a method whose server trains on features that clients send"
        raise option_error(f"server_labels: {kind} {problem}", where, "server_labels", kind)
    searched, decoder = kind == "beam", isinstance(tokenizer, WhisperTokens)
    for name in {"lm", "weights"} & new.assets.keys():
        if not searched or decoder:
            why = "with a model that has a decoder" if searched else f"with server_labels: {kind}"
            remedy = f"leave out --asset {name}"
            raise UserError(f"asset {name} has no use {why}", path=new.where, remedy=remedy)
    if not searched:
        return
    if decoder:
        _generation(training, where)
    elif "lm" not in new.assets:
        remedy = "give --asset lm=FOLDER, made by fedtools train-lm"
        raise UserError("server_labels: beam needs an n-gram", path=new.where, remedy=remedy)
    else:
        assert isinstance(tokenizer, Tokenizer)
        CtcBeamDecoder.load(tokenizer, new.assets["lm"], _beam(training, where))


def _beam(training: UtteranceTraining, where: str | Path) -> BeamOptions:
    return from_mapping(BeamOptions, training.search, f"{where}.search")


def _generation(training: UtteranceTraining, where: str | Path) -> Generation:
    return from_mapping(Generation, training.search, f"{where}.search")
