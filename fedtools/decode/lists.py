"""N-best lists after decoding: joining jobs, tuning weights, taking the best. Needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fedtools.core.config import from_mapping, read_yaml, write_yaml
from fedtools.core.errors import UserError
from fedtools.data.datadir import DataDir, byte_order, write_table
from fedtools.data.nbest import Hypothesis, best_text, read_nbest, write_nbest
from fedtools.data.text_units import WORD, TextUnit, read_text_unit
from fedtools.decode.repetition import repeats
from fedtools.score.align import count_errors

# Values that `tune` tries on validation data; on N-best lists the whole grid takes seconds.
LM_WEIGHTS = [round(0.1 * step, 1) for step in range(51)]
WORD_SCORES = [0.5 * step for step in range(-8, 17)]
# File next to the hypotheses, with the weights that selected them.
WEIGHTS_FILE = "weights.yaml"


@dataclass(frozen=True)
class TunedWeights:
    """The weights that `tune` writes, see `Hypothesis.total`.

    Attributes:
        lm_weight, word_score: the weights.
        tuned_on: the name of the data that they were tuned on; "" for weights of the user's own.
    """

    lm_weight: float
    word_score: float
    tuned_on: str = ""

    @property
    def values(self) -> dict[str, float]:
        """Return the weights themselves, by name."""
        return {"lm_weight": self.lm_weight, "word_score": self.word_score}

    @property
    def at_edge(self) -> list[str]:
        """Return the weights at an edge of the values that `tune` tries, for messages.

        An LM weight of 0 does not count, since a lower one makes no sense.
        """
        found = []
        if self.lm_weight >= LM_WEIGHTS[-1]:
            found.append(f"LM weight {self.lm_weight:g}")
        if not WORD_SCORES[0] < self.word_score < WORD_SCORES[-1]:
            found.append(f"word score {self.word_score:g}")
        return found


def merge(out: str | Path, data_path: str | Path, jobs: int) -> Path:
    """Join the jobs' N-best lists to `OUT/nbest.tsv`, checking that each utterance has one.

    Raises:
        UserError: naming the first utterance that is missing, or not in the data directory.
    """
    out = Path(out)
    lists: dict[str, list[Hypothesis]] = {}
    for job in range(1, jobs + 1):
        lists |= read_nbest(out / f"nbest.{job}.tsv")
    utterances = DataDir.read(data_path, "utt2spk").utterances
    for name in utterances:
        if name not in lists:
            raise UserError(f"no hypothesis of utterance {name!r}", path=out)
    if len(lists) > len(utterances):
        extra = next(name for name in lists if name not in set(utterances))
        raise UserError(f"utterance {extra!r} is not in {data_path}", path=out)
    write_nbest(out / "nbest.tsv", ((name, lists[name]) for name in byte_order(lists)))
    return out / "nbest.tsv"


def best_weights(
    nbest: Mapping[str, Sequence[Hypothesis]],
    reference: Mapping[str, str],
    lm_weights: Sequence[float],
    word_scores: Sequence[float] = (0.0,),
    where: str | Path | None = None,
    unit: TextUnit = WORD,
) -> tuple[TunedWeights, float]:
    """Return the weights whose rescored N-best lists have the fewest errors; the first on a tie.

    Args:
        nbest: hypotheses by utterance.
        reference: words by utterance, for the same utterances.
        lm_weights: candidate LM weights; the LM's scores are natural logarithms.
        word_scores: candidate scores per word.
        where: the file of the hypotheses, for messages.
        unit: unit in which errors are counted; the word score always counts words.

    Returns:
        The weights, and their error rate (a fraction).

    Raises:
        UserError: if hypotheses and reference differ in utterances, or the reference has no words.
    """
    if different := sorted(set(nbest) ^ set(reference)):
        place = "reference" if different[0] in nbest else "N-best list"
        problem = f"utterance {different[0]!r} is missing in the {place} ({len(different)} differ)"
        remedy = "decode and tune on the same data directory"
        raise UserError(problem, path=where, remedy=remedy)
    length = sum(len(unit.cut(words)) for words in reference.values())
    if not length:
        remedy = "tune on a set with transcripts"
        raise UserError("the reference has no words", path=where, remedy=remedy)
    shape = (len(nbest), max(map(len, nbest.values())))
    acoustic, lm = np.full(shape, -np.inf), np.zeros(shape)
    words, errors = np.zeros(shape), np.zeros(shape, dtype=int)
    for row, (utterance, hypotheses) in enumerate(nbest.items()):
        spoken = unit.cut(reference[utterance])
        for column, hypothesis in enumerate(hypotheses):
            found = unit.cut(hypothesis.words)
            acoustic[row, column], lm[row, column] = hypothesis.acoustic, hypothesis.lm
            words[row, column] = len(hypothesis.words.split())
            errors[row, column] = count_errors(spoken, found).errors
    rows = np.arange(shape[0])
    grid = [
        (TunedWeights(lm_weight, word_score), errors[rows, best].sum() / length)
        for lm_weight in lm_weights
        for word_score in word_scores
        for best in [(acoustic + lm_weight * lm + word_score * words).argmax(1)]
    ]
    return min(grid, key=lambda found: found[1])


def tune(out: str | Path, data_path: str | Path, weights: str | Path) -> str:
    """Choose LM weight and word score on validation N-best lists, and write them as YAML.

    A warning goes to stderr if a chosen value is at an edge of the values tried.

    Returns:
        one line that reports the choice.
    """
    reference = DataDir.read(data_path, "text").text
    nbest = _read_merged(out)
    where = Path(out) / "nbest.tsv"
    # On a tie the word score nearest to 0 is taken: an edge is chosen only if it is better.
    tried, unit = sorted(WORD_SCORES, key=abs), read_text_unit(data_path)
    best, rate = best_weights(nbest, reference, LM_WEIGHTS, tried, where, unit)
    write_yaml(weights, best.values | {"tuned_on": Path(data_path).resolve().name})
    if best.at_edge:
        spans = (f"{tried[0]:g} to {tried[-1]:g}" for tried in (LM_WEIGHTS, WORD_SCORES))
        edge = f"{', '.join(best.at_edge)}: at an edge of the values tried ({', '.join(spans)})"
        print(f"warning: {weights}: {edge}; a better value may lie beyond", file=sys.stderr)
    return (
        f"{weights}: lm_weight {best.lm_weight}, word_score {best.word_score}, "
        f"{unit.title} {100 * rate:.2f} % on {data_path}"
    )


def best_path(out: str | Path, weights: str | Path | None, drop_loops: bool = False) -> str:
    """Write the best hypotheses to `OUT/text`, re-ranked by `weights` if given.

    The weights are copied to `OUT/weights.yaml`, for the report.

    Args:
        drop_loops: whether to write an empty transcript for a hypothesis whose words, or the
            letters of one of them, repeat themselves.

    Returns:
        the path of the text, with `drop_loops` also the number of such hypotheses.
    """
    nbest = _read_merged(out)
    chosen = _read_weights(weights) if weights else None
    used, text = Path(out) / WEIGHTS_FILE, best_text(nbest, **(chosen.values if chosen else {}))
    lost = [name for name, words in text.items() if drop_loops and repeats(words)]
    used.unlink(missing_ok=True)
    write_table(Path(out) / "text", text | dict.fromkeys(lost, ""))
    if chosen:
        write_yaml(used, {name: value for name, value in asdict(chosen).items() if value != ""})
    said = f": {len(lost)} of {len(text)} hypotheses repeat themselves, left empty"
    return f"{Path(out) / 'text'}{said if drop_loops else ''}"


def used_weights(out: str | Path) -> TunedWeights | None:
    """Return the weights that `best_path` used in a folder; None if it wrote rank 1, or nothing."""
    path = Path(out) / WEIGHTS_FILE
    return _read_weights(path) if path.exists() else None


def _read_weights(path: str | Path) -> TunedWeights:
    return from_mapping(TunedWeights, read_yaml(path), path)


def _read_merged(out: str | Path) -> dict[str, list[Hypothesis]]:
    path = Path(out) / "nbest.tsv"
    nbest = read_nbest(path)
    if not nbest:
        raise UserError("empty", path=path, remedy="run fedtools decode again")
    return nbest
