#!/usr/bin/env python3
"""Make the data directories of marginal personalisation from AMI: train, dev and eval.

    prepare.py CORPUS OUT                       annotations and the recordings of headsets
    prepare.py CORPUS OUT --speech synthetic    annotations alone, for speak.py

writes OUT/train, OUT/dev and OUT/eval: the meetings found of the "Full-corpus-ASR" partition (see
split.py) or of a split given by --split. CORPUS has `words`, `segments` and `corpusResources`, or
these are in CORPUS/annotations or CORPUS/ami_public_manual_1.6.2; recordings are
<MEETING>/audio/<MEETING>.Headset-<channel>.wav in CORPUS or CORPUS/amicorpus. See corpus.py for how
the corpus' quirks are handled, and words.py for how words are normalised.

A client is a person's headset in a meeting, ES2011a-H00-FEE041, or with `--client meeting` all of
the meeting, ES2011a. It is also the speaker in utt2spk and the prefix of its utterances' ids, which
are in the order of their times:

    --client speaker    ES2011a-H00-FEE041-0003415-0003484      start and end in hundredths
    --client meeting    ES2011a-0003415-0003484-H00-FEE041

In addition to Kaldi's tables there are utt2client, client2utt, utt2meeting, utt2person (the
participant) and, if clients are speakers whose names show it, spk2gender. The audio is not copied,
except that the first channel of a recording with two channels is copied to OUT/mono. Without
recordings there are neither wav.scp nor segments, but utt2start, the time at which an utterance
begins in its meeting (seconds).
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import corpus
import typer
from corpus import Headsets, Reader, Utterance
from split import SETS, census, official, read_split

from fedtools.cli.app import script
from fedtools.core.atomic import atomic_path
from fedtools.core.errors import UserError
from fedtools.data.datadir import DataDir, check_id
from fedtools.data.dropped import Dropped
from fedtools.lm.stream import STARTS

MONO = "mono"
RECORDED, SYNTHETIC = "recorded", "synthetic"


# --- writing --------------------------------------------------------------------------------------


def ids(utterance: Utterance, client: str) -> tuple[str, str]:
    """Return the client, and the id of the utterance, which begins with it."""
    place = f"{utterance.start:07}-{utterance.end:07}"
    if client == "speaker":
        owner, name = utterance.speaker, f"{utterance.speaker}-{place}"
    else:
        who = utterance.speaker.removeprefix(f"{utterance.meeting}-")
        owner, name = utterance.meeting, f"{utterance.meeting}-{place}-{who}"
    return owner, check_id(name, "utterance")


def data_dir(path: Path, utterances: Iterable[Utterance], client: str, audio: dict) -> DataDir:
    """Build the tables of one set; `audio` is recording -> file."""
    tables = ("utt2meeting", "utt2person", "spk2gender", STARTS)
    data = DataDir(path, others={name: {} for name in tables})
    for utterance in utterances:
        owner, name = ids(utterance, client)
        data.utt2spk[name] = data.utt2client[name] = owner
        data.text[name] = utterance.text
        data.others["utt2meeting"][name] = utterance.meeting
        data.others["utt2person"][name] = utterance.person
        if client == "speaker" and utterance.person[0] in "FM":
            data.others["spk2gender"][owner] = utterance.person[0].lower()
        start, end = (f"{time // 100}.{time % 100:02}" for time in (utterance.start, utterance.end))
        if utterance.audio:
            data.wav_scp[utterance.audio] = str(audio[utterance.audio])
            data.segments[name] = f"{utterance.audio} {start} {end}"
            data.utt2dur[name] = f"{(utterance.end - utterance.start) / 100:.2f}"
        else:
            data.others[STARTS][name] = start
    return data


def copy_first_channel(path: Path, copy: Path) -> None:
    """Write the first channel of a recording, its samples unchanged."""
    import soundfile

    with soundfile.SoundFile(path) as source, atomic_path(copy) as temporary:
        kind = ("int16", "PCM_16") if source.subtype == "PCM_16" else ("float32", "FLOAT")
        target = soundfile.SoundFile(temporary, "w", source.samplerate, 1, kind[1], format="WAV")
        with target:
            for block in source.blocks(1 << 20, dtype=kind[0], always_2d=True):
                target.write(block[:, 0])
        if soundfile.info(str(temporary)).frames != source.frames:
            raise UserError("the audio is truncated", path=path, remedy="fetch it again")


def write_all(
    out: Path, sets: dict[str, list[Utterance]], client: str, headsets: Headsets | None
) -> None:
    """Write all sets under temporary names, then move them into place, replacing earlier ones."""
    new, old = out / ".new", out / ".old"
    shutil.rmtree(new, ignore_errors=True)
    audio = dict(headsets.paths) if headsets else {}
    channels = headsets.channels if headsets else {}
    try:
        for recording in sorted({u.audio for own in sets.values() for u in own} - {""}):
            if channels[recording] > 1:
                copy_first_channel(audio[recording], new / MONO / f"{recording}.wav")
                audio[recording] = out.resolve() / MONO / f"{recording}.wav"
        for name, utterances in sets.items():
            if utterances:
                data_dir(new / name, utterances, client, audio).write()
        shutil.rmtree(old, ignore_errors=True)
        old.mkdir()
        for name in (MONO, *SETS):
            with suppress(FileNotFoundError):
                (out / name).rename(old / name)
            with suppress(FileNotFoundError):
                (new / name).rename(out / name)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


# --- the command ----------------------------------------------------------------------------------


def prepare(options: SimpleNamespace) -> None:
    """Read the corpus, write the sets, and report what was kept and dropped."""
    split = read_split(options.split) if options.split else official()
    dropped, headsets = Dropped(), None
    folder = options.annotations or options.corpus
    places, pattern = corpus.ANNOTATIONS, "segments/*.segments.xml"
    annotations = corpus.find(folder, places, pattern, "annotations", "--annotations")
    there = corpus.meetings_there(annotations) & split.keys()
    if options.speech == RECORDED:
        folder, pattern = options.audio or options.corpus, "*/audio/*.Headset-*.wav"
        remedies = "--audio, or take --speech synthetic"
        headsets = Headsets(corpus.find(folder, corpus.AUDIO, pattern, "recordings", remedies))
    absent = sorted(split.keys() - there)
    if not there or (absent and options.whole):
        problem = f"{len(absent)} meetings of the split are missing: {', '.join(absent[:4])}"
        raise UserError(problem + ", ..." * (len(absent) > 4), path=options.corpus)
    print(f"meetings: {census(split, there)}", file=sys.stderr)
    reader = Reader(annotations, headsets, options.most, dropped)
    utterances = list(reader.read(there))
    kept = f"words: {reader.untimed} without a time, kept"
    print(f"{kept}; {reader.duplicates} with another word's id, left out", file=sys.stderr)
    if reader.silent:
        silent = f"speakers without segments: {len(reader.silent)}"
        print(f"{silent}, the first {reader.silent[0]}", file=sys.stderr)
    check(utterances, dropped, options)
    sets = {name: [u for u in utterances if split[u.meeting] == name] for name in SETS}
    write_all(options.out, sets, options.client, headsets)
    for name, own in sets.items():
        report(name, own, options.client)
    reasons = f" ({dropped.summary()})" if dropped.total() else ""
    print(f"kept {len(utterances)}, dropped {dropped.total()}{reasons}")


def check(utterances: list[Utterance], dropped: Dropped, options: SimpleNamespace) -> None:
    """Report unusable segments; raise `UserError` if they are too many or nothing is left."""
    faults = dropped.faults()
    for reason, place in sorted(dropped.first.items()):
        print(f"{reason}: {dropped[reason]}, the first in {place}", file=sys.stderr)
    if not utterances or faults > options.max_drop * (faults + len(utterances)):
        raise UserError(
            f"{faults} of {faults + len(utterances)} cannot be used ({dropped.summary()})",
            path=options.corpus,
            remedy="repair the corpus or raise --max-drop",
        )


def report(name: str, utterances: list[Utterance], client: str) -> None:
    """Print a set's numbers of meetings, clients, utterances and words in one line."""
    owners = {ids(utterance, client)[0] for utterance in utterances}
    words = sum(len(utterance.text.split()) for utterance in utterances)
    hours = sum(u.end - u.start for u in utterances) / 360_000
    meetings = len({utterance.meeting for utterance in utterances})
    print(
        f"{name}: {meetings} meetings, {len(owners)} clients, {len(utterances)} utterances,"
        f" {words} words, {hours:.2f} hours"
    )


