"""Secure sums on files: the bytes of plain sums, whatever happens, and what is refused."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import commands
import numpy as np
import private_world
import pytest
import secure_world as world
from commands import inside
from hypothesis import given
from hypothesis import strategies as st
from private_world import CLIENTS, STEPS, rows_of, vector
from safetensors.numpy import load_file
from secagg_world import uniform
from secure_world import PLAIN, SECURE, aggregate, begin, init, kept_of, keys_for, state, train

from fedtools.attack.victims import find_victims
from fedtools.core.errors import UserError
from fedtools.core.tables import read_tsv
from fedtools.federation.federation import Federation
from fedtools.federation.rounds import run_rounds
from fedtools.federation.secure_round import SecureRound
from fedtools.privacy.secagg.boxes import read_box, write_box
from fedtools.privacy.secagg.holder import Attempt
from fedtools.privacy.secagg.signed import HEADER_BYTES

CLIP, N = 0.05, len(CLIENTS)
# Of the states, float32, in steps of the sum.
ROUNDING = 32


@pytest.fixture(scope="module")
def root(tmp_path_factory, module_key) -> Path:
    return world.make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def module_key(tmp_path_factory):
    """Give the module's experiments a noise key; see `key` for that of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDTOOLS_NOISE_KEY", str(tmp_path_factory.mktemp("key") / "noise.key"))
        yield


@pytest.fixture
def path(root, tmp_path) -> Path:
    """Return a new experiment, cut into three jobs."""
    path = begin(root, tmp_path / "exp")
    inside("sample", path, "--nj", "3").ok()
    return path


@pytest.fixture
def keys(root, path) -> Path:
    return keys_for(root, path)


def test_rounds_have_the_bytes_of_plain_sums(root, tmp_path):
    path = begin(root, tmp_path / "exp")
    keys = keys_for(root, path)
    inside("rounds", path, "--to", "1", "--nj", "2", "--keys", keys).ok()
    said = inside("rounds", path, "--to", "2", "--keys", keys).ok()
    assert "loss" not in said.err
    for number in (2, 3):
        assert state(path, number) == state(root / "plain", number)
    # Of one client nothing is left, and nothing is known but what it has sent.
    assert not kept_of(keys) and not [*path.glob("server/*"), *path.glob("round_*/secure.*")]
    rows = [row for row in read_tsv(path / "round_0001/ledger.tsv", None) if row["client"] != "-"]
    told = {tuple(v for k, v in row.items() if k != "client") for row in rows}
    assert len(rows) == N and len(told) == 1
    assert {name: rows[0][name] for name in ("steps", "client_epochs", "seconds")} == {
        "steps": "0",
        "client_epochs": "0",
        "seconds": "0.000",
    }
    assert not [*path.glob("tensorboard/train/*")]
    inside("show", path, "--clients").fails(1, "secure sums: nobody sees what one client sends")


def test_single_commands_name_the_next_one(root, path, keys):
    for at, step in enumerate(world.STEPS):
        said = inside("train-local", path, "--job", "2", "--keys", keys).ok().out
        assert f"step '{step}': done by 1 of 3 jobs; next: fedtools train-local of" in said
        inside("aggregate", path).fails(1, f"secure.{step}.1: missing; run fedtools train-local")
        train(path, keys)
        mark = (path / f"round_0001/secure.{step}.1").stat().st_mtime_ns
        train(path, keys)
        assert (path / f"round_0001/secure.{step}.1").stat().st_mtime_ns == mark
        said = aggregate(path).ok().out
        assert (f"step '{world.STEPS[at + 1]}'" in said) if at < 4 else not said.strip()
    assert state(path) == state(root / "plain")
    # What was listed makes the same again.
    assert (path / "commands.sh").read_text().count("fedtools aggregate") == 5


class Killed(BaseException):
    """Exception that replaces kill -9."""


FILES = [
    *(f"secure.{step}.1" for step in world.STEPS),
    *(f"secure.{step}.1.reply" for step in ("keys", "shares")),
    *(f"secure.{step}.reply" for step in ("masked", "survivors")),
    *(f"secure.{step}" for step in ("keys", "shares", "masked", "survivors")),
    *("promises.tsv", "secrets", "ledger.tsv"),
]


