"""Frozen bottoms of pretrained models, computed once: unchanged losses, and refusals."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attacked
import kaldiio
import keywords
import numpy as np
import pytest
import simulated
import torch
import yaml
from commands import contents, inside, kill_when
from pretrained_models import save_recogniser, save_wave, save_whisper
from torch import nn

from fedtools.core.errors import UserError
from fedtools.data.ark import write_ark
from fedtools.data.datadir import DataDir
from fedtools.exchange.layer_cache import Place
from fedtools.models.acoustic.asr import build_model, classify, represent
from fedtools.models.acoustic.asr import losses as criterion_losses
from fedtools.models.keywords import build_network

CLIENTS = {f"c{number}": [2, 1, 2, number] for number in range(1, 6)}
UPPER = {"kind": "lora", "rank": 2, "targets": ["layers.2.*"]}
HEAD, NORM = {"kind": "head"}, {"kind": "head", "also": ["layer_norm*"]}
QUIET = {"time_shift_ms": 0, "noise_volume": 0.0}


# Normalisation of the convolutions: the base's, or the large model's.
WAVES = {"Wav2Vec2": "group", "Hubert": "layer", "WavLM": "layer"}


def waves(path: Path, clients: list[str], utterances: int) -> None:
    """Make a data directory of waveforms of several lengths, under a quarter of a second."""
    data, random, matrices = DataDir(path), np.random.default_rng(0), []
    for client in clients:
        for number in range(utterances):
            name = f"{client}-{number}"
            matrices.append((name, random.normal(0, 0.1, (1500 + 700 * number, 1)).astype("f4")))
            data.utt2spk[name] = data.utt2client[name] = client
            data.text[name] = "ab ba"
    path.mkdir(parents=True)
    data.feats_scp = write_ark(path / "feats.ark", matrices)
    data.write()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make clips, utterances, tokens, and a Whisper for each."""
    root = tmp_path_factory.mktemp("frozen")
    for split, seconds in (("train", CLIENTS), ("test", {"t1": [2, 2, 2, 2], "t2": [1, 3, 1, 1]})):
        keywords.pack(root / "clips" / split, seconds)
    save_whisper(root / "mel80")
    save_whisper(root / "mel20", bins=simulated.BINS)
    save_recogniser(root / "whisper", bins=simulated.BINS)
    simulated.data_dir(root / "speech" / "train", ["au", "en"], 6, log_mel=True)
    simulated.data_dir(root / "speech" / "test", ["xx", "yy"], 3, seed=1, log_mel=True)
    for kind, norm in WAVES.items():
        save_wave(root / kind, kind, norm)
    waves(root / "waves" / "train", ["au", "en"], 4)
    waves(root / "waves" / "test", ["xx", "yy"], 2)
    text = root / "speech" / "train" / "text"
    inside("train-tokens", text, root / "tokens", "--token-type", "char").ok()
    return root


def config_of(world: Path, task: str, model: dict, training: dict | None = None) -> dict:
    bins = 80 if task == "kws" else simulated.BINS
    name = "whisper" if model.get("criterion") == "seq2seq" else f"mel{bins}"
    section = {"network": "hf", "path": str(world / name), **model}
    if task == "kws":
        own = {"optim": "sgd", "optim_conf": {"lr": 0.05}, "batch_size": 3, "stack": 2}
        conf = {"local_steps": 3}
        own["augment"] = QUIET
    else:
        own = {"optim": "adam", "optim_conf": {"lr": 0.01}, "batch_bins": 4000}
        conf = {"local_epochs": 2}
    settings = {"rounds": 2, "clients_per_round": 2, "evaluate_every": 1, "keep_updates": True}
    return {
        "task": task,
        **settings,
        "model": section,
        "training": {**own, "save_interval_steps": 2, **(training or {})},
        "method_conf": conf,
    }


def data_of(path: Path) -> Path:
    """Return the folder of an experiment's own data."""
    return path.with_suffix(".data")


