"""Ctrl-C at any moment: one line, exit 130, and no worker that writes a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import ROOT, run

from fedtools.core.signals import is_interrupt, uninterrupted

PLAIN, WRAPPED = "raise KeyboardInterrupt", "try: raise KeyboardInterrupt\nfinally: 1 / 0"


def _stubbed(folder: Path, module: str, text: str) -> dict[str, str]:
    """Return an environment in which the import of a module is interrupted."""
    folder.mkdir()
    (folder / f"{module}.py").write_text(f"{text}\n")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


@pytest.mark.parametrize("module", ["typer", "yaml", "numpy", "torch"])
@pytest.mark.parametrize("text", [PLAIN, WRAPPED], ids=["plain", "wrapped"])
def test_ctrl_c_while_modules_are_imported_is_one_line(tmp_path, module, text):
    """A module in C may turn it into an error of its own."""
    env = _stubbed(tmp_path / "stubs", module, text)
    command = [sys.executable, "-m", "fedtools", "train-local", tmp_path / "nowhere"]
    if module == "torch":
        command[3:] = ["import", tmp_path / "x.pt", tmp_path / "out", "--tokenizer", tmp_path]
    found = run(*command, env=env, cold=True)
    assert (found.code, found.out) == (130, "")
    assert found.err == "fedtools: interrupted; the same command continues from here\n"


def test_ctrl_c_ends_a_script_of_a_recipe_in_one_line(tmp_path):
    """The script reads a table from a FIFO that nobody writes to, until it is interrupted."""
    corpus = tmp_path / "en"
    (corpus / "clips").mkdir(parents=True)
    columns = "client_id\tpath\tsentence\taccents\n"
    # A table that takes longer than the test to read.
    (corpus / "validated.tsv").write_text(columns + "s\ta.mp3\tWords.\tx\n" * 600_000)
    script = ROOT / "local/commonvoice/prepare.py"
    command = [sys.executable, str(script), str(corpus), str(tmp_path / "out"), "--accents", "x"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while "soundfile" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        time.sleep(0.01)
    try:
        _, told = process.communicate(timeout=0.6)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        _, told = process.communicate()
    assert told == "prepare.py: interrupted; run the same command again\n"
    assert process.returncode == 130


def test_processes_that_are_started_meanwhile_do_not_see_ctrl_c(tmp_path):
    """A worker imports for seconds before it can set a handler of its own."""
    line = "import time; open('there', 'w'); time.sleep(0.5); print('done')"
    with uninterrupted():
        child = subprocess.Popen(
            [sys.executable, "-c", line], stdout=subprocess.PIPE, cwd=tmp_path, text=True
        )
    while not (tmp_path / "there").exists():
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate()
    assert (child.returncode, out) == (0, "done\n")


def test_ctrl_c_takes_effect_afterwards():
    """Another thread, as libraries have them, may take the signal."""
    waits = threading.Event()
    threads = [threading.Thread(target=waits.wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    seen = []
    try:
        with pytest.raises(KeyboardInterrupt), uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            # Long enough for the handler to run, wherever the signal was taken.
            time.sleep(0.01)
            seen.append(True)
    finally:
        waits.set()
    assert seen
    assert not is_interrupt(ValueError())
