"""How any model is trained: options, optimisers, the learning rate, settings of torch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Le
from torch import nn

from fedtools.files.config import (
    Natural,
    NonNegative,
    checked,
    option_error,
    unknown,
)
from fedtools.files.errors import UserError

OptimizerName = Literal["adam", "adamw", "sgd"]
OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
# Far above what is of use.
MAX_THREADS = 1024
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Training:
    """How a model is trained, in ESPnet's names.

    Attributes:
        optim, optim_conf: torch's optimiser and its options.
        scheduler, scheduler_conf: None, or "warmuplr" with `warmup_steps`.
        grad_clip: largest norm of each model's gradient; 0 does not clip.
        train_dtype: "float32", or "bfloat16" for autocast to it.
        num_threads: of each process; part of the configuration because the order of sums, and with
            it the last bit, depends on it.
        save_interval_steps: steps between two checkpoints; 0 for none.
        use_tf32: convolutions and products with 10 bits of mantissa, on GPUs that are faster so;
            without, a stack is as near to its clients one after the other as on a CPU.
    """

    optim: OptimizerName = "adam"
    optim_conf: dict = field(default_factory=dict)
    scheduler: Literal["warmuplr"] | None = None
    scheduler_conf: dict = field(default_factory=dict)
    grad_clip: NonNegative = 0.0
    train_dtype: Literal["float32", "bfloat16"] = "float32"
    num_threads: Annotated[int, Ge(1), Le(MAX_THREADS)] = 1
    save_interval_steps: Natural = 0
    use_tf32: bool = False

    def __post_init__(self) -> None:
        for name in self.scheduler_conf:
            if name != "warmup_steps":
                raise ValueError(f"scheduler_conf: {unknown(name, ['warmup_steps'])}")
        steps = self.warmup_steps
        if not isinstance(steps, (int, float)) or isinstance(steps, bool) or not 0 < steps < 1e12:
            raise ValueError(f"scheduler_conf.warmup_steps is {steps!r}, not a number over 0")

    @property
    def warmup_steps(self) -> float:
        """Steps until the learning rate is at its largest (ESPnet's default)."""
        return self.scheduler_conf.get("warmup_steps", 25000)

    def learning_rate(self, base: float, step: int) -> float:
        """That of a step, counted from 1; "warmuplr" is ESPnet's WarmupLR (Noam)."""
        if self.scheduler is None:
            return base
        warmup = self.warmup_steps
        return base * warmup**0.5 * min(step**-0.5, step * warmup**-1.5)

    def settings(self, threads: int | None = None) -> AbstractContextManager[None]:
        """Compute as these options say; with `threads` in the place of `num_threads`."""
        return torch_settings(threads or self.num_threads, self.use_tf32)


@contextmanager
def torch_settings(threads: int, tf32: bool = False) -> Iterator[None]:
    """Set what torch keeps for the whole process, and put back what was there before.

    Results depend on it to the last bit, so that it is set around work, not where an experiment is
    opened: a process may open several.

    Args:
        threads: of an operation.
        tf32: see `Training.use_tf32`. On a GPU, reruns are made alike.
    """
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = torch.get_num_threads(), cudnn.allow_tf32, matmul.allow_tf32, cudnn.deterministic

    def use(threads: int, convolutions: bool, products: bool, deterministic: bool) -> None:
        torch.set_num_threads(threads)
        cudnn.allow_tf32, matmul.allow_tf32 = convolutions, products
        cudnn.deterministic = deterministic

    # torch's default of TF32 is True for convolutions alone.
    use(threads, tf32, tf32, True)
    try:
        yield
    finally:
        use(*before)


def make_optimizer(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    """The optimiser of the configuration over the trainable parameters.

    Raises:
        UserError: if there is none, as of a model that is frozen whole.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        remedy = "take another kind of adapt than none, which can be measured only"
        raise UserError("the model has no parameter that is trained", remedy=remedy)
    # One kernel for all parameters, on the CPU as on a GPU.
    return OPTIMIZERS[training.optim](parameters, fused=True, **training.optim_conf)


def check_optimizer(training: Training, where: str | Path) -> None:
    """Fail with a `UserError` unless the optimiser, whose options are of `where`, takes steps.

    Whatever torch makes of wrong options, it says when it uses them.
    """
    known = dict(inspect.signature(OPTIMIZERS[training.optim]).parameters)
    del known["params"]
    for name, given in training.optim_conf.items():
        if name not in known:
            raise option_error(f"optim_conf: {unknown(name, known)}", where, name, given)
        # torch takes true for 1.
        if type(known[name].default) in (int, float):
            checked(name, given, float, f"{where}: optim_conf")
    value = nn.Parameter(torch.ones(1))
    try:
        optimizer = make_optimizer(nn.ParameterList([value]), training)
        for _ in range(2):
            value.grad = torch.ones(1)
            optimizer.step()
        problem = "" if value.isfinite() else "a step of the optimiser is not finite"
    except (
        ArithmeticError,
        AssertionError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        problem = str(error)
    if problem:
        options = training.optim_conf
        problem = f"optim_conf: {' '.join(problem.split())}"
        raise option_error(problem, where, "optim_conf", options)


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
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, np.ndarray]
) -> None:
    """Put back what `optimizer_state` gave."""
    parameters = dict(model.named_parameters())
    for name, value in state.items():
        kind, _, parameter_name = name.partition(".")
        parameter = parameters[parameter_name]
        tensor = torch.as_tensor(np.array(value))
        # Fused optimisers keep their step counts beside the parameters.
        optimizer.state[parameter][kind] = tensor.to(parameter.device)


def load_model(
    tensors: Mapping[str, torch.Tensor], state: Mapping[str, np.ndarray | torch.Tensor]
) -> None:
    """Copy a state into a model's tensors, by name; those that `state` lacks stay as they are.

    A tensor of a stack, with a leading client dimension, gives every client the same values.
    """
    with torch.no_grad():
        for name, value in state.items():
            tensors[name].copy_(torch.as_tensor(value))
