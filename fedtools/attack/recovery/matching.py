"""Gradient matching: find inputs that change a model as a client changed it.

J. Geiping, H. Bauermeister, H. Droege, M. Moeller: Inverting gradients - how easy is it to break
privacy in federated learning?, NeurIPS 2020, equation 4: minimise the angle between the change that
an input causes and the update, with total variation as a prior, by Adam on signs of the gradient.
It follows L. Zhu, Z. Liu, S. Han: Deep leakage from gradients, NeurIPS 2019. If the local steps are
few steps of SGD, all are simulated and differentiated through (Geiping et al., section 6);
otherwise the update is treated as that of one step.

Where BatchNorm's statistics are sent, they reveal mean and variance of the inputs of its layers,
which the recovered input has to match (H. Yin et al.: See through gradients, CVPR 2021; for the
statistics of a client's own batch, A. Hatamizadeh et al.: Do gradient inversion attacks make
federated learning unsafe?, IEEE TMI 2023).

The attacker knows neither the draws of dropout, SpecAugment and augmentation, nor the batches: a
simulated step is of all items, as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedtools.attack.options import Inversion
from fedtools.attack.victims import State
from fedtools.core.progress import Lines
from fedtools.models.training import Training

# Loss of a model on some inputs, (frames, values) each.
Loss = Callable[[nn.Module, Sequence[Tensor]], Tensor]
Moments = tuple[Tensor, Tensor]
# Bound of the inputs, in deviations from the mean of other people's speech.
_FURTHEST = 5.0
# Shares of the iterations after which the rate is divided by ten.
_SLOWER = (3 / 8, 5 / 8, 7 / 8)
_LEAST = 1e-12


@dataclass(frozen=True)
class Plan:
    """Local steps of SGD to simulate; by default one, whose length does not matter.

    Attributes:
        steps: number of steps.
        rate, momentum: options of SGD.
        clip: the largest norm of a gradient; 0: no bound.
    """

    steps: int = 1
    rate: float = 1.0
    momentum: float = 0.0
    clip: float = 0.0


def plan_of(training: Training, steps: int, most: int) -> Plan | None:
    """Return a client's steps if they can be simulated: plain SGD, and no more than `most`."""
    known = {"lr", "momentum"} >= training.optim_conf.keys()
    if training.optim != "sgd" or not known or training.scheduler or steps > most:
        return None
    rate = training.optim_conf.get("lr", 1e-3)
    return Plan(steps, rate, training.optim_conf.get("momentum", 0.0), training.grad_clip)


@dataclass(frozen=True)
class Seen:
    """Update and moments that a client's training reveals.

    Attributes:
        update: parameter -> its sent value less its initial value.
        moments: layer of BatchNorm -> mean and variance of its input, (channels,) each.
    """

    update: Mapping[str, Tensor]
    moments: Mapping[str, Moments]


