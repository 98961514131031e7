"""Parts of secure sums: neighbours, shares of secrets, masks, parsers.

Shamir's sharing is compared with a textbook version, numbers of neighbours with scipy's
distribution and with simulated rounds.
"""

from __future__ import annotations

import contextlib
import math
import re
import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from secagg_world import (
    COMPLETE,
    MOST,
    again,
    key_of,
    one_line,
    session_of,
    uniform,
)
from seeds import commit_seed

from fedtools.core.errors import UserError
from fedtools.privacy.secagg import masks, shamir, shares, signed, survivors
from fedtools.privacy.secagg.collector import Collector
from fedtools.privacy.secagg.graph import harary
from fedtools.privacy.secagg.keys import (
    Secrets,
    pair_masks,
    read_keys,
    self_mask,
    send_keys,
)
from fedtools.privacy.secagg.plan import Options, Plan, _disconnected, plan
from fedtools.privacy.secagg.session import MOST_ATTEMPTS, encode
from fedtools.privacy.secagg.signed import Step

# Numbers of neighbours


def bound(clients: int, degree: int, threshold: int, lost: int, colluding: int) -> float:
    """Compute the bound of `plan` by scipy, without parts of the ring."""
    of = stats.hypergeom
    privacy = (clients - colluding) * of.sf(threshold - 1, clients - 1, colluding, degree)
    left = clients - lost
    of_lost = lost * of.cdf(threshold - 1, clients - 1, left, degree)
    of_left = left * of.cdf(threshold - 2, clients - 1, left - 1, degree)
    return privacy + of_lost + of_left


def test_plans_of_the_usual_sizes():
    found = {n: plan(Options(), n) for n in (10, 100, 1000)}
    assert [(one.neighbours, one.threshold) for one in found.values()] == [
        (9, 5),
        (50, 21),
        (180, 79),
    ]
    assert (found[100].least, found[100].quorum) == (70, 61)
    assert "180 neighbours each, of whom 79 recover a secret" in str(found[1000])
    assert math.isclose(float(found[1000].failure), bound(1000, 180, 79, 300, 200), rel_tol=1e-9)
    # No smaller degree, and no other threshold, is as good.
    assert all(bound(1000, 170, t, 300, 200) > 2**-40 for t in range(2, 171))
    assert min(range(2, 181), key=lambda t: bound(1000, 180, t, 300, 200)) == 79
    assert 40 <= -math.log2(found[1000].failure) < 50


@pytest.mark.parametrize("clients", [3, 4, 7, 13, 31, 64, 150])
def test_every_plan_can_be_met(clients):
    for options in (Options(), Options(graph="complete"), Options(lost=0.1, colluding=0)):
        found = plan(options, clients)
        assert found.failure * 2**40 <= 1
        assert found.colluding < found.threshold <= found.neighbours
        assert found.quorum <= found.least and found.threshold >= 2
        assert 2 * found.quorum > found.clients + found.colluding


def simulated(degree: int, threshold: int, rounds: int = 4000) -> float:
    """Return the share of rounds of 100 clients that 30 lost ones spoil, on real graphs' shape."""
    random = np.random.default_rng(commit_seed())
    names = [f"c{number}" for number in range(100)]
    graph = harary(bytes(32), names, degree).neighbours
    edges = np.zeros((100, 100), np.int32)
    for client, row in enumerate(graph):
        edges[client, list(row)] = 1
    edges += np.eye(100, dtype=np.int32)
    left = random.permuted(np.arange(100)[None].repeat(rounds, 0), axis=1) >= 30
    # One that is left holds a share of its own.
    return float((left.astype(np.int32) @ edges < threshold).any(1).mean())


def test_simulated_rounds_fail_as_often_as_the_bound_says():
    loose = simulated(40, 23)
    # 6.1 % of 20,000 rounds; the bound counts a round once for each client.
    assert 0.045 < loose < 0.08 < bound(100, 40, 23, 30, 20) < 0.4
    assert simulated(50, 21) == 0
    assert float(Plan(100, 30, 20, 40, 23).failure) == pytest.approx(bound(100, 40, 23, 30, 20))


