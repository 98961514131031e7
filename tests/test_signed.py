"""Keys, signed requests and answers, and what a site allows: each fault is one line."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import test_capsules
from conftest import inside
from test_capsules import SITES, begin, changed, run, world

from fedtools.core.tables import read_tsv
from fedtools.exchange.states import save_state

__all__ = ["world"]
NAMES = ("a", "b", "server")


def openssl(*words: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run(["openssl", *map(str, words)], capture_output=True, check=False)


def make_roster(keys: Path, names: tuple[str, ...] = NAMES) -> Path:
    """Make a key for each name, and the roster."""
    found = [inside("site-key", keys / f"{name}.key").ok().out.strip() for name in names]
    rows = "".join(f"{name}\t{key}\n" for name, key in zip(names, found, strict=True))
    (keys / "roster.tsv").write_text(f"site\tkey\n{rows}")
    return keys / "roster.tsv"


def signed(place: Path, name: str) -> tuple[str, Path]:
    return "--key", place / "keys" / f"{name}.key"


def ask(place: Path, number: int, site: str, out: Path) -> Path:
    words = "site", place / "parts", "--site", site, "--round", number, *signed(place, "server")
    inside(*words, out).ok()
    return out


def resign(place: Path, path: Path, name: str = "server") -> None:
    """Sign a file by OpenSSL, which knows nothing of this project."""
    words = "pkeyutl", "-sign", "-rawin", "-inkey", place / "keys" / f"{name}.key"
    assert not openssl(*words, "-in", path, "-out", f"{path}.sig").returncode


@pytest.fixture(scope="module")
def asked(world, tmp_path_factory) -> Path:
    """Return a folder with a signed experiment, keys, capsules, and requests of round 2.

    The capsules are there as they came, too: unused-a, unused-b.
    """
    place = tmp_path_factory.mktemp("asked")
    roster = make_roster(place / "keys")
    more = "--roster", roster, "--set", "clients_per_round=null"
    parts = begin(world, place / "parts", "fedavg", *more)
    inside("sample", parts).ok()
    for site in "ab":
        inside("site", parts, "--site", site, *signed(place, "server"), place / site).ok()
        shutil.copytree(place / site, place / f"unused-{site}")
        first = ask(place, 1, site, place / f"{site}1")
        run(world, place / site, first, place / "sent", *signed(place, site)).ok()
        for file in (place / "sent").iterdir():
            shutil.move(file, parts / "round_0001")
        (place / "sent").rmdir()
    inside("aggregate", parts).ok()
    inside("sample", parts).ok()
    for site in "ab":
        ask(place, 2, site, place / f"{site}2")
    return place


@pytest.fixture
def mine(asked, tmp_path) -> Path:
    """Return a copy of the folder that a test may change."""
    return Path(shutil.copytree(asked, tmp_path / "asked"))


def test_openssl_reads_keys_and_checks_signatures(asked, tmp_path):
    key, path = asked / "keys" / "server.key", asked / "a2" / "request.yaml"
    public = tmp_path / "public.pem"
    assert not openssl("pkey", "-in", key, "-pubout", "-out", public).returncode
    raw = openssl("pkey", "-in", key, "-pubout", "-outform", "DER").stdout
    rows = {row["site"]: row["key"] for row in read_tsv(asked / "keys" / "roster.tsv", None)}
    assert raw[-32:].hex() == rows["server"]
    words = "pkeyutl", "-verify", "-pubin", "-rawin", "-inkey", public, "-sigfile"
    for signed_ in (path, asked / "a" / "sha256sums"):
        assert not openssl(*words, f"{signed_}.sig", "-in", signed_).returncode
    (tmp_path / "other").write_bytes(path.read_bytes() + b"#")
    assert openssl(*words, f"{path}.sig", "-in", tmp_path / "other").returncode


def test_a_key_is_made_once_and_is_its_owners_alone(tmp_path):
    path = tmp_path / "new" / "site.key"
    first = inside("site-key", path).ok().out
    assert inside("site-key", path).ok().out == first and path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    inside("site-key", path).fails(1, "other users can access the key")
    path.chmod(0o600)
    for content in (b"", b"x" * 100, b"\xff\0", path.read_bytes()[:60], b"a" * 10**6):
        path.write_bytes(content)
        inside("site-key", path).fails(1)
    for kind in (("-algorithm", "x25519"), ("-algorithm", "ed25519", "-aes256", "-pass", "pass:x")):
        path.unlink()
        assert not openssl("genpkey", *kind, "-out", path).returncode
        path.chmod(0o600)
        inside("site-key", path).fails(1, "not an Ed25519 key without password")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("site\tkey", "site key"), "roster.tsv:1: "),
        (lambda text: text.replace("\nb\t", "\nc\t"), ":3: 'c' is no site of this experiment"),
        (lambda text: text.replace("\nb\t", "\na\t"), ":3: a came before"),
        (lambda text: text + text.splitlines()[1] + "\n", ":5: a came before"),
        (lambda text: text.replace("\na\t", "\na\t0"), ":2: the key of a is not one of 64"),
        (lambda text: text[:-2] + "G\n", ":4: the key of server is not one of 64"),
        (lambda text: "\n".join(text.splitlines()[:-1]) + "\n", "no key of server"),
        (
            lambda text: text.replace(text.splitlines()[2][2:], text.splitlines()[1][2:]),
            ":3: b has the key of another",
        ),
    ],
)
def test_bad_rosters(world, tmp_path, change, said):
    roster = make_roster(tmp_path / "keys")
    roster.write_text(change(roster.read_text()))
    words = "init", tmp_path / "exp", "--config", world / "config.yaml", "--method", "fedavg"
    words += ("--data", f"train={world / 'train'}", "--sites", world / "sites.tsv")
    inside(*words, "--roster", roster).fails(1, said)
    assert not (tmp_path / "exp").exists()


def test_a_roster_is_fixed_and_its_fingerprint_printed(world, tmp_path):
    roster, path = make_roster(tmp_path / "keys"), tmp_path / "exp"
    words = ("init", path, "--config", world / "config.yaml", "--method", "fedavg")
    words += ("--data", f"train={world / 'train'}", "--sites", world / "sites.tsv")
    said = inside(*words, "--roster", roster).ok().out
    found = subprocess.run(["sha256sum", path / "roster.tsv"], capture_output=True, check=True)
    assert f"fingerprint {found.stdout.decode().split()[0]}" in said
    inside(*words).fails(1, "not the keys that")
    inside("site-key", tmp_path / "keys" / "new.key").ok()
    (tmp_path / "keys" / "a.key").unlink()
    inside(*words, "--roster", make_roster(tmp_path / "keys")).fails(1, "not the keys that")
    changed_ = (path / "roster.tsv").read_text().replace("b\t", "b\t0")
    (path / "roster.tsv").write_text(changed_)
    inside("sample", path).fails(1, "changed since the experiment began")
    inside(*words[:-2], "--roster", roster).fails(1, "a roster of keys without sites")


def test_signed_answers_give_the_bytes_of_one_machine(world, asked, tmp_path):
    whole = begin(world, tmp_path / "whole", "fedavg", "--set", "clients_per_round=null")
    inside("rounds", whole, "--to", 1).ok()
    name = "round_0002/global.safetensors"
    assert (whole / name).read_bytes() == (asked / "parts" / name).read_bytes()
    assert test_capsules.costs(whole, 1) == test_capsules.costs(asked / "parts", 1)


def test_what_must_be_signed_is_not_written_without_the_key(world, asked, tmp_path):
    words = "site", asked / "parts", "--site", "a"
    for more in ((), ("--round", 2)):
        inside(*words, *more, tmp_path / "out").fails(1, "must be signed", "give the key of server")
        other = signed(asked, "a")
        inside(*words, *more, *other, tmp_path / "out").fails(1, "not the key of server")
    capsule = Path(shutil.copytree(asked / "a", tmp_path / "a"))
    run(world, capsule, asked / "a2", tmp_path / "out").fails(1, "give the key of a")
    run(world, capsule, asked / "a2", tmp_path / "out", *signed(asked, "b")).fails(1, "key of a")
    assert not (tmp_path / "out").exists()
    unsigned = begin(world, tmp_path / "parts", "fedavg")
    inside("site", unsigned, "--site", "a", *signed(asked, "server"), tmp_path / "out").fails(
        1, "no roster of keys", "leave --key out"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: changed(path, "request.yaml", "round: 2", "round: 3"), "not signed by serv"),
        (lambda path: (path / "request.yaml.sig").unlink(), "request.yaml.sig: "),
        (lambda path: (path / "request.yaml.sig").write_bytes(b"\0" * 64), "not signed by server"),
        (lambda path: (path / "request.yaml.sig").write_bytes(b"x"), "not signed by server"),
        (lambda path: os.truncate(path / "request.yaml.sig", 10**9), "bytes, more than"),
        (lambda path: os.truncate(path / "request.yaml", 10**9), "bytes, more than"),
        (lambda path: (path / "request.yaml").write_bytes(b"\xff\0"), "not signed by server"),
        (lambda path: resign(path.parent, path / "request.yaml", "b"), "not signed by server"),
        (
            lambda path: (path / "clients").write_text(next(iter(SITES)) + "\n"),
            "not what the request states",
        ),
        (lambda path: (path / "global.safetensors").write_bytes(b"x"), "not the state of"),
        (lambda path: shutil.copytree(path.parent / "a1", path, dirs_exist_ok=True), "differs fr"),
        (lambda path: shutil.copytree(path.parent / "b2", path, dirs_exist_ok=True), "not a req"),
    ],
)
def test_a_request_that_the_server_has_not_signed_is_refused(world, mine, change, said):
    """Also one of another site, and an older one that carries a new number's files."""
    before = test_capsules.kept(mine / "a")
    right = Path(shutil.copytree(mine / "a2", mine / "right"))
    change(mine / "a2")
    if said == "differs fr":
        # The request of round 1, answered already, with the clients of another site.
        (mine / "a2" / "clients").write_text("")
        said = "not what the request states"
    run(world, mine / "a", mine / "a2", mine / "sent", *signed(mine, "a")).fails(1, said)
    assert not (mine / "sent").exists()
    after = test_capsules.kept(mine / "a")
    assert {one: after.get(one) for one in before} == before
    if after != before:
        run(world, mine / "a", right, mine / "sent", *signed(mine, "a")).ok()


