"""The recipes' whisper.yaml: all their methods, on a tiny model, from section to bytes."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import keywords
import numpy as np
import pytest
import simulated
import yaml
from asr_checkout import command, make_checkout
from commands import inside, ledger, run
from conftest import ROOT
from pretrained_models import save_recogniser, save_whisper
from safetensors.numpy import load_file

from fedtools.exchange.experiment import Experiment
from fedtools.report.results import read_cost

# As many as in tiny.en.
LAYERS = 4
ASR = ["centralized", "fedavg", "fednorm", "fedextract", "decouplefl", "joint"]
LOWER = ("encoder.layers.0.", "encoder.layers.1.")
KWS = ["fedavg", "fednorm", "fedextract"]


def planned(script: str, *arguments: object) -> dict[str, list[str]]:
    """Return experiment -> the words of its line."""
    places = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = (sys.executable, ROOT / "local" / script / "experiments.py", *arguments)
    done = run(*command, env={"PATH": places}).ok()
    lines = (line.split("\t") for line in done.out.splitlines())
    return {path: words for path, _, *words in lines}


def begin(path: str, config: Path, words: list[str], *more: object) -> Path:
    inside("init", path, "--config", config, *words, *more).ok()
    return Path(path)


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Begin experiments of every method, with the baseline first."""
    root = tmp_path_factory.mktemp("asr1")
    bins = simulated.BINS
    save_recogniser(root / "whisper", bins=bins, encoder_layers=LAYERS)
    for split, clients in {"train": ["au", "en"], "server_train": ["us"]}.items():
        simulated.data_dir(root / "data" / split, clients, 3, log_mel=True)
    for split in ("valid", "server_valid"):
        (root / "data" / split).symlink_to(root / "data" / split.replace("valid", "train"))
    config = ROOT / "conf/commonvoice/whisper.yaml"
    lines = planned(
        *("commonvoice", "all", "--exp", root / "exp", "--config", config, "--seeds", "0"),
        *("--methods", " ".join(ASR), "--data", root / "data", "--tokens", root / "whisper"),
        *("--pretrained", root / "whisper"),
    )
    fast = ("--set", "rounds=1", "--set", "training.num_threads=1")
    for path, words in lines.items():
        experiment = begin(path, config, words, *fast)
        if "baseline" in path:
            # Training options that the tests below do not depend on.
            shutil.copy(experiment / "init.safetensors", experiment / "model.safetensors")
    return root / "exp"


@pytest.mark.parametrize("method", ASR)
def test_methods_of_asr1(speech: Path, method: str):
    """Norms, or the lower half of the encoder, stay at clients; other trained tensors are sent."""
    path = speech / method / "seed0"
    whole = load_file(path / "init.safetensors")
    assert load_file(speech / "baseline/seed0/model.safetensors").keys() == whole.keys()
    personal = set()
    if method == "fednorm":
        personal = {name for name in whole if "layer_norm" in name}
    elif method in ("fedextract", "decouplefl", "joint"):
        personal = {name for name in whole if name.startswith(LOWER)}
        assert not any(name.startswith("encoder.conv") for name in whole)
    inside("rounds", path).ok()
    last = max(path.glob("round_*/global.safetensors"))
    assert load_file(last).keys() == whole.keys() - personal
    kept = sorted(path.glob("clients/au/round_*/personal.safetensors"))
    assert bool(kept) == bool(personal)
    if kept:
        state = load_file(kept[-1])
        assert state.keys() == personal
        assert any(not np.array_equal(state[name], whole[name]) for name in personal)


def test_labels_that_repeat_themselves_are_not_trained_on(tmp_path: Path):
    """All labels of a Whisper with random weights repeat themselves, so that none is left."""
    recipe = make_checkout(tmp_path)
    whisper = save_recogniser(tmp_path / "whisper", bins=80)
    config = {
        "model": {"network": "hf", "criterion": "seq2seq", "adapt": {"kind": "lora", "rank": 2}},
        "pretrained": {"whisper": "tiny.en"},
        "training": {"labels": "transcripts", "optim": "adamw", "batch_bins": 60000},
        "rounds": 1,
        "average": 1,
        "decode": {"beam": 1, "no_repeat_ngram_size": 0},
        "baseline": {"rounds": 1},
        "variants": {
            "transcripts": {"training": {"labels": "transcripts"}},
            "as_it_is": {"training": {"optim_conf": {"lr": 0.0}}},
        },
    }
    (recipe / "own.yaml").write_text(yaml.safe_dump(config))
    words, environment = command(recipe, "--config", "own.yaml", "--pretrained", str(whisper))
    words += ["--labels", "fixed", "--baseline", "as_it_is", "--methods", "fedavg"]
    done = run(*words, "--speeds", "", "--stop_stage", "5", env=environment)
    assert done.code == 1 and "27 of 27 hypotheses repeat themselves, left empty" in done.out
    assert "no words for any utterance of data/fake/train" in done.err.splitlines()[-1]
    assert not (recipe / "exp/fake/fedavg+fixed").exists()


