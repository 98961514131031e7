"""Federations with sites: a job is a site, and its clients train with no other site's."""

from __future__ import annotations

from pathlib import Path

import counts
import keyword_world
import keywords
import pytest
from conftest import inside, ledger
from counts import CLIENTS, fedtools

from fedtools.core.tables import read_tsv
from fedtools.exchange.messages import COLUMNS

# Not in the order of the clients; the third has one client.
SITES = {client: ("west", "east", "east")[number % 3] for number, client in enumerate(CLIENTS)}
SITES[CLIENTS[3]] = "north"


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return counts.make_world(tmp_path_factory.mktemp("counts"))


def table(path: Path, sites: dict[str, str] = SITES) -> Path:
    rows = "".join(f"{client}\t{site}\n" for client, site in reversed(sites.items()))
    path.write_text(f"client\tsite\n{rows}")
    return path


@pytest.fixture
def begun(world, tmp_path) -> Path:
    return counts.begin(world, tmp_path / "exp", "--sites", table(tmp_path / "sites.tsv"))


def jobs(path: Path, number: int) -> dict[int, list[str]]:
    tables = (path / f"round_{number:04d}").glob("update.*.tsv")
    return {
        int(one.name.split(".")[1]): [row["client"] for row in read_tsv(one, COLUMNS)]
        for one in tables
    }


@pytest.mark.parametrize("options", [(), ("--nj", "2")])
def test_a_job_is_a_site_and_sums_are_the_same(world, begun, tmp_path, options):
    fedtools(world, "rounds", begun, *options).ok()
    without = counts.begin(world, tmp_path / "without")
    fedtools(world, "rounds", without).ok()
    # Counts are added up exactly, whoever has them.
    assert counts.states(begun) == counts.states(without)
    for number in (1, 2):
        drawn = (begun / f"round_{number:04d}" / "clients").read_text().split()
        assert jobs(begun, number) == {
            job: [client for client in drawn if SITES[client] == site]
            for job, site in enumerate(["east", "north", "west"], 1)
        }


def test_a_stack_has_clients_of_one_site(tmp_path):
    """A site's messages have the bytes of a federation that has its clients alone."""
    sizes = dict(zip(keyword_world.CLIENTS, keyword_world.SIZES, strict=True))
    people = {client: [size, size // 2, 1, 0] for client, size in sizes.items()}
    first = keyword_world.CLIENTS[:3]
    plain = {"time_shift_ms": 0, "noise_volume": 0.0, "noise_probability": 0.0}
    training = keyword_world.CONFIG["training"] | {"augment": plain, "stack": 4}
    config = keyword_world.CONFIG | {"training": training, "clients_per_round": None}
    keywords.config_file(tmp_path / "config.yaml", **config)
    rows = table(tmp_path / "sites.tsv", {one: "ab"[one not in first] for one in people})
    sent = []
    for name, clients, more in (
        ("all", people, ("--sites", rows)),
        ("first", {client: people[client] for client in first}, ()),
    ):
        data = keywords.pack(tmp_path / f"{name}-clips", clients)
        path = tmp_path / name
        words = ("--config", tmp_path / "config.yaml", "--method", "fedavg")
        inside("init", path, *words, "--data", f"train={data}", *more).ok()
        inside("sample", path).ok()
        inside("train-local", path, "--job", "1").ok()
        sent.append((path / "round_0001" / "update.1.safetensors").read_bytes())
    assert sent[0] == sent[1]


def test_a_late_site_is_named_and_can_be_left_out(world, begun):
    fedtools(world, "sample", begun).ok()
    for job in (1, 2):
        fedtools(world, "train-local", begun, "--job", job).ok()
    said = ("update.3.tsv: missing, of site west", "--job 3, or leave it out: --without west")
    fedtools(world, "aggregate", begun).fails(1, *said)
    fedtools(world, "aggregate", begun, "--without", "wets").fails(1, "no site 'wets' to leave out")
    assert not (begun / "round_0001" / ".done").exists()
    fedtools(world, "aggregate", begun, "--without", "west").ok()
    status = {row["client"]: row["status"] for row in ledger(begun)}
    late = {client for client, site in SITES.items() if site == "west"}
    assert {client for client, said in status.items() if "its site was left out" in said} == late


def test_a_site_that_is_left_out_does_not_count_though_it_answered(world, begun, tmp_path):
    other = counts.begin(world, tmp_path / "other", "--sites", tmp_path / "sites.tsv")
    for path in (begun, other):
        fedtools(world, "sample", path).ok()
        for job in (1, 2):
            fedtools(world, "train-local", path, "--job", job).ok()
    fedtools(world, "train-local", begun, "--job", "3").ok()
    for path in (begun, other):
        fedtools(world, "aggregate", path, "--without", "west").ok()
    assert counts.states(begun) == counts.states(other)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("client site\n", ":1: the header is"),
        ("client\tsite\nnobody\teast\n", ":2: nobody is no client of the training data"),
        ("client\tsite\nc0\teast\nc0\twest\n", ":3: c0 came before"),
        ("client\tsite\nc0\t../x\n", ":2: site '../x' is not usable"),
        ("client\tsite\nc0\teast\n", ": no site of c1, c2, c3"),
    ],
)
def test_bad_tables(world, tmp_path, content, said):
    (tmp_path / "sites.tsv").write_text(content)
    words = ("init", tmp_path / "exp", "--config", world / "config.yaml", "--method", "counting")
    words += ("--data", f"train={world / 'data'}", "--sites", tmp_path / "sites.tsv")
    fedtools(world, *words).fails(1, f"sites.tsv{said}")
    assert not (tmp_path / "exp").exists()


def test_sites_are_fixed(world, begun, tmp_path):
    moved = table(tmp_path / "moved.tsv", SITES | {CLIENTS[0]: "east"})
    words = ("init", begun, "--config", world / "config.yaml", "--method", "counting")
    words += ("--data", f"train={world / 'data'}")
    fedtools(world, *words, "--sites", tmp_path / "sites.tsv").ok()
    for more in ((), ("--sites", moved)):
        fedtools(world, *words, *more).fails(1, "not the sites that")
    (begun / "sites.tsv").write_text((begun / "sites.tsv").read_text().replace("north", "west"))
    fedtools(world, "sample", begun).fails(1, "sites.tsv: changed since the experiment began")


def test_a_number_of_jobs_other_than_that_of_sites_is_refused(world, begun):
    fedtools(world, "sample", begun).ok()
    (begun / "round_0001" / "jobs").write_text("9\n")
    said = "cut into 9 jobs, and there are 3 sites"
    fedtools(world, "train-local", begun).fails(1, said)
    fedtools(world, "aggregate", begun).fails(1)


def test_methods_without_clients_have_no_sites(tmp_path):
    world = keyword_world.make_world(tmp_path / "world")
    rows = table(tmp_path / "sites.tsv")
    words = ("init", tmp_path / "exp", "--config", world / "config.yaml", "--method", "centralized")
    words += ("--data", f"train={world / 'train'}", "--sites", rows)
    inside(*words).fails(1, "centralized has no clients", "leave --sites out")
