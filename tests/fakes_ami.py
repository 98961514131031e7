"""AMI in miniature: NXT annotations and headset recordings, with the faults of the real ones."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fakes import tiny_wav

HEAD = '<?xml version="1.0" encoding="ISO-8859-1" standalone="yes"?>\n'
NITE = 'xmlns:nite="http://nite.sourceforge.net/"'


@dataclass(frozen=True)
class AmiSpeaker:
    """A speaker's words and segments in a meeting, and the headset recording.

    `words` are elements without their ids, which are words0, words1, ... in order; `segments` are
    whole elements. `channel` is written to meetings.xml unchanged; "" omits it. `audio` is "good",
    "missing", "empty", "damaged" or "stereo" (a different tone on the second channel).
    """

    agent: str
    channel: str
    name: str
    words: tuple[str, ...]
    segments: tuple[str, ...]
    audio: str = "good"


def word(text: str, start: object = None, end: object = None, more: str = "") -> str:
    """Return a `w` element; None omits a time, "" leaves it empty."""
    times = "" if start is None else f' starttime="{start}" endtime="{end}"'
    return f"<w{times}{more}>{text}</w>"


def mark(text: str, time: object = None) -> str:
    """Return a punctuation mark."""
    return word(text, time, time, ' punc="true"')


def sound(tag: str, start: object = None, end: object = None) -> str:
    """Return a vocalsound, disfmarker, gap, ..."""
    return word("", start, end).replace("<w", f"<{tag}").replace("></w>", "/>")


def segment(
    who: str, first: int, last: int | None = None, start: object = 0, end: object = 0, **other: str
) -> str:
    """Return a segment that points to a range of words, or to one; href may be given instead."""
    name = f"{who}.words"
    to = f"#id({name}{first})" + ("" if last is None else f"..id({name}{last})")
    href = other.get("href", f"{name}.xml{to}")
    return (
        f'<segment nite:id="{who}.sync.{other.get("id", first)}" channel="0"'
        f' transcriber_start="{start}" transcriber_end="{end}">'
        f'<nite:child href="{href}"/></segment>'
    )


def plain(
    meeting: str, agent: str, channel: int, name: str, said: Iterable[tuple[float, float, str]],
    audio: str = "good",
) -> AmiSpeaker:  # fmt: skip
    """Return a faultless speaker: (start, end, words) is a segment that ends in a full stop."""
    words: list[str] = []
    segments: list[str] = []
    for start, end, text in said:
        begun, own = len(words), text.split()
        step = (end - start) / len(own)
        for place, each in enumerate(own):
            words.append(word(each, f"{start + place * step:.3f}",
                              f"{start + (place + 1) * step:.3f}"))  # fmt: skip
        words.append(mark(".", f"{end:.3f}"))
        segments.append(segment(f"{meeting}.{agent}", begun, len(words) - 1, start, end))
    return AmiSpeaker(agent, str(channel), name, tuple(words), tuple(segments), audio)


def some_meetings() -> dict[str, list[AmiSpeaker]]:
    """Return four speakers with one meeting per set; agents and channels differ in order."""
    meetings = {}
    for number, meeting in enumerate(("ES2002a", "IS1008b", "TS3003c")):
        meetings[meeting] = [
            plain(
                meeting, agent, (3 - place + number) % 4, f"{'FM'[place % 2]}EE{number}{place}0",
                [(1.0 + place + 4 * turn, 1.9 + place + 4 * turn, f"so says {agent} now")
                 for turn in range(4)],
            )
            for place, agent in enumerate("ABCD")
        ]  # fmt: skip
    return meetings


@cache
def headset_wav(channel: int, seconds: float, audio: str) -> bytes:
    """Write a tone for each channel, or a faulty file."""
    if audio in ("empty", "damaged"):
        return tiny_wav("", 0.1, audio)
    if audio == "good":
        return tiny_wav(f"headset {channel}", seconds)
    import numpy as np
    import soundfile

    first, second = (
        soundfile.read(io.BytesIO(tiny_wav(f"headset {n}", seconds)), dtype="int16")[0]
        for n in (channel, channel + 50)
    )
    file = io.BytesIO()
    soundfile.write(file, np.stack([first, second], axis=1), 16000, format="WAV", subtype="PCM_16")
    return file.getvalue()


def ami(
    folder: Path, meetings: dict[str, list[AmiSpeaker]], seconds: float = 20.0,
    annotations: str = "", audio: str = "",
) -> Path:  # fmt: skip
    """Write meetings in the layout of AMI; return the corpus directory, `folder`/ami.

    Args:
        folder: the corpus is made in it.
        meetings: meeting -> its speakers.
        seconds: the length of every recording.
        annotations: where within the corpus words, segments and corpusResources are.
        audio: where within the corpus the meetings' recordings are.
    """
    corpus = folder / "ami"
    where = corpus / annotations
    listed = []
    for meeting, speakers in meetings.items():
        lines = []
        for number, speaker in enumerate(speakers):
            channel = f' channel="{speaker.channel}"' if speaker.channel else ""
            lines.append(
                f'<speaker nite:id="{meeting}_{number}"{channel} nxt_agent="{speaker.agent}"'
                f' global_name="{speaker.name}" role="PM"/>\n'
            )
            who = f"{meeting}.{speaker.agent}"
            words = [
                re.sub("^<([a-z]+)", rf'<\1 nite:id="{who}.words{place}"', element)
                for place, element in enumerate(speaker.words)
            ]
            for kind, own in (("words", words), ("segments", speaker.segments)):
                path = where / kind / f"{who}.{kind}.xml"
                path.parent.mkdir(parents=True, exist_ok=True)
                body = "".join(f"{element}\n" for element in own)
                text = f'{HEAD}<nite:root nite:id="{who}.{kind}" {NITE}>\n{body}</nite:root>\n'
                path.write_bytes(text.encode("iso-8859-1"))
            if speaker.audio != "missing" and speaker.channel.isdigit():
                wav = (
                    corpus / audio / meeting / "audio" / f"{meeting}.Headset-{speaker.channel}.wav"
                )
                wav.parent.mkdir(parents=True, exist_ok=True)
                wav.write_bytes(headset_wav(int(speaker.channel), seconds, speaker.audio))
        listed.append(f'<meeting nite:id="m{len(listed)}" observation="{meeting}"'
                      f' room="Z\u00fcrich">\n{"".join(lines)}</meeting>\n')  # fmt: skip
    resources = where / "corpusResources"
    resources.mkdir(parents=True, exist_ok=True)
    text = f'{HEAD}<nite:root nite:id="meetings" {NITE}>\n{"".join(listed)}</nite:root>\n'
    (resources / "meetings.xml").write_bytes(text.encode("iso-8859-1"))
    return corpus


# --- one speaker with nearly every trap; the recording has 100 seconds ----------------------------

_WHO = "ES2004b.C"
AMI_WORDS = (
    word("Hello", "1.00", "1.40"), mark(",", "1.40"), word("world", "1.40", "1.90"),
    mark(".", "1.90"),
    # 4
    sound("vocalsound", "3.00", "3.50"), word("Okay", "3.50", "3.804"),
    sound("disfmarker", "3.9", "3.9"), word("th", "4.00", "4.1049", ' trunc="true"'),
    word("that's", "4.2", "4.455"),
    # 9: no times, and empty ones
    word("No"), word("way", "", ""),
    # 11: two sentences, and a laugh after them
    word("One", "7.0", "7.2"), word("two"), mark(".", "7.6"), word("Three", "7.7", "8.0"),
    mark("?", "8.0"), sound("vocalsound", "8.0", "9.0"),
    # 17: spelling
    word("T_V_s", "10", "10.5"), word("infra-red", "10.5", "11"), word("Mm-hmm", "11", "11.2"),
    word("um,I", "11.2", "11.4"), word("'", "11.4", "11.5"), word("@", "11.5", "11.6"),
    word("caf\u00e9 &amp; bar", "12", "12.5"),
    # 24: a single word; then only sounds
    word("Yeah", "13", "13.5"), sound("vocalsound", "14", "15"), sound("gap"),
    sound("transformerror", "15", "15"),
    # 28: two pointers around a word without one
    word("Two", "16", "16.3"), word("not", "16.3", "16.5"), word("parts", "16.5", "17"),
    # 31: a little beyond the end of the audio
    word("ends", "99.9", "100.4"),
    # 32: a full stop without a time does not split
    word("a", "20", "20.2"), mark("."), word("b", "20.4", "20.6"),
    # 35: faults follow
    word("back"), word("far", "100.2", "101.0"), word("later", "100.1", "100.3"), word("lost"),
    # 39: invalid times
    word("times", "nan", "-1"), word("odd", "1e3", "\u00b2"),
    # 41: words that overlap and are not in order of time
    word("what", "60.5", "61.0"), word("ever", "60.0", "60.6"),
)  # fmt: skip
_TWO = segment(_WHO, 28, 28).replace(
    "</segment>", f'<nite:child href="{_WHO}.words.xml#id({_WHO}.words30)"/></segment>'
)
# Each segment, and the (hundredths, hundredths, words) expected of it.
AMI_TRAPS: tuple[tuple[str, tuple[tuple[int, int, str], ...]], ...] = (
    (segment(_WHO, 0, 3, "0.9", "2.2"), ((100, 190, "HELLO WORLD"),)),
    (segment(_WHO, 4, 8, "2.9", "4.6"), ((300, 446, "OKAY TH THAT'S"),)),
    (segment(_WHO, 9, 10, "5.004", "6.005"), ((500, 601, "NO WAY"),)),
    (segment(_WHO, 11, 16, "7", "9"), ((700, 760, "ONE TWO"), (760, 800, "THREE"))),
    (segment(_WHO, 17, 23, "10", "13"),
     ((1000, 1250, "T. V. S INFRA RED MM-HMM UM I CAF\u00c9 BAR"),)),
    (segment(_WHO, 24, None, "13", "13.5"), ((1300, 1350, "YEAH"),)),
    (segment(_WHO, 25, 27, "14", "15"), ()),
    (f'<segment nite:id="{_WHO}.sync.none" transcriber_start="1" transcriber_end="2"/>', ()),
    (_TWO, ((1600, 1700, "TWO PARTS"),)),
    (segment(_WHO, 31, 31, "99", "100"), ((9990, 10000, "ENDS"),)),
    (segment(_WHO, 32, 34, "20", "21"), ((2000, 2060, "A B"),)),
    (segment(_WHO, 39, 40, "50", "51"), ((5000, 5100, "TIMES ODD"),)),
    (segment(_WHO, 41, 42, "60.2", "60.8"), ((6000, 6100, "WHAT EVER"),)),
    # Faults follow.
    (segment(_WHO, 35, 35, "30", "29", id="reversed"), ()),
    (segment(_WHO, 0, 3, "0.9", "2.2", id="twice"), ()),
    (segment(_WHO, 36, 36, "100", "101", id="far"), ()),
    (segment(_WHO, 37, 37, "100", "101"), ()),
    (segment(_WHO, 38, 38, "", "", id="lost"), ()),
    (segment(_WHO, 3, 0, "1", "2", id="backwards"), ()),
    (segment(_WHO, 0, 99, "1", "2", id="nowhere"), ()),
    (segment(_WHO, 0, href=f"{_WHO}.words.xml#xpointer(1)", id="malformed"), ()),
    (segment(_WHO, 0, href="ES2004b.A.words.xml#id(ES2004b.A.words0)", id="others"), ()),
)  # fmt: skip


def trap_speaker(channel: str = "2") -> AmiSpeaker:
    """Return the speaker of AMI_TRAPS."""
    return AmiSpeaker("C", channel, "MTD012ME", AMI_WORDS, tuple(xml for xml, _ in AMI_TRAPS))
