"""What acoustic models are trained with: what each has of its encoder's output, and its loss.

A model has its own as `criterion`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from fedtools.models.lfmmi.lattice import Lattice


class Criterion(Protocol):
    """What `fedtools.models.asr` asks of a model above its encoder."""

    def classify(self, features: Tensor) -> Tensor:
        """What the loss is of: (B, T', size) to (B, T', outputs)."""

    def posteriors(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Log posteriors as of CTC, of what `classify` gave and numbers of frames.

        Raises:
            UserError: if the model has none.
        """

    def losses(self, values: Tensor, lengths: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """The loss of each utterance, natural log, summed over its frames: (B,).

        Args:
            values, lengths: what `classify` gave, and numbers of frames.
            batch: `text` (B, tokens; padded with -1) and `text_lengths`.
        """


class Ctc:
    """Connectionist temporal classification (Graves et al., ICML 2006).

    Args:
        layer: ESPnet's, of the model.
    """

    def __init__(self, layer: Any):
        self._layer = layer

    def classify(self, features: Tensor) -> Tensor:
        """Log posteriors."""
        found: Tensor = self._layer.log_softmax(features)
        return found.float()

    def posteriors(self, values: Tensor, lengths: Tensor) -> Tensor:
        """What they are."""
        return values

    def losses(self, values: Tensor, lengths: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """See `Criterion`."""
        targets = batch["text"][batch["text"] >= 0]
        # An utterance with more tokens than frames has no alignment; it must not turn the rest to
        # inf.
        return nn.functional.ctc_loss(
            values.transpose(0, 1),
            targets,
            lengths,
            batch["text_lengths"],
            reduction="none",
            zero_infinity=True,
        )


class LatticeFree:
    """Lattice-free MMI, see `fedtools.models.lfmmi`.

    Args:
        layer: ESPnet's of CTC, whose scores it takes.
        lattice: has the denominator.
    """

    def __init__(self, layer: Any, lattice: Lattice):
        self._layer, self._lattice = layer, lattice

    def classify(self, features: Tensor) -> Tensor:
        """Scores."""
        found: Tensor = self._layer.ctc_lo(features)
        return found

    def posteriors(self, values: Tensor, lengths: Tensor) -> Tensor:
        """See `Criterion`."""
        return self._lattice.log_posteriors(values, lengths)

    def losses(self, values: Tensor, lengths: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """See `Criterion`."""
        return self._lattice.losses(values, lengths, batch)
