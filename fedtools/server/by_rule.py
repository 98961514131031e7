"""The next state by a robust rule, from the files of the clients' messages.

First pass: every update is checked as for the mean (finite values, `Method.max_norm_ratio`), and
lengths, or inner products of all pairs, are computed by part of the model: weights with products of
adapters, and BatchNorm statistics. From these the rule computes each client's share. Second pass:
the updates are added to the state by their shares. For the median, which needs no shares, the
second pass reads all values of some coordinates at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fedtools.core.errors import UserError
from fedtools.exchange.messages import Message, Refusal
from fedtools.exchange.states import Spec
from fedtools.exchange.values import Values
from fedtools.models.adapt.adaptation import FACTORS, OF_PRODUCTS
from fedtools.server.aggregate import (
    OF_STATISTICS,
    OF_WEIGHTS,
    Bound,
    Refused,
    check_shared,
    outside,
    part_of,
    unusable,
)
from fedtools.server.changed_products import changed_products
from fedtools.server.products import (
    Adapters,
    combine_models,
    layers_of,
    outside_products,
    put_products,
    too_large,
    without,
)
from fedtools.server.robust.base import Part, Rule
from fedtools.server.updates import Products, Updates

# Tensors of adapters, whose norms bound updates, but whose products count for rules.
_OF_FACTORS = "factors"


@dataclass(frozen=True)
class Ruled:
    """What a rule has made of a round.

    Attributes:
        refusals: the clients refused here.
        statuses: client -> CLIPPED or LEFT_OUT.
        recorded: what the rule has recorded in this round, by part.
    """

    refusals: list[Refusal]
    statuses: dict[str, str] = field(default_factory=dict)
    recorded: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Given:
    """What a rule is given besides the messages.

    Attributes:
        rule: the rule.
        bound: bound on the norms of updates.
        adapters: options of adapter aggregation.
        root: the file of the tensors that the server trained on data of its own, if it did.
        recorded: what the rule has recorded in earlier rounds, by part.
        values: tensor name -> bounds on its elements.
    """

    rule: Rule
    bound: Bound
    adapters: Adapters
    root: Path | None = None
    recorded: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, Values] = field(default_factory=dict)


def combine_by_rule(
    messages: Sequence[Message],
    weights: Sequence[float],
    out_path: Path,
    spec: Spec,
    given: Given,
    *,
    min_clients: int = 1,
) -> Ruled:
    """Write the next state by a robust rule.

    The result has the same bits for any split of the clients into jobs and any number of threads.
    Clients are refused as in `fedtools.server.products.combine_models`.

    Args:
        messages: as `read_messages` returns them.
        weights: one per message, finite and not negative; of any scale.
        out_path: the safetensors file to write, with the tensors of `spec`.
        spec: the tensors of one client.
        given: the rule, and what it needs.
        min_clients: the fewest usable updates; with fewer, nothing is written.
    """
    from threadpoolctl import threadpool_limits

    check_shared(spec)
    kept = [*zip(messages, weights, strict=True)]
    refusals: list[Refusal] = []
    # Each refusal changes the median, which can lead to further refusals.
    while len(kept) >= min_clients:
        own = [message for message, _ in kept]
        updates = Updates(own, spec, given.bound.sent_state, given.values, given.root)
        found, products = _checked(updates, given)
        if not found:
            # Of products of small matrices the bits may depend on the number of threads.
            with threadpool_limits(1, "blas"):
                done = _write(updates, [weight for _, weight in kept], products, out_path, given)
            return replace(done, refusals=refusals)
        refusals += found
        kept = without(kept, found)
    return Ruled(refusals)


def _checked(updates: Updates, given: Given) -> tuple[list[Refusal], dict[str, Products]]:
    """Return the clients to refuse, or the inner products of all updates by part."""
    spec, messages, bound = updates.spec, updates.messages, given.bound
    layers, pairs = layers_of(spec), given.rule.needs == "pairs"
    factors = {layer + end for layer in layers for end in FACTORS}
    products: dict[str, Products] = {}
    try:
        products = updates.products(
            lambda name: _OF_FACTORS if name in factors else part_of(name), pairs
        )
        finite = np.isfinite(sum(one.squares for one in products.values()))
    except Refused:
        finite = np.array(False)
    if not finite.all():
        bad = unusable(messages, spec, updates.values)
        if finite.ndim:
            for place in np.flatnonzero(~finite).tolist():
                bad.setdefault(messages[place].client, "an update of norm inf")
        if not bad:
            remedy = "run the command again"
            raise UserError("an update changed while it was read", remedy=remedy)
        return [Refusal(client, why) for client, why in bad.items()], {}
    lengths = {part: one.squares for part, one in products.items() if part != _OF_FACTORS}
    if _OF_FACTORS in products:
        of_factors = products.pop(_OF_FACTORS).squares
        lengths[OF_WEIGHTS] = lengths.get(OF_WEIGHTS, 0.0) + of_factors
    bounded = bound.ratio > 0 and len(messages) > 1
    if bounded and (far := outside(messages, lengths, bound)):
        return [Refusal(client, why) for client, why in far.items()], {}
    if layers and messages:
        weighted = [(message, 1.0) for message in messages]
        big = list(too_large(weighted, layers, spec)) if given.adapters.how in OF_PRODUCTS else []
        if big := big or outside_products(weighted, layers, spec, bound):
            return big, {}
        empty = Products.none(len(messages), pairs)
        changed = changed_products(messages, spec, layers, updates.state, updates.root, pairs)
        products[OF_WEIGHTS] = products.get(OF_WEIGHTS, empty) + changed
    return [], products


def _write(
    updates: Updates,
    weights: Sequence[float],
    products: Mapping[str, Products],
    out_path: Path,
    given: Given,
) -> Ruled:
    """Write the next state; return statuses and what was recorded."""
    rule, spec, clients = given.rule, updates.spec, len(updates.messages)
    if rule.needs == "values" and clients:
        updates.write_centre(rule.centre, out_path)
        return Ruled([])
    total = math.fsum(weights)
    if rule.uses_weights and clients and not total > 0:
        raise UserError("the weights of all usable updates are zero")
    scaled = np.array(weights, np.float64) / (total or 1.0)
    shares, statuses, recorded = dict[str, np.ndarray](), dict[str, str](), dict[str, float]()
    for name, found in sorted(products.items()):
        part = _part(name, found, scaled, given)
        shares[name] = rule.shares(part) if clients else np.zeros(0)
        if name not in given.recorded and (fixed := rule.record(part)) is not None:
            recorded[name] = fixed
        of_part = rule.statuses(part, shares[name]) if clients else []
        for message, status in zip(updates.messages, of_part, strict=True):
            if status:
                # What is said of the weights comes first.
                statuses.setdefault(message.client, status)
    if rule.is_mean and clients and all(np.array_equal(one, scaled) for one in shares.values()):
        # Nothing was changed, so that the bytes are those of the mean.
        messages = updates.messages
        combine_models(messages, weights, out_path, spec, given.adapters, values=given.values)
        return Ruled([], statuses, recorded)
    updates.write_sum({name: shares[part_of(name)] for name in spec}, out_path)
    if (layers := layers_of(spec)) and given.adapters.how in OF_PRODUCTS and clients:
        own = shares[OF_WEIGHTS]
        chosen = zip(updates.messages, own.tolist(), strict=True)
        kept = [(message, share) for message, share in chosen if share]
        put_products(kept, out_path, layers, given.adapters, 1.0 - float(own.sum()))
    return Ruled([], statuses, recorded)


def _part(name: str, found: Products, weights: np.ndarray, given: Given) -> Part:
    """Return what the rule may know of a part."""
    trained = given.root is not None
    return Part(
        weights,
        # Of products of factors, rounding may make a square of 0 negative.
        np.maximum(found.squares, 0.0),
        found.inner,
        found.along if trained else None,
        found.root if trained else None,
        given.recorded.get(name),
        name == OF_STATISTICS,
    )
