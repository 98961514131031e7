"""Corpora in miniature, in their owners' layouts, with the faults that the real ones have."""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from mp3s import TINY_SECONDS, silent_mp3, tiny_mp3

# --- Common Voice --------------------------------------------------------------------------------

_OLD = "client_id path sentence up_votes down_votes age gender accent"
_NEW = (
    "client_id path sentence_id sentence sentence_domain up_votes down_votes age gender accents "
    "variant locale segment"
)
COMMON_VOICE_COLUMNS = {
    1: _OLD,
    5: "up_votes down_votes age gender accent client_id path sentence",
    8: "client_id path sentence up_votes down_votes age gender accents locale segment",
    12: "client_id path sentence up_votes down_votes age gender accents locale segment",
    17: _NEW,
    22: _NEW,
}
COMMON_VOICE_TEXTS = {
    "australia": "Australian English",
    "england": "England English",
    "indian": "India and South Asia (India, Pakistan, Sri Lanka)",
    "us": "United States English",
    "scotland": "Scottish English",
}


@dataclass(frozen=True)
class Clip:
    """One row of validated.tsv and its clip.

    `accent` is a code, written as text in the releases that have texts; anything else is
    written as it is. `audio` is "good", "missing", "empty" (zero bytes) or "damaged" (no MP3).
    `path` replaces the release's own file name in the table.
    """

    speaker: str
    number: int
    sentence: str = "A cat sat on the mat."
    accent: str = "us"
    gender: str = "male"
    audio: str = "good"
    path: str | None = None
    seconds: float | None = None
    locale: str = ""


def speaker_id(name: str) -> str:
    """Return a client_id in Common Voice's form: 128 hexadecimal digits."""
    return hashlib.sha512(name.encode()).hexdigest()


