"""A server that has no client's data begins with what sites tell, and gives one machine's bytes."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import keyword_world
import keywords
import numpy as np
import pytest
import simulated
import yaml
from conftest import inside

from fedtools.core.tables import read_tsv
from fedtools.data.clips import Clip, Clips, write_clips

SITES = {
    "kws": {client: "ab"[number % 2] for number, client in enumerate(keyword_world.CLIENTS)},
    "asr": {"au": "a", "en": "b", "in": "a"},
}
BLOCKS = '["encoder.embed.*","encoder.encoders.0.*"]'


def begin_keywords(place: Path, server: Path) -> None:
    keyword_world.make_world(place)
    shutil.copy(place / "config.yaml", server)
    shutil.copytree(place / "test", server / "test")
    clips = Clips.read(place / "train")
    for site in "ab":
        own = []
        for client in (one for one, at in SITES["kws"].items() if at == site):
            rows = clips.rows(client)
            for row in range(rows.start, rows.stop):
                label = clips.classes[int(clips.labels[row])]
                own.append(Clip(f"{client}-{row:05d}", client, label, clips.waves[row]))
        write_clips(place / site, own, clips.classes, [clips.noise], clips.samples)


def begin_speech(place: Path, server: Path) -> None:
    train = simulated.data_dir(place / "train", [*SITES["asr"]], 4)
    simulated.data_dir(server / "test", ["nz"], 2, seed=1)
    simulated.config_file(server / "config.yaml", rounds=2)
    inside("train-tokens", train / "text", server / "tokens", "--token-type", "char").ok()
    for site in "ab":
        (place / site).mkdir()
        for name in ("text", "utt2spk", "utt2client", "feats.scp", "utt2num_frames"):
            lines = (train / name).read_text().splitlines(keepends=True)
            own = [line for line in lines if SITES["asr"][line[:2]] == site]
            (place / site / name).write_text("".join(own))


class World:
    """A server's folder, and one of the clients' data, which is not there for the server."""

    def __init__(self, task: str, root: Path):
        self.task, self.data, self.server = task, root / "data", root / "server"
        self.server.mkdir()
        (begin_keywords if task == "kws" else begin_speech)(self.data, self.server)
        rows = "".join(f"{client}\t{site}\n" for client, site in SITES[task].items())
        (self.server / "sites.tsv").write_text(f"client\tsite\n{rows}")
        for site in "ab":
            inside("site-facts", self.data / site, self.server / site, "--task", task).ok()

    @contextlib.contextmanager
    def without_data(self) -> Iterator[None]:
        gone = self.data.rename(self.data.with_name("gone"))
        try:
            yield
        finally:
            gone.rename(self.data)

    def words(self, method: str, *more: str | Path) -> tuple[str | Path, ...]:
        own = ("--asset", f"tokens={self.server / 'tokens'}") if self.task == "asr" else ()
        return (
            *("--config", self.server / "config.yaml", "--method", method, *own),
            *("--data", f"test={self.server / 'test'}", *more),
        )

    def facts(self, **replaced: Path) -> tuple[str | Path, ...]:
        folders = [replaced.get(site, self.server / site) for site in "ab"]
        given = [word for one in folders for word in ("--facts", one)]
        return ("--sites", self.server / "sites.tsv", *given)


@pytest.fixture(scope="module")
def kws(tmp_path_factory) -> World:
    return World("kws", tmp_path_factory.mktemp("kws"))


@pytest.fixture(scope="module")
def asr(tmp_path_factory) -> World:
    return World("asr", tmp_path_factory.mktemp("asr"))


def costs(path: Path, number: int) -> list[dict[str, str]]:
    """Return a round's ledger but for seconds."""
    rows = read_tsv(path / f"round_{number:04d}" / "ledger.tsv", None)
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def exchange(world: World, parts: Path, number: int, place: Path) -> None:
    """Run a round; only a site's own command sees any data, and that only its own."""
    folder = parts / f"round_{number:04d}"
    with world.without_data():
        inside("sample", parts).ok()
    drawn = (folder / "clients").read_text().split()
    for site in "ab":
        if any(SITES[world.task][client] == site for client in drawn):
            asked, sent = place / f"{site}{number}", place / f"{site}{number}-answer"
            with world.without_data():
                inside("site", parts, "--site", site, "--round", number, asked).ok()
            data = f"train={world.data / site}"
            words = ("site-round", place / site, asked, sent, "--data", data)
            (place / "site.yaml").write_text("payloads: [models, changes, features]\n")
            inside(*words, "--bounds", place / "site.yaml").ok()
            for file in sent.iterdir():
                shutil.copy(file, folder)
    with world.without_data():
        inside("aggregate", parts).ok()


