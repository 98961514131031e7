"""Streams of rescored N-best lists: the lists by client, in the order of its utterances."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from fedtools.core.atomic import atomic_path, write_text
from fedtools.core.errors import UserError
from fedtools.core.text_files import read_lines
from fedtools.data.datadir import DataDir, parse_segment, read_table, write_table
from fedtools.lm.private_words import covered_words, rare_words, read_phrases, write_phrases
from fedtools.lm.vocabulary import UNIGRAM, WORDS
from fedtools.lm.word_scores import NBEST, NNLM, Rescored, check_same, open_rescored, read_scp


def make_stream(data_dir: str | Path, rescored: str | Path, out: str | Path) -> None:
    """Write rescored lists, with clients and times, into one folder for `open_stream`.

    Args:
        data_dir: has utt2client, and maybe text, utt2spk, and segments or `STARTS`.
        rescored: the folder that `fedtools rescore` wrote.

    Raises:
        UserError: if the two do not have the same utterances, or `open_stream` would refuse a file.
    """
    data_dir, rescored, out = Path(data_dir), Path(rescored), Path(out)
    tables = ("utt2client", "text", "utt2spk", SEGMENTS)
    there = [name for name in tables[1:] if (data_dir / name).exists()]
    data, lists = DataDir.read(data_dir, "utt2client", *there), open_rescored(rescored)
    check_same(data.utt2client, lists.utterances, data_dir / "utt2client")
    _times(data_dir, lists.utterances)
    if (data_dir / STARTS).exists():
        read_times(data_dir / STARTS)
    out.mkdir(parents=True, exist_ok=True)
    files = [data_dir / name for name in (*tables, STARTS)]
    files += [rescored / name for name in (NBEST, WORDS, UNIGRAM)]
    for file in files:
        if file.exists():
            with atomic_path(out / file.name) as temporary:
                shutil.copyfile(file, temporary)
        else:
            # It may be left over from an earlier run.
            (out / file.name).unlink(missing_ok=True)
    write_table(out / NNLM, read_scp(rescored / NNLM))


# The files of a data directory that give the start times of utterances: Kaldi's segments, or a
# table of seconds.
SEGMENTS, STARTS = "segments", "utt2start"
NO_TIMES = f"no {SEGMENTS} or {STARTS}, whose times groups: clock needs"
# Clients' own lists of words, see `fedtools.lm.private_words`.
PHRASES = "phrases.tsv"
# The utterances that these lists were made from, one a line; missing for lists given by users.
MADE_OF = "phrases_of"


@dataclass(frozen=True)
class Stream:
    """Lists in the order in which clients rescore them.

    Attributes:
        rescored: the lists, those of a client together.
        runs: each client's run of utterances.
        begins: (utterances,) seconds at which each begins in its recording; None if no times are
            known.
        phrases: client -> its own list of words; None if there are no lists.
        made_of: the utterances that the lists of words were made from, to which these lists do not
            apply.
    """

    rescored: Rescored
    runs: dict[str, slice]
    begins: np.ndarray | None
    phrases: dict[str, list[str]] | None = None
    made_of: frozenset[str] = frozenset()

    def covered(self) -> np.ndarray | None:
        """Count the words of each hypothesis that its client's list covers, (H,).

        The count is 0 for an utterance in `made_of`: there was no list when it was said. Without
        any lists the result is None.
        """
        if self.phrases is None:
            return None
        first = self.rescored.first_hypothesis
        owners = {
            client: slice(int(first[run.start]), int(first[run.stop]))
            for client, run in self.runs.items()
        }
        found = covered_words(self.rescored.hypotheses, owners, self.phrases)
        before = [name in self.made_of for name in self.rescored.utterances]
        return np.where(np.repeat(before, np.diff(first)), 0, found)

    def groups(self, client: str, rounds: int, span: float | None = None) -> list[slice]:
        """Return a client's utterances in rounds + 1 groups, see `groups_of`.

        Raises:
            UserError: if they are to be cut by time, and no times are known.
        """
        if span is not None and self.begins is None:
            raise UserError(NO_TIMES, remedy="set groups: even")
        return groups_of(self.runs[client], rounds, self.begins, span)


def groups_of(
    utterances: slice, rounds: int, begins: np.ndarray | None = None, span: float | None = None
) -> list[slice]:
    """Cut a client's utterances, in the order in which they were said, into rounds + 1 groups.

    Args:
        utterances: the client's run of utterances.
        rounds: T.
        begins: (utterances of all,) when each begins, seconds; only needed with `span`.
        span: seconds that groups divide into equal parts; later utterances are in the last group.
            It must be known without the data, so that no utterance affects the group of another.
            None makes groups of equal numbers, section 3.2.
    """
    if span is not None:
        edges = span * np.arange(1, rounds + 1) / (rounds + 1)
        found = np.searchsorted(begins[utterances], edges, "left")
        edges = utterances.start + np.array([0, *found, utterances.stop - utterances.start])
    else:
        count = utterances.stop - utterances.start
        sizes = [len(part) for part in np.array_split(np.empty(count), rounds + 1)]
        edges = utterances.start + np.concatenate([[0], np.cumsum(sizes)])
    return [slice(int(at), int(to)) for at, to in pairwise(edges)]


def open_stream(folder: str | Path) -> Stream:
    """Read the stream that `make_stream` wrote.

    Utterances are ordered by the times in segments, or else in utt2start; without either, by their
    names.

    Raises:
        UserError: if the utterances are not those of utt2client, or one has no time.
    """
    folder = Path(folder)
    data = DataDir.read(folder, "utt2client")
    rescored = open_rescored(folder)
    if different := sorted(set(rescored.utterances) ^ data.utt2client.keys()):
        problem = f"{different[0]!r} is not in both utt2client and nbest.tsv"
        raise UserError(problem, path=folder, remedy="make both of the same utterances")
    times = _times(folder, rescored.utterances)

    def place(index: int) -> tuple[bytes, float, int]:
        name = rescored.utterances[index]
        return data.utt2client[name].encode(), times[name] if times else 0.0, index

    order = np.array(sorted(range(len(rescored.utterances)), key=place))
    names = [rescored.utterances[index] for index in order]
    owners = [data.utt2client[name] for name in names]
    starts = np.unique(owners, return_index=True)[1]
    edges = [*sorted(starts.tolist()), len(owners)]
    runs = {owners[at]: slice(at, to) for at, to in pairwise(edges)}
    begins = np.array([times[name] for name in names]) if times else None
    phrases = read_phrases(folder / PHRASES) if (folder / PHRASES).exists() else None
    return Stream(reordered(rescored, order), runs, begins, phrases, _made_of(folder, names))


def _made_of(folder: Path, utterances: Sequence[str]) -> frozenset[str]:
    path = folder / MADE_OF
    if not path.exists():
        return frozenset()
    known, found = set(utterances), read_lines(path)
    for line, name in enumerate(found, 1):
        if name not in known:
            remedy = "run fedtools rescore-words again"
            raise UserError(f"no utterance {name!r}", path=path, line=line, remedy=remedy)
    return frozenset(found)


def times_in(folder: Path) -> Path | None:
    """Return the table of a folder that gives the utterances' start times, if it has one."""
    return next((folder / name for name in (SEGMENTS, STARTS) if (folder / name).exists()), None)