@pytest.mark.parametrize("name", FILES)
def test_a_kill_changes_no_byte(root, tmp_path, monkeypatch, name):
    path = begin(root, tmp_path / "exp")
    inside("sample", path, "--nj", "3").ok()
    keys = keys_for(root, path)
    replace, killed = os.replace, []

    def replaced(source, target):
        replace(source, target)
        if Path(target).name.startswith(name) if name == "secrets" else Path(target).name == name:
            killed.append(target)
            raise Killed

    for _ in range(4 if name == "secrets" else 1):
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replaced)
            with pytest.raises(Killed):
                run_rounds(path, 1, 1, keys=keys)
            if name == "secrets":
                # Each time one step further: the sum in it was kept before the message left.
                patch.setattr(os, "replace", replace)
                train(path, keys)
                aggregate(path).ok()
    inside("rounds", path, "--to", "1", "--keys", keys).ok()
    assert killed and state(path) == state(root / "plain") and not kept_of(keys)


def test_who_has_no_data_is_hidden_in_the_sum(root, tmp_path):
    less = private_world.without(root / "train", tmp_path / "less", CLIENTS[3])
    plain = private_world.begin(root, tmp_path / "plain", PLAIN, train=less)
    inside("rounds", plain, "--to", "1").ok()
    path = tmp_path / "exp"
    inside(
        *("init", path, "--config", root / "config.yaml", "--method", "dpfedavg"),
        *("--data", f"train={less}", "--clients", root / "clients", "--set", SECURE),
        *("--client-keys", root / "client_keys.tsv"),
    ).ok()
    said = inside("rounds", path, "--to", "1", "--keys", keys_for(root, path)).ok()
    assert "left out" not in said.err
    assert state(path) == state(plain) != state(root / "plain")
    rows = read_tsv(path / "round_0001/ledger.tsv", None)
    assert {row["status"] for row in rows} == {"ok"}


# Clients that are lost


def sum_without(root: Path, lost: set[str]) -> np.ndarray:
    """Return the sum of plain messages, in steps, in the order of the tensors' names."""
    return sum(vector(one) for name, one in rows_of(root / "plain").items() if name not in lost)


def moved(path: Path) -> np.ndarray:
    """Return what a round has added to the state, in steps of the sum."""
    return private_world.released(path) * N * STEPS / CLIP


def clients_of(path: Path, job: int) -> set[str]:
    """Return the clients of a job, by their signed messages alone."""
    box = read_box(path / f"round_0001/secure.keys.{job}", range(N), 1 << 20)
    return {CLIENTS[number] for number in box}


@pytest.mark.parametrize("step", ["shares", "masked"])
def test_a_damaged_file_costs_the_clients_of_its_job(root, path, keys, step):
    lost = set()

    def damage(now):
        if now == step:
            lost.update(clients_of(path, 3))
            box = path / f"round_0001/secure.{step}.3"
            box.write_bytes(box.read_bytes()[:-1])

    world.until(path, keys, "unmask", damage)
    train(path, keys, (1, 2))
    aggregate(path).ok()
    assert 0 < len(lost) <= 2
    assert np.abs(moved(path) - sum_without(root, lost)).max() < ROUNDING
    assert np.abs(moved(path) - sum_without(root, set())).max() > 100 * ROUNDING
    rows = {row["client"]: row for row in read_tsv(path / "round_0001/ledger.tsv", None)}
    for client in CLIENTS:
        said = f"refused: is not in the secure sum: lost in step '{step}'"
        assert rows[client]["status"] == (said if client in lost else "ok")
    sizes = {int(row["bytes_up"]) for name, row in rows.items() if name in {*CLIENTS} - lost}
    assert len(sizes) == 1 and all(int(rows[one]["bytes_up"]) < min(sizes) for one in lost)


def test_too_few_are_left_and_the_next_attempt_has_other_masks(root, path, keys):
    first = {}

    def damage(step):
        if step == "masked":
            first.update(read_box(path / "round_0001/secure.masked.1", range(N), 1 << 20))
            for job in (2, 3):
                (path / f"round_0001/secure.masked.{job}").write_bytes(b"x")

    world.until(path, keys, "masked")
    train(path, keys)
    damage("masked")
    said = aggregate(path)
    assert said.code == 1 and "clients are left after step 'masked', and 5 are the" in said.err
    inside("reset", path, "--round", "1").ok()
    assert (path / "attempt").read_text() == "2\n"
    inside("sample", path, "--nj", "3").ok()
    world.until(path, keys, "masked")
    train(path, keys)
    second = read_box(path / "round_0001/secure.masked.1", range(N), 1 << 20)
    assert first.keys() == second.keys()
    for number in first:
        # The same vectors, behind other masks.
        words = [np.frombuffer(one[number][HEADER_BYTES:-64], "<u4") for one in (first, second)]
        assert np.mean(words[0] == words[1]) < 0.01
    aggregate(path).ok()
    for _ in range(2):
        train(path, keys)
        aggregate(path).ok()
    assert state(path) == state(root / "plain")