@pytest.mark.parametrize(
    "change",
    [
        lambda capsule: changed_sum(capsule, "clients.txt", next(iter(SITES)), "x"),
        lambda capsule: changed_sum(capsule, "config.yaml", "rounds: 4", "rounds: 9"),
        lambda capsule: (capsule / "sha256sums.sig").unlink(),
    ],
)
def test_a_capsule_that_the_server_has_not_signed_is_refused(world, mine, change):
    change(mine / "a")
    run(world, mine / "a", mine / "a2", mine / "sent", *signed(mine, "a")).fails(1, "sha256sums")
    assert not (mine / "sent").exists()


def changed_sum(capsule: Path, name: str, old: str, new: str) -> None:
    """Change a fixed file and its sum, as whoever carries a capsule could."""
    path = capsule / name
    text, before = path.read_text(), test_capsules.sha256(path)
    assert old in text
    path.write_text(text.replace(old, new))
    sums = capsule / "sha256sums"
    sums.write_text(sums.read_text().replace(before, test_capsules.sha256(path)))


def test_a_server_with_another_model_is_not_answered(world, mine):
    """Nor is a request accepted that then could not be answered: the right one still is."""
    key, states = signed(mine, "a"), np.zeros(3, np.float32)
    for number, said in ((1, "another state than the capsule has"), (2, "tensor")):
        capsule = mine / ("unused-a" if number == 1 else "a")
        bad = Path(shutil.copytree(mine / f"a{number}", mine / "bad"))
        before = test_capsules.sha256(bad / "global.safetensors")
        save_state(bad / "global.safetensors", {"x": states})
        request, after = bad / "request.yaml", test_capsules.sha256(bad / "global.safetensors")
        request.write_text(request.read_text().replace(before, after))
        resign(mine, request)
        words = ("--data", f"train={world / 'a-train'}", *key)
        inside("site-round", capsule, bad, mine / "sent", *words).fails(1, said)
        inside("site-round", capsule, mine / f"a{number}", mine / "sent", *words).ok()
        shutil.rmtree(mine / "sent")
        shutil.rmtree(bad)