def some_clips(
    speakers: int = 4, each: int = 2, accents: Iterable[str] | None = None
) -> list[Clip]:
    """Return a faultless corpus: `speakers` speakers of each accent, with `each` clips.

    They are men, women and, every third, speakers of unreported gender. Sentences are distinct.
    """
    clips: list[Clip] = []
    for accent in accents or ("australia", "england", "indian", "us"):
        for speaker in range(speakers):
            who = Clip(speaker_id(f"{accent} {speaker}"), 0, accent=accent)
            who = replace(who, gender=("male", "female", "")[speaker % 3])
            for utterance in range(each):
                letters = "abcdefghijkl"
                name = letters[speaker % 12] + (letters[speaker // 12] if speaker >= 12 else "")
                sentence = f"{accent} {name} said {'so ' * (utterance + 1)}."
                clips.append(replace(who, number=1000 + len(clips), sentence=sentence))
    return clips


def common_voice(
    folder: Path,
    clips: Iterable[Clip],
    release: int = 17,
    durations: bool | None = None,
    name: str = "en",
) -> Path:
    """Write clips in the layout of a Common Voice release; return the language's directory.

    Args:
        folder: the corpus is made in it as cv-corpus-<release>.0/<name>.
        clips: its rows, in the order of the table.
        release: a key of COMMON_VOICE_COLUMNS.
        durations: whether to write clip_durations.tsv; by default as in the release.
        name: the folder of the language.
    """
    language = folder / f"cv-corpus-{release}.0" / name
    (language / "clips").mkdir(parents=True)
    columns = COMMON_VOICE_COLUMNS[release].split()
    lines, lengths = ["\t".join(columns)], ["clip\tduration[ms]"]
    for clip in clips:
        stem = f"common_voice_en_{clip.number}"
        if release == 1:
            stem = hashlib.sha512(stem.encode()).hexdigest()
        good = tiny_mp3() if clip.seconds is None else silent_mp3(clip.seconds)
        content = {"good": good, "empty": b"", "damaged": b"not an MP3 " * 50}.get(clip.audio)
        if content is not None:
            (language / "clips" / f"{stem}.mp3").write_bytes(content)
        if clip.audio != "missing":
            lengths.append(f"{stem}.mp3\t{round(1000 * (clip.seconds or TINY_SECONDS))}")
        cells = dict.fromkeys(columns, "")
        accent = COMMON_VOICE_TEXTS.get(clip.accent, clip.accent) if release > 6 else clip.accent
        gender = {"male": "male_masculine", "female": "female_feminine"}.get(clip.gender)
        cells |= {
            "client_id": clip.speaker,
            "path": clip.path or (stem if release == 1 else f"{stem}.mp3"),
            "sentence": clip.sentence,
            "gender": gender or clip.gender if release > 17 else clip.gender,
            "accents" if "accents" in columns else "accent": "" if release == 12 else accent,
            "up_votes": "2",
        }
        cells |= {"locale": clip.locale} if "locale" in columns else {}
        lines.append("\t".join(cells[column] for column in columns))
    (language / "validated.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if durations or (durations is None and release >= 17):
        (language / "clip_durations.tsv").write_text("\n".join(lengths) + "\n")
    return language


# --- Speech Commands ------------------------------------------------------------------------------


def google_set(speaker: str) -> str:
    """Return a speaker's set by Google's own rule, of its training code and README."""
    digest = int(hashlib.sha1(speaker.encode()).hexdigest(), 16)
    percent = digest % (2**27) * (100.0 / (2**27 - 1))
    return "valid" if percent < 10 else "test" if percent < 20 else "train"


KEYWORDS = "yes no up down left right on off stop go".split()
# Version 1 has the first twenty of these in addition to the ten keywords, version 2 has all.
OTHER_WORDS = (
    "zero one two three four five six seven eight nine bed bird cat dog happy house marvin sheila "
    "tree wow backward forward follow learn visual"
).split()


@dataclass(frozen=True)
class Word:
    """One clip of Speech Commands, and the list that it is on: "valid", "test", or "train" (none).

    `audio` is "good", "empty" (zero bytes), "damaged" (no WAV), "cut" (its end is lost), "silent"
    (a header without samples), "stereo" or "missing". `file` replaces the clip's name.
    """

    speaker: str
    word: str
    number: int = 0
    part: str = "train"
    audio: str = "good"
    seconds: float = 0.3
    file: str = ""

    @property
    def path(self) -> str:
        return f"{self.word}/{self.file or f'{self.speaker}_nohash_{self.number}.wav'}"


def hex_id(name: str) -> str:
    """Return a speaker ID in Speech Commands' form: eight hexadecimal digits."""
    return hashlib.sha256(name.encode()).hexdigest()[:8]


@cache
def tiny_wav(word: str, seconds: float = 0.3, audio: str = "good") -> bytes:
    """Write a tone at 16 kHz, different for each word, or a faulty file."""
    import numpy as np
    import soundfile

    if audio in ("empty", "damaged"):
        return b"" if audio == "empty" else b"not a WAV " * 50
    frequency = 200 + zlib.crc32(word.encode()) % 3000
    samples = 0 if audio == "silent" else round(16000 * seconds)
    tone = 0.3 * np.sin(2 * np.pi * frequency * np.arange(samples) / 16000)
    file = io.BytesIO()
    channels = np.stack([tone, tone], axis=1) if audio == "stereo" else tone
    soundfile.write(file, channels, 16000, format="WAV", subtype="PCM_16")
    content = file.getvalue()
    return content[: len(content) // 2] if audio == "cut" else content


def some_words(
    train: int = 5, valid: int = 2, test: int = 2, words: Sequence[str] | None = None
) -> list[Word]:
    """Return a faultless corpus: speakers per set, each with every word once."""
    counts = {"train": train, "valid": valid, "test": test}
    return [
        Word(hex_id(f"{part} {number}"), word, part=part)
        for part, count in counts.items()
        for number in range(count)
        for word in words or [*KEYWORDS, *OTHER_WORDS[:4]]
    ]


def speech_commands(
    folder: Path, clips: Iterable[Word], noise: Iterable[float] = (5.0, 2.0)
) -> Path:
    """Write clips in the layout of Speech Commands; return the corpus directory.

    Args:
        folder: the corpus is made in it as speech_commands.
        clips: its clips; those of valid and test come on the lists, in this order.
        noise: the seconds of the noise recordings.
    """
    corpus = folder / "speech_commands"
    lists: dict[str, list[str]] = {"valid": [], "test": []}
    for clip in clips:
        path = corpus / clip.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if clip.audio != "missing":
            path.write_bytes(tiny_wav(clip.word, clip.seconds, clip.audio))
        if clip.part in lists:
            lists[clip.part].append(f"{clip.path}\n")
    (corpus / "validation_list.txt").write_text("".join(lists["valid"]))
    (corpus / "testing_list.txt").write_text("".join(lists["test"]))
    (corpus / "_background_noise_").mkdir(parents=True, exist_ok=True)
    (corpus / "_background_noise_" / "README.md").write_text("Noise.\n")
    for number, seconds in enumerate(noise):
        recording = corpus / "_background_noise_" / f"noise_{number}.wav"
        recording.write_bytes(tiny_wav("noise", seconds))
    (corpus / "README.md").write_text("Speech Commands.\n")
    return corpus


def speech_commands_test_set(folder: Path, clips: Iterable[Word]) -> Path:
    """Write the separate test archive: keywords of the test list, silence and unknown words."""
    archive = folder / "speech_commands_test_set"
    clips = [clip for clip in clips if clip.part == "test" and clip.word in KEYWORDS]
    speaker = clips[0].speaker
    clips += [Word("", "_silence_", file=f"noise_{number}.wav") for number in range(3)]
    clips += [
        Word("", "_unknown_", file=f"{word}_{speaker}_nohash_1.wav") for word in ("bed", "cat")
    ]
    clips.append(Word(hex_id("unknown"), "_unknown_"))
    for clip in clips:
        path = archive / clip.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tiny_wav(clip.word, clip.seconds, clip.audio))
    return archive


# --- TED-LIUM 3 -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TedTalk:
    """One talk: its stm file and its audio, which has a tone for every second.

    `lines` are (start, end, words) in seconds, or whole lines of the stm file; `audio` is "good",
    "missing", "empty" or "damaged". `label` may be empty; `speaker` and `stm` replace the
    talk's name in field 3 and in the name of the stm file.
    """

    name: str
    part: str
    lines: tuple[tuple[float, float, str] | str, ...]
    seconds: float
    label: str = "<o,f0,male>"
    speaker: str = ""
    stm: str = ""
    audio: str = "good"


def ted_talk(name: str, part: str = "train", sentences: int = 8, each: float = 2.0, **other):
    """Return a faultless talk: `sentences` sentences of `each` seconds, half a second apart."""
    step = each + 0.5
    words = f"{name.partition('_')[0].lower()} said so"
    lines = tuple(
        (0.5 + step * number, 0.5 + step * number + each, f"{words} {'and so ' * number}".strip())
        for number in range(sentences)
    )
    return TedTalk(name, part, lines, 1.0 + step * sentences, **other)


def some_talks(train: int = 12, held_out: int = 2) -> list[TedTalk]:
    """Return talks of speakers, every third of whom has two; dev and test are of equal size.

    The labels of every third speaker with one talk do not report the sex.
    """
    talks = []
    for number in range(train):
        gender = ("male", "female")[number % 2]
        years = ("2005", "2009G") if number % 3 == 0 else ("2007",)
        name = f"Person{number:03}"
        label = "<NA>" if number % 3 == 2 else f"<o,f0,{gender}>"
        talks += [ted_talk(f"{name}_{year}", label=label) for year in years]
    for part in ("dev", "test"):
        for number in range(held_out):
            name = f"{part.title()}{number}"
            other = {"speaker": f"{part.title()}_{number}", "label": "<F0_F>"}
            talks.append(ted_talk(f"{name}_2010", part, 12, 1.0, **other))
    return talks


@cache
def sphere(seconds: float) -> bytes:
    """Return NIST SPHERE bytes: a tone at 16 kHz, 16 bits."""
    import numpy as np
    import soundfile

    tone = 0.3 * np.sin(2 * np.pi * 300 * np.arange(round(16000 * seconds)) / 16000)
    file = io.BytesIO()
    soundfile.write(file, tone, 16000, format="NIST", subtype="PCM_16")
    return file.getvalue()


def tedlium(
    folder: Path, talks: Iterable[TedTalk], partition: str = "legacy", linked: bool = False
) -> Path:
    """Write talks in the layout of TED-LIUM 3; return the corpus directory.

    Args:
        folder: the corpus is made in it as TEDLIUM_release-3.
        talks: its talks.
        partition: legacy or speaker-adaptation.
        linked: the audio is in data/sph, to which the partition has links.
    """
    corpus = folder / "TEDLIUM_release-3"
    for talk in talks:
        home = corpus / partition / talk.part
        (home / "stm").mkdir(parents=True, exist_ok=True)
        (home / "sph").mkdir(parents=True, exist_ok=True)
        lines = []
        for line in talk.lines:
            if not isinstance(line, str):
                start, end, words = line
                fields = [talk.name, "1", talk.speaker or talk.name, f"{start:.2f}", f"{end:.2f}"]
                line = " ".join(field for field in (*fields, talk.label, words) if field)
            lines.append(f"{line}\n")
        stm = home / "stm" / f"{talk.stm or talk.name}.stm"
        stm.write_bytes("".join(lines).encode("utf-8", "surrogateescape"))
        content = {"good": sphere(talk.seconds), "empty": b"", "damaged": b"not audio " * 500}
        if talk.audio == "missing":
            continue
        sph = home / "sph" / f"{talk.name}.sph"
        real = corpus / "data" / "sph" / sph.name if linked else sph
        real.parent.mkdir(parents=True, exist_ok=True)
        real.write_bytes(content[talk.audio])
        if linked:
            sph.symlink_to(Path("../../../data/sph") / sph.name)
    return corpus


# A talk with nearly every trap: each line, and the words and hundredths expected of it, if any.
TED_TRAPS: tuple[tuple[str, tuple[int, int, str] | None], ...] = (
    (";; LABEL \"o\" \"Overall\" \"Overall results\"", None),
    ("", None),
    ("Trap_2001 1 inter_segment_gap 0 1.0 <o,,unknown> ignore_time_segment_in_scoring", None),
    ("Trap_2001 1 Trap_2001 1.0 1.5 <o,f0,male> IGNORE_TIME_SEGMENT_IN_SCORING", None),
    ("Trap_2001 1 Trap_2001 2.00 3.00 <F0_M> and it 's plain", (200, 300, "and it's plain")),
    # 8.29 * 100 is 828.99..., and truncated hundredths would be 828.
    ("Trap_2001 1 Trap_2001 8.29 9.115 <NA> we don 't care", (829, 912, "we don't care")),
    ("Trap_2001 1 Trap_2001 4.0049 5 that ' cause us 'cause", (400, 500, "that cause us 'cause")),
    ("Trap_2001 A Trap_2001 4.96 6 <o,f0,male> overlaps", (496, 600, "overlaps")),
    ("Trap_2001 1 Trap_2001 10 11 <o,f0,male> the(2) <sil> cat(3) {NOISE} sat [NOISE]",
     (1000, 1100, "the cat sat")),
    ("Trap_2001 1 Trap_2001 11 12 <unk> 's house is <unk> {UH} big (Trap_2001-11-12-F0_M)",
     (1100, 1200, "house is big")),
    ("Trap_2001 1 Trap_2001 12 13 <NA> <unk> because O 'CLOCK y 'all rock 'n roll",
     (1200, 1300, "because o'clock y'all rock 'n roll")),
    ("Trap_2001\t1  Trap_2001 13 14 <o,f0,male>   tabs \t and blanks \r",
     (1300, 1400, "tabs and blanks")),
    ("Trap_2001 1 Trap_2001 14 15.30 <o,f0,male> ends after the audio",
     (1400, 1500, "ends after the audio")),
    # Faulty lines follow.
    ("Trap_2001 1 Trap_2001 2.00 3.00 <o,f0,male> the same time", None),
    ("Trap_2001 1 Trap_2001 6 6.001 <o,f0,male> no length", None),
    ("Trap_2001 1 Trap_2001 7 6.5 <o,f0,male> backwards", None),
    ("Trap_2001 1 Trap_2001 7 8 <o,f0,male> <sil> {NOISE} (2)", None),
    ("Trap_2001 1 Trap_2001 7 8 <o,f0,male>", None),
    ("Trap_2001 1 Trap_2001 nan 8 <o,f0,male> no time", None),
    ("Trap_2001 1 Trap_2001 7", None),
    ("Trap_2001 1 Trap_2001 14 16 <o,f0,male> far after the audio", None),
    ("Trap_2001 1 Trap_2001 15 15.2 <o,f0,male> begins after the audio", None),
    ("Trap_2001 1 ../Trap 7 8 <o,f0,male> a path", None),
    ("Gone_2001 1 Gone_2001 7 8 <o,f0,male> no audio", None),
    ("Trap_2001 1 Trap_2001 7 8 <o,f0,male> not \udcff utf", None),
)  # fmt: skip
