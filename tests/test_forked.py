"""A program that is a fork of the server is like one with an interpreter of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, fedtools, run, torchless
from forked import forked

TELLS = """\
import json, os, random, signal, sys, tempfile
import beside, numpy, torch
handlers = {n: str(signal.getsignal(n)) for n in range(1, 32) if n not in (9, 19)}
print("said", file=sys.stderr)
umask = os.umask(0)
told = {
    "argv": sys.argv, "path": sys.path, "folder": os.getcwd(), "umask": umask, "signals": handlers,
    "environment": dict(os.environ), "stdin": sys.stdin.read(), "file": __file__, "name": __name__,
    "streams": [(s.encoding, s.errors, s.line_buffering, s.isatty())
                for s in (sys.stdin, sys.stdout, sys.stderr)],
    "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
    "flags": repr(sys.flags), "executable": sys.executable,
    "passed": os.read(int(sys.argv[1]), 9).decode(), "modules": sys.modules["__main__"].__file__,
}
json.dump(told, sys.stdout)
"""


@pytest.fixture
def programs(tmp_path) -> Path:
    """Make a folder for scripts that are forked because of their names."""
    folder = tmp_path / "a checkout" / "local"
    folder.mkdir(parents=True)
    (folder / "beside.py").touch()
    return folder


@pytest.fixture
def environment() -> dict[str, str]:
    found = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return forked(found)


def test_it_sees_what_the_real_one_sees(programs, environment):
    (programs / "tells.py").write_text(TELLS)
    found = []
    for python in ("python3", sys.executable):
        ours, theirs = os.pipe()
        os.write(theirs, b"passed on")
        # Behind bash's &, SIGINT is ignored.
        line = f'umask 27; "{python}" local/tells.py {ours} "a b" "" ü <<<told & wait $!'
        done = subprocess.run(
            ["bash", "-c", line], env=environment, cwd=programs.parent, capture_output=True,
            pass_fds=[ours], check=True,
        )  # fmt: skip
        os.close(ours)
        os.close(theirs)
        told = json.loads(done.stdout)
        told["argv"][1] = told["environment"]["_"] = None
        found.append((told, done.stderr))
    for name, value in found[1][0].items():
        assert found[0][0][name] == value, name
    assert found[0][1] == found[1][1]
    assert found[0][0]["passed"] == "passed on" and found[0][0]["umask"] == 0o27


def fork(programs: Path, environment: dict[str, str], code: str, **more) -> subprocess.Popen:
    """Start a program of these lines."""
    script = programs / f"{len(list(programs.iterdir()))}.py"
    script.write_text(code)
    return subprocess.Popen(["python3", script], env=environment, text=True, **more)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("", 0),
        ("raise SystemExit", 0),
        ("raise SystemExit(300)", 300 & 255),
        ("raise SystemExit('said')", 1),
        ("1 / 0", 1),
        ("import os; os._exit(7)", 7),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("raise KeyboardInterrupt", -signal.SIGINT),
    ],
)
def test_its_end(programs, environment, code, status):
    process = fork(programs, environment, code, stderr=subprocess.PIPE)
    _, said = process.communicate()
    assert process.returncode == status
    assert ("Traceback" in said) == ("0" in code.split() or "Keyboard" in code), said
    assert "said" not in code or said == "said\n"


def test_its_random_numbers_are_its_own(programs, environment):
    code = "import numpy, random, tempfile, torch, uuid\n"
    code += "print(random.random(), numpy.random.rand(), uuid.uuid4(), tempfile.mktemp())\n"
    code += "print(torch.rand(1).item(), torch.initial_seed())\n"
    said = [fork(programs, environment, code, stdout=-1).communicate()[0] for _ in range(2)]
    assert all(one != other for one, other in zip(*map(str.split, said), strict=True))


def test_what_it_leaves_to_the_end_is_done(programs, environment):
    code = "import atexit, sys, threading, time\n"
    code += "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n"
    code += "atexit.register(print, 'atexit'); sys.stdout.write('main ')\n"
    assert fork(programs, environment, code, stdout=-1).communicate()[0] == "main thread\natexit\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_go_on_to_it(programs, environment, number):
    # Behind nohup, or in the background, some are ignored, which children would inherit.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        check_signals(programs, environment, number)
    finally:
        signal.signal(number, before)


def check_signals(programs, environment, number) -> None:
    code = "import signal, sys, time\n"
    code += f"signal.signal({int(number)}, lambda n, _: sys.exit(n))\nprint(flush=True)\n"
    process = fork(programs, environment, code + "time.sleep(60)", stdout=subprocess.PIPE)
    process.stdout.readline()
    process.send_signal(number)
    assert process.wait() == number
    code = "import time; print(flush=True); time.sleep(60)"
    silence = {"stderr": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    process = fork(programs, environment, code, **silence)
    process.stdout.readline()
    process.send_signal(number)
    assert process.wait() == -number


WRITES = """\
import os, subprocess, sys
if os.fork():
    subprocess.run(["sh", "-c", "while :; do echo >>again; done"])
while True:
    os.utime("own")
"""


def test_nothing_of_it_is_left_once_it_was_killed(programs, environment):
    own, again = programs / "own", programs / "again"
    for _ in range(3):
        own.touch()
        again.unlink(missing_ok=True)
        process = fork(programs, environment, WRITES, cwd=programs, start_new_session=True)
        while not again.exists():
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # Asynchronous work in the kernel completes, as with a real process.
        time.sleep(0.01)
        before = own.stat().st_mtime_ns, again.stat().st_size
        time.sleep(0.1)
        assert (own.stat().st_mtime_ns, again.stat().st_size) == before


SPAWNS = """\
import multiprocessing, os, sys

