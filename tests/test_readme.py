"""README.md: every command in it runs, every option is known, every file is there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, inside

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", README, flags=re.S)
COMMANDS = [
    line.split("#")[0].strip() for block in BLOCKS for line in block.splitlines() if line.strip()
]


def test_there_are_commands():
    assert any("asr1/run.sh" in command for command in COMMANDS)
    assert any("kws1/run.sh" in command for command in COMMANDS)
    assert any("tests/run.sh" in command for command in COMMANDS)


@pytest.mark.parametrize("command", [c for c in COMMANDS if "run.sh" in c])
def test_commands_parse(command):
    """With --help behind them the scripts answer, having read the options before it."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    program, *words = shlex.split(command)
    ending = ["--help"] if "egs/" in program else ["--version"]
    done = subprocess.run(
        [str(ROOT / program), *words, *ending],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_options_of_the_recipe_are_known():
    scripts = [path.read_text() for path in (ROOT / "egs").glob("*/*/run.sh")]
    known = {"help"}.union(*(re.findall(r"^([a-z_]+)=", text, flags=re.M) for text in scripts))
    mentioned = {
        option.replace("-", "_")
        for line in [*COMMANDS, *re.findall(r"`(\./run\.sh [^`]*|--[^`]*)`", README)]
        if "run.sh" in line or line.startswith("--")
        for option in re.findall(r"--([a-z_-]+)", line)
    }
    assert mentioned <= known, mentioned - known


def test_fedtools_commands_exist():
    for name in set(re.findall(r"`fedtools ([a-z-]+)", README)):
        inside(name, "--help").ok()


def test_files_are_there():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
    for name in re.findall(r"`((?:egs|conf|local|fedtools|utils|tests)/[a-zA-Z0-9_./]*)`", README):
        assert (ROOT / name).exists(), name


def test_the_tables_are_those_of_the_results():
    """The README repeats tables of the mini corpora's sections, and has no figure of its own."""
    tables = re.findall(r"<!-- mini table of (\S+) -->\n\n(.*?)\n\n", README, flags=re.S)
    assert len(tables) == 2
    for name, table in tables:
        results = (ROOT / name).read_text(encoding="utf-8")
        assert table in results[results.index("<!-- fedtools:mini") :]