FAST = ["--set", "training.stack=1", "--set", "method_conf.local_steps=1"]
STAGES = (f"method_conf.personal={BLOCKS}", "method_conf.stage1=1", "method_conf.stage2=1")


PRIVATE = (
    *("method_conf.client_method=fednorm", "method_conf.clip=1", "method_conf.noise=0"),
    *("method_conf.epsilon=null", "clients_per_round=null"),
)


@pytest.mark.parametrize(
    ("task", "method", "settings"),
    [
        ("kws", "fedavg", ("rounds=2", "method_conf.local_steps=2")),
        ("kws", "fedkws_ui", ("rounds=2", "method_conf.local_steps=2")),
        ("kws", "dpfedavg", (*PRIVATE, "rounds=2", "method_conf.local_steps=2")),
        ("asr", "fedavg", ()),
        ("asr", "decouplefl", STAGES),
    ],
)
def test_a_server_without_data_has_the_bytes_of_one_machine(
    request, tmp_path, task, method, settings
):
    world: World = request.getfixturevalue(task)
    more = [word for one in settings for word in ("--set", one)]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    at_hand = ("--data", f"train={world.data / 'train'}", "--sites", world.server / "sites.tsv")
    inside("init", whole, *world.words(method, *at_hand, *more)).ok()
    inside("rounds", whole, "--evaluate", "test").ok()
    with world.without_data():
        inside("init", parts, *world.words(method, *world.facts(), *more)).ok()
        for site in "ab":
            inside("site", parts, "--site", site, tmp_path / site).ok()
    assert (whole / "facts.tsv").read_bytes() == (parts / "facts.tsv").read_bytes()
    assert (whole / "init.safetensors").read_bytes() == (parts / "init.safetensors").read_bytes()
    rounds = yaml.safe_load((parts / "config.yaml").read_text())["rounds"]
    for number in range(1, rounds + 1):
        exchange(world, parts, number, tmp_path)
        name = f"round_{number + 1:04d}/global.safetensors"
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
        assert costs(whole, number) == costs(parts, number)
    measured = "evaluate_test.tsv"
    with world.without_data():
        said = inside("rounds", parts, "--evaluate", "test").ok().err
        # Of clients of the test data, whose own layers the server does not have.
        personal = method == "dpfedavg"
        assert ("are at their sites: measured with a newcomer's model" in said) == personal
        numbers = {row["round"] for row in read_tsv(whole / measured, None)}
        assert numbers
        inside("evaluate", parts, "--split", "test").ok()
        theirs = [one for one in read_tsv(parts / measured, None) if one["round"] in numbers]
        assert personal or theirs == read_tsv(whole / measured, None)
        inside("show", parts).ok()
        inside("rounds", parts).ok()
        # A round that is opened again is the sites' to answer.
        inside("reset", parts, "--round", str(rounds)).ok()
        inside("rounds", parts).fails(1, "the clients' data are at their sites")


