"""Updates and means of stacks: written row by row, read with suspicion; every refusal there is."""

from __future__ import annotations

import os
import tracemalloc

import numpy as np
import pytest
import safetensors.numpy
import torch
from fedtools.files.means import COLUMNS as MEMBERS
from fedtools.files.means import MeanWriter, read_means
from fedtools.files.updates import COLUMNS, UpdateWriter, job_complete, read_updates
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from fedtools.files.errors import UserError
from fedtools.files.states import load_state
from fedtools.files.tables import read_tsv

BASE = "0123456789abcdef" * 4
SPEC = {"bias": ((3,), "float32"), "scale": ((), "float64"), "weight": ((2, 3), "float32")}
CLIENTS = ["alice", "bob", "carol", "dave"]


def state(client: str) -> dict[str, np.ndarray]:
    random = np.random.default_rng(CLIENTS.index(client))
    return {
        name: random.standard_normal(shape).astype(kind) for name, (shape, kind) in SPEC.items()
    }


def write(folder, job, clients, left_out=(), spec=SPEC, tensors=state, base=BASE, order=None):
    with UpdateWriter(folder, job, clients, spec, base) as writer:
        for client in order or clients:
            if client in left_out:
                writer.leave_out(client, "the loss is nan")
            else:
                writer.add(client, tensors(client), 10 + CLIENTS.index(client), 5, 0.5)


def row_of(update, name):
    shape, kind = SPEC[name]
    with open(update.path, "rb") as file:
        file.seek(update.offset(name))
        return np.frombuffer(file.read(update.layout.strides[name]), kind).reshape(shape)


def test_rows_come_back_and_the_file_is_the_librarys(tmp_path):
    write(tmp_path, 1, CLIENTS[:3])
    write(tmp_path, 2, CLIENTS[3:])
    stacked = {
        name: np.stack([np.asarray(state(client)[name]) for client in CLIENTS[:3]]) for name in SPEC
    }
    path = tmp_path / "update.1.safetensors"
    assert path.read_bytes() == safetensors.numpy.save(stacked)
    with safe_open(path, "np") as file:
        assert np.array_equal(file.get_tensor("weight"), stacked["weight"])
    updates, refusals = read_updates(tmp_path, CLIENTS, SPEC, BASE)
    assert not refusals and [update.client for update in updates] == CLIENTS
    for update in updates:
        assert (update.utterances, update.steps, update.loss, update.bytes) == (
            10 + CLIENTS.index(update.client),
            5,
            0.5,
            3 * 4 + 8 + 6 * 4,
        )
        for name in SPEC:
            assert np.array_equal(row_of(update, name), state(update.client)[name])
    assert read_updates(tmp_path, CLIENTS[::-1], SPEC, BASE)[0] == updates[::-1]


@settings(max_examples=20, deadline=None)
@given(left_out=st.sets(st.sampled_from(CLIENTS)), order=st.permutations(CLIENTS))
def test_who_is_left_out_was_never_there(tmp_path_factory, left_out, order):
    tmp_path = tmp_path_factory.mktemp("round")
    rest = [client for client in CLIENTS if client not in left_out]
    write(tmp_path, 1, CLIENTS, left_out, order=order)
    names = ("update.1.safetensors", "update.1.tsv")
    got = [(tmp_path / name).read_bytes() for name in names]
    updates, refusals = read_updates(tmp_path, CLIENTS, SPEC, BASE)
    assert [update.client for update in updates] == rest
    assert {refusal.client for refusal in refusals} == left_out
    assert all("the loss is nan" in refusal.reason for refusal in refusals)
    assert len(load_state(tmp_path / names[0])["bias"]) == len(rest)
    assert job_complete(tmp_path, 1, CLIENTS, SPEC, BASE)
    write(tmp_path, 1, rest)
    assert [(tmp_path / name).read_bytes() for name in names] == got
    assert sorted(path.name for path in tmp_path.iterdir()) == list(names)


