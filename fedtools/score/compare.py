"""`fedtools compare`: do two systems differ on the same utterances?"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from fedtools.files.tables import format_table, write_tsv
from fedtools.score.align import Counts
from fedtools.score.bootstrap import AVERAGE, interval
from fedtools.score.mapsswe import mapsswe
from fedtools.score.pairs import References, align_all, estimate, read_hypotheses, tokenise
from fedtools.score.wer import interval_text, percent

COLUMNS = (
    "client",
    "wer_a",
    "wer_b",
    "difference",
    "difference_low",
    "difference_high",
    "segments",
    "segment_difference",
    "z",
    "p",
)


def compare(
    data_dir: str | Path,
    hyp_a: str | Path,
    hyp_b: str | Path,
    resamples: int,
    seed: int,
    out: str | Path | None = None,
) -> list[dict[str, object]]:
    """Compare two systems' word errors, for each client, on average, and over all.

    The difference of the WERs, A minus B, comes with the 95 % interval of a bootstrap that draws
    the same speakers for both; z and p are of the matched-pair test (see `mapsswe`), which has no
    average over clients.

    Args:
        data_dir: holds `text`, `utt2spk` and, optionally, `utt2client`.
        hyp_a: a Kaldi `text` of system A's hypotheses.
        hyp_b: that of system B.
        resamples: draws of the bootstrap.
        seed: of the bootstrap.
        out: where the rows are written as a tab-separated file, if anywhere.

    Returns:
        The rows, their numbers rounded and written out.

    Raises:
        UserError: if the utterances are not exactly the same, or a file breaks a rule.
    """
    references = References.read(data_dir)
    operations = [
        align_all(tokenise(references, read_hypotheses(path, references), "wer"))
        for path in (hyp_a, hyp_b)
    ]
    counts = [{utt: Counts.of(letters) for utt, letters in system.items()} for system in operations]
    rates, draws = estimate(references, counts, resamples, seed)
    rows = []
    for client, (wer_a, wer_b) in rates.items():
        low, high = interval(draws[client][:, 0] - draws[client][:, 1])
        row: dict[str, object] = {
            "client": client,
            "wer_a": percent(wer_a),
            "wer_b": percent(wer_b),
            "difference": percent(wer_a - wer_b),
            "difference_low": percent(low),
            "difference_high": percent(high),
            **dict.fromkeys(COLUMNS[6:], "-"),
        }
        if client != AVERAGE:
            utts = references.clients.get(client, list(references.text))
            test = mapsswe([(operations[0][utt], operations[1][utt]) for utt in utts])
            row["segments"] = test.segments
            row["segment_difference"] = f"{test.difference:.3f}"
            row["z"] = "-" if math.isnan(test.z) else f"{test.z:.3f}"
            row["p"] = "-" if math.isnan(test.p) else f"{test.p:.3g}"
        rows.append(row)
    if out is not None:
        write_tsv(out, COLUMNS, rows)
    return rows


def compare_table(rows: Iterable[dict[str, object]]) -> str:
    """The rows of `compare` as an aligned table."""
    header = ["client", "WER% A", "WER% B", "A - B", "95%", "segments", "z", "p (MAPSSWE)"]
    cells = [
        [
            *(row[column] for column in ("client", "wer_a", "wer_b", "difference")),
            interval_text(row["difference_low"], row["difference_high"]),
            *(row[column] for column in ("segments", "z", "p")),
        ]
        for row in rows
    ]
    return format_table(header, cells)
