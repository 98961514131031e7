"""Sites that share no folder with the server give the bytes of one machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import keyword_world
import pytest
import simulated
from conftest import inside

from fedtools.core.atomic import sha256
from fedtools.core.tables import read_tsv
from fedtools.data.clips import Clip, Clips, write_clips

SITES = {client: "ab"[number % 2] for number, client in enumerate(keyword_world.CLIENTS)}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Make clips of all, and of each site's own clients."""
    root = keyword_world.make_world(tmp_path_factory.mktemp("world"))
    rows = "".join(f"{client}\t{site}\n" for client, site in SITES.items())
    (root / "sites.tsv").write_text(f"client\tsite\n{rows}")
    for split in ("train", "test"):
        clips = Clips.read(root / split)
        for site in "ab":
            own = []
            for client in (one for one in clips.clients if SITES[one] == site):
                places = clips.rows(client)
                for place in range(places.start, places.stop):
                    name, label = f"{client}-{place:05d}", clips.classes[int(clips.labels[place])]
                    own.append(Clip(name, client, label, clips.waves[place]))
            write_clips(root / f"{site}-{split}", own, clips.classes, [clips.noise], clips.samples)
    return root


def begin(world: Path, path: Path, method: str, *more: str) -> Path:
    words = (
        "--config",
        world / "config.yaml",
        "--method",
        method,
        "--data",
        f"train={world / 'train'}",
    )
    inside("init", path, *words, "--sites", world / "sites.tsv", *more).ok()
    return path


def ask(parts: Path, number: int, site: str, out: Path) -> Path:
    inside("site", parts, "--site", site, "--round", number, out).ok()
    return out


def run(world: Path, capsule: Path, asked: Path, sent: Path, *more: str | Path):
    data = f"train={world / f'{capsule.name}-train'}"
    return inside("site-round", capsule, asked, sent, "--data", data, *more)


def exchange(world: Path, parts: Path, number: int, place: Path, sites: str = "ab") -> None:
    """Sample a round, and let sites answer by copies of files."""
    inside("sample", parts).ok()
    folder = parts / f"round_{number:04d}"
    drawn = (folder / "clients").read_text().split()
    for job, site in enumerate("ab", 1):
        if site in sites and any(SITES[client] == site for client in drawn):
            asked = ask(parts, number, site, place / f"{site}{number}")
            sent = place / f"{site}{number}-answer"
            run(world, place / site, asked, sent).ok()
            assert all(one.name.startswith(f"update.{job}.") for one in sent.iterdir())
            inside("site-answer", parts, sent, "--site", site, "--round", number).ok()


@pytest.mark.parametrize("method", ["fedavg", "fedkws_ui", "fednorm", "dpfedavg"])
def test_requests_and_answers_give_the_bytes_of_one_machine(world, tmp_path, method):
    more = ("--set", "method_conf.client_method=fednorm", "--set", "method_conf.clip=1",
            "--set", "method_conf.noise=0", "--set", "clients_per_round=null",
            "--set", "method_conf.epsilon=null") if method == "dpfedavg" else ()  # fmt: skip
    more += ("--set", "method_conf.local_steps=2")
    whole, parts = (begin(world, tmp_path / name, method, *more) for name in ("whole", "parts"))
    # Clients with models of their own are drawn in some rounds only.
    last = 3 if method == "fedkws_ui" else 2
    inside("rounds", whole, "--to", last).ok()
    for site in "ab":
        inside("site", parts, "--site", site, tmp_path / site).ok()
    for number in range(1, last + 1):
        exchange(world, parts, number, tmp_path)
        inside("aggregate", parts).ok()
        name = f"round_{number + 1:04d}/global.safetensors"
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
        assert costs(whole, number) == costs(parts, number)
    for site in "ab":
        held = {one.name for one in (tmp_path / site).glob("clients/*")}
        assert held <= {one for one, at in SITES.items() if at == site}
        if method == "fedkws_ui":
            for name in held:
                # A site keeps the round before, too, in case its answer is lost.
                theirs = kept(whole / "clients" / name)
                assert theirs
                for path, content in theirs.items():
                    assert (tmp_path / site / path.relative_to(whole)).read_bytes() == content


