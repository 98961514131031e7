"""Lists of experiments: the order of training, and the handling of failures."""

from __future__ import annotations

import sys
from pathlib import Path

import keyword_world
import pytest
import small_recipe
from conftest import contents, inside, run, start
from hypothesis import given
from hypothesis import strategies as st
from small_recipe import UTILS, listed, order
from test_shell import alive, wait_until

WAVES = UTILS / "waves.py"
LINE = UTILS / "line.sh"
sys.path.append(str(UTILS))

import waves  # noqa: E402  (a script of utils/, which is no package)


@st.composite
def awaited(draw) -> dict[str, list[str]]:
    """Return experiments without a cycle, in any order, and their dependencies."""
    names = [f"exp/{number}" for number in range(draw(st.integers(1, 12)))]
    found = {
        name: draw(st.lists(st.sampled_from(names[:index]), unique=True, max_size=3))
        for index, name in enumerate(names)
        if index
    } | {names[0]: []}
    return {name: found[name] for name in draw(st.permutations(names))}


@given(awaited())
def test_everything_is_trained_once_and_as_soon_as_it_may(listed):
    lines = [f"{name}\t{' '.join(others) or '-'}\t{name} & co" for name, others in listed.items()]
    rows = [line.split("\t") for line in waves.ordered(lines)]
    assert sorted(row[1] for row in rows) == sorted(listed)
    assert sorted("\t".join(row[1:]) for row in rows) == sorted(lines)
    numbers = {row[1]: int(row[0]) for row in rows}
    for name, others in listed.items():
        # One wave after its last dependency, and not later.
        assert numbers[name] == 1 + max((numbers[other] for other in others), default=0)
    # Wave by wave, and within one in the listed order.
    place = list(listed)
    order = [(numbers[row[1]], place.index(row[1])) for row in rows]
    assert order == sorted(order)


@given(awaited(), st.data())
def test_a_circle_is_refused(listed, data):
    first = data.draw(st.sampled_from(sorted(listed)))
    last = data.draw(st.sampled_from(sorted({first} | reached(listed, first))))
    # Dependencies have dependencies of their own.
    listed[last] = [*listed[last], first]
    with pytest.raises(waves.ListError, match="circular dependency: "):
        waves.waves(listed)


def reached(listed: dict[str, list[str]], name: str) -> set[str]:
    """Return all direct and indirect dependencies of an experiment."""
    found = set(listed[name])
    return found.union(*(reached(listed, other) for other in found))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no experiments"),
        ("a\n", "line 1: not a folder, a tab, and awaited folders: 'a'"),
        ("a\t-\nb\t\tx\n", "line 2: not a folder"),
        ("a\t-\n\t-\n", "line 2: not a folder"),
        ("a\t-\nb\ta\na\t-\n", "line 3: a appears twice"),
        ("a\tb\n", "a waits for b, which is not in the list"),
        ("a\tb\nb\tc\nc\ta\n", "circular dependency: "),
    ],
)
def test_a_list_without_an_order_is_refused(tmp_path, text, said):
    (tmp_path / "list").write_text("what was there\n")
    order(tmp_path, text).fails(1, f"waves.py: {tmp_path}/list: {said}")
    assert (tmp_path / "list").read_text() == "what was there\n"
    assert [path.name for path in tmp_path.iterdir()] == ["list"]


def test_a_list_is_written_behind_the_numbers_of_its_waves(tmp_path):
    order(tmp_path, "b\ta\t--set\tx=1 2\na\t-\nc\t-\td\n").ok()
    assert (tmp_path / "list").read_text() == "1\ta\t-\n1\tc\t-\td\n2\tb\ta\t--set\tx=1 2\n"
    run(WAVES).fails(2, "usage: waves.py LIST")


WORDS = st.text(st.characters(exclude_characters="\0\t\n\r", exclude_categories=["Cs"]))


