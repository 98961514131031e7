"""Fixed labels of sent features: the server's own search, against every sentence."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import kaldiio
import kenlm
import numpy as np
import pytest
import torch
import yaml
from asr_world import TRAIN, assert_near, load, model_of, table, tokens_of
from conftest import contents, inside, kill_when
from decouplefl_world import CUT, EXTRACTOR, final, learned_world, stages, start
from safetensors.numpy import load_file, save_file
from test_decouplefl import Student
from torch import Tensor, nn

from fedtools.models.acoustic.asr import build_model

LM_WEIGHT, WORDS = 0.8, 3
WIDE = {"beam_size": 5000, "beam_threshold": 1e6, "beam_size_token": 100}
SEARCH = {**WIDE, "lm_weight": LM_WEIGHT, "nbest": 5000}
# Weights other than the search's, so that another hypothesis of a list is the best one.
WEIGHTS = {"lm_weight": 2.5, "word_score": -1.5}
SENT = "round_0002"


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    root = learned_world(tmp_path_factory.mktemp("labels"))
    inside("train-lm", root / "train/text", root / "lm", "--order", "2").ok()
    (root / "server_weights.yaml").write_text(yaml.safe_dump(WEIGHTS))
    return root


def labelled(world: Path, path: Path, *more: str, kind: str = "beam", **options: object) -> Path:
    """Run one round of stage 1 and two of stage 2, on labels of a kind."""
    said = ("--set", f"training.server_labels={kind}", "--set", "method_conf.bits=32")
    if kind == "beam":
        search = yaml.safe_dump(SEARCH | options, default_flow_style=True).strip()
        said += ("--set", f"training.search={search}", "--asset", f"lm={world / 'lm'}")
    return start(world, path, "decouplefl", *CUT, *stages(1, 2), *said, *more)


@pytest.fixture(scope="module")
def searched(world) -> Path:
    path = labelled(world, world / "searched")
    inside("rounds", path).ok()
    return path


def sent_by(path: Path, client: str) -> dict[str, Tensor]:
    ark = kaldiio.load_ark(str(path / SENT / f"features.{client}.ark"))
    return {name: torch.tensor(matrix) for name, matrix in ark}


def posteriors(model: nn.Module, features: Tensor) -> Tensor:
    """Return posteriors of the second block and the last layer on features."""
    hidden = model.encoder.encoders[1](features[None], torch.ones(1, 1, len(features)).bool())[0]
    return model.ctc.log_softmax(model.encoder.after_norm(hidden))[0]


def alignments(log_probs: np.ndarray, spelled: np.ndarray) -> np.ndarray:
    """Return the best alignment score of each row of tokens in a number of frames, by state."""
    states = np.zeros((len(spelled), 2 * spelled.shape[1] + 1), int)
    states[:, 1::2] = spelled
    leaps = np.zeros(states.shape, bool)
    leaps[:, 3::2] = spelled[:, 1:] != spelled[:, :-1]
    best = np.full(states.shape, -np.inf)
    best[:, :2] = log_probs[0, states[:, :2]]
    for frame in log_probs[1:]:
        step, leap = np.full(states.shape, -np.inf), np.full(states.shape, -np.inf)
        step[:, 1:], leap[:, 2:] = best[:, :-1], best[:, :-2]
        best = np.maximum(np.maximum(best, step), np.where(leaps, leap, -np.inf)) + frame[states]
    return best[:, -2:].max(1)


class Exhaustive:
    """Every sentence of a few words, all of which the n-gram knows."""

    def __init__(self, world: Path, weights: Mapping[str, float]):
        tokens, weight = tokens_of(world), weights["lm_weight"] * math.log(10)
        lm, words = kenlm.Model(str(world / "lm/2gram.arpa")), (world / "lm/vocabulary").read_text()
        self.found: dict[int, list[tuple[str, list[int], float]]] = {}
        for count in range(1, WORDS + 1):
            for sentence in itertools.product(words.split(), repeat=count):
                text = " ".join(sentence)
                ids = [tokens.index("<space>" if one == " " else one) for one in text]
                said = weight * lm.score(text) + weights.get("word_score", 0.0) * count
                self.found.setdefault(len(ids), []).append((text, ids, said))

    def best(self, log_probs: np.ndarray) -> str:
        totals = {}
        for group in self.found.values():
            texts, ids, said = zip(*group, strict=True)
            scores = alignments(log_probs.astype(float), np.array(ids)) + np.array(said)
            totals[texts[scores.argmax()]] = scores.max()
        return max(totals, key=totals.__getitem__)


def labels_of(path: Path) -> dict[str, str]:
    files = sorted((path / "server/labels").glob("*"))
    assert [file.name.partition(".")[0] for file in files] == list(TRAIN)
    return {name: text for file in files for name, text in table(file).items()}


def check_labels(world: Path, path: Path, weights: Mapping[str, float]) -> dict[str, str]:
    """Check that each label is the best of all sentences."""
    begun, oracle = load_file(path / "init.safetensors"), Exhaustive(world, weights)
    model = load(build_model(model_of(0.0), tokens_of(world)), begun).eval()
    labels = labels_of(path)
    assert labels.keys() == {name for client in TRAIN for name in sent_by(path, client)}
    for client in TRAIN:
        for name, features in sent_by(path, client).items():
            with torch.no_grad():
                expected = oracle.best(posteriors(model, features).numpy())
            assert labels[name] == expected
    return labels


def test_labels_are_the_best_of_all_sentences(world, searched):
    assert len(set(check_labels(world, searched, SEARCH).values())) > 5


def test_weights_of_their_own_choose_among_what_was_found(world, searched, tmp_path):
    path = labelled(world, tmp_path / "exp", "--asset", f"weights={world}")
    inside("rounds", path, "--to", "3").ok()
    assert check_labels(world, path, WEIGHTS) != labels_of(searched)


class OnLabels(Student):
    """The server, which trains the classifier on fixed words."""

    def __init__(self, world: Path, path: Path, labels: Mapping[str, str]):
        classifier = ("encoder.encoders.1.", "encoder.after_norm.", "ctc.")
        super().__init__(world, *TRAIN, trained=classifier)
        tokens, self.labelled = tokens_of(world), []
        for client in TRAIN:
            for name, features in sent_by(path, client).items():
                spelled = ["<space>" if one == " " else one for one in labels.get(name, "")]
                self.labelled += [(features, [tokens.index(one) for one in spelled])] * bool(
                    spelled
                )

    def loss(self) -> Tensor:
        losses = []
        for features, ids in self.labelled:
            log_probs = posteriors(self.model, features)
            sizes = torch.tensor([len(features)]), torch.tensor([len(ids)])
            text = torch.tensor([ids])
            one = nn.functional.ctc_loss(log_probs[:, None], text, *sizes, reduction="sum")
            losses.append(one)
        return torch.stack(losses).mean()


def check_training(world: Path, path: Path, labels: Mapping[str, str]) -> None:
    begun = load_file(path / "init.safetensors")
    server = OnLabels(world, path, labels)
    server.begin(begun)
    for at in (3, 4):
        server.step()
        found = load_file(path / f"round_{at + 1:04d}" / "global.safetensors")
        expected = {name: server.state()[name] for name in found}
        assert_near(found, expected, {name: begun[name] for name in found})


def test_stage_2_trains_on_the_labels_which_stay_as_they_are(world, searched):
    check_training(world, searched, labels_of(searched))


def said_by(world: Path, path: Path, client: str) -> dict[str, str]:
    """Return the transcript of each sent utterance, identified by its features."""
    begun, texts = final(path, client, 1), table(world / "train/text")
    model, found = load(build_model(model_of(0.0), tokens_of(world)), begun).eval(), {}
    own = {}
    for name, place in table(world / "train/feats.scp").items():
        if name.startswith(client):
            speech = torch.tensor(kaldiio.load_mat(place))
            with torch.no_grad():
                values, _ = model.normalize(speech[None].clone(), torch.tensor([len(speech)]))
                hidden, _ = model.encoder.embed(values, torch.ones(1, 1, len(speech)).bool())
                mask = torch.ones(1, 1, hidden.shape[1]).bool()
                own[name] = model.encoder.encoders[0](hidden, mask)[0][0]
    for sent, matrix in sent_by(path, client).items():
        (found[sent],) = [
            texts[name]
            for name, one in own.items()
            if one.shape == matrix.shape and torch.allclose(one, matrix, atol=2e-4)
        ]
    return found


def test_a_bound_is_trained_on_transcripts(world, tmp_path):
    """Stage 1 uses a teacher's labels as before."""
    path = labelled(world, tmp_path / "exp", kind="transcripts")
    inside("rounds", path).ok()
    said: dict[str, str] = {}
    for client in TRAIN:
        said |= said_by(world, path, client)
    check_training(world, path, said)
    assert not (path / "server/labels").exists()
    other = labelled(world, tmp_path / "other")
    inside("rounds", other, "--to", "1").ok()
    for client in TRAIN:
        ours, theirs = (final(one, client, 1) for one in (path, other))
        for name in (one for one in ours if one.startswith(EXTRACTOR)):
            assert np.array_equal(ours[name], theirs[name])


