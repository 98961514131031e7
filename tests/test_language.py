"""Federated fine-tuning of the language model, against rescoring by each round's model."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import inside
from fmp_world import best_text, by_hand
from rescored_world import CLIENTS, WORDS, make_stream
from safetensors.numpy import load_file

from fedtools.core.tables import read_tsv
from fedtools.lm.stream import open_stream

T = 3
LM = {"embed_unit": 8, "att_unit": 8, "head": 2, "unit": 16, "layer": 1, "dropout_rate": 0.0}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("world")
    made = make_stream(root / "made")
    random = np.random.default_rng(1)
    lines = [" ".join(random.choice(WORDS, 3)) for _ in range(60)]
    (root / "plain").write_text("".join(f"{line}\n" for line in lines))
    options = {"lm_conf": LM, "epochs": 1, "optim_conf": {"lr": 0.01}}
    (root / "nnlm.yaml").write_text(yaml.safe_dump({"nnlm": options}))
    train = ("--plain", root / "plain", "--config", root / "nnlm.yaml")
    inside("train-nnlm", *train, "--valid", made / "text", root / "nnlm").ok()
    inside("rescore", made, root / "nnlm", root / "rescored").ok()
    inside("rescore-stream", made, root / "rescored", root / "stream").ok()
    (root / "weights").mkdir()
    (root / "weights" / "weights.yaml").write_text("lm_weight: 2.0\nword_score: 0.5\n")
    return root


def begin(world: Path, path: Path, *more: str, lr: float = 0.05, method: str = "fedavg") -> Path:
    config = {
        "task": "lm",
        "rounds": T,
        "model": LM,
        "training": {"optim": "sgd", "optim_conf": {"lr": lr}, "batch_sentences": 2},
    }
    path.with_suffix(".yaml").write_text(yaml.safe_dump(config))
    inside(
        *("init", path, "--config", path.with_suffix(".yaml"), "--method", method, *more),
        *("--data", f"train={world / 'stream'}", "--asset", f"weights={world / 'weights'}"),
        *("--start", world / "nnlm" / "model.safetensors"),
    ).ok()
    inside("rounds", path, "--evaluate", "train").ok()
    return path


@pytest.fixture(scope="module")
def tuned(world, tmp_path_factory) -> Path:
    return begin(world, tmp_path_factory.mktemp("exp") / "exp")


def test_without_learning_it_is_plain_rescoring(world, tmp_path):
    path = begin(world, tmp_path / "exp", lr=1e-12)
    expected = by_hand(world / "stream", scale=0.0, lm_weight=2.0, word_score=0.5)
    assert best_text(path) == expected


def test_each_group_is_rescored_by_the_model_before_it(world, tuned, tmp_path):
    """`fedtools rescore` by a round's model gives the clients' hypotheses."""
    found, said = best_text(tuned), set()
    stream = open_stream(world / "stream")
    for number in range(T + 1):
        nnlm = tmp_path / f"nnlm{number}"
        shutil.copytree(world / "nnlm", nnlm)
        state = tuned / f"round_{number + 1:04d}" / "global.safetensors"
        shutil.copy(state, nnlm / "model.safetensors")
        rescored, other = tmp_path / f"rescored{number}", tmp_path / f"stream{number}"
        inside("rescore", world / "made", nnlm, rescored).ok()
        inside("rescore-stream", world / "made", rescored, other).ok()
        expected = by_hand(other, scale=0.0, lm_weight=2.0, word_score=0.5)
        for client in CLIENTS:
            group = stream.groups(client, T)[number]
            names = stream.rescored.utterances[group]
            said.update(names)
            assert {name: found[name] for name in names} == {n: expected[n] for n in names}
    assert said == set(found)
    assert found != by_hand(world / "stream", scale=0.0, lm_weight=2.0, word_score=0.5)


def test_clients_learn_what_was_heard_and_not_what_was_said(world, tuned, tmp_path):
    """Models are the same without transcripts; a round trains on that round's utterances."""
    other = tmp_path / "world"
    shutil.copytree(world, other)
    (other / "stream" / "text").unlink()
    config = tuned.with_suffix(".yaml")
    path = tmp_path / "exp"
    inside(
        *("init", path, "--config", config, "--method", "fedavg"),
        *("--data", f"train={other / 'stream'}", "--asset", f"weights={world / 'weights'}"),
        *("--start", world / "nnlm" / "model.safetensors"),
    ).ok()
    inside("rounds", path).ok()
    for number in range(1, T + 2):
        name = f"round_{number:04d}/global.safetensors"
        assert (path / name).read_bytes() == (tuned / name).read_bytes()
    rows = read_tsv(tuned / "round_0001" / "ledger.tsv", None)
    state = load_file(tuned / "round_0001" / "global.safetensors")
    assert int(rows[0]["bytes_up"]) == sum(value.nbytes for value in state.values())
    measured = read_tsv(tuned / "evaluate_train.tsv", None)
    assert len(measured) == (T + 1) * len(CLIENTS)