def forged(capsule: Path) -> None:
    """Put an answer of the site's own into a capsule, with other parameters, for it to sign."""
    shutil.copytree(capsule.parent / "a" / "round_0001", capsule / "round_0001", dirs_exist_ok=True)
    one_bit(capsule / "round_0001" / "update.1.safetensors")


def linked(capsule: Path) -> None:
    (capsule.parent / "elsewhere").mkdir()
    (capsule / "clients").symlink_to(capsule.parent / "elsewhere")


def doubled(capsule: Path) -> None:
    (capsule.parent / "tokens").hardlink_to(capsule / "classes.txt")


def fifo(capsule: Path) -> None:
    (capsule / "config.yaml").unlink()
    os.mkfifo(capsule / "config.yaml")


def folders(capsule: Path) -> None:
    """Make a thousand folders within each other, under the name of a temporary file."""
    place = capsule / ".admitted.tmp"
    place.mkdir()
    for _ in range(300):
        place /= "x" * 9
        place.mkdir()


OTHERS = "not one of the files that the server has put there"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (forged, OTHERS),
        (linked, OTHERS),
        (doubled, "a link, or no regular file"),
        (fifo, "config.yaml"),
        (folders, OTHERS),
        (lambda capsule: (capsule / "local.yaml").write_text("sums: [1]\n"), OTHERS),
        (lambda capsule: (capsule / "resetting").write_text("1\n"), OTHERS),
        (lambda capsule: (capsule / ".locks").symlink_to(capsule.parent), "a symbolic link"),
        (lambda capsule: (capsule / "admitted").write_text("capsule: x\nfiles: {}\n"), ""),
        (lambda capsule: os.truncate(capsule / "sha256sums", 10**10), "bytes, more than"),
    ],
)
def test_a_site_takes_nothing_that_a_carrier_has_put_into_a_capsule(world, mine, change, said):
    """It would sign an answer that it has not made, or write into another folder."""
    capsule = mine / "unused-a"
    change(capsule)
    words = ("--data", f"train={world / 'a-train'}", *signed(mine, "a"))
    found = inside("site-round", capsule, mine / "a1", mine / "sent", *words)
    if not said:
        # What the site has not signed says nothing, and is written anew.
        found.ok()
        return
    found.fails(1, said)
    assert not (mine / "sent").exists() and not (capsule / "admitted").exists()
    assert not [*mine.glob("elsewhere/*"), *mine.glob("rounds")]


