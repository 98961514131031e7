"""An experiment's folder withstands other commands, edits and damage; rounds can be taken back."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import counts
import keyword_world
import numpy as np
import pytest
import simulated
from conftest import inside, ledger, start
from safetensors.numpy import load_file, save_file

from fedtools.core.errors import UserError
from fedtools.core.untrusted import received_lines
from fedtools.exchange.experiment import Experiment
from fedtools.exchange.ledger import read_ledger
from fedtools.federation.evaluations import read_evaluation
from fedtools.tasks import facts_of
from fedtools.tasks.facts import data_of

CLIENTS = ["au", "en"]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return counts.make_world(tmp_path_factory.mktemp("counts"))


@pytest.fixture(scope="module")
def reference(world) -> Path:
    path = counts.begin(world, world / "reference")
    counts.fedtools(world, "rounds", path).ok()
    counts.fedtools(world, "evaluate", path, "--split", "train").ok()
    return path


@pytest.fixture
def copied(reference, tmp_path) -> Path:
    """Copy all four rounds, to be damaged."""
    return shutil.copytree(reference, tmp_path / "exp")


def test_nobody_disturbs_who_runs_the_rounds(world, reference, tmp_path):
    path = counts.begin(world, tmp_path / "exp")
    env = {**counts.environment(world), "SLOW": "2"}
    command = [sys.executable, "-m", "fedtools", "rounds", str(path), "--nj", "2"]
    running = start(*command, env=env, stderr=subprocess.DEVNULL)
    while not (path / "round_0001" / "jobs").exists():
        time.sleep(0.01)
    for other in (
        ("sample", path, "--nj", "3"),
        ("train-local", path),
        ("aggregate", path),
        ("reset", path, "--round", "1"),
        ("rounds", path),
    ):
        counts.fedtools(world, *other).fails(1, "another process is writing", "(rounds)")
    assert running.poll() is None, "the others must have met a running one"
    assert running.wait() == 0
    assert counts.states(path) == counts.states(reference)
    assert all(row["status"] == "ok" for row in ledger(path))


@pytest.mark.parametrize("victim", ["worker", "parent"])
def test_a_process_that_is_killed_leaves_one_line_at_most(world, reference, tmp_path, victim):
    path = counts.begin(world, tmp_path / "exp")
    env = {**counts.environment(world), "SLOW": "1"}
    command = [sys.executable, "-m", "fedtools", "rounds", str(path), "--nj", "2"]
    running = start(*command, env=env, stderr=subprocess.PIPE, cold=True)
    while not list(path.glob("round_0001/.update*.tmp")):
        time.sleep(0.01)
    found = list(workers(running.pid))
    os.kill(found[-1] if victim == "worker" else running.pid, signal.SIGKILL)
    # Until all holders of the pipe end: workers, and Python's tracker of semaphores.
    error = running.communicate(timeout=60)[1]
    assert len(found) == 2 and not any(map(alive, found))
    if victim == "worker":
        assert running.returncode == 1 and error.count("\n") == 1, error
        assert "a training process died in round 1" in error
    else:
        assert error == ""
    counts.fedtools(world, "rounds", path, "--nj", "2").ok()
    assert counts.states(path) == counts.states(reference)
    assert not list(path.rglob("*.tmp"))


def workers(parent: int) -> Iterator[int]:
    """Yield a process's training workers."""
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and b"spawn_main" in (place / "cmdline").read_bytes():
                yield int(place.name)


