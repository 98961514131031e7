"""`fedtools rounds --estimate` against rounds whose length is known."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import counts
import pytest
from commands import Result, run
from small_recipe import make_recipe

# Seconds of a unit of two clients. Four clients take part in every round but the first, in which
# all seven do.
PAIR = 0.5
ROUND = 2 * PAIR


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    root = counts.make_world(tmp_path_factory.mktemp("estimate"))
    (root / "config.yaml").write_text("task: counts\nrounds: 30\nclients_per_round: 4\n")
    counts.begin(root, root / "all/exp")
    return root


def rounds(world: Path, *options: object) -> Result:
    env = counts.environment(world) | {"SLOW": str(PAIR)}
    command = (sys.executable, "-m", "fedtools", "rounds", world / "all/exp")
    return run(*command, *map(str, options), env=env)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return the bytes of all files, and the time when each was written."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


FORM = (
    r"\S+/exp: (\d+) rounds of ([\d.]+) s(?:, (\d+) evaluations of ([\d.]+) s)?: ([\d.]+) minutes\n"
)


def test_rounds_that_are_left_are_counted_and_nothing_is_changed(world):
    exp = world / "all/exp"
    for done, options in ((0, ()), (2, ("--evaluate", "train"))):
        if done:
            rounds(world, "--to", done).ok()
        before = contents(exp)
        found = re.fullmatch(FORM, rounds(world, "--estimate", *options).ok().out)
        assert found, "another form"
        assert contents(exp) == before
        assert [path.name for path in exp.parent.iterdir()] == ["exp"]
        left, each, evaluations, evaluation, minutes = (float(one or 0) for one in found.groups())
        assert left == 30 - done
        # The first round takes twice as long, and would be seen.
        assert ROUND <= each < 2 * ROUND
        # After every round.
        assert evaluations == (left if options else 0)
        assert minutes == pytest.approx((left * each + evaluations * evaluation) / 60, abs=0.06)


def test_processes_share_a_round(world):
    found = re.fullmatch(FORM, rounds(world, "--estimate", "--nj", 2).ok().out)
    assert PAIR <= float(found[2]) < ROUND


def test_without_rounds_to_time_it_says_so(world, tmp_path):
    for path in (tmp_path / "none", world / "data"):
        failed = counts.fedtools(world, "rounds", path, "--estimate")
        failed.fails(1, f"{path}: no experiment here; run fedtools init")
    rounds(world, "--estimate", "--to", 3).fails(2, "goes without --to")
    done = counts.begin(world, tmp_path / "exp", "--set", "rounds=1")
    found = re.fullmatch(FORM, counts.fedtools(world, "rounds", done, "--estimate").ok().out)
    assert found[1] == "1"
    counts.fedtools(world, "rounds", done).ok()
    failed = counts.fedtools(world, "rounds", done, "--estimate")
    failed.fails(1, f"{done}: all rounds are complete")


PRICE = """
cd "$0" && set -euo pipefail
ngpu=0 nj=1 price=true config=$1/config.yaml exp=$1/exp data=$1/data
set --
. utils/recipe.sh
for seed in 0 1; do
    tabbed "${exp}/a/seed${seed}" - --seed "${seed}" --method counting --data "train=$data"
done | utils/waves.py "${exp}/list"
train_waves "${exp}/list" train 1 1 fedtools init EXP --config "${config}" OPTIONS '&&' \
    fedtools rounds EXP --nj NJ --ngpu "${ngpu}" --evaluate train
echo "all are trained"
"""


def test_a_recipe_prices_what_it_would_train(tmp_path):
    """Two seeds are begun, one of them is timed, and neither is trained."""
    world = counts.make_world(tmp_path)
    env = {"FEDTOOLS_PATH": str(world / "plugin"), "SLOW": str(PAIR)}
    recipe = make_recipe(tmp_path / "a recipe", world)
    told = run("bash", "-c", PRICE, recipe, world, env=env).ok().out
    begun, one, total = told.splitlines()
    assert begun.startswith(f"    fedtools init {world}/exp/a/seed0 --config ")
    found = re.search(r"(\d+) rounds of ([\d.]+) s, 5 evaluations of .* ([\d.]+) minutes", one)
    assert found[1] == "4" and float(found[2]) >= ROUND
    assert one.endswith("(2 of these)")
    assert f"In all {2 * float(found[3]):g} minutes" in total
    for seed in (0, 1):
        assert [path.name for path in (world / f"exp/a/seed{seed}").glob("round_*")] == [
            "round_0001"
        ]
        assert not (world / f"exp/a/seed{seed}/round_0001/clients").exists()
    trained = PRICE.replace("price=true", "price=false")
    run("bash", "-c", trained, recipe, world, env=env | {"SLOW": "0"}).ok()
    # There is nothing left.
    told = run("bash", "-c", PRICE, recipe, world, env=env).ok().out
    assert told == f"{begun}\nall are trained\n"
