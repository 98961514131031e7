"""A reader of AMI: utterances of the headset recordings, from the manual annotations.

Quirks of the corpus (NXT annotations 1.6.1 and 1.6.2), and how they are handled:

channel     `<MEETING>.Headset-<channel>.wav` has its number from corpusResources/meetings.xml. The
            agent letter in the names of annotation files does not determine the channel, and
            EN2001a, EN2001d and EN2001e have five headsets.
times       An utterance lasts from the first to the last time of the elements that its segment
            points at: words, marks, laughter and other sounds, as in NXT and in Kaldi's recipe. If
            no element has a time (some words have none, or empty ones) the transcriber's segment
            times are used. Words without a time are kept and counted.
segments    They are divided at full stops, and further if they are long (see words.py). Left out
            and counted: reversed ones, those past the end of the audio by more than half a second
            (Kaldi's limit; by less, they are cut), duplicates, those that point nowhere.
pointers    `file#id(a)..id(b)`, inclusive, in the order of the file, or `file#id(a)`.
no words    vocalsound, nonvocalsound, disfmarker, gap, transformerror, comment, pause, and
            `punc="true"`. Truncated words, `trunc="true"`, are words. Segments without a word are
            no fault of the corpus and do not count for --max-drop.
stereo      Some recordings have two channels, which data directories and our reader do not support:
            the first channel is copied, which is also Kaldi's default. A mean could cancel speech,
            and would mix in the speaker on the other channel.
audio       A recording that is missing, empty or damaged drops its segments, each of them counted.
gender      The first letter of a participant's name, by the owners' explanation of these names.

Without recordings, words and times come from the annotations alone, and no utterance is outside of
its audio.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nxt import (
    Element,
    Fault,
    Speaker,
    Words,
    hundredths,
    pointed_at,
    read_meetings,
    read_xml,
)
from words import Sentence, Token, sentences

from fedtools.audio.wave import AudioError, describe_recording
from fedtools.core.errors import UserError
from fedtools.data.datadir import MAX_OVERSHOOT, corpus_folder
from fedtools.data.dropped import Dropped

ANNOTATIONS = (".", "annotations", "ami_public_manual_1.6.2", "ami_public_manual_1.6.1")
AUDIO = (".", "amicorpus", "audio", "wav_db")
# The only reason for dropping a segment that is not a fault of the corpus.
NO_WORDS = "no words"


@dataclass(frozen=True, order=True)
class Utterance:
    """One sentence of a person in a meeting.

    `start` and `end` are in hundredths of a second; `audio` is the recording, "" if there is none.
    """

    meeting: str
    start: int
    end: int
    speaker: str
    person: str
    text: str
    audio: str = ""


# --- folders --------------------------------------------------------------------------------------


def find(folder: Path, places: Sequence[str], pattern: str, what: str, option: str) -> Path:
    """Return the first of the places below a folder with files of a pattern, as absolute path."""
    folder = corpus_folder(folder, f"the folder with the {what}")
    for place in places:
        if any((folder / place).glob(pattern)):
            return (folder / place).resolve()
    remedy = f"unpack the {what} there, or name another folder with {option}"
    raise UserError(f"no {pattern}", path=folder, remedy=remedy)


def meetings_there(annotations: Path) -> set[str]:
    """Return the meetings that have segments."""
    return {path.name.split(".")[0] for path in annotations.glob("segments/*.segments.xml")}


# --- audio ----------------------------------------------------------------------------------------


class Headsets:
    """The recordings of the headsets, their lengths and numbers of channels.

    Attributes:
        paths: recording -> its file, of the usable recordings.
        channels: recording -> number of channels of its file.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.paths: dict[str, Path] = {}
        self.channels: dict[str, int] = {}
        self._seconds: dict[str, float | str] = {}

    def seconds(self, meeting: str, channel: int) -> float:
        """Return the length of a recording; raise `Fault` if it is unusable."""
        name = recording_of(meeting, channel)
        if name not in self._seconds:
            path = self.folder / meeting / "audio" / f"{meeting}.Headset-{channel}.wav"
            try:
                self._seconds[name], self.channels[name] = describe_recording(str(path))
                self.paths[name] = path
            except AudioError as error:
                self._seconds[name] = f"audio: {error.reason}"
        length = self._seconds[name]
        if isinstance(length, str):
            raise Fault(length)
        return length

    def within(self, sentence: Sentence, meeting: str, channel: int) -> Sentence:
        """Return the sentence, cut at its recording's end; raise `Fault` if it lies outside."""
        length = self.seconds(meeting, channel)
        end = min(sentence.end, int(100 * length + 1e-6))
        if sentence.start >= end or sentence.end > 100 * (length + MAX_OVERSHOOT):
            raise Fault("outside of its audio")
        return replace(sentence, end=end)


