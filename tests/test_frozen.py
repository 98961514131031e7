"""Frozen bottoms of pretrained models, computed once: unchanged losses, and refusals."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import keywords
import numpy as np
import pytest
import simulated
import torch
import yaml
from commands import contents, inside, kill_when
from pretrained_models import save_recogniser, save_wave, save_whisper
from torch import nn

from fedtools.files.ark import write_ark
from fedtools.files.datadir import DataDir
from fedtools.files.frozen import Place
from fedtools.models.asr import build_model, classify, represent
from fedtools.models.asr import losses as criterion_losses
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


def begin(world: Path, path: Path, task: str, *, method: str = "fedavg", **sections: dict):
    """Call init and return its result."""
    config = path.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(config_of(world, task, **sections)))
    spoken = "waves" if Path(sections["model"].get("path", "")).name in WAVES else "speech"
    data = world / ("clips" if task == "kws" else spoken)
    whole = sections["model"].get("criterion") == "seq2seq"
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


def made(path: Path) -> dict[str, np.ndarray]:
    """Return the stored outputs: folder and split -> values."""
    files = sorted(path.glob("**/frozen/**/*.npy"))
    return {
        f"{one.parent.relative_to(path)} {one.stem.split('.')[0]}": np.load(one) for one in files
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
    plain = losses(train(world, task, adapt, **more))
    kept = train(world, task, adapt, cache_frozen=True, **more)
    np.testing.assert_allclose(losses(kept), plain, atol=1e-5, rtol=1e-5)
    assert len(set(plain)) >= 6
    files = made(kept)
    sampled = {name for one in kept.glob("round_*/clients") for name in one.read_text().split()}
    assert {name for name in files if name.endswith("train")} == {
        f"clients/{client}/frozen train" for client in sampled
    }
    if task == "kws":
        sizes = {f"clients/{one}/frozen train": sum(CLIENTS[one]) for one in sampled}
        sizes["frozen valid"] = 14
        assert {name: value.shape for name, value in files.items()} == {
            name: (count * positions, 32) for name, count in sizes.items()
        }
    else:
        others = {name for name in files if name.endswith("valid")}
        assert others == {"frozen/xx valid", "frozen/yy valid"}
        counts = (world / "speech/train/utt2num_frames").read_text().split()
        frames = dict(zip(counts[::2], map(int, counts[1::2]), strict=True))
        for client in sampled:
            own = sum(max(100, n) // 2 for name, n in frames.items() if name[:2] == client)
            assert files[f"clients/{client}/frozen train"].shape == (own, 32)
    for folder in {one.parent for one in kept.glob("**/frozen/**/*.npy")}:
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("task", "kind"), [("kws", "Hubert"), *(("asr", one) for one in WAVES)])
def test_losses_of_waveforms_are_as_without(world: Path, task: str, kind: str):
    model = {"adapt": UPPER, "path": str(world / kind)}
    plain, kept = (train(world, task, **model, **more) for more in ({}, {"cache_frozen": True}))
    np.testing.assert_allclose(losses(kept), losses(plain), atol=1e-5, rtol=1e-5)
    assert len(set(losses(plain))) >= 6
    files = made(kept)
    # A position has 20 samples, and the first has 30.
    positions = (16_000 - 30) // 20 + 1
    if task == "kws":
        assert files["frozen valid"].shape == (14 * positions, 32)
        return
    lengths = [1500 + 700 * number for number in range(4)]
    counts = [(length - 30) // 20 + 1 for length in lengths]
    assert files["clients/au/frozen train"].shape == (sum(counts), 32)


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
        begin_row = 3 * 50
    else:
        import kaldiio

        places = (world / "speech/train/feats.scp").read_text().split()
        frames = torch.tensor(kaldiio.load_mat(places[1]).T[None])
        frames = nn.functional.pad(frames, (0, max(0, 100 - frames.shape[2])))
        begin_row = 0
    with torch.no_grad():
        hidden = nn.functional.gelu(encoder.conv1(frames))
        hidden = nn.functional.gelu(encoder.conv2(hidden)).transpose(1, 2)
        hidden = hidden + encoder.embed_positions.weight[: hidden.shape[1]]
        for layer in encoder.layers[:2]:
            hidden = layer(hidden, None)
    found = made(tmp_path / "exp")["frozen train"][begin_row : begin_row + hidden.shape[1]]
    np.testing.assert_allclose(found, hidden[0].numpy(), atol=2e-5)


def test_what_is_kept_is_read(world: Path, tmp_path: Path):
    """Training uses the stored values: replaced ones change its results."""
    path = tmp_path / "exp"
    begin(world, path, "kws", model={"adapt": HEAD, "cache_frozen": True}).ok()
    inside("rounds", path, "--to", "1").ok()
    whole = losses_of_valid(path)
    (file,) = path.glob("frozen/valid.*.npy")
    values = np.load(file)
    values[:] = values[:1]
    np.save(file, values)
    shutil.copy(path / "evaluate_valid.tsv", tmp_path)
    (path / "evaluate_valid.tsv").unlink()
    assert losses_of_valid(path) != whole
    file.write_bytes(file.read_bytes()[:-1])
    (path / "evaluate_valid.tsv").unlink()
    inside("evaluate", path).fails(1, str(file), "damaged", "remove it")
    file.unlink()
    assert losses_of_valid(path) == whole


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
    kill_when(command, dict(os.environ), path, "clients/*/frozen/*train*")
    inside("rounds", path, "--to", "1").ok()
    kept = relative(path, "clients/*/frozen/*")
    # Missing ones are computed again.
    for folder in path.glob("clients/*/frozen"):
        shutil.rmtree(folder)
    inside("rounds", path, "--to", "2").ok()
    inside("evaluate", path).ok()
    assert not list(path.glob("clients/*/frozen/.*.tmp"))
    made_whole = relative(whole, "clients/*/frozen/*")
    assert kept.items() <= made_whole.items()
    assert relative(path, "clients/*/frozen/*").items() <= made_whole.items()
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


def test_one_of_two_computes_and_the_other_waits(tmp_path: Path):
    begun = []

    def parts() -> Iterator[tuple[int, np.ndarray]]:
        begun.append(1)
        time.sleep(0.3)
        yield 2, np.ones((1, 3), "f4")
        yield 0, np.zeros((2, 3), "f4")

    place = Place(tmp_path / "own" / "frozen", "train", "0" * 16, (3, 3), "float16")
    threads = [threading.Thread(target=place.make, args=(parts,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert begun == [1]
    assert place.rows(1, 3).tolist() == [[0, 0, 0], [1, 1, 1]]


def test_another_key_takes_the_place_of_the_first(tmp_path: Path):
    places = [
        Place(tmp_path / "frozen", split, key * 16, (1, 2), "float32")
        for split, key in (("train", "1"), ("train-more", "1"), ("train", "2"))
    ]
    for place in places:
        place.make(lambda: [(0, np.ones((1, 2)))])
    assert sorted(one.name for one in (tmp_path / "frozen").glob("*.npy")) == [
        "train-more.1111111111111111.npy",
        "train.2222222222222222.npy",
    ]
    with pytest.raises(ValueError, match="1 rows, 2"):
        Place(tmp_path, "train", "3" * 16, (2, 2), "float32").make(lambda: [(0, np.ones((1, 2)))])
    assert not list(tmp_path.glob("train*"))


def test_keys_tell_apart_all_that_values_depend_on(world: Path):
    """They depend on the layers, the storage, and the values of a base of the same shape."""
    other = save_whisper(world / "other", bins=simulated.BINS, decoder_layers=1)
    variants = [{"adapt": UPPER}, {"adapt": HEAD}, {"adapt": UPPER, "cache_dtype": "float16"}]
    variants += [{"adapt": UPPER, "path": str(other)}]
    paths = [train(world, "asr", cache_frozen=True, **model) for model in variants]
    keys = {one.name for path in paths for one in path.glob("clients/au/frozen/train.*")}
    assert len(keys) == 4
