"""An experiment's commands.sh: the commands that made it, which make it again elsewhere."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from pathlib import Path

import keyword_world
import pytest
import small_recipe
from conftest import contents, fedtools, inside, run, start
from forked import forked

from fedtools.exchange import commands

STEPS = [("sample", "--nj", "2"), ("train-local", "--job", "1"), ("train-local", "--job", "2")]


@pytest.fixture
def world(tmp_path) -> Path:
    return keyword_world.make_world(tmp_path / "a world")


@pytest.fixture
def made(world, tmp_path) -> Path:
    """Begin an experiment."""
    return keyword_world.begin(world, tmp_path / "an exp", "fedavg", "rounds=2")


def listed(experiment: Path) -> list[list[str]]:
    """Return the words of the commands, without `fedtools` and the experiment's folder."""
    head, what, strict, guard, *lines = (experiment / "commands.sh").read_text().splitlines()
    assert (head, what[:2], strict) == ("#!/usr/bin/env bash", "# ", "set -euo pipefail")
    assert guard.startswith("[ ! -e ")
    words = [shlex.split(line) for line in lines]
    assert all(line[0] == "fedtools" and str(experiment) in line for line in words)
    return [[word for word in line[1:] if word != str(experiment)] for line in words]


def replay(experiment: Path, folder: Path) -> None:
    """Run the commands of an experiment in another folder."""
    folder.mkdir(exist_ok=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run("bash", experiment / "commands.sh", cwd=folder, env=forked({"PATH": path})).ok()


def results(experiment: Path) -> dict[Path, bytes]:
    """Return what does not depend on times and jobs."""
    names = ("**/*.safetensors", "*.yaml", "sha256sums", "*.txt", "*.tsv")
    files = [path for name in names for path in experiment.glob(name)]
    files = [path for path in files if not path.name.startswith(("update.", "software."))]
    return {path.relative_to(experiment): raw for path, raw in contents(files).items()}


def test_the_same_commands_elsewhere_give_the_same_bytes(world, tmp_path, monkeypatch):
    """Also of an experiment whose name has blanks and signs, and that was killed and reset."""
    name = 'exp/a $name\'s \\ "é"'
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    begin = ("--config", "../a world/config.yaml", "--method", "fedavg", "--set", "rounds=3")
    data = [f"--data={split}=../a world/{part}" for split, part in
            (("train", "train"), ("valid", "test"), ("test", "test"))]  # fmt: skip
    for words in (
        ("init", name, *begin, *data),
        ("rounds", name, "--to", "2", "--evaluate", "valid"),
        ("average", name, "--best", "1"),
        ("reset", name, "--round", "2"),
        ("sample", name, "--nj", "2"),
        ("train-local", name, "--job", "2"),
        ("train-local", name, "--job", "1"),
        ("aggregate", name),
        ("rounds", name),
        ("evaluate", name, "--split", "test"),
        ("average", name),
    ):
        inside(*words).ok()
    there = tmp_path / "there"
    replay(Path(name).absolute(), there)
    ours, theirs = results(Path(name)), results(there / name)
    assert Path("model.safetensors") in ours and Path("round_0004/global.safetensors") in ours
    assert ours == theirs
    assert (there / name / "commands.sh").read_bytes() == Path(name, "commands.sh").read_bytes()
    # Where the experiment is, its reset would undo rounds.
    before = contents(Path(name).rglob("*"))
    refused = run("bash", Path(name).absolute() / "commands.sh", cwd=tmp_path / "here")
    refused.fails(1, f"{name} is there: run this in another folder")
    assert contents(Path(name).rglob("*")) == before


def test_the_commands_of_a_recipe_elsewhere_give_the_same_bytes(world, tmp_path):
    """Of a list of experiments, one of which starts from the other, and that is trained twice."""
    recipe = small_recipe.make_recipe(tmp_path / "a recipe", world)
    script = (recipe / "run.sh").read_text()
    average = """valid '&&' fedtools average EXP --ngpu "${ngpu}"\n"""
    (recipe / "run.sh").write_text(script.replace("--evaluate test\n", f"--evaluate {average}"))
    valid = ("--data", f"valid={world / 'test'}")
    start = ("--start", "exp/first/model.safetensors", "--seed", "1")
    lines = small_recipe.listed(world, "later one", "exp/first", *valid, *start)
    small_recipe.order(recipe, small_recipe.listed(world, "first", "-", *valid) + lines).ok()
    for _ in range(2):
        told = run("bash", recipe / "run.sh").ok().out.splitlines()
    first = (recipe / "exp/first/commands.sh").read_text().splitlines()[4]
    assert shlex.split(told[0]) == shlex.split(first)
    there = tmp_path / "there"
    for name in ("first", "later one"):
        lines = (recipe / "exp" / name / "commands.sh").read_text().splitlines()[4:]
        assert [line.split()[1] for line in lines] == ["init", "rounds", "average"]
        replay(recipe / "exp" / name, there)
        ours, theirs = results(recipe / "exp" / name), results(there / "exp" / name)
        assert Path("model.safetensors") in ours and ours == theirs


def test_each_is_listed_once_with_all_its_options(world, made):
    init = ["init", "--config", f"{world}/config.yaml", "--method", "fedavg"]
    init += ["--data", f"train={world}/train", "--data", f"test={world}/test", "--set", "rounds=2"]
    assert listed(made) == [init]
    # As a recipe does that is run again and again, and with other jobs after the end.
    for number in ("2", "2", "3"):
        keyword_world.begin(world, made, "fedavg", "rounds=2")
        inside("rounds", made, "--nj", number, "--evaluate", "test").ok()
    rounds = ["rounds", "--nj", "2", "--evaluate", "test"]
    assert listed(made) == [init, rounds]
    assert "commands.sh" not in (made / "sha256sums").read_text()
    # Done again after a reset, by the same command.
    for _ in range(2):
        inside("reset", made, "--round", "2").ok()
        inside("rounds", made, "--nj", "2", "--evaluate", "test").ok()
    assert listed(made) == [init, rounds, *[["reset", "--round", "2"], rounds] * 2]


def test_what_fails_or_changes_nothing_is_not_listed(world, made):
    before = (made / "commands.sh").read_bytes()
    init = ("init", made, "--config", world / "config.yaml", "--method", "fedavg")
    inside(*init, "--data", f"train={world / 'train'}").fails(1, "config.yaml")
    inside("rounds", made, "--evaluate", "valid").fails(1, "valid")
    inside("average", made).fails(1, "")
    inside("reset", made, "--round", "7").fails(1, "cannot be reset")
    inside("train-local", made).fails(1, "run fedtools sample")
    inside("rounds", made, "--estimate").ok()
    inside("show", made)
    assert (made / "commands.sh").read_bytes() == before
    # What has been measured is printed again, without a word in the list.
    inside("evaluate", made, "--split", "test").ok()
    inside("rounds", made, "--to", "1").ok()
    inside("evaluate", made, "--split", "test").ok()
    before = (made / "commands.sh").read_bytes()
    inside("average", made, "--best", "1").fails(1, "valid")
    inside("evaluate", made, "--split", "test").ok()
    assert (made / "commands.sh").read_bytes() == before
    assert [line[0] for line in listed(made)] == ["init", "evaluate", "rounds", "evaluate"]


def test_steps_are_listed_with_their_round(made):
    for number in (1, 2):
        # Two jobs run again, as after a kill of the second.
        for name, *options in [*STEPS, *STEPS[1:]]:
            inside(name, made, *options).ok()
        inside("aggregate", made).ok()
        of_round = ["--round", str(number)]
        steps = [[name, *options, *of_round] for name, *options in [*STEPS, ("aggregate",)]]
        assert listed(made)[-4:] == steps
    inside("aggregate", made, "--round", "2").ok()
    assert listed(made)[-1] == steps[-1] and len(listed(made)) == 9


# Kills a command before the file of a number, from 1, that it saves in an experiment.
KILLED = """
import os, signal, sys
left, made, sys.argv = int(sys.argv[1]), sys.argv[3], ["fedtools", *sys.argv[2:]]
def hook(event, arguments):
    global left
    if event == "os.rename" and os.fspath(arguments[1]).startswith(made):
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
import fedtools.cli
fedtools.cli.main()
"""


def test_a_killed_command_is_listed_once_and_the_file_is_whole(made):
    """Killed before and after it is written: the next run lists what there is to list."""
    for number, commands_listed in ((1, 1), (3, 2), (3, 2)):
        killed = run(sys.executable, "-c", KILLED, str(number), "rounds", made)
        assert killed.code == -signal.SIGKILL
        assert len(listed(made)) == commands_listed
    inside("rounds", made).ok()
    assert listed(made)[1:] == [["rounds"]]


def test_all_ranks_of_a_run_list_it_once(made):
    words = [sys.executable, "-m", "fedtools", "rounds", str(made), "--evaluate", "test"]
    ranks = [start(*words, env={"RANK": str(rank), "WORLD_SIZE": "2"}) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert listed(made)[1:] == [["rounds", "--evaluate", "test"]]


def test_jobs_at_the_same_time_lose_no_line(made, tmp_path):
    """Each reads the file, waits, and writes it."""
    children = []
    for job in range(8):
        if not (child := os.fork()):
            with commands.running(["train-local", str(made), "--job", str(job)]):
                commands.add_command(made, once=True)
            os._exit(0)
        children.append(child)
    assert {os.waitpid(child, 0)[1] for child in children} == {0}
    found = listed(made)[1:]
    assert sorted(found) == [["train-local", "--job", str(job)] for job in range(8)]


def test_experiments_that_no_command_began_have_no_list(world, made, tmp_path):
    """Of the package's functions, or of an earlier version: half a list would be wrong."""
    shutil.copytree(made, tmp_path / "old")
    (tmp_path / "old/commands.sh").unlink()
    inside("rounds", tmp_path / "old").ok()
    assert not (tmp_path / "old/commands.sh").exists()


def test_names_that_are_no_utf8_are_listed_as_they_are(world, tmp_path):
    name = os.fsdecode(bytes(tmp_path) + b"/\xff")
    init = ("init", name, "--config", world / "config.yaml", "--method", "fedavg")
    data = ("--data", f"train={world / 'train'}")
    done = fedtools(*init, *data, errors="surrogateescape")
    if done.code == 0:
        assert os.fsencode(shlex.quote(name)) in Path(name, "commands.sh").read_bytes()
    else:
        done.fails(1)