def results(path: Path) -> dict[str, bytes]:
    kinds = ("*.safetensors", "server/labels/*")
    found = contents(one for kind in kinds for one in path.rglob(kind))
    # The name of the labels also gives the location of data.
    names = (str(one.relative_to(path)) for one in found)
    names = (name.partition(".")[0] if "labels" in name else name for name in names)
    return dict(zip(names, found.values(), strict=True))


def test_the_same_bytes_whatever_is_killed_removed_or_said(world, searched, tmp_path):
    """Labels made before a kill are not made again; transcripts are not read."""
    root = tmp_path / "world"
    shutil.copytree(world, root, ignore=shutil.ignore_patterns("baseline", "searched"))
    (root / "train/text").unlink()
    path = labelled(root, tmp_path / "exp")
    inside("rounds", path, "--to", "2").ok()
    command = [sys.executable, "-m", "fedtools", "rounds", str(path)]
    kill_when(command, dict(os.environ), path, "server/labels/au.*")
    (made,) = path.glob("server/labels/au.*")
    before = made.stat()
    inside("rounds", path).ok()
    assert made.stat().st_mtime_ns == before.st_mtime_ns
    expected = results(searched)
    assert len([name for name in expected if "labels" in name]) == len(TRAIN)
    assert results(path) == expected
    inside("reset", path, "--round", "4").ok()
    made.unlink()
    stale = path / "server/labels/en.0123456789abcdef"
    stale.touch()
    inside("rounds", path).ok()
    stale.unlink()
    assert results(path) == expected


