"""Membership attacks: on clients that learn their data by heart, and on updates that are noise."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import kaldiio
import numpy as np
import pytest
import simulated
import torch
from conftest import inside
from hypothesis import given
from hypothesis import strategies as st
from keyword_world import begin as begin_keywords
from keyword_world import make_world
from safetensors.numpy import load_file, save_file
from simulated import one_speaker_each

from fedtools.attack.membership import ANYBODY, COLUMNS, SAME, area, draw, score
from fedtools.federation.federation import Federation
from fedtools.files.datadir import DataDir
from fedtools.files.tables import read_tsv
from fedtools.models.asr import build_model

CLIENTS = [f"{speaker}-m{number}" for speaker in ("ann", "bob", "cat") for number in (1, 2)]


@pytest.fixture(scope="module")
def learnt(tmp_path_factory) -> Path:
    """Each client goes through its four utterances thirty times."""
    root = tmp_path_factory.mktemp("world")
    one_speaker_each(simulated.data_dir(root / "train", CLIENTS, 4))
    inside("train-tokens", root / "train" / "text", root / "tokens", "--token-type", "char").ok()
    simulated.config_file(root / "c.yaml")
    path = root / "exp"
    settings = ("rounds=1", "method_conf.local_epochs=30", "training.optim_conf.lr=0.01")
    inside(
        *("init", path, "--config", root / "c.yaml", "--method", "fedavg"),
        *("--data", f"train={root / 'train'}", "--asset", f"tokens={root / 'tokens'}"),
        *(word for one in settings for word in ("--set", one)),
    ).ok()
    inside("rounds", path).ok()
    return path


def attacked(path: Path, out: Path, *more: str) -> dict[tuple[str, str], dict[str, str]]:
    inside("attack", "membership", path, out, "--round", "1", *more).ok()
    rows = read_tsv(out / "membership.tsv", COLUMNS)
    return {(row["score"], row["others_of"]): row for row in rows}


def test_what_was_learnt_by_heart_is_found(learnt, tmp_path):
    rows = attacked(learnt, tmp_path / "a")
    assert rows.keys() == {("loss", SAME), ("gradient", SAME)}
    for row in rows.values():
        assert (row["clients"], row["members"], row["others"], row["low"]) == ("6", "24", "24", "-")
    assert float(rows["loss", SAME]["AUC%"]) > 75
    assert float(rows["gradient", SAME]["AUC%"]) > 65
    first = (tmp_path / "a" / "membership.tsv").read_bytes()
    attacked(learnt, tmp_path / "again")
    assert (tmp_path / "again" / "membership.tsv").read_bytes() == first


@pytest.fixture(scope="module")
def twice(learnt) -> Path:
    """Two short rounds, the second of which begins with another model than the first."""
    root = learnt.parent
    settings = ("rounds=2", "method_conf.local_epochs=2", "training.optim_conf.lr=0.01")
    inside(
        *("init", root / "twice", "--config", root / "c.yaml", "--method", "fedavg"),
        *("--data", f"train={root / 'train'}", "--asset", f"tokens={root / 'tokens'}"),
        *(word for one in settings for word in ("--set", one)),
    ).ok()
    inside("rounds", root / "twice").ok()
    return root / "twice"


def test_scores_by_hand(twice):
    """The fall of the loss from the round's global model, and the cosine of update and descent."""
    root, number = twice.parent, 2
    found = score(Federation(twice), number, 20, 0)
    tokens = (root / "tokens" / "tokens.txt").read_text().split()
    models = {name: build_model(simulated.CONFIG["model"], tokens) for name in ("all", *CLIENTS)}
    begun = load_file(twice / "init.safetensors")
    begun |= load_file(twice / f"round_{number:04d}" / "global.safetensors")
    sent = load_file(twice / f"round_{number:04d}" / "update.1.safetensors")
    rows = read_tsv(twice / f"round_{number:04d}" / "update.1.tsv", None)
    for name, model in models.items():
        at = [row["client"] for row in rows].index(name) if name != "all" else -1
        own = {key: value[at] for key, value in sent.items()} if name != "all" else {}
        state = {key: torch.tensor(value) for key, value in (begun | own).items()}
        model.load_state_dict(state)
        model.eval()
    start = torch.cat([value.detach().flatten() for value in models["all"].parameters()])
    expected: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for client in CLIENTS:
        parameters = [value.detach().flatten() for value in models[client].parameters()]
        update = torch.cat(parameters) - start
        # Of one speaker there are two clients, whose utterances are the others.
        for owner in (one for one in CLIENTS if one[:3] == client[:3]):
            for item in items(root, owner):
                before = models["all"](**item)[0].sum()
                gradients = torch.autograd.grad(before, list(models["all"].parameters()))
                down = -torch.cat([one.flatten() for one in gradients])
                with torch.no_grad():
                    gain = (before - models[client](**item)[0].sum()).item()
                cosine = (down @ update / (down.norm() * update.norm())).item()
                expected.setdefault((client, owner == client), []).append((gain, cosine))
    for (client, member), pairs in expected.items():
        chosen = (found.clients == client) & (found.members == member)
        assert chosen.sum() == len(pairs) == 4
        for name, values in zip(("loss", "gradient"), zip(*pairs, strict=True), strict=True):
            np.testing.assert_allclose(
                np.sort(found.scores[name][chosen]), np.sort(values), rtol=2e-3, atol=1e-4
            )


