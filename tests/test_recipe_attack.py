"""The TED-LIUM recipe on a fake corpus: from SPHERE files to the tables of both attacks."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import ROOT, Result, contents, run
from fakes import some_talks, tedlium
from forked import forked
from recorder import calls, record
from safetensors import safe_open

from fedtools.attack.speakers.verify import COLUMNS
from fedtools.attack.utility import UTILITY
from fedtools.core.tables import read_tsv, write_tsv
from fedtools.data.datadir import read_table, write_table
from fedtools.exchange.states import load_state

TINY = {
    "tokens": {"token_type": "char", "vocab_size": 40},
    "lm": {"order": 2},
    "denominator": {"order": 2},
    "ivectors": {"gaussians": 2, "dimension": 3, "hours": 0.01},
    "model": {
        "criterion": "lfmmi",
        "input_size": 43,
        "encoder": "tdnn",
        "encoder_conf": {"output_size": 8, "contexts": [1, 1, 3]},
    },
    "training": {"optim": "adam", "optim_conf": {"lr": 0.001}, "batch_bins": 60000},
    "rounds": 1,
    "methods": {
        "fedavg": {
            "method_conf": {"local_epochs": 5},
            "model": {"encoder_conf": {"fixed_scale": True}},
        }
    },
    "baseline": {"rounds": 1},
    # Intervals of few trials take less time.
    "a1": {"others": 100},
    "a2": {"network": 0.25, "width": 8, "epochs": 1, "others": 100},
    "updates": {"each": 1, "references": 1, "shadows": 0, "permutations": 1},
    "decode": {"beam_size": 5, "beam_size_token": 5, "nbest": 2},
}
# A few speakers per set for `some_talks`, whose talks have 16 seconds of speech.
OPTIONS = ("--partition", "legacy", "--hours_g", "0.01", "--seconds_per_model", "7")
OPTIONS += ("--indicator_utterances", "4")

DEFENCE = "clip=1+noise=9"
CORPUS = "TEDLIUM_release-3"


def make_checkout(folder: Path) -> Path:
    """Make a checkout whose path has a blank, next to a fake corpus; fixed files are links."""
    root = folder / "a checkout"
    made = shutil.ignore_patterns("data", "dump", "exp", "downloads")
    shutil.copytree(
        ROOT / "egs" / "tedlium3", root / "egs" / "tedlium3", symlinks=True, ignore=made
    )
    for name in ("conf", "fedtools", "local", "utils", "setup.py"):
        (root / name).symlink_to(ROOT / name)
    assert tedlium(root, some_talks(train=18, held_out=2)) == root / CORPUS
    recipe = root / "egs" / "tedlium3" / "attack1"
    (recipe / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    return recipe


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    recipe = make_checkout(tmp_path_factory.mktemp("attack"))
    call(recipe).ok()
    # The same features without i-vectors, to a global model.
    (recipe / "data" / "bare").symlink_to("fake")
    (recipe / "exp" / "bare").mkdir()
    for name in ("tokens", "lm", "denominator"):
        (recipe / "exp" / "bare" / name).symlink_to(Path("..") / "fake" / name)
    bare = ("--tag", "bare", "--ivectors", "false", "--stage", "5", "--stop_stage", "5")
    call(recipe, *bare).ok()
    return recipe


def surroundings(recipe: Path) -> dict[str, str]:
    """Return the environment of a recipe, in which commands are not forks."""
    return {
        **os.environ,
        "TEDLIUM": str(recipe.parents[2] / CORPUS),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


def call(recipe: Path, *more: str) -> Result:
    """Run the recipe, with further options."""
    fixed = ("--tag", "fake", "--config", "tiny.yaml", "--layers", "1 3", "--speeds", "1.0 1.1")
    fixed += ("--volumes", "true", "--defences", f"none {DEFENCE}")
    fixed += ("--parts", "relu", "--nj", "1", "--local_epochs", "1")
    environment = record(recipe.parents[2] / "recorder", forked(surroundings(recipe)))
    return run(recipe / "run.sh", *fixed, *OPTIONS, *more, env=environment)


def test_every_personalised_model_is_a_client(recipe):
    data, exp = recipe / "data" / "fake", recipe / "exp" / "fake"
    for part in ("part1", "part2"):
        clients = set(read_table(data / part / "utt2client").values())
        assert set((exp / part / "clients.txt").read_text().split()) == clients
        config = yaml.safe_load((exp / part / "config.yaml").read_text())
        assert Path(config["data"]["train"]).name == f"{part}_sp_vol_iv"
        assert config["model"]["criterion"] == "lfmmi"
        assert config["method_conf"]["local_epochs"] == 1
        # Costs are measured on its speakers' other utterances, and on people in no set.
        assert Path(config["data"]["held"]).name == f"{part}_held_iv"
        assert Path(config["data"]["newcomers"]).name == "indicator_iv"
        # Inputs are scaled by the global model's statistics; the layers' statistics do change.
        with safe_open(exp / part / "round_0001" / "update.1.safetensors", "numpy") as sent:
            for name in ("encoder.scale.running_mean", "encoder.layers.0.norm.running_mean"):
                before = load_state(exp / part / "round_0001" / "global.safetensors")[name]
                moved = np.abs(sent.get_tensor(name) - before).max(-1) > 0
                assert moved.all() == ("layers" in name) and moved.any() == ("layers" in name)
        # Both start from the global model.
        begun = (exp / part / "round_0001" / "global.safetensors").read_bytes()
        assert begun == (exp / "part1" / "round_0001" / "global.safetensors").read_bytes()


def test_a_model_without_ivectors(recipe):
    config = yaml.safe_load((recipe / "exp" / "bare" / "global" / "config.yaml").read_text())
    assert config["model"]["input_size"] == 40 != TINY["model"]["input_size"]
    assert Path(config["data"]["train"]).name == "train_g_sp_vol"
    assert (recipe / "exp" / "bare" / "global" / "model.safetensors").exists()


def test_who_is_known_and_who_is_attacked(recipe):
    """A2 trains on Part-1 and decides Part-2; the global model is chosen on its own data."""
    found, exp = calls(recipe.parents[2] / "recorder"), "exp/fake"
    attacks = [words for words in found["attack"] if words[0] == "a2"]
    assert len(attacks) == 2
    for words in attacks:
        start = words.index("--ngpu") + 2
        assert words[start : start + 3] == [f"{exp}/part1", f"{exp}/part2", f"{exp}/a2"]
        assert words[words.index("--indicator") + 1] == "data/fake/indicator_iv"
    attacks = [words[1:] for words in found["attack"] if words[0] == "a1"]
    prints = [f"{exp}/{part}/footprints.relu" for part in ("part1", "part2")]
    assert [prints[1], f"{exp}/a1.relu.part2"] in [words[:2] for words in attacks]
    assert [*prints, f"{exp}/a1.relu.part1+part2"] in [words[:3] for words in attacks]
    for words in found["tune"]:
        path = words[2].removesuffix("/weights.yaml")
        split = "valid" if "bare" in path else "valid_iv"
        data = "data/bare" if "bare" in path else "data/fake"
        assert words[:2] == [f"{path}/decode_{split}", f"{data}/{split}"]
    for name in ("train-tokens", "train-lm", "train-denominator"):
        assert [words[0] for words in found[name]] == ["data/fake/train_g/text"]


def test_tables_of_both_attacks(recipe):
    exp = recipe / "exp" / "fake"
    models = read_tsv(recipe / "data" / "fake" / "models.tsv", None)
    of_part = [[m for m in models if m["part"] == part] for part in ("part1", "part2")]
    pairs = [len(own) - len({m["speaker"] for m in own}) for own in of_part]
    for sets, targets in (("part2", pairs[1]), ("part1+part2", sum(pairs))):
        rows = read_tsv(exp / f"a1.relu.{sets}" / "a1.tsv", COLUMNS)
        assert {row["layer"] for row in rows} == {"tdnn1", "tdnn2", "tdnn3"}
        assert {row["targets"] for row in rows if row["trials"] == "easy"} == {str(targets)}
    for layer in (1, 3):
        rows = read_tsv(exp / "a2" / f"a2.h{layer}.tsv", COLUMNS)
        ways = {"PLDA", "PLDA, cohort", "cosine", "cosine, cohort"}
        assert {row["scores"] for row in rows} == ways
        assert {row["targets"] for row in rows if row["trials"] == "easy"} == {str(pairs[1])}


def test_defences_membership_and_sex(recipe):
    updates = recipe / "exp" / "fake" / "part2" / "attacks"
    names, attackers = ["none", DEFENCE], ["ignorant", "lazy-informed", "semi-informed"]
    rows = read_tsv(updates / "utility.tsv", UTILITY)
    assert [(row["defence"], row["on"]) for row in rows] == [
        (name, on) for name in ("nothing sent", *names) for on in ("own", "newcomers", "everybody")
    ]
    assert {row["rate"] for row in rows} == {"wer"} and all(row["value"] != "-" for row in rows)
    # If talks are as long as two models, no speech is left of them.
    speakers = set(read_table(recipe / "data/fake/part2_held/utt2spk").values())
    assert 0 < len(speakers) < len(read_table(recipe / "data/fake/part2/model2speaker"))
    own = [row["speakers"] for row in rows if row["on"] == "own"]
    assert own == [str(len(speakers))] * 3
    sent = [read_tsv(updates / f"defence{n}" / "a1.tsv", COLUMNS) for n in range(2)]
    both = read_tsv(recipe / "exp" / "fake" / "a1.relu.part1+part2" / "a1.tsv", COLUMNS)
    assert sent[0] == both != sent[1]
    targets = {row["targets"] for row in both if row["trials"] == "easy"}
    for number, name in enumerate(names):
        folder = updates / f"defence{number}"
        weights = read_tsv(folder / "weights.tsv", COLUMNS)
        assert {"encoder.layers.0", "all", "input"} <= {row["layer"] for row in weights}
        sex = read_tsv(folder / "attributes.tsv", None)
        whose = attackers if number else ["-"]
        for rows, known in (
            (weights, whose),
            # Equation 4 is not trained, and attributes exclude all enrolled speakers.
            (sent[number], whose[:2]),
            (sex, whose[::2]),
        ):
            assert {row["defence"] for row in rows} == {name}
            assert list(dict.fromkeys(row["attacker"] for row in rows)) == known
        if not number:
            assert {row["targets"] for row in weights if row["trials"] == "easy"} == targets
    assert read_tsv(updates / "defence0" / "readout.tsv", None)
    rows = read_tsv(updates / "membership.tsv", None)
    # Speakers with two models in a part also have utterances on which the first was not trained.
    assert {row["others_of"] for row in rows} == {"same speaker", "anybody"}
    known = {(row["defence"], row["attacker"]) for row in rows}
    assert known == {("none", "-"), (DEFENCE, "ignorant"), (DEFENCE, "semi-informed")}
    card = read_tsv(updates / "card.tsv", None)
    told = {(row["attack"], row["defence"]) for row in card}
    assert {
        (one, name) for one in ("weights", "a1", "attributes", "cost") for name in names
    } <= told
    run("utils/attack_updates.sh", "--out", "x", cwd=recipe).fails(2, "--exp is missing")
    given = ("--exp", "exp/fake/part2", "--indicator", "y", "--out", "z")
    given += ("--defences", "bits=8 none")
    run("utils/attack_updates.sh", *given, cwd=recipe).fails(2, "'none' must be first")


def goes_on_after_a_stop(out, given, forks, recipe, said):
    """The same command does what is left alone, and prints the rest as before."""
    tables = [out / f"defence{number}" / "weights.tsv" for number in range(2)]
    times = [table.stat().st_mtime_ns for table in tables]
    again = run("utils/attack_updates.sh", *given, "--nj", "1", env=forks, cwd=recipe).ok()
    assert [table.stat().st_mtime_ns for table in tables] == times
    without = re.compile(r"^[\d: -]+ ", re.M)
    assert without.sub("", again.out) == without.sub("", said)
    # As after a stop in the second of two jobs.
    max((out / "done").iterdir(), key=lambda one: one.stat().st_mtime_ns).unlink()
    run("utils/attack_updates.sh", *given, "--nj", "1", env=forks, cwd=recipe).ok()
    assert [old == table.stat().st_mtime_ns for old, table in zip(times, tables, strict=True)] == [
        True, False,
    ]  # fmt: skip


def test_without_an_indicator_weights_alone_are_attacked(recipe, tmp_path):
    """A cohort of other people is given, whose models are in no trial."""
    exp = recipe / "exp" / "fake"
    given = ("--exp", exp / "part2", "--cohort", "exp/fake/part1", "--out", tmp_path / "updates")
    given += ("--defences", "none bits=8", "--models", recipe / "data" / "fake" / "models.tsv")
    forks = forked(surroundings(recipe))
    first = run("utils/attack_updates.sh", *given, "--nj", "1", env=forks, cwd=recipe).ok()
    theirs = set((exp / "part2" / "clients.txt").read_text().split())
    goes_on_after_a_stop(tmp_path / "updates", given, forks, recipe, first.out)
    for number in range(2):
        folder = tmp_path / "updates" / f"defence{number}"
        assert read_tsv(folder / "weights.tsv", COLUMNS) and not (folder / "a1.tsv").exists()
        assert not list(folder.glob("weights.encoder*"))
        for attacker in (".ignorant", ".semi-informed") if number else ("",):
            lines = (folder / f"weights.all{attacker}.easy").read_text().splitlines()
            assert {name for line in lines for name in line.split()[:2]} == theirs
    assert not (tmp_path / "updates" / "membership.tsv").exists()
    assert (tmp_path / "updates" / "card.md").exists()


def test_all_attacks_learn_from_a_cohort(recipe, tmp_path):
    """The cohort's models are in no trial; A2 and inversion run behind each defence, too."""
    exp, data = recipe / "exp" / "fake", recipe / "data" / "fake"
    given = ("--exp", exp / "part2", "--cohort", "exp/fake/part1", "--out", tmp_path / "updates")
    given += ("--defences", "none bits=8", "--models", data / "models.tsv", "--nj", "1")
    config = TINY | {"a1": TINY["a1"] | {"scores": ["cohort"]}, "inversion": {"iterations": 8}}
    (tmp_path / "cohort.yaml").write_text(yaml.safe_dump(config))
    given += ("--indicator", data / "indicator_iv", "--config", tmp_path / "cohort.yaml")
    given += ("--shadows", "0")
    given += ("--a2", "exp/fake/part1", "--layers", "1", "--inversion", "1")
    done = run("utils/attack_updates.sh", *given, env=forked(surroundings(recipe)), cwd=recipe).ok()
    # The estimate stands before the search of what it estimates.
    assert re.search(r"Inversion of 1 clients' updates of round 1: about \d+\.\d minutes", done.out)
    theirs = set((exp / "part2" / "clients.txt").read_text().split())
    for number, attackers in enumerate((["-"], ["ignorant", "lazy-informed", "semi-informed"])):
        folder = tmp_path / "updates" / f"defence{number}"
        rows = read_tsv(folder / "a1.tsv", COLUMNS)
        cohort = [row for row in rows if row["scores"] == "both, cohort"]
        assert list(dict.fromkeys(row["attacker"] for row in cohort)) == attackers
        own = "" if not number else ".semi-informed"
        lines = (folder / f"a1-cohort.{rows[0]['layer']}{own}.easy").read_text().splitlines()
        assert {name for line in lines for name in line.split()[:2]} == theirs
        second = read_tsv(folder / "a2" / "a2.h1.tsv", COLUMNS)
        assert list(dict.fromkeys(row["attacker"] for row in second)) == attackers
    parts = read_tsv(tmp_path / "updates" / "inversion_parts.tsv", None)
    assert parts and (tmp_path / "updates" / "inversion.tsv").exists()