def test_what_a_site_tells_is_this_and_no_more(kws, asr, tmp_path):
    own = [one for one, site in SITES["kws"].items() if site == "a"]
    assert sorted(one.name for one in (kws.server / "a").iterdir()) == [
        *("classes.txt", "clients.tsv", "facts.yaml"),
    ]
    assert (kws.server / "a/classes.txt").read_text().split() == [*keywords.CLASSES]
    sizes = dict(zip(keyword_world.CLIENTS, keyword_world.SIZES, strict=True))
    rows = read_tsv(kws.server / "a/clients.tsv", ("client", "size", "entropy"))
    assert {one["client"]: int(one["size"]) for one in rows} == {one: sizes[one] for one in own}
    clips = Clips.read(kws.data / "train")
    for row in rows:
        labels = clips.labels[clips.rows(row["client"])]
        share = np.bincount(labels)[np.bincount(labels) > 0] / len(labels)
        expected = -(share * np.log(share)).sum() / np.log(len(keywords.CLASSES))
        assert float(row["entropy"]) == pytest.approx(expected, abs=1e-12)
    assert yaml.safe_load((kws.server / "a/facts.yaml").read_text()).keys() == {
        *("task", "sum", "samples"),
    }
    assert sorted(one.name for one in (asr.server / "a").iterdir()) == ["clients.tsv", "facts.yaml"]
    assert (asr.server / "a/clients.tsv").read_text() == "client\tsize\nau\t4\nin\t4\n"
    for world in (kws, asr):
        held = b"".join(one.read_bytes() for one in (world.server / "a").iterdir())
        assert str(world.data).encode() not in held and b"-s0" not in held and b"-0" not in held
    said = inside("site-facts", kws.data / "a", tmp_path / "a", "--task", "kws").ok().out
    head, *lines = said.splitlines()
    # In columns: what leaves begins where its heading does.
    at = [head.index(word) for word in ("file", "what leaves", "value")]
    for line in lines:
        assert all(line[:one][-1:] in ("", " ") and line[one] != " " for one in at)
    assert f"{sum(sizes[one] for one in own)} in all" in said
    inside("site-facts", kws.data / "a", tmp_path / "a", "--task", "kws").fails(1, "exists")
    inside("site-facts", kws.data / "a", tmp_path / "c", "--task", "lm").fails(1, "everybody's")
    inside("site-facts", tmp_path / "no", tmp_path / "c", "--task", "kws").fails(1, "no such")
    inside("site-facts", kws.data / "a", tmp_path / "c", "--task", "kw").fails(1, "kws")
    inside("site-facts", kws.data / "a", tmp_path / "c", "--task", "asr").fails(1, "no clients")
    assert not (tmp_path / "c").exists()


def test_a_sum_tells_data_apart(kws, asr, tmp_path):
    sums = []
    for world in (kws, asr):
        for site in "ab":
            sums.append(yaml.safe_load((world.server / site / "facts.yaml").read_text())["sum"])
    other = shutil.copytree(asr.data / "a", tmp_path / "other")
    text = (other / "text").read_text()
    (other / "text").write_text(text.replace(" ", " a", 1))
    inside("site-facts", other, tmp_path / "told", "--task", "asr").ok()
    sums.append(yaml.safe_load((tmp_path / "told/facts.yaml").read_text())["sum"])
    assert len({*sums}) == 5


FIRST = keyword_world.CLIENTS[0]


def edit(name: str, old: str, new: str):
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return change


def replace_line(name: str, line: int, new: str):
    def change(folder: Path) -> None:
        lines = (folder / name).read_text().splitlines()
        lines[line : line + 1] = new.splitlines()
        (folder / name).write_text("".join(f"{one}\n" for one in lines))

    return change


