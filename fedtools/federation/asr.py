"""Speech recognition in a federation: CTC models over utterances, one client after the other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedtools.client.fit import Objective
from fedtools.client.options import UtteranceTraining, check_optimizer
from fedtools.client.place import Place
from fedtools.client.utterances import Batch, UtteranceBatches, Utterances
from fedtools.decode.greedy import greedy
from fedtools.federation.base import Beginning, State
from fedtools.federation.model import ModelFederation, begin_with
from fedtools.federation.tasks import ALL
from fedtools.files.ark import FeatureReader
from fedtools.files.config import from_mapping
from fedtools.files.datadir import DataDir
from fedtools.files.errors import UserError
from fedtools.files.private import Private
from fedtools.lm.tokens import Tokenizer
from fedtools.models.asr import (
    INPUT_SIZE,
    build_model,
    ctc_loss,
    ctc_losses,
    log_posteriors,
    shortest_input,
)
from fedtools.score.align import count_errors


def read_data(path: str | Path, config: Mapping[str, Any], *tables: str) -> DataDir:
    """Read the features and the named tables of a data directory, and its clients if it has any.

    Raises:
        UserError: if one is missing or malformed, or the features do not fit a model's `config`.
    """
    clients = ("utt2client",) if (Path(path) / "utt2client").exists() else ()
    data = DataDir.read(path, "utt2spk", "feats.scp", *tables, *clients)
    wanted = config.get("input_size", INPUT_SIZE)
    for name in data.utterances[:1]:
        size = FeatureReader({name: data.feats_scp[name]}).shape(name)[1]
        if size != wanted:
            problem = f"{size} values in a frame of {name!r}, the model's input_size is {wanted}"
            remedy = "extract other features, or begin with another model.input_size"
            raise UserError(problem, path=data.path / "feats.scp", remedy=remedy)
    return data


def mean_ctc_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean CTC loss of a batch's utterances, nats, (1,)."""
    return ctc_loss(model, batch).mean()[None]


class AsrFederation(ModelFederation):
    """A federation whose clients transcribe speech."""

    def __init__(self, path: str | Path, device: str = "cpu"):
        super().__init__(path, device)
        options = self.experiment.config["training"]
        self.training = from_mapping(UtteranceTraining, options, f"{self.where}: training")
        self.tokenizer = Tokenizer.load(self.experiment.path)
        self._utterances: OrderedDict[tuple[str, str], Utterances] = OrderedDict()
        self.training.set_up_torch()

    @staticmethod
    def begin(beginning: Beginning) -> tuple[State, State]:
        config, where = beginning.config, beginning.where
        training = from_mapping(UtteranceTraining, config["training"], f"{where}: training")
        units = Tokenizer.load(beginning.assets["tokens"]).tokens
        model = build_model(config["model"], units, f"{where}: model")
        read_data(beginning.data["train"], config["model"])
        check_optimizer(training, f"{where}: training")
        return begin_with(beginning, model, model.state_dict())

    @cached_property
    def model(self) -> nn.Module:
        config = self.experiment.config["model"]
        return build_model(config, self.tokenizer.tokens, f"{self.where}: model").to(self.device)

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()

    @cached_property
    def data(self) -> Mapping[str, DataDir]:
        """The data directories that were read, by split."""
        return {}

    def read(self, split: str) -> DataDir:
        """The data directory of a split; "train" without transcripts where no method reads them."""
        if split not in self.data:
            labels = ("text",) if split != "train" or self.method.labels else ()
            path = self.data_path(split)
            self.data[split] = read_data(path, self.experiment.config["model"], *labels)
        return self.data[split]

    def utterances(self, split: str, client: str) -> Utterances:
        """The utterances of one client (or of `ALL`) in a split.

        Features stay in memory for later rounds, those used last, as far as `cache_mb` allows.
        """
        key = split, client
        if key not in self._utterances:
            data = self.read(split)
            names = data.utterances if client == ALL else data.client_utterances(client)
            found = Utterances(
                data,
                names,
                self.tokenizer,
                self.training.batch_bins,
                shortest_input(self.model),
                labelled=bool(data.text),
            )
            self._make_room(found)
            self._utterances[key] = found
        self._utterances.move_to_end(key)
        return self._utterances[key]

    def _make_room(self, found: Utterances) -> None:
        limit = self.training.cache_mb << 20
        found.keep = found.bytes <= limit
        kept = sum(other.bytes for other in self._utterances.values() if other.keep)
        while found.keep and self._utterances and kept + found.bytes > limit:
            _, oldest = self._utterances.popitem(last=False)
            kept -= oldest.bytes if oldest.keep else 0

    def units(self, clients: Sequence[str], number: int) -> list[list[str]]:
        return [[client] for client in clients]

    def place(self, clients: Sequence[str], number: int) -> Place:
        (client,) = clients
        self.load_result(client, number - 1)
        return self._place(client, number, self.experiment.own(client, number), client)

    def at_server(self, number: int) -> Place:
        self.load_shared(number)
        return self._place("server", number, self.experiment.at_server(number), ALL)

    def _place(self, name: str, number: int, own: Private, client: str) -> Place:
        data, seed = self.utterances("train", client), self.experiment.seed

        def batches(
            epochs: int | None, steps: int | Sequence[int] | None, purpose: str
        ) -> UtteranceBatches:
            if steps is not None:
                raise NotImplementedError("utterances are trained on for epochs, not steps")
            key = (seed, number, name, *([purpose] if purpose != "train" else []))
            epochs = epochs or self.method.local_epochs
            return UtteranceBatches(data, epochs, self.training.accum_grad, self.device, key)

        return Place(
            [name],
            number,
            self.model,
            stacked=False,
            training=self.training,
            objective=Objective(mean_ctc_loss),
            batches=batches,
            sizes=[len(data)],
            own=[own],
            seed=seed,
        )

    @torch.no_grad()
    def measure(self, split: str, client: str) -> dict[str, object]:
        """Mean CTC loss, nats per utterance, and greedy WER, %."""
        data = self.utterances(split, client)
        model = self.model.eval()
        loss, words, errors = 0.0, 0, 0
        batches = data.batches()
        for indices, batch in zip(batches, data.stream(batches, self.device), strict=True):
            log_probs, lengths = log_posteriors(model, batch)
            loss += ctc_losses(log_probs, lengths, batch).double().sum().item()
            hypotheses = greedy(log_probs.cpu().numpy(), lengths.cpu().numpy())
            for index, tokens in zip(indices, hypotheses, strict=True):
                reference = data.texts[index].split()
                counts = count_errors(reference, self.tokenizer.decode(tokens).split())
                words += len(reference)
                errors += counts.errors
        return {
            "utterances": len(data),
            "loss": f"{loss / len(data):.6f}",
            "words": words,
            "errors": errors,
            "wer": f"{100 * errors / words:.4f}",
        }