class Simulation:
    """Training of a model on some inputs, differentiable with respect to the inputs.

    Args:
        model: the model that clients began with; it is not changed.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self._norms = _as_in_training(model)
        parameters = model.named_parameters()
        self.weights = {name: value for name, value in parameters if value.requires_grad}

    def seen(self, sent: State, start: State, steps: int) -> Seen:
        """Return what a client sent in the form that `match` takes.

        Args:
            sent: the tensors that are visible to the attacker.
            start: the tensors that the client began with.
            steps: number of steps that the client took.
        """
        changes = {
            name: torch.from_numpy(sent[name].astype("f8") - start[name]).to(value).view_as(value)
            for name, value in self.weights.items()
            if name in sent
        }
        moments = {}
        for path, layer in self._norms.items():
            names = f"{path}.running_mean", f"{path}.running_var"
            if not set(names) <= sent.keys():
                continue
            # Running statistics are weighted means over batches, the last of which has most weight.
            old = (1 - layer.momentum) ** steps
            mean, variance = (
                torch.from_numpy((sent[name].astype("f8") - old * start[name]) / (1 - old))
                .to(layer.running_mean)
                .flatten()
                for name in names
            )
            moments[path] = mean, variance.clamp(min=_LEAST)
        return Seen(changes, moments)

    def step(self, loss: Loss, inputs: Sequence[Tensor]) -> State:
        """Return what a client would send after one step on some items, as float64."""
        changes, moments = self.run(loss, inputs, Plan())
        found = {name: self.weights[name].detach() + value for name, value in changes.items()}
        for path, given in moments.items():
            layer = self._norms[path]
            for name, value in zip(("running_mean", "running_var"), given, strict=True):
                old = getattr(layer, name)
                found[f"{path}.{name}"] = old.lerp(value.view_as(old), layer.momentum)
        return {name: value.detach().double().cpu().numpy() for name, value in found.items()}

    def run(
        self, loss: Loss, inputs: Sequence[Tensor], plan: Plan
    ) -> tuple[dict[str, Tensor], dict[str, Moments]]:
        """Return the change of each parameter by some steps, and moments of BatchNorm's inputs."""
        whole = _Whole(self.model, loss)
        weights, speed = dict(self.weights), dict[str, Tensor]()
        seen: dict[str, Moments] = {}
        for _ in range(plan.steps):
            # A pass would update running statistics, which must stay as they are.
            buffers = {name: value.clone() for name, value in self.model.named_buffers()}
            tensors = {f"model.{name}": value for name, value in (weights | buffers).items()}
            with self._watched(seen), sdpa_kernel(SDPBackend.MATH):
                value = functional_call(whole, tensors, (inputs,))
            gradients = torch.autograd.grad(
                value, list(weights.values()), create_graph=True, materialize_grads=True
            )
            if plan.clip:
                norm = torch.cat([one.flatten() for one in gradients]).norm()
                gradients = [one * (plan.clip / norm).clamp(max=1) for one in gradients]
            for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
                speed[name] = gradient + (
                    plan.momentum * speed[name] if speed.get(name) is not None else 0
                )
                weights[name] = weight - plan.rate * speed[name]
        return {name: value - self.weights[name] for name, value in weights.items()}, seen

    @contextmanager
    def _watched(self, seen: dict[str, Moments]) -> Iterator[None]:
        """Add the moments of BatchNorm's inputs to those of earlier steps."""

        def watch(path: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            def before(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
                values = given[0].transpose(0, 1).flatten(1)
                found = values.mean(1), values.var(1)
                if path in seen:
                    pairs = zip(seen[path], found, strict=True)
                    found = tuple(old.lerp(new, layer.momentum) for old, new in pairs)
                seen[path] = found

            return before

        hooks = [
            layer.register_forward_pre_hook(watch(path)) for path, layer in self._norms.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class _Whole(nn.Module):
    """A model together with its loss, for `functional_call`."""

    def __init__(self, model: nn.Module, loss: Loss):
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        return self._loss(self.model, inputs)


def _as_in_training(model: nn.Module) -> dict[str, nn.Module]:
    """Put BatchNorm in training mode, unless frozen, and everything else in evaluation mode."""
    model.train()
    norms = {
        path: layer
        for path, layer in model.named_modules()
        if layer.training and getattr(layer, "running_mean", None) is not None
    }
    model.eval()
    for layer in norms.values():
        layer.training = True
    return norms


def match(
    simulation: Simulation,
    loss: Loss,
    seen: Seen,
    plan: Plan,
    frames: Sequence[int],
    scales: Moments,
    options: Inversion,
    seed: int,
    title: str,
) -> list[Tensor]:
    """Search for the inputs whose update best matches the client's, (frames, values) each.

    Args:
        simulation: training of the model.
        loss: loss with the labels that the attacker knows.
        seen: update and moments of the client.
        plan: the client's steps.
        frames: number of frames of each input.
        scales: mean and deviation of a frame's values in other people's speech, (values,) each.
        options: options of the search.
        seed: random seed of the initial inputs.
        title: title of progress lines.
    """
    random = torch.Generator().manual_seed(seed)
    mean, deviation = scales
    best, least = list[Tensor](), torch.inf
    lines = Lines(title, "restart", options.restarts)
    for number in range(options.restarts):
        values = [
            torch.randn(length, len(mean), generator=random).to(mean).requires_grad_()
            for length in frames
        ]
        optimizer = torch.optim.Adam(values, lr=options.rate)
        turns = [round(share * options.iterations) for share in _SLOWER]
        slower = torch.optim.lr_scheduler.MultiStepLR(optimizer, turns)
        for _ in range(options.iterations):
            inputs = [mean + deviation * value for value in values]
            found = distance(*simulation.run(loss, inputs, plan), seen, options.statistics)
            prior = sum(value.diff(dim=0).abs().mean() for value in values) / len(values)
            gradients = torch.autograd.grad(found + options.total_variation * prior, values)
            if (here := found.item()) < least:
                least = here
                best = [one.detach().clone() for one in inputs]
            for value, gradient in zip(values, gradients, strict=True):
                value.grad = gradient.sign()
            optimizer.step()
            slower.step()
            with torch.no_grad():
                for value in values:
                    value.clamp_(-_FURTHEST, _FURTHEST)
        lines.done(number + 1, f"distance {least:.3g}")
    return best


def distance(
    changes: Mapping[str, Tensor], moments: Mapping[str, Moments], seen: Seen, weight: float
) -> Tensor:
    """Return 1 - the cosine of two updates, plus the squared distance of moments in deviations.

    Args:
        changes, moments: as `Simulation.run` returns them.
        seen: update and moments to match.
        weight: weight of the moments.
    """
    one = torch.cat([changes[name].flatten() for name in seen.update])
    other = torch.cat([value.flatten() for value in seen.update.values()])
    found = 1 - one @ other / (one.norm() * other.norm()).clamp(min=_LEAST)
    for path, (mean, variance) in seen.moments.items():
        here, spread = moments[path]
        apart = ((here - mean).square() / variance).mean()
        apart = apart + ((spread.clamp(min=_LEAST) / variance).sqrt() - 1).square().mean()
        found = found + weight * apart / len(seen.moments)
    return found