HOSTILE = [
    (edit("clients.tsv", "\t40\t", "\t-40\t"), "clients.tsv:2: size"),
    (edit("clients.tsv", "\t40\t", "\t0\t"), "clients.tsv:2: size"),
    (edit("clients.tsv", "\t40\t", f"\t{10**7}\t"), "clients.tsv:2: size"),
    (edit("clients.tsv", "\t40\t", f"\t{'9' * 30}\t"), "clients.tsv:2: size"),
    (edit("clients.tsv", "\t40\t", f"\t{'9' * 10**6}\t"), "clients.tsv:2: size"),
    (edit("clients.tsv", "\t40\t", "\t4.0e1\t"), "clients.tsv:2: size"),
    (replace_line("clients.tsv", 1, f"{FIRST}\t40\tnan"), "clients.tsv:2: entropy"),
    (replace_line("clients.tsv", 1, f"{FIRST}\t40\tinf"), "clients.tsv:2: entropy"),
    (replace_line("clients.tsv", 1, f"{FIRST}\t40\t1.5"), "clients.tsv:2: entropy"),
    (replace_line("clients.tsv", 1, f"{FIRST}\t40\t-0.1"), "clients.tsv:2: entropy"),
    (replace_line("clients.tsv", 1, f"{FIRST}\t40\t0.5\t9"), "clients.tsv:2: 4 fields"),
    (replace_line("clients.tsv", 1, f"{FIRST}\t40\t0.5\n{FIRST}\t40\t0.5"), "clients.tsv:3: "),
    (replace_line("clients.tsv", 1, "../x\t40\t0.5"), "clients.tsv:2: client '../x'"),
    (replace_line("clients.tsv", 1, f"{'x' * 10**5}\t40\t0.5"), "clients.tsv:2: client"),
    (replace_line("clients.tsv", 1, "zz\t40\t0.5"), "is not in order"),
    (replace_line("clients.tsv", 0, "client\tsize\tentropy\tage"), "the header is"),
    (lambda folder: (folder / "clients.tsv").write_text("client\tsize\tentropy\n"), "0 clients"),
    (lambda folder: (folder / "clients.tsv").write_bytes(bytes(range(256))), "clients.tsv"),
    (lambda folder: (folder / "facts.yaml").write_bytes(bytes(range(256))), "facts.yaml"),
    (lambda folder: (folder / "clients.tsv").unlink(), "clients.tsv"),
    (lambda folder: (folder / "facts.yaml").unlink(), "facts.yaml"),
    (lambda folder: shutil.rmtree(folder), "no such folder"),
    (lambda folder: os.truncate(folder / "clients.tsv", 10**10), "bytes, more than"),
    (lambda folder: os.truncate(folder / "facts.yaml", 10**6), "bytes, more than"),
    (lambda folder: (folder / "clients.tsv").hardlink_to(folder / "x"), "of 2 names"),
    (edit("facts.yaml", "sum: ", "sum: x"), "sum"),
    (edit("facts.yaml", "task: kws", "task: asr"), "facts for task 'asr'"),
    (edit("facts.yaml", "samples: 5600", "samples: 8000"), "not the samples of"),
    (edit("facts.yaml", "samples: 5600", f"samples: {10**9}"), "samples"),
    (edit("facts.yaml", "samples: 5600", "samples: -1"), "samples"),
    (edit("facts.yaml", "samples: 5600", "samples: .nan"), "samples"),
    (edit("facts.yaml", "task:", "path: /x\ntask:"), "path"),
    (edit("classes.txt", "yes", "maybe"), "not the classes of"),
    (edit("classes.txt", "yes", "no"), "duplicated"),
    (edit("classes.txt", "yes", "<b>"), "is no word"),
    (lambda folder: (folder / "classes.txt").unlink(), "samples: 5600, expected none"),
]


@pytest.mark.parametrize(("change", "said"), HOSTILE)
def test_facts_that_cannot_be_are_refused(kws, tmp_path, change, said):
    """In one line, and nothing is written."""
    bad = Path(shutil.copytree(kws.server / "a", tmp_path / "bad"))
    if said == "of 2 names":
        (bad / "clients.tsv").rename(bad / "x")
    change(bad)
    found = inside("init", tmp_path / "exp", *kws.words("fedavg", *kws.facts(a=bad)))
    found.fails(1, said)
    assert len(found.err) < 1000
    assert not (tmp_path / "exp").exists()


