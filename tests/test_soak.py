"""A hundredth of `tests/soak/soak.py`: damaged inputs of every command, and kills."""

from __future__ import annotations

import os
import random
import sys

import pytest
from conftest import ROOT, run
from seeds import VARIABLE, commit_seed

SOAK = ROOT / "tests" / "soak"
SEED = 10


@pytest.fixture(autouse=True)
def _environment():
    """Take back what importing soak.py sets: other tests' programs would not be forks."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_no_input_makes_a_command_fail_otherwise_than_in_one_line(tmp_path):
    done = run(sys.executable, SOAK / "soak.py", "--inputs", "100", "--seed", str(SEED))
    assert done.code == 0, done.out
    assert "100 inputs in" in done.out


def stop(kills: int, *worlds: str) -> None:
    """Kill federations at moments that another commit would not draw."""
    options = ("--kills", kills, "--crashes", "10", "--worlds", *worlds, "--seed", commit_seed())
    done = run(sys.executable, SOAK / "soak.py", *map(str, options))
    assert done.code == 0, done.out + done.err
    assert "bugs: 0" in done.out


def test_federations_that_are_stopped_go_on():
    stop(3, "counts")


def test_federations_that_train_are_stopped_and_go_on():
    stop(24, "keywords", "speech")


def test_a_seed_is_the_commits_or_the_one_that_is_given(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    (tmp_path / "fedtools").mkdir()
    (tmp_path / "fedtools" / "a.py").write_text("one")
    git = ("git", "-C", tmp_path, "-c", "user.name=t", "-c", "user.email=t@t")
    seeds = [commit_seed(tmp_path)]
    (tmp_path / "fedtools" / "a.py").write_text("two")
    seeds.append(commit_seed(tmp_path))
    run(*git, "init", "--quiet").ok()
    for _ in range(2):
        run(*git, "commit", "--quiet", "--allow-empty", "--message", "t").ok()
        seeds += [commit_seed(tmp_path)] * 2
        assert seeds[-1] == commit_seed(tmp_path)
    assert len(set(seeds)) == 4
    monkeypatch.setenv(VARIABLE, "7")
    assert commit_seed(tmp_path) == 7


def test_what_a_stopped_command_must_not_leave_is_seen(tmp_path, monkeypatch):
    """Scripts with forbidden behaviour, stopped where it is visible, are reported."""
    monkeypatch.syspath_prepend(str(SOAK))
    import kills
    from faults import Fault
    from federations import Process, World

    (tmp_path / "before").mkdir()
    (tmp_path / "after").mkdir()
    (tmp_path / "after" / "a.tsv").write_text("a\n1\n")

    def bug(kind: str, at: int, code: str) -> str:
        script, said = tmp_path / "script.py", []
        script.write_text(
            f"import os, sys\nfrom pathlib import Path\np = Path(sys.argv[1])\n{code}"
        )
        soak = kills.Soak(0, tmp_path)
        soak.tell = lambda *told: said.append(str(told[-1]))
        stage = [Process(f"{script} {{}}")]
        world = World(tmp_path, "", "train", 1, 1, False)
        soak._crash(world, "x", stage, Fault(kind, at), tmp_path / "before", tmp_path / "after")
        return " ".join(said)

    good = "(p / '.a.tmp').write_text('a\\n1\\n')\nos.replace(p / '.a.tmp', p / 'a.tsv')\n"
    for kind in ("before", "after"):
        assert bug(kind, 1, good) == ""
    refused = "import errno\ntry:\n    (p / 'a.tsv').write_text('a\\n1\\n')\n"
    assert "Traceback" in bug("once full", 2, good)
    refused += "except OSError as e:\n    sys.exit('fedtools: No space left on device')\n"
    assert bug("once full", 1, refused) == ""
    partly = "if (p / 'a.tsv').exists():\n    sys.exit(0)\n"
    half = "with open(p / 'a.tsv', 'w') as f:\n    f.write('a\\n1')\n    f.flush()\n"
    assert "half-written" in bug("before", 1, f"{half}os.fsync(0)\n")
    assert "left over" in bug("before", 2, f"(p / f'{{os.getpid()}}.tmp').mkdir()\n{good}")
    assert "not the same" in bug("after", 2, partly + good.replace("1", "2"))
    assert "exit status 1" in bug("once full", 1, refused.replace("No space", "nothing"))


def test_the_same_number_is_the_same_mutation(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(SOAK))
    from mutate import mutate

    found = set()
    for number in range(200):
        said = []
        for again in ("one", "two"):
            path = tmp_path / again / f"{number}.yaml"
            path.parent.mkdir(exist_ok=True)
            path.write_text("a: 1\nb: {c: [2], d: x}\n")
            how = mutate(path, random.Random(number), [path])
            content = path.read_bytes() if path.is_file() else path.is_dir()
            said.append((how, content))
        assert said[0] == said[1]
        found.add(said[0][1])
    assert len(found) > 100


def test_what_must_not_be_is_seen(tmp_path, monkeypatch):
    """Every kind of bug that the fuzzer looks for is reported."""
    monkeypatch.syspath_prepend(str(SOAK))
    import soak

    monkeypatch.setattr(soak, "MEMORY", 1 << 29)

    def outcome(code: str, changed: str = "") -> str:
        script = tmp_path / "prepare.py"
        script.write_text(f"import os, sys, time\nfrom pathlib import Path\n{code}\n")
        ended = soak.run([str(script)], tmp_path)
        return soak.judge(ended, tmp_path, [tmp_path / changed] if changed else [])

    assert outcome("pass") == "done"
    assert outcome(f"sys.exit('prepare.py: {tmp_path}/x: wrong')") == "refused"
    assert outcome("sys.exit('prepare.py: wrong')") == "no file named"
    assert outcome("sys.exit(1)") == "no error line"
    assert outcome("sys.exit(2)") == "status 2"
    assert outcome("1 / 0") == "traceback"
    assert outcome("os.abort()") == "signal 6"
    # Mapped, since a process of many tests may have freed as much before.
    mapped = (
        "x = __import__('mmap').mmap(-1, 300 << 20)\nfor _ in range(300): x.write(b'1' * (1 << 20))"
    )
    assert outcome(mapped) == "memory"
    assert outcome("bytearray(1 << 30)") == "traceback"
    assert outcome("Path('.a.tmp').touch()", ".a.tmp") == "left over"
    assert outcome("Path('text').write_text('half')", "text") == "half-written"
    assert outcome("Path('x.yaml').write_text('a: [')", "x.yaml") == "half-written"
    monkeypatch.setattr(soak, "SECONDS", 1)
    assert outcome("time.sleep(60)") == "no end"
