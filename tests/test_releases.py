"""Releases with noise over reruns, kills, resets, copies and other experiments, on files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import inside
from fmp_world import SPAN, T, begin, counts_after, sent
from rescored_world import make_stream
from safetensors.numpy import load_file, save_file

from fedtools.core.tables import read_tsv
from fedtools.federation.fmp.simulation import simulate
from fedtools.federation.rounds import run_rounds
from fedtools.lm.reweighting import Lists, ListWeights
from fedtools.lm.stream import open_stream
from fedtools.methods.fmp import FMP
from fedtools.privacy.key import NoiseKey
from fedtools.privacy.ledger import Spent, together
from fedtools.privacy.releases import Releases

# By time, so that an utterance is in one release: epsilon is the cost of one.
LAPLACE = {
    "privacy": {"mechanism": "laplace", "epsilon": 1.0, "cap": 4.0},
    "groups": "clock",
    "span": SPAN,
    # Known of each of three clients, so that init does not warn of one's share.
    "max_words": 50.0,
}
BY_CLIENT = {**LAPLACE, "privacy": {**LAPLACE["privacy"], "trust": "client"}}
NONCE = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def stream(tmp_path_factory) -> Path:
    return make_stream(tmp_path_factory.mktemp("releases") / "stream")


@pytest.fixture
def fixed(key, monkeypatch) -> str:
    """Set a fixed nonce, so that two folders can be compared."""
    monkeypatch.setenv("FEDTOOLS_NONCE", NONCE)
    return NONCE


def make(stream: Path, path: Path, rounds: int = 0, **options):
    """Make an experiment with a number of complete rounds."""
    config = {"task": "rescore", "rounds": T, "method_conf": options}
    path.with_suffix(".yaml").write_text(yaml.safe_dump(config))
    arguments = ("--config", path.with_suffix(".yaml"), "--method", "fmp")
    done = inside("init", path, *arguments, "--data", f"train={stream}").ok()
    if rounds:
        inside("rounds", path, "--to", rounds).ok()
    return done


def states(path: Path) -> list[bytes]:
    return [
        (path / f"round_{number:04d}" / "global.safetensors").read_bytes()
        for number in range(1, T + 2)
    ]


def noise(path: Path, number: int) -> np.ndarray:
    """Return the server's noise in a round of increments, from the state it sent."""
    total = sum(sent(path, number).values())
    return counts_after(path, number) - counts_after(path, number - 1) - total


def apart(one: np.ndarray, two: np.ndarray) -> bool:
    """Return whether noise of a scale of thousands of steps is neither equal nor partly equal."""
    words = one[1:] != two[1:]
    return words.mean() > 0.9


def total(path: Path) -> dict[str, float]:
    inside("privacy", path).ok()
    row = read_tsv(path / "dp.tsv", None)[-1]
    return {level: float(row[f"epsilon_{level}"]) for level in ("word", "utterance", "user")}


class Killed(BaseException):
    """Exception that replaces kill -9."""


def run_until(path: Path, monkeypatch, stop) -> bool:
    """Run rounds, killed as soon as a file is in place for which `stop(path)` holds."""
    replace = os.replace

    def replaced(source, target):
        replace(source, target)
        if stop(Path(target)):
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replaced)
        try:
            run_rounds(path, None, 1, "cpu", None, None)
        except Killed:
            return True
    return False


# The nonce.


@pytest.mark.parametrize("options", [LAPLACE, BY_CLIENT, {"privacy": {"mechanism": "paper"}}])
def test_a_rerun_in_another_folder_has_other_noise(stream, tmp_path, key, options):
    """Otherwise equal counts would have equal noise, and show which client is missing."""
    one, two = tmp_path / "one", tmp_path / "two"
    for path in (one, two):
        make(stream, path, T, **options)
    for number in range(1, T + 1):
        if options is BY_CLIENT:
            messages = sent(one, number), sent(two, number)
            assert all(apart(messages[0][name], messages[1][name]) for name in messages[0])
        # The paper's marginals replace negative values by 0.
        assert (counts_after(one, number) != counts_after(two, number)).sum() > 5