def test_folders_and_tables_that_do_not_belong_together(kws, asr, tmp_path):
    def fails(*words: str | Path) -> None:
        *given, said = words
        inside("init", tmp_path / "exp", *kws.words("fedavg", *given)).fails(1, said)
        assert not (tmp_path / "exp").exists()

    facts, table = kws.facts(), kws.server / "sites.tsv"
    fails(*facts, "--data", f"train={kws.data / 'train'}", "give --data train=FOLDER, or --facts")
    fails(*facts[2:], "no table of sites")
    fails("no training data")
    fails(*facts, "--facts", kws.server / "a", "given twice")
    again = shutil.copytree(kws.server / "a", tmp_path / "again")
    fails(*facts, "--facts", again, f"{FIRST} is also in")
    fails(*facts[:4], "is no client of the training data")
    rows = table.read_text().splitlines(keepends=True)
    other = tmp_path / "sites.tsv"
    for text, said in (
        ("".join(rows[:-1]), "no site of"),
        ("".join([*rows[:-1], rows[-1].replace("\ta", "\tb")]), "of site b, and"),
        ("".join(rows).replace("\tb", "\ta"), "facts of site a, and so are"),
        ("".join(rows) + "../x\ta\n", "'../x'"),
    ):
        other.write_text(text)
        fails("--sites", other, *facts[2:], said)
    fails(*facts[:2], "--facts", asr.server / "a", "facts for task 'asr'")
    central = kws.words("centralized", *facts)
    inside("init", tmp_path / "exp", *central).fails(1, "centralized has no clients")
    wrong = asr.words("fedavg", *asr.facts(), "--set", "model.input_size=40")
    inside("init", tmp_path / "exp", *wrong).fails(1, "20 values", "input_size is 40")
    labels = asr.words("decouplefl", *asr.facts(), "--set", "training.server_labels=transcripts")
    more = [word for one in STAGES for word in ("--set", one)]
    inside("init", tmp_path / "exp", *labels, *more).fails(1, "clients' transcripts")


def test_kinds_of_features_are_compared(asr, tmp_path):
    kinds = {"a": "fbank, sample_rate 16000, num_mel_bins 20", "b": "mfcc, sample_rate 16000"}
    told = {}
    for site, kind in kinds.items():
        told[site] = Path(shutil.copytree(asr.server / site, tmp_path / site))
        with open(told[site] / "facts.yaml", "a") as file:
            file.write(f"features: {kind}\n")
    found = inside("init", tmp_path / "exp", *asr.words("fedavg", *asr.facts(**told)))
    found.fails(1, "features of another kind")
    inside("init", tmp_path / "exp", *asr.words("fedavg", *asr.facts(a=told["a"]))).ok()
    known = yaml.safe_load((tmp_path / "exp/data.yaml").read_text())["train"]
    assert known["features"] == kinds["a"] and {"a/sum", "b/sum"} < known.keys()


@pytest.fixture
def begun(kws, tmp_path) -> Path:
    """Return a folder with the experiment `parts`, of facts, and the capsule `a`."""
    inside("init", tmp_path / "parts", *kws.words("fedavg", *kws.facts())).ok()
    inside("site", tmp_path / "parts", "--site", "a", tmp_path / "a").ok()
    return tmp_path


def test_what_needs_data_at_the_server_says_so(kws, begun):
    parts = begun / "parts"
    with kws.without_data():
        inside("sample", parts).ok()
        for words in (
            ("train-local", parts),
            ("rounds", parts),
            ("rounds", parts, "--nj", "2"),
            ("rounds", parts, "--estimate"),
            ("evaluate", parts, "--split", "train"),
        ):
            inside(*words).fails(1, "the clients' data are at their sites", "fedtools site")
        inside("evaluate", parts, "--split", "valid").fails(1, "no valid data", "there are test")
        inside("evaluate", parts, "--split", "test").ok()
    assert not [*(parts / "round_0001").glob("update.*")]