def test_a_corpus_that_tells_no_sex(recipe, tmp_path):
    """If all labels are <NA>, the other attacks and the report still run.

    Other attributes have tables of their own; membership is of single clients, not means.
    """
    exp, data = recipe / "exp" / "fake", recipe / "data" / "fake"
    rows = read_tsv(data / "models.tsv", None)
    unknown = [{**row, "gender": "--"} for row in rows]
    write_tsv(tmp_path / "models.tsv", list(rows[0]), unknown)
    given = ("--exp", exp / "part2", "--out", tmp_path / "updates")
    given += ("--indicator", data / "indicator_iv", "--models", tmp_path / "models.tsv")
    given += ("--defences", "none mean=2", "--tables", tmp_path / "spk2accent", "--nj", "1")
    given += ("--config", "tiny.yaml")
    # Four people of each, as many as there must be.
    speakers = sorted({row["speaker"] for row in rows if row["part"] == "part2"})
    assert len(speakers) == 8
    write_table(
        tmp_path / "spk2accent",
        {one: ("north", "south")[number % 2] for number, one in enumerate(speakers)},
    )
    forks = forked(surroundings(recipe))
    done = run("utils/attack_updates.sh", *given, env=forks, cwd=recipe)
    assert "sex is not attacked: two classes of at least 4 people" in done.ok().out
    for number in range(2):
        found = read_tsv(tmp_path / "updates" / f"defence{number}" / "attributes.tsv", None)
        assert {row["attribute"] for row in found} == {"accent"}
    found = read_tsv(tmp_path / "updates" / "membership.tsv", None)
    assert {row["defence"] for row in found} == {"none"}
    options = ("--section", "x", "--corpus", "c", "--release", "r", "--command", "run.sh")
    options += ("--updates", f"Part-1={tmp_path / 'updates'}")
    script = recipe / "local" / "report.py"
    run(sys.executable, script, exp, data, tmp_path / "RESULTS.md", *options).ok()
    page = (tmp_path / "RESULTS.md").read_text()
    assert f"Leakage card of {exp / 'part2'}" in page
    assert "| attributes: accent" in page and "attributes: sex" not in page


