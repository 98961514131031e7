"""Keyword spotting in a federation: small networks over clips, many clients at once."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtools.audio.augment import Augment
from fedtools.audio.front_end import front_end
from fedtools.audio.mfcc import frames_of
from fedtools.client.attackers.options import read_attackers
from fedtools.client.options import ClipTraining
from fedtools.client.unit import SERVER
from fedtools.core.config import from_mapping, option_error
from fedtools.core.errors import UserError
from fedtools.data.clips import RATE, Clips, read_classes, read_length
from fedtools.exchange.experiment import Experiment
from fedtools.exchange.messages import Limits
from fedtools.exchange.options import Options
from fedtools.methods.base import ROOT, Method, Phase
from fedtools.models.adapt.copies import copy_of
from fedtools.models.keywords import NETWORKS, build_network, inputs_of
from fedtools.models.keywords.clip_batch import ClipBatch
from fedtools.models.keywords.trial import try_network
from fedtools.models.pretrained.options import is_pretrained, part_kinds
from fedtools.models.stacked import held_once
from fedtools.models.training import check_optimizer, load_model
from fedtools.tasks.base import Indicator, Items, NewExperiment, State, Task, as_configured
from fedtools.tasks.begin import begin_with, report_trained, split_base
from fedtools.tasks.client_facts import ClientFacts
from fedtools.tasks.facts import ALL
from fedtools.tasks.kws.clips import ClipCorpus, check_clips, check_samples
from fedtools.tasks.kws.facts import as_one, of_clips, prepared
from fedtools.tasks.kws.layer_outputs import AboveFrozen, check_outputs, open_outputs
from fedtools.tasks.kws.memory import keep_freed_memory
from fedtools.tasks.kws.model import KwsModels, cross_entropy, tensors_of
from fedtools.tasks.kws.poisoned import check_poison, poisoned
from fedtools.tasks.kws.projection import check_start, find_projection
from fedtools.tasks.kws.stacks import ClipSource, stacks_of, step_bytes
from fedtools.tasks.layer_outputs import options_of

_MEASURED_AT_ONCE = 256


class KwsTask(Task[Method]):
    """Clients recognise keywords."""

    needs_torch = True
    models: KwsModels
    poison = staticmethod(poisoned)

    def __init__(self, experiment: Experiment, method: Method, device: str = "cpu"):
        super().__init__(experiment, method, device)
        options = experiment.options
        self.training = from_mapping(ClipTraining, options.training, f"{self.where}: training")
        self.device = torch.device(device)
        self._classes = read_classes(experiment.path / "classes.txt")
        self._samples = read_length(experiment.path)
        classes, frames = len(self._classes), frames_of(self._samples)
        where = f"{self.where}: model"
        self.models = KwsModels(
            options.model, classes, frames, self.training, where, self.device, experiment.path
        )
        front = front_end(*inputs_of(options.model))
        outputs = None
        if options_of(options.model, where):
            outputs = open_outputs(options.model, where, self.models.build(), self.device)
            front = AboveFrozen(front, self.models.whole)
        self.clips = ClipCorpus(
            self.data_path,
            self._classes,
            self._samples,
            front,
            self.device,
            self.training,
            outputs,
        )

    def settings(self) -> AbstractContextManager[None]:
        keep_freed_memory()
        return self.training.settings()

    @staticmethod
    def begin(new: NewExperiment[Method]) -> tuple[State, State]:
        options, where = new.options, new.where
        training = from_mapping(ClipTraining, options.training, f"{where}: training")
        names, samples, train = kind_of_clips(new)
        classes = len(names)
        for folder in new.data.values():
            check_like(Clips.read(folder), names, samples, train)
        if attackers := read_attackers(options.attackers, where):
            try:
                check_poison(attackers, names, samples)
            except ValueError as error:
                raise UserError(f"attackers: {error}", path=where) from None
        if not is_pretrained(options.model):
            try_network(options.model, classes, f"{where}: model", frames_of(samples))
        new, base = split_base(new)
        build = partial(
            build_network,
            *(options.model, classes, f"{where}: model"),
            projection=find_projection(new),
        )
        network = build(frames=frames_of(samples), base=base)
        if (shift := training.augmentation.time_shift_ms) > 1000 * samples / RATE:
            problem = f"training: augment: time_shift_ms {shift} is longer than a clip"
            raise option_error(problem, where, "time_shift_ms", shift)
        check_clips(network, options.model, samples, train)
        check_optimizer(training, f"{where}: training")
        check_outputs(new, network, training, partial(build, whole=True))
        before = {name: value.clone() for name, value in held_once(network).items()}
        states = begin_with(new, network, tensors_of(network))
        if new.start:
            check_start(new.start, before, network)
        report_trained(network, options.model)
        return states

    @staticmethod
    def client_facts_of(new: NewExperiment[Method]) -> ClientFacts | None:
        where = f"{new.where}: training"
        training = from_mapping(ClipTraining, new.options.training, where)
        if new.known is None:
            return None
        source = new.data.get("train", Path(new.where))
        return prepared(new.known.clients, new.method, training.batch_size, source)

    @staticmethod
    def kinds(options: Options) -> dict[str, type]:
        own = {"training": ClipTraining, "training.augment": Augment, **part_kinds(options.model)}
        if not is_pretrained(options.model):
            own["model.network_conf"] = NETWORKS.get(options.model.get("network"), None)
        return own

    @cached_property
    def client_facts(self) -> ClientFacts:
        """Return what is known of each client, such as its steps."""
        if self.frozen_facts is not None:
            return self.frozen_facts
        clips = self.clips.features("train").clips
        known = of_clips(clips).clients
        return prepared(known, self.method, self.training.batch_size, clips.path)

    def units(self, clients: Sequence[str], number: int) -> list[list[str]]:
        facts = self.client_facts.select(clients)
        if self.method.user_privacy:
            # Stacks are cut by names alone, and their clients take the same number of steps. Those
            # of a secret sample would depend on who else is in it.
            options = self.experiment.options
            sampled = options.clients_per_round is not None and options.sampling == "poisson"
            alike = self.method.local_steps and not sampled
            largest = self._stack_size if alike else 1
            return [list(clients[at : at + largest]) for at in range(0, len(clients), largest)]
        steps, sizes = (
            dict(zip(clients, facts[name].tolist(), strict=True)) for name in ("steps", "size")
        )
        return stacks_of(clients, steps, sizes, self._stack_size)

    @cached_property
    def _stack_size(self) -> int:
        """Return the number of clients whose activations of a step fit into the allowed memory."""
        batch = self.training.batch_size
        # Always measured on a CPU: the server must cut the same stacks as the clients' machines.
        network = copy_of(self.models.build()).cpu().train()
        # A step without trained parameters keeps nothing.
        one = max(1, step_bytes(network, torch.zeros(1, *self.clips.shape), batch))
        wanted, megabytes = self.training.stack, self.training.stack_mb
        fit = max(1, (megabytes << 20) // one)
        if fit < wanted:
            need = math.ceil(wanted * one / 2**20)
            print(
                f"{fit} clients are trained at once: training.stack {wanted} needs "
                f"training.stack_mb {need}, but it is {megabytes}",
                file=sys.stderr,
            )
        return min(wanted, fit)

    def source(self, clients: Sequence[str], number: int, phase: Phase) -> ClipSource:
        key = self.experiment.seed, number
        if not clients:
            return self._at_server(phase.server_data, key)
        data = self.clips.features("train")
        rows = [self._rows(client) for client in clients]
        facts = self.client_facts.select(clients)
        full = bool(self.method.user_privacy)
        return ClipSource(data, clients, rows, key, self.training, facts, full)

    def _at_server(self, split: str, key: tuple[int, int]) -> ClipSource:
        """Return the clips of a split as the server's; of its own, with the steps of a client."""
        data = self.clips.features(split)
        facts: Mapping[str, np.ndarray] = {}
        if split == ROOT:
            own = as_one(data.clips, SERVER)
            facts = prepared(own, self.method, self.training.batch_size, data.clips.path).values
        everything = slice(0, len(data.clips.labels))
        return ClipSource(data, [SERVER], [everything], key, self.training, facts)

    def _rows(self, client: str) -> slice:
        """Return a client's training clips; none of one that is in the list of clients alone."""
        clips = self.clips.features("train").clips
        # A search, since a list of a million clients is asked for each of them.
        place = bisect_left(clips.clients, client)
        return clips.rows(client) if clips.clients[place : place + 1] == [client] else slice(0, 0)

    def limits(self, phase: Phase, seconds: float) -> Limits:
        """Return bounds by the clips and steps that the method knew before the federation began."""

        def most(name: str, client: str) -> int:
            return self.client_facts.value(name, client)

        return Limits(
            utterances=lambda client: most("size", client),
            steps=lambda client, _: most("steps", client) if phase.trains else 0,
            seconds=seconds,
        )

    def epochs(self, client: str, steps: int) -> float:
        size = self.client_facts.value("size", client)
        return steps * min(size, self.training.batch_size) / size if size else 0.0

    def load(self, state: State, number: int) -> None:
        load_model(tensors_of(self.models.build()), state)

    @as_configured
    def measure(self, split: str, client: str) -> dict[str, object]:
        """Measure mean cross-entropy, nats per clip, and accuracy, %."""
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
        """Return the model's logits (clips, classes) for a client's clips, or all, and labels."""
        data = self.clips.features(split)
        whole = slice(0, len(data.clips.labels))
        rows = whole if client == ALL else data.clips.rows(client)
        labels = torch.from_numpy(np.array(data.clips.labels[rows], np.int64))
        return predict(self.models.build(), self.clips.plain(split, rows)).cpu(), labels

    @as_configured
    def hear(self, features: Tensor) -> Tensor:
        """Return the model's logits (clips, classes) for features that `clips.made` returned."""
        return predict(self.models.build(), features).cpu()

    def speakers(self) -> dict[str, str]:
        """Return client -> its speaker: a client of the keyword recipe is a speaker."""
        return {client: client for client in self.experiment.clients}

    def items(self, held: Sequence[str] = ()) -> Items:
        """Return the training clips by number, and those of the splits `held` as SPLIT/NUMBER."""
        features = {split: self.clips.features(split) for split in ("train", *held)}
        places, speakers = dict[str, tuple[str, int]](), dict[str, str]()
        for split, found in features.items():
            for place, client in enumerate(np.repeat(found.clips.clients, found.clips.sizes)):
                name = str(place) if split == "train" else f"{split}/{place}"
                places[name], speakers[name] = (split, place), str(client)
        owners = {one: who if "/" not in one else "" for one, who in speakers.items()}

        def losses(model: nn.Module, names: Sequence[str]) -> Tensor:
            found = []
            for split, place in (places[name] for name in names):
                mfcc = features[split].plain(slice(place, place + 1))
                label = torch.tensor([int(features[split].clips.labels[place])], device=self.device)
                found.append(F.cross_entropy(model(mfcc[None])[0], label))
            return torch.stack(found)

        def audio(name: str) -> np.ndarray:
            split, place = places[name]
            found: np.ndarray = features[split].plain(slice(place, place + 1))[0].cpu().numpy()
            return found

        def labels(name: str) -> list[int]:
            split, place = places[name]
            return [int(features[split].clips.labels[place])]

        def errors(model: nn.Module, name: str, mfcc: Tensor) -> tuple[int, int]:
            (found,) = predict(model, mfcc[None]).argmax(1).tolist()
            return int([found] != labels(name)), 1

        def source(names: Sequence[str], client: str, number: int, seed: int) -> ClipSource:
            found = [places[name] for name in names]
            chosen = [(features[split].clips, place) for split, place in found]
            data = self.clips.gather(features["train"].clips.taken(chosen, client))
            facts = self.client_facts.select([client])
            rows = [slice(0, len(names))]
            return ClipSource(data, [client], rows, (seed, number), self.training, facts)

        sizes = dict.fromkeys(owners, self._samples)
        return Items(
            owners,
            speakers,
            {one: one for one in owners},
            sizes,
            losses,
            audio,
            source,
            labels,
            loss_at,
            errors,
        )

    def indicator(self, folder: Path, at_once: int) -> Indicator:
        """Return clips, `at_once` of them in a batch."""
        clips = self.clips.read_clips(folder)
        mfcc = self.clips.gather(clips).plain(slice(0, len(clips.labels)))

        def inputs() -> Iterator[Tensor]:
            return iter(torch.split(mfcc[None], at_once, 1))

        trained = set(self.experiment.clients)
        return Indicator(inputs, lambda model, given: model(given), set(clips.clients), trained)