def costs(path: Path, number: int) -> list[dict[str, str]]:
    """Return a round's ledger but for seconds."""
    rows = read_tsv(path / f"round_{number:04d}" / "ledger.tsv", None)
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def test_a_capsule_holds_nothing_of_others(world, tmp_path):
    parts = begin(world, tmp_path / "parts", "fedkws_ui")
    inside("site", parts, "--site", "a", tmp_path / "a").ok()
    held = b"".join(one.read_bytes() for one in (tmp_path / "a").rglob("*") if one.is_file())
    assert str(world).encode() not in held and str(tmp_path).encode() not in held
    # Whole words, since a sum may hold a short name.
    words = set(held.split())
    for client, site in SITES.items():
        assert (client.encode() in words) == (site == "a")
    inside("site", parts, "--site", "c", tmp_path / "c").fails(1, "no site 'c'", "there are a, b")
    inside("site", parts, "--site", "a", tmp_path / "a").fails(1, "already exists")
    assert not (tmp_path / "c").exists()


@pytest.fixture(scope="module")
def answered(world, tmp_path_factory) -> Path:
    """Return a folder with the experiment `parts`, two capsules and answers of two rounds."""
    place = tmp_path_factory.mktemp("answered")
    parts = begin(world, place / "parts", "fedavg", "--set", "clients_per_round=null")
    for site in "ab":
        inside("site", parts, "--site", site, place / site).ok()
    for number in (1, 2):
        exchange(world, parts, number, place)
        inside("aggregate", parts).ok()
    inside("sample", parts).ok()
    ask(parts, 3, "a", place / "a3")
    return place


def kept(folder: Path) -> dict[Path, bytes]:
    """Return the content of all files."""
    return {one: one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def changed(asked: Path, name: str, old: str, new: str) -> None:
    """Change a file, and what the request states of it."""
    path = asked / name
    text, before = path.read_text(), sha256(path)
    assert old in text
    path.write_text(text.replace(old, new, 1))
    request = asked / "request.yaml"
    request.write_text(request.read_text().replace(before, sha256(path)))


FIRST = keyword_world.CLIENTS[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda asked: changed(asked, "request.yaml", "site: a", "site: b"), "not a request for"),
        (lambda asked: changed(asked, "request.yaml", "experiment: ", "experiment: f"), "not a "),
        (lambda asked: changed(asked, "request.yaml", "round: 3", "round: 5"), "there are 4"),
        (lambda asked: changed(asked, "request.yaml", "round: 3", "round: 1"), "of round 2 was"),
        (lambda asked: changed(asked, "request.yaml", "round: 3", "round: 2"), "differs from the"),
        (lambda asked: changed(asked, "request.yaml", "round: 3", "round: -1"), "round"),
        (lambda asked: changed(asked, "request.yaml", "last_round: 2", "last_round: 1"), "know of"),
        (lambda asked: changed(asked, "request.yaml", "base: ", "base: 0"), "not the state of"),
        (lambda asked: changed(asked, "clients", FIRST, keyword_world.CLIENTS[1]), "no client of"),
        (lambda asked: changed(asked, "clients", FIRST, "../x"), "no client of"),
        (lambda asked: changed(asked, "ledger.tsv", FIRST, keyword_world.CLIENTS[1]), "ledger"),
        (lambda asked: changed(asked, "request.yaml", "attempt: 1", "attempt: 0"), "of attempt 1"),
        (
            lambda asked: changed(asked, "request.yaml", "format: 1", "format: 2"),
            "message format 2",
        ),
        (
            lambda asked: changed(asked, "request.yaml", "fedtools: 0.1", "fedtools: 0.2"),
            "by fedtools 0.2, and here is 0.1",
        ),
        (lambda asked: changed(asked, "request.yaml", "clients: ", "clients: 0"), "what the requ"),
        (
            lambda asked: changed(asked, "request.yaml", "ledger.tsv: ", "x: "),
            "what the re",
        ),
        (lambda asked: (asked / "global.safetensors").write_bytes(b"x"), "not the state of"),
        (lambda asked: os.truncate(asked / "global.safetensors", 10**10), "bytes, more than"),
        (lambda asked: (asked / "request.yaml").unlink(), "request.yaml"),
        (lambda asked: (asked / "clients").write_text("x\n" * 10**6), "too long"),
    ],
)
def test_a_request_that_is_not_the_next_is_refused(world, answered, tmp_path, change, said):
    """In one line, and nothing is sent; the right request is then answered as ever."""
    asked = answered / "a3"
    capsule = Path(shutil.copytree(answered / "a", tmp_path / "a"))
    bad = Path(shutil.copytree(asked, tmp_path / "bad"))
    change(bad)
    before = kept(capsule)
    run(world, capsule, bad, tmp_path / "sent").fails(1, said)
    assert not (tmp_path / "sent").exists()
    # A capsule that is as it was answers as ever.
    if kept(capsule) != before:
        run(world, capsule, asked, tmp_path / "right").ok()


