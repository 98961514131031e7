"""Models over one pretrained base: they take the memory of one, and no folder is read twice."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import simulated
import torch
import yaml
from commands import inside
from pretrained_models import save_whisper
from safetensors.torch import load_file
from torch import nn

from fedtools.client.options import ClipTraining
from fedtools.federation.federation import Federation
from fedtools.models.acoustic.asr import build_model, losses, outputs
from fedtools.models.adapt.copies import copy_of
from fedtools.models.keywords import build_network
from fedtools.tasks.kws.model import KwsModels
from fedtools.tasks.parts import MODELS

RANK, CLASSES, SIZE, INNER, LAYERS = 2, 5, 32, 64, 3
LORA = {"kind": "lora", "rank": RANK, "alpha": 4.0}
# Each layer has four attention matrices and two others.
ADAPTERS = LAYERS * RANK * (4 * (SIZE + SIZE) + 2 * (SIZE + INNER))


def bytes_of(*models: nn.Module) -> int:
    """Return the memory of all their tensors, each storage counted once."""
    pieces = {}
    for model in models:
        for value in [*model.parameters(), *model.buffers()]:
            piece = value.untyped_storage()
            pieces[piece.data_ptr()] = piece.nbytes()
    return sum(pieces.values())


def base_bytes(folder: Path, *parts: str) -> int:
    """Return the bytes of the tensors in a folder's weights."""
    weights = load_file(folder / "model.safetensors")
    return sum(4 * value.numel() for name, value in weights.items() if name.startswith(parts))


def sizes(models: Iterable[nn.Module]) -> list[set[int]]:
    return [{len(value) for value in model.state_dict().values()} for model in models]


def test_stacks_of_keywords_share_the_base(tmp_path: Path):
    folder = save_whisper(tmp_path / "mel80")
    base = base_bytes(folder, "model.encoder.")
    config = {"network": "hf", "path": str(folder), "adapt": LORA}
    make = KwsModels(config, CLASSES, 100, ClipTraining(), "test", torch.device("cpu"))
    trained = 4 * (ADAPTERS + SIZE * CLASSES + CLASSES)
    eight = make.build(8)
    assert bytes_of(eight) == base + 8 * trained
    # Another read of the folder would fail.
    shutil.rmtree(folder)
    others = [make.build(), make.build(3), make.build(8, "copy"), make.build(8, "teacher")]
    assert bytes_of(eight, *others) == base + (8 + 1 + 3 + 8 + 8) * trained
    assert sizes([eight, *others]) == [{8}, {1}, {3}, {8}, {8}]
    assert make.build(3) is others[1]


@pytest.mark.parametrize("how", [LORA, {"kind": "bias"}, {"kind": "full"}, {"kind": "head"}])
def test_a_copy_is_as_one_that_was_built(tmp_path: Path, how: dict):
    """Loaded with the same tensors, it computes the same; training it changes no other model."""
    config = {"network": "hf", "path": str(save_whisper(tmp_path / "mel80")), "adapt": how}
    first, built = (build_network(config, CLASSES, "test", clients=n) for n in (1, 3))
    copied = copy_of(first, 3)
    with torch.no_grad():
        for value in built.parameters():
            value.add_(torch.randn_like(value) * 0.1)
    assert list(copied.state_dict()) == list(built.state_dict())
    copied.load_state_dict(built.state_dict())
    frames = torch.randn(3, 2, 100, 80)
    before = first(frames[:1])
    assert torch.equal(copied(frames), built(frames))
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.5)
    copied(frames).square().sum().backward()
    assert all(value.grad is not None for value in copied.parameters())
    optimizer.step()
    assert not torch.equal(copied(frames), built(frames))
    assert torch.equal(first(frames[:1]), before)
    assert all(value.grad is None for value in first.parameters())


