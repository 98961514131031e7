"""Secure sums over sites that share no disk: requests and answers of each step."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
import secure_world as world
import yaml
from commands import Result, inside
from private_world import CLIENTS
from secure_world import PLAIN, SECURE, SITES, STEPS, aggregate, begin, state

from fedtools.core.tables import read_tsv
from fedtools.exchange.signed import read_key, sign

NAMES = sorted({*SITES.values()})


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDTOOLS_NOISE_KEY", str(tmp_path_factory.mktemp("key") / "noise.key"))
        root = world.make_world(tmp_path_factory.mktemp("world"))
        sites = ("--sites", root / "sites.tsv")
        inside("rounds", begin(root, root / "whole", PLAIN, *sites), "--to", "2").ok()
        begin(root, root / "parts", SECURE, *sites, "--roster", root / "roster.tsv")
        yield root


class Parts:
    """A federation of sites: the server's folder, and each site's capsule and key."""

    def __init__(self, root: Path, folder: Path):
        self.root, self.folder, self.server = root, folder, folder / "server"
        shutil.copytree(root / "parts", self.server)
        self.key = root / "server.key"
        for name in NAMES:
            (folder / name).mkdir()
            shutil.copy(root / f"{name}.key", folder / name / "key")
            (folder / name / "key").chmod(0o600)
            capsule = folder / name / "capsule"
            inside("site", self.server, "--site", name, "--key", self.key, capsule).ok()
        inside("sample", self.server).ok()
        self.count = 0

    def request(self, name: str, number: int = 1) -> Path:
        """Return what the server asks a site for now."""
        self.count += 1
        out = self.folder / f"request{self.count}"
        words = ("--site", name, "--round", number, "--key", self.key)
        inside("site", self.server, *words, out).ok()
        return out

    def answer(self, name: str, request: Path, *more: str | Path) -> tuple[Path, Result]:
        """Return what a site answers."""
        self.count += 1
        out, own = self.folder / f"answer{self.count}", self.folder / name
        data = ("--data", f"train={self.root / 'train'}", "--key", own / "key")
        return out, inside("site-round", own / "capsule", request, out, *data, *more)

    def take(self, name: str, answer: Path, number: int = 1) -> Result:
        return inside("site-answer", self.server, answer, "--site", name, "--round", number)

    def step(self, names: list[str] = NAMES, number: int = 1, *more: str) -> Result:
        """Let some sites do what is due, and the server reply."""
        for name in names:
            answer, done = self.answer(name, self.request(name, number))
            done.ok()
            self.take(name, answer, number).ok()
        return aggregate(self.server, number, *more)

    def statuses(self, number: int = 1) -> dict[str, str]:
        """Return client -> its status in the ledger of a round."""
        rows = read_tsv(self.server / f"round_{number:04d}/ledger.tsv", None)
        return {row["client"]: row["status"] for row in rows}


@pytest.fixture
def parts(root, tmp_path) -> Parts:
    return Parts(root, tmp_path)


def test_rounds_over_sites_have_the_bytes_of_one_machine(root, parts):
    for number in (1, 2):
        for _ in STEPS:
            parts.step(NAMES[::-1], number).ok()
        assert state(parts.server, number + 1) == state(root / "whole", number + 1)
        inside("sample", parts.server).ok()
    # A site keeps its promises beside its key, and no secret any more.
    kept = parts.folder / "east" / "key.secure"
    assert [one.name for one in kept.iterdir() if one.is_file()] == ["promises.tsv"]
    # The state is sent once in a round.
    assert {*parts.statuses().values()} == {"ok"}
    first, later = (parts.folder / name for name in ("request1", "request7"))
    assert (first / "global.safetensors").exists() and (later / "secure.keys.1.reply").exists()
    assert not (later / "global.safetensors").exists()


def test_a_request_that_comes_twice_gets_the_same_answer(parts):
    for _ in STEPS:
        request = parts.request("west")
        first, done = parts.answer("west", request)
        done.ok()
        second, done = parts.answer("west", request)
        done.ok()
        job = NAMES.index("west") + 1
        (name,) = [one.name for one in first.glob("secure.*")]
        assert name.endswith(f".{job}")
        assert (first / name).read_bytes() == (second / name).read_bytes()
        parts.step().ok()
    assert (parts.server / "round_0001/.done").exists()


@pytest.mark.parametrize("late", [2, 3])
def test_a_site_that_is_late_is_left_out(root, parts, late):
    for _ in STEPS[:late]:
        parts.step().ok()
    aggregate(parts.server).fails(1, "missing")
    left = [name for name in NAMES if name != "west"]
    parts.step(left, 1, "--without", "west").ok()
    for _ in STEPS[late + 1 :]:
        # It need not be named again.
        parts.step(left).ok()
    if late == 3:
        # Its vectors are in the sum, and its masks are recovered.
        assert state(parts.server) == state(root / "whole")
        return
    rows = parts.statuses()
    for client in CLIENTS:
        lost = SITES[client] == "west"
        assert rows[client].startswith("refused: is not in the secure sum") == lost
    # In the next round it is there again.
    inside("sample", parts.server).ok()
    parts.step(NAMES, 2).ok()


def signed(request: Path, key: Path, **fields: object) -> Path:
    """Change a request, and sign it as its server does."""
    said = request / "request.yaml"
    said.write_text(yaml.safe_dump(yaml.safe_load(said.read_text()) | fields))
    sign(said, read_key(key))
    return request


def test_steps_that_a_site_does_not_do(root, parts):
    request = parts.request("east")
    for step, words in (
        ("shares", "asks for step 'shares' of round 1, which has not begun here"),
        ("sharesx", "asks for step 'sharesx', and the method has a step of a secure sum"),
        ("", "asks for step '', and the method has a step of a secure sum"),
    ):
        changed = signed(shutil.copytree(request, parts.folder / f"r{step}"), parts.key, step=step)
        parts.answer("east", changed)[1].fails(1, words)
    # Nothing was begun, and nothing sent.
    assert not (parts.folder / "east/capsule/round_0001/secure.keys.1").exists()
    parts.step().ok()
    request = parts.request("east")
    reply = request / "secure.keys.1.reply"
    reply.write_bytes(reply.read_bytes()[:-1] + b"x")
    parts.answer("east", request)[1].fails(1, "secure.keys.1.reply: not what the request states")


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ("least_summed: 5", ""),
        ("least_summed: 6", "the site allows no sum of 5 clients, but of 6 or more (least_summed)"),
        ("secure_sums: true", ""),
        ("own_noise: true", "the site allows no training without noise of the clients' own"),
        ("largest_clip: 0.04", "the site allows no changes of norm 0.05, but 0.04"),
    ],
)
def test_a_sites_own_word_on_secure_sums(parts, bounds, said):
    path = parts.folder / "bounds.yaml"
    path.write_text(bounds + "\n")
    done = parts.answer("east", parts.request("east"), "--bounds", path)[1]
    if said:
        done.fails(1, said)
    else:
        done.ok()


def test_a_site_that_requires_secure_sums_trains_without_none(root, tmp_path):
    sites = ("--sites", root / "sites.tsv", "--roster", root / "roster.tsv")
    path = begin(root, tmp_path / "exp", PLAIN, *sites)
    inside("sample", path).ok()
    key, request, capsule = root / "server.key", tmp_path / "request", tmp_path / "capsule"
    inside("site", path, "--site", "east", "--key", key, capsule).ok()
    inside("site", path, "--site", "east", "--round", "1", "--key", key, request).ok()
    (tmp_path / "bounds.yaml").write_text("secure_sums: true\n")
    words = ("--data", f"train={root / 'train'}", "--key", root / "east.key")
    command = ("site-round", capsule, request, tmp_path / "answer", *words)
    said = "the site allows no training without secure sums (secure_sums)"
    inside(*command, "--bounds", tmp_path / "bounds.yaml").fails(1, said)


def test_secure_sums_over_sites_need_a_roster(root, tmp_path):
    sites = ("--sites", root / "sites.tsv")
    world.init(root, tmp_path / "exp", SECURE, *sites).fails(
        1, "need keys of all sites; give --ros"
    )
    keys = ("--client-keys", root / "client_keys.tsv", "--roster", root / "roster.tsv")
    world.init(root, tmp_path / "exp", SECURE, *sites, *keys).fails(1, "leave --client-keys out")


def test_a_site_reckons_epsilon_by_the_noise_that_it_adds(root, tmp_path):
    sites = ("--sites", root / "sites.tsv", "--roster", root / "roster.tsv")
    own = "method_conf={epsilon: 8.0, clip: 0.05, local_steps: 2, sums: secure, trust: clients}"
    path = begin(root, tmp_path / "exp", own, *sites)
    key, request, capsule = root / "server.key", tmp_path / "request", tmp_path / "capsule"
    inside("site", path, "--site", "east", "--key", key, capsule).ok()
    inside("sample", path).ok()
    inside("site", path, "--site", "east", "--round", "1", "--key", key, request).ok()
    # A server that promises more than the noise keeps, in a capsule that it has signed.
    plan = yaml.safe_load((capsule / "privacy.yaml").read_text())
    seal(capsule, key, **plan | {"epsilon": 1.0, "noise": 9.0, "rounds": 1, "delta": 0.5})
    words = ("--data", f"train={root / 'train'}", "--key", root / "east.key")
    for most, said in ((7.9, "the site allows no epsilon of 8, but 7.9"), (8.1, "")):
        (tmp_path / "bounds.yaml").write_text(f"largest_epsilon: {most}\n")
        command = ("site-round", capsule, request, tmp_path / f"answer{most}", *words)
        done = inside(*command, "--bounds", tmp_path / "bounds.yaml")
        done.fails(1, said) if said else done.ok()
    for own, said in ((0.0, "no unbounded epsilon"), (2.0, "own_deviation is 2 steps")):
        other = tmp_path / f"capsule{own}"
        inside("site", path, "--site", "east", "--key", key, other).ok()
        seal(other, key, **plan | {"own_deviation": own})
        command = ("site-round", other, request, tmp_path / f"answer{own}", *words)
        inside(*command, "--bounds", tmp_path / "bounds.yaml").fails(1, said)


def seal(capsule: Path, key: Path, **plan: object) -> None:
    """Put another plan of privacy into a capsule, and sign it as the server does."""
    (capsule / "privacy.yaml").write_text(yaml.safe_dump(plan))
    digest = hashlib.sha256((capsule / "privacy.yaml").read_bytes()).hexdigest()
    sums = (capsule / "sha256sums").read_text().splitlines()
    changed = [f"{digest}  privacy.yaml" if " privacy.yaml" in one else one for one in sums]
    (capsule / "sha256sums").write_text("\n".join(changed) + "\n")
    sign(capsule / "sha256sums", read_key(key))


def test_sites_that_were_given_other_options_are_in_no_sum_together(root, parts):
    """A server that lets others learn nothing would see one site's changes in the sum."""
    config = parts.folder / "east/capsule/config.yaml"
    config.write_text(config.read_text().replace("local_steps: 2", "local_steps: 1"))
    sums = config.with_name("sha256sums")
    digest = hashlib.sha256(config.read_bytes()).hexdigest()
    lines = sums.read_text().splitlines()
    changed = [f"{digest}  config.yaml" if one.endswith(" config.yaml") else one for one in lines]
    sums.write_text("\n".join(changed) + "\n")
    sign(sums, read_key(parts.key))
    said = parts.step()
    # The keys of east are of another session, and 4 clients are too few.
    assert said.code == 1 and "4 clients are left after step 'keys'" in said.err


def test_keys_that_are_no_sites_are_refused(root, parts):
    table = parts.folder / "east/capsule/client_keys.tsv"
    rows = table.read_text().splitlines()
    table.write_text("\n".join([*rows, "zz\t" + "ab" * 32]) + "\n")
    sums = table.with_name("sha256sums")
    digest = hashlib.sha256(table.read_bytes()).hexdigest()
    lines = sums.read_text().splitlines()
    changed = [f"{digest}  {table.name}" if table.name in one else one for one in lines]
    sums.write_text("\n".join(changed) + "\n")
    sign(sums, read_key(parts.key))
    said = "client_keys.tsv: the key of zz is no site's in the roster"
    parts.answer("east", parts.request("east"))[1].fails(1, said)
