"""Reading Common Voice: what its table says of a clip, and whether the clip is there."""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedtools.files.datadir import corpus_folder
from fedtools.files.errors import UserError
from fedtools.files.languages import is_language
from fedtools.files.spoken import normalise
from fedtools.files.text_files import open_input, other_encoding

# The codes of the first releases, and the texts that Common Voice itself replaced them by.
CODES = {
    "african": "southern african (south africa, zimbabwe, namibia)",
    "australia": "australian english",
    "bermuda": "west indies and bermuda (bahamas, bermuda, jamaica, trinidad)",
    "canada": "canadian english",
    "england": "england english",
    "hongkong": "hong kong english",
    "indian": "india and south asia (india, pakistan, sri lanka)",
    "ireland": "irish english",
    "malaysia": "malaysian english",
    "newzealand": "new zealand english",
    "philippines": "filipino",
    "scotland": "scottish english",
    "singapore": "singaporean english",
    "southatlandtic": "south atlantic (falkland islands, saint helena)",
    "us": "united states english",
    "wales": "welsh english",
}


# So many rows that are not UTF-8 are named.
_NAMED = 5

# What --accents takes for speakers of every accent and of none, and how messages tell of it.
ANY = "any"
UNCLEAR = "unclear"
EVERYBODY = f"--accents {ANY} --server-fraction 0.4 (run.sh: --clients speaker)"


@dataclass
class Row:
    """One line of validated.tsv.

    `clip` is as it stands there until `usable` makes it a file name, `sentence` until `usable`
    makes it words; `locale` until `find_languages` makes it a language; `accents` are all that it
    names. `sift_accents` sets `name`, what the user calls the accent, "" for an accent that nobody
    named; and `group`, which is never empty. `lengths.measure` sets `seconds`, and `opened` of a
    clip that was read.
    """

    clip: str
    speaker: str
    sentence: str
    accents: tuple[str, ...]
    gender: str
    locale: str = ""
    name: str = ""
    group: str = ""
    seconds: float = 0.0
    opened: bool = False


# --- accents ------------------------------------------------------------------------------------


def separate(text: str, marks: str) -> list[str]:
    """Cut at any of `marks` that is outside parentheses; parts are stripped, none is empty."""
    parts = re.split(rf"[{re.escape(marks)}](?![^()]*\))", text)
    return [part.strip() for part in parts if part.strip()]


def canonical(accent: str) -> str:
    """One spelling for an accent: lower case, whitespace squeezed, a code replaced by its text."""
    accent = unicodedata.normalize("NFC", " ".join(accent.lower().split()))
    return CODES.get(accent, accent)


def short_name(accent: str) -> str:
    """A name for an accent that nobody named: its code, or its letters and digits."""
    codes = {text: code for code, text in CODES.items()}
    plain = unicodedata.normalize("NFKD", accent).encode("ascii", "ignore").decode().lower()
    return codes.get(canonical(accent)) or re.sub("[^a-z0-9]+", "_", plain).strip("_")[:60] or "x"


def _lost(accent: str) -> bool:
    """Whether an accent has letters that its short name would be without."""
    plain = unicodedata.normalize("NFKD", accent)
    return any(mark.isalpha() and not mark.isascii() for mark in plain)


def parse_accents(text: str) -> dict[str, list[str]]:
    """Read NAME=PATTERN|PATTERN,... or ACCENT,... into name -> canonical patterns."""
    accents: dict[str, list[str]] = {}
    for entry in separate(text, ","):
        name, equals, patterns = entry.partition("=")
        if not equals and _lost(entry):
            problem = f"{entry!r} has letters that names have not"
            raise argparse.ArgumentTypeError(f"{problem}: give it one, as in NAME={entry}")
        name = name.strip() if equals else short_name(entry)
        if not re.fullmatch("[A-Za-z0-9_]{1,60}", name):
            problem = f"{name!r}: a name is letters a-z, digits and '_'"
            tail = f", as in x={patterns}" if equals else ""
            raise argparse.ArgumentTypeError(problem + tail)
        if entry == ANY:
            patterns, equals = "*", "="
        if name in accents:
            raise argparse.ArgumentTypeError(f"{name!r} is given twice")
        found = separate(patterns, "|") if equals else [entry]
        if not found:
            raise argparse.ArgumentTypeError(f"{name!r} has no pattern")
        accents[name] = [canonical(pattern) for pattern in found]
    if not accents:
        raise argparse.ArgumentTypeError("no accent is given")
    return accents


def name_of(accent: str, names: dict[str, list[str]]) -> str:
    """The name whose patterns match an accent, "" without one; two names are a `UserError`.

    The accent "" of a row that has none is matched by "*" alone.
    """
    found = [
        name
        for name, patterns in names.items()
        if any(
            re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), accent) for pattern in patterns
        )
    ]
    if len(found) > 1:
        raise UserError(f"accent {accent!r} is matched by {found[0]!r} and by {found[1]!r}")
    return found[0] if found else ""