# Another sum of the same changes


def test_a_round_that_was_signed_is_never_done_again(root, path, keys):
    world.until(path, keys, "survivors")
    copy = path.with_name("copy")
    shutil.copytree(path, copy)
    train(path, keys)
    said = "round 1 cannot be reset: clients have bound themselves to its sum"
    inside("reset", path, "--round", "1").fails(1, said)
    # A server that goes back all the same: to another attempt, or to another list.
    for file in copy.glob("round_0001/secure.*"):
        file.unlink()
    (copy / "attempt").write_text("2\n")
    command = ("train-local", copy, "--job", "1", "--keys", keys)
    inside(*command).fails(1, "in round 1 another attempt than 2 was signed; finish that one")
    aggregate(path).ok()
    train(path, keys)
    aggregate(path).ok()
    inside("rounds", path, "--to", "2", "--keys", keys).ok()
    inside("reset", path, "--round", "2").fails(1, "round 2 cannot be reset: clients have bound")
    assert state(path, 3) == state(root / "plain", 3)


@pytest.mark.parametrize("step", ["keys", "shares", "masked"])
def test_a_reply_that_changes_is_refused(path, keys, step):
    """A server that hides neighbours in a later step would learn sums of fewer."""
    following = world.STEPS[world.STEPS.index(step) + 1]
    world.until(path, keys, following)
    train(path, keys)
    reply = path / f"round_0001/secure.{step}{'.reply' if step == 'masked' else '.1.reply'}"
    aggregate(path).ok()
    content = reply.read_bytes()
    reply.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    inside("train-local", path, "--job", "1", "--keys", keys).fails(
        1, f"messages of step '{step}': another reply of the server was used in this attempt"
    )
    reply.write_bytes(content)
    train(path, keys)


def test_a_vector_is_masked_once(path, keys):
    world.until(path, keys, "masked")
    train(path, keys)
    sent = path / "round_0001/secure.masked.1"
    content = sent.read_bytes()
    sent.unlink()
    train(path, keys)
    assert sent.read_bytes() == content
    # Training that does not repeat to the last bit.
    sent.unlink()
    ((where, kept),) = [one for one in kept_of(keys).items() if one[0].suffix == ".1"]
    where.write_text(where.read_text().replace(kept["sent"]["masked"], "0" * 64))
    said = "messages of step 'masked': others were sent in this attempt"
    inside("train-local", path, "--job", "1", "--keys", keys).fails(1, said)
    assert not sent.exists()
    attempt = Attempt("ab", {})
    attempt.bind("sent", "masked", "1")
    attempt.bind("sent", "masked", "1")
    with pytest.raises(UserError, match="others were sent"):
        attempt.bind("sent", "masked", "2")


def test_secrets_that_are_gone_cost_their_clients(root, path, keys):
    world.until(path, keys, "shares")
    for where in kept_of(keys):
        if where.suffix == ".3":
            where.unlink()
    said = "what the clients kept of this attempt is not here, or was removed"
    inside("train-local", path, "--job", "3", "--keys", keys).fails(1, said)
    lost = clients_of(path, 3)
    train(path, keys, (1, 2))
    inside("aggregate", path, "--without", "4").fails(1, "no site or job '4' to leave out")
    aggregate(path, 1, "--without", "3").ok()
    for _ in range(3):
        train(path, keys, (1, 2))
        aggregate(path).ok()
    assert np.abs(moved(path) - sum_without(root, lost)).max() < ROUNDING


def test_who_takes_part_is_frozen(root, path, keys):
    """A server that lists a client with colluders alone would see its change in the sum."""
    (path / "round_0001/clients").write_text("1e1\n2e2\n3e3\n")
    session = SecureRound(Federation(path), 1).session
    assert [*session.names] == CLIENTS and session.plan.least == 5
    train(path, keys)
    aggregate(path).fails(1, "not the clients drawn for this seed and round")