def test_a_nonce_that_was_set(stream, tmp_path, fixed):
    """Two folders of the same experiment are equal; any difference changes the noise."""
    paths = [tmp_path / name for name in ("one", "two", "three", "four")]
    told = make(stream, paths[0], T, **LAPLACE)
    assert "warning: the nonce" in told.err
    make(stream, paths[1], T, **LAPLACE)
    assert states(paths[0]) == states(paths[1])
    # Lists used only by the last group: the counts of the first rounds are the same.
    other = tmp_path / "stream"
    shutil.copytree(stream, other)
    last = next(
        line.split()[0]
        for line in (stream / "segments").read_text().splitlines()
        if float(line.split()[2]) >= SPAN * T / (T + 1)
    )
    lines = (other / "nbest.tsv").read_text().splitlines()
    changed = [
        line.replace("\t-2\t", "\t-2.5\t") if line.startswith(f"{last}\t") else line
        for line in lines
    ]
    assert changed != lines
    (other / "nbest.tsv").write_text("".join(f"{line}\n" for line in changed))
    make(other, paths[2], T, **LAPLACE)
    make(stream, paths[3], T, **LAPLACE, smoothing=0.2)
    for path in paths[2:]:
        for number in range(1, T + 1):
            for client, counts in sent(paths[0], number).items():
                assert (sent(path, number)[client] == counts).all()
            assert apart(noise(paths[0], number), noise(path, number))
    assert (paths[0] / "nonce").read_text() == f"{NONCE} fixed\n"
    assert "the nonce of the noise was set" in inside("privacy", paths[0]).ok().err


def test_other_words_for_a_nonce(stream, tmp_path, key, monkeypatch):
    make(stream, tmp_path / "one", **LAPLACE)
    assert (tmp_path / "one/nonce").read_text() != NONCE
    monkeypatch.setenv("FEDTOOLS_NONCE", NONCE)
    inside("rounds", tmp_path / "one").fails(1, "its nonce differs from FEDTOOLS_NONCE")
    monkeypatch.setenv("FEDTOOLS_NONCE", "zero")
    config = ("--config", tmp_path / "one.yaml", "--method", "fmp", "--data", f"train={stream}")
    inside("init", tmp_path / "two", *config).fails(1, "FEDTOOLS_NONCE", "32 hexadecimal digits")
    monkeypatch.delenv("FEDTOOLS_NONCE")
    inside("init", tmp_path / "two", *config).ok()
    nonces = [(tmp_path / name / "nonce").read_text() for name in ("one", "two")]
    assert len(set(nonces)) == 2
    # Neither the nonce nor the record of the key may be changed or removed.
    for name in ("nonce", "noise_key"):
        kept = (tmp_path / "two" / name).read_text()
        for left in ("0" * 32 + "\n", None):
            (tmp_path / "two" / name).unlink()
            if left:
                (tmp_path / "two" / name).write_text(left)
            inside("rounds", tmp_path / "two").fails(1, f"two/{name}")
        (tmp_path / "two" / name).write_text(kept)
    inside("rounds", tmp_path / "two", "--to", 1).ok()
    # A rerun of init draws none.
    inside("init", tmp_path / "two", *config).ok()
    assert (tmp_path / "two/nonce").read_text() == nonces[1]
    key.unlink()
    inside("rounds", tmp_path / "two").fails(1, "noise key")


def test_an_experiment_without_a_nonce(stream, tmp_path, key):
    """With privacy it is refused; without, it never needed any."""
    path, plain = tmp_path / "old", tmp_path / "plain"
    make(stream, path, 1, **LAPLACE)
    sums = (path / "sha256sums").read_text().splitlines(keepends=True)
    kept = [line for line in sums if line.split()[1] not in ("nonce", "noise_key")]
    assert len(kept) == len(sums) - 2
    (path / "sha256sums").write_text("".join(kept))
    (path / "nonce").unlink()
    for command in ("rounds", "privacy", "train-local", "aggregate"):
        inside(command, path).fails(1, f"{path / 'nonce'}: ")
    make(stream, plain, T)
    assert not (plain / "nonce").exists() and not (plain / "releases.tsv").exists()


# One release per round.


