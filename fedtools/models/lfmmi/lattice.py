"""Lattice-free MMI as a model's criterion: the loss, and posteriors of tokens for decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedtools.core.errors import UserError
from fedtools.exchange.states import load_state, save_state
from fedtools.models.lfmmi.forward_backward import Packed, pack, posteriors
from fedtools.models.lfmmi.graph import Graph, denominator, estimate, numerator, word_starts
from fedtools.models.lfmmi.loss import OUTPUT_L2, lfmmi_losses

# File that `fedtools train-denominator` writes, also in an experiment.
FILE = "denominator.safetensors"
_ARRAYS = ("source", "target", "pdf", "weight", "initial", "final")
# Floor of a token's posterior, because a decoder adds logarithms.
_LEAST = 1e-10
# Size of the cache of transcripts' numerators.
_NUMERATORS = 20_000


class Lattice:
    """A denominator, and the numerators of transcripts.

    Args:
        graph: the denominator.
        tokens: number of the tokenizer's tokens, including the CTC blank and <sos/eos>.
        output_l2: see `lfmmi_losses`.
    """

    def __init__(self, graph: Graph, tokens: int, output_l2: float = OUTPUT_L2):
        self.graph, self.tokens, self._output_l2 = graph, tokens, output_l2
        self._packed: dict[torch.device, Packed] = {}
        self._numerator = lru_cache(_NUMERATORS)(lambda tokens: numerator(graph, tokens))

    @property
    def outputs(self) -> int:
        """Return the scores per frame: two for each token and for silence, none for <sos/eos>."""
        return 2 * (self.tokens - 1)

    def losses(self, scores: Tensor, lengths: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of each utterance, nats, (B,); 0 for one too short for its transcript.

        Args:
            scores: (B, T, outputs), output of the last layer.
            lengths: (B,) numbers of frames.
            batch: `text` (B, tokens; padded with -1) and `text_lengths`.
        """
        texts = zip(batch["text"].tolist(), batch["text_lengths"].tolist(), strict=True)
        numerators = [self._numerator(tuple(row[:length])) for row, length in texts]
        losses, _ = lfmmi_losses(
            scores.float(), lengths, self._denominator(scores), numerators, self._output_l2
        )
        return losses

    def log_posteriors(self, scores: Tensor, lengths: Tensor) -> Tensor:
        """Return log posteriors in CTC's form, (B, T, tokens), over all paths of the denominator.

        A token's posterior is that of its first frame. The blank has all the rest: silence, and
        tokens that continue.
        """
        found = posteriors(scores.float(), lengths, self._denominator(scores))
        begins = found[..., 2::2].clamp(0, 1)
        blank = (1 - begins.sum(-1, keepdim=True)).clamp(min=0)
        last = torch.zeros_like(blank)
        return torch.cat([blank, begins, last], -1).clamp(min=_LEAST).log().float()

    def _denominator(self, scores: Tensor) -> Packed:
        if scores.device not in self._packed:
            self._packed[scores.device] = pack(self.graph, scores.device)
        return self._packed[scores.device]

    def __deepcopy__(self, memo: dict) -> Lattice:
        # Copies of a model share the lattice.
        return self


def train_denominator(
    transcripts: Sequence[Sequence[int]], tokens: Sequence[str], order: int, max_histories: int
) -> Graph:
    """Return the denominator of an n-gram that is estimated on transcripts.

    Args:
        transcripts: token ids of each transcript.
        tokens: the tokenizer's tokens, the CTC blank first and <sos/eos> last.
        order, max_histories: see `estimate`.
    """
    ngram = estimate(transcripts, len(tokens) - 1, order, max_histories)
    return denominator(ngram, word_starts(tokens))


def save_denominator(path: Path, graph: Graph) -> None:
    """Write a graph as a safetensors file."""
    save_state(path, {name: getattr(graph, name) for name in _ARRAYS})


def load_denominator(path: Path, tokens: int) -> Graph:
    """Read a denominator that `save_denominator` wrote.

    Raises:
        UserError: naming the file, if it is not a denominator, or is for other tokens.
    """
    remedy = "make it with fedtools train-denominator and the same tokens"
    arrays = load_state(path)
    sizes = {name: value.shape for name, value in arrays.items()}
    arcs, states = sizes.get("pdf"), sizes.get("final")
    wanted = dict.fromkeys(("source", "target", "pdf", "weight"), arcs)
    wanted |= dict.fromkeys(("initial", "final"), states)
    whole = all(arrays[name].dtype == np.int64 for name in _ARRAYS[:3] if name in arrays)
    if sizes != wanted or not whole or arcs is None or len(arcs) != 1 or len(states) != 1:
        raise UserError("not a denominator", path=path, remedy=remedy)
    for name, least, most in (("source", 0, *states), ("target", 0, *states)):
        if not ((arrays[name] >= least) & (arrays[name] < most)).all():
            raise UserError(f"{name}: no such state", path=path, remedy=remedy)
    if not ((arrays["pdf"] >= -1) & (arrays["pdf"] < 2 * (tokens - 1))).all():
        raise UserError(f"it is not for {tokens} tokens", path=path, remedy=remedy)
    if any(np.isnan(arrays[name]).any() for name in ("weight", "initial", "final")):
        raise UserError("a weight is NaN", path=path, remedy=remedy)
    try:
        return Graph(*(arrays[name] for name in _ARRAYS))
    except ValueError as error:
        raise UserError(str(error), path=path, remedy=remedy) from None
