"""The acoustic model and its data: losses against torch and ESPnet, batches that lose nothing."""

from __future__ import annotations

import numpy as np
import pytest
import simulated
import torch
from fedtools.client.data import Utterances
from hypothesis import given
from hypothesis import strategies as st

from fedtools.files.datadir import DataDir
from fedtools.files.errors import UserError
from fedtools.files.keyed import generator
from fedtools.lm.tokens import Tokenizer
from fedtools.models.asr import (
    block_of,
    build_model,
    ctc_loss,
    log_posteriors,
    shortest_input,
)

TOKENS = ["<blank>", "<unk>", "<space>", *simulated.LETTERS, "<sos/eos>"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> DataDir:
    path = simulated.data_dir(tmp_path_factory.mktemp("asr") / "data", ["au", "en"], 12)
    return DataDir.read(path)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    return build_model(simulated.CONFIG["model"], TOKENS).eval()


def utterances(data: DataDir, bins: int = 8000, shortest: int = 1) -> Utterances:
    return Utterances(data, data.utterances, Tokenizer(TOKENS), bins, shortest)


def test_loss_is_espnets(data, model):
    """ESPnet's own forward pass gives the mean of our losses."""
    batch = utterances(data).load([0, 5, 7])
    ours = ctc_loss(model, batch)
    theirs, _, _ = model(
        batch["speech"], batch["speech_lengths"], batch["text"], batch["text_lengths"]
    )
    assert ours.mean().item() == pytest.approx(theirs.item(), rel=1e-5)


def test_a_batch_can_be_used_twice(data, model):
    """ESPnet normalises in place; a teacher and a student must still see the same input."""
    batch = utterances(data).load(range(8))
    before = batch["speech"].clone()
    first = ctc_loss(model, batch)
    assert torch.equal(batch["speech"], before)
    assert torch.equal(first, ctc_loss(model, batch))


def test_posteriors_are_distributions(data, model):
    log_probs, lengths = log_posteriors(model, utterances(data).load([0, 1]))
    sums = log_probs.exp().sum(-1)
    assert torch.allclose(sums, torch.ones_like(sums), atol=1e-5)
    assert log_probs.shape[1] == lengths.max()


@given(st.integers(500, 20000), st.one_of(st.none(), st.integers(0, 2**32)))
def test_batches_hold_everything_once(data, bins, seed):
    everything = utterances(data, bins)
    batches = everything.batches(None if seed is None else generator(seed, "test"))
    assert sorted(index for batch in batches for index in batch) == list(range(len(everything)))
    for batch in batches:
        size = everything.load(batch)["speech"].numel()
        assert size <= bins or len(batch) == 1


def test_epochs_differ_and_repeat(data):
    everything = utterances(data)
    first, second = (everything.batches(generator(0, "batches", n)) for n in (1, 2))
    assert first != second
    assert first == everything.batches(generator(0, "batches", 1))


def test_short_utterances_are_padded(data, model):
    """An utterance below the convolutions' reach is padded, not lost."""
    least = shortest_input(model)
    padded = utterances(data, shortest=10_000).load([0])
    assert padded["speech"].shape[1] == 10_000
    frames = torch.zeros(1, least, simulated.BINS)
    log_posteriors(model, {"speech": frames, "speech_lengths": torch.tensor([least])})
    with pytest.raises(Exception, match="too short"):
        short = frames[:, 1:]
        log_posteriors(model, {"speech": short, "speech_lengths": torch.tensor([least - 1])})


def test_missing_features_and_texts(data):
    for table in ("feats_scp", "text"):
        broken = DataDir.read(data.path)
        getattr(broken, table).pop(data.utterances[3])
        with pytest.raises(UserError, match=data.utterances[3]):
            utterances(broken)


def test_read_while_training_is_the_same(data, monkeypatch):
    """A client too large for memory is read ahead by a thread: the same batches."""
    from fedtools.client import data as module

    kept = utterances(data)
    batches = kept.batches()
    first = [batch["speech"] for batch in kept.stream(batches, torch.device("cpu"))]
    monkeypatch.setattr(module, "_KEEP_BYTES", 0)
    read = utterances(data)
    second = [batch["speech"] for batch in read.stream(batches, torch.device("cpu"))]
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"encoder": "transformr"}, "transformer"),
        ({"encodr": "transformer"}, "encoder"),
        ({"encoder_conf": {"output_size": "wide"}}, "encoder_conf"),
        ({"encoder_conf": {"outputsize": 8}}, "output_size"),
        ({"init": "magic"}, "init"),
    ],
)
def test_refused_models(config, said):
    with pytest.raises(UserError, match=said):
        build_model(config, TOKENS)


def test_block_of(model):
    blocks = {block_of(name) for name in model.state_dict()}
    assert blocks == {None, 0, 1}


def test_bf16_trains(data):
    from fedtools.client.train import Training, fit, make_optimizer

    torch.manual_seed(0)
    model = build_model(simulated.CONFIG["model"], TOKENS)
    training = Training(optim_conf={"lr": 0.003}, batch_bins=8000, train_dtype="bfloat16")
    optimizer = make_optimizer(model, training)
    losses = [
        fit(
            model, optimizer, utterances(data), training, ctc_loss,
            epochs=4, seed=0, key=(number, "test"),
        ).loss
        for number in range(3)
    ]  # fmt: skip
    assert losses[2] < losses[0]
    assert all(value.dtype == torch.float32 for value in model.state_dict().values())
    assert np.isfinite(losses).all()