def test_the_same_facts_begin_the_same_experiment(kws, begun):
    parts = begun / "parts"
    before = {one: one.read_bytes() for one in parts.rglob("*") if one.is_file()}
    inside("init", parts, *kws.words("fedavg", *kws.facts())).ok()
    assert before == {one: one.read_bytes() for one in parts.rglob("*") if one.is_file()}
    other = Path(shutil.copytree(kws.server / "a", begun / "other"))
    known = yaml.safe_load((other / "facts.yaml").read_text())["sum"]
    edit("facts.yaml", known, "f" * 64)(other)
    inside("init", parts, *kws.words("fedavg", *kws.facts(a=other))).fails(1, "other data", "a/sum")
    edit("facts.yaml", "f" * 64, known)(other)
    edit("clients.tsv", "\t40\t", "\t39\t")(other)
    changed = inside("init", parts, *kws.words("fedavg", *kws.facts(a=other)))
    changed.fails(1, "not the facts of clients that")


def answer(world: World, place: Path, data: Path):
    inside("sample", place / "parts").ok()
    inside("site", place / "parts", "--site", "a", "--round", "1", place / "asked").ok()
    words = ("site-round", place / "a", place / "asked", place / "sent")
    return inside(*words, "--data", f"train={data}")


def test_a_site_refuses_other_data_than_it_told_of(kws, begun):
    answer(kws, begun, kws.data / "b").fails(1, "not the sum that", str(kws.data / "b"))
    assert not (begun / "sent").exists()
    shutil.rmtree(begun / "asked")
    answer(kws, begun, kws.data / "a").ok()


@pytest.mark.parametrize("change", ["size", "sum"])
def test_a_site_refuses_facts_that_it_did_not_tell(kws, tmp_path, change):
    """As a server would that has other facts of the site than the site has."""
    bad = Path(shutil.copytree(kws.server / "a", tmp_path / "told"))
    known = yaml.safe_load((bad / "facts.yaml").read_text())["sum"]
    pair = {
        "size": ("clients.tsv", "\t40\t", "\t41\t"),
        "sum": ("facts.yaml", known, "f" * 64),
    }[change]
    edit(*pair)(bad)
    inside("init", tmp_path / "parts", *kws.words("fedavg", *kws.facts(a=bad))).ok()
    inside("site", tmp_path / "parts", "--site", "a", tmp_path / "a").ok()
    said = f"size of client {FIRST} is 41, and 40" if change == "size" else "not the sum that"
    answer(kws, tmp_path, kws.data / "a").fails(1, said)
    assert not (tmp_path / "sent").exists()


def test_a_client_cannot_report_more_utterances_than_its_site_told_of(asr, tmp_path):
    parts = tmp_path / "parts"
    inside("init", parts, *asr.words("fedavg", *asr.facts())).ok()
    inside("site", parts, "--site", "a", tmp_path / "a").ok()
    inside("site", parts, "--site", "b", tmp_path / "b").ok()
    inside("sample", parts).ok()
    for site in "ab":
        asked, sent = tmp_path / f"asked-{site}", tmp_path / f"sent-{site}"
        inside("site", parts, "--site", site, "--round", "1", asked).ok()
        data = f"train={asr.data / site}"
        inside("site-round", tmp_path / site, asked, sent, "--data", data).ok()
        for file in sent.iterdir():
            shutil.copy(file, parts / "round_0001")
    edit("update.1.tsv", "au\t4\t", "au\t5\t")(parts / "round_0001")
    (parts / "round_0001" / "update.1.answer").unlink()
    inside("aggregate", parts).ok()
    status = {row["client"]: row["status"] for row in costs(parts, 1)}
    assert "utterances" in status["au"] and status["en"] == status["in"] == "ok"


