"""The AMI recipe on a fake corpus: from annotations to the tables of FMP."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, run
from fakes_ami import ami, some_meetings

from fedtools.files.datadir import read_table
from fedtools.files.tables import read_tsv

LM = {"embed_unit": 8, "att_unit": 8, "head": 2, "unit": 16, "layer": 1, "dropout_rate": 0.0}
TINY = {
    "tokens": {"token_type": "char", "vocab_size": 40},
    "lm": {"order": 2},
    "model": {
        "input_size": 80,
        "encoder": "tdnn",
        "encoder_conf": {"output_size": 8, "contexts": [1, 1, 3]},
    },
    "training": {"optim": "adam", "optim_conf": {"lr": 0.001}, "batch_bins": 100000},
    "rounds": 1,
    "baseline": {},
    "decode": {"beam_size": 5, "beam_size_token": 5, "nbest": 3},
    "nnlm": {"lm_conf": LM, "epochs": 1},
}
FINETUNING = {"task": "lm", "model": LM, "training": {"batch_sentences": 4}}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("rescore") / "a checkout"
    made = shutil.ignore_patterns("data", "dump", "exp", "downloads")
    shutil.copytree(ROOT / "egs" / "ami", root / "egs" / "ami", symlinks=True, ignore=made)
    for name in ("conf", "fedtools", "local", "utils", "setup.py"):
        (root / name).symlink_to(ROOT / name)
    corpus = ami(root, some_meetings())
    recipe = root / "egs" / "ami" / "rescore1"
    for name, content in (("tiny", TINY), ("tuning", FINETUNING)):
        (recipe / f"{name}.yaml").write_text(yaml.safe_dump(content))
    environment = {
        **os.environ,
        "AMI": str(corpus),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    fixed = ("--tag", "fake", "--config", "tiny.yaml", "--finetuning", "tuning.yaml")
    run(recipe / "run.sh", *fixed, "--rounds", "1 2", "--nj", "1", env=environment).ok()
    return recipe


def test_federations_of_table_2(recipe):
    data, exp = recipe / "data" / "fake", recipe / "exp" / "fake"
    spoken = read_table(data / "eval" / "text")
    clients = set(read_table(data / "eval" / "utt2client").values())
    tuned = yaml.safe_load((exp / "nnlm" / "seed0" / "weights.yaml").read_text())
    scale = yaml.safe_load((exp / "nnlm" / "seed0" / "scale.yaml").read_text())["scale"]
    for name, rounds, expected in (("rescored", 1, 0.0), ("fmp1", 1, scale), ("fmp2", 2, scale)):
        path = exp / name / "seed0"
        config = yaml.safe_load((path / "config.yaml").read_text())
        assert config["rounds"] == rounds and config["method_conf"]["scale"] == expected
        # Weights were tuned on dev, and the clients are those of eval.
        assert {key: config["method_conf"][key] for key in tuned} == tuned
        assert set((path / "clients.txt").read_text().split()) == clients
        heard = read_table(path / "best" / "text", values="optional")
        assert heard.keys() == spoken.keys()
    config = yaml.safe_load((exp / "finetuned" / "seed0" / "config.yaml").read_text())
    assert config["task"] == "lm" and config["rounds"] == 2


def test_the_report(recipe):
    exp = recipe / "exp" / "fake"
    page = (exp / "RESULTS.md").read_text()
    for row in (
        "First pass",
        "NNLM rescoring",
        "FMP, T = 1",
        "FMP, T = 2",
        "Fine-tuning by FedAvg",
    ):
        assert f"| {row}" in page
    assert "Laplace on bounded counts" in page and "32.83 |" in page
    picture = exp / "RESULTS-fake-epsilon.png"
    assert picture.read_bytes()[:4] == b"\x89PNG" and f"({picture.name})" in page
    # The same federation by its files and in memory.
    (total,) = (
        row
        for row in read_tsv(exp / "fmp2" / "seed0" / "best" / "wer.tsv", None)
        if row["client"] == "all"
    )
    rows = read_tsv(exp / "sweeps" / "seed0" / "sigma.tsv", None)
    assert rows[0]["sigma"] == "5.0" and rows[0]["wer"] == total["wer"]