def test_large_rows_move_too(tmp_path):
    spec = {"a": ((1 << 21,), "float32"), "b": ((3 << 20,), "float32")}

    def tensors(client):
        random = np.random.default_rng(CLIENTS.index(client))
        return {name: random.random(shape, "float32") for name, (shape, _) in spec.items()}

    write(tmp_path, 1, CLIENTS, {"alice", "carol"}, spec, tensors)
    back = load_state(tmp_path / "update.1.safetensors")
    for name in spec:
        expected = np.stack([tensors(client)[name] for client in ("bob", "dave")])
        assert np.array_equal(back[name], expected)


def test_memory_does_not_grow_with_clients(tmp_path):
    spec = {"a": ((1 << 18,), "float32")}
    clients = [f"c{number}" for number in range(50)]
    tensors = {"a": np.ones(1 << 18, "float32")}
    tracemalloc.start()
    with UpdateWriter(tmp_path, 1, clients, spec, BASE) as writer:
        for client in clients:
            writer.add(client, tensors, 1, 1, 0.0)
    read_updates(tmp_path, clients, spec, BASE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_method_that_shares_nothing(tmp_path):
    write(tmp_path, 1, CLIENTS, spec={}, tensors=lambda client: {})
    updates, refusals = read_updates(tmp_path, CLIENTS, {}, BASE)
    assert len(updates) == 4 and not refusals and updates[0].bytes == 0


def test_a_job_without_clients(tmp_path):
    write(tmp_path, 1, CLIENTS)
    write(tmp_path, 2, [])
    assert len(read_updates(tmp_path, CLIENTS, SPEC, BASE)[0]) == 4
    assert job_complete(tmp_path, 2, [], SPEC, BASE)


def test_an_error_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), UpdateWriter(tmp_path, 1, CLIENTS, SPEC, BASE) as writer:
        writer.add("alice", state("alice"), 1, 1, 0.0)
        raise KeyError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "wrong",
    [
        lambda writer: writer.add("eve", state("alice"), 1, 1, 0.0),
        lambda writer: writer.add("bob", state("bob"), 1, 1, 0.0),
        lambda writer: writer.leave_out("bob", "again"),
        lambda writer: writer.add("alice", {"bias": np.ones(3, "float32")}, 1, 1, 0.0),
        lambda writer: writer.add("alice", {**state("alice"), "bias": np.ones(3)}, 1, 1, 0.0),
        lambda writer: writer.close(),
    ],
)
def test_methods_that_break_their_word(tmp_path, wrong):
    writer = UpdateWriter(tmp_path, 1, CLIENTS[:2], SPEC, BASE)
    writer.add("bob", state("bob"), 1, 1, 0.0)
    with pytest.raises(ValueError):
        wrong(writer)


def test_ids_stay_in_the_folder(tmp_path):
    for job, clients in ((1, ["../x"]), ("../x", ["a"]), (1, ["a/b"])):
        with pytest.raises(UserError, match="not usable as an id"):
            UpdateWriter(tmp_path / "round", job, clients, SPEC, BASE)
    assert list(tmp_path.rglob("*x*")) == []


def test_reruns_with_other_numbers_of_jobs(tmp_path):
    for nj in (3, 1, 2, 4, 2):
        jobs = [CLIENTS[job::nj] for job in range(nj)]
        for job, clients in enumerate(jobs, 1):
            write(tmp_path, job, clients)
        updates, refusals = read_updates(tmp_path, CLIENTS, SPEC, BASE)
        assert [update.client for update in updates] == CLIENTS and not refusals


def test_what_is_complete(tmp_path):
    def complete(clients=("alice", "bob"), spec=SPEC, base=BASE):
        return job_complete(tmp_path, 1, clients, spec, base)

    assert not complete()
    write(tmp_path, 1, ["alice", "bob"])
    assert complete()
    assert not complete(["alice"]) and not complete(["bob", "alice"]) and not complete(CLIENTS)
    assert not complete(base="f" * 64) and not complete(spec={"bias": SPEC["bias"]})
    whole = (tmp_path / "update.1.safetensors").read_bytes()
    (tmp_path / "update.1.safetensors").write_bytes(whole[:-1])
    assert not complete()


