#!/usr/bin/env python3
"""Make data directories of Common Voice: a client for each accent, and the server's labelled data.

    prepare.py CORPUS OUT --accents au=australia,en=england,in=indian

writes OUT/{train,valid,test}, where the client of an utterance is the name of its accent, and
OUT/{server_train,server_valid,server_test}, by default from speakers of all other accents and from
those who name none, or several. No speaker is in two of the six sets, and no sentence of the
clients' valid and test is in train or server_train (see choose.py). The clients' split is that of
Decouple-FL (section 4.1): 100 h, 10 h and 10 h, a third for each accent. An accent with less speech
contributes all of it, in that ratio.

Input is `validated.tsv`, `clips/` and `clip_durations.tsv`. Releases differ:

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
all     quotation marks are ordinary characters; a clip may be missing, empty or damaged; a speaker
        may have two accents or two genders.

Text becomes lower-case words by the rules of the row's language, which utt2lang names
(fedtools/data/written_to_spoken.py). Rows whose words cannot be known from the text (digits, "&")
are dropped, and the characters that are removed from the others are reported. The audio is not
converted: wav.scp names the clips.
"""

from __future__ import annotations

import math
import re
import shutil
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import corpus
import lengths
import letters
import typer
from choose import SETS, UNFIT, choose
from corpus import Row, sha256_of

from fedtools.cli.app import script
from fedtools.core.errors import UserError
from fedtools.core.recipe_sections import Corpus
from fedtools.data.datadir import DataDir, check_id, write_table
from fedtools.data.dropped import reasons_text
from fedtools.data.languages import is_code
from fedtools.data.text_units import UTT2LANG

# Longer clips are rarely a single sentence. With frames of 40 ms, CTC outputs at most 25 characters
# a second.
LONG_SECONDS, FAST_CHARACTERS = 30, 25
# Reasons to leave out rows that were not requested; every other reason is a fault of the corpus.
NOT_ASKED = (
    "no accent",
    "several accents",
    "accent not asked for",
    "beyond the hours asked for",
    *UNFIT,
)


def choose_readable(
    rows: list[Row], options: SimpleNamespace, language: Path, dropped: Counter
) -> dict[str, list[Row]]:
    """Choose the six sets, repeating the choice without clips that turn out to be faulty.

    Only chosen clips are opened: a release has far more clips than a run needs.
    """
    while True:
        left_out: Counter = Counter()
        sets = choose(rows, options, dropped, left_out)
        chosen = [row for part in sets.values() for row in part if not row.opened]
        usable = lengths.open_clips(rows, chosen, language, options.nj, dropped)
        if len(usable) == len(rows):
            beyond = len(rows) - sum(map(len, sets.values())) - left_out.total()
            dropped["beyond the hours asked for"] += beyond
            dropped.update(left_out)
            return sets
        rows = usable


# --- writing ------------------------------------------------------------------------------------


def data_dir(path: Path, rows: list[Row], clips: Path, clients: bool) -> DataDir:
    """Build a set's tables, with utterance ids <accent>-<speaker>-<number of the clip>."""
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
    """Return speaker -> m or f, for speakers whose rows name exactly one of the two."""
    named: dict[str, set[str]] = {}
    for row in rows:
        if row.gender in ("male", "female"):
            named.setdefault(row.speaker, set()).add(row.gender[0])
    both = sum(len(genders) > 1 for genders in named.values())
    if both:
        print(f"{both} speakers with two genders: left out of spk2gender", file=sys.stderr)
    return {speaker: min(genders) for speaker, genders in named.items() if len(genders) == 1}


def write_sets(out: Path, sets: dict[str, list[Row]], clips: Path) -> None:
    """Write the six data directories under temporary names, then move them into place."""
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
    if len(hours) != 3 or not all(0 < value < math.inf for value in hours):
        raise typer.BadParameter("expected three hours above 0, such as 100,10,10")
    return hours


def fraction(text: str) -> float:
    """Read a number above 0 and at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise typer.BadParameter("expected a number above 0 and at most 1, such as 0.4")
    return value


def language_code(text: str) -> str:
    """Read the code of a language."""
    if not is_code(text):
        raise typer.BadParameter("expected the code of a language, such as de or zh-CN")
    return text


ABOUT = """
Make data directories of Common Voice: clients by accent, and server data.

ACCENTS is NAME=PATTERN|PATTERN,... in quotation marks.

A pattern is a whole accent as the table has it, in any case. "*" stands for anything. Commas and
bars inside parentheses belong to the accent. A code of the first releases (australia, england,
indian, us, ...) also means the text of the later ones, and the other way round. An accent without
NAME= is named by its code, or else by its letters. Examples:

  --accents australia,england,indian
  --accents 'au=australia,en=england|Estuary English,in=India*'
  --accents 'in=India and South Asia (India, Pakistan, Sri Lanka)'
  --accents 'Child English,Male adult English'      (child_english, male_adult_english)
  --accents any --server-fraction 0.4       speakers of every accent, and of none: for clients that
                                            are speakers, and releases that have no accents
