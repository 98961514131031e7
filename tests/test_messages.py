"""Messages: written stack by stack, read with suspicion; all refusals."""

from __future__ import annotations

import hashlib
import os
import time
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

import kaldiio
import numpy as np
import pytest
import safetensors.numpy
import torch
from damaged import SEEDS, damage
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from fedtools.core.errors import UserError
from fedtools.core.tables import read_tsv
from fedtools.data.datadir import read_table
from fedtools.exchange.messages import (
    COLUMNS,
    Features,
    MessageWriter,
    Payload,
    Refusal,
    Report,
    job_complete,
    read_messages,
    remove_messages,
)
from fedtools.exchange.origin import Origin
from fedtools.exchange.sent_features import write_features
from fedtools.exchange.states import load_state

ORIGIN = Origin("fedcba9876543210" * 4, 7, "0123456789abcdef" * 4)
SPEC = {"bias": ((3,), "float32"), "scale": ((), "float64"), "weight": ((2, 3), "float32")}
CLIENTS = ["alice", "bob", "carol", "dave"]
LEFT_OUT = "the loss is nan"


def state(client: str, spec=SPEC) -> dict[str, np.ndarray]:
    random = np.random.default_rng(CLIENTS.index(client))
    return {
        name: np.asarray(random.standard_normal(shape), kind)
        for name, (shape, kind) in spec.items()
    }


def report(client: str, left_out=()) -> Report:
    reason = LEFT_OUT if client in left_out else ""
    return Report(client, 10 + CLIENTS.index(client), 5, 0.5, 1.2, reason)


def stack(clients, spec=SPEC, tensors=state) -> dict[str, np.ndarray]:
    states = [tensors(client) for client in clients]
    return {name: np.stack([one[name] for one in states]) for name in spec}


def write(folder, job, clients, left_out=(), spec=SPEC, tensors=state, origin=ORIGIN, order=None):
    """Write a job's files, with its clients sent one by one."""
    with MessageWriter(folder, job, clients, Payload(spec), origin) as writer:
        for client in order or clients:
            writer.send([report(client, left_out)], stack([client], spec, tensors))


def read(folder, jobs, sampled=None, spec=SPEC, origin=ORIGIN):
    sampled = sampled or [client for job in jobs for client in job]
    return read_messages(folder, jobs, sampled, Payload(spec), origin)


HALVES = [CLIENTS[:2], CLIENTS[2:]]


def row_of(message, name):
    shape, kind = SPEC[name]
    with open(message.path, "rb") as file:
        file.seek(message.offset(name))
        return np.frombuffer(file.read(message.layout.strides[name]), kind).reshape(shape)


def test_rows_come_back_and_the_file_is_the_librarys(tmp_path):
    write(tmp_path, 1, CLIENTS[:3])
    write(tmp_path, 2, CLIENTS[3:])
    path = tmp_path / "update.1.safetensors"
    with safe_open(path, "np") as file:
        about = file.metadata()
        assert "Row k" in about["content"] and "not the difference" in about["content"]
        assert np.array_equal(file.get_tensor("weight"), stack(CLIENTS[:3])["weight"])
    assert path.read_bytes() == safetensors.numpy.save(stack(CLIENTS[:3]), about)
    jobs = [CLIENTS[:3], CLIENTS[3:]]
    messages, refusals = read(tmp_path, jobs)
    assert not refusals and [message.client for message in messages] == CLIENTS
    for message in messages:
        assert (message.utterances, message.steps, message.loss, message.seconds) == (
            *(10 + CLIENTS.index(message.client), 5),
            *(0.5, 1.2),
        )
        assert message.bytes == 3 * 4 + 8 + 6 * 4
        for name in SPEC:
            assert np.array_equal(row_of(message, name), state(message.client)[name])
    assert read(tmp_path, jobs, CLIENTS[::-1])[0] == messages[::-1]


def files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@settings(max_examples=40, deadline=None)
@given(left_out=st.sets(st.sampled_from(CLIENTS)), order=st.permutations(CLIENTS), data=st.data())
def test_stacks_and_orders_of_sending_change_no_byte(tmp_path_factory, left_out, order, data):
    """The reference is one by one, in the order of rows."""
    one, other = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other")
    write(one, 1, CLIENTS, left_out)
    ends = sorted(data.draw(st.sets(st.integers(1, 3))) | {len(CLIENTS)})
    with MessageWriter(other, 1, CLIENTS, Payload(SPEC), ORIGIN) as writer:
        for begin, end in zip([0, *ends], ends, strict=False):
            part = order[begin:end]
            writer.send([report(client, left_out) for client in part], stack(part))
    assert files(one) == files(other)


@settings(max_examples=20, deadline=None)
@given(left_out=st.sets(st.sampled_from(CLIENTS)))
def test_who_is_left_out_has_a_row_and_sends_zeros(tmp_path_factory, left_out):
    tmp_path = tmp_path_factory.mktemp("round")
    write(tmp_path, 1, CLIENTS, left_out, tensors=lambda client: bad_if(client in left_out, client))
    assert sorted(files(tmp_path)) == ["update.1.safetensors", "update.1.tsv"]
    messages, refusals = read(tmp_path, [CLIENTS])
    assert [message.client for message in messages] == [c for c in CLIENTS if c not in left_out]
    assert refusals == [
        Refusal(client, f"left out by its job: {LEFT_OUT}")
        for client in CLIENTS
        if client in left_out
    ]
    back = load_state(tmp_path / "update.1.safetensors")
    rows = read_tsv(tmp_path / "update.1.tsv", COLUMNS)
    for index, (client, row) in enumerate(zip(CLIENTS, rows, strict=True)):
        out = client in left_out
        assert row["client"] == client and row["bytes"] == ("0" if out else "44")
        for name in SPEC:
            expected = 0 * state(client)[name] if out else state(client)[name]
            assert np.array_equal(back[name][index], expected)
    for message in messages:
        assert np.array_equal(row_of(message, "weight"), state(message.client)["weight"])
    assert job_complete(tmp_path, 1, CLIENTS, Payload(SPEC), ORIGIN)