def test_a_round_that_was_unmasked_is_not_done_with_other_noise(root, path, keys):
    world.until(path, keys, "unmask")
    copy = path.with_name("copy")
    shutil.copytree(path, copy)
    train(path, keys)
    for file in copy.glob("round_0001/secure.*"):
        file.unlink()
    said = "the clients have signed in round 1, and forgotten their masks"
    inside("train-local", copy, "--job", "1", "--keys", keys).fails(1, said)


def test_a_list_may_be_signed_wherever_it_is(root, path, keys):
    world.until(path, keys, "survivors")
    assert not [*path.glob("round_0001/secure.survivors.*")]
    inside("reset", path, "--round", "1").fails(1, "round 1 cannot be reset: clients have bound")


def test_jobs_that_were_cut_again(root, path, keys):
    world.until(path, keys, "shares")
    (path / "round_0001/jobs").write_text("1\n")
    said = "has the secrets of other clients than those of job 1"
    inside("train-local", path, "--job", "1", "--keys", keys).fails(1, said)
    for file in path.glob("round_0001/secure.*"):
        file.unlink()
    for where in kept_of(keys):
        if where.suffix == ".1":
            where.unlink()
    said = "has clients that are now in another job"
    inside("train-local", path, "--job", "1", "--keys", keys).fails(1, said)


# What a server may see


def test_a_server_without_clients_folders_finishes_the_round(root, path, keys):
    """It has a folder of its own, and gets what clients send."""
    server = path.with_name("server")
    private = shutil.ignore_patterns("clients", "keys*")
    shutil.copytree(path, server, ignore=private, dirs_exist_ok=True)
    shutil.copy(path / "round_0001/clients", server / "round_0001/clients")
    there, here = (one / "round_0001" for one in (path, server))
    seen = bytearray()
    for step in world.STEPS:
        train(path, keys)
        for sent in there.glob(f"secure.{step}.[123]"):
            shutil.copy(sent, here / sent.name)
            if step == "masked":
                for one in read_box(sent, range(N), 1 << 20).values():
                    seen += one[HEADER_BYTES:-64]
        aggregate(server).ok()
        for reply in here.glob("secure.*.reply"):
            shutil.copy(reply, there / reply.name)
    assert state(server) == state(root / "plain")
    assert not (server / "clients").exists()
    assert len(seen) == N * 4 * 1244 and uniform(bytes(seen))
    # The test of uniformity can fail: unmasked changes are small numbers.
    plain = b"".join(
        vector(one).astype("<i4").tobytes() for one in rows_of(root / "plain").values()
    )
    assert not uniform(plain)


@pytest.mark.parametrize(
    "more",
    [
        "optimizer: adam, learning_rate: 0.01, momentum: 0.9",
        "personal: ['head.*']",
        "cohorts: 2",
        "client_method: fedprox, client_conf: {proximal: 0.1}",
    ],
)
def test_what_composes_with_secure_sums(root, tmp_path, more):
    """Each cell of the page's table has the bytes of plain sums."""
    found = []
    for name, setting in (("plain", PLAIN), ("secure", SECURE)):
        path = tmp_path / name
        changed = f"{setting[:-1]}, {more}}}"
        if name == "plain":
            private_world.begin(root, path, changed)
            inside("rounds", path, "--to", "2").ok()
        else:
            if "cohorts" in more:
                # Of three clients none may be lost.
                changed = changed[:-1] + ", sums_conf: {lost: 0.0}}"
            begin(root, path, changed)
            inside("rounds", path, "--to", "2", "--keys", keys_for(root, path)).ok()
        found.append(state(path, 3))
    assert found[0] == found[1] != state(root / "plain", 3)