def test_the_ring_falls_apart_as_seldom_as_said():
    # Eight of twelve are bad, in two places of two or more: all 495 choices.
    def parts(bad: tuple[int, ...]) -> int:
        good = [one not in bad for one in range(12)]
        gaps = [
            start
            for start in range(12)
            if good[start - 1] and not (good[start] or good[start - 11])
        ]
        return len(gaps)

    apart = sum(parts(one) > 1 for one in combinations(range(12), 8)) / 495
    assert 0 < apart <= _disconnected(12, 8, 4)
    assert _disconnected(100, 50, 50) * 2**80 < 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lost": 0.5}, "below 1 together"),
        ({"lost": -0.1}, "lost is -0.1"),
        ({"colluding": 1.0}, "colluding is 1"),
        ({"failure_bits": 5}, "failure_bits is 5"),
        ({"graph": "ring"}, "graph is 'ring'"),
    ],
)
def test_options_out_of_range(change, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        Options(**change)


def test_too_few_clients():
    assert "a secure sum of 2 clients" in one_line(plan, Options(), 2)
    assert "could not agree" in one_line(plan, Options(lost=0.49, colluding=0.01), 5)


# The graph


def test_graphs_are_regular_symmetric_and_drawn_by_everything():
    session = session_of()
    graph = session.graph.neighbours
    for client, row in enumerate(graph):
        assert len(set(row)) == 10 and client not in row and list(row) == sorted(row)
        assert all(client in graph[other] for other in row)
    others = [
        session_of(label="other"),
        session_of(round=4),
        session_of(attempt=2),
        replace(session, roster={**session.roster, "c0000": "00" * 32}),
    ]
    assert all(other.graph != graph and other.digest != session.digest for other in others)
    # What clients do not agree on beforehand has no influence on the graph.
    assert replace(session, size=51).graph == session.graph
    assert replace(session, size=51).digest != session.digest


def test_all_neighbours_are_equally_likely():
    names = [f"c{number}" for number in range(20)]
    counts = Counter(
        other
        for number in range(2000)
        for other in harary(number.to_bytes(32, "big"), names, 4).neighbours[0]
    )
    assert stats.chisquare([counts[other] for other in range(1, 20)]).pvalue > 1e-4
    assert harary(b"", names[:5], 4).neighbours[1] == (0, 2, 3, 4)
    with pytest.raises(ValueError, match="degree"):
        harary(b"", names, 5)


# Shamir's sharing


def textbook(shared: list[tuple[int, bytes]], prime: int) -> int:
    """Interpolate at 0, Newton's divided differences, in a field."""
    xs = [x for x, _ in shared]
    table = [int.from_bytes(y, "big") for _, y in shared]
    for level in range(1, len(xs)):
        for i in range(len(xs) - 1, level - 1, -1):
            below = pow(xs[i] - xs[i - level], prime - 2, prime)
            table[i] = (table[i] - table[i - 1]) * below % prime
    value = 0
    for x, one in zip(reversed(xs), reversed(table), strict=True):
        value = (value * -x + one) % prime
    return value


@settings(max_examples=40)
@given(st.binary(min_size=32, max_size=32), st.data())
def test_shares_are_values_of_a_polynomial(secret, data):
    holders = data.draw(st.lists(st.integers(1, 10_001), min_size=1, max_size=24, unique=True))
    threshold = data.draw(st.integers(1, len(holders)))
    dealt = dict(zip(holders, shamir.deal(secret, holders, threshold), strict=True))
    kept = data.draw(st.permutations(holders))[:threshold]
    assert shamir.recover({x: dealt[x] for x in kept}, threshold) == secret
    assert textbook([(x, dealt[x]) for x in kept], shamir.PRIME) == int.from_bytes(secret, "big")
    if threshold > 1:
        with pytest.raises(ValueError, match="are needed"):
            shamir.recover({x: dealt[x] for x in kept[1:]}, threshold)


def test_fewer_shares_fit_every_secret():
    # With another secret and the same t - 1 shares there is one polynomial, as with the right one.
    secret, holders = bytes(32), [1, 2, 3]
    dealt = shamir.deal(secret, holders, 3)
    other = b"\xff" * 32
    third = [
        (0, other),
        (1, dealt[0]),
        (2, dealt[1]),
    ]
    # Lagrange at 3 of the points 0, 1, 2: 1, -3, 3.
    value = sum(
        weight * int.from_bytes(y, "big") for weight, (_, y) in zip((1, -3, 3), third, strict=True)
    )
    made = (value % shamir.PRIME).to_bytes(33, "big")
    assert shamir.recover({1: dealt[0], 2: dealt[1], 3: made}, 3) == other
    assert shamir.recover(dict(zip(holders, dealt, strict=True)), 3) == secret
    # Each share alone is uniform: bytes of a thousand of them, without the highest.
    found = b"".join(shamir.deal(secret, [7, 8], 2)[0][1:] for _ in range(1000))
    assert uniform(found)


def test_the_field_is_prime_and_small():
    assert all(pow(base, shamir.PRIME - 1, shamir.PRIME) == 1 for base in (2, 3, 5, 7, 11))
    assert shamir.PRIME.bit_length() == 257


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((bytes(31), [1, 2], 2), "31 bytes"),
        ((bytes(32), [1, 2], 3), "3 of 2"),
        ((bytes(32), [1, 1], 2), "different numbers"),
        ((bytes(32), [0, 1], 2), "different numbers"),
    ],
)
def test_sharing_out_of_range(arguments, words):
    with pytest.raises(ValueError, match=words):
        shamir.deal(*arguments)


