#!/usr/bin/env python3
"""Draw the recipe's own corpus from Speech Commands, and pack it as Opus.

    draw_corpus.py CORPUS OUT

writes OUT/<word>.opus, all clips of a word one after the other; OUT/clips.tsv, the place of each
clip; and OUT/SHA256SUMS of these files. Speakers are drawn by a hash of their names from those with
at least three clips of the eight words in CORPUS, which has Google's layout and lists:

    train   300 speakers of neither list, with all their clips of these words
    valid   60 speakers of the validation list, at most six clips each: those that the server has
            labelled
    test    200 speakers of the testing list, three clips each

Many speakers with few clips each give a test set narrower intervals than few with many. The packed
corpus in the repository was drawn from 7,152 training and validation clips of these words, and all
3,276 test clips. Speakers that it lacks are left to choose rounds and learning rates with.

unpack_corpus.py makes Speech Commands' own layout of these files again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import corpus
import numpy as np
import typer
from corpus import Clip
from unpack_corpus import COLUMNS, RATE, SUMS, TABLE, sums_of

from fedtools.cli.app import script
from fedtools.core.atomic import atomic_path, write_text
from fedtools.core.errors import UserError
from fedtools.core.seeds import seed64
from fedtools.core.tables import write_tsv

WORDS = ("down", "go", "left", "no", "right", "stop", "up", "yes")
LEAST = 3
# libsndfile's scale: 6 kbit/s and 256 kbit/s for a channel.
KBITS, LOWEST, HIGHEST = 24, 6, 256


@dataclass(frozen=True)
class Part:
    """How many speakers a set has, and the most clips of each; None: no bound."""

    speakers: int
    of_each: int | None = None


PARTS = {"train": Part(300), "valid": Part(60, 6), "test": Part(200, 3)}


def key(*names: str) -> int:
    """Return the place of a speaker or clip in the order of drawing."""
    return seed64(0, "corpus", *names)


def drawn(clips: Iterable[Clip], part: Part, name: str, folder: Path) -> list[Clip]:
    """Draw the clips of a set: speakers first, then clips of each."""
    found = defaultdict(list)
    for clip in clips:
        found[clip.speaker].append(clip)
    enough = sorted((one for one, own in found.items() if len(own) >= LEAST), key=key)
    if len(enough) < part.speakers:
        problem = f"{len(enough)} speakers of {name} have {LEAST} clips, not {part.speakers}"
        raise UserError(problem, path=folder, remedy="give the whole corpus")
    chosen = []
    for speaker in enough[: part.speakers]:
        chosen += sorted(found[speaker], key=lambda clip: key(clip.name))[: part.of_each]
    return chosen


def pack(sets: dict[str, list[Clip]], out: Path) -> None:
    """Write the clips of each word as one Opus file, and the table of all."""
    import soundfile

    rows: list[dict[str, object]] = []
    for word in WORDS:
        waves, start = [], 0
        for name, clips in sets.items():
            for clip in sorted(clips, key=lambda clip: clip.name):
                if clip.label != word:
                    continue
                wave, rate = soundfile.read(clip.path, dtype="int16")
                if rate != RATE:
                    raise UserError(f"{rate} Hz, not {RATE}", path=clip.path)
                place = f"{word}/{clip.path.name}"
                rows.append(dict(zip(COLUMNS, (name, place, start, len(wave)), strict=True)))
                waves.append(wave)
                start += len(wave)
        level = (HIGHEST - KBITS) / (HIGHEST - LOWEST)
        with atomic_path(out / f"{word}.opus") as path:
            soundfile.write(str(path), np.concatenate(waves), RATE, format="OGG", subtype="OPUS",
                            compression_level=level)  # fmt: skip
    write_tsv(out / TABLE, COLUMNS, rows)
    write_text(out / SUMS, sums_of(out, [TABLE, *(f"{word}.opus" for word in WORDS)]))


def draw(folder: Path, out: Path) -> None:
    """Read a corpus, draw and pack its sets, and print the counts."""
    folder = corpus.find_corpus(folder)
    dropped: corpus.Dropped = defaultdict(list)
    found = corpus.split(
        folder, corpus.read_clips({word: folder / word for word in WORDS}, dropped), dropped
    )
    sets = {name: drawn(found[name], part, name, folder) for name, part in PARTS.items()}
    out.mkdir(parents=True, exist_ok=True)
    pack(sets, out)
    for name, clips in sets.items():
        sizes = Counter(clip.speaker for clip in clips)
        print(f"{name}: {len(clips)} clips of {len(sizes)} speakers")


def main(
    corpus: Path = typer.Argument(..., metavar="CORPUS", help="Speech Commands, unpacked."),
    out: Path = typer.Argument(..., metavar="OUT", help="Folder of the packed corpus."),
) -> None:
    draw(corpus, out)


if __name__ == "__main__":
    script(main, "draw_corpus.py", __doc__)
