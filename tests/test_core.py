"""A federation without torch: counts, with the guarantees of those that train models."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import ledger
from counts import CLIENTS, begin, fedtools, make_world
from safetensors.numpy import load_file
from split_mix import split_mix


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("counts"))


@pytest.fixture(scope="module")
def reference(world) -> Path:
    path = begin(world, world / "reference")
    fedtools(world, "rounds", path).ok()
    return path


def counts_of(world: Path, clients: list[str]) -> list[int]:
    """Compute counts, sharing no code with the plugin."""
    words = [word for name in clients for word in (world / "data" / name).read_text().split()]
    return [words.count("one"), words.count("two"), words.count("three")]


def test_counts_are_summed_exactly_in_phases(world, reference):
    sampled = {n: (reference / f"round_{n:04d}/clients").read_text().split() for n in range(1, 5)}
    found = {
        n: load_file(reference / f"round_{n:04d}/global.safetensors")["counts"].tolist()
        for n in range(1, 6)
    }
    assert sampled[1] == CLIENTS
    assert found[1] == [0, 0, 0] and found[2] == counts_of(world, CLIENTS)
    assert len(sampled[2]) == 4 and found[3] == counts_of(world, sampled[2])
    # Round 3 sends nothing, so that its state stays.
    assert found[4] == found[3]
    assert not list((reference / "round_0003").glob("update.*.safetensors"))
    assert found[5] == counts_of(world, sampled[4])


def test_every_round_of_every_seed_draws_its_own_clients(world, reference, tmp_path):
    """Clients with the lowest random numbers are drawn, by another implementation."""
    other = begin(world, tmp_path / "exp", "--seed", "5")
    fedtools(world, "rounds", other, "--to", "4").ok()
    found = set()
    for seed, path in ((0, reference), (5, other)):
        # In round 1, all clients take part.
        for number in (2, 3, 4):
            numbers = dict(zip(CLIENTS, split_mix(seed, number, len(CLIENTS)), strict=True))
            drawn = (path / f"round_{number:04d}/clients").read_text().split()
            assert drawn == sorted(sorted(CLIENTS, key=numbers.get)[:4])
            found.add(tuple(drawn))
    assert len(found) > 3


def test_the_ledger_is_the_sum_of_messages_and_charges_nobody_twice(reference):
    rows = ledger(reference)
    size = (reference / "round_0001/global.safetensors").stat().st_size
    up = {row["bytes_up"] for row in rows if row["client"] != "-" and row["round"] != "3"}
    assert up == {str(3 * 8)}
    assert {row["bytes_up"] for row in rows if row["round"] == "3"} == {"0"}
    held = set((reference / "round_0003/clients").read_text().split())
    for row in rows:
        if row["client"] == "-":
            assert row["bytes_down"] == "0"
        elif row["round"] == "4":
            # Rounds 3 and 4 begin with the same state: a client that had it does not need it again.
            assert row["bytes_down"] == ("0" if row["client"] in held else str(size))
        else:
            assert row["bytes_down"] == str(size)
    assert any(
        row["bytes_down"] == "0" for row in rows if row["round"] == "4" and row["client"] != "-"
    )
    assert all(row["status"] == "ok" for row in rows)


def test_poisson_sampling_may_draw_nobody(world, tmp_path):
    path = begin(
        world, tmp_path / "exp", "--set", "sampling=poisson", "--set", "clients_per_round=1"
    )
    fedtools(world, "rounds", path, "--to", 14).ok()
    sizes = [
        len((path / f"round_{number:04d}/clients").read_text().split())
        for number in range(2, 15)
        if number != 3
    ]
    assert 0 in sizes and max(sizes) > 1
    empty = next(n for n in range(4, 15) if not (path / f"round_{n:04d}/clients").read_text())
    before, after = (
        (path / f"round_{number:04d}/global.safetensors").read_bytes()
        for number in (empty, empty + 1)
    )
    assert before == after
