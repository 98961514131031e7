"""Training options shared by all models: optimisers, the learning rate, settings of torch."""

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

from fedtools.core.config import (
    Natural,
    NonNegative,
    checked,
    option_error,
    unknown,
)
from fedtools.core.errors import UserError

OptimizerName = Literal["adam", "adamw", "sgd"]
OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def _uncompiled(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return an optimiser whose methods do not import torch's compiler.

    Nothing is compiled here, and the import takes longer than the rest of a small experiment.
    """
    methods = {
        name: inspect.unwrap(getattr(kind, name)) for name in ("add_param_group", "zero_grad")
    }
    return type(
        kind.__name__, (kind,), {**methods, "step": torch.no_grad()(inspect.unwrap(kind.step))}
    )


_UNCOMPILED = {name: _uncompiled(kind) for name, kind in OPTIMIZERS.items()}
# Far above any useful number.
MAX_THREADS = 1024
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Training:
    """Options of training, with ESPnet's names.

    Attributes:
        optim, optim_conf: torch's optimiser and its options.
        scheduler, scheduler_conf: None, or "warmuplr" with `warmup_steps`.
        grad_clip: largest norm of each model's gradient; 0 does not clip.
        train_dtype: "float32", or "bfloat16" for autocast to it.
        num_threads: threads of each process; part of the configuration because the order of sums,
            and with it the last bit, depends on it.
        save_interval_steps: steps between two checkpoints; 0 for none.
        use_tf32: compute convolutions and products with 10 bits of mantissa, which is faster on
            some GPUs. Without it, training in a stack and one by one differ no more than on a CPU.
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
        """Return the steps until the learning rate peaks; the default is ESPnet's."""
        return self.scheduler_conf.get("warmup_steps", 25000)

    def learning_rate(self, base: float, step: int) -> float:
        """Return the learning rate of a step, counted from 1.

        Scheduler "warmuplr" is ESPnet's WarmupLR (Noam).
        """
        if self.scheduler is None:
            return base
        warmup = self.warmup_steps
        return base * warmup**0.5 * min(step**-0.5, step * warmup**-1.5)

    def settings(self, threads: int | None = None) -> AbstractContextManager[None]:
        """Return a context of torch's settings by these options, with `threads` if given."""
        return torch_settings(threads or self.num_threads, self.use_tf32)


@contextmanager
def torch_settings(threads: int, tf32: bool = False) -> Iterator[None]:
    """Set torch's process-wide settings, and restore the previous ones at the end.

    On a GPU, reruns are made deterministic. Results depend on the settings to the last bit. They
    are set around work, not when an experiment is opened, because a process may open several.

    Args:
        threads: threads of an operation.
        tf32: see `Training.use_tf32`.
    """
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = torch.get_num_threads(), cudnn.allow_tf32, matmul.allow_tf32, cudnn.deterministic

    def use(threads: int, convolutions: bool, products: bool, deterministic: bool) -> None:
        torch.set_num_threads(threads)
        cudnn.allow_tf32, matmul.allow_tf32 = convolutions, products
        cudnn.deterministic = deterministic

    # By default, torch uses TF32 for convolutions, but not for products.
    use(threads, tf32, tf32, True)
    try:
        yield
    finally:
        use(*before)


def make_optimizer(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    """Return the configured optimiser over the trainable parameters.

    Raises:
        UserError: if there are no trainable parameters, as in a model that is completely frozen.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        remedy = "take another kind of adapt than none, which is for evaluation only"
        raise UserError("the model has no trainable parameters", remedy=remedy)
    # One kernel for all parameters, on the CPU as on a GPU.
    return _UNCOMPILED[training.optim](parameters, fused=True, **training.optim_conf)


def check_optimizer(training: Training, where: str | Path) -> None:
    """Raise a `UserError` unless the optimiser, with options from `where`, can take steps.

    torch reports wrong options only when it uses them.
    """
    known = dict(inspect.signature(OPTIMIZERS[training.optim]).parameters)
    del known["params"]
    for name, given in training.optim_conf.items():
        if name not in known:
            raise option_error(f"optim_conf: {unknown(name, known)}", where, name, given)
        # torch accepts true for 1.
        if type(known[name].default) in (int, float):
            checked(name, given, float, f"{where}: optim_conf")
    value = nn.Parameter(torch.ones(1))
    try:
        optimizer = make_optimizer(nn.ParameterList([value]), training)
        for _ in range(2):
            value.grad = torch.ones(1)
            optimizer.step()
        problem = "" if value.isfinite() else "the optimiser's step is not finite"
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
    """Return the optimiser's tensors by "<tensor's name>.<parameter's name>"."""
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
    """Restore an optimiser's tensors from the result of `optimizer_state`."""
    parameters = dict(model.named_parameters())
    for name, value in state.items():
        kind, _, parameter_name = name.partition(".")
        parameter = parameters[parameter_name]
        tensor = torch.as_tensor(np.array(value))
        # Fused optimisers keep their step counts on the parameters' device.
        optimizer.state[parameter][kind] = tensor.to(parameter.device)


def load_model(
    tensors: Mapping[str, torch.Tensor], state: Mapping[str, np.ndarray | torch.Tensor]
) -> None:
    """Copy a state into a model's tensors, by name; tensors missing in `state` are unchanged.

    A tensor of a stack, with a leading client dimension, gives every client the same values.
    """
    with torch.no_grad():
        for name, value in state.items():
            tensors[name].copy_(torch.as_tensor(value))