def told(pipe):
    pipe.send((__name__, os.getppid(), "torch" in sys.modules))
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    open("ended", "w").close()

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=told, args=(theirs,))
    process.start()
    print(ours.recv(), flush=True)
    if sys.argv[1:]:
        os._exit(0)
    process.terminate()
    process.join()
    print(process.exitcode)
"""


def test_what_it_spawns_is_a_fork_too_and_sees_its_end(programs, environment):
    script = programs / "spawns.py"
    script.write_text(SPAWNS)
    calls = [["python3", script], ["python3", script, "alone"]]
    found = [
        subprocess.run(words, env=environment, cwd=programs, capture_output=True, text=True)
        for words in calls
    ]
    for done in found:
        assert "('__mp_main__', " in done.stdout and ", True)" in done.stdout, done.stderr
    assert found[0].stdout.splitlines()[1] == str(-signal.SIGTERM)
    deadline = time.monotonic() + 30
    while not (programs / "ended").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_threads_are_as_its_environment_says(programs, environment):
    code = "import torch; print(torch.get_num_threads())"
    said = [
        fork(programs, environment | more, code, stdout=-1).communicate()[0].strip()
        for more in ({}, {"OMP_NUM_THREADS": "2"})
    ]
    real = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said == [real.stdout.strip(), "2"]


@pytest.mark.parametrize(("kind", "torch"), [("light", False), ("torch", True)])
def test_it_finds_packages_imported_but_none_of_our_own(programs, environment, kind, torch):
    code = "import sys\nprint('numpy' in sys.modules, 'torch' in sys.modules)\n"
    code += "print([name for name in sys.modules if name.startswith('fedtools')])\n"
    script = programs / {"light": "prepare.py", "torch": "price.py"}[kind]
    script.write_text(f"#!/usr/bin/env python3\n{code}")
    script.chmod(0o755)
    for words in ([script], ["python3", script]):
        said = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        assert said.stdout == f"True {torch}\n[]\n", said.stderr


def test_other_variables_of_an_interpreter_give_it_one_of_its_own(programs, environment):
    code = "import sys; print(sys.flags.hash_randomization, 'numpy' in sys.modules)"
    # scikit-learn, imported by a test, sets the second for all programs that follow.
    for more, said in (
        ({}, "1 True\n"),
        ({"KMP_INIT_AT_FORK": "FALSE"}, "1 True\n"),
        ({"PYTHONHASHSEED": "0"}, "0 False\n"),
    ):
        process = fork(programs, environment | more, code, stdout=subprocess.PIPE)
        assert process.communicate()[0] == said


def test_it_imports_from_its_own_folders(programs, environment):
    (programs / "own").mkdir()
    (programs / "own" / "mine.py").write_text("said = 1")
    code = "import mine, sys; print(mine.said, sys.path[1])"
    more = {"PYTHONPATH": f"{programs / 'own'}:{os.environ.get('PYTHONPATH', '')}"}
    process = fork(programs, environment | more, code, stdout=subprocess.PIPE)
    assert process.communicate()[0] == f"1 {programs / 'own'}\n"


def test_torchless_is_without_torch(tmp_path, programs):
    script = programs / "one.py"
    script.write_text("import sys\nprint('torch' in sys.modules)\nimport torch\n")
    found = run(sys.executable, script, env=torchless(tmp_path / "without"))
    assert found.out == "False\n" and found.err.endswith("ModuleNotFoundError: no torch here\n")


def test_fedtools_is_one(environment):
    for words, status in ((["--version"], 0), (["show", "nothing"], 1), (["--nothing"], 2)):
        found = [
            subprocess.run([program, *words], env=environment, capture_output=True, cwd=ROOT)
            for program in ("fedtools", Path(sys.executable).parent / "fedtools")
        ]
        ends = [(done.returncode, done.stdout, done.stderr) for done in found]
        assert ends[0] == ends[1] and ends[0][0] == status
        assert ends[0][1] or ends[0][2]
        found = [fedtools(*words), fedtools(*words, cold=True)]
        assert found[0] == found[1] and found[0].code == status


def test_nobody_reads_what_it_says(programs, environment):
    found = []
    for python in ("python3", sys.executable):
        (programs / "says.py").write_text("import sys; sys.stdout.write('x' * 9)")
        reader, writer = os.pipe()
        os.close(reader)
        words, silent = [python, programs / "says.py"], subprocess.DEVNULL
        done = subprocess.run(words, env=environment, stdout=writer, stderr=silent, check=False)
        os.close(writer)
        found.append(done.returncode)
    assert found[0] == found[1] != 0


def test_a_server_keeps_code_but_not_that_of_a_changed_module(tmp_path):
    (tmp_path / "fedtools").mkdir()
    module = tmp_path / "fedtools/one.py"
    module.write_text(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass One:\n    x: int = 1\n"
    )
    program = """
import sys
from pathlib import Path
import fork_code
fork_code.ROOT = Path.cwd()
sys.path.insert(0, "")
fork_code.keep_code(True)
assert not [name for name in sys.modules if name.startswith("fedtools")]
module = Path("fedtools/one.py")
module.write_text(module.read_text() + "y = 2\\n")
from fedtools.one import One, y
assert (One(), One(3).x, y, One() == One(1)) == (One(1), 3, 2, True)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True)
