"""DecoupleFL continues without a client that goes missing after stage 1."""

from __future__ import annotations

import shutil
from pathlib import Path

import kaldiio
import numpy as np
import pytest
import simulated
from asr_world import TRAIN, TRAINING, begin, model_of, some_data
from conftest import inside, ledger
from safetensors.numpy import load_file

from fedtools.data.ark import write_ark

STAGE_1, LAST = 2, 6
OPTIONS = ("personal=[encoder.embed.*, encoder.encoders.0.*]", f"stage1={STAGE_1}", "stage2=2")


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Make data in which each client's features are in an archive of its own."""
    root = tmp_path_factory.mktemp("gone")
    some_data(root / "train", TRAIN, 0)
    some_data(root / "valid", {"au": 2, "en": 4, "in": 3}, 1)
    matrices, places = kaldiio.load_scp(str(root / "train" / "feats.scp")), {}
    for client in TRAIN:
        own = [(name, matrices[name]) for name in matrices if name.startswith(client)]
        places |= write_ark(root / "train" / f"feats.{client}.ark", own)
    lines = [f"{name} {places[name]}\n" for name in matrices]
    (root / "train" / "feats.scp").write_text("".join(lines))
    simulated.config_file(root / "plain.yaml", model=model_of(0.1), training=TRAINING)
    inside("train-tokens", root / "train" / "text", root / "tokens", "--token-type", "char").ok()
    more = [x for one in OPTIONS for x in ("--set", f"method_conf.{one}")]
    path = begin(root, root / "begun", "decouplefl", *more, "--set", "training.labels=continuous")
    inside("rounds", path, "--to", str(STAGE_1)).ok()
    return root


def lose_archive(world: Path, path: Path, client: str) -> str:
    (world / "train" / f"feats.{client}.ark").rename(world / f"feats.{client}.ark")
    return f"its feats.{client}.ark is missing"


def lose_own(world: Path, path: Path, client: str) -> str:
    shutil.rmtree(path / "clients" / client)
    return "its trained personal parameters are missing"


@pytest.fixture
def mended(world):
    """Restore the archives that a test has moved away."""
    yield world
    for client in TRAIN:
        if (away := world / f"feats.{client}.ark").exists():
            away.rename(world / "train" / away.name)


def of_round(path: Path, number: int) -> dict[str, dict[str, str]]:
    return {row["client"]: row for row in ledger(path) if row["round"] == str(number)}


@pytest.fixture(scope="module")
def without_en(world) -> Path:
    """Return the oracle, in which en sends features that are deleted before aggregation."""
    path = shutil.copytree(world / "begun", world / "without")
    for command in ("sample", "train-local"):
        inside(command, path).ok()
    for file in path.glob("round_0003/features.en.*"):
        file.unlink()
    inside("aggregate", path).ok()
    inside("rounds", path).ok()
    return path


# The first client's archive is checked first.
@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize("lose", [lose_archive, lose_own])
def test_a_client_that_is_gone_after_stage_1(mended, without_en, tmp_path, lose, jobs):
    path = shutil.copytree(mended / "begun", tmp_path / "exp")
    why = lose(mended, path, "en")
    done = inside("rounds", path, "--nj", jobs).ok()
    for number in (STAGE_1 + 1, LAST):
        rows = of_round(path, number)
        assert rows["en"]["status"] == f"refused: left out by its job: {why}"
        assert (
            rows["en"]["bytes_up"] == "0" and rows["au"]["status"] == rows["in"]["status"] == "ok"
        )
        # With several jobs, another process reports it first.
        said = f"round {number}, en: refused: left out by its job: {why}"
        assert done.err.count(f"{said}\n") == 1
    sent = {file.name for file in path.glob("round_0003/features.*")}
    assert sent == {f"features.{name}.{kind}" for name in ("au", "in") for kind in ("ark", "scp")}
    # The other clients continue as if its features had not arrived.
    last = f"round_{LAST + 1:04d}/global.safetensors"
    assert (path / last).read_bytes() == (without_en / last).read_bytes()
    before, after = (load_file(path / name) for name in ("round_0001/global.safetensors", last))
    assert any(not np.array_equal(before[name], after[name]) for name in before)