def begin(
    world: Path,
    path: Path,
    task: str,
    *,
    method: str = "fedavg",
    data: Path | None = None,
    **sections: dict,
):
    """Call init and return its result."""
    config = path.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(config_of(world, task, **sections)))
    spoken = "waves" if Path(sections["model"].get("path", "")).name in WAVES else "speech"
    # Data of its own, so that the outputs beside them are those of this experiment alone.
    data = data or shutil.copytree(world / ("clips" if task == "kws" else spoken), data_of(path))
    whole = sections["model"].get("criterion") == "seq2seq"
    if whole:
        # Search takes most of the time: one utterance of each client is enough.
        some = DataDir.read(data / "test")
        some.restrict([some.client_utterances(client)[0] for client in ("xx", "yy")]).write()
    tokens = world / ("whisper" if whole else "tokens")
    assets = () if task == "kws" else ("--asset", f"tokens={tokens}")
    return inside(
        *("init", path, "--config", config, "--method", method, *assets),
        *("--data", f"train={data / 'train'}", "--data", f"valid={data / 'test'}"),
    )


def train(world: Path, task: str, adapt: dict, **more: object) -> Path:
    """Run an experiment through all its rounds, once, for tests that do not change it."""
    model = {"adapt": adapt, **more}
    name = hashlib.sha256(repr((task, model)).encode()).hexdigest()
    path = world / name
    if not path.exists():
        begin(world, path, task, model=model).ok()
        inside("rounds", path, "--to", "2").ok()
        inside("evaluate", path).ok()
    return path


def rows_of(path: Path) -> list[dict[str, str]]:
    header, *lines = (line.split("\t") for line in path.read_text().splitlines())
    return [dict(zip(header, line, strict=True)) for line in lines]


def losses(path: Path) -> list[float]:
    """Return the losses of each client's training and of each evaluation."""
    tables = [*sorted(path.glob("round_*/update.*.tsv")), *sorted(path.glob("evaluate_*.tsv"))]
    found = [float(row["loss"]) for table in tables for row in rows_of(table)]
    assert len(found) >= 7
    return found


def assert_near(one: Path, other: Path) -> None:
    """Compare the losses of two experiments; those in messages have four digits."""
    np.testing.assert_allclose(losses(one), losses(other), rtol=1.1e-3)
    measured = [
        [float(row["loss"]) for row in rows_of(path / "evaluate_valid.tsv")]
        for path in (one, other)
    ]
    np.testing.assert_allclose(*measured, atol=1e-5, rtol=1e-5)


def made(path: Path) -> dict[str, np.ndarray]:
    """Return the stored outputs of an experiment: split, and owner if any -> values."""
    root = data_of(path)
    return {
        " ".join(one.parent.relative_to(root).parts).replace(" frozen", ""): np.load(one)
        for one in sorted(root.glob("*/frozen/**/*.npy"))
    }


