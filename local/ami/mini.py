#!/usr/bin/env python3
"""Make a small AMI, spoken by espeak-ng, in the layout of the corpus' owners.

    mini.py OUT

writes OUT/ami-mini/{words,segments,corpusResources,<MEETING>/audio,background.txt,SHA256SUMS}: 20
training meetings (81 headsets, 12 sentences each), 3 of dev (12 headsets, 40 each) and 6 of eval
(24 headsets, 60 each), under names of the official partition. background.txt has 42,000 normalised
sentences for language models, one a line. sayings.py describes the sentences, and how they differ
from the background text. Two meetings of a group have the same people.

To keep recordings short, everybody speaks all the time, each into a headset that picks up nobody
else. It picks up noise, so that recognition leaves errors for a language model to correct. Between
two sentences all samples are zero, so that the times of the annotations can be read off the audio;
times of words within a sentence are estimated from their numbers of letters.

The annotations have the quirks that prepare.py has to handle: channels in another order than
agents, a fifth headset, whose recording is stereo, laughter, gaps and false starts, words without
times and with empty ones, sentences of more than thirty words, pointers to one word and to several,
and in the first meeting one reversed segment, one duplicate, and one after the end of the audio.

The same seed gives the same bytes on the same machine. A second run checks every file by its hash
and makes what is missing or damaged, also after a run that was killed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np
import sayings
from sayings import Background, Clause, Grammar, Person, Training, breaths, lists_of
from words import words_of

from fedtools.core.atomic import atomic_path, atomic_write, sha256, write_text
from fedtools.core.errors import UserError

# Code that all mini corpora share is in the folder above; resolve() because this one may be a link.
sys.path.append(str(Path(__file__).resolve().parent.parent))
from synthesis import make_corpus, recipe_of, run
from voices import ACCENTS, RATE, Speaker, Synthesiser, make_speaker, random_of

MEETINGS = {
    "train": (
        "ES2002a ES2003a ES2005a ES2006a ES2007a ES2008a ES2009a ES2010a IS1000a IS1001a IS1002b "
        "IS1003a IS1004a TS3005a TS3006a TS3007a TS3008a EN2001a IB4005 IN1001"
    ).split(),
    "dev": "ES2011a IS1008a TS3004a".split(),
    "eval": "ES2004a ES2004b IS1009a TS3003a EN2002a EN2002b".split(),
}
SENTENCES = {"train": 12, "dev": 40, "eval": 60}
FIVE_HEADSETS = "EN2001a"
# Background sentences for each sentence of a person in eval, so that a smaller corpus has fewer.
BACKGROUND = 700
GAP = np.zeros(3 * RATE // 10)
# Zero samples that separate sentences; the noise within one is never zero for this long.
SILENT = RATE // 5
ENCODING = "iso-8859-1"
HEAD = f'<?xml version="1.0" encoding="{ENCODING.upper()}" standalone="yes"?>\n'
NAMESPACE = 'xmlns:nite="http://nite.sourceforge.net/"'


@dataclass(frozen=True)
class Headset:
    """A person's headset in a meeting: its channel, its wearer, and their sentences."""

    meeting: str
    agent: str
    channel: int
    person: str
    speaker: Speaker
    segments: tuple[tuple[Clause, ...], ...]

    @property
    def audio(self) -> str:
        return f"{self.meeting}/audio/{self.meeting}.Headset-{self.channel}.wav"

    @property
    def stereo(self) -> bool:
        return self.channel == 4

    def table(self, kind: str) -> str:
        """Return the path of the headset's words or segments."""
        return f"{kind}/{self.meeting}.{self.agent}.{kind}.xml"

    def called(self, kind: str) -> str:
        return f"{self.meeting}.{self.agent}.{kind}"


# --- people and sentences -------------------------------------------------------------------------


