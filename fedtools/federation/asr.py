"""Speech recognition in a federation: CTC models over utterances, one client after the other."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedtools.client.joint import Joint, JointPlace
from fedtools.client.objectives import ContinuousLabels, Posteriors, Transcripts
from fedtools.client.options import UtteranceTraining, check_optimizer, load_model
from fedtools.client.place import Place
from fedtools.client.utterances import Batch, UtteranceBatches, Utterances
from fedtools.decode.greedy import greedy
from fedtools.federation.base import Beginning, Sent, State, as_configured
from fedtools.federation.gone import first_there, missing_archive
from fedtools.federation.model import ModelFederation, begin_with, kinds_of
from fedtools.federation.tasks import ALL
from fedtools.files.ark import FRAMES_PER_HOUR, FeatureReader
from fedtools.files.config import from_mapping
from fedtools.files.datadir import DataDir, read_table
from fedtools.files.errors import UserError, some
from fedtools.files.ledger import SERVER_ROW, read_round
from fedtools.files.messages import COUNTED, Payload, Report
from fedtools.files.perturb import SPEED_TABLE
from fedtools.files.private import PERSONAL_STATE, Private
from fedtools.files.received import Seal
from fedtools.files.sent_features import Features, open_sent
from fedtools.files.units import UTT2LANG, Unit, unit_of
from fedtools.lm.tokens import Tokenizer, warn_of_unspelled
from fedtools.methods.base import PERSONAL, Extracted, Phase
from fedtools.models.asr import (
    INPUT_SIZE,
    as_posteriors,
    build_model,
    losses,
    outputs,
    shortest_input,
)
from fedtools.models.cut import Cut
from fedtools.models.lfmmi.lattice import FILE, Lattice, load_denominator
from fedtools.score.align import count_errors
from fedtools.server.shares import taken_of


def read_data(
    path: str | Path, config: Mapping[str, Any], *tables: str, may_lack: bool = False
) -> DataDir:
    """Read the features and the named tables of a data directory, and its clients if it has any.

    Args:
        config: of the model.
        may_lack: some archives may be gone.

    Raises:
        UserError: if one is missing or malformed, or the features do not fit a model's `config`.
    """
    clients = ("utt2client",) if (Path(path) / "utt2client").exists() else ()
    data = DataDir.read(path, "utt2spk", "feats.scp", *tables, *clients)
    if (speeds := data.path / SPEED_TABLE).exists():
        data.others[SPEED_TABLE] = read_table(speeds)
    if (languages := data.path / UTT2LANG).exists():
        data.others[UTT2LANG] = read_table(languages)
    wanted = config.get("input_size", INPUT_SIZE)
    for name in first_there(data) if may_lack else data.utterances[:1]:
        data.check_features([name])
        size = FeatureReader(data.feats_scp).shape(name)[1]
        if size != wanted:
            problem = f"{size} values in a frame of {name!r}, the model's input_size is {wanted}"
            remedy = "extract other features, or begin with another model.input_size"
            raise UserError(problem, path=data.path / "feats.scp", remedy=remedy)
    return data


def check_words(path: Path) -> None:
    """Fail unless everybody who is measured by data has a word in them: an error rate needs one."""
    clients = ("utt2client",) if (path / "utt2client").exists() else ()
    data = DataDir.read(path, "text", *clients)
    said: dict[str, int] = {}
    for name, text in data.text.items():
        owner = data.utt2client.get(name, "")
        said[owner] = said.get(owner, 0) + len(text.split())
    if silent := sorted(owner for owner, words in said.items() if not words):
        who = f" of {some(silent)}" if clients else ""
        raise UserError(f"no word in the transcripts{who}, so no WER", path=path / "text")


def read_lattice(folder: Path | None, tokens: int) -> Lattice | None:
    """The denominator of LF-MMI in a folder; None without one."""
    return Lattice(load_denominator(folder / FILE, tokens), tokens) if folder else None


def cut_above(
    model: nn.Module, kinds: Mapping[str, str], config: Mapping[str, Any], where: str | Path
) -> Cut:
    """The cut above a method's personal parameters."""
    names = {name for name, _ in model.named_parameters() if kinds[name] == PERSONAL}
    if model.lattice:
        raise UserError("a model of criterion lfmmi is not cut in two", path=where)
    try:
        return Cut.above(model, names, config.get("input_size", INPUT_SIZE))
    except ValueError as error:
        raise UserError(f"method_conf.personal: {error}", path=where) from None


