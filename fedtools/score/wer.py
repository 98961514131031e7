"""`fedtools score`: word and character error rates of one system, by client."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fedtools.files import trn
from fedtools.files.atomic import write_text
from fedtools.files.tables import format_table, write_tsv
from fedtools.score.align import Counts
from fedtools.score.bootstrap import interval
from fedtools.score.pairs import TOKENS, References, align_all, estimate, read_hypotheses, tokenise
from fedtools.score.result import result_text

# What is counted of words, by the names of `Counts`; the end of a rate's column is its interval's.
COUNTED = ("substitutions", "deletions", "insertions")
RATES = tuple(f"{rate}{end}" for rate in TOKENS for end in ("", "_low", "_high"))
COLUMNS = ("client", "speakers", "utterances", "words", *COUNTED, *RATES)


def score(
    data_dir: str | Path, hyp_text: str | Path, out_dir: str | Path, resamples: int, seed: int
) -> list[dict[str, object]]:
    """Score hypotheses against a data directory, and write what ESPnet's scoring writes.

    Writes `score_wer/` and `score_cer/`, each with `ref.trn`, `hyp.trn` (for `sclite -i rm`) and
    `result.txt`, and last `wer.tsv`: a row for each client, then `average`, the mean of the
    clients' rates, and `all`, the rate over all utterances.

    Args:
        data_dir: holds `text`, `utt2spk` and, optionally, `utt2client`.
        hyp_text: a Kaldi `text`; an id alone is an empty hypothesis.
        out_dir: made if it is missing.
        resamples: draws of the bootstrap.
        seed: of the bootstrap.

    Returns:
        The rows of `wer.tsv`, its rates rounded and written out.

    Raises:
        UserError: if the utterances are not exactly the same, or a file breaks a rule.
    """
    references = References.read(data_dir)
    hypotheses = read_hypotheses(hyp_text, references)
    names = trn.trn_ids(references.utt2spk)
    counts: dict[str, dict[str, Counts]] = {}
    for rate in TOKENS:
        tokens = tokenise(references, hypotheses, rate)
        operations = align_all(tokens)
        counts[rate] = {utt: Counts.of(letters) for utt, letters in operations.items()}
        folder = Path(out_dir) / f"score_{rate}"
        for side, name in enumerate(("ref.trn", "hyp.trn")):
            trn.write_trn(folder / name, ((tokens[utt][side], names[utt]) for utt in names))
        result = result_text(references.utt2spk, names, tokens, operations, counts[rate])
        write_text(folder / "result.txt", result)
    rows = _rows(references, counts, resamples, seed)
    write_tsv(Path(out_dir) / "wer.tsv", COLUMNS, rows)
    return rows


def score_table(rows: Iterable[dict[str, object]]) -> str:
    """The rows of `wer.tsv` as an aligned table."""
    counts = ["client", "speakers", "utterances", "words", "sub", "del", "ins"]
    cells = []
    for row in rows:
        values = [row[column] for column in COLUMNS[: len(counts)]]
        for rate in TOKENS:
            values += [row[rate], interval_text(row[f"{rate}_low"], row[f"{rate}_high"])]
        cells.append(values)
    return format_table([*counts, "WER%", "95%", "CER%", "95%"], cells)


def _rows(
    references: References, counts: dict[str, dict[str, Counts]], resamples: int, seed: int
) -> list[dict[str, object]]:
    rates, draws = estimate(references, list(counts.values()), resamples, seed)
    everyone = list(references.text)
    rows = []
    for client in rates:
        utts = references.clients.get(client, everyone)
        total = sum((counts["wer"][utt] for utt in utts), Counts(0, 0, 0, 0))
        speakers = len({references.utt2spk[utt] for utt in utts})
        row: dict[str, object] = {"client": client, "speakers": speakers, "utterances": len(utts)}
        row["words"] = total.tokens
        row |= {name: getattr(total, name) for name in COUNTED}
        for column, rate in enumerate(TOKENS):
            low, high = interval(draws[client][:, column])
            row[rate] = percent(rates[client][column])
            row[f"{rate}_low"], row[f"{rate}_high"] = percent(low), percent(high)
        rows.append(row)
    return rows


def percent(value: float) -> str:
    """A rate in percent as the files have it; a dash for what is not known."""
    return "-" if np.isnan(value) else f"{value:.2f}"


def interval_text(low: object, high: object) -> str:
    """An interval as tables show it; a dash where it is not known."""
    return "-" if low == "-" else f"[{low}, {high}]"
