"""A reader of Speech Commands: its words, clips, two lists, noise, and the test archive."""

from __future__ import annotations

import hashlib
import re
import shlex
import sys
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedtools.audio.wave import AudioError, recording_seconds
from fedtools.core.errors import UserError
from fedtools.core.text_files import TABLE, read_bytes
from fedtools.data.datadir import ID_PATTERN, byte_order, check_id, corpus_folder

SETS = ("train", "valid", "test")
LISTS = {"valid": "validation_list.txt", "test": "testing_list.txt"}
NOISE, SILENCE, UNKNOWN = "_background_noise_", "_silence_", "_unknown_"
# The speaker is a hash of the speaker's identity in Google's corpus, and may be a number in other
# corpora of this layout. In the test archive, names of clips of unknown words may begin with the
# word; some of its names end with .wav.wav.
CLIP_NAME = re.compile(r"(?:([^/]+)_)??([0-9A-Za-z]+)_nohash_([0-9]+)(?:\.wav)+")
# Below this, a length in seconds would be written as 0.000.
SHORTEST = 0.001
CLIPS_BETWEEN_LINES = 20_000
# Google's MAX_NUM_WAVS_PER_CLASS.
_MOST_CLIPS = 2**27 - 1
HASHED = (
    "no validation_list.txt and testing_list.txt: split by a hash of the speaker, as Google's "
    "lists are, 10 % valid and 10 % test"
)

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
    """Return the absolute path of the corpus, which has both lists or neither."""
    folder = corpus_folder(folder, "the folder that the archive was unpacked in")
    if (folder / UNKNOWN).is_dir():
        remedy = "give the corpus first, and this folder with --test-archive"
        raise UserError(f"with {UNKNOWN}, this is a test archive", path=folder, remedy=remedy)
    there = {name: (folder / name).is_file() for name in LISTS.values()}
    for name, is_there in there.items():
        if not is_there and any(there.values()):
            remedy = "put it back, or take the other list away for a split by hash"
            raise UserError(f"no {name}", path=folder, remedy=remedy)
    if not any(map(CLIP_NAME.fullmatch, (path.name for path in folder.glob("*/*.wav")))):
        problem = "no <word>/<speaker>_nohash_<number>.wav"
        raise UserError(problem, path=folder, remedy=_remedy(folder))
    return folder


def _remedy(folder: Path) -> str:
    """Return what to do about a folder that has no clips of this layout's names."""
    if inner := sorted(folder.glob("*/*/*_nohash_*.wav")):
        above = sorted({path.parents[1].name for path in inner})
        if len(above) == 1:
            return f"name the folder of the words, {inner[0].parents[1]}"
        joined = " ".join(f"{shlex.quote(name)}/." for name in above)
        return f"put the words of {', '.join(above)} into one folder: mkdir all; cp -r {joined} all"
    if any(folder.glob("*_splits.csv")) or any(folder.glob("clips/*/common_voice_*")):
        remedy = "Multilingual Spoken Words has its speakers in *_splits.csv: convert the clips to"
        return f"{remedy} <word>/<speaker>_nohash_<number>.wav"
    if archives := sorted({*folder.glob("*.tar.gz"), *folder.glob("*/*.tar.gz")}):
        return f"unpack the archives, each into its own folder, such as {archives[0].name}"
    if parquet := sorted({*folder.glob("*.parquet"), *folder.glob("*/*.parquet")}):
        return f"take Google's own archive; tables such as {parquet[0].name} are not read"
    return "name the folder that has a folder of such clips for each word"


def label_of(folder: Path) -> str:
    """Return the word that a folder is of, with composed accents.

    Raises:
        UserError: unless it is one printable word.
    """
    word = unicodedata.normalize("NFC", folder.name)
    if not word.isprintable() or len(word.split()) != 1:
        raise UserError(f"{word!r} is not one word", path=folder, remedy="rename the folder")
    return word


def id_of(word: str) -> str:
    """Return what stands for a word in ids, which are ASCII: itself, or its letters and a hash."""
    if ID_PATTERN.fullmatch(word):
        return word
    letters = unicodedata.normalize("NFKD", word).encode("ascii", "ignore").decode()
    plain = "".join(filter(str.isalnum, letters))[:60]
    return f"{plain}_{hashlib.sha256(word.encode()).hexdigest()[:8]}"


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


