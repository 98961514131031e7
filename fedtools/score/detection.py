"""False accepts and false rejects of a keyword spotter.

X.-C. Li et al.: Avoid overfitting user specific information in federated keyword spotting,
Interspeech 2022, section 5 and table 3. `DEFINITION` says what is counted, and where the paper
leaves it open; a prediction is the class of the largest logit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedtools.files.errors import UserError

NEGATIVE = ("_silence_", "_unknown_")
RATES = ("fa", "fr", "fa_of_negatives", "fr_of_positives")
COLUMNS = ("round", "clips", "negatives", "false_accepts", "false_rejects", *RATES)
"""Of the file in which an experiment keeps these, a row after its last round."""

DEFINITION = (
    f"Negative classes are `{NEGATIVE[0]}` and `{NEGATIVE[1]}`, all others are positive; no "
    "threshold. "
    "FA: clips of a negative class taken for a positive one; FR: clips of a positive class taken "
    "for a negative one; both in % of all clips. Beside them FA in % of the negative clips and FR "
    "in % of the positive ones. A keyword taken for another keyword is neither. The paper "
    "averages FA over its ten words and does not say of what its rates are percentages; all clips "
    "is what its authors' public code counts."
)


@dataclass(frozen=True)
class Detection:
    """Counts of clips: all, of negative classes, falsely accepted, falsely rejected."""

    clips: int
    negatives: int
    false_accepts: int
    false_rejects: int

    @property
    def rates(self) -> dict[str, float]:
        """`RATES`: of all clips, and of those that could be falsely taken, in %."""
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
    """Count false accepts and rejects; the module says what they are.

    Args:
        predicted, labels: class indices, (clips,).
        classes: the label of each index.
        where: the clips' folder, for messages.

    Raises:
        UserError: if the classes or the clips are all positive, or all negative.
    """
    if not set(NEGATIVE) & set(classes):
        problem = f"no class is {' or '.join(NEGATIVE)}, so that nothing is to be rejected"
        remedy = "take the data of the 12-class task"
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
