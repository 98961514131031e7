"""Attacks on updates of pretrained models: adapters that distinguish models."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import kaldiio
import keywords
import numpy as np
import pytest
import simulated
import torch
import transformers
import yaml
from commands import inside
from pretrained_models import save_recogniser, save_wave, save_whisper
from safetensors.torch import load_file
from test_adapters import CONFORMER

from fedtools.attack.speakers.verify import COLUMNS
from fedtools.core.tables import read_tsv
from fedtools.data.ark import write_ark
from fedtools.data.datadir import DataDir

# In speech, each person has two clients.
PEOPLE = {"exp": ("kim", "lou", "mia"), "known": tuple("ann bob cat dan eva fay gil hal".split())}
LORA = {"kind": "lora", "rank": 2}
UPPER = LORA | {"targets": ["layers.2.*"]}
# The default leaves out the output layer, whose adapter tells which tokens were said.
OUTPUT = LORA | {"targets": ["*", "proj_out"]}
ASR = {"optim": "adamw", "optim_conf": {"lr": 0.01}, "batch_bins": 8000}
KWS = {"optim": "sgd", "optim_conf": {"lr": 0.5}, "batch_size": 3, "stack": 2}
KWS["augment"] = {"time_shift_ms": 0, "noise_volume": 0.0}
# Folder, data, and further options of the model.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "kws": ("mel80", "clips", {}),
    "kws kept": ("mel80", "clips", {"adapt": UPPER, "cache_frozen": True}),
    "kws head": ("mel80", "clips", {"adapt": {"kind": "head"}, "cache_frozen": True}),
    "ctc": ("whisper", "speech", {}),
    "ctc kept": ("whisper", "speech", {"adapt": UPPER, "cache_frozen": True}),
    "ctc wave": ("wavlm", "waves", {}),
    "seq2seq": ("whisper", "speech", {"criterion": "seq2seq", "adapt": OUTPUT}),
    "conformer": ("", "fbank", {}),
}
LAYERS = {
    "kws kept": ["block3", "head"],
    "kws head": ["head"],
    "conformer": ["embed", "block1", "block2"],
}
BLOCKS = ["block1", "block2", "block3"]
LAYERS["kws"] = [*BLOCKS, "head"]


def waves(path: Path, clients: list[str], seed: int) -> Path:
    """Make a data directory of a fifth of a second of noise for each utterance."""
    data, random, matrices = DataDir(path), np.random.default_rng(seed), []
    for client in clients:
        for number in range(2):
            name = f"{client}-{number}"
            matrices.append((name, random.normal(0, 0.1, (3200, 1)).astype("f4")))
            data.utt2spk[name] = data.utt2client[name] = client
            data.text[name] = "ab"
    path.mkdir(parents=True)
    data.feats_scp = write_ark(path / "feats.ark", matrices)
    data.write()
    return path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make models, data of two federations of other people, and speech of any speaker."""
    root = tmp_path_factory.mktemp("attacks")
    save_whisper(root / "mel80")
    save_recogniser(root / "whisper", bins=simulated.BINS)
    save_wave(root / "wavlm", "WavLM")
    groups = {name: [f"{one}{n}" for one in people for n in (1, 2)]
              for name, people in PEOPLE.items()}  # fmt: skip
    for seed, (name, clients) in enumerate((groups | {"anybody": ["xen1", "yan1"]}).items()):
        keywords.pack(root / "clips" / name, {one: [2, 2, 1, 1] for one in clients})
        folders = [waves(root / "waves" / name, clients, seed)]
        for kind in ("speech", "fbank"):
            path = root / kind / name
            folders.append(simulated.data_dir(path, clients, 2, seed, log_mel=kind == "speech"))
        for folder in folders:
            simulated.one_speaker_each(folder)
    text = root / "speech/exp/text"
    inside("train-tokens", text, root / "tokens", "--token-type", "char").ok()
    return root


def begin(world: Path, path: Path, kind: str, people: str, *more: object) -> None:
    folder, data, changes = MODELS[kind]
    model = {"network": "hf", "path": str(world / folder), "adapt": LORA} | changes
    if not folder:
        model = CONFORMER | {"adapt": {"rank": 2, "targets": ["*linear_q"]}}
    config = {"task": "kws" if data == "clips" else "asr", "rounds": 1, "keep_updates": True}
    config |= {"model": model, "training": KWS if data == "clips" else ASR}
    path.with_suffix(".yaml").write_text(yaml.safe_dump(config))
    tokens = world / ("whisper" if "criterion" in changes else "tokens")
    assets = () if data == "clips" else ("--asset", f"tokens={tokens}")
    train = world / data / people
    inside(
        *("init", path, "--config", path.with_suffix(".yaml"), "--method", "fedavg", *assets),
        *("--data", f"train={train}", "--data", f"valid={train}", *more),
    ).ok()


def train(world: Path, kind: str, people: str = "exp") -> Path:
    """Run an experiment's only round, once, for tests that do not change it."""
    path = world / f"{kind} {people}"
    if path.exists():
        return path
    start: tuple[object, ...] = ()
    if kind == "conformer":
        start = ("--start", base_of(world))
    elif people == "known":
        start = ("--start", train(world, kind) / "init.safetensors")
    begin(world, path, kind, people, *start)
    inside("rounds", path).ok()
    return path


