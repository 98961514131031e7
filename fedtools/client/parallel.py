"""Many clients trained at once, as one network with a leading client dimension.

Clients that trained one after the other would each pay for starting every operation on a batch of
a few clips; a stack pays once for all. Sorted by their number of steps, those that have finished
drop out at the end of the stack. Every random number is keyed by round and client, so a client's
training does not depend on who else is in its stack, apart from rounding. (AdamW makes whole steps
of rounding where a gradient is zero, as that of a bias before BatchNorm or of an attention's key.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedtools.audio.augment import Augment, Plan, plan
from fedtools.client.clips import ClipBatch, ClipFeatures
from fedtools.client.progress import Progress
from fedtools.client.train import (
    OPTIMIZERS,
    Fitted,
    load_optimizer,
    make_optimizer,
    optimizer_state,
)
from fedtools.files.config import from_mapping
from fedtools.files.experiment import Experiment
from fedtools.files.states import load_state, save_state, spec_of
from fedtools.files.updates import MAX_LOSS
from fedtools.models.keywords import Network


@dataclass(frozen=True)
class ClipTraining:
    """How keyword networks are trained.

    Attributes:
        optim, optim_conf: torch's optimiser and its options.
        batch_size: clips of a step; a client with fewer takes all it has.
        stack: clients trained at once; 1 trains them one after the other. Part of the
            configuration because the order of sums, and with it the last bit, depends on it.
        stack_mb: a stack gets smaller if the activations of a step would need more memory, in each
            process.
        grad_clip: largest norm of each client's gradient; 0 does not clip.
        num_threads: of each process; part of the configuration as `stack` is.
        use_tf32: convolutions and products with 10 bits of mantissa, on GPUs that are faster so;
            without, a stack is as near to its clients one after the other as on a CPU.
        augment: fields of `fedtools.audio.augment.Augment`.
    """

    optim: str = "sgd"
    optim_conf: dict = field(default_factory=dict)
    batch_size: int = 32
    stack: int = 16
    stack_mb: int = 4000
    grad_clip: float = 0.0
    num_threads: int = 1
    use_tf32: bool = False
    augment: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.optim not in OPTIMIZERS:
            raise ValueError(f"optim {self.optim!r} is not one of {', '.join(OPTIMIZERS)}")
        for name in ("batch_size", "stack", "stack_mb", "num_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if not 0 <= self.grad_clip < math.inf:
            raise ValueError(f"grad_clip {self.grad_clip} is not 0 or a largest norm")
        from_mapping(Augment, self.augment, "augment")

    @cached_property
    def augmentation(self) -> Augment:
        """What happens to training audio."""
        return Augment(**self.augment)


# Computes each client's loss of a batch, shape (K,).
StackLoss = Callable[[Network, ClipBatch], Tensor]


def log_probabilities(network: Network, batch: ClipBatch) -> Tensor:
    """Natural logarithms of the network's predictions, (K, B, classes)."""
    return F.log_softmax(network(batch.mfcc, batch.valid), -1)


def cross_entropy(network: Network, batch: ClipBatch) -> Tensor:
    """Each client's mean cross-entropy, (K,)."""
    log_probs = log_probabilities(network, batch)
    return batch.mean(-log_probs.gather(2, batch.labels[..., None])[..., 0])


def tensors_of(network: Network, client: int = 0) -> dict[str, Tensor]:
    """Views of one client's parameters and buffers, without the leading dimension."""
    return {name: value[client] for name, value in network.state_dict().items()}


