#!/usr/bin/env python3
"""Print the folder with the fewest word errors, the first one in a tie.

    fewest_errors.py DIR...

DIR/best/wer.tsv comes from `fedtools score`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedtools.core.errors import exit_with_message
from fedtools.core.tables import read_tsv
from fedtools.score.wer import COLUMNS, COUNTED


def errors_of(folder: Path) -> int:
    rows = {row["client"]: row for row in read_tsv(folder / "best" / "wer.tsv", COLUMNS)}
    return sum(int(rows["all"][kind]) for kind in COUNTED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    options = parser.parse_args()
    with exit_with_message("fewest_errors.py"):
        print(min(options.folders, key=errors_of))


if __name__ == "__main__":
    main()