def test_wrong_shares():
    with pytest.raises(ValueError, match="out of range"):
        shamir.recover({1: shares.NO_SHARE, 2: bytes(33)}, 2)
    with pytest.raises(ValueError, match="no shares of one secret"):
        # The line through these is 2^256 at 0.
        shamir.recover({1: (2**256).to_bytes(33, "big"), 2: (2**256).to_bytes(33, "big")}, 2)


# Masks


@pytest.mark.parametrize("bits_", [32, 64])
@pytest.mark.parametrize("size", [1, 7, 16384, 40000])
def test_masks_are_keystreams_of_aes(bits_, size):
    words = np.arange(size, dtype=f"<u{bits_ // 8}")
    keys = [bytes([number]) * 32 for number in range(3)]
    masks.apply(words, keys[:2], keys[2:])
    drawn = []
    for key in keys:
        cipher = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
        drawn.append(np.frombuffer(cipher.update(bytes(words.nbytes)), words.dtype))
    wanted = np.arange(size, dtype=words.dtype) + drawn[0] + drawn[1] - drawn[2]
    assert (words == wanted).all()


def test_words_hold_the_sum():
    assert masks.word_bits(MOST, 1000) == 32 == masks.word_bits(MOST, 2047)
    assert masks.word_bits(MOST, 2048) == 64
    with pytest.raises(ValueError, match="values up to"):
        masks.word_bits(1 << 60, 8)
    values = np.array([-5, 0, 5], np.int32)
    assert (masks.to_values(masks.to_words(values, 5, 64)) == values).all()
    for wrong, words in ((np.array([6]), "above"), (np.array([0.5]), "type"), (values, "above")):
        with pytest.raises(ValueError, match=words):
            masks.to_words(wrong, 4, 32)


def test_masking_needs_little_memory():
    words = np.zeros(1_000_000, np.uint32)
    masks.apply(words[:10], [bytes(32)])
    tracemalloc.start()
    masks.apply(words, [number.to_bytes(32, "big") for number in range(10)])
    assert tracemalloc.get_traced_memory()[1] < 300_000
    tracemalloc.stop()


