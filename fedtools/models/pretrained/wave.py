"""Encoders of waveforms, wav2vec 2.0, HuBERT and WavLM, independent of padding.

If feat_extract_norm is "group", transformers normalises the first convolution's output over
padding, too, even with a mask; here only an utterance's own frames count. Padding is set to zero
before the positional convolution, and masked in attention.
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
    """The encoder of wav2vec 2.0, HuBERT or WavLM, (N, samples, 1) -> (N, positions, D).

    Baevski et al., NeurIPS 2020; Hsu et al., TASLP 2021; Chen et al., JSTSP 2022. SpecAugment masks
    the convolutions' output, as in wav2vec 2.0. The weight normalisation of the positional
    convolution is folded into its weight.

    Args:
        model: the model of transformers.
        normalized: whether waveforms are normalised to zero mean and unit variance.
    """

    # No table of positions limits the length.
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
        # The norm is either before the first layer or after the last one.
        stable, norm = config.do_stable_layer_norm, model.encoder.layer_norm
        self.embed_layer_norm = nn.Identity() if stable else norm
        self.layer_norm = norm if stable else nn.Identity()
        self._kernels = list(zip(config.conv_kernel, config.conv_stride, strict=True))
        self.size: int = config.hidden_size
        # Samples from one position to the next, and the fewest samples, for a single position.
        self.step, self.shortest = math.prod(config.conv_stride), 1
        for kernel, stride in reversed(self._kernels):
            self.shortest = (self.shortest - 1) * stride + kernel

    def positions(self, samples: Any) -> Any:
        """Return the number of positions for a number of samples, or for an array of them."""
        for kernel, stride in self._kernels:
            samples = (samples - kernel) // stride + 1
        return samples

    def embed(
        self, waves: Tensor, lengths: Tensor | None, specaug: nn.Module | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the first layer's input, its lengths, and the attention mask."""
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
        # HuBERT's projection returns a single tensor.
        hidden = projected if isinstance(projected, Tensor) else projected[0]
        if specaug is not None:
            hidden, _ = specaug(hidden.clone(), lengths)
        own = inside(hidden, lengths)[..., None]
        if padded:
            hidden = hidden * own
        hidden = self.embed_layer_norm(hidden + self._placed(hidden, own))
        return hidden, lengths, attention_mask(hidden, lengths) if padded else None

    def levels(self, name: str) -> tuple[int, int]:
        """Return the levels of first and last use; all layers use the first's position bias."""
        first, last = super().levels(name)
        return first, len(self.layers) if ".rel_attn_embed." in name else last

    def run(
        self, hidden: Tensor, mask: Tensor | None, first: int = 0, last: int | None = None
    ) -> Tensor:
        """Run the layers from `first` to before `last`."""
        attention = self.layers[0].attention
        if not isinstance(attention, GatedAttention):
            return super().run(hidden, mask, first, last)
        bias = attention.position_bias(hidden)
        for layer in self.layers[first:last]:
            hidden, _ = layer(hidden, mask, bias)
        return hidden

    def _convolve(self, waves: Tensor, lengths: Tensor | None) -> Tensor:
        """Convolve (N, samples) to (N, positions, channels); lengths are None without padding."""
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
        """Return the output of the positional convolution."""
        place = self.pos_conv_embed
        if getattr(place, "batch_norm", None) is not None:
            hidden = place.batch_norm(hidden.transpose(1, 2)).transpose(1, 2) * own
        found = place.activation(place.padding(place.conv(hidden.transpose(1, 2))))
        return found.transpose(1, 2)


def normalize(waves: Tensor, lengths: Tensor) -> Tensor:
    """Normalise waveforms to zero mean and unit variance over their own samples, as transformers.

    Args:
        waves: (N, samples).
        lengths: (N,) numbers of samples.
    """
    own, count = inside(waves, lengths), lengths[:, None]
    waves = waves * own
    centred = (waves - waves.sum(1, keepdim=True) / count) * own
    return centred / (centred.square().sum(1, keepdim=True) / count + 1e-7).sqrt()


class TimeNorm(nn.Module):
    """A group normalisation with a group for each channel, over an utterance's own frames.

    Args:
        norm: normalisation that provides the parameters.
    """

    def __init__(self, norm: nn.GroupNorm):
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, values: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Normalise (N, channels, frames), with numbers of frames (N,) if there is padding."""
        if lengths is None:
            return F.group_norm(values, values.shape[1], self.weight, self.bias, self.eps)
        own, count = inside(values.transpose(1, 2), lengths)[:, None], lengths[:, None, None]
        mean = (values * own).sum(2, keepdim=True) / count
        centred = values - mean
        variance = (centred.square() * own).sum(2, keepdim=True) / count
        normal = centred * (variance + self.eps).rsqrt()
        return torch.addcmul(self.bias[:, None], normal, self.weight[:, None])


class Gate(nn.Module):
    """The scale of the second gate, as a layer, because only layers can be adapted."""

    def __init__(self, constant: nn.Parameter):
        super().__init__()
        self.weight = constant

    def forward(self, values: Tensor) -> Tensor:
        return values * self.weight - 1.0


class GatedAttention(nn.Module):
    """WavLM's attention with a gated bias of relative positions, section III.A of its paper.

    The implementation in transformers uses the weights without calling the layers, and so ignores
    adapters.

    Args:
        attention: attention of transformers that provides the layers.
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
        """Return the position bias for all layers, (N or 1, heads, T, T), of inputs (N, T, D)."""
        places = torch.arange(hidden.shape[1], device=hidden.device)
        apart = places - places[:, None]
        exact = self.buckets // 2
        far = torch.log(apart.abs().float() / exact) / math.log(self.distance / exact)
        far = (exact + far * (self.buckets - exact)).long().clamp(max=self.buckets - 1)
        bucket = torch.where(apart.abs() < exact, apart.abs(), far) + (apart > 0) * self.buckets
        # In a stack, each client may have its own embedding.
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
