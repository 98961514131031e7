"""Training of one model on the data of one place, resumable at every step.

All randomness of a step (dropout, SpecAugment) is drawn after seeding torch by the step's own key,
so that a run resumed from a checkpoint is the same, bit for bit, as one that was left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedtools.client.data import Batch, Utterances
from fedtools.client.progress import Progress
from fedtools.files.errors import UserError
from fedtools.files.keyed import generator, seed64
from fedtools.files.states import load_state, save_state
from fedtools.files.updates import MAX_LOSS

# Computes the loss of each utterance of a batch, shape (batch,).
Loss = Callable[[nn.Module, Batch], torch.Tensor]


class Diverged(Exception):
    """The loss or the parameters became NaN or infinite: this result is not to be sent."""


@dataclass(frozen=True)
class Training:
    """How a model is trained, in ESPnet's names.

    `batch_bins` counts frames x bins of a padded batch. `num_threads` is part of the
    configuration because the order of sums, and with it the last bit, depends on it.
    """

    optim: str = "adam"
    optim_conf: dict = field(default_factory=dict)
    scheduler: str | None = None
    scheduler_conf: dict = field(default_factory=dict)
    batch_bins: int = 1_000_000
    grad_clip: float = 5.0
    accum_grad: int = 1
    train_dtype: str = "float32"
    num_threads: int = 1
    save_interval_steps: int = 500

    def __post_init__(self) -> None:
        if self.optim not in OPTIMIZERS:
            raise ValueError(f"optim {self.optim!r} is not one of {', '.join(OPTIMIZERS)}")
        if self.scheduler not in (None, "warmuplr"):
            raise ValueError(f"scheduler {self.scheduler!r} is not 'warmuplr'")
        if self.train_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"train_dtype {self.train_dtype!r} is not float32 or bfloat16")
        for name in ("batch_bins", "accum_grad", "num_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")


@dataclass(frozen=True)
class Fitted:
    """What a training came to: optimiser steps, mean loss per utterance, utterances seen."""

    steps: int
    loss: float
    utterances: int


OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def make_optimizer(
    model: nn.Module, training: Training, where: str | Path | None = None
) -> torch.optim.Optimizer:
    """The optimiser of the configuration, read from `where`, over the trainable parameters."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        # One kernel for all parameters, on the CPU as on a GPU.
        return OPTIMIZERS[training.optim](parameters, fused=True, **training.optim_conf)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"optim_conf: {error}", path=where) from None


def learning_rate(training: Training, base: float, step: int) -> float:
    """The learning rate of a step, counted from 1; "warmuplr" is ESPnet's WarmupLR (Noam)."""
    if training.scheduler is None:
        return base
    warmup = training.scheduler_conf.get("warmup_steps", 25000)
    return base * warmup**0.5 * min(step**-0.5, step * warmup**-1.5)


