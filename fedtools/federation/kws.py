"""Keyword spotting in a federation: small networks over clips, many clients at once."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fedtools.client.clips import ClipFeatures
from fedtools.client.memory import keep_freed_memory
from fedtools.client.parallel import (
    ClipTraining,
    Stack,
    stacks_of,
    step_bytes,
    tensors_of,
)
from fedtools.client.train import load_model, make_optimizer
from fedtools.federation.federation import Federation, Trained
from fedtools.files.clips import Clips, read_classes
from fedtools.files.config import from_mapping
from fedtools.files.errors import UserError
from fedtools.files.states import save_state
from fedtools.methods.base import PERSONAL, SHARED, Method
from fedtools.models.keywords import Network, build_network

_MEASURED_AT_ONCE = 256


class KwsFederation(Federation):
    """A federation whose clients tell keywords apart."""

    def __init__(self, path: str | Path, device: str = "cpu"):
        super().__init__(path, device)
        self.training = from_mapping(ClipTraining, self.experiment.config["training"], self.where)
        self._classes = (self.experiment.path / "classes.txt").read_text().split()
        self._features: dict[str, ClipFeatures] = {}
        self._plain: dict[str, torch.Tensor] = {}
        torch.set_num_threads(self.training.num_threads)
        # torch's default is True for convolutions alone.
        torch.backends.cudnn.allow_tf32 = self.training.use_tf32
        torch.backends.cuda.matmul.allow_tf32 = self.training.use_tf32
        # On a GPU too, a rerun shall be the same.
        torch.backends.cudnn.deterministic = True
        keep_freed_memory()

    @staticmethod
    def begin(
        config: Mapping[str, Any], train: Path, tokens: Path | None, where: str | Path
    ) -> dict[str, torch.Tensor]:
        training = from_mapping(ClipTraining, config["training"], where)
        classes = len(read_classes(train / "classes.txt"))
        network = build_network(config["model"], classes, f"{where}: model")
        make_optimizer(network, training, where)
        return tensors_of(network)

    @cached_property
    def model(self) -> Network:
        return self._network(1)

    def _network(self, clients: int) -> Network:
        config = self.experiment.config["model"]
        where = f"{self.where}: model"
        network = build_network(config, len(self._classes), where, clients=clients)
        return network.to(self.device)

    def tensors(self) -> dict[str, torch.Tensor]:
        return tensors_of(self.model)

    def features(self, role: str) -> ClipFeatures:
        """The clips of a role, read when they are first needed."""
        if role not in self._features:
            clips = Clips.read(self.data_path(role))
            if clips.classes != self._classes:
                where = self.data_path(role) / "classes.txt"
                remedy = "pack the clips again, or begin another experiment"
                raise UserError("not the classes of the experiment", path=where, remedy=remedy)
            self._features[role] = ClipFeatures(clips, self.device)
        return self._features[role]

    @cached_property
    def _facts(self) -> dict[str, dict[str, Any]]:
        """client -> what the method says of it, such as its steps, from all clients' data."""
        clients, batch_size = self.experiment.clients, self.training.batch_size
        facts = prepare(self.method, self.features("train"), clients, batch_size)
        return {
            client: {name: values[index] for name, values in facts.items()}
            for index, client in enumerate(clients)
        }

    def units(self, clients: Sequence[str], number: int) -> list[list[str]]:
        steps, sizes = (
            {client: int(self._facts[client][name]) for client in clients}
            for name in ("steps", "size")
        )
        return stacks_of(clients, steps, sizes, self._stack_size)

    @cached_property
    def _stack_size(self) -> int:
        """Clients whose activations of a step fit into the configured memory."""
        data, batch = self.features("train"), self.training.batch_size
        one = step_bytes(self._network(1), data.plain(slice(0, 1)), batch)
        wanted, megabytes = self.training.stack, self.training.stack_mb
        fit = max(1, (megabytes << 20) // one)
        if fit < wanted:
            need = math.ceil(wanted * one / 2**20)
            print(
                f"{fit} clients are trained at once: training.stack {wanted} needs "
                f"training.stack_mb {need}, which is {megabytes}",
                file=sys.stderr,
            )
        return min(wanted, fit)

    def train(self, clients: Sequence[str], number: int) -> Iterator[Trained]:
        stack = self._stack(clients, number)
        fitted = self.method.train_client(stack)
        for index, (client, result) in enumerate(zip(stack.names, fitted, strict=True)):
            if result.loss != result.loss:
                yield Trained(client, result, {}, "diverged: loss or parameters are not finite")
                continue
            state = tensors_of(stack.model, index)
            if personal := self.of_kind(PERSONAL, state):
                folder = self.experiment.personal_dir(self.experiment.client_dir(client), number)
                save_state(folder / "personal.safetensors", personal)
            yield Trained(client, result, self.of_kind(SHARED, state))

    def _stack(self, clients: Sequence[str], number: int) -> Stack:
        network = self._network(len(clients))
        self.load_shared(number)
        for index, client in enumerate(clients):
            state = tensors_of(network, index)
            load_model(state, self.tensors())
            load_model(state, self.personal(client, number))
        folders = [self.experiment.client_dir(client) for client in clients]
        rows = [self.features("train").clips.rows(client) for client in clients]
        facts = {
            name: np.array([self._facts[client][name] for client in clients])
            for name in self._facts[clients[0]]
        }
        return self._make_stack(clients, folders, number, network, rows, facts)

    def _make_stack(
        self,
        names: Sequence[str],
        folders: Sequence[Path],
        number: int,
        network: Network,
        rows: Sequence[slice],
        facts: Mapping[str, np.ndarray],
    ) -> Stack:
        return Stack(
            self.experiment,
            names,
            folders,
            number,
            network,
            self._network,
            self.features("train"),
            rows,
            facts,
            self.training,
        )

    def finish(self, client: str, number: int) -> None:
        """Nothing: a stack has no checkpoints, what it holds is a job's work of seconds."""

    def closed(self, number: int) -> None:
        # Thousands of private models are gigabytes: the newest of each will do.
        for client in self.experiment.sampled(number):
            self.experiment.drop_old_rounds(self.experiment.client_dir(client), keep=1)

    def at_server(self, number: int) -> Stack:
        self.load_shared(number)
        folder, clips = self.experiment.server_dir(), self.features("train").clips
        everything = slice(0, len(clips.labels))
        steps = -(-everything.stop // self.training.batch_size) * self.method.server_epochs
        facts = {"steps": np.array([steps])}
        return self._make_stack(["server"], [folder], number, self.model, [everything], facts)

    def epochs(self, client: str, steps: int) -> float:
        size = self.features("train").size(client)
        return steps * min(size, self.training.batch_size) / size

    def measure(self, role: str, client: str) -> dict[str, object]:
        """Mean cross-entropy, nats per clip, and accuracy, %."""
        logits, labels = self.logits(role)
        loss = F.cross_entropy(logits.double(), labels).item()
        errors = int((logits.argmax(1) != labels).sum())
        return {
            "clips": len(labels),
            "loss": f"{loss:.6f}",
            "errors": errors,
            "accuracy": f"{100 * (1 - errors / len(labels)):.4f}",
        }

    def logits(self, role: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's logits (clips, classes) of all clips of a role, and their labels (clips,)."""
        data = self.features(role)
        if role not in self._plain:
            count = len(data.clips.labels)
            edges = [*range(0, count, _MEASURED_AT_ONCE), count]
            self._plain[role] = torch.cat([data.plain(slice(*ends)) for ends in pairwise(edges)])
        return predict(self.model, self._plain[role]).cpu(), torch.from_numpy(data.clips.labels)


def prepare(
    method: Method, data: ClipFeatures, clients: Sequence[str], batch_size: int
) -> dict[str, np.ndarray]:
    """What a method says of each client, beside its "size" and the "entropy" of its labels.

    Raises:
        UserError: if the method can do nothing with these clients.
    """
    sizes = np.array([data.size(client) for client in clients])
    entropies = np.array([data.entropy(client) for client in clients])
    try:
        facts = method.prepare(sizes, entropies, batch_size)
    except ValueError as error:
        raise UserError(str(error), path=data.clips.path) from None
    return {"size": sizes, "entropy": entropies, **facts}


@torch.no_grad()
def predict(network: Network, mfcc: torch.Tensor) -> torch.Tensor:
    """Logits (clips, classes) of one client's network for clips, (clips, frames, 40)."""
    network.eval()
    return torch.cat([network(part[None])[0] for part in mfcc.split(_MEASURED_AT_ONCE)])