def read_times(path: Path) -> dict[str, tuple[float, float]]:
    """Read when utterances begin and end, from a table that `times_in` found.

    Returns:
        utterance -> seconds of its beginning and its end. If the table gives no end (`STARTS`, or
        -1 in segments), the end is the beginning.

    Raises:
        UserError: naming the line that is malformed.
    """
    times = {}
    for line, (name, value) in enumerate(read_table(path).items(), 1):
        if path.name == SEGMENTS:
            _, begin, end = parse_segment(value, path, line)
        else:
            begin = end = _seconds(value, path, line)
        times[name] = (begin, max(begin, end))
    return times


def _times(folder: Path, utterances: Sequence[str]) -> dict[str, float] | None:
    """Return the seconds at which utterances begin; None if the folder does not have them."""
    path = times_in(folder)
    if path is None:
        return None
    times = read_times(path)
    if missing := [name for name in utterances if name not in times]:
        raise UserError(f"no entry of utterance {missing[0]!r}", path=path)
    return {name: begin for name, (begin, _) in times.items()}


def spoken(folder: str | Path, utterances: Sequence[str]) -> dict[str, str]:
    """Read FOLDER/text, utterance -> words.

    Raises:
        UserError: if it lacks one of the given utterances.
    """
    text = DataDir.read(folder, "text").text
    if missing := [name for name in utterances if name not in text]:
        raise UserError(f"no entry of utterance {missing[0]!r}", path=Path(folder) / "text")
    return text