def bad_if(bad: bool, client: str) -> dict[str, np.ndarray]:
    """Return a client's tensors, or NaN."""
    return {name: value * (np.nan if bad else 1) for name, value in state(client).items()}


@pytest.mark.parametrize(
    ("loss", "seconds", "sent"),
    [
        (1.23456789, 83.123456, ("1.235", "83")),
        (-0.00098765432, 0.0123456, ("-0.0009877", "0.012")),
        (123456.7, 123.456, ("123500", "120")),
        (0.0, 0.0, ("0", "0")),
        (1e300, 4e-7, ("1e+300", "4e-07")),
    ],
)
def test_no_more_digits_are_sent_than_are_used(tmp_path, loss, seconds, sent):
    with MessageWriter(tmp_path, 1, ["a"], Payload(), ORIGIN) as writer:
        writer.send([Report("a", 3, 1, loss, seconds)])
    header, row = (tmp_path / "update.1.tsv").read_text().splitlines()
    found = dict(zip(header.split("\t"), row.split("\t"), strict=True))
    assert (found["loss"], found["seconds"]) == sent


def test_losses_that_are_no_numbers_are_left_out_without_a_trace(tmp_path):
    with MessageWriter(tmp_path, 1, ["a"], Payload(), ORIGIN) as writer:
        writer.send([Report("a", 3, 1, float("nan"), 0.1, "diverged:\n\tloss nan " + "x" * 400)])
    (row,) = read_tsv(tmp_path / "update.1.tsv", COLUMNS)
    assert row["loss"] == "0.0" and row["status"].startswith("diverged: loss nan xxx")
    assert len(row["status"]) <= 200


def test_memory_does_not_grow_with_clients(tmp_path):
    spec = {"a": ((1 << 18,), "float32")}
    clients = [f"c{number}" for number in range(50)]
    tensors = {"a": np.ones((1, 1 << 18), "float32")}
    tracemalloc.start()
    with MessageWriter(tmp_path, 1, clients, Payload(spec), ORIGIN) as writer:
        for client in clients:
            writer.send([Report(client)], tensors)
    assert len(read(tmp_path, [clients], None, spec)[0]) == 50
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("spec", [{}, {"counts": ((2, 5), "float64"), "users": ((), "float64")}])
def test_payloads_of_no_model(tmp_path, spec):
    """Empty payloads, and counts, are read back."""
    write(tmp_path, 1, CLIENTS, ["bob"], spec=spec, tensors=lambda client: state(client, spec))
    assert (tmp_path / "update.1.safetensors").exists() == bool(spec)
    messages, refusals = read(tmp_path, [CLIENTS], spec=spec)
    assert [message.client for message in messages] == ["alice", "carol", "dave"]
    assert [refusal.client for refusal in refusals] == ["bob"]
    assert {message.bytes for message in messages} == {11 * 8 if spec else 0}
    assert job_complete(tmp_path, 1, CLIENTS, Payload(spec), ORIGIN)
    if spec:
        back = load_state(tmp_path / "update.1.safetensors")
        assert np.array_equal(back["counts"][2], state("carol", spec)["counts"])


def test_zero_utterances_and_steps_are_allowed(tmp_path):
    with MessageWriter(tmp_path, 1, ["a"], Payload(), ORIGIN) as writer:
        writer.send([Report("a")])
    (message,), refusals = read(tmp_path, [["a"]], None, {})
    assert (message.utterances, message.steps, message.loss, message.bytes) == (0, 0, 0.0, 0)
    assert not refusals


def test_a_job_without_clients(tmp_path):
    write(tmp_path, 1, CLIENTS)
    write(tmp_path, 2, [])
    assert len(read(tmp_path, [CLIENTS, []])[0]) == 4
    assert job_complete(tmp_path, 2, [], Payload(SPEC), ORIGIN)


def test_an_error_leaves_nothing(tmp_path):
    with (
        pytest.raises(KeyError),
        MessageWriter(tmp_path, 1, CLIENTS, Payload(SPEC), ORIGIN) as writer,
    ):
        writer.send([report("alice")], stack(["alice"]))
        raise KeyError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "wrong",
    [
        lambda writer: writer.send([Report("eve")], stack(["alice"])),
        lambda writer: writer.send([report("bob")], stack(["bob"])),
        lambda writer: writer.send([report("bob", ["bob"])], stack(["bob"])),
        lambda writer: writer.send([report("alice")] * 2, stack(["alice"] * 2)),
        lambda writer: writer.send([report("alice")], {"bias": np.ones((1, 3), "float32")}),
        lambda writer: writer.send([report("alice")], None),
        lambda writer: writer.send([report("alice")], {**stack(["alice"]), "more": np.ones(1)}),
        lambda writer: writer.send([report("alice")], {**stack(["alice"]), "bias": np.ones(3)}),
        lambda writer: writer.send(
            [report("alice")], {**stack(["alice"]), "bias": np.ones((1, 3))}
        ),
        lambda writer: writer.send([report("alice")], stack(["alice", "bob"])),
        lambda writer: writer.send([report("alice")], stack(["alice"]), matrices("alice", 2)),
        lambda writer: None,
    ],
)
def test_methods_that_break_their_word(tmp_path, wrong):
    with (
        pytest.raises(ValueError),
        MessageWriter(tmp_path, 1, CLIENTS[:2], Payload(SPEC), ORIGIN) as writer,
    ):
        writer.send([report("bob")], stack(["bob"]))
        wrong(writer)
    assert not list(tmp_path.iterdir())


