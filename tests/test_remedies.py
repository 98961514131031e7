"""Mistakes of a first day: each message names the place at fault and the remedy, in one line."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import simulated
from conftest import fedtools, inside
from scripts import program

from fedtools.data.datadir import DataDir

ROUNDS = "round_0001/global.safetensors"


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Data of two clients, tokens and a configuration, all by relative names."""
    root = tmp_path_factory.mktemp("remedies")
    simulated.data_dir(root / "data", ["au", "en"], 4)
    (root / "text").write_text(f"x {' '.join(simulated.LETTERS)}\n")
    inside("train-tokens", root / "text", root / "tokens", "--token-type", "char").ok()
    networks = {"small": {"rounds": 2}, "large": {"rounds": 3}}
    simulated.config_file(root / "config.yaml", task="asr", rounds=1, networks=networks)
    return root


def _words(changes: dict[str, str | None] | None = None, *more: str) -> list[str]:
    """Return the arguments of `fedtools init exp`, with changed options; None leaves one out."""
    options = {"--config": "config.yaml", "--method": "fedavg", "--data": "train=data"}
    options |= {"--asset": "tokens=tokens", **(changes or {})}
    given = [word for name, value in options.items() if value for word in (name, value)]
    return ["init", "exp", *given, *more]


INIT = {
    "a section misspelt on the command line": (
        _words(None, "--set", "trainig.x=1"),
        "--set trainig.x=1: unknown option 'trainig', did you mean 'training'?",
    ),
    "an option misspelt on the command line": (
        _words(None, "--set", "training.grad_clib=1"),
        "--set training.grad_clib=1: training: unknown option 'grad_clib', did you mean",
    ),
    "a bad value on the command line": (
        _words(None, "--set", "training.batch_bins=-1"),
        "--set training.batch_bins=-1: training: option 'batch_bins' is -1",
    ),
    "the same in the file": (
        _words({"--config": "bad.yaml"}),
        "bad.yaml:2: training: unknown option 'grad_clib', did you mean 'grad_clip'?",
    ),
    "more clients than there are": (
        _words(None, "--set", "clients_per_round=5"),
        "--set clients_per_round=5: option 'clients_per_round' is 5, no number or share of 2 "
        "clients; give a number from 1 to 2 or a share, such as 0.1",
    ),
    "a size that heads do not divide": (
        _words(None, "--set", "model.encoder_conf.output_size=63"),
        "output_size 63 has to be an even multiple of attention_heads (2)",
    ),
    "an odd size": (
        _words(
            None,
            *("--set", "model.encoder_conf.output_size=63"),
            *("--set", "model.encoder_conf.attention_heads=3"),
        ),
        "output_size 63 has to be an even multiple of attention_heads (3)",
    ),
    "an unknown section": (
        _words(None, "--section", "tiny"),
        "config.yaml: no section 'tiny'; known: model, networks, training",
    ),
    "an unknown section of a section": (
        _words(None, "--section", "networks.smal"),
        "config.yaml: networks: no section 'smal', did you mean 'small'?",
    ),
    "a section of an unknown section": (
        _words(None, "--section", "network.small"),
        "config.yaml: no section 'network', did you mean 'networks'?",
    ),
    "training data that do not exist": (
        _words({"--data": "train=typo"}),
        "typo: no such data directory; check --data train=FOLDER",
    ),
    "validation data that do not exist": (
        _words(None, "--data", "valid=typo"),
        "typo: no such data directory; check --data valid=FOLDER",
    ),
    "an asset that does not exist": (
        _words({"--asset": "tokens=typo"}),
        "typo: no such folder; check --asset tokens=FOLDER",
    ),
    "features of too few utterances": (
        _words({"--data": "train=few"}),
        "few/feats.scp: no features of utterance 'au-s0-000'; extract them",
    ),
    "transcripts of too few utterances": (
        _words(None, "--data", "valid=silent"),
        "silent/text: no entry of utterance 'au-s0-000'; add its transcript",
    ),
    "a method of one's own without a path": (
        _words({"--method": "mymethod"}),
        "; $FEDTOOLS_PATH, for methods of your own, is not set",
    ),
}