def test_features_are_counted_beside_adapters(speech: Path):
    """Columns Comm. and Comm./client include DecoupleFL's features by their size on disk."""
    sizes = {}
    for method in ("fedavg", "decouplefl"):
        path = speech / method / "seed0"
        inside("rounds", path).ok()
        rows = [row for row in ledger(path) if row["client"] != "-"]
        sizes[method] = sum(int(row["bytes_up"]) for row in rows)
        down = sum(int(row["bytes_down"]) for row in rows)
        assert read_cost(Experiment(path)).bytes == sizes[method] + down
    path = speech / "decouplefl/seed0"
    files = [one for one in path.glob("round_*/features.*") if one.suffix in (".ark", ".scp")]
    assert sizes["decouplefl"] == sum(file.stat().st_size for file in files)
    frames = [int(line.split()[1]) for line in (speech.parent / "data/train/utt2num_frames").open()]
    # Positions have this model's 32 values, in 16 bits: windows of 10 s exceed the 4 s that it
    # reads.
    assert max(frames) <= 400
    values = len(frames) * 200 * 32
    assert 2 * values < sizes["decouplefl"] < 2.2 * values
    state = load_file(speech / "fedavg/seed0/init.safetensors")
    assert sizes["fedavg"] == 2 * 4 * sum(value.size for value in state.values())


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    root = tmp_path_factory.mktemp("kws1")
    save_whisper(root / "whisper", encoder_layers=LAYERS)
    for split in ("train", "valid", "test"):
        keywords.pack(root / "dump/keywords" / split, {"ann": [1, 1, 1, 1], "bob": [1, 1, 2, 2]})
    lines = planned(
        *("speechcommands", root / "exp", root / "dump", "--seeds", "0", "--tasks", "keywords"),
        *("--networks", "lora head", "--methods", " ".join(KWS), "--pretrained", root / "whisper"),
    )
    return root, lines


@pytest.mark.parametrize("method", KWS)
@pytest.mark.parametrize("network", ["lora", "head"])
def test_methods_of_kws1(clips, network: str, method: str):
    root, lines = clips
    config = ROOT / "conf/speechcommands/whisper.yaml"
    path = root / "exp/keywords" / network / method / "seed0"
    more = ("--set", "rounds=1", "--set", "clients_per_round=null", "--set", "keep_updates=true")
    if (network, method) == ("head", "fedextract"):
        words = ("init", path, "--config", config, *lines[str(path)], *more)
        done = inside(*words)
        said = "method_conf.personal: no parameter matches 'encoder.layers.[0-1].*'"
        assert done.code == 1 and said in done.err.splitlines()[-1]
        return
    inside("rounds", begin(str(path), config, lines[str(path)], *more)).ok()
    whole, sent = (
        load_file(path / name) for name in ("init.safetensors", "round_0001/global.safetensors")
    )
    personal = set(whole) - set(sent)
    if method == "fedavg":
        assert not personal
    elif method == "fednorm":
        assert personal == {name for name in whole if "layer_norm" in name} != set()
    else:
        assert personal == {name for name in whole if name.startswith(LOWER)} != set()


@pytest.mark.parametrize("name", ["whisper", "whisper_ctc"])
def test_models_of_attack1(tmp_path: Path, name: str):
    """Personalised models start from the global one, and their trained parameters are kept."""
    save_recogniser(tmp_path / "whisper", bins=simulated.BINS, encoder_layers=LAYERS)
    data = simulated.data_dir(tmp_path / "data", ["ann", "bob"], 3, log_mel=True)
    config, tokens = ROOT / f"conf/tedlium3/{name}.yaml", tmp_path / "whisper"
    if name == "whisper_ctc":
        tokens = tmp_path / "tokens"
        inside("train-tokens", data / "text", tokens, "--token-type", "char").ok()
    given = ["--data", f"train={data}", "--data", f"valid={data}", "--asset", f"tokens={tokens}"]
    given += ["--set", f"model.path={tmp_path / 'whisper'}", "--set", "training.num_threads=1"]
    begun = begin(
        str(tmp_path / "global"), config, ["--section", "baseline", *given],
        *("--method", "centralized", "--set", "rounds=1"),
    )  # fmt: skip
    inside("rounds", begun).ok()
    start = begun / "round_0001/global.safetensors"
    part = begin(
        str(tmp_path / "part2"), config, ["--section", "methods.fedavg", *given],
        *("--method", "fedavg", "--start", start),
    )  # fmt: skip
    inside("rounds", part).ok()
    kept = sorted((part / "round_0001").glob("update.*.safetensors"))
    assert len(kept) == 1
    sent, whole = load_file(kept[0]), load_file(start)
    assert sent.keys() == whole.keys()
    if name == "whisper_ctc":
        assert set(sent) == {"ctc.ctc_lo.weight", "ctc.ctc_lo.bias"}
    else:
        assert all("lora" in one for one in sent)
    # A model for each client, all of which have changed.
    for one, values in sent.items():
        assert values.shape == (2, *whole[one].shape)
    changed = [
        np.abs(values - whole[one]).max(axis=tuple(range(1, values.ndim)))
        for one, values in sent.items()
    ]
    assert np.max(changed, axis=0).min() > 0
