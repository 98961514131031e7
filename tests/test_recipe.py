"""The Common Voice recipe from audio to RESULTS.md, in a path with blanks; alone and killed."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import fakes
import pytest
import yaml
from conftest import ROOT, Result, kill_at_random, run

from fedtools.files.tables import read_tsv

TINY = {
    "tokens": {"token_type": "char", "vocab_size": 32},
    "lm": {"order": 2},
    "model": {
        "input_size": 80,
        "init": "xavier_uniform",
        "normalize": "utterance_mvn",
        "encoder": "transformer",
        "encoder_conf": {
            "output_size": 8,
            "attention_heads": 2,
            "linear_units": 16,
            "num_blocks": 1,
            "dropout_rate": 0.1,
        },
    },
    "training": {"optim": "adam", "optim_conf": {"lr": 0.001}, "batch_bins": 60000},
    "rounds": 2,
    "average": 2,
    "decode": {"beam_size": 10, "nbest": 3},
    "baseline": {"rounds": 2},
    "methods": {"fedavg": {"method_conf": {"weighting": "utterances"}}},
}


def make_checkout(folder: Path) -> Path:
    """A checkout whose path has blanks; what is big or fixed is linked to the real one."""
    root = folder / "a checkout"
    recipe = root / "egs" / "commonvoice" / "asr1"
    shutil.copytree(ROOT / "egs" / "commonvoice" / "asr1", recipe, symlinks=True,
                    ignore=shutil.ignore_patterns("data", "dump", "exp", "downloads"))  # fmt: skip
    for name in ("conf", "fedtools", "local", "utils", "setup.py"):
        (root / name).symlink_to(ROOT / name)
    (recipe / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    clips = fakes.some_clips(speakers=5, each=3)
    corpus = fakes.common_voice(folder / "a corpus", clips, release=22)
    (folder / "environment").write_text(str(corpus))
    return recipe


def command(recipe: Path, *more: str) -> tuple[list[str], dict[str, str]]:
    """The recipe's command line, and its environment."""
    corpus = (recipe.parents[3] / "environment").read_text()
    environment = {
        **os.environ,
        "COMMONVOICE": corpus,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    fixed = ["--tag", "fake", "--release", "fake", "--config", "tiny.yaml", "--nj", "2"]
    hours = ["--hours", "0.6,0.2,0.2", "--methods", "client fedavg", "--speeds", "1.0 1.1"]
    return [str(recipe / "run.sh"), *fixed, *hours, *more], environment


def outcome(recipe: Path) -> dict[str, bytes]:
    """What a killed run must have in common with one left alone."""
    exp = recipe / "exp" / "fake"
    files = [
        *exp.rglob("global.safetensors"),
        *exp.rglob("model.safetensors"),
        *exp.rglob("wer.tsv"),
        *exp.rglob("nbest.tsv"),
    ]
    return {str(path.relative_to(exp)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[Path, Result]:
    """The recipe, run to its end without a disturbance."""
    recipe = make_checkout(tmp_path_factory.mktemp("alone"))
    words, environment = command(recipe)
    # From another directory: the recipe must not depend on where it is called.
    return recipe, run(*words, env=environment, cwd=recipe.parents[3]).ok()


def test_ends_with_the_table(alone):
    recipe, result = alone
    page = (recipe / "exp" / "fake" / "RESULTS.md").read_text()
    for row in ("Baseline", "Client", "FedAvg"):
        assert f"| {row}" in page or f"| **{row}" in page, page
        assert row in result.out
    assert "Comm." in page
    assert (recipe / "exp" / "fake" / "RESULTS-fake.png").read_bytes()[:4] == b"\x89PNG"
    assert "kept 60, dropped 0" in result.out
    names = set(outcome(recipe))
    assert "fedavg/seed0/round_0003/global.safetensors" in names
    assert "baseline/seed0/decode_test/wer.tsv" in names


def test_a_method_has_the_options_of_its_section(alone):
    recipe, _ = alone
    for method, options in (("fedavg", {"weighting": "utterances"}), ("client", {})):
        config = yaml.safe_load(
            (recipe / "exp" / "fake" / method / "seed0" / "config.yaml").read_text()
        )
        assert config["method_conf"] == options


def test_nothing_but_the_data_is_in_the_way(alone):
    """No file outside of data, dump and exp is written, and none is left half-written."""
    recipe, _ = alone
    made = {path.name for path in recipe.iterdir()} - {
        path.name for path in (ROOT / "egs/commonvoice/asr1").iterdir()
    }
    assert made <= {"data", "dump", "exp", "tiny.yaml"}
    assert not [path for path in recipe.rglob("*.tmp") if ".venv" not in path.parts]


def test_training_data_alone_are_of_several_speeds(alone):
    recipe, _ = alone
    data = recipe / "data" / "fake"
    count = {path.name: len((path / "text").read_text().splitlines()) for path in data.iterdir()}
    assert count["train_sp"] == 2 * count["train"]
    assert count["server_train_sp"] == 2 * count["server_train"]
    assert sum(name.endswith("_sp") for name in count) == 2
    for system, split in (("baseline", "server_train_sp"), ("fedavg", "train_sp")):
        path = recipe / "exp" / "fake" / system / "seed0" / "config.yaml"
        assert Path(yaml.safe_load(path.read_text())["data"]["train"]).name == split


def test_reruns_from_stage_6(alone):
    recipe, _ = alone
    before = outcome(recipe)
    for path in (recipe / "exp" / "fake").rglob("nbest.*"):
        path.unlink()
    words, environment = command(recipe, "--stage", "6")
    run(*words, env=environment).ok()
    assert outcome(recipe) == before


def test_help_and_wrong_options(alone):
    recipe, _ = alone
    words, environment = command(recipe)
    shown = run(words[0], "--help", env=environment).ok()
    assert "--stop_stage" in shown.out + shown.err
    wrong = run(words[0], "--stagee", "3", env=environment)
    assert wrong.code == 2
    assert "stagee" in wrong.err
    stray = run(words[0], "--methods", "client", "fedavg", env=environment)
    assert stray.code == 2 and "unexpected 'fedavg'" in stray.err


def test_the_readme_tells_all_options_and_no_others():
    folder = ROOT / "egs/commonvoice/asr1"
    above, _, _ = (folder / "run.sh").read_text().partition(". utils/parse_options.sh")
    options = set(re.findall(r"^([a-z_]+)=", above, flags=re.M)) - {"help_message"}
    told = set(re.findall(r"--([a-z_]+)", (folder / "README.md").read_text())) - {"help"}
    assert told == options


def test_killed_and_rerun(alone, tmp_path):
    """kill -9 at random moments, then the same command: the same bytes as one left alone."""
    recipe = make_checkout(tmp_path)
    words, environment = command(recipe)
    seed = kill_at_random(words, environment, times=4, longest=25)
    run(*words, env=environment).ok()
    first, _ = alone
    assert outcome(recipe) == outcome(first), f"seed {seed}"


def test_tables_are_means_over_seeds(alone):
    """The last test: a seed more is in the way of the others."""
    recipe, _ = alone
    words, environment = command(recipe, "--stage", "4", "--seeds", "0 1")
    words[words.index("client fedavg")] = "fedavg"
    before = (recipe / "exp/fake/fedavg/seed0/model.safetensors").read_bytes()
    run(*words, env=environment).ok()
    assert (recipe / "exp/fake/fedavg/seed0/model.safetensors").read_bytes() == before
    scores = [recipe / f"exp/fake/fedavg/seed{seed}/decode_test/wer.tsv" for seed in (0, 1)]
    averages = [read_tsv(path, None)[-2] for path in scores]
    mean = sum(float(row["wer"]) for row in averages) / 2
    page = (recipe / "exp" / "fake" / "RESULTS.md").read_text()
    assert "Means ± standard deviations over 2 seeds." in page
    assert "Seed: 0, 1." in page
    cells = next(line for line in page.splitlines() if line.startswith("| FedAvg")).split("|")
    assert float(cells[-2].strip(" *").split(" ± ")[0]) == pytest.approx(mean, abs=0.06)
