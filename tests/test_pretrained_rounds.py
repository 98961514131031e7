"""Rounds on pretrained models: sampling, labels of a teacher, kills, ranks, the ledger."""

from __future__ import annotations

from pathlib import Path

import keywords
import numpy as np
import pytest
import simulated
import yaml
from commands import inside, ledger, wait_until
from pretrained_models import save_recogniser, save_whisper
from safetensors.numpy import load_file, save_file
from test_ranks import start

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
# Places of the interruption: as the second round starts, or during training.
CUT = {"kws": "round_0002/clients", "seq2seq": "clients/*/checkpoint.*"}


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
    inside(
        *("init", path, "--config", path.with_suffix(".yaml"), "--method", "fedavg", *assets),
        *("--data", f"train={data}"),
    ).ok()
    return path


def everything(path: Path) -> dict[str, bytes]:
    """Return models, sampled clients, and client states; each rank has a file of messages."""
    patterns = ("round_*/global.safetensors", "round_*/clients", "clients/**/*.safetensors")
    found = {
        str(file.relative_to(path)): file.read_bytes()
        for pattern in patterns
        for file in path.glob(pattern)
        if "checkpoint" not in file.name
    }
    assert len(found) >= 5
    return found


def costs(path: Path) -> list[dict[str, str]]:
    return [row | {"seconds": ""} for row in ledger(path)]


def run_killed(path: Path, pattern: str) -> None:
    """Kill two ranks once a given file exists, and resume in one process."""
    ranks = [start(path, rank, size=2) for rank in range(2)]
    wait_until(lambda: any(path.glob(pattern)))
    for process in ranks:
        process.kill()
        process.communicate()
    assert not (path / "round_0002/.done").exists()
    inside("rounds", path).ok()


def run_by_steps(path: Path) -> None:
    for number in ("1", "2"):
        inside("sample", path, "--round", number, "--nj", "2").ok()
        for job in ("2", "1"):
            inside("train-local", path, "--round", number, "--job", job).ok()
        inside("aggregate", path, "--round", number).ok()


@pytest.mark.parametrize("kind", TASKS)
def test_the_same_bytes_after_a_kill_by_ranks_and_by_steps(world: Path, tmp_path: Path, kind: str):
    """Two of four clients take part in a round."""
    whole, other = (begin(world, tmp_path / name, kind) for name in ("whole", "other"))
    inside("rounds", whole).ok()
    if kind in CUT:
        run_killed(other, CUT[kind])
    else:
        run_by_steps(other)
    assert everything(other) == everything(whole)
    assert costs(other) == costs(whole)
    state = load_file(whole / "init.safetensors")
    size = 4 * sum(value.size for value in state.values())
    drawn = set()
    for number in (1, 2):
        sampled = (whole / f"round_{number:04d}/clients").read_text().split()
        rows = [row for row in costs(whole) if row["round"] == str(number)]
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
    status = {row["status"] for row in costs(whole)}
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
