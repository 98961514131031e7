"""The Common Voice recipe from audio to RESULTS.md, in a path with spaces; alone and killed."""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

import fakes
import numpy as np
import pytest
import yaml
from asr_checkout import TINY, command, make_checkout
from conftest import ROOT, Result, contents, kill_when, run
from recorder import calls, record
from safetensors.numpy import load_file

from fedtools.core.tables import read_tsv
from fedtools.data.datadir import DataDir

SETS = ("server_train", "server_valid", "server_test", "train", "valid", "test")


def outcome(recipe: Path) -> dict[str, bytes]:
    """Return what a killed run must have in common with an uninterrupted one."""
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
    """Run the recipe to its end without interruption."""
    recipe = make_checkout(tmp_path_factory.mktemp("alone"))
    words, environment = command(recipe)
    environment = record(recipe.parents[3] / "recorder", environment)
    # From another directory: the recipe must not depend on the current one.
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
    assert "fedavg/seed3/round_0003/global.safetensors" in names
    assert "baseline/seed3/decode_test/wer.tsv" in names


def test_a_method_has_the_options_of_its_section(alone):
    recipe, _ = alone
    for method, options in (("fedavg", {"weighting": "utterances"}), ("client", {})):
        config = yaml.safe_load(
            (recipe / "exp" / "fake" / method / "seed3" / "config.yaml").read_text()
        )
        assert config["method_conf"] == options


SYSTEMS = ("baseline/seed3", "client/seed3", "fedavg/seed3")
BASELINE = SYSTEMS[0]
DECODED = [(system, split) for system in SYSTEMS for split in ("valid", "test")]
DECODED.append((BASELINE, "server_test"))


def test_each_command_opens_what_is_its_own(alone):
    """Nothing is chosen on test data, and clients are decoded and scored by their own files."""
    recipe, _ = alone
    exp, data, found = "exp/fake", "data/fake", calls(recipe.parents[3] / "recorder")

    def folder(system: str, split: str) -> str:
        return f"{exp}/{system}/decode_{split}"

    assert sorted(found["tune"]) == [
        [folder(one, "valid"), f"{data}/valid", f"{exp}/{one}/weights.yaml"] for one in SYSTEMS
    ]
    # Options of one set follow the options of all.
    decoded = {tuple(words[words.index("--nj") + 2 :][:3]) for words in found["decode"]}
    assert decoded == {
        (f"{exp}/{system}", f"{data}/{split}", folder(system, split)) for system, split in DECODED
    }
    for words in found["decode"]:
        assert words[words.index("--lm") + 1] == f"{exp}/lm" and "--model" not in words
    tested = [(system, split) for system, split in DECODED if split != "valid"]
    assert sorted(found["best-path"]) == sorted(
        [folder(*one), "--weights", f"{exp}/{one[0]}/weights.yaml"] for one in tested
    )
    assert sorted(found["score"]) == sorted(
        [f"{data}/{split}", f"{folder(system, split)}/text", folder(system, split)]
        for system, split in tested
    )
    assert sorted(words[:3] for words in found["compare"]) == [
        [f"{data}/test", f"{folder(BASELINE, 'test')}/text", f"{folder(one, 'test')}/text"]
        for one in SYSTEMS[1:]
    ]
    for name, made in (("train-tokens", "tokens"), ("train-lm", "lm")):
        (words,) = found[name]
        assert words[:2] == [f"{data}/server_train/text", f"{exp}/{made}"]
    (words,) = found["train-lm"]
    judged = [words[index + 1] for index, word in enumerate(words) if word == "--valid"]
    assert judged == [f"{data}/server_valid/text", f"{data}/valid/text"]
    for name in ("train-tokens", "train-lm", "rounds", "average", "tune"):
        assert not [word for words in found[name] for word in words if "test" in word]
    # The options of init.
    begun = (recipe / exp / "experiments").read_text().splitlines()
    assert len(begun) == len(SYSTEMS)
    assert not [word for line in begun for word in line.split("\t") if "test" in word]
    (words,) = found["report"]
    rows = [words[index + 1] for index, word in enumerate(words) if word == "--row"]
    scored = [row.partition("=")[2] or row for row in rows]
    experiments = ["", *(f"{exp}/{one}" for one in SYSTEMS[1:])]
    assert scored == [
        f"{experiment}:{folder(system, 'test')}"
        for experiment, system in zip(experiments, SYSTEMS, strict=True)
    ]