@pytest.mark.parametrize(("sends", "trust"), [("increments", "server"), ("cumulative", "client")])
def test_killed_at_any_file_a_run_goes_on_with_the_same_noise(
    stream, tmp_path, fixed, monkeypatch, sends, trust
):
    """Wherever it is killed, no other next state is left."""
    options = {**LAPLACE, "sends": sends}
    options["privacy"] = {**LAPLACE["privacy"], "trust": trust}
    path, kills = tmp_path / "exp", 0
    make(stream, path, T - 1, **options)
    shutil.copytree(path, tmp_path / "begun")
    inside("rounds", path).ok()
    expected = states(path)
    state = path / f"round_{T + 1:04d}" / "global.safetensors"
    records = [path / "releases.tsv", *path.glob("clients/*/releases.tsv")]
    rows = [file.read_bytes() for file in records if file.exists()]
    for writes in range(40):
        shutil.rmtree(path)
        shutil.copytree(tmp_path / "begun", path)
        left = iter(range(writes))
        if not run_until(path, monkeypatch, lambda target: next(left, None) is None):  # noqa: B023
            break
        kills += 1
        assert not state.exists() or state.read_bytes() == expected[-1]
        inside("rounds", path).ok()
        assert states(path) == expected
        assert [file.read_bytes() for file in records if file.exists()] == rows
    assert 5 < kills < 40
    # Neither the server nor a client keeps temporary state beyond the complete round.
    assert not [file for file in (path / "server").rglob("*") if file.is_file()]
    assert not list(path.glob("clients/*/release.safetensors"))


def change_message(path: Path, number: int) -> None:
    """Add a word to a message, like a client that wants the round to be repeated."""
    (file,) = (path / f"round_{number:04d}").glob("update.*.safetensors")
    found = load_file(file)
    found["counts"][0, 5] += 1.0
    save_file(found, file)


def test_a_release_that_was_changed_is_refused(stream, tmp_path, key, monkeypatch):
    path = tmp_path / "exp"
    make(stream, path, **LAPLACE)
    assert run_until(path, monkeypatch, lambda target: target.name == "ledger.tsv")
    file = path / "server/release.safetensors"
    found = load_file(file)
    found["counts"][3] += 1
    save_file(found, file)
    inside("rounds", path).fails(1, f"{file}: changed since its release", "reset --round 1")
    inside("reset", path, "--round", 1).ok()
    inside("rounds", path).ok()


@pytest.mark.parametrize(
    ("options", "last"),
    [
        (LAPLACE, "server/release.safetensors"),
        (LAPLACE, "releases.tsv"),
        (LAPLACE, f"round_{T + 1:04d}/global.safetensors"),
        (LAPLACE, f"round_{T:04d}/ledger.tsv"),
        ({"privacy": {"mechanism": "paper"}}, f"round_{T:04d}/ledger.tsv"),
    ],
)
def test_a_release_that_was_written_is_the_one(stream, tmp_path, key, monkeypatch, options, last):
    """If a round is repeated with another message, no second noise is drawn."""
    path = tmp_path / "exp"
    make(stream, path, T - 1, **options)
    assert run_until(path, monkeypatch, lambda target: target == path / last)
    released = load_file(path / "server/release.safetensors")["counts"]
    change_message(path, T)
    inside("rounds", path).ok()
    before = counts_after(path, T - 1) if options is LAPLACE else 0.0
    assert (counts_after(path, T) == before + released).all()
    assert len(read_tsv(path / "releases.tsv", None)) == T
    rows = read_tsv(path / "dp.tsv", None) if total(path) else []
    assert [row["release"] for row in rows] == [*map(str, range(1, T + 1)), "total"]


