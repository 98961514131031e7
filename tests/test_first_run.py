"""The keyword recipe's first run: its own corpus, a pretrained encoder, a server alone, a table."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import yaml
from commands import ledger
from conftest import ROOT, Result, run
from forked import forked
from keyword_checkout import make_checkout
from packed_corpus import SPEAKERS, WORDS, pack
from pretrained_models import save_whisper

FIRST = ROOT / "conf/speechcommands/first.yaml"


def environment() -> dict[str, str]:
    places = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    empty = {"SPEECHCOMMANDS": "", "SPEECHCOMMANDS_TEST": ""}
    return forked({**os.environ, **empty, "PATH": places})


def start(recipe: Path, *options: str) -> Result:
    return run(recipe / "run.sh", *options, env=environment())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Run all stages with few rounds, on a small corpus and a tiny Whisper."""
    folder = tmp_path_factory.mktemp("first")
    recipe = make_checkout(folder)
    (recipe / "corpus").unlink()
    pack(recipe / "corpus")
    config = yaml.safe_load(FIRST.read_text())
    config |= {"rounds": 2, "evaluate_every": 1}
    config["methods"]["centralized"] |= {"rounds": 2, "evaluate_every": 1}
    config["methods"]["dpfedavg"] |= {"rounds": 2, "evaluate_every": 1}
    config["baseline"] |= {"rounds": 2, "evaluate_every": 1}
    (recipe / "short.yaml").write_text(yaml.safe_dump(config))
    whisper = save_whisper(folder / "whisper", encoder_layers=1)
    options = ["--config", "short.yaml", "--pretrained", str(whisper), "--server_clips", "5 9"]
    return recipe, start(recipe, *options, "--seeds", "0").ok()


def test_rows_of_the_table(finished):
    recipe, done = finished
    page = (recipe / "exp/first-short/RESULTS.md").read_text()
    assert "## Speech Commands 560 speakers, short.yaml" in page and "(mini)" not in page
    rows = re.compile(r"^(?:\| )?(Server alone, \d clips|FedAvg|FedKWS-UI) +(?:\| +)?\d", re.M)
    table = page[page.index("accuracy (%) of federated training") :].split("\n\n")[1]
    order = ["Server alone, 5 clips", "Server alone, 9 clips", "FedAvg", "FedKWS-UI"]
    assert rows.findall(table) == rows.findall(done.out) == order
    assert "to Server alone, 5 clips" in page and "to FedAvg" in page
    assert (recipe / "exp/first-short/RESULTS-first-short-accuracy.png").exists()
    assert not list((recipe / "exp/first-short").glob("*landscape*"))


def test_experiments_and_their_data(finished):
    recipe, _ = finished
    exp = recipe / "exp/first-short/words/head"
    rows = {"centralized", "dpfedavg", "fedavg", "fedkws_ui"}
    rows |= {f"centralized.server_clips={clips}" for clips in (5, 9)}
    assert {path.name for path in exp.iterdir()} == rows
    names = {}
    for split in ("train", "valid", "test", "server5", "server9"):
        table = (recipe / f"dump/first-short/words/{split}/clips.tsv").read_text().splitlines()
        names[split] = {line.split("\t")[0] for line in table[1:]}
    for split, speakers in SPEAKERS.items():
        assert len(names[split]) == 8 * speakers
    assert len(names["server5"]) == 5 and len(names["server9"]) == 9
    assert names["server5"] < names["server9"] < names["valid"]
    assert not names["valid"] & names["train"] and not names["test"] & names["train"]
    for row in rows:
        config = yaml.safe_load((exp / row / "seed0/config.yaml").read_text())
        _, _, clips = row.partition("=")
        train = f"server{clips}" if clips else "train"
        assert config["data"]["train"] == f"dump/first-short/words/{train}"
        assert config["data"]["test"] == "dump/first-short/words/test"
    # One experiment computes the encoder's outputs, and the others wait for it.
    lines = [
        line.split("\t")[:3]
        for line in (recipe / "exp/first-short/experiments").read_text().splitlines()
    ]
    first = "exp/first-short/words/head/centralized/seed0"
    assert lines[0] == ["1", first, "-"] and len(lines) == 6
    assert {(wave, awaited) for wave, _, awaited in lines[1:]} == {("2", first)}
    clients = {row["client"] for row in ledger(exp / "fedavg/seed0")} - {"-"}
    assert len(clients) == SPEAKERS["train"]