def test_a_client_comes_once_in_a_job(tmp_path):
    with pytest.raises(ValueError, match="duplicated"):
        MessageWriter(tmp_path, 1, ["a", "b", "a"], Payload(), ORIGIN)


def test_ids_stay_in_the_folder(tmp_path):
    for clients in (["../x"], ["a/b"], [""], ["."]):
        with pytest.raises(UserError, match="not usable as an id"):
            MessageWriter(tmp_path / "round", 1, clients, Payload(SPEC), ORIGIN)
    assert list(tmp_path.rglob("*x*")) == []


def test_what_is_complete(tmp_path):
    def complete(clients=("alice", "bob"), spec=SPEC, origin=ORIGIN):
        return job_complete(tmp_path, 1, clients, Payload(spec), origin)

    assert not complete()
    write(tmp_path, 1, ["alice", "bob"])
    assert complete()
    assert not complete(["alice"]) and not complete(["bob", "alice"]) and not complete(CLIENTS)
    assert not complete(origin=ORIGIN._replace(base="f" * 64)) and not complete(
        spec={"bias": SPEC["bias"]}
    )
    whole = (tmp_path / "update.1.safetensors").read_bytes()
    (tmp_path / "update.1.safetensors").write_bytes(whole[:-1])
    assert not complete()


def test_what_a_kill_leaves_is_removed(tmp_path):
    """Its own files are removed, with the table first."""
    write(tmp_path, 1, CLIENTS[:2], origin=ORIGIN._replace(base="f" * 64))
    write(tmp_path, 2, CLIENTS[2:])
    before = files(tmp_path)
    writer = MessageWriter(tmp_path, 1, CLIENTS[:2], Payload(SPEC), ORIGIN)
    writer.send([report("bob")], stack(["bob"]))
    assert "update.1.tsv" not in files(tmp_path)
    assert [refusal.client for refusal in read(tmp_path, HALVES)[1]] == ["alice", "bob"]
    assert not job_complete(tmp_path, 1, CLIENTS[:2], Payload(SPEC), ORIGIN)
    write(tmp_path, 1, CLIENTS[:2])
    assert len(read(tmp_path, HALVES)[0]) == 4
    assert {name: before[name] for name in ("update.2.tsv", "update.2.safetensors")}.items() <= (
        files(tmp_path).items()
    )


def test_messages_are_removed_and_nothing_else(tmp_path):
    write(tmp_path, 1, CLIENTS)
    for name in ("features.alice.ark", "features.alice.scp", "clients", "global.safetensors"):
        (tmp_path / name).write_text("x")
    (tmp_path / "update.7.tsv" / "within").mkdir(parents=True)
    os.mkfifo(tmp_path / "update.8.tsv")
    for _ in range(2):
        remove_messages(tmp_path)
        left = sorted(path.name for path in tmp_path.iterdir())
        assert left == ["clients", "global.safetensors"]


def refused(folder, jobs=HALVES, payload=Payload(SPEC), limits=None) -> dict[str, str]:
    """Return refused clients -> reasons; check that all others arrived, once, and in order."""
    sampled = [client for job in jobs for client in job]
    messages, refusals = read_messages(folder, jobs, sampled, payload, ORIGIN, limits)
    reasons = {refusal.client: refusal.reason for refusal in refusals}
    assert len(reasons) == len(refusals)
    assert [m.client for m in messages] == [c for c in sampled if c not in reasons]
    assert list(reasons) == [client for client in sampled if client in reasons]
    for reason in reasons.values():
        assert reason.isprintable() and str(folder) not in reason and len(reason) < 1000
    return reasons


@pytest.fixture
def jobs(tmp_path):
    """Make two jobs of two clients each."""
    write(tmp_path, 1, CLIENTS[:2])
    write(tmp_path, 2, CLIENTS[2:])
    return tmp_path


def replace_tensors(folder, tensors):
    (folder / "update.2.safetensors").write_bytes(safetensors.numpy.save(tensors))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"extra\n\tname" * 9: np.ones((2, 1), "float32")}, "does not belong"),
        ({"bias": None}, "'bias' is missing"),
        ({"bias": np.ones((2, 4), "float32")}, "'bias' is float32 of shape [2, 4], expected"),
        ({"bias": np.ones((2, 3), "float64")}, "'bias' is float64"),
        ({"bias": np.ones((2, 3), "float16")}, "'bias' is wrong"),
    ],
)
def test_other_tensors_lose_the_job(jobs, change, said):
    stacked = {**load_state(jobs / "update.2.safetensors"), **change}
    replace_tensors(jobs, {name: t for name, t in stacked.items() if t is not None})
    reasons = refused(jobs)
    assert set(reasons) == {"carol", "dave"} and all(said in text for text in reasons.values())


def test_a_damaged_tensor_file_loses_the_job(jobs):
    path = jobs / "update.2.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"more")
    said = f"update.2.safetensors: {size + 4} bytes long, its header says {size}; the file is cut "
    reasons = refused(jobs)
    assert reasons.keys() == {"carol", "dave"}
    assert all(reason.startswith(said) for reason in reasons.values())


@pytest.mark.parametrize("column", COLUMNS)
def test_every_column_is_read(jobs, column):
    """An invalid value in any column is noticed."""
    set_field(jobs / "update.2.tsv", 2, column, "\x1b[31m?")
    reasons = refused(jobs)
    assert set(reasons) == ({"carol", "dave"} if column == "client" else {"carol"})