def test_what_a_kill_leaves_is_removed(tmp_path):
    (tmp_path / ".update.1.safetensors.abc.tmp").write_bytes(b"half")
    (tmp_path / ".update.2.safetensors.abc.tmp").write_bytes(b"of another job")
    (tmp_path / "update.1.safetensors").write_bytes(b"old, without a table")
    (tmp_path / "update.1.left_out").write_text("bob the loss is nan\n")
    write(tmp_path, 1, CLIENTS)
    assert job_complete(tmp_path, 1, CLIENTS, SPEC, BASE)
    assert len(read_updates(tmp_path, CLIENTS, SPEC, BASE)[0]) == 4
    assert [path.name for path in tmp_path.glob(".*")] == [".update.2.safetensors.abc.tmp"]


def refused(folder, sampled=CLIENTS) -> dict[str, str]:
    """Clients refused -> reasons; the others must have got through, once, and in order."""
    updates, refusals = read_updates(folder, sampled, SPEC, BASE)
    reasons = {refusal.client: refusal.reason for refusal in refusals}
    assert len(reasons) == len(refusals)
    assert [u.client for u in updates] == [c for c in sampled if c not in reasons]
    assert set(sampled) <= {u.client for u in updates} | set(reasons)
    for reason in reasons.values():
        assert reason.isprintable() and str(folder) not in reason and len(reason) < 1000
    return reasons


@pytest.fixture
def jobs(tmp_path):
    """Two jobs of two clients each."""
    write(tmp_path, 1, CLIENTS[:2])
    write(tmp_path, 2, CLIENTS[2:])
    return tmp_path


def replace_tensors(folder, tensors):
    (folder / "update.2.safetensors").write_bytes(safetensors.numpy.save(tensors))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"extra": np.ones((2, 1), "float32")}, "'extra' does not belong"),
        ({"extra\n\tname" * 9: np.ones((2, 1), "float32")}, "does not belong"),
        ({"bias": None}, "'bias' is missing"),
        ({"bias": np.ones((2, 4), "float32")}, "'bias' is float32 of shape [2, 4], expected"),
        ({"bias": np.ones((2, 3), "float64")}, "'bias' is float64"),
        ({"bias": np.ones((3, 3), "float32")}, "'bias' is float32 of shape [3, 3]"),
        ({"bias": np.ones(6, "float32")}, "'bias' is float32 of shape [6]"),
        ({"bias": np.ones((2, 3), "float16")}, "'bias' is wrong"),
    ],
)
def test_other_tensors_lose_the_job(jobs, change, said):
    stacked = {**load_state(jobs / "update.2.safetensors"), **change}
    replace_tensors(jobs, {name: t for name, t in stacked.items() if t is not None})
    reasons = refused(jobs)
    assert set(reasons) == {"carol", "dave"} and all(said in text for text in reasons.values())