def test_one_that_is_gone_is_scored_with_what_all_share(mended, without_en, tmp_path):
    """No model is built for it from a classifier and an extractor not trained together."""
    path = shutil.copytree(mended / "begun", tmp_path / "exp")
    lose_own(mended, path, "en")
    inside("rounds", path, "--evaluate", "valid").ok()
    told = inside("average", path).ok().err
    assert f"{path}/clients/en: personal parameters missing, not averaged\n" in told
    assert not (path / "clients" / "en" / "model.safetensors").exists()
    shared = load_file(path / "model.safetensors")
    assert {one.parent.name for one in path.glob("clients/*/model.safetensors")} == {"au", "in"}
    begun = load_file(path / "init.safetensors")
    assert all(np.array_equal(shared[name], begun[name]) for name in begun if "embed" in name)
    for model in ("average", f"round:{LAST}"):
        out = tmp_path / model.replace(":", "")
        err = inside("decode", path, mended / "valid", out, "--model", model).ok().err
        said = f"en: personal parameters missing in {path}, decoded with the shared model"
        assert f"{mended / 'valid'}: {said}\n" in err


def test_whoever_comes_first_may_be_gone_too(mended, tmp_path):
    path = shutil.copytree(mended / "begun", tmp_path / "exp")
    lose_archive(mended, path, "au")
    inside("rounds", path).ok()
    rows = of_round(path, LAST)
    assert [client for client in TRAIN if rows[client]["status"] != "ok"] == ["au"]


def test_one_that_is_gone_when_the_classifier_comes_back(mended, tmp_path):
    path = shutil.copytree(mended / "begun", tmp_path / "exp")
    inside("rounds", path, "--to", str(LAST - 1)).ok()
    why = lose_archive(mended, path, "in")
    inside("rounds", path).ok()
    rows = of_round(path, LAST)
    assert rows["in"]["status"].endswith(why) and rows["en"]["status"] == "ok"
    assert of_round(path, STAGE_1 + 1)["in"]["status"] == "ok"


def test_stage_1_wants_everybody_and_so_does_a_wrong_machine(mended, tmp_path):
    """If no archive exists at all, no client is left out, since the data are on another machine."""
    path = shutil.copytree(mended / "begun", tmp_path / "exp")
    inside("reset", path, "--round", "1").ok()
    lose_archive(mended, path, "en")
    inside("rounds", path).fails(1, "feats.en.ark: cannot be read", "where fedtools init ran")
    path = shutil.copytree(mended / "begun", tmp_path / "elsewhere")
    for client in ("au", "in"):
        lose_archive(mended, path, client)
    inside("rounds", path).fails(1, "feats.au.ark: cannot be read")
    assert not list(path.glob("round_0003/update.*"))


def test_while_it_trains_a_client_does_not_begin_again_unasked(world, tmp_path):
    """Not in stage 1, nor with another method."""
    methods = {"decouplefl": OPTIONS, "client": (), "joint": OPTIONS[:1]}
    for method, more in methods.items():
        options = [x for one in more for x in ("--set", f"method_conf.{one}")]
        path = begin(world, tmp_path / method, method, *options, "--set", "rounds=3")
        inside("rounds", path, "--to", "1").ok()
        (path / "clients" / "en").rename(tmp_path / "en")
        inside("rounds", path, "--to", "2").fails(1, "clients/en: the personal", "put the folder")
        (tmp_path / "en").rename(path / "clients" / "en")
        inside("rounds", path, "--to", "2").ok()


def test_one_that_is_gone_after_all_were_trained_jointly(world, tmp_path):
    path = begin(world, tmp_path / "exp", "joint", "--set", f"method_conf.{OPTIONS[0]}")
    inside("rounds", path, "--to", "2", "--evaluate", "valid").ok()
    shutil.rmtree(path / "clients" / "en")
    told = inside("average", path).ok().err
    assert f"{path}/clients/en: personal parameters missing, not averaged\n" in told
    assert {one.parent.name for one in path.glob("clients/*/model.safetensors")} == {"au", "in"}
    for model in ("average", "round:2"):
        out = tmp_path / model.replace(":", "")
        err = inside("decode", path, world / "valid", out, "--model", model).ok().err
        assert f"en: personal parameters missing in {path}" in err


def test_a_client_that_never_trained_has_nothing_to_lose(mended, tmp_path):
    """Without a stage 1, all clients start from the initial extractor."""
    more = [x for one in (*OPTIONS, "stage1=0") for x in ("--set", f"method_conf.{one}")]
    path = begin(mended, tmp_path / "exp", "decouplefl", *more)
    inside("rounds", path).ok()
    assert {row["status"] for row in ledger(path)} <= {"ok", "collapsed"}