@pytest.mark.parametrize("method", ["fedavg", "fedkws_ui"])
def test_a_new_capsule_does_not_begin_personal_models_anew(world, tmp_path, method):
    """It would, silently, without what the site's clients have kept; FedAvg's keep nothing."""
    parts = begin(world, tmp_path / "parts", method, "--set", "clients_per_round=null",
                  "--set", "method_conf.local_steps=1")  # fmt: skip
    for site in "ab":
        inside("site", parts, "--site", site, tmp_path / site).ok()
    exchange(world, parts, 1, tmp_path)
    inside("aggregate", parts).ok()
    inside("sample", parts).ok()
    old = shutil.move(tmp_path / "a", tmp_path / "old")
    inside("site", parts, "--site", "a", tmp_path / "a").ok()
    asked, sent = ask(parts, 2, "a", tmp_path / "asked"), tmp_path / "sent"
    if method == "fedavg":
        run(world, tmp_path / "a", asked, sent).ok()
        return
    for _ in range(2):
        run(world, tmp_path / "a", asked, sent).fails(1, "kept in round 1 is not here")
        assert not sent.exists()
    shutil.rmtree(tmp_path / "a")
    shutil.move(old, tmp_path / "a")
    run(world, tmp_path / "a", asked, sent).ok()


def data_of(world: Path, site: str) -> tuple[str, str]:
    return "--data", f"test={world / f'{site}-test'}"


