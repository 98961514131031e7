"""The training loop: of one model, or of a stack of models at once; resumable at every step.

A stack is one network whose every parameter has a leading dimension, one model after another.
Clients that trained one after the other would each pay for starting every operation on a batch of a
few clips; a stack pays once for all. Sorted by their number of steps, those that have finished drop
out at its end.

All randomness of a step (dropout, SpecAugment) is drawn after seeding torch by the step's own key,
so that a run resumed from a checkpoint is the same, bit for bit, as one that was left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fedtools.client.options import (
    DTYPES,
    Training,
    load_model,
    load_optimizer,
    optimizer_state,
)
from fedtools.files.keyed import seed64
from fedtools.files.messages import MAX_LOSS
from fedtools.files.progress import Progress

# The loss of each model of a batch, shape (K,); K is 1 for a model that is no stack.
Loss = Callable[[nn.Module, Any], Tensor]
State = dict[str, "Tensor | np.ndarray"]


class Batch(Protocol):
    """What a loss is given; `amount` is its weight in the mean loss, `frames` its size."""

    amount: int
    frames: int


class Batches(Protocol):
    """The batches of a training; `steps` are those of each model, not growing along the stack."""

    steps: list[int]

    def stream(self, first: int) -> Iterator[list[Batch]]:
        """The batches of each step from number `first`, of which the gradient is the mean."""


class Objective:
    """What training minimises; methods derive from it where a loss alone does not say it.

    Args:
        loss: of each model, shape (K,).
    """

    # Whether its state lives on from round to round; of one client, or the server.
    keep = False
    # The share of the training's steps taken so far, for what grows or falls along it.
    done = 0.0

    def __init__(self, loss: Loss):
        self.loss = loss

    def new_round(self) -> None:
        """What happens to a state that was kept, when the next round begins."""

    @property
    def empty_labels(self) -> Mapping[int, float]:
        """Each client's share of utterances trained on with an empty label in this round."""
        return {}

    def after_step(self, model: nn.Module, active: int) -> None:
        """What happens after each step of the optimiser, such as an update of a teacher.

        Args:
            active: of a stack, how many models took this step, the first ones; momentum moves the
                others on too, but not to where they will end.
        """

    def state(self) -> State:
        """The tensors that checkpoints keep, and `load` puts back."""
        return {}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Put back what `state` gave."""


@dataclass(frozen=True)
class Fitted:
    """What a training came to: optimiser steps, mean loss, the size of the data.

    `reason` says why the result cannot be used: loss or parameters are not finite. It may carry
    what a phase sends in place of the shared tensors: tensors of no model, or features.
    `empty_labels` is each client's share of utterances that had an empty label; a server trains on
    those of many clients.
    """

    steps: int
    loss: float
    utterances: int
    reason: str = ""
    tensors: Mapping[str, Tensor | np.ndarray] | None = None
    features: Any = None
    empty_labels: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Run:
    """A training in progress: what `fit` changes, and what a checkpoint holds.

    Attributes:
        model: a network, or a stack of them.
        stacked: whether its tensors have a leading dimension.
        steps: taken so far.
        totals, amounts: sums of each model's loss and of the batches' weights, (K,).
        finished: the results of models that have fewer steps than the first: tensors (K, ...).
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    objective: Objective
    stacked: bool
    steps: int = 0
    totals: Tensor | None = None
    amounts: Tensor | None = None
    finished: dict[str, Tensor] = field(default_factory=dict)

    def state(self) -> State:
        """All tensors, for a checkpoint."""
        parts = {
            "model": self.model.state_dict(),
            "optimizer": optimizer_state(self.model, self.optimizer),
            "objective": self.objective.state(),
            "finished": self.finished,
            "run": {"steps": np.array(self.steps), "totals": self.totals, "amounts": self.amounts},
        }
        return {f"{part}/{name}": parts[part][name] for part in parts for name in parts[part]}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Put back what `state` gave."""
        parts: dict[str, dict[str, np.ndarray]] = {}
        for name, value in state.items():
            part, _, rest = name.partition("/")
            parts.setdefault(part, {})[rest] = value
        load_model(self.model.state_dict(), parts["model"])
        load_optimizer(self.model, self.optimizer, parts.get("optimizer", {}))
        self.objective.load(parts.get("objective", {}))
        device = next(self.model.parameters()).device
        self.steps = int(parts["run"]["steps"])
        self.totals, self.amounts = (
            torch.as_tensor(parts["run"][name]).to(device) for name in ("totals", "amounts")
        )
        self.finished = {
            name: torch.as_tensor(value).to(device)
            for name, value in parts.get("finished", {}).items()
        }

    def keep_finished(self, first: int, last: int) -> None:
        """Take the results of a stack's models `first` to `last` - 1: momentum would move them."""
        for name, value in self.model.state_dict().items():
            kept = self.finished.setdefault(name, torch.zeros_like(value))
            kept[first:last] = value[first:last]

    def put_back(self, first: int) -> None:
        """Put the results of models from `first` on back into the model."""
        for name, value in self.model.state_dict().items() if self.finished else ():
            value[first:] = self.finished[name][first:]

    def finite(self) -> list[bool]:
        """Whether each model's tensors are finite (and so small that their sums are)."""
        return finite(self.model, self.stacked)