def set_field(path, line, column, value):
    """Change one field of a table; lines count from 1."""
    lines = path.read_text().splitlines()
    fields = lines[line - 1].split("\t")
    fields[COLUMNS.index(column)] = value
    lines[line - 1] = "\t".join(fields)
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("utterances", "-1", "'-1', not a whole number"),
        ("utterances", "99999999999", "cannot be"),
        ("steps", "9" * 18, "cannot be"),
        ("loss", "1e999", "not a finite number"),
        ("loss", "1.7e308", "a loss of 1.7e+308"),
        ("loss", "-1e+31", "a loss of -1e+31"),
        ("loss", "1_0", "not a finite number"),
        ("seconds", "-0.5", "-0.5 seconds cannot be"),
        ("seconds", "1e10", "1e+10 seconds cannot be"),
        ("bytes", "43", "43 bytes announced, 44 sent"),
        ("bytes", "45", "45 bytes announced, 44 sent"),
        ("experiment", "f" * 64, "is of another experiment"),
        ("round", "8", "is of another round"),
        ("base", "f" * 64, "another global state"),
        ("status", "", "left out by its job"),
        ("status", "a \x1b[31mred\u202e", "left out by its job: a ?[31mred?"),
        ("status", "x" * 2000, "left out by its job: xxx"),
    ],
)
def test_nonsense_in_a_row_loses_its_client(jobs, column, value, said):
    set_field(jobs / "update.2.tsv", 2, column, value)
    reasons = refused(jobs)
    assert set(reasons) == {"carol"} and said in reasons["carol"]
    assert column == "status" or reasons["carol"].startswith("update.2.tsv:2: ")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("carol", "../x"), ":2: client '../x' is not usable"),
        (lambda text: text.replace("carol", "a\tb"), ":2: 11 fields, the header has 10"),
        (lambda text: text.replace("client", "klient"), ":1: the header is"),
        (lambda text: text[:-1], ":3: the last line has no end"),
        (lambda text: "", ":1: the header is ''"),
        (lambda text: "h" * 60_000 + "\n", ":1: the header is"),
        (lambda text: text + "x" * 100_000 + "\n", ": too long for a table"),
        (lambda text: "\udcff" + text, ":1: not UTF-8"),
        (lambda text: text.replace("ok", "o\0k"), ":2: a NUL byte"),
    ],
)
def test_unreadable_tables_lose_the_job(jobs, change, said):
    path = jobs / "update.2.tsv"
    path.write_bytes(change(path.read_text()).encode("utf-8", "surrogateescape"))
    reasons = refused(jobs)
    assert set(reasons) == {"carol", "dave"}
    for reason in reasons.values():
        assert reason.startswith("sent nothing that could be read; update.2.tsv" + said)


def test_rows_and_tensors_must_agree(jobs):
    path = jobs / "update.2.tsv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]))
    reasons = refused(jobs)
    assert "expected float32 of shape [1, 3]" in reasons["carol"] and "dave" in reasons


