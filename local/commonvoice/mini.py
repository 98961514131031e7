#!/usr/bin/env python3
"""Make a small Common Voice, spoken by espeak-ng, in the layout of release 17 and later.

    mini.py OUT

writes OUT/cv-corpus-mini/en/{clips/*.mp3,validated.tsv,train.tsv,dev.tsv,test.tsv,
clip_durations.tsv} and OUT/cv-corpus-mini/SHA256SUMS: 178 speakers of six accents (see
local/voices.py), about two hours. The accents of Australia, England and India have six speakers
each of 40 sentences, to train on, and 26 of 6, enough speakers for validation and test that
confidence intervals by speaker are meaningful. The accents of the United States, Scotland and the
West Indies have 60 speakers of 30 sentences, and 22 of 8. (prepare.py puts speakers of few
sentences into validation and test.) With --tests 60 each of the clients' accents has 60 test
speakers and 12 validation speakers of 15 sentences each: a different corpus, which resolves smaller
differences.

The sentences come from a small grammar, and no two are the same. Its words are chosen such that
an accent matters: they form groups that differ only in a sound that accents shift.

The same seed gives the same bytes on the same machine. A second run checks every file by its hash
and makes what is missing or damaged, also after a run that was killed.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256 as hash_of
from pathlib import Path

from fedtools.core.atomic import atomic_path, write_text

# Code that all mini corpora share is in the folder above; resolve() because this one may be a link.
sys.path.append(str(Path(__file__).resolve().parent.parent))
from synthesis import make_corpus, recipe_of, run
from voices import RATE, Speaker, Synthesiser, make_speaker, random_of

# Accent -> (speakers, sentences per speaker) for training, and for validation and test.
SPEAKERS = {
    "au": ((6, 40), (26, 6)),
    "en": ((6, 40), (26, 6)),
    "in": ((6, 40), (26, 6)),
    "us": ((32, 30), (10, 8)),
    "scotland": ((16, 30), (6, 8)),
    "bermuda": ((12, 30), (6, 8)),
}
CLIENTS = ("au", "en", "in")
# With --tests N: sentences per held-out speaker, and test speakers per validation speaker.
SENTENCES, PER_VALID = 15, 5
COLUMNS = (
    "client_id path sentence_id sentence sentence_domain up_votes down_votes age gender accents "
    "variant locale segment"
).split()
# Words that an accent makes sound alike: pan pen pin (raised front vowels), bay boy, tail
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
"""A capital stands for a word of WORDS; lower-case words are literal."""
# Clips begin as those of Common Voice do, with ffmpeg's ID3 tag. Neither has an Info frame, which
# would give the number of frames: LAME writes none at 32 kbit/s.
TAG = b"ID3\x04\0\0\0\0\0\x23TSSE\0\0\0\x0f\0\0\x03Lavf57.83.100\0" + bytes(10)


@dataclass(frozen=True)
class Clip:
    """An utterance of the corpus."""

    name: str
    speaker: Speaker
    sentence: str
    part: str

    def row(self) -> str:
        """Return the clip's line of validated.tsv."""
        sentence_id = hash_of(self.sentence.encode()).hexdigest()
        spoken = self.sentence.capitalize() + "."
        speaker = self.speaker
        # As in a real release, a third of the speakers give no gender, and a third no age.
        digits = int(speaker.client_id[:8], 16)
        age = speaker.age if digits % 3 else ""
        gender = speaker.gender if digits // 3 % 3 else ""
        cells = [speaker.client_id, self.name, sentence_id, spoken, "", "2", "0", age, gender]
        return "\t".join([*cells, speaker.accent.text, "", "en", ""])


def sentences(seed: int) -> Iterator[str]:
    """Yield distinct sentences of the grammar."""
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
    """Return the clips of the corpus, at most `most` per speaker.

    `tests` is the number of test speakers of each of the clients' accents; 0 for the default.
    Speakers of few sentences are in dev.tsv and test.tsv alternately, the others in train.tsv.
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
    """Synthesise a clip and write it as MP3."""
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
    """Make the corpus, or its missing and damaged files."""
    clips, arguments = plan(seed, most, tests), [f"seed {seed}", f"most {most}"]
    arguments += [f"tests {tests}"] * bool(tests)
    tables = [f"en/{name}.tsv" for name in ("validated", "train", "dev", "test", "clip_durations")]
    make_corpus(
        corpus,
        recipe_of(arguments, __file__),
        {f"en/clips/{clip.name}": clip for clip in clips},
        speak,
        tables,
        lambda: write_tables(clips, corpus / "en"),
        jobs,
    )


if __name__ == "__main__":
    description = "Make a small Common Voice with espeak-ng."
    tests = f"test speakers of each of the clients' accents, {SENTENCES} sentences each"
    run(__file__, description, "cv-corpus-mini", 40, "sentences", make, {"tests": tests})