def test_both_of_a_pair_find_the_same_mask_and_nobody_else():
    session, kept = session_of(), [Secrets() for _ in range(3)]
    keys = [
        read_keys(session, i, send_keys(session, i, one, key_of(session.names[i])))
        for i, one in enumerate(kept)
    ]
    plus, minus = pair_masks(session, 0, kept[0].masks, {1: keys[1].masks, 2: keys[2].masks})
    assert not minus and len({*plus}) == 2
    assert pair_masks(session, 1, kept[1].masks, {0: keys[0].masks}) == ([], [plus[0]])
    other = again(session)
    assert pair_masks(other, 0, kept[0].masks, {1: keys[1].masks})[0] != plus[:1]
    assert self_mask(session, 0, kept[0].seed) != self_mask(other, 0, kept[0].seed)


# Parsers


@settings(max_examples=60)
@given(st.data())
def test_parsers_take_any_bytes(data):
    session = session_of(COMPLETE)
    content = data.draw(st.binary(max_size=400))
    header = data.draw(st.sampled_from([b"", signed._header(Step.KEYS, session, 0)]))
    size = data.draw(st.sampled_from([0, session.plan.clients // 8 * 2]))
    calls = [
        lambda: read_keys(session, 0, header + content),
        lambda: signed.opened(Step.KEYS, session, 1, header + content, len(content) - 64),
        lambda: survivors.read_list(session, content),
        lambda: survivors.read_list(session, session.digest + content[:size]),
        lambda: survivors.read_certificate(session, session.digest + content),
        lambda: shares.read_rows(content, "rows", [0]),
        lambda: Collector(session).keys({"c0000": content, "c0001": header + content}),
    ]
    for call in calls:
        try:
            call()
        except UserError as error:
            assert "\n" not in str(error)


@settings(max_examples=60)
@given(st.sets(st.integers(0, 19)), st.data())
def test_lists_are_read_as_written(dealers, data):
    session = session_of()
    left = data.draw(st.sets(st.sampled_from(sorted(dealers)))) if dealers else set()
    listed = survivors.Listed(frozenset(dealers), frozenset(left))
    content = survivors.write_list(session, listed)
    assert survivors.read_list(session, content) == listed
    place = data.draw(st.integers(0, 8 * len(content) - 1))
    changed = bytearray(content)
    changed[place // 8] ^= 1 << place % 8
    with contextlib.suppress(UserError):
        assert survivors.read_list(session, changed) != listed


@settings(max_examples=60)
@given(st.lists(st.one_of(st.text(max_size=5), st.integers(0, 2**64 - 1), st.binary(max_size=5))))
def test_other_parts_have_other_bytes(parts):
    whole = encode("a", *parts)
    assert whole != encode("b", *parts)
    if parts:
        assert whole != encode("a", *parts[:-1])
        assert whole != encode("a", *parts[:-1], str(parts[-1]) + "x")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attempt": 0}, "attempt 0"),
        ({"attempt": MOST_ATTEMPTS + 1}, "attempt 65"),
        ({"round": -1}, "round -1"),
        ({"plan": COMPLETE}, "a plan for 8 clients, and a roster of 20"),
        ({"size": 0}, "0 values"),
        ({"most": 1 << 52}, "values up to"),
    ],
)
def test_sessions_out_of_range(change, words):
    given = session_of()
    assert words in one_line(lambda: replace(given, **change))


def test_clients_with_one_key_are_apart():
    # Those of a site.
    session = session_of(COMPLETE)
    roster = dict.fromkeys(session.names, session.roster["c0000"])
    shared = replace(session, roster=roster)
    message = send_keys(shared, 1, Secrets(), key_of("c0000"))
    assert read_keys(shared, 1, message)
    assert "sent by another client" in one_line(read_keys, shared, 2, message)


def test_secrets_are_not_printed():
    kept = Secrets()
    assert repr(kept) == "Secrets()" and kept != Secrets()
