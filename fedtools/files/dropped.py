"""What the preparation of a corpus leaves out, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


class Dropped(Counter[str]):
    """Reason -> how many are left out; `first` has the place of the first of each fault."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, str] = {}

    def fault(self, reason: str, place: str) -> None:
        """Count what cannot be used."""
        self[reason] += 1
        self.first.setdefault(reason, place)

    def faults(self) -> int:
        """How many cannot be used; other reasons are of what nobody asked for."""
        return sum(self[reason] for reason in self.first)

    def told(self) -> str:
        """Reasons and their counts, the most frequent first."""
        return told(self)


def told(counts: Mapping[str, int], first: Mapping[str, str] | None = None) -> str:
    """Reasons and their counts, the most frequent first, each with the first of its kind if known.

    "malformed line: 3, no words: 1"
    """
    reasons = sorted((-count, reason) for reason, count in counts.items() if count)
    shown = {reason: f", the first {one}" for reason, one in (first or {}).items()}
    return ", ".join(f"{reason}: {-count}{shown.get(reason, '')}" for count, reason in reasons)
