"""Frozen normalisations of a keyword head's input: the fit, by hand and by others; federations."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

import kaldiio
import keywords
import numpy as np
import pytest
import simulated
import torch
import transformers
import yaml
from commands import Result, fedtools, inside, kill_when, ledger
from pretrained_models import save_recogniser, save_whisper
from safetensors.numpy import load_file, save_file
from sklearn.decomposition import PCA
from threadpoolctl import threadpool_limits
from torch import nn

from fedtools.client.options import ClipTraining
from fedtools.client.trainer import finite
from fedtools.models.adapt.copies import copy_of
from fedtools.models.keywords.projection import fit
from fedtools.models.training import torch_settings
from fedtools.tasks.kws.model import KwsModels, tensors_of
from fedtools.tasks.kws.projection import listed

SIZE, DIMENSION, CLASSES = 32, 6, len(keywords.CLASSES)
CLIENTS = {"ann": [2, 1, 2, 1], "bob": [1, 1, 1, 1], "cat": [3, 1, 1, 2], "dan": [1, 2, 1, 0]}
TEST = {"ann": [1, 1, 1, 1], "eve": [1, 2, 1, 1]}
VALID = {"fay": [2, 2, 2, 2]}
PUBLIC = {f"p{number}": [6, 5, 6, 5] for number in range(4)}
HEAD = {"head.weight", "head.bias"}
TENSORS = {"normalise.mean", "normalise.map"}
FILES = ("projection.safetensors", "projection.yaml")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make clips, two models of one shape, and a projection for the first."""
    root = tmp_path_factory.mktemp("projection")
    splits = {"train": CLIENTS, "valid": VALID, "test": TEST, "public": PUBLIC}
    for split, clients in splits.items():
        keywords.pack(root / split, clients, length=16000)
    save_whisper(root / "model")
    save_whisper(root / "other", encoder_ffn_dim=48)
    save_whisper(root / "narrow", d_model=16)
    fitted(root, root / "projection").ok()
    return root


def fitted(world: Path, out: Path, *more: object, data: Path | None = None) -> Result:
    words = ("fit-projection", data or world / "public", out, "--pretrained", world / "model")
    return inside(*words, "--dimension", DIMENSION, *more)


def begin(world: Path, exp: Path, *more: object, method: str = "fedavg", **model) -> Result:
    """Call init; `projection` gives the asset, other options are of the model."""
    asset = model.pop("projection", None)
    config = {
        "task": "kws",
        "rounds": 2,
        "keep_updates": True,
        "model": {
            "network": "hf",
            "path": str(world / "model"),
            "adapt": {"kind": "head"},
            "cache_frozen": True,
            **model,
        },
        "training": {
            "optim": "sgd",
            "optim_conf": {"lr": 0.05},
            "batch_size": 8,
            "stack": 3,
            "augment": {"time_shift_ms": 0, "noise_volume": 0.0},
        },
        "method_conf": {"local_steps": 1},
    }
    exp.with_suffix(".yaml").write_text(yaml.safe_dump(config))
    return inside(
        *("init", exp, "--config", exp.with_suffix(".yaml"), "--method", method),
        *(f"--data={split}={world / split}" for split in ("train", "valid", "test")),
        *(("--asset", f"projection={asset}") if asset else ()),
        *more,
    )


def projected(world: Path, path: Path, *more: object, **others) -> Path:
    asset = world / "projection"
    begin(world, path, *more, normalise="projection", projection=asset, **others).ok()
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


def outputs_of(model: Path, data: Path) -> np.ndarray:
    """Return transformers' own encoder's mean outputs, (clips, values), in double precision."""
    whole = transformers.WhisperForConditionalGeneration.from_pretrained(model).double()
    encoder = whole.model.encoder.eval()
    extract = transformers.WhisperFeatureExtractor(chunk_length=1)
    waves = np.load(data / "clips.npy").astype("f4") / 32768
    frames = extract(list(waves), sampling_rate=16000, return_tensors="pt").input_features
    with torch.no_grad():
        hidden = nn.functional.gelu(encoder.conv1(frames.double()))
        hidden = nn.functional.gelu(encoder.conv2(hidden)).transpose(1, 2)
        hidden = hidden + encoder.embed_positions.weight[: hidden.shape[1]]
        for layer in encoder.layers:
            hidden = layer(hidden, None)
        return encoder.layer_norm(hidden).mean(1).numpy()


