"""A reader of Speech Commands: its words, clips, two lists, noise, and the test archive."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fedtools.audio.wave import AudioError, recording_seconds
from fedtools.files.datadir import byte_order, check_id, corpus_folder
from fedtools.files.errors import UserError
from fedtools.files.text_files import TABLE, read_bytes

SETS = ("train", "valid", "test")
LISTS = {"valid": "validation_list.txt", "test": "testing_list.txt"}
NOISE, SILENCE, UNKNOWN = "_background_noise_", "_silence_", "_unknown_"
# The speaker is a hash of the speaker's identity in Google's corpus, and may be a number in other
# corpora of this layout. In the test archive, names of clips of unknown words may begin with the
# word.
CLIP_NAME = re.compile(r"(?:([^/]+)_)??([0-9A-Za-z]+)_nohash_([0-9]+)\.wav")
# Below this, a length in seconds would be written as 0.000.
SHORTEST = 0.001
CLIPS_BETWEEN_LINES = 20_000

# Reason -> unusable clips.
Dropped = dict[str, list[str]]


@dataclass(frozen=True)
class Clip:
    """A clip and its utterance.

    `name` is the utterance's id, <speaker>-<word>-<number>; `start` is where a clip of silence
    begins within its recording, in seconds, or None if the clip is a whole recording.
    """

    name: str
    speaker: str
    label: str
    path: Path
    seconds: float
    start: float | None = None


# --- the folder -----------------------------------------------------------------------------------


def find_corpus(folder: Path) -> Path:
    """Return the absolute path of the corpus, which must have the two lists."""
    folder = corpus_folder(folder, "the folder that the archive was unpacked in")
    if (folder / UNKNOWN).is_dir():
        remedy = "give the corpus first, and this folder with --test-archive"
        raise UserError(f"with {UNKNOWN}, this is a test archive", path=folder, remedy=remedy)
    for name in LISTS.values():
        if not (folder / name).is_file():
            remedy = "name the folder that has it and a folder for each word"
            raise UserError(f"no {name}", path=folder, remedy=remedy)
    return folder


def length(path: Path, dropped: Dropped) -> float:
    """Return a clip's length in seconds by its header; if unusable, add it to dropped, return 0."""
    try:
        seconds = recording_seconds(str(path))
        reason = "" if seconds >= SHORTEST else "no samples"
    except AudioError as error:
        reason = error.reason
    if not reason:
        return seconds
    dropped[reason].append(str(path))
    return 0.0


# --- clips ----------------------------------------------------------------------------------------


def words_of(folder: Path) -> list[str]:
    """Return the words of a corpus, in C order: its folders with clips, except the noise."""
    folders = (path for path in folder.iterdir() if path.is_dir() and path.name != NOISE)
    words = (path.name for path in folders if path.name[0] != "." and any(path.glob("*.wav")))
    return byte_order(words)


def read_clips(folder: Path, words: Iterable[str], dropped: Dropped) -> dict[str, Clip]:
    """Read <word>/<speaker>_nohash_<number>.wav: path within the corpus -> clip.

    Args:
        folder: the corpus.
        words: the words, from `words_of`.
        dropped: reason -> unusable clips, added to.

    Raises:
        UserError: if a word cannot be part of an id.
    """
    clips: dict[str, Clip] = {}
    opened = 0
    for word in words:
        check_id(word, "the word", folder / word)
        for path in sorted((folder / word).glob("*.wav")):
            name = CLIP_NAME.fullmatch(path.name)
            if not name or name[1]:
                dropped["not the name of a clip"].append(str(path))
                continue
            if seconds := length(path, dropped):
                utterance = f"{name[2]}-{word}-{name[3]}"
                clips[f"{word}/{path.name}"] = Clip(utterance, name[2], word, path, seconds)
            opened += 1
            if opened % CLIPS_BETWEEN_LINES == 0:
                print(f"read the lengths of {opened} clips", file=sys.stderr)
    return clips


