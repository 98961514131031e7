"""Import of N-best lists from other toolkits.

Kaldi: text archives of `lattice-to-nbest` and `nbest-to-linear`, as written by the rescoring
scripts in steps/: `ac_cost` and `lm_cost`, negative natural logarithms, and `words_text`; lines are
`<utterance>-<rank> ...`, in any order. The folder may also hold such folders of several jobs,
`archives.1`, `archives.2`, ...

ESPnet: `<n>best_recog/text` and `<n>best_recog/score` for each n, in one decoding folder or in the
jobs' folders `output.1`, `output.2`, ... (directly or in `logdir`). Its only score is the weighted
sum of all scores of its beam search, including attention decoder and language model. There is then
no separate LM score, and only `nnlm: 1` gives a neural model all of `lm_weight`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedtools.core.errors import UserError
from fedtools.core.text_files import stream_lines
from fedtools.data.datadir import check_id
from fedtools.data.nbest import Hypothesis, write_nbest
from fedtools.data.symbols import UNKNOWN, check_sentence, words_of
from fedtools.data.written_to_spoken import lower, upper

_RANKED = re.compile(r"(?P<utterance>.+)-(?P<rank>[1-9][0-9]{0,8})")
_NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
# torch prints scalars as tensor(...), with the device on a GPU.
_SCORE = re.compile(rf"(?:tensor\()?({_NUMBER})(?:(?:, [^()]*)?\))?")
_NBEST_FOLDER = re.compile(r"([1-9][0-9]{0,8})best_recog")


class _Found(NamedTuple):
    """A hypothesis, and the file and line of its words, for messages."""

    acoustic: float
    lm: float
    words: str
    path: Path
    line: int


# By utterance and rank.
_Lists = dict[str, dict[int, _Found]]


# Case conversions of words by the rules of a language: other toolkits' lists may have another case
# than the vocabulary.
NORMALISE: Mapping[str, Callable[[str, str], str]] = {"lower": lower, "upper": upper}


def import_kaldi(
    source: Path,
    out: Path,
    acoustic_scale: float = 1.0,
    normalise: str | None = None,
    language: str = "",
) -> int:
    """Write Kaldi's lists to OUT/nbest.tsv.

    Args:
        source: the folder, see the module's description.
        out: receives nbest.tsv.
        acoustic_scale: factor of acoustic scores, Kaldi's acwt.
        normalise: key of `NORMALISE` to apply to all words; None leaves them unchanged.
        language: language code of the words; "" for general rules.

    Returns:
        number of utterances.

    Raises:
        UserError: naming the source file, and the line if there is one, if a file is missing, the
            three files do not match, an utterance's name cannot be used as an id, a score is not a
            number, a rank is missing or repeated, or a word is reserved.
    """
    folders = [source] if (source / "words_text").exists() else _numbered(source, "archives")
    if not folders:
        remedy = "give the folder with ac_cost, lm_cost and words_text"
        raise UserError("no words_text, nor archives.1/words_text", path=source, remedy=remedy)
    lists: _Lists = {}
    for folder in folders:
        words = _read(folder / "words_text")
        costs = [_read(folder / name) for name in ("ac_cost", "lm_cost")]
        _require_same(words, folder / "words_text", costs[0], folder / "ac_cost")
        _require_same(words, folder / "words_text", costs[1], folder / "lm_cost")
        for key, (line, spoken) in words.items():
            found = _RANKED.fullmatch(key)
            if not found:
                problem = f"{key!r} is not <utterance>-<rank>"
                raise UserError(problem, path=folder / "words_text", line=line)
            acoustic = _score(*costs[0][key], folder / "ac_cost", -acoustic_scale)
            lm = _score(*costs[1][key], folder / "lm_cost", -1.0)
            one = _Found(acoustic, lm, spoken, folder / "words_text", line)
            _add(
                lists,
                found["utterance"],
                int(found["rank"]),
                one,
                f"{key!r} is in an earlier folder",
            )
    return _write(lists, source, out, normalise, language)


def import_espnet(source: Path, out: Path, normalise: str | None = None, language: str = "") -> int:
    """Write ESPnet's lists to OUT/nbest.tsv; arguments, result and errors as in `import_kaldi`.

    ESPnet's score becomes the acoustic score; the language model score is 0.
    """
    jobs = [source]
    if not _recognised(source):
        jobs = _numbered(source, "output") or _numbered(source / "logdir", "output")
    lists: _Lists = {}
    for job in jobs:
        for rank, folder in _recognised(job).items():
            text, scores = _read(folder / "text"), _read(folder / "score")
            _require_same(text, folder / "text", scores, folder / "score")
            for utterance, (line, words) in text.items():
                score = _score(*scores[utterance], folder / "score")
                one = _Found(score, 0.0, words, folder / "text", line)
                _add(lists, utterance, rank, one, f"utterance {utterance!r} is in an earlier job")
    if not lists:
        remedy = "give the folder that holds them, or output.1, ...; decode with --nbest"
        raise UserError("no 1best_recog/text", path=source, remedy=remedy)
    return _write(lists, source, out, normalise, language)


def _recognised(folder: Path) -> dict[int, Path]:
    """Return the folders of a decoding by rank, in the order of the ranks."""
    found = ((_NBEST_FOLDER.fullmatch(path.name), path) for path in folder.glob("*best_recog"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def _numbered(folder: Path, name: str) -> list[Path]:
    """Return the folders name.1, name.2, ... in a folder."""
    found = (re.fullmatch(rf"{name}\.([0-9]+)", path.name) for path in folder.glob(f"{name}.*"))
    return [folder / match[0] for match in sorted(filter(None, found), key=lambda m: int(m[1]))]


def _read(path: Path) -> dict[str, tuple[int, str]]:
    """Read line number and value by key; lines may have any order and trailing blanks."""
    table: dict[str, tuple[int, str]] = {}
    for line, text in enumerate(stream_lines(path), 1):
        key, *words = text.split() or [""]
        if not key:
            raise UserError("an empty line", path=path, line=line)
        if key in table:
            raise UserError(f"{key!r} is duplicated", path=path, line=line)
        table[key] = line, " ".join(words)
    return table


def _score(line: int, text: str, path: Path, scale: float = 1.0) -> float:
    found = _SCORE.fullmatch(text)
    if not found or not math.isfinite(float(found[1])):
        raise UserError(f"score {text!r} is not a finite number", path=path, line=line)
    if not math.isfinite(score := scale * float(found[1])):
        problem = f"score {text!r} times {abs(scale):g} is not a finite number"
        raise UserError(problem, path=path, line=line)
    return score


def _add(lists: _Lists, utterance: str, rank: int, one: _Found, subject: str) -> None:
    """Add a hypothesis to its list; `subject` begins the message if the rank exists already."""
    check_id(utterance, "utterance", one.path, one.line)
    check_sentence(one.words, one.path, one.line)
    ranks = lists.setdefault(utterance, {})
    if rank in ranks:
        problem = f"{subject} already: {ranks[rank].path}:{ranks[rank].line}"
        raise UserError(problem, path=one.path, line=one.line)
    ranks[rank] = one


_Table = Mapping[str, tuple[int, str]]


def _require_same(one: _Table, path: Path, other: _Table, other_path: Path) -> None:
    if different := sorted(one.keys() ^ other.keys()):
        key = different[0]
        there, at, missing = (one, path, other_path) if key in one else (other, other_path, path)
        problem = f"{key!r} is missing ({len(different)} differ)"
        raise UserError(problem, path=missing, remedy=f"it is in {at}:{there[key][0]}")


def _write(lists: _Lists, source: Path, out: Path, normalise: str | None, language: str) -> int:
    def changed(words: str) -> str:
        if not normalise:
            return words
        change = NORMALISE[normalise]
        spoken = words_of(words)
        return " ".join(one if one == UNKNOWN else change(one, language) for one in spoken)

    def ranked(utterance: str) -> Sequence[Hypothesis]:
        ordered = []
        for rank, (place, found) in enumerate(sorted(lists[utterance].items()), 1):
            if place != rank:
                problem = f"rank {rank} of {utterance!r} is missing; this is rank {place}"
                raise UserError(problem, path=found.path, line=found.line)
            ordered.append(Hypothesis(rank, found.acoustic, found.lm, changed(found.words)))
        return ordered

    if not lists:
        raise UserError("no hypotheses", path=source)
    write_nbest(out / "nbest.tsv", [(utterance, ranked(utterance)) for utterance in lists])
    return len(lists)
