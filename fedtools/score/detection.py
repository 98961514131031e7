"""False accepts and false rejects of a keyword spotter.

X.-C. Li et al.: Avoid overfitting user specific information in federated keyword spotting,
Interspeech 2022, section 5 and table 3. `DEFINITION` says what is counted, and where the paper
leaves it open; a prediction is the class of the largest logit.

A clip is accepted if its score is at least the threshold: `scores_of` defines the score. Running
speech without keywords has a score at every step of a sliding window, and `peaks` defines which
steps count as one false accept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedtools.core.errors import UserError

NEGATIVE = ("_silence_", "_unknown_")
RATES = ("fa", "fr", "fa_of_negatives", "fr_of_positives")
COLUMNS = ("round", "clips", "negatives", "false_accepts", "false_rejects", *RATES)
"""Columns of the file in which an experiment keeps these, with a row after its last round."""

DET = ("threshold", "false_rejects", "false_accepts")
"""Columns of the file of rates, as shares, at all thresholds at which they change."""

DEFINITION = (
    f"Negative classes are `{NEGATIVE[0]}` and `{NEGATIVE[1]}`, all others are positive; no "
    "threshold. "
    "FA: clips of a negative class taken for a positive one; FR: clips of a positive class taken "
    "for a negative one; both in % of all clips. The table also has FA in % of the negative clips "
    "and FR in % of the positive ones. A keyword taken for another keyword is neither. The paper "
    "averages FA over its ten words and does not say what its percentages refer to; its authors' "
    "public code counts all clips."
)


# Commonly reported operating points of a detector: false accepts per hour of speech without
# keywords, and in % of clips without one.
AN_HOUR = (1.0, 10.0, 100.0)
OF_CLIPS = (0.1, 1.0, 5.0)


@dataclass(frozen=True)
class Detection:
    """Counts of clips: all, of negative classes, falsely accepted, falsely rejected."""

    clips: int
    negatives: int
    false_accepts: int
    false_rejects: int

    @property
    def rates(self) -> dict[str, float]:
        """Return `RATES`, in %: of all clips, and of those that could be falsely taken."""
        accepts, rejects = 100 * self.false_accepts, 100 * self.false_rejects
        values = (
            accepts / self.clips,
            rejects / self.clips,
            accepts / self.negatives,
            rejects / (self.clips - self.negatives),
        )
        return dict(zip(RATES, values, strict=True))


def detect(
    predicted: np.ndarray, labels: np.ndarray, classes: Sequence[str], where: str | Path
) -> Detection:
    """Count false accepts and rejects, as defined in `DEFINITION`.

    Args:
        predicted, labels: class indices, (clips,).
        classes: the label of each index.
        where: the clips' folder, for messages.

    Raises:
        UserError: if the classes or the clips are all positive, or all negative.
    """
    if not set(NEGATIVE) & set(classes):
        problem = f"no class is {' or '.join(NEGATIVE)}, so there is nothing to reject"
        remedy = "use the data of the 12-class task"
        raise UserError(problem, path=where, remedy=remedy)
    negative = np.isin(classes, NEGATIVE)
    is_negative, taken_for_negative = negative[labels], negative[predicted]
    if is_negative.all() or not is_negative.any():
        what = "positive" if is_negative.all() else "negative"
        raise UserError(f"no clip of a {what} class", path=where, remedy="measure on other clips")
    return Detection(
        clips=len(labels),
        negatives=int(is_negative.sum()),
        false_accepts=int((is_negative & ~taken_for_negative).sum()),
        false_rejects=int((~is_negative & taken_for_negative).sum()),
    )


def scores_of(logits: np.ndarray, classes: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the score of each clip, float64 (clips,), and the class that a high score accepts.

    The class is the most probable keyword, and the score its natural log odds: its logit minus the
    log sum of all other classes' exponentials. Another keyword that is as probable lowers it.

    Args:
        logits: (clips, classes).
        classes: the label of each column.
    """
    values = np.asarray(logits, np.float64)
    best = np.where(np.isin(classes, NEGATIVE), -np.inf, values).argmax(1)
    rows = np.arange(len(values))
    own = values[rows, best]
    values = values.copy()
    values[rows, best] = -np.inf
    most = values.max(1)
    return own - most - np.log(np.exp(values - most[:, None]).sum(1)), best


def peaks(scores: np.ndarray, apart: int) -> list[int]:
    """Return the steps of a sliding window that count as one word each, in falling order of scores.

    Each is the highest that no higher one suppresses, and suppresses those less than `apart` steps
    from it: a word is in many windows, and is accepted once, at any threshold.
    """
    free, found = np.ones(len(scores), bool), []
    for step in np.argsort(-scores, kind="stable").tolist():
        if free[step]:
            found.append(step)
            free[max(0, step - apart + 1) : step + apart] = False
    return found


def rejects_at(positives: np.ndarray, negatives: np.ndarray, allowed: int) -> float:
    """Return the false rejects, in %, at the lowest threshold with few enough false accepts.

    Args:
        positives: scores of clips that are to be accepted.
        negatives: scores of what is to be rejected.
        allowed: the most negatives that may be accepted.
    """
    if allowed >= len(negatives):
        return 0.0
    highest = np.sort(negatives)[-1 - allowed]
    return float(100 * (positives <= highest).mean())