def test_other_ivectors_want_another_tag(recipe):
    """If they replaced the present ones, existing experiments could not continue."""
    config = yaml.safe_load((recipe / "tiny.yaml").read_text())
    config["ivectors"]["gaussians"] += 1
    (recipe / "other.yaml").write_text(yaml.safe_dump(config))
    made = (recipe / "exp" / "fake" / "ivectors" / "ivectors.safetensors").read_bytes()
    call(recipe, "--config", "other.yaml", "--stage", "3").fails(1, "give another --tag")
    assert (recipe / "exp" / "fake" / "ivectors" / "ivectors.safetensors").read_bytes() == made


def test_the_report(recipe):
    page = (recipe / "exp" / "fake" / "RESULTS.md").read_text()
    assert f"{DEFENCE} |" in page and "Leakage card of exp/fake/part2" in page
    assert "| attributes: sex" in page and "| membership: " in page
    assert "Part-1 and Part-2; membership and costs are of Part-2 alone." in page
    assert "A speaker is a person; seed 0; legacy partition." in page
    assert "on which its best rounds and the weights of its search were chosen" in page
    assert "LM weight and word score, tuned on validation data: global " in page
    lines = page.partition("(table 2)")[2].partition("**fake")[0].splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"
    ]
    assert rows[0][:2] == ["Layer", "Attack"] and rows[0][-3:] == ["Cllr", "minCllr", "published"]
    ways = ("PLDA", "PLDA, cohort", "cosine", "cosine, cohort")
    assert [tuple(row[:2]) for row in rows[2:12]] == [
        (f"h={h}", name) for h in (1, 3) for name in ("A1", *(f"A2, {way}" for way in ways))
    ]
    for row in rows[2:12]:
        assert (row[-3] == "-") == ("PLDA" not in row[1]) and row[-2] != "-"
    assert rows[2][-1] == "0.86" and rows[3][-1] == "12.31"
    # The minimum over all layers, as in the attack's own table.
    told = read_tsv(recipe / "exp" / "fake" / "a1.relu.part2" / "a1.tsv", COLUMNS)
    own = [row for row in told if row["trials"] == "easy" and row["scores"] == "both"]
    least = min(own, key=lambda row: float(row["low"]) + float(row["high"]))
    summary = page.partition("summary**")[2].partition("\n\n**")[0]
    line = next(line for line in summary.splitlines() if line.startswith("| A1 "))
    assert f"[{least['low']}, {least['high']}] | {least['layer']} |" in re.sub(" +", " ", line)
    assert f"[{least['low']}, {least['high']}] at {least['layer']} |" in page
    for name in ("a1", "a2", "weights", "membership", "utility"):
        kept = read_tsv(recipe / "exp" / "fake" / f"RESULTS-fake-{name}.tsv", None)
        assert kept and f"`RESULTS-fake-{name}.tsv`" in page
    for name in ("layers", "det", "card1"):
        picture = recipe / "exp" / "fake" / f"RESULTS-fake-{name}.png"
        assert picture.read_bytes()[:4] == b"\x89PNG" and f"({picture.name})" in page


