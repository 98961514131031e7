"""Layers whose parameters have a leading client dimension: K networks that run as one.

A network for one client is the case K = 1, so there is one definition of every network, and
training alone and in a stack differs by rounding only. The difference grows: after twenty steps of
SGD in single precision it was up to 1e-3 of an update, with AdamW more.

Images of K clients are folded into the channels, (B, K x C, H, W), where a convolution of K groups
keeps clients apart; sequences are (K, B, T, D), where a batched matrix product does.

An input may have fewer clients than a layer: then the parameters of the first ones are used. A
stack with clients sorted by their number of steps can thus drop those that have finished. All
clients share a tensor with a client dimension of one, such as the frozen part of an adapted
network. Layers name those that are in the state nevertheless, in `held_once`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def uniform(clients: int, *shape: int, fan_in: int) -> nn.Parameter:
    """Return a parameter (clients, *shape) from U(-1/sqrt(fan_in), 1/sqrt(fan_in)), as in torch.

    All clients have the same values, since a federation begins with one model.
    """
    bound = 1 / math.sqrt(fan_in)
    return nn.Parameter(
        torch.empty(1, *shape).uniform_(-bound, bound).repeat_interleave(clients, 0)
    )


def constant(clients: int, *shape: int, value: float) -> Tensor:
    """Return a tensor (clients, *shape) filled with one value."""
    return torch.full((clients, *shape), value)


def first(parameter: Tensor, clients: int) -> Tensor:
    """Return the part of (K, ...) for the first clients; (1, ...) is expanded to all of them.

    With all K clients the parameter itself is returned, because a slice's gradient is a copy.
    """
    if clients == len(parameter):
        return parameter
    if len(parameter) == 1:
        return parameter.expand(clients, *parameter.shape[1:])
    return parameter[:clients]


def held_once(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a stack's state that are held once for all clients, by name."""
    return {
        f"{path}.{name}" if path else name: getattr(layer, name)
        for path, layer in model.named_modules()
        for name in getattr(layer, "held_once", ())
    }


def working_dtype(value: Tensor) -> torch.dtype:
    """Return the type in which products of `value` are computed: autocast's if enabled."""
    device = value.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return value.dtype


