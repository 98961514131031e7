"""Bounds on the share of one client in a round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

from fedtools.data.ark import FeatureReader
from fedtools.exchange.messages import Message
from fedtools.server.robust.base import Rule

if TYPE_CHECKING:
    from fedtools.client.unit import Trained

# A client has a large share with this many times the mean client's.
_LARGE = 3.0


class Rules(Protocol):
    """The options of `fedtools.methods.base.Method` that the server uses."""

    @property
    def min_clients(self) -> int: ...

    @property
    def max_norm_ratio(self) -> float: ...

    @property
    def max_weight_ratio(self) -> float: ...

    @property
    def rule(self) -> Rule:
        """Return the robust rule; `Mean` by default."""

    @property
    def client(self) -> Callable[[Any], list[Trained]]:
        """Return the client update, by which the server trains on data of its own."""

    def weight(self, utterances: int) -> float:
        """Return a client's weight in the mean."""


def most_of(amounts: Sequence[float], ratio: float) -> float:
    """Return the bound on one client's amount: `ratio` times the median of amounts above 0.

    Args:
        amounts: one amount per client; for an even number the lower median is used, so that of two
            clients the smaller one bounds the other.
        ratio: the ratio, 0 for no bound.
    """
    given = [amount for amount in amounts if amount > 0]
    return ratio * statistics.median_low(given) if ratio and given else math.inf


def bounded(amounts: Sequence[float], ratio: float) -> list[float]:
    """Return amounts, of which each is at most the bound of `most_of`."""
    most = most_of(amounts, ratio)
    return [min(amount, most) for amount in amounts]


def dominant(amounts: Sequence[float]) -> list[int]:
    """Return the positions of the amounts that are more than half of all, if these are few.

    These are the amounts that each exceed three times the mean; [] if together they are no more
    than half of the sum.
    """
    total = sum(amounts)
    large = [at for at, one in enumerate(amounts) if one * len(amounts) > _LARGE * total]
    return large if 2 * sum(amounts[at] for at in large) > total else []


def client_weights(rules: Rules, messages: Sequence[Message]) -> list[float]:
    """Return each client's weight in the mean, bounded by `Method.max_weight_ratio`."""
    weights = [rules.weight(message.utterances) for message in messages]
    return bounded(weights, rules.max_weight_ratio)


def taken_of(sent: Mapping[str, FeatureReader], ratio: float) -> dict[str, list[str]]:
    """Return the utterances used of each client: the first of those that it sent.

    Their number, and their number of frames, are at most `ratio` times the median client's, but at
    least one utterance is used.

    Args:
        sent: the features of each client.
        ratio: see `most_of`.
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