def test_noise_is_added_to_the_same_sum(root, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDTOOLS_NONCE", "0123456789abcdef" * 2)
    noisy = "method_conf={noise: 1.0, clip: 0.05, local_steps: 2, sums: secure}"
    path = begin(root, tmp_path / "exp", noisy)
    inside("rounds", path, "--to", "1", "--keys", keys_for(root, path)).ok()
    noise = moved(path) - sum_without(root, set())
    # Of standard deviation 2^20, and not what the clients have sent.
    assert 0.9 < noise.std() / STEPS < 1.1
    assert "4.37718" in inside("privacy", path).ok().out


def test_noise_that_clients_add_themselves(root, tmp_path):
    own = "method_conf={epsilon: 8.0, clip: 0.05, local_steps: 2, sums: secure, trust: clients}"
    path = tmp_path / "exp"
    said = init(root, path, own).ok().out
    found = re.search(r"noise of (\d+) steps: epsilon 8 against the server, ([\d.]+) if all", said)
    # The fewest honest ones are 5 survivors less a colluder. Of 7 there is more noise.
    deviation, central = float(found[1]), float(found[2])
    assert 5 < central < 6
    inside("rounds", path, "--keys", keys_for(root, path)).ok()
    noise = moved(path) - sum_without(root, set())
    assert abs(noise.std() / (deviation * np.sqrt(N)) - 1) < 0.1
    later = private_world.released(path, 2) * N * STEPS / CLIP
    assert abs(np.corrcoef(noise, later)[0, 1]) < 0.2
    # zCDP by hand: three rounds, four honest clients, and all orders.
    rho = 3 * STEPS**2 / (2 * 4 * deviation**2)
    orders = np.linspace(1.01, 60, 200_000)
    bound = orders * rho + np.log1p(-1 / orders) - np.log(orders * 1e-5) / (orders - 1)
    assert abs(bound.min() - 8) < 1e-3
    total = read_tsv(path / "dp.tsv", None) if inside("privacy", path).ok() else []
    assert float(total[-1]["spent"]) == pytest.approx(8, abs=1e-3)
    inside("publish", path, tmp_path / "out").ok()
    text = (tmp_path / "out/README.md").read_text()
    assert "discrete Gaussian" in text and "It need not be trusted" in text


# Boxes


@given(st.dictionaries(st.integers(0, 9), st.binary(max_size=20)))
def test_boxes_are_read_as_written(tmp_path_factory, contents):
    path = tmp_path_factory.getbasetemp() / "box"
    write_box(path, contents)
    assert read_box(path, range(10), 20) == contents


@given(st.binary(max_size=60))
def test_any_bytes_are_a_box_or_an_error(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(content)
    try:
        found = read_box(path, range(3), 20)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert found.keys() <= {0, 1, 2} and sum(12 + len(v) for v in found.values()) == len(
            content
        )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\0\0\0\1" + bytes(7) + b"\1", "the file is truncated"),
        (b"\0\0\0\1" + bytes(7) + b"\1a" + b"\0\0\0\1" + bytes(8), "byte 13: a second entry of"),
        (b"\0\0\0\3" + bytes(8), "byte 0: an entry of client 3, which has none here"),
        (b"\0\0\0\1" + bytes(7) + b"\5" + b"abcde", "an entry of 5 bytes, and 4 are the most"),
        (b"\0\0\0\1" + b"\xff" * 8, "truncated"),
    ],
)
def test_boxes_that_are_none(tmp_path, content, said):
    (tmp_path / "box").write_bytes(content)
    with pytest.raises(UserError, match=re.escape(said)):
        read_box(tmp_path / "box", range(3), 4)


# What is refused


def test_keys_that_are_not_there_or_others(root, path, keys):
    inside("train-local", path, "--job", "1").fails(1, "each client needs its key; give --keys, a")
    other = keys_for(root, path.with_name("other"))
    names = sorted(other.glob("*.key"))
    names[0].unlink()
    names[1].rename(names[0])
    said = [inside("train-local", path, "--job", job, "--keys", other) for job in (1, 2, 3)]
    assert any(
        f"not the key of {names[0].stem} in the roster of round 1" in one.err for one in said
    )
    assert all("Traceback" not in one.err for one in said)
    names[0].chmod(0o644)
    said = [inside("train-local", path, "--job", job, "--keys", other) for job in (1, 2, 3)]
    assert any("other users can access" in one.err for one in said)
    inside("rounds", path, "--estimate").fails(1, "bind themselves to the sum of each round")


