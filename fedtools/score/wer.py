"""`fedtools score`: word and character error rates of one system, by client."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import numpy as np

from fedtools.core.atomic import write_text
from fedtools.core.tables import format_table, write_tsv
from fedtools.data import trn
from fedtools.data.datadir import invert
from fedtools.data.text_units import CHARACTER, WORD, TextUnit
from fedtools.score import utterances
from fedtools.score.align import Counts
from fedtools.score.bootstrap import interval
from fedtools.score.pairs import (
    References,
    align_all,
    cuts_of,
    estimate,
    read_hypotheses,
    tokenise,
)
from fedtools.score.result import result_text
from fedtools.score.text_rule import TextRule

# The kinds of errors that are counted, by the names of `Counts`.
COUNTED = ("substitutions", "deletions", "insertions")
_SUMMED = ("tokens", "errors")


def columns_of(unit: TextUnit) -> tuple[str, ...]:
    """Return the columns of `wer.tsv`, with the bounds of a rate's interval after the rate."""
    rates = (f"{rate}{end}" for rate in cuts_of(unit) for end in ("", "_low", "_high"))
    return "client", "speakers", "utterances", unit.plural, *COUNTED, *rates


COLUMNS = columns_of(WORD)


def score(
    data_dir: str | Path,
    hyp_text: str | Path,
    out_dir: str | Path,
    resamples: int,
    seed: int,
    rule: TextRule = "none",
) -> list[dict[str, object]]:
    """Score hypotheses against a data directory, and write the files of ESPnet's scoring.

    Writes `score_wer/` and `score_cer/`, each with `ref.trn`, `hyp.trn` (for `sclite -i rm`) and
    `result.txt`, then `utterances.tsv`, the counts of each utterance, and last `wer.tsv`: a row for
    each client, then `average`, the mean of the clients' rates, and `all`, the rate over all
    utterances. A language that is written without spaces (see `fedtools.data.text_units`) has no
    words: `score_wer/` is left out, and the tables have only characters and their rate.

    Args:
        data_dir: holds `text`, `utt2spk` and, optionally, `utt2client` and `utt2lang`.
        hyp_text: a Kaldi `text`; an id alone is an empty hypothesis.
        out_dir: made if it is missing.
        resamples: draws of the bootstrap.
        seed: random seed of the bootstrap.
        rule: the text rule for both references and hypotheses.

    Returns:
        The rows of `wer.tsv`, with its rates rounded and formatted.

    Raises:
        UserError: if the utterances are not exactly the same, or a file breaks a rule.
    """
    references = References.read(data_dir, rule)
    hypotheses = read_hypotheses(hyp_text, references)
    names = trn.trn_ids(references.utt2spk)
    counts: dict[str, dict[str, Counts]] = {}
    for rate in cuts_of(references.unit):
        tokens = tokenise(references, hypotheses, rate)
        operations = align_all(tokens)
        counts[rate] = {utt: Counts.of(letters) for utt, letters in operations.items()}
        folder = Path(out_dir) / f"score_{rate}"
        for side, name in enumerate(("ref.trn", "hyp.trn")):
            trn.write_trn(folder / name, ((tokens[utt][side], names[utt]) for utt in names))
        result = result_text(references.utt2spk, names, tokens, operations, counts[rate])
        write_text(folder / "result.txt", result)
    rows = _rows(references, counts, resamples, seed)
    columns = utterances.columns_of(counts)
    write_tsv(Path(out_dir) / utterances.FILE, columns, _by_utterance(references, counts))
    write_tsv(Path(out_dir) / "wer.tsv", columns_of(references.unit), rows)
    return rows


def score_table(rows: Iterable[dict[str, object]]) -> str:
    """Format the rows of `wer.tsv` as an aligned table, with a note if characters are counted."""
    rows = list(rows)
    unit = text_unit_of_columns(rows[0])
    counts = ["client", "speakers", "utterances", unit.plural, "sub", "del", "ins"]
    cells = []
    for row in rows:
        values = [row[column] for column in columns_of(unit)[: len(counts)]]
        for rate in cuts_of(unit):
            values += [row[rate], interval_text(row[f"{rate}_low"], row[f"{rate}_high"])]
        cells.append(values)
    rates = [head for rate in cuts_of(unit) for head in (f"{rate.upper()}%", "95%")]
    return with_note(unit, format_table([*counts, *rates], cells))


def text_unit_of_columns(columns: Collection[str]) -> TextUnit:
    """Return the unit that a table of these columns counts."""
    return CHARACTER if CHARACTER.plural in columns else WORD


def with_note(unit: TextUnit, table: str) -> str:
    """Put a line that defines the rates above a table, if they are not of words."""
    return f"{unit.title} {unit.note}\n\n{table}" if unit.note else table


def _rows(
    references: References, counts: dict[str, dict[str, Counts]], resamples: int, seed: int
) -> list[dict[str, object]]:
    rates, draws = estimate(references, list(counts.values()), resamples, seed)
    everyone = list(references.text)
    rows = []
    for client in rates:
        utts = references.clients.get(client, everyone)
        total = sum((counts[references.unit.rate][utt] for utt in utts), Counts(0, 0, 0, 0))
        speakers = len({references.utt2spk[utt] for utt in utts})
        row: dict[str, object] = {"client": client, "speakers": speakers, "utterances": len(utts)}
        row[references.unit.plural] = total.tokens
        row |= {name: getattr(total, name) for name in COUNTED}
        for column, rate in enumerate(counts):
            low, high = interval(draws[client][:, column])
            row[rate] = percent(rates[client][column])
            row[f"{rate}_low"], row[f"{rate}_high"] = percent(low), percent(high)
        rows.append(row)
    return rows


def _by_utterance(
    references: References, counts: dict[str, dict[str, Counts]]
) -> Iterator[dict[str, object]]:
    names = utterances.columns_of(counts)
    for client, utts in references.clients.items():
        speakers = invert({utt: references.utt2spk[utt] for utt in utts})
        for speaker, own in speakers.items():
            for utt in own:
                found = [getattr(one[utt], what) for one in counts.values() for what in _SUMMED]
                yield dict(zip(names, (client, speaker, utt, *found), strict=True))


def percent(value: float) -> str:
    """Format a rate in percent as the files have it; a dash for NaN."""
    return "-" if np.isnan(value) else f"{value:.2f}"


def interval_text(low: object, high: object) -> str:
    """Format an interval for tables; a dash if it is not known."""
    return "-" if low == "-" else f"[{low}, {high}]"
