"""N-best lists of other toolkits, taken over into ours.

Kaldi: text archives of `lattice-to-nbest` and `nbest-to-linear`, as the scripts in steps/ that
rescore leave them: `ac_cost` and `lm_cost`, negative natural logarithms, and `words_text`; lines
are `<utterance>-<rank> ...`, in any order. The folder may also hold such folders of several jobs,
`archives.1`, `archives.2`, ...

ESPnet: `<n>best_recog/text` and `<n>best_recog/score` for each n, of one decoding folder or of the
jobs' folders `output.1`, `output.2`, ... (in it or in its `logdir`). Its one score is the weighted
sum of all that its beam search used, attention decoder and language model among them: with it
alone, only `nnlm: 1` gives a neural model all of `lm_weight`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedtools.files.errors import UserError
from fedtools.files.lines import read_lines
from fedtools.files.nbest import Hypothesis, write_nbest

_RANKED = re.compile(r"(?P<utterance>.+)-(?P<rank>[1-9][0-9]{0,8})")
_NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
# torch writes its scalars so, on a GPU with the device.
_SCORE = re.compile(rf"(?:tensor\()?({_NUMBER})(?:(?:, [^()]*)?\))?")
_NBEST_FOLDER = re.compile(r"([1-9][0-9]{0,8})best_recog")

# (acoustic, lm, words) by utterance and rank.
_Lists = dict[str, dict[int, tuple[float, float, str]]]


# What may be done to words: vocabularies are in one case, and other toolkits' lists in another.
NORMALISE: Mapping[str, Callable[[str], str]] = {"lower": str.lower, "upper": str.upper}


def import_kaldi(
    source: Path, out: Path, acoustic_scale: float = 1.0, normalise: str | None = None
) -> int:
    """Write Kaldi's lists to OUT/nbest.tsv.

    Args:
        source: the folder, see above.
        out: gets nbest.tsv.
        acoustic_scale: what acoustic scores are multiplied by, Kaldi's acwt.
        normalise: one of `NORMALISE`, done to all words; None leaves them.

    Returns:
        how many utterances.

    Raises:
        UserError: naming the file, and the line where there is one, if a file is missing, the three
            do not fit each other, a score is no number, or a rank is missing or comes twice.
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
            acoustic, lm = (
                -_score(*table[key], folder / name)
                for table, name in zip(costs, ("ac_cost", "lm_cost"), strict=True)
            )
            ranks = lists.setdefault(found["utterance"], {})
            if int(found["rank"]) in ranks:
                problem = f"{key!r} is in an earlier folder, too"
                raise UserError(problem, path=folder / "words_text", line=line)
            ranks[int(found["rank"])] = (acoustic_scale * acoustic, lm, spoken)
    return _write(lists, source, out, normalise)


def import_espnet(source: Path, out: Path, normalise: str | None = None) -> int:
    """Write ESPnet's lists to OUT/nbest.tsv; arguments, result and errors as of `import_kaldi`.

    The score is the acoustic one of our lists; that of the language model is 0.
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
                ranks = lists.setdefault(utterance, {})
                if rank in ranks:
                    problem = f"utterance {utterance!r} is in an earlier job, too"
                    raise UserError(problem, path=folder / "text", line=line)
                ranks[rank] = (_score(*scores[utterance], folder / "score"), 0.0, words)
    if not lists:
        remedy = "give the folder that holds them, or output.1, ...; decode with --nbest"
        raise UserError("no 1best_recog/text", path=source, remedy=remedy)
    return _write(lists, source, out, normalise)


def _recognised(folder: Path) -> dict[int, Path]:
    """Rank -> its folder, in the order of the ranks."""
    found = ((_NBEST_FOLDER.fullmatch(path.name), path) for path in folder.glob("*best_recog"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def _numbered(folder: Path, name: str) -> list[Path]:
    """The folders name.1, name.2, ... in a folder."""
    found = (re.fullmatch(rf"{name}\.([0-9]+)", path.name) for path in folder.glob(f"{name}.*"))
    return [folder / match[0] for match in sorted(filter(None, found), key=lambda m: int(m[1]))]


def _read(path: Path) -> dict[str, tuple[int, str]]:
    """Key -> line number and the rest, of lines in any order; Kaldi ends many with a blank."""
    table: dict[str, tuple[int, str]] = {}
    for line, text in enumerate(read_lines(path), 1):
        key, *words = text.split() or [""]
        if not key:
            raise UserError("an empty line", path=path, line=line)
        if key in table:
            raise UserError(f"{key!r} comes twice", path=path, line=line)
        table[key] = line, " ".join(words)
    return table


def _score(line: int, text: str, path: Path) -> float:
    found = _SCORE.fullmatch(text)
    if not found or not math.isfinite(float(found[1])):
        raise UserError(f"score {text!r} is not a finite number", path=path, line=line)
    return float(found[1])


def _require_same(
    one: Mapping[str, object], path: Path, other: Mapping[str, object], other_path: Path
) -> None:
    if different := sorted(one.keys() ^ other.keys()):
        lacking = other_path if different[0] in one else path
        problem = f"{different[0]!r} is missing ({len(different)} differ)"
        raise UserError(problem, path=lacking)


def _write(lists: _Lists, source: Path, out: Path, normalise: str | None) -> int:
    change = NORMALISE[normalise] if normalise else str

    def ranked(utterance: str) -> Sequence[Hypothesis]:
        ranks = lists[utterance]
        for rank in range(1, len(ranks) + 1):
            if rank not in ranks:
                raise UserError(f"rank {rank} of {utterance!r} is missing", path=source)
        ordered = (Hypothesis(rank, *ranks[rank]) for rank in sorted(ranks))
        return [replace(one, words=change(one.words)) for one in ordered]

    if not lists:
        raise UserError("no hypotheses", path=source)
    write_nbest(out / "nbest.tsv", [(utterance, ranked(utterance)) for utterance in lists])
    return len(lists)