# A name with nothing behind it, and what would block a reader, or fill its memory.
STRANGE = {
    "missing": lambda path: None,
    "fifo": os.mkfifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("suffix", ["tsv", "safetensors"])
@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_no_regular_file_loses_the_job(jobs, suffix, kind):
    """Reading it neither blocks nor fills the memory."""
    path = jobs / f"update.2.{suffix}"
    path.unlink()
    STRANGE[kind](path)
    reasons = refused(jobs)
    assert set(reasons) == {"carol", "dave"}
    assert all(f"update.2.{suffix}: " in reason for reason in reasons.values())
    assert not job_complete(jobs, 2, CLIENTS[2:], Payload(SPEC), ORIGIN)


def test_files_of_jobs_that_do_not_exist_are_ignored_with_a_warning(jobs, capsys):
    for name in ("update.-x.tsv", "update.3.tsv", "update.01.tsv", "update..tsv", "update.1.tsv~"):
        (jobs / name).write_bytes((jobs / "update.2.tsv").read_bytes())
    (jobs / "update.3.safetensors").mkdir()
    os.mkfifo(jobs / "update.4.tsv")
    assert refused(jobs) == {}
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 7
    assert all(line.endswith("no job was to write this file; ignored") for line in warnings)
    assert f"{jobs}/update.-x.tsv: no job" in warnings[0]


def add_row(table, client, like=2):
    """Add a row to a job's table, and its tensors, under any name."""
    lines = table.read_text().splitlines()
    row = lines[like - 1].split("\t")
    table.write_text("\n".join([*lines, "\t".join([client, *row[1:]])]) + "\n")
    tensors = load_state(table.with_suffix(".safetensors"))
    more = {name: np.concatenate([rows, rows[:1]]) for name, rows in tensors.items()}
    table.with_suffix(".safetensors").write_bytes(safetensors.numpy.save(more))


@pytest.mark.parametrize(
    "names", [["alice"], ["alice", "bob"], ["eve"], ["server"], ["total"], ["alice"] * 3]
)
def test_a_table_that_names_others_costs_the_job_its_own_and_nobody_else(jobs, names):
    """Clients of another job, and invented ones, are dropped completely."""
    honest, _ = read(jobs, HALVES)
    for name in names:
        add_row(jobs / "update.2.tsv", name)
    messages, refusals = read(jobs, HALVES)
    assert messages == honest[:2]
    said = f"sent nothing that could be read; update.2.tsv:4: {names[0]!r} is no client of this job"
    assert refusals == [Refusal(client, said) for client in ("carol", "dave")]


def test_who_is_of_no_job(jobs):
    messages, refusals = read(jobs, HALVES, [*CLIENTS, "eve"])
    assert len(messages) == 4 and refusals == [Refusal("eve", "is of no job")]


def test_one_table_that_names_all(tmp_path):
    """Twenty jobs have a client each, and one job's table lists all of them."""
    clients = [f"c{number:02}" for number in range(20)]
    spec = {"a": ((1,), "float32")}
    for job, client in enumerate(clients, 1):
        with MessageWriter(tmp_path, job, [client], Payload(spec), ORIGIN) as writer:
            writer.send([Report(client)], {"a": np.ones((1, 1), "float32")})
    for client in clients[:7] + clients[8:]:
        add_row(tmp_path / "update.8.tsv", client)
    assert list(refused(tmp_path, [[client] for client in clients], Payload(spec))) == ["c07"]


def test_who_has_no_row_or_came_twice(jobs):
    """A duplicated client is ambiguous and lost; the other clients of the job are kept."""
    said = "has no row in its job's table"
    assert refused(jobs, [CLIENTS[:2], [*CLIENTS[2:], "eve"]]) == {"eve": said}
    add_row(jobs / "update.2.tsv", "carol")
    assert refused(jobs) == {"carol": "came 2 times"}
    assert bytes_of(jobs) == {"carol": 88}
    # A client that is left out, or whose row is invalid, is there, too.
    set_field(jobs / "update.2.tsv", 2, "status", "ill")
    set_field(jobs / "update.2.tsv", 4, "loss", "nan")
    assert refused(jobs) == {"carol": "came 2 times"}
    assert refused(jobs, [CLIENTS[:2], CLIENTS[2:], ["fay"]])["fay"].endswith(
        "update.3.tsv: cannot be read: No such file or directory"
    )


def bytes_of(folder, jobs=HALVES, payload=Payload(SPEC)) -> dict[str, int]:
    """Return refused clients -> bytes received of them."""
    sampled = [client for job in jobs for client in job]
    refusals = read_messages(folder, jobs, sampled, payload, ORIGIN)[1]
    return {refusal.client: refusal.bytes for refusal in refusals}


def test_what_came_of_a_refused_client_is_counted(jobs):
    """3 float32, a float64 and 6 float32 are counted, if it has a row of tensors."""
    for column, value in (("base", "f" * 64), ("bytes", "0"), ("loss", "nan")):
        set_field(jobs / "update.2.tsv", 2, column, value)
        assert bytes_of(jobs) == {"carol": 44}
    set_field(jobs / "update.2.tsv", 2, "status", "ill")
    assert bytes_of(jobs, [CLIENTS[:2], [*CLIENTS[2:], "eve"]]) == {"carol": 0, "eve": 0}
    (jobs / "update.2.safetensors").write_bytes(b"")
    assert bytes_of(jobs) == {"carol": 0, "dave": 0}


def test_one_bad_client_of_a_stack_costs_its_own_message_alone(tmp_path):
    """Of 20 in one stack, one sends a loss of 1e308, and one is left out."""
    clients = [f"c{number:02}" for number in range(20)]
    reports = [Report(client, 7, 3, 0.5, 0.1) for client in clients]
    reports[4] = reports[4]._replace(loss=1e308)
    reports[11] = reports[11]._replace(reason="diverged: loss nan")
    with MessageWriter(tmp_path, 1, clients, Payload(SPEC), ORIGIN) as writer:
        writer.send(reports, {n: np.ones((20, *s), k) for n, (s, k) in SPEC.items()})
    reasons = refused(tmp_path, [clients])
    assert list(reasons) == ["c04", "c11"]


def test_torch_tensors(tmp_path):
    with MessageWriter(tmp_path / "torch", 1, CLIENTS, Payload(SPEC), ORIGIN) as writer:
        tensors = {name: torch.from_numpy(rows) for name, rows in stack(CLIENTS).items()}
        # A view that is not in C order, and a parameter.
        tensors["weight"] = torch.nn.Parameter(tensors["weight"].mT.contiguous().mT)
        writer.send([report(client) for client in CLIENTS], tensors)
    write(tmp_path / "numpy", 1, CLIENTS)
    assert files(tmp_path / "torch") == files(tmp_path / "numpy")


# --- features

WIDTH = 5
SOUND = Payload(features=Features(WIDTH, utterances=3, frames=60, longest=55, largest=100.0))
BOTH = Payload(SPEC, SOUND.features)


def matrices(client: str, *lengths: int, width: int = WIDTH) -> list[tuple[str, np.ndarray]]:
    random = np.random.default_rng(CLIENTS.index(client))
    return [
        (f"{client}-{number}", random.standard_normal((length, width)).astype("float32"))
        for number, length in enumerate(lengths)
    ]


def send_features(folder, payload=SOUND, left_out=(), **sent):
    """Send each client's features in job 1, by default two utterances."""
    clients = [client for client in CLIENTS if client in sent] or CLIENTS[:3]
    with MessageWriter(folder, 1, clients, payload, ORIGIN) as writer:
        for client in clients:
            tensors = stack([client]) if payload.tensors else None
            own = sent.get(client, matrices(client, 7, 9))
            features = None if client in left_out else iter(own)
            row = report(client, left_out)._replace(utterances=len(own))
            writer.send([row], tensors, features)
    return folder


@pytest.mark.parametrize("payload", [SOUND, BOTH])
def test_features_come_back(tmp_path, payload):
    send_features(tmp_path, payload, left_out=["bob"])
    assert not (tmp_path / "features.bob.ark").exists()
    messages, refusals = read_messages(tmp_path, [CLIENTS[:3]], CLIENTS[:3], payload, ORIGIN)
    assert [refusal.client for refusal in refusals] == ["bob"]
    for message in messages:
        expected = dict(matrices(message.client, 7, 9))
        assert list(read_table(tmp_path / f"features.{message.client}.scp")) == list(expected)
        # kaldiio is the oracle: the file is plain Kaldi.
        ark = tmp_path / f"features.{message.client}.ark"
        by_kaldi = dict(kaldiio.load_ark(str(ark)))
        for utterance, matrix in expected.items():
            assert np.array_equal(by_kaldi[utterance], matrix)
        sizes = ark.stat().st_size + ark.with_suffix(".scp").stat().st_size
        assert message.bytes == sizes + (44 if payload.tensors else 0)
        files = (ark, ark.with_suffix(".scp"))
        digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
        assert message.sums == digests
    text = (tmp_path / "features.alice.scp").read_text()
    assert str(tmp_path) not in text and "/" not in text


def test_the_seconds_of_features_are_those_in_which_they_are_computed(tmp_path):
    def slowly():
        for one in matrices("alice", 7, 9):
            time.sleep(0.2)
            yield one

    with MessageWriter(tmp_path, 1, ["alice"], SOUND, ORIGIN) as writer:
        writer.send([report("alice")._replace(utterances=2)], None, slowly())
    (message,), _ = read_messages(tmp_path, [["alice"]], ["alice"], SOUND, ORIGIN)
    # The work it reported before that is 1.2.
    assert 1.59 <= message.seconds < 60


def test_who_sends_no_features_is_refused(tmp_path):
    send_features(tmp_path, alice=[], bob=matrices("bob", 3))
    messages, refusals = read_messages(tmp_path, [CLIENTS[:2]], CLIENTS[:2], SOUND, ORIGIN)
    assert [message.client for message in messages] == ["bob"]
    assert [(one.client, one.reason) for one in refusals] == [
        ("alice", "features.alice.scp: no utterance")
    ]


def test_features_of_an_earlier_try_are_removed(tmp_path):
    send_features(tmp_path)
    send_features(tmp_path, left_out=["bob"])
    assert not list(tmp_path.glob("features.bob.*"))
    assert len(list(tmp_path.glob("features.*"))) == 4


@pytest.mark.parametrize(
    ("payload", "reports", "features"),
    [
        (SOUND, ["alice"], None),
        (SOUND, ["alice", "bob"], matrices("alice", 3)),
        (Payload(), ["alice", "bob"], matrices("alice", 3)),
    ],
)
def test_features_that_were_not_announced(tmp_path, payload, reports, features):
    with (
        pytest.raises(ValueError, match="features"),
        MessageWriter(tmp_path, 1, CLIENTS[:2], payload, ORIGIN) as writer,
    ):
        writer.send([report(client) for client in reports], None, features)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (matrices("bob", 7, 9, width=WIDTH + 1), "features.bob.scp:1: 7 frames of 6 values"),
        ([*matrices("bob", 7), ("bob-1", np.ones((9, 1)))], "frames of 1 values"),
        (matrices("bob", 40, 20, 1), "features.bob.scp:3: 1 frames of 5 values, 61 in all"),
        (matrices("bob", 2, 56), "features.bob.scp:2: 56 frames of 5 values, 58 in all"),
        (matrices("bob", *[1] * 4), "features.bob.scp: 4 utterances, over 3"),
        ([*matrices("bob", 2), ("bob-1", np.full((2, WIDTH), np.nan))], "value is NaN or inf"),
        ([*matrices("bob", 2), ("bob-1", np.full((2, WIDTH), -101.0))], ":2: 'bob-1' has values"),
        ([("../x", np.ones((2, WIDTH)))], "utterance '../x' is not named bob-0000000 or so"),
        (matrices("alice", 3), "utterance 'alice-0' is not named bob-0000000 or so"),
    ],
)
def test_features_beyond_their_bounds(tmp_path, sent, said):
    send_features(tmp_path, alice=matrices("alice", 3), bob=sent, carol=matrices("carol", 55, 5))
    reasons = refused(tmp_path, [CLIENTS[:3]], SOUND)
    assert set(reasons) == {"bob"} and said in reasons["bob"]