"""


def warn_of_odd_clips(rows: list[Row]) -> None:
    """Warn of training clips that recipes usually leave out."""
    long = sum(row.seconds > LONG_SECONDS for row in rows)
    fast = sum(len(row.sentence) > FAST_CHARACTERS * row.seconds for row in rows)
    if long or fast:
        print(
            f"training: {long} clips of more than {LONG_SECONDS} s (see --max-seconds), {fast} of "
            f"more than {FAST_CHARACTERS} characters a second (see --max-chars-per-second)",
            file=sys.stderr,
        )


def report(sets: dict[str, list[Row]], dropped: Counter, options: SimpleNamespace) -> None:
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
    reasons = f" ({reasons_text(dropped)})" if dropped.total() else ""
    print(f"kept {sum(map(len, sets.values()))}, dropped {dropped.total()}{reasons}")


def prepare(options: SimpleNamespace) -> None:
    """Read the corpus, choose and write the six sets, and report what was kept and dropped."""
    language = corpus.find_language(options.corpus)
    clips, table = language / "clips", language / "validated.tsv"
    dropped: Counter = Counter()
    left_out: Counter[str] = Counter()
    rows = corpus.read_rows(table, dropped, bool(corpus.name_of("", options.accents)))
    corpus.find_languages(rows, language, options.language)
    speakers = corpus.speaker_names({row.speaker for row in rows})
    others = not options.server and not options.server_fraction
    names = {**options.accents, **options.server}
    rows = corpus.sift_accents(rows, names, others, options.unclear == "server", dropped, table)
    rows = corpus.usable(rows, clips, dropped, left_out)
    rows = lengths.measure(rows, language, options.nj, dropped)
    for row in rows:
        row.speaker = f"{row.group}-{speakers[row.speaker]}"
    sets = choose_readable(rows, options, language, dropped)
    faults = sum(count for reason, count in dropped.items() if reason not in NOT_ASKED)
    asked = faults + sum(map(len, sets.values())) + dropped["beyond the hours asked for"]
    asked += sum(dropped[reason] for reason in UNFIT)
    if faults > options.max_drop * asked:
        raise UserError(
            f"{faults} of {asked} rows are faulty ({reasons_text(dropped)})",
            path=language,
            remedy="repair the corpus or raise --max-drop",
        )
    write_sets(options.out, sets, clips)
    letters.report(options.out / "left_out.tsv", left_out)
    warn_of_odd_clips(sets["train"] + sets["server_train"])
    report(sets, dropped, options)


LIMIT = "Leave out training clips {} than this (default: no limit)."


def limit(name: str, default: float, metavar: str, which: str) -> Any:
    """Return an option that leaves training clips out."""
    return typer.Option(
        default, name, min=0.0, metavar=metavar, show_default=False, help=LIMIT.format(which)
    )


def main(
    corpus: Path = typer.Argument(
        ..., metavar="CORPUS", help="The folder of the language, or the one above it."
    ),
    out: Path = typer.Argument(
        ..., metavar="OUT", help="Where train, valid, test and server_* are written."
    ),
    accents: Any = typer.Option(
        ..., parser=corpus.parse_accents, metavar="ACCENTS", help="The clients; see above."
    ),
    hours: Any = typer.Option(
        ",".join(map(str, Corpus.hours)),
        parser=three_hours,
        metavar="H,H,H",
        help="Train, valid and test hours of all clients together.",
    ),
    server_hours: Any = typer.Option(
        None,
        parser=three_hours,
        metavar="H,H,H",
        help="The same for the server's data (default: as --hours).",
    ),
    server: Any = typer.Option(
        None,
        parser=corpus.parse_accents,
        metavar="ACCENTS",
        help="Accents of the server's data (default: all others).",
    ),
    server_fraction: Any = typer.Option(
        None,
        parser=fraction,
        metavar="X",
        help="Instead: the server gets this fraction of the speakers of each client's accent.",
    ),
    language: Any = typer.Option(
        None,
        parser=language_code,
        metavar="CODE",
        help="The language, if neither the table's locale nor the folder's name shows it.",
    ),
    unclear: Literal["server", "drop"] = typer.Option(
        "server",
        help="Rows with no accent or several, of speakers who name none of --accents: give them to "
        "the server, as those of all other accents, or drop them.",
    ),
    speaker_share: Any = typer.Option(
        None,
        parser=fraction,
        metavar="X",
        help="Choose speakers who make up at most this fraction of a valid or test set first "
        "(default: 0.1), for sets of many speakers with little speech.",
    ),
    seed: int = typer.Option(0, help="Random seed of the split."),
    common_sentences: Literal["drop", "keep"] = typer.Option(
        "drop",
        help="What to do with sentences of valid and test in train and server_train; keep them for "
        "a closed vocabulary, such as digits.",
    ),
    min_seconds: float = limit("--min-seconds", 0.0, "S", "shorter"),
    max_seconds: float = limit("--max-seconds", math.inf, "S", "longer"),
    min_chars_per_second: float = limit(
        "--min-chars-per-second", 0.0, "X", "with fewer characters (spaces included)"
    ),
    max_chars_per_second: float = limit("--max-chars-per-second", math.inf, "X", "with more"),
    nj: int = typer.Option(
        1,
        min=1,
        max=9999,
        metavar="N",
        help="Processes that open clips; no result depends on it.",
    ),
    max_drop: Any = typer.Option(
        "0.5",
        parser=fraction,
        metavar="X",
        help="Fail if more than this fraction of the requested rows is faulty.",
    ),
) -> None:
    if server and server_fraction:
        problem = "not allowed with --server"
        raise typer.BadParameter(problem, param_hint="--server-fraction")
    if overlap := sorted(accents.keys() & (server or {}).keys()):
        raise typer.BadParameter(f"{overlap[0]!r} is in --accents and in --server")
    given = SimpleNamespace(**locals())
    given.server, given.speaker_share = server or {}, speaker_share or 0.0
    prepare(given)


if __name__ == "__main__":
    script(main, "prepare.py", ABOUT)
