"""Greedy CTC decoding: the best token of every frame, repeats merged, blanks removed."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fedtools.files.errors import UserError


def greedy(log_probs: ArrayLike, lengths: ArrayLike, blank: int = 0) -> list[list[int]]:
    """Best-path decoding of a batch (Graves et al. 2006, section 3.2).

    Args:
        log_probs: (utterances, frames, tokens), of any scale: only the order counts.
        lengths: (utterances,) valid frames; those after them are ignored.
        blank: id of the CTC blank.

    Returns:
        Token ids of each utterance; empty where every frame is blank.

    Raises:
        UserError: if there is a NaN within the valid frames.
    """
    log_probs, lengths = np.asarray(log_probs), np.asarray(lengths)
    best = log_probs.argmax(-1)
    # argmax takes a NaN for the largest, so the best score tells whether there was one.
    score = np.take_along_axis(log_probs, best[..., None], -1)[..., 0]
    inside = np.arange(best.shape[1]) < lengths[:, None]
    refuse_nan(score[inside])
    kept = inside & (best != blank)
    kept[:, 1:] &= best[:, 1:] != best[:, :-1]
    ends = np.cumsum(kept.sum(1))[:-1]
    return [ids.tolist() for ids in np.split(best[kept], ends)] if len(best) else []


def refuse_nan(scores: np.ndarray) -> None:
    """Raise a `UserError` if posteriors hold a NaN: a model that diverged must not look silent."""
    if np.isnan(scores).any():
        problem = "the acoustic model's posteriors are NaN: its training diverged"
        remedy = "decode an earlier checkpoint, or train with a smaller learning rate"
        raise UserError(problem, remedy=remedy)
