"""Common Voice's table of clips: read, checked, and filtered by accent and usable audio."""

from __future__ import annotations

import csv
import hashlib
import io
import re
import shlex
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer

from fedtools.core.errors import UserError
from fedtools.core.text_files import open_input, other_encoding
from fedtools.data.datadir import corpus_folder
from fedtools.data.languages import is_language
from fedtools.data.written_to_spoken import normalise

# The accent codes of the first releases, and the texts that replaced them in later ones.
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


# Number of non-UTF-8 rows that are reported by line.
_NAMED = 5

# The value of --accents for speakers of every accent and of none, and how messages refer to it.
ANY = "any"
UNCLEAR = "unclear"
EVERYBODY = f"--accents {ANY} --server-fraction 0.4 (run.sh: --clients speaker)"


@dataclass
class Row:
    """One line of validated.tsv.

    Fields start as the table has them. `usable` turns `clip` into a file name and `sentence` into
    words; `find_languages` turns `locale` into a language code. `accents` has every accent that the
    line names. `sift_accents` sets `name`, the user's name of the accent ("" if the user gave it
    none), and `group`, which is never empty. `lengths.measure` sets `seconds`, and also `opened` if
    the clip was read.
    """

    clip: str
    speaker: str
    sentence: str
    accents: tuple[str, ...]
    gender: str
    locale: str = ""
    variant: str = ""
    name: str = ""
    group: str = ""
    seconds: float = 0.0
    opened: bool = False


# --- accents ------------------------------------------------------------------------------------


def separate(text: str, marks: str) -> list[str]:
    """Split a text at any of `marks` outside parentheses into stripped, non-empty parts."""
    parts = re.split(rf"[{re.escape(marks)}](?![^()]*\))", text)
    return [part.strip() for part in parts if part.strip()]


def canonical(accent: str) -> str:
    """Return an accent in lower case, whitespace squeezed, a code replaced by its text."""
    accent = unicodedata.normalize("NFC", " ".join(accent.lower().split()))
    return CODES.get(accent, accent)


def short_name(accent: str) -> str:
    """Return a default name for an accent: its code, or else its ASCII letters and digits."""
    codes = {text: code for code, text in CODES.items()}
    plain = unicodedata.normalize("NFKD", accent).encode("ascii", "ignore").decode().lower()
    return codes.get(canonical(accent)) or re.sub("[^a-z0-9]+", "_", plain).strip("_")[:60] or "x"


def _lost(accent: str) -> bool:
    """Return whether an accent has letters that its short name would lose."""
    plain = unicodedata.normalize("NFKD", accent)
    return any(mark.isalpha() and not mark.isascii() for mark in plain)


def parse_accents(text: str) -> dict[str, list[str]]:
    """Read NAME=PATTERN|PATTERN,... or ACCENT,... into name -> canonical patterns."""
    accents: dict[str, list[str]] = {}
    for entry in separate(text, ","):
        name, equals, patterns = entry.partition("=")
        if not equals and _lost(entry):
            problem = f"{entry!r} has letters that are not allowed in names"
            raise typer.BadParameter(f"{problem}: give it one, as in NAME={entry}")
        name = name.strip() if equals else short_name(entry)
        if not re.fullmatch("[A-Za-z0-9_]{1,60}", name):
            problem = f"{name!r}: a name is letters a-z, digits and '_'"
            tail = f", as in x={patterns}" if equals else ""
            raise typer.BadParameter(problem + tail)
        if entry == ANY:
            patterns, equals = "*", "="
        if name in accents:
            raise typer.BadParameter(f"{name!r} is given twice")
        found = separate(patterns, "|") if equals else [entry]
        if not found:
            raise typer.BadParameter(f"{name!r} has no pattern")
        accents[name] = [canonical(pattern) for pattern in found]
    if not accents:
        raise typer.BadParameter("no accent is given")
    return accents


