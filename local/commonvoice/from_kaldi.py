#!/usr/bin/env python3
"""Write Kaldi data directories in Common Voice's layout, for corpora other than Common Voice.

    from_kaldi.py OUT DATA... --accents SPK2ACCENT [--language en]

writes OUT/LANGUAGE/{clips/*.mp3,validated.tsv,train.tsv,dev.tsv,test.tsv,clip_durations.tsv}, with
columns as in release 17 and later. Every utterance is a clip, at its own sampling rate, and a row
of validated.tsv and train.tsv; prepare.py makes the sets. SPK2ACCENT has a line `SPEAKER ACCENT`
for each speaker, such as `adam Male one`; accents may have blanks. The tables are written last, so
that a killed run leaves no corpus that looks complete.
"""

from __future__ import annotations

import io
from hashlib import sha256, sha512
from pathlib import Path

import typer
from mini import COLUMNS

from fedtools.cli.app import script
from fedtools.core.atomic import atomic_path, write_text
from fedtools.core.errors import UserError
from fedtools.core.progress import Count
from fedtools.data.datadir import DataDir, read_table
from fedtools.data.languages import is_known

SEX = {"f": "female_feminine", "m": "male_masculine"}
# Number of the first clip.
FIRST = 40_000_000


def write_clip(path: Path, place: tuple[str, float | None, float | None]) -> int:
    """Write an utterance as MP3, in the best quality; return its length in milliseconds."""
    import soundfile

    from fedtools.audio.wave import read_wave

    wave, encoded = read_wave(*place), io.BytesIO()
    options = {"bitrate_mode": "VARIABLE", "compression_level": 0.0}
    soundfile.write(
        encoded, wave.samples, wave.rate, format="MP3", subtype="MPEG_LAYER_III", **options
    )
    with atomic_path(path) as temporary:
        temporary.write_bytes(encoded.getvalue())
    return round(1000 * len(wave.samples) / wave.rate)


def write_corpus(out: Path, folders: list[Path], accents_path: Path, language: str) -> str:
    """Write the corpus; return a line with its size.

    Raises:
        UserError: if a speaker has no accent, or an utterance cannot be read.
    """
    from fedtools.audio.features import audio_places

    accents = read_table(accents_path)
    every = [DataDir.read(folder) for folder in folders]
    for data in every:
        for utterance, name in data.utt2spk.items():
            if utterance not in data.text:
                raise UserError(f"{utterance!r} is missing", path=data.path / "text")
            if name not in accents:
                remedy = f"add a line '{name} ACCENT'"
                raise UserError(f"no accent of {name!r}", path=accents_path, remedy=remedy)
    top, rows, lengths = out / language, ["\t".join(COLUMNS)], ["clip\tduration[ms]"]
    (top / "clips").mkdir(parents=True, exist_ok=True)
    with Count("write clips", sum(len(data.utterances) for data in every), "clips") as bar:
        for data in every:
            sexes = data.others.get("spk2gender", {})
            for utterance, place in audio_places(data, data.utterances).items():
                clip = f"common_voice_{language}_{FIRST + len(lengths) - 1}.mp3"
                lengths.append(f"{clip}\t{write_clip(top / 'clips' / clip, place)}")
                name, words = data.utt2spk[utterance], data.text[utterance]
                row = {
                    "client_id": sha512(name.encode()).hexdigest(),
                    "path": clip,
                    "sentence_id": sha256(words.encode()).hexdigest(),
                    "sentence": words,
                    "up_votes": "2",
                    "down_votes": "0",
                    "gender": SEX.get(sexes.get(name, ""), ""),
                    "accents": accents[name],
                    "locale": language,
                }
                rows.append("\t".join(row.get(column, "") for column in COLUMNS))
                bar.advance()
    for table in ("dev", "test"):
        write_text(top / f"{table}.tsv", rows[0] + "\n")
    for table, lines in {"clip_durations": lengths, "train": rows, "validated": rows}.items():
        write_text(top / f"{table}.tsv", "\n".join(lines) + "\n")
    speakers = {name for data in every for name in data.utt2spk.values()}
    return f"{top}: {len(rows) - 1} clips of {len(speakers)} speakers"


def main(
    out: Path = typer.Argument(..., metavar="OUT"),
    folders: list[Path] = typer.Argument(..., metavar="DATA..."),
    accents: Path = typer.Option(..., metavar="SPK2ACCENT"),
    language: str = typer.Option("en", help="Common Voice's code."),
) -> None:
    if not is_known(language):
        raise UserError(f"--language {language!r}: unknown code")
    print(write_corpus(out, folders, accents, language))


if __name__ == "__main__":
    script(main, "from_kaldi.py", __doc__)
