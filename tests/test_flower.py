"""A federation over Flower: a SuperLink and three nodes in namespaces of their own.

No node sees another's data, or the experiment; the server sees no data; there is no network but a
loopback. Programs are killed, and the bytes are those of one machine.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import flower_net
import kaldiio
import keyword_world
import keywords
import pytest
import simulated
from commands import ROOT, Result, inside, ledger, run, wait_until
from flower_net import LINK, PATIENCE, PORT, Net

from fedtools.data.ark import write_ark
from fedtools.data.clips import Clip, Clips, write_clips
from fedtools.data.datadir import write_table

pytestmark = pytest.mark.skipif(
    bool(flower_net.why_not()), reason=f"NOT CHECKED: Flower: {flower_net.why_not()}"
)
CLIPS = {client: "abc"[number % 3] for number, client in enumerate(keyword_world.CLIENTS)}
SPEECH = {"au": "a", "en": "b", "in": "c", "us": "a"}
BLOCKS = '["encoder.embed.*","encoder.encoders.0.*"]'


@pytest.fixture(scope="module")
def net(tmp_path_factory) -> Iterator[Net]:
    """Start a server and three nodes, once for all tests."""
    root = tmp_path_factory.mktemp("flower") / "a folder"
    for site in "abc":
        (root / "sites" / site).mkdir(parents=True)
    (root / "server").mkdir()
    make_clips(root)
    make_speech(root)
    with flower_net.network(root) as net:
        begin_speech(net, "first")
        start(net)
        yield net


def make_clips(root: Path) -> None:
    """Make clips of all clients, and of each site's."""
    keyword_world.make_world(root / "clips")
    settings = {"rounds": 2, "clients_per_round": None}
    keywords.config_file(root / "clips/config.yaml", **keyword_world.CONFIG | settings)
    write_sites(root / "clips/sites.tsv", CLIPS)
    clips = Clips.read(root / "clips/train")
    for site in "abc":
        own = []
        for client in (one for one, at in CLIPS.items() if at == site):
            places = clips.rows(client)
            for place in range(places.start, places.stop):
                name, label = f"{client}-{place:05d}", clips.classes[int(clips.labels[place])]
                own.append(Clip(name, client, label, clips.waves[place]))
        write_clips(
            root / "sites" / site / "clips", own, clips.classes, [clips.noise], clips.samples
        )


def make_speech(root: Path) -> None:
    """Make speech of all clients, and of each site's."""
    world = root / "world"
    train = simulated.data_dir(world / "train", [*SPEECH], 4)
    inside("train-tokens", train / "text", world / "tokens", "--token-type", "char").ok()
    # Large enough that its states are most of what is sent.
    encoder = simulated.CONFIG["model"]["encoder_conf"] | {"output_size": 128, "linear_units": 512}
    model = simulated.CONFIG["model"] | {"encoder_conf": encoder}
    simulated.config_file(world / "config.yaml", rounds=1, model=model)
    write_sites(world / "sites.tsv", SPEECH)
    matrices = kaldiio.load_scp(str(train / "feats.scp"))
    for site in "abc":
        folder = root / "sites" / site / "speech"
        folder.mkdir()
        for name in ("text", "utt2spk", "utt2client", "utt2num_frames"):
            lines = (train / name).read_text().splitlines(keepends=True)
            (folder / name).write_text("".join(one for one in lines if SPEECH[one[:2]] == site))
        own = [(name, matrices[name]) for name in matrices if SPEECH[name[:2]] == site]
        write_table(folder / "feats.scp", write_ark(folder / "feats.ark", own))


def write_sites(path: Path, sites: dict[str, str]) -> None:
    path.write_text("client\tsite\n" + "".join(f"{one}\t{at}\n" for one, at in sites.items()))


def start(net: Net) -> None:
    """Start the server and the nodes, and hand over the certificate and the keys."""
    server, address = net.root / "server", f"127.0.0.1:{PORT}"
    command = net.flower("server", "server", server / "first", address)
    net.start("server", net.hidden("server"), *command)
    wait_until((server / "ca.crt").exists)
    for site in "abc":
        shutil.copy(server / "ca.crt", net.site(site))
        command = net.flower(site, "site", f"127.0.0.1:{LINK}")
        net.start(site, net.hidden(site), *command)
    for site in "abc":
        wait_until((net.site(site) / "node.key").exists)
        (server / "sites").mkdir(exist_ok=True)
        shutil.copy(net.site(site) / "node.pub", server / "sites" / f"{site}.pub")


def begin_speech(net: Net, name: str) -> None:
    """Begin an experiment of which the server has no data."""
    world = net.root / "world"
    words = ("--method", "fedavg", "--set", f"method_conf.personal={BLOCKS}")
    begin(net, name, "asr", world, *words, "--asset", f"tokens={world / 'tokens'}")


