"""Rounds on pretrained models: sampling, labels of a teacher, the ledger, refused updates."""

from __future__ import annotations

from pathlib import Path

import keywords
import numpy as np
import pytest
import simulated
import yaml
from commands import Result, inside, ledger
from pretrained_models import save_recogniser, save_whisper
from safetensors.numpy import load_file, save_file

CLIENTS = ["ann", "bob", "cat", "dan"]
TASKS = {
    "kws": {
        "task": "kws",
        "training": {"optim": "sgd", "optim_conf": {"lr": 0.05}, "batch_size": 2, "stack": 1},
        "method_conf": {"local_steps": 4},
    },
    "ctc": {"labels": "continuous"},
    "seq2seq": {"labels": "continuous"},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rounds")
    save_whisper(root / "mel80")
    save_recogniser(root / "whisper", bins=simulated.BINS, max_target_positions=20)
    keywords.pack(root / "clips", dict.fromkeys(CLIENTS, (2, 1, 2, 1)))
    simulated.data_dir(root / "speech", CLIENTS, 4, log_mel=True)
    text = root / "speech" / "text"
    inside("train-tokens", text, root / "tokens", "--token-type", "char").ok()
    return root


def begin(world: Path, path: Path, kind: str) -> Path:
    init(world, path, kind).ok()
    return path


def init(world: Path, path: Path, kind: str, *more: str) -> Result:
    model = {"network": "hf", "path": str(world / "whisper"), "adapt": {"rank": 2}}
    assets: tuple[object, ...] = ()
    sections = TASKS[kind]
    if kind == "kws":
        data, model["path"] = world / "clips", str(world / "mel80")
    else:
        training = {"optim": "adamw", "optim_conf": {"lr": 0.01}, "batch_bins": 4000}
        sections = {"task": "asr", "training": training | {"decay": 0.5} | sections}
        data, model["criterion"] = world / "speech", kind
        assets = ("--asset", f"tokens={world / ('tokens' if kind == 'ctc' else 'whisper')}")
    sections["training"] |= {"save_interval_steps": 1, "num_threads": 1}
    config = {"rounds": 2, "clients_per_round": 2, "keep_updates": True, "model": model}
    path.with_suffix(".yaml").write_text(yaml.safe_dump(config | sections))
    return inside(
        *("init", path, "--config", path.with_suffix(".yaml"), "--method", "fedavg", *assets),
        *("--data", f"train={data}", *more),
    )


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("option", ["targets", "also"])
def test_a_pattern_that_fits_no_layer_is_named(world: Path, tmp_path: Path, kind: str, option: str):
    path = tmp_path / "e"
    done = init(world, path, kind, "--set", f"model.adapt.{option}=['*nope*']")
    done.fails(1, "e.yaml", "adapt", option, "'*nope*'")
    assert not path.exists()


@pytest.mark.parametrize("kind", TASKS)
def test_adapters_are_sent_and_charged(world: Path, tmp_path: Path, kind: str):
    """Two of four clients take part in a round."""
    whole = begin(world, tmp_path / "whole", kind)
    inside("rounds", whole).ok()
    state = load_file(whole / "init.safetensors")
    size = 4 * sum(value.size for value in state.values())
    drawn = set()
    for number in (1, 2):
        sampled = (whole / f"round_{number:04d}/clients").read_text().split()
        rows = [row for row in ledger(whole) if row["round"] == str(number)]
        rows = [row for row in rows if row["client"] != "-"]
        assert sorted(row["client"] for row in rows) == sorted(sampled) and len(sampled) == 2
        drawn |= set(sampled)
        # Trained parameters are sent, and none of the base's.
        assert {int(row["bytes_up"]) for row in rows} == {size}
        down = (whole / f"round_{number:04d}/global.safetensors").stat().st_size
        assert {int(row["bytes_down"]) for row in rows} == {down}
    assert drawn <= set(CLIENTS)
    ended = load_file(whole / "round_0003/global.safetensors")
    assert all(not np.array_equal(ended[name], state[name]) for name in state)
    # No transcript is read with a teacher's labels.
    status = {row["status"] for row in ledger(whole)}
    assert status == {"ok"} or kind == "seq2seq"


@pytest.mark.parametrize("what", ["base", "rank"])
@pytest.mark.parametrize("kind", ["kws", "seq2seq"])
def test_who_sends_the_base_or_another_rank_is_refused_by_name(
    world: Path, tmp_path: Path, kind: str, what: str
):
    path = begin(world, tmp_path / "e", kind)
    inside("sample", path, "--round", "1", "--nj", "2").ok()
    for job in ("1", "2"):
        inside("train-local", path, "--round", "1", "--job", job).ok()
    file = path / "round_0001/update.2.safetensors"
    update = load_file(file)
    name = next(one for one in update if one.endswith("fc1.lora_a"))
    if what == "base":
        weights = load_file(world / ("mel80" if kind == "kws" else "whisper") / "model.safetensors")
        name = name.replace("lora_a", "weight")
        update[name] = weights[f"model.{name}"][None]
    else:
        update[name] = update[name].repeat(2, 1)
    save_file(update, file)
    said = inside("aggregate", path, "--round", "1").ok().err
    problem = "does not belong there" if what == "base" else "is float32 of shape"
    (row,) = (row for row in ledger(path) if "refused" in row["status"])
    assert name in row["status"] and problem in row["status"]
    assert f"round 1, {row['client']}: refused: " in said and name in said
