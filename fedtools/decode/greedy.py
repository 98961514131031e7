"""Greedy CTC decoding: the best token of every frame, repeats merged, blanks removed."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fedtools.core.errors import UserError


def greedy(log_probs: ArrayLike, lengths: ArrayLike, blank: int = 0) -> list[list[int]]:
    """Decode a batch by the best path (Graves et al. 2006, section 3.2).

    Args:
        log_probs: (utterances, frames, tokens), on any scale: only the order counts.
        lengths: (utterances,) numbers of valid frames; later frames are ignored.
        blank: id of the CTC blank.

    Returns:
        Token ids of each utterance; empty where every frame is blank.

    Raises:
        UserError: if a valid frame has a NaN.
    """
    log_probs, lengths = np.asarray(log_probs), np.asarray(lengths)
    best = log_probs.argmax(-1)
    # argmax treats a NaN as the largest value, so the best score is NaN if any is.
    score = np.take_along_axis(log_probs, best[..., None], -1)[..., 0]
    inside = np.arange(best.shape[1]) < lengths[:, None]
    refuse_nan(score[inside])
    kept = inside & (best != blank)
    kept[:, 1:] &= best[:, 1:] != best[:, :-1]
    ends = np.cumsum(kept.sum(1))[:-1]
    return [ids.tolist() for ids in np.split(best[kept], ends)] if len(best) else []


def refuse_nan(scores: np.ndarray) -> None:
    """Raise a `UserError` if posteriors have a NaN: a diverged model must not pass for silence."""
    if np.isnan(scores).any():
        problem = "the acoustic model's posteriors are NaN: its training diverged"
        remedy = "decode an earlier checkpoint, or train with a smaller learning rate"
        raise UserError(problem, remedy=remedy)
