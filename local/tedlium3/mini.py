#!/usr/bin/env python3
"""Make a small TED-LIUM 3, spoken by espeak-ng, in the layout of the corpus' owners.

    mini.py OUT [--speakers N] [--talks N] [--channels N] [--seconds N]

writes OUT/TEDLIUM_release-mini/{data/{sph,stm},legacy,speaker-adaptation,SHA256SUMS}: 80 persons of
six accents (see local/voices.py) in train, and 8 each in the legacy dev and test sets, about two
hours and a half. `speaker-adaptation` has other dev and test sets, of persons who are in train in
`legacy`. Both link to the audio in `data/sph`, but the legacy dev and test sets have their own.

Every eighth person speaks for well over half a minute (enough for one personalised model of 40
seconds), every fourth has two talks of nearly a minute, of different years, and the others have one
of over a minute and a half. Each talk has its own channel: distance, noise, and spectral tilt.

--speakers and --talks set the number of persons in train and of talks per person. With --seconds,
each of these talks has enough speech for two personalised models of this length. With --channels,
the talks of a person are passed through this number of filters in turn, which are drawn at random
for each person: with as many channels as talks each talk has its own, with 1 all share one.

The stm files have the quirks that prepare.py has to handle: overlapping segments and segments out
of order, old labels, comments, unscored segments, words split at their apostrophes, `<unk>`,
`<sil>`, `{NOISE}`, pronunciation variants, and one file whose name differs from its audio's.
Between two sentences all samples are zero, so that the times of an stm file can be read off the
audio: the file can be rewritten without a new synthesis.

The same seed gives the same bytes on the same machine. A second run checks every file by its hash
and makes what is missing or damaged, also after a run that was killed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fedtools.core.atomic import atomic_path, write_text
from fedtools.core.errors import UserError

# Code that all mini corpora share is in the folder above; resolve() because this one may be a link.
sys.path.append(str(Path(__file__).resolve().parent.parent))
from synthesis import make_corpus, recipe_of, run
from voices import ACCENTS, RATE, Speaker, Synthesiser, make_speaker, random_of

PERSONS = {"train": 80, "dev": 8, "test": 8}
# Persons who are in train in `legacy`, and in dev and test in `speaker-adaptation`.
ADAPTATION = {"dev": range(0, 80, 10), "test": range(5, 80, 10)}
SHORT, HALF, WHOLE, HELD_OUT = 9, 13, 24, 12
"""Sentences per talk: of a short talk, of each of two talks, of a single talk, of dev and test."""
LONGEST = 100_000
# A talk has this many times the speech of two models, because words take only about four fifths of
# the time that a voice's nominal words per minute imply.
SPARE = 1.3
# Extra seconds for each model: a set ends with a whole sentence, and sentences that overlap with
# the first set are lost.
MARGIN = 5
FIRST = "Ada Ben Cleo Dan Eva Finn Gina Hugo Iris Jon Kira Leo Mona Nils Olga Paul".split()
LAST = "North Brook Hill Stone Reed Woods".split()
# If there are more persons than names, last names are formed from two.
LAST += [one + other.lower() for one in LAST for other in LAST]
# A channel's filter: frequencies of its random gains in Hz, their deviation in dB, number of taps.
BANDS = (0, 250, 500, 1000, 1500, 2000, 3000, 4000, 6000, 8000)
DEVIATION, TAPS = 6.0, 255
YEARS = 80
GAP = np.zeros(2 * RATE // 5)
# Zero samples that separate sentences; the noise within one is never zero for this long.
SILENT = RATE // 5
WORDS = {
    "N": "teacher doctor river city engine garden market machine forest bridge village window "
    "picture letter mountain kitchen farmer painter computer rocket island factory planet horse",
    "P": "children people students workers farmers birds numbers questions stories ideas houses "
    "wheels rooms lights seeds maps boats words dreams rivers",
    "A": "small bright quiet hungry simple broken recent strange heavy gentle narrow yellow clever "
    "hidden empty golden busy careful young",
    "V": "carried noticed painted followed measured repaired borrowed opened counted answered "
    "changed forgot planted visited watched gathered built",
    "O": "water bread music paper sugar energy money weather language silence sunlight iron",
}
TIMES = (
    "yesterday|in march|last winter|this morning|after lunch|at school|near the sea|on sunday|"
    "in my country|for ten years|before the storm|every single day"
).split("|")
TEMPLATES = (
    "T the A N V the P and nobody asked about the O",
    "it 's a A N that V all of our P T",
    "we don 't need O we need P who V the A N",
    "i want to tell you about the N where P V the O T",
    "they 're A P and that 's why the N V them",
    "the A P stayed by the N ' cause the O was gone",
    "when the N V the O we 'd seen A P T",
    "so let 's imagine a A N full of O and P",
    "what if the P i 've met V a A N T",
    "she 'll say that the A N V her P T",
)
"""A capital stands for an entry of WORDS or TIMES; other words are literal, as in a stm file."""
UNKNOWN = "zorvane bleckle tumbrio pradda".split()


@dataclass(frozen=True)
class Layout:
    """Sizes of the training set; 0 for the default.

    Attributes:
        speakers: number of persons.
        talks: number of talks per person.
        channels: number of channels per person.
        seconds: length of each of the two models for which a talk has speech.
    """

    speakers: int = 0
    talks: int = 0
    channels: int = 0
    seconds: int = 0


@dataclass(frozen=True)
class Talk:
    """A talk: its name, its speaker, and its sentences, each (as spoken, as written).

    `taps` are the taps of its channel's filter; None if the talk has a random spectral tilt.
    """

    name: str
    person: int
    part: str
    speaker: Speaker
    sentences: tuple[tuple[str, str], ...]
    taps: np.ndarray | None = field(default=None, compare=False)

    @property
    def folder(self) -> str:
        """Return the folder of the talk's files: data for train, else the set's folder."""
        return "data" if self.part == "train" else f"legacy/{self.part}"

    @property
    def stm(self) -> str:
        """Return the stem of the talk's stm file."""
        return f"{self.name}_clean" if self.part == "train" and self.person == 1 else self.name