def test_a_round_that_was_reset_is_released_again_and_counted(stream, tmp_path, key):
    path = tmp_path / "exp"
    make(stream, path, T, **LAPLACE)
    assert total(path)["utterance"] == 1
    messages, found = sent(path, T), [noise(path, T)]
    for again in (2, 3):
        inside("reset", path, "--round", T).ok()
        # A release counts, whether or not the round is repeated.
        assert total(path)["utterance"] == again - 1
        inside("rounds", path).ok()
        assert all((sent(path, T)[name] == messages[name]).all() for name in messages)
        found.append(noise(path, T))
        assert total(path)["utterance"] == again
    assert all(apart(one, two) for at, one in enumerate(found) for two in found[:at])
    rows = read_tsv(path / "dp.tsv", None)
    names = [*map(str, range(1, T + 1)), f"{T}.2", f"{T}.3", "total"]
    assert [row["release"] for row in rows] == names
    assert rows[-1]["composition"].endswith("2 drawn again")
    # Each utterance is in one round, and those of the first rounds were in two fewer releases.
    inside("reset", path, "--round", 1).ok()
    inside("rounds", path).ok()
    assert total(path)["utterance"] == 4 and len(read_tsv(path / "releases.tsv", None)) == T + 2 + T


def test_a_client_that_sends_again_counts_it(stream, tmp_path, key):
    path = tmp_path / "exp"
    make(stream, path, T, **BY_CLIENT)
    first = sent(path, T)
    assert total(path)["utterance"] == 1
    inside("reset", path, "--round", T).ok()
    inside("rounds", path).ok()
    again = sent(path, T)
    assert all(apart(first[name], again[name]) for name in first)
    assert total(path)["utterance"] == 2
    for client in first:
        rows = read_tsv(path / "clients" / client / "releases.tsv", None)
        assert [(row["round"], row["draw"]) for row in rows] == [
            *((str(number), "1") for number in range(1, T + 1)),
            (str(T), "2"),
        ]
    # The server releases nothing more from a sum of theirs alone.
    assert not (path / "releases.tsv").exists()


def test_a_client_repeats_what_it_has_released(stream, tmp_path, key, monkeypatch):
    """This holds even if its message is lost, or its counts have changed since."""
    path = tmp_path / "exp"
    make(stream, path, T - 1, **BY_CLIENT)
    assert run_until(path, monkeypatch, lambda target: target.name == "ledger.tsv")
    first = sent(path, T)
    for file in (path / f"round_{T:04d}").glob("update.*"):
        file.unlink()
    # The server's state says that they did not take part before, so that all would be new.
    (path / "round_0001/clients").write_text("ann\n")
    inside("rounds", path).ok()
    assert all((sent(path, T)[name] == first[name]).all() for name in first)
    assert total(path)["utterance"] == 1


# Copies.


def test_a_copy_draws_its_own_noise_and_both_count_it(stream, tmp_path, key, cli):
    path, copy = tmp_path / "exp", tmp_path / "copy"
    make(stream, path, 1, **LAPLACE)
    shutil.copytree(path, copy)
    inside("rounds", path).ok()
    assert total(path)["utterance"] == 1
    inside("rounds", copy).ok()
    assert (noise(path, 1) == noise(copy, 1)).all()
    for number in range(2, T + 1):
        assert apart(noise(path, number), noise(copy, number))
    # One release is common to both.
    for one in (path, copy):
        assert total(one)["utterance"] == 2
        names = [row["release"] for row in read_tsv(one / "dp.tsv", None)]
        assert names == ["1", "2", "2.2", "3", "3.2", "total"]
    assert cli("privacy", path, copy).ok().out.splitlines()[-1].split()[1:3] == ["4", "2"]


def test_a_moved_folder_is_the_same_and_a_backup_is_a_copy(stream, tmp_path, key):
    path, moved = tmp_path / "exp", tmp_path / "moved"
    make(stream, path, 1, **LAPLACE)
    shutil.copytree(path, tmp_path / "backup")
    path.rename(moved)
    inside("rounds", moved).ok()
    assert total(moved)["utterance"] == 1
    (tmp_path / "backup").rename(path)
    inside("rounds", path).ok()
    assert apart(noise(path, T), noise(moved, T))
    assert total(path)["utterance"] == 2
    # Without the key's record, other experiments' draws are unknown.
    beside = key.with_name("noise.key.releases")
    assert beside.stat().st_mode & 0o077 == 0
    beside.rename(tmp_path / "elsewhere")
    inside("reset", path, "--round", T).ok()
    inside("rounds", path).fails(1, "the record of the releases of", "put it back next to the key")
    assert "copies are not counted" in inside("privacy", path).ok().err
    (tmp_path / "elsewhere").rename(beside)
    inside("rounds", path).ok()