@given(st.lists(WORDS, min_size=1, max_size=4))
def test_the_words_of_a_line_arrive_as_they_are(tmp_path_factory, words):
    folder = tmp_path_factory.getbasetemp()
    (folder / "lines").write_text("other\t-\n" + "\t".join(words) + "\nother\t-\n")
    program = "printf '%s\\0' \"$@\" | od -An -v -tx1 | tr -d ' \\n'"
    command = ["sh", "-c", program, "sh", "first"]
    shown = run(LINE, folder / "lines", "2", *command).ok()
    head, said = shown.out.splitlines()
    assert said == "".join(word.encode().hex() + "00" for word in ("first", *words))
    # The log begins with the command, which a shell reads as it was.
    told = run(LINE, "-n", folder / "lines", "2", *command).ok().out
    assert told == f"   {head.removeprefix('#')}\n"
    again = run("bash", "-c", head.removeprefix("# "), cold=True).ok()
    assert again.out == said


def test_a_command_names_the_words_of_an_experiment(tmp_path):
    (tmp_path / "list").write_text("1\texp/a b\texp/c exp/d\t--set\tx=1 2\t--seed\t3\n")
    show = [sys.executable, "-c", "import sys; print(sys.argv[1:])"]
    words = ["init", "EXP", "--config", "c.yaml", "OPTIONS", "--out", "EXP/out"]
    shown = run(LINE, "list", "1", *show, *words, cwd=tmp_path).ok().out.splitlines()[1]
    assert shown == str(["init", "exp/a b", "--config", "c.yaml", "--set", "x=1 2", "--seed", "3",
                         "--out", "EXP/out"])  # fmt: skip
    shown = run(LINE, "list", "1", *show, "rounds", "EXP", cwd=tmp_path).ok().out.splitlines()[1]
    assert shown == str(["rounds", "exp/a b"])


def test_a_line_that_fails_is_named(tmp_path):
    (tmp_path / "list").write_text("1\texp/a\t-\t--set\tx=1\n2\texp/b c\texp/a\n")
    failed = run(LINE, "list", "2", "bash", "-c", "exit 3", cwd=tmp_path)
    assert (failed.code, failed.err) == (3, f"{LINE}: line 2 of list failed: 2 exp/b c exp/a\n")
    run(LINE, "list", "3", "true", cwd=tmp_path).fails(1, "list has no line 3")


# ----------------------------------------------------------------- waves of real experiments
@pytest.fixture
def world(tmp_path) -> Path:
    return keyword_world.make_world(tmp_path / "a world")


@pytest.fixture
def recipe(tmp_path, world) -> Path:
    return small_recipe.make_recipe(tmp_path / "a recipe", world)


def test_a_failing_experiment_is_named_and_the_others_of_its_wave_finish(recipe, world):
    good, later = listed(world, "good/seed0", "-"), listed(world, "the later", "exp/good/seed0")
    # Without the data for evaluation.
    bad = listed(world, "bad/seed0", "-").replace(f"\t--data\ttest={world / 'test'}", "")
    order(recipe, bad + later + good).ok()
    failed = run("bash", recipe / "run.sh")
    assert failed.code == 1 and "all done" not in failed.out
    last = failed.err.splitlines()[-1]
    assert last.startswith("fedtools: ") and last.endswith(" (log: exp/log/train.1.log)")
    log = (recipe / "exp/log/train.1.log").read_text()
    assert "line 1 of list failed: 1 exp/bad/seed0 -\n" in log
    done = recipe / "exp/good/seed0/round_0003/global.safetensors"
    assert done.exists() and not (recipe / "exp/the later").exists()


def trained(recipe: Path) -> list[str]:
    """Return the experiments that have closed a round."""
    return sorted({path.parents[1].name for path in recipe.glob("exp/**/round_*/.done")})


