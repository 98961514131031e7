"""Training criteria of acoustic models: scores from the encoder's output, and the loss.

A model has its criterion as `criterion`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from fedtools.models.lfmmi.lattice import Lattice


class Criterion(Protocol):
    """The part of a model above its encoder, as `fedtools.models.acoustic.asr` uses it.

    Attributes:
        unfit: what is wrong with utterances that have too few frames, and how to mend it.
    """

    unfit: tuple[str, str]

    def classify(self, features: Tensor) -> Tensor:
        """Return the input of the loss: (B, T', size) to (B, T', outputs)."""

    def posteriors(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Return CTC log posteriors, from the output of `classify` and numbers of frames.

        Raises:
            UserError: if the model has none.
        """

    def losses(self, values: Tensor, lengths: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return each utterance's loss, natural log, summed over its frames: (B,).

        Args:
            values, lengths: the output of `classify`, and numbers of frames.
            batch: `text` (B, tokens; padded with -1) and `text_lengths`.
        """

    def fewest_frames(self, tokens: Sequence[int]) -> int:
        """Return the number of frames that a transcript needs; with fewer, its loss means nothing.

        Args:
            tokens: of the transcript.
        """


# Of criteria that align tokens with frames.
_UNALIGNED = (
    "too few frames for their text, so no alignment",
    "check its segments and text, or take tokens of several letters",
)


class Ctc:
    """Connectionist temporal classification (Graves et al., ICML 2006).

    Args:
        layer: ESPnet's CTC layer of the model.
    """

    unfit = _UNALIGNED

    def __init__(self, layer: Any):
        self._layer = layer

    def classify(self, features: Tensor) -> Tensor:
        """Return log posteriors."""
        found: Tensor = self._layer.log_softmax(features)
        return found.float()

    def posteriors(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Return the values, which are log posteriors already."""
        return values

    def losses(self, values: Tensor, lengths: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return each utterance's loss; see `Criterion`."""
        targets = batch["text"][batch["text"] >= 0]
        # Without an alignment the loss is infinite. Such utterances are left out beforehand; were
        # one left, it would not spoil the batch.
        return nn.functional.ctc_loss(
            values.transpose(0, 1),
            targets,
            lengths,
            batch["text_lengths"],
            reduction="none",
            zero_infinity=True,
        )

    def fewest_frames(self, tokens: Sequence[int]) -> int:
        """Return a frame for each token, and for each blank between two equal ones."""
        return len(tokens) + sum(one == other for one, other in pairwise(tokens))


class LatticeFree:
    """Lattice-free MMI, see `fedtools.models.lfmmi`.

    Args:
        layer: ESPnet's CTC layer, whose scores are used without softmax.
        lattice: the denominator, and numerators of transcripts.
    """

    unfit = _UNALIGNED

    def __init__(self, layer: Any, lattice: Lattice):
        self._layer, self._lattice = layer, lattice

    def classify(self, features: Tensor) -> Tensor:
        """Return the scores of the last layer, not normalised."""
        found: Tensor = self._layer.ctc_lo(features)
        return found

    def posteriors(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Return log posteriors of tokens; see `Criterion`."""
        return self._lattice.log_posteriors(values, lengths)

    def losses(self, values: Tensor, lengths: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return each utterance's loss; see `Criterion`."""
        return self._lattice.losses(values, lengths, batch)

    def fewest_frames(self, tokens: Sequence[int]) -> int:
        """Return a frame for each unit."""
        return len(tokens)
