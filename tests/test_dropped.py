"""Reports of what preparation left out."""

from __future__ import annotations

from fedtools.data.dropped import Dropped, reasons_text


def test_reasons_are_told_the_most_frequent_first():
    dropped = Dropped()
    dropped["not asked for"] += 2
    for line in (7, 9, 11):
        dropped.fault("malformed line", f"a.stm:{line}")
    dropped.fault("no words", "b.stm:1")
    dropped["nothing"] += 0
    assert dropped.total() == 6
    assert dropped.faults() == 4
    assert dropped.first == {"malformed line": "a.stm:7", "no words": "b.stm:1"}
    assert dropped.summary() == "malformed line: 3, not asked for: 2, no words: 1"
    assert reasons_text(dropped, {"no words": "b"}).endswith(": 2, no words: 1, the first b")
    assert reasons_text({}) == ""