def without(name: str):
    def change(capsule: Path) -> None:
        lines = (capsule / "sha256sums").read_text().splitlines(keepends=True)
        kept = "".join(line for line in lines if not line.endswith(f"  {name}\n"))
        (capsule / "sha256sums").write_text(kept)

    return change


def more_sums(name: str):
    def change(capsule: Path) -> None:
        with open(capsule / "sha256sums", "a") as file:
            file.write(f"{'0' * 64}  {name}\n")

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (more_sums("../x"), "'../x' is no file of a capsule"),
        (more_sums("round_0002/clients"), "is no file of a capsule"),
        (more_sums("local.yaml"), "is no file of a capsule"),
        (without("origin"), "a whole experiment"),
        (without("sites.tsv"), "a capsule of 0 sites"),
        (lambda capsule: changed_sum(capsule, "sites.tsv", "7e7\ta", "7e7\tb"), "of 2 sites"),
        (lambda capsule: changed_sum(capsule, "config.yaml", "data: {}", "data: {train: /}"), ""),
    ],
)
def test_a_capsule_that_no_server_should_sign_is_refused(world, mine, change, said):
    """But for a path of data, which has no effect: the site names its data."""
    capsule = mine / "unused-a"
    change(capsule)
    resign(mine, capsule / "sha256sums")
    words = (mine / "a1", mine / "sent", *signed(mine, "a"), "--data")
    found = inside(
        "site-round", capsule, *words, f"{'train' if said else 'valid'}={world / 'a-train'}"
    )
    found.fails(1, said or "asks for train data", "" if said else "give --data train=FOLDER")
    assert not (mine / "sent").exists()


def test_a_folder_that_is_no_capsule(world, mine):
    words = (mine / "a1", mine / "sent", *signed(mine, "a"), "--data", f"train={world / 'a-train'}")
    inside("site-round", mine / "none", *words).fails(1, "no capsule here")
    inside("site-round", mine / "a1", *words).fails(1, "no capsule here")
    inside("site-round", mine / "parts", *words).fails(1, "a whole experiment", "fedtools site")
    assert not (mine / "a1" / ".locks").exists()