def begin_clips(net: Net, name: str, rounds: int) -> None:
    """Begin an experiment with personal tensors."""
    world = net.root / "clips"
    begin(net, name, "kws", world, "--method", "fedkws_ui", "--set", f"rounds={rounds}")


def begin_sums(net: Net, name: str) -> None:
    """Begin an experiment whose server learns the sum of clipped changes alone."""
    conf = "noise: 0.0, clip: 0.05, local_steps: 2, personal: ['*norm*']"
    words = ("--method", "dpfedavg", "--set", "rounds=1", "--set", f"method_conf={{{conf}}}")
    secure = ("--set", f"method_conf={{{conf}, sums: secure}}")
    begin(net, name, "kws", net.root / "clips", *words, signed=secure)


def begin(
    net: Net,
    name: str,
    task: str,
    world: Path,
    *more: str | Path,
    signed: tuple[str, ...] = (),
) -> None:
    """Begin an experiment and run it on one machine; begin it with what sites tell, signed.

    Args:
        more: options of both.
        signed: options of the signed one.
    """
    whole, parts = net.root / "world" / f"{name}-whole", net.root / "server" / name
    data = {"asr": "speech", "kws": "clips"}[task]
    words = ("--config", world / "config.yaml", "--sites", world / "sites.tsv", *more)
    inside("init", whole, *words, "--data", f"train={world / 'train'}").ok()
    inside("rounds", whole).ok()
    keys, facts = [], []
    for who, folder in (("server", net.root / "server"), *((one, net.site(one)) for one in "abc")):
        keys.append(f"{who}\t{inside('site-key', folder / 'key').ok().out}")
    for site in "abc":
        facts += ["--facts", net.root / "server" / f"{name}-{site}"]
        inside("site-facts", net.site(site) / data, facts[-1], "--task", task).ok()
    (world / "roster.tsv").write_text("site\tkey\n" + "".join(keys))
    inside("init", parts, *words, *facts, "--roster", world / "roster.tsv", *signed).ok()
    key = net.root / "server/key"
    for site in "abc":
        inside("site", parts, "--site", site, "--key", key, net.site(site) / name).ok()
        given = f'"--data", "train={data}", "--key", "key"'
        lines = f'site = "{site}"\ncapsule = "{name}"\nsite-round = [{given}]\n'
        (net.site(site) / "site.toml").write_text(lines)
    lines = f'experiment = "{name}"\nsite = ["--key", "{key}"]\n'
    (net.root / "server/server.toml").write_text(lines)
    app = net.root / "server" / f"{name}-app"
    inside("flower", "app", parts, app).ok()
    change(app / "pyproject.toml", "again = 30.0", "again = 5.0")


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def go(net: Net, name: str, *more: str, seconds: float = flower_net.PATIENCE) -> Result:
    """Run an experiment's rounds to their end."""
    command = net.flower("server", "run", net.root / "server" / f"{name}-app")
    try:
        done = net.run("server", *command, seconds=seconds)
    except subprocess.TimeoutExpired:
        raise AssertionError(net.logs()) from None
    assert done.code == 0, f"{done.out}\n{done.err}\n{net.logs()}"
    return done


def assert_same(net: Net, name: str, sites: dict[str, str], rounds: int) -> None:
    """Compare an experiment with that of one machine: states, ledgers, and personal tensors."""
    whole, parts = net.root / "world" / f"{name}-whole", net.root / "server" / name
    for number in range(2, rounds + 2):
        path = f"round_{number:04d}/global.safetensors"
        assert (whole / path).read_bytes() == (parts / path).read_bytes()
    costs = [
        [{key: value for key, value in row.items() if key != "seconds"} for row in ledger(path)]
        for path in (whole, parts)
    ]
    assert costs[0] == costs[1]
    assert not [*parts.glob("clients/*/*.safetensors")]
    for client, site in sites.items():
        mine, theirs = (
            {one.name: one.read_bytes() for one in (path / "clients" / client).rglob("*.s*")}
            for path in (net.site(site) / name, whole)
        )
        assert mine == theirs and mine


def test_a_round_has_the_bytes_of_one_machine_and_costs_what_the_ledger_says(net):
    done = go(net, "first")
    assert "all 1 rounds are complete" in done.out
    up, down = net.passed()
    assert_same(net, "first", SPEECH, 1)
    rows = [row for row in ledger(net.root / "server/first") if row["client"] != "-"]
    sent = sum(int(row["bytes_up"]) for row in rows)
    # A site gets a state once, for all of its clients.
    states = {(row["round"], SPEECH[row["client"]]): int(row["bytes_down"]) for row in rows}
    received = sum(states.values())
    print(f"up {up} of {sent} bytes, down {down} of {received} bytes")
    assert sent < up < 1.1 * sent
    assert received < down < 1.1 * received


