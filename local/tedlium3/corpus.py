"""A reader of TED-LIUM 3: utterances from its transcripts, with a check of the audio.

Quirks of the corpus, and how they are handled:

layout      <partition>/{train,dev,test}/{stm/*.stm,sph/*.sph}, where the partition is `legacy` (dev
            and test are those of releases 1 and 2) or `speaker-adaptation` (16 and 16 speakers).
            The training audio is in `data/sph`, to which the partitions link; if a link is missing,
            the audio is taken from there.
lines       <audio> <channel> <speaker> <start> <end> [<label>] <words>. Field 1 names the audio;
            the name of the stm file may differ from it. `;;` begins a comment.
speakers    In training a "speaker" is a talk (AlGore_2006), in the legacy dev and test sets a
            person (Al_Gore, in the audio AlGore_2009). Both are kept: `talk` is the speaker field,
            and `person` the name before `_YEAR`, or a name without a year without its underscores.
            Some persons have several names (`ALIASES`); some names are shared by several persons
            (ChrisAnderson), who cannot be distinguished.
labels      <o,f0,male> and, in older files, <F0_M>; <NA> gives no gender; some lines have no label.
times       Seconds. Segments overlap by some hundredths, and are not always in order. Kaldi's
            recipe truncates to hundredths (8.29 becomes 8.28, as 8.29 * 100 < 829 there); here
            times are rounded.
not scored  Lines of `ignore_time_segment_in_scoring`, mostly of the speaker `inter_segment_gap`.
words       `it 's` is one word, but the quotation mark in `' cause` is not a word, and `'cause` and
            `'em` are words. `<unk>`, `<sil>`, `{NOISE}`, the variant numbers in `the(2)`, and keys
            in parentheses at the end of a line are not words.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

from fedtools.audio.wave import AudioError, recording_seconds
from fedtools.core.errors import UserError
from fedtools.core.text_files import TABLE, read_bytes
from fedtools.data.datadir import MAX_OVERSHOOT, corpus_folder
from fedtools.data.dropped import Dropped

PARTITIONS = ("legacy", "speaker-adaptation")
SETS = ("train", "dev", "test")
AUDIO = (".sph", ".wav", ".flac")
IGNORED = "ignore_time_segment_in_scoring"
# The suffix of a name in `AlGore_2006`, `TomWujec_2009GU`, `MarisaFickJordan_2007G2`.
YEAR = re.compile(r"_((?:19|20)[0-9]{2}[A-Za-z0-9]{0,2})$")
NAME = re.compile(r"[A-Za-z0-9_]{1,80}")
TIME = re.compile(r"[0-9]{1,7}(\.[0-9]{1,9})?", re.ASCII)
# Suffixes that are written apart from their words, and the words `o 'clock` and `y 'all`.
SUFFIXES = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}
SPLIT_WORDS = {("o", "'clock"), ("y", "'all")}
# Other names of a person in the published list of talks: with a talk's title, or spelt differently.
ALIASES = dict(
    pair.split("=")
    for pair in """
    BobThurman=RobertThurman CarolineLavelle_FartherthantheSun=CarolineLavelle
    ChrisAnderson_GreatTEDTalk=ChrisAnderson CornielleEwango=CorneilleEwango EWidder=EdithWidder
    EddiReader_KiteflyersHill=EddiReader GabeBarciaColombo=GabrielBarciaColombo
    GayleLemmon=GayleTzemachLemmon GordonBrown_QA=GordonBrown Halla_Tomasdottir=HallaTomasdottir
    JarrettKrosoczka=JarrettJKrosoczka Jenny8Lee=Jennifer8Lee JohanRockstroem=JohanRockstrom
    JillSobuleandJuliaSweeneySHOW=JillSobuleandJuliaSweeney
    JillSobuleandJuliaSweeney_TheJillandJuliaShow=JillSobuleandJuliaSweeney
    JoshPrager=JoshuaPrager KRamdas=KavitaRamdas LaliteshKattragadda=LaliteshKatragadda
    LarryLessig=LawrenceLessig MandyLenCatron_SFU=MandyLenCatron MarcoTempest_Session4=MarcoTempest
    MarcoTempest_Session7=MarcoTempest MurrayGellMannLANGUAGE=MurrayGellMann
    PeterHirschberg=PeterHirshberg PhilZimbardo=PhilipZimbardo PhilipeStarck=PhilippeStarck
    Rives4AM=Rives RivesINTERNET=Rives RivesMOCKINGBIRD=Rives RivesTTYL=Rives
    Saraswati=SriSwamiDayanandaSaraswati SirMartinRees=MartinRees StevenPetranek=StephenPetranek
    """.split()
)


@dataclass(frozen=True, order=True)
class Utterance:
    """One line of a stm file with words; start and end are in hundredths of a second."""

    audio: str
    start: int
    end: int
    talk: str
    gender: str
    text: str
    path: Path

    @property
    def person(self) -> str:
        return person_of(self.talk)

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 100


class LineError(Exception):
    """An unusable line; its text is the reason, and `file` is another file at fault, if any."""

    def __init__(self, reason: str, file: Path | None = None):
        super().__init__(reason)
        self.file = file


class NotScored(Exception):
    """A line that marks a part of the audio as not transcribed."""


# --- one line -------------------------------------------------------------------------------------


def person_of(talk: str) -> str:
    """Return the person of a talk: AlGore for AlGore_2006, and for Al_Gore, which has no year."""
    name = YEAR.sub("", talk)
    return ALIASES.get(name) or (name if name != talk else name.replace("_", ""))


def event_of(talk: str) -> str:
    """Return a talk's year and the letters after it, which distinguish events, or ""."""
    year = YEAR.search(talk)
    return year[1] if year else ""