class Stack:
    """Some clients, or the server, in one round: what a method's `train_client` works with.

    Attributes:
        names: the clients, those with the most steps first.
        number: the round.
        model: holds what each client begins the round with; `fit` trains it in place.
        facts: what the method's `prepare` said of each client, arrays of shape (K,).
        start: the parameters that each client began the round with, each (K, ...).
    """

    def __init__(
        self,
        experiment: Experiment,
        names: Sequence[str],
        folders: Sequence[Path],
        number: int,
        model: Network,
        make_network: Callable[[int], Network],
        data: ClipFeatures,
        rows: Sequence[slice],
        facts: Mapping[str, np.ndarray],
        training: ClipTraining,
    ):
        self.names = list(names)
        self.number = number
        self.model = model
        self.facts = facts
        self.start = {name: value.detach().clone() for name, value in model.named_parameters()}
        self._experiment = experiment
        self._folders = list(folders)
        self._rows = list(rows)
        self._sizes = [place.stop - place.start for place in rows]
        self._make_network = make_network
        self._data = data
        self._training = training

    def copy(self) -> Network:
        """A second network for every client, with what `model` holds now."""
        network = self._make_network(len(self.names)).to(self._data.device)
        network.load_state_dict(self.model.state_dict())
        return network

    def fit(
        self,
        *,
        steps: int | Sequence[int] | None = None,
        keep_optimizer: bool = False,
        loss: StackLoss = cross_entropy,
        network: Network | None = None,
        only: Callable[[str], bool] | None = None,
        purpose: str = "train",
    ) -> list[Fitted]:
        """Train every client's network on its clips.

        Args:
            steps: gradient steps, of all clients or of each, not growing along the stack; by
                default those of the round.
            keep_optimizer: take up the optimiser of the last round, and keep it for the next.
            loss: each client's value, (K,).
            network: what is trained; by default `model`.
            only: chooses parameters by name; by default all are trained.
            purpose: a second training in a round needs another name, for other random numbers.

        Returns:
            steps, mean loss and clips of each client; a loss that is not finite means that the
            client's training diverged, which leaves the others as they are.
        """
        network = network or self.model
        counts = self._counts(steps)
        plans = self._plans(counts, purpose)
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(only is None or only(name))
        trained = [value for value in network.parameters() if value.requires_grad]
        optimizer = make_optimizer(network, self._training)
        if keep_optimizer:
            self._load(network, optimizer)
        network.train()
        device = self._data.device
        totals = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        finished: list[dict[str, Tensor]] = [{}] * len(self.names)
        title = f"round {self.number}, {self.names[0]}"
        title += f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        with Progress(title, counts[0]) as progress:
            for step in range(counts[0]):
                active = sum(count > step for count in counts)
                batch = self._data.batch(self._rows[:active], plans[:active], step)
                losses = loss(network, batch)
                losses.sum().backward()
                if self._training.grad_clip:
                    clip_each(trained, self._training.grad_clip)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                totals[:active] += losses.detach()
                for client in range(active):
                    # Momentum would move a finished client on: its result is taken now.
                    if counts[client] == step + 1 < counts[0]:
                        views = tensors_of(network, client)
                        finished[client] = {name: value.clone() for name, value in views.items()}
                frames = int(batch.labels.numel()) * batch.mfcc.shape[2]
                progress.advance(frames, lambda: losses.mean().item())  # noqa: B023
        for client, result in enumerate(finished):
            for name, view in tensors_of(network, client).items():
                if result:
                    view.copy_(result[name])
        if keep_optimizer:
            self._save(network, optimizer)
        network.requires_grad_(True)
        means = (totals.cpu() / torch.tensor(counts).clamp(min=1)).tolist()
        usable = self._finite(network)
        return [
            Fitted(count, mean if fine and abs(mean) <= MAX_LOSS else math.nan, int(size))
            for count, mean, size, fine in zip(counts, means, self._sizes, usable, strict=True)
        ]

    def _counts(self, steps: int | Sequence[int] | None) -> list[int]:
        if steps is None:
            steps = self.facts["steps"].tolist()
        counts = [steps] * len(self.names) if isinstance(steps, int) else list(steps)
        if sorted(counts, reverse=True) != counts:
            raise ValueError(f"clients are not sorted by their steps: {counts}")
        return counts

    def _plans(self, counts: Sequence[int], purpose: str) -> list[Plan]:
        return [
            plan(
                self._experiment.seed,
                self.number,
                f"{purpose}/{name}",
                int(size),
                count,
                self._training.batch_size,
                len(self._data.clips.noise),
                self._training.augmentation,
            )
            for name, size, count in zip(self.names, self._sizes, counts, strict=True)
        ]

    def _finite(self, network: Network) -> list[bool]:
        fine = torch.ones(len(self.names), dtype=torch.bool, device=self._data.device)
        for value in network.state_dict().values():
            fine &= value.flatten(1).isfinite().all(1)
        return fine.tolist()

    def load_own(self, network: Network, name: str) -> None:
        """Put into `network` what each client kept under `name`; newcomers keep what is there."""
        for client, folder in enumerate(self._folders):
            path = self._experiment.last_personal(folder, self.number, f"{name}.safetensors")
            if path is not None:
                views = tensors_of(network, client)
                spec = spec_of(views)
                for key, value in load_state(path, spec).items():
                    views[key].copy_(torch.as_tensor(value))

    def save_own(self, network: Network, name: str) -> None:
        """Keep each client's tensors, under `name`, for a later round.

        Of a client whose tensors are not finite nothing is kept: it begins again another time.
        """
        usable = self._finite(network)
        for client, folder in enumerate(self._folders):
            if not usable[client]:
                continue
            path = self._experiment.personal_dir(folder, self.number) / f"{name}.safetensors"
            save_state(path, tensors_of(network, client))

    def tensors(self) -> dict[str, Tensor]:
        """The first client's parameters and buffers, not copied: the server's, who is alone."""
        return tensors_of(self.model)

    def finish(self) -> None:
        """The round's result is on disk: remove what was kept of rounds before the last two."""
        for folder in self._folders:
            self._experiment.drop_old_rounds(folder, keep=2)

    def _load(self, network: Network, optimizer: torch.optim.Optimizer) -> None:
        (folder,) = self._folders
        path = self._experiment.last_personal(folder, self.number, "optimizer.safetensors")
        if path is not None:
            load_optimizer(network, optimizer, load_state(path))

    def _save(self, network: Network, optimizer: torch.optim.Optimizer) -> None:
        (folder,) = self._folders
        path = self._experiment.personal_dir(folder, self.number) / "optimizer.safetensors"
        save_state(path, optimizer_state(network, optimizer))