def recording_of(meeting: str, channel: int) -> str:
    """Return the id of a recording, such as ES2011a-H00."""
    return f"{meeting}-H{channel:02}"


# --- annotations ----------------------------------------------------------------------------------


@dataclass
class Reader:
    """A reader of the utterances of meetings.

    Attributes:
        annotations: the folder with words, segments and corpusResources.
        headsets: the recordings; None if there are only annotations.
        most: as of `words.sentences`.
        dropped: counts of dropped segments by reason, added to.
        untimed: number of words without a time; they are kept.
        duplicates: number of words with another word's id; the first word is kept.
        silent: the speakers (<MEETING>.<agent>) of meetings.xml who have no segments file.
    """

    annotations: Path
    headsets: Headsets | None
    most: int
    dropped: Dropped
    untimed: int = 0
    duplicates: int = 0
    silent: list[str] = field(default_factory=list)

    def read(self, wanted: Collection[str]) -> Iterator[Utterance]:
        """Yield the utterances of the wanted meetings that exist, sorted within each meeting."""
        path = self.annotations / "corpusResources" / "meetings.xml"
        meetings = read_meetings(path, wanted)
        for meeting in sorted(meetings_there(self.annotations) & set(wanted)):
            if meeting not in meetings:
                problem = f"the meeting {meeting}, which has segments, is missing"
                raise UserError(problem, path=path, remedy="unpack the annotations again")
            found: dict[tuple[str, int, int], Utterance] = {}
            paths = sorted(self.annotations.glob(f"segments/{meeting}.*.segments.xml"))
            agents = meetings[meeting].keys() - {path.name.split(".")[1] for path in paths}
            self.silent += [f"{meeting}.{agent}" for agent in sorted(agents)]
            for segments in paths:
                self._read_segments(segments, meeting, meetings[meeting], found)
            yield from sorted(found.values())

    def _read_segments(
        self,
        path: Path,
        meeting: str,
        speakers: dict[str, Speaker],
        found: dict[tuple[str, int, int], Utterance],
    ) -> None:
        """Add one speaker's utterances to a meeting's."""
        agent = path.name.split(".")[1]
        words_path = self.annotations / "words" / f"{meeting}.{agent}.words.xml"
        words = Words(words_path) if words_path.is_file() else None
        if words:
            self.untimed += words.untimed
            self.duplicates += words.duplicates
        for segment in read_xml(path).children:
            if segment.tag != "segment":
                continue
            place = f"{path}:{segment.line}: {segment.called}"
            try:
                if agent not in speakers:
                    raise Fault("a speaker without a channel in meetings.xml")
                if words is None:
                    raise Fault("no words file")
                speaker = speakers[agent]
                tokens = pointed_at(segment, words, words_path.name)
                own = spoken(segment, tokens, self.most)
            except Fault as fault:
                self.dropped.fault(str(fault), place)
                continue
            if not own:
                self.dropped[NO_WORDS] += 1
            for sentence in own:
                try:
                    self._add(sentence, meeting, speaker, found)
                except Fault as fault:
                    self.dropped.fault(str(fault), place)

    def _add(
        self,
        sentence: Sentence,
        meeting: str,
        speaker: Speaker,
        found: dict[tuple[str, int, int], Utterance],
    ) -> None:
        if sentence.start >= sentence.end:
            raise Fault("ends before it begins")
        if self.headsets is not None:
            sentence = self.headsets.within(sentence, meeting, speaker.channel)
        recording = recording_of(meeting, speaker.channel)
        name = f"{recording}-{speaker.name}"
        key = name, sentence.start, sentence.end
        if key in found:
            raise Fault("the same times twice")
        audio = recording if self.headsets is not None else ""
        found[key] = Utterance(meeting, *key[1:], name, speaker.name, sentence.text, audio)


def spoken(segment: Element, tokens: Sequence[Token], most: int) -> list[Sentence]:
    """Return the sentences of a segment that points at these tokens.

    Raises:
        Fault: if neither the tokens nor the segment have times, or they are reversed.
    """
    starts = [token.start for token in tokens if token.start is not None]
    ends = [token.end for token in tokens if token.end is not None]
    start: int | None
    end: int | None
    if starts and ends:
        start, end = min(starts), max(ends)
    else:
        start = hundredths(segment, "transcriber_start")
        end = hundredths(segment, "transcriber_end")
    found = sentences(tokens, start or 0, end or 0, most)
    if found and (start is None or end is None):
        raise Fault("no times")
    return found