def name_of(accent: str, names: dict[str, list[str]]) -> str:
    """Return the name whose patterns match an accent, or "" if none does.

    The accent "" of a row without accents is matched by "*" alone.

    Raises:
        UserError: if the patterns of two names match.
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
    """Return the folder with validated.tsv: the one given, or the only one below it."""
    corpus = corpus_folder(corpus, "the folder of the language")
    found = [corpus] if (corpus / "validated.tsv").is_file() else []
    found = found or sorted(path.parent for path in corpus.glob("*/validated.tsv"))
    if not found:
        raise UserError("no validated.tsv", path=corpus, remedy=_remedy(corpus))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise UserError(f"several languages: {names}", path=corpus, remedy="name the folder of one")
    language = corpus_folder(found[0], "the folder of the language")
    if not (language / "clips").is_dir():
        raise UserError("no such folder", path=language / "clips", remedy="unpack the audio")
    return language


def _remedy(folder: Path) -> str:
    """Return what to do about a folder that has no validated.tsv."""
    if inner := sorted(folder.glob("*/*/validated.tsv")):
        return f"name the folder of the language, such as {inner[0].parent}"
    if any(folder.glob("ss-corpus-*.tsv")) or any(folder.glob("*/ss-corpus-*.tsv")):
        return "this is Spontaneous Speech, which is not read: take Scripted Speech, Common Voice"
    if any(folder.glob("transcript/*")) or any(folder.glob("audio/*/*/*.tar")):
        return (
            "Hugging Face's copy has other folders: unpack audio/*/*/*.tar into one folder clips, "
            "write the rows of transcript/*/*.tsv to validated.tsv beside it, or take Mozilla's "
            "archive"
        )
    if any(folder.glob("cv-valid-*")) or any(folder.glob("*/cv-valid-*")):
        return "Kaggle's copy does not tell speakers apart: take Mozilla's archive"
    if archives := sorted([*folder.glob("*.tar.gz"), *folder.glob("*/*.tar.gz")]):
        return f"unpack the archive, with tar -xf {shlex.quote(str(archives[0]))}"
    if parquet := sorted([*folder.glob("*.parquet"), *folder.glob("*/*.parquet")]):
        return f"tables such as {parquet[0].name} are not read: take Mozilla's archive"
    return "name the folder of the language"


def read_tsv(path: Path, *columns: str) -> Iterator[dict[str, str]]:
    """Yield the rows of a table that must have the named columns.

    A line with more or fewer cells than the header, or one that is not UTF-8, is an empty row. A
    column without a name, such as an index that pandas has added, is not used.
    """
    odd = 0
    with open_input(path) as raw:
        if name := other_encoding(raw.peek(4)):
            remedy = f"convert it with: iconv -f {name} -t UTF-8"
            raise UserError(f"{name}, not UTF-8", path=path, line=1, remedy=remedy)
        file = io.TextIOWrapper(raw, "utf-8-sig", "surrogateescape", newline="")
        lines = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        try:
            for column in columns:
                if column not in (lines.fieldnames or ()):
                    raise UserError(f"no column {column!r}", path=path, line=1)
            for cells in lines:
                whole = None not in cells and None not in cells.values()
                known = all(is_text("".join(cell or "")) for cell in cells.values())
                odd += not known
                if not known and odd <= _NAMED:
                    problem = "not UTF-8, so the row is left out; save the table as UTF-8"
                    print(f"{path}:{lines.line_num}: {problem}", file=sys.stderr)
                yield cells if whole and known else {}
        except csv.Error as error:
            raise UserError(str(error), path=path, line=lines.line_num + 1) from None
    if odd > _NAMED:
        print(f"{path}: {odd - _NAMED} more rows are not UTF-8", file=sys.stderr)


def is_text(value: str) -> bool:
    """Return whether a value that was read with `surrogateescape` was UTF-8."""
    return not any("\ud800" <= mark <= "\udfff" for mark in value)


def read_rows(path: Path, dropped: Counter, all_accents: bool) -> list[Row]:
    """Read the rows of the table, in an order that does not depend on the file's.

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
        row.locale, row.variant = cells.get("locale", ""), cells.get("variant", "")
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
    """Keep the rows of the requested accents, and set `name` and `group` of each.

    Speakers whose rows contradict each other are left out. A row with no accent or with several
    does not show whether its speaker has a requested accent. If other rows of the speaker name a
    requested accent, such a row is left out; otherwise it is kept with the rows of other accents.

    Args:
        rows: what `read_rows` returned.
        names: name -> patterns.
        others: whether accents without a name are requested too.
        unclear: whether, along with `others`, rows with no accent or with several are requested.
        dropped: reason -> rows, added to.
        path: the table of the rows, for messages.
    """
    # The group of each accent: its name, or the accent after a blank, which no name begins with.
    groups = {accent: name_of(accent, names) or f" {accent}" for accent in _accents(rows)}
    found = {row.accents: {groups[accent] for accent in row.accents or ("",)} for row in rows}
    # The group of rows whose accents are all of one group, and not empty.
    clear = {accents: min(own) for accents, own in found.items() if len(own) == 1 and own != {" "}}
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
    """Return every accent that rows name, and "" if a row names none."""
    return {accent for row in rows for accent in row.accents or ("",)}


