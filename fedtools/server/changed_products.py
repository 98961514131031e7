"""Inner products of the changes of adapters' products B A, by Gram matrices of their factors.

The change of a layer, for A (r, inputs) and B (outputs, r) of which the server sent A_0 and B_0, is

    B A - B_0 A_0 = (B - B_0) A + B_0 (A - A_0) = U V,   U = [B - B_0, B_0],   V = [A; A - A_0]

in which nothing cancels that is much longer than the change. The inner product of two changes is
the sum of all elements of (U_i' U_j) o (V_i V_j'), two matrices of 2 r rows: no matrix as large as
the layer is needed. (R. Singhal et al.: FedEx-LoRA, ACL 2025, has the products; see
`fedtools.server.products`.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fedtools.exchange.messages import Message, Opened
from fedtools.exchange.states import Spec, load_state
from fedtools.models.adapt.adaptation import FACTORS
from fedtools.server.products import Factors, factors_of
from fedtools.server.updates import Products

# Values of the factors U and V of the clients of a block together, and rows of U' U and V V'.
_TOGETHER, _ROWS = 1 << 22, 1 << 11


def changed_products(
    messages: Sequence[Message],
    spec: Spec,
    layers: Sequence[str],
    state: Path,
    root: Path | None,
    pairs: bool,
) -> Products:
    """Compute the inner products of all layers' changes together.

    Args:
        messages, spec, state, root: see `fedtools.server.updates.Updates`.
        layers: the paths of the layers of which both factors are sent.
        pairs: whether those of all pairs are needed.
    """
    from threadpoolctl import threadpool_limits

    before, own = load_state(state), load_state(root) if root else None
    total = Products.none(len(messages), pairs)
    with threadpool_limits(1, "blas"), Opened() as files:
        for layer in layers:
            sent = _of_state(before, layer)
            trained = _split(_of_state(own, layer), sent) if own else None

            def split(place: int, layer: str = layer, sent: Factors = sent) -> Factors:
                return _split(factors_of(files, messages[place], layer, spec), sent)

            size, rank = 2 * sum(one.size for one in sent), len(sent[0])
            at_once = max(1, min(_TOGETHER // size, _ROWS // (2 * rank)))
            total = total + _of_layer(len(messages), split, trained, pairs, at_once)
    return total


def _of_state(state: dict[str, np.ndarray], layer: str) -> Factors:
    down, up = (state[layer + end].astype(np.float64) for end in FACTORS)
    return down, up


def _split(factors: Factors, sent: Factors) -> Factors:
    """Return V (2 r, inputs) and U (outputs, 2 r) of a change."""
    (down, up), (down_sent, up_sent) = factors, sent
    return np.vstack([down, down - down_sent]), np.hstack([up - up_sent, up_sent])


def _of_layer(
    clients: int,
    split: Callable[[int], Factors],
    root: Factors | None,
    pairs: bool,
    at_once: int,
) -> Products:
    """Compute the inner products of a layer's changes.

    Args:
        clients: their number.
        split: position of a client -> V and U.
        root: V and U of the server's own change.
        pairs: whether those of all pairs are needed.
        at_once: the most clients whose factors are held together with those of as many others.
    """
    found = Products.none(clients, pairs)
    if found.inner is None:
        for place in range(clients):
            own = split(place)
            found.squares[place] = _inner(own, own)
            found.along[place] = _inner(own, root) if root else 0.0
        square = _inner(root, root) if root else 0.0
        return Products(found.squares, None, found.along, square)
    for first in range(0, clients, at_once):
        rows = slice(first, min(first + at_once, clients))
        ours = _stacked([split(place) for place in range(clients)[rows]])
        for second in range(0, first + 1, at_once):
            columns = slice(second, min(second + at_once, clients))
            theirs = ours
            if second < first:
                theirs = _stacked([split(place) for place in range(clients)[columns]])
            block = _block(ours, theirs, rows.stop - rows.start)
            found.inner[rows, columns], found.inner[columns, rows] = block, block.T
    return Products(np.diag(found.inner).copy(), found.inner, found.along, 0.0)


def _inner(one: Factors, other: Factors) -> float:
    """Return the inner product of two changes."""
    (down, up), (down_other, up_other) = one, other
    return float(((up.T @ up_other) * (down @ down_other.T)).sum())


def _stacked(factors: Sequence[Factors]) -> Factors:
    """Return V (k 2 r, inputs) and U (outputs, k 2 r) of k changes."""
    downs, ups = zip(*factors, strict=True)
    return np.vstack(downs), np.hstack(ups)


def _block(ours: Factors, theirs: Factors, rows: int) -> np.ndarray:
    """Return the inner products of some changes with others, (rows, columns)."""
    (down, up), (down_other, up_other) = ours, theirs
    both = (up.T @ up_other) * (down @ down_other.T)
    twice = len(down) // rows
    block: np.ndarray = both.reshape(rows, twice, -1, twice).sum((1, 3))
    return block
