"""FMP and control experiments on the same stored scores: word errors by person.

A row is a setting of FMP's options, as in a sweep, or one of these control experiments, which show
where a gain comes from:

    counts: adapted     counts words of the best hypothesis after adaptation instead of equation 3
    counts: posterior   weights each hypothesis by its probability in its list after adaptation
    counts: reference   counts the reference words: a bound, which separates errors of the counts
                        from those of the method
    clients: another    uses the counts of a client of another person in another series of meetings,
                        at the same round, drawn by a seed; shows which gain is specific to a person
    everybody: static   uses a fixed unigram of other text instead of all clients' counts

Meetings whose names differ only in a final lower-case letter are a series.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedtools.core.config import from_mapping
from fedtools.core.errors import UserError
from fedtools.core.seeds import generator
from fedtools.core.tables import write_tsv
from fedtools.core.text_files import read_words
from fedtools.data.datadir import read_table
from fedtools.data.symbols import words_of
from fedtools.federation.fmp.simulation import Control, simulate
from fedtools.federation.fmp.sweep import Setting, Sweep, setting_of
from fedtools.lm.ngram import read_sentences
from fedtools.lm.reweighting import Lists
from fedtools.lm.stream import spoken
from fedtools.lm.vocabulary import END_ID, Vocabulary
from fedtools.methods.fmp import Evidence
from fedtools.privacy.options import NONE
from fedtools.score.align import count_errors

COLUMNS = ("row", "scored", "person", "words", "errors")
# Ways of scoring: all words, or all except listed words.
ALL, SOME = "all", "without"


@dataclass(frozen=True)
class Other:
    """The control experiment of a row; see the module docstring."""

    counts: Literal["kernel", "adapted", "posterior", "reference"] = "kernel"
    clients: Literal["own", "another"] = "own"
    everybody: Literal["counted", "static"] = "counted"


OTHER = tuple(one.name for one in fields(Other))


@dataclass(frozen=True)
class People:
    """The person and meeting of each utterance.

    Attributes:
        person: utterance -> person.
        meeting: utterance -> meeting.
    """

    person: Mapping[str, str]
    meeting: Mapping[str, str]

    @classmethod
    def read(cls, data: Path, utterances: Collection[str]) -> People:
        """Read utt2person and utt2meeting; raise a `UserError` if an utterance is missing."""
        tables = []
        for name in ("utt2person", "utt2meeting"):
            tables.append(read_table(data / name))
            if missing := [one for one in utterances if one not in tables[-1]]:
                raise UserError(f"no entry of utterance {missing[0]!r}", path=data / name)
        return cls(*tables)

    def stand_ins(
        self, runs: Mapping[str, slice], utterances: Sequence[str], seed: int, where: Path
    ) -> dict[str, str]:
        """Draw for each client one of another person in another series of meetings."""
        persons = {
            client: {self.person[one] for one in utterances[run]} for client, run in runs.items()
        }
        series = {
            client: {re.sub("[a-z]$", "", self.meeting[one]) for one in utterances[run]}
            for client, run in runs.items()
        }
        found = {}
        for client in runs:
            strangers = [
                one
                for one in runs
                if not persons[one] & persons[client] and not series[one] & series[client]
            ]
            if not strangers:
                problem = f"no client in another series of meetings than client {client!r}"
                raise UserError(problem, path=where, remedy="leave out rows of clients: another")
            drawn = generator(seed, "stand-in", client).integers(len(strangers))
            found[client] = strangers[int(drawn)]
        return found


def evidence_of(lists: Lists, kind: str, text: Mapping[str, str]) -> Evidence | None:
    """Return what clients count instead of equation 3; None for equation 3 itself."""
    if kind == "kernel":
        return None
    if kind == "reference":
        names = lists.rescored.utterances
        known = [lists.rescored.vocabulary.encode(text[name])[:-1] for name in names]
        return partial(_reference, known)
    return partial({"adapted": _adapted, "posterior": _posterior}[kind], lists)


def _reference(
    known: Sequence[Sequence[int]], part: slice, factors: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    words = np.array([word for one in known[part] for word in one], int)
    return words, np.ones(len(words))


def _adapted(
    lists: Lists, part: slice, factors: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    starts, ids = lists.rescored.first_word, lists.rescored.word_ids
    best = [ids[starts[one] : starts[one + 1]] for one in lists.best(part, factors)]
    words = np.concatenate(best) if best else np.zeros(0, int)
    words = words[words != END_ID]
    return words, np.ones(len(words))


def _posterior(
    lists: Lists, part: slice, factors: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the words of all hypotheses, weighted by the hypotheses' posterior probabilities.

    Scores are divided by the language model weight, since acoustic models are overconfident.
    """
    first = lists.rescored.first_hypothesis[part.start : part.stop + 1]
    scores = lists.scores(part, factors) / max(1.0, lists.weights.lm_weight)
    shares = np.zeros(len(scores))
    for at, to in pairwise(first - first[0]):
        likely = np.exp(scores[at:to] - scores[at:to].max())
        shares[at:to] = likely / likely.sum()
    words, ranks, owner = lists.words(part)
    return words, shares[first[owner] - first[0] + ranks - 1]