def alive(process: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_one_job_at_a_time_but_jobs_side_by_side(world, tmp_path):
    path = counts.begin(world, tmp_path / "exp")
    counts.fedtools(world, "sample", path, "--nj", "2").ok()
    env = {**counts.environment(world), "SLOW": "2"}
    command = [sys.executable, "-m", "fedtools", "train-local", str(path), "--job", "1"]
    running = start(*command, env=env)
    while not (path / ".locks" / "round-1-job-1").exists():
        time.sleep(0.01)
    counts.fedtools(world, "train-local", path, "--job", "1").fails(1, "(round-1-job-1)")
    counts.fedtools(world, "aggregate", path).fails(1, "(rounds)")
    counts.fedtools(world, "train-local", path, "--job", "2").ok()
    assert running.wait() == 0
    counts.fedtools(world, "aggregate", path).ok()


def test_a_round_that_is_cut_stays_so(world, reference, tmp_path):
    path = counts.begin(world, tmp_path / "exp")
    counts.fedtools(world, "sample", path, "--nj", "3").ok()
    counts.fedtools(world, "train-local", path, "--job", "2").ok()
    table = path / "round_0001" / "update.2.tsv"
    before = table.read_bytes(), table.stat().st_mtime_ns
    said = counts.fedtools(world, "sample", path, "--nj", "1").ok().err
    assert "round 1 is already cut into 3 jobs" in said
    assert (table.read_bytes(), table.stat().st_mtime_ns) == before
    counts.fedtools(world, "rounds", path).ok()
    assert counts.states(path) == counts.states(reference)


def test_who_was_sampled_is_computed_again(world, tmp_path):
    path = counts.begin(world, tmp_path / "exp")
    counts.fedtools(world, "rounds", path, "--to", "1").ok()
    counts.fedtools(world, "sample", path).ok()
    listed = path / "round_0002" / "clients"
    first, *others = listed.read_text().splitlines()
    listed.write_text(f"{first}\nnobody\n")
    counts.fedtools(world, "train-local", path).fails(1, f"{listed}:2: 'nobody' is no client")
    listed.write_text("".join(f"{name}\n" for name in others))
    counts.fedtools(world, "train-local", path).ok()
    counts.fedtools(world, "aggregate", path).fails(1, "not the clients drawn for this seed")
    assert not (path / "round_0002" / ".done").exists()
    counts.fedtools(world, "reset", path, "--round", "2").ok()
    counts.fedtools(world, "rounds", path, "--to", "2").ok()
    assert first in listed.read_text().split()


def test_messages_of_another_experiment_do_not_count(world, tmp_path):
    """Neither do those of another round, though both started from the same state."""
    one, other = (
        counts.begin(world, tmp_path / name, "--set", f"clients_per_round={number}")
        for name, number in (("one", 5), ("other", 6))
    )
    for path in (one, other):
        counts.fedtools(world, "sample", path).ok()
    counts.fedtools(world, "train-local", other).ok()
    same = (path / "round_0001" / "global.safetensors" for path in (one, other))
    assert len({path.read_bytes() for path in same}) == 1
    for file in (other / "round_0001").glob("update.*"):
        shutil.copy(file, one / "round_0001")
    counts.fedtools(world, "aggregate", one).fails(1, "is of another experiment")
    counts.fedtools(world, "train-local", one).ok()
    table = one / "round_0001" / "update.1.tsv"
    text = table.read_text()
    table.write_text(re.sub("\t1\t([0-9a-f]{64}\t)", r"\t2\t\1", text))
    assert table.read_text() != text
    counts.fedtools(world, "aggregate", one).fails(1, "is of another round")


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    "name",
    [
        "config.yaml",
        "clients.txt",
        "data.yaml",
        "init.safetensors",
        "round_0005/global.safetensors",
    ],
)
def test_what_is_frozen_is_compared(world, copied, name):
    for change in (flip, Path.unlink):
        saved = (copied / name).read_bytes()
        change(copied / name)
        for command in (("rounds", copied, "--to", "5"), ("sample", copied)):
            said = counts.fedtools(world, *command).fails(1, copied.name).err
            assert Path(name).name in said or "no experiment here" in said, said
        (copied / name).write_bytes(saved)
    counts.fedtools(world, "rounds", copied, "--to", "5").ok()