def test_every_model_is_trained_on_its_own_data_and_begins_with_the_baseline(alone):
    recipe, _ = alone
    exp = recipe / "exp" / "fake"
    averaged = (exp / BASELINE / "model.safetensors").read_bytes()
    for system in SYSTEMS:
        config = yaml.safe_load((exp / system / "config.yaml").read_text())
        server = "server_" * (system == BASELINE)
        assert config["data"] == {
            "train": f"data/fake/{server}train_sp",
            "valid": f"data/fake/{server}valid",
        }
        assert (config["seed"], config["rounds"]) == (3, 2)
        started = None if system == BASELINE else hashlib.sha256(averaged).hexdigest()
        assert config["start"] == started
        begun, model = f"{system}/init.safetensors", f"{BASELINE}/model.safetensors"
        first, whole = (load_file(exp / name) for name in (begun, model))
        same = [np.array_equal(first[name], whole[name]) for name in whole]
        assert all(same) == (system != BASELINE)


def test_hypotheses_are_searched_as_configured(alone):
    recipe, _ = alone
    exp = recipe / "exp" / "fake"
    sum_of_lm = hashlib.sha256((exp / "lm" / "2gram.bin").read_bytes()).hexdigest()
    for system, split in DECODED:
        made_from = yaml.safe_load((exp / system / f"decode_{split}/nbest.1.yaml").read_text())
        assert made_from["data"] == f"data/fake/{split}"
        assert made_from["search"].items() >= {"lm": sum_of_lm, **TINY["decode"]}.items()


def test_the_seed_decides_who_is_in_which_set(alone, tmp_path):
    recipe, _ = alone
    corpus = (recipe.parents[3] / "environment").read_text()
    hours = ("--hours", "0.6,0.2,0.2", "--accents", "au=australia,en=england,in=indian")
    hours += ("--common-sentences", "keep")
    found = []
    for seed in (3, 4):
        program = (sys.executable, ROOT / "local/commonvoice/prepare.py", corpus)
        run(*program, tmp_path / f"{seed}", *hours, "--seed", f"{seed}").ok()
        found.append([(tmp_path / f"{seed}" / name / "utt2spk").read_text() for name in SETS])
    made = [(recipe / "data" / "fake" / name / "utt2spk").read_text() for name in SETS]
    assert made == found[0] != found[1]


def test_nothing_but_the_data_is_in_the_way(alone):
    """No file outside data, dump and exp is written, and no partial file is left."""
    recipe, _ = alone
    made = {path.name for path in recipe.iterdir()} - {
        path.name for path in (ROOT / "egs/commonvoice/asr1").iterdir()
    }
    assert made <= {"data", "dump", "exp", "tiny.yaml"}
    assert not [path for path in recipe.rglob("*.tmp") if ".venv" not in path.parts]


def test_training_data_alone_are_of_several_speeds(alone):
    recipe, _ = alone
    data = recipe / "data" / "fake"
    count = {path.parent.name: len(path.read_text().splitlines()) for path in data.glob("*/text")}
    assert count["train_sp"] == 2 * count["train"]
    assert count["server_train_sp"] == 2 * count["server_train"]
    assert sum(name.endswith("_sp") for name in count) == 2
    for system, split in (("baseline", "server_train_sp"), ("fedavg", "train_sp")):
        path = recipe / "exp" / "fake" / system / "seed3" / "config.yaml"
        assert Path(yaml.safe_load(path.read_text())["data"]["train"]).name == split


