"""The command that makes clips for the keyword engine."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtools.cli.app import app


@app.command("pack-clips")
def pack_clips(
    data_dir: Path = typer.Argument(..., metavar="DATA_DIR", help="A Kaldi data directory."),
    folder: Path = typer.Argument(..., metavar="OUT", help="Receives clips.npy, clips.tsv, ..."),
    classes: Path = typer.Option(..., metavar="TXT", help="The labels, one a line."),
    noise: Path | None = typer.Option(
        None, metavar="SCP", help="Table of background noise: name and path."
    ),
    max_drop: float = typer.Option(
        0.02, min=0.0, max=1.0, help="Largest share of clips that may be unusable."
    ),
) -> None:
    """Pack one-word utterances into one file of one-second clips, client by client.

    A client is a speaker where DATA_DIR has no utt2client.
    """
    from fedtools.audio.pack import pack_clips
    from fedtools.files.clips import RATE
    from fedtools.files.tables import format_table

    done = pack_clips(data_dir, folder, classes, noise, max_drop=max_drop)
    print(done.extraction)
    header = ["clips", "clients", "classes", "padded", "cut", "noise"]
    seconds = f"{done.noise_samples / RATE:.1f} s"
    row = [done.clips, done.clients, done.classes, done.padded, done.cut, seconds]
    print(format_table(header, [row], "r" * len(row)), end="")