def _seconds(value: str, path: Path, line: int) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        problem = f"{value!r} is not a number of seconds"
        raise UserError(problem, path=path, line=line, remedy="write: utterance seconds, from 0")
    return seconds


def list_words(folder: str | Path, rounds: int, most: int, corrected: bool = False) -> int:
    """Make every client's list of words from its first group of utterances.

    This writes FOLDER/phrases.tsv, and the utterances that it was made from, for `open_stream`.

    Args:
        rounds: T of the groups.
        most: the highest count in the background text of a listed word.
        corrected: take the words from FOLDER/text, not from the first pass' best hypotheses, which
            have no new words.

    Returns:
        the number of listed words, over all clients.

    Raises:
        UserError: if corrected, and an utterance has no text.
    """
    # Existing lists may be of other data.
    _remove_words(Path(folder))
    stream = open_stream(folder)
    rescored = stream.rescored
    counts = dict(zip(rescored.vocabulary.words, rescored.unigram.tolist(), strict=True))
    text = spoken(folder, rescored.utterances) if corrected else {}
    sentences, made_of = {}, []
    for client in stream.runs:
        group = stream.groups(client, rounds)[0]
        names = rescored.utterances[group]
        if corrected:
            sentences[client] = [text[name] for name in names]
        else:
            best = rescored.first_hypothesis[group.start : group.stop]
            sentences[client] = [rescored.hypotheses[index] for index in best]
        made_of += names
    phrases = rare_words(sentences, counts, most)
    put_words(folder, phrases, made_of)
    return sum(map(len, phrases.values()))


def put_words(
    folder: str | Path, phrases: Mapping[str, Sequence[str]], made_of: Sequence[str] = ()
) -> None:
    """Write clients' lists of words, and the utterances that they were made from, if any."""
    # So that a killed run leaves no list next to the utterances of another list.
    _remove_words(Path(folder))
    if made_of:
        write_text(Path(folder) / MADE_OF, "".join(f"{name}\n" for name in made_of))
    write_phrases(Path(folder) / PHRASES, phrases)


def _remove_words(folder: Path) -> None:
    for name in (PHRASES, MADE_OF):
        (folder / name).unlink(missing_ok=True)


def reordered(rescored: Rescored, order: np.ndarray) -> Rescored:
    """Return the same lists with the utterances in another order."""
    first, words = rescored.first_hypothesis, rescored.first_word
    hypotheses = _runs(first[order], np.diff(first)[order])
    lengths = np.diff(words)[hypotheses]
    places = _runs(words[hypotheses], lengths)
    return replace(
        rescored,
        utterances=[rescored.utterances[index] for index in order],
        hypotheses=[rescored.hypotheses[index] for index in hypotheses],
        first_hypothesis=np.concatenate([[0], np.cumsum(np.diff(first)[order])]),
        first_word=np.concatenate([[0], np.cumsum(lengths)]),
        word_ids=rescored.word_ids[places],
        log_probs=rescored.log_probs[places],
        acoustic=rescored.acoustic[hypotheses],
        lm=rescored.lm[hypotheses],
        num_words=rescored.num_words[hypotheses],
    )


def _runs(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the numbers start, start + 1, ... of each run, one run after the other."""
    ends = np.cumsum(sizes)
    return np.repeat(starts - ends + sizes, sizes) + np.arange(ends[-1] if len(ends) else 0)