def clip_each(parameters: Sequence[Tensor], largest: float) -> None:
    """Shrink each client's gradient, over all parameters, to a norm of at most `largest`."""
    parameters = [value for value in parameters if value.grad is not None]
    norms = sum(value.grad.flatten(1).square().sum(1) for value in parameters).sqrt()
    factors = (largest / (norms + 1e-6)).clamp(max=1)
    for value in parameters:
        # Not in place: of one client's one clip, two gradients can be views of the same memory.
        value.grad = value.grad * factors.view(-1, *[1] * (value.ndim - 1))


def stacks_of(
    clients: Sequence[str], steps: Mapping[str, int], sizes: Mapping[str, int], largest: int
) -> list[list[str]]:
    """Cut the clients of a round into stacks: those with as many steps and clips together.

    A function of the round's clients alone, never of the number of jobs.
    """
    order = sorted(clients, key=lambda name: (-steps[name], -sizes[name], name))
    return [order[begin : begin + largest] for begin in range(0, len(order), largest)]


def step_bytes(network: Network, mfcc: Tensor, batch_size: int) -> int:
    """The memory that one client's step keeps for its gradient, in bytes.

    Args:
        network: for one client.
        mfcc: one clip, (1, frames, coefficients).
        batch_size: clips of a step.
    """
    kept: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        network(mfcc[None].expand(1, 2, *mfcc.shape[1:]))
    return sum(kept.values()) * batch_size // 2