@pytest.fixture(scope="module")
def sent(world, asked, tmp_path_factory) -> Path:
    """Return a folder with the answers of both sites to the requests of round 2."""
    place = tmp_path_factory.mktemp("sent")
    for site in "ab":
        capsule = Path(shutil.copytree(asked / site, place / f"capsule-{site}" / site))
        words = (asked / f"{site}2", place / site, *signed(asked, site))
        run(world, capsule, *words).ok()
    return place


@pytest.fixture
def round_2(mine, sent) -> Path:
    """Return the folder of round 2 at the server, with the answers of both sites."""
    for file in (*(sent / "a").iterdir(), *(sent / "b").iterdir()):
        shutil.copy(file, mine / "parts" / "round_0002")
    return mine / "parts" / "round_0002"


def one_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def other_experiment(folder: Path) -> None:
    """Put the answer of another experiment of the same sites, keys and seed in the place of a's."""
    changed_answer(folder, "experiment: ", "experiment: 0")


def changed_answer(folder: Path, old: str, new: str, name: str = "a") -> None:
    path = folder / "update.1.answer"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    resign(folder.parent.parent, path, name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "update.1.answer").unlink(), "update.1.answer: cannot be read"),
        (lambda folder: (folder / "update.1.answer.sig").unlink(), "answer.sig: cannot be read"),
        (lambda folder: one_bit(folder / "update.1.answer.sig"), "not signed by a"),
        (
            lambda folder: one_bit(folder / "update.1.safetensors"),
            "not the update.1.safetens",
        ),
        (lambda folder: changed_answer(folder, "round: 2", "round: 1"), "is of another round"),
        (lambda folder: changed_answer(folder, "attempt: 1", "attempt: 2"), "of another attempt"),
        (lambda folder: changed_answer(folder, "job: 1", "job: 2"), "is of another job"),
        (lambda folder: changed_answer(folder, "site: a", "site: b"), "is of another site"),
        (lambda folder: changed_answer(folder, "base: ", "base: 0"), "is of another base"),
        (other_experiment, "is of another experiment"),
        (lambda folder: changed_answer(folder, "format: 1", "format: 9"), "of message format 9"),
        (lambda folder: changed_answer(folder, "fedtools: 0.1", "fedtools: 0.9"), "fedtools 0.9"),
        (lambda folder: changed_answer(folder, "a", "a", "b"), "not signed by a"),
        (lambda folder: changed_answer(folder, "files:", "more: 1\nfiles:"), "unknown option 'mor"),
        (lambda folder: os.truncate(folder / "update.1.answer", 10**9), "bytes, more than"),
    ],
)
def test_an_answer_that_its_site_has_not_signed_costs_its_own_clients(round_2, change, said):
    """And nobody else's: the round goes on."""
    folder = round_2
    change(folder)
    inside("aggregate", folder.parent).ok()
    rows = [row for row in read_tsv(folder / "ledger.tsv", None) if row["client"] != "-"]
    lost = {row["client"] for row in rows if said in row["status"]}
    assert lost == {client for client, site in SITES.items() if site == "a"}
    assert {row["status"] for row in rows if row["client"] not in lost} == {"ok"}


def test_an_answer_may_have_files_of_clients_that_are_refused(round_2, monkeypatch):
    """The length of a statement is that of the clients that were asked for."""
    folder = round_2
    table, stated = folder / "update.1.tsv", folder / "update.1.answer"
    head, first, *rows = table.read_text().splitlines()
    before = test_capsules.sha256(table)
    rows = [row.replace("\t", "\t-", 1) for row in rows]
    table.write_text("".join(f"{row}\n" for row in (head, first, *rows)))
    changed_answer(folder, before, test_capsules.sha256(table))
    # As if each file had a name of the longest kind.
    size, files = stated.stat().st_size, 2 + 2 * (1 + len(rows))
    monkeypatch.setattr("fedtools.exchange.signed._STATEMENT_BYTES", size - 512 * files)
    inside("aggregate", folder.parent).ok()
    status = {row["client"]: row["status"] for row in read_tsv(folder / "ledger.tsv", None)}
    assert status[first.split("\t")[0]] == "ok"
    assert all("utterances" in status[row.split("\t")[0]] for row in rows) and rows