def static_unigram(
    paths: Sequence[Path], vocabulary: Vocabulary, plain: Sequence[Path]
) -> np.ndarray:
    """Count the words of a text, (V,), 0 for `</s>`."""
    counts = np.zeros(len(vocabulary))
    for sentence in read_sentences(paths, plain):
        np.add.at(counts, vocabulary.encode(" ".join(sentence))[:-1], 1)
    return counts


def read_rows(rows: Mapping[str, Any], fixed: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Read the setting and the control experiment of each row, by name.

    Raises:
        UserError: if a row is not a mapping of options, or combines incompatible options.
    """
    found = {}
    for name, options in rows.items():
        if not isinstance(options, dict):
            raise UserError(f"row {name!r}: must be a mapping of options", path=where)
        own = {key: value for key, value in options.items() if key in OTHER}
        rest = {key: value for key, value in options.items() if key not in OTHER}
        other = from_mapping(Other, own, f"{where}: {name}")
        setting = setting_of({**fixed, **rest})
        if own and setting.method.protection.mechanism != NONE:
            problem = f"row {name!r}: {', '.join(own)} with privacy, which bounds equation 3 only"
            raise UserError(problem, path=where, remedy="leave privacy out")
        if own and setting.method.continuous:
            problem = f"row {name!r}: {', '.join(own)} with continuous"
            raise UserError(problem, path=where, remedy="leave continuous out")
        found[str(name)] = setting, other
    return found


class Rows:
    """Evaluation of rows on one stream.

    Args:
        stream: a stream with text, see `fedtools.lm.stream.open_stream`.
        data: the data directory, with utt2person and utt2meeting.
        out: the table.
        static: function from the vocabulary to counts of a fixed text, for `everybody: static`.
        seed: the random seed of stand-in clients.
    """

    def __init__(
        self,
        stream: Path,
        data: Path,
        out: Path,
        static: Callable[[Vocabulary], np.ndarray] | None = None,
        seed: int = 0,
    ):
        self._tried, self._data, self._seed = Sweep(stream, out, seed), data, seed
        rescored = self._tried.stream.rescored
        self._names, self._rescored = rescored.utterances, rescored
        self._text = spoken(stream, self._names)
        self._static = static(rescored.vocabulary) if static else None
        self.people = People.read(data, self._names)

    def best(self, setting: Setting, other: Other) -> np.ndarray:
        """Compute the best hypotheses under a row's setting, (utterances,)."""
        if other == Other():
            return self._tried.best(setting)
        method, (lists, groups) = setting.method, self._tried.clients(setting)
        evidence, stand_ins, everybody = evidence_of(lists, other.counts, self._text), None, None
        if other.clients == "another":
            runs = self._tried.stream.runs
            stand_ins = self.people.stand_ins(runs, self._names, self._seed, self._data)
        if other.everybody == "static":
            if self._static is None:
                raise UserError("no text for rows with everybody: static", remedy="give --static")
            everybody = method.smoothed(self._static, lists.background)
        control = Control(evidence, stand_ins, everybody)
        return simulate(method, lists, groups, control=control)[0]

    def errors(self, best: np.ndarray, without: Collection[str] = ()) -> dict[str, np.ndarray]:
        """Count words and errors of the best hypotheses, (2,), by person.

        Args:
            best: the best hypotheses, (utterances,).
            without: words to leave out of references and hypotheses.
        """
        found: dict[str, np.ndarray] = {}
        for name, index in zip(self._names, best, strict=True):
            reference, hypothesis = (
                [word for word in words_of(words) if word not in without]
                for words in (self._text[name], self._rescored.hypotheses[index])
            )
            counts = np.array([len(reference), count_errors(reference, hypothesis).errors])
            person = self.people.person[name]
            found[person] = found.get(person, np.zeros(2, int)) + counts
        return found


def write_rows(
    rows: Rows, settings: Mapping[str, tuple[Setting, Other]], out: Path, without: Path | None
) -> list[dict[str, object]]:
    """Write words and errors of each row, way of scoring and person to the table `out`."""
    ways: dict[str, Collection[str]] = {ALL: ()}
    if without is not None:
        ways[SOME] = set(read_words(without, "list a word on each line"))
    found: list[dict[str, object]] = []
    for name, (setting, other) in settings.items():
        best = rows.best(setting, other)
        for way, left_out in ways.items():
            for person, (words, errors) in sorted(rows.errors(best, left_out).items()):
                figures = (name, way, person, int(words), int(errors))
                found.append(dict(zip(COLUMNS, figures, strict=True)))
    write_tsv(out, COLUMNS, found)
    return found