def finite(model: nn.Module, stacked: bool) -> list[bool]:
    """Whether the tensors of each model of a stack are finite, as are their sums."""
    values = [*model.parameters(), *model.buffers()]
    rows = len(values[0]) if stacked else 1
    floats = [value.detach() for value in values if value.is_floating_point()]
    # Mostly all are, and then a look at all models at once will do.
    if torch.stack(torch._foreach_norm(floats)).isfinite().all():
        return [True] * rows
    sums = sum(_rows(value if stacked else value[None]).sum(1) for value in floats)
    return sums.isfinite().tolist()


def _rows(value: Tensor) -> Tensor:
    """A tensor (K, ...) as a matrix of K rows."""
    return value[..., None].flatten(1)


def fit(
    run: Run,
    batches: Batches,
    training: Training,
    *,
    seed: int,
    key: tuple[int | str, ...],
    first_step: int = 0,
    save: Callable[[State], None] | None = None,
    title: str = "",
    fixed: Iterable[nn.Module] = (),
) -> list[tuple[int, float, str]]:
    """Train to the end of the batches.

    Args:
        run: the training; may have begun earlier.
        seed: the experiment's seed.
        key: (round, client): with the seed and the step it determines every random number.
        first_step: optimiser steps taken before, for the schedule of the learning rate.
        save: receives the state every `save_interval_steps`.
        title: what the progress line calls this training.
        fixed: layers that work as in testing.

    Returns:
        (steps, mean loss, reason why it cannot be used or "") of each model.
    """
    counts, model, optimizer = batches.steps, run.model, run.optimizer
    device = next(model.parameters()).device
    if run.totals is None:
        run.totals = torch.zeros(len(counts), dtype=torch.float64, device=device)
        run.amounts = torch.zeros_like(run.totals)
        if run.stacked and 0 in counts:
            run.keep_finished(counts.index(0), len(counts))
    rates = [group["lr"] for group in optimizer.param_groups]
    random = seed64(seed, "step", *key)
    model.train()
    for layer in fixed:
        layer.eval()
    with Progress(title, counts[0], done=run.steps) as progress:
        for number, parts in enumerate(batches.stream(run.steps), run.steps):
            active = sum(count > number for count in counts)
            _set_rates(optimizer, rates, training, first_step + number + 1)
            _seed((random + number) % 2**64, device)
            run.objective.done = number / counts[0]
            for batch in parts:
                losses = _backward(run, batch, device, training, len(parts))
                run.totals[:active] += losses * batch.amount
                run.amounts[:active] += batch.amount
            if training.grad_clip:
                clip(model, training.grad_clip, run.stacked)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            run.objective.after_step(model, active)
            run.steps = number + 1
            if (left := sum(count > run.steps for count in counts)) < active and left:
                run.keep_finished(left, active)
            progress.advance(sum(batch.frames for batch in parts), lambda: _mean(run))
            # The last state is kept too, until the whole job's results are on disk.
            interval = training.save_interval_steps
            if save and interval and (run.steps % interval == 0 or run.steps == counts[0]):
                save(run.state())
    run.put_back(sum(count == counts[0] for count in counts))
    for group, base in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = base
    means = (run.totals / run.amounts.clamp(min=1)).tolist()
    return [
        (count, mean, _reason(mean, usable))
        for count, mean, usable in zip(counts, means, run.finite(), strict=True)
    ]


def _seed(seed: int, device: torch.device) -> None:
    # torch.manual_seed() would keep a stack trace for each kind of device that was not used yet.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)


def _set_rates(
    optimizer: torch.optim.Optimizer, rates: Sequence[float], training: Training, step: int
) -> None:
    if training.scheduler is not None:
        for group, base in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = training.learning_rate(base, step)


def _backward(
    run: Run, batch: Batch, device: torch.device, training: Training, parts: int
) -> Tensor:
    low = training.train_dtype != "float32"
    with torch.autocast(device.type, DTYPES[training.train_dtype]) if low else nullcontext():
        losses = run.objective.loss(run.model, batch)
    total = losses.sum()
    (total / parts if parts > 1 else total).backward()
    return losses.detach().double()


def clip(model: nn.Module, largest: float, stacked: bool) -> None:
    """Shrink each model's gradient, over all parameters, to a norm of at most `largest`."""
    parameters = [value for value in model.parameters() if value.grad is not None]
    if not stacked:
        nn.utils.clip_grad_norm_(parameters, largest)
        return
    norms = sum(_rows(value.grad).square().sum(1) for value in parameters).sqrt()
    factors = (largest / (norms + 1e-6)).clamp(max=1)
    for value in parameters:
        # Not in place: of one client's one clip, two gradients can be views of the same memory.
        value.grad = value.grad * factors.view(-1, *[1] * (value.ndim - 1))


def _mean(run: Run) -> float:
    return (run.totals.sum() / run.amounts.sum()).item()


def _reason(mean: float, usable: bool) -> str:
    if math.isfinite(mean) and abs(mean) <= MAX_LOSS and usable:
        return ""
    return f"diverged: loss {mean:g}" + ("" if usable else ", parameters not finite")