def test_a_server_learns_the_sum_alone(net, key):
    begin_sums(net, "sums")
    # Each of 15 messages starts a process.
    done = go(net, "sums", seconds=2 * flower_net.PATIENCE)
    assert done.out.count("site a has answered") == 5
    whole, parts = net.root / "world/sums-whole", net.root / "server/sums"
    path = "round_0002/global.safetensors"
    assert (whole / path).read_bytes() == (parts / path).read_bytes()
    assert not [*parts.glob("round_0001/update.*.safetensors")]


def test_who_takes_part_sees_no_data_of_others(net):
    here = net.run("a", "find", net.root, "-type", "f").ok().out
    assert "/sites/a/speech/feats.ark" in here and "/world/" not in here and "/a/clips/" in here
    assert not any(f"/{other}/" in here for other in ("sites/b", "sites/c", "server"))
    there = net.run("server", "find", net.root, "-type", "f").ok().out
    assert "/server/first/config.yaml" in there and "/sites/" not in there.replace("/server/", "")
    assert "feats.ark" not in there
    assert net.run("a", "ip", "-o", "link").ok().out.count("\n") == 1


A, B = "/sites/a/site.toml", "/sites/b/site.toml"
# Of each round; Flower takes a minute to notice either of the first.
KILLS = {
    "a client process and a node": [[("flwr-clientapp", A), ("flower-supernode", B)]],
    "the server app and the SuperLink": [[("flwr-serverapp", "")], [("flower-superlink", "")]],
}


@pytest.mark.parametrize("victims", KILLS)
def test_a_kill_changes_no_byte(net, victims):
    name, rounds = f"kill{[*KILLS].index(victims)}", len(KILLS[victims])
    begin_clips(net, name, rounds)
    log = net.root / f"run-{name}.out"
    command = net.flower("server", "run", net.root / "server" / f"{name}-app")
    net.start(f"run-{name}", net.hidden("server"), *command)
    try:
        for number, programs in enumerate(KILLS[victims], 1):
            for program, variable in programs:
                # Its request is at the site, and its answer is not written yet.
                request = net.site("b" if variable == B else "a") / "work/now/request/request.yaml"
                wait_until(lambda at=request, n=number: asks_for(at, n), PATIENCE)
                net.kill(program, variable)
        wait_until(lambda: f"all {rounds} rounds are complete" in log.read_text(), PATIENCE)
    except AssertionError:
        raise AssertionError(f"{log.read_text()}\n{net.logs()}") from None
    assert_same(net, name, CLIPS, rounds)


def asks_for(request: Path, number: int) -> bool:
    """Return whether a request is there, and for a round."""
    try:
        return f"round: {number}\n" in request.read_text()
    except FileNotFoundError:
        return False


def test_a_site_that_cannot_answer_says_why_and_a_round_ends_without_it(net):
    begin_clips(net, "late", 1)
    project = net.root / "server/late-app/pyproject.toml"
    # On a busy machine, a site that can answer took more than 20 seconds.
    change(project, "patience = 0.0", "patience = 60.0")
    change(project, "again = 5.0", "again = 120.0")
    change(net.site("c") / "site.toml", "train=clips", "train=nowhere")
    said = go(net, "late").out
    reason = "fedtools: nowhere: no such data directory; check --data train=FOLDER"
    assert f"round 1: site c: {reason}; asked again in 120 s" in said
    assert "round 1: closed --without c, after 60 s" in said
    left = {one for one, at in CLIPS.items() if at == "c"}
    rows = ledger(net.root / "server/late")
    assert {row["client"] for row in rows if "its site was left out" in row["status"]} == left


TRY_FRONT = """
import sys
import httpx

authority, front, inner = sys.argv[1:]
tried = ((front, "control"), (front, "fleet"), (front, "fleet/../control"), (inner, "control"))
for port, path in tried:
    url = f"https://127.0.0.1:{port}/v1/{path}/list-runs"
    print(httpx.post(url, verify=authority).status_code)
"""


def test_sites_reach_nothing_that_asks_for_no_key(net):
    """What nodes call asks for theirs; all else is not there."""
    address = (net.root / "server/flwr/config.toml").read_text().partition('"127.0.0.1:')[2]
    words = (net.root / "server/ca.crt", str(PORT), address.partition('"')[0])
    python = flower_net.FLOWER / "bin/python3"
    codes = net.run("server", python, "-c", TRY_FRONT, *words).ok().out.split()
    assert codes[:3] == ["404", "404", "404"]
    # That of the SuperLink itself; it misses a body, and no key.
    assert codes[3] not in ("401", "403", "404")