def test_another_torch_or_processor_stands_in_the_ledger(round_2):
    folder = round_2
    changed_answer(folder, "torch: ", "torch: 9")
    inside("aggregate", folder.parent).ok()
    for row in read_tsv(folder / "ledger.tsv", None):
        expected = "other torch or processor" if SITES.get(row["client"]) == "a" else "ok"
        assert row["status"] == expected


def test_a_site_is_told_of_a_server_with_another_torch(world, mine):
    changed(mine / "a2", "request.yaml", "torch: ", 'torch: "9\\n\\e[2J" #')
    resign(mine, mine / "a2" / "request.yaml")
    said = run(world, mine / "a", mine / "a2", mine / "sent", *signed(mine, "a")).ok()
    (line,) = said.err.splitlines()
    assert "the server has torch 9\\n\\x1b[2J" in line and "may differ by rounding" in line


def test_after_a_reset_answered_requests_are_not_answered_anew(world, mine):
    """A site that has answered round 1 does not train it again; a new capsule does."""
    parts = mine / "parts"
    inside("reset", parts, "--round", 1).ok()
    assert (parts / "attempt").read_text() == "2\n"
    inside("sample", parts).ok()
    again = ask(mine, 1, "a", mine / "again")
    key = signed(mine, "a")
    run(world, mine / "a", again, mine / "sent", *key).fails(1, "again after a reset")
    # An answer to the first attempt does not count in the second.
    for site in "ab":
        inside("site", parts, "--site", site, *signed(mine, "server"), mine / f"new-{site}").ok()
    shutil.rmtree(mine / "a")
    shutil.move(mine / "new-a", mine / "a")
    run(world, mine / "a", mine / "a1", mine / "old", *key).ok()
    for file in (mine / "old").iterdir():
        shutil.copy(file, parts / "round_0001")
    shutil.rmtree(mine / "b")
    shutil.move(mine / "new-b", mine / "b")
    run(world, mine / "b", ask(mine, 1, "b", mine / "b9"), mine / "new", *signed(mine, "b")).ok()
    for file in (mine / "new").iterdir():
        shutil.copy(file, parts / "round_0001")
    inside("aggregate", parts).ok()
    rows = read_tsv(parts / "round_0001" / "ledger.tsv", None)
    assert sum("is of another attempt" in row["status"] for row in rows) == sum(
        site == "a" for site in SITES.values()
    )


def test_code_that_a_capsule_does_not_name_is_not_used(world, mine, monkeypatch):
    """A server can leave out the list of own files, and ask for a method among them."""
    own = "fedtools.federation.code._is_own"
    monkeypatch.setattr(own, lambda file: file.name == "fedavg.py")
    words = (world, mine / "a", mine / "a2", mine / "sent", *signed(mine, "a"))
    run(*words).fails(1, "$FEDTOOLS_PATH (code)", "fedavg.py")
    assert not (mine / "sent").exists()
    (mine / "site.yaml").write_text("code: true\n")
    run(*words, "--bounds", mine / "site.yaml").ok()


def test_evaluations_are_bounded_by_roster_and_rounds(world, mine):
    words = ("--site", "a", "--round", 2, "--evaluate", "train", *signed(mine, "server"))
    inside("site", mine / "parts", *words, mine / "asked").ok()
    bounds = mine / "site.yaml"
    for name, value in (("roster", f"'{'0' * 64}'"), ("most_rounds", "1")):
        bounds.write_text(f"{name}: {value}\nleast_evaluated: 1\n")
        words = (world, mine / "a", mine / "asked", mine / "sent", *signed(mine, "a"))
        run(*words, "--bounds", bounds).fails(1, "the site allows no")
    assert not (mine / "sent").exists()