def test_a_list_of_sums_that_lacks_the_first_model_is_named(world, copied):
    sums = copied / "sha256sums"
    sums.write_text(sums.read_text().replace("round_0001/", "rounD_0001/"))
    (copied / "round_0001" / ".done").unlink()
    for command in (("sample", "--nj", "1"), ("rounds",), ("aggregate",)):
        said = counts.fedtools(world, command[0], copied, *command[1:])
        said.fails(1, "round_0001/global.safetensors: changed since the server wrote it")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\n#", 1),
        lambda text: text + text.splitlines()[1] + "\n",
        lambda text: text.replace("\t0\t", "\t1e400\t", 1),
        lambda text: text[: len(text) // 2],
        None,
    ],
)
def test_a_ledger_that_was_changed_is_named(world, copied, change):
    path = copied / "round_0002" / "ledger.tsv"
    before = path.read_text()
    if change is None:
        path.unlink()
    else:
        path.write_text(change(before))
    counts.fedtools(world, "show", copied).fails(1, "round_0002/ledger.tsv", "reset --round 2")
    # The next rounds do not change it.
    counts.fedtools(world, "rounds", copied, "--to", "5").ok()
    assert not path.exists() if change is None else path.read_text() == change(before)
    path.write_text(before)
    assert "total" in counts.fedtools(world, "show", copied).ok().out