def read_list(path: Path) -> dict[str, int]:
    """Read validation_list.txt or testing_list.txt: <word>/<name>.wav -> its line, from 1."""
    listed: dict[str, int] = {}
    text = read_bytes(path, TABLE).decode("utf-8-sig", "replace")
    for line, name in enumerate(text.splitlines(), 1):
        word, _, clip = name.partition("/")
        if not (word and word.isprintable() and "\ufffd" not in word and CLIP_NAME.fullmatch(clip)):
            remedy = "lines are <word>/<speaker>_nohash_<number>.wav: unpack the archive again"
            raise UserError(f"{name!r} is not the name of a clip", path=path, line=line,
                            remedy=remedy)  # fmt: skip
        listed[name] = line
    if not listed:
        raise UserError("an empty list", path=path, remedy="unpack the archive again")
    return listed


def split(folder: Path, clips: dict[str, Clip], dropped: Dropped) -> dict[str, list[Clip]]:
    """Split officially: valid and test are the clips of the two lists, train all others.

    Args:
        folder: the corpus.
        clips: the clips, from `read_clips`.
        dropped: reason -> clips; clips on a list that are missing are added to it.

    Raises:
        UserError: if a list cannot be read, or a clip is on both.
    """
    listed = {name: read_list(folder / file) for name, file in LISTS.items()}
    for clip, line in listed["test"].items():
        if clip in listed["valid"]:
            problem = f"{clip!r} is in line {listed['valid'][clip]} of {LISTS['valid']} too"
            raise UserError(problem, path=folder / LISTS["test"], line=line,
                            remedy="take it out of one of the lists")  # fmt: skip
    where = {clip: name for name, names in listed.items() for clip in names}
    dropped["on a list, but missing"] += [
        clip for clip in where if clip not in clips and not (folder / clip).exists()
    ]
    sets: dict[str, list[Clip]] = {name: [] for name in SETS}
    for name, found in clips.items():
        sets[where.get(name, "train")].append(found)
    return sets


# --- noise, and the test archive ------------------------------------------------------------------


def read_noise(folder: Path, dropped: Dropped) -> list[Clip]:
    """Read the recordings of background noise, in C order of their names, without speakers."""
    recordings = []
    for path in sorted((folder / NOISE).glob("*.wav")):
        check_id(path.stem, "the recording", path)
        if seconds := length(path, dropped):
            recordings.append(Clip(path.stem, "", SILENCE, path, seconds))
    return recordings


def read_test_archive(
    folder: Path, labels: Iterable[str], dropped: Dropped, notes: list[str]
) -> list[Clip]:
    """Read the clips of the separate test archive, which has a folder for each label.

    The speaker of a clip whose name has none (mostly silence) is its label.

    Args:
        folder: the archive.
        labels: the task's labels; folders of other labels are left out and added to `notes`.
        dropped: reason -> unusable clips, added to.
        notes: notes on the data, added to.

    Raises:
        UserError: if a label has no folder.
    """
    folder = corpus_folder(folder, "the folder that the test archive was unpacked in")
    labels, there = byte_order(labels), words_of(folder)
    for label in labels:
        if label not in there:
            remedy = f"it has {', '.join(there)}: see --keywords, --silence, --unknown"
            raise UserError(f"no clips of {label!r}", path=folder, remedy=remedy)
    if others := [label for label in there if label not in labels]:
        notes.append(f"keywords: the test archive's {', '.join(others)} are left out")
    clips = []
    for label in labels:
        for path in sorted((folder / label).glob("*.wav")):
            name = CLIP_NAME.fullmatch(path.name)
            speaker = name[2] if name else label
            utterance = (
                f"{speaker}-{name[1] or label}-{name[3]}" if name else f"{label}-{path.stem}"
            )
            check_id(utterance, "the utterance", path)
            if seconds := length(path, dropped):
                clips.append(Clip(utterance, speaker, label, path, seconds))
    return clips
