#!/usr/bin/env python3
"""Write a section of RESULTS.md again from the file beside its page, without experiments.

    remake.py RESULTS-<section>-errors.gz RESULTS.md

The page is made if it is missing, and its other sections are left unchanged; pictures are not
drawn. Prints the summary, which is computed from the errors of each clip.
"""

from __future__ import annotations

from fedtools.report.accuracies import read_record, summary_of
from fedtools.report.section import remake

if __name__ == "__main__":
    remake(__doc__.split("\n", 1)[0], read_record, summary_of)