class AsrFederation(ModelFederation):
    """A federation whose clients transcribe speech."""

    def __init__(self, path: str | Path, device: str = "cpu"):
        super().__init__(path, device)
        options = self.experiment.options.training
        self.training = from_mapping(UtteranceTraining, options, f"{self.where}: training")
        self.tokenizer = Tokenizer.load(self.experiment.path)
        self._utterances: OrderedDict[tuple[str, str], Utterances] = OrderedDict()
        self._received: Utterances | None = None

    @staticmethod
    def begin(beginning: Beginning) -> tuple[State, State]:
        options, where = beginning.options, beginning.where
        training = from_mapping(UtteranceTraining, options.training, f"{where}: training")
        tokenizer = Tokenizer.load(beginning.assets["tokens"])
        units = tokenizer.tokens
        lattice = read_lattice(beginning.assets.get("denominator"), len(units))
        model = build_model(options.model, units, f"{where}: model", lattice)
        if lattice and training.labels != "transcripts":
            problem = f"labels: {training.labels} are of models of criterion ctc"
            raise UserError(problem, path=f"{where}: training")
        read_data(beginning.data["train"], options.model)
        for split, folder in beginning.data.items():
            if split != "train":
                check_words(folder)
            if split != "train" or training.labels == "transcripts":
                warn_of_unspelled(tokenizer, folder / "text", beginning.assets["tokens"])
        check_optimizer(training, f"{where}: training")
        states = begin_with(beginning, model, model.state_dict())
        phases = map(beginning.method.phase, range(1, options.rounds + 1))
        if any(phase.jointly or isinstance(phase.sends, Extracted) for phase in phases):
            kinds = kinds_of(beginning.method, model, model.state_dict(), where)
            cut_above(model, kinds, options.model, where)
        return states

    @cached_property
    def model(self) -> nn.Module:
        return self._build()

    @cached_property
    def _teacher(self) -> nn.Module:
        """A second model, which gives the labels where transcripts do not."""
        return self._build()

    @cached_property
    def _joint(self) -> Joint:
        """The models of all clients, which have what is shared in common."""
        return self._build_joint()

    @cached_property
    def _joint_teacher(self) -> Joint:
        return self._build_joint()

    def _build_joint(self) -> Joint:
        models = [self._build() for _ in self.experiment.clients]
        return Joint(models, self.shared_spec, self.cut)

    def _build(self) -> nn.Module:
        config, tokens = self.experiment.options.model, self.tokenizer.tokens
        return build_model(config, tokens, f"{self.where}: model", self._lattice).to(self.device)

    @cached_property
    def _lattice(self) -> Lattice | None:
        where = self.experiment.path
        return read_lattice(where if (where / FILE).exists() else None, len(self.tokenizer))

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()

    @cached_property
    def data(self) -> Mapping[str, DataDir]:
        """The data directories that were read, by split."""
        return {}

    def read(self, split: str) -> DataDir:
        """The data directory of a split; "train" without transcripts where no method reads them."""
        if split not in self.data:
            reads = split != "train" or self.training.labels == "transcripts"
            labels = ("text",) if reads else ()
            path, config = self.data_path(split), self.experiment.options.model
            may_lack = self.may_lack and split == "train"
            self.data[split] = read_data(path, config, *labels, may_lack=may_lack)
        return self.data[split]

    def utterances(self, split: str, client: str) -> Utterances:
        """The utterances of one client (or of `ALL`) in a split.

        Features stay in memory for later rounds, those used last, as far as `cache_mb` allows.
        """
        key = split, client
        if key not in self._utterances:
            data = self.read(split)
            names = data.utterances if client == ALL else data.client_utterances(client)
            found = self.gather(data, names)
            self._make_room(found)
            self._utterances[key] = found
        self._utterances.move_to_end(key)
        return self._utterances[key]

    def gather(
        self, data: DataDir, names: Sequence[str], labelled: bool | None = None
    ) -> Utterances:
        """Some utterances of a data directory, in batches for the model.

        Args:
            labelled: whether each needs a transcript; by default if the data have any.
        """
        bins, shortest = self.training.batch_bins, shortest_input(self.model)
        labelled = bool(data.text) if labelled is None else labelled
        ends = self.training.end_frames
        return Utterances(data, names, self.tokenizer, bins, shortest, labelled, end_frames=ends)

    def gather_sent(
        self, data: DataDir, names: Sequence[str], seals: Mapping[str, Seal]
    ) -> Utterances:
        """Some utterances' features, as many in a batch as of filterbanks."""
        bins = max(1, round(self.training.batch_bins * self.cut.share))
        return Utterances(data, names, self.tokenizer, bins, labelled=False, seals=seals)

    def _make_room(self, found: Utterances) -> None:
        limit = self.training.cache_mb << 20
        found.keep = found.bytes <= limit
        kept = sum(other.bytes for other in self._utterances.values() if other.keep)
        while found.keep and self._utterances and kept + found.bytes > limit:
            _, oldest = self._utterances.popitem(last=False)
            kept -= oldest.bytes if oldest.keep else 0

    def units(self, clients: Sequence[str], number: int) -> list[list[str]]:
        return [[client] for client in clients]

    def work(self, clients: Sequence[str], number: int, phase: Phase) -> Iterator[Sent]:
        (client,) = clients
        self.may_lack = phase.may_lack
        if phase.may_lack and (reason := self._what_is_gone(client, number)):
            yield Sent([Report(client, reason=reason)])
        else:
            yield from super().work(clients, number, phase)

    def _what_is_gone(self, client: str, number: int) -> str:
        """Why a client cannot take part in a round that goes on without it; "" if it can."""
        if archive := missing_archive(self.read("train"), client):
            return f"its {archive.name} is gone"
        lost = self.lost(client, number)
        return "the personal parameters that it trained are gone" if lost else ""

    def place(self, clients: Sequence[str], number: int) -> Place:
        (client,) = clients
        self.load_result(client, number - 1)
        own, data = self.experiment.own(client, number), self.utterances("train", client)
        return self._place(client, number, own, data)

    def at_server(self, number: int, phase: Phase) -> Place:
        self.load_shared(number)
        own = self.experiment.at_server(number)
        if phase.on_features:
            data = self._sent(phase.on_features)
            return self._place("server", number, own, data, self._posteriors_of_features)
        data = self.utterances("train", ALL)
        if phase.jointly:
            return self._jointly(number, own, data)
        return self._place("server", number, own, data)

    def _jointly(self, number: int, own: Private, data: Utterances) -> Place:
        """The server as a place that trains the models of all clients."""
        clients, joint = self.experiment.clients, self._joint
        for client in clients:
            if self.lost(client, number):
                raise self.gone(client)
        for client, model in zip(clients, joint.models, strict=True):
            state = {**self.start(number), **self.personal_state(client, number)}
            load_model(model.state_dict(), state)

        def keep(client: int, model: nn.Module) -> None:
            personal = self.of_kind(PERSONAL, model.state_dict())
            self.experiment.own(clients[client], number).save(PERSONAL_STATE, personal)

        make = partial(JointPlace, joint, keep)
        return self._place("server", number, own, data, Joint.posteriors, joint, make)

    @cached_property
    def cut(self) -> Cut:
        """Where the personal extractor ends."""
        return cut_above(self.model, self.kinds, self.experiment.options.model, self.where)

    def payload(self, phase: Phase) -> Payload:
        if not isinstance(phase.sends, Extracted):
            return super().payload(phase)
        frames = math.ceil(phase.sends.hours * FRAMES_PER_HOUR / self.cut.step)
        return Payload(features=Features(self.cut.size, phase.sends.bits, frames=frames))

    def _sent(self, number: int) -> Utterances:
        """The features that clients sent in a round, of those whose messages counted."""
        experiment = self.experiment
        if self._received is None:
            data, seals = DataDir(experiment.round_dir(number)), {}
            sent = {
                row.client: open_sent(experiment, number, row.client)
                for row in read_round(experiment, number)
                if row.client != SERVER_ROW and row.status in COUNTED
            }
            for client, names in taken_of(sent, self.method.max_weight_ratio).items():
                data.feats_scp |= {name: sent[client].scp[name] for name in names}
                data.utt2client |= dict.fromkeys(names, client)
                seals |= sent[client].seals
            if not data.feats_scp:
                raise UserError("no client has sent any features", path=data.path)
            found = self.gather_sent(data, list(data.feats_scp), seals)
            found.keep = found.bytes <= self.training.cache_mb << 20
            self._received = found
        return self._received

    def _posteriors_of_features(
        self, model: nn.Module, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The classifier's log posteriors of features, which are masked in training as audio is."""
        features, lengths = batch["speech"], batch["speech_lengths"]
        if model.training and model.specaug is not None:
            features, lengths = model.specaug(features.clone(), lengths)
        return self.cut.classify(model, features, lengths), lengths

    def _place(
        self,
        name: str,
        number: int,
        own: Private,
        data: Utterances,
        posteriors: Posteriors = outputs,
        student: nn.Module | None = None,
        make: Callable[..., Place] | None = None,
    ) -> Place:
        seed, training = self.experiment.seed, self.training

        def batches(
            epochs: int | None, steps: int | Sequence[int] | None, purpose: str
        ) -> UtteranceBatches:
            if steps is not None:
                raise NotImplementedError("utterances are trained on for epochs, not steps")
            key = (seed, number, name, *([purpose] if purpose != "train" else []))
            epochs = epochs or self.method.local_epochs
            return UtteranceBatches(data, epochs, training.accum_grad, self.device, key)

        def everything(order: Sequence[int]) -> Iterator[tuple[list[int], Batch]]:
            # One at a time: what is sent must not depend on the shape of a batch, by no bit.
            plan = [[index] for index in order]
            return zip(plan, data.stream(plan, self.device), strict=True)

        return (make or partial(Place, self.model))(
            names=[name],
            number=number,
            stacked=False,
            training=training,
            objective=self._objective(data, student or self.model, posteriors),
            batches=batches,
            everything=everything,
            cut=lambda: self.cut,
            facts={"speakers": np.array([data.speakers]), "clients": np.array(data.clients)},
            sizes=[len(data)],
            own=[own],
            seed=seed,
        )

    def _objective(
        self, data: Utterances, student: nn.Module, posteriors: Posteriors
    ) -> Transcripts:
        """CTC on transcripts where these are wanted and there, otherwise on a teacher's labels."""
        training = self.training
        if training.labels == "transcripts" and data.labelled:
            return Transcripts(posteriors)
        teacher = self._teacher if student is self.model else self._joint_teacher
        load_model(teacher.state_dict(), student.state_dict())
        decay, keep = training.decay, training.keep_teacher
        return ContinuousLabels(student, teacher, decay, keep, posteriors)

    def unit(self, split: str) -> Unit:
        data = self.read(split)
        return unit_of(data.others.get(UTT2LANG, {}), data.path / UTT2LANG)

    def measure(self, split: str, client: str) -> dict[str, object]:
        return self.measured(self.utterances(split, client))

    @as_configured
    @torch.no_grad()
    def measured(self, data: Utterances) -> dict[str, object]:
        """The model's mean loss on some utterances, nats per utterance, and greedy WER, %.

        Words are characters where the language is written without spaces, see `Utterances.unit`.
        """
        model = self.model.eval()
        loss, words, errors = 0.0, 0, 0
        batches = data.batches()
        for indices, batch in zip(batches, data.stream(batches, self.device), strict=True):
            values, lengths = outputs(model, batch)
            loss += losses(model, values, lengths, batch).double().sum().item()
            log_probs = as_posteriors(model, values, lengths)
            hypotheses = greedy(log_probs.cpu().numpy(), lengths.cpu().numpy())
            for index, tokens in zip(indices, hypotheses, strict=True):
                reference = data.unit.cut(data.texts[index])
                counts = count_errors(reference, data.unit.cut(self.tokenizer.decode(tokens)))
                words += len(reference)
                errors += counts.errors
        if not words:
            problem = f"no word in the transcripts of {some(data.names)}, so no WER"
            raise UserError(problem, path=data.path / "text")
        return {
            "utterances": len(data),
            "loss": f"{loss / len(data):.6f}",
            "words": words,
            "errors": errors,
            "wer": f"{100 * errors / words:.4f}",
        }