def test_methods_with_a_term_in_the_loss(world, tmp_path):
    """FedProx restrains changes of the server's model; FedMMD equals FedAvg only with weight 0."""
    epochs = "local_epochs: 3"

    def moved(method: str, conf: str) -> float:
        path = begin(
            world,
            tmp_path / f"{method}-{conf}",
            *("--set", f"method_conf={{{conf}{epochs}}}", "--set", "rounds=1"),
            method=method,
        )
        start, end = (
            load_file(path / f"round_000{number}" / "global.safetensors") for number in (1, 2)
        )
        return sum(np.square(end[name] - start[name]).sum() for name in start) ** 0.5

    plain = moved("fedavg", "")
    assert moved("fedprox", "proximal: 0.0, ") == pytest.approx(plain, rel=1e-5)
    assert moved("fedprox", "proximal: 8.0, ") < 0.9 * plain
    assert moved("fedmmd", "discrepancy: 0.0, ") == pytest.approx(plain, rel=1e-5)
    assert moved("fedmmd", "discrepancy: 0.01, ") != pytest.approx(plain, rel=1e-3)


def test_a_round_in_which_a_client_says_nothing_leaves_its_model_alone(world, tmp_path):
    """There are more groups than utterances; silent clients send back the model they got."""
    rounds = 14
    path = begin(world, tmp_path / "exp", "--set", f"rounds={rounds}")
    stream = open_stream(world / "stream")
    groups = {client: stream.groups(client, rounds) for client in CLIENTS}
    states = [
        load_file(path / f"round_{number:04d}/global.safetensors")
        for number in range(1, rounds + 2)
    ]
    silent = [
        number
        for number in range(rounds)
        if all(of[number].start == of[number].stop for of in groups.values())
    ]
    assert silent and len(silent) < rounds
    for number in range(rounds):
        same = all(
            np.allclose(states[number][name], states[number + 1][name], rtol=0, atol=1e-7)
            for name in states[number]
        )
        assert same == (number in silent), number


def test_mistakes_are_told(world, tuned, tmp_path, cli):
    cli("rounds", tuned, "--to", T + 1).fails(1, f"round {T + 1}", "more rounds")
    cli("average", tuned).fails(1, "exp: models of task lm are not averaged")
    path = begin(world, tmp_path / "valid", "--data", f"valid={world / 'stream'}")
    cli("evaluate", path, "--split", "valid").fails(1, "'valid' is not a stream")
    config = {"task": "lm", "rounds": T, "model": LM}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    data = ("--config", tmp_path / "c.yaml", "--data", f"train={world / 'stream'}")
    cli("init", tmp_path / "a", *data, "--method", "fedavg").fails(1, "--start")
    start = ("--start", world / "nnlm" / "model.safetensors")
    cli("init", tmp_path / "a", *data, *start, "--method", "fmp").fails(
        1, "FMP needs counts, which task lm does not have"
    )
    config["model"] = {**LM, "unit": 32}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    cli("init", tmp_path / "a", *data, *start, "--method", "fedavg").fails(1, "model.safetensors")


def test_lists_without_scores_of_a_language_model_are_warned_of(world, tmp_path):
    """ESPnet's lists have none: with `nnlm: 0.5`, half of lm_weight is lost."""
    shutil.copytree(world / "made", tmp_path / "made")
    path = tmp_path / "made" / "nbest.tsv"
    path.write_text(path.read_text().replace("\t-2\t", "\t0\t"))
    inside("rescore", tmp_path / "made", world / "nnlm", tmp_path / "r").ok()
    stream = tmp_path / "stream"
    inside("rescore-stream", tmp_path / "made", tmp_path / "r", stream).ok()
    said = "no score of a first pass' language model (all are 0); with nnlm 0.5 the neural one has"
    sweep = ("rescore-sweep", stream, tmp_path / "t.tsv", "--vary", "lm_weight=1,2")
    assert inside(*sweep).ok().err.count(said) == 1
    assert said not in inside(*sweep, "--set", "nnlm=1").ok().err
    for method, task, model in (("fmp", "rescore", {}), ("fedavg", "lm", LM)):
        config = {"task": task, "rounds": T, "model": model}
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
        start = ("--start", world / "nnlm" / "model.safetensors") if model else ()
        begun = ("init", tmp_path / task, "--config", tmp_path / "c.yaml", "--method", method)
        done = inside(*begun, "--data", f"train={stream}", *start).ok()
        assert f"{stream / 'nbest.tsv'}: {said}" in done.err
