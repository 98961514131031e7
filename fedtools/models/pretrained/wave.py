"""Encoders of waveforms, wav2vec 2.0, HuBERT and WavLM, in which padding changes nothing.

transformers normalises the first convolution's output over the whole padded batch where
feat_extract_norm is "group", even under a mask; here only an utterance's own frames count. What
lies behind them is zero before the positional convolution, and masked in attention.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fedtools.models.pooling import inside
from fedtools.models.pretrained.encoders import Encoder, attention_mask


class WaveEncoder(Encoder):
    """The encoder of wav2vec 2.0 (Baevski et al., NeurIPS 2020), HuBERT (Hsu et al., TASLP 2021)
    or WavLM (Chen et al., JSTSP 2022), (N, samples, 1) -> (N, positions, D).

    SpecAugment masks what the convolutions make of the waveform, as in wav2vec 2.0. The weight
    normalisation of the positional convolution is folded into its weight.

    Args:
        model: of transformers.
        normalized: whether waveforms are brought to zero mean and unit variance.
    """

    # Samples: there is no table of positions that would end.
    longest = None

    def __init__(self, model: nn.Module, normalized: bool):
        super().__init__()
        self._normalized, config = normalized, model.config
        self.conv_layers = model.feature_extractor.conv_layers
        self._grouped = config.feat_extract_norm == "group"
        if self._grouped:
            self.conv_layers[0].layer_norm = TimeNorm(self.conv_layers[0].layer_norm)
        self.feature_projection = model.feature_projection
        self.pos_conv_embed = model.encoder.pos_conv_embed
        if parametrize.is_parametrized(self.pos_conv_embed.conv):
            parametrize.remove_parametrizations(self.pos_conv_embed.conv, "weight")
        self.layers = model.encoder.layers
        if config.model_type == "wavlm":
            for layer in self.layers:
                layer.attention = GatedAttention(layer.attention)
        # One of two places.
        stable, norm = config.do_stable_layer_norm, model.encoder.layer_norm
        self.embed_layer_norm = nn.Identity() if stable else norm
        self.layer_norm = norm if stable else nn.Identity()
        self._kernels = list(zip(config.conv_kernel, config.conv_stride, strict=True))
        self.size: int = config.hidden_size
        # Samples from one position to the next, and the fewest, of a single position.
        self.step, self.shortest = math.prod(config.conv_stride), 1
        for kernel, stride in reversed(self._kernels):
            self.shortest = (self.shortest - 1) * stride + kernel

    def positions(self, samples: Any) -> Any:
        """How many positions so many samples have; of a number, or an array of them."""
        for kernel, stride in self._kernels:
            samples = (samples - kernel) // stride + 1
        return samples

    def embed(
        self, waves: Tensor, lengths: Tensor | None, specaug: nn.Module | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """What is below the first layer: hidden values, their lengths, the mask of attention."""
        waves = waves.squeeze(-1)
        if lengths is None:
            lengths = torch.full((len(waves),), waves.shape[1])
        lengths = lengths.to(waves.device)
        padded = bool((lengths < waves.shape[1]).any())
        if self._normalized:
            waves = normalize(waves, lengths)
        hidden = self._convolve(waves, lengths if padded else None)
        lengths = self.positions(lengths)
        projected = self.feature_projection(hidden)
        # HuBERT's gives no second value.
        hidden = projected if isinstance(projected, Tensor) else projected[0]
        if specaug is not None:
            hidden, _ = specaug(hidden.clone(), lengths)
        own = inside(hidden, lengths)[..., None]
        if padded:
            hidden = hidden * own
        hidden = self.embed_layer_norm(hidden + self._placed(hidden, own))
        return hidden, lengths, attention_mask(hidden, lengths) if padded else None

    def levels(self, name: str) -> tuple[int, int]:
        """Where a parameter is used first, and last; the first layer's bias of positions in all."""
        first, last = super().levels(name)
        return first, len(self.layers) if ".rel_attn_embed." in name else last

    def run(
        self, hidden: Tensor, mask: Tensor | None, first: int = 0, last: int | None = None
    ) -> Tensor:
        """The layers from `first` to before `last`."""
        attention = self.layers[0].attention
        if not isinstance(attention, GatedAttention):
            return super().run(hidden, mask, first, last)
        bias = attention.position_bias(hidden)
        for layer in self.layers[first:last]:
            hidden, _ = layer(hidden, mask, bias)
        return hidden

    def _convolve(self, waves: Tensor, lengths: Tensor | None) -> Tensor:
        """(N, samples) to (N, positions, channels); None if all are as long as the batch."""
        hidden = waves[:, None]
        for layer, (kernel, stride) in zip(self.conv_layers, self._kernels, strict=True):
            hidden = layer.conv(hidden)
            lengths = None if lengths is None else (lengths - kernel) // stride + 1
            if not self._grouped:
                hidden = layer.layer_norm(hidden.transpose(1, 2)).transpose(1, 2)
            elif layer is self.conv_layers[0]:
                hidden = layer.layer_norm(hidden, lengths)
            hidden = layer.activation(hidden)
        return hidden.transpose(1, 2)

    def _placed(self, hidden: Tensor, own: Tensor) -> Tensor:
        """What the positional convolution adds."""
        place = self.pos_conv_embed
        if getattr(place, "batch_norm", None) is not None:
            hidden = place.batch_norm(hidden.transpose(1, 2)).transpose(1, 2) * own
        found = place.activation(place.padding(place.conv(hidden.transpose(1, 2))))
        return found.transpose(1, 2)


