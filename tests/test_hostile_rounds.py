"""Rounds in which one client lies: only it is refused, by name, and the mean is over the others.

The oracle is a round of the same experiment in which the liar reports that it sends nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import keyword_world
import numpy as np
import pytest
import rescored_world
import yaml
from conftest import inside, ledger
from rescored_world import make_stream
from safetensors.numpy import load_file, save_file

from fedtools.core.untrusted import open_received, seal_of
from fedtools.methods.fmp import FMP
from fedtools.privacy.incoming import bounds_on_counts
from fedtools.privacy.options import Privacy
from fedtools.privacy.plan import Plan

Change = Callable[[dict[str, np.ndarray], int], None]


@pytest.fixture(scope="module")
def keywords(tmp_path_factory) -> Path:
    """Make a round of seven clients in three jobs, up to its aggregation."""
    world = keyword_world.make_world(tmp_path_factory.mktemp("world"))
    more = ("clients_per_round=1.0", "keep_updates=true")
    path = keyword_world.begin(world, world / "exp", "fedavg", *more)
    return trained(path, 3)


@pytest.fixture(scope="module")
def stream(tmp_path_factory) -> Path:
    return make_stream(tmp_path_factory.mktemp("talk") / "stream")


def counting(stream: Path, path: Path, **options) -> Path:
    """Make a round of FMP's three clients in three jobs, up to its aggregation."""
    config = {"task": "rescore", "rounds": 2, "method_conf": options}
    path.with_suffix(".yaml").write_text(yaml.safe_dump(config))
    more = ("--config", path.with_suffix(".yaml"), "--method", "fmp", "--data", f"train={stream}")
    inside("init", path, *more).ok()
    return trained(path, 3)


def trained(path: Path, jobs: int) -> Path:
    inside("sample", path, "--nj", jobs).ok()
    for job in range(1, jobs + 1):
        inside("train-local", path, "--job", job).ok()
    return path


def rows_of(table: Path) -> list[list[str]]:
    return [line.split("\t") for line in table.read_text().splitlines()]


def write_rows(table: Path, rows: list[list[str]]) -> None:
    table.write_text("".join("\t".join(row) + "\n" for row in rows))


def first_of(path: Path, job: int = 2) -> str:
    """Return the first client of a job."""
    return rows_of(path / "round_0001" / f"update.{job}.tsv")[1][0]


def without(path: Path, copy: Path, *clients: str) -> bytes:
    """Return the next state if these clients had reported that they send nothing."""
    shutil.copytree(path, copy)
    for table in copy.glob("round_0001/update.*.tsv"):
        header, *rows = rows_of(table)
        for row in rows:
            if row[0] in clients:
                row[-1] = "ill"
        write_rows(table, [header, *rows])
    inside("aggregate", copy).ok()
    return (copy / "round_0002" / "global.safetensors").read_bytes()


def assert_refused(path: Path, expected: bytes, said: str, *liars: str) -> None:
    """Check that aggregation refuses only the liars, by name, and averages the other clients."""
    done = inside("aggregate", path).ok()
    rows = {row["client"]: row["status"] for row in ledger(path)}
    assert {client for client, status in rows.items() if status != "ok"} == set(liars)
    for client in liars:
        assert said in rows[client]
        assert f"round 1, {client}: {rows[client]}" in done.err
    assert (path / "round_0002" / "global.safetensors").read_bytes() == expected


def lie(path: Path, change: Change, job: int = 2) -> str:
    """Change the update of a job's first client; return its name."""
    file = path / "round_0001" / f"update.{job}.safetensors"
    tensors = {name: value.copy() for name, value in load_file(file).items()}
    change(tensors, 0)
    save_file(tensors, file)
    return first_of(path, job)


def test_a_table_that_names_all_others(keywords, tmp_path):
    """Only its job is lost, and its invented figures are not used."""
    own = [row[0] for row in rows_of(keywords / "round_0001/update.2.tsv")[1:]]
    expected = without(keywords, tmp_path / "left", *own)
    path = Path(shutil.copytree(keywords, tmp_path / "exp"))
    folder = path / "round_0001"
    others = [row for job in (1, 3) for row in rows_of(folder / f"update.{job}.tsv")[1:]]
    like = others[0][1:]
    rows = [*rows_of(folder / "update.2.tsv"), *others, ["server", *like], ["total", *like]]
    write_rows(folder / "update.2.tsv", rows)
    tensors = load_file(folder / "update.2.safetensors")
    more = {name: np.concatenate([x, *[x[:1]] * (len(others) + 2)]) for name, x in tensors.items()}
    save_file(more, folder / "update.2.safetensors")
    assert_refused(path, expected, f"{others[0][0]!r} is no client of this job", *own)
    assert {row["client"] for row in ledger(path)} == {*keyword_world.CLIENTS, "-"}
    shown = inside("show", path).ok().out.splitlines()
    assert [line.split()[0] for line in shown].count("total") == 1
    assert len(shown) == 1 + len(keyword_world.CLIENTS) + 2


