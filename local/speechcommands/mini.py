#!/usr/bin/env python3
"""A small Speech Commands, spoken by espeak-ng, in the layout of version 2.

    mini.py OUT

writes OUT/speech_commands_mini/{<word>/<speaker>_nohash_<number>.wav,validation_list.txt,
testing_list.txt,_background_noise_/*.wav,README.md,SHA256SUMS}: 88 speakers of six accents (see
local/voices.py), the 35 words of version 2, about 2,800 clips of one second at 16 kHz; and
spk2gender, which the real corpus lacks, of two thirds of the speakers, for attacks that guess it.

Speakers have as little in common as figure 1 of Li et al. (2022) shows it for the real corpus: of
the 64 that train, few have many clips of all words, and many have few clips of some words. The
speakers of the two lists, 8 and 16, are others, and say every word once.

No two clips of a speaker's word are the same: speed, pitch, loudness, place within the second, and
level and colour of the noise differ. The noise recordings of a minute are white and pink noise,
the hum of mains, and babble of words that are not among the 35.

The same seed gives the same bytes on the same machine. A second run checks every file by its hash
and makes what is missing or damaged; so does the run after one that was killed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedtools.files.atomic import atomic_path, write_text

# What the makers of all corpora share lies in the folder above; this one may be a link to ours.
sys.path.append(str(Path(__file__).resolve().parent.parent))
from synthesis import make_corpus, recipe_of, run
from voices import ACCENTS, RATE, Speaker, Synthesiser, make_speaker, random_of

WORDS = (
    "backward bed bird cat dog down eight five follow forward four go happy house learn left "
    "marvin nine no off on one right seven sheila six stop three tree two up visual wow yes zero"
).split()
SPEAKERS = {"train": 64, "valid": 8, "test": 16}
LISTS = {"valid": "validation_list.txt", "test": "testing_list.txt"}
# Clips of the training speaker with the fewest and of the one with the most; sizes between them
# grow by less than an exponential, so that most are small.
FEWEST, MOST, BEND = 4, 140, 1.35
NOISES = ("babble", "hum", "pink_noise", "white_noise")
NOISE_SECONDS = 60
BABBLERS = 6
BABBLE = (
    "the pan is near the lake and my boat was under a thin glass roof while some men sold paper "
    "coats by the port where every king met his lazy aunt before lunch in winter"
)
README = """# Speech Commands in miniature

