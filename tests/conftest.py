"""Fixtures and hooks of all tests: the command line, called as a user calls it."""

from __future__ import annotations

import multiprocessing.spawn
import os
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

import forked
import pytest
from commands import (
    ROOT,
    Result,
    contents,
    fedtools,
    inside,
    kill_when,
    ledger,
    run,
    start,
    torchless,
)
from hypothesis import settings
from scored import SCLITE

# Re-exported: most tests import them from here.
__all__ = [
    "ROOT",
    "Result",
    "contents",
    "fedtools",
    "inside",
    "kill_when",
    "ledger",
    "run",
    "start",
    "torchless",
]

# No deadlines, since a busy machine is no failure; the same examples every time, so that a red test
# stays red.
settings.register_profile("fedtools", deadline=None, derandomize=True)
settings.load_profile("fedtools")


BEGUN = time.monotonic()
# Variables of all programs, so that they can be forks of the same servers: the first two as path.sh
# sets them. With more threads, small matrices cost half as much again in processor time, since
# OpenBLAS waits by spinning, for cores that the other worker has.
STATE = {
    "LC_ALL": "C",
    "OMP_WAIT_POLICY": "passive",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
# Without it, each of some thousand processes compiles all modules; to rewrite the assertions of all
# files of tests takes ten seconds.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_configure(config: pytest.Config) -> None:
    """Make the programs that run as forks of a server, once for all processes of a run."""
    if not hasattr(config, "workerinput"):
        os.environ |= STATE
        os.environ[forked.FOLDER] = str(forked.make_folder(os.getpid()))
    # Jobs of a command that a test calls in its own process are forks, too.
    multiprocessing.spawn.set_executable(str(forked.programs() / "python3"))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Print what all processes have cost; remove the programs. Servers end with this process."""
    if not hasattr(config, "workerinput"):
        used, wall = sum(os.times()[:4]) + forked.seconds(), time.monotonic() - BEGUN
        print(f"{wall / 60:.1f} minutes, {used:.0f} s of processor time (user + sys)", end="; ")
        print(f"{forked.cold()} programs in interpreters of their own")
        skipped = config.pluginmanager.get_plugin("terminalreporter").stats.get("skipped", [])
        if left := sum(SCLITE in str(report.longrepr) for report in skipped):
            print(f"NOT CHECKED: {left} tests of scoring, because {SCLITE}")
        shutil.rmtree(os.environ.pop(forked.FOLDER))


# The longest files, which a run starts with, so that no worker is left alone with one at the end.
LONGEST = (
    "test_recipe.py",
    "test_recipe_attack.py",
    "test_recipe_personal.py",
    "test_keyword_federation.py",
    "test_recipe_rescore.py",
    "test_keyword_recipe.py",
    "test_soak.py",
    "test_decouplefl.py",
    "test_slurm.py",
    "test_flower.py",
)


# Tests that only `tests/run.sh --all` runs; each has a case in the short run. They try many moments
# of a kill, many cuts, many damaged inputs or a cluster.
LONG = (
    "test_flower.py::test_a_kill_changes_no_byte",
    "test_flower.py::test_a_site_that_cannot_answer_says_why_and_a_round_ends_without_it",
    "test_flower.py::test_sites_reach_nothing_that_asks_for_no_key",
    "test_flower.py::test_a_round_has_the_bytes_of_one_machine_and_costs_what_the_ledger_says",
    "test_flower.py::test_who_takes_part_sees_no_data_of_others",
    "test_flower.py::test_a_server_learns_the_sum_alone",
    "test_net.py::test_each_way_writes_the_same_bytes_in_the_long_run",
    "test_ranks.py::test_a_rank_that_dies_ends_the_run_and_the_same_command_goes_on[1]",
    "test_ranks.py::test_a_rank_that_outlives_a_killed_run_does_not_end_the_next",
    "test_secure_rounds.py::test_ranks_do_each_step_of_a_secure_sum",
    "test_slurm.py::test_a_failure_shows_its_log",
    "test_slurm.py::test_a_federation_on_the_cluster_gives_the_same_bytes",
    "test_slurm.py::test_a_killed_submitters_array_never_runs_beside_its_reruns",
    "test_slurm.py::test_a_rank_that_fails_ends_the_others",
    "test_slurm.py::test_ranks_are_spread_over_nodes_as_the_config_says",
    "test_slurm.py::test_rounds_over_ranks_on_two_nodes_give_the_same_bytes",
    "test_slurm.py::test_sigterm_cancels_the_array",
    "test_slurm.py::test_waves_of_experiments_on_the_cluster_give_the_same_bytes",
    "test_whisper_import.py::test_a_model_that_is_cut_off_anywhere[1]",
    "test_soak.py::test_federations_that_train_are_stopped_and_go_on",
    "test_soak.py::test_no_input_makes_a_command_fail_otherwise_than_in_one_line",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the short run."""
    parser.addoption("--short", action="store_true", help="leave out the tests of conftest.LONG")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest files; leave out long tests if told to."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    if config.getoption("short"):
        names = {item: long_name(item) for item in items}
        if unknown := set(LONG) - set(names.values()):
            raise pytest.UsageError(f"conftest.LONG: no such tests: {', '.join(sorted(unknown))}")
        config.hook.pytest_deselected(items=[item for item in items if names[item]])
        items[:] = [item for item in items if not names[item]]


def long_name(item: pytest.Item) -> str:
    """Return the name by which a test is in LONG, with or without its parameters; none is ""."""
    names = (f"{item.path.name}::{name}" for name in (item.name, item.name.partition("[")[0]))
    return next((name for name in names if name in LONG), "")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print how long files took, with the slowest tests: `--durations=N`."""
    number = config.getoption("durations")
    if number is None:
        return
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section(f"slowest files, {sum(seconds.values()):.0f} s of all")
    for name, total in seconds.most_common(number or None):
        terminalreporter.write_line(f"{total:.2f}s {name}")


@pytest.fixture(scope="session", autouse=True)
def _no_key_of_the_user(tmp_path_factory):
    """Keep tests from drawing noise under the user's own key."""
    os.environ["FEDTOOLS_NOISE_KEY"] = str(tmp_path_factory.mktemp("secret") / "noise.key")
    os.environ.pop("FEDTOOLS_NONCE", None)


@pytest.fixture
def key(tmp_path, monkeypatch) -> Path:
    """Return the path of a noise key of one test alone."""
    path = tmp_path / "secret" / "noise.key"
    monkeypatch.setenv("FEDTOOLS_NOISE_KEY", str(path))
    return path


@pytest.fixture
def set_key(key) -> Path:
    """Return a fixed noise key, for tests in which noise must not happen to change nothing."""
    key.parent.mkdir()
    key.write_text("00" * 32)
    key.chmod(0o600)
    return key


@pytest.fixture
def cli():
    """Return `inside`, as a fixture."""
    return inside


@pytest.fixture
def in_float64():
    """Compute in float64, since rounding is not under test."""
    import torch

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    yield
    torch.set_default_dtype(torch.float32)