class Conv2d(nn.Module):
    """K convolutions at once: (B, K x in, H, W) -> (B, K x out, H', W')."""

    def __init__(
        self,
        clients: int,
        inputs: int,
        outputs: int,
        kernel: tuple[int, int],
        *,
        stride: tuple[int, int] = (1, 1),
        padding: tuple[int, int] = (0, 0),
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
    ):
        super().__init__()
        self.inputs, self.groups = inputs, groups
        self.options = {"stride": stride, "padding": padding, "dilation": dilation}
        fan_in = inputs // groups * kernel[0] * kernel[1]
        self.weight = uniform(clients, outputs, inputs // groups, *kernel, fan_in=fan_in)
        self.bias = uniform(clients, outputs, fan_in=fan_in) if bias else None

    def forward(self, images: Tensor) -> Tensor:
        clients = images.shape[1] // self.inputs
        weight = first(self.weight, clients).flatten(0, 1)
        bias = None if self.bias is None else first(self.bias, clients).flatten()
        if images.is_contiguous(memory_format=torch.channels_last):
            # One copy, where autocast and the convolution would each make one.
            weight = weight.to(working_dtype(weight), memory_format=torch.channels_last)
        return F.conv2d(images, weight, bias, groups=clients * self.groups, **self.options)


class Conv1d(Conv2d):
    """K convolutions over time: (B, K x in, T) -> (B, K x out, T').

    Channels are adjacent in memory (channels last): on a CPU, torch's convolutions of many groups
    and their gradients then need no reordering, and later layers keep that order.
    """

    def __init__(
        self,
        clients: int,
        inputs: int,
        outputs: int,
        length: int,
        *,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        bias: bool = True,
    ):
        options = {"stride": (1, stride), "padding": (0, padding), "dilation": dilation}
        super().__init__(clients, inputs, outputs, (1, length), bias=bias, **options)

    def forward(self, values: Tensor) -> Tensor:
        images = values[:, :, None].contiguous(memory_format=torch.channels_last)
        return super().forward(images)[:, :, 0]


class Pointwise(Conv2d):
    """K convolutions of kernel size 1, without bias, as matrix products.

    On a CPU this takes half the time of a convolution in groups.
    """

    def __init__(self, clients: int, inputs: int, outputs: int):
        super().__init__(clients, inputs, outputs, (1, 1), bias=False)

    def forward(self, images: Tensor) -> Tensor:
        values = images.unflatten(1, (-1, self.inputs)).flatten(3)
        found = torch.matmul(first(self.weight, values.shape[1])[:, :, :, 0, 0], values)
        return found.flatten(1, 2).unflatten(2, images.shape[2:])


class ManyToMany(Conv2d):
    """K convolutions with equal numbers of inputs and outputs, without bias; on a CPU one by one.

    On a CPU, the gradient of a convolution in groups takes up to twice as long.
    """

    def __init__(self, clients: int, channels: int, side: int, *, dilation: int):
        around = (dilation * (side // 2),) * 2
        options = {"padding": around, "dilation": dilation, "bias": False}
        super().__init__(clients, channels, channels, (side, side), **options)

    def forward(self, images: Tensor) -> Tensor:
        if images.device.type != "cpu":
            return super().forward(images)
        parts = images.split(self.inputs, 1)
        pairs = zip(parts, first(self.weight, len(parts)), strict=True)
        found = [F.conv2d(*pair, **self.options) for pair in pairs]
        return torch.cat(found, 1) if len(found) > 1 else found[0]


class OneToMany(Conv2d):
    """K square convolutions of one channel each, without bias, as products over shifted images.

    The input is data, without a gradient. On a CPU, torch's gradient for the weights of few
    outputs takes several times as long as all of this.
    """

    def __init__(self, clients: int, outputs: int, side: int):
        padding = (side // 2, side // 2)
        super().__init__(clients, 1, outputs, (side, side), padding=padding, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        batch, clients, *size = images.shape
        side = self.weight.shape[-1]
        padded = F.pad(images, (side // 2,) * 4)
        shifted = padded.unfold(2, side, 1).unfold(3, side, 1).permute(0, 1, 4, 5, 2, 3)
        shifted = shifted.reshape(batch, clients, side * side, -1)
        found = torch.matmul(first(self.weight, clients).flatten(2), shifted)
        return found.flatten(1, 2).unflatten(2, size)


class FramesToOne(Conv2d):
    """K convolutions over frames into one channel each: (B, K x in, T, W) -> (B, K, T, W).

    They are computed as products over the channels, whose rows are shifted and added. For a single
    output, this takes at most half the time of torch's convolution and its gradient.
    """

    def __init__(self, clients: int, inputs: int, length: int):
        super().__init__(clients, inputs, 1, (length, 1), padding=(length // 2, 0))

    def forward(self, images: Tensor) -> Tensor:
        frames, width = images.shape[2:]
        values = images.unflatten(1, (-1, self.inputs)).flatten(3)
        clients = values.shape[1]
        weight = first(self.weight, clients)[:, 0, :, :, 0].transpose(1, 2)
        products = torch.matmul(weight, values).unflatten(3, (frames, width))
        length = weight.shape[1]
        padded = F.pad(products, (0, 0, length // 2, length // 2))
        found = first(self.bias, clients)[:, :, None].expand(-1, frames, width)
        for shift in range(length):
            found = found + padded[:, :, shift, shift : shift + frames]
        return found


class BatchNorm2d(nn.Module):
    """K batch normalisations, each with a client's own statistics over its valid clips.

    The running statistics are buffers, which the federated method shares like parameters, keeps
    or resets; there is no count of batches.
    """

    def __init__(self, clients: int, channels: int, *, affine: bool = True, momentum: float = 0.1):
        super().__init__()
        self.channels, self.momentum, self.eps = channels, momentum, 1e-5
        self.weight = nn.Parameter(constant(clients, channels, value=1.0)) if affine else None
        self.bias = nn.Parameter(constant(clients, channels, value=0.0)) if affine else None
        self.register_buffer("running_mean", constant(clients, channels, value=0.0))
        self.register_buffer("running_var", constant(clients, channels, value=1.0))

    def forward(self, images: Tensor, valid: Tensor | None = None) -> Tensor:
        """Normalise (B, K x C, H, W); `valid` (K, B) is 0 where a smaller batch was padded."""
        clients = images.shape[1] // self.channels
        # Views of the clients' own statistics: training updates these in place.
        mean, var = (
            first(value, clients).flatten() for value in (self.running_mean, self.running_var)
        )
        weight = None if self.weight is None else first(self.weight, clients).flatten()
        bias = None if self.bias is None else first(self.bias, clients).flatten()
        if valid is None or not self.training:
            return F.batch_norm(
                images, mean, var, weight, bias, self.training, self.momentum, self.eps
            )
        counts = valid.sum(1, keepdim=True) * images[0, 0].numel()
        share = (valid / counts).t().repeat_interleave(self.channels, 1)
        normal, centre, spread = _Normalise.apply(images, weight, bias, share, self.eps)
        with torch.no_grad():
            unbiased = counts / (counts - 1).clamp(min=1)
            mean.lerp_(centre, self.momentum)
            var.lerp_(spread * unbiased.repeat_interleave(self.channels), self.momentum)
        return normal


class _Normalise(torch.autograd.Function):
    """Batch normalisation over the valid clips, with its gradient, in few passes over memory.

    Memory access dominates the time: with autograd's gradient it takes more than twice as long.
    """

    @staticmethod
    def forward(
        ctx,
        images: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        share: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normalise (B, C, H, W), and return also means and biased variances, each (C,).

        `share` (B, C) is the weight of each place of a clip in a mean.
        """
        mean = (images.sum((2, 3)) * share).sum(0)
        centred = images - mean[:, None, None]
        squares = torch.linalg.vector_norm(centred.flatten(2), dim=2).square_()
        var = (squares * share).sum(0)
        factor = (var + eps).rsqrt_()
        scale = factor if weight is None else factor * weight
        normal = centred.mul_(scale[:, None, None])
        if bias is not None:
            normal += bias[:, None, None]
        ctx.save_for_backward(images, weight, share, mean, factor)
        ctx.mark_non_differentiable(mean, var)
        return normal, mean, var

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        images, weight, share, mean, factor = ctx.saved_tensors
        centred = images - mean[:, None, None]
        bias_gradient = gradient.sum((0, 2, 3))
        weight_gradient = (gradient * centred).sum((0, 2, 3)) * factor
        scale = factor if weight is None else factor * weight
        constant = (bias_gradient * scale * share)[..., None, None]
        slope = (weight_gradient * factor * scale * share)[..., None, None]
        found = gradient * scale[:, None, None]
        found -= centred.mul_(slope).add_(constant)
        if weight is None:
            return found, None, None, None, None
        return found, weight_gradient, bias_gradient, None, None


class GroupNorm2d(nn.Module):
    """K group normalisations, without dependence on other clips or running statistics."""

    def __init__(self, clients: int, channels: int, *, affine: bool = True, groups: int = 0):
        super().__init__()
        self.channels = channels
        # The largest number of groups, up to 8, with at least two channels each: in a group of one,
        # the mean over all places is 0, and ResNet's features are such means.
        self.groups = groups or max(
            [1, *(n for n in range(1, 9) if channels % n == 0 and n < channels)]
        )
        self.weight = nn.Parameter(constant(clients, channels, value=1.0)) if affine else None
        self.bias = nn.Parameter(constant(clients, channels, value=0.0)) if affine else None

    def forward(self, images: Tensor, valid: Tensor | None = None) -> Tensor:
        clients = images.shape[1] // self.channels
        weight = None if self.weight is None else first(self.weight, clients).flatten()
        bias = None if self.bias is None else first(self.bias, clients).flatten()
        return F.group_norm(images, clients * self.groups, weight, bias)


NORMS = {"batch": BatchNorm2d, "group": GroupNorm2d}


class Linear(nn.Module):
    """K affine maps: (K, ..., in) -> (K, ..., out)."""

    def __init__(self, clients: int, inputs: int, outputs: int, *, bias: bool = True):
        super().__init__()
        self.weight = uniform(clients, outputs, inputs, fan_in=inputs)
        self.bias = uniform(clients, outputs, fan_in=inputs) if bias else None

    def forward(self, values: Tensor) -> Tensor:
        clients = values.shape[0]
        rows = values.reshape(clients, -1, values.shape[-1])
        weight = first(self.weight, clients).transpose(1, 2)
        if self.bias is None:
            found = torch.bmm(rows, weight)
        else:
            found = torch.baddbmm(first(self.bias, clients)[:, None], rows, weight)
        return found.view(*values.shape[:-1], -1)


class LayerNorm(nn.Module):
    """K layer normalisations over the last dimension of (K, B, T, D)."""

    def __init__(self, clients: int, size: int):
        super().__init__()
        self.weight = nn.Parameter(constant(clients, size, value=1.0))
        self.bias = nn.Parameter(constant(clients, size, value=0.0))

    def forward(self, values: Tensor) -> Tensor:
        clients, size = values.shape[0], values.shape[-1]
        if clients == 1:
            return F.layer_norm(values, (size,), self.weight[0], self.bias[0])
        weight, bias = (
            first(self.weight, clients)[:, None, None],
            first(self.bias, clients)[:, None, None],
        )
        return torch.addcmul(bias, F.layer_norm(values, (size,)), weight)


class BiGru(nn.Module):
    """K bidirectional GRU layers with torch's equations and gate order: (K, B, T, in) -> 2 x size.

    Both directions of all clients are stepped together, because with a few dozen units the calls
    take longer than the multiplications.
    """

    def __init__(self, clients: int, inputs: int, size: int):
        super().__init__()
        self.size = size
        self.weight_ih = uniform(clients, 2, 3 * size, inputs, fan_in=size)
        self.weight_hh = uniform(clients, 2, 3 * size, size, fan_in=size)
        self.bias_ih = uniform(clients, 2, 3 * size, fan_in=size)
        self.bias_hh = uniform(clients, 2, 3 * size, fan_in=size)

    def forward(self, values: Tensor) -> Tensor:
        clients, batch, frames, inputs = values.shape
        both, size = 2 * clients, self.size
        ways = torch.stack([values, values.flip(2)], 1).view(both, batch * frames, inputs)
        weight = first(self.weight_ih, clients).flatten(0, 1).transpose(1, 2)
        bias = first(self.bias_ih, clients).reshape(both, 1, 3 * size)
        gates = torch.baddbmm(bias, ways, weight).view(both, batch, frames, 3 * size)
        # unbind, not indexing: the gradient of a single index has the size of the whole tensor.
        by_frame = gates.permute(2, 0, 1, 3).contiguous()
        reset_update, new = (part.unbind(0) for part in by_frame.split([2 * size, size], -1))
        weight = first(self.weight_hh, clients).flatten(0, 1).transpose(1, 2)
        bias = first(self.bias_hh, clients).reshape(both, 1, 3 * size)
        state = gates.new_zeros(both, batch, size)
        states = []
        for frame in range(frames):
            inner = torch.baddbmm(bias, state, weight)
            inner_gates, inner_new = inner.split([2 * size, size], -1)
            reset, update = torch.sigmoid(reset_update[frame] + inner_gates).chunk(2, -1)
            candidate = torch.tanh(torch.addcmul(new[frame], reset, inner_new))
            state = torch.lerp(candidate, state, update)
            states.append(state)
        outputs = torch.stack(states, 2).view(clients, 2, batch, frames, size)
        return torch.cat([outputs[:, 0], outputs[:, 1].flip(2)], -1)
