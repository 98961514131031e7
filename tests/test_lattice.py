"""Models trained by lattice-free MMI, through the commands, on simulated speech."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import simulated
import torch
from asr_world import table
from conftest import inside
from safetensors.numpy import load_file, save_file

from fedtools.data.ark import FeatureReader
from fedtools.data.datadir import DataDir
from fedtools.decode.greedy import greedy
from fedtools.lm.tokens import Tokenizer
from fedtools.models.acoustic.asr import build_model, log_posteriors
from fedtools.models.lfmmi.lattice import Lattice, load_denominator
from fedtools.score.align import count_errors

MODEL = {
    "input_size": simulated.BINS,
    "criterion": "lfmmi",
    "encoder": "tdnn",
    "encoder_conf": {"output_size": 32, "contexts": [1, 1, 3, 3]},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("world")
    simulated.data_dir(root / "train", ["au", "en"], 60, 0)
    simulated.data_dir(root / "valid", ["au", "en"], 6, 1)
    inside("train-tokens", root / "train" / "text", root / "tokens", "--token-type", "char").ok()
    made = inside("train-denominator", root / "train" / "text", root / "tokens", root / "den").ok()
    assert "denominator.safetensors: " in made.out
    simulated.config_file(root / "c.yaml", model=MODEL)
    return root


def begin(world: Path, path: Path, *more: str, denominator: bool = True):
    asset = ("--asset", f"denominator={world / 'den'}") if denominator else ()
    return inside(
        *("init", path, "--config", world / "c.yaml", "--asset", f"tokens={world / 'tokens'}"),
        *("--data", f"train={world / 'train'}", "--data", f"valid={world / 'valid'}"),
        *asset, *(more if "--method" in more else ("--method", "centralized", *more)),
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(world) -> Path:
    path = world / "exp"
    begin(world, path, "--set", "rounds=20", "--set", "training.optim_conf.lr=0.01").ok()
    inside("rounds", path, "--evaluate", "valid").ok()
    return path


def losses_of(path: Path) -> dict[tuple[str, str], float]:
    """Return (round, client) -> validation loss."""
    lines = (path / "evaluate_valid.tsv").read_text().splitlines()
    rows = [line.split("\t") for line in lines[1:]]
    return {(number, client): float(loss) for number, client, _, loss, *_ in rows}


def test_a_model_is_adapted(world, trained, tmp_path):
    """Adapters of its convolutions do not change the initial outputs."""
    base, path = tmp_path / "base.safetensors", tmp_path / "e"
    save_file(load_file(trained / "init.safetensors")
              | load_file(trained / "round_0021/global.safetensors"), base)  # fmt: skip
    settings = ("model.adapt={rank: 2}", "training.optim_conf.lr=0.01", "rounds=2")
    more = [word for one in settings for word in ("--set", one)]
    begin(world, path, "--method", "fedavg", "--start", str(base), *more).ok()
    inside("rounds", path, "--evaluate", "valid").ok()
    low = {f"encoder.layers.{n}.affine.lora_{name}" for n in range(4) for name in "ab"}
    head = {"ctc.ctc_lo.weight", "ctc.ctc_lo.bias"}
    assert load_file(path / "round_0003/global.safetensors").keys() == low | head
    before, after = losses_of(trained), losses_of(path)
    for client in ("au", "en"):
        assert after["0", client] == before["20", client] != after["2", client]


def test_a_model_learns_to_transcribe(trained):
    header, *rows = [
        line.split("\t") for line in (trained / "evaluate_valid.tsv").read_text().splitlines()
    ]
    found = {
        name: [
            np.mean([float(row[header.index(name)]) for row in rows if row[0] == str(number)])
            for number in range(21)
        ]
        for name in ("loss", "wer")
    }
    # Two equal letters without a space between them cannot be distinguished from one long one.
    assert found["wer"][0] > 95 and min(found["wer"]) < 60
    assert 0 < min(found["loss"]) < found["loss"][0] / 2


def test_decoding_of_its_posteriors(world, trained, tmp_path):
    inside("average", trained).ok()
    inside("train-lm", world / "train" / "text", tmp_path / "lm", "--order", "2").ok()
    out = tmp_path / "decode"
    inside("decode", trained, world / "valid", out, "--lm", tmp_path / "lm").ok()
    inside("merge-nbest", out, world / "valid", "--nj", "1").ok()
    inside("tune", out, world / "valid", out / "weights.yaml").ok()
    inside("best-path", out, "--weights", out / "weights.yaml").ok()
    found, right = table(out / "text"), table(world / "valid" / "text")
    assert found.keys() == right.keys()
    letters = [[list(texts[name].replace(" ", "")) for name in right] for texts in (right, found)]
    wrong = sum(count_errors(*pair).errors for pair in zip(*letters, strict=True))
    assert wrong < sum(map(len, letters[0])) / 4


def test_posteriors_are_those_of_tokens(world, trained):
    """They sum to 1 in each frame; the best tokens mostly spell the transcript."""
    tokenizer = Tokenizer.load(world / "tokens")
    tokens = len(tokenizer)
    lattice = Lattice(load_denominator(world / "den" / "denominator.safetensors", tokens), tokens)
    model = build_model(MODEL, tokenizer.tokens, lattice=lattice).eval()
    assert model.ctc.ctc_lo.out_features == 2 * (tokens - 1)
    state = load_file(trained / "round_0021" / "global.safetensors")
    model.load_state_dict({k: torch.as_tensor(v) for k, v in state.items()}, strict=False)
    data, right = DataDir.read(world / "train"), []
    for name in data.utterances[::3]:
        speech = torch.from_numpy(FeatureReader(data.feats_scp).read(name))[None]
        with torch.no_grad():
            batch = {"speech": speech, "speech_lengths": torch.tensor([speech.shape[1]])}
            found, lengths = log_posteriors(model, batch)
        assert found.shape == (1, lengths[0], tokens)
        total = found.exp().sum(2)
        torch.testing.assert_close(total, torch.ones_like(total), atol=1e-4, rtol=0)
        said = tokenizer.decode(greedy(found.numpy(), lengths.numpy())[0])
        right.append(said.replace(" ", "") == data.text[name].replace(" ", ""))
    assert np.mean(right) > 0.5


def test_what_does_not_go_with_it_is_refused(world, trained, tmp_path):
    path = tmp_path / "exp"
    begin(world, path, denominator=False).fails(1, "criterion lfmmi", "--asset denominator=FOLDER")
    begin(world, path, "--set", "model.criterion=ctc").fails(1, "criterion ctc", "only with it")
    begin(world, path, "--set", "model.criterion=mmi").fails(1, "criterion: ", "'mmi'")
    labels = ("--set", "training.labels=continuous")
    begin(world, path, *labels).fails(1, "labels: continuous", "criterion ctc")
    method = ("--method", "decouplefl", "--set", "method_conf.personal=[encoder.layers.0.*]")
    begin(world, path, *method).fails(1, "a model of criterion lfmmi cannot be cut in two")
    assert not path.exists()
    inside("average", trained).ok()
    inside("export", trained, path).fails(1, "ESPnet does not support the model's criterion, lfmmi")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda graph: graph.pop("final"), "not a denominator"),
        (lambda graph: graph.update(pdf=graph["pdf"][:-1]), "not a denominator"),
        (lambda graph: graph.update(pdf=graph["pdf"].astype("float32")), "not a denominator"),
        (lambda graph: graph["target"].__setitem__(3, 10**6), "target: no such state"),
        (lambda graph: graph["source"].__setitem__(3, -1), "source: no such state"),
        (lambda graph: graph["pdf"].__setitem__(3, 10**6), "not for"),
        (lambda graph: graph["weight"].__setitem__(3, np.nan), "a weight is NaN"),
    ],
)
def test_damaged_denominators_are_refused(world, tmp_path, change, said):
    graph = load_file(world / "den" / "denominator.safetensors")
    change(graph)
    save_file(graph, tmp_path / "denominator.safetensors")
    more = ("--asset", f"denominator={tmp_path}")
    done = begin(world, tmp_path / "exp", *more, denominator=False)
    done.fails(1, "denominator.safetensors", said)
    assert not (tmp_path / "exp").exists()
