#!/usr/bin/env python3
"""Synthesise speech for a first pass from the real words of meetings.

    speak.py DATA OUT --dev MEETING...

DATA comes from `prepare.py --speech synthetic`; OUT/{train,dev,eval} are data directories with
audio, spoken by espeak-ng, and OUT/background.txt is the text of all train utterances that are not
spoken, one on each line. Spoken are --hours of train, drawn at random, the given meetings of dev,
and all of eval. Each person has their own voice in all meetings, of the sex given by the first
letter of the person's id (the owners' participants.xml is incomplete).

Words, times, persons and meetings are DATA's: utt2start has the times of the annotations, although
a synthesised utterance may be longer than the original.

The same seed gives the same bytes on the same machine. A second run checks every file by its hash
and makes what is missing or damaged, also after a run that was killed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedtools.core.atomic import atomic_path, write_text
from fedtools.core.errors import UserError, exit_with_message
from fedtools.data.datadir import DataDir

# Code that all mini corpora share is in the folder above; resolve() because this one may be a link.
sys.path.append(str(Path(__file__).resolve().parent.parent))
from split import SETS
from synthesis import make_corpus, recipe_of
from voices import ACCENTS, RATE, Speaker, Synthesiser, make_speaker, random_of
from words import WORDS_PER_SECOND


@dataclass(frozen=True)
class SpokenText:
    """The speaker and words of one audio file."""

    speaker: Speaker
    words: str
    key: str


def voices_of(persons: Collection[str], seed: int) -> dict[str, Speaker]:
    """Return person -> voice: accents in turn over the sorted persons, and no voice twice."""
    found, accents = {}, list(ACCENTS)
    for place, person in enumerate(sorted(persons)):
        if person[0] not in "FM":
            problem = f"the id {person!r} does not begin with F or M, from which the sex is taken"
            raise UserError(problem, remedy="name persons as AMI does")
        accent, turn = accents[place % len(accents)], place // len(accents)
        # make_speaker's numbers are women's and men's in alternating blocks, each as long as the
        # accent has ways of speaking.
        ways, block = len(ACCENTS[accent]), 2 * turn + (person[0] == "M")
        found[person] = make_speaker(accent, block * ways + turn % ways, seed)
    return found


def chosen(
    sets: Mapping[str, DataDir], hours: float, meetings: Collection[str], seed: int
) -> dict[str, list[str]]:
    """Choose the utterances of each set that are spoken, in C order.

    Raises:
        UserError: if a meeting is not in dev.
    """
    train, dev = sets["train"].text, sets["dev"].others["utt2meeting"]
    names, kept, words = list(train), [], 0
    for index in random_of(seed, "spoken").permutation(len(names)):
        if words >= hours * (3600 * WORDS_PER_SECOND):
            break
        kept.append(names[index])
        words += len(train[names[index]].split())
    if strange := sorted(set(meetings) - set(dev.values())):
        problem = f"no meeting {strange[0]!r} in dev"
        raise UserError(problem, path=sets["dev"].path / "utt2meeting", remedy="give others")
    return {
        "train": sorted(kept, key=lambda one: one.encode()),
        "dev": [name for name, meeting in dev.items() if meeting in meetings],
        "eval": list(sets["eval"].text),
    }


def speak(synthesiser: Synthesiser, spoken: SpokenText, path: Path) -> None:
    """Synthesise one utterance and write it as WAV."""
    import soundfile

    # Spelled letters are written "T. V."; espeak-ng would end a sentence there.
    text = spoken.words.replace(".", "").lower()
    wave = synthesiser.speak(text, spoken.speaker, spoken.key)
    with atomic_path(path) as temporary:
        soundfile.write(str(temporary), wave, RATE, format="WAV", subtype="PCM_16")


def write_data(out: Path, data: DataDir, utterances: list[str], audio: Path) -> None:
    """Write a data directory of the spoken utterances, with all of DATA's tables."""
    kept = data.restrict(utterances, path=out)
    kept.wav_scp = {one: str((audio / f"{one}.wav").absolute()) for one in utterances}
    kept.write(remove_others=True)


def read(path: Path) -> dict[str, DataDir]:
    """Read set -> its data directory, as prepare.py wrote it."""
    sets = {name: DataDir.read(path / name) for name in SETS}
    for data in sets.values():
        for name in ("utt2start", "utt2person", "utt2meeting"):
            if name not in data.others or data.wav_scp:
                remedy = "make it with prepare.py --speech synthetic"
                raise UserError("not data of annotations alone", path=data.path, remedy=remedy)
    return sets


def make(options: argparse.Namespace) -> None:
    """Synthesise the chosen utterances, and write the data directories."""
    sets = read(options.data)
    utterances = chosen(sets, options.hours, options.dev, options.seed)
    persons = {name: data.others["utt2person"] for name, data in sets.items()}
    voices = voices_of({one for own in persons.values() for one in own.values()}, options.seed)
    clips = {}
    digest = hashlib.sha256()
    for name, data in sets.items():
        for one in utterances[name]:
            person = persons[name][one]
            clips[f"{name}/{one}.wav"] = SpokenText(voices[person], data.text[one], one)
            digest.update(f"{name} {one} {voices[person].client_id} {data.text[one]}\n".encode())
    audio = options.out / "speech"
    recipe = recipe_of([f"seed {options.seed}", digest.hexdigest()], __file__)
    make_corpus(audio, recipe, clips, speak, [], lambda: None, options.nj)
    for name, data in sets.items():
        write_data(options.out / name, data, utterances[name], audio / name)
    spoken = set(utterances["train"])
    rest = (text for one, text in sets["train"].text.items() if one not in spoken)
    write_text(options.out / "background.txt", "".join(f"{text}\n" for text in rest))


def main() -> None:
    """Run the command: 0 done, 1 bad input (one line on stderr), 2 wrong usage."""
    parser = argparse.ArgumentParser(description="Synthesise the speech of meetings.")
    parser.add_argument("data", type=Path, help="the output of prepare.py --speech synthetic")
    parser.add_argument("out", type=Path, help="where the data directories are written")
    hours = "approximate hours of train to synthesise (default: 1)"
    parser.add_argument("--hours", type=float, default=1.0, metavar="X", help=hours)
    dev = "meetings of dev to synthesise"
    parser.add_argument("--dev", nargs="+", required=True, metavar="MEETING", help=dev)
    parser.add_argument("--seed", type=int, default=0, help="random seed of voices (default: 0)")
    jobs = os.cpu_count() or 1
    parser.add_argument("--nj", type=int, default=jobs, help=f"processes (default: {jobs})")
    options = parser.parse_args()
    if options.nj < 1 or not options.hours > 0:
        parser.error("--nj must be at least 1, and --hours above 0")
    with exit_with_message("speak.py"):
        make(options)


if __name__ == "__main__":
    main()