CASES = {
    "kws layers": ("kws", UPPER, 50),
    "kws norm": ("kws", NORM, 50),
    "kws head": ("kws", HEAD, 1),
    "kws convolutions": ("kws", {"kind": "lora", "rank": 2}, 50),
    "asr layers": ("asr", UPPER, None),
    "asr head": ("asr", HEAD, None),
    "asr biases above": ("asr", {"kind": "head", "also": ["layers.1.fc1.bias"]}, None),
    "asr decoder": ("asr", {**UPPER, "targets": ["decoder.*"]}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_as_without(world: Path, case: str):
    task, adapt, positions = CASES[case]
    more = {"criterion": "seq2seq", "window": 1} if case == "asr decoder" else {}
    without = train(world, task, adapt, **more)
    plain = losses(without)
    kept = train(world, task, adapt, cache_frozen=True, **more)
    assert_near(kept, without)
    assert len(set(plain)) >= 6
    files = made(kept)
    assert not list(kept.glob("**/frozen"))
    if task == "kws":
        # 40 and 14 clips.
        assert {name: value.shape for name, value in files.items()} == {
            "train": (sum(map(sum, CLIENTS.values())), positions, 32),
            "test": (14, positions, 32),
        }
        return
    sampled = {name for one in kept.glob("round_*/clients") for name in one.read_text().split()}
    assert set(files) == {*(f"train {client}" for client in sampled), "test xx", "test yy"}
    counts = (world / "speech/train/utt2num_frames").read_text().split()
    frames = dict(zip(counts[::2], map(int, counts[1::2]), strict=True))
    for client in sampled:
        own = sum(max(100, n) // 2 for name, n in frames.items() if name[:2] == client)
        assert files[f"train {client}"].shape == (own, 32)


@pytest.mark.parametrize(("task", "kind"), [("kws", "Hubert"), *(("asr", one) for one in WAVES)])
def test_losses_of_waveforms_are_as_without(world: Path, task: str, kind: str):
    model = {"adapt": UPPER, "path": str(world / kind)}
    plain, kept = (train(world, task, **model, **more) for more in ({}, {"cache_frozen": True}))
    assert_near(kept, plain)
    assert len(set(losses(plain))) >= 6
    files = made(kept)
    # A position has 20 samples, and the first has 30.
    positions = (keywords.LENGTH - 30) // 20 + 1
    if task == "kws":
        assert files["test"].shape == (14, positions, 32)
        return
    lengths = [1500 + 700 * number for number in range(4)]
    counts = [(length - 30) // 20 + 1 for length in lengths]
    assert files["train au"].shape == (sum(counts), 32)


@pytest.mark.parametrize("task", ["kws", "asr"])
def test_half_precision_is_near(world: Path, task: str):
    plain = losses(train(world, task, UPPER))
    kept = train(world, task, UPPER, cache_frozen=True, cache_dtype="float16")
    np.testing.assert_allclose(losses(kept), plain, rtol=1e-2)
    assert losses(kept) != plain
    assert {value.dtype for value in made(kept).values()} == {np.dtype("f2")}


@pytest.mark.parametrize("task", ["kws", "asr"])
def test_values_are_those_of_transformers(world: Path, tmp_path: Path, task: str):
    """Stored values equal the outputs of transformers' own layers."""
    import transformers

    model = {"adapt": UPPER, "cache_frozen": True}
    begin(world, tmp_path / "exp", task, method="centralized", model=model).ok()
    inside("rounds", tmp_path / "exp", "--to", "1").ok()
    name = "mel80" if task == "kws" else "mel20"
    whole = transformers.WhisperForConditionalGeneration.from_pretrained(world / name)
    encoder = whole.model.encoder.eval()
    if task == "kws":
        wave = np.load(world / "clips/train/clips.npy")[3].astype("f4") / 32768
        frames = transformers.WhisperFeatureExtractor(chunk_length=1)(
            wave, sampling_rate=16000, return_tensors="pt"
        ).input_features
    else:
        import kaldiio

        places = (world / "speech/train/feats.scp").read_text().split()
        frames = torch.tensor(kaldiio.load_mat(places[1]).T[None])
        frames = nn.functional.pad(frames, (0, max(0, 100 - frames.shape[2])))
    with torch.no_grad():
        hidden = nn.functional.gelu(encoder.conv1(frames))
        hidden = nn.functional.gelu(encoder.conv2(hidden)).transpose(1, 2)
        hidden = hidden + encoder.embed_positions.weight[: hidden.shape[1]]
        for layer in encoder.layers[:2]:
            hidden = layer(hidden, None)
    found = made(tmp_path / "exp")["train"]
    found = found[3] if task == "kws" else found[: hidden.shape[1]]
    np.testing.assert_allclose(found, hidden[0].numpy(), atol=2e-5)


def sum_of(file: Path, values: np.ndarray) -> str:
    name = f"{file.parent.name}/{file.stem}\n"
    return hashlib.sha256(name.encode() + values.tobytes()).hexdigest()


def test_what_is_kept_is_read(world: Path, tmp_path: Path):
    """Training uses the stored values if they have their sums: replaced ones change its results."""
    path = tmp_path / "exp"
    begin(world, path, "kws", model={"adapt": HEAD, "cache_frozen": True}).ok()
    inside("rounds", path, "--to", "1").ok()
    whole = losses_of_valid(path)
    (file,) = data_of(path).glob("test/frozen/*.npy")
    values, sums = np.load(file), file.with_suffix(".sums")
    assert sums.read_text() == f"0 14 {sum_of(file, values)}\n"
    values[:] = values[:1]
    np.save(file, values)
    (path / "evaluate_valid.tsv").unlink()
    inside("evaluate", path).fails(1, str(file), "rows 0 to 13", "sum", "remove it")
    sums.write_text(f"0 14 {sum_of(file, values)}\n")
    assert losses_of_valid(path) != whole
    for damage in (lambda: file.write_bytes(file.read_bytes()[:-1]), lambda: file.write_bytes(b"")):
        damage()
        (path / "evaluate_valid.tsv").unlink(missing_ok=True)
        inside("evaluate", path).fails(1, str(file), "damaged", "remove it")
    file.unlink()
    assert losses_of_valid(path) == whole


def test_the_trigger_of_a_backdoor_is_in_clips_before_frozen_layers(world: Path, tmp_path: Path):
    """Attackers train as clients do whose clips were packed with it; the success likewise."""
    config = config_of(world, "kws", {"adapt": HEAD, "cache_frozen": True}, {"stack": 1})
    config |= {"rounds": 1, "clients_per_round": None}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    ours = attacked.expected_attackers([*CLIENTS], 2, 0)
    data = shutil.copytree(world / "clips", tmp_path / "clean")
    change, rewrite = attacked.triggered, attacked.rewrite
    rewrite(data / "train", tmp_path / "heard/train", change, ours)
    rewrite(data / "test", tmp_path / "heard/test", change, ["t1", "t2"], left_out="yes")
    setting = ("--set", attacked.section("backdoor", poisoned=1.0))
    for name, more in (("clean", setting), ("heard", ())):
        folder, path = tmp_path / name, tmp_path / f"exp_{name}"
        inside(
            *("init", path, "--config", tmp_path / "config.yaml", "--method", "fedavg", *more),
            *("--data", f"train={folder / 'train'}", "--data", f"test={folder / 'test'}"),
        ).ok()
        inside("rounds", path, "--nj", "1").ok()
    one, other = (attacked.messages(tmp_path / f"exp_{name}") for name in ("clean", "heard"))
    assert all(attacked.same(one[client], other[client]) for client in CLIENTS)
    assert len(list(data.glob("train/frozen/*.npy"))) == 2
    said = inside("attack", "backdoor", tmp_path / "exp_clean").ok().out.splitlines()[1].split()
    # The same model, and all labels are the target.
    inside("evaluate", tmp_path / "exp_heard", "--split", "test").ok()
    row = rows_of(tmp_path / "exp_heard/evaluate_test.tsv")[-1]
    assert said[1:4] == ["yes", "1", row["clips"]] and row["round"] == "1"
    assert float(said[4]) == pytest.approx(float(row["accuracy"]), abs=0.051)
    assert len(list(data.glob("test/frozen/*.npy"))) == 2


def losses_of_valid(path: Path) -> list[str]:
    inside("evaluate", path).ok()
    return [row["loss"] for row in rows_of(path / "evaluate_valid.tsv")]


@pytest.mark.parametrize("task", ["kws", "asr"])
def test_a_killed_run_goes_on_to_the_same_bytes(world: Path, tmp_path: Path, task: str):
    model = {"adapt": UPPER, "cache_frozen": True}
    whole = train(world, task, **model)
    path = tmp_path / "killed"
    begin(world, path, task, model=model).ok()
    command = [sys.executable, "-m", "fedtools", "rounds", str(path), "--to", "2"]
    kill_when(command, dict(os.environ), data_of(path), "train/frozen/**/*.sums")
    inside("rounds", path, "--to", "1").ok()
    # Missing ones are computed again.
    for folder in data_of(path).glob("train/frozen"):
        shutil.rmtree(folder)
    inside("rounds", path, "--to", "2").ok()
    inside("evaluate", path).ok()
    made_whole = relative(data_of(whole), "*/frozen/**/*.[ns]*")
    found = relative(data_of(path), "*/frozen/**/*.[ns]*")
    assert len(found) >= 4
    assert found.items() <= made_whole.items()
    for pattern in ("round_*/global.safetensors", "round_*/update.*.safetensors", "evaluate_*"):
        assert relative(path, pattern) == relative(whole, pattern)


def relative(root: Path, pattern: str) -> dict[Path, bytes]:
    return {one.relative_to(root): data for one, data in contents(root.glob(pattern)).items()}


MASKS = simulated.CONFIG["model"]["specaug_conf"]
REFUSED = {
    "shift": ("kws", {}, {"augment": {"noise_volume": 0.0, "time_shift_ms": 5}}, "time_shift_ms 5"),
    "noise": ("kws", {}, {"augment": {"time_shift_ms": 0}}, "noise_volume 0.1"),
    "specaug": ("asr", {"specaug": "specaug", "specaug_conf": MASKS}, {}, "specaug"),
    "full": ("kws", {"adapt": {"kind": "full"}}, {}, "conv1.weight"),
    "bias": ("asr", {"adapt": {"kind": "bias"}}, {}, "conv1.bias"),
    "also": ("asr", {"adapt": {"also": ["conv2.weight"]}}, {}, "conv2.weight"),
    "limit": ("kws", {"path": "wide", "cache_limit": 1}, {}, "cache_limit 1 MB"),
    "asr limit": ("asr", {"path": "wide20", "cache_limit": 1}, {}, "train 1.2 MB"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_kept_is_refused_at_init(world: Path, tmp_path: Path, case: str):
    task, model, training, said = REFUSED[case]
    if "path" in model:
        bins = 80 if task == "kws" else simulated.BINS
        wide = save_whisper(tmp_path / "wide", bins, d_model=512)
        model = {**model, "path": str(wide)}
    path = tmp_path / "exp"
    tried = begin(world, path, task, model={"cache_frozen": True, **model}, training=training)
    tried.fails(1, "cache_frozen", said)
    assert not path.exists()


def test_the_size_is_told(world: Path, tmp_path: Path):
    path = tmp_path / "exp"
    told = begin(world, path, "kws", model={"adapt": UPPER, "cache_frozen": True}).ok().err
    # 40 and 14 clips of 50 positions of 32 values of 4 bytes.
    assert "0.3 MB on disk: train 0.3 MB, valid 0.1 MB" in told
    assert sum(map(sum, CLIENTS.values())) == 40
    # Not again for other experiments with the same outputs.
    inside("rounds", path, "--evaluate", "valid").ok()
    model = {"adapt": UPPER, "cache_frozen": True}
    other = begin(world, tmp_path / "other", "kws", data=data_of(path), model=model)
    assert "on disk" not in other.ok().err


def batches_of(build: Callable[[dict], nn.Module], given: Callable) -> list[torch.Tensor]:
    """Return losses under dropout of the trained part, without and with a stored bottom."""
    found = []
    for cached in (False, True):
        model = build({"cache_frozen": cached})
        torch.manual_seed(7)
        for step in range(3):
            torch.default_generator.manual_seed(step)
            found.append(given(model, cached))
    return found


def test_masks_do_not_depend_on_the_bottom_keywords(world: Path):
    torch.manual_seed(1)
    frames = torch.randn(4, 100, 80)
    head = nn.Linear(32, 5)

    def build(more: dict) -> nn.Module:
        config = {"network": "hf", "path": str(world / "mel80"), "adapt": UPPER, **more}
        torch.manual_seed(3)
        network = build_network(config, 5, "test", clients=2)
        network.head = nn.Sequential(nn.Dropout(0.5), head)
        return network.train()

    def given(network: nn.Module, cached: bool) -> torch.Tensor:
        return network((network.lower(frames) if cached else frames).unflatten(0, (2, 2)))

    found = batches_of(build, given)
    for plain, kept in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(kept, plain, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found[0], found[1])


@pytest.mark.parametrize("criterion", ["ctc", "seq2seq"])
def test_masks_do_not_depend_on_the_bottom_speech(world: Path, criterion: str):
    """This holds for padded batches, with dropout in the trained layers."""
    torch.manual_seed(1)
    speech, lengths = torch.randn(3, 200, 20), torch.tensor([200, 140, 100])
    batch = {"text": torch.tensor([[5, 6, 7], [8, 9, -1], [7, -1, -1]])}
    batch |= {"text_lengths": torch.tensor([3, 2, 1]), "prompt": torch.tensor([[3], [3], [3]])}
    targets = ["encoder.layers.2.*"] if criterion == "seq2seq" else ["layers.2.*"]

    def build(more: dict) -> nn.Module:
        config = {"network": "hf", "path": str(world / "mel20"), "criterion": criterion}
        torch.manual_seed(3)
        how = {**UPPER, "targets": targets}
        return build_model({**config, "adapt": how, **more}, ["<blank>", *"abcdefghi"]).train()

    def given(model: nn.Module, cached: bool) -> torch.Tensor:
        said = {"speech": speech, "speech_lengths": lengths}
        if cached:
            with torch.no_grad():
                hidden, positions = model.encoder.lower(speech, lengths, model.depth)
            said = {"hidden": hidden, "speech_lengths": positions}
        values, positions = represent(model, said)
        values = nn.functional.dropout(values, 0.5)
        values = classify(model, values)
        return criterion_losses(model, values, positions, batch)

    found = batches_of(build, given)
    for plain, kept in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(kept, plain, atol=1e-4, rtol=1e-5)
    assert not torch.allclose(found[0], found[1])


@pytest.mark.parametrize("task", ["kws", "asr"])
def test_experiments_share_outputs(
    world: Path, tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch
):
    """The second experiment on the same data computes none; with a head, it needs no encoder."""
    first, second = tmp_path / "first", tmp_path / "second"
    model = {"adapt": HEAD, "cache_frozen": True}
    begin(world, first, task, model=model).ok()
    said = inside("rounds", first, "--evaluate", "valid").ok().err
    assert "computing outputs of frozen layers" in said
    before = relative(data_of(first), "*/frozen/**/*.[ns]*")
    if task == "kws":
        monkeypatch.setitem(sys.modules, "transformers", None)
    begin(world, second, task, data=data_of(first), model=model).ok()
    assert "computing" not in inside("rounds", second, "--evaluate", "valid").ok().err
    assert relative(data_of(first), "*/frozen/**/*.[ns]*") == before
    assert losses(first) == losses(second)
    if task == "kws":
        inside("clip-scores", second, "--split", "valid").ok()
        inside("detection", second, "--split", "valid").ok()
        # Another weight, another key.
        other = shutil.copytree(world / "mel80", tmp_path / "mel80")
        weights = bytearray((other / "model.safetensors").read_bytes())
        weights[-1] ^= 1
        (other / "model.safetensors").write_bytes(weights)
        third = begin(
            *(world, tmp_path / "third", task),
            data=data_of(first),
            model={**model, "path": str(other)},
        )
        third.fails(1, "transformers")


def test_another_clip_is_another_key(world: Path, tmp_path: Path):
    """A clip that changed gets a new output if it was packed again, and an error otherwise."""
    path, model = tmp_path / "exp", {"adapt": HEAD, "cache_frozen": True}
    begin(world, path, "kws", model=model).ok()
    data = data_of(path) / "test" / "clips.npy"
    inside("evaluate", path).ok()
    (before,) = data.parent.glob("frozen/*.npy")
    kept = np.load(before)
    clips = np.load(data)
    clips[5] = clips[6]
    np.save(data, clips)
    for file in data.parent.glob("frozen/[0-9a-f]*"):
        file.unlink()
    (path / "evaluate_valid.tsv").unlink()
    inside("evaluate", path).fails(1, "clips.npy has another sum", "pack-clips")
    assert all(np.load(one).shape == kept.shape for one in data.parent.glob("frozen/*.npy"))
    lines = (data.parent / "sha256sums").read_text().splitlines()
    known = [line for line in lines if not line.endswith(" clips.npy")]
    known.append(f"{hashlib.sha256(data.read_bytes()).hexdigest()}  clips.npy")
    (data.parent / "sha256sums").write_text("".join(f"{line}\n" for line in known))
    begin(world, tmp_path / "other", "kws", data=data_of(path), model=model).ok()
    inside("evaluate", tmp_path / "other").ok()
    # Those of the old clips are gone.
    (after,) = data.parent.glob("frozen/*.npy")
    assert after.name.split(".")[0] != before.name.split(".")[0]
    assert after.name.split(".")[1] == before.name.split(".")[1]
    changed = (np.load(after) != kept).any((1, 2)).tolist()
    assert changed[5] and not changed[6]
    np.testing.assert_array_equal(np.load(after)[5], np.load(after)[6])


def test_other_features_are_another_key(world: Path, tmp_path: Path):
    """Utterances of the same names and lengths, with other values."""
    model = {"adapt": HEAD, "cache_frozen": True}
    begin(world, tmp_path / "one", "asr", model=model).ok()
    inside("rounds", tmp_path / "one", "--to", 1).ok()
    data = shutil.copytree(data_of(tmp_path / "one"), data_of(tmp_path / "two"))
    found = sorted((data / "train/frozen").glob("*/*.npy"))
    before = {path.parent.name: (path.name, np.load(path)) for path in found}
    assert before
    table = (world / "speech/train/feats.scp").read_text().splitlines()
    matrices = [(line.split()[0], kaldiio.load_mat(line.split()[1])) for line in table]
    places = write_ark(data / "train/feats.ark", [(name, one + 1) for name, one in matrices])
    lines = [f"{name} {place}\n" for name, place in places.items()]
    (data / "train/feats.scp").write_text("".join(lines))
    begin(world, tmp_path / "two", "asr", data=data, model=model).ok()
    inside("rounds", tmp_path / "two", "--to", 1).ok()
    for path in (data / "train/frozen").glob("*/*.npy"):
        name, values = before[path.parent.name]
        assert path.name.split(".")[0] != name.split(".")[0]
        assert path.name.split(".")[1] == name.split(".")[1]
        assert np.abs(np.load(path) - values).max() > 1e-3


PARTS = [[(2, 3)], [(0, 1), (3, 5)], [(1, 2)]]
VALUES = np.arange(10, dtype="f4").reshape(5, 2)


def computed(parts: list[list[tuple[int, int]]], most: int = 9) -> Iterator[list[np.ndarray]]:
    """Yield values of batches, and fail after some of them."""
    for number, batch in enumerate(parts):
        if number == most:
            raise KeyboardInterrupt
        yield [VALUES[first:last] for first, last in batch]


def place_in(folder: Path, data: str = "0" * 16, model: str = "1" * 16) -> Place:
    return Place(folder / "frozen", data, model, VALUES.shape, "float16")


def test_one_of_several_processes_computes_and_the_others_wait(tmp_path: Path):
    place, log = place_in(tmp_path), tmp_path / "log"

    def compute(parts: list) -> Iterator[list[np.ndarray]]:
        with open(log, "a") as file:
            file.write("begun\n")
        time.sleep(0.3)
        yield from computed(parts)

    def work() -> None:
        place.make(PARTS, compute)
        assert (place.open().rows(0, 5) == VALUES).all()

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=work) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert log.read_text() == "begun\n"


def test_a_kill_loses_a_part_at_most(tmp_path: Path):
    """What is there stays, unless it is damaged; a line that was cut off is no part."""
    place, asked = place_in(tmp_path), []

    def compute(most: int) -> Callable[[list], Iterator[list[np.ndarray]]]:
        def found(parts: list) -> Iterator[list[np.ndarray]]:
            asked.append(parts)
            return computed(parts, most)

        return found

    with pytest.raises(KeyboardInterrupt):
        place.make(PARTS, compute(2))
    assert not place.is_complete()
    with pytest.raises(UserError, match="missing or damaged"):
        place.open()
    # A line that was cut off, and a value of the first batch.
    place.sums.write_text(place.sums.read_text() + "1 2 123abc")
    with open(place.path, "r+b") as file:
        file.seek(128 + 2 * 4)
        file.write(b"xx")
    with pytest.raises(KeyboardInterrupt):
        place.make(PARTS, compute(1))
    place.make(PARTS, compute(9))
    assert asked == [PARTS, [PARTS[0], PARTS[2]], [PARTS[2]]]
    np.testing.assert_array_equal(np.load(place.path), VALUES)
    lines = place.sums.read_text().splitlines()
    assert sorted(lines) == [
        f"{first} {last} {sum_of(place.path, VALUES[first:last].astype('<f2'))}"
        for first, last in sorted(part for batch in PARTS for part in batch)
    ]


def test_only_parts_that_are_used_are_compared_with_their_sums(tmp_path: Path):
    place = place_in(tmp_path)
    place.make(PARTS, computed)
    with open(place.path, "r+b") as file:
        file.seek(128 + 3 * 4)
        file.write(b"xx")
    outputs = place.open()
    np.testing.assert_array_equal(outputs.rows(0, 3), VALUES[:3])
    for rows in ([3], [0, 4]):
        with pytest.raises(UserError, match="rows 3 to 4 do not have the sum"):
            outputs.check(np.array(rows))


@pytest.mark.parametrize(
    "header",
    [
        b"\x93NUMPY\x01\x00" + (9990).to_bytes(2, "little") + b"{'descr':" + b"(" * 9981,
        b"\x93NUMPY\x01\x00v\x00{'descr':'<f2','fortran_order':False,'shape':(99999999999999999999,)}",
        b"\x93NUMPY\x02\x00\x00\x00\x00\x80{",
        b"\0",
    ],
)
def test_a_crafted_header_is_damage(tmp_path: Path, header: bytes):
    place = place_in(tmp_path)
    place.make(PARTS, computed)
    values = place.path.read_bytes()
    place.path.write_bytes(header + values[len(header) :])
    with pytest.raises(UserError, match="missing or damaged; remove it"):
        place_in(tmp_path).open()
    # Cut within the values.
    place.path.write_bytes(values[:-3])
    with pytest.raises(UserError, match="missing or damaged; remove it"):
        place_in(tmp_path).open()


def test_another_owners_file_is_damage(tmp_path: Path):
    """Of the same shape, and with its own sums; also that of other data, or of another model."""
    one, two = (Place(tmp_path / name, "0" * 16, "1" * 16, (5, 2), "float16") for name in "ab")
    others = [Place(tmp_path / "a", *hashes, (5, 2), "float16") for hashes in ("2" * 2, "01")]
    one.make(PARTS, computed)
    written = one.path.read_bytes(), one.sums.read_bytes()
    for place in (two, *others):
        place.make(PARTS, computed)
        assert (place.open().rows(0, 5) == VALUES).all()
        place.path.write_bytes(written[0])
        place.sums.write_bytes(written[1])
        with pytest.raises(UserError, match="do not have the sum"):
            place.open().rows(0, 5)


def test_outputs_of_other_models_stay_and_of_other_data_go(tmp_path: Path):
    old, new = "0" * 16, "f" * 16
    for place in (place_in(tmp_path, old), place_in(tmp_path, old, "2" * 16)):
        place.make(PARTS, computed)
    assert len(list((tmp_path / "frozen").glob("[0-9a-f]*"))) == 4
    place_in(tmp_path, new).make(PARTS, computed)
    names = sorted(one.name for one in (tmp_path / "frozen").glob("[0-9a-f]*"))
    assert names == [f"{new}.{'1' * 16}.npy", f"{new}.{'1' * 16}.sums"]


@pytest.mark.parametrize("parts", [PARTS[:2], [*PARTS, [(1, 2)]], [[(0, 6)]], []])
def test_parts_hold_every_row_once(tmp_path: Path, parts: list):
    with pytest.raises(ValueError, match="each of 5 rows once"):
        place_in(tmp_path).make(parts, computed)
    assert not (tmp_path / "frozen").exists()


def test_keys_tell_apart_all_that_values_depend_on(world: Path):
    """They depend on the layers, the storage, and the values of a base of the same shape."""
    other = save_whisper(world / "other", bins=simulated.BINS, decoder_layers=1)
    variants = [{"adapt": UPPER}, {"adapt": HEAD}, {"adapt": UPPER, "cache_dtype": "float16"}]
    variants += [{"adapt": UPPER, "path": str(other)}, {"adapt": UPPER, "window": 2}]
    paths = [train(world, "asr", cache_frozen=True, **model) for model in variants]
    keys = {one.name for path in paths for one in data_of(path).glob("train/frozen/au/*.npy")}
    assert len(keys) == 5


def test_keys_tell_apart_layers_and_windows_of_clips(world: Path):
    """Some of these outputs have one shape: those of three depths, and those of two windows."""
    variants = [(UPPER, {}), (NORM, {}), ({"kind": "lora", "rank": 2}, {}), (HEAD, {})]
    variants.append((HEAD, {"window": 2}))
    paths = [train(world, "kws", adapt, cache_frozen=True, **more) for adapt, more in variants]
    found = [next(data_of(path).glob("train/frozen/*.npy")) for path in paths]
    shapes = [np.load(one, mmap_mode="r").shape for one in found]
    assert len(set(shapes[:3])) == len(set(shapes[3:])) == 1
    assert len({one.name for one in found}) == 5
