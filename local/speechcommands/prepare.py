#!/usr/bin/env python3
"""Make data directories of Speech Commands for keyword spotting, with speakers as clients.

    prepare.py CORPUS OUT

writes OUT/keywords and OUT/words, each with the data directories train, valid and test, those of
--server-clips (server<N>, the first N clips of valid by a key of the seed and the clip), and
classes.txt (a label a line, in the order of the class indices); OUT/noise.scp, the recordings
of background noise; and OUT/notes.txt, notes on the data. CORPUS is Google's version 1 (30 words)
or 2 (35 words), or another in the same layout, with any words:

    <word>/<speaker>_nohash_<number>.wav    at most a second, at 16 kHz; not converted
    validation_list.txt testing_list.txt    <word>/<name>.wav, one a line; without both, the sets
                                            are by a hash of the speaker, as Google's lists are
    _background_noise_/*.wav                a minute or more

Utterance ids are <speaker>-<word>-<number>; words with letters outside a-z are spelled there by the
others and a hash. Clips that are empty or damaged, that have another form
of name, or that are on a list but missing are dropped and counted.

words       Every word of the corpus is a class. On Google's version 2 it is the task of 35 classes,
            and --task 35 means the same.
keywords    The words of --keywords, `_silence_` and `_unknown_` (unless --silence false, --unknown
            false). With Google's ten keywords it is the task of 12 classes, and --task 12 means the
            same. As in Google's own input pipeline, the numbers of clips of silence and of unknown
            in each set are each a tenth of its keywords' clips, rounded up. Unknown clips are clips
            of the set's other words, chosen by a key of the seed and the clip. Clips of silence are
            `segments` of one second of the noise, at its own volume (Google's pipeline draws a
            volume); each is assigned to the speaker of one of the set's keyword clips, drawn by a
            key of the seed and its number, so that a client has silence in proportion to its
            keywords. With --clip-seconds, silence has this length, and pieces are longer or shorter
            in proportion. With --silence own a training clip brings one with probability 1/10, by
            its own name, whatever others have. Unlike in Google's pipeline each set has its own
            noise, so that no silence of the test set is in training (except with --split paper,
            where all of it is): every recording is cut into pieces of two seconds, of which valid
            and test get a fifth each, and no piece is used again before all others are. (The noise
            that training adds to clips, at a tenth of the volume, is from all pieces.) With
            --test-archive, the test set is Google's separate archive instead, with its own silence
            and unknown; its folders of words that are not in the task are left out.

Two constructions of the training set (valid and test are the same in both):

official    The clips on neither list. Google's lists never divide a speaker, so that no client
            has clips in valid or test; the printed table shows whether this holds for a corpus.
paper       The construction that the counts in table 1 of Li et al. (2022), "Avoid overfitting user
            specific information in federated keyword spotting", imply: N = 105.5 k clips of
            K = 2,434 users are nearly all of the 105,829 clips, whose 2,618 speakers are more
            than those of the training set alone. Train has the clips of train, valid and test
            together, without users of under five clips. Accuracies on such a test set are
            accuracies on training clips.
"""

from __future__ import annotations

import shutil
import unicodedata
from argparse import ArgumentTypeError
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import corpus
import typer
from corpus import SETS, SILENCE, UNKNOWN, Clip, Dropped
from made_noise import NOTE, make_noise
from options import server_set, sizes
from silence import PIECE_CLIPS, cut_own_silence, cut_silence, share_noise

from fedtools.cli.app import script
from fedtools.core.atomic import write_text
from fedtools.core.errors import UserError
from fedtools.core.recipe_sections import Clips
from fedtools.core.seeds import seed64
from fedtools.core.tables import format_table
from fedtools.data.datadir import DataDir, byte_order, write_table
from fedtools.data.dropped import reasons_text

KEYWORDS = "yes,no,up,down,left,right,on,off,stop,go"
KEYWORD_TASK, WORD_TASK = TASKS = ("keywords", "words")
# Google's names of the two tasks: the numbers of classes in its own corpus.
ALIASES = {"12": KEYWORD_TASK, "35": WORD_TASK}
# Number of keyword clips for each clip of silence, and for each of unknown.
KEYWORDS_TO_ONE = 10
ALONE = "make only --task words (run.sh: --tasks words)"
Sets = dict[str, list[Clip]]
"""train, valid and test, and what a server trains on alone."""


@dataclass
class Task:
    """A task: its name, its labels in the order of the class indices, and its sets."""

    name: str
    classes: list[str]
    sets: Sets


# --- choosing -------------------------------------------------------------------------------------


