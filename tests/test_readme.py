"""The README files: every command in them runs, every option is known, every file is there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, inside

TOP = ROOT / "README.md"
RECIPES = sorted((ROOT / "egs").glob("*/*/README.md"))
PAGES = [TOP, *RECIPES, ROOT / "fedtools/README.md", ROOT / "tests/bench/README.md"]


def commands(page: Path) -> list[str]:
    """The lines of a page's shell blocks, without comments."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)
    whole = (block.replace("\\\n", " ") for block in blocks)
    lines = (line.split("#")[0].strip() for block in whole for line in block.splitlines())
    return [line for line in lines if line]


RUNS = [(page, line) for page in PAGES for line in commands(page) if "run.sh" in line]


def test_there_are_commands():
    top = commands(TOP)
    assert any("asr1/run.sh" in line for line in top) and "tests/run.sh" in top
    assert len(RECIPES) == len(list((ROOT / "egs").glob("*/*/run.sh")))
    assert {page for page, _ in RUNS} >= {TOP, *RECIPES}


@pytest.mark.parametrize(("page", "line"), RUNS, ids=[line for _, line in RUNS])
def test_commands_parse(page, line):
    """With --help behind them the scripts answer, having read the options before it."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    words = shlex.split(line)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    done = subprocess.run(
        [*words, "--version" if "tests/" in words[0] else "--help"],
        capture_output=True,
        text=True,
        cwd=page.parent,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_options_of_the_recipes_are_known(page):
    here = page.parent / "run.sh"
    scripts = [here] if here.exists() else list((ROOT / "egs").glob("*/*/run.sh"))
    texts = [path.read_text() for path in scripts]
    known = {"help"}.union(*(re.findall(r"^([a-z_]+)=", text, flags=re.M) for text in texts))
    told = re.findall(r"`(\./run\.sh [^`]*)`", page.read_text(encoding="utf-8"))
    if page in RECIPES:
        told += re.findall(r"^\| (`--[^|]*) \|", page.read_text(encoding="utf-8"), flags=re.M)
    told += [line for line in commands(page) if "/run.sh" in line]
    mentioned = {o.replace("-", "_") for line in told for o in re.findall(r"--([a-z_-]+)", line)}
    assert mentioned <= known, mentioned - known


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_fedtools_commands_exist(page):
    for name in set(re.findall(r"`fedtools ([a-z-]+)", page.read_text(encoding="utf-8"))):
        inside(name, "--help").ok()


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_files_are_there(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
    folders = "egs|conf|local|fedtools|utils|tests"
    for name in re.findall(rf"`((?:{folders})/[a-zA-Z0-9_./]*)`", text):
        assert (page.parent / name).exists() or (ROOT / name).exists(), name


def test_the_table_is_that_of_the_results():
    """The README repeats a table of the mini corpus's section, and has no figure of its own."""
    tables = re.findall(r"<!-- mini table of (\S+) -->\n\n(.*?)\n\n", TOP.read_text(), flags=re.S)
    assert len(tables) == 1
    for name, table in tables:
        results = (ROOT / name).read_text(encoding="utf-8")
        assert table in results[results.index("<!-- fedtools:mini") :]
