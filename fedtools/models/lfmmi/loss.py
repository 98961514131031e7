"""The loss of lattice-free MMI, on whole utterances without alignments.

Hadian et al.: End-to-end speech recognition using lattice-free MMI, Interspeech 2018; Povey et al.:
Purely sequence-trained neural networks for ASR based on lattice-free MMI, Interspeech 2016.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedtools.models.lfmmi.forward_backward import Packed, log_totals, pack
from fedtools.models.lfmmi.graph import Graph

# The value of chain.l2-regularize in Kaldi's recipes.
OUTPUT_L2 = 5e-5


def lfmmi_losses(
    scores: Tensor,
    lengths: Tensor,
    denominator: Packed,
    numerators: Sequence[Graph] | Packed,
    output_l2: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return each utterance's loss, -ln of its transcript's probability among all token sequences.

        loss = -ln (sum over paths of the transcript / sum over all paths) + l2 / 2 * |scores|^2

    The first term is at least 0 if the numerators come from the denominator; both sums include the
    n-gram's probabilities of tokens.

    Args:
        scores: output of the network's last layer without softmax, (B, T, pdfs); two for each
            token, and T after all subsampling. Padded frames may be anything.
        lengths: frames of each utterance, (B,).
        denominator: the denominator, packed on the device of the scores.
        numerators: the graph of each utterance's transcript.
        output_l2: weight of the squared scores (Kaldi's l2-regularize, see `OUTPUT_L2`). Nothing
            else keeps scores from drifting, because the sum over all paths normalises them.

    Returns:
        losses, nats summed over frames, (B,); and whether each utterance could be used, (B,).
        An utterance with fewer frames than its transcript has tokens has no path: its loss and its
        gradient are 0.
    """
    if not isinstance(numerators, Packed):
        numerators = pack(numerators, scores.device)
    lengths = lengths.to(scores.device)
    correct = log_totals(scores, lengths, numerators)
    losses = log_totals(scores, lengths, denominator) - correct
    if output_l2:
        padded = torch.arange(scores.shape[1], device=scores.device) >= lengths[:, None]
        squares = scores.masked_fill(padded[..., None], 0.0).double().square().sum((1, 2))
        losses = losses + output_l2 / 2 * squares
    # A diverged model has NaN sums, which must not pass for utterances that are too short.
    usable = correct != -torch.inf
    return losses.where(usable, 0.0).to(torch.promote_types(scores.dtype, torch.float32)), usable
