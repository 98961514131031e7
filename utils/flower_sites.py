#!/usr/bin/env python3
"""Give the experiments of a list, for utils/waves.py, sites to which their clients are dealt.

    experiments.py ... | flower_sites.py FOLDER [NUMBER]

A line whose method trains clients gets the words `--sites TABLE`; the tables are in FOLDER, one for
each training data. The clients are dealt to NUMBER sites, by default 3: site1, site2, ...
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# Of clips, and of data directories; the second has clients in its second column.
TABLES = (("clients.tsv", 0, 1), ("utt2client", 1, 0))
# These train where all data are.
ALONE = ("centralized",)


def clients_of(folder: Path) -> list[str]:
    """Return the clients of packed clips or of a data directory."""
    for name, column, header in TABLES:
        if (folder / name).exists():
            lines = (folder / name).read_text("utf-8").splitlines()[header:]
            return sorted({line.split()[column] for line in lines}, key=str.encode)
    sys.exit(f"flower_sites.py: {folder}: no {' and no '.join(name for name, *_ in TABLES)}")


def main(folder: Path, number: int) -> None:
    """Copy the list from stdin to stdout."""
    for line in sys.stdin.read().splitlines():
        words = line.split("\t")
        method = words[words.index("--method") + 1]
        (train,) = (word[6:] for word in words if word.startswith("train="))
        if method not in ALONE:
            table = folder / f"{re.sub(r'[^A-Za-z0-9.-]', '_', train)}.tsv"
            rows = [
                f"{one}\tsite{at % number + 1}\n" for at, one in enumerate(clients_of(Path(train)))
            ]
            folder.mkdir(parents=True, exist_ok=True)
            table.write_text("client\tsite\n" + "".join(rows))
            words += ["--sites", str(table)]
        print(*words, sep="\t")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
        print(__doc__)
        sys.exit(0 if "--help" in sys.argv else 2)
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3)
