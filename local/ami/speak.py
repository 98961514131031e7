#!/usr/bin/env python3
"""Give transcripts of meetings voices: speech for a first pass, of words that people did say.

    speak.py DATA OUT

DATA is what `prepare.py --transcripts` wrote; OUT/{train,dev,eval} are data directories with audio,
spoken by espeak-ng, a voice for every client, and OUT/background.txt is the text of all train
utterances that are not spoken, one on each line. Of train so many hours are spoken, drawn at
random; of dev and eval the first utterances of each client.

The same seed gives the same bytes on the same machine. A second run checks every file by its hash
and makes what is missing or damaged; so does the run after one that was killed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedtools.files.atomic import atomic_path, write_text
from fedtools.files.datadir import DataDir
from fedtools.files.errors import UserError, exit_with_message

# What the makers of all corpora share lies in the folder above; this one may be a link to ours.
sys.path.append(str(Path(__file__).resolve().parent.parent))
from split import SETS
from synthesis import make_corpus, recipe_of
from voices import ACCENTS, RATE, Speaker, Synthesiser, make_speaker, random_of
from words import WORDS_PER_SECOND


@dataclass(frozen=True)
class Saying:
    """What is spoken in one file."""

    speaker: Speaker
    words: str
    key: str


def voice_of(client: str, seed: int) -> Speaker:
    """The client's voice: of all accents, one of 20 persons each."""
    random = random_of(seed, "voice", client)
    accents = list(ACCENTS)
    accent = accents[int(random.integers(len(accents)))]
    return make_speaker(accent, int(random.integers(20)), seed)


def chosen(data: DataDir, name: str, hours: float, each: int, seed: int) -> list[str]:
    """The utterances of a set that are spoken, in C order."""
    names = list(data.text)
    if name == "train":
        words, kept = 0, []
        for index in random_of(seed, "spoken").permutation(len(names)):
            if words >= hours * (3600 * WORDS_PER_SECOND):
                break
            kept.append(names[index])
            words += len(data.text[names[index]].split())
        return sorted(kept, key=lambda one: one.encode())
    counts: dict[str, int] = {}
    kept = []
    for utterance in names:
        client = data.utt2client[utterance]
        counts[client] = counts.get(client, 0) + 1
        if counts[client] <= each:
            kept.append(utterance)
    return kept


def speak(synthesiser: Synthesiser, saying: Saying, path: Path) -> None:
    """Make one file."""
    import soundfile

    # Spelled letters are written "T. V."; espeak-ng would end a sentence there.
    text = saying.words.replace(".", "").lower()
    wave = synthesiser.speak(text, saying.speaker, saying.key)
    with atomic_path(path) as temporary:
        soundfile.write(str(temporary), wave, RATE, format="WAV", subtype="PCM_16")


def write_data(out: Path, data: DataDir, utterances: list[str], audio: Path) -> None:
    """Write a data directory of the utterances that are spoken."""
    kept = DataDir(out)
    for name in ("text", "utt2spk", "utt2client"):
        table: Mapping[str, str] = getattr(data, name)
        getattr(kept, name).update({one: table[one] for one in utterances})
    kept.wav_scp.update({one: str((audio / f"{one}.wav").absolute()) for one in utterances})
    kept.write(remove_others=True)


def make(options: argparse.Namespace) -> None:
    """Speak what is chosen, and write the data directories."""
    sets = {
        name: DataDir.read(options.data / name, "text", "utt2spk", "utt2client") for name in SETS
    }
    if taken := [name for name, data in sets.items() if not data.text]:
        raise UserError("no utterance", path=options.data / taken[0])
    utterances = {
        name: chosen(data, name, options.hours, options.each, options.seed)
        for name, data in sets.items()
    }
    voices: dict[str, Speaker] = {}
    clips = {}
    digest = hashlib.sha256()
    for name, data in sets.items():
        for one in utterances[name]:
            client = data.utt2client[one]
            if client not in voices:
                voices[client] = voice_of(client, options.seed)
            clips[f"{name}/{one}.wav"] = Saying(voices[client], data.text[one], one)
            digest.update(f"{name} {one} {client} {data.text[one]}\n".encode())
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
    parser = argparse.ArgumentParser(description="Give transcripts of meetings voices.")
    parser.add_argument("data", type=Path, help="what prepare.py --transcripts wrote")
    parser.add_argument("out", type=Path, help="where the data directories are written")
    hours = "of train that are spoken, about (default: 1)"
    parser.add_argument("--hours", type=float, default=1.0, metavar="X", help=hours)
    each = "utterances of each client of dev and eval that are spoken (default: 60)"
    parser.add_argument("--each", type=int, default=60, metavar="N", help=each)
    parser.add_argument("--seed", type=int, default=0, help="another seed, other voices")
    jobs = os.cpu_count() or 1
    parser.add_argument("--nj", type=int, default=jobs, help=f"processes (default: {jobs})")
    options = parser.parse_args()
    if min(options.nj, options.each) < 1 or not options.hours > 0:
        parser.error("--nj and --each are at least 1, --hours is above 0")
    with exit_with_message("speak.py"):
        make(options)


if __name__ == "__main__":
    main()