def test_where_the_activations_of_each_attack_are_taken(recipe, tmp_path):
    """`--parts norm` gives A1 only activations after BatchNorm; A2 uses those after the ReLU."""
    page = (recipe / "exp" / "fake" / "RESULTS.md").read_text()
    assert "(table 2), activations after the ReLU." in page
    exp = tmp_path / "exp"
    shutil.copytree(recipe / "exp" / "fake", exp)
    for sets in ("part2", "part1+part2"):
        (exp / f"a1.relu.{sets}").rename(exp / f"a1.norm.{sets}")
    options = ("--section", "x", "--corpus", "c", "--release", "r", "--command", "run.sh")
    script = recipe / "local" / "report.py"
    data, out = recipe / "data" / "fake", tmp_path / "RESULTS.md"
    run(sys.executable, script, exp, data, out, *options).ok()
    assert "activations after BatchNorm for A1, after the ReLU for A2." in out.read_text()
    assert "DET curves, all trials, activations after BatchNorm for A1" in out.read_text()


def test_the_readmes_example_of_any_experiment(recipe):
    text = (ROOT / "egs/tedlium3/attack1/README.md").read_text()
    lines = [line for line in text.splitlines() if re.match("fedtools attack [a-z0-9]+ exp/", line)]
    assert [line.split()[2] for line in lines] == ["footprints", "a1"]
    for line in lines:
        words = line.replace("/mini/", "/fake/").split()
        run(*words, env=forked(surroundings(recipe)), cwd=recipe).ok()
    exp = recipe / "exp" / "fake"
    assert read_tsv(exp / "by_hand" / "result" / "a1.tsv", COLUMNS)