def test_labels_that_are_not_of_what_was_sent_are_refused(searched, tmp_path):
    path = shutil.copytree(searched, tmp_path / "exp")
    inside("reset", path, "--round", "4").ok()
    (file,) = path.glob("server/labels/en.*")
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))
    said = f"{file}: not the labels of the features that were sent"
    inside("rounds", path).fails(1, said, "remove it")


def test_empty_labels_are_left_out_and_told(world, tmp_path):
    """The model outputs only blanks."""
    state = load_file(world / "start.safetensors")
    state["ctc.ctc_lo.bias"][0] += 100
    save_file(state, tmp_path / "silent.safetensors")
    path = labelled(world, tmp_path / "exp", "--start", str(tmp_path / "silent.safetensors"))
    inside("rounds", path, "--to", "2").ok()
    done = inside("rounds", path)
    *told, last = done.err.splitlines()
    assert done.code == 1 and "all labels of clients' features are empty" in last
    for client, count in TRAIN.items():
        assert f"round 2, {client}: {count} of {count} labels are empty: left out" in told


REFUSED = {
    "no n-gram": (("training.server_labels=beam",), (), "server_labels: beam needs an n-gram"),
    "no features": (("training.server_labels=transcripts",), (), "needs a method whose server"),
    "an n-gram without a search": ((), ("lm",), "lm has no use with server_labels: continuous"),
    "a search without a beam": (
        ("training.server_labels=beam", "training.search={beam_size: 0}"),
        ("lm",),
        "beam_size",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_fail_after_stage_1_is_refused_before(world, tmp_path, case):
    settings, assets, said = REFUSED[case]
    method = "fedavg" if case == "no features" else "decouplefl"
    personal = () if method == "fedavg" else (*CUT, *stages(1, 1))
    words = [word for one in settings for word in ("--set", one)]
    words += [word for one in assets for word in ("--asset", f"{one}={world / one}")]
    done = inside(
        *("init", tmp_path / "exp", "--config", world / "plain.yaml", "--method", method),
        *("--data", f"train={world / 'train'}", "--asset", f"tokens={world / 'tokens'}"),
        *(*personal, *words),
    )
    assert done.fails(1, said).err.count("\n") == 1
    assert not (tmp_path / "exp").exists()


def test_newcomers_adapt_without_a_server(world, searched, tmp_path):
    inside("average", searched, "--best", "1").ok()
    inside("adapt", searched, world / "train", tmp_path / "new", "--epochs", "1").ok()
    config = yaml.safe_load((tmp_path / "new/config.yaml").read_text())
    assert "server_labels" not in config["training"] and "search" not in config["training"]
