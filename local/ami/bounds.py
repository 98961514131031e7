#!/usr/bin/env python3
"""Write bounds for differential privacy from development data: public, independent of eval data.

    bounds.py DATA OUT.yaml

writes the 75th percentile of words per utterance and per client (`utterance` and `user`, to which
counts are clipped; a `word` counts once), and the seconds of the longest meeting (`span`, which is
divided into groups by the clock; an utterance whose end is -1 in segments, the end of the
recording, counts with its beginning). DATA has text, utt2client, and segments or utt2start; without
times there is no span.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import typer

from fedtools.cli.app import script
from fedtools.core.config import write_yaml
from fedtools.core.errors import UserError
from fedtools.data.datadir import DataDir
from fedtools.lm.stream import read_times, times_in


def bounds_of(path: Path) -> dict[str, float]:
    """Compute the bounds, by name; raise `UserError` if there is no utterance."""
    data = DataDir.read(path, "text", "utt2client")
    words = {name: len(text.split()) for name, text in data.text.items()}
    if not words:
        raise UserError("no utterance", path=path)
    clients: Counter[str] = Counter()
    for name, count in words.items():
        clients[data.utt2client[name]] += count
    found = {"word": 1.0} | {
        name: float(np.percentile(list(counts.values()), 75, method="higher"))
        for name, counts in (("utterance", words), ("user", clients))
    }
    table = times_in(path)
    times = read_times(table) if table else {}
    span = max((end for _, end in times.values()), default=0.0)
    return {**found, "span": span} if span else found


def main(
    data: Path = typer.Argument(
        ..., metavar="DATA", help="text, utt2client, and segments or utt2start"
    ),
    out: Path = typer.Argument(..., metavar="OUT.yaml", help="utterance, user, span"),
) -> None:
    write_yaml(out, bounds_of(data))


if __name__ == "__main__":
    script(main, "bounds.py", __doc__)
