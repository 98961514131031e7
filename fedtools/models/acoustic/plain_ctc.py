"""CTC in plain torch operations, whose gradient can be differentiated again, unlike torch's CTC.

A. Graves, S. Fernandez, F. Gomez, J. Schmidhuber: Connectionist temporal classification, ICML 2006,
section 4.1: the forward variables, in logs. It is slow; use it only for second derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BLANK = 0
# Stands for -inf, whose gradient would be NaN.
_NEVER = -1e30


def ctc_losses(log_probs: Tensor, lengths: Tensor, texts: Sequence[Sequence[int]]) -> Tensor:
    """Return the loss of each utterance, nats: (B,); 0 where no alignment is possible.

    Args:
        log_probs: (B, T, tokens), blank first.
        lengths: (B,) numbers of frames.
        texts: tokens of each utterance.
    """
    rows = zip(log_probs, lengths.tolist(), texts, strict=True)
    return torch.stack([_loss(frames[:length], text) for frames, length, text in rows])


def _loss(frames: Tensor, text: Sequence[int]) -> Tensor:
    # A blank before, between and after all tokens.
    states = torch.full((2 * len(text) + 1,), _BLANK)
    states[1::2] = torch.tensor(text, dtype=torch.long)
    # Two different tokens may follow one another without a blank.
    skips = torch.zeros(len(states), dtype=torch.bool)
    skips[2:] = (states[2:] != _BLANK) & (states[2:] != states[:-2])
    scores = frames[:, states.to(frames.device)]
    never = scores.new_full((2,), _NEVER)
    forward = torch.cat([scores[0, :2], never.repeat(len(text))[: max(len(states) - 2, 0)]])
    for frame in scores[1:]:
        behind = torch.cat([never, forward])
        jump = torch.where(skips.to(frame.device), behind[:-2], never[0])
        ways = torch.stack([behind[2:], behind[1:-1], jump])
        forward = torch.logsumexp(ways, 0) + frame
    total = torch.logsumexp(forward[-2:], 0)
    return torch.where(total > _NEVER / 2, -total, torch.zeros_like(total))