def test_a_mini_corpus_of_another_size(recipe):
    """Two models of each talk; their trials are of the same recording and of others."""
    pytest.importorskip("espeakng_loader")
    sizes = "--speakers 6 --talks 2 --channels 2 --seconds 16"
    call(recipe, "--mini_corpus", sizes, "--tag", "other").fails(2, "TEDLIUM is set in db.sh")
    options = ("--tag", "other", "--config", "tiny.yaml", *OPTIONS, "--speakers", "2,2,2")
    options += (
        "--seconds_per_model",
        "16",
        "--models_of",
        "talk",
        "--mini_corpus",
        sizes,
        "--stop_stage",
        "1",
    )
    environment = forked({**surroundings(recipe), "TEDLIUM": ""})
    run(recipe / "run.sh", *options, "--stop_stage", "1", env=environment).ok()
    folder = sizes.replace("--", "").replace(" ", "-")
    assert (recipe / "downloads" / folder / "TEDLIUM_release-mini").is_dir()
    rows = read_tsv(recipe / "data" / "other" / "models.tsv", None)
    talks: dict[str, list[str]] = {}
    for row in rows:
        talks.setdefault(row["speaker"], []).append(row["talks"])
    assert len(talks) == 4
    assert all(len(own) == 4 and len(set(own)) == 2 for own in talks.values())
    said = (recipe / "exp" / "other" / "data_options").read_text()
    assert f"mini.py {sizes} --partition" in said and "--models-of talk" in said