def base_of(world: Path) -> Path:
    """Make an untrained conformer."""
    base = world / "conformer"
    if not base.exists():
        config = {"task": "asr", "rounds": 1, "model": CONFORMER, "training": ASR}
        base.with_suffix(".yaml").write_text(yaml.safe_dump(config))
        inside(
            *("init", base, "--config", base.with_suffix(".yaml"), "--method", "fedavg"),
            *("--data", f"train={world / 'fbank/exp'}", "--asset", f"tokens={world / 'tokens'}"),
        ).ok()
    return base / "init.safetensors"


def prints_of(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """Return layer -> model -> mean and deviation."""
    return {
        path.stem.partition("-")[2]: dict(kaldiio.load_scp(str(path)).items())
        for path in sorted(folder.glob("footprints.1.*.scp"))
    }


@pytest.mark.parametrize("kind", MODELS)
def test_all_attacks(world: Path, tmp_path: Path, kind: str):
    """Footprints of all layers, A1's decisions, and membership are computed."""
    path, data = train(world, kind), world / MODELS[kind][1]
    look = ("attack", "footprints", path, tmp_path, "--indicator", data / "anybody", "--round", 1)
    inside(*look).ok()
    found = prints_of(tmp_path)
    assert list(found) == LAYERS.get(kind, BLOCKS)
    clients = {f"{one}{n}" for one in PEOPLE["exp"] for n in (1, 2)}
    frozen = {"embed": kind == "conformer", "block1": "kept" in kind, "block2": "kept" in kind}
    for layer, models in found.items():
        assert models.keys() == clients
        for value in models.values():
            # Frozen layers distinguish no models.
            assert value.any() != frozen.get(layer, False)
    options = ("--resamples", "20")
    if data.name != "clips":
        inside("attack", "a1", tmp_path, tmp_path, *options).ok()
        rows = read_tsv(tmp_path / "a1.tsv", COLUMNS)
        assert {(row["targets"], row["others"]) for row in rows} == {("3", "12")}
    few = ("--round", 1, "--each", 2, "--references", 2, "--shadows", 1)
    inside("attack", "membership", path, tmp_path, *few, *options).ok()
    rows = read_tsv(tmp_path / "membership.tsv", None)
    assert {row["score"] for row in rows} == {"loss", "gradient", "audio"}
    no_features = inside("attack", "features", path, tmp_path / "features")
    no_features.fails(1, "no features are sent in this experiment")


# Commands that are not applicable, with the reason.
NOT_INVERTED = {
    "ctc wave": {"gradient matching": "takes waveforms"},
    "decoder": {"bag of tokens": "the output layer is not sent: adapters do not change it"},
}


@pytest.mark.parametrize(
    "kind", ["kws", "kws kept", "ctc", "ctc wave", "seq2seq", "decoder", "conformer"]
)
def test_inversion_of_updates(world: Path, tmp_path: Path, kind: str, monkeypatch):
    """It runs, or reports why not; eight iterations need not find anything."""
    changes = {"criterion": "seq2seq", "adapt": LORA}
    monkeypatch.setitem(MODELS, "decoder", ("whisper", "speech", changes))
    look = ("--round", 1, "--each", 1, "--set", "inversion.iterations=8", "--resamples", "20")
    done = inside("attack", "inversion", train(world, kind), tmp_path, *look).ok()
    rows = read_tsv(tmp_path / "inversion.tsv", None)
    parts = {row["part"]: row["status"] for row in read_tsv(tmp_path / "inversion_parts.tsv", None)}
    why = NOT_INVERTED.get(kind, {})
    assert parts.keys() == {"gradient matching", "bag of tokens"}
    for part, status in parts.items():
        if part in why:
            assert status.startswith("not applicable: ") and why[part] in status
            assert f"{part}: {status}" in done.err
        else:
            assert status == "ok"
        assert (part in {row["attack"] for row in rows}) == (part not in why)


@pytest.mark.parametrize("kind", ["kws kept", "ctc"])
def test_what_defences_cost(world: Path, tmp_path: Path, kind: str):
    """Without a defence, the accuracy is that of the next round's global model."""
    path = train(world, kind)
    wants = ("--round", 1, "--defence", "none", "--defence", "bits=8")
    inside("attack", "utility", path, tmp_path / "u.tsv", *wants).ok()
    (cost,) = (
        float(row["value"])
        for row in read_tsv(tmp_path / "u.tsv", None)
        if (row["defence"], row["on"]) == ("none", "everybody")
    )
    copied = shutil.copytree(path, tmp_path / "copy")
    inside("evaluate", copied, "--split", "valid").ok()
    rows = read_tsv(copied / "evaluate_valid.tsv", None)
    last = [row for row in rows if row["round"] == "1"]
    of = "clips" if kind == "kws kept" else "words"
    errors, total = (sum(float(row[name]) for row in last) for name in ("errors", of))
    expected = 100 * errors / total
    assert cost == pytest.approx(100 - expected if of == "clips" else expected, abs=0.01)


@pytest.mark.parametrize("kind", ["kws kept", "ctc", "conformer"])
def test_a2(world: Path, tmp_path: Path, kind: str):
    data, known = world / MODELS[kind][1], train(world, kind, "known")
    command = ["attack", "a2", known, train(world, kind), tmp_path]
    command += ["--indicator", data / "anybody", "--layer", "2", "--resamples", "20"]
    command += ["--set", "a2.width=8", "--set", "a2.epochs=1", "--set", "a2.network=0.25"]
    done = inside(*command)
    if data.name == "clips":
        # A client of clips is a speaker, who has one model in a round.
        done.fails(1, "no speaker has two models; give a second")
        return
    done.ok()
    rows = read_tsv(tmp_path / "a2.h2.tsv", COLUMNS)
    assert {(row["targets"], row["others"]) for row in rows} == {("3", "12")}


def test_footprints_are_those_of_the_merged_model(world: Path, tmp_path: Path):
    """Footprints equal those of transformers' layers with a client's update in their weights."""
    path, anybody = train(world, "ctc"), world / "speech/anybody"
    inside("attack", "footprints", path, tmp_path, "--indicator", anybody, "--round", "1").ok()
    table = read_tsv(path / "round_0001/update.1.tsv", None)
    place = [row["client"] for row in table].index("lou2")
    stacked = load_file(path / "round_0001/update.1.safetensors")
    states = [load_file(path / "round_0001/global.safetensors")]
    states.append({name: value[place] for name, value in stacked.items()})
    frames = list(dict(kaldiio.load_ark(str(anybody / "feats.ark"))).values())
    seen = [[_blocks(world / "whisper", state, one) for one in frames] for state in states]
    found = prints_of(tmp_path)
    for number in range(3):
        before, after = (torch.cat([one[number] for one in each]).numpy() for each in seen)
        apart = after.astype("f8") - before
        expected = np.stack([apart.mean(0), apart.std(0)])
        np.testing.assert_allclose(found[f"block{number + 1}"]["lou2"], expected, atol=1e-5)
        assert np.abs(expected).max() > 1e-3


@torch.no_grad()
def _blocks(folder: Path, state: dict[str, torch.Tensor], frames: np.ndarray):
    """Return the outputs of each block."""
    whole = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    encoder = whole.model.encoder
    for name, low in state.items():
        if name.endswith(".lora_a"):
            stem = name.removesuffix(".lora_a")
            layer = encoder.get_submodule(stem.removeprefix("encoder."))
            layer.weight += 16 / 2 * state[f"{stem}.lora_b"] @ low
    hidden = torch.nn.functional.gelu(encoder.conv1(torch.tensor(frames.T[None])))
    hidden = torch.nn.functional.gelu(encoder.conv2(hidden)).transpose(1, 2)
    hidden = hidden + encoder.embed_positions.weight[: hidden.shape[1]]
    found = []
    for layer in encoder.layers:
        hidden = layer(hidden, None)
        found.append(hidden[0])
    return found


def test_what_cannot_be_looked_at_is_told(world: Path, tmp_path: Path):
    """Adapters of the decoder alone leave the encoder's layers unchanged."""
    path = tmp_path / "e"
    changes = {"criterion": "seq2seq", "adapt": LORA | {"targets": ["decoder.*"]}}
    MODELS["decoder"] = ("whisper", "speech", changes)
    begin(world, path, "decoder", "exp")
    inside("rounds", path).ok()
    look = ("attack", "footprints", path, tmp_path, "--indicator", world / "speech/anybody")
    inside(*look, "--round", "1").ok()
    alike = "no layer of any model differs from the global model's"
    inside("attack", "a1", tmp_path, tmp_path).fails(1, alike)


def test_adapted_convolutions_have_a_value_for_each_channel(world: Path, tmp_path: Path):
    network = {"network": "dscnn", "network_conf": {"channels": 4, "blocks": 1}}
    shapes: list[dict[str, tuple[int, ...]]] = []
    start: tuple[object, ...] = ()
    for name, more in (("whole", {}), ("adapted", {"adapt": {"rank": 2}})):
        config = keywords.config_file(
            tmp_path / f"{name}.yaml", rounds=1, keep_updates=True, model=network | more
        )
        data = [f"{split}={world / 'clips/exp'}" for split in ("train", "valid")]
        inside(
            *("init", tmp_path / name, "--config", config, "--method", "fedavg", *start),
            *("--data", data[0], "--data", data[1]),
        ).ok()
        inside("rounds", tmp_path / name).ok()
        look = ("attack", "footprints", tmp_path / name, tmp_path / f"{name}.fp")
        inside(*look, "--indicator", world / "clips/anybody", "--round", "1").ok()
        found = prints_of(tmp_path / f"{name}.fp")
        shapes.append({layer: one["kim1"].shape for layer, one in found.items()})
        start = ("--start", tmp_path / "whole/init.safetensors")
    assert shapes[1] and shapes[1].items() <= shapes[0].items()
    assert set(shapes[1].values()) == {(2, 4)}