# What a server can write. It also mends the sums of the experiment's files.


def mend(path: Path) -> None:
    """Write the sums of an experiment's frozen files as they are now."""
    names = [line.split()[1] for line in (path / "sha256sums").read_text().splitlines()]
    sums = [f"{hashlib.sha256((path / name).read_bytes()).hexdigest()}  {name}" for name in names]
    (path / "sha256sums").write_text("".join(f"{line}\n" for line in sums))


def recorded(key: Path) -> int:
    """Return the number of releases that the record next to the key has."""
    tables = key.with_name(f"{key.name}.releases").glob("*/*.tsv")
    return sum(len(table.read_text().splitlines()) - 1 for table in tables)


def mark_nonce(path: Path) -> None:
    (path / "nonce").write_text(f"{(path / 'nonce').read_text().strip()} fixed\n")


def another_nonce(path: Path) -> None:
    (path / "nonce").write_text("ab" * 16 + "\n")


def options(path: Path, **changed) -> None:
    """Change options of privacy, or with None remove all of them."""
    config = yaml.safe_load((path / "config.yaml").read_text())
    if None in changed.values():
        config["method_conf"]["privacy"] = {"mechanism": "none"}
    else:
        config["method_conf"]["privacy"] |= changed
    (path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


def own_registry(path: Path) -> None:
    """Name a link to the client's key, with a record that the server has made."""
    from fedtools.privacy.key import key_path

    (path.parent / "mine").mkdir()
    link = path.parent / "mine/noise.key"
    link.symlink_to(key_path())
    nonce = (path / "nonce").read_text().strip()
    made = link.with_name("noise.key.releases") / nonce
    made.mkdir(parents=True)
    config = yaml.safe_load((path / "config.yaml").read_text())
    config["method_conf"]["noise_key"] = str(link)
    # An option that is given has no default.
    del config["defaults"]["method_conf"]["noise_key"]
    (path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    for name in ("folder", "clients"):
        (made / name).write_text("")
    sums = (path / "sha256sums").read_text().splitlines()[:3]
    changed = hashlib.sha256((path / "config.yaml").read_bytes()).hexdigest()
    (made / "sha256sums").write_text("\n".join([f"{changed}  config.yaml", *sums[1:]]) + "\n")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (another_nonce, "the record of the releases"),
        (lambda path: options(path, epsilon=1e6), "config.yaml: not the one"),
        (lambda path: options(path, trust="server"), "config.yaml: not the one"),
        (lambda path: options(path, mechanism=None), "began with differential privacy"),
        (own_registry, "config.yaml: not the one"),
        (lambda path: (path / "clients.txt").write_text("ann\nbob\n"), "clients.txt: not the one"),
    ],
)
def test_a_server_cannot_switch_off_what_protects_a_client(stream, tmp_path, key, change, said):
    path = tmp_path / "exp"
    make(stream, path, 1, **BY_CLIENT)
    before = recorded(key)
    assert before == 3
    change(path)
    mend(path)
    if inside("sample", path).code == 0:
        inside("train-local", path).fails(1, said)
    else:
        inside("rounds", path).fails(1, said)
    assert not list((path / "round_0002").glob("update.*")) and recorded(key) == before


def test_noise_that_a_server_asks_for_again_is_counted(stream, tmp_path, key):
    """Any change of the sums gives another noise on the same counts; no mark switches it off."""
    path = tmp_path / "exp"
    make(stream, path, **BY_CLIENT)
    messages = []
    for number in range(4):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(path, copy)
        mark_nonce(copy)
        mend(copy)
        with (copy / "sha256sums").open("a") as file:
            file.write(f"{number:064x}  round_0001/note\n")
        inside("sample", copy).ok()
        inside("train-local", copy).ok()
        messages.append(sent(copy, 1))
        assert recorded(key) == 3 * (number + 1)
    assert all(apart(messages[0]["ann"], other["ann"]) for other in messages[1:])


