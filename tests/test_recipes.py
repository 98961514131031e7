"""What the four recipes have in common before their first stage, which none of these runs reach."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from commands import ROOT, Result, run
from forked import forked

RECIPES = sorted(path.parent.relative_to(ROOT) for path in (ROOT / "egs").glob("*/*/run.sh"))


@pytest.fixture(params=RECIPES, ids=str)
def call(request, tmp_path):
    """Return a function that runs a recipe by a path with blanks, from another directory."""
    (tmp_path / "a checkout").symlink_to(ROOT)
    (tmp_path / "elsewhere").mkdir()
    script = Path("..") / "a checkout" / request.param / "run.sh"

    def called(*words: str) -> Result:
        before = {path.name for path in (ROOT / request.param).iterdir()}
        result = run(script, *words, env=forked(dict(os.environ)), cwd=tmp_path / "elsewhere")
        # Neither there nor in the recipe is anything written.
        assert not list((tmp_path / "elsewhere").iterdir())
        assert {path.name for path in (ROOT / request.param).iterdir()} == before
        return result

    return called


def test_there_are_four():
    assert len(RECIPES) == 4


def test_help_names_the_options_of_all_recipes(call):
    said = call("--help").ok().out
    for name in ("stage", "stop_stage", "nj", "ngpu", "config", "tag", "release"):
        assert f"\n  --{name}=" in said, name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--stagee", "3"], "unknown option --stagee"),
        # Without quotes, the second word and all options after it would be ignored.
        (["--stop_stage", "0", "one", "--nj", "2"], "unexpected argument 'one'"),
        (["--stop_stage"], "--stop_stage"),
        (["--nj", "two"], "--nj"),
        (["--stop_stage", "0", "--tag", "a b"], "--tag 'a b': use letters"),
        (["--stop_stage", "0", "--ngpu", "2"], "--ngpu: '2' is not of the form 0|1"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_wrong_options_are_one_line_and_exit_2(call, words, said):
    result = call(*words).fails(2, said)
    assert result.err.count("\n") == 1 and "run.sh: " in result.err, result.err