@pytest.mark.parametrize("payload", [SOUND, BOTH])
def test_what_came_of_a_client_with_refused_features_is_counted(tmp_path, payload):
    send_features(tmp_path, payload, left_out=["carol"])
    paths = [tmp_path / f"features.bob.{suffix}" for suffix in ("ark", "scp")]
    whole, tensors = sum(path.stat().st_size for path in paths), 44 * (payload is BOTH)
    paths[1].write_bytes(paths[1].read_bytes().replace(b"bob-0 ", b"eve-0 "))
    found = {"bob": whole + tensors, "carol": 0}
    assert bytes_of(tmp_path, [CLIENTS[:3]], payload) == found
    # A sender can make a sparse file of any size; the largest valid one has 60 frames of float32.
    os.truncate(paths[0], 10**12)
    found = bytes_of(tmp_path, [CLIENTS[:3]], payload)["bob"]
    assert 60 * WIDTH * 4 < found - tensors < 10**5
    for path in paths:
        path.unlink()
    assert bytes_of(tmp_path, [CLIENTS[:3]], payload) == {"bob": tensors, "carol": 0}


def test_more_utterances_than_bound(tmp_path):
    bound = Payload(features=Features(WIDTH, utterances=2))
    send_features(tmp_path, bound, alice=matrices("alice", 1, 1), bob=matrices("bob", 1, 1, 1))
    reasons = refused(tmp_path, [CLIENTS[:2]], bound)
    assert set(reasons) == {"bob"} and "3 utterances" in reasons["bob"]


# The position of bob's second utterance: after the first one's 7 frames, name and header.
BEHIND = 6 + 15 + 7 * WIDTH * 4 + 6


