#!/usr/bin/env python3
"""Common Voice -> data directories: one client for each accent, and labelled data for the server.

    prepare.py CORPUS OUT --accents au=australia,en=england,in=indian

writes OUT/{train,valid,test}, where the client of an utterance is the name of its accent, and
OUT/{server_train,server_valid,server_test}, by default from speakers of all other accents. No
speaker is in two of the six. The clients' split is that of Decouple-FL (section 4.1): 100 h, 10 h
and 10 h, a third for each accent. An accent that has less gives all it has, in that ratio.

What the releases do differently, read from `validated.tsv`, `clips/` and `clip_durations.tsv`:

1       `path` is a long hash without ".mp3".
2-4     `accent` holds a code (australia, england, indian, us); `path` mostly without ".mp3".
5       another order of columns; `path` with ".mp3" from here on. 5.1 adds `locale`, `segment`.
7-11    `accents` instead of `accent`, and texts instead of codes (Australian English, England
        English, "India and South Asia (India, Pakistan, Sri Lanka)"); a speaker may name several,
        separated by "," (as inside the parentheses), later by "|", and may write a text freely.
12      `accents` is empty in every row.
13-16   as 11. From 14 on there is `clip_durations.tsv`: clip, duration[ms].
17      `sentence_id` comes after `path`, and so moves `sentence`; `sentence_domain`, `variant`.
18-     genders read `male_masculine`, `female_feminine`, and others.
all     quotation marks are ordinary characters; a clip may be missing, empty or damaged; one
        speaker may have been given two accents or two genders.

Text becomes lower-case words by the rules of the row's language (fedtools/files/spoken.py), which
utt2lang names. Rows whose words cannot be known from the text (digits, "&") are dropped, and what
is left out of the others is told by character. The audio stays as it is: wav.scp names the clips.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import corpus
import letters
from corpus import Row, sha256_of

from fedtools.files.datadir import DataDir, check_id, write_table
from fedtools.files.errors import UserError, exit_with_message
from fedtools.files.spoken import is_language
from fedtools.files.units import UTT2LANG

SETS = ("train", "valid", "test")
# Why a row that nobody asked for is left out; every other reason is a fault of the corpus.
NOT_ASKED = ("no accent", "several accents", "accent not asked for", "beyond the hours asked for")


def by_speaker(rows: list[Row], seed: int) -> dict[str, list[Row]]:
    """speaker -> rows, the speakers in a random order that only they and the seed decide."""
    speakers: dict[str, list[Row]] = {}
    for row in rows:
        speakers.setdefault(row.speaker, []).append(row)
    return {
        name: speakers[name] for name in sorted(speakers, key=lambda n: sha256_of(f"{seed} {n}"))
    }


def fill(speakers: dict[str, list[Row]], seconds: float, leave: int) -> list[Row]:
    """Move speakers, whole, out of `speakers` until they come nearest to `seconds`.

    At least one is moved, and at least `leave` stay. Those who give little are asked first, so
    that in a large corpus no speaker makes up more than a tenth of a set: intervals that are
    resampled by speaker would otherwise mean nothing.
    """
    length = {name: sum(row.seconds for row in rows) for name, rows in speakers.items()}
    taken: dict[str, None] = {}
    missing = seconds
    for share in (0.1, 0.3, float("inf")):
        for name in speakers:
            room = len(speakers) - len(taken) > leave and name not in taken
            if room and length[name] <= min(share * seconds, 2 * missing):
                taken[name] = None
                missing -= length[name]
    names = list(taken) or [min(speakers, key=lambda name: length[name])]
    return [row for name in names for row in speakers.pop(name)]


def split(name: str, speakers: dict[str, list[Row]], hours: list[float]) -> list[list[Row]]:
    """Share speakers out to train, valid and test: `hours` each, or all there is in that ratio."""
    if len(speakers) < len(SETS):
        raise UserError(
            f"{name} has usable clips of {len(speakers)} speakers, but train, valid and test need "
            f"one each",
            remedy="choose another accent, or another seed or fraction",
        )
    speakers = dict(speakers)
    there = sum(row.seconds for rows in speakers.values() for row in rows)
    part = min(3600.0, there / sum(hours))
    test = fill(speakers, hours[2] * part, leave=2)
    valid = fill(speakers, hours[1] * part, leave=1)
    if part == 3600.0:
        return [fill(speakers, hours[0] * part, leave=0), valid, test]
    return [[row for rows in speakers.values() for row in rows], valid, test]


def choose(rows: list[Row], options: argparse.Namespace) -> dict[str, list[Row]]:
    """Choose the rows of the six sets."""
    sets: dict[str, list[Row]] = {prefix + name: [] for prefix in ("", "server_") for name in SETS}

    def add(prefix: str, name: str, speakers: dict[str, list[Row]], hours: list[float]) -> None:
        for which, part in zip(SETS, split(name, speakers, hours), strict=True):
            sets[prefix + which] += part

    third = [hours / len(options.accents) for hours in options.hours]
    server_hours = options.server_hours or options.hours
    server_third = [hours / len(options.accents) for hours in server_hours]
    for name in options.accents:
        speakers = by_speaker([row for row in rows if row.name == name], options.seed)
        if options.server_fraction:
            first = list(speakers)[: round(options.server_fraction * len(speakers))]
            theirs = {speaker: speakers.pop(speaker) for speaker in first}
            add("server_", f"the server's part of {name!r}", theirs, server_third)
        add("", f"accent {name!r}", speakers, third)
    if not options.server_fraction:
        others = [row for row in rows if row.name not in options.accents]
        if not others:
            raise UserError(
                "no speaker of another accent is left for the server's labelled data",
                remedy="use --server-fraction 0.4 to give it 40 % of each accent's speakers",
            )
        add("server_", "the server", by_speaker(others, options.seed), server_hours)
    return sets


def choose_readable(
    rows: list[Row], options: argparse.Namespace, clips: Path, dropped: Counter
) -> dict[str, list[Row]]:
    """Choose the six sets, again without those clips that turn out to be no audio.

    Only what is chosen is opened: a release has far more clips than a run asks for.
    """
    opened: set[str] = set()
    while True:
        sets = choose(rows, options)
        chosen = [row for part in sets.values() for row in part if row.clip not in opened]
        damaged = {row.clip for row in chosen if not corpus.seconds_of(clips / row.clip)}
        if not damaged:
            dropped["beyond the hours asked for"] += len(rows) - sum(map(len, sets.values()))
            return sets
        opened |= {row.clip for row in chosen}
        dropped["unreadable clip"] += len(damaged)
        rows = [row for row in rows if row.clip not in damaged]


# --- writing ------------------------------------------------------------------------------------


def data_dir(path: Path, rows: list[Row], clips: Path, clients: bool) -> DataDir:
    """The tables of one set; the id of an utterance is <accent>-<speaker>-<number of the clip>."""
    data = DataDir(path, others={UTT2LANG: {}})
    for row in rows:
        number = re.search(r"_([0-9]{1,20})\.mp3$", row.clip)
        utterance = f"{row.speaker}-{number[1] if number else sha256_of(row.clip)[:16]}"
        if utterance in data.text:
            utterance = f"{row.speaker}-{sha256_of(row.clip)[:16]}"
        check_id(utterance, "utterance")
        data.wav_scp[utterance] = str(clips / row.clip)
        data.text[utterance] = row.sentence
        data.utt2spk[utterance] = row.speaker
        data.utt2dur[utterance] = f"{row.seconds:.3f}"
        data.others[UTT2LANG][utterance] = row.locale
        if clients:
            data.utt2client[utterance] = row.name
    return data


def genders_of(rows: list[Row]) -> dict[str, str]:
    """speaker -> m or f, for the speakers whose rows name one of the two and not both."""
    named: dict[str, set[str]] = {}
    for row in rows:
        if row.gender in ("male", "female"):
            named.setdefault(row.speaker, set()).add(row.gender[0])
    both = sum(len(genders) > 1 for genders in named.values())
    if both:
        print(f"{both} speakers with two genders: left out of spk2gender", file=sys.stderr)
    return {speaker: min(genders) for speaker, genders in named.items() if len(genders) == 1}


def write_sets(out: Path, sets: dict[str, list[Row]], clips: Path) -> None:
    """Write six whole data directories beside their final names, then put them in their places."""
    genders = genders_of([row for rows in sets.values() for row in rows])
    try:
        for name, rows in sets.items():
            new = out / f".{name}.new"
            shutil.rmtree(new, ignore_errors=True)
            data = data_dir(new, rows, clips, clients=not name.startswith("server_"))
            data.write()
            speakers = set(data.utt2spk.values()) & genders.keys()
            if speakers:
                write_table(new / "spk2gender", {speaker: genders[speaker] for speaker in speakers})
        for name in sets:
            shutil.rmtree(out / f".{name}.old", ignore_errors=True)
            with suppress(FileNotFoundError):
                (out / name).rename(out / f".{name}.old")
            (out / f".{name}.new").rename(out / name)
    finally:
        for name in sets:
            shutil.rmtree(out / f".{name}.new", ignore_errors=True)
            shutil.rmtree(out / f".{name}.old", ignore_errors=True)


# --- the command ---------------------------------------------------------------------------------


def three_hours(text: str) -> list[float]:
    """Read train,valid,test in hours."""
    try:
        hours = [float(part) for part in text.split(",")]
    except ValueError:
        hours = []
    if len(hours) != 3 or not all(0 < value < float("inf") for value in hours):
        raise argparse.ArgumentTypeError("three hours above 0 are wanted, as in 100,10,10")
    return hours


def fraction(text: str) -> float:
    """Read a number above 0 and at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError("a number above 0 and at most 1 is wanted, as in 0.4")
    return value


