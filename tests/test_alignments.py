"""Utterances whose transcript has no alignment: found exactly, dropped and counted, by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import simulated
import torch
from conftest import inside, ledger
from simulated import BINS, CONFIG, LETTERS

from fedtools.data.datadir import DataDir
from fedtools.federation.federation import Federation
from fedtools.models.acoustic.asr import build_model, outputs, positions
from fedtools.models.criteria import Ctc

TOKENS = ["<blank>", "<unk>", "<space>", *LETTERS, "<sos/eos>"]
BY_SIZE = {"weighting": "utterances"}
# Far more letters than any utterance has frames.
LONG = LETTERS * 100
BLOCK = {"output_size": 16, "attention_heads": 2, "linear_units": 32, "num_blocks": 1}
ENCODERS = {
    "transformer": {},
    **{
        layer: {"encoder_conf": {**BLOCK, "input_layer": layer}}
        for layer in ("conv2d1", "conv2d2", "conv2d6", "conv2d8", "linear")
    },
    "conformer": {
        "encoder": "conformer",
        "encoder_conf": {
            **BLOCK,
            "rel_pos_type": "latest",
            "pos_enc_layer_type": "rel_pos",
            "selfattention_layer_type": "rel_selfattn",
        },
    },
    "tdnn": {
        "encoder": "tdnn",
        "encoder_conf": {"output_size": 8, "contexts": [1, 1, 3], "subsampling": 3},
    },
}


@pytest.mark.parametrize("name", ENCODERS)
def test_frames_of_the_criterion_are_counted_without_the_model(name):
    """The counts are those of the model's own output, for utterances of a batch and alone."""
    model = build_model({**CONFIG["model"], **ENCODERS[name]}, TOKENS).eval()
    lengths = torch.tensor([97, 60, 41, 40, 39, 38, 37])
    batch = {"speech": torch.randn(7, 97, BINS), "speech_lengths": lengths}
    with torch.no_grad():
        _, found = outputs(model, batch)
    assert positions(model, lengths.numpy()).tolist() == found.tolist()
    assert [positions(model, length) for length in lengths.tolist()] == found.tolist()


@pytest.mark.parametrize("text", [[], [3], [3, 4, 5], [3, 3], [3, 3, 3, 4, 4], [4, 3, 4]])
def test_a_transcript_needs_as_many_frames_as_torch_says(text):
    """With one frame fewer, torch's loss is infinite."""
    needed = Ctc(None).fewest_frames(text)
    for frames in range(1, 10):
        log_probs = torch.randn(frames, 1, 7).log_softmax(-1)
        sizes = torch.tensor([frames]), torch.tensor([len(text)])
        loss = torch.nn.functional.ctc_loss(log_probs, torch.tensor([text]), *sizes)
        assert bool(loss.isfinite()) == (frames >= needed), (text, frames)


def _relabel(path: Path, texts: dict[str, str]) -> DataDir:
    data = DataDir.read(path)
    data.text |= texts
    data.write()
    return data


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Data, and the same without alignments: a half of `au`, and all of `en`."""
    root = tmp_path_factory.mktemp("alignments")
    for name in ("good", "mixed", "none"):
        simulated.data_dir(root / name, ["au", "en", "in"], 4)
    (root / "text").write_text(f"x {' '.join(LETTERS)}\n")
    inside("train-tokens", root / "text", root / "tokens", "--token-type", "char").ok()
    simulated.config_file(
        root / "sim.yaml", task="asr", rounds=2, method_conf=BY_SIZE, keep_updates=True
    )
    names = DataDir.read(root / "good").utterances
    lost = [name for name in names if name.startswith("en")] + names[:2]
    mixed = _relabel(root / "mixed", dict.fromkeys(lost, LONG))
    _relabel(root / "none", dict.fromkeys(names, LONG))
    mixed.restrict([name for name in names if name not in lost], root / "rest").write()
    return root


def _init(world: Path, out: Path, data: str, *more: str):
    return inside(
        "init", out, "--config", world / "sim.yaml", "--method", "fedavg", "--data",
        f"train={world / data}", "--asset", f"tokens={world / 'tokens'}", *more,
    )  # fmt: skip


def test_utterances_without_alignment_are_dropped_by_name(world, tmp_path):
    """The model is that of data without them; a client that has no others is left out."""
    told = _init(world, tmp_path / "mixed", "mixed").ok().err
    assert "mixed/text: 6 of 12 utterances have too few frames for their text" in told
    assert "dropped from training: au-s0-000, au-s0-002, en-s0-000" in told
    assert "no others of en, who are left out" in told
    _init(world, tmp_path / "rest", "rest").ok()
    said = inside("rounds", tmp_path / "mixed").ok().err
    assert said.count("en: left out: its 4 utterances all have too few frames for their text") == 2
    inside("rounds", tmp_path / "rest").ok()
    for number in (1, 2):
        rows, others = (_rows(tmp_path / name, number) for name in ("mixed", "rest"))
        assert rows["au"]["utterances"] == others["au"]["utterances"] == "2"
        assert rows["au"]["loss"] == others["au"]["loss"]
        assert rows["en"]["status"].startswith("its 4 utterances all have")
    told = [row for row in ledger(tmp_path / "mixed") if row["client"] == "en"]
    assert [row["status"][:33] for row in told] == 2 * ["refused: left out by its job: its"]
    final = "round_0003/global.safetensors"
    assert (tmp_path / "mixed" / final).read_bytes() == (tmp_path / "rest" / final).read_bytes()


def _rows(experiment: Path, number: int) -> dict[str, dict[str, str]]:
    header, *lines = (
        line.split("\t")
        for line in (experiment / f"round_{number:04}/update.1.tsv").read_text().splitlines()
    )
    return {line[0]: dict(zip(header, line, strict=True)) for line in lines}


def test_nothing_without_an_alignment_begins(world, tmp_path):
    """Data of which no utterance can be trained on is refused, and nothing is written."""
    told = _init(world, tmp_path / "exp", "none")
    assert told.code == 1
    assert "none/text: 12 of 12 utterances have too few frames for their text" in told.err
    assert "check its segments and text" in told.err
    assert not (tmp_path / "exp").exists()


def test_the_loss_on_other_data_is_that_of_what_has_an_alignment(world, tmp_path):
    """Utterances without an alignment count in the error rate, not in the loss as 0."""
    more = ("--data", f"valid={world / 'mixed'}", "--data", f"test={world / 'rest'}")
    told = _init(world, tmp_path / "exp", "good", *more).ok().err
    assert "mixed/text: 6 of 12 utterances" in told
    assert "left out of the loss" in told
    federation = Federation(tmp_path / "exp")
    federation.load_result(None, 0)
    valid, test = (federation.task.measure(split, "au") for split in ("valid", "test"))
    assert valid["loss"] == test["loss"]
    assert (valid["utterances"], test["utterances"]) == (4, 2)
    assert federation.task.measure("valid", "en")["loss"] == "nan"
