"""The interface to local training that methods use: a client, a stack of clients or the server."""

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
from fedtools.exchange.private import PERSONAL_STATE, Private, save_each
from fedtools.exchange.sent_features import sent_names
from fedtools.exchange.states import spec_of
from fedtools.models.stacked import held_once
from fedtools.models.training import load_model


class Client:
    """A training unit in a round, with its data and models.

    Args:
        unit: a client, a stack of clients, or the server.
        source: the data of the unit.
        models: the models of the task.
        model: the model at the start of the round; `train` changes it in place.
    """

    def __init__(self, unit: Unit, source: Source, models: Models, model: nn.Module):
        self.unit, self.source, self.models, self.model = unit, source, models, model

    @property
    def facts(self) -> Mapping[str, np.ndarray]:
        """Return the values of the method's `prepare` for each client, arrays of shape (K,)."""
        return self.source.facts

    @cached_property
    def objective(self) -> Objective:
        """Return the task's objective, created from the model as it is at the first access."""
        return self.models.objective(self.model, self.source)

    @cached_property
    def start(self) -> dict[str, Tensor]:
        """Return a copy of the parameters as they are at the first access."""
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def copy(self) -> nn.Module:
        """Return a second model for every client, with the current tensors of `model`."""
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
            objective: the objective; by default the task's.
            epochs, steps: length of the training; by default that of the round.
            model: the model to train; by default the client's.
            only: selects the parameters to train by name; by default all.
            fix_statistics: whether a BatchNorm without trained parameters keeps its statistics
                and normalises with them, as in evaluation mode.
            keep_optimizer: whether to restore the optimiser state of the last round and keep it
                for the next; only for one client or the server.
            purpose: key of the random numbers; a second training in a round needs another one.

        Returns:
            the result of each client; a client whose training diverged does not affect others.
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
        # A client that diverged starts the next round from the optimiser state of the last one.
        if not any(reason for *_, reason in done):
            trainer.keep(keep_optimizer)
        empty = {str(self.facts["clients"][at]): x for at, x in objective.empty_labels.items()}
        return [
            Trained(count, loss, size, reason, empty_labels=empty)
            for (count, loss, reason), size in zip(done, self.source.sizes, strict=True)
        ]

    def rest(self) -> list[Trained]:
        """Return results without training."""
        return [Trained(0, 0.0, size) for size in self.source.sizes]

    def send_features(self) -> list[Trained]:
        """Send the features of one client's utterances, computed while they are written.

        The utterance names, which identify speakers, are replaced and reordered: `sent_names`.
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
        """Return one client's parameters and buffers, not copied."""
        return self.models.tensors(model or self.model, client)

    def recall(self, name: str, model: nn.Module) -> None:
        """Load into `model` what each client kept under `name`; new clients are left unchanged."""
        for client, own in enumerate(self.unit.own):
            views = self._own(model, client)
            load_model(views, own.load(name, spec_of(views)) or {})

    def keep(self, name: str, model: nn.Module) -> None:
        """Keep each client's tensors under `name` for a later round.

        A client with tensors that are not finite keeps its previous ones. Those that all clients
        share are not kept again for each.
        """
        save_each(name, self._kept(model, finite(model, self.models.stacked)))

    def keep_personal(self, usable: Sequence[bool]) -> None:
        """Keep the personal tensors of each client whose result is usable."""
        if personal := self.unit.personal:
            kept = self._kept(self.model, usable)
            own = ((owner, {name: state[name] for name in personal}) for owner, state in kept)
            save_each(PERSONAL_STATE, own)

    def _kept(
        self, model: nn.Module, usable: Sequence[bool]
    ) -> Iterator[tuple[Private, dict[str, Tensor]]]:
        """Yield the files and the tensors of each client whose result is usable."""
        for client, owner in enumerate(self.unit.own):
            if usable[client]:
                yield owner, self._own(model, client)

    def _own(self, model: nn.Module, client: int) -> dict[str, Tensor]:
        """Return one client's tensors, without those that all clients share."""
        shared = held_once(model)
        tensors = self.tensors(model, client)
        return {name: value for name, value in tensors.items() if name not in shared}


def untrained_norms(model: nn.Module) -> list[nn.Module]:
    """Return the BatchNorm layers without trained parameters."""
    norms = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    return [one for one in norms if not any(value.requires_grad for value in one.parameters())]