def test_options_that_do_not_fit_are_told_in_one_line_before_any_training(recipe, world):
    one, two = listed(world, "one", "-"), listed(world, "two", "-")
    bad, later = listed(world, "bad", "-", "--set", "training.nope=1"), listed(world, "late", "one")
    later = later.replace("\tone\t", "\texp/one\t")
    order(recipe, one + bad).ok()
    failed = run("bash", recipe / "run.sh")
    assert failed.err.count("\n") == 1 and "'nope'" in failed.err, failed.err
    assert failed.err.startswith("fedtools: ") and failed.code == 1
    assert failed.err.endswith(" (log: exp/log/train.init.log)\n") and not trained(recipe)
    order(recipe, one + later).ok()
    run("bash", recipe / "run.sh").ok()
    assert trained(recipe) == ["late", "one"]
    # Changed options are reported before a new experiment of an earlier wave trains.
    order(recipe, one + two + later.replace("rounds=2", "rounds=3")).ok()
    failed = run("bash", recipe / "run.sh")
    assert failed.code == 1 and failed.err.count("\n") == 1, failed.err
    for part in ("fedtools: exp/late/config.yaml: ", "rounds", "(log: exp/log/train.begun.log)"):
        assert part in failed.err
    assert not (recipe / "exp/two").exists()
    # Unless one of its initial files does not exist yet.
    (world / "copy").symlink_to("test")
    later = later.replace(f"test={world / 'test'}", f"test={world / 'copy'}")
    order(recipe, one + later.replace("exp/late", "exp/last")).ok()
    run("bash", recipe / "run.sh").ok()
    (world / "copy").unlink()
    order(recipe, one + two + later.replace("exp/late", "exp/last")).ok()
    assert "world/copy" in run("bash", recipe / "run.sh").err
    assert trained(recipe) == ["last", "late", "one", "two"]


def test_a_list_goes_on_without_what_was_wrong_over_ranks_too(recipe, world):
    good, later = listed(world, "good/seed0", "-"), listed(world, "the later", "exp/good/seed0")
    bad = listed(world, "bad/seed0", "-", "--set", "training.nope=1")
    order(recipe, good).ok()
    run("bash", recipe / "run.sh").ok()
    order(recipe, bad + later + good).ok()
    assert "'nope'" in run("bash", recipe / "run.sh").err
    done = recipe / "exp/good/seed0/round_0003/global.safetensors"
    before = contents([*recipe.glob("exp/good/**/*.safetensors")])
    order(recipe, bad.replace("training.nope=1", "rounds=1") + later + good).ok()
    (recipe / "cmd.sh").write_text('train_cmd=utils/run.py rounds_cmd="utils/run.py --ntasks 2"\n')
    told, done_at_last = run("bash", recipe / "run.sh").ok().out.splitlines()
    assert told.startswith("    fedtools init exp/bad/seed0 --config ")
    assert done_at_last == "all done"
    assert contents([*recipe.glob("exp/good/**/*.safetensors")]) == before
    assert (recipe / "exp/bad/seed0/round_0002/global.safetensors").exists()
    final = recipe / "exp/the later/round_0003/global.safetensors"
    assert final.read_bytes() == done.read_bytes()
    alone = keyword_world.begin(world, recipe / "alone", "fedavg", "rounds=2")
    inside("rounds", alone).ok()
    assert (alone / "round_0003/global.safetensors").read_bytes() == done.read_bytes()


def test_a_killed_recipe_leaves_no_array_behind_a_pipe(recipe):
    text = (recipe / "run.sh").read_text()
    (recipe / "job.sh").write_text("echo $$ >pid.new && mv pid.new pid && exec sleep 100\n")
    sleeps = 'sleeps() { cat >lines; array "${train_cmd}" x.JOB.log lines 1 0 bash job.sh; }'
    text = text.replace("train_waves list", f"{sleeps}\necho 1 | sleeps\ntrain_waves list")
    (recipe / "run.sh").write_text(text)
    killed = start("bash", recipe / "run.sh")
    wait_until((recipe / "pid").exists)
    pid = int((recipe / "pid").read_text())
    assert alive(pid)
    killed.kill()
    killed.wait()
    wait_until(lambda: not alive(pid))