def kind_of_clips(new: NewExperiment[Method]) -> tuple[list[str], int, Path]:
    """Return classes and samples of the clips to train on, and their folder or that of options."""
    if "train" in new.data:
        train = new.data["train"]
        return read_classes(train / "classes.txt"), read_length(train), train
    assert new.known
    return list(new.known.classes), new.known.samples, Path(new.where)


def check_like(clips: Clips, classes: Sequence[str], samples: int, train: Path) -> None:
    """Raise a `UserError` unless clips have the classes and the length of those to train on.

    Args:
        classes, samples: of the clips to train on.
        train: their folder, for messages.
    """
    if clips.classes != list(classes):
        remedy = f"pack the clips again with --classes {train / 'classes.txt'}"
        problem = "not the classes of the training data"
        raise UserError(problem, path=clips.path / "classes.txt", remedy=remedy)
    check_samples(clips, samples, "the training data")


def loss_at(
    network: nn.Module, names: Sequence[str], mfcc: Sequence[Tensor], labels: Sequence[list[int]]
) -> Tensor:
    """Return one client's mean cross-entropy for any clips, see `Items`."""
    values = torch.stack(list(mfcc))[None]
    classes = torch.tensor(labels, device=values.device).T
    weights = torch.full_like(classes, 1 / len(mfcc), dtype=values.dtype)
    return cross_entropy(network, ClipBatch(values, classes, weights, None))[0]


@torch.no_grad()
def predict(network: nn.Module, mfcc: torch.Tensor) -> torch.Tensor:
    """Return one client's network's logits (clips, classes) for clips (clips, frames, 40)."""
    network.eval()
    # Features kept on disk are on no device, and may be in half precision.
    like = next(iter(network.parameters()))
    parts = (part.to(like.device, like.dtype) for part in torch.split(mfcc, _MEASURED_AT_ONCE))
    return torch.cat([network(part[None])[0] for part in parts])