def test_an4_runs_to_its_rates_and_trains_on_no_speaker_it_is_judged_by(tmp_path):
    recipe, spoken = make_checkout(tmp_path), {"train": 10, "test": 11}
    (tmp_path / "clip.mp3").write_bytes(fakes.tiny_mp3())
    for name, speakers in spoken.items():
        who = {f"{name}{n}-{u}": f"{name}{n}" for n in range(speakers) for u in range(2)}
        tables = {"utt2spk": who, "text": dict.fromkeys(who, "A B")}
        tables["wav_scp"] = dict.fromkeys(who, str(tmp_path / "clip.mp3"))
        DataDir(tmp_path / "an4" / name, **tables).write()
    _, environment = command(recipe)
    options = ("--config", "tiny.yaml", "--nj", "1", tmp_path / "an4")
    done = run("local/an4.sh", *options, env=environment, cwd=recipe).ok()
    made = {
        name: DataDir.read(recipe / "data/an4" / name) for name in ("train_sp", "valid", "test")
    }
    heard = {speaker.split("-")[-1] for speaker in made["train_sp"].utt2spk.values()}
    valid, test = (set(made[name].utt2spk.values()) for name in ("valid", "test"))
    assert (len(heard), len(valid), len(test)) == (2, 8, 10)
    assert heard | valid == {f"train{n}" for n in range(10)} and all("test" in who for who in test)
    assert {name: len(one.feats_scp) for name, one in made.items()} == {
        "train_sp": 2 * 2 * 3, "valid": 8 * 2, "test": 10 * 2,
    }  # fmt: skip
    # Half a second at its original speed.
    lengths = [made[name].utt2num_frames.values() for name in ("valid", "test")]
    assert len({frames for one in lengths for frames in one}) == 1
    assert len(set(made["train_sp"].utt2num_frames.values())) == 3
    # Rates of both sets, each over all of its utterances, by weights that were tuned on valid.
    for name, words in (("valid", 8 * 2 * 2), ("test", 10 * 2 * 2)):
        out = recipe / "exp/an4/baseline" / f"decode_{name}"
        rows = [line.split("\t") for line in (out / "wer.tsv").read_text().splitlines()]
        assert rows[-1][0] == "all" and rows[-1][rows[0].index("words")] == str(words)
        assert (out / "weights.yaml").read_text() == (out.parent / "weights.yaml").read_text()
    assert "WER" in done.out


def test_reruns_from_stage_6(alone):
    recipe, _ = alone
    before = outcome(recipe)
    for system in SYSTEMS[:2]:
        for path in (recipe / "exp" / "fake" / system).rglob("nbest.*"):
            path.unlink()
    stages = ("--stage", "6", "--stop_stage", "7")
    words, environment = command(recipe, *stages, "--methods", "client")
    run(*words, env=environment).ok()
    assert outcome(recipe) == before


def test_the_readme_tells_all_options_and_no_others():
    folder = ROOT / "egs/commonvoice/asr1"
    above, _, _ = (folder / "run.sh").read_text().partition(". utils/parse_options.sh")
    options = set(re.findall(r"^([a-z_]+)=", above, flags=re.M)) - {"help_message"}
    # Options of commands are not the recipe's.
    text = re.sub(r"`fedtools [^`]*`", "", (folder / "README.md").read_text())
    told = set(re.findall(r"--([a-z_]+)", text)) - {"help"}
    assert told == options


def test_killed_and_rerun(alone, tmp_path):
    """Killed in several stages and rerun by the same command, it writes the same bytes."""
    recipe = make_checkout(tmp_path)
    # One of two methods, and no report, of which nothing is compared.
    words, environment = command(recipe, "--methods", "client", "--stop_stage", "7")
    for there in (
        "dump/fake/valid/*.ark",
        "exp/fake/client/seed3/decode_valid/nbest.1.tsv",
    ):
        kill_when(words, environment, recipe, there)
    run(*words, env=environment).ok()
    first, _ = alone
    own = {name: one for name, one in outcome(first).items() if not name.startswith("fedavg/")}
    assert outcome(recipe) == own


