"""The loss of lattice-free MMI, for whole utterances and without alignments.

Hadian et al.: End-to-end speech recognition using lattice-free MMI, Interspeech 2018; Povey et al.:
Purely sequence-trained neural networks for ASR based on lattice-free MMI, Interspeech 2016.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedtools.models.lfmmi.forward_backward import Packed, log_totals, pack
from fedtools.models.lfmmi.graph import Graph

# Kaldi's recipes have this chain.l2-regularize.
OUTPUT_L2 = 5e-5


def lfmmi_losses(
    scores: Tensor,
    lengths: Tensor,
    denominator: Packed,
    numerators: Sequence[Graph] | Packed,
    output_l2: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The loss of each utterance: -ln of its transcript's probability among all unit sequences.

        loss = -ln (sum over paths of the transcript / sum over all paths) + l2 / 2 * |scores|^2

    The first term is at least 0 with numerators of that denominator; units have the n-gram's
    probabilities in both sums.

    Args:
        scores: the network's last layer as it is, without softmax, (B, T, pdfs); two for each unit,
            and T after all subsampling. Padded frames may be anything.
        lengths: frames of each utterance, (B,).
        denominator: packed on the device of the scores.
        numerators: the graph of each utterance's transcript.
        output_l2: weight of the squares of all scores (Kaldi's l2-regularize, see `OUTPUT_L2`):
            nothing else keeps scores from drifting, as sums over all paths normalise them.

    Returns:
        losses, nats summed over frames, (B,); and whether each utterance could be used, (B,).
        One with fewer frames than its transcript has units has no path: its loss is 0, as is its
        gradient.
    """
    if not isinstance(numerators, Packed):
        numerators = pack(numerators, scores.device)
    lengths = lengths.to(scores.device)
    said = log_totals(scores, lengths, numerators)
    losses = log_totals(scores, lengths, denominator) - said
    if output_l2:
        padded = torch.arange(scores.shape[1], device=scores.device) >= lengths[:, None]
        squares = scores.masked_fill(padded[..., None], 0.0).double().square().sum((1, 2))
        losses = losses + output_l2 / 2 * squares
    # A model that diverged has sums that are no numbers; these must not pass for short utterances.
    usable = said != -torch.inf
    return losses.where(usable, 0.0).to(torch.promote_types(scores.dtype, torch.float32)), usable
