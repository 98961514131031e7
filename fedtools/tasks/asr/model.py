"""The acoustic models of a federation: how they are built, and what they minimise."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedtools.client.options import UtteranceTraining
from fedtools.client.unit import Models
from fedtools.core.errors import UserError
from fedtools.decode.greedy import greedy
from fedtools.exchange.experiment import Experiment
from fedtools.exchange.states import spec_of
from fedtools.lm.tokens import Tokenizer
from fedtools.lm.whisper_tokens import WhisperTokens
from fedtools.methods.base import SHARED, Method
from fedtools.models.acoustic.asr import (
    as_posteriors,
    build_model,
    classify,
    input_size_of,
    losses,
    outputs,
    represent,
)
from fedtools.models.acoustic.extractor import Cut
from fedtools.models.acoustic.masks import scaled
from fedtools.models.adapt.adaptation import BASE, has_base
from fedtools.models.adapt.copies import copy_of
from fedtools.models.criteria import LatticeFree
from fedtools.models.lfmmi.lattice import FILE, Lattice, load_denominator
from fedtools.models.pooling import pooled
from fedtools.models.pretrained.options import is_pretrained, is_seq2seq
from fedtools.models.training import load_model
from fedtools.tasks.asr.data import Batch, UtteranceSource
from fedtools.tasks.asr.joint import Joint
from fedtools.tasks.asr.labels import ContinuousLabels, Posteriors, Transcripts
from fedtools.tasks.asr.search import fixed_search, generate, greedy_search, is_lost
from fedtools.tasks.begin import personal_parameters


class AsrModels(Models):
    """Models of one experiment; see `fedtools.client.unit.Models`.

    Args:
        experiment: the opened experiment.
        method: of the experiment.
        training: the options.
        tokenizer: has the tokens that the models output.
        device: of the models.
    """

    training: UtteranceTraining
    stacked = False

    def __init__(
        self,
        experiment: Experiment,
        method: Method,
        training: UtteranceTraining,
        tokenizer: Tokenizer | WhisperTokens,
        device: torch.device,
    ):
        self.training, self.device = training, device
        self._path, self._method, self._tokenizer = experiment.path, method, tokenizer
        self._config: Mapping[str, Any] = experiment.options.model
        self._where = f"{experiment.path / 'config.yaml'}: model"
        if isinstance(tokenizer, WhisperTokens):
            where = f"{experiment.path / 'config.yaml'}: training"
            self._search = greedy_search(fixed_search(experiment.options.training, where))
        self._built: dict[str, nn.Module] = {}
        self._joint: dict[str, Joint] = {}

    def build(self, clients: int = 1, use: str = "") -> nn.Module:
        """Return a model, built once for each use."""
        if use not in self._built:
            self._built[use] = self._new()
        return self._built[use]

    def joint(self, clients: int, use: str = "") -> Joint:
        """Return the models of all clients, which share the federation's shared tensors."""
        if use not in self._joint:
            parameters = {name for name, _ in self.build().named_parameters()}
            kinds = self._method.kinds(parameters, spec_of(self.build().state_dict()))
            shared = [name for name, kind in kinds.items() if kind == SHARED]
            self._joint[use] = Joint([self._new() for _ in range(clients)], shared, self.cut())
        return self._joint[use]

    def _new(self) -> nn.Module:
        if self._built and (is_pretrained(self._config) or has_base(self._config)):
            return copy_of(next(iter(self._built.values())))
        base, units = self._path / BASE if has_base(self._config) else None, self._tokenizer.tokens
        model = build_model(self._config, units, self._where, self._lattice, base)
        return model.to(self.device)

    @cached_property
    def _lattice(self) -> Lattice | None:
        there = (self._path / FILE).exists()
        return read_lattice(self._path if there else None, len(self._tokenizer.tokens))

    def tensors(self, model: nn.Module, client: int = 0) -> dict[str, Tensor]:
        """Return the tensors of a model, or of a client's model in a `Joint`."""
        own = model.models[client] if isinstance(model, Joint) else model
        return own.state_dict()

    def cut(self) -> Cut:
        """Return where the personal extractor ends."""
        return self._cut

    @cached_property
    def _cut(self) -> Cut:
        extractor = personal_parameters(self._method, self.build())
        where = self._path / "config.yaml"
        return cut_above(self.build(), extractor, self._config, where)

    def objective(self, model: nn.Module, source: UtteranceSource) -> Transcripts:
        """Return the objective on the data's labels if the options ask for them, or a teacher's."""
        training, posteriors = self.training, self._posteriors(model, source)
        # Labels of features that clients sent are already those that `server_labels` asks for.
        if source.data.labelled and (source.received or training.labels == "transcripts"):
            return Transcripts(posteriors)
        if isinstance(model, Joint):
            teacher: nn.Module = self.joint(len(model.models), "teacher")
        else:
            teacher = self.build(use="teacher")
        load_model(teacher.state_dict(), model.state_dict())
        tokens = self._tokenizer
        drops = partial(is_lost, tokens) if isinstance(tokens, WhisperTokens) else None
        labels = partial(self.transcribe, teacher), drops
        decay, keep = training.decay, training.keep_teacher
        if training.decay_per == "epoch":
            # Batches in order of length: shuffled, an epoch may have a batch more or less.
            decay **= 1 / -(-len(source.data.batches()) // training.accum_grad)
        return ContinuousLabels(model, teacher, decay, keep, posteriors, *labels)

    def _posteriors(self, model: nn.Module, source: UtteranceSource) -> Posteriors:
        if isinstance(model, Joint):
            return lambda model, batch: model(batch)
        return partial(posteriors_of_features, self.cut()) if source.received else outputs

    def transcribe(
        self, model: nn.Module, found: tuple[Tensor, Tensor], batch: Batch
    ) -> list[list[int]]:
        """Return the best tokens of each utterance, given what `outputs` returned."""
        values, lengths = found
        if isinstance(self._tokenizer, WhisperTokens):
            # The clients' models share the decoder.
            model = model.models[0] if isinstance(model, Joint) else model
            lists = generate(model, self._tokenizer, found, batch, self._search)
            return [best[0][0] for best in lists]
        log_probs = as_posteriors(model, values, lengths)
        return greedy(log_probs.cpu().numpy(), lengths.cpu().numpy())

    def represent(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the encoder's output for a batch, and numbers of frames."""
        return represent(model, batch)

    def classify(self, model: nn.Module, features: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the criterion's input, and numbers of frames."""
        return classify(model, features[0]), features[1]

    def loss_of(self, found: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        """Return the mean loss of a batch's utterances, nats, (1,)."""
        return losses(self.build(), *found, batch).mean()[None]

    def vectors(self, features: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """Return mean and deviation of each utterance's frames, (1, B, 2 D), and equal weights."""
        vectors = pooled(*features)[None]
        return vectors, vectors.new_full(vectors.shape[:2], 1 / vectors.shape[1])


def open_tokens(folder: Path, model: Mapping[str, Any]) -> Tokenizer | WhisperTokens:
    """Read the tokens in a folder, of the kind that a model outputs."""
    if is_seq2seq(model):
        return WhisperTokens.load(folder, model.get("language"))
    return Tokenizer.load(folder)


def posteriors_of_features(cut: Cut, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the classifier's output for features, masked in training as much as audio is."""
    features, lengths = batch["speech"], batch["speech_lengths"]
    if model.training and isinstance(model.specaug, nn.Module):
        masks = scaled(model.specaug, cut.step, cut.share * cut.step)
        features, lengths = masks(features.clone(), lengths)
    return cut.classify(model, features, lengths), lengths


def read_lattice(folder: Path | None, tokens: int) -> Lattice | None:
    """Read the denominator of LF-MMI in a folder; return None without a folder."""
    return Lattice(load_denominator(folder / FILE, tokens), tokens) if folder else None


def cut_above(
    model: nn.Module, extractor: Collection[str], config: Mapping[str, Any], where: str | Path
) -> Cut:
    """Return the cut above a method's personal parameters."""
    if isinstance(model.criterion, LatticeFree):
        raise UserError("a model of criterion lfmmi cannot be cut in two", path=where)
    try:
        return Cut.above(model, extractor, input_size_of(config))
    except ValueError as error:
        raise UserError(f"method_conf.personal: {error}", path=where) from None
