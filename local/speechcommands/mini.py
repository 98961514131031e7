#!/usr/bin/env python3
"""Make a small Speech Commands, spoken by espeak-ng, in the layout of version 2.

    mini.py OUT

writes OUT/speech_commands_mini/{<word>/<speaker>_nohash_<number>.wav,validation_list.txt,
testing_list.txt,_background_noise_/*.wav,README.md,SHA256SUMS}: 88 speakers of six accents (see
local/voices.py), the 35 words of version 2, about 2,800 clips of one second at 16 kHz; and
spk2gender, which the real corpus lacks, of two thirds of the speakers, for attacks that infer it.

Speakers differ as much as figure 1 of Li et al. (2022) shows for the real corpus: of the 64
training speakers, few have many clips of all words, and many have few clips of some words. The 8
and 16 speakers of the two lists are different ones, and say every word once.

No two clips of a speaker's word are the same: speed, pitch, loudness, place within the second, and
level and colour of the noise differ. The noise recordings of a minute are white and pink noise,
the hum of mains, and babble of words that are not among the 35.

The same seed gives the same bytes on the same machine. A second run checks every file by its hash
and makes what is missing or damaged, also after a run that was killed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedtools.core.atomic import atomic_path, write_text

# Code that all mini corpora share is in the folder above; resolve() because this one may be a link.
sys.path.append(str(Path(__file__).resolve().parent.parent))
from synthesis import make_corpus, recipe_of, run
from voices import ACCENTS, RATE, Speaker, Synthesiser, make_speaker, random_of

WORDS = (
    "backward bed bird cat dog down eight five follow forward four go happy house learn left "
    "marvin nine no off on one right seven sheila six stop three tree two up visual wow yes zero"
).split()
SPEAKERS = {"train": 64, "valid": 8, "test": 16}
LISTS = {"valid": "validation_list.txt", "test": "testing_list.txt"}
# The fewest and the most clips of a training speaker. With BEND above 1, sizes between them stay
# below an exponential curve, so that most are small.
FEWEST, MOST, BEND = 4, 140, 1.35
NOISES = ("babble", "hum", "pink_noise", "white_noise")
NOISE_SECONDS = 60
BABBLERS = 6
BABBLE = (
    "the pan is near the lake and my boat was under a thin glass roof while some men sold paper "
    "coats by the port where every king met his lazy aunt before lunch in winter"
)
README = """# Speech Commands in miniature

Made by local/speechcommands/mini.py: these words are synthesised by espeak-ng. Figures that are
measured on them do not apply to people's speech.
"""


@dataclass(frozen=True)
class Clip:
    """One word of one speaker; `number` counts the speaker's earlier clips of this word."""

    speaker: Speaker
    word: str
    number: int
    part: str

    @property
    def name(self) -> str:
        """Return the clip's path within the corpus."""
        return f"{self.word}/{self.speaker.client_id[:8]}_nohash_{self.number}.wav"


def times(part: str, place: float, random: np.random.Generator) -> np.ndarray:
    """Draw how often a speaker says each word.

    Args:
        part: the set of the speaker.
        place: rank of a training speaker among the others, 0 (fewest clips) to 1 (most).
        random: the generator that draws the words.
    """
    if part != "train":
        return np.ones(len(WORDS), dtype=int)
    size = round(FEWEST * (MOST / FEWEST) ** place**BEND)
    # Speakers with many clips use all words more evenly, with random variation between speakers.
    evenness = 10 ** (2 * place - 1 + random.normal(0, 0.4))
    return random.multinomial(size, random.dirichlet(np.full(len(WORDS), evenness)))


def plan(seed: int, most: int) -> list[Clip]:
    """Return the clips of the corpus, at most `most` per speaker."""
    clips = []
    everybody = [(part, number) for part, count in SPEAKERS.items() for number in range(count)]
    for order, (part, number) in enumerate(everybody):
        accent = list(ACCENTS)[order % len(ACCENTS)]
        speaker = make_speaker(accent, order // len(ACCENTS), seed)
        random = random_of(seed, "words", order)
        counts = times(part, number / (SPEAKERS[part] - 1), random)
        theirs = [
            Clip(speaker, word, time, part)
            for word, count in zip(WORDS, counts, strict=True)
            for time in range(count)
        ]
        clips += [theirs[index] for index in sorted(random.permutation(len(theirs))[:most])]
    return clips


# --- sound ----------------------------------------------------------------------------------------


def coloured(random: np.random.Generator, samples: int, slope: float) -> np.ndarray:
    """Make noise of mean square 1, its power proportional to frequency ** -slope: (samples,)."""
    spectrum = np.fft.rfft(random.standard_normal(samples))
    spectrum *= np.maximum(np.arange(len(spectrum)), samples * 20 / RATE) ** (-slope / 2)
    noise = np.fft.irfft(spectrum, samples)
    return noise / np.sqrt(np.mean(noise**2))


def trimmed(wave: np.ndarray) -> np.ndarray:
    """Cut a wave to its first and last samples above a hundredth of the loudest."""
    loud = np.flatnonzero(np.abs(wave) > 0.01 * np.abs(wave).max())
    return wave[loud[0] : loud[-1] + 1]


def second_of(synthesiser: Synthesiser, clip: Clip) -> np.ndarray:
    """Synthesise the second of one clip: (16000,) within [-1, 1]."""
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
    """Mix several voices, each saying the words of BABBLE in its own order."""
    length = NOISE_SECONDS * RATE
    mixed = np.zeros(length)
    for number in range(BABBLERS):
        speaker = make_speaker(list(ACCENTS)[number % len(ACCENTS)], 100 + number, 0)
        words, voice = BABBLE.split(), np.zeros(0)
        while len(voice) < length:
            text = " ".join(random.permutation(words))
            voice = np.concatenate([voice, synthesiser.say(text, speaker, random)])
        mixed += voice[:length] / np.abs(voice).max()
    return mixed


def minute_of(synthesiser: Synthesiser, name: str, seed: int) -> np.ndarray:
    """Make a minute of background noise: (960000,) within [-1, 1]."""
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
    """Write the two lists, spk2gender, and a README which explains that the corpus is synthetic."""
    for part, name in LISTS.items():
        listed = sorted(clip.name for clip in clips if clip.part == part)
        write_text(corpus / name, "".join(f"{clip}\n" for clip in listed))
    write_text(corpus / "README.md", README)
    speakers = {clip.speaker.client_id[:8]: clip.speaker.gender[0] for clip in clips}
    # The gender of every third speaker is left out.
    known = [pair for number, pair in enumerate(sorted(speakers.items())) if number % 3]
    lines = (f"{name} {sex}\n" for name, sex in known)
    write_text(corpus / "spk2gender", "".join(lines))


def make(corpus: Path, seed: int, most: int, jobs: int) -> None:
    """Make the corpus, or its missing and damaged files."""
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