# --- words ----------------------------------------------------------------------------------------


def sentences(seed: int) -> Iterator[tuple[str, str]]:
    """Yield sentences, as spoken and as written in a stm file, all spoken ones distinct."""
    random = random_of(seed, "tedlium", "sentences")
    choices = {kind: words.split() for kind, words in WORDS.items()} | {"T": TIMES}
    seen: set[str] = set()
    while True:
        template = TEMPLATES[random.integers(len(TEMPLATES))].split()
        words = [str(random.choice(choices.get(word, [word]))) for word in template]
        spoken = " ".join(words).replace("' cause", "cause").replace(" '", "'")
        if spoken in seen:
            continue
        seen.add(spoken)
        kind = len(seen) % 12
        if kind == 3:
            name = UNKNOWN[random.integers(len(UNKNOWN))]
            spoken, words = f"{name} said {spoken}", ["<unk>", "said", *words]
        elif kind == 6:
            words = [f"{word}(2)" if word == "the" else word for word in words]
        elif kind == 9:
            words = ["<sil>", *words[:3], "{NOISE}", *words[3:]]
        yield spoken, " ".join(words)


def talks_of(part: str, person: int, layout: Layout) -> list[tuple[str, int]]:
    """Return a person's talks: the year with its letter, and the number of sentences."""
    year = 2003 + person % 13
    if part != "train":
        return [(str(year), HELD_OUT)]
    if layout.talks:
        return [(str(year + number), WHOLE) for number in range(layout.talks)]
    if person % 8 == 0:
        return [(f"{year}X", SHORT)]
    if person % 4 == 1:
        return [(str(year), HALF), (f"{year + 2}G", HALF)]
    return [(str(year), WHOLE)]


def said_in(
    source: Iterator[tuple[str, str]], length: int, seconds: float, most: int, speaker: Speaker
) -> tuple[tuple[str, str], ...]:
    """Take a talk's sentences: `length`, or for `seconds` if above 0; at most `most`."""
    taken: list[tuple[str, str]] = []
    timed = seconds > 0
    while len(taken) < most and (seconds > 0 if timed else len(taken) < length):
        taken.append(next(source))
        seconds -= 60 * len(taken[-1][0].split()) / speaker.words_per_minute
    return tuple(taken)


