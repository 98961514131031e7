"""Scoring N-best lists by a neural language model, each word of each hypothesis once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def batches(sizes: Sequence[Sequence[int]], bins: int) -> Iterator[list[int]]:
    """Cut utterances into batches of lists of about the same length.

    Args:
        sizes: of each utterance the words of its hypotheses, `</s>` among them.
        bins: of a batch, the most hypotheses x words of the longest; a single utterance may have
            more.

    Yields:
        indices of utterances; each is in one batch.
    """
    longest = [max(lengths) for lengths in sizes]
    batch: list[int] = []
    rows = 0
    for index in sorted(range(len(sizes)), key=longest.__getitem__):
        more = rows + len(sizes[index])
        if batch and more * longest[index] > bins:
            yield batch
            batch, more = [], len(sizes[index])
        batch.append(index)
        rows = more
    if batch:
        yield batch
