"""What the client half of a method works with: a client, a stack of clients, or the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedtools.client.objective import Objective
from fedtools.client.trainer import Trainer, finite
from fedtools.client.unit import Models, Source, Trained, Unit
from fedtools.files.private import PERSONAL_STATE
from fedtools.files.sent_features import sent_names
from fedtools.files.states import spec_of
from fedtools.models.training import load_model


class Client:
    """Who trains in a round, and the data and the models for it.

    Args:
        unit: a client, clients who train as a stack, or the server.
        source: their data.
        models: of the task.
        model: what each begins the round with; `train` changes it in place.
    """

    def __init__(self, unit: Unit, source: Source, models: Models, model: nn.Module):
        self.unit, self.source, self.models, self.model = unit, source, models, model

    @property
    def facts(self) -> Mapping[str, np.ndarray]:
        """What the method's `prepare` said of each client, arrays of shape (K,)."""
        return self.source.facts

    @cached_property
    def objective(self) -> Objective:
        """What the task minimises; it begins with the model as it is when this is asked for."""
        return self.models.objective(self.model, self.source)

    @cached_property
    def start(self) -> dict[str, Tensor]:
        """The parameters as they are when this is first asked for."""
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def copy(self) -> nn.Module:
        """A second model for every client, with what `model` holds now."""
        model = self.models.build(len(self.unit.names), "copy")
        load_model(model.state_dict(), self.model.state_dict())
        return model

    def train(
        self,
        objective: Objective | None = None,
        *,
        epochs: int | None = None,
        steps: int | Sequence[int] | None = None,
        model: nn.Module | None = None,
        only: Callable[[str], bool] | None = None,
        fix_statistics: bool = False,
        keep_optimizer: bool = False,
        purpose: str = "train",
    ) -> list[Trained]:
        """Train every client's model on its data.

        Args:
            objective: what is minimised; by default the task's.
            epochs, steps: how long; by default as the round says.
            model: what is trained; by default the client's.
            only: chooses parameters by name; by default all are trained.
            fix_statistics: a BatchNorm whose parameters are not trained keeps its statistics, and
                normalises by them as in testing.
            keep_optimizer: take up the optimiser of the last round, and keep it for the next; of
                one client, or the server.
            purpose: a second training in a round needs another name, for other random numbers.

        Returns:
            what it came to, for each client; one whose training diverged leaves the others as
            they are.
        """
        model, objective = model or self.model, objective or self.objective
        others = [
            parameter
            for name, parameter in model.named_parameters()
            if only and parameter.requires_grad and not only(name)
        ]
        for parameter in others:
            parameter.requires_grad_(False)
        fixed = untrained_norms(model) if fix_statistics else []
        options, stacked = self.models.training, self.models.stacked
        trainer = Trainer(model, objective, options, self.unit, stacked=stacked, purpose=purpose)
        trainer.take_up(keep_optimizer)
        done = trainer.train(self.source.batches(epochs, steps, purpose), fixed)
        for parameter in others:
            parameter.requires_grad_(True)
        # Who diverged begins the next round as the last one.
        if not any(reason for *_, reason in done):
            trainer.keep(keep_optimizer)
        empty = {str(self.facts["clients"][at]): x for at, x in objective.empty_labels.items()}
        return [
            Trained(count, loss, size, reason, empty_labels=empty)
            for (count, loss, reason), size in zip(done, self.source.sizes, strict=True)
        ]

    def rest(self) -> list[Trained]:
        """Do nothing."""
        return [Trained(0, 0.0, size) for size in self.source.sizes]

    def send_features(self) -> list[Trained]:
        """Send features of one client's utterances, which are computed while they are written.

        They go without their names, which tell speakers, in an order of their own: `sent_names`.
        """
        (client,), (size,) = self.unit.names, self.source.sizes
        names, cut = sent_names(self.source.secret, client, size), self.models.cut()

        def features() -> Iterator[tuple[str, np.ndarray]]:
            self.model.eval()
            for indices, batch in self.source.items(sorted(range(size), key=names.__getitem__)):
                with torch.no_grad():
                    values, lengths = cut.extract(self.model, batch)
                rows = zip(indices, values.float().cpu().numpy(), lengths.tolist(), strict=True)
                for index, matrix, length in rows:
                    yield names[index], matrix[:length]

        return [Trained(0, 0.0, size, features=features())]

    def tensors(self, model: nn.Module | None = None, client: int = 0) -> dict[str, Tensor]:
        """One client's parameters and buffers, not copied."""
        return self.models.tensors(model or self.model, client)

    def recall(self, name: str, model: nn.Module) -> None:
        """Put into `model` what each client kept under `name`; newcomers keep what is there."""
        for client, own in enumerate(self.unit.own):
            views = self.tensors(model, client)
            load_model(views, own.load(name, spec_of(views)) or {})

    def keep(self, name: str, model: nn.Module) -> None:
        """Keep each client's tensors, under `name`, for a later round.

        Of a client whose tensors are not finite nothing is kept: it begins again another time.
        """
        usable = finite(model, self.models.stacked)
        for client, own in enumerate(self.unit.own):
            if usable[client]:
                own.save(name, self.tensors(model, client))

    def keep_personal(self, usable: Sequence[bool]) -> None:
        """Keep what stays at each client whose result can be used."""
        for client, own in enumerate(self.unit.own) if self.unit.personal else ():
            if usable[client]:
                state = self.tensors(client=client)
                own.save(PERSONAL_STATE, {name: state[name] for name in self.unit.personal})


def untrained_norms(model: nn.Module) -> list[nn.Module]:
    """The layers of BatchNorm of which no parameter is trained."""
    norms = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    return [one for one in norms if not any(value.requires_grad for value in one.parameters())]