def taps_of(seed: int, person: str, channel: int) -> np.ndarray:
    """Make a channel's filter of linear phase with random gains: (TAPS,)."""
    random = random_of(seed, "channel", person, channel)
    frequencies = np.linspace(0, RATE / 2, TAPS // 2 + 1)
    gains = np.interp(frequencies, BANDS, random.normal(0, DEVIATION, len(BANDS)))
    taps = np.fft.irfft(10 ** (gains / 20), TAPS)
    return np.roll(taps, TAPS // 2) * np.hanning(TAPS + 2)[1:-1]


def plan(seed: int, most: int, layout: Layout) -> list[Talk]:
    """Return the talks of the corpus, with at most `most` sentences each.

    Raises:
        UserError: if there are more persons than names, or more talks than years.
    """
    persons = {**PERSONS, "train": layout.speakers or PERSONS["train"]}
    if sum(persons.values()) > len(FIRST) * len(LAST):
        names = len(FIRST) * len(LAST) - sum(persons.values()) + persons["train"]
        raise UserError(f"--speakers {persons['train']}: there are names for only {names}")
    if layout.talks > YEARS:
        raise UserError(f"--talks {layout.talks}: there are years for only {YEARS}")
    source, talks, order = sentences(seed), [], 0
    for part, count in persons.items():
        for person in range(count):
            name = FIRST[order % len(FIRST)] + LAST[order // len(FIRST)]
            accent = list(ACCENTS)[order % len(ACCENTS)]
            speaker = make_speaker(accent, order // len(ACCENTS), seed)
            order += 1
            for number, (year, length) in enumerate(talks_of(part, person, layout)):
                talk, taps = f"{name}_{year}", None
                random = random_of(seed, "room", talk)
                if layout.channels:
                    channel = number % layout.channels
                    random = random_of(seed, "room", name, channel)
                    taps = taps_of(seed, name, channel)
                room = replace(
                    speaker,
                    level=float(10 ** (random.uniform(-12, 0) / 20)),
                    noise=float(10 ** (random.uniform(-45, -30) / 20)),
                )
                timed = layout.seconds and part == "train"
                long = 2 * SPARE * (layout.seconds + MARGIN) if timed else 0
                own = said_in(source, length, long, most, speaker)
                talks.append(Talk(talk, person, part, room, own, taps))
    return talks


# --- sound and stm --------------------------------------------------------------------------------


def wave_of(synthesiser: Synthesiser, talk: Talk) -> np.ndarray:
    """Synthesise a talk's sentences through its channel, zeros around each: (samples,)."""
    random = random_of("talk", talk.speaker.client_id, talk.name)
    colour = random.uniform(-0.4, 0.4)
    pieces = [GAP]
    for spoken, _ in talk.sentences:
        wave = synthesiser.say(spoken, talk.speaker, random)
        if talk.taps is None:
            wave[1:] += colour * wave[:-1]
        else:
            wave = np.convolve(wave, talk.taps, "same")
        wave *= 0.7 * talk.speaker.level / max(np.abs(wave).max(), 1e-3)
        noise = 0.2 * talk.speaker.noise * talk.speaker.level
        pieces += [wave + noise * random.standard_normal(len(wave)), GAP]
    return np.clip(np.concatenate(pieces), -1, 1)


def times_of(path: Path) -> list[tuple[float, float]]:
    """Return (start, end) in seconds of each sentence, which zeros separate in the audio."""
    import soundfile

    loud = np.flatnonzero(soundfile.read(str(path), dtype="int16")[0])
    breaks = np.flatnonzero(np.diff(loud) > SILENT)
    starts, ends = loud[np.append(0, breaks + 1)], loud[np.append(breaks, -1)]
    return [(start / RATE, end / RATE) for start, end in zip(starts, ends, strict=True)]


def stm_of(talk: Talk, path: Path) -> str:
    """Return the text of a talk's stm file, with the times of its audio."""
    gender = talk.speaker.gender.partition("_")[0]
    old = {"male": "<F0_M>", "female": "<F0_F>"}[gender]
    label = old if talk.part == "dev" else f"<o,f0,{gender}>"
    # A third of the persons have labels without gender, like the talks that release 3 added.
    if talk.person // len(ACCENTS) % 3 == 1:
        label = "<NA>"
    speaker = talk.name if talk.part == "train" else talk.name.partition("_")[0]
    lines = []
    times = times_of(path)
    if len(times) != len(talk.sentences):
        raise UserError("not the audio that was made", path=path, remedy="remove it and run again")
    for number, ((start, end), (_, text)) in enumerate(zip(times, talk.sentences, strict=True)):
        # The gap is 0.4 s: these two overlap with the segments after and before them.
        before, after = (0.1, 0.35) if number % 6 == 2 else (0.1, 0.1)
        shown = "<NA>" if talk.part == "train" and number % 7 == 5 else label
        segment = f"{max(start - before, 0):.3f} {end + after:.3f}"
        lines.append(f"{talk.name} 1 {speaker} {segment} {shown} {text}")
    for number in range(8, len(lines), 9):
        lines[number - 1 : number + 1] = reversed(lines[number - 1 : number + 1])
    if talk.part != "train" or talk.person % 3 == 0:
        gap = f"{talk.name} 1 inter_segment_gap 0 0.2 <o,,unknown> ignore_time_segment_in_scoring"
        lines.insert(0, gap)
    if talk.part != "train":
        lines.insert(0, f";; {talk.name}")
    return "".join(f"{line}\n" for line in lines)


# --- the corpus -----------------------------------------------------------------------------------


def links_of(talks: list[Talk]) -> dict[str, str]:
    """Return the two partitions' links -> their targets, as paths within the corpus."""
    links = {}
    for talk in talks:
        if talk.part != "train":
            continue
        sets = {"legacy": "train", "speaker-adaptation": "train"}
        for name, persons in ADAPTATION.items():
            if talk.person in persons:
                sets["speaker-adaptation"] = name
        for partition, part in sets.items():
            for file in (f"sph/{talk.name}.sph", f"stm/{talk.stm}.stm"):
                links[f"{partition}/{part}/{file}"] = f"data/{file}"
    return links


def write_tables(talks: list[Talk], corpus: Path) -> None:
    """Write the stm files, and link the partitions to data."""
    for talk in talks:
        folder = corpus / talk.folder
        write_text(
            folder / "stm" / f"{talk.stm}.stm", stm_of(talk, folder / f"sph/{talk.name}.sph")
        )
    for link, file in links_of(talks).items():
        path = corpus / link
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(os.path.relpath(corpus / file, path.parent))


def make(corpus: Path, seed: int, most: int, jobs: int, **numbers: int) -> None:
    """Make the corpus, or its missing and damaged files; `numbers` are fields of `Layout`."""
    layout = Layout(**numbers)
    talks = plan(seed, most, layout)

    def speak(synthesiser: Synthesiser, talk: Talk, path: Path) -> None:
        import soundfile

        wave = wave_of(synthesiser, talk)
        with atomic_path(path) as temporary:
            soundfile.write(str(temporary), wave, RATE, format="NIST", subtype="PCM_16")

    make_corpus(
        corpus,
        recipe_of([f"seed {seed}", f"most {most}", f"{layout}"], __file__),
        {f"{talk.folder}/sph/{talk.name}.sph": talk for talk in talks},
        speak,
        [*(f"{talk.folder}/stm/{talk.stm}.stm" for talk in talks), *links_of(talks)],
        lambda: write_tables(talks, corpus),
        jobs,
    )


if __name__ == "__main__":
    description = "Make a small TED-LIUM 3 with espeak-ng."
    run(
        __file__,
        description,
        "TEDLIUM_release-mini",
        LONGEST,
        "sentences in a talk",
        make,
        {
            "speakers": f"number of training persons (default: {PERSONS['train']})",
            "talks": "talks per training person (default: one or two)",
            "channels": "channels per training person, used by the talks in turn (default: a mild "
            "channel for each talk)",
            "seconds": "speech per talk suffices for two models of this length (default: varied)",
        },
    )
