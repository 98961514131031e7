"""The regression net: its results for one method, and the changes of files it detects."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import net
import numpy as np
from conftest import run
from net_ways import Failed, Runner
from safetensors.numpy import load_file, save_file

CASE = "rescore-fmp-increments"


def command(*arguments: object):
    return run(sys.executable, net.__file__, "--only", CASE, *map(str, arguments))


def test_a_method_is_recorded_and_a_changed_byte_is_noticed(tmp_path):
    table = tmp_path / "net.tsv"
    assert ", 0 differ, " in command("--table", table, "--record").ok().out
    about, *rows = table.read_text().splitlines()
    files = {row.split("\t")[1] for row in rows}
    assert {"exp/round_0002/global.safetensors", "exp/round_0003/ledger.tsv"} < files
    assert {"exp/round_0003/messages", "out/text"} < files and len(rows) > 15
    at = next(index for index, row in enumerate(rows) if "round_0003/messages" in row)
    rows[at] = rows[at][:-1] + ("0" if rows[at][-1] != "0" else "1")
    table.write_text("".join(f"{line}\n" for line in (about, *rows)))
    done = command("--table", table)
    # ESPnet prints missing packages to stdout.
    *_, header, row, summary = done.out.splitlines()
    assert done.code == 1 and ", 1 differ, " in summary
    assert (header.split(), row.split()) == (
        ["method", "file", "way"],
        [CASE, "exp/round_0003/messages", "all"],
    )


ROWS = ("client\tloss\tseconds\n", "au\t1.5\t0.25\n", "en\t2.5\t0.75\n")


def made(root: Path) -> Runner:
    """Make a round in a federation's format, of two clients in one job."""
    runner = Runner(CASE, root)
    folder = runner.exp("one") / "round_0001"
    folder.mkdir(parents=True)
    state = {"b": np.arange(3, dtype="f4"), "a": np.ones((2, 2), "f4")}
    save_file(state, folder / "global.safetensors")
    save_file({name: np.stack([v, v + 1]) for name, v in state.items()}, _message(folder, 1))
    (folder / "update.1.tsv").write_text("".join(ROWS))
    (folder / "ledger.tsv").write_text("".join(ROWS))
    (folder / ".done").write_text("0\n")
    return runner


def _message(folder: Path, job: int) -> Path:
    return folder / f"update.{job}.safetensors"


def test_each_byte_counts_but_for_seconds_and_jobs(tmp_path):
    runner = made(tmp_path)
    folder = runner.exp("one") / "round_0001"
    whole = dict(runner.hashes("one"))
    kinds = {"messages", "global.safetensors", "ledger.tsv"}
    assert whole.keys() == {f"exp/round_0001/{kind}" for kind in kinds}

    def changed() -> set[str]:
        now = dict(runner.hashes("one"))
        return {name.rpartition("/")[2] for name in whole if whole[name] != now.get(name)}

    def with_byte(path: Path, at: int) -> set[str]:
        before = path.read_bytes()
        after = bytearray(before)
        after[at] ^= 1
        path.write_bytes(after)
        found = changed()
        path.write_bytes(before)
        return found

    assert with_byte(folder / "global.safetensors", -1) == {"global.safetensors"}
    assert with_byte(_message(folder, 1), -1) == {"messages"}
    assert with_byte(folder / "update.1.tsv", "".join(ROWS).index("1.5")) == {"messages"}
    assert with_byte(folder / "ledger.tsv", "".join(ROWS).index("2.5")) == {"ledger.tsv"}
    assert with_byte(folder / "ledger.tsv", "".join(ROWS).index("0.75")) == set()
    assert with_byte(folder / "update.1.tsv", "".join(ROWS).index("0.25")) == set()
    # The same messages in two jobs, the second client's in the first.
    tensors = load_file(_message(folder, 1))
    for job, client in ((1, 1), (2, 0)):
        rows = {name: value[client : client + 1].copy() for name, value in tensors.items()}
        save_file(rows, _message(folder, job))
        (folder / f"update.{job}.tsv").write_text(ROWS[0] + ROWS[1 + client])
    assert changed() == set()
    (folder / "update.2.tsv").unlink()
    assert changed() == {"messages"}


def test_a_way_that_writes_otherwise_is_told(tmp_path):
    class Written(Runner):
        """Fake ways that write files, of which the second lacks one and the third changes one."""

        def one(self) -> None:
            shutil.copytree(made(tmp_path / "made").exp("one"), self.exp("one"))

        def three(self) -> None:
            shutil.copytree(self.exp("one"), self.exp("three"))
            (self.exp("three") / "round_0001" / "global.safetensors").unlink()

        def killed(self) -> None:
            shutil.copytree(self.exp("one"), self.exp("killed"))
            (self.exp("killed") / "round_0001" / "ledger.tsv").write_text("other\n")

        def ranks(self) -> None:
            raise Failed("exit 1: rank 1 stopped responding")

        def after(self) -> None:
            pass

    found = Written(CASE, tmp_path / "net").run()
    assert net.compared(found, None) == [
        (CASE, "exit 1: rank 1 stopped responding", "ranks"),
        (CASE, "exp/round_0001/global.safetensors", "three"),
        (CASE, "exp/round_0001/ledger.tsv", "killed"),
    ]