def test_sites_evaluate_and_send_sums(world, answered, tmp_path):
    """They add up to the figures of one machine that has all data; fewer clips tell nothing."""
    place = Path(shutil.copytree(answered, tmp_path / "answered"))
    parts, words = place / "parts", ("--bounds", tmp_path / "site.yaml")
    bounds = (tmp_path / "site.yaml").write_text
    for number in (1, 3):
        for site in "ab":
            out, capsule = tmp_path / f"{site}{number}", place / site
            words_ = "site", parts, "--site", site, "--round", number, "--evaluate", "test"
            inside(*words_, out).ok()
            if number == 1:
                # One that has answered round 2 does not go back.
                run(world, capsule, out, tmp_path / "no", *data_of(world, site)).fails(1, "round 2")
                capsule = tmp_path / "new" / site
                capsule.parent.mkdir(exist_ok=True)
                inside("site", parts, "--site", site, capsule).ok()
            data = data_of(world, site)
            bounds("least_evaluated: 21\n")
            sent = tmp_path / f"{site}{number}-sent"
            run(world, capsule, out, sent, *data, *words).fails(1, "of fewer than 21")
            bounds("least_evaluated: 20\npayloads: []\n")
            run(world, capsule, out, sent, *data, *words).ok()
            job = "ab".index(site) + 1
            assert {one.name for one in sent.iterdir()} == {f"evaluation.test.{job}.yaml"}
            shutil.copy(sent / f"evaluation.test.{job}.yaml", parts / f"round_{number:04d}")
    inside("evaluate", parts, "--split", "test", "--by-site").ok()
    rows = {row["round"]: row for row in read_tsv(parts / "evaluate_sites_test.tsv", None)}
    whole = begin(world, tmp_path / "whole", "fedavg", "--set", "clients_per_round=null",
                  "--data", f"test={world / 'test'}")  # fmt: skip
    inside("rounds", whole, "--to", 2).ok()
    inside("evaluate", whole, "--split", "test").ok()
    for row in read_tsv(whole / "evaluate_test.tsv", None):
        if row["round"] in rows:
            found = rows[row["round"]]
            assert {name: found[name] for name in ("clips", "errors", "accuracy")} == {
                name: row[name] for name in ("clips", "errors", "accuracy")
            }
            assert (found["sites"], found["clients"]) == ("2", "2")
    assert rows.keys() == {"0", "2"}
    # It asked for no training, so that the round goes on as ever.
    run(world, place / "a", ask(parts, 3, "a", tmp_path / "asked"), tmp_path / "trained").ok()
    evaluation = parts / "round_0003" / "evaluation.test.1.yaml"
    for old, new, said in (
        ("round: 3", "round: 1", "is of another round"),
        ("errors: ", "errors: -", "errors"),
        ("counted: 20", "counted: 0", "counted"),
        ("counted: 20", "counted: 1", "not an evaluation that can be"),
        ("clients: 1", f"clients: {10**15}", "not an evaluation that can be"),
        ("split: test", "split: valid", "not an evaluation that can be"),
        ("clients: 1", "clients: 1\nmore: 1", "more"),
    ):
        text = evaluation.read_text()
        assert old in text
        evaluation.write_text(text.replace(old, new))
        inside("evaluate", parts, "--split", "test", "--by-site").fails(1, said)
        evaluation.write_text(text)
    # After a reset, those of models that are no more are gone, and the others count.
    inside("evaluate", parts, "--split", "../test", "--by-site").fails(1, "split '../test'")
    inside("reset", parts, "--round", 2).ok()
    inside("evaluate", parts, "--split", "test", "--by-site").ok()
    (row,) = read_tsv(parts / "evaluate_sites_test.tsv", None)
    assert row == rows["0"] and not [*parts.glob("round_0003/*")]
    evaluation = parts / "round_0001" / "evaluation.test.1.yaml"
    evaluation.unlink()
    evaluation.symlink_to(parts / "none")
    inside("evaluate", parts, "--split", "test", "--by-site").fails(1, "symbolic link")


def test_the_same_request_has_the_same_answer(world, answered, tmp_path):
    capsule = Path(shutil.copytree(answered / "a", tmp_path / "a"))
    asked = ask(answered / "parts", 3, "a", tmp_path / "asked")
    sent = []
    for name in ("one", "two"):
        run(world, capsule, asked, tmp_path / name).ok()
        sent.append({one.name: one.read_bytes() for one in (tmp_path / name).iterdir()})
    assert sent[0] == sent[1] and sent[0]
    run(world, capsule, asked, tmp_path / "two").fails(1, "already exists")


