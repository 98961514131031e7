"""Folders of pretrained models, and features for them: accepted and refused ones."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import kaldiio
import keywords
import numpy as np
import pytest
import soundfile
import torch
import yaml
from conftest import ROOT, Result, inside, run
from pretrained_models import save_wave, save_whisper
from safetensors.torch import load_file, save_file

from fedtools.data.ark import FeatureReader
from fedtools.data.datadir import DataDir, read_table
from fedtools.models.pretrained.folder import Folder

KINDS = ("fbank", "log_mel", "wave")
LONGEST = 4


def record(path: Path, seconds: dict[str, float]) -> Path:
    """Make a data directory of one speaker per client, with tones of `seconds`."""
    random, data = np.random.default_rng(0), DataDir(path)
    (path / "wav").mkdir(parents=True)
    for name, length in seconds.items():
        time = np.arange(round(length * 16_000)) / 16_000
        tone = 0.2 * np.sin(2 * np.pi * 440 * time) + random.normal(0, 0.01, len(time))
        soundfile.write(path / "wav" / f"{name}.wav", tone, 16_000, subtype="PCM_16")
        data.wav_scp[name] = str(path / "wav" / f"{name}.wav")
        data.utt2spk[name] = data.utt2client[name] = name.partition("-")[0]
        data.text[name] = "ab ba"
    data.write()
    return path


def extract(path: Path, kind: str, *more: str) -> Result:
    return inside("extract-features", path, path / "ark", "--kind", kind, *more)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Make data of each kind of features, tokens, and two models."""
    root = tmp_path_factory.mktemp("world")
    lengths = {"a-1": 0.8, "a-2": 1.3, "b-1": 2.0, "b-2": 3.1}
    for kind in KINDS:
        extract(record(root / kind, lengths), kind).ok()
    text = root / "wave" / "text"
    inside("train-tokens", text, root / "tokens", "--token-type", "char").ok()
    save_whisper(root / "whisper", max_source_positions=50 * LONGEST)
    save_wave(root / "wav2vec", num_hidden_layers=1)
    return root


def init(world: Path, out: Path, folder: Path, kind: str, *more: str) -> list[str | Path]:
    """Return the command that begins an experiment on a kind of features."""
    config = out.with_name(f"{out.name}.yaml")
    model = {"network": "hf", "path": str(folder), "adapt": {"kind": "lora", "rank": 2}}
    training = {"optim": "adamw", "optim_conf": {"lr": 0.01}, "batch_bins": 100_000}
    sections = {"task": "asr", "rounds": 1, "evaluate_every": 1}
    config.write_text(yaml.safe_dump(sections | {"model": model, "training": training}))
    data = [word for split in ("train", "valid") for word in ("--data", f"{split}={world / kind}")]
    tokens = ("--asset", f"tokens={world / 'tokens'}")
    return ["init", out, "--config", config, "--method", "fedavg", *data, *tokens, *more]


def test_data_directories_are_valid_and_of_their_kind(world):
    for kind, frames in (("log_mel", [100, 200, 200, 400]), ("wave", [12800, 20800, 32000, 49600])):
        run(sys.executable, ROOT / "utils" / "validate_data_dir.py", world / kind).ok()
        assert [int(n) for n in read_table(world / kind / "utt2num_frames").values()] == frames
        durations = [float(n) for n in read_table(world / kind / "utt2dur").values()]
        assert durations == [0.8, 1.3, 2.0, 3.1]
    reader = FeatureReader(read_table(world / "wave" / "feats.scp"))
    samples, _ = soundfile.read(world / "wave" / "wav" / "a-2.wav", dtype="float32")
    assert np.array_equal(reader.read("a-2")[:, 0], samples)


@pytest.mark.parametrize("folder", ["whisper", "wav2vec"])
@pytest.mark.parametrize("kind", KINDS)
def test_features_of_another_kind_are_refused(world, tmp_path, folder, kind):
    wanted = {"whisper": "log_mel", "wav2vec": "wave"}[folder]
    done = inside(*init(world, tmp_path / "e", world / folder, kind))
    if kind == wanted:
        done.ok()
    else:
        done.fails(1, f"{kind}/feats.scp", "'a-1'", f"the model takes {wanted}", f"--kind {wanted}")


