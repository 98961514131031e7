"""The tables of RESULTS.md, in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fedtools.files.tables import format_markdown
from fedtools.report.results import Interval, Method, epochs_text, size_text
from fedtools.score.bootstrap import AVERAGE


def main_table(methods: Sequence[Method]) -> str:
    """Communication, computation and WER, as in table 3 of Zhu et al. 2022; the best in bold."""
    clients = list(methods[0].rates["wer"])
    header = ["Method", "Comm.", "Client epochs", "Server epochs", *map(_heading, clients)]
    cells = [
        [
            method.name,
            size_text(method.cost.bytes),
            epochs_text(method.cost.client_epochs),
            epochs_text(method.cost.server_epochs),
            *(f"{method.rates['wer'][client].value:.1f}" for client in clients),
        ]
        for method in methods
    ]
    for column in range(4, len(header)):
        embolden(cells, column)
    return format_markdown(header, cells)


def interval_table(methods: Sequence[Method], rate: str) -> str:
    """One rate ("wer" or "cer") by client, with its 95 % intervals."""
    clients = list(methods[0].rates[rate])
    cells = [
        [method.name, *(_with_interval(method.rates[rate][client]) for client in clients)]
        for method in methods
    ]
    return format_markdown(["Method", *map(_heading, clients)], cells)


def pooled_line(method: Method) -> str:
    """WER over all utterances, with its interval, in words."""
    utterances, words = method.words[AVERAGE]
    rate = _with_interval(method.rates["wer"][AVERAGE])
    return f"WER {rate} % on {utterances} utterances, {words} words"


def _heading(client: str) -> str:
    return "AVG" if client == AVERAGE else client


def _with_interval(rate: Interval) -> str:
    low, high = ("-" if bound is None else f"{bound:.1f}" for bound in (rate.low, rate.high))
    return f"{rate.value:.1f} [{low}, {high}]"


def embolden(
    cells: list[list[str]], column: int, best: Callable[[Iterable[float]], float] = min
) -> None:
    """Set the best figure of a column in bold, and all that look equal to it.

    A cell begins with its figure, or is a dash.
    """
    shown = {row[column]: float(row[column].split()[0]) for row in cells if row[column] != "-"}
    for row in cells:
        if row[column] in shown and shown[row[column]] == best(shown.values()):
            row[column] = f"**{row[column]}**"