def normalize(waves: Tensor, lengths: Tensor) -> Tensor:
    """Bring each to zero mean and unit variance over its own samples, as transformers does.

    Args:
        waves: (N, samples).
        lengths: (N,).
    """
    own, count = inside(waves, lengths), lengths[:, None]
    waves = waves * own
    centred = (waves - waves.sum(1, keepdim=True) / count) * own
    return centred / (centred.square().sum(1, keepdim=True) / count + 1e-7).sqrt()


class TimeNorm(nn.Module):
    """A group normalisation with a group for each channel, over an utterance's own frames.

    Args:
        norm: whose parameters it takes.
    """

    def __init__(self, norm: nn.GroupNorm):
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, values: Tensor, lengths: Tensor | None = None) -> Tensor:
        """(N, channels, frames), and numbers of frames (N,) where not all are whole."""
        if lengths is None:
            return F.group_norm(values, values.shape[1], self.weight, self.bias, self.eps)
        own, count = inside(values.transpose(1, 2), lengths)[:, None], lengths[:, None, None]
        mean = (values * own).sum(2, keepdim=True) / count
        centred = values - mean
        variance = (centred.square() * own).sum(2, keepdim=True) / count
        normal = centred * (variance + self.eps).rsqrt()
        return torch.addcmul(self.bias[:, None], normal, self.weight[:, None])


class Gate(nn.Module):
    """What scales the second of the two gates, as a layer: adapters are of layers."""

    def __init__(self, constant: nn.Parameter):
        super().__init__()
        self.weight = constant

    def forward(self, values: Tensor) -> Tensor:
        return values * self.weight - 1.0


class GatedAttention(nn.Module):
    """WavLM's attention with a gated bias of relative positions, sections III.A of its paper.

    That of transformers takes its layers' weights and goes past the layers, and so past adapters.

    Args:
        attention: of transformers, whose layers it takes.
    """

    def __init__(self, attention: nn.Module):
        super().__init__()
        self.heads: int = attention.num_heads
        self.buckets: int = attention.num_buckets // 2
        self.distance: int = attention.max_distance
        for name, layer in attention.named_children():
            setattr(self, name, layer)
        self.gru_rel_pos_const = Gate(attention.gru_rel_pos_const)

    def position_bias(self, hidden: Tensor) -> Tensor:
        """Of the first layer, for all: (N or 1, heads, T, T) for hidden values (N, T, D)."""
        places = torch.arange(hidden.shape[1], device=hidden.device)
        apart = places - places[:, None]
        exact = self.buckets // 2
        far = torch.log(apart.abs().float() / exact) / math.log(self.distance / exact)
        far = (exact + far * (self.buckets - exact)).long().clamp(max=self.buckets - 1)
        bucket = torch.where(apart.abs() < exact, apart.abs(), far) + (apart > 0) * self.buckets
        # Of a stack, each client may have its own.
        rows = 1 if type(self.rel_attn_embed) is nn.Embedding else len(hidden)
        found: Tensor = self.rel_attn_embed(bucket.expand(rows, -1, -1)).permute(0, 3, 1, 2)
        return found

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, position_bias: Tensor, **_: Any
    ) -> tuple[Tensor, None, Tensor]:
        rows, length, _size = hidden_states.shape
        shape = rows, length, self.heads, -1
        gates = self.gru_rel_pos_linear(hidden_states.view(shape).transpose(1, 2))
        first, second = gates.unflatten(-1, (2, 4)).sum(-1).sigmoid().chunk(2, -1)
        bias = (first * self.gru_rel_pos_const(second) + 2.0) * position_bias
        if attention_mask is not None:
            bias = bias + attention_mask
        query, key, value = (
            layer(hidden_states).view(shape).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.out_proj(found.transpose(1, 2).flatten(2)), None, position_bias