def items(root: Path, client: str) -> Iterator[dict[str, torch.Tensor]]:
    """A client's utterances, one by one, as ESPnet's models take them."""
    data, tokens = DataDir.read(root / "train"), (root / "tokens" / "tokens.txt").read_text()
    for name in data.client_utterances(client):
        speech = torch.tensor(kaldiio.load_mat(data.feats_scp[name]))[None]
        letters = ["<space>" if one == " " else one for one in data.text[name]]
        text = torch.tensor([[tokens.split().index(one) for one in letters]])
        yield {
            "speech": speech,
            "speech_lengths": torch.tensor([speech.shape[1]]),
            "text": text,
            "text_lengths": torch.tensor([text.shape[1]]),
        }


def test_few_members_have_an_interval_and_no_bare_rate(learnt, tmp_path):
    """As attack A1 of few target trials."""
    for row in attacked(learnt, tmp_path / "enough").values():
        assert float(row["EER_low"]) < float(row["EER%"]) < float(row["EER_high"])
    done = inside("attack", "membership", learnt, tmp_path, "--round", "1", "--each", "2").ok()
    assert "fewer than 20 members, so that only intervals of the error rate are told" in done.err
    for row in read_tsv(tmp_path / "membership.tsv", COLUMNS):
        assert (row["members"], row["EER%"]) == ("12", "-")
        # Of twelve independent ones, whatever the rate.
        assert float(row["EER_high"]) - float(row["EER_low"]) > 20


def test_noise_gives_nothing_away(learnt, tmp_path):
    """In place of what clients learnt, a random step of the same size."""
    path = shutil.copytree(learnt, tmp_path / "exp")
    update = path / "round_0001" / "update.1.safetensors"
    begun = load_file(path / "round_0001" / "global.safetensors")
    random = np.random.default_rng(0)
    noisy = {
        name: (begun[name] + random.normal(0, 0.02, value.shape)).astype(value.dtype)
        for name, value in load_file(update).items()
    }
    save_file(noisy, update)
    for row in attacked(path, tmp_path / "out").values():
        assert 25 < float(row["AUC%"]) < 75


def test_clips_of_keyword_clients(tmp_path):
    """Clients are speakers: others are of anybody."""
    world = make_world(tmp_path / "world")
    settings = ("method_conf.local_steps=60", "rounds=1", "keep_updates=true")
    path = begin_keywords(world, tmp_path / "exp", "fedavg", *settings, "clients_per_round=null")
    inside("rounds", path).ok()
    rows = attacked(path, tmp_path / "out", "--each", "5")
    assert rows.keys() == {("loss", ANYBODY), ("gradient", ANYBODY)}
    # Seven clients, of which two have fewer than five clips.
    assert {row["members"] for row in rows.values()} == {"29"}
    assert float(rows["loss", ANYBODY]["AUC%"]) > 60


def test_trials():
    owners = {f"{client}-{n}": client for client in ("a1", "a2", "b", "c") for n in range(3)}
    speakers = {"a1": "a", "a2": "a", "b": "b"}
    trials = list(draw("a1", owners, speakers, 2, 0))
    assert [member for _, member, _ in trials] == [True, True, False, False]
    for item, member, kind in trials:
        assert owners[item] == ("a1" if member else "a2")
        assert kind == ("" if member else SAME)
    assert {owners[item] for item, member, _ in draw("b", owners, speakers, 9, 0) if member} == {
        "b"
    }
    others = [item for item, member, kind in draw("b", owners, speakers, 9, 0) if kind == ANYBODY]
    assert len(others) == 3 and "b" not in {owners[item] for item in others}
    # A client of whom no speaker is known has nobody's utterances but others'.
    assert all(kind in ("", ANYBODY) for *_, kind in draw("c", owners, speakers, 9, 0))


def test_trials_are_drawn_from_all():
    """Each utterance of either kind as often as any other one."""
    owners = {f"{client}-{n}": client for client in ("a1", "a2", "b") for n in range(8)}
    speakers, seeds = {"a1": "a", "a2": "a", "b": "b"}, 400
    drawn = Counter(
        item for seed in range(seeds) for item, *_ in draw("a1", owners, speakers, 2, seed)
    )
    assert drawn.keys() == {name for name, owner in owners.items() if owner != "b"}
    # Each with a chance of 2 in 8: 100 times, give or take 9.
    assert all(abs(count - seeds / 4) < 45 for count in drawn.values())


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.booleans(), st.integers(0, 2)), min_size=1, max_size=12
    )
)
def test_the_area_counts_pairs(items):
    """Against all pairs, ties counting half, each item as often as its weight."""
    scores, members, weights = (np.array(column) for column in zip(*items, strict=True))
    pairs = [
        (weights[i] * weights[k], (scores[i] > scores[k]) + 0.5 * (scores[i] == scores[k]))
        for i in np.flatnonzero(members)
        for k in np.flatnonzero(~members)
    ]
    total = sum(weight for weight, _ in pairs)
    found = area(scores, members, weights.astype(float))
    if total:
        assert found == pytest.approx(100 * sum(w * won for w, won in pairs) / total)
    else:
        assert np.isnan(found)