def scaled(factor: float) -> Change:
    def change(tensors, row):
        for value in tensors.values():
            value[row] *= factor

    return change


def set_value(ending: str, value: float) -> Change:
    def change(tensors, row):
        (name, *_) = (name for name in sorted(tensors) if name.endswith(ending))
        tensors[name][row].reshape(-1)[0] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_value(".running_var", -40), "-40 is below 0 in tensor"),
        (set_value(".running_var", -1e-30), "-1e-30 is below 0 in tensor"),
        (set_value(".running_var", np.nan), "NaN or Inf in tensor"),
        (set_value(".running_mean", np.inf), "NaN or Inf in tensor"),
        (set_value("weight", 1e9), "x the median"),
        (scaled(1e30), "x the median"),
    ],
)
def test_values_that_no_model_has(keywords, tmp_path, change, said):
    liar = first_of(keywords)
    expected = without(keywords, tmp_path / "left", liar)
    path = Path(shutil.copytree(keywords, tmp_path / "exp"))
    assert lie(path, change) == liar
    assert_refused(path, expected, said, liar)


def huge_shape(path: Path) -> None:
    text = b'{"a":{"dtype":"F32","shape":[1%s,1%s],"data_offsets":[0,0]}}' % ((b"0" * 4000,) * 2)
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def elsewhere(put: Callable[[Path, Path], None]) -> Callable[[Path], None]:
    """Return replacements for a file that was moved out of the folder."""

    def change(path: Path) -> None:
        moved = path.rename(path.parent.parent / f"moved.{path.name}")
        put(path, moved)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (huge_shape, "is wrong"),
        (elsewhere(lambda path, moved: path.symlink_to(moved)), "a symbolic link"),
        (elsewhere(lambda path, moved: path.hardlink_to(moved)), "2 names"),
        (elsewhere(lambda path, moved: os.mkfifo(path)), "not a regular file"),
        (elsewhere(lambda path, moved: path.symlink_to(path.name)), "a symbolic link"),
        (lambda path: os.truncate(path, 10**12), "1000000000000"),
    ],
)
@pytest.mark.parametrize("suffix", ["safetensors", "tsv"])
def test_files_that_are_not_a_jobs_own(keywords, tmp_path, change, said, suffix):
    if suffix == "tsv" and change is huge_shape:
        return
    own = [row[0] for row in rows_of(keywords / "round_0001/update.2.tsv")[1:]]
    expected = without(keywords, tmp_path / "left", *own)
    path = Path(shutil.copytree(keywords, tmp_path / "exp"))
    change(path / "round_0001" / f"update.2.{suffix}")
    said = "too long" if suffix == "tsv" and said.isdigit() else said
    assert_refused(path, expected, said, *own)
    assert sum(int(row["bytes_up"]) for row in ledger(path)) < 10**6


def fill(value: float, words: slice = slice(5, 6)) -> Change:
    def change(tensors, row):
        tensors["counts"][row, words] = value

    return change


LAPLACE = {"mechanism": "laplace", "epsilon": 5.0, "cap": 4.0}