def mend_bytes(folder, client="bob"):
    """Update the announced sizes, so that only another check can refuse the file."""
    paths = [folder / f"features.{client}.{suffix}" for suffix in ("ark", "scp")]
    size = sum(path.stat().st_size for path in paths if path.exists())
    set_field(folder / "update.1.tsv", 2 + CLIENTS.index(client), "bytes", str(size))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("features.bob.ark", "features.alice.ark"), "is not in"),
        (lambda text: text.replace("features.bob.ark", "/etc/passwd"), "is not in features.bob"),
        (lambda text: text.replace("features.bob.ark:", "features.bob.ark"), "is not in"),
        (lambda text: text.replace(".ark:6", ".ark:6[0:2]"), "is not in"),
        (lambda text: text.replace(".ark:6", ".ark:٦"), "is not in"),
        (lambda text: text.replace(".ark:6", ".ark:7"), "no binary matrix at byte 7"),
        (lambda text: text.replace(".ark:6", ".ark:" + "9" * 15), "should be at byte 9999"),
        (lambda text: text.replace(".ark:6", ".ark:" + "9" * 40), "features.bob.ark"),
        (
            lambda text: text.replace(f".ark:{BEHIND}", ".ark:6"),
            "features.bob.scp:2: 'bob-1' begins within another utterance",
        ),
        (lambda text: text[: text.index("bob-1")], "features.bob.scp: 1 utterances, 2 announced"),
        (lambda text: text.replace("bob-1", "bob-0"), "features.bob.scp:2: 'bob-0' is duplicated"),
        (
            lambda text: text.replace("bob-0", "bob-9"),
            "features.bob.scp:2: 'bob-1' is not in order",
        ),
        (lambda text: text.replace("bob-0", "..-0"), "'..-0' is not named bob-0000000"),
        (lambda text: text[:-1], "the last line has no end"),
        (lambda text: text.replace("bob-0 ", "bob-0"), "has no value"),
        (lambda text: "\udcff" + text, "features.bob.scp:1: not UTF-8"),
        (lambda text: text + "x" * 100_000 + "\n", "features.bob.scp: too long for a table"),
    ],
)
def test_damaged_tables_of_features_lose_their_client(tmp_path, change, said):
    send_features(tmp_path)
    path = tmp_path / "features.bob.scp"
    assert path.read_text().startswith("bob-0 features.bob.ark:6\n")
    path.write_bytes(change(path.read_text()).encode("utf-8", "surrogateescape"))
    mend_bytes(tmp_path)
    reasons = refused(tmp_path, [CLIENTS[:3]], SOUND)
    assert set(reasons) == {"bob"} and said in reasons["bob"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda ark: ark[:-1], "damaged: 9 x 5 need 180 bytes"),
        (lambda ark: b"", "damaged"),
        (lambda ark: ark.replace(b"FM ", b"XX ", 1), "is no kind of matrix"),
        (
            lambda ark: ark.replace(b"\4\7\0\0\0", b"\4\xff\xff\xff\x7f", 1),
            "a matrix of 2147483647",
        ),
        (lambda ark: ark.replace(b"\4\7\0\0\0", b"\4\xff\xff\xff\xff", 1), "a matrix of -1"),
    ],
)
def test_damaged_arks_lose_their_client(tmp_path, change, said):
    send_features(tmp_path)
    path = tmp_path / "features.bob.ark"
    path.write_bytes(change(path.read_bytes()))
    mend_bytes(tmp_path)
    reasons = refused(tmp_path, [CLIENTS[:3]], SOUND)
    assert set(reasons) == {"bob"} and said in reasons["bob"]


def test_an_ark_of_a_terabyte_of_nothing_is_refused_unread(tmp_path):
    """The file is sparse and takes no space, and the table's entries are valid."""
    sent = {
        "alice": matrices("alice", 7),
        "bob": matrices("bob", 10),
        "carol": matrices("carol", 3),
    }
    for client in ("bob", "carol"):
        folder = tmp_path / client
        send_features(folder, **sent)
        path = folder / f"features.{client}.ark"
        size = path.stat().st_size
        os.truncate(path, 10**12)
        mend_bytes(folder, client)
        reasons = refused(folder, [CLIENTS[:3]], SOUND)
        assert set(reasons) == {client}
        assert f"{10**12 - size} bytes of no utterance, at byte {size}" in reasons[client]


@pytest.mark.parametrize("where", [0, BEHIND - 6, -1])
def test_bytes_of_no_utterance_lose_their_client(tmp_path, where):
    """Extra bytes before the first, between two, or after the last; also with matching offsets."""
    send_features(tmp_path)
    ark, scp = (tmp_path / f"features.bob.{suffix}" for suffix in ("ark", "scp"))
    whole = ark.read_bytes()
    at = len(whole) if where < 0 else where
    ark.write_bytes(whole[:at] + b"smuggled" + whole[at:])
    for offset in (BEHIND, 6):
        moved = offset + 8 if offset > at else offset
        scp.write_text(scp.read_text().replace(f".ark:{offset}\n", f".ark:{moved}\n"))
    mend_bytes(tmp_path)
    reasons = refused(tmp_path, [CLIENTS[:3]], SOUND)
    assert set(reasons) == {"bob"}
    assert f"features.bob.ark: 8 bytes of no utterance, at byte {at}" in reasons["bob"]


KIND = {32: "FM", 16: "CM2", 8: "CM3"}


@pytest.mark.parametrize("bits", KIND)
@pytest.mark.parametrize("wanted", KIND)
def test_features_have_the_bits_that_were_asked_for(tmp_path, bits, wanted):
    asked = Payload(features=Features(WIDTH, bits=wanted))
    for clients, written in ((CLIENTS[:2], wanted), (CLIENTS[2:3], bits)):
        for client in clients:
            write_features(tmp_path, client, matrices(client, 7, 9), written)
    with MessageWriter(tmp_path, 1, CLIENTS[:3], Payload(), ORIGIN) as writer:
        writer.send([report(client)._replace(utterances=2) for client in CLIENTS[:3]])
    for client in CLIENTS[:3]:
        mend_bytes(tmp_path, client)
    reasons = refused(tmp_path, [CLIENTS[:3]], asked)
    said = f"features.carol.scp:1: 'carol-0' is a matrix {KIND[bits]}, not {KIND[wanted]}"
    assert reasons == ({} if bits == wanted else {"carol": f"{said} ({wanted} bits a value)"})


