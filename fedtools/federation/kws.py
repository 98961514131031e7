"""Keyword spotting in a federation: small networks over clips, many clients at once."""

from __future__ import annotations

import copy
import math
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from fedtools.audio.mfcc import frames_of
from fedtools.client.clips import ClipFeatures
from fedtools.client.fit import Objective
from fedtools.client.memory import keep_freed_memory
from fedtools.client.options import ClipTraining, check_optimizer, load_model
from fedtools.client.place import Place
from fedtools.client.stacks import ClipBatches, cross_entropy, stacks_of, step_bytes
from fedtools.federation.base import Beginning, State, as_configured
from fedtools.federation.model import ModelFederation, begin_with
from fedtools.federation.tasks import ALL
from fedtools.files.clips import RATE, Clips, read_classes, read_length
from fedtools.files.config import from_mapping, option_error
from fedtools.files.errors import UserError
from fedtools.files.private import Private
from fedtools.methods.base import Method, Phase
from fedtools.models.keywords import build_network
from fedtools.models.keywords.base import Network

_MEASURED_AT_ONCE = 256


class KwsFederation(ModelFederation):
    """A federation whose clients tell keywords apart."""

    def __init__(self, path: str | Path, device: str = "cpu"):
        super().__init__(path, device)
        options = self.experiment.options.training
        self.training = from_mapping(ClipTraining, options, f"{self.where}: training")
        self._classes = read_classes(self.experiment.path / "classes.txt")
        self._samples = read_length(self.experiment.path)
        self._features: dict[str, ClipFeatures] = {}
        self._plain: dict[str, torch.Tensor] = {}
        self._networks: dict[tuple[int, str], Network] = {}

    def settings(self) -> AbstractContextManager[None]:
        keep_freed_memory()
        return super().settings()

    @staticmethod
    def begin(beginning: Beginning) -> tuple[State, State]:
        options, where = beginning.options, beginning.where
        training = from_mapping(ClipTraining, options.training, f"{where}: training")
        classes = len(read_classes(beginning.data["train"] / "classes.txt"))
        samples = read_length(beginning.data["train"])
        network = build_network(
            options.model, classes, f"{where}: model", frames=frames_of(samples)
        )
        if (shift := training.augmentation.time_shift_ms) > 1000 * samples / RATE:
            problem = f"training: augment: time_shift_ms {shift} is more than a clip"
            raise option_error(problem, where, "time_shift_ms", shift)
        check_optimizer(training, f"{where}: training")
        return begin_with(beginning, network, tensors_of(network))

    @cached_property
    def model(self) -> Network:
        return self._network(1, "measured")

    def _network(self, clients: int, use: str) -> Network:
        """A network for so many clients, made once for each use; who uses it loads its tensors."""
        if (clients, use) not in self._networks:
            config, where = self.experiment.options.model, f"{self.where}: model"
            frames = frames_of(self._samples)
            network = build_network(
                config, len(self._classes), where, clients=clients, frames=frames
            )
            self._networks[clients, use] = network.to(self.device)
        return self._networks[clients, use].requires_grad_(True)

    def tensors(self) -> dict[str, torch.Tensor]:
        return tensors_of(self.model)

    def features(self, split: str) -> ClipFeatures:
        """The clips of a split, read when they are first needed."""
        if split not in self._features:
            clips = self.read_clips(self.data_path(split))
            if clips.classes != self._classes:
                where = self.data_path(split) / "classes.txt"
                remedy = "pack the clips again, or begin another experiment"
                raise UserError("not the classes of the experiment", path=where, remedy=remedy)
            self._features[split] = ClipFeatures(clips, self.device)
        return self._features[split]

    def read_clips(self, folder: Path) -> Clips:
        """Clips of any classes; a `UserError` if they are not as long as the experiment's."""
        clips = Clips.read(folder)
        if clips.samples != self._samples:
            there, wanted = clips.samples / RATE, self._samples / RATE
            remedy = f"pack them with --clip-seconds {wanted:g}"
            problem = f"clips of {there:g} s, the experiment's have {wanted:g} s"
            raise UserError(problem, path=folder, remedy=remedy)
        return clips

    @cached_property
    def facts(self) -> dict[str, np.ndarray]:
        """What the method says of each client, such as its steps: name -> (clients,)."""
        return prepare(self.method, self.features("train").clips, self.training.batch_size)

    def _facts_of(self, clients: Sequence[str]) -> dict[str, np.ndarray]:
        names = self.features("train").clips.clients
        places = [bisect_left(names, client) for client in clients]
        return {name: values[places] for name, values in self.facts.items()}

    def units(self, clients: Sequence[str], number: int) -> list[list[str]]:
        facts = self._facts_of(clients)
        steps, sizes = (
            dict(zip(clients, facts[name].tolist(), strict=True)) for name in ("steps", "size")
        )
        return stacks_of(clients, steps, sizes, self._stack_size)

    @cached_property
    def _stack_size(self) -> int:
        """Clients whose activations of a step fit into the configured memory."""
        data, batch = self.features("train"), self.training.batch_size
        # On one kind of device, whatever trains: the server must find the jobs that clients found.
        network = copy.deepcopy(self._network(1, "stack")).cpu()
        one = step_bytes(network, data.plain(slice(0, 1)).cpu(), batch)
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

    def place(self, clients: Sequence[str], number: int) -> Place:
        network = self._network(len(clients), "stack")
        load_model(network.state_dict(), self.start(number))
        if self.personal:
            for index, client in enumerate(clients):
                load_model(tensors_of(network, index), self.personal_state(client, number))
        own = [self.experiment.own(client, number) for client in clients]
        rows = [self.features("train").clips.rows(client) for client in clients]
        return self._place(clients, own, number, network, rows, self._facts_of(clients))

    def at_server(self, number: int, phase: Phase) -> Place:
        self.load_shared(number)
        everything = slice(0, len(self.features("train").clips.labels))
        own = self.experiment.at_server(number)
        return self._place(["server"], [own], number, self.model, [everything], {})

    def _place(
        self,
        names: Sequence[str],
        own: Sequence[Private],
        number: int,
        network: Network,
        rows: Sequence[slice],
        facts: Mapping[str, np.ndarray],
    ) -> Place:
        sizes = [place.stop - place.start for place in rows]

        def batches(
            epochs: int | None, steps: int | Sequence[int] | None, purpose: str
        ) -> ClipBatches:
            if epochs is not None:
                steps = [-(-size // self.training.batch_size) * epochs for size in sizes]
            elif steps is None:
                steps = facts["steps"].tolist()
            counts = [steps] * len(names) if isinstance(steps, int) else steps
            key = self.experiment.seed, number, purpose
            return ClipBatches(self.features("train"), names, rows, counts, self.training, key)

        return Place(
            network,
            names=names,
            number=number,
            stacked=True,
            training=self.training,
            objective=Objective(cross_entropy),
            batches=batches,
            sizes=sizes,
            own=own,
            seed=self.experiment.seed,
            facts=facts,
            copies=lambda: self._network(len(names), "copy"),
        )

    def most_utterances(self, client: str) -> int:
        """The clips that the method was told of, before the federation began."""
        return int(self._facts_of([client])["size"][0])

    def most_steps(self, client: str, utterances: int, phase: Phase) -> int:
        return int(self._facts_of([client])["steps"][0]) if phase.trains else 0

    def epochs(self, client: str, steps: int) -> float:
        rows = self.features("train").clips.rows(client)
        size = rows.stop - rows.start
        return steps * min(size, self.training.batch_size) / size

    @as_configured
    def measure(self, split: str, client: str) -> dict[str, object]:
        """Mean cross-entropy, nats per clip, and accuracy, %."""
        logits, labels = self.logits(split, client)
        loss = F.cross_entropy(logits.double(), labels).item()
        errors = int((logits.argmax(1) != labels).sum())
        return {
            "clips": len(labels),
            "loss": f"{loss:.6f}",
            "errors": errors,
            "accuracy": f"{100 * (1 - errors / len(labels)):.4f}",
        }

    @as_configured
    def logits(self, split: str, client: str = ALL) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's logits (clips, classes) of a client's clips, or all, and their labels."""
        data = self.features(split)
        if split not in self._plain:
            count = len(data.clips.labels)
            edges = [*range(0, count, _MEASURED_AT_ONCE), count]
            self._plain[split] = torch.cat([data.plain(slice(*ends)) for ends in pairwise(edges)])
        rows = slice(None) if client == ALL else data.clips.rows(client)
        labels = torch.from_numpy(np.array(data.clips.labels[rows], np.int64))
        return predict(self.model, self._plain[split][rows]).cpu(), labels


def tensors_of(network: Network, client: int = 0) -> dict[str, torch.Tensor]:
    """Views of one client's parameters and buffers, without the leading dimension."""
    return {name: value[client] for name, value in network.state_dict().items()}


def prepare(method: Method, clips: Clips, batch_size: int) -> dict[str, np.ndarray]:
    """What a method says of each client, beside its "size" and the "entropy" of its labels.

    Returns:
        name -> one value for each of `clips.clients`.

    Raises:
        UserError: if the method can do nothing with these clients.
    """
    sizes, entropies = clips.sizes, clips.entropies()
    try:
        facts = method.prepare(sizes, entropies, batch_size)
    except ValueError as error:
        raise UserError(str(error), path=clips.path) from None
    return {"size": sizes, "entropy": entropies, **facts}


@torch.no_grad()
def predict(network: Network, mfcc: torch.Tensor) -> torch.Tensor:
    """Logits (clips, classes) of one client's network for clips, (clips, frames, 40)."""
    network.eval()
    return torch.cat([network(part[None])[0] for part in mfcc.split(_MEASURED_AT_ONCE)])