ABOUT = "Make data directories of AMI's train, dev and eval sets, with clients."


def main(
    corpus: Path = typer.Argument(
        ..., metavar="CORPUS", help="The folder with annotations and audio."
    ),
    out: Path = typer.Argument(..., metavar="OUT", help="Where the data directories are written."),
    speech: Literal["recorded", "synthetic"] = typer.Option(
        RECORDED, help="synthetic: annotations alone, to be spoken by speak.py."
    ),
    client: Literal["speaker", "meeting"] = typer.Option("speaker", help="Unit of a client."),
    annotations: Path | None = typer.Option(
        None, metavar="DIR", help="The folder of words and segments (default: below CORPUS)."
    ),
    audio: Path | None = typer.Option(
        None, metavar="DIR", help="The folder of the meetings' recordings (default: below CORPUS)."
    ),
    split: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="A meeting and train, dev or eval on each line (default: Full-corpus-ASR).",
    ),
    whole: bool = typer.Option(
        False, "--whole", help="Fail unless every meeting of the split is there."
    ),
    most: int = typer.Option(
        30,
        "--max-words",
        min=0,
        max=999_999,
        metavar="N",
        help="Divide segments at full stops, and sentences with more words and marks than this at "
        "commas; 0: do not divide segments.",
    ),
    max_drop: float = typer.Option(
        0.02,
        min=0.0,
        max=1.0,
        metavar="X",
        help="Fail if more than this fraction of the segments is unusable.",
    ),
) -> None:
    if speech == SYNTHETIC and audio:
        raise typer.BadParameter("cannot be used with --speech synthetic", param_hint="--audio")
    prepare(SimpleNamespace(**locals()))


if __name__ == "__main__":
    script(main, "prepare.py", ABOUT)