@pytest.mark.parametrize("kind", [b"DM", b"CM"])
def test_features_in_kinds_that_nobody_writes(tmp_path, kind):
    """One has 64 bits a value, and one has values that are not evenly spaced."""
    bits = 8 if kind == b"CM" else 32
    asked = Payload(features=Features(WIDTH, bits=bits))
    matrix = np.ones((7, WIDTH), "float64" if kind == b"DM" else "float32")
    send_features(tmp_path, asked, alice=matrices("alice", 7), bob=[("bob-0", matrix)])
    with open(tmp_path / "features.bob.ark", "wb") as file:
        kaldiio.save_ark(file, {"bob-0": matrix}, compression_method=2 if kind == b"CM" else None)
    assert b"\0B" + kind + b" " in (tmp_path / "features.bob.ark").read_bytes()
    mend_bytes(tmp_path)
    reasons = refused(tmp_path, [CLIENTS[:2]], asked)
    assert set(reasons) == {"bob"} and f"is a matrix {kind.decode()}, not" in reasons["bob"]


@pytest.mark.parametrize("suffix", ["ark", "scp"])
@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("utterances", [0, 2])
def test_features_that_are_no_regular_files(tmp_path, suffix, kind, utterances):
    send_features(
        tmp_path,
        alice=matrices("alice", 7),
        bob=matrices("bob", 7, 9)[:utterances],
        carol=matrices("carol", 7),
    )
    path = tmp_path / f"features.bob.{suffix}"
    path.unlink()
    STRANGE[kind](path)
    set_field(tmp_path / "update.1.tsv", 3, "bytes", "0")
    reasons = refused(tmp_path, [CLIENTS[:3]], SOUND)
    assert set(reasons) == {"bob"} and f"features.bob.{suffix}: " in reasons["bob"]


def test_bytes_of_features_are_the_sizes_of_both_files(tmp_path):
    send_features(tmp_path)
    sizes = [(tmp_path / f"features.bob.{suffix}").stat().st_size for suffix in ("ark", "scp")]
    for announced in (sizes[0], sizes[1], sum(sizes) - 1, sum(sizes) + 1):
        set_field(tmp_path / "update.1.tsv", 3, "bytes", str(announced))
        reasons = refused(tmp_path, [CLIENTS[:3]], SOUND)
        assert reasons == {"bob": f"update.1.tsv:3: {announced} bytes announced, {sum(sizes)} sent"}
    mend_bytes(tmp_path)
    with open(tmp_path / "features.bob.ark", "ab") as file:
        file.write(b"more")
    assert set(refused(tmp_path, [CLIENTS[:3]], SOUND)) == {"bob"}


def numbers_of(message) -> tuple:
    """Return what a row tells of its client, and the sums of its features."""
    return (message.client, message.utterances, message.steps, message.loss, message.bytes,
            message.status, message.sums)  # fmt: skip


# A file, and the clients that its damage may lose.
SENT = {
    "update.2.tsv": {"carol", "dave"},
    "update.2.safetensors": {"carol", "dave"},
    "features.carol.ark": {"carol"},
    "features.carol.scp": {"carol"},
}


@settings(max_examples=200)
@given(name=st.sampled_from(sorted(SENT)), seed=SEEDS)
def test_damage_loses_its_clients_or_is_read_as_it_stands(name, seed):
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for job, clients in enumerate(HALVES, 1):
            with MessageWriter(folder, job, clients, BOTH, ORIGIN) as writer:
                for client in clients:
                    row = report(client)._replace(utterances=2)
                    writer.send([row], stack([client]), iter(matrices(client, 7, 9)))
        whole = {one.client: one for one in read_messages(folder, HALVES, CLIENTS, BOTH, ORIGIN)[0]}
        assert whole.keys() == set(CLIENTS)
        damage(folder / name, seed, *(folder / other for other in SENT))
        assert set(refused(folder, HALVES, BOTH)) <= SENT[name]
        for message in read_messages(folder, HALVES, CLIENTS, BOTH, ORIGIN)[0]:
            if name != "update.2.tsv" or message.client not in SENT[name]:
                assert numbers_of(message)[:6] == numbers_of(whole[message.client])[:6]
            else:
                # Not splitlines(), which ends lines at other characters, too.
                text = (folder / name).read_bytes().decode()
                lines = (line.split("\t") for line in text.removesuffix("\n").split("\n"))
                for row in (dict(zip(COLUMNS, line, strict=True)) for line in lines):
                    if row["client"] == message.client:
                        told = int(row["utterances"]), int(row["steps"]), float(row["loss"])
                        assert told == (message.utterances, message.steps, message.loss)
            if message.client not in SENT[name]:
                assert numbers_of(message) == numbers_of(whole[message.client])
            # What was accepted can be read: tensors of the right size, and Kaldi's matrices.
            for tensor, (shape, _) in SPEC.items():
                assert row_of(message, tensor).shape == shape
            table = (folder / f"features.{message.client}.scp").read_text().splitlines()
            shapes = [kaldiio.load_mat(f"{folder}/{line.split()[1]}").shape for line in table]
            assert sum(length for length, _ in shapes) == message.frames
            assert {width for _, width in shapes} == {WIDTH} and len(shapes) == message.utterances