def _check_names(rows: list[Row], names: dict[str, list[str]], there: set[str], path: Path) -> None:
    """Raise a `UserError` for a name whose accents no row has."""
    missing = sorted(names.keys() - there)
    if not missing:
        return
    if rows and _accents(rows) == {""}:
        problem, remedy = f"no accent in any of {len(rows)} rows", ""
        if variants := Counter(row.variant for row in rows if row.variant):
            listed = "; ".join(f"{name} ({count})" for name, count in variants.most_common(5))
            problem += f", which have variants of the language instead: {listed}"
        else:
            problem, remedy = f"{problem}, as in release 12", "take another release, or "
        remedy += f"make speakers the clients: {EVERYBODY}"
        raise UserError(problem, path=path, remedy=remedy)
    counts = Counter(accent for row in rows for accent in row.accents).most_common(12)
    listed = "; ".join(f"{accent} ({count})" for accent, count in counts) or "none"
    raise UserError(
        f"no row has the accent {missing[0]!r}",
        path=path,
        remedy=f"accents there: {listed}; or make speakers the clients: {EVERYBODY}",
    )


def find_languages(rows: list[Row], folder: Path, given: str | None) -> None:
    """Set the language of every row: its `locale`, else the folder's name, else `--language`.

    A locale or folder name that is not the code of a known language is ignored.

    Raises:
        UserError: if a row has none of the three.
    """
    default = folder.name if is_language(folder.name) else given or ""
    unknown = Counter(row.locale for row in rows if row.locale and not is_language(row.locale))
    for row in rows:
        row.locale = row.locale if is_language(row.locale) else default
    code = next((f"{code!r}" for code, _ in unknown.most_common()), "")
    if any(not row.locale for row in rows):
        problem = "neither a locale in the table nor the folder's name says which language it is"
        problem += f": {code} is not the code of a known language" if unknown else ""
        raise UserError(problem, path=folder, remedy="give --language, as in --language de")
    if unknown:
        problem = f"the locale of {unknown.total()} rows, such as {code}, is not a known language"
        print(f"{folder}: {problem}: they are treated as {default}", file=sys.stderr)
    if given and not is_language(given):
        problem = f"--language {given} is not the code of a known language"
        print(f"{problem}: all letters are kept, and words have spaces", file=sys.stderr)
    others = Counter(row.locale for row in rows if row.locale != given)
    if given and others:
        found = ", ".join(f"{count} are {language}" for language, count in others.most_common())
        print(f"--language {given} is not that of all rows: {found}", file=sys.stderr)


def usable(rows: list[Row], clips: Path, dropped: Counter, left_out: Counter) -> list[Row]:
    """Keep the rows that have words and an existing clip, and set `clip` to its file name.

    Characters of sentences that do not occur in their words are counted in `left_out`.
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
    """Return client_id -> its first 8 hexadecimal digits, or as many more as make it unique."""
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