def test_models_of_speech_share_the_base(tmp_path: Path):
    folder = save_whisper(tmp_path / "mel20", bins=simulated.BINS)
    base = base_bytes(folder, "model.encoder.")
    data = simulated.data_dir(tmp_path / "train", ["au", "en"], 4, log_mel=True)
    inside("train-tokens", data / "text", tmp_path / "tokens", "--token-type", "char").ok()
    model = {"network": "hf", "path": str(folder), "adapt": LORA}
    config = {"task": "asr", "model": model, "rounds": 1}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    inside(
        *("init", tmp_path / "exp", "--config", tmp_path / "config.yaml", "--method", "fedavg"),
        *("--data", f"train={data}", "--asset", f"tokens={tmp_path / 'tokens'}"),
    ).ok()
    make = Federation(tmp_path / "exp").task.need(MODELS)
    first = make.build()
    shutil.rmtree(folder)
    models = [first, make.build(use="copy"), make.build(use="teacher")]
    tokens = len((tmp_path / "tokens" / "tokens.txt").read_text().split())
    trained = 4 * (ADAPTERS + SIZE * tokens + tokens)
    assert bytes_of(*models) == base + 3 * trained


def test_a_copy_of_whisper_keeps_what_is_tied(tmp_path: Path):
    """Its decoder's token table stays that of its outputs, also when it is trained."""
    folder = save_whisper(tmp_path / "mel20", bins=simulated.BINS)
    base = base_bytes(folder, "model.", "proj_out.")
    config = {"network": "hf", "path": str(folder), "criterion": "seq2seq"}
    how = {"kind": "none", "also": ["decoder.embed_tokens.weight"]}
    first = build_model({**config, "adapt": how}, [])
    copied = copy_of(first)
    trained = 4 * 60 * SIZE
    assert bytes_of(first) == base + trained
    assert bytes_of(first, copied) == base + 2 * trained
    batch = {"speech": torch.randn(1, 100, 20), "speech_lengths": torch.tensor([100])}
    batch |= {"prompt": torch.tensor([[3]]), "text": torch.tensor([[7, 8]])}
    batch |= {"text_lengths": torch.tensor([2])}

    def loss(model: nn.Module) -> torch.Tensor:
        return losses(model, *outputs(model, batch), batch)

    before = loss(first)
    assert torch.equal(loss(copied), before)
    torch.manual_seed(0)
    table = torch.randn(60, SIZE)
    for model in (copied, alone := build_model({**config, "adapt": how}, [])):
        with torch.no_grad():
            (value,) = model.parameters()
            value.copy_(table)
    assert torch.equal(loss(copied), loss(alone))
    assert torch.equal(loss(first), before)
    assert not torch.equal(loss(copied), before)


def test_models_that_adapt_espnets_share_the_base(tmp_path: Path):
    data = simulated.data_dir(tmp_path / "train", ["au", "en"], 4)
    inside("train-tokens", data / "text", tmp_path / "tokens", "--token-type", "char").ok()
    model = {
        "input_size": simulated.BINS,
        "encoder": "tdnn",
        "encoder_conf": {"output_size": SIZE, "contexts": [1, 3]},
    }
    where = ("--data", f"train={data}", "--asset", f"tokens={tmp_path / 'tokens'}")
    for name, how in (("base", {}), ("exp", {"adapt": LORA})):
        config = {"task": "asr", "model": model | how, "rounds": 1}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config))
        start = ("--start", tmp_path / "base/init.safetensors") if how else ()
        inside(
            *("init", tmp_path / name, "--config", tmp_path / f"{name}.yaml"),
            *("--method", "fedavg", *where, *start),
        ).ok()
    make = Federation(tmp_path / "exp").task.need(MODELS)
    first = make.build()
    (tmp_path / "exp/base.safetensors").unlink()
    models = [first, make.build(use="copy"), make.build(use="teacher")]
    whole = load_file(tmp_path / "base/init.safetensors")
    base = sum(v.nbytes for name, v in whole.items() if not name.startswith("ctc."))
    trained = sum(value.nbytes for value in first.state_dict().values())
    inputs = simulated.BINS * 3, SIZE * 3
    low = RANK * (sum(inputs) + 2 * SIZE)
    assert trained == 4 * low + sum(v.nbytes for n, v in whole.items() if n.startswith("ctc."))
    assert bytes_of(*models) == base + 3 * trained