class Checkpoint:
    """A training in progress: model, optimiser, position; written every so many steps.

    Args:
        path: the file; a checkpoint of another round is not taken up, because the key is in it.
        key: what the training is keyed by.
    """

    def __init__(self, path: Path, key: tuple[int, ...]):
        self._path = path
        self._key = np.array(key, dtype=np.int64)

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, position: list) -> None:
        """Write the state after some step; `position` is (steps, sum of loss, utterances)."""
        state = {f"model.{name}": value for name, value in model.state_dict().items()}
        state |= {
            f"optimizer.{name}": value for name, value in optimizer_state(model, optimizer).items()
        }
        state["key"] = self._key
        state["position"] = np.array(position, dtype=np.float64)
        save_state(self._path, state)

    def resume(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list | None:
        """Put model and optimiser back; returns the position, or None to begin."""
        if not self._path.exists():
            return None
        state = load_state(self._path)
        if not np.array_equal(state.pop("key"), self._key):
            self.remove()
            return None
        steps, total, utterances = state.pop("position").tolist()
        load_model(model.state_dict(), _below(state, "model."))
        load_optimizer(model, optimizer, _below(state, "optimizer."))
        return [int(steps), total, int(utterances)]

    def remove(self) -> None:
        """The training is done and its result is on disk."""
        self._path.unlink(missing_ok=True)


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Utterances,
    training: Training,
    loss: Loss,
    *,
    epochs: int,
    seed: int,
    key: tuple[int | str, ...],
    first_step: int = 0,
    checkpoint: Checkpoint | None = None,
    title: str = "",
) -> Fitted:
    """Train for some epochs over the data.

    Args:
        loss: the loss of each utterance, shape (batch,); a step minimises its mean.
        seed: the experiment's seed.
        key: (round, client): with the seed and the step it determines every random number.
        first_step: optimiser steps taken before, for the schedule of the learning rate.
        checkpoint: where to save progress and to take it up from.
        title: what the progress line calls this training.

    Raises:
        Diverged: if loss or parameters are no longer finite.
    """
    device = next(model.parameters()).device
    position = checkpoint.resume(model, optimizer) if checkpoint else None
    steps, loss_sum, utterances = position or [0, 0.0, 0]
    plan = [
        batch
        for epoch in range(epochs)
        for batch in data.batches(generator(seed, "batches", *key, epoch))
    ]
    groups = [
        plan[start : start + training.accum_grad]
        for start in range(0, len(plan), training.accum_grad)
    ]
    rest = [batch for group in groups[steps:] for batch in group]
    stream = data.stream(rest, device)
    rates = [group["lr"] for group in optimizer.param_groups]
    model.train()
    total = torch.tensor(loss_sum, dtype=torch.float64, device=device)
    with Progress(title, len(groups), done=steps) as progress:
        for step in range(steps, len(groups)):
            rate_step = first_step + step + 1
            for group, base in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = learning_rate(training, base, rate_step)
            torch.manual_seed(seed64(seed, "step", *key, step))
            frames = 0
            for _ in groups[step]:
                batch = next(stream)
                total += _backward(model, batch, training, loss, len(groups[step]))
                utterances += len(batch["speech_lengths"])
                frames += batch["speech"].shape[0] * batch["speech"].shape[1]
            nn.utils.clip_grad_norm_(model.parameters(), training.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            steps = step + 1
            progress.advance(frames, lambda: total.item() / utterances)  # noqa: B023
            # The last state is kept too, until the whole job's results are on disk.
            if checkpoint and (steps % training.save_interval_steps == 0 or steps == len(groups)):
                checkpoint.save(model, optimizer, [steps, total.item(), utterances])
    for group, base in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = base
    mean = total.item() / max(utterances, 1)
    if not abs(mean) <= MAX_LOSS or not all(
        torch.isfinite(value).all() for value in model.state_dict().values()
    ):
        raise Diverged(f"loss {mean} after {steps} steps")
    return Fitted(steps, mean, utterances)


def _backward(
    model: nn.Module, batch: Batch, training: Training, loss: Loss, parts: int
) -> torch.Tensor:
    device = batch["speech"].device.type
    with torch.autocast(device, torch.bfloat16, enabled=training.train_dtype == "bfloat16"):
        losses = loss(model, batch)
    (losses.mean() / parts).backward()
    return losses.detach().sum().double()


def load_model(
    tensors: Mapping[str, torch.Tensor], state: Mapping[str, np.ndarray | torch.Tensor]
) -> None:
    """Copy a state into a model's tensors, by name; those that `state` lacks stay as they are."""
    with torch.no_grad():
        for name, value in state.items():
            tensors[name].copy_(torch.as_tensor(value))


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimiser's tensors as "<its name>.<parameter's name>"."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{kind}.{names[parameter]}": value
        for parameter, slots in optimizer.state.items()
        for kind, value in slots.items()
        if torch.is_tensor(value)
    }


def load_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, np.ndarray],
) -> None:
    """Put back what `optimizer_state` gave."""
    parameters = dict(model.named_parameters())
    for name, value in state.items():
        kind, _, parameter_name = name.partition(".")
        parameter = parameters[parameter_name]
        tensor = torch.as_tensor(np.array(value))
        # Fused optimisers keep their step counts beside the parameters.
        optimizer.state[parameter][kind] = tensor.to(parameter.device)


def _below(state: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }
