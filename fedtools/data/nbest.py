r"""N-best lists: a decoder's hypotheses for each utterance, with separate scores.

One hypothesis per line, utterances in C order, ranks from 1:

    <utterance>\t<rank>\t<acoustic, natural log>\t<lm, natural log>\t<words>
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedtools.core.atomic import write_lines
from fedtools.core.errors import UserError
from fedtools.core.text_files import stream_lines
from fedtools.data.datadir import byte_order, check_id

_SCORE = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")


@dataclass(frozen=True)
class Hypothesis:
    """One line of an N-best list.

    Attributes:
        rank: 1 for the best.
        acoustic: log-probability of the acoustic model, natural logarithm.
        lm: log-probability of the language model with the end of sentence, natural logarithm,
            without any weight.
        words: separated by single spaces; "" if nothing was recognised.
    """

    rank: int
    acoustic: float
    lm: float
    words: str

    def total(self, lm_weight: float, word_score: float = 0.0) -> float:
        """Return the total score: acoustic + lm_weight * lm + word_score * number of words."""
        return self.acoustic + lm_weight * self.lm + word_score * len(self.words.split())


def write_nbest(path: str | Path, nbest: Iterable[tuple[str, Sequence[Hypothesis]]]) -> None:
    """Write an N-best list, sorted in the C locale, atomically.

    Scores are written with nine digits, so that a float32 survives unchanged, and a list that is
    read and written again gives the same file.

    Args:
        path: the file.
        nbest: pairs (utterance, its hypotheses by rank).

    Raises:
        UserError: if an utterance is duplicated, or a hypothesis could not be read back.
    """
    lines: dict[str, list[str]] = {}
    for utterance, hypotheses in nbest:
        if utterance in lines:
            raise UserError(f"utterance {utterance!r} is duplicated", path=path)
        lines[utterance] = [
            f"{utterance}\t{h.rank}\t{h.acoustic:.9g}\t{h.lm:.9g}\t{h.words}" for h in hypotheses
        ]
        # The parser defines the format: lines that it would refuse are never written.
        previous = 0
        for line in lines[utterance]:
            previous = _parse(line, path, None, previous)[1].rank
        if not hypotheses:
            raise UserError(f"utterance {utterance!r} has no hypothesis", path=path)
    ordered = (line for utterance in byte_order(lines) for line in lines[utterance])
    write_lines(path, ordered)


def read_nbest(path: str | Path) -> dict[str, list[Hypothesis]]:
    """Read an N-best list.

    Returns:
        utterance -> hypotheses by rank, in the order of the file.

    Raises:
        UserError: naming file and line, if the file cannot be read, utterances are not sorted and
            grouped, ranks do not count up from 1, a score is not a finite number, or the words
            are not cleanly spaced.
    """
    nbest: dict[str, list[Hypothesis]] = {}
    current, rank = "", 0
    for number, line in enumerate(stream_lines(path), 1):
        same = line.partition("\t")[0] == current
        utterance, hypothesis = _parse(line, path, number, rank if same else 0)
        if not same and utterance.encode() < current.encode():
            problem = f"utterance {utterance!r} is not in order"
            remedy = "sort by utterance with LC_ALL=C, then by rank"
            raise UserError(problem, path=path, line=number, remedy=remedy)
        nbest.setdefault(utterance, []).append(hypothesis)
        current, rank = utterance, hypothesis.rank
    return nbest


def best_text(
    nbest: Mapping[str, Sequence[Hypothesis]],
    lm_weight: float | None = None,
    word_score: float = 0.0,
) -> dict[str, str]:
    """Return the best hypothesis of each utterance, as a Kaldi text table.

    Args:
        nbest: utterance -> hypotheses.
        lm_weight: weight for the total score that is maximised; None takes the first of each list.
        word_score: added for each word; natural log.
    """
    if lm_weight is None:
        return {utterance: hypotheses[0].words for utterance, hypotheses in nbest.items()}
    return {
        utterance: max(hypotheses, key=lambda h: h.total(lm_weight, word_score)).words
        for utterance, hypotheses in nbest.items()
    }


def _parse(
    line: str, path: str | Path, number: int | None, previous_rank: int
) -> tuple[str, Hypothesis]:
    fields = line.split("\t")
    if len(fields) != 5:
        remedy = "expected utterance, rank, acoustic, lm and words, separated by tabs"
        raise UserError(f"{len(fields)} fields", path=path, line=number, remedy=remedy)
    utterance, rank, acoustic, lm, words = fields
    check_id(utterance, "utterance", path, number)
    if rank != str(previous_rank + 1):
        problem = f"rank {rank!r} of {utterance!r} where {previous_rank + 1} belongs"
        remedy = "ranks count up from 1, lines of an utterance together"
        raise UserError(problem, path=path, line=number, remedy=remedy)
    if words != " ".join(words.split()):
        problem = f"words of {utterance!r} with a leading, doubled or trailing whitespace"
        raise UserError(problem, path=path, line=number, remedy="use single spaces")
    for text in (acoustic, lm):
        # float() alone would let underscores, whitespace and other scripts' digits pass, and "nan".
        if not _SCORE.fullmatch(text) or not math.isfinite(float(text)):
            raise UserError(f"score {text!r} is not a finite number", path=path, line=number)
    return utterance, Hypothesis(previous_rank + 1, float(acoustic), float(lm), words)