@pytest.mark.parametrize("options", [LAPLACE, BY_CLIENT])
@pytest.mark.parametrize("draw", [1, 77])
def test_a_planted_release_is_not_sent(stream, tmp_path, key, options, draw):
    path = tmp_path / "exp"
    make(stream, path, 1, **options)
    size = len(next(iter(sent(path, 1).values())))
    owner = path / ("server" if options is LAPLACE else "clients/ann")
    owner.mkdir(exist_ok=True)
    planted = {"counts": np.zeros(size), "round": np.array(2), "draw": np.array(draw)}
    save_file(planted, owner / "release.safetensors")
    before = recorded(key)
    inside("rounds", path).fails(1, f"{owner}/release.safetensors: changed since its release")
    assert recorded(key) == before
    inside("reset", path, "--round", 2).ok()
    inside("rounds", path).ok()


def test_a_key_has_one_record_whatever_its_name(stream, tmp_path, key, monkeypatch):
    path = tmp_path / "exp"
    make(stream, path, 1, **LAPLACE)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/name").symlink_to(key)
    monkeypatch.setenv("FEDTOOLS_NOISE_KEY", str(tmp_path / "other/name"))
    inside("rounds", path, "--to", 2).ok()
    assert recorded(key) == 2 and not (tmp_path / "other/name.releases").exists()
    (tmp_path / "other/name").unlink()
    (tmp_path / "other/name").hardlink_to(key)
    inside("rounds", path).fails(1, "the record of the releases")
    config = ("--config", tmp_path / "exp.yaml", "--method", "fmp", "--data", f"train={stream}")
    inside("init", tmp_path / "new", *config).fails(1, "a noise key with 2 hard links")
    monkeypatch.setenv("FEDTOOLS_NOISE_KEY", str(key))
    inside("rounds", path).fails(1, f"{key}: a noise key with 2 hard links")
    (tmp_path / "other/name").unlink()
    # A record that others can change is none.
    beside = key.with_name(f"{key.name}.releases")
    beside.chmod(0o777)
    inside("rounds", path).fails(1, f"{beside}: another user can change this record")
    beside.chmod(0o700)
    inside("rounds", path).ok()


def test_an_experiment_without_privacy_in_the_folder_of_one_with(stream, tmp_path, key):
    """Begun by the user it is another one; made of the other by changing its options, it is not."""
    path = tmp_path / "exp"
    make(stream, path, 1, **LAPLACE)
    shutil.rmtree(path)
    make(stream, path, T)
    assert (path / f"round_{T + 1:04d}/global.safetensors").exists()


# Content of releases.


@pytest.fixture(scope="module")
def silent(stream, tmp_path_factory) -> Path:
    """Make a stream with all speech after all groups but the last, so that all counts are zero."""
    late = tmp_path_factory.mktemp("silent") / "stream"
    shutil.copytree(stream, late)
    lines = [line.split() for line in (late / "segments").read_text().splitlines()]
    later = [(name, audio, float(at) + 1000, float(to) + 1000) for name, audio, at, to in lines]
    (late / "segments").write_text("".join(f"{n} {a} {at} {to}\n" for n, a, at, to in later))
    return late


def test_the_papers_mechanism_of_nothing_is_noise(silent, tmp_path, key):
    """Before any word is said, exact counts are zeros, which would reveal just that."""
    path = tmp_path / "exp"
    privacy = {"mechanism": "paper", "epsilon": 1.0}
    make(silent, path, T, privacy=privacy, groups="clock", span=SPAN)
    assert not any(counts.any() for counts in sent(path, T).values())
    found = [counts_after(path, number) for number in range(1, T + 1)]
    for counts in found:
        assert counts.sum() == pytest.approx(1) and len(np.unique(counts)) > 5
    before = total(path)
    inside("reset", path, "--round", T).ok()
    inside("rounds", path).ok()
    found.append(counts_after(path, T))
    assert all((one != two).sum() > 5 for at, one in enumerate(found) for two in found[:at])
    assert len(read_tsv(path / "releases.tsv", None)) == T + 1
    # No client had anything to lose.
    assert before == total(path) == {"word": 0, "utterance": 0, "user": 0}


