"""The training loop, for one model or a stack of models; resumable at every step.

A stack is one network whose parameters all have a leading dimension with one entry per model.
Clients that train one by one each pay the overhead of launching every operation on a batch of a
few clips; a stack pays it once for all. Models are sorted by their number of steps, so that those
that finish first are at the end of the stack and drop out there.

Torch is seeded before each step with the step's own key, from which all its randomness (dropout,
SpecAugment) follows, so that a run resumed from a checkpoint has the same bits as an uninterrupted
one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from fedtools.client.objective import Objective, State, total
from fedtools.client.unit import Batch, Batches, Unit
from fedtools.core.progress import Progress
from fedtools.exchange.messages import MAX_LOSS
from fedtools.exchange.private import Private
from fedtools.exchange.states import load_state
from fedtools.models.training import (
    DTYPES,
    Training,
    load_model,
    load_optimizer,
    make_optimizer,
    optimizer_state,
)

# Names of what a unit keeps between rounds: its optimiser, with the number of steps taken, and the
# state of its objective.
_OPTIMIZER, _STEPS, _OBJECTIVE = "optimizer", "steps", "objective"


class Trainer:
    """A training in progress, with all the state that a checkpoint holds.

    Args:
        model: a network, or a stack of them; parameters that need no gradient are not trained.
        objective: what is minimised.
        training: the options.
        unit: the unit that trains.
        stacked: whether the model's tensors have a leading model dimension.
        purpose: key of the random numbers; a second training in a round needs another one.

    Attributes:
        steps: steps taken so far.
        before: steps taken in earlier rounds, if their optimiser was kept.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        training: Training,
        unit: Unit,
        *,
        stacked: bool,
        purpose: str = "train",
    ):
        self.model, self.objective, self.unit = model, objective, unit
        self.steps, self.before = 0, 0
        self._training, self._stacked, self._purpose = training, stacked, purpose
        self.optimizer = make_optimizer(model, training)
        self._device = next(model.parameters()).device
        # Sums of each model's weighted losses and of the batch weights, (K,).
        self._totals = self._amounts = torch.zeros(0)
        # The results of models that finished before the first: tensors (K, ...).
        self._finished: dict[str, Tensor] = {}

    def train(
        self, batches: Batches, fixed: Iterable[nn.Module] = ()
    ) -> list[tuple[int, float, str]]:
        """Train on all batches, from a checkpoint if there is one.

        Args:
            batches: the batches of all steps.
            fixed: layers to keep in evaluation mode.

        Returns:
            (steps, mean loss, reason why the result is unusable or "") of each model.
        """
        counts = batches.steps
        if not self._resume():
            self._begin(counts)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        random = self.unit.random(self._purpose)
        interval = self._training.save_interval_steps
        self.model.train()
        for layer in fixed:
            layer.eval()
        with Progress(self.unit.title, counts[0], done=self.steps) as progress:
            for number, parts in enumerate(batches.stream(self.steps), self.steps):
                active = sum(count > number for count in counts)
                self._set_rates(rates, number)
                _seed((random + number) % 2**64, self._device)
                self.objective.done = number / counts[0]
                self._step(parts, active)
                if (left := sum(count > self.steps for count in counts)) < active and left:
                    self._keep_finished(left, active)
                progress.advance(sum(batch.frames for batch in parts), self._mean)
                # The last state is saved too: it is needed until the job's results are on disk.
                if interval and (self.steps % interval == 0 or self.steps == counts[0]):
                    self._save()
        self._put_back(sum(count == counts[0] for count in counts))
        means = (self._totals / self._amounts.clamp(min=1)).tolist()
        return [
            (count, mean, _reason(mean, usable))
            for count, mean, usable in zip(
                counts, means, finite(self.model, self._stacked), strict=True
            )
        ]

    def _begin(self, counts: list[int]) -> None:
        self._totals = torch.zeros(len(counts), dtype=torch.float64, device=self._device)
        self._amounts = torch.zeros_like(self._totals)
        if self._stacked and 0 in counts:
            self._keep_finished(counts.index(0), len(counts))

    def _step(self, parts: Sequence[Batch], active: int) -> None:
        """Take an optimiser step with the mean gradient of the batches."""
        for batch in parts:
            losses = self._backward(batch, len(parts))
            self._totals[:active] += losses * batch.amount
            self._amounts[:active] += batch.amount
        if self._training.grad_clip:
            clip(self.model, self._training.grad_clip, self._stacked)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.objective.after_step(self.model, active)
        self.steps += 1

    def _backward(self, batch: Batch, parts: int) -> Tensor:
        dtype = DTYPES[self._training.train_dtype]
        low = torch.autocast(self._device.type, dtype) if dtype != torch.float32 else nullcontext()
        with low:
            losses = self.objective.loss(self.model, batch)
        mean = losses.sum() / parts if parts > 1 else losses.sum()
        torch.autograd.backward(mean)
        return losses.detach().double()

    def take_up(self, optimizer: bool) -> None:
        """Restore the state kept in the last round by one client or the server.

        Args:
            optimizer: whether to restore the optimiser in addition to the objective.
        """
        if optimizer and (state := self._home().load(_OPTIMIZER)) is not None:
            self.before = int(state.pop(_STEPS))
            load_optimizer(self.model, self.optimizer, state)
        if self.objective.keep and (kept := self._home().load(_OBJECTIVE)) is not None:
            self.objective.load(kept)
            self.objective.new_round()

    def keep(self, optimizer: bool) -> None:
        """Keep the state that `take_up` restores in the next round."""
        if optimizer:
            state = optimizer_state(self.model, self.optimizer)
            self._home().save(_OPTIMIZER, state | {_STEPS: np.array(self.before + self.steps)})
        if self.objective.keep:
            self._home().save(_OBJECTIVE, self.objective.state())

    def _home(self) -> Private:
        if self.unit.home is None:
            raise ValueError("clients that train together keep neither optimiser nor objective")
        return self.unit.home

    def state(self) -> State:
        """Return all tensors of a checkpoint."""
        run = {"steps": np.array(self.steps), "totals": self._totals, "amounts": self._amounts}
        parts = {
            "model": self.model.state_dict(),
            "optimizer": optimizer_state(self.model, self.optimizer),
            "objective": self.objective.state(),
            "finished": self._finished,
            "run": run,
        }
        return {f"{part}/{name}": parts[part][name] for part in parts for name in parts[part]}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore the tensors returned by `state`."""
        parts: dict[str, dict[str, np.ndarray]] = {}
        for name, value in state.items():
            part, _, rest = name.partition("/")
            parts.setdefault(part, {})[rest] = value
        load_model(self.model.state_dict(), parts["model"])
        load_optimizer(self.model, self.optimizer, parts.get("optimizer", {}))
        self.objective.load(parts.get("objective", {}))
        self.steps = int(parts["run"]["steps"])
        self._totals, self._amounts = (
            torch.as_tensor(parts["run"][name]).to(self._device) for name in ("totals", "amounts")
        )
        self._finished = {
            name: torch.as_tensor(value).to(self._device)
            for name, value in parts.get("finished", {}).items()
        }

    def _save(self) -> None:
        if self.unit.home is not None:
            self.unit.home.save_checkpoint({**self.state(), "key": self.unit.key(self._purpose)})

    def _resume(self) -> bool:
        """Load the checkpoint of this round and purpose; return whether there was one."""
        if self.unit.home is None or not self.unit.home.checkpoint.exists():
            return False
        state = load_state(self.unit.home.checkpoint)
        if not np.array_equal(state.pop("key"), self.unit.key(self._purpose)):
            return False
        self.load(state)
        return True

    def _set_rates(self, rates: list[float], number: int) -> None:
        if self._training.scheduler is not None:
            step = self.before + number + 1
            for group, base in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = self._training.learning_rate(base, step)

    def _keep_finished(self, first: int, last: int) -> None:
        """Save the results of models `first` to `last` - 1, which momentum would change."""
        for name, value in self.model.state_dict().items():
            kept = self._finished.setdefault(name, torch.zeros_like(value))
            kept[first:last] = value[first:last]

    def _put_back(self, first: int) -> None:
        """Restore the saved results of models `first` and later."""
        for name, value in self.model.state_dict().items() if self._finished else ():
            value[first:] = self._finished[name][first:]

    def _mean(self) -> float:
        return (self._totals.sum() / self._amounts.sum()).item()


def finite(model: nn.Module, stacked: bool) -> list[bool]:
    """Return for each model of a stack whether its tensors and their sums are finite."""
    values = list(model.state_dict().values())
    # A tensor that all models share has one row.
    rows = max(map(len, values)) if stacked else 1
    floats = [value.detach() for value in values if value.is_floating_point()]
    # Usually all are finite, which one check of all models together shows.
    if torch.stack(torch._foreach_norm(floats)).isfinite().all():
        return [True] * rows
    sums = total(_rows(value if stacked else value[None]).sum(1) for value in floats)
    usable: list[bool] = sums.isfinite().tolist()
    return usable


def clip(model: nn.Module, largest: float, stacked: bool) -> None:
    """Clip each model's gradient, over all parameters, to a norm of at most `largest`."""
    if not stacked:
        nn.utils.clip_grad_norm_(list(model.parameters()), largest)
        return
    found = [(value, value.grad) for value in model.parameters() if value.grad is not None]
    norms = total(_rows(gradient).square().sum(1) for _, gradient in found).sqrt()
    factors = (largest / (norms + 1e-6)).clamp(max=1)
    for value, gradient in found:
        # Not in place: with one client and one clip, two gradients can share memory.
        value.grad = gradient * factors.view(-1, *[1] * (value.ndim - 1))


def _rows(value: Tensor) -> Tensor:
    """Reshape a tensor (K, ...) to a matrix of K rows."""
    return value[..., None].flatten(1)


def _seed(seed: int, device: torch.device) -> None:
    # torch.manual_seed() keeps a stack trace for each device type that was not used yet.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)


def _reason(mean: float, usable: bool) -> str:
    if math.isfinite(mean) and abs(mean) <= MAX_LOSS and usable:
        return ""
    return f"diverged: loss {mean:g}" + ("" if usable else ", parameters not finite")