def language_code(text: str) -> str:
    """Read the code of a language."""
    if not is_language(text):
        raise argparse.ArgumentTypeError("the code of a language is wanted, as in de or zh-CN")
    return text


EPILOG = """
ACCENTS is NAME=PATTERN|PATTERN,... in quotation marks.

A pattern is a whole accent as the table has it, in any case. "*" stands for anything. Commas and
bars inside parentheses belong to the accent. A code of the first releases (australia, england,
indian, us, ...) also means the text of the later ones, and the other way round. An accent without
NAME= is named by its code, or else by its letters. Examples:

  --accents australia,england,indian
  --accents 'au=australia,en=england|Estuary English,in=India*'
  --accents 'in=India and South Asia (India, Pakistan, Sri Lanka)'
  --accents 'Child English,Male adult English'      (child_english, male_adult_english)
"""


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """Read the command line; wrong usage exits 2."""
    parser = argparse.ArgumentParser(
        description="Common Voice -> data directories: clients by accent, and the server's data.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("corpus", type=Path, help="the folder of the language, or the one above it")
    add("out", type=Path, help="where train, valid, test and server_* are written")
    add(
        "--accents",
        type=corpus.parse_accents,
        required=True,
        metavar="ACCENTS",
        help="the clients; see below",
    )
    hours = "train, valid and test hours of all clients together (default: 100,10,10)"
    add("--hours", type=three_hours, default=[100.0, 10.0, 10.0], metavar="H,H,H", help=hours)
    hours = "the same of the server's data (default: as --hours)"
    add("--server-hours", type=three_hours, metavar="H,H,H", help=hours)
    server = parser.add_mutually_exclusive_group()
    server.add_argument(
        "--server",
        type=corpus.parse_accents,
        default={},
        metavar="ACCENTS",
        help="accents of the server's data (default: all others)",
    )
    server.add_argument(
        "--server-fraction",
        type=fraction,
        metavar="X",
        help="instead: the server gets this share of the speakers of each client's accent",
    )
    languages = "the language, where neither the table's locale nor the folder's name says it"
    add("--language", type=language_code, metavar="CODE", help=languages)
    add("--seed", type=int, default=0, help="decides who is in which set (default: 0)")
    add(
        "--max-drop",
        type=fraction,
        default=0.5,
        metavar="X",
        help="fail if more than this share of the rows that are asked for is faulty (default: 0.5)",
    )
    options = parser.parse_args(arguments)
    if twice := sorted(options.accents.keys() & options.server.keys()):
        parser.error(f"{twice[0]!r} is in --accents and in --server")
    return options


def report(sets: dict[str, list[Row]], dropped: Counter, options: argparse.Namespace) -> None:
    """Print hours, speakers and utterances of every set and accent, and what was dropped."""
    print(f"{'set':<13} {'accent':<24} {'hours':>8} {'speakers':>8} {'utterances':>10}")
    for name, rows in sets.items():
        accents: dict[str, list[Row]] = {}
        for row in rows:
            accents.setdefault(row.speaker.rpartition("-")[0], []).append(row)
        for accent, part in sorted(accents.items()):
            hours = sum(row.seconds for row in part) / 3600
            speakers = len({row.speaker for row in part})
            print(f"{name:<13} {accent:<24} {hours:>8.3f} {speakers:>8} {len(part):>10}")
    for prefix, asked in (("", options.hours), ("server_", options.server_hours or options.hours)):
        hours = sum(row.seconds for name in SETS for row in sets[prefix + name]) / 3600
        if hours < 0.95 * sum(asked):
            who = "the server has" if prefix else "the clients have"
            ratio = ":".join(f"{value:g}" for value in asked)
            print(f"{who} {hours:.2f} h, not {sum(asked):g} h: all there is, in ratio {ratio}")
    reasons = f" ({told(dropped)})" if dropped.total() else ""
    print(f"kept {sum(map(len, sets.values()))}, dropped {dropped.total()}{reasons}")


def told(dropped: Counter) -> str:
    """Reasons and their counts, the most frequent first."""
    reasons = sorted((-count, reason) for reason, count in dropped.items() if count)
    return ", ".join(f"{reason}: {-count}" for count, reason in reasons)


def prepare(options: argparse.Namespace) -> None:
    """Read the corpus, choose the six sets, write them, and say what was kept and dropped."""
    language = corpus.find_language(options.corpus)
    clips, table = language / "clips", language / "validated.tsv"
    dropped: Counter = Counter()
    left_out: Counter[str] = Counter()
    rows = corpus.read_rows(table, dropped)
    corpus.find_languages(rows, language, options.language)
    speakers = corpus.speaker_names({row.speaker for row in rows})
    others = not options.server and not options.server_fraction
    names = {**options.accents, **options.server}
    rows = corpus.one_accent(rows, names, others, dropped, table)
    rows = corpus.measure(corpus.usable(rows, clips, dropped, left_out), language, dropped)
    for row in rows:
        row.speaker = f"{row.name or corpus.short_name(row.accent)}-{speakers[row.speaker]}"
    sets = choose_readable(rows, options, clips, dropped)
    faults = sum(count for reason, count in dropped.items() if reason not in NOT_ASKED)
    asked = faults + sum(map(len, sets.values())) + dropped["beyond the hours asked for"]
    if faults > options.max_drop * asked:
        raise UserError(
            f"{faults} of {asked} rows are faulty ({told(dropped)})",
            path=language,
            remedy="mend the corpus or raise --max-drop",
        )
    write_sets(options.out, sets, clips)
    letters.report(options.out / "left_out.tsv", left_out)
    report(sets, dropped, options)


def main() -> None:
    """Run the command: 0 done, 1 bad input (one line on stderr), 2 wrong usage."""
    options = parse_options(sys.argv[1:])
    with exit_with_message("prepare.py"):
        prepare(options)


if __name__ == "__main__":
    main()
