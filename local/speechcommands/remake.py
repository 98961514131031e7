#!/usr/bin/env python3
"""Write a section of RESULTS.md again from the file beside its page, without experiments.

    remake.py RESULTS-<section>-errors.gz RESULTS.md

The page is made if it is missing, and its other sections are left unchanged; pictures are not
drawn. Prints the summary, which is computed from the errors of each clip.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from record import page_with, read_record
from summary import summary_of

from fedtools.files.atomic import write_text
from fedtools.files.errors import exit_with_message
from fedtools.report.summary import on_terminal


def main() -> None:
    """Run the command: 0 done, 1 bad input (one line on stderr), 2 wrong usage."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("file", type=Path, help="the file that report.py wrote beside its page")
    parser.add_argument(
        "results", type=Path, help="the page; its other sections are left unchanged"
    )
    options = parser.parse_args()
    with exit_with_message("remake.py"):
        section, rows = read_record(options.file)
        summary = summary_of(rows)
        write_text(options.results, page_with(options.results, section, summary))
        print(on_terminal(section.caption, summary, sys.stdout), end="")


if __name__ == "__main__":
    main()
