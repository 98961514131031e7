"""A place that trains: a client, a stack of clients, or the server, in one round."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedtools.client.fit import Batches, Fitted, Loss, Objective, Run, State, finite, fit
from fedtools.files.private import Private
from fedtools.files.sent_features import sent_names
from fedtools.files.states import load_state, spec_of
from fedtools.models.training import Training, load_model, load_optimizer, make_optimizer
from fedtools.models.training import optimizer_state as state_of

if TYPE_CHECKING:
    from fedtools.models.extractor import Cut

# (epochs, steps of all or of each, purpose) to batches; None is what the round has.
MakeBatches = Callable[["int | None", "int | Sequence[int] | None", str], Batches]

# The count of steps that an optimiser has taken, kept beside its tensors.
_STEPS = "steps"
# What an objective keeps from round to round.
_OBJECTIVE = "objective"


class Place:
    """What the client half of a method works with.

    Attributes:
        names: the clients, those with the most steps first; or "server".
        number: the round.
        model: holds what each client begins the round with; `fit` trains it in place.
        facts: what the method's `prepare` said of each client, arrays of shape (K,); of an owner of
            utterances the number of its "speakers".
        objective: what `fit` minimises by default.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        names: Sequence[str],
        number: int,
        stacked: bool,
        training: Training,
        objective: Objective,
        batches: MakeBatches,
        sizes: Sequence[int],
        own: Sequence[Private],
        seed: int,
        facts: Mapping[str, np.ndarray] | None = None,
        everything: Callable[[Sequence[int]], Iterator[tuple[list[int], Any]]] | None = None,
        cut: Callable[[], Cut] | None = None,
        copies: Callable[[], nn.Module] | None = None,
    ):
        self.names, self.number, self.model = list(names), number, model
        self.facts = facts or {}
        self.stacked, self._training, self.objective = stacked, training, objective
        self._batches, self._sizes, self._own = batches, sizes, list(own)
        self.seed, self.device = seed, next(model.parameters()).device
        self._everything, self._cut = everything, cut
        self._copies = copies or (lambda: copy.deepcopy(model))

    @cached_property
    def start(self) -> dict[str, Tensor]:
        """The parameters as they are when this is first asked for."""
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def copy(self) -> nn.Module:
        """A second model for every client, with what `model` holds now."""
        model = self._copies()
        load_model(model.state_dict(), self.model.state_dict())
        return model

    def fit(
        self,
        objective: Objective | Loss | None = None,
        *,
        epochs: int | None = None,
        steps: int | Sequence[int] | None = None,
        keep_optimizer: bool = False,
        network: nn.Module | None = None,
        only: Callable[[str], bool] | None = None,
        fix_statistics: bool = False,
        purpose: str = "train",
    ) -> list[Fitted]:
        """Train every client's model on its data.

        Args:
            objective: what is minimised, or a loss of each model, (K,); by default the task's.
            epochs, steps: how long; by default as the round says.
            keep_optimizer: take up the optimiser of the last round, and keep it for the next; of
                one client, or the server.
            network: what is trained; by default `model`.
            only: chooses parameters by name; by default all are trained.
            fix_statistics: a BatchNorm whose parameters are not trained keeps its statistics, and
                normalises by them as in testing.
            purpose: a second training in a round needs another name, for other random numbers.

        Returns:
            what it came to, for each client; one whose training diverged leaves the others as
            they are.
        """
        network = network or self.model
        for name, parameter in network.named_parameters() if only else ():
            parameter.requires_grad_(only(name))
        fixed = untrained_norms(network) if fix_statistics else []
        optimizer, before = make_optimizer(network, self._training), 0
        if keep_optimizer:
            before = self._take_up(network, optimizer)
        objective = objective or self.objective
        if not isinstance(objective, Objective):
            objective = Objective(objective)
        if objective.keep:
            (own,) = self._own
            if (kept := own.load(_OBJECTIVE)) is not None:
                objective.load(kept)
                objective.new_round()
        run = Run(network, optimizer, objective, self.stacked)
        key = (self.number, self.names[0] if purpose == "train" else f"{purpose}/{self.names[0]}")
        self._resume(run, purpose)
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        done = fit(
            run,
            self._batches(epochs, steps, purpose),
            self._training,
            seed=self.seed,
            key=key,
            first_step=before,
            save=(lambda state: self._save(state, purpose)) if len(self._own) == 1 else None,
            title=f"round {self.number}, {self.names[0]}{more}",
            fixed=fixed,
        )
        if only:
            network.requires_grad_(True)
        # Who diverged begins the next round as the last one.
        usable = not any(reason for *_, reason in done)
        if keep_optimizer and usable:
            (own,) = self._own
            state = state_of(network, optimizer) | {_STEPS: np.array(before + run.steps)}
            own.save("optimizer", state)
        if objective.keep and usable:
            own.save(_OBJECTIVE, objective.state())
        empty = {str(self.facts["clients"][at]): x for at, x in objective.empty_labels.items()}
        return [
            Fitted(count, loss, size, reason, empty_labels=empty)
            for (count, loss, reason), size in zip(done, self._sizes, strict=True)
        ]

    @property
    def cut(self) -> Cut:
        """Where the extractor ends."""
        return self._cut()

    def rest(self) -> list[Fitted]:
        """Do nothing."""
        return [Fitted(0, 0.0, size) for size in self._sizes]

    def send_features(self) -> list[Fitted]:
        """What one client sends of its utterances: features, computed while they are written.

        They go without their names, which tell speakers, in an order of their own: `sent_names`.
        """
        (client,), (size,) = self.names, self._sizes
        _, first = next(iter(self._everything([0])))
        names = sent_names(first.secret, client, size)

        def features() -> Iterator[tuple[str, np.ndarray]]:
            self.model.eval()
            for indices, batch in self._everything(sorted(range(size), key=names.__getitem__)):
                with torch.no_grad():
                    values, lengths = self.cut.extract(self.model, batch)
                rows = zip(indices, values.float().cpu().numpy(), lengths.tolist(), strict=True)
                for index, matrix, length in rows:
                    yield names[index], matrix[:length]

        return [Fitted(0, 0.0, size, features=features())]

    def tensors(self, network: nn.Module | None = None, client: int = 0) -> dict[str, Tensor]:
        """One client's parameters and buffers, not copied."""
        state = (network or self.model).state_dict()
        return {name: value[client] for name, value in state.items()} if self.stacked else state

    def load_own(self, network: nn.Module, name: str) -> None:
        """Put into `network` what each client kept under `name`; newcomers keep what is there."""
        for client, own in enumerate(self._own):
            views = self.tensors(network, client)
            load_model(views, own.load(name, spec_of(views)) or {})

    def save_own(self, network: nn.Module, name: str) -> None:
        """Keep each client's tensors, under `name`, for a later round.

        Of a client whose tensors are not finite nothing is kept: it begins again another time.
        """
        usable = finite(network, self.stacked)
        for client, own in enumerate(self._own):
            if usable[client]:
                own.save(name, self.tensors(network, client))

    def _take_up(self, network: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Put back the optimiser of the last round; the steps that it has taken."""
        (own,) = self._own
        state = own.load("optimizer")
        if state is None:
            return 0
        steps = int(state.pop(_STEPS))
        load_optimizer(network, optimizer, state)
        return steps

    def _key(self, purpose: str) -> np.ndarray:
        """What tells this training's checkpoint from that of another round or purpose."""
        return np.array([self.number, zlib.crc32(purpose.encode())])

    def _save(self, state: State, purpose: str) -> None:
        self._own[0].save_checkpoint({**state, "key": self._key(purpose)})

    def _resume(self, run: Run, purpose: str) -> None:
        if len(self._own) != 1 or not self._own[0].checkpoint.exists():
            return
        state = load_state(self._own[0].checkpoint)
        if np.array_equal(state.pop("key"), self._key(purpose)):
            run.load(state)


def untrained_norms(network: nn.Module) -> list[nn.Module]:
    """The layers of BatchNorm of which no parameter is trained."""
    norms = [layer for layer in network.modules() if isinstance(layer, _BatchNorm)]
    return [one for one in norms if not any(value.requires_grad for value in one.parameters())]