def person_of(order: int, meeting: str, seed: int) -> tuple[str, Speaker]:
    """Return the name of a participant, in AMI's form, and the voice."""
    accent = list(ACCENTS)[order % len(ACCENTS)]
    speaker = make_speaker(accent, order // len(ACCENTS), seed)
    native = "O" if accent == "in" else "E"
    return f"{speaker.gender[0].upper()}{meeting[0]}{native}{order + 1:03}", speaker


def plan(seed: int, most: int) -> list[Headset]:
    """Return the headsets of the corpus, with at most `most` sentences each."""
    training = Training(Random(f"{seed} ami train"))
    orders: dict[tuple[str, str], int] = {}
    headsets, topic = [], -1
    for part, meetings in MEETINGS.items():
        for number, meeting in enumerate(meetings):
            topic = number if part == "train" else topic + 1
            if (part, number) == ("dev", 0):
                topic = 0
            # People keep their voices and pet words in all meetings of their group.
            random = Random(f"{seed} ami {meeting[:6]}")
            count = 5 if meeting == FIVE_HEADSETS else 4
            pets = random.sample(sayings.PET, 3 * count)
            for place, agent in enumerate("ABCDE"[:count]):
                order = orders.setdefault((meeting[:6], agent), len(orders))
                person, speaker = person_of(order, meeting, seed)
                grammar: Grammar = training
                if part != "train":
                    own = Random(f"{seed} ami {meeting} {agent}")
                    liked = random.sample(lists_of(sayings.RARE)[topic], 2)
                    grammar = Person(own, topic, liked, pets[3 * place : 3 * place + 3])
                spoken = breaths(grammar, topic, min(SENTENCES[part], most), long=agent == "A")
                # As in AMI, channels are not in the order of agents.
                channel = (place + number + 1) % count
                headset = Headset(meeting, agent, channel, person, in_room(speaker, meeting, seed),
                                  tuple(map(tuple, spoken)))  # fmt: skip
                headsets.append(headset)
    return headsets


def in_room(speaker: Speaker, meeting: str, seed: int) -> Speaker:
    """Return the speaker with the level and noise of the headset in that meeting."""
    random = random_of(seed, "ami", meeting, speaker.client_id)
    level, noise = 10 ** (random.uniform(-9, 0) / 20), 10 ** (random.uniform(-28, -16) / 20)
    return replace(speaker, level=float(level), noise=float(noise))


# --- sound ----------------------------------------------------------------------------------------


def wave_of(synthesiser: Synthesiser, headset: Headset) -> np.ndarray:
    """Synthesise a headset's signal, zeros around each clause: (samples,) or (samples, 2)."""
    random = random_of("ami", headset.meeting, headset.speaker.client_id)
    colour = random.uniform(-0.4, 0.4)
    pieces = [GAP] * (1 + ord(headset.agent) - ord("A"))
    for clauses in headset.segments:
        for clause in clauses:
            wave = synthesiser.say(clause.spoken, headset.speaker, random)
            wave[1:] += colour * wave[:-1]
            wave *= 0.7 * headset.speaker.level / max(np.abs(wave).max(), 1e-3)
            noise = 0.2 * headset.speaker.noise * headset.speaker.level
            pieces += [wave + noise * random.standard_normal(len(wave)), GAP]
    wave = np.clip(np.concatenate(pieces), -1, 1)
    if not headset.stereo:
        return wave
    return np.stack([wave, 0.01 * random.standard_normal(len(wave))], axis=1)


def times_of(path: Path) -> tuple[list[tuple[float, float]], float]:
    """Return (start, end) of each clause, which zeros separate, and the audio's length: seconds."""
    import soundfile

    wave = soundfile.read(str(path), dtype="int16", always_2d=True)[0][:, 0]
    loud = np.flatnonzero(wave)
    breaks = np.flatnonzero(np.diff(loud) > SILENT)
    starts, ends = loud[np.append(0, breaks + 1)], loud[np.append(breaks, -1)]
    times = [(start / RATE, end / RATE) for start, end in zip(starts, ends, strict=True)]
    return times, len(wave) / RATE


# --- annotations ----------------------------------------------------------------------------------


class Annotation:
    """The words and segments files of a headset, while they are built."""

    def __init__(self, headset: Headset, seconds: float):
        self.headset, self.seconds = headset, seconds
        self.words: list[str] = []
        self.segments: list[str] = []

    def add(
        self, tag: str, times: tuple[float, float] | None, more: str = "", text: str = ""
    ) -> str:
        """Add an element to the words, and return its id."""
        name = f"{self.headset.called('words')}{len(self.words)}"
        timed = f' starttime="{times[0]:.2f}" endtime="{times[1]:.2f}"' if times else ""
        end = f">{text}</{tag}>" if text else "/>"
        self.words.append(f'<{tag} nite:id="{name}"{timed}{more}{end}')
        return name

    def point(self, start: float, end: float, first: str, last: str) -> None:
        """Add a segment that points at words."""
        name = f"{self.headset.meeting}.sync.{len(self.segments) + 1}"
        to = f"#id({first})" + (f"..id({last})" if last != first else "")
        self.segments.append(
            f'<segment nite:id="{name}" channel="{self.headset.channel}"'
            f' transcriber_start="{start:.3f}" transcriber_end="{end:.3f}">\n'
            f'   <nite:child href="{self.headset.called("words")}.xml{to}"/>\n</segment>'
        )

    def segment(self, number: int, clauses: tuple[Clause, ...], times: list) -> None:
        """Add a segment's clauses, spoken at these times."""
        begun = len(self.words)
        if number % 6 == 1:
            self.add("vocalsound", None, ' type="laugh"')
        for place, (clause, (start, end)) in enumerate(zip(clauses, times, strict=True)):
            letters = np.cumsum([0, *map(len, clause.words)])
            bounds = start + (end - start) * letters / letters[-1]
            for index, word in enumerate(clause.words):
                own: tuple[float, float] | None = (bounds[index], bounds[index + 1])
                more = ' trunc="true"' if clause.trunc and index == 0 else ""
                if index == 1 and number % 7 in (3, 5):
                    own, more = None, "" if number % 7 == 3 else ' starttime="" endtime=""'
                written = word.capitalize() if index == 0 and place == 0 else word
                self.add("w", own, more, written)
                if index == 0 and clause.pet:
                    self.add("w", (bounds[1], bounds[1]), ' punc="true"', ",")
            if number % 6 == 4:
                self.add("disfmarker", (end, end))
            # A sentence of several clauses has commas between them.
            within = len(clauses) > 2 and place < len(clauses) - 1
            if len(clause.words) > 1:
                self.add("w", (end, end), ' punc="true"', "," if within else clause.mark)
        begin, stop = max(times[0][0] - 0.1, 0), min(times[-1][1] + 0.15, self.seconds)
        last = len(self.words) - 1
        self.point(begin, stop, *(f"{self.headset.called('words')}{n}" for n in (begun, last)))

    def faults(self) -> None:
        """Add unusable segments."""
        end = self.seconds
        reversed_ = self.add("w", None, "", "Okay")
        self.point(1.5, 1.2, reversed_, reversed_)
        self.segments.append(self.segments[0])
        after = self.add("w", (end + 1, end + 1.4), "", "Okay")
        self.point(end + 1, end + 1.5, after, after)

    def write(self, corpus: Path) -> None:
        for kind, root, lines in (
            ("words", "words", self.words), ("segments", "segs", self.segments),
        ):  # fmt: skip
            body = "".join(f"   {line}\n" for line in "\n".join(lines).split("\n"))
            text = f'{HEAD}<nite:root nite:id="{self.headset.called(root)}" {NAMESPACE}>\n{body}'
            write_text(corpus / self.headset.table(kind), f"{text}</nite:root>\n")


def annotate(headset: Headset, corpus: Path, faulty: bool) -> None:
    """Write the words and segments of a headset, whose audio must exist."""
    path = corpus / headset.audio
    times, seconds = times_of(path)
    if len(times) != sum(map(len, headset.segments)):
        raise UserError("not the audio that was made", path=path, remedy="remove it and run again")
    annotation, left = Annotation(headset, seconds), iter(times)
    for number, clauses in enumerate(headset.segments):
        annotation.segment(number, clauses, [next(left) for _ in clauses])
        if number == 0:
            laugh = annotation.add("vocalsound", (0.01, 0.2), ' type="laugh"')
            annotation.point(0.01, 0.2, laugh, laugh)
    if faulty:
        annotation.faults()
    annotation.write(corpus)


def meetings_of(headsets: list[Headset]) -> Iterator[str]:
    """Yield the lines of meetings.xml."""
    yield HEAD + f'<nite:root nite:id="meetings" {NAMESPACE}>'
    for number, name in enumerate(dict.fromkeys(headset.meeting for headset in headsets)):
        yield f'   <meeting nite:id="meet_{number}" observation="{name}" place="Z\u00fcrich">'
        for place, headset in enumerate(h for h in headsets if h.meeting == name):
            yield (
                f'      <speaker nite:id="{name}_{place + 1}" channel="{headset.channel}"'
                f' nxt_agent="{headset.agent}" global_name="{headset.person}"/>'
            )
        yield "   </meeting>"
    yield "</nite:root>"


# --- the corpus -----------------------------------------------------------------------------------


def write_tables(headsets: list[Headset], corpus: Path, seed: int, most: int) -> None:
    """Write the annotations and the background text."""
    for number, headset in enumerate(headsets):
        annotate(headset, corpus, faulty=number == 0)
    with atomic_write(corpus / "corpusResources" / "meetings.xml", "wb") as file:
        file.write("".join(f"{line}\n" for line in meetings_of(headsets)).encode(ENCODING))
    lines = Background(Random(f"{seed} ami background")).lines(BACKGROUND * most)
    write_text(corpus / "background.txt", "".join(f"{words_of(line)}\n" for line in lines))


def make(corpus: Path, seed: int, most: int, jobs: int) -> None:
    """Make the corpus, or its missing and damaged files."""
    headsets = plan(seed, most)

    def speak(synthesiser: Synthesiser, headset: Headset, path: Path) -> None:
        import soundfile

        wave = wave_of(synthesiser, headset)
        with atomic_path(path) as temporary:
            soundfile.write(str(temporary), wave, RATE, format="WAV", subtype="PCM_16")

    code = [sha256(Path(__file__).with_name(f"{name}.py")) for name in ("sayings", "words")]
    make_corpus(
        corpus,
        recipe_of([f"seed {seed}", f"most {most}", *code], __file__),
        {headset.audio: headset for headset in headsets},
        speak,
        [
            *(headset.table(kind) for headset in headsets for kind in ("words", "segments")),
            "corpusResources/meetings.xml",
            "background.txt",
        ],
        lambda: write_tables(headsets, corpus, seed, most),
        jobs,
    )


if __name__ == "__main__":
    description = "Make a small AMI with espeak-ng."
    run(__file__, description, "ami-mini", max(SENTENCES.values()), "sentences", make)