def gender_of(label: str) -> str:
    """Return m or f from a label, <o,f0,female> or <F0_F>, or "" if it gives no gender."""
    found = re.fullmatch(r"<(?:.*,)?(male|female)>|<F[0-9]_([MF])>", label, re.IGNORECASE)
    return (found[1] or found[2])[0].lower() if found else ""


def words_of(transcript: str) -> str:
    """Return the words of a transcript, lower case, single-spaced, or "" if there is none."""
    words: list[str] = []
    for token in re.sub(r"\([^() ]*\)", " ", transcript.lower()).split():
        if token == "<unk>":
            words.append(token)  # kept until the end, so that its suffix joins no other word
        elif re.fullmatch(r"<[^<>]*>|\{[^{}]*\}|\[[^][]*\]|'+", token):
            continue
        elif words and (token in SUFFIXES or (words[-1], token) in SPLIT_WORDS):
            words[-1] += token
        elif token not in SUFFIXES:
            words.append(token)
    return " ".join(word for word in words if not word.startswith("<unk>"))


def hundredths(time: str) -> int:
    """Return a time of seconds in hundredths, rounded; raise `LineError` if it is invalid."""
    if not TIME.fullmatch(time):
        raise LineError("malformed line")
    return int((100 * Decimal(time)).to_integral_value(ROUND_HALF_UP))


def parse_line(line: str, audio_of: Path) -> Utterance | None:
    """Read one line of a stm file; return None for a comment or an empty line.

    Args:
        line: the line, without its end.
        audio_of: the folder with the audio.

    Raises:
        LineError: with the reason, if the line is unusable.
        NotScored: if the line is deliberately without transcript.
    """
    fields = line.split()
    if not fields or fields[0].startswith(";;"):
        return None
    if len(fields) < 6:
        raise LineError("malformed line" if len(fields) < 5 else "no words")
    audio, _, talk, start, end, *words = fields
    times = hundredths(start), hundredths(end)
    if IGNORED in (word.lower() for word in words) or talk == "inter_segment_gap":
        raise NotScored
    label = words[0] if re.fullmatch("<.*>", words[0]) else ""
    if label.lower() in ("<unk>", "<sil>"):
        label = ""
    text = words_of(" ".join(words[1:] if label else words))
    if not (NAME.fullmatch(audio) and NAME.fullmatch(talk) and person_of(talk)):
        raise LineError("name with characters other than letters, digits and _")
    if not text.isprintable():
        raise LineError("unprintable characters")
    if not text:
        raise LineError("no words")
    if times[0] >= times[1]:
        raise LineError("ends before it begins")
    return Utterance(audio, *times, talk, gender_of(label), text, audio_of / f"{audio}.sph")


