"""Counts of the items that the preparation of a corpus leaves out, by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


class Dropped(Counter[str]):
    """Counter of dropped items by reason; `first` has the place of the first fault of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, str] = {}

    def fault(self, reason: str, place: str) -> None:
        """Count an item that cannot be used."""
        self[reason] += 1
        self.first.setdefault(reason, place)

    def faults(self) -> int:
        """Return the number of unusable items, without those that are merely not requested."""
        return sum(self[reason] for reason in self.first)

    def summary(self) -> str:
        """Return the reasons and their counts as text, the most frequent first."""
        return reasons_text(self)


def reasons_text(counts: Mapping[str, int], first: Mapping[str, str] | None = None) -> str:
    """Return reasons and counts as text, the most frequent first, such as "no words: 3".

    Args:
        counts: reason -> count.
        first: reason -> the place of the first item, which is added to the text.
    """
    reasons = sorted((-count, reason) for reason, count in counts.items() if count)
    shown = {reason: f", the first {one}" for reason, one in (first or {}).items()}
    return ", ".join(f"{reason}: {-count}{shown.get(reason, '')}" for count, reason in reasons)
