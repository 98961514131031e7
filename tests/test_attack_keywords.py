"""The attacks on keyword networks, whose clients are speakers: on two tiny federations."""

from __future__ import annotations

from pathlib import Path

import keywords
import numpy as np
import pytest
import torch
from conftest import inside

from fedtools.attack.verify import COLUMNS
from fedtools.attack.victims import make_probe
from fedtools.federation.base import open_federation
from fedtools.files.tables import read_tsv

PEOPLE = {"known": ("kim", "lou", "mia"), "exp": ("ann", "bob", "cat", "dan")}
CLIPS = 5
TWO = ("--round", "1", "--round", "2")


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Two federations of other speakers, from one beginning; all take part in both rounds."""
    root = tmp_path_factory.mktemp("keywords")
    keywords.pack(root / "indicator", {"xen": [0, 0, 2, 1], "yan": [0, 0, 1, 1]})
    keywords.config_file(root / "c.yaml", rounds=2, keep_updates=True)
    for name, people in PEOPLE.items():
        keywords.pack(root / f"{name}_train", {one: [0, 0, 4, 4] for one in people})
        start = ("--start", root / "known" / "init.safetensors") if name == "exp" else ()
        inside(
            *("init", root / name, "--config", root / "c.yaml", "--method", "fedavg", *start),
            *("--data", f"train={root / f'{name}_train'}", "--set", "clients_per_round=null"),
        ).ok()
        inside("rounds", root / name).ok()
    return root


def test_an_input_of_a2_is_one_clip(world):
    federation = open_federation(world / "exp")
    clips, _ = make_probe(federation, 1, world / "indicator", 1, clips_at_once=1)
    (together,) = make_probe(federation, 1, world / "indicator", 1)[0].inputs()
    alone = list(clips.inputs())
    assert [one.shape[:2] for one in alone] == [(1, 1)] * CLIPS
    assert torch.equal(torch.cat(alone, 1), together)


def test_a2_on_two_rounds_of_keyword_networks(world, tmp_path):
    options = ("--indicator", world / "indicator", "--layer", "1", "--width", "8", "--epochs", "1")
    command = ("attack", "a2", world / "known", world / "exp")
    inside(*command, tmp_path, *TWO, *options, "--resamples", "20").ok()
    rows = read_tsv(tmp_path / "a2.h1.tsv", COLUMNS)
    # A speaker's two models are those of two rounds: 4 pairs of 28.
    assert {(row["targets"], row["others"]) for row in rows} == {("4", "24")}
    assert all(np.isfinite(float(row["minCllr"])) for row in rows)
    names = [line.split()[0] for line in (tmp_path / "a2.h1.scp").read_text().splitlines()]
    both = [one for people in PEOPLE.values() for one in people]
    assert names == sorted(f"{one}-r000{number}" for one in both for number in (1, 2))
    # Of one round no speaker has two models.
    inside(*command, tmp_path, *options).fails(1, "no speaker has two models; give a second")
    inside(*command, tmp_path, *options, *TWO[:2], *TWO[:2]).fails(2, "a round comes twice")