# --- files ----------------------------------------------------------------------------------------


def find_partition(corpus: Path, partition: str) -> Path:
    """Return the absolute path of a partition's folder, which has train, dev and test."""
    corpus = corpus_folder(corpus, "the unpacked TEDLIUM_release-3")
    for part in SETS:
        folder = corpus / partition / part / "stm"
        if not any(folder.glob("*.stm")):
            there = [name for name in PARTITIONS if (corpus / name / "train" / "stm").is_dir()]
            remedy = f"--partition {' or '.join(there)}" if there else _remedy(corpus)
            raise UserError("no *.stm", path=folder, remedy=remedy)
    return corpus / partition


def _remedy(corpus: Path) -> str:
    """Return what to do about a folder that has no partition."""
    if inner := sorted(corpus.glob("*/*/train/stm")):
        return f"name {inner[0].parents[2]}"
    if (corpus / "train" / "stm").is_dir():
        if corpus.name in PARTITIONS:
            return f"name the folder above, {corpus.parent}"
        link = f"mkdir DIR && ln -s {shlex.quote(str(corpus))} DIR/{PARTITIONS[0]}"
        return f"releases 1 and 2 have one partition: {link}, and name DIR"
    if inner := sorted(corpus.glob("*/train/stm")):
        return f"releases 1 and 2 have one partition: name {inner[0].parents[1]} for how to use it"
    if archives := sorted([*corpus.glob("*/*.tar.gz"), *corpus.glob("*.tar.gz")]):
        return f"unpack the archives, such as {archives[0].name}"
    return "unpack the corpus again"


def read_set(folder: Path, dropped: Dropped) -> list[Utterance]:
    """Read the utterances of one set, sorted by audio and time, each within its audio.

    Args:
        folder: the set's folder, with stm and sph.
        dropped: counts of dropped lines by reason, added to.
    """
    found: dict[tuple[str, int, int], Utterance] = {}
    lengths: dict[str, float | str] = {}
    for path in sorted((folder / "stm").glob("*.stm")):
        for number, raw in enumerate(read_bytes(path, TABLE).split(b"\n"), 1):
            try:
                utterance = parse_line(raw.decode("utf-8-sig"), folder / "sph")
                if utterance is None:
                    continue
                utterance = within_audio(utterance, folder, lengths)
                key = utterance.audio, utterance.start, utterance.end
                if key in found:
                    raise LineError("the same segment twice")
                found[key] = utterance
            except NotScored:
                dropped["not scored"] += 1
            except (LineError, UnicodeDecodeError) as error:
                reason = str(error) if isinstance(error, LineError) else "not UTF-8"
                file = getattr(error, "file", None)
                dropped.fault(reason, f"{path}:{number}" + (f": {file}" if file else ""))
    return sorted(found.values())


def within_audio(utterance: Utterance, folder: Path, lengths: dict[str, float | str]) -> Utterance:
    """Return the utterance with its audio's path, cut at the end of the audio.

    `lengths` caches the seconds of each audio, or why it cannot be read.

    Raises:
        LineError: if the audio cannot be read, or the segment is not within it.
    """
    path = _audio(utterance.path, folder.parents[1] / "data" / "sph")
    if utterance.audio not in lengths:
        try:
            lengths[utterance.audio] = recording_seconds(str(path))
        except AudioError as error:
            lengths[utterance.audio] = f"audio: {error.reason}"
    length = lengths[utterance.audio]
    if isinstance(length, str):
        raise LineError(length, path)
    end = min(utterance.end, int(100 * length + 1e-6))
    if utterance.start >= end or utterance.end > 100 * (length + MAX_OVERSHOOT):
        raise LineError("outside of its audio")
    return replace(utterance, end=end, path=path)


def _audio(path: Path, data: Path) -> Path:
    """Return where an audio is: at its path or in `data`, as SPHERE or converted to WAV or FLAC."""
    places = [folder / path.name for folder in (path.parent, data)]
    names = [place.with_suffix(suffix) for suffix in AUDIO for place in places]
    return next((name for name in names if name.is_file()), places[0])
