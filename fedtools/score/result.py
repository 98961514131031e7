"""`result.txt`: the summary by speaker in sclite's layout, and every alignment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fedtools.data.datadir import invert
from fedtools.score.align import Counts


def result_text(
    utt2spk: Mapping[str, str],
    names: Mapping[str, str],
    tokens: Mapping[str, tuple[list[str], list[str]]],
    operations: Mapping[str, str],
    counts: Mapping[str, Counts],
) -> str:
    """Return the table that `sclite -o sum` prints, in percent, followed by the alignments.

    Args:
        utt2spk: utterance -> speaker.
        names: utterance -> its id in the trn files.
        tokens: utterance -> tokens of the reference, tokens of the hypothesis.
        operations: utterance -> letters of `align.align`.
        counts: utterance -> the counts of its letters.
    """
    rows = [
        _row(speaker, [counts[utt] for utt in utts]) for speaker, utts in invert(utt2spk).items()
    ]
    rows.append(_row("Sum/Avg", list(counts.values())))
    width = max(len(row[0]) for row in rows)
    lines = [
        f"| {name:{width}} | {sentences:>6} {words:>7} |{' '.join(rates)} |"
        for name, sentences, words, rates in rows
    ]
    heads = " ".join(f"{head:>6}" for head in ("Corr", "Sub", "Del", "Ins", "Err", "S.Err"))
    header = f"| {'SPKR':{width}} | {'# Snt':>6} {'# Wrd':>7} |{heads} |"
    rule = "|" + "-" * (len(header) - 2) + "|"
    table = [header, rule, *lines[:-1], rule.replace("-", "="), lines[-1]]
    alignments = [
        line for utt in counts for line in _alignment(names[utt], *tokens[utt], operations[utt])
    ]
    return "\n".join(["SYSTEM SUMMARY PERCENTAGES by SPEAKER", "", *table, "", *alignments])


def _row(name: str, counts: list[Counts]) -> tuple[str, int, int, list[str]]:
    total = sum(counts, Counts(0, 0, 0, 0))
    numbers = [total.correct, total.substitutions, total.deletions, total.insertions, total.errors]
    # A speaker without a reference word has no percentages; as sclite, show the numbers, starred.
    rates = [_percent(n, total.tokens) if total.tokens else f"{n:5d}*" for n in numbers]
    wrong = _percent(sum(count.errors > 0 for count in counts), len(counts))
    return name, len(counts), total.tokens, [*rates, wrong]


def _percent(part: int, whole: int) -> str:
    # Halves go up, as sclite has it; formatting a float would send some of them down.
    return f"{(2000 * part + whole) // (2 * whole) / 10:6.1f}"


def _alignment(name: str, reference: list[str], hypothesis: list[str], letters: str) -> list[str]:
    counts = Counts.of(letters)
    scores = (counts.correct, counts.substitutions, counts.deletions, counts.insertions)
    lines = [f"id: ({name})", f"Scores: (#C #S #D #I) {' '.join(map(str, scores))}"]
    columns = list(_columns(letters, iter(reference), iter(hypothesis)))
    for row, head in enumerate(("REF:", "HYP:", "Eval:")):
        lines.append(f"{head:5} {' '.join(column[row] for column in columns)}".rstrip())
    return [*lines, ""]


def _columns(
    letters: str, reference: Iterator[str], hypothesis: Iterator[str]
) -> Iterator[tuple[str, ...]]:
    for letter in letters:
        ref = "" if letter == "I" else next(reference)
        hyp = "" if letter == "D" else next(hypothesis)
        width = max(len(ref), len(hyp))
        mark = "" if letter == "C" else letter
        yield (
            (ref or "*" * width).ljust(width),
            (hyp or "*" * width).ljust(width),
            mark.ljust(width),
        )
