"""The keyword recipe from clips to RESULTS.md, in a path with spaces; uninterrupted, killed, and
rerun."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import ROOT, Result, contents, kill_when, run
from keyword_checkout import TINY, command, make_checkout

RUN = "egs/speechcommands/kws1/run.sh"


def outcome(recipe: Path) -> dict[str, bytes]:
    exp = recipe / "exp" / "fake"
    files = [*exp.rglob("global.safetensors"), *exp.rglob("evaluate_test.tsv")]
    return {str(path.relative_to(exp)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[Path, Result]:
    """Run the recipe to its end without interruption."""
    recipe = make_checkout(tmp_path_factory.mktemp("alone"))
    words, environment = command(recipe)
    return recipe, run(*words, env=environment, cwd=recipe.parents[3]).ok()


def test_ends_with_tables_and_figures(alone):
    recipe, _ = alone
    page = (recipe / "exp/fake/RESULTS.md").read_text()
    for row in ("Centralized", "FedAvg", "FedKWS-UI"):
        assert row in page
    for figure in ("accuracy", "clients-keywords", "clients-words", "landscape"):
        picture = recipe / f"exp/fake/RESULTS-fake-{figure}.png"
        assert picture.read_bytes()[:4] == b"\x89PNG", figure
        assert picture.name in page
    assert (recipe / "exp/fake/keywords/dscnn/fedkws_ui/seed0/detection_test.tsv").exists()
    assert len(outcome(recipe)) == 6 * 4
    # Options that the configuration has for tasks of 12 classes apply to no other.
    for task, classes, ratio in (("keywords", 12, 3.5), ("words", 14, None)):
        path = recipe / "exp/fake" / task / "dscnn/fedkws_ui/seed0"
        assert len((path / "classes.txt").read_text().split()) == classes
        options = yaml.safe_load((path / "config.yaml").read_text())["method_conf"]
        assert options.get("base_ratio") == ratio


def test_every_experiment_is_of_its_own_data(alone):
    """Experiments train and are evaluated on the clips of their task, with noise."""
    recipe, _ = alone
    found = sorted((recipe / "exp/fake").glob("*/*/*/seed0/config.yaml"))
    assert len(found) == 6
    for path in found:
        task, network, method = path.parts[-5:-2]
        config = yaml.safe_load(path.read_text())
        assert config["data"] == {
            split: f"dump/fake/{task}/{split}" for split in ("train", "valid", "test")
        }
        assert (config["model"]["network"], config["method"]) == (network, method)
        classes = len((recipe / "data/fake" / task / "classes.txt").read_text().splitlines())
        own = TINY["tasks"].get(str(classes), {}).get(method, {})
        expected = TINY["method_conf"]
        for section in (TINY["methods"][method], own):
            expected = expected | section.get("method_conf", {})
        assert config["method_conf"] == expected
    for task in ("keywords", "words"):
        packed = {
            split: (recipe / f"dump/fake/{task}/{split}/clips.tsv").read_text().splitlines()[1:]
            for split in ("train", "valid", "test")
        }
        spoken = {
            split: {line.split("\t")[0] for line in lines if "_silence_" not in line}
            for split, lines in packed.items()
        }
        listed = (recipe / f"data/fake/{task}/test/text").read_text().splitlines()
        assert {line.split("\t")[0] for line in packed["test"]} == {
            line.split()[0] for line in listed
        }
        assert spoken["test"] and not spoken["test"] & (spoken["train"] | spoken["valid"])
        # Five and two seconds.
        assert len(np.load(recipe / f"dump/fake/{task}/train/noise.npy")) == 7 * 16_000


def test_what_is_finished_is_not_opened_again(alone):
    recipe, _ = alone
    before, log = outcome(recipe), recipe / "exp/fake/log"
    words, environment = command(recipe, "--stage", "4", "--stop_stage", "4")
    (recipe / "exp/fake/keywords/dscnn/fedavg/seed0/evaluate_test.tsv").unlink()
    run(*words, env=environment).ok()
    assert outcome(recipe) == before
    said = [path.read_text() for path in log.glob("train.*.log")]
    assert sum("seed0: all rounds are complete" in text for text in said) == 5
    # Other options are checked, and refused.
    tiny = recipe / "tiny.yaml"
    kept = tiny.read_text()
    tiny.write_text(kept.replace("rounds: 2", "rounds: 3"))
    refused = run(*words, env=environment)
    tiny.write_text(kept)
    line = refused.err.splitlines()[-1]
    assert refused.code == 1
    assert line.startswith("fedtools: exp/fake/keywords/dscnn/") and "rounds" in line
    assert "made with another configuration" in line
    assert line.endswith(" (log: exp/fake/log/train.init.log)")


def test_data_that_experiments_began_with_are_not_made_anew(alone):
    recipe, _ = alone
    words, environment = command(recipe, "--min_clips", "3")
    made = list(recipe.glob("d*/fake/**/*"))
    before = contents(made)
    said = "made with SPEECHCOMMANDS=.../speech & commands --split official --min-clips 2 "
    run(*words, env=environment).fails(1, said, "give another --tag")
    assert contents(made) == before


def test_too_few_clips_for_figure_4_are_told_before_training(alone):
    recipe, _ = alone
    more = ["--landscape_clips", "1000", "--stage", "3"]
    words, environment = command(recipe, *more)
    run(*words, env=environment).fails(
        1, "figure 4 needs two clients with 1000 clips, but there are 0"
    )


def test_figure_4_of_a_grid_whose_first_network_is_not_centralised(alone):
    recipe, _ = alone
    grid = {"wide": {"fedavg": 0}, "dscnn": {"centralized": 0}}
    networks = {**TINY["networks"], "wide": TINY["networks"]["dscnn"]}
    config = {**TINY, "networks": networks, "grid": grid}
    (recipe / "grid.yaml").write_text(yaml.safe_dump(config))
    page = recipe / "of a grid"
    page.mkdir()
    more = ["--config", "grid.yaml", "--whole_grid", "true", "--networks", "wide dscnn"]
    more += ["--figures", "landscape"]
    words, environment = command(recipe, *more, "--results", f"{page}/RESULTS.md")
    listed = recipe / "exp/fake/experiments"
    kept = listed.read_text()
    # The models of centralised training are those of the run without a grid.
    run(*words, "--stage", "3", "--stop_stage", "3", env=environment).ok()
    run(*words, "--stage", "6", env=environment).ok()
    assert (page / "RESULTS-fake-landscape.png").read_bytes()[:4] == b"\x89PNG"
    listed.write_text(kept.replace("/centralized/", "/fedavg/"))
    assert "no figure 4" in run(*words, "--stage", "6", env=environment).ok().out
    assert not (page / "RESULTS-fake-landscape.png").exists()
    # Without a centralised row, nothing is asked of the clients' clips. A grid's configuration need
    # not have all methods of the paper.
    at = words.index("--methods")
    del words[at : at + 2]
    (recipe / "grid.yaml").write_text(yaml.safe_dump({**config, "grid": {"dscnn": {"fedavg": 0}}}))
    words += ["--landscape_clips", "1000"]
    run(*words, "--stage", "3", "--stop_stage", "3", env=environment).ok()
    drawn = run(*words, "--stage", "6", "--stop_stage", "6", env=environment).ok()
    assert "no figure 4" in drawn.out
    listed.write_text(kept)


def listed(recipe: Path) -> list[list[str]]:
    """Return folder, seed, sections and settings of each line of the list."""
    found = []
    for line in (recipe / "exp/grid/experiments").read_text().splitlines():
        wave, folder, awaited, *words = line.split("\t")
        assert (wave, awaited) == ("1", "-")
        pairs = list(zip(words[::2], words[1::2], strict=True))
        options = [[value for name, value in pairs if name == f"--{kind}"]
                   for kind in ("seed", "section", "set")]  # fmt: skip
        found.append([folder, *options[0], *options[1], *options[2]])
        data = dict(value.split("=") for name, value in pairs if name == "--data")
        assert data["test"] == f"dump/grid/{folder.split('/')[2]}/test"
    return found


def test_the_whole_grid(alone):
    """The list has every task, network, method and seed once, and the ablations of figure 3."""
    recipe, _ = alone
    words, environment = command(recipe)
    for tag in ("grid", "speech___commands"):
        (recipe / "dump" / tag).symlink_to("fake")
    # A name of the corpus' folder that must not break the lines of the list.
    shown = run(words[0], "--stage", "3", "--stop_stage", "3", env=environment).ok().out
    assert "the list of 16 experiments, exp/speech___commands/experiments" in shown
    grid = ["--tag", "grid", "--stage", "3", "--stop_stage", "3", "--whole_grid", "true"]
    run(words[0], *grid, env=environment).ok()
    lines = listed(recipe)
    varied_count = 2 * (4 + 4) + 2 * 4 * 3
    assert len(lines) == len({line[0] for line in lines}) == 2 * 4 * 8 * 3 + varied_count
    sections = {section for line in lines for section in line[2:4]}
    config = yaml.safe_load((recipe / "conf/mini.yaml").read_text())
    assert sections == {
        f"{kind}.{name}" for kind in ("networks", "methods") for name in config[kind]
    }
    # The configuration has options of one method for 12 keywords; all words have 14.
    assert {line[4].split(".")[1] for line in lines if "/words/" in line[0]} == {"14"}
    assert {line[4].split(".")[1] for line in lines if "/keywords/" in line[0]} == {"12"}
    varied = [line for line in lines if len(line) > 5]
    assert len(varied) == varied_count
    for folder, seed, network, method, _, setting, *more in varied:
        assert folder.endswith(setting.removeprefix("method_conf.") + f"/seed{seed}")
        if method == "methods.alt":
            assert [setting, *more] == ["method_conf.conserve=clips", "method_conf.base_ratio=0.0"]
        else:
            assert network in ("networks.dscnn", "networks.resnet") and not more and seed == "0"
            assert method == "methods.fedkws_ui" and "/keywords/" in folder
    # Without FedKWS-UI there are no ablations of it.
    run(words[0], *grid, "--methods", "fedavg alt", env=environment).ok()
    lines = (recipe / "exp/grid/experiments").read_text().splitlines()
    assert len(lines) == 2 * 4 * 3 * 3
    assert not any("fedkws_ui" in line for line in lines)
    run(words[0], *grid, "--ablations", "clips", env=environment).ok()
    lines = (recipe / "exp/grid/experiments").read_text().splitlines()
    assert len(lines) == 2 * 4 * 9 * 3
    # Whitespace around the words and line breaks between them change nothing.
    odd = ["--seeds", " 3\n4", "--tasks", "12 ", "--networks", " dscnn", "--methods", "fedkws_ui "]
    odd += ["--whole_grid", "false", "--ablations", "true"]
    run(words[0], *grid, *odd, env=environment).ok()
    lines = listed(recipe)
    assert [line[1] for line in lines] == ["3", "4"] + ["3"] * 8
    assert all(line[0].endswith(f"/seed{line[1]}") for line in lines)
    assert all("/keywords/" in line[0] for line in lines)


def test_killed_and_rerun(alone, tmp_path):
    """Killed in several stages and rerun by the same command, it writes the same bytes."""
    recipe = make_checkout(tmp_path)
    # One method of three: the others are trained, and were killed, in the same way.
    words, environment = command(recipe, "--methods", "fedkws_ui", "--stop_stage", "4")
    for there in (
        "dump/fake/keywords/valid/clips.*",
        "exp/fake/words/dscnn/fedkws_ui/seed0/round_0003/global.safetensors",
    ):
        kill_when(words, environment, recipe, there)
    run(*words, env=environment).ok()
    first, _ = alone
    own = {name: one for name, one in outcome(first).items() if "/fedkws_ui/" in name}
    assert len(own) == 2 * 4 and outcome(recipe) == own


def test_wrong_options(alone):
    recipe, _ = alone
    words, environment = command(recipe)

    def wrong(code: int, said: str, *more: str) -> None:
        found = run(words[0], *more, "--stop_stage", "0", env=environment, cwd=recipe)
        assert (found.code, found.err.count("\n")) == (code, 1) and said in found.err

    wrong(2, "--networks is empty", "--networks", " ")
    wrong(2, "--seeds: '01' is not of the form", "--seeds", "1 01")
    wrong(2, "--seeds: 5 is given twice", "--seeds", "5 4 5")
    wrong(2, "--tasks: '36' is not of the form keywords|words", "--tasks", "12 36")
    wrong(2, "--tasks: keywords is given twice", "--tasks", "12 keywords")
    wrong(2, "--silence: 'no' is not of the form true|false|own", "--silence", "no")
    wrong(2, "--dimension: '0' is not of the form", "--dimension", "0")
    wrong(2, "--ablations must be one word, not 'true false'", "--ablations", "true false")
    # Before hours of corpus preparation:
    wrong(1, "conf/none.yaml: cannot be read", "--config", "conf/none.yaml")
    wrong(1, "conf/paper.yaml: no option 'networks.dscn'", "--networks", "resnet dscn")
    wrong(1, "conf/paper.yaml: no option 'methods.fedsgd'", "--methods", "fedavg fedsgd")
    missing = run(words[0], "--stage", "4", "--tag", "none", env=environment)
    assert missing.code == 1 and "exp/none/experiments: no experiments" in missing.err
    assert not list(recipe.glob("JOB*"))


def test_its_readme_names_options_and_files_that_there_are():
    readme = (ROOT / "egs/speechcommands/kws1/README.md").read_text()
    known = set(re.findall(r"^([a-z_]+)=", (ROOT / RUN).read_text(), re.M)) | {"help"}
    commands = "".join(re.findall(r"^\./run\.sh [^#\n]*|`--[^`]*`", readme, re.M))
    mentioned = set(re.findall(r"--([a-z_]+)", commands))
    assert len(mentioned) > 10 and mentioned <= known, mentioned - known
    for name in re.findall(r"`((?:conf|local)/[a-z_.]+\.[a-z]+)`", readme):
        assert (ROOT / "egs/speechcommands/kws1" / name).exists(), name