@pytest.mark.parametrize(("task", "method"), [("kws", "fedkws_ui"), ("asr", "decouplefl")])
def test_processes_of_a_site_change_no_byte(request, tmp_path, task, method):
    """Not of what it sends, and not of what its clients keep; but seconds are its own."""
    world: World = request.getfixturevalue(task)
    more = [word for one in STAGES for word in ("--set", one)] if task == "asr" else []
    parts, files = tmp_path / "parts", {}
    # Units of one client, of which there are more than processes.
    more += ["--set", "clients_per_round=null"] + FAST * (task == "kws")
    inside("init", parts, *world.words(method, *world.facts(), *more)).ok()
    inside("site", parts, "--site", "a", tmp_path / "a1").ok()
    last = 2 if task == "asr" else 1
    (tmp_path / "site.yaml").write_text("payloads: [models, features]\n")
    for number in range(1, last + 1):
        inside("sample", parts).ok()
        # Up to the last round, in which features are sent, one process is as good as two.
        used = ("1", "2") if number == last else ("1",)
        if number == last:
            shutil.copytree(tmp_path / "a1", tmp_path / "a2")
        for nj in used:
            asked, sent = tmp_path / f"asked-{nj}-{number}", tmp_path / f"sent-{nj}-{number}"
            inside("site", parts, "--site", "a", "--round", str(number), asked).ok()
            words = ("site-round", tmp_path / f"a{nj}", asked, sent, "--nj", nj)
            words += ("--data", f"train={world.data / 'a'}", "--bounds", tmp_path / "site.yaml")
            inside(*words).ok()
            # Sums of a table are of its seconds, too.
            files[nj] = {
                one.name: one.read_bytes()
                for one in sent.iterdir()
                if one.suffix not in (".tsv", ".answer")
            }
            for place in (tmp_path / f"a{nj}").glob("clients/*/*/*"):
                files[nj][str(place.relative_to(tmp_path / f"a{nj}"))] = place.read_bytes()
            rows = read_tsv(next(sent.glob("update.*.tsv")), None)
            files[nj]["rows"] = [{**row, "seconds": ""} for row in rows]
        if number < last:
            for file in sent.iterdir():
                shutil.copy(file, parts / f"round_{number:04d}")
            inside("aggregate", parts, "--without", "b").ok()
    # Only where the archives of features are differs.
    named = {name for name in files["1"] if not name.endswith(".scp")}
    assert task != "asr" or any(name.endswith(".ark") for name in named)
    assert named and {one: files["1"][one] for one in named} == {
        one: files["2"][one] for one in named
    }


class Killed(BaseException):
    """Exception that replaces kill -9."""


def killed(number: int, monkeypatch, *words: str | Path) -> bool:
    """Run a command, killed when so many files or folders are in place; return whether it was."""
    left = [number]

    def counted(move):
        def moved(source, target, **more):
            move(source, target, **more)
            left[0] -= 1
            if not left[0]:
                raise Killed

        return moved

    with monkeypatch.context() as patch:
        for name in ("replace", "rename"):
            patch.setattr(os, name, counted(getattr(os, name)))
        try:
            inside(*words).ok()
        except Killed:
            return True
    return False


def contents(folder: Path) -> dict[str, bytes]:
    """Return name -> bytes of what an experiment, or a capsule, begins with."""
    known = {"commands.sh", "software.yaml"}
    files = (one for one in folder.rglob("*") if one.is_file() and ".locks" not in one.parts)
    return {
        str(one.relative_to(folder)): one.read_bytes() for one in files if one.name not in known
    }


def test_kills_of_init_and_site_leave_what_goes_on(kws, tmp_path, monkeypatch):
    words = (*kws.words("fedavg"), *kws.facts())
    whole = tmp_path / "whole"
    inside("init", whole, *words).ok()
    inside("site", whole, "--site", "a", tmp_path / "capsule").ok()
    numbers = [0, 0]
    for number in range(1, 60):
        path, capsule = tmp_path / f"exp{number}", tmp_path / f"capsule{number}"
        begun = killed(number, monkeypatch, "init", path, *words)
        inside("init", path, *words).ok()
        assert contents(path) == contents(whole)
        out = killed(number, monkeypatch, "site", whole, "--site", "a", capsule)
        if out and not capsule.exists():
            inside("site", whole, "--site", "a", capsule).ok()
        assert contents(capsule) == contents(tmp_path / "capsule")
        numbers = [numbers[0] + begun, numbers[1] + out]
        if not (begun or out):
            break
    # Each file of the experiment, and of the capsule, was the last one once.
    assert numbers[0] >= 10 and numbers[1] >= 1
