"""The attacks on keyword networks, whose clients are speakers: on two tiny federations."""

from __future__ import annotations

import shutil
from pathlib import Path

import keywords
import numpy as np
import pytest
import torch
from conftest import inside
from safetensors.numpy import load_file, save_file

from fedtools.attack.speakers.verify import COLUMNS
from fedtools.attack.victims import make_probe
from fedtools.core.tables import read_tsv
from fedtools.federation.federation import Federation

KNOWN = ("kim", "lou", "mia", "ned", "oda", "pia", "rob", "sue")
PEOPLE = {"known": KNOWN, "exp": ("ann", "bob", "cat", "dan")}
CLIPS = 5
TWO = ("--round", "1", "--round", "2")
SMALL = ("--set", "a2.width=8", "--set", "a2.epochs=1", "--set", "a2.network=0.25")


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Make two federations of different speakers with one initial model and full participation."""
    root = tmp_path_factory.mktemp("keywords")
    keywords.pack(root / "indicator", {"xen": [0, 0, 2, 1], "yan": [0, 0, 1, 1]})
    keywords.config_file(root / "c.yaml", rounds=2, keep_updates=True)
    for name, people in PEOPLE.items():
        keywords.pack(root / f"{name}_train", {one: [0, 0, 4, 4] for one in people})
        start = ("--start", root / "known" / "init.safetensors") if name == "exp" else ()
        inside(
            *("init", root / name, "--config", root / "c.yaml", "--method", "fedavg", *start),
            *("--data", f"train={root / f'{name}_train'}", "--set", "clients_per_round=null"),
            *("--data", f"valid={keywords.pack(root / f'{name}_valid', {'zoe': [2, 2, 4, 4]})}"),
        ).ok()
        inside("rounds", root / name).ok()
    return root


def test_an_input_of_a2_is_one_clip(world):
    federation = Federation(world / "exp")
    clips = make_probe(federation, 1, world / "indicator", 1, clips_at_once=1)
    (together,) = make_probe(federation, 1, world / "indicator", 1).inputs()
    alone = list(clips.inputs())
    assert [one.shape[:2] for one in alone] == [(1, 1)] * CLIPS
    assert torch.equal(torch.cat(alone, 1), together)


def test_a2_on_two_rounds_of_keyword_networks(world, tmp_path):
    options = ("--indicator", world / "indicator", "--layer", "1", *SMALL)
    command = ("attack", "a2", world / "known", world / "exp")
    inside(*command, tmp_path, *TWO, *options, "--resamples", "20").ok()
    rows = read_tsv(tmp_path / "a2.h1.tsv", COLUMNS)
    # A speaker's two models are from two rounds: 4 pairs of 28.
    assert {(row["targets"], row["others"]) for row in rows} == {("4", "24")}
    assert all(np.isfinite(float(row["minCllr"])) for row in rows)
    names = [line.split()[0] for line in (tmp_path / "a2.h1.scp").read_text().splitlines()]
    # The attacked speakers, and the known ones outside the network's training set.
    attacked = [one for one in names if one[:3] in PEOPLE["exp"]]
    assert attacked == [f"{one}-r000{number}" for one in PEOPLE["exp"] for number in (1, 2)]
    assert len({one[:3] for one in names} & {*KNOWN}) == 6 and len(names) == 20
    # In one round, no speaker has two models.
    inside(*command, tmp_path, *options).fails(1, "no speaker has two models; give a second")
    inside(*command, tmp_path, *options, *TWO[:2], *TWO[:2]).fails(2, "a round is duplicated")


def test_a1_sex_membership_and_costs_of_keyword_networks(world, tmp_path):
    def look(name: str, out: str, *rounds: str) -> Path:
        command = ("attack", "footprints", world / name, tmp_path / out)
        inside(*command, "--indicator", world / "indicator", *rounds).ok()
        rows = read_tsv(tmp_path / out / "models.1.tsv", None)
        assert len(rows) == len(rounds) // 2 * len(PEOPLE[name])
        assert {row["status"] for row in rows} == {"ok"}
        return tmp_path / out

    inside("attack", "a1", look("exp", "two", *TWO), tmp_path, "--resamples", "20").ok()
    rows = read_tsv(tmp_path / "a1.tsv", COLUMNS)
    # Two models of each of four speakers.
    assert {(row["targets"], row["others"]) for row in rows} == {("4", "24")}
    lines = [
        f"{one}\t{one}\t{'fm'[number % 2]}\t{one}\n"
        for people in PEOPLE.values()
        for number, one in enumerate(people)
    ]
    (tmp_path / "models.tsv").write_text("model\tspeaker\tgender\ttalks\n" + "".join(lines))
    table = ("--models", tmp_path / "models.tsv", "--resamples", "20", "--permutations", "9")
    folders = [look(name, name, *TWO[:2]) for name in PEOPLE]
    inside("attack", "attributes", *folders, tmp_path, *table).ok()
    rows = read_tsv(tmp_path / "attributes.tsv", None)
    assert rows and {(row["models"], row["speakers"]) for row in rows} == {("12", "12")}
    inside("attack", "membership", world / "exp", tmp_path, "--round", "1", "--each", "2").ok()
    assert read_tsv(tmp_path / "membership.tsv", None)
    options = ("--round", "2", "--split", "valid", "--defence", "none", "--defence", "bits=8")
    inside("attack", "utility", world / "exp", tmp_path / "utility.tsv", *options).ok()
    costs = {row["defence"]: row for row in read_tsv(tmp_path / "utility.tsv", None)}
    assert {row["rate"] for row in costs.values()} == {"accuracy"}
    # The oracle: without a defence it is the next round's global model.
    inside("evaluate", world / "exp", "--split", "valid").ok()
    known = {row["round"]: row for row in read_tsv(world / "exp" / "evaluate_valid.tsv", None)}
    assert float(costs["none"]["value"]) == pytest.approx(float(known["2"]["accuracy"]), abs=0.05)


def test_models_that_are_not_finite_are_named_by_all_attacks(world, tmp_path):
    """If all of an experiment's models are non-finite, none is silently left out of training."""
    for name in PEOPLE:
        shutil.copytree(world / name, tmp_path / name)
    exp = tmp_path / "exp"
    paths = {at: exp / f"round_000{at}" / "update.1.safetensors" for at in (1, 2)}
    for path in paths.values():
        state = load_file(path)
        key = min(name for name, value in state.items() if value.dtype.kind == "f")
        state[key][:2] = np.nan
        save_file(state, path)
    sent = [row["client"] for row in read_tsv(paths[1].with_suffix(".tsv"), None)][:2]
    options = ("--indicator", world / "indicator", "--layer", "1", *SMALL)
    a2 = ("attack", "a2", tmp_path / "known", exp, tmp_path / "a2", *TWO, *options)
    told = inside(*a2, "--resamples", "20").ok()
    for one in sent:
        assert f"{one}-r0001: refused: NaN or Inf in tensor '{key}'" in told.err
    membership = ("attack", "membership", exp, tmp_path, "--round", "1", "--each", "2")
    utility = ("attack", "utility", exp, tmp_path / "u.tsv", "--round", "1", "--defence", "none")
    for command in (membership, utility):
        told = inside(*command).ok()
        assert all(f"{one}: refused: NaN or Inf" in told.err for one in sent)
    for path in paths.values():
        state = load_file(path)
        state[key][:] = np.nan
        save_file(state, path)
    done = inside(*a2)
    assert done.code == 1 and "Traceback" not in done.err
    assert done.err.splitlines()[-1].startswith(f"fedtools: {exp / 'config.yaml'}: no speaker has")