def words_of(folder: Path) -> dict[str, Path]:
    """Return the words of a corpus, in C order, with their folders: those with clips but noise.

    Raises:
        UserError: if a folder's name is not one word, or two have names of the same word.
    """
    folders = (path for path in sorted(folder.iterdir()) if path.is_dir() and path.name != NOISE)
    words: dict[str, Path] = {}
    for path in folders:
        if path.name[0] == "." or not any(path.glob("*.wav")):
            continue
        if (word := label_of(path)) in words:
            problem = f"a second folder of {word!r}, whose accents are written otherwise"
            raise UserError(problem, path=path, remedy="join the two")
        words[word] = path
    return {word: words[word] for word in byte_order(words)}


def read_clips(words: Mapping[str, Path], dropped: Dropped) -> dict[str, Clip]:
    """Read <word>/<speaker>_nohash_<number>.wav: path within the corpus -> clip.

    Args:
        words: words and folders, from `words_of`.
        dropped: reason -> unusable clips, added to.
    """
    clips: dict[str, Clip] = {}
    opened = 0
    for word, folder in words.items():
        for path in sorted(folder.glob("*.wav")):
            name = CLIP_NAME.fullmatch(path.name)
            if not name or name[1]:
                dropped["not the name of a clip"].append(str(path))
                continue
            if seconds := length(path, dropped):
                utterance = f"{name[2]}-{id_of(word)}-{name[3]}"
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
        listed[unicodedata.normalize("NFC", name)] = line
    if not listed:
        raise UserError("an empty list", path=path, remedy="unpack the archive again")
    return listed


def split(folder: Path, clips: dict[str, Clip], dropped: Dropped) -> dict[str, list[Clip]]:
    """Split officially: valid and test are the clips of the two lists, train all others.

    Without lists, the split is by hash, see `by_hash`.

    Args:
        folder: the corpus.
        clips: the clips, from `read_clips`.
        dropped: reason -> clips; clips on a list that are missing are added to it.

    Raises:
        UserError: if a list cannot be read, or a clip is on both.
    """
    if not (folder / LISTS["test"]).is_file():
        return by_hash(clips)
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


def by_hash(clips: dict[str, Clip]) -> dict[str, list[Clip]]:
    """Split as Google's which_set does, which made the lists: 10 % valid, 10 % test, by speaker.

    P. Warden: Speech Commands (arXiv:1804.03209), section 7; the function is in the README of its
    archive.
    """
    sets: dict[str, list[Clip]] = {name: [] for name in SETS}
    for clip in clips.values():
        number = int(hashlib.sha1(clip.speaker.encode()).hexdigest(), 16) % (_MOST_CLIPS + 1)
        share = number * (100 / _MOST_CLIPS)
        sets["valid" if share < 10 else "test" if share < 20 else "train"].append(clip)
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
    unnamed = 0
    for label in labels:
        if label not in there:
            remedy = f"it has {', '.join(there)}: see --keywords, --silence, --unknown"
            raise UserError(f"no clips of {label!r}", path=folder, remedy=remedy)
    if others := [label for label in there if label not in labels]:
        notes.append(f"keywords: the test archive's {', '.join(others)} are left out")
    clips = []
    for label in labels:
        for path in sorted(there[label].glob("*.wav")):
            name = CLIP_NAME.fullmatch(path.name)
            speaker = name[2] if name else label
            word = id_of(unicodedata.normalize("NFC", name[1] or label) if name else label)
            utterance = f"{speaker}-{word}-{name[3]}" if name else f"{word}-{path.stem}"
            check_id(utterance, "the utterance", path)
            unnamed += not name and label != SILENCE
            if seconds := length(path, dropped):
                clips.append(Clip(utterance, speaker, label, path, seconds))
    if unnamed:
        problem = f"names of {unnamed} clips of the test archive have no speaker: their label is it"
        notes.append(f"keywords: {problem}")
    return clips
