"""The regression net: equal bytes of federations in all ways, and the changes it detects."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import net
import numpy as np
import pytest
from conftest import ROOT, run
from net_cases import CASES, SHORT
from net_ways import Failed, Runner
from safetensors.numpy import load_file, save_file

# Without torch.
CASE = "counts"


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> net.Hashes:
    """Run the cases whose tests are selected, in all ways, and return their hashes."""
    tests = [one for one in request.session.items if one.path == request.path]
    names = [one.callspec.params["case"] for one in tests if hasattr(one, "callspec")]
    table = tmp_path_factory.mktemp("net") / "net.tsv"
    run(sys.executable, net.__file__, "--only", *names, "--write", table).ok()
    return net.read(table)


def check(found: net.Hashes, case: str) -> None:
    """Check that all ways wrote the same, and on the recording kind of machine, the recorded."""
    ours = {key: value for key, value in found.items() if key[0] == case}
    # If a change is meant: tests/net.py --record --only CASE.
    assert net.compared(ours, net.recorded_here(net.TABLE, [case])) == []
    assert len(ours) > 10


@pytest.mark.parametrize("case", SHORT)
def test_each_way_writes_the_same_bytes(found, case):
    check(found, case)


@pytest.mark.parametrize("case", [name for name in CASES if name not in SHORT])
def test_each_way_writes_the_same_bytes_in_the_long_run(found, case):
    check(found, case)


def command(*arguments: object, program: Path = Path(net.__file__)):
    return run(sys.executable, program, *map(str, arguments))


def test_a_method_is_recorded_and_a_changed_byte_is_noticed(tmp_path):
    table = tmp_path / "net.tsv"
    assert ", 0 differ, " in command("--only", CASE, "--table", table, "--record").ok().out
    about, *rows = table.read_text().splitlines()
    ours = net.read(table)
    files = {file for _, file in ours}
    assert {"exp/round_0002/global.safetensors", "exp/round_0003/ledger.tsv"} < files
    assert "exp/round_0004/messages" in files and len(files) > 15
    assert net.compared(ours, net.recorded_here(table, [CASE])) == []
    at = next(index for index, row in enumerate(rows) if "round_0004/messages" in row)
    rows[at] = rows[at][:-1] + ("0" if rows[at][-1] != "0" else "1")
    table.write_text("".join(f"{line}\n" for line in (about, *rows)))
    found = net.compared(ours, net.recorded_here(table, [CASE]))
    assert found == [(CASE, "exp/round_0004/messages", "all")]
    # Values of another kind of machine are not compared.
    table.write_text("".join(f"{line}\n" for line in ("# torch 1", *rows)))
    assert net.recorded_here(table, [CASE]) is None


# A case on a world whose builder the other commit does not have.
FRESH = """

def _fresh(world):
    import fresh

    fresh.make_world(net_worlds.made(world))
    (world / "train").symlink_to("data")


import net_cases
import net_worlds

net_worlds.WORLDS["fresh"] = (_fresh, ())
net_worlds.TORCHLESS.add("fresh")
net_cases.CASES["fresh"] = net_cases.Case("fresh", "counting", (), "train")
"""


def test_another_commit_is_compared_where_it_can_run_a_case(tmp_path):
    for name in ("fedtools", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    git = ("git", "-C", tmp_path, "-c", "user.name=t", "-c", "user.email=t@t")
    for words in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "--message", "t")):
        run(*git, *words).ok()
    tests = tmp_path / "tests"
    counts = (tests / "counts.py").read_text()
    (tests / "fresh.py").write_text(counts)
    with open(tests / "net_ways.py", "a") as file:
        file.write(FRESH)
    # Clients that count otherwise.
    counted = "[words.count(word) for"
    assert counted in counts
    (tests / "counts.py").write_text(counts.replace(counted, counted.replace("word)", "word) * 2")))
    done = command("--against", "HEAD", "--only", CASE, "fresh", program=tests / "net.py")
    assert done.code == 1 and "No module named 'fresh'" in done.out
    assert "fresh: new since HEAD, which cannot run it: exit 1" in done.out
    rows = [line.split() for line in done.out.splitlines() if line.endswith(("all", "new", "gone"))]
    assert [CASE, "exp/round_0001/messages", "all"] in rows
    assert [CASE, "exp/round_0001/clients", "all"] not in rows
    assert {(name, way) for name, _, way in rows} == {(CASE, "all")}
    assert run(*git, "worktree", "list").ok().out.count("\n") == 1


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
