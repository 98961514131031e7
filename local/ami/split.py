"""The split of meetings into train, dev and eval: AMI's official "Full-corpus-ASR" partition.

https://groups.inf.ed.ac.uk/ami/corpus/datasets.shtml; 137, 18 and 16 meetings, with IB4005 in
train. (IB4005 shares two persons with IB4001 to IB4004, which are in dev, by the owners' choice.)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from fedtools.core.errors import UserError
from fedtools.core.text_files import read_lines

SETS = ("train", "dev", "eval")
MEETING = re.compile(r"[A-Za-z0-9]{1,40}")
# A series and the letters of its meetings; those without letters are one meeting.
SERIES = {
    "train": """
        ES2002abcd ES2003abcd ES2005abcd ES2006abcd ES2007abcd ES2008abcd ES2009abcd ES2010abcd
        ES2012abcd ES2013abcd ES2014abcd ES2015abcd ES2016abcd
        IS1000abcd IS1001abcd IS1002bcd IS1003abcd IS1004abcd IS1005abc IS1006abcd IS1007abcd
        TS3005abcd TS3006abcd TS3007abcd TS3008abcd TS3009abcd TS3010abcd TS3011abcd TS3012abcd
        EN2001abde EN2003a EN2004a EN2005a EN2006ab EN2009bcd
        IN1001 IN1002 IN1005 IN1007 IN1008 IN1009 IN1012 IN1013 IN1014 IN1016 IB4005
    """,
    "dev": "ES2011abcd IS1008abcd TS3004abcd IB4001 IB4002 IB4003 IB4004 IB4010 IB4011",
    "eval": "ES2004abcd IS1009abcd TS3003abcd EN2002abcd",
}


def official() -> dict[str, str]:
    """Return meeting -> set, of the 171 meetings."""
    split = {}
    for name, series in SERIES.items():
        for each in series.split():
            split |= {f"{each[:6]}{letter}": name for letter in each[6:] or [""]}
    return split


def read_split(path: Path) -> dict[str, str]:
    """Read a custom split: a meeting and its set on each line; raise `UserError` if invalid."""
    split: dict[str, str] = {}
    for number, line in enumerate(read_lines(path), 1):
        fields = line.split()
        if len(fields) != 2 or not MEETING.fullmatch(fields[0]) or fields[1] not in SETS:
            remedy = f"write a meeting and one of {' '.join(SETS)}"
            raise UserError(f"{line!r} is not a line of a split", path=path, line=number,
                            remedy=remedy)  # fmt: skip
        if fields[0] in split:
            raise UserError(f"{fields[0]} appears twice", path=path, line=number)
        split[fields[0]] = fields[1]
    if not split:
        raise UserError("empty", path=path)
    return split


def census(split: Mapping[str, str], there: Collection[str]) -> str:
    """Format how many meetings of each set exist: `train 8 of 137, dev 3 of 18, ...`."""
    parts = []
    for name in SETS:
        wanted = [meeting for meeting, own in split.items() if own == name]
        parts.append(f"{name} {sum(meeting in there for meeting in wanted)} of {len(wanted)}")
    return ", ".join(parts)
