"""Secure sums in memory: equal to plain sums, and hidden from all below the bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from secagg_world import (
    COMPLETE,
    MOST,
    SPARSE,
    STEPS,
    World,
    again,
    losing,
    one_line,
    session_of,
    uniform,
    vectors,
)
from seeds import commit_seed

from fedtools.core.errors import UserError
from fedtools.privacy.secagg import masks, shamir, shares
from fedtools.privacy.secagg.keys import (
    Secrets,
    pair_masks,
    self_mask,
)
from fedtools.privacy.secagg.signed import HEADER_BYTES

# Sums


def test_the_sum_is_that_of_plain_numbers():
    world = World(session_of())
    assert (world.total() == world.expected()).all()
    assert not world.failed and not world.server.refused
    assert len(world.sent["unmask"]) == 20


@pytest.mark.parametrize("turn", range(6))
@pytest.mark.parametrize("plan_", [SPARSE, COMPLETE])
def test_sums_with_clients_lost_at_each_step(plan_, turn):
    random = np.random.default_rng([commit_seed(), turn])
    session = session_of(plan_, most=(MOST, 1 << 40)[turn % 2])
    gone = random.permutation(session.names)[: plan_.lost - 1]
    world = World(session, change=losing({name: STEPS[random.integers(5)] for name in gone}))
    try:
        total = world.total()
    except UserError as error:
        # Ten neighbours are not many.
        assert plan_ is SPARSE and "needed" in str(error)
        return
    assert total.dtype == np.int64 and (total == world.expected()).all()
    assert not world.server.refused


@pytest.mark.parametrize("step", STEPS)
def test_sums_with_all_that_may_be_lost_at_one_step(step):
    session = session_of(COMPLETE)
    world = World(session, change=losing(dict.fromkeys(session.names[2:4], step)))
    assert (world.total() == world.expected()).all()
    taken = 8 if step in ("survivors", "unmask") else 6
    assert len(world.server._listed.survivors) == taken


def test_messages_of_two_attempts_differ_though_vectors_do_not():
    values = vectors(session_of())
    first = World(session_of(), values).until("masked")
    second = World(again(session_of()), values, promises=first.promises).until("masked")
    for name, message in first.sent["masked"].items():
        mine, other = (one[HEADER_BYTES:-64] for one in (message, second.sent["masked"][name]))
        assert np.mean(np.frombuffer(mine, np.uint8) == np.frombuffer(other, np.uint8)) < 0.1
        # Keys, too: those of a client follow from no seed.
        assert first.sent["keys"][name][HEADER_BYTES:-64] != second.sent["keys"][name]
    assert len({one[HEADER_BYTES:-64] for one in first.sent["keys"].values()}) == 20


def test_too_few_are_left():
    names = session_of(COMPLETE).names
    for step in ("keys", "shares", "masked"):
        world = World(session_of(COMPLETE), change=losing(dict.fromkeys(names[:3], step)))
        said = one_line(world.total)
        assert said == f"round 3: 5 clients are left after step '{step}', and 6 are the least"
    world = World(session_of(COMPLETE), change=losing(dict.fromkeys(names[:4], "survivors")))
    assert one_line(world.total) == "round 3: 4 signed the survivors; 5 needed"


def test_too_few_shares_and_more_that_come_later():
    session = session_of(COMPLETE)
    held = {}

    def change(step, name, message):
        if step == "masked" and name == session.names[0]:
            return None
        if step == "unmask" and name in session.names[4:]:
            held[name] = message
            return None
        return message

    world = World(session, change=change)
    said = one_line(world.total)
    assert "round 3: 3 shares of the secrets of c0000, c0004, c0005, c0006, c0007; 4 need" in said
    late = dict([held.popitem()])
    assert (world.server.unmask(late) == world.expected()).all()


# What the server and colluders see


class Attacker:
    """The server with some clients, who know all of each other, and try to read one client.

    Args:
        world: a finished attempt, whose colluders' objects still have their secrets.
        kept: colluder -> its secrets and the shares it holds.
    """

    def __init__(self, world: World, victim: str, kept: dict[int, tuple[Secrets, dict]]):
        self.session, self.world, self.kept = world.session, world, kept
        self.victim = world.session.numbers[victim]
        body = world.sent["masked"][victim][HEADER_BYTES:-64]
        self.words = np.frombuffer(body, "<u4").copy()

    def shares(self, of: int, kind: str) -> dict[int, bytes]:
        """Return the shares that it holds of a client's secret: revealed, and colluders' own."""
        survived = of in self.world.server._listed.survivors
        found = {}
        if (kind == "seed") == survived:
            found.update(self.world.server._shares.get(of, {}))
        for number, (_, held) in self.kept.items():
            if of in held:
                found[shares.point(number)] = getattr(held[of], kind)
        return found

    def read(self, extra: dict[int, bytes] | None = None) -> np.ndarray:
        """Remove all masks of the victim that it can, as values."""
        session, server = self.session, self.world.server
        seed = server._seeds.get(self.victim)
        words = self.words.copy()
        if seed is None:
            seed = shamir.recover(self.shares(self.victim, "seed"), session.plan.threshold)
        masks.apply(words, (), [self_mask(session, self.victim, seed)])
        have = {number: one.masks for number, (one, _) in self.kept.items()}
        secret = {**self.shares(self.victim, "masks"), **(extra or {})}
        if len(secret) >= session.plan.threshold:
            mine = shamir.recover(secret, session.plan.threshold)
            dealers = server._neighbours(self.victim, server._listed.dealers)
            others = {one: server._keys[one].masks for one in dealers}
            masks.apply(words, *pair_masks(session, self.victim, mine, others)[::-1])
            return masks.to_values(words)
        for number in session.graph.neighbours[self.victim]:
            if number in server._listed.dropped:
                shared = self.shares(number, "masks")
                have[number] = shamir.recover(shared, session.plan.threshold)
        for number, one in have.items():
            if number in session.graph.neighbours[self.victim]:
                theirs = {self.victim: server._keys[self.victim].masks}
                masks.apply(words, *pair_masks(session, number, one, theirs))
        return masks.to_values(words)


def attacked(colluders: int) -> tuple[World, Attacker, dict[int, bytes]]:
    """Run an attempt, and return what the attackers have, and one share more than that."""
    session = session_of(replace(SPARSE, colluding=4), size=4000)
    victim = session.names[0]
    around = [session.names[one] for one in session.graph.neighbours[0]]
    # Two are lost, and four of the neighbours work with the server.
    lost = {around[-1]: "masked", around[-2]: "shares"}
    world = World(session, change=losing(lost)).until("survivors")
    kept = {
        session.numbers[name]: (world.clients[name]._kept, world.clients[name]._held)
        for name in around[:colluders]
    }
    honest = session.numbers[around[5]]
    extra = {shares.point(honest): world.clients[around[5]]._held[0].masks}
    assert (world.until("unmask").given["unmask"] == world.expected()).all()
    return world, Attacker(world, victim, kept), extra


def test_below_the_bound_a_vector_stays_uniform_and_above_it_is_read():
    world, attacker, extra = attacked(SPARSE.threshold - 1)
    values = world.values[world.session.names[0]]
    assert len(attacker.shares(0, "masks")) == SPARSE.threshold - 1
    assert uniform(attacker.words.tobytes())
    found = attacker.read().astype("<i4")
    assert uniform(found.tobytes()) and (found != values).mean() > 0.99
    # The plain vector would not pass, so that the test could fail.
    assert not uniform(values.astype("<i4").tobytes())
    assert (attacker.read(extra) == values).all()


def test_only_the_sum_of_the_honest_is_left():
    world, attacker, _ = attacked(SPARSE.threshold - 1)
    honest = world.server._listed.survivors - attacker.kept.keys()
    total = world.given["unmask"].copy()
    for number in attacker.kept:
        total -= world.values[world.session.names[number]]
    assert (total == sum(world.values[world.session.names[one]] for one in honest)).all()
    assert len(honest) >= SPARSE.least - SPARSE.threshold + 1
