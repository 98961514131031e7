"""A time delay neural network as an encoder of ESPnet's ASR model.

V. Peddinti, D. Povey, S. Khudanpur (Interspeech 2015), in the form of Tomashenko et al. (ICASSP
2022), section 4.2: thirteen hidden layers of 512, contexts {-1,0,1} of the first six and {-3,0,3}
of the others, a third of the frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from espnet2.asr.encoder.abs_encoder import AbsEncoder
from torch import Tensor, nn

from fedtools.models.pooling import inside


class TdnnLayer(nn.Module):
    """An affine map of three frames, ReLU, and BatchNorm without parameters, as in Kaldi.

    Args:
        before, size: values per frame of input and output.
        context: distance in frames of the outer two frames from the middle one.
        step: one of `step` frames is kept.
    """

    def __init__(self, before: int, size: int, context: int, step: int = 1):
        super().__init__()
        self.step = step
        self.affine = nn.Conv1d(before, size, 3, stride=step, dilation=context, padding=context)
        self.relu = nn.ReLU()
        self.norm = nn.BatchNorm1d(size, affine=False)

    def forward(self, hidden: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the layer to (B, before, T) and the mask of an utterance's own frames (B, T)."""
        # For every layer, frames after an utterance's end are zeros, like those before its start.
        hidden = self.norm(self.relu(self.affine(hidden * own[:, None])))
        return hidden, own[:, :: self.step]


class TdnnEncoder(AbsEncoder):
    """The layers of a TDNN; only BatchNorm in training depends on the rest of a batch.

    Args:
        input_size: values per frame, including an i-vector.
        output_size: output size of each layer.
        contexts: context of each layer, in frames of the input.
        subsampling: one of this many frames is kept before the first layer whose context it
            divides. It has to divide the contexts of all later layers, too.
        dropout_rate: dropout after each layer.
        fixed_scale: keep the statistics that scale the input fixed in training, like Kaldi's fixed
            transform of the input; otherwise a model adapted to a speaker would hold the mean of
            the speaker's features.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int = 512,
        contexts: Sequence[int] = (1,) * 6 + (3,) * 7,
        subsampling: int = 3,
        dropout_rate: float = 0.0,
        fixed_scale: bool = False,
    ):
        super().__init__()
        self._output_size, self._fixed_scale = output_size, fixed_scale
        wide = [context % subsampling == 0 for context in contexts]
        first = wide.index(True) if True in wide else len(contexts)
        if not contexts or not all(wide[first:]) or (subsampling > 1 and first in (0, len(wide))):
            raise ValueError(
                f"contexts {list(contexts)}: first come some that are no multiple of subsampling "
                f"({subsampling}), then multiples only"
            )
        # Cepstra and i-vectors have very different scales (Kaldi's recipes use an LDA).
        self.scale = nn.BatchNorm1d(input_size, affine=False)
        layers = []
        for index, context in enumerate(contexts):
            step = subsampling if index == first - 1 else 1
            context = context // subsampling if index >= first else context
            before = output_size if layers else input_size
            layers.append(TdnnLayer(before, output_size, context, step))
        self.layers = nn.ModuleList(layers)
        self.dropout = nn.Dropout(dropout_rate)

    def train(self, mode: bool = True) -> TdnnEncoder:
        """Set training mode, except for a fixed scale of the input."""
        super().train(mode)
        self.scale.train(mode and not self._fixed_scale)
        return self

    def output_size(self) -> int:
        """Return the number of values per frame of the output."""
        return self._output_size

    def positions(self, frames: Any) -> Any:
        """Return the number of output frames for a number of input frames, or for an array."""
        for layer in self.layers:
            frames = -(-frames // layer.step)
        return frames

    def forward(
        self, xs_pad: Tensor, ilens: Tensor, prev_states: Tensor | None = None
    ) -> tuple[Tensor, Tensor, None]:
        """Encode (B, T, input_size) and (B,) to (B, T / subsampling, output_size) and (B,)."""
        own = inside(xs_pad, ilens)
        hidden = self.scale(xs_pad.transpose(1, 2))
        for layer in self.layers:
            hidden, own = layer(hidden, own)
            hidden = self.dropout(hidden)
        return hidden.transpose(1, 2), own.sum(1).to(ilens), None