def test_damaged_tensor_files_lose_the_job(jobs):
    path = jobs / "update.2.safetensors"
    whole = path.read_bytes()
    for content in (whole[:-1], whole[:50], b"", b"\xff" * 100, whole + b"more"):
        path.write_bytes(content)
        reasons = refused(jobs)
        assert set(reasons) == {"carol", "dave"}
        assert all(reason.startswith("update.2.safetensors: ") for reason in reasons.values())
    path.unlink()
    assert "cannot be read" in refused(jobs)["carol"]
    os.mkfifo(path)
    assert "not a plain file" in refused(jobs)["carol"]


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("utterances", "-1", "'-1', not a whole number"),
        ("utterances", "0", "cannot be"),
        ("utterances", "1e3", "not a whole number"),
        ("utterances", "99999999999", "cannot be"),
        ("utterances", "9" * 50, "not a whole number"),
        ("utterances", "", "not a whole number"),
        ("steps", "1.5", "not a whole number"),
        ("steps", "9" * 18, "cannot be"),
        ("loss", "nan", "no finite number"),
        ("loss", "-inf", "no finite number"),
        ("loss", "1e999", "no finite number"),
        ("loss", "-1e+31", "a loss of -1e+31 cannot be"),
        ("loss", "1_0", "no finite number"),
        ("loss", "x" * 500, "no finite number"),
        ("bytes", "43", "43 bytes announced, 44 sent"),
        ("sha256", "f" * 64, "another global model"),
        ("sha256", BASE.upper(), "another global model"),
    ],
)
def test_nonsense_in_a_row_loses_its_client(jobs, column, value, said):
    path = jobs / "update.2.tsv"
    header, carol, dave = path.read_text().splitlines()
    fields = carol.split("\t")
    fields[COLUMNS.index(column)] = value
    path.write_text("\n".join([header, "\t".join(fields), dave]) + "\n")
    reasons = refused(jobs)
    assert set(reasons) == {"carol"}
    assert said in reasons["carol"] and reasons["carol"].startswith("update.2.tsv:2: ")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("carol", "../x"),
        lambda text: text.replace("carol", "c" * 300),
        lambda text: text.replace("carol", "a\tb"),
        lambda text: text.replace("client", "klient"),
        lambda text: text[:-1],
        lambda text: "",
        lambda text: "h" * 60_000 + "\n",
        lambda text: text + "x" * 100_000 + "\n",
        lambda text: "\udcff" + text,
    ],
)
def test_unreadable_tables_lose_the_job(jobs, change):
    path = jobs / "update.2.tsv"
    path.write_bytes(change(path.read_text()).encode("utf-8", "surrogateescape"))
    reasons = refused(jobs)
    assert set(reasons) == {"carol", "dave"}
    assert all("update.2.tsv" in reason for reason in reasons.values())


def test_rows_and_tensors_must_agree(jobs):
    path = jobs / "update.2.tsv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]))
    reasons = refused(jobs)
    assert "expected float32 of shape [1, 3]" in reasons["carol"] and "dave" in reasons


def test_tables_that_are_no_files(jobs):
    (jobs / "update.3.tsv").mkdir()
    os.mkfifo(jobs / "update.4.tsv")
    assert refused(jobs) == {}
    (jobs / "update.2.tsv").unlink()
    assert "update.3.tsv: not a plain file" in refused(jobs)["carol"]


def test_who_was_not_sampled(jobs):
    assert refused(jobs, ["dave", "alice", "bob"]) == {"carol": "was not sampled"}
    assert "sent no update" in refused(jobs, [*CLIENTS, "eve"])["eve"]


def test_who_comes_twice_is_refused_altogether(jobs):
    for suffix in ("tsv", "safetensors"):
        content = (jobs / f"update.2.{suffix}").read_bytes().replace(b"dave", b"eve0")
        (jobs / f"update.3.{suffix}").write_bytes(content)
    assert refused(jobs) == {"carol": "came 2 times", "eve0": "was not sampled"}
    path = jobs / "update.2.tsv"
    path.write_text(path.read_text().replace("dave", "carol"))
    assert refused(jobs)["carol"] == "came 3 times"


def test_left_out_lists_are_not_trusted_either(jobs):
    path = jobs / "update.1.left_out"
    path.write_bytes("alice \x1b[31mred\u202e\neve x\n".encode())
    assert refused(jobs) == {}
    reasons = refused(jobs, [*CLIENTS, "eve"])
    assert reasons["eve"] == "left out by its job: x"
    path.write_bytes(b"eve " + b"x" * 100_000 + b"\n")
    assert "update.1.left_out: too long" in refused(jobs, [*CLIENTS, "eve"])["eve"]