def test_more_servers_of_the_same_run(finished):
    """Another size needs no other tag, and nothing that is finished is trained again."""
    recipe, _ = finished
    exp = recipe / "exp/first-short/words/head"
    before = {path: path.stat().st_mtime_ns for path in exp.rglob("global.safetensors")}
    whisper = recipe.parents[3] / "whisper"
    options = ["--config", "short.yaml", "--pretrained", str(whisper), "--seeds", "0"]
    start(recipe, *options, "--server_clips", "5 9 16", "--stop_stage", "4").ok()
    after = {path: path.stat().st_mtime_ns for path in exp.rglob("global.safetensors")}
    assert before.items() <= after.items()
    assert {path.parents[2].name for path in after.keys() - before.keys()} == {
        "centralized.server_clips=16"
    }
    many = start(recipe, *options, "--server_clips", "17", "--stop_stage", "1")
    told = "task words has 16 clips in valid, not 17; lower --server-clips"
    assert many.code == 1 and told in many.err.splitlines()[-1]


def test_default_is_the_corpus_in_the_repository(tmp_path: Path):
    """Without a corpus in db.sh, stage 1 unpacks it, and every speaker is a client."""
    recipe = make_checkout(tmp_path)
    whisper = save_whisper(tmp_path / "whisper", encoder_layers=1)
    done = start(recipe, "--pretrained", str(whisper), "--stop_stage", "1").ok()
    for said in ("560 speakers", "71 MB", "minutes"):
        assert said in done.out
    counts = {}
    for split in ("train", "valid", "test", "server25"):
        folder = recipe / "data/first/words" / split
        clients = (folder / "utt2client").read_text().splitlines()
        counts[split] = (len(clients), len({line.split()[1] for line in clients}))
    assert counts["valid"] == (270, 60) and counts["test"] == (600, 200)
    assert counts["train"][1] == 300 and counts["server25"][0] == 25
    assert (recipe / "data/first/words/classes.txt").read_text().split() == list(WORDS)


def test_mini_configuration_is_the_synthetic_run(tmp_path: Path):
    """Its tag and its rows are those of RESULTS-mini.md, which this command wrote."""
    recipe = make_checkout(tmp_path)
    packed = recipe / "dump/mini/keywords/train"
    packed.mkdir(parents=True)
    (packed / "classes.txt").write_text("_silence_\n_unknown_\nyes\nno\n")
    config = ("--config", "conf/mini.yaml", "--stage", "3", "--stop_stage", "3")
    done = start(recipe, *config).ok()
    assert "mini corpus, spoken by a synthesiser" in done.out
    lines = (recipe / "exp/mini/experiments").read_text().splitlines()
    rows = {tuple(line.split("\t")[1].split("/")[1:]) for line in lines}
    page = (ROOT / "egs/speechcommands/kws1/RESULTS-mini.md").read_text()
    assert "run.sh --config conf/mini.yaml --results RESULTS-mini.md" in page
    titles = {"centralized": "Centralized", "fedavg": "FedAvg", "alt": "ALT",
              "fedkws_ui": "FedKWS-UI"}  # fmt: skip
    networks = {"dscnn": "DSCNN", "mhattrnn": "MHAttRNN", "resnet": "ResNet",
                "transformer": "Transformer"}  # fmt: skip
    costs = page[page.index("communication and computation") :].split("\n\n")[1]
    found = re.findall(r"^\| keywords \| (\w+) +\| ([\w-]+) +\|", costs, re.M)
    assert len(rows) == len(lines) == 16
    assert {(networks[network], titles[method]) for _, _, network, method, _ in rows} == {*found}
    assert {(root, task, seed) for root, task, *_, seed in rows} == {("mini", "keywords", "seed0")}