# --- reading ------------------------------------------------------------------------------------


def find_language(corpus: Path) -> Path:
    """The folder with validated.tsv: the one given, or the only one below it."""
    corpus = corpus_folder(corpus, "the folder of the language")
    found = [corpus] if (corpus / "validated.tsv").is_file() else []
    found = found or sorted(path.parent for path in corpus.glob("*/validated.tsv"))
    if not found:
        raise UserError("no validated.tsv", path=corpus, remedy="name the folder of the language")
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise UserError(f"several languages: {names}", path=corpus, remedy="name the folder of one")
    language = corpus_folder(found[0], "the folder of the language")
    if not (language / "clips").is_dir():
        raise UserError("no such folder", path=language / "clips", remedy="unpack the audio")
    return language


def read_tsv(path: Path, *columns: str) -> Iterator[dict[str, str]]:
    """Yield the rows of a table with the named columns; a line that is not whole is an empty row.

    Not whole is a line of another length than the header's, or one that is not UTF-8.
    """
    odd = 0
    with open_input(path) as raw:
        if name := other_encoding(raw.peek(4)):
            remedy = f"convert it with: iconv -f {name} -t UTF-8"
            raise UserError(f"{name}, not UTF-8", path=path, line=1, remedy=remedy)
        file = io.TextIOWrapper(raw, "utf-8-sig", "surrogateescape", newline="")
        lines = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE, restkey="")
        try:
            for column in columns:
                if column not in (lines.fieldnames or ()):
                    raise UserError(f"no column {column!r}", path=path, line=1)
            for cells in lines:
                whole = "" not in cells and None not in cells.values()
                known = all(is_text("".join(cell or "")) for cell in cells.values())
                odd += not known
                if not known and odd <= _NAMED:
                    said = "not UTF-8, so the row is left out; save the table as UTF-8"
                    print(f"{path}:{lines.line_num}: {said}", file=sys.stderr)
                yield cells if whole and known else {}
        except csv.Error as error:
            raise UserError(str(error), path=path, line=lines.line_num + 1) from None
    if odd > _NAMED:
        print(f"{path}: {odd - _NAMED} more rows are not UTF-8", file=sys.stderr)


def is_text(value: str) -> bool:
    """Whether a value that was read with `surrogateescape` was UTF-8."""
    return not any("\ud800" <= mark <= "\udfff" for mark in value)


def read_rows(path: Path, dropped: Counter, all_accents: bool) -> list[Row]:
    """Read the table, in an order that does not depend on the file's.

    With `all_accents` the column of accents may be missing.
    """
    rows = []
    for cells in read_tsv(path, "client_id", "path", "sentence"):
        if not cells or not cells["client_id"]:
            dropped["malformed line"] += 1
            continue
        value = cells.get("accents", cells.get("accent"))
        if value is None and not all_accents:
            remedy = f"make speakers the clients: {EVERYBODY}"
            raise UserError("no column 'accents' or 'accent'", path=path, line=1, remedy=remedy)
        accents = tuple(sorted({canonical(part) for part in separate(value or "", ",|")}))
        gender = cells.get("gender", "").lower().partition("_")[0]
        row = Row(cells["path"], cells["client_id"], cells["sentence"], accents, gender)
        row.locale = cells.get("locale", "")
        rows.append(row)
    return sorted(rows, key=lambda row: (row.clip, row.speaker, row.sentence, row.accents))


# --- sifting -------------------------------------------------------------------------------------


def sift_accents(
    rows: list[Row],
    names: dict[str, list[str]],
    others: bool,
    unclear: bool,
    dropped: Counter,
    path: Path,
) -> list[Row]:
    """Name the accents that are asked for; leave out speakers that were given two, and more.

    Rows with no accent, or with several, say nothing of whether their speaker has one that is asked
    for. Where other rows of the speaker name one that is, they are left out; otherwise they are
    kept with the rows of other accents.

    Args:
        rows: what `read_rows` gave.
        names: name -> patterns.
        others: whether accents without a name are asked for too.
        unclear: whether, with them, rows without an accent or with several are.
        dropped: reason -> rows, added to.
        path: the table they are from, for messages.
    """
    # The group of each accent: its name, or itself behind a blank, which no name has.
    groups = {accent: name_of(accent, names) or f" {accent}" for accent in _accents(rows)}
    said = {row.accents: {groups[accent] for accent in row.accents or ("",)} for row in rows}
    # Of rows that say one thing, and not that there is no accent.
    clear = {accents: min(own) for accents, own in said.items() if len(own) == 1 and own != {" "}}
    speakers: dict[str, set[str]] = {row.speaker: set() for row in rows}
    for row in rows:
        if row.accents in clear:
            speakers[row.speaker].add(clear[row.accents])
    _check_names(rows, names, set().union(*speakers.values()), path)
    kept = []
    for row in rows:
        own = speakers[row.speaker]
        group = min(own, default=f" {UNCLEAR}")
        is_named = group[0] != " "
        if row.accents in clear and len(own) > 1:
            dropped["contradictory accents of one speaker"] += 1
        elif row.accents not in clear and (is_named or len(own) > 1 or not (others and unclear)):
            dropped["several accents" if row.accents else "no accent"] += 1
        elif not is_named and not others:
            dropped["accent not asked for"] += 1
        else:
            row.name = group if is_named else ""
            row.group = row.name or short_name(group)
            kept.append(row)
    return kept