def test_models_of_filterbanks_refuse_what_whisper_takes(world, tmp_path):
    path = tmp_path / "e"
    command = init(world, path, world / "whisper", "log_mel")
    config = path.with_name("e.yaml")
    model = {"encoder": "conformer", "encoder_conf": {"output_size": 8, "num_blocks": 1}}
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"model": model}))
    inside(*command).fails(1, "are log_mel", "--kind fbank or mfcc")


def test_other_features_of_a_single_utterance_are_refused_by_name(world, tmp_path):
    """Without a record of their kinds; all but the second are in whole seconds, as log_mel are."""
    data = shutil.copytree(world / "log_mel", tmp_path / "mixed")
    reader = FeatureReader(read_table(data / "feats.scp"))
    found = {utt: reader.read(utt) for utt in read_table(data / "feats.scp")}
    found["a-2"] = found["a-2"][:130]
    kaldiio.save_ark(str(tmp_path / "feats.ark"), found, scp=str(tmp_path / "feats.scp"))
    mixed = read_table(tmp_path / "feats.scp")
    (data / "feats.scp").write_text("".join(f"{utt} {place}\n" for utt, place in mixed.items()))
    (data / "utt2num_frames").unlink()
    command = init(world, tmp_path / "e", world / "whisper", "log_mel", "--data", f"test={data}")
    done = inside(*command)
    *_, told = done.err.splitlines()
    assert done.code == 1 and "mixed/feats.scp: 130 frames of 'a-2' are not whole seconds" in told
    assert told.endswith("--kind log_mel")


def test_what_is_too_long_is_refused_by_name(world, tmp_path):
    long = record(tmp_path / "long", {"a-1": 1.0, "a-2": LONGEST + 0.1})
    extract(long, "log_mel").ok()
    path = tmp_path / "e"
    inside(*init(world, path, world / "whisper", "log_mel", "--data", f"test={long}")).fails(
        1, "long/feats.scp", "'a-2'", f"the model accepts {LONGEST}00"
    )
    inside(*init(world, path, world / "whisper", "log_mel")).ok()
    inside("decode", path, long, tmp_path / "out", "--model", "round:0").fails(
        1, "long/feats.scp", "'a-2'", f"the model accepts {LONGEST}00"
    )


def test_what_whisper_cannot_hear_is_dropped_and_counted(tmp_path):
    data = record(tmp_path / "data", {"a-1": 0.5, "a-2": 30.01, "a-3": 30.0})
    refused = extract(data, "log_mel")
    assert refused.code == 1 and "dropped 1 (too long: 1): over 2.0%" in refused.err
    assert "dropped 1 (too long: 1)" in extract(data, "log_mel", "--max-drop", "0.5").ok().out
    assert list(read_table(data / "feats.scp")) == ["a-1", "a-3"]
    extract(data, "wave", "--sample-rate", "8000").fails(2, "--sample-rate", "16000")


