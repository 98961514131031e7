"""How much one client may count beside the others of a round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from fedtools.files.ark import FeatureReader
from fedtools.files.messages import Message


class Rules(Protocol):
    """What a method says of its server; see `fedtools.methods.base.Method`."""

    @property
    def min_clients(self) -> int: ...

    @property
    def max_norm_ratio(self) -> float: ...

    @property
    def max_weight_ratio(self) -> float: ...

    def weight(self, utterances: int) -> float:
        """A client's weight in the mean."""


def most_of(amounts: Sequence[float], ratio: float) -> float:
    """What one client's amount counts as, at most: a multiple of the median of those above 0.

    Args:
        amounts: one for each client; of an even number the lower median is taken, so that of two
            clients the one with less bounds the other.
        ratio: 0 for no bound.
    """
    given = [amount for amount in amounts if amount > 0]
    return ratio * statistics.median_low(given) if ratio and given else math.inf


def weights_of(rules: Rules, messages: Sequence[Message]) -> list[float]:
    """Each client's weight in the mean, none of them over `Method.max_weight_ratio`."""
    weights = [rules.weight(message.utterances) for message in messages]
    most = most_of(weights, rules.max_weight_ratio)
    return [min(weight, most) for weight in weights]


def taken_of(sent: Mapping[str, FeatureReader], ratio: float) -> dict[str, list[str]]:
    """Client -> the utterances that are taken of those that it sent, the first ones.

    Nobody's are more, or have more frames, than a multiple of the median client's; one always is.

    Args:
        ratio: as of `most_of`.
    """
    frames = {
        client: [reader.num_frames(utt) for utt in reader.scp] for client, reader in sent.items()
    }
    most = most_of([len(lengths) for lengths in frames.values()], ratio)
    most_frames = most_of([sum(lengths) for lengths in frames.values()], ratio)
    taken = {}
    for client, lengths in frames.items():
        within = sum(total <= most_frames for total in accumulate(lengths))
        taken[client] = list(sent[client].scp)[: max(1, int(min(most, within)))]
    return taken
