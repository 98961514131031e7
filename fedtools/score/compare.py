"""`fedtools compare`: do two systems differ on the same utterances?"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from fedtools.core.tables import format_table, write_tsv
from fedtools.data.text_units import CHARACTER, WORD, TextUnit
from fedtools.score.align import Counts
from fedtools.score.bootstrap import AVERAGE, interval
from fedtools.score.mapsswe import mapsswe
from fedtools.score.pairs import References, align_all, estimate, read_hypotheses, tokenise
from fedtools.score.text_rule import TextRule
from fedtools.score.wer import interval_text, percent, with_note

# Columns after the systems' rates; those of the test come last.
_DIFFERENCE = ("difference", "difference_low", "difference_high")
_TEST = ("segments", "segment_difference", "z", "p")


def columns_of(unit: TextUnit) -> tuple[str, ...]:
    """Return the columns of the table that `compare` writes."""
    return "client", f"{unit.rate}_a", f"{unit.rate}_b", *_DIFFERENCE, *_TEST


COLUMNS = columns_of(WORD)


def compare(
    data_dir: str | Path,
    hyp_a: str | Path,
    hyp_b: str | Path,
    resamples: int,
    seed: int,
    out: str | Path | None = None,
    rule: TextRule = "none",
) -> list[dict[str, object]]:
    """Compare two systems' word errors, for each client, on average, and over all.

    Where a language is written without spaces, characters are counted (`fedtools.data.text_units`).
    The difference of the rates, A minus B, comes with the 95 % interval of a bootstrap that draws
    the same speakers for both; z and p come from the matched-pair test (see `mapsswe`), which has
    no average over clients.

    Args:
        data_dir: holds `text`, `utt2spk` and, optionally, `utt2client` and `utt2lang`.
        hyp_a: a Kaldi `text` of system A's hypotheses.
        hyp_b: that of system B.
        resamples: draws of the bootstrap.
        seed: random seed of the bootstrap.
        rule: the text rule for both references and hypotheses.
        out: a tab-separated file for the rows, if one is requested.

    Returns:
        The rows, with their numbers rounded and formatted.

    Raises:
        UserError: if the utterances are not exactly the same, or a file breaks a rule.
    """
    references = References.read(data_dir, rule)
    unit = references.unit
    operations = [
        align_all(tokenise(references, read_hypotheses(path, references), unit.rate))
        for path in (hyp_a, hyp_b)
    ]
    counts = [{utt: Counts.of(letters) for utt, letters in system.items()} for system in operations]
    rates, draws = estimate(references, counts, resamples, seed)
    rows = []
    for client, (rate_a, rate_b) in rates.items():
        low, high = interval(draws[client][:, 0] - draws[client][:, 1])
        row: dict[str, object] = {
            "client": client,
            f"{unit.rate}_a": percent(rate_a),
            f"{unit.rate}_b": percent(rate_b),
            "difference": percent(rate_a - rate_b),
            "difference_low": percent(low),
            "difference_high": percent(high),
            **dict.fromkeys(_TEST, "-"),
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
        write_tsv(out, columns_of(unit), rows)
    return rows


def compare_table(rows: Iterable[dict[str, object]]) -> str:
    """Format the rows of `compare` as an aligned table, with a note if characters are counted."""
    rows = list(rows)
    unit = next(one for one in (WORD, CHARACTER) if f"{one.rate}_a" in rows[0])
    header = ["client", f"{unit.title}% A", f"{unit.title}% B", "A - B", "95%"]
    header += ["segments", "z", "p (MAPSSWE)"]
    cells = [
        [
            *(row[column] for column in columns_of(unit)[:4]),
            interval_text(row["difference_low"], row["difference_high"]),
            *(row[column] for column in ("segments", "z", "p")),
        ]
        for row in rows
    ]
    return with_note(unit, format_table(header, cells))
