"""Speech recognition in a federation: CTC models over utterances, one client after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedtools.client.data import Utterances
from fedtools.client.learner import Learner
from fedtools.client.train import Diverged, Fitted, Training
from fedtools.decode.greedy import greedy
from fedtools.federation.federation import Federation, Trained
from fedtools.federation.tasks import ALL
from fedtools.files.config import from_mapping
from fedtools.files.datadir import DataDir
from fedtools.files.states import save_state
from fedtools.lm.tokens import Tokenizer
from fedtools.methods.base import PERSONAL, SHARED
from fedtools.models.asr import build_model, ctc_loss, ctc_losses, log_posteriors, shortest_input
from fedtools.score.align import count_errors


def read_data(path: str | Path, *tables: str) -> DataDir:
    """Read the named tables of a data directory, and utt2client where there is one."""
    clients = ("utt2client",) if (Path(path) / "utt2client").exists() else ()
    return DataDir.read(path, *tables, *clients)


class AsrFederation(Federation):
    """A federation whose clients transcribe speech."""

    def __init__(self, path: str | Path, device: str = "cpu"):
        super().__init__(path, device)
        self.training = from_mapping(Training, self.experiment.config["training"], self.where)
        self.tokenizer = Tokenizer.load(self.experiment.path)
        self._utterances: dict[tuple[str, str], Utterances] = {}
        self._learners: dict[str, Learner] = {}
        torch.set_num_threads(self.training.num_threads)

    @staticmethod
    def begin(
        config: Mapping[str, Any], train: Path, tokens: Path | None, where: str | Path
    ) -> dict[str, torch.Tensor]:
        from_mapping(Training, config["training"], where)
        units = Tokenizer.load(tokens).tokens
        return build_model(config["model"], units, f"{where}: model").state_dict()

    @cached_property
    def model(self) -> nn.Module:
        config = self.experiment.config["model"]
        return build_model(config, self.tokenizer.tokens, f"{self.where}: model").to(self.device)

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()

    @cached_property
    def data(self) -> dict[str, DataDir]:
        """The data directories, by their role ("train", "valid")."""
        tables = ("text", "utt2spk", "feats.scp")
        roles = self.experiment.config["data"]
        return {role: read_data(self.data_path(role), *tables) for role in roles}

    def utterances(self, role: str, client: str) -> Utterances:
        """The utterances of one client (or of `ALL`) in one role, kept for later rounds."""
        if (role, client) not in self._utterances:
            data = self.data[role]
            names = data.utterances if client == ALL else data.client_utterances(client)
            self._utterances[role, client] = Utterances(
                data, names, self.tokenizer, self.training.batch_bins, shortest_input(self.model)
            )
        return self._utterances[role, client]

    def units(self, clients: Sequence[str], number: int) -> list[list[str]]:
        return [[client] for client in clients]

    def train(self, clients: Sequence[str], number: int) -> Iterator[Trained]:
        for client in clients:
            self.load_result(client, number - 1)
            own = self.experiment.client_dir(client)
            data = self.utterances("train", client)
            learner = self._learner(client, own, number, data, self.method.local_epochs)
            self._learners[client] = learner
            try:
                (fitted,) = self.method.train_client(learner)
            except Diverged as reason:
                yield Trained(client, Fitted(0, 0.0, 0), {}, f"diverged: {reason}")
                continue
            state = self.tensors()
            if personal := self.of_kind(PERSONAL, state):
                folder = self.experiment.personal_dir(own, number)
                save_state(folder / "personal.safetensors", personal)
            yield Trained(client, fitted, self.of_kind(SHARED, state))

    def finish(self, client: str, number: int) -> None:
        self._learners.pop(client).finish()

    def closed(self, number: int) -> None:
        """Nothing: `average` chooses among the personal states of all rounds."""

    def at_server(self, number: int) -> Learner:
        self.load_shared(number)
        folder, data = self.experiment.server_dir(), self.utterances("train", ALL)
        return self._learner("server", folder, number, data, self.method.server_epochs)

    def _learner(
        self, name: str, folder: Path, number: int, data: Utterances, epochs: int
    ) -> Learner:
        return Learner(
            self.experiment, name, folder, number, self.model, data, self.training, ctc_loss, epochs
        )

    def epochs(self, client: str, steps: int) -> float:
        return self.method.local_epochs

    @torch.no_grad()
    def measure(self, role: str, client: str) -> dict[str, object]:
        """Mean CTC loss, nats per utterance, and greedy WER, %."""
        data = self.utterances(role, client)
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
