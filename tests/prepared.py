"""Mini corpora, and what preparation scripts write, shared by several test files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from commands import ROOT, Result, run
from scripts import program

from fedtools.audio.wave import recording_seconds
from fedtools.data.datadir import DataDir
from fedtools.data.validate import validate_data_dir

# Three of the four accents of `fakes.some_clips`; the server has the fourth.
ACCENTS = "au=australia,en=england,in=indian"


@contextlib.contextmanager
def folder():
    """Make a folder for one example."""
    path = Path(tempfile.mkdtemp())
    try:
        yield path
    finally:
        shutil.rmtree(path)


def content(folder: Path) -> dict[str, bytes]:
    """Return everything below a folder, including hidden files: relative path -> bytes."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def checked(out: Path, **absent: bool) -> dict[str, DataDir]:
    """Return the data directories of a folder, each of which passes the validator.

    Args:
        out: the folder.
        absent: what a directory may lack, as arguments of the validator: `wav=False`.
    """
    found = sorted(path.parent for path in out.rglob("utt2spk"))
    assert found
    for path in found:
        validate_data_dir(path, feats=False, recording_seconds=recording_seconds, **absent)
    return {path.name: DataDir.read(path) for path in found}


# Of each speaker of a mini corpus, so many sentences or clips are enough for tests.
SENTENCES = {"ami": 2, "commonvoice": 1, "speechcommands": 2, "tedlium3": 2}


def make_mini(recipe: str, out: Path, *options: str | int) -> Result:
    """Make a recipe's mini corpus in a folder, or what is missing of it."""
    pytest.importorskip("espeakng_loader")
    few = ("--utterances", SENTENCES[recipe])
    return program(f"local/{recipe}/mini.py", out, *few, *options)


def mini_corpus(recipe: str, factory: pytest.TempPathFactory) -> Path:
    """Return a recipe's mini corpus, which is made once for all processes; nobody changes it."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    out = shared / "mini corpora" / recipe
    out.mkdir(parents=True, exist_ok=True)
    with open(out.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(out.glob("*/SHA256SUMS")):
            # A process without torch, which is forked for each sentence.
            pytest.importorskip("espeakng_loader")
            command = (sys.executable, ROOT / f"local/{recipe}/mini.py", out, "--nj", "2")
            run(*command, "--utterances", str(SENTENCES[recipe])).ok()
    (corpus,) = out.iterdir()
    return corpus
