"""A time delay neural network as an encoder of ESPnet's ASR model.

V. Peddinti, D. Povey, S. Khudanpur (Interspeech 2015), in the form of Tomashenko et al. (ICASSP
2022), section 4.2: thirteen hidden layers of 512, contexts {-1,0,1} of the first six and {-3,0,3}
of the others, a third of the frames.
"""

from __future__ import annotations

from collections.abc import Sequence

from espnet2.asr.encoder.abs_encoder import AbsEncoder
from torch import Tensor, nn

from fedtools.models.pooling import inside


class TdnnLayer(nn.Module):
    """An affine map of three frames, ReLU, and BatchNorm without parameters, as Kaldi's.

    Args:
        before, size: values of a frame before and after it.
        context: frames from the middle one to the other two.
        step: of how many frames one is kept.
    """

    def __init__(self, before: int, size: int, context: int, step: int = 1):
        super().__init__()
        self.step = step
        self.affine = nn.Conv1d(before, size, 3, stride=step, dilation=context, padding=context)
        self.relu = nn.ReLU()
        self.norm = nn.BatchNorm1d(size, affine=False)

    def forward(self, hidden: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """(B, before, T), and which frames are an utterance's own (B, T), to the same of it."""
        # Frames beyond an utterance's end are zeros to every layer, as those before its beginning.
        hidden = self.norm(self.relu(self.affine(hidden * own[:, None])))
        return hidden, own[:, :: self.step]


class TdnnEncoder(AbsEncoder):
    """Layers of a TDNN; an utterance is the same in any batch, but for BatchNorm in training.

    Args:
        input_size: values of a frame, an i-vector included.
        output_size: of each layer.
        contexts: of each layer, in frames of the input.
        subsampling: the first layer with a context that it divides keeps one of so many frames; it
            divides those of the layers behind, too, which see these frames only.
        dropout_rate: behind each layer.
        fixed_scale: values of the input are scaled by what is known of them, and training does not
            change that, as Kaldi's transform of the input is fixed; a model that is adapted to a
            speaker would otherwise hold the mean of the speaker's features.
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
                f"contexts {list(contexts)}: some that {subsampling}, the subsampling, does not "
                "divide, then some that it divides"
            )
        # Cepstra and i-vectors are of very different scales (Kaldi's recipes have an LDA there).
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
        """As of any module; the scale of the input may be beyond training."""
        super().train(mode)
        self.scale.train(mode and not self._fixed_scale)
        return self

    def output_size(self) -> int:
        """Values of a frame of what `forward` gives."""
        return self._output_size

    def forward(
        self, xs_pad: Tensor, ilens: Tensor, prev_states: Tensor | None = None
    ) -> tuple[Tensor, Tensor, None]:
        """(B, T, input_size) and (B,) to (B, T / subsampling, output_size) and (B,)."""
        own = inside(xs_pad, ilens)
        hidden = self.scale(xs_pad.transpose(1, 2))
        for layer in self.layers:
            hidden, own = layer(hidden, own)
            hidden = self.dropout(hidden)
        return hidden.transpose(1, 2), own.sum(1).to(ilens), None