def whitened_by_svd(values: np.ndarray, dimension: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and map from the singular vectors of the centred values."""
    mean = values.mean(0)
    _, lengths, rows = np.linalg.svd(values - mean, full_matrices=False)
    rows = rows[:dimension] * (len(values) - 1) ** 0.5 / lengths[:dimension, None]
    signs = [np.sign(max(row, key=abs)) for row in rows]
    return mean, rows * np.array(signs)[:, None]


@pytest.mark.parametrize(
    ("count", "size", "dimension"), [(200, 12, 5), (200, 12, 12), (9, 12, 8), (4100, 5, 3)]
)
def test_the_fit_is_that_of_singular_vectors_and_of_sklearn(count, size, dimension):
    random = np.random.default_rng(count + size)
    mixed = random.normal(0, 1, (count, size)) @ random.normal(0, 1, (size, size))
    values = (mixed + random.normal(0, 30, size)).astype("f4")
    found = fit(values, dimension)
    mean, rows = whitened_by_svd(values.astype("f8"), dimension)
    assert found.map.shape == (dimension, size)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(found.map, rows, rtol=1e-6, atol=1e-8 * abs(rows).max())
    white = (values - found.mean) @ found.map.T
    np.testing.assert_allclose(np.cov(white.T), np.eye(dimension), atol=1e-8)
    pca = PCA(dimension, whiten=True, svd_solver="full").fit(values.astype("f8"))
    theirs = pca.transform(values.astype("f8"))
    signs = np.sign((theirs * white).sum(0))
    np.testing.assert_allclose(theirs * signs, white, atol=1e-6)
    assert found.share == pytest.approx(pca.explained_variance_ratio_.sum(), rel=1e-9)


def test_the_fit_does_not_depend_on_threads():
    values = np.random.default_rng(0).normal(0, 1, (3000, 400)).astype("f4")
    found = []
    for threads in (1, 2, 4):
        with threadpool_limits(threads, "blas"):
            one = fit(values, 40)
        found.append((one.mean.tobytes(), one.map.tobytes(), one.share))
    assert found[0] == found[1] == found[2]


def test_what_does_not_vary_in_so_many_dimensions_is_refused():
    """Three dimensions in single precision, far from 0; rounding adds others."""
    random = np.random.default_rng(0)
    exact = random.normal(0, 1, (300, 3)) @ random.normal(0, 1, (3, 8)) + 20
    values = exact.astype("f4")
    fit(values, 3)
    with pytest.raises(ValueError, match="vary in fewer than 4 dimensions"):
        fit(values, 4)
    # A dimension of a thousandth of the others is one.
    fit((exact + 1e-3 * random.normal(0, 1, exact.shape)).astype("f4"), 8)
    with pytest.raises(ValueError, match="fewer than 9"):
        fit(values, 9)
    values[7, 1] = np.nan
    with pytest.raises(FloatingPointError, match="NaN"):
        fit(values, 2)


def test_the_commands_values_are_those_of_transformers(world: Path):
    """Mean and map agree with the outputs of another implementation, whitened apart."""
    outputs = outputs_of(world / "model", world / "public")
    found = load_file(world / "projection" / FILES[0])
    assert {name: (value.shape, value.dtype.name) for name, value in found.items()} == {
        "mean": ((SIZE,), "float32"),
        "map": ((DIMENSION, SIZE), "float32"),
    }
    mean, rows = whitened_by_svd(outputs, DIMENSION)
    np.testing.assert_allclose(found["mean"], mean, atol=2e-5)
    np.testing.assert_allclose(found["map"], rows, atol=5e-3 * abs(rows).max())
    white = (outputs - found["mean"]) @ found["map"].T.astype("f8")
    np.testing.assert_allclose(np.cov(white.T), np.eye(DIMENSION), atol=2e-3)
    facts = yaml.safe_load((world / "projection" / FILES[1]).read_text())
    assert facts["names"] == sorted(PUBLIC) and facts["people"] == 4
    assert facts["clips"] == len(outputs) == 88 and facts["dimension"] == DIMENSION
    assert (facts["version"], facts["window"], facts["clip_samples"]) == (1, 1, 16000)
    assert facts["data"] == str(world / "public")


def test_any_number_of_threads_and_a_kill_give_the_same_bytes(world: Path, tmp_path: Path):
    before = contents(world / "projection")
    # The path of the data is recorded, so that the same folder is used.
    data, frozen, own = world / "public", world / "public/frozen", os.sched_getaffinity(0)
    for threads in (1, 2):
        shutil.rmtree(frozen)
        with threadpool_limits(threads), torch_settings(threads):
            os.sched_setaffinity(0, sorted(own)[:threads])
            try:
                done = fitted(world, tmp_path / str(threads)).ok()
            finally:
                os.sched_setaffinity(0, own)
        assert "computing" in done.err and contents(tmp_path / str(threads)) == before
    shutil.rmtree(frozen)
    out = tmp_path / "killed"
    words = ("fit-projection", data, out, "--pretrained", world / "model", "--dimension", "6")
    kill_when([sys.executable, "-m", "fedtools", *map(str, words)], {}, data, "frozen/*.npy")
    assert not out.exists()
    fitted(world, out).ok()
    assert contents(out) == before
    # A kill between the two files leaves one of them from before.
    fitted(world, tmp_path / "five", "--dimension", "5").ok()
    shutil.copy(tmp_path / "five" / FILES[1], out)
    model = {"normalise": "projection", "projection": out}
    begin(world, tmp_path / "exp", **model).fails(1, str(out), "6 dimensions, but 5", "again")
    fitted(world, out).ok()
    assert contents(out) == before


def test_outputs_that_experiments_cached_are_not_computed_again(world: Path, tmp_path: Path):
    data = tmp_path / "data"
    shutil.copytree(world / "public", data / "train")
    shutil.rmtree(data / "train/frozen")
    for name in ("model", "valid", "test"):
        (data / name).symlink_to(world / name)
    begin(data, tmp_path / "exp").ok()
    assert "computing" in inside("rounds", tmp_path / "exp", "--to", "1").ok().err
    done = fitted(world, tmp_path / "out", data=data / "train").ok()
    assert "computing" not in done.err and len(list(data.glob("train/frozen/*.npy"))) == 1
    assert contents(tmp_path / "out")[FILES[0]] == contents(world / "projection")[FILES[0]]
    assert "6 of 32 dimensions" in done.out and "88 clips of 4 people" in done.out


def by_hand(kind: str, outputs: np.ndarray, path: Path) -> np.ndarray:
    """Return the head's input, computed in double precision from an experiment's files."""
    if kind == "layer":
        centred = outputs - outputs.mean(1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5)
    found = load_file(path / FILES[0])
    return (outputs - found["mean"].astype("f8")) @ found["map"].astype("f8").T


@pytest.mark.parametrize("kind", ["projection", "layer"])
def test_head_and_training_are_as_by_hand(world: Path, tmp_path: Path, kind: str):
    """One step of SGD on all clips of each client, in stacks; then the scores of all test clips."""
    path = tmp_path / "exp"
    asset = shutil.copytree(world / "projection", tmp_path / "asset")
    given = {"projection": asset} if kind == "projection" else {}
    begin(world, path, normalise=kind, **given).ok()
    # Nothing needs it any more.
    shutil.rmtree(asset)
    inside("rounds", path, "--evaluate", "test").ok()
    inside("clip-scores", path).ok()
    initial = load_file(path / "init.safetensors")
    assert set(initial) == HEAD | (TENSORS if given else set())
    size = DIMENSION if given else SIZE
    assert initial["head.weight"].shape == (CLASSES, size)
    inputs = by_hand(kind, outputs_of(world / "model", world / "train"), path)
    labels = np.load(world / "train/labels.npy")
    edges = np.cumsum([0, *map(sum, CLIENTS.values())])
    sent = {}
    for table in path.glob("round_0001/update.*.tsv"):
        names = [line.split("\t")[0] for line in table.read_text().splitlines()[1:]]
        tensors = load_file(table.with_suffix(".safetensors"))
        assert set(tensors) == HEAD
        sent |= {name: {n: v[at] for n, v in tensors.items()} for at, name in enumerate(names)}
    assert set(sent) == set(CLIENTS)
    for (name, counts), first, last in zip(CLIENTS.items(), edges, edges[1:], strict=False):
        assert last - first == sum(counts) <= 8
        own, target = inputs[first:last], np.eye(CLASSES)[labels[first:last]]
        logits = own @ initial["head.weight"].T + initial["head.bias"]
        shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        slope = (shares - target) / len(own)
        weight = initial["head.weight"] - 0.05 * slope.T @ own
        np.testing.assert_allclose(sent[name]["head.weight"], weight, atol=2e-4)
        assert abs(weight - initial["head.weight"]).max() > 2e-3
        bias = initial["head.bias"] - 0.05 * slope.sum(0)
        np.testing.assert_allclose(sent[name]["head.bias"], bias, atol=2e-4)
    last = load_file(path / "round_0003/global.safetensors")
    assert set(last) == HEAD
    inputs = by_hand(kind, outputs_of(world / "model", world / "test"), path)
    scores = kaldiio.load_scp(str(path / "scores_test/round_0002.scp"))
    found = np.stack([scores[name] for name in scores])
    np.testing.assert_allclose(found, inputs @ last["head.weight"].T + last["head.bias"], atol=2e-3)


MORE = {
    "not cached": {"cache_frozen": False},
    "adapters": {"cache_frozen": False, "adapt": {"rank": 2, "targets": ["layers.2.*"]}},
    "adapters kept": {"adapt": {"rank": 2, "targets": ["layers.2.*"]}},
    "half": {"cache_dtype": "float16"},
}


def losses(path: Path) -> list[float]:
    inside("rounds", path, "--evaluate", "test").ok()
    rows = [line.split("\t") for line in (path / "evaluate_test.tsv").read_text().splitlines()]
    found = [float(row[rows[0].index("loss")]) for row in rows[1:]]
    assert len(found) >= 2
    return found


@pytest.mark.parametrize("kind", ["projection", "layer"])
def test_cached_and_whole_networks_agree(world: Path, tmp_path: Path, kind: str):
    given = {"normalise": kind}
    if kind == "projection":
        given["projection"] = world / "projection"
    found = {}
    more = MORE if kind == "projection" else {"not cached": MORE["not cached"]}
    for name, model in {"cached": {}, "plain": None, **more}.items():
        path = tmp_path / name.replace(" ", "_")
        begin(world, path, "--set", "rounds=1", **(given | model if model is not None else {})).ok()
        found[name] = losses(path)
    np.testing.assert_allclose(found["not cached"], found["cached"], rtol=1e-4)
    # It is not what is trained without a normalisation.
    assert abs(np.subtract(found["plain"], found["cached"])).max() > 1e-3
    if more is MORE:
        np.testing.assert_allclose(found["adapters kept"], found["adapters"], rtol=1e-4)
        np.testing.assert_allclose(found["half"], found["cached"], rtol=2e-2)
        assert abs(np.subtract(found["adapters"], found["cached"])).max() > 1e-4


def test_the_projection_is_stored_with_models_and_never_sent(world: Path, tmp_path: Path):
    """Neither in messages, nor again for each client; jobs and kills do not change it."""
    asset = load_file(world / "projection" / FILES[0])
    alo = ("--set", "training.stack=2")
    one, two = (projected(world, tmp_path / name, *alo, method="alo") for name in ("one", "two"))
    inside("rounds", one, "--evaluate", "test").ok()
    inside("rounds", two, "--to", "1").ok()
    fedtools("rounds", two, "--nj", "2", "--evaluate", "test").ok()
    for number in (1, 2, 3):
        name = f"round_000{number}/global.safetensors"
        assert (one / name).read_bytes() == (two / name).read_bytes()
        assert set(load_file(one / name)) == HEAD
    messages = [*one.glob("round_*/update.*.safetensors"), *two.glob("round_*/update.*.s*s")]
    assert len(messages) >= 5 and all(set(load_file(path)) == HEAD for path in messages)
    kept = [*one.glob("clients/*/round_*/private.safetensors")]
    assert len(kept) == 4 and all(set(load_file(path)) == HEAD for path in kept)
    size = 4 * CLASSES * (DIMENSION + 1)
    rows = [row for row in ledger(one) if row["client"] != "-"]
    assert {int(row["bytes_up"]) for row in rows} == {size}
    inside("average", one, "--best", "2").ok()
    for file in ("init.safetensors", "model.safetensors"):
        state = load_file(one / file)
        assert set(state) == HEAD | TENSORS
        for name, value in asset.items():
            np.testing.assert_array_equal(state[f"normalise.{name}"], value)
    copied = {name: (one / name).read_bytes() for name in FILES}
    assert copied == contents(world / "projection")
    (one / FILES[0]).write_bytes(copied[FILES[0]][:-1] + b"x")
    inside("evaluate", one).fails(1, FILES[0], "changed since the experiment began")


def test_attacks_and_export_work_on_its_models(world: Path, tmp_path: Path):
    path = projected(world, tmp_path / "exp", "--set", "rounds=1")
    inside("rounds", path).ok()
    look = ("--indicator", world / "public", "--round", 1)
    inside("attack", "footprints", path, tmp_path / "prints", *look).ok()
    few = ("--round", 1, "--each", 2, "--resamples", 20)
    inside("attack", "membership", path, tmp_path / "attacks", *few).ok()
    inside("attack", "inversion", path, tmp_path / "inverted", "--round", 1, "--each", 1,
           "--set", "inversion.iterations=8", "--resamples", 20).ok()  # fmt: skip
    inside("average", path, "--best", 1).ok()
    said = inside("export", path, tmp_path / "out").ok().err
    assert "normalised as normalise.map (x - normalise.mean)" in said
    head, state = (
        load_file(tmp_path / "out/head.safetensors"),
        load_file(path / "model.safetensors"),
    )
    assert set(head) == HEAD | TENSORS
    assert all(np.array_equal(head[name], state[name]) for name in state)


def test_a_model_to_start_from_has_the_same_projection(world: Path, tmp_path: Path):
    path = projected(world, tmp_path / "exp")
    inside("rounds", path).ok()
    inside("average", path, "--best", 1).ok()
    start = ("--start", path / "model.safetensors")
    again = projected(world, tmp_path / "again", *start)
    state = load_file(path / "model.safetensors")
    assert load_file(again / "init.safetensors").keys() == state.keys()
    assert np.array_equal(
        load_file(again / "init.safetensors")["head.weight"], state["head.weight"]
    )
    changed = state | {"normalise.mean": state["normalise.mean"] + 1}
    save_file(changed, tmp_path / "changed.safetensors")
    given = {"normalise": "projection", "projection": world / "projection"}
    tried = begin(world, tmp_path / "no", "--start", tmp_path / "changed.safetensors", **given)
    tried.fails(1, "changed.safetensors", "another projection")
    tried = begin(world, tmp_path / "no", *start)
    tried.fails(1, "model.safetensors", "'head.weight'", "[4, 6]", "[4, 32]")
    assert not (tmp_path / "no").exists()


def damaged(**changes: object):
    """Return a function that changes facts of a projection, or its tensors by name."""

    def change(folder: Path) -> None:
        facts = yaml.safe_load((folder / FILES[1]).read_text())
        tensors = load_file(folder / FILES[0])
        for name, value in changes.items():
            if name in tensors:
                tensors[name] = value(tensors[name])
                save_file(tensors, folder / FILES[0])
            else:
                facts[name] = value
        (folder / FILES[1]).write_text(yaml.safe_dump(facts))

    return change


def with_nan(value: np.ndarray) -> np.ndarray:
    return np.where(np.arange(value.shape[-1]) == 3, np.float32(np.nan), value)


def cut(folder: Path) -> None:
    (folder / FILES[0]).write_bytes((folder / FILES[0]).read_bytes()[:-4])


def pickled(folder: Path) -> None:
    torch.save({"mean": torch.zeros(SIZE), "map": torch.eye(SIZE)}, folder / FILES[0])


# What is wrong -> what is done to the projection, options of the model, and what is said.
CHOSEN = {"normalise": "projection"}
REFUSED = {
    "no asset": (None, CHOSEN, ["projection", "--asset projection=FOLDER"]),
    "asset alone": (damaged(), {}, ["asset projection needs", "normalise: projection"]),
    "asset for layer": (damaged(), {"normalise": "layer"}, ["asset projection needs"]),
    "unknown": (None, {"normalise": "batch"}, ["normalise", "'batch'"]),
    "another model": (damaged(), CHOSEN | {"path": "other"}, ["of another model than", "other"]),
    "narrow model": (damaged(), CHOSEN | {"path": "narrow"}, ["of another model than"]),
    "another window": (damaged(), CHOSEN | {"window": 3}, ["window of 1 s", "--window 3"]),
    "another length": (damaged(clip_samples=8000), CHOSEN, ["clips of 0.5 s", "have 1 s"]),
    "too wide": (damaged(map=lambda _: np.zeros((33, SIZE), "f4")), CHOSEN, ["[33, 32]"]),
    "narrow mean": (damaged(mean=lambda one: one[:5]), CHOSEN, ["'mean'", "[5]", "[32]"]),
    "double": (damaged(map=lambda one: one.astype("f8")), CHOSEN, ["'map'", "float64"]),
    "one dimension": (damaged(map=lambda one: one[0]), CHOSEN, ["'map'", "[32]"]),
    "fewer": (damaged(map=lambda one: one[:4]), CHOSEN, ["4 dimensions, but 6"]),
    "other values": (damaged(map=lambda one: 2 * one), CHOSEN, ["not the file", "describes"]),
    "NaN": (damaged(map=with_nan), CHOSEN, ["NaN or Inf", "'map'"]),
    "Inf": (damaged(mean=lambda one: one / np.float32(0)), CHOSEN, ["NaN or Inf", "'mean'"]),
    "cut off": (cut, CHOSEN, [FILES[0], "cut off or damaged"]),
    "pickled": (pickled, CHOSEN, [FILES[0], "header"]),
    "no tensors": (lambda one: (one / FILES[0]).unlink(), CHOSEN, [FILES[0], "No such file"]),
    "no facts": (lambda one: (one / FILES[1]).unlink(), CHOSEN, ["no projection here"]),
    "another version": (damaged(version=2), CHOSEN, [FILES[1], "version"]),
    "not YAML": (lambda one: (one / FILES[1]).write_text("{a"), CHOSEN, [FILES[1], "not YAML"]),
    "unknown fact": (damaged(more=1), CHOSEN, [FILES[1], "more"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_init_refuses_in_one_line(world: Path, tmp_path: Path, case: str):
    change, model, said = REFUSED[case]
    given = dict(model)
    if "path" in model:
        given["path"] = str(world / model["path"])
    if change:
        given["projection"] = shutil.copytree(world / "projection", tmp_path / "asset")
        with np.errstate(divide="ignore"):
            change(tmp_path / "asset")
    begin(world, tmp_path / "exp", **given).fails(1, *said)
    assert not (tmp_path / "exp").exists()


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_an_experiments_own_data_are_refused(world: Path, tmp_path: Path, split: str):
    fitted(world, tmp_path / "own", data=world / split).ok()
    tried = begin(world, tmp_path / "exp", **CHOSEN, projection=tmp_path / "own")
    tried.fails(1, FILES[1], f"experiment's own {split} data", "other people")
    assert not (tmp_path / "exp").exists()


def test_a_server_alone_may_fit_on_what_it_trains_on(world: Path, tmp_path: Path):
    """It protects nobody by training; what it is tested on stays apart."""
    fitted(world, tmp_path / "own", data=world / "train").ok()
    alone = {"method": "centralized", "projection": tmp_path / "own"}
    assert "train data" not in begin(world, tmp_path / "exp", **CHOSEN, **alone).ok().err
    fitted(world, tmp_path / "tested", data=world / "test").ok()
    alone["projection"] = tmp_path / "tested"
    begin(world, tmp_path / "other", **CHOSEN, **alone).fails(1, "own test data")


def test_people_in_both_are_named(world: Path, tmp_path: Path):
    keywords.pack(tmp_path / "data", {"bob": [4] * 4, "eve": [3] * 4, "zoe": [1] * 4}, length=16000)
    fitted(world, tmp_path / "some", data=tmp_path / "data").ok()
    done = begin(world, tmp_path / "exp", **CHOSEN, projection=tmp_path / "some").ok()
    assert "1 of its people are also in the train data: bob\n" in done.err
    assert "1 of its people are also in the test data: eve\n" in done.err
    damaged(names=None)(tmp_path / "some")
    done = begin(world, tmp_path / "two", **CHOSEN, projection=tmp_path / "some").ok()
    assert "its 3 people are not listed" in done.err and "bob" not in done.err
    done = begin(world, tmp_path / "none", **CHOSEN, projection=world / "projection").ok()
    assert "warning" not in done.err
    people = [f"p{number:05d}" for number in range(10_001)]
    assert listed(people[1:]) == people[1:] and listed(people) is None


def test_fit_refuses_in_one_line(world: Path, tmp_path: Path):
    out = tmp_path / "out"
    fitted(world, out, "--dimension", "33").fails(1, "model", "32 values", "33")
    few = keywords.pack(tmp_path / "few", {"ann": [2, 2, 1, 1]}, length=16000)
    fitted(world, out, data=few).fails(1, "few", "6 clips, at least 7", "more clips")
    fitted(world, out, "--dimension", "5", data=few).ok()
    shutil.rmtree(out)
    # Copies of three clips.
    same = keywords.pack(tmp_path / "same", {"ann": [3, 3, 3, 3]}, length=16000)
    waves = np.load(same / "clips.npy")
    np.save(same / "clips.npy", waves[np.arange(12) % 3])
    lines = (same / "sha256sums").read_text().splitlines()
    digest = hashlib.sha256((same / "clips.npy").read_bytes()).hexdigest()
    lines = [line for line in lines if not line.endswith(" clips.npy")] + [f"{digest}  clips.npy"]
    (same / "sha256sums").write_text("".join(f"{line}\n" for line in lines))
    tried = fitted(world, out, data=same)
    computed, said = tried.err.splitlines()
    assert tried.code == 1 and "computing" in computed
    assert "same" in said and "vary in fewer than 6 dimensions; give more clips" in said
    fitted(world, out, data=tmp_path).fails(1, "no packed clips")
    tried = fitted(world, out, "--window", "5", "--pretrained", world / "train")
    tried.fails(1, "train", "no pretrained model here")
    save_whisper(tmp_path / "short", max_source_positions=40)
    tried = fitted(world, out, "--pretrained", tmp_path / "short")
    tried.fails(1, "public", "clips of 100 frames, the model accepts 80")
    assert not out.exists()


def test_a_window_is_that_of_the_experiment(world: Path, tmp_path: Path):
    fitted(world, tmp_path / "three", "--window", 3).ok()
    given = CHOSEN | {"projection": tmp_path / "three"}
    begin(world, tmp_path / "exp", window=3, **given).ok()
    begin(world, tmp_path / "no", **given).fails(1, "window of 3 s", "has 1 s", "--window 1")
    one, other = (
        load_file(path / FILES[0])["mean"] for path in (world / "projection", tmp_path / "three")
    )
    assert abs(one - other).max() > 1e-3


def test_heads_of_speech_recognition_refuse_it(tmp_path: Path):
    save_recogniser(tmp_path / "whisper", bins=simulated.BINS)
    data = simulated.data_dir(tmp_path / "train", ["au"], 2, log_mel=True)
    inside("train-tokens", data / "text", tmp_path / "ctc", "--token-type", "char").ok()
    (tmp_path / "seq2seq").symlink_to("whisper")
    for criterion in ("ctc", "seq2seq"):
        model = {"network": "hf", "path": str(tmp_path / "whisper"), "criterion": criterion}
        config = {"task": "asr", "model": model | {"normalise": "layer"}}
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
        words = ("init", tmp_path / "exp", "--config", tmp_path / "c.yaml", "--method", "fedavg")
        assets = ("--data", f"train={data}", "--asset", f"tokens={tmp_path / criterion}")
        inside(*words, *assets).fails(1, "c.yaml:", "normalise", "heads for keywords")


def test_without_it_only_a_default_is_recorded(world: Path, tmp_path: Path):
    begin(world, tmp_path / "plain").ok()
    begin(world, tmp_path / "said", normalise="none").ok()
    plain, said = (yaml.safe_load((tmp_path / one / "config.yaml").read_text())
                   for one in ("plain", "said"))  # fmt: skip
    assert plain["defaults"]["model"].pop("normalise") == said["model"].pop("normalise") == "none"
    assert plain == said
    one, two = (load_file(tmp_path / name / "init.safetensors") for name in ("plain", "said"))
    assert set(one) == HEAD and all(np.array_equal(one[name], two[name]) for name in HEAD)
    assert not any((tmp_path / "plain" / name).exists() for name in FILES)


def test_a_stack_holds_one_projection(world: Path):
    """Copies share its memory; a client that diverged is found beside it."""
    config = {"network": "hf", "path": str(world / "model"), **CHOSEN}
    config |= {"adapt": {"kind": "head"}, "cache_frozen": True}
    device = torch.device("cpu")
    made = KwsModels(config, CLASSES, 98, ClipTraining(), "x", device, world / "projection")
    stack = made.build(3)
    asset = load_file(world / "projection" / FILES[0])
    state = stack.state_dict()
    assert {name: len(state[name]) for name in sorted(TENSORS | HEAD)} == {
        "head.bias": 3, "head.weight": 3, "normalise.map": 1, "normalise.mean": 1,
    }  # fmt: skip
    for client in range(3):
        views = tensors_of(stack, client)
        for name, value in asset.items():
            np.testing.assert_array_equal(views[f"normalise.{name}"].numpy(), value)
    others = [made.build(), made.build(5), made.build(3, "copy"), copy_of(stack, 2)]
    for model in [*others, made.whole()]:
        shared = model.state_dict()["normalise.map"]
        assert shared.shape == (1, DIMENSION, SIZE) and torch.equal(shared, state["normalise.map"])
    places = {model.state_dict()["normalise.map"].data_ptr() for model in [stack, *others]}
    assert len(places) == 1
    assert [len(model.head.weight) for model in others] == [1, 5, 3, 2]
    assert finite(stack, True) == [True] * 3
    with torch.no_grad():
        stack.head.weight[1, 0, 0] = float("nan")
    assert finite(stack, True) == [True, False, True]
    # Each client has a head of its own, and fewer may be active than there are.
    values, weight = torch.randn(2, 4, 1, SIZE), stack.head.weight.detach()
    whitened = (values[0, :, 0] - torch.tensor(asset["mean"])) @ torch.tensor(asset["map"]).T
    expected = whitened @ weight[0].T + stack.head.bias[0]
    torch.testing.assert_close(stack(values)[0], expected, atol=1e-5, rtol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        found = stack.features(values)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[0], whitened, atol=1e-5, rtol=1e-5)
