"""Commands that count errors, registered with `fedtools.cli.app`."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtools.cli.app import app


@app.command("score")
def score_command(
    data_dir: Path = typer.Argument(help="Data directory: text, utt2spk, utt2client if any."),
    hyp_text: Path = typer.Argument(help="Kaldi text of the hypotheses; an id alone is empty."),
    out_dir: Path = typer.Argument(help="Gets score_wer/, score_cer/ and wer.tsv."),
    resamples: int = typer.Option(1000, min=1, max=100_000, help="Draws of the bootstrap."),
    seed: int = typer.Option(0, help="Seed of the bootstrap."),
) -> None:
    """Word and character error rates as sclite counts them, by client, with 95 % intervals."""
    from fedtools.score.wer import score, score_table

    rows = score(data_dir, hyp_text, out_dir, resamples, seed)
    print(score_table(rows), end="")


@app.command("compare")
def compare_command(
    data_dir: Path = typer.Argument(help="Data directory: text, utt2spk, utt2client if any."),
    hyp_a: Path = typer.Argument(help="Kaldi text of system A's hypotheses."),
    hyp_b: Path = typer.Argument(help="Kaldi text of system B's hypotheses."),
    out: Path | None = typer.Option(None, help="Write the table there too, tab-separated."),
    resamples: int = typer.Option(1000, min=1, max=100_000, help="Draws of the bootstrap."),
    seed: int = typer.Option(0, help="Seed of the bootstrap."),
) -> None:
    """Two systems' word error rates: their difference, and the matched-pair test (MAPSSWE)."""
    from fedtools.score.compare import compare, compare_table

    rows = compare(data_dir, hyp_a, hyp_b, resamples, seed, out)
    print(f"A = {hyp_a}\nB = {hyp_b}\n")
    print(compare_table(rows), end="")
