"""The acoustic model and its data: losses against torch and ESPnet, batches that lose nothing."""

from __future__ import annotations

import numpy as np
import pytest
import simulated
import torch
from conftest import inside
from hypothesis import given
from hypothesis import strategies as st

from fedtools.client.options import UtteranceTraining
from fedtools.client.trainer import Trainer
from fedtools.client.unit import Unit
from fedtools.core.errors import UserError
from fedtools.core.seeds import generator
from fedtools.data.datadir import DataDir
from fedtools.federation.federation import Federation
from fedtools.lm.tokens import Tokenizer
from fedtools.models.acoustic.asr import (
    build_model,
    log_posteriors,
    losses,
    outputs,
    shortest_input,
)
from fedtools.tasks.asr.data import UtteranceBatches, Utterances, Zeros
from fedtools.tasks.asr.labels import Transcripts

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
    return Utterances(data, data.utterances, Tokenizer(TOKENS), bins, Zeros(0, shortest))


def test_loss_is_espnets(data, model):
    """ESPnet's own forward pass gives the mean of our losses."""
    batch = utterances(data).load([0, 5, 7])
    ours = losses(model, *outputs(model, batch), batch)
    theirs, _, _ = model(
        batch["speech"], batch["speech_lengths"], batch["text"], batch["text_lengths"]
    )
    assert ours.mean().item() == pytest.approx(theirs.item(), rel=1e-5)


def test_masks_are_for_training_and_normalisation_for_all(data):
    """SpecAugment is off in evaluation; a constant added to all frames changes nothing."""
    config = dict(simulated.CONFIG["model"])
    rates = {"dropout_rate": 0.0, "positional_dropout_rate": 0.0}
    config["encoder_conf"] = config["encoder_conf"] | rates
    torch.manual_seed(1)
    model = build_model(config, TOKENS)
    batch = utterances(data).load([0])
    bare = {key: config[key] for key in config if not key.startswith("specaug")}
    plain = build_model(bare, TOKENS)
    plain.load_state_dict(model.state_dict())
    louder = {**batch, "speech": batch["speech"] + 3.0}
    with torch.no_grad():
        expected = log_posteriors(plain.train(), batch)[0]
        assert torch.equal(log_posteriors(model.eval(), batch)[0], expected)
        torch.testing.assert_close(log_posteriors(model, louder)[0], expected, rtol=0, atol=1e-4)
        masked = [log_posteriors(model.train(), batch)[0] for _ in range(3)]
    for one, other in ((masked[0], expected), (masked[0], masked[1]), (masked[1], masked[2])):
        assert (one - other).abs().max() > 1e-3


def test_a_batch_can_be_used_twice(data, model):
    """ESPnet normalises in place; a teacher and a student must still see the same input."""
    batch = utterances(data).load(range(8))
    before = batch["speech"].clone()
    first = losses(model, *outputs(model, batch), batch)
    assert torch.equal(batch["speech"], before)
    assert torch.equal(first, losses(model, *outputs(model, batch), batch))


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
        loaded = everything.load(batch)
        size = loaded["speech"].numel()
        assert size <= bins or len(batch) == 1
        assert loaded.frames == size / simulated.BINS


def test_epochs_differ_and_repeat(data):
    everything = utterances(data)
    first, second = (everything.batches(generator(0, "batches", n)) for n in (1, 2))
    assert first != second
    assert first == everything.batches(generator(0, "batches", 1))


def test_short_utterances_are_padded(data, model):
    """An utterance shorter than the convolutions' receptive field is padded and kept."""
    least = shortest_input(model)
    padded = utterances(data, shortest=10_000).load([0])
    assert padded["speech"].shape[1] == 10_000
    frames = torch.zeros(1, least, simulated.BINS)
    log_posteriors(model, {"speech": frames, "speech_lengths": torch.tensor([least])})
    with pytest.raises(Exception, match="too short"):
        short = frames[:, 1:]
        log_posteriors(model, {"speech": short, "speech_lengths": torch.tensor([least - 1])})


@pytest.mark.parametrize(("shortest", "more"), [(1, 4), (10_000, 9_000)])
def test_frames_behind_the_end(data, shortest, more):
    """Zero frames that end an utterance belong to it, in a batch and in its size."""
    plain = utterances(data)
    longer = Utterances(data, data.utterances, Tokenizer(TOKENS), 8000, Zeros(more, shortest))
    expected, found = plain.load([0, 5]), longer.load([0, 5])
    for row, length in enumerate(expected["speech_lengths"].tolist()):
        own = found["speech"][row, :length]
        assert torch.equal(own, expected["speech"][row, :length])
        assert found["speech_lengths"][row] == longer.frames[[0, 5][row]]
        assert found["speech_lengths"][row] == max(length + more, shortest)
        assert not found["speech"][row, length:].any()
    assert longer.bytes == int(np.maximum(plain.frames + more, shortest).sum()) * simulated.BINS * 4


def test_missing_features_and_texts(data):
    for table in ("feats_scp", "text"):
        broken = DataDir.read(data.path)
        getattr(broken, table).pop(data.utterances[3])
        with pytest.raises(UserError, match=data.utterances[3]):
            utterances(broken)