TRY_FILES = r"""
import json, sys
from pathlib import Path
import numpy as np
from flwr.app import Array

sys.path.insert(0, sys.argv[1])
from fedtools_flower.folder import Problem, one_line, read_folder, write_folder
from fedtools_flower.server_app import Experiment

place = Path(sys.argv[2])
(place / "sent").mkdir(parents=True)
noise = np.random.default_rng(0).bytes(6_000_000)
files = {"update.1.tsv": b"", "x.safetensors": noise, "y": np.float64("nan").tobytes()}
for name, data in files.items():
    (place / "sent" / name).write_bytes(data)
record = read_folder(place / "sent", 10**8)
(place / "came").mkdir()
write_folder(record, place / "came", 10**8)
assert {one.name: one.read_bytes() for one in (place / "came").iterdir()} == files

one = Array(np.zeros(4, np.uint8))
header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n"
data = b"\x93NUMPY\x01\x00v\x00" + header + b"cos\nsystem\n"
pickled = Array("object", (1,), "numpy.ndarray", data)
bad = [({name: one}, 10**8) for name in ("../x", "/x", "a/b", ".x", "", "x" * 300, "a\nb", "-x")]
bad += [({"x": Array(np.zeros(2, np.float32))}, 10**8)]
bad += [({"x": Array(np.zeros((2, 2), np.uint8))}, 10**8)]
bad += [({"x": Array("uint8", (4,), "numpy.ndarray", b"nonsense")}, 10**8), ({"x": pickled}, 10**8)]
bad += [({"x": Array("uint8", (4,), "other", b"1234")}, 10**8), ({"x": one}, 100)]
for number, (record, most) in enumerate(bad):
    (place / str(number)).mkdir()
    try:
        write_folder(record, place / str(number), most)
    except Problem as problem:
        assert "\n" not in str(problem), problem
    else:
        raise AssertionError(record)
    assert not [*(place / str(number)).iterdir()], record

experiment = Experiment({"folder": place, "experiment": "exp"})
(place / "exp/round_0001").mkdir(parents=True)
(place / "exp/sites.tsv").write_text("client\tsite\nk\ta\nk.l\tb\n")
(place / "exp/round_0001/clients").write_text("k\nk.l\n")
others = ("update.2.tsv", "features.k.l.ark", "update.10.tsv")
for name in (*others, "global.safetensors", "clients", "ledger.tsv"):
    try:
        experiment.keep(1, "a", {"update.1.tsv": one, name: one}, 10**8)
    except Problem as problem:
        assert "no file of this site" in str(problem)
    else:
        raise AssertionError(name)
    assert len([*(place / "exp/round_0001").iterdir()]) == 1
assert experiment.keep(1, "a", {"update.1.tsv": one, "features.k.ark": one}, 10**8) == 8
assert experiment.has_answer(1, "a") and not experiment.has_answer(1, "b")
(place / "exp/round_0001/update.1.tsv").unlink()
assert not experiment.has_answer(1, "a")
assert one_line("a\x1b[2J\n b") == "a?[2J b"
"""


def test_what_comes_over_the_network_becomes_no_path_and_no_program(tmp_path):
    """Names, kinds, sizes and whose file it is are checked; what is refused leaves nothing."""
    source = ROOT / "fedtools/federation/flower_app"
    shutil.copytree(source, tmp_path / "app/fedtools_flower")
    python = flower_net.FLOWER / "bin/python3"
    run(python, "-c", TRY_FILES, tmp_path / "app", tmp_path / "place").ok()


def test_an_app_is_of_an_experiment_with_sites(tmp_path):
    world = keyword_world.make_world(tmp_path / "world")
    path = keyword_world.begin(world, tmp_path / "exp")
    inside("flower", "app", path, tmp_path / "app").fails(1, "has no sites", "--sites")
    assert not (tmp_path / "app").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "server, site or run"),
        (("server", "a", "b"), 2, "server FOLDER EXP HOST:PORT"),
        (("site", "a", "b c"), 2, "'b c' is not HOST:PORT"),
        (("server", "a", "none", "here:1"), 1, "none: no such experiment"),
        (("site", "a", "here:1"), 1, "a/site.toml: missing"),
        (("run", "a", "none"), 1, "none: no app"),
    ],
)
def test_wrong_usage_is_said_in_a_line(tmp_path, words, code, said):
    done = run(ROOT / "utils/flower.sh", *words, cwd=tmp_path, env={"FEDTOOLS": "fedtools"})
    done.fails(code, said)
    assert done.err.count("\n") == 1