def edit(file: str, **changes: object) -> Callable[[Path], object]:
    def work(folder: Path) -> None:
        read = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(read | changes))

    return work


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def sharded(*names: str) -> Callable[[Path], None]:
    """Write weights in the first of `names`, and an index that names all."""

    def work(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        save_file(weights, folder / "a.safetensors", metadata={"format": "pt"})
        index = {f"x{n}": name for n, name in enumerate(names)} | dict.fromkeys(weights, names[0])
        written = json.dumps({"metadata": {}, "weight_map": index})
        (folder / "model.safetensors.index.json").write_text(written)

    return work


def without(name: str) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        del weights[name]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return work


def peft(folder: Path) -> None:
    """Leave a folder as peft saves an adapter."""
    for path in folder.iterdir():
        path.unlink()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file({"base_model.x": torch.zeros(1)}, folder / "adapter_model.safetensors")


def inner(*names: str) -> Callable[[Path], None]:
    """Return what moves a model into folders within its own."""

    def work(folder: Path) -> None:
        shutil.move(folder, folder.with_name("aside"))
        for name in names:
            shutil.copytree(folder.with_name("aside"), folder / name)

    return work


def instead(name: str, raw: bytes = b"x") -> Callable[[Path], None]:
    """Return what puts another file in place of the weights."""

    def work(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(raw)

    return work


def nan(folder: Path) -> None:
    """Put a NaN into a weight."""
    weights = load_file(folder / "model.safetensors")
    weights[NORM][0] = np.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"
NORM = "encoder.layers.0.layer_norm.weight"
CONFIG, INDEX = "config.json", "model.safetensors.index.json"
REFUSED = {
    "absent": (shutil.rmtree, ("no pretrained model here", "nothing is downloaded")),
    "empty": (lambda path: (path / CONFIG).unlink(), ("no pretrained model here",)),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), ("missing",)),
    "no json": (lambda path: (path / CONFIG).write_text("{"), (CONFIG, "not JSON")),
    "deep json": (lambda path: (path / CONFIG).write_text("[" * 99_999), (CONFIG, "not JSON")),
    "a list": (lambda path: (path / CONFIG).write_text("[]"), (CONFIG, "not a JSON object")),
    "pickled": (pickled, ("pytorch_model.bin", "pickled weights", "safetensors")),
    "code": (edit(CONFIG, auto_map={"AutoModel": "x.Y"}), (CONFIG, "its own code", "auto_map")),
    "other": (edit(CONFIG, model_type="bert"), (CONFIG, "of type 'bert'", "wav2vec2")),
    "quantised": (edit(CONFIG, quantization_config={"bits": 4}), (CONFIG, "quantised")),
    "adapter": (
        lambda path: (path / "adapter_config.json").write_text('{"peft_type": "LORA"}'),
        ("an adapter, not a model",),
    ),
    "peft's": (peft, ("an adapter, not a model", "merge_and_unload")),
    "a Trainer's": (
        inner("checkpoint-900", "checkpoint-1000"),
        ("a folder of a Trainer: give the model in it", "/checkpoint-1000"),
    ),
    "the hub's": (
        inner("snapshots/0a1b", "refs"),
        ("a folder of the hub's cache: give the model in it", "/snapshots/0a1b"),
    ),
    "above it": (inner("whisper"), ("no pretrained model here", "give the model in it", "whisper")),
    "of CTranslate2": (
        lambda path: ((path / CONFIG).write_text("{}"), (path / "model.bin").write_text("x")),
        ("a CTranslate2 model", "fedtools import"),
    ),
    "tensorflow's": (instead("tf_model.h5"), ("tf_model.h5: weights of TensorFlow", "save_pre")),
    "flax's": (instead("flax_model.msgpack"), ("weights of Flax", "save_pretrained")),
    "an onnx": (instead("model.onnx"), ("model.onnx: an ONNX model", "save_pretrained")),
    "llama.cpp's": (instead("model-q8.gguf"), ("llama.cpp's format", "safetensors")),
    "whisper.cpp's": (instead("ggml-tiny.bin"), ("whisper.cpp's format", "safetensors")),
    "pickled shards": (
        instead("pytorch_model-00001-of-00002.bin"),
        ("pickled weights", "save it as safetensors"),
    ),
    "a pointer": (
        lambda path: (path / "model.safetensors").write_bytes(POINTER),
        ("model.safetensors: a Git LFS pointer, not the file itself", "git lfs pull"),
    ),
    "a small pointer": (
        lambda path: (path / CONFIG).write_bytes(POINTER),
        ("config.json: a Git LFS pointer", "git lfs pull"),
    ),
    "nan": (nan, (f"weight '{NORM}' has a NaN", "take another model")),
    "above": (edit(CONFIG, add_adapter=True), (CONFIG, "add_adapter")),
    "cut off": (cut, ("model.safetensors", "not a whole safetensors file", "again")),
    "lacking": (without(NORM), ("its weights lack", NORM)),
    "wider": (edit(CONFIG, hidden_size=64), (CONFIG, "hidden_size is 64, but 32 by the weights")),
    "reaching": (edit(CONFIG, num_conv_pos_embeddings=16), ("by config.json",)),
    "deeper": (edit(CONFIG, num_hidden_layers=2), ("is 2, but 1 by the weights",)),
    "flatter": (edit(CONFIG, num_hidden_layers=0), ("is 0, but 1 by the weights",)),
    "deepest": (edit(CONFIG, num_hidden_layers=10**6), ("is 1000000, but 1 by the weights",)),
    "outputs": (edit(CONFIG, num_labels=10**8), ("num_labels is 1e+08, more than any",)),
    "inside": (edit(CONFIG, text_config={"a": [10**9]}), ("text_config is 1e+09, more than",)),
    "strides": (
        edit(CONFIG, conv_stride=[10**5, 2, 2]),
        (
            CONFIG,
            "conv_stride: not numbers",
        ),
    ),
    "kernels": (edit(CONFIG, conv_kernel=[9, 3, 2]), ("is [9, 3, 2], but [10, 3, 2] by",)),
    "half a pair": (
        lambda path: (path / CONFIG).write_text('{"model_type": "\\ud800"}'),
        (CONFIG, "not JSON"),
    ),
    "types": (edit(CONFIG, model_type=["wav2vec2"]), (CONFIG, "a model of type \"['wav2vec2']\"")),
    "odd heads": (edit(CONFIG, num_attention_heads=5), ("no model can be built", "divisible")),
    "no number": (edit(CONFIG, hidden_size="x"), ("hidden_size is x, but 32",)),
    "rate": (edit("preprocessor_config.json", sampling_rate=8000), ("8000 Hz",)),
    "perhaps": (edit("preprocessor_config.json", do_normalize="no"), ("do_normalize is 'no'",)),
    "shard": (sharded("a.safetensors", "b.safetensors"), (INDEX, "'b.safetensors' is missing")),
    "outside": (sharded("../a.safetensors"), (INDEX, "'../a.safetensors'", "of this folder")),
    "root": (sharded("/etc/a.safetensors"), (INDEX, "of this folder")),
    "pickled shard": (sharded("a.bin"), (INDEX, "'a.bin' is not a safetensors file")),
    "no names": (sharded(""), (INDEX, "''", "of this folder")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_folders_are_refused_by_name(world, tmp_path, case):
    work, said = REFUSED[case]
    folder = shutil.copytree(world / "wav2vec", tmp_path / "model")
    work(folder)
    path = tmp_path / "e"
    inside(*init(world, path, folder, "wave")).fails(1, *said)
    assert not (path / "config.yaml").exists()


def test_shards_are_read(world, tmp_path):
    folder = shutil.copytree(world / "wav2vec", tmp_path / "model")
    sharded("a.safetensors")(folder)
    inside(*init(world, tmp_path / "e", folder, "wave")).ok()


@pytest.mark.parametrize("part", ["model.safetensors", "config.json", "preprocessor_config.json"])
def test_another_model_in_its_place_is_told(world, tmp_path, part):
    folder = shutil.copytree(world / "wav2vec", tmp_path / "model")
    path = tmp_path / "e"
    inside(*init(world, path, folder, "wave")).ok()
    if part == "model.safetensors":
        weights = load_file(folder / part)
        weights[NORM] += 1
        save_file(weights, folder / part, metadata={"format": "pt"})
    elif part == "config.json":
        edit(part, layer_norm_eps=0.1)(folder)
    else:
        edit(part, do_normalize=False)(folder)
    inside("rounds", path).fails(1, "not the pretrained model that the experiment began with")


def test_a_processors_config_says_how_waves_are_normalised(world, tmp_path):
    """transformers 5 writes it instead of the preprocessor's."""
    folder = shutil.copytree(world / "wav2vec", tmp_path / "model")
    extractor = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    for normalized in (True, False):
        written = {"feature_extractor": {**extractor, "do_normalize": normalized}}
        (folder / "processor_config.json").write_text(json.dumps(written))
        assert Folder.open(folder).normalized is normalized
    for changed, said in (({"sampling_rate": 8000}, "8000 Hz"), (None, "not a JSON object")):
        written = {"feature_extractor": changed and {**extractor, **changed}}
        (folder / "processor_config.json").write_text(json.dumps(written))
        path = tmp_path / said
        inside(*init(world, path, folder, "wave")).fails(1, "processor_config.json", said)


def test_a_language_without_effect_is_refused(world, tmp_path):
    command = init(world, tmp_path / "e", world / "wav2vec", "wave", "--set", "model.language=fr")
    inside(*command).fails(1, "language has no effect")


@pytest.mark.parametrize("seconds", [1, 2])
def test_clips_are_no_longer_than_whisper_hears(tmp_path, seconds):
    clips = keywords.pack(tmp_path / "clips", {"a": [1, 1, 1, 1]}, length=seconds * 16_000)
    folder = save_whisper(tmp_path / "whisper", max_source_positions=50)
    model = {"network": "hf", "path": str(folder), "adapt": {"kind": "head"}}
    config = keywords.config_file(tmp_path / "kws.yaml", model=model)
    done = inside(
        *("init", tmp_path / "e", "--config", config, "--method", "fedavg"),
        *("--data", f"train={clips}", "--data", f"test={clips}"),
    )
    if seconds > 1:
        done.fails(1, "clips of 200 frames, the model accepts 100", "--clip-seconds")
    else:
        done.ok()


def test_a_federation_trains_on_waves(world, tmp_path):
    path = tmp_path / "e"
    inside(*init(world, path, world / "wav2vec", "wave")).ok()
    inside("rounds", path).ok()
    begun, ended = (load_file(path / f"round_000{n}" / "global.safetensors") for n in (1, 2))
    assert {name.split(".")[-1] for name in ended if name.startswith("encoder.")} == {
        "lora_a",
        "lora_b",
    }
    assert all((begun[name] != ended[name]).any() for name in ended)
    inside("decode", path, world / "wave", tmp_path / "out", "--model", "round:1").ok()
    lists = (tmp_path / "out" / "nbest.tsv").read_text().splitlines()
    assert len({line.partition("\t")[0] for line in lists}) == 4


def stub(folder: Path, text: str) -> dict[str, str]:
    """Return an environment in which Python starts by running `text`."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


def test_without_transformers_it_is_told_what_to_install(world, tmp_path):
    env = stub(tmp_path / "stub", "import sys\nsys.modules['transformers'] = None\n")
    command = init(world, tmp_path / "e", world / "wav2vec", "wave")
    done = run(sys.executable, "-m", "fedtools", *command, env=env)
    done.fails(1, "need transformers", "utils/pretrained.sh", "pip install '.[pretrained]'")


NO_SOCKETS = """
import socket


def refuse(*_, **__):
    raise RuntimeError("a socket was opened")


socket.socket.__init__ = refuse
"""


def test_no_connection_is_opened(world, tmp_path):
    env = stub(tmp_path / "stub", NO_SOCKETS)
    one = run(sys.executable, "-c", "import socket; socket.create_connection(('localhost', 1))",
              env=env)  # fmt: skip
    assert "a socket was opened" in one.err
    path = tmp_path / "e"
    commands = [init(world, path, world / "whisper", "log_mel"), ["rounds", path]]
    commands.append(["evaluate", path, "--split", "valid"])
    listed = [[str(word) for word in command] for command in commands]
    script = f"from commands import inside\nfor one in {listed!r}:\n    inside(*one).ok()\n"
    env["PYTHONPATH"] += f":{ROOT / 'tests'}"
    run(sys.executable, "-c", script, env=env).ok()
    assert (path / "round_0002" / "global.safetensors").is_file()