BOUNDS = {
    "roster: ": (f"'{'0' * 64}'", "no roster of keys but 0000"),
    "payloads: ": ("[changes]", "no models to be sent (payloads)"),
    "tensors: ": ('["nothing.*"]', "to be sent (tensors)"),
    "least_utterances: ": ("100", "(least_utterances)"),
    "most_rounds: ": ("3", "no 4 rounds, but 3 (most_rounds)"),
    "most_steps: ": ("1", "in a round, but 1 (most_steps)"),
    "most_epochs: ": ("0.01", "in a round, but 0.01 (most_epochs)"),
    "privacy: ": ("true", "without user-level privacy"),
    "payload: ": ("[models]", "unknown option 'payload'"),
    "code: ": ("perhaps", "code"),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_request_for_more_than_the_site_allows_is_refused(world, mine, name):
    value, said = BOUNDS[name]
    (mine / "site.yaml").write_text(f"{name}{value}\n")
    words = (world, mine / "a", mine / "a2", mine / "sent", *signed(mine, "a"))
    run(*words, "--bounds", mine / "site.yaml").fails(1, said)
    assert not (mine / "sent").exists() and not (mine / "a" / "round_0002" / "jobs").exists()


def test_a_request_for_all_that_the_site_allows_is_answered(world, mine):
    words = (world, mine / "a", mine / "a2", mine / "sent", *signed(mine, "a"))
    fingerprint = test_capsules.sha256(mine / "a" / "roster.tsv")
    (mine / "site.yaml").write_text(f"roster: {fingerprint}\nmost_rounds: 4\nmost_steps: 1000\n")
    run(*words, "--bounds", mine / "site.yaml").ok()


PRIVATE = ("clip=1", "noise=1", "epsilon=null")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("largest_clip", "0.5", "changes of norm 1, but 0.5"),
        ("largest_epsilon", "0.1", "epsilon"),
        ("payloads", "[models]", "no changes to be sent"),
    ],
)
def test_bounds_of_private_models(world, tmp_path, name, value, said):
    more = ["--set", "method_conf.client_method=fednorm"]
    more += [word for one in PRIVATE for word in ("--set", f"method_conf.{one}")]
    parts = begin(world, tmp_path / "parts", "dpfedavg", *more, "--set", "clients_per_round=null")
    inside("sample", parts).ok()
    inside("site", parts, "--site", "a", tmp_path / "a").ok()
    test_capsules.ask(parts, 1, "a", tmp_path / "a1")
    (tmp_path / "site.yaml").write_text(f"{name}: {value}\n")
    words = (world, tmp_path / "a", tmp_path / "a1", tmp_path / "sent", "--bounds")
    run(*words, tmp_path / "site.yaml").fails(1, said)
    (tmp_path / "site.yaml").write_text("largest_clip: 1\nlargest_epsilon: 1000\nprivacy: true\n")
    run(*words, tmp_path / "site.yaml").ok()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("global.safetensors", "'global.safetensors' is no file that a sends in round 2"),
        ("jobs", "'jobs' is no file"),
        (".done", "'.done' is no file"),
        ("update.2.tsv", "'update.2.tsv' is no file"),
        ("features.x.ark", "'features.x.ark' is no file"),
        ("evaluation.test.2.yaml", "is no file"),
        ("update.1.tsv/", "update.1.tsv: "),
        ("@update.1.tsv", "a symbolic link"),
    ],
)
def test_of_an_answer_only_the_sites_own_files_are_taken(world, mine, name, said):
    """If there are others, none is taken, and what is in the round's folder stays as it was."""
    sent, parts = mine / "a-sent", mine / "parts"
    run(world, mine / "a", mine / "a2", sent, *signed(mine, "a")).ok()
    before = {one: one.read_bytes() for one in (parts / "round_0002").iterdir()}
    words = ("site-answer", parts, "--site", "a", "--round")
    good = Path(shutil.copytree(sent, mine / "good"))
    plain = name.strip("@/")
    if name != plain:
        (sent / plain).unlink()
    if name.endswith("/"):
        (sent / plain).mkdir()
    elif name.startswith("@"):
        (sent / plain).symlink_to(good / plain)
    else:
        (sent / plain).write_bytes(b"x")
    inside(*words, 2, sent).fails(1, said)
    kept = {one: one.read_bytes() for one in before}
    assert kept == before
    inside(*words, 1, good).fails(1, "round 1 is closed")
    inside("site-answer", parts, "--site", "b", "--round", 2, good).fails(1, "no file that b")
    inside(*words, 2, good).ok()
    inside("aggregate", parts, "--without", "b").ok()
    rows = read_tsv(parts / "round_0002" / "ledger.tsv", None)
    assert {row["status"] for row in rows if SITES.get(row["client"]) == "a"} == {"ok"}