def test_torch_tensors(tmp_path):
    def tensors(client):
        return {name: torch.from_numpy(np.asarray(t)) for name, t in state(client).items()}

    write(tmp_path / "torch", 1, CLIENTS, tensors=tensors)
    write(tmp_path / "numpy", 1, CLIENTS)
    for name in ("update.1.safetensors", "update.1.tsv"):
        assert (tmp_path / "torch" / name).read_bytes() == (tmp_path / "numpy" / name).read_bytes()
    assert [row["client"] for row in read_tsv(tmp_path / "torch/update.1.tsv", COLUMNS)] == CLIENTS


STACKS = [{"s1": CLIENTS[:2]}, {"s2": CLIENTS[2:]}]


def write_means(folder, job, stacks, left_out=(), weigh=float):
    with MeanWriter(folder, job, stacks, SPEC, BASE, weigh) as writer:
        for client in (client for clients in stacks.values() for client in clients):
            if client in left_out:
                writer.leave_out(client, "the loss is nan")
            else:
                writer.add(client, state(client), 10 + CLIENTS.index(client), 5, 0.5)


@pytest.fixture
def means(tmp_path):
    """Two jobs with a stack of two clients each."""
    for job, stacks in enumerate(STACKS, 1):
        write_means(tmp_path, job, stacks)
    return tmp_path


def refused_means(folder, sampled=CLIENTS, weigh=float) -> dict[str, str]:
    """Clients refused -> reasons; the others are in a stack whose weight is the server's own."""
    updates, weights, groups, refusals = read_means(folder, sampled, SPEC, BASE, weigh)
    reasons = {refusal.client: refusal.reason for refusal in refusals}
    kept = [member.client for group in groups.values() for member in group]
    assert len(reasons) == len(refusals) and len(set(kept)) == len(kept)
    assert [update.client for update in updates] == list(groups) == sorted(groups)
    assert reasons.keys().isdisjoint(kept) and set(sampled) <= {*kept, *reasons}
    for group, weight in zip(groups.values(), weights, strict=True):
        assert weight == sum(weigh(10 + CLIENTS.index(member.client)) for member in group)
    for reason in reasons.values():
        assert reason.isprintable() and str(folder) not in reason and len(reason) < 1000
    return reasons


def set_field(path, line, columns, column, value):
    """Change one field of a table; lines count from 1."""
    lines = path.read_text().splitlines()
    fields = lines[line - 1].split("\t")
    fields[columns.index(column)] = value
    lines[line - 1] = "\t".join(fields)
    path.write_text("\n".join(lines) + "\n")


def test_sound_means_pass(means):
    assert refused_means(means) == {}
    write_means(means, 2, STACKS[1], left_out=["dave"])
    assert refused_means(means) == {"dave": "left out by its job: the loss is nan"}
    write_means(means, 2, STACKS[1], left_out=["carol", "dave"])
    assert list(refused_means(means)) == ["carol", "dave"]


