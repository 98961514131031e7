"""utils/build_kenlm.sh: one build of lmplz, for a recipe and for others at the same time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest
from commands import wait_until
from conftest import ROOT, Result, run

BUILD = ROOT / "utils/build_kenlm.sh"
PROGRAMS = ("lmplz", "build_binary")

# The build's tools: pip "downloads" a small archive, and cmake "compiles" two programs, but waits
# while the file `slow` is there, and fails if the file `broken` is.
PIP = 'import os, shutil\nshutil.copy(os.environ["TOOLS"] + "/kenlm-0.3.0.tar.gz", ".")\n'
CMAKE = """#!/usr/bin/env bash
[[ $1 == --build ]] || exit 0
echo begun >>"$TOOLS/builds"
while [[ -e $TOOLS/slow ]]; do sleep 0.1; done
[[ ! -e $TOOLS/broken ]] || { echo "error: no such header"; exit 2; }
mkdir -p build/bin
cp "$TOOLS/make" build/bin/lmplz
cp "$TOOLS/make" build/bin/build_binary
"""


class Machine:
    """A virtual environment without KenLM's programs, and the tools of a build."""

    def __init__(self, folder: Path):
        self.bin, self.tools = folder / "a venv" / "bin", folder / "tools"
        run(sys.executable, "-m", "venv", "--without-pip", self.bin.parent).ok()
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(self.bin.parent)}))
        (packages / "real.pth").write_text(sysconfig.get_path("purelib"))
        (self.tools / "pip").mkdir(parents=True)
        (self.tools / "pip/__init__.py").touch()
        (self.tools / "pip/__main__.py").write_text(PIP)
        for path in (self.bin / "fedtools", self.tools / "make", self.tools / "cmake"):
            path.write_text(CMAKE)
            path.chmod(0o755)
        source = folder / "kenlm-0.3.0"
        source.mkdir()
        (source / "CMakeLists.txt").touch()
        with tarfile.open(self.tools / "kenlm-0.3.0.tar.gz", "w:gz") as archive:
            archive.add(source, source.name)
        self.env = {
            "PATH": f"{self.bin}:{self.tools}:/usr/bin:/bin",
            "PYTHONPATH": f"{self.tools}:{ROOT}",
            "TOOLS": str(self.tools),
            "CXX": "true",
        }

    def build(self, *options: str, **env: str) -> Result:
        return run(BUILD, *options, env=self.env | env)

    def begin(self) -> subprocess.Popen:
        """Start a build that waits, and return when it compiles."""
        (self.tools / "slow").touch()
        process = subprocess.Popen([BUILD], env=os.environ | self.env, start_new_session=True)
        wait_until(lambda: self.begun() > 0)
        return process

    def begun(self) -> int:
        listed = self.tools / "builds"
        return listed.read_text().count("begun") if listed.exists() else 0

    def built(self) -> bool:
        return all(os.access(self.bin / name, os.X_OK) for name in PROGRAMS)


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def test_a_missing_compiler_is_said_before_the_build(machine):
    for options in ((), ("--background",)):
        failed = machine.build(*options, CXX="no-such-compiler")
        failed.fails(
            1, "there is no C++ compiler; install one (Debian, Ubuntu: apt-get install g++"
        )
    assert not machine.begun()
    machine.build("--now").fails(2, "unknown argument '--now'")


def test_two_at_once_build_once(machine):
    first = machine.begin()
    second = subprocess.Popen(
        [BUILD], env=os.environ | machine.env, stderr=subprocess.PIPE, text=True
    )
    assert "waiting for the build of KenLM's lmplz" in second.stderr.readline()
    (machine.tools / "slow").unlink()
    assert (first.wait(), second.wait(), machine.begun()) == (0, 0, 1)
    second.stderr.close()
    assert machine.built()
    # Nothing is left to do: no tool is called.
    assert machine.build(PYTHONPATH="/nowhere").ok().err == ""


def test_in_the_background_it_returns_at_once_and_can_be_waited_for(machine):
    (machine.tools / "slow").touch()
    assert "in the background, once (log: " in machine.build("--background").ok().err
    wait_until(lambda: machine.begun() > 0)
    assert not machine.built()
    (machine.tools / "slow").unlink()
    machine.build().ok()
    assert machine.built()
    assert machine.begun() == 1


def test_a_failed_build_shows_its_last_lines_and_can_be_repeated(machine):
    (machine.tools / "broken").touch()
    failed = machine.build()
    assert failed.code == 1
    assert "    | error: no such header\n" in failed.err
    assert "the build of KenLM's lmplz failed; its output is in" in failed.err.splitlines()[-1]
    assert not machine.built()
    (machine.tools / "broken").unlink()
    machine.build().ok()
    assert machine.built()


def test_a_killed_build_leaves_nothing_that_counts(machine):
    process = machine.begin()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not any((machine.bin / name).exists() for name in PROGRAMS)
    (machine.tools / "slow").unlink()
    machine.build().ok()
    assert machine.built()
    assert machine.begun() == 2