def keyword_sets(sets: Sets, noise: list[Clip], options: SimpleNamespace, notes: list[str]) -> Sets:
    """Return the sets of the keyword task: clips of the keywords, of other words, and silence."""
    if options.silence:
        where = options.corpus / corpus.NOISE
        pieces = share_noise(noise, options.seed, where, options.clip_seconds)
    chosen = {}
    for name, clips in sets.items():
        words = [clip for clip in clips if clip.label in options.keywords]
        count = -(-len(words) // KEYWORDS_TO_ONE)
        chosen[name] = words.copy()
        if options.unknown:
            others = [clip for clip in clips if clip.label not in options.keywords]
            others.sort(key=lambda clip: seed64(options.seed, "unknown", clip.name))
            unknown = [replace(clip, label=UNKNOWN) for clip in others[:count]]
            if len(unknown) < count and not (name == "test" and options.test_archive):
                few = f"{len(unknown)} unknown clips instead of {count}, for lack of other words"
                notes.append(f"{KEYWORD_TASK}, {name}: {few}")
            if not unknown and name == "train":
                raise UserError(f"no clip of another word in train for {UNKNOWN}",
                                path=options.corpus, remedy="give --unknown false")  # fmt: skip
            chosen[name] += unknown
        elif name == "train":
            notes.append(f"{KEYWORD_TASK}: {_without_unknown(clips, words, count)}")
        if options.silence and options.own and name == "train":
            chosen[name] += cut_own_silence(
                words, pieces[name], KEYWORDS_TO_ONE, options.seed, options.clip_seconds
            )
        elif options.silence:
            chosen[name] += cut_silence(
                name, words, pieces[name], count, options.seed, options.clip_seconds
            )
    return chosen


def _without_unknown(clips: list[Clip], words: list[Clip], wanted: int) -> str:
    """Return a note on the clips that the class of unknown words would have in training."""
    keywords = {clip.label for clip in words}
    others = [clip for clip in clips if clip.label not in keywords]
    speakers = {clip.speaker for clip in others}
    there = f"training has {len(others)} clips of other words, at {len(speakers)} of"
    there += f" {len({clip.speaker for clip in clips})} clients"
    return f"no class {UNKNOWN}, which would need {wanted} clips: {there}"


def keyword_classes(options: SimpleNamespace) -> list[str]:
    """Return the labels of the keyword task, in the order of the class indices."""
    negative = [SILENCE] * options.silence + [UNKNOWN] * options.unknown
    return [*negative, *options.keywords]


def make_tasks(
    sets: Sets, noise: list[Clip], options: SimpleNamespace, notes: list[str]
) -> list[Task]:
    """Make the requested tasks, with the official training set."""
    words = byte_order({clip.label for clips in sets.values() for clip in clips})
    tasks = []
    if KEYWORD_TASK in options.task:
        if missing := [word for word in options.keywords if word not in words]:
            raise UserError(
                f"no clip of {', '.join(missing)}, which --keywords asks for",
                path=options.corpus,
                remedy=f"choose others with --keywords ({', '.join(words)}), or {ALONE}",
            )
        chosen = keyword_sets(sets, noise, options, notes)
        tasks.append(Task(KEYWORD_TASK, keyword_classes(options), chosen))
    if WORD_TASK in options.task:
        tasks.append(Task(WORD_TASK, words, dict(sets)))
    return tasks


def construct(task: Task, archive: list[Clip], options: SimpleNamespace, notes: list[str]) -> None:
    """Apply --split and --min-clips to the training set, and use the archive as the test set."""
    clips = task.sets["train"]
    if options.split == "paper":
        clips = [clip for name in SETS for clip in task.sets[name]]
    sizes = Counter(clip.speaker for clip in clips)
    large = [clip for clip in clips if sizes[clip.speaker] >= options.min_clips]
    if left := len(clips) - len(large):
        few = sum(size < options.min_clips for size in sizes.values())
        under = f"{few} clients of under {options.min_clips} clips are left out of train"
        notes.append(f"{task.name}: {under}, with {left} clips")
    task.sets["train"] = large
    if task.name == KEYWORD_TASK and archive:
        task.sets["test"] = archive
    for name, clips in task.sets.items():
        if not clips:
            remedy = "check the lists, or lower --min-clips"
            raise UserError(f"task {task.name} has no clip in {name}", path=options.corpus,
                            remedy=remedy)  # fmt: skip


def add_server_sets(task: Task, options: SimpleNamespace) -> None:
    """Add the sets of a server that trains alone: for each size, the first clips of valid."""
    clips = task.sets["valid"]
    # Every larger set contains the smaller ones.
    clips = sorted(clips, key=lambda clip: seed64(options.seed, "server", clip.name))
    for size in options.server_clips:
        if size > len(clips):
            problem = f"task {task.name} has {len(clips)} clips in valid, not {size}"
            remedy = "lower --server-clips"
            raise UserError(problem, path=options.corpus, remedy=remedy)
        task.sets[server_set(size)] = clips[:size]


# --- writing --------------------------------------------------------------------------------------


def data_dir(path: Path, clips: list[Clip]) -> DataDir:
    """Build the tables of one set; if it has silence cut from noise, all clips are segments."""
    data = DataDir(path)
    cut = any(clip.start is not None for clip in clips)
    for clip in clips:
        # Noise gets an id with a prefix that no speaker has, so that it never equals a clip's.
        recording = clip.name if clip.start is None else f"{corpus.NOISE}-{clip.path.stem}"
        data.wav_scp[recording] = str(clip.path)
        if cut:
            start, end = (0, -1) if clip.start is None else (clip.start, clip.start + clip.seconds)
            interval = "0 -1" if clip.start is None else f"{start:.3f} {end:.3f}"
            data.segments[clip.name] = f"{recording} {interval}"
        data.text[clip.name] = clip.label
        data.utt2spk[clip.name] = data.utt2client[clip.name] = clip.speaker
        data.utt2dur[clip.name] = f"{clip.seconds:.3f}"
    return data


def write_tasks(out: Path, tasks: list[Task]) -> None:
    """Write every task under a temporary name, then move them into place."""
    try:
        for task in tasks:
            new = out / f".{task.name}.new"
            shutil.rmtree(new, ignore_errors=True)
            for name, clips in task.sets.items():
                data_dir(new / name, clips).write()
            write_text(new / "classes.txt", "".join(f"{label}\n" for label in task.classes))
        for task in tasks:
            shutil.rmtree(out / f".{task.name}.old", ignore_errors=True)
            with suppress(FileNotFoundError):
                (out / task.name).rename(out / f".{task.name}.old")
            (out / f".{task.name}.new").rename(out / task.name)
    finally:
        for task in tasks:
            shutil.rmtree(out / f".{task.name}.new", ignore_errors=True)
            shutil.rmtree(out / f".{task.name}.old", ignore_errors=True)


# --- the command ----------------------------------------------------------------------------------


def report(tasks: list[Task], split: str, notes: list[str]) -> None:
    """Print table 1 of the paper for every set, and how much of a set is in training too.

    With the official split no client should be: `notes` gets a line for each set with such clients.
    """
    rows = []
    for task in tasks:
        names = {clip.name for clip in task.sets["train"]}
        clients = {clip.speaker for clip in task.sets["train"]}
        for name, clips in task.sets.items():
            sizes = Counter(clip.speaker for clip in clips)
            row = [task.name, name, len(clips), len(sizes)]
            row += [f"{len(clips) / len(sizes):.1f}", max(sizes.values())]
            both = [sum(clip.name in names for clip in clips), len(clients & sizes.keys())]
            rows.append([*row, *(both if name != "train" else "--")])
            if split == "official" and name != "train" and both[1]:
                problem = f"{both[1]} of its clients are in training too: are the lists complete?"
                notes.append(f"{task.name}, {name}: {problem}")
    header = ["task", "set", "clips", "clients", "average", "largest"]
    header += ["clips in train", "clients in train"]
    print(format_table(header, rows, "llrrrrrr"), end="")


def outcome_of(kept: int, dropped: Dropped) -> str:
    """Return the numbers of clips kept and dropped, with reasons and their first clips, as text."""
    counts = {reason: len(clips) for reason, clips in dropped.items()}
    listed = reasons_text(counts, {reason: clips[0] for reason, clips in dropped.items() if clips})
    return f"kept {kept}, dropped {sum(counts.values())}" + (f" ({listed})" if listed else "")


def prepare(options: SimpleNamespace) -> None:
    """Read the corpus, choose and write the sets of the tasks, and report the result."""
    folder = corpus.find_corpus(options.corpus)
    dropped: Dropped = defaultdict(list)
    clips = corpus.read_clips(corpus.words_of(folder), dropped)
    sets = corpus.split(folder, clips, dropped)
    archive: list[Clip] = []
    notes: list[str] = []
    if not (folder / corpus.LISTS["test"]).is_file():
        notes.append(corpus.HASHED)
    if options.noise == "made":
        made = PIECE_CLIPS * options.clip_seconds
        noise = make_noise(options.out.absolute() / "noise", options.seed, made)
        notes.append(NOTE)
    else:
        noise = corpus.read_noise(folder, dropped)
    if options.test_archive and KEYWORD_TASK in options.task:
        labels = keyword_classes(options)
        archive = corpus.read_test_archive(options.test_archive, labels, dropped, notes)
    kept = len(clips) + len(noise) + len(archive)
    outcome, lost = outcome_of(kept, dropped), sum(map(len, dropped.values()))
    if not clips or lost > options.max_drop * (kept + lost):
        over = f"over {options.max_drop:.1%}" if clips else "no usable clip"
        remedy = "unpack the archive again, repair the corpus, or raise --max-drop"
        raise UserError(f"{outcome}: {over}", path=folder, remedy=remedy)
    tasks = make_tasks(sets, noise, options, notes)
    for task in tasks:
        construct(task, archive, options, notes)
        add_server_sets(task, options)
    write_tasks(options.out, tasks)
    write_table(options.out / "noise.scp", {clip.name: str(clip.path) for clip in noise})
    report(tasks, options.split, notes)
    write_text(options.out / "notes.txt", "".join(f"{note}\n" for note in notes))
    for note in notes:
        print(note)
    print(outcome)


def several_words(text: str) -> list[str]:
    """Read two or more different words, separated by commas."""
    words = [unicodedata.normalize("NFC", word.strip()) for word in text.split(",")]
    if len(words) < 2 or len(set(words)) != len(words) or not all(words):
        problem = f"expected two or more different words, such as {KEYWORDS}"
        raise typer.BadParameter(problem)
    return words


def clip_length(text: str) -> float:
    """Read a number of seconds, rounded to milliseconds like pack-clips does."""
    try:
        value = round(float(text), 3)
    except (ValueError, OverflowError):
        value = 0.0
    if not 0.1 <= value <= 60:
        raise typer.BadParameter("expected seconds from 0.1 to 60, such as 1.5")
    return value


def server_sizes(text: str) -> list[int]:
    """Read different whole numbers from 1, separated by commas."""
    try:
        return sizes(text)
    except ArgumentTypeError as error:
        raise typer.BadParameter(str(error)) from None


def task_of(name: str) -> str:
    """Read the name of a task, or Google's number for it."""
    if (task := ALIASES.get(name, name)) not in TASKS:
        raise typer.BadParameter(f"expected {' or '.join(TASKS)}")
    return task


Boolean = Literal["true", "false"]


ABOUT = "Make data directories of Speech Commands where every speaker is a client."


def main(
    corpus: Path = typer.Argument(
        ..., metavar="CORPUS", help="The folder with the words' folders and the two lists."
    ),
    out: Path = typer.Argument(
        ..., metavar="OUT", help="Where keywords, words and noise.scp are written."
    ),
    task: Any = typer.Option(
        None, parser=task_of, metavar="|".join(TASKS), help="One of the tasks (default: both)."
    ),
    split: Literal["official", "paper"] = typer.Option(
        "official", help="official: train is the clips on neither list; paper: all clips."
    ),
    keywords: Any = typer.Option(
        KEYWORDS,
        parser=several_words,
        metavar="W,W,...",
        help="Two or more words, for the task keywords.",
    ),
    silence: Literal["true", "false", "own"] = typer.Option(
        "true",
        help=f"Whether the task keywords has {SILENCE}; own: a training client's depends on its "
        "own clips alone, for user-level privacy.",
    ),
    unknown: Boolean = typer.Option("true", help=f"Whether the task keywords has {UNKNOWN}."),
    noise: Literal["corpus", "made"] = typer.Option(
        "corpus",
        help="Noise for silence and augmentation: the corpus' recordings, or generated.",
    ),
    test_archive: Path | None = typer.Option(
        None,
        metavar="DIR",
        help="The separate test archive, to use as the test set of the task keywords.",
    ),
    min_clips: int | None = typer.Option(
        None,
        min=1,
        metavar="N",
        help="Leave clients with fewer clips out of train (default: "
        f"{Clips.paper_min_clips} with --split paper, otherwise {Clips.min_clips}).",
    ),
    server_clips: Any = typer.Option(
        None,
        parser=server_sizes,
        metavar="N,N,...",
        help="Sizes of the sets of a server that trains alone, 25,67: the first clips of valid.",
    ),
    seed: int = typer.Option(0, help="Random seed of unknown and silence clips."),
    clip_seconds: Any = typer.Option(
        f"{Clips.clip_seconds:g}",
        parser=clip_length,
        metavar="S",
        help="Length of a clip, and of the silence that is cut from noise.",
    ),
    max_drop: float = typer.Option(
        0.02,
        min=0.0,
        max=1.0,
        metavar="X",
        help="Fail if more than this fraction of the clips is unusable.",
    ),
) -> None:
    given = SimpleNamespace(**locals())
    given.task = (task,) if task else TASKS
    given.silence, given.own = silence != "false", silence == "own"
    given.unknown = unknown == "true"
    if given.own and given.unknown:
        problem = f"with own, clients' clips of {UNKNOWN} would still be chosen among all clients'"
        raise typer.BadParameter(f"{problem}: give --unknown false", param_hint="--silence")
    given.server_clips = server_clips or []
    if min_clips is None:
        given.min_clips = Clips.paper_min_clips if split == "paper" else Clips.min_clips
    prepare(given)


if __name__ == "__main__":
    script(main, "prepare.py", ABOUT)