@pytest.mark.parametrize("options", [LAPLACE, BY_CLIENT])
def test_equal_counts_meet_other_noise_of_every_round_and_client(silent, tmp_path, key, options):
    path = tmp_path / "exp"
    make(silent, path, T, **options)
    if options is LAPLACE:
        found = [noise(path, number) for number in range(1, T + 1)]
    else:
        found = [counts for number in range(1, T + 1) for counts in sent(path, number).values()]
        assert len(found) == 3 * T
    assert all(apart(one, two) for at, one in enumerate(found) for two in found[:at])


@pytest.mark.parametrize("sends", ["increments", "cumulative"])
def test_a_user_adds_no_more_than_its_cap_over_all_rounds(stream, tmp_path, key, sends):
    """This holds for unnoised messages: the sum of increments, or the last cumulative counts."""
    cap = 5.0
    privacy = {"mechanism": "laplace", "unit": "user", "cap": cap, "epsilon": 1e6}
    path = tmp_path / "exp"
    make(stream, path, T, privacy=privacy, sends=sends, sigma=0.1)
    rounds = [sent(path, number) for number in range(1, T + 1)]
    added = rounds if sends == "increments" else rounds[-1:]
    for client in rounds[0]:
        # Counts of the first round.
        assert rounds[0][client].sum() == pytest.approx(cap, abs=1e-4)
        assert sum(one[client] for one in added).sum() <= cap


class Seen(Releases):
    """A record of the counts that each client has bounded."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.by: dict[str, list[np.ndarray]] = {}

    def by_client(self, counts: np.ndarray, number: int, client: str) -> np.ndarray:
        self.by.setdefault(client, []).append(counts)
        return super().by_client(counts, number, client)


@pytest.mark.parametrize("release", ["increments", "cumulative"])
def test_nor_does_a_user_in_a_sweep(stream, release):
    opened, cap = open_stream(stream), 5.0
    privacy = {"mechanism": "laplace", "unit": "user", "cap": cap}
    method = FMP(sigma=0.1, privacy=privacy, sends=release)
    seen = Seen(method.plan(T), NoiseKey(bytes(32)), "sweep")
    groups = {client: opened.groups(client, T) for client in opened.runs}
    simulate(method, Lists(opened.rescored, ListWeights()), groups, seen)
    assert len(seen.by) == 3
    for counts in seen.by.values():
        assert len(counts) == T and counts[0].sum() == pytest.approx(cap, abs=1e-4)
        assert (sum(counts) if release == "increments" else counts[-1]).sum() <= cap


def test_sweeps_have_nonces_of_their_own(stream, tmp_path, set_key, monkeypatch, cli):
    """A repeated table is the same; another nonce, key, seed or setting has other noise."""
    options = ("--set", f"rounds={T}", "--set", "mechanism=laplace", "--set", "epsilon=0.1")
    options += ("--vary", "scale=0.5,1,2", "--vary", "cap=1,2,4,8")

    def swept(name: str, *more: str) -> str:
        cli("rescore-sweep", stream, tmp_path / name, *options, *more).ok()
        return (tmp_path / name).read_text()

    assert swept("one") == swept("one") and swept("two")
    drawn = {(tmp_path / f"{name}.nonce").read_text() for name in ("one", "two")}
    assert len(drawn) == 2
    cli("rescore-sweep", stream, tmp_path / "plain", "--vary", "scale=1").ok()
    assert not (tmp_path / "plain.nonce").exists()
    monkeypatch.setenv("FEDTOOLS_NONCE", NONCE)
    table = swept("three")
    assert table == swept("four")
    # With another seed, intervals differ too.
    errors = [row["errors"] for row in read_tsv(tmp_path / "three", None)]
    swept("four", "--seed", "1")
    assert errors != [row["errors"] for row in read_tsv(tmp_path / "four", None)]
    monkeypatch.setenv("FEDTOOLS_NONCE", NONCE[::-1])
    assert swept("three") != table
    monkeypatch.setenv("FEDTOOLS_NONCE", NONCE)
    set_key.write_text("01" * 32)
    assert swept("three") != table


# Several experiments.


def test_what_experiments_cost_together_by_hand():
    def spent(epsilon: float, **owners: str) -> Spent:
        return Spent((epsilon, 2 * epsilon, 5 * epsilon), owners)

    same = [spent(1, u="ann", v="bob"), spent(2, u="ann", v="bob"), spent(4, u="ann", v="bob")]
    assert together(same) == (7, 14, 35)
    assert together([spent(1, u="ann"), spent(3, w="cat")]) == (3, 6, 15)
    # An utterance that two of three have; ann is in all three.
    some = [spent(1, u="ann"), spent(2, u="ann", v="bob"), spent(4, x="ann")]
    assert together(some) == (4, 8, 35)
    # The same speech, divided by speaker and by meeting: one overlaps two of the other.
    assert together([spent(1, u="ann", v="bob"), spent(1, u="m", v="m")]) == (2, 4, 15)
    # Utterances connect clients that have no name in common.
    chain = [spent(1, u="a", v="b"), spent(1, v="c", w="d"), spent(1, w="e")]
    assert together(chain) == (2, 4, 10)
    assert together([]) == (0, 0, 0)


def renamed(stream: Path, out: Path, names: dict[str, str]) -> Path:
    """Copy the stream with other speakers' names."""
    shutil.copytree(stream, out)
    for name in ("nbest.tsv", "nnlm.scp", "segments", "text", "utt2client", "utt2spk"):
        text = (out / name).read_text()
        for old, new in names.items():
            text = text.replace(f"{old}-", f"{new}-").replace(f" {old}\n", f" {new}\n")
        (out / name).write_text(text)
    return out


