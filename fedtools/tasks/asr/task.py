"""Speech recognition in a federation: CTC models over utterances, one client after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from fedtools.audio.perturb import speakers_of
from fedtools.client.options import UtteranceTraining
from fedtools.client.unit import SERVER
from fedtools.core.config import from_mapping
from fedtools.core.errors import UserError, some
from fedtools.data.ark import FRAMES_PER_HOUR
from fedtools.data.clips import RATE
from fedtools.decode.beam import BeamOptions
from fedtools.exchange.experiment import Experiment
from fedtools.exchange.messages import Payload
from fedtools.exchange.options import Options
from fedtools.exchange.sent_features import Features
from fedtools.lm.whisper_tokens import WhisperTokens
from fedtools.methods.base import Extracted, Method, Phase
from fedtools.models.acoustic.asr import (
    build_model,
    encoder_kinds,
    input_kind_of,
    losses,
    outputs,
    represent,
)
from fedtools.models.pretrained.options import Generation, is_pretrained, is_seq2seq, part_kinds
from fedtools.models.training import check_optimizer, load_model
from fedtools.score.align import count_errors
from fedtools.tasks.asr.archives import missing_archive
from fedtools.tasks.asr.checks import check_split, check_told
from fedtools.tasks.asr.corpus import Corpus
from fedtools.tasks.asr.data import (
    Batch,
    Utterances,
    UtteranceSource,
    joined,
    read_data,
)
from fedtools.tasks.asr.fits import check_tokens
from fedtools.tasks.asr.items import Single
from fedtools.tasks.asr.layer_outputs import check_outputs
from fedtools.tasks.asr.model import AsrModels, cut_above, open_tokens, read_lattice
from fedtools.tasks.asr.server_labels import check_server_labels
from fedtools.tasks.base import (
    Indicator,
    Items,
    MissingData,
    NewExperiment,
    State,
    Task,
    as_configured,
)
from fedtools.tasks.begin import begin_with, personal_parameters, report_trained, split_base
from fedtools.tasks.facts import ALL


class AsrTask(Task[Method]):
    """Clients transcribe speech."""

    needs_torch = True
    models: AsrModels

    def __init__(self, experiment: Experiment, method: Method, device: str = "cpu"):
        super().__init__(experiment, method, device)
        options = experiment.options.training
        self.training = from_mapping(UtteranceTraining, options, f"{self.where}: training")
        self.device = torch.device(device)
        self.tokenizer = open_tokens(experiment.path, experiment.options.model)
        self.models = AsrModels(experiment, method, self.training, self.tokenizer, self.device)
        self.corpus = Corpus(self, self.tokenizer, self.models)

    @staticmethod
    def begin(new: NewExperiment[Method]) -> tuple[State, State]:
        options, where = new.options, new.where
        training = from_mapping(UtteranceTraining, options.training, f"{where}: training")
        tokenizer = open_tokens(new.assets["tokens"], options.model)
        units = tokenizer.tokens
        lattice = read_lattice(new.assets.get("denominator"), len(units))
        new, base = split_base(new)
        model = build_model(options.model, units, f"{where}: model", lattice, base)
        if lattice and training.labels != "transcripts":
            problem = f"labels: {training.labels} needs a model of criterion ctc"
            raise UserError(problem, path=f"{where}: training")
        tokens = new.assets["tokens"]
        if "train" in new.data:
            read_data(new.data["train"], options.model)
        else:
            check_told(new, training)
        if isinstance(tokenizer, WhisperTokens):
            check_tokens(tokenizer, tokens, model)
        for split, folder in new.data.items():
            check_split(split, folder, options.model, model, tokenizer, training, tokens)
        check_optimizer(training, f"{where}: training")
        check_outputs(new, model, training)
        check_server_labels(new, training, tokenizer)
        states = begin_with(new, model, model.state_dict())
        phases = map(new.method.phase, range(1, options.rounds + 1))
        if any(phase.jointly or isinstance(phase.sends, Extracted) for phase in phases):
            cut_above(model, personal_parameters(new.method, model), options.model, where)
        report_trained(model, options.model)
        return states

    def check_site_data(self) -> None:
        config, model = self.experiment.options.model, self.models.build()
        where = self.data_path("train"), config, model, self.tokenizer, self.training
        check_split("train", *where, self.experiment.path, of_site=True)

    @staticmethod
    def kinds(options: Options) -> dict[str, type]:
        model, training = options.model, options.training
        own = {"training": UtteranceTraining, **part_kinds(model)}
        if training.get("server_labels") == "beam":
            own["training.search"] = Generation if is_seq2seq(model) else BeamOptions
        return own if is_pretrained(model) else {**own, **encoder_kinds(model)}

    def settings(self) -> AbstractContextManager[None]:
        return self.training.settings()

    def source(self, clients: Sequence[str], number: int, phase: Phase) -> UtteranceSource:
        for client in clients if phase.may_lack else ():
            if archive := missing_archive(self.corpus.read("train", True), client):
                raise MissingData(f"its {archive.name} is missing")
        received = not clients and bool(phase.on_features)
        if received:
            data = self.corpus.sent(phase.on_features)
        else:
            client, split = (clients[0], "train") if clients else (ALL, phase.server_data)
            data = self.corpus.utterances(split, client, phase.may_lack)
        key = self.experiment.seed, number, clients[0] if clients else SERVER
        epochs = self.method.local_epochs
        return UtteranceSource(data, key, self.training, epochs, self.device, received)

    def payload(self, phase: Phase) -> Payload:
        if not isinstance(phase.sends, Extracted):
            return super().payload(phase)
        cut = self.models.cut()
        waves = input_kind_of(self.experiment.options.model) == "wave"
        hour = 3600 * RATE if waves else FRAMES_PER_HOUR
        frames = math.ceil(phase.sends.hours * hour / cut.step)
        return Payload(features=Features(cut.size, phase.sends.bits, frames=frames))

    def load(self, state: State, number: int) -> None:
        load_model(self.models.build().state_dict(), state)

    def measure(self, split: str, client: str) -> dict[str, object]:
        return self.measured(self.corpus.utterances(split, client))

    @as_configured
    @torch.no_grad()
    def measured(self, data: Utterances) -> dict[str, object]:
        """Return the model's mean loss on some utterances, nats per utterance, and greedy WER, %.

        The loss is that of utterances that fit the criterion; NaN if there are none.
        Words are characters where the language is written without spaces, see `Utterances.unit`.
        """
        model = self.models.build().eval()
        loss, words, errors = 0.0, 0, 0
        unfit = set(data.unfit(model))
        fit = len(data) - len(unfit)
        batches = data.batches()
        for indices, batch in zip(batches, data.stream(batches, self.device), strict=True):
            values, lengths = outputs(model, batch)
            own = torch.tensor([data.names[index] not in unfit for index in indices])
            found = losses(model, values, lengths, batch)
            loss += (found * own.to(found.device)).double().sum().item()
            hypotheses = self.models.transcribe(model, (values, lengths), batch)
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
            "loss": f"{loss / fit if fit else math.nan:.6f}",
            "words": words,
            "errors": errors,
            "wer": f"{100 * errors / words:.4f}",
        }

    def speakers(self) -> dict[str, str]:
        """Return client -> its speaker, for clients with a single speaker."""
        data = self.corpus.read("train")
        people = dict(zip(data.utterances, speakers_of(data, data.utterances), strict=True))
        found = {}
        own: dict[str, set[str]] = {}
        for name, client in data.utt2client.items():
            own.setdefault(client, set()).add(people[name])
        for client in self.experiment.clients:
            # With user-level privacy a client may be in the list alone.
            if len(speakers := own.get(client, set())) == 1:
                found[client] = min(speakers)
        return found

    def items(self, held: Sequence[str] = ()) -> Items:
        """Return the training utterances, with their transcripts even if training reads none.

        Utterances of the splits `held` that are not among them follow as held-out ones.
        """
        data = self.corpus.read_folder(self.data_path("train"), "text")
        owners = dict(data.utt2client)
        for split in held:
            more = self.corpus.read_folder(self.data_path(split), "text")
            owners |= {name: "" for name in more.utterances if name not in data.utt2spk}
            data = joined(data, more)
        known = self.corpus, self.models, self.tokenizer
        return Single(data, owners, *known, self.method.local_epochs).items()

    def indicator(self, folder: Path, at_once: int) -> Indicator:
        """Return utterances one at a time: without padding, and long enough to keep a CPU busy."""
        data, train = self.corpus.read_folder(folder), self.corpus.read("train")
        audio = self.corpus.gather(data, data.utterances, labelled=False)

        def inputs() -> Iterator[Batch]:
            return audio.stream([[index] for index in range(len(audio))], self.device)

        heard, trained = (set(speakers_of(one, one.utterances)) for one in (data, train))
        return Indicator(inputs, represent, heard, trained)
