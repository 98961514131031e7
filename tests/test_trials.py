"""Membership trials and their reference models: none depends on who is a member."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from fedtools.attack.membership.candidates import ANYBODY, SAME, Candidates, Draw
from fedtools.attack.membership.shadows import plan
from fedtools.tasks.base import Items

PEOPLE = tuple("abcdefgh")


def items_of(owners: dict[str, str], sizes: dict[str, int] | None = None) -> Items:
    """Return utterances whose speaker is the first letter of their name."""
    lacking = ("losses", "audio", "source", "labels", "loss_at", "errors")
    nothing: dict = dict.fromkeys(lacking)
    sizes = sizes or dict.fromkeys(owners, 100)
    speakers = {name: name[0] for name in owners}
    recordings = {name: name.partition("@")[0] for name in owners}
    return Items(owners, speakers, recordings, sizes, **nothing)


@pytest.fixture
def world() -> tuple[Items, list[str]]:
    """Make eight people with three clients each, of eight utterances of many lengths."""
    clients = [f"{one}{number}" for one in PEOPLE for number in range(3)]
    owners = {f"{client}-{n}": client for client in clients for n in range(8)}
    random = np.random.default_rng(0)
    return items_of(owners, {name: int(random.integers(50, 500)) for name in owners}), clients


def tried(candidates: Candidates) -> set[str]:
    return {item for pairs in candidates.pairs.values() for pair in pairs for item in pair}


@pytest.mark.parametrize("seed", range(5))
def test_no_reference_knows_what_it_is_a_reference_for(world, seed):
    items, clients = world
    draw = Draw(items, clients, 6, 4, seed)
    found = [draw.candidates(client) for client in clients]
    cohort = {name for one in found for name in one.cohort}
    assert len(cohort) == 4
    for one in found:
        models = {*one.cohort, *one.kin}
        assert one.client not in models
        assert {items.owners[item] for item in one.items}.isdisjoint(models)
        assert all(name[0] != one.client[0] for name in one.cohort)
        # One of the speaker's two other clients.
        assert len(one.kin) == 1 and one.kin[0][0] == one.client[0]
        assert len(one.population) > 10 and not tried(one) & set(one.population)
        assert {item[0] for item in one.population}.isdisjoint(one.client[0])
        for kind, pairs in one.pairs.items():
            assert len(pairs) == 6
            for member, other in pairs:
                assert items.owners[member] == one.client != items.owners[other]
                assert (other[0] == one.client[0]) == (kind == SAME)
        assert one.pairs.keys() == {SAME, ANYBODY}


def test_others_are_of_like_length(world):
    """Among hundreds there is one of nearly the same length; among eight, a similar one."""
    items, clients = world
    draw = Draw(items, clients, 6, 4, 0)
    ratios = {SAME: [], ANYBODY: []}
    for client in clients:
        for kind, pairs in draw.candidates(client).pairs.items():
            ratios[kind] += [np.log(items.sizes[one] / items.sizes[two]) for one, two in pairs]
    chance = np.log([[x / y for x in items.sizes.values()] for y in items.sizes.values()])
    assert np.median(np.abs(ratios[ANYBODY])) < 0.1 * np.median(np.abs(chance))
    assert np.median(np.abs(ratios[SAME])) < 0.6 * np.median(np.abs(chance))


def test_members_are_drawn_from_all():
    owners = {f"{client}-{n}": client for client in ("a1", "a2", "b1") for n in range(8)}
    items, seeds = items_of(owners), 400
    drawn = Counter(
        item
        for seed in range(seeds)
        for pair in Draw(items, ["a1", "a2", "b1"], 2, 4, seed).candidates("a1").pairs[SAME]
        for item in pair
    )
    assert drawn.keys() == {name for name, owner in owners.items() if owner != "b1"}
    # Each with a chance of 2 in 8: 100 times, give or take 9.
    assert all(abs(count - seeds / 4) < 45 for count in drawn.values())


def test_clients_of_several_people_are_matched_person_by_person():
    owners = {f"{one}-{n}": "x" for one in "ab" for n in range(4)}
    owners |= {f"{one}-{n}": "y" for one in "bc" for n in range(4, 8)}
    found = Draw(items_of(owners), ["x", "y"], 20, 4, 0).candidates("x")
    assert len(found.pairs[SAME]) == 4
    assert {one[0] for pair in found.pairs[SAME] for one in pair} == {"b"}


def test_held_out_speech_is_nobodys():
    owners = {f"{one}-{n}": one for one in PEOPLE for n in range(6)}
    held = {f"{one}-held{n}": "" for one in "abc" for n in range(6)}
    items = items_of(owners | held)
    draw = Draw(items, list(PEOPLE), 5, 4, 0)
    for client in PEOPLE:
        found = draw.candidates(client)
        assert (SAME in found.pairs) == (client in "abc")
        others = {other for _, other in found.pairs.get(SAME, ())}
        assert others <= held.keys() and {item[0] for item in others} <= {client}
        assert not {item for item in (*found.population,) if item in held}
        assert not found.kin


def test_a_recording_at_another_speed_is_the_same():
    """It is neither tried twice, nor in the data of a model that is trained without it."""
    clients = [f"{one}{number}" for one in PEOPLE for number in range(3)]
    names = [(f"{client}-{n}", client) for client in clients for n in range(4)]
    # a1 has a copy of a recording of a0.
    owners = {f"{name}{speed}": who for name, who in names for speed in ("", "@0.9", "@1.1")}
    owners["a0-0@1.1"] = "a1"
    items = items_of(owners)
    draw = Draw(items, clients, 4, 4, 0)
    for client in clients:
        candidates = draw.candidates(client)
        for pairs in candidates.pairs.values():
            tried = [items.recordings[one] for pair in pairs for one in pair]
            assert len(set(tried)) == len(tried) >= 6
        known = {items.recordings[one] for one in candidates.items}
        for one in plan(draw, candidates, 1, 0):
            assert len(one) == draw.size(client)
            rest = one[len(candidates.pairs[SAME]) :]
            assert rest and known.isdisjoint(items.recordings[item] for item in rest)
        if client == "a0":
            assert "a0-0@1.1" not in {one for pair in candidates.pairs[SAME] for one in pair}


def test_no_other_is_a_recording_of_the_client_at_another_speed():
    """Another client of the speaker has copies of all of its recordings, and one of its own."""
    owners = {f"a0-{n}": "a0" for n in range(4)} | {f"a0-{n}@1.1": "a1" for n in range(4)}
    owners |= {"a1-0": "a1", "b0-0": "b0", "b0-1": "b0"}
    items = items_of(owners)
    for seed in range(10):
        pairs = Draw(items, ["a0", "a1", "b0"], 4, 1, seed).candidates("a0").pairs
        assert [other for _, other in pairs[SAME]] == ["a1-0"]


def test_no_shadow_model_has_the_clients_other_recordings_at_another_speed():
    """Both other clients of the speaker, one of which is kin, have copies of all of them."""
    mine = {f"a0-{n}": "a0" for n in range(6)}
    owners = {**mine, **{f"b0-{n}": "b0" for n in range(12)}}
    for client in ("a1", "a2"):
        owners |= {f"{name}@{client}": client for name in mine}
        owners |= {f"{client}-{n}": client for n in range(3)}
    items = items_of(owners)
    draw = Draw(items, ["a0", "a1", "a2", "b0"], 1, 1, 0)
    candidates = draw.candidates("a0")
    assert len(candidates.kin) == 1 and len(candidates.pairs[SAME]) == 1
    for data in plan(draw, candidates, 3, 0):
        rest = {items.recordings[item] for item in data[1:]}
        assert len(data) == 6 and rest.isdisjoint(mine)
        assert {name[0] for name in rest} == {"a"}


def test_who_has_no_others_is_not_tried():
    owners = {f"a-{n}": "a" for n in range(3)}
    assert Draw(items_of(owners), ["a"], 5, 4, 0).candidates("a") is None
    assert Draw(items_of(owners), ["a", "b"], 5, 4, 0).candidates("b") is None


def test_shadow_models_have_one_of_each_pair(world):
    items, clients = world
    draw = Draw(items, clients, 6, 4, 0)
    candidates = draw.candidates("a1")
    data = plan(draw, candidates, 3, 0)
    assert len(data) == 6 and all(len(set(one)) == len(one) == 8 for one in data)
    members = []
    for one, twin in zip(data[::2], data[1::2], strict=True):
        for pair in candidates.pairs[SAME]:
            assert len({*pair} & {*one}) == len({*pair} & {*twin}) == 1
            assert {*pair} <= {*one, *twin}
        members.append([item for item in one if items.owners[item] == "a1"])
    # Membership is drawn anew.
    assert len({tuple(some) for some in members}) > 1
    known = {item for pair in candidates.pairs[SAME] for item in pair}
    for one in data:
        rest = [item for item in one if item not in known]
        # The same speaker's other speech is enough.
        assert len(rest) == 2 and {item[0] for item in rest} == {"a"}
        assert all(items.owners[item] != "a1" for item in rest)


def test_shadow_models_are_filled_with_other_peoples_speech():
    owners = {f"{one}-{n}": one for one in PEOPLE for n in range(12)}
    draw = Draw(items_of(owners), list(PEOPLE), 3, 4, 0)
    candidates = draw.candidates("a")
    for one in plan(draw, candidates, 2, 0):
        rest = set(one) - tried(candidates)
        assert len(one) == 12 and len(rest) == 9
        assert "a" not in {item[0] for item in rest} and not rest & {*candidates.population}