@pytest.mark.parametrize(
    ("change", "said", "options"),
    [
        (fill(-4.0), "-4 is below 0", {}),
        (fill(1e300), "1e+300 in all is over 202", {}),
        (fill(1.7e308, slice(None)), "inf in all is over", {}),
        (fill(204_000.0), "in all is over 202", {}),
        (fill(101.0), "in all is over 100", {"max_words": 100.0, "sigma": 0.0}),
        (fill(np.nan), "NaN or Inf", {}),
        (fill(0.1), "no multiple of", {"privacy": LAPLACE}),
        (fill(-4.0), "-4 is below 0", {"privacy": LAPLACE}),
        (fill(2.0**40), "in all is over", {"privacy": LAPLACE}),
        (fill(1.7e308), "in all is over", {"privacy": LAPLACE}),
        (fill(4.5), "in all is over 4", {"privacy": {**LAPLACE, "unit": "user"}}),
        (fill(0.1), "no multiple of", {"privacy": {**LAPLACE, "trust": "client"}}),
        (fill(2.0**40), "over", {"privacy": {**LAPLACE, "trust": "client"}}),
        (fill(-(2.0**40)), "is below", {"privacy": {**LAPLACE, "trust": "client"}}),
        (fill(-4.0), "-4 is below 0", {"privacy": {"mechanism": "paper", "epsilon": 1.0}}),
    ],
)
def test_counts_that_nobody_has(stream, tmp_path, monkeypatch, change, said, options):
    monkeypatch.setenv("FEDTOOLS_NOISE_KEY", str(tmp_path / "secret" / "noise.key"))
    # The copy without bob has the same noise, which would otherwise differ.
    monkeypatch.setenv("FEDTOOLS_NONCE", "0123456789abcdef" * 2)
    path = counting(stream, tmp_path / "exp", **options)
    expected = without(path, tmp_path / "left", "bob")
    jobs = {first_of(path, job): job for job in (1, 2, 3)}
    assert lie(path, change, jobs["bob"]) == "bob"
    assert_refused(path, expected, said, "bob")


