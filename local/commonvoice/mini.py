#!/usr/bin/env python3
"""A small Common Voice, spoken by espeak-ng, in the layout of release 17 and later.

    mini.py OUT

writes OUT/cv-corpus-mini/en/{clips/*.mp3,validated.tsv,train.tsv,dev.tsv,test.tsv,
clip_durations.tsv} and OUT/cv-corpus-mini/SHA256SUMS: 178 speakers of six accents (see
local/voices.py), about two hours. The accents of Australia, England and India have six speakers
each who say 40 sentences, to train on, and 26 who say 6: enough speakers for validation and test
that intervals by speaker mean something. Those of the United States, Scotland and the West Indies
have 60 speakers of 30 sentences, and 22 of 8. (prepare.py gives validation and test those who say
little.) With --tests 60 each of the clients' accents has 60 speakers to test on, and 12 to
validate on, who say 15 sentences each: another corpus, in which smaller differences can be told.

The sentences come from a small grammar, and no two are the same. Its words are chosen such that
an accent matters: they come in groups that differ by the one sound that the accents move.

The same seed gives the same bytes on the same machine. A second run checks every file by its hash
and makes what is missing or damaged; so does the run after one that was killed.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256 as hash_of
from pathlib import Path

from fedtools.files.atomic import atomic_path, write_text

# What the makers of all corpora share lies in the folder above; this one may be a link to ours.
sys.path.append(str(Path(__file__).resolve().parent.parent))
from synthesis import make_corpus, recipe_of, run
from voices import RATE, Speaker, Synthesiser, make_speaker, random_of

# Of each accent: speakers and sentences of each, for training, and for validation and test.
SPEAKERS = {
    "au": ((6, 40), (26, 6)),
    "en": ((6, 40), (26, 6)),
    "in": ((6, 40), (26, 6)),
    "us": ((32, 30), (10, 8)),
    "scotland": ((16, 30), (6, 8)),
    "bermuda": ((12, 30), (6, 8)),
}
CLIENTS = ("au", "en", "in")
# Of --tests N: what each of these speakers says, and one to validate on for so many to test on.
SENTENCES, PER_VALID = 15, 5
COLUMNS = (
    "client_id path sentence_id sentence sentence_domain up_votes down_votes age gender accents "
    "variant locale segment"
).split()
# Groups that an accent moves into each other: pan pen pin (raised front vowels), bay boy, tail
# tile (FACE and PRICE), coat goat, pot bought (breath), vest west, wine vine (v and w), cart cot
# cat (START), three free tree, hat at (h), ship sheep, ...
WORDS = {
    "D": "the my his this",
    "A": "red big bad dark wet white fine free thin",
    "N": (
        "pen pin pan pine bed bay boy bell bill ball tail tile lake ship sheep shop coat goat kite "
        "gate vest vine wine veil whale cat cart cot cut hat heart hut hen dog man men road rod "
        "pot port park pack path bath grass glass tree"
    ),
    "V": "saw sold left let lit hid met took",
    "C": "two three four five nine ten",
    "P": "by near in under past",
}
TEMPLATES = (
    "D A N V D N",
    "C A N P D N",
    "D N and C N P D N",
    "V D N C P D A N",
    "D N is A and not A",
)
"""Capitals stand for one of WORDS, the rest for itself."""
# Clips begin as those of Common Voice do, with what ffmpeg writes. An Info frame, which would tell
# how many frames follow, is not there either: LAME writes none at 32 kbit/s.
TAG = b"ID3\x04\0\0\0\0\0\x23TSSE\0\0\0\x0f\0\0\x03Lavf57.83.100\0" + bytes(10)


@dataclass(frozen=True)
class Clip:
    """One utterance of the corpus that is to be made."""

    name: str
    speaker: Speaker
    sentence: str
    part: str

    def row(self) -> str:
        """The line of validated.tsv."""
        sentence_id = hash_of(self.sentence.encode()).hexdigest()
        spoken = self.sentence.capitalize() + "."
        speaker = self.speaker
        # As in a real release, a third of the speakers do not tell their sex, or their age.
        digits = int(speaker.client_id[:8], 16)
        age = speaker.age if digits % 3 else ""
        gender = speaker.gender if digits // 3 % 3 else ""
        cells = [speaker.client_id, self.name, sentence_id, spoken, "", "2", "0", age, gender]
        return "\t".join([*cells, speaker.accent.text, "", "en", ""])


def sentences(seed: int) -> Iterator[str]:
    """Yield sentences of the grammar, no two the same."""
    random = random_of(seed, "sentences")
    choices = {kind: words.split() for kind, words in WORDS.items()}
    seen: set[str] = set()
    while True:
        template = TEMPLATES[random.integers(len(TEMPLATES))].split()
        sentence = " ".join(str(random.choice(choices.get(word, [word]))) for word in template)
        if sentence not in seen:
            seen.add(sentence)
            yield sentence


def plan(seed: int, most: int, tests: int = 0) -> list[Clip]:
    """The clips of the corpus, at most so many of a speaker.

    With `tests`, so many speakers of each of the clients' accents are to be tested on. Those who
    say little are in dev.tsv and test.tsv by turns, the others in train.tsv.
    """
    source = sentences(seed)
    clips = []
    for accent, ((count, many), (others, few)) in SPEAKERS.items():
        if tests and accent in CLIENTS:
            others, few = tests + -(-tests // PER_VALID), SENTENCES
        for number in range(count + others):
            speaker = make_speaker(accent, number, seed)
            part = "train" if number < count else ("dev", "test")[number % 2]
            for _ in range(min(many if part == "train" else few, most)):
                name = f"common_voice_en_{40000000 + len(clips)}.mp3"
                clips.append(Clip(name, speaker, next(source), part))
    return clips


def speak(synthesiser: Synthesiser, clip: Clip, path: Path) -> None:
    """Make one clip."""
    import soundfile

    wave = synthesiser.speak(clip.sentence, clip.speaker, clip.name)
    encoded = io.BytesIO()
    soundfile.write(
        encoded,
        wave,
        RATE,
        format="MP3",
        subtype="MPEG_LAYER_III",
        bitrate_mode="CONSTANT",
        compression_level=0.85,
    )
    with atomic_path(path) as temporary:
        temporary.write_bytes(TAG + encoded.getvalue())


def write_tables(clips: list[Clip], language: Path) -> None:
    """Write validated.tsv, the three splits and clip_durations.tsv."""
    from fedtools.audio.wave import recording_seconds

    header = "\t".join(COLUMNS)
    ordered = sorted(clips, key=lambda clip: (clip.speaker.client_id, clip.name))
    for table in ("validated", "train", "dev", "test"):
        rows = [clip.row() for clip in ordered if table in ("validated", clip.part)]
        write_text(language / f"{table}.tsv", "\n".join([header, *rows]) + "\n")
    lines = ["clip\tduration[ms]"]
    for clip in clips:
        seconds = recording_seconds(str(language / "clips" / clip.name))
        lines.append(f"{clip.name}\t{round(1000 * seconds)}")
    write_text(language / "clip_durations.tsv", "\n".join(lines) + "\n")


def make(corpus: Path, seed: int, most: int, jobs: int, tests: int) -> None:
    """Make the corpus, or what of it is missing or damaged."""
    clips, said = plan(seed, most, tests), [f"seed {seed}", f"most {most}"]
    said += [f"tests {tests}"] * bool(tests)
    tables = [f"en/{name}.tsv" for name in ("validated", "train", "dev", "test", "clip_durations")]
    make_corpus(
        corpus,
        recipe_of(said, __file__),
        {f"en/clips/{clip.name}": clip for clip in clips},
        speak,
        tables,
        lambda: write_tables(clips, corpus / "en"),
        jobs,
    )


if __name__ == "__main__":
    description = "Make a small Common Voice with espeak-ng."
    told = f"speakers of each of the clients' accents for tests, {SENTENCES} sentences each"
    run(__file__, description, "cv-corpus-mini", 40, "sentences", make, {"tests": told})