def _accents(rows: list[Row]) -> set[str]:
    """Every accent that rows name, and "" of those that name none."""
    return {accent for row in rows for accent in row.accents or ("",)}


def _check_names(rows: list[Row], names: dict[str, list[str]], there: set[str], path: Path) -> None:
    """A `UserError` for a name of which there is no row."""
    missing = sorted(names.keys() - there)
    if not missing:
        return
    if rows and _accents(rows) == {""}:
        raise UserError(
            f"no accent in any of {len(rows)} rows, as in release 12",
            path=path,
            remedy=f"take another release, or make speakers the clients: {EVERYBODY}",
        )
    counts = Counter(accent for row in rows for accent in row.accents).most_common(12)
    listed = "; ".join(f"{accent} ({count})" for accent, count in counts) or "none"
    raise UserError(
        f"no row has the accent {missing[0]!r}",
        path=path,
        remedy=f"accents there: {listed}; or make speakers the clients: {EVERYBODY}",
    )


def find_languages(rows: list[Row], folder: Path, given: str | None) -> None:
    """Set the language of every row: its `locale`, else the folder's name, else `--language`.

    A locale, or a name, that is the code of no known language is none.

    Raises:
        UserError: if there are rows that have none of the three.
    """
    default = folder.name if is_language(folder.name) else given or ""
    unknown = Counter(row.locale for row in rows if row.locale and not is_language(row.locale))
    for row in rows:
        row.locale = row.locale if is_language(row.locale) else default
    code = next((f"{code!r}" for code, _ in unknown.most_common()), "")
    if any(not row.locale for row in rows):
        problem = "neither a locale in the table nor the folder's name says which language it is"
        problem += f": {code} is the code of none that is known" if unknown else ""
        raise UserError(problem, path=folder, remedy="give --language, as in --language de")
    if unknown:
        problem = f"the locale of {unknown.total()} rows, as {code}, is of no known language"
        print(f"{folder}: {problem}: they are taken for {default}", file=sys.stderr)
    if given and not is_language(given):
        problem = f"--language {given} is the code of no known language"
        print(f"{problem}: all letters are kept, and words have spaces", file=sys.stderr)
    others = Counter(row.locale for row in rows if row.locale != given)
    if given and others:
        found = ", ".join(f"{count} are {language}" for language, count in others.most_common())
        print(f"--language {given} is not that of all rows: {found}", file=sys.stderr)


def usable(rows: list[Row], clips: Path, dropped: Counter, left_out: Counter) -> list[Row]:
    """Keep the rows with words, and with a clip that is there; `clip` becomes its file name.

    The characters that sentences have and their words have not are added to `left_out`.
    """
    kept: dict[str, Row] = {}
    for row in rows:
        text, reason = normalise(row.sentence, row.locale, left_out)
        row.clip += "" if row.clip.endswith(".mp3") else ".mp3"
        if not re.fullmatch(r"[A-Za-z0-9_.+-]+", row.clip) or row.clip.startswith("."):
            reason = "not the name of a clip"
        elif row.clip in kept:
            reason = "clip named twice"
        elif not reason:
            try:
                reason = "" if (clips / row.clip).stat().st_size else "clip of zero bytes"
            except OSError:
                reason = "missing clip"
        if reason:
            dropped[reason] += 1
            continue
        row.sentence = text
        kept[row.clip] = row
    return list(kept.values())


def speaker_names(speakers: set[str]) -> dict[str, str]:
    """client_id -> its first 8 hexadecimal digits, or as many more as tell it from the others."""
    digests = {
        speaker if re.fullmatch("[0-9a-f]{8,}", speaker) else sha256_of(speaker): speaker
        for speaker in speakers
    }
    names, length = {}, 8
    while digests:
        counts = Counter(digest[:length] for digest in digests)
        for digest in [digest for digest in digests if counts[digest[:length]] == 1]:
            names[digests.pop(digest)] = digest[:length]
        length += 4
    return names


def sha256_of(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