NEW_ROUND = "round_0005"
UPDATE = f"{NEW_ROUND}/update.1.tsv"
READERS = {
    "sha256sums": Experiment,
    "config.yaml": Experiment,
    "clients.txt": lambda path: Experiment(path).clients,
    "round_0002/.done": lambda path: Experiment(path).round(3).start_sum(),
    "round_0002/ledger.tsv": lambda path: list(read_ledger(Experiment(path))),
    f"{NEW_ROUND}/global.safetensors": lambda path: Experiment(path).round(5).start_sum(),
    f"{NEW_ROUND}/clients": lambda path: Experiment(path).round(5).sampled(),
    f"{NEW_ROUND}/jobs": lambda path: Experiment(path).round(5).jobs(),
    UPDATE: lambda path: received_lines(path / UPDATE, 9),
    "evaluate_train.tsv": lambda path: read_evaluation(
        path / "evaluate_train.tsv", facts_of("kws", "")
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_or_a_device_in_place_of_a_file_is_refused(copied, name):
    """Reading a FIFO would block, and reading /dev/zero would never end."""
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (copied / name).unlink(missing_ok=True)
        make(copied / name)
        with at_most(20), pytest.raises(UserError, match=re.escape(str(copied))):
            READERS[name](copied)


def test_a_pipe_in_place_of_a_lock_is_named(world, copied):
    (copied / ".locks/rounds").unlink()
    os.mkfifo(copied / ".locks/rounds")
    with at_most(20):
        counts.fedtools(world, "sample", copied).fails(1, f"{copied}/.locks/rounds: ")


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Interrupt what does not end in time."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def test_a_round_is_taken_back_and_done_again(world, reference, copied):
    whole = {
        path.relative_to(copied): path.read_bytes()
        for path in copied.rglob("*")
        if path.is_file() and path.name not in (".done", "software.yaml", "commands.sh")
        and not path.name.endswith(".tsv") and ".tfevents." not in path.name
    }  # fmt: skip
    for wrong in ("6", "9"):
        counts.fedtools(world, "reset", copied, "--round", wrong).fails(1, "4 rounds are complete")
    counts.fedtools(world, "reset", copied, "--round", "2").ok()
    assert Experiment(copied).last_round() == 1
    assert not (copied / "round_0003").exists()
    measured = (copied / "evaluate_train.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in measured[1:]] == ["0", "1"]
    counts.fedtools(world, "rounds", copied).ok()
    counts.fedtools(world, "evaluate", copied, "--split", "train").ok()
    for name, content in whole.items():
        assert (copied / name).read_bytes() == content, name
    tables = [(one / "evaluate_train.tsv").read_text() for one in (copied, reference)]
    assert tables[0] == tables[1]


@pytest.mark.parametrize(("method", "nearest"), [("fedkws_ui", 4), ("fedopt", 3)])
def test_no_round_is_done_again_without_what_was_kept_before_it(tmp_path, method, nearest):
    """Clients keep a private model of their last round, the server its optimiser of two."""
    path = keyword_world.begin(keyword_world.make_world(tmp_path), tmp_path / "exp", method)

    inside("rounds", path, "--to", "3").ok()
    whole = kept(path)
    for number in range(2, nearest):
        inside("reset", path, "--round", number).fails(1, "the state kept before round")
        assert kept(path) == whole and Experiment(path).last_round() == 3
    for number in (nearest, 1):
        inside("reset", path, "--round", number).ok()
        inside("rounds", path, "--to", "3").ok()
        assert kept(path) == whole


def test_what_a_killed_run_had_no_time_to_remove_goes(tmp_path, monkeypatch):
    """An earlier round's private model stays until the round is complete, and is then removed."""
    from fedtools.federation.federation import Federation

    path = keyword_world.begin(keyword_world.make_world(tmp_path), tmp_path / "exp")
    inside("rounds", path, "--to", "2").ok()
    other = shutil.copytree(path, tmp_path / "other")
    inside("rounds", path, "--to", "3").ok()
    with monkeypatch.context() as patch:
        patch.setattr(Federation, "closed", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        inside("aggregate", other).fails(1, "fedtools sample")
        inside("sample", other).ok()
        inside("train-local", other).ok()
        inside("aggregate", other).fails(130, "interrupted")
    assert Experiment(other).last_round() == 3 and kept(other).keys() > kept(path).keys()
    inside("aggregate", other, "--round", "3").ok()
    assert kept(other) == kept(path)


def kept(path: Path) -> dict[str, bytes]:
    """Return the states that the server sends, and that it and clients keep."""
    patterns = ("round_*/global*", "clients/*/*/*", "server/*/*")
    files = [file for pattern in patterns for file in path.glob(pattern)]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@pytest.mark.parametrize(("method", "number"), [("fedkws_ui", 1), ("fedopt", 3)])
def test_a_reset_that_is_broken_off_is_finished_first(tmp_path, monkeypatch, method, number):
    """No training starts from the remains of a partial reset."""
    start = keyword_world.begin(keyword_world.make_world(tmp_path), tmp_path / "exp", method)
    inside("rounds", start, "--to", "3").ok()
    whole, real = kept(start), os.unlink
    for left in (8, 18, 33):
        path, count = shutil.copytree(start, tmp_path / f"exp{left}"), itertools.count()

        def unlink(*arguments, left=left, count=count, **named):
            if next(count) == left:
                raise KeyboardInterrupt
            real(*arguments, **named)

        monkeypatch.setattr(os, "unlink", unlink)
        done = inside("reset", path, "--round", number)
        monkeypatch.setattr(os, "unlink", real)
        if done.code:
            assert done.code == 130
            again = f"a reset was interrupted; run fedtools reset --round {number} again"
            inside("rounds", path, "--to", "4").fails(1, again)
            if number < 3:
                inside("reset", path, "--round", number + 1).fails(1)
            inside("reset", path, "--round", number).ok()
        inside("rounds", path, "--to", "3").ok()
        assert kept(path) == whole, left


def test_a_reset_leaves_what_others_put_beside_events(world, copied):
    events = copied / "tensorboard" / "train"
    events.mkdir(parents=True, exist_ok=True)
    other = events / "events.out.tfevents.1700000000.host.12.0"
    own = events / "events.out.tfevents.00000002"
    (copied / "clients").mkdir(exist_ok=True)
    (copied / "clients" / ".DS_Store").touch()
    for path in (other, own):
        path.touch()
    counts.fedtools(world, "reset", copied, "--round", "2").ok()
    assert other.exists() and not own.exists() and not (copied / "resetting").exists()
    assert Experiment(copied).last_round() == 1


def test_a_folder_where_a_job_writes_does_not_stop_it(world, reference, tmp_path):
    """Directories at a job's output paths do not stop it."""
    path = counts.begin(world, tmp_path / "exp")
    for name in ("update.1.tsv", "update.1.safetensors"):
        (path / "round_0001" / name / "within").mkdir(parents=True)
    counts.fedtools(world, "rounds", path).ok()
    assert counts.states(path) == counts.states(reference)


def test_what_clients_keep_is_for_their_owner_alone(tmp_path):
    path = keyword_world.begin(keyword_world.make_world(tmp_path), tmp_path / "exp", "fedkws_ui")
    inside("rounds", path, "--to", "1").ok()
    folders = list((path / "clients").iterdir())
    assert folders and {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}
    kept = list((path / "clients").glob("*/round_*/*"))
    assert kept and {one.stat().st_mode & 0o777 for one in kept} == {0o600}
    # As another program may leave them.
    for folder in folders:
        folder.chmod(0o755)
    inside("rounds", path, "--to", "2").ok()
    sampled = (path / "round_0002" / "clients").read_text().split()
    assert {(path / "clients" / name).stat().st_mode & 0o777 for name in sampled} == {0o700}


@pytest.mark.parametrize("beneath", [True, False], ids=["new", "made before"])
def test_what_clients_send_is_for_their_owner_alone(tmp_path, beneath):
    """Not for other users, even if the experiment's folder is opened to them later."""
    tmp_path.chmod(0o755)
    (tmp_path / "usual").touch()
    usual = (tmp_path / "usual").stat().st_mode & 0o777
    assert usual & 0o044, "the umask of these tests hides what they test"
    if not beneath:
        (tmp_path / "exp").mkdir()
    world = keyword_world.make_world(tmp_path)
    path = keyword_world.begin(world, tmp_path / "exp", "fedavg", "keep_updates=true")
    inside("rounds", path, "--to", "1", "--evaluate", "test").ok()
    assert path.stat().st_mode & 0o777 == 0o700
    written = [one for one in path.rglob("*") if one.is_file() and ".locks" not in one.parts]
    assert {one.name for one in written} >= {"update.1.safetensors", "update.1.tsv", "ledger.tsv"}
    assert {one.stat().st_mode & 0o077 for one in written} == {0}
    # Elsewhere the user's umask decides.
    packed = [one for one in world.rglob("sha256sums") if path not in one.parents]
    assert packed and {one.stat().st_mode & 0o777 for one in packed} == {usual}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_job_that_another_user_has_answered_is_not_complete(tmp_path):
    world = keyword_world.make_world(tmp_path)
    path = keyword_world.begin(world, tmp_path / "exp", "fedavg", "keep_updates=true")
    inside("sample", path).ok()
    inside("train-local", path).ok()
    table = path / "round_0001/update.1.tsv"
    honest = table.read_bytes()
    table.write_bytes(honest.replace(b"\tok", b"\tno"))
    inside("train-local", path).ok()
    assert table.read_bytes() != honest
    os.chown(table, 65534, 65534)
    inside("train-local", path).ok()
    assert b"\tok" in table.read_bytes() and table.stat().st_uid == 0


def test_more_rounds_than_anybody_runs_are_refused(world, tmp_path):
    for rounds in (10**9, -1, True):
        (tmp_path / "c.yaml").write_text(f"task: counts\nrounds: {rounds}\n")
        counts.fedtools(
            world, "init", tmp_path / "exp", "--config", tmp_path / "c.yaml",
            "--method", "counting", "--data", f"train={world / 'data'}",
        ).fails(1, "c.yaml:2", "input should be")  # fmt: skip
    assert not (tmp_path / "exp").exists()


def test_a_start_that_was_changed_is_refused(tmp_path):
    path = keyword_world.begin(keyword_world.make_world(tmp_path), tmp_path / "exp")
    state = load_file(path / "init.safetensors")
    save_file({name: value + 1 for name, value in state.items()}, path / "init.safetensors")
    inside("rounds", path, "--to", "1").fails(
        1, "init.safetensors: changed since the experiment began"
    )


@pytest.fixture(scope="module")
def speech(tmp_path_factory) -> Path:
    """Make speech data and an experiment on them."""
    root = tmp_path_factory.mktemp("speech")
    simulated.data_dir(root / "train", CLIENTS, 6)
    simulated.config_file(root / "config.yaml")
    inside("train-tokens", root / "train" / "text", root / "tokens", "--token-type", "char").ok()
    inside(*init(root, root / "exp", "fedavg", root / "train")).ok()
    return root


def init(root: Path, path: Path, method: str, train: Path) -> list[object]:
    config = ("--config", root / "config.yaml", "--method", method)
    return [
        "init",
        path,
        *config,
        "--data",
        f"train={train}",
        "--asset",
        f"tokens={root / 'tokens'}",
    ]


def rotate(path: Path) -> None:
    """Rotate the values: every key gets the next key's value."""
    pairs = [line.split(" ", 1) for line in path.read_text().splitlines()]
    values = [value for _, value in pairs]
    lines = [
        f"{key} {value}\n" for (key, _), value in zip(pairs, values[1:] + values[:1], strict=True)
    ]
    path.write_text("".join(lines))


def again(path: Path) -> None:
    """Write the same features with slightly other numbers, as another extraction would."""
    from fedtools.data.ark import FeatureReader, write_ark
    from fedtools.data.datadir import DataDir

    data = DataDir.read(path.parent)
    reader = FeatureReader(data.feats_scp)
    write_ark(path, [(name, reader.read(name) * np.float32(1.01)) for name in data.utterances])


def test_a_damaged_list_of_data_is_no_traceback(speech):
    experiment, listed = Experiment(speech / "exp"), speech / "exp" / "data.yaml"
    before = listed.read_text()
    for nonsense in ("train: [1]\n", "train: x\n", "valid: {}\n"):
        listed.write_text(nonsense)
        with pytest.raises(UserError, match=r"not the .* began with"):
            data_of(experiment, "train")
    listed.write_text(before)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("feats.scp", rotate, "feats.scp"),
        ("feats.ark", again, "feats.scp"),
        ("utt2client", rotate, "utt2client"),
        ("text", rotate, "text"),
    ],
)
def test_other_data_of_the_same_name_are_noticed(speech, cli, name, change, said):
    train, experiment = speech / "train", Experiment(speech / "exp")
    assert data_of(experiment, "train") == train
    shutil.copytree(train, speech / "kept")
    try:
        change(train / name)
        with pytest.raises(UserError, match=f"not the {said} that .* began with"):
            data_of(experiment, "train")
        cli("sample", speech / "exp").ok()
        cli("train-local", speech / "exp").fails(1, f"not the {said} that")
    finally:
        shutil.rmtree(train)
        shutil.move(speech / "kept", train)


def test_a_moved_archive_is_the_same_data(speech, tmp_path):
    """The location of archives does not matter, nor does a path in feats.scp."""
    from fedtools.tasks.identity import of_utterances

    moved = shutil.copytree(speech / "train", tmp_path / "moved")
    text = (moved / "feats.scp").read_text().replace(str(speech / "train"), str(moved))
    (moved / "feats.scp").write_text(text)
    assert of_utterances(moved, True) == of_utterances(speech / "train", True)


def test_no_model_begins_with_what_is_not_finite(speech, cli, tmp_path):
    state = load_file(speech / "exp" / "init.safetensors")
    state["ctc.ctc_lo.bias"][0] = np.nan
    save_file(state, tmp_path / "start.safetensors")
    command = init(speech, tmp_path / "exp", "fedavg", speech / "train")
    cli(*command, "--start", tmp_path / "start.safetensors").fails(
        1, "start.safetensors", "NaN or Inf in tensor 'ctc.ctc_lo.bias'"
    )
    assert not (tmp_path / "exp").exists()


def test_pseudo_labels_need_no_transcripts(speech, cli, tmp_path):
    """The model does not depend on the transcripts."""
    options = ("--set", "training.labels=continuous")
    found = []
    for name, text in (("none", None), ("wrong", "zzz")):
        train = shutil.copytree(speech / "train", tmp_path / name)
        (train / "text").unlink()
        if text:
            names = [line.split()[0] for line in (train / "utt2spk").read_text().splitlines()]
            (train / "text").write_text("".join(f"{utt} {text}\n" for utt in names))
        path = tmp_path / f"exp-{name}"
        cli(*init(speech, path, "fedavg", train), *options).ok()
        cli("rounds", path, "--to", "1").ok()
        found.append((path / "round_0002" / "global.safetensors").read_bytes())
    assert found[0] == found[1]
    assert found[0] != (tmp_path / "exp-none" / "round_0001" / "global.safetensors").read_bytes()
    train = tmp_path / "none"
    command = init(speech, tmp_path / "exp", "fedavg", train)
    cli(*command).fails(1, "none/text: missing", "transcripts")
