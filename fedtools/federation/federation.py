"""An experiment opened for work: its method, model and data."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedtools.client.data import Utterances
from fedtools.client.learner import Learner
from fedtools.client.train import Training, load_model
from fedtools.files.config import from_mapping
from fedtools.files.datadir import DataDir
from fedtools.files.experiment import Experiment
from fedtools.files.states import Spec, load_state, spec_of
from fedtools.lm.tokens import Tokenizer
from fedtools.methods import make_method
from fedtools.methods.base import PERSONAL, SHARED
from fedtools.models.asr import build_model, ctc_loss, shortest_input

# The one "client" of a data directory without utt2client.
ALL = "all"


def read_data(path: str | Path, *tables: str) -> DataDir:
    """Read the named tables of a data directory, and utt2client where there is one."""
    clients = ("utt2client",) if (Path(path) / "utt2client").exists() else ()
    return DataDir.read(path, *tables, *clients)


class Federation:
    """An experiment opened for work: its method, model and data, made once when first needed."""

    def __init__(self, path: str | Path, device: str = "cpu"):
        self.experiment = Experiment(path)
        config, where = self.experiment.config, self.experiment.path / "config.yaml"
        self.method = make_method(config["method"], config["method_conf"], where)
        self.training = from_mapping(Training, config["training"], where)
        self.device = torch.device(device)
        self.tokenizer = Tokenizer.load(self.experiment.path)
        self._utterances: dict[tuple[str, str], Utterances] = {}
        torch.set_num_threads(self.training.num_threads)

    @cached_property
    def model(self) -> nn.Module:
        """The one model object; every user loads its own tensors into it."""
        config, where = self.experiment.config, self.experiment.path / "config.yaml"
        model = build_model(config["model"], self.tokenizer.tokens, f"{where}: model")
        return model.to(self.device)

    @cached_property
    def initial(self) -> dict[str, torch.Tensor]:
        """The full model that everybody begins with."""
        spec = spec_of(self.model.state_dict())
        return {
            name: torch.as_tensor(value)
            for name, value in load_state(self.experiment.init, spec).items()
        }

    @cached_property
    def kinds(self) -> dict[str, str]:
        """tensor name -> SHARED, PERSONAL or RESET."""
        parameters = {name for name, _ in self.model.named_parameters()}
        return {
            name: self.method.parameter_kind(name)
            if name in parameters
            else self.method.buffer_kind(name, value.is_floating_point())
            for name, value in self.model.state_dict().items()
        }

    @cached_property
    def shared_spec(self) -> Spec:
        """Names, shapes and types of the tensors that travel."""
        return spec_of(self.of_kind(SHARED, self.model.state_dict()))

    def of_kind(self, kind: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of `state` that are of one kind."""
        return {name: value for name, value in state.items() if self.kinds[name] == kind}

    @cached_property
    def data(self) -> dict[str, DataDir]:
        """The data directories, by their role ("train", "valid")."""
        tables = ("text", "utt2spk", "feats.scp")
        roles = self.experiment.config["data"].items()
        return {role: read_data(path, *tables) for role, path in roles}

    def utterances(self, role: str, client: str) -> Utterances:
        """The utterances of one client (or of `ALL`) in one role, kept for later rounds."""
        if (role, client) not in self._utterances:
            data = self.data[role]
            names = data.utterances if client == ALL else data.client_utterances(client)
            self._utterances[role, client] = Utterances(
                data, names, self.tokenizer, self.training.batch_bins, shortest_input(self.model)
            )
        return self._utterances[role, client]

    def load_client(self, client: str, number: int) -> None:
        """Put into the model what `client` begins round `number` with."""
        self.load_result(client, number - 1)

    def load_result(self, client: str | None, number: int) -> None:
        """Put into the model what `client` uses after round `number` (0: the beginning).

        Args:
            client: whose personal tensors; None takes the initial ones, as a newcomer has them.
        """
        load_model(self.model, self.initial)
        state = load_state(self.experiment.global_state(number + 1), self.shared_spec)
        load_model(self.model, state)
        if client is not None and PERSONAL in self.kinds.values():
            own = self.experiment.client_dir(client)
            path = self.experiment.last_personal(own, number + 1, "personal.safetensors")
            if path is not None:
                personal = spec_of(self.of_kind(PERSONAL, self.initial))
                load_model(self.model, load_state(path, personal))

    def learner(self, name: str, folder: Path, number: int, data: Utterances) -> Learner:
        """A `Learner` on the model as it is loaded now."""
        return Learner(
            self.experiment, name, folder, number, self.model, data, self.training, ctc_loss
        )