def test_weights_may_differ_by_rounding(means):
    set_field(means / "members.2.tsv", 2, MEMBERS, "weight", "12.00000000001")
    assert refused_means(means) == {}
    # The server has another rule: neither job's mean is the one it wants.
    assert set(refused_means(means, weigh=lambda utterances: 1.0)) == set(CLIENTS)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("weight", "1e12", "the weight of 12 utterances is 1e+12, expected 12"),
        ("weight", "0.0", "expected 12"),
        ("weight", "-12.0", "expected 12"),
        ("weight", "12.0001", "expected 12"),
        ("weight", "nan", "the weight is 'nan', no finite number"),
        ("weight", "inf", "no finite number"),
        ("weight", "1_2", "no finite number"),
        ("weight", "", "no finite number"),
        ("utterances", "-1", "'-1', not a whole number"),
        ("utterances", "0", "cannot be"),
        ("utterances", "13", "the weight of 13 utterances is 12, expected 13"),
        ("utterances", "99999999999", "cannot be"),
        ("utterances", "9" * 50, "not a whole number"),
        ("steps", "1.5", "not a whole number"),
        ("steps", "9" * 18, "cannot be"),
        ("steps", "6", "s2 has 25 utterances and 11 steps, 25 and 10 in update.2.tsv"),
        ("loss", "nan", "no finite number"),
        ("loss", "1e999", "no finite number"),
        ("loss", "1.7e308", "a loss of 1.7e+308 cannot be"),
        ("loss", "x" * 500, "no finite number"),
        ("stack", "s1", "s1 is not in update.2.tsv"),
        ("stack", "s3", "s3: sent no update that could be read"),
        ("client", "eve", "eve was not sampled"),
        ("client", "dave", "dave came 2 times"),
        ("status", "no", "s2 has 13 utterances and 5 steps, 25 and 10 in update.2.tsv"),
    ],
)
def test_nonsense_in_a_row_loses_its_stack(means, column, value, said):
    set_field(means / "members.2.tsv", 2, MEMBERS, column, value)
    reasons = refused_means(means)
    strangers = {"eve"} if value == "eve" else set()
    assert set(reasons) == {"carol", "dave"} | strangers
    assert said in reasons["carol"] + reasons["dave"]
    assert "members.2.tsv:" in "".join(reasons.values())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("carol", "../x"), ":2: client '../x' is not usable"),
        (lambda text: text.replace("ok", "ok\tok", 1), ":2: 8 fields, the header has 7"),
        (lambda text: text.replace("s2", ""), ":2: stack '' is not usable"),
        (lambda text: text.replace("client", "klient"), ":1: the header is"),
        (lambda text: text[:-1], ":3: the last line has no end"),
        (lambda text: "", ":1: the header is ''"),
        (lambda text: text + "x" * 100_000 + "\n", ": too long for a table"),
        (lambda text: "\udcff" + text, ":1: not UTF-8"),
    ],
)
def test_unreadable_members_lose_the_job(means, change, said):
    path = means / "members.2.tsv"
    path.write_bytes(change(path.read_text()).encode("utf-8", "surrogateescape"))
    reasons = refused_means(means)
    assert set(reasons) == {"carol", "dave"}
    for reason in reasons.values():
        assert reason.startswith("sent no update that could be read; members.2.tsv" + said)


def test_members_that_are_no_files(means):
    os.mkfifo(means / "update.3.tsv")
    os.mkfifo(means / "members.3.tsv")
    assert refused_means(means) == {}
    (means / "members.2.tsv").unlink()
    assert "members.2.tsv: not a plain file" in refused_means(means)["carol"]


def test_refused_updates_lose_their_clients(means):
    path = means / "update.2.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    reasons = refused_means(means)
    assert set(reasons) == {"carol", "dave"}
    assert all(reason.startswith("s2: update.2.safetensors: ") for reason in reasons.values())
    (means / "update.2.tsv").write_text("nothing\n")
    assert "update.2.tsv:1: the header is" in refused_means(means)["dave"]


def test_who_is_in_two_stacks_loses_both(means):
    """The one in the first cannot be told from the one in the second."""
    set_field(means / "members.2.tsv", 2, MEMBERS, "client", "bob")
    reasons = refused_means(means)
    assert set(reasons) == set(CLIENTS)
    assert reasons["alice"] == "members.1.tsv:3: bob came 2 times"
    assert reasons["dave"] == "members.2.tsv:2: bob came 2 times"
    assert reasons["carol"] == "sent no update that could be read"


def test_a_job_cannot_join_anothers_stack(means):
    """Its rows would give the other's mean a weight that nobody trained for."""
    set_field(means / "members.2.tsv", 3, MEMBERS, "stack", "s1")
    reasons = refused_means(means)
    assert reasons["dave"] == "members.2.tsv:3: s1 is not in update.2.tsv"
    assert set(reasons) == {"carol", "dave"} and "s2 has 12 utterances" in reasons["carol"]


def test_means_of_clients_who_were_not_sampled(means):
    reasons = refused_means(means, CLIENTS[:3])
    assert list(reasons) == ["carol", "dave"] and reasons["dave"] == "was not sampled"
    assert reasons["carol"] == "members.2.tsv:3: dave was not sampled"