PARTITION = "TEDLIUM=.../TEDLIUM_release-3 --partition legacy --unit person --seed 0 --hours-g 0.01"


@pytest.mark.parametrize(
    ("options", "made_with"),
    [
        (("--seconds_per_model", "8"), f"{PARTITION} --seconds-per-model 7 --valid 0.02"),
        (("--unit", "talk"), PARTITION),
        (("--hours_g", "0.02"), PARTITION),
        (("--partition_seed", "1"), PARTITION),
        (("--speakers", "4,4,4"), PARTITION),
        (("--speeds", "1.0 1.2"), "--volumes true --speeds 1.0 1.1"),
        (("--speeds", "1.0 1.2", "--stage", "2"), "--volumes true --speeds 1.0 1.1"),
        (("--volumes", "false"), "--volumes true --speeds 1.0 1.1"),
    ],
)
def test_data_that_experiments_began_with_are_not_made_anew(recipe, options, made_with):
    made = list(recipe.glob("d*/fake/**/*"))
    before = contents(made)
    call(recipe, *options).fails(1, f"use data made with {made_with}", "give another --tag")
    assert contents(made) == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--local_epochs", "2"), "part1/config.yaml: made with another configuration"),
        (("--criterion", "ctc"), "part1/config.yaml: made with another configuration"),
        (("--ivectors", "false"), "part1_sp_vol/feats.scp: features of another kind"),
        (("--seed", "1"), "part1/config.yaml: made with another configuration"),
    ],
)
def test_models_of_other_options_are_refused_by_the_experiments(recipe, options, said):
    refused = call(recipe, "--stage", "6", "--stop_stage", "6", *options)
    # The first experiment of the wave is refused, and the second is not begun.
    refused.fails(1, said)
    assert "part2" not in refused.err


def test_options_of_no_data_may_change(tmp_path):
    recipe = make_checkout(tmp_path)
    # Without an experiment, data may change too.
    call(recipe, "--stop_stage", "1", "--unit", "talk").ok()
    call(recipe, "--stop_stage", "1").ok()
    (recipe / "exp" / "fake" / "global").mkdir()
    (recipe / "exp" / "fake" / "global" / "config.yaml").touch()
    more = ("--layers", "1", "--parts", "norm", "--max_drop", "0.5", "--release", "other")
    call(recipe, "--stop_stage", "1", *more, "--seed", "1", "--local_epochs", "2").ok()
    call(recipe, "--stop_stage", "1", *more, "--unit", "talk").fails(1, "give another --tag")