def test_experiments_on_the_same_people_add_up(stream, tmp_path, key, cli):
    others = renamed(stream, tmp_path / "s1", {"ann": "dan", "bob": "eve", "cat": "fox"})
    some = renamed(stream, tmp_path / "s2", {"ann": "aa", "bob": "b"})
    # Another seed's lists have other scores.
    seed = tmp_path / "seed"
    shutil.copytree(stream, seed)
    text = (seed / "nbest.tsv").read_text()
    (seed / "nbest.tsv").write_text(text.replace("\t-2\t", "\t-2.1\t"))
    paths = [tmp_path / name for name in "abcd"]
    for path, data in zip(paths, (stream, others, some, seed), strict=True):
        make(data, path, T, **LAPLACE)
    alone = [total(path) for path in paths]
    assert {one["utterance"] for one in alone} == {1}

    def summed(*at: int) -> list[float]:
        lines = cli("privacy", *(paths[one] for one in at)).ok().out.splitlines()
        assert len(lines) == 2 + len(at)
        return [float(value) for value in lines[-1].split()[1:]]

    assert summed(0, 3) == [4, 2, alone[0]["user"] + alone[3]["user"]]
    assert summed(0, 1) == [2, 1, max(alone[at]["user"] for at in (0, 1))]
    # One client of three is the same.
    assert summed(0, 1, 2)[1] == 2
    assert summed(0, 0) == [2, 1, alone[0]["user"]]
    # A user who passes one is shown the others, and one that is missing.
    told = cli("privacy", paths[0], paths[3]).ok().err
    assert told == f"warning: experiments on the same clients not counted: {paths[2]}\n"
    shutil.rmtree(paths[3])
    told = cli("privacy", paths[0]).ok().err
    assert f"{paths[2]}, {paths[3]}\n" in told
    assert cli("privacy", paths[1]).ok().err == ""
    plain = begin(stream, tmp_path / "plain")
    cli("privacy", paths[0], plain).fails(1, "no differential privacy", str(plain))


def test_a_killed_init_leaves_nothing_in_the_way(stream, tmp_path, key, monkeypatch):
    config = {"task": "rescore", "rounds": T, "method_conf": LAPLACE}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    command = ("init", tmp_path / "exp", "--config", tmp_path / "c.yaml", "--method", "fmp")
    replace = os.replace

    def killed(source, target):
        if Path(target).name == "sha256sums":
            raise Killed
        replace(source, target)

    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(os, "replace", killed)
        inside(*command, "--data", f"train={stream}")
    assert (tmp_path / "exp/nonce").exists() and not (tmp_path / "exp/sha256sums").exists()
    inside(*command, "--data", f"train={stream}").ok()
    inside("rounds", tmp_path / "exp").ok()