def test_an_answer_of_another_site_costs_its_own_clients_alone(world, answered, tmp_path):
    parts = Path(shutil.copytree(answered / "parts", tmp_path / "parts"))
    for site in "ab":
        capsule = Path(shutil.copytree(answered / site, tmp_path / site))
        asked = ask(parts, 3, site, tmp_path / f"asked-{site}")
        run(world, capsule, asked, tmp_path / f"sent-{site}").ok()
    # What b sent, under the name of a's job.
    for file in (tmp_path / "sent-b").iterdir():
        shutil.copy(file, parts / "round_0003" / file.name)
        shutil.copy(file, parts / "round_0003" / file.name.replace("update.2", "update.1"))
    inside("aggregate", parts).ok()
    rows = read_tsv(parts / "round_0003" / "ledger.tsv", None)
    lost = {row["client"] for row in rows if "is no client of this job" in row["status"]}
    assert lost == {client for client, site in SITES.items() if site == "a"}
    counted = {row["client"] for row in rows if row["status"] == "ok"}
    assert counted == {"-", *(client for client, site in SITES.items() if site == "b")}


def test_data_that_changed_at_the_site_are_named(world, answered, tmp_path):
    capsule = Path(shutil.copytree(answered / "a", tmp_path / "a"))
    asked = ask(answered / "parts", 3, "a", tmp_path / "asked")
    words = ("site-round", capsule, asked, tmp_path / "sent", "--data")
    inside(*words, f"train={world / 'b-train'}").fails(1, "began with")
    inside(*words, f"train={tmp_path / 'none'}").fails(1, "no such data directory")
    run(world, capsule, asked, tmp_path / "sent").ok()


SPEAKERS = {"au": "a", "en": "b", "in": "a"}
BLOCKS = '["encoder.embed.*","encoder.encoders.0.*"]'


@pytest.fixture(scope="module")
def speech(tmp_path_factory) -> Path:
    """Make speech of three clients, and of each of two sites."""
    root = tmp_path_factory.mktemp("speech")
    train = simulated.data_dir(root / "train", [*SPEAKERS], 4)
    inside("train-tokens", train / "text", root / "tokens", "--token-type", "char").ok()
    simulated.config_file(root / "config.yaml", rounds=2)
    rows = "".join(f"{client}\t{site}\n" for client, site in SPEAKERS.items())
    (root / "sites.tsv").write_text(f"client\tsite\n{rows}")
    (root / "site.yaml").write_text("payloads: [models, features]\n")
    for site in "ab":
        (root / f"{site}-train").mkdir()
        for name in ("text", "utt2spk", "utt2client", "feats.scp", "utt2num_frames"):
            lines = (train / name).read_text().splitlines(keepends=True)
            own = [line for line in lines if SPEAKERS[line[:2]] == site]
            (root / f"{site}-train" / name).write_text("".join(own))
    return root


@pytest.mark.parametrize("method", ["fedavg", "decouplefl"])
def test_speech_is_trained_on_and_features_are_sent(speech, tmp_path, method):
    words = ("--config", speech / "config.yaml", "--method", method)
    words += ("--data", f"train={speech / 'train'}", "--asset", f"tokens={speech / 'tokens'}")
    words += ("--sites", speech / "sites.tsv", "--set", f"method_conf.personal={BLOCKS}")
    if method == "decouplefl":
        words += ("--set", "method_conf.stage1=1", "--set", "method_conf.stage2=1")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for path in (whole, parts):
        inside("init", path, *words).ok()
    inside("rounds", whole).ok()
    for site in "ab":
        inside("site", parts, "--site", site, tmp_path / site).ok()
    for number in (1, 2):
        inside("sample", parts).ok()
        folder = parts / f"round_{number:04d}"
        if (folder / "clients").read_text():
            for site in "ab":
                asked, sent = tmp_path / f"{site}{number}", tmp_path / f"{site}{number}-answer"
                ask(parts, number, site, asked)
                if method == "decouplefl" and number == 2:
                    run(speech, tmp_path / site, asked, sent).fails(1, "no features to be sent")
                run(speech, tmp_path / site, asked, sent, "--bounds", speech / "site.yaml").ok()
                for file in sent.iterdir():
                    shutil.copy(file, folder)
        inside("aggregate", parts).ok()
        name = f"round_{number + 1:04d}/global.safetensors"
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
        assert costs(whole, number) == costs(parts, number)