Made by local/speechcommands/mini.py: no one has spoken these words, espeak-ng has. Figures that
are measured on them say nothing of people's speech.
"""


@dataclass(frozen=True)
class Clip:
    """One word of one speaker; `number` counts how often they have said it before."""

    speaker: Speaker
    word: str
    number: int
    part: str

    @property
    def name(self) -> str:
        """The path within the corpus."""
        return f"{self.word}/{self.speaker.client_id[:8]}_nohash_{self.number}.wav"


def times(part: str, place: float, random: np.random.Generator) -> np.ndarray:
    """How often a speaker says each word.

    Args:
        part: the set of the speaker.
        place: of a training speaker among the others, 0 (fewest clips) to 1 (most).
        random: draws which words.
    """
    if part != "train":
        return np.ones(len(WORDS), dtype=int)
    size = round(FEWEST * (MOST / FEWEST) ** place**BEND)
    # Who says much says all words alike; how much this holds differs from speaker to speaker.
    evenness = 10 ** (2 * place - 1 + random.normal(0, 0.4))
    return random.multinomial(size, random.dirichlet(np.full(len(WORDS), evenness)))


def plan(seed: int, most: int) -> list[Clip]:
    """The clips of the corpus, at most so many of a speaker."""
    clips = []
    everybody = [(part, number) for part, count in SPEAKERS.items() for number in range(count)]
    for order, (part, number) in enumerate(everybody):
        accent = list(ACCENTS)[order % len(ACCENTS)]
        speaker = make_speaker(accent, order // len(ACCENTS), seed)
        random = random_of(seed, "words", order)
        said = times(part, number / (SPEAKERS[part] - 1), random)
        theirs = [
            Clip(speaker, word, time, part)
            for word, count in zip(WORDS, said, strict=True)
            for time in range(count)
        ]
        clips += [theirs[index] for index in sorted(random.permutation(len(theirs))[:most])]
    return clips


# --- sound ----------------------------------------------------------------------------------------


def coloured(random: np.random.Generator, samples: int, slope: float) -> np.ndarray:
    """Noise of that many samples, mean square 1, whose power falls with frequency ** -slope."""
    spectrum = np.fft.rfft(random.standard_normal(samples))
    spectrum *= np.maximum(np.arange(len(spectrum)), samples * 20 / RATE) ** (-slope / 2)
    noise = np.fft.irfft(spectrum, samples)
    return noise / np.sqrt(np.mean(noise**2))


def trimmed(wave: np.ndarray) -> np.ndarray:
    """The wave from its first to its last sample that is above a hundredth of the loudest."""
    loud = np.flatnonzero(np.abs(wave) > 0.01 * np.abs(wave).max())
    return wave[loud[0] : loud[-1] + 1]


def second_of(synthesiser: Synthesiser, clip: Clip) -> np.ndarray:
    """The second of one clip: (16000,) within [-1, 1]."""
    speaker = clip.speaker
    random = random_of("clip", speaker.client_id, clip.word, clip.number)
    words_per_minute = round(speaker.words_per_minute * random.uniform(0.85, 1.3))
    hurried = replace(speaker, words_per_minute=words_per_minute)
    pitch = int(random.integers(35, 66))
    spoken = trimmed(synthesiser.say(clip.word, hurried, random, pitch))[:RATE]
    level = speaker.level * 10 ** (random.uniform(-6, 0) / 20)
    wave = np.zeros(RATE)
    start = random.integers(RATE - len(spoken) + 1)
    wave[start : start + len(spoken)] = 0.7 * level / np.abs(spoken).max() * spoken
    noise = level * 10 ** (random.uniform(-50, -25) / 20)
    return np.clip(wave + noise * coloured(random, RATE, random.uniform(0, 1.5)), -1, 1)


def babble(synthesiser: Synthesiser, random: np.random.Generator) -> np.ndarray:
    """Several voices at the same time, each saying the words of BABBLE in its own order."""
    length = NOISE_SECONDS * RATE
    mixed = np.zeros(length)
    for number in range(BABBLERS):
        speaker = make_speaker(list(ACCENTS)[number % len(ACCENTS)], 100 + number, 0)
        words, said = BABBLE.split(), np.zeros(0)
        while len(said) < length:
            text = " ".join(random.permutation(words))
            said = np.concatenate([said, synthesiser.say(text, speaker, random)])
        mixed += said[:length] / np.abs(said).max()
    return mixed


def minute_of(synthesiser: Synthesiser, name: str, seed: int) -> np.ndarray:
    """A minute of background noise: (960000,) within [-1, 1]."""
    random = random_of(seed, "noise", name)
    length = NOISE_SECONDS * RATE
    if name == "babble":
        noise = babble(synthesiser, random)
    elif name == "hum":
        phase = 2 * np.pi * 50 * np.arange(length) / RATE
        parts = (np.sin(n * phase + random.uniform(0, 6)) / n for n in range(1, 12))
        swell = 1 + 0.5 * np.sin(phase / 250)
        noise = swell * sum(parts) + 0.2 * coloured(random, length, 1)
    else:
        noise = coloured(random, length, {"pink_noise": 1, "white_noise": 0}[name])
    return 0.6 * noise / np.abs(noise).max()


# --- the corpus -----------------------------------------------------------------------------------


def write_tables(clips: list[Clip], corpus: Path) -> None:
    """Write the two lists, and what says that this is no real corpus."""
    for part, name in LISTS.items():
        listed = sorted(clip.name for clip in clips if clip.part == part)
        write_text(corpus / name, "".join(f"{clip}\n" for clip in listed))
    write_text(corpus / "README.md", README)
    speakers = {clip.speaker.client_id[:8]: clip.speaker.gender[0] for clip in clips}
    # Every third does not tell it.
    told = [pair for number, pair in enumerate(sorted(speakers.items())) if number % 3]
    lines = (f"{name} {sex}\n" for name, sex in told)
    write_text(corpus / "spk2gender", "".join(lines))


def make(corpus: Path, seed: int, most: int, jobs: int) -> None:
    """Make the corpus, or what of it is missing or damaged."""
    clips = plan(seed, most)

    def speak(synthesiser: Synthesiser, what: Clip | str, path: Path) -> None:
        import soundfile

        if isinstance(what, Clip):
            wave = second_of(synthesiser, what)
        else:
            wave = minute_of(synthesiser, what, seed)
        with atomic_path(path) as temporary:
            soundfile.write(str(temporary), wave, RATE, format="WAV", subtype="PCM_16")

    make_corpus(
        corpus,
        recipe_of([f"seed {seed}", f"most {most}"], __file__),
        {
            **{f"_background_noise_/{noise}.wav": noise for noise in NOISES},
            **{clip.name: clip for clip in clips},
        },
        speak,
        [*LISTS.values(), "README.md", "spk2gender"],
        lambda: write_tables(clips, corpus),
        jobs,
    )


if __name__ == "__main__":
    description = "Make a small Speech Commands with espeak-ng."
    run(__file__, description, "speech_commands_mini", MOST, "clips", make)