@pytest.mark.parametrize("name", INIT)
def test_what_init_says(world, tmp_path, monkeypatch, name):
    words, said = INIT[name]
    shutil.copytree(world, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDTOOLS_PATH", raising=False)
    Path("bad.yaml").write_text("training:\n  grad_clib: 1\ntask: asr\n")
    for folder, table in (("few", "feats_scp"), ("silent", "text")):
        data = DataDir.read("data")
        whole = getattr(data, table)
        shutil.copytree("data", folder)
        file = Path(folder, table.replace("_", "."))
        first = next(iter(whole))
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if not line.startswith(f"{first} ")))
    inside(*words).fails(1, said)
    assert not Path("exp", ROUNDS).exists()


@pytest.mark.parametrize("place", ["checkout", "path"])
def test_a_method_that_is_not_found_is_looked_for(world, tmp_path, place):
    """In a checkout that is not the package that runs, or a folder of $FEDTOOLS_PATH."""
    folder = tmp_path / "checkout/egs/deep"
    shutil.copytree(world, folder)
    env = {"FEDTOOLS_PATH": ""}
    if place == "checkout":
        own = tmp_path / "checkout/fedtools/methods/mymethod.py"
        own.parent.mkdir(parents=True)
        own.write_text("")
        said = f"{own} is not in the package that runs, "
    else:
        env = {"FEDTOOLS_PATH": str(tmp_path / "mine")}
        said = f"it is not in {tmp_path / 'mine'}/methods either"
    told = fedtools(*_words({"--method": "mymethod"}), cwd=folder, env=env)
    told.fails(1, "unknown method 'mymethod'", said)


def test_rounds_from_another_folder(world, tmp_path, monkeypatch):
    shutil.copytree(world, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    inside(*_words()).ok()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    said = "data: the train data are not there; run it where fedtools init ran"
    inside("rounds", "../here/exp").fails(1, said)
    monkeypatch.chdir(tmp_path / "here")
    inside("rounds", "exp").ok()


TABLES = {
    "utt2spk": "write a line for each utterance: <utterance> <speaker>",
    "spk2utt": "make it with: awk ",
    "text": "write a line for each utterance: <utterance> <words>, or pass --no-text",
    "feats.scp": "make it with fedtools extract-features, or pass --no-feats",
    "client2utt": "utt2client is there: make it with: awk ",
    "utt2client": "client2utt is there: make it with: awk ",
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_that_are_not_there(world, tmp_path, name):
    """What the message says makes the table that was there, byte by byte."""
    folder = shutil.copytree(world / "data", tmp_path / "my data")
    whole = (folder / name).read_bytes()
    (folder / name).unlink()
    told = program("utils/validate_data_dir.py", folder, "--no-wav")
    told.fails(1, f"{name}: not there; ", TABLES[name])
    if "awk" in TABLES[name]:
        command = told.err.strip().partition("make it with: ")[2]
        environment = {"PATH": os.environ["PATH"]}
        subprocess.run(command, shell=True, check=True, cwd=folder, env=environment)
        assert (folder / name).read_bytes() == whole


def test_files_that_cannot_be_read_say_what_to_do(tmp_path):
    (tmp_path / "a folder").mkdir()
    for name, said in (
        ("nothing.yaml", "cannot be read: No such file or directory; check its name"),
        ("nowhere/x.yaml", f"cannot be read: No such file or directory; {tmp_path}/nowhere is not"),
        ("a folder", "cannot be read: not a regular file; name a file in this folder"),
    ):
        inside("config", tmp_path / name, "rounds").fails(1, f"{tmp_path / name}: ", said)
