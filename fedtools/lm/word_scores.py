"""N-best lists with a log-probability for every word, in a folder that `fedtools rescore` wrote.

    nbest.tsv     the lists that were scored (see fedtools/data/nbest.py)
    nnlm.scp/ark  one matrix (words, 1) for each utterance, float32 natural logarithms: hypothesis
                  after hypothesis in the order of their ranks, of each its words and then `</s>`
    words.txt     the model's vocabulary; a word that is not in it has the probability of `<unk>`
    unigram.tsv   the counts of these words in the model's training text
    nnlm.yaml     sums of what the scores were made from

Re-weighting of words needs nothing else, and no neural network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from fedtools.core.atomic import sha256
from fedtools.core.config import read_yaml
from fedtools.core.errors import UserError
from fedtools.data.ark import FeatureReader
from fedtools.data.datadir import read_table
from fedtools.data.nbest import Hypothesis, read_nbest
from fedtools.data.symbols import check_sentence, warn_of_unknown, words_of
from fedtools.lm.vocabulary import END_ID, UNIGRAM, UNKNOWN_ID, WORDS, Vocabulary, read_unigram

NBEST, NNLM, MADE_FROM = "nbest.tsv", "nnlm.scp", "nnlm.yaml"
_REMEDY = "run fedtools rescore again"


@dataclass(frozen=True)
class Rescored:
    """All lists of a folder, as flat arrays: U utterances, H hypotheses, W words.

    Hypotheses of utterance u are `first_hypothesis[u]` to `first_hypothesis[u + 1]`, in the order
    of their ranks; words of hypothesis h are `first_word[h]` to `first_word[h + 1]`, of which the
    last is `</s>`: every hypothesis has one, also one without words.

    Attributes:
        vocabulary: of the model; ids are lines of words.txt from 0: 0 is `</s>`, 1 is `<unk>`.
        unigram: (vocabulary,) int64, counts of the words in the model's training text.
        unknown: how many words of that text `<unk>` stands for.
        utterances: the U names, in C order.
        hypotheses: the words of each of the H hypotheses, as one string.
        first_hypothesis: (U + 1,) int64.
        first_word: (H + 1,) int64.
        word_ids: (W,) int32, what was scored, with `</s>` and with `<unk>` for unknown words.
        log_probs: (W,) float32, natural logarithm of the model's p(word | words before it).
        acoustic: (H,) float64, natural logarithm.
        lm: (H,) float64, of the first pass' language model, with `</s>`, natural logarithm.
        num_words: (H,) int64, without `</s>`.
    """

    vocabulary: Vocabulary
    unigram: np.ndarray
    unknown: int
    utterances: list[str]
    hypotheses: list[str]
    first_hypothesis: np.ndarray
    first_word: np.ndarray
    word_ids: np.ndarray
    log_probs: np.ndarray
    acoustic: np.ndarray
    lm: np.ndarray
    num_words: np.ndarray

    def sentence_scores(self) -> np.ndarray:
        """Return the sum of each hypothesis' log-probabilities, (H,) float64.

        The words that `<unk>` stands for share its probability equally. If each had all of it, a
        hypothesis would gain from a rare word.
        """
        log_probs = self.log_probs.astype(np.float64)
        log_probs[self.word_ids == UNKNOWN_ID] -= np.log(max(1, self.unknown))
        return np.add.reduceat(log_probs, self.first_word[:-1])


def open_rescored(folder: str | Path) -> Rescored:
    """Read and check the folder that `fedtools rescore` wrote.

    Raises:
        UserError: naming the file, if one is missing or damaged, if lists or vocabulary do not have
            the sums in nnlm.yaml, if the utterances or the numbers of words are not those of the
            lists, or if a score is not a log-probability.
    """
    folder = Path(folder)
    if not (folder / NNLM).exists():
        remedy = "run fedtools rescore, and of several jobs merge-rescored"
        raise UserError(f"no {NNLM}: nothing was rescored here", path=folder, remedy=remedy)
    _check_sums(folder)
    vocabulary = Vocabulary.read(folder)
    unigram, unknown = read_unigram(folder, vocabulary)
    nbest = read_nbest(folder / NBEST)
    if not nbest:
        raise UserError("empty", path=folder / NBEST, remedy=_REMEDY)
    flat = [hypothesis for hypotheses in nbest.values() for hypothesis in hypotheses]
    ids, lengths = encode_all(vocabulary, flat, folder / NBEST)
    unknown_words = int((ids == UNKNOWN_ID).sum())
    warn_of_unknown(unknown_words, len(ids) - len(flat), folder / NBEST, folder / WORDS)
    first_hypothesis = _offsets(map(len, nbest.values()))
    first_word = _offsets(lengths)
    ends = first_word[first_hypothesis]
    log_probs = _read_vectors(folder / NNLM, list(nbest), np.diff(ends))
    if (log_probs > 0).any():
        utterance = int(np.searchsorted(ends, int(np.argmax(log_probs > 0)), "right")) - 1
        problem = f"a log-probability of {list(nbest)[utterance]!r} is above 0"
        raise UserError(problem, path=folder / NNLM, remedy=_REMEDY)
    return Rescored(
        vocabulary=vocabulary,
        unigram=unigram,
        unknown=unknown,
        utterances=list(nbest),
        hypotheses=[hypothesis.words for hypothesis in flat],
        first_hypothesis=first_hypothesis,
        first_word=first_word,
        word_ids=ids,
        log_probs=log_probs,
        acoustic=np.array([hypothesis.acoustic for hypothesis in flat]),
        lm=np.array([hypothesis.lm for hypothesis in flat]),
        num_words=np.diff(first_word) - 1,
    )


def _check_sums(folder: Path) -> None:
    if not (folder / MADE_FROM).exists():
        return
    sums = read_yaml(folder / MADE_FROM)
    for name in (NBEST, WORDS, UNIGRAM):
        if name in sums and sha256(folder / name) != sums[name]:
            problem = f"not the file that {NNLM} was made from"
            raise UserError(problem, path=folder / name, remedy=_REMEDY)


def encode_all(
    vocabulary: Vocabulary, hypotheses: Sequence[Hypothesis], path: Path
) -> tuple[np.ndarray, list[int]]:
    """Return the ids of all words, `</s>` after each hypothesis, and the hypotheses' lengths.

    Raises:
        UserError: if a hypothesis has a reserved word, such as `<s>`.
    """
    ids, lengths, found = vocabulary.ids, [], []
    # Not `Vocabulary.encode`: a whole evaluation set has two million words.
    for line, hypothesis in enumerate(hypotheses, 1):
        row = [ids.get(word, UNKNOWN_ID) for word in words_of(hypothesis.words)]
        check_sentence(hypothesis.words, path, line)
        row.append(END_ID)
        found += row
        lengths.append(len(row))
    return np.array(found, dtype=np.int32), lengths


def read_scp(path: str | Path) -> dict[str, str]:
    """Read the entries of an scp; if its folder has moved, arks are found next to the scp."""
    path, entries = Path(path), {}
    known: dict[str, str] = {}
    for utterance, value in read_table(path).items():
        ark, _, offset = value.rpartition(":")
        if ark not in known:
            moved = path.parent / Path(ark).name
            known[ark] = str(moved) if moved.is_file() else ark
        entries[utterance] = f"{known[ark]}:{offset}"
    return entries


def _read_vectors(path: Path, utterances: Sequence[str], sizes: np.ndarray) -> np.ndarray:
    entries = read_scp(path)
    check_same(entries, utterances, path)
    found = FeatureReader(entries).read_many(utterances)
    for utterance, size, matrix in zip(utterances, sizes.tolist(), found, strict=True):
        if matrix.shape != (size, 1):
            problem = f"{utterance!r} has scores of shape {list(matrix.shape)}"
            remedy = f"its N-best list has {size} words; {_REMEDY}"
            raise UserError(problem, path=path, remedy=remedy)
    return np.concatenate(found)[:, 0]


def check_same(entries: Mapping[str, object], utterances: Sequence[str], path: Path) -> None:
    """Raise a `UserError` unless a table has exactly these utterances."""
    if different := sorted(entries.keys() ^ set(utterances)):
        place = path if different[0] not in entries else path.parent / NBEST
        problem = f"utterance {different[0]!r} is missing ({len(different)} differ)"
        raise UserError(problem, path=place, remedy=_REMEDY)


def _offsets(sizes) -> np.ndarray:
    return np.array([0, *accumulate(sizes)], dtype=np.int64)
