"""Scores of hypotheses by a low-order n-gram of the training text, for a density ratio.

McDermott et al., "A density ratio approach to language model fusion in end-to-end automatic speech
recognition", ASRU 2019: the score of a language model of the training text stands for what the
recogniser has learnt of it, and is subtracted before another language model's score is added.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedtools.core.errors import UserError
from fedtools.data.symbols import warn_of_unknown, words_of
from fedtools.lm.ngram import NgramFolder

_LN10 = math.log(10)


def score_hypotheses(ngram: Path, hypotheses: Sequence[str], path: Path) -> np.ndarray:
    """Return ln P of each hypothesis with its end, (hypotheses,) float32.

    Args:
        ngram: folder made by `train_ngram`, of words; words that it lacks are its `<unk>`.
        path: the file of the hypotheses, for a warning of many such words.

    Raises:
        UserError: if the folder is damaged, or the n-gram is one of tokens.
    """
    import kenlm

    folder = NgramFolder.read(ngram)
    if folder.unit != "word":
        raise UserError("an n-gram of tokens", path=folder.path, remedy="give one of words")
    model = kenlm.Model(str(folder.binary))
    known: dict[str, float] = {}
    for words in hypotheses:
        if words not in known:
            known[words] = model.score(" ".join(words_of(words))) * _LN10
    counts = Counter(word for words in hypotheses for word in words_of(words))
    unknown = sum(count for word, count in counts.items() if word not in model)
    warn_of_unknown(unknown, counts.total(), path, folder.vocabulary)
    return np.array([known[words] for words in hypotheses], dtype=np.float32)