@pytest.mark.parametrize(
    ("setting", "keys", "said"),
    [
        (SECURE, None, "secure sums need keys of all clients; give --client-keys"),
        (PLAIN, "all", "keys of clients are for secure sums alone; leave --client-keys out"),
        (SECURE, "7e7\t", "no key of 7e7; add what fedtools client-keys prints there"),
        (SECURE, "twice", "1e1 came before"),
        (SECURE, "other", "'x' is no client of this experiment"),
        (SECURE, "short", "the key of 1e1 is not one of 64 hexadecimal digits"),
        (SECURE[:-1] + ", sums_conf: {lost: 0.6}}", "all", "lost"),
        (SECURE[:-1] + ", sums_conf: {lots: 0.1}}", "all", "did you mean 'lost'"),
        (PLAIN[:-1] + ", sums_conf: {lost: 0.1}}", None, "sums_conf: is used with sums: secure"),
        (
            SECURE[:-1] + ", sums_conf: {lost: 0.0, colluding: 0.9}}",
            "all",
            "no secure sum of 7 clients",
        ),
        (SECURE[:-1] + ", cohorts: 3}", "all", "sums_conf: a secure sum of"),
        (PLAIN[:-1] + ", trust: clients}", None, "trust: noise of clients is hidden by sums: se"),
        (SECURE[:-1] + ", trust: clients, cohorts: 2}", "all", "trust: clients draw no noise that"),
        (
            SECURE.replace("noise: 0.0", "noise: 0.000001")[:-1] + ", trust: clients}",
            "all",
            "steps are too small",
        ),
    ],
)
def test_experiments_that_are_not_begun(root, tmp_path, setting, keys, said):
    table = (root / "client_keys.tsv").read_text()
    rows = table.splitlines(keepends=True)
    changed = {
        "7e7\t": "".join(row for row in rows if not row.startswith("7e7\t")),
        "twice": table + rows[1],
        "other": table + "x\t" + "0" * 64 + "\n",
        "short": table.replace(rows[1], rows[1][:-2] + "\n"),
    }.get(keys, table)
    (tmp_path / "keys.tsv").write_text(changed)
    more = ("--client-keys", tmp_path / "keys.tsv") if keys else ("--seed", "0")
    init(root, tmp_path / "exp", setting, *more).fails(1, said)
    assert not (tmp_path / "exp/sha256sums").exists()


def test_numbers_of_the_plan_are_printed(root, tmp_path):
    said = init(root, tmp_path / "exp").ok().out
    assert "secure sums: 7 clients, 6 neighbours each, of whom 4 recover a secret; 5 surv" in said
    found = load_file(tmp_path / "exp/round_0001/global.safetensors")
    assert sum(one.size for one in found.values()) == 1244


# Attacks see what the server sees


def test_attacks_see_one_sum_of_all(root, tmp_path):
    path = begin(root, tmp_path / "exp")
    inside("rounds", path, "--to", "2", "--keys", keys_for(root, path)).ok()
    found = {}
    for name, experiment in (("plain", root / "plain"), ("secure", path)):
        rounds = ("--round", "1", "--round", "2")
        inside("attack", "weights", experiment, tmp_path / name, *rounds).ok()
        found[name] = {row["layer"]: row for row in read_tsv(tmp_path / name / "weights.tsv", None)}
    # Who sent a change in two rounds is plain to see in the changes, and not in their sums.
    assert found["plain"]["all"]["TPR@1%"] == "100.0"
    for layer, row in found["secure"].items():
        assert float(row["minDCF"]) == 1.0 and float(row["low"]) < 20 < 80 < float(row["high"]), (
            layer
        )
    said = inside("attack", "weights", path, tmp_path / "x", "--round", "1", "--defence", "clip=1")
    assert "only a secure sum is visible" in said.ok().err
    victims = find_victims(Federation(path), [2])
    following = load_file(path / "round_0003/global.safetensors")
    assert [*victims.messages] == CLIENTS
    for _, sent in victims.states(CLIENTS):
        for name, one in following.items():
            assert (sent[name] == one).all()


def test_ranks_do_each_step_of_a_secure_sum(root, tmp_path):
    path = begin(root, tmp_path / "exp")
    keys = keys_for(root, path)
    command = ("-m", "fedtools", "rounds", path, "--to", "2", "--keys", keys)
    ranks = [
        commands.start(
            *(sys.executable, *command),
            env={"RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cold=True,
        )
        for rank in (1, 0)
    ]
    for one in ranks:
        _, said = one.communicate(timeout=100)
        assert one.returncode == 0, said
    assert state(path, 3) == state(root / "plain", 3)
