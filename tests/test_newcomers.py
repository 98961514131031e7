"""Newcomers, clients' models on each other's data, and data with other transcripts."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import simulated
import yaml
from asr_world import begin, model_of, say, table, tokens_of
from conftest import inside
from safetensors.numpy import load_file

from fedtools.core.tables import read_tsv
from fedtools.data.datadir import write_table
from fedtools.federation.asr.cross import read_cross

CLIENTS = ("au", "en", "in")
EXTRACTOR = ("encoder.embed.", "encoder.encoders.0.")
PERSONAL = ("--set", 'method_conf.personal=["encoder.embed.*", "encoder.encoders.0.*"]')


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("newcomers")
    simulated.data_dir(root / "train", list(CLIENTS), 6, 0)
    simulated.data_dir(root / "valid", list(CLIENTS), 3, 1)
    simulated.data_dir(root / "new", ["nz", "sa"], 6, 2)
    training = simulated.CONFIG["training"]
    simulated.config_file(root / "plain.yaml", model=model_of(0.1), training=training)
    inside("train-tokens", root / "train" / "text", root / "tokens", "--token-type", "char").ok()
    return root


@pytest.fixture(scope="module")
def trained(world) -> Path:
    path = begin(world, world / "exp", "fedextract", *PERSONAL)
    inside("rounds", path, "--to", "2").ok()
    inside("average", path, "--best", "1").ok()
    return path


def best_round(path: Path) -> int:
    """Return the best round of all clients together, by loss; the later one of equals."""
    losses: dict[int, float] = {}
    for row in read_tsv(path / "evaluate_valid.tsv", None):
        at = int(row["round"])
        losses[at] = losses.get(at, 0.0) + float(row["loss"]) if at else np.inf
    return min(losses, key=lambda at: (losses[at], -at))


def test_a_newcomer_has_what_all_share_and_personal_layers_of_the_beginning(trained):
    found, begun = load_file(trained / "model.safetensors"), load_file(trained / "init.safetensors")
    at = best_round(trained) + 1
    shared = load_file(trained / f"round_{at:04d}" / "global.safetensors")
    for name, value in found.items():
        expected = begun if name.startswith(EXTRACTOR) else shared
        assert np.array_equal(value, expected.get(name, begun[name])), name
    assert any(not np.array_equal(shared[name], begun[name]) for name in shared)


def test_newcomers_adapt_what_is_personal_each_for_itself(world, trained, tmp_path):
    path = tmp_path / "adapted"
    inside("adapt", trained, world / "new", path, "--epochs", "2").ok()
    inside("rounds", path).ok()
    begun = load_file(trained / "model.safetensors")
    assert (path / "clients.txt").read_text().split() == ["nz", "sa"]
    kept = [
        load_file(path / "clients" / client / "round_0002" / "personal.safetensors")
        for client in ("nz", "sa")
    ]
    for own in kept:
        names = {name for name, _ in own.items()}
        assert names and all(name.startswith(EXTRACTOR) for name in names)
        assert any(not np.array_equal(own[name], begun[name]) for name in names)
    assert any(not np.array_equal(kept[0][name], kept[1][name]) for name in kept[0])
    shared = load_file(path / "round_0003" / "global.safetensors")
    assert all(np.array_equal(shared[name], begun[name]) for name in shared)
    out = tmp_path / "decoded"
    inside("decode", path, world / "new", out, "--model", "round:2").ok()


@pytest.mark.parametrize("weight", [0, 1])
def test_newcomers_adapt_without_speaker_invariance_and_it_is_said(world, tmp_path, weight):
    options = ("stage1=1", "stage2=0", f"speaker_invariance={weight}")
    more = [x for one in options for x in ("--set", f"method_conf.{one}")]
    path = begin(world, tmp_path / "exp", "decouplefl", *PERSONAL, *more)
    inside("rounds", path).ok()
    inside("average", path).ok()
    done = inside("adapt", path, world / "new", tmp_path / "adapted", "--epochs", "1").ok()
    said = f"{tmp_path / 'adapted'}: newcomers adapt without speaker-invariant training\n"
    assert done.err == (said if weight else "")
    config = yaml.safe_load((tmp_path / "adapted" / "config.yaml").read_text())
    assert "speaker_invariance" not in config["method_conf"]


def test_where_nothing_is_personal_a_newcomer_adapts_everything(world, tmp_path):
    path = begin(world, tmp_path / "exp", "fedavg")
    inside("adapt", path, world / "new", tmp_path / "early", "--epochs", "1").fails(
        1, "model.safetensors: missing", "fedtools average"
    )
    inside("rounds", path, "--to", "1").ok()
    inside("average", path).ok()
    inside("adapt", path, world / "new", tmp_path / "adapted", "--epochs", "1").ok()
    inside("rounds", tmp_path / "adapted").ok()
    own = load_file(tmp_path / "adapted/clients/nz/round_0001/personal.safetensors")
    assert own.keys() >= {"ctc.ctc_lo.weight", "encoder.embed.conv.0.weight"}


def test_each_clients_model_on_each_clients_data(world, trained, tmp_path):
    """The error rate of a model that recognises one letter in every frame is counted by hand."""
    path = shutil.copytree(trained, tmp_path / "exp")
    letters = dict(zip(CLIENTS, simulated.LETTERS, strict=False))
    for client, letter in letters.items():
        say(path / "clients" / client / "model.safetensors", letter, tokens_of(world))
    out, plot = tmp_path / "cross.tsv", tmp_path / "cross.png"
    part, absent = tmp_path / "part.tsv", tmp_path / "absent.tsv"
    inside("cross", world / "valid", part, f"{{}}, all={path}").ok()
    inside("merge-cross", out, absent, part, part, "--plot", plot).ok()
    header, *rows = part.read_text().splitlines()
    assert out.read_text().splitlines() == [header, *rows, *rows]
    inside("merge-cross", out, part, "--plot", plot).ok()
    assert out.read_bytes() == part.read_bytes()
    owners, texts = (table(world / "valid" / name) for name in ("utt2client", "text"))
    found = read_cross(out)
    assert list(found) == ["FedExtract, all"] and plot.read_bytes()[:4] == b"\x89PNG"
    for (model, data), rate in found["FedExtract, all"].items():
        spoken = [text.split() for name, text in texts.items() if owners[name] == data]
        errors = sum(len(words) - (letters[model] in words) for words in spoken)
        assert rate == pytest.approx(100 * errors / sum(map(len, spoken)), abs=1e-3)
    assert len(found["FedExtract, all"]) == 9
    # Without spaces, the same models are right about some characters.
    silent = shutil.copytree(world / "valid", tmp_path / "valid")
    write_table(silent / "utt2lang", dict.fromkeys(texts, "th"))
    inside("cross", silent, out, f"{{}}, all={path}").ok()
    said = f"not the columns of {part}"
    inside("merge-cross", tmp_path / "both.tsv", absent, part, out).fails(1, said)
    assert out.read_text().split("\n")[0] == "name\tmodel\tdata\tcharacters\terrors\tcer"
    for (model, data), rate in read_cross(out)["FedExtract, all"].items():
        spoken = [text.replace(" ", "") for name, text in texts.items() if owners[name] == data]
        errors = sum(len(letters_) - (letters[model] in letters_) for letters_ in spoken)
        assert rate == pytest.approx(100 * errors / sum(map(len, spoken)), abs=1e-3)


def test_models_that_are_everybodys_are_not_crossed(world, tmp_path):
    path = begin(world, tmp_path / "exp", "fedavg")
    done = inside("cross", world / "valid", tmp_path / "cross.tsv", f"FedAvg={path}").ok()
    assert "no personal models" in done.err and not (tmp_path / "cross.tsv").exists()
    (tmp_path / "all.tsv").write_text("of an earlier run\n")
    done = inside("merge-cross", tmp_path / "all.tsv", tmp_path / "cross.tsv").ok()
    assert "no personal models" in done.err and not (tmp_path / "all.tsv").exists()


# --- data


def durations(path: Path, seconds: float) -> None:
    names = table(path / "utt2spk")
    (path / "utt2dur").write_text("".join(f"{name} {seconds}\n" for name in names))


def test_the_first_seconds_of_every_speaker(world, tmp_path, cli):
    data = shutil.copytree(world / "new", tmp_path / "data")
    parts = ("--first", "2.5", "--rest", tmp_path / "rest")
    (data / "utt2dur").unlink(missing_ok=True)
    cli("subset-data", data, tmp_path / "first", *parts).fails(1, "no duration of utterance")
    durations(data, 2.0)
    cli("subset-data", data, tmp_path / "first", *parts).ok()
    first, rest = (table(tmp_path / name / "utt2spk") for name in ("first", "rest"))
    whole = table(data / "utt2spk")
    assert first | rest == whole and not first.keys() & rest.keys()
    for speaker in set(whole.values()):
        own = [name for name in sorted(whole) if whole[name] == speaker]
        # Three utterances of two seconds: two are needed for 2.5 s.
        assert [name for name in own if name in first] == own[:2] and own[2] in rest
    cli("subset-data", data, tmp_path / "most", "--first", "100").ok()
    assert len(table(tmp_path / "most" / "utt2spk")) == len(whole) - len(set(whole.values()))


def test_a_speaker_with_one_utterance_is_no_newcomer(world, tmp_path, cli):
    """Without adaptation data, it would be scored as adapted."""
    whole, kept = table(world / "new" / "utt2spk"), {}
    for name in sorted(whole):
        own = [one for one in kept if kept[one] == whole[name]]
        if whole[name] != min(whole.values()) or not own:
            kept[name] = whole[name]
    (alone,) = [name for name in kept if kept[name] == min(whole.values())]
    data = tmp_path / "data"
    (tmp_path / "some").write_text("".join(f"{name} a\n" for name in kept))
    cli("relabel", world / "new", tmp_path / "some", data).ok()
    durations(data, 2.0)
    parts = ("--first", "2.5", "--rest", tmp_path / "rest")
    done = cli("subset-data", data, tmp_path / "first", *parts).ok()
    assert done.err == f"{data}: speakers with one utterance, left out: {whole[alone]}\n"
    first, rest = (table(tmp_path / name / "utt2spk") for name in ("first", "rest"))
    assert set(first.values()) == set(rest.values()) == set(kept.values()) - {whole[alone]}
    assert first.keys() | rest.keys() == kept.keys() - {alone}
    # Other options give all other utterances to evaluation.
    every = ("--utterances", "1", "--rest", tmp_path / "others")
    cli("subset-data", data, tmp_path / "one", *every).ok()
    assert len(table(tmp_path / "others" / "utt2spk")) == len(kept) - 1
    (tmp_path / "some").write_text(f"{alone} a\n")
    cli("relabel", world / "new", tmp_path / "some", data).ok()
    durations(data, 2.0)
    cli("subset-data", data, tmp_path / "none", *parts).fails(
        1, "every speaker has only one utterance"
    )
    assert not (tmp_path / "none").exists()


def test_other_transcripts(world, tmp_path, cli):
    names = list(table(world / "new" / "utt2spk"))
    lines = [f"{name} w {index}\n" if index else f"{name}\n" for index, name in enumerate(names)]
    (tmp_path / "text").write_text("".join(lines))
    assert cli("relabel", world / "new", tmp_path / "text", tmp_path / "out").ok().err == ""
    found = table(tmp_path / "out" / "text")
    assert found == {name: f"w {index}" for index, name in enumerate(names) if index}
    assert table(tmp_path / "out" / "feats.scp").keys() == found.keys()
    (tmp_path / "text").write_text("".join(f"{name}\n" for name in names))
    cli("relabel", world / "new", tmp_path / "text", tmp_path / "none").fails(1, "no words")
    assert not (tmp_path / "none").exists()


def test_a_client_without_labels_is_named_when_it_vanishes_and_when_it_is_scored(
    world, tmp_path, cli
):
    owners = table(world / "train" / "utt2client")
    lines = [f"{name}{'' if owner == 'en' else ' a'}\n" for name, owner in owners.items()]
    (tmp_path / "text").write_text("".join(lines))
    left, path = tmp_path / "left", tmp_path / "exp"
    told = cli("relabel", world / "train", tmp_path / "text", left).ok()
    assert told.err == f"{left}: no words for any utterance of en: left out\n"
    found = {}
    for method, more in (("fedextract", PERSONAL), ("centralized", ())):
        path = tmp_path / method
        options = ("--config", world / "plain.yaml", "--asset", f"tokens={world / 'tokens'}", *more)
        cli("init", path, "--method", method, "--data", f"train={left}", *options).ok()
        out = tmp_path / "decoded" / method
        found[method] = cli("decode", path, world / "valid", out, "--model", "start").ok().err
    said = f"en: not a client of {tmp_path / 'fedextract'}, decoded with the shared model\n"
    assert found == {"fedextract": f"{world / 'valid'}: {said}", "centralized": ""}