def test_data_without_transcripts(data):
    """Labels may be missing only where the caller allows it; features are always needed."""
    bare = DataDir.read(data.path)
    bare.text.clear()
    everything = Utterances(bare, bare.utterances, Tokenizer(TOKENS), 8000, labelled=False)
    batch = everything.load([0, 1])
    assert batch["text_lengths"].tolist() == [0, 0] and batch["speech"].shape[0] == 2
    bare.feats_scp.pop(bare.utterances[0])
    with pytest.raises(UserError, match=rf"feats.scp: no entry of utterance '{data.utterances[0]}"):
        Utterances(bare, bare.utterances, Tokenizer(TOKENS), 8000, labelled=False)


def test_read_while_training_is_the_same(data):
    """A client too large for memory is read ahead by a thread, in the same batches."""
    kept, read = (Utterances(data, data.utterances, Tokenizer(TOKENS), 4000) for _ in range(2))
    kept.keep = True
    batches = kept.batches()
    assert len(batches) > 5
    for _ in range(2):
        streams = (each.stream(batches, torch.device("cpu")) for each in (kept, read))
        for one, other in zip(*streams, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_cannot_be_read_ahead_is_told(data):
    broken = DataDir.read(data.path)
    broken.feats_scp[data.utterances[-1]] += "0"
    everything = Utterances(data, data.utterances, Tokenizer(TOKENS), 8000)
    everything._reader.scp = broken.feats_scp
    everything._reader._records.clear()
    with pytest.raises(UserError, match=data.utterances[-1]):
        list(everything.stream(everything.batches(), torch.device("cpu")))


def test_validation_without_a_word(tmp_path):
    """An error rate needs words: one line, before anything is begun with these data."""
    for split, seed in (("train", 0), ("valid", 1)):
        simulated.data_dir(tmp_path / split, ["au"], 3, seed)
    text = tmp_path / "valid" / "text"
    names = [line.split()[0] for line in text.read_text().splitlines()]
    good = text.read_text()
    simulated.config_file(tmp_path / "config.yaml")
    tokens, exp = tmp_path / "tokens", tmp_path / "exp"
    inside("train-tokens", tmp_path / "train" / "text", tokens, "--token-type", "char").ok()
    begin = [
        "init", exp, "--config", tmp_path / "config.yaml", "--method", "fedavg",
        "--data", f"train={tmp_path / 'train'}", "--data", f"valid={tmp_path / 'valid'}",
        "--asset", f"tokens={tokens}",
    ]  # fmt: skip
    text.write_text("".join(f"{name}\n" for name in names))
    inside(*begin).fails(1, f"{text}: no word in the transcripts of au, so no WER")
    # A single silent utterance among others is accepted.
    text.write_text(good.replace(good.splitlines()[2], names[2]))
    inside(*begin).ok()
    inside("rounds", exp, "--to", "1", "--evaluate", "valid").ok()
    # Data may change under an experiment if its files were not checked again.
    federation = Federation(exp)
    federation.task.corpus.read("valid").text.update(dict.fromkeys(names, ""))
    with pytest.raises(UserError, match=f"text: no word in the transcripts of {names[0]}, "):
        federation.task.measure("valid", "au")


@pytest.mark.parametrize("accum_grad", [1, 2, 5])
def test_steps_hold_every_epoch_once_and_can_be_taken_up(data, accum_grad):
    everything = utterances(data, 4000)
    cpu, key = torch.device("cpu"), (3, 7, "au")
    batches = UtteranceBatches(everything, 2, accum_grad, cpu, key)
    steps = list(batches.stream(0))
    plan = [
        len(batch)
        for epoch in range(2)
        for batch in everything.batches(generator(3, "batches", 7, "au", epoch))
    ]
    assert [batch.amount for step in steps for batch in step] == plan
    assert sum(plan) == 2 * len(everything)
    assert batches.steps == [len(steps)] == [-(-len(plan) // accum_grad)]
    assert {len(step) for step in steps[:-1]} == {accum_grad}
    for first in (1, len(steps) - 1, len(steps)):
        again = list(batches.stream(first))
        assert len(again) == len(steps) - first
        for one, other in zip(steps[first:], again, strict=True):
            for batch, same in zip(one, other, strict=True):
                assert torch.equal(batch["speech"], same["speech"])
                assert torch.equal(batch["text"], same["text"])
        # An abandoned iterator leaves no reader waiting.
        next(batches.stream(0))


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


def test_bf16_trains_near_float32(data):
    """Losses are within a few per cent of float32's; the weights stay in float32."""
    losses, states = {}, {}
    for kind in ("float32", "bfloat16"):
        torch.manual_seed(0)
        model = build_model(simulated.CONFIG["model"], TOKENS)
        training = UtteranceTraining(optim_conf={"lr": 0.003}, batch_bins=8000, train_dtype=kind)
        losses[kind] = []
        for number in range(3):
            unit = Unit(["test"], number, 0, None, [])
            trainer = Trainer(model, Transcripts(), training, unit, stacked=False)
            key = (0, number, "test")
            batches = UtteranceBatches(utterances(data), 2, 1, torch.device("cpu"), key)
            ((steps, loss, reason),) = trainer.train(batches)
            assert steps == batches.steps[0] and not reason
            losses[kind].append(loss)
        assert losses[kind][2] < losses[kind][0]
        states[kind] = model.state_dict()
        assert all(value.dtype == torch.float32 for value in states[kind].values())
    assert np.allclose(losses["bfloat16"], losses["float32"], rtol=0.03)
    assert losses["bfloat16"] != losses["float32"]