@pytest.fixture(scope="module")
def crowd(tmp_path_factory) -> Path:
    """Make a stream of twenty clients who say about as much."""
    names = tuple(f"u{number:02d}" for number in range(20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rescored_world, "CLIENTS", names)
        return make_stream(tmp_path_factory.mktemp("crowd") / "stream", utterances=24)


@pytest.mark.parametrize(
    ("options", "lowered"),
    [
        ({}, True),
        ({"sends": "increments"}, True),
        ({"privacy": {"mechanism": "paper", "epsilon": 1.0}}, True),
        ({"privacy": {**LAPLACE, "epsilon": 1e6, "trust": "client"}}, True),
        ({"privacy": {**LAPLACE, "unit": "user", "cap": 100.0}}, False),
        ({"privacy": {**LAPLACE, "unit": "word"}, "max_words": 100.0}, False),
    ],
)
def test_one_of_twenty_clients_has_no_word_to_itself(crowd, tmp_path, key, options, lowered):
    """Its counts are bounded by the others' or, where that would leak them, by a public number."""
    path = counting(crowd, tmp_path / "exp", **options)
    tensors = path / "round_0001/update.1.safetensors"
    found = load_file(tensors)
    (liar, *_) = rows_of(path / "round_0001/update.1.tsv")[1]
    honest = np.median(np.abs(found["counts"]).sum(1))
    found["counts"][0] = 0
    found["counts"][0, 5] = 150_000 if lowered else 100
    save_file(found, tensors)
    told = inside("aggregate", path).ok().err
    counts = load_file(path / "round_0002/global.safetensors")["counts"]
    if "paper" not in str(options):
        assert counts[5] / counts.sum() < 0.5
    status = {row["client"]: row["status"] for row in ledger(path)}
    assert status[liar] == ("weight lowered" if lowered else "ok")
    if lowered:
        (amount,) = re.findall(rf"{liar}: counts of 150000 in all lowered to ([0-9.]+)", told)
        assert 4 * honest < float(amount) < 9 * honest
        assert 20 < share_of(path, liar) < 40
    assert {one for name, one in status.items() if name != liar} == {"ok"}


def test_a_client_with_most_of_the_counts_is_named(crowd, tmp_path, key):
    """Where nothing else than a public number bounds it."""
    path = counting(crowd, tmp_path / "exp", privacy={**LAPLACE, "unit": "word"})
    tensors = path / "round_0001/update.1.safetensors"
    found = load_file(tensors)
    found["counts"][0, 5] = 150_000
    save_file(found, tensors)
    told = inside("aggregate", path).ok().err
    (liar, *_) = rows_of(path / "round_0001/update.1.tsv")[1]
    assert f"round 1: 1 of 20 clients has 99% of all counts: {liar} (99%)" in told
    status = {row["client"]: row["status"] for row in ledger(path)}
    assert [name for name, one in status.items() if one == "large share"] == [liar]
    assert 98 < share_of(path, liar) < 100


def share_of(path: Path, client: str) -> float:
    """Return a client's share in the first round, in percent, as shown."""
    table = inside("show", path, "--clients").ok().out.splitlines()
    (row,) = (line.split() for line in table if line.startswith(f"{client} "))
    return float(row[row.index("%") - 1])


def test_what_one_client_may_have_is_said_at_init(crowd, tmp_path, key):
    config = {"task": "rescore", "rounds": 2}
    for unit, said in (("word", True), ("utterance", True), ("user", False)):
        config["method_conf"] = {"privacy": {**LAPLACE, "unit": unit}}
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
        arguments = ("--config", tmp_path / "c.yaml", "--method", "fmp")
        told = inside("init", tmp_path / unit, *arguments, "--data", f"train={crowd}").ok().err
        warned = "max_words of 30000 lets one dishonest client have 9"
        assert (warned in told) == said


@pytest.mark.parametrize("trust", ["server", "client"])
@pytest.mark.parametrize("release", ["increments", "cumulative"])
@pytest.mark.parametrize("unit", ["word", "utterance", "user"])
def test_honest_counts_are_within_their_bounds(unit, release, trust):
    """The largest honest counts with noise: of 500 draws of 40 words, none exceeds the bounds."""
    from fedtools.privacy.key import NoiseKey

    options = Privacy("laplace", 0.5, unit, 3.0, release, trust)
    plan = Plan(options, 4, even_groups=True)
    bounds = bounds_on_counts(plan, 7 * FMP.max_words, 40, 3)
    most = plan.steps * plan.grid
    counts = np.zeros(40)
    counts[7] = most if unit == "user" else 1000 * most
    for number in range(500):
        sent = counts
        if trust == "client":
            key = NoiseKey(number.to_bytes(32, "big"))
            sent = plan.release(counts, key, experiment="x", number=1, sender="c")
        assert not bounds.problem(sent)
        assert not bounds.total_problem(np.abs(sent).sum())


def test_a_model_to_begin_with_that_no_training_makes(tmp_path):
    """`init --start` refuses a variance of -40, and a shape of 10^4000."""
    world = keyword_world.make_world(tmp_path / "world")
    first = keyword_world.begin(world, tmp_path / "first", "fedavg")
    state = load_file(first / "init.safetensors")
    name = next(name for name in sorted(state) if name.endswith(".running_var"))
    state[name][0] = -40
    start = tmp_path / "start.safetensors"
    save_file(state, start)
    more = ("--config", world / "config.yaml", "--method", "fedavg", "--start", start)
    data = ("--data", f"train={world / 'train'}", "--data", f"test={world / 'test'}")
    inside("init", tmp_path / "exp", *more, *data).fails(1, str(start), "-40 is below 0", name)
    huge_shape(start)
    inside("init", tmp_path / "exp", *more, *data).fails(1, str(start), "is wrong")
    assert not (tmp_path / "exp").exists()


def test_what_was_kept_is_known_by_its_sum(keywords, tmp_path, capsys):
    """A message replaced after its round is reported where models are read, and checked again."""
    from fedtools.attack.victims import sound_victims
    from fedtools.federation.federation import Federation

    path = Path(shutil.copytree(keywords, tmp_path / "exp"))
    inside("aggregate", path).ok()
    done, everybody = path / "round_0001" / ".done", set(keyword_world.CLIENTS)
    sums = dict(reversed(line.split("  ")) for line in done.read_text().splitlines())
    for file in path.glob("round_0001/update.*"):
        assert sums[file.name] == hashlib.sha256(file.read_bytes()).hexdigest()
    victims = sound_victims(Federation(path), [1])
    assert set(victims.messages) == everybody and not victims.refused
    assert not capsys.readouterr().err
    liar = lie(path, set_value(".running_mean", np.nan))
    changed = path / "round_0001" / "update.2.safetensors"
    warning = f"warning: {changed}: changed since its round was closed"
    victims = sound_victims(Federation(path), [1])
    assert set(victims.messages) == everybody - {liar}
    assert victims.refused[liar].startswith("NaN or Inf in tensor")
    assert warning in capsys.readouterr().err


def test_a_seal_is_broken_by_any_writing(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345678")
    with open_received(path) as file:
        seal = seal_of(file)
    times = path.stat()
    with open_received(path, seal=seal) as file:
        assert file.read() == b"12345678" and seal_of(file) == seal
        with open(path, "r+b") as other:
            other.write(b"8")
        # Modification times can be set back, but change times cannot.
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert seal_of(file) != seal