ACCENTS = "--accents au=australia,en=england,in=indian --seed 3 --hours 0.6,0.2,0.2"


@pytest.mark.parametrize(
    ("options", "made_with"),
    [
        (("--hours", "0.5,0.2,0.2"), f"{ACCENTS} --server-hours 0.6,0.2,0.2 --common"),
        (("--server_hours", "0.5,0.2,0.2"), ACCENTS),
        (("--server_fraction", "0.4"), ACCENTS),
        (("--accents", "au=australia"), ACCENTS),
        (("--split_seed", "4"), ACCENTS),
        (("--speeds", "1.0 1.2"), "made with --clients accent --speeds 1.0 1.1;"),
        (("--speeds", "1.0 1.2", "--stage", "2"), "made with --clients accent --speeds 1.0 1.1;"),
        (("--clients", "speaker"), "made with --clients accent --speeds 1.0 1.1;"),
    ],
)
def test_data_that_experiments_began_with_are_not_made_anew(alone, options, made_with):
    recipe, _ = alone
    made = list(recipe.glob("d*/fake/**/*"))
    before = contents(made)
    words, environment = command(recipe, *options)
    run(*words, env=environment).fails(1, made_with, "give another --tag")
    assert contents(made) == before


def test_another_corpus_needs_another_tag(alone, tmp_path):
    recipe, _ = alone
    words, environment = command(recipe)
    release, name = Path(environment["COMMONVOICE"]).parts[-2:]
    (tmp_path / "other").symlink_to(Path(environment["COMMONVOICE"]).parent)
    environment["COMMONVOICE"] = str(tmp_path / "other" / name)
    refused = run(*words, env=environment)
    refused.fails(1, f"use data made with COMMONVOICE=.../{release}/{name} --accents")


def test_options_of_no_data_may_change(tmp_path):
    recipe = make_checkout(tmp_path)

    def stage_1(*more: str) -> Result:
        words, environment = command(recipe, "--stop_stage", "1", *more)
        return run(*words, env=environment)

    # Without an experiment, data may change too.
    stage_1("--split_seed", "4").ok()
    stage_1().ok()
    (recipe / "exp" / "fake" / "baseline").mkdir()
    (recipe / "exp" / "fake" / "baseline" / "config.yaml").touch()
    more = ("--methods", "fednorm", "--seeds", "7", "--max_drop", "0.6", "--release", "other")
    stage_1(*more, "--nj", "1", "--labels", "transcripts").ok()
    stage_1(*more, "--split_seed", "4").fails(1, "give another --tag")


def test_tables_are_means_over_seeds(alone):
    """The last test, since an additional seed disturbs the other tests."""
    recipe, _ = alone
    words, environment = command(recipe, "--stage", "4", "--seeds", "3 4")
    words[words.index("client fedavg")] = "fedavg"
    before = (recipe / "exp/fake/fedavg/seed3/model.safetensors").read_bytes()
    run(*words, env=environment).ok()
    assert (recipe / "exp/fake/fedavg/seed3/model.safetensors").read_bytes() == before
    scores = [recipe / f"exp/fake/fedavg/seed{seed}/decode_test/wer.tsv" for seed in (3, 4)]
    averages = [read_tsv(path, None)[-2] for path in scores]
    mean = sum(float(row["wer"]) for row in averages) / 2
    page = (recipe / "exp" / "fake" / "RESULTS.md").read_text()
    assert "Means ± standard deviations over 2 seeds." in page
    assert "Seed: 3, 4." in page
    lines = [line for line in page.splitlines() if line.startswith(("| Method ", "| FedAvg "))]
    names, cells = ([cell.strip() for cell in line.split("|")] for line in lines[2:4])
    assert float(cells[names.index("AVG")].split(" ± ")[0]) == pytest.approx(mean, abs=0.06)
    # Its difference from itself is not distinguishable from 0.
    assert cells[next(i for i, name in enumerate(names) if "FedAvg" in name)] == "-"
