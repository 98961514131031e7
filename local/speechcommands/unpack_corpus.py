#!/usr/bin/env python3
"""Unpack the recipe's own corpus to Speech Commands' layout.

    unpack_corpus.py PACKED OUT

writes OUT/{<word>/<speaker>_nohash_<number>.wav,validation_list.txt,testing_list.txt,LICENSE,
README.md,SHA256SUMS} from PACKED, which draw_corpus.py wrote. Clips have their original names and
lengths, but not the original samples, because they were encoded in between.

OUT appears when it is complete. A second run checks every file by its hash, and unpacks all of them
again if one is missing or damaged, or if PACKED has changed.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import typer
from corpus import CLIP_NAME, LISTS, SETS

from fedtools.cli.app import script
from fedtools.core.atomic import new_folder, sha256, write_text
from fedtools.core.errors import UserError
from fedtools.core.tables import count, read_tsv
from fedtools.core.text_files import read_text

TABLE, SUMS = "clips.tsv", "SHA256SUMS"
COLUMNS = ("set", "clip", "start", "samples")
TEXTS = ("LICENSE", "README.md")
RATE = 16_000
# Where an unpacked corpus has the sums of the files that it was unpacked from.
ORIGIN = ".packed"
# Longer than an hour is no joined word.
MOST_SAMPLES = 3600 * RATE
REMEDY = "restore it with: git checkout -- egs/speechcommands/kws1/corpus"


def sums_of(folder: Path, names: Iterable[str]) -> str:
    """Return sums of files of a folder, in the format of sha256sum."""
    return "".join(f"{sha256(folder / name)}  {name}\n" for name in sorted(names))


def read_sums(path: Path) -> dict[str, str]:
    """Read name -> sum; names may not leave the folder."""
    found = {}
    for line, text in enumerate(read_text(path, remedy=REMEDY).splitlines(), 1):
        match = re.fullmatch(r"([0-9a-f]{64})  ([A-Za-z_][\w.]*(?:/\w[\w.]*)?)", text)
        if not match:
            raise UserError("not a sum and a name", path=path, line=line, remedy=REMEDY)
        found[match[2]] = match[1]
    return found


def check(packed: Path) -> None:
    """Raise a `UserError` if a packed file is missing or damaged."""
    for name, digest in read_sums(packed / SUMS).items():
        if sha256(packed / name) != digest:
            raise UserError(f"damaged: not the sum in {SUMS}", path=packed / name, remedy=REMEDY)


def read_table(path: Path) -> dict[str, list[tuple[str, str, int, int]]]:
    """Read word -> (set, clip, start, samples) of its clips."""
    found: dict[str, list[tuple[str, str, int, int]]] = {}
    for line, row in enumerate(read_tsv(path, COLUMNS), 2):
        word, _, name = row["clip"].partition("/")
        start, samples = (count(row, column, path, line) for column in COLUMNS[2:])
        known = row["set"] in SETS and re.fullmatch("[a-z]+", word) and CLIP_NAME.fullmatch(name)
        if not known or not 0 < samples <= RATE or start > MOST_SAMPLES:
            raise UserError("not a clip and its place", path=path, line=line, remedy=REMEDY)
        found.setdefault(word, []).append((row["set"], row["clip"], start, samples))
    return found


def write_clips(
    packed: Path, out: Path, table: Mapping[str, list[tuple[str, str, int, int]]]
) -> None:
    """Write the clips of all words, and the two lists."""
    import soundfile

    listed: dict[str, list[str]] = {name: [] for name in SETS}
    for word, clips in table.items():
        path = packed / f"{word}.opus"
        try:
            # Decoded from the beginning, because a seek in Opus is not exact to the sample.
            wave, rate = soundfile.read(path, dtype="int16")
        except (OSError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            remedy = "Opus needs libsndfile 1.0.29 or later: pip install -U soundfile"
            raise UserError(f"cannot be decoded: {reason}", path=path, remedy=remedy) from None
        ends = max(start + samples for *_, start, samples in clips)
        if rate != RATE or wave.shape != (ends,):
            problem = f"{wave.shape} samples at {rate} Hz, not {ends} at {RATE}"
            raise UserError(problem, path=path, remedy=REMEDY)
        (out / word).mkdir()
        for name, clip, start, samples in clips:
            soundfile.write(out / clip, wave[start : start + samples], RATE, subtype="PCM_16")
            listed[name].append(clip)
    for name, file in LISTS.items():
        write_text(out / file, "".join(f"{clip}\n" for clip in sorted(listed[name])))


def is_whole(out: Path, origin: str) -> bool:
    """Return whether a corpus was unpacked from files with these sums, and has all of its own."""
    try:
        if (out / ORIGIN).read_text("utf-8") != origin:
            return False
        return all(sha256(out / name) == digest for name, digest in read_sums(out / SUMS).items())
    except (OSError, UnicodeError, UserError):
        return False


def unpack(packed: Path, out: Path) -> None:
    """Unpack a corpus, unless it is there already."""
    check(packed)
    # If it is a link, its target is renamed, on its own disk.
    origin, out = read_text(packed / SUMS), out.resolve()
    if is_whole(out, origin):
        print(f"{out}: the corpus is complete", file=sys.stderr)
        return
    if out.exists() and not (out / ORIGIN).exists() and any(out.iterdir()):
        raise UserError("was not made by this script", path=out, remedy="choose another OUT")
    table = read_table(packed / TABLE)
    old = out.with_name(f".{out.name}.old")
    with new_folder(out) as new:
        write_clips(packed, new, table)
        for name in TEXTS:
            shutil.copyfile(packed / name, new / name)
        clips = [clip for found in table.values() for _, clip, *_ in found]
        write_text(new / SUMS, sums_of(new, [*clips, *LISTS.values(), *TEXTS]))
        write_text(new / ORIGIN, origin)
        shutil.rmtree(old, ignore_errors=True)
        if out.exists():
            out.rename(old)
    shutil.rmtree(old, ignore_errors=True)
    print(f"{out}: unpacked {len(clips)} clips", file=sys.stderr)


def main(
    packed: Path = typer.Argument(..., metavar="PACKED", help="Folder with the Opus files."),
    out: Path = typer.Argument(..., metavar="OUT", help="The corpus, made or mended."),
) -> None:
    unpack(packed, out)


if __name__ == "__main__":
    script(main, "unpack_corpus.py", __doc__)
