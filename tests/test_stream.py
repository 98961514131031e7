"""Streams: start times of utterances, their groups, and independence of groups."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import ROOT, Result, inside, run
from rescored_world import CLIENTS, make_stream
from safetensors.numpy import load_file

from fedtools.core.tables import read_tsv
from fedtools.lm.reweighting import Lists, ListWeights
from fedtools.lm.stream import open_stream
from fedtools.methods.fmp import FMP, ClientState
from fedtools.privacy.options import Privacy
from fedtools.privacy.plan import Plan

T = 3


@pytest.fixture(scope="module")
def stream(tmp_path_factory) -> Path:
    return make_stream(tmp_path_factory.mktemp("world") / "stream")


def without(stream: Path, name: str, out: Path) -> Path:
    """Copy the files without one utterance."""
    shutil.copytree(stream, out)
    for file in ("utt2client", "utt2spk", "text", "segments", "nbest.tsv", "nnlm.scp"):
        lines = (out / file).read_text().splitlines(keepends=True)
        (out / file).write_text("".join(line for line in lines if line.split()[0] != name))
    return out


def begins_of(stream: Path) -> dict[str, float]:
    lines = [line.split() for line in (stream / "segments").read_text().splitlines()]
    return {name: float(begin) for name, _, begin, _ in lines}


def groups_by_name(folder: Path, span: float) -> dict[str, int]:
    opened = open_stream(folder)
    return {
        name: number
        for client in opened.runs
        for number, group in enumerate(opened.groups(client, T, span))
        for name in opened.rescored.utterances[group]
    }


def sums(folder: Path, plan: Plan, span: float) -> np.ndarray:
    """Return a server's releases without the noise, (T, words): the sum over clients."""
    opened = open_stream(folder)
    lists = Lists(opened.rescored, ListWeights())
    found = np.zeros((T, len(lists.background)))
    for client in opened.runs:
        state = ClientState(client, lists, opened.groups(client, T, span), FMP())
        for number in range(T):
            state.count()
            found[number] += plan.bound(state.new)[0]
            state.take()
    if plan.options.release == "cumulative":
        found = np.cumsum(found, axis=0)
    return found


@pytest.mark.parametrize("span", [47.0, 30.0, 1000.0])
def test_no_utterance_decides_another_ones_round(stream, tmp_path, span):
    """This includes the one that ends last, and one that starts after the span."""
    begins = begins_of(stream)
    whole = groups_by_name(stream, span)
    assert whole == {name: min(int(begin / (span / 4)), 3) for name, begin in begins.items()}
    plans = [
        Plan(Privacy(mechanism="laplace", cap=2.0, release=release), T, False)
        for release in ("increments", "cumulative")
    ]
    released = [sums(stream, plan, span) for plan in plans]
    most = [(0.0, 0.0)] * 2
    for name in begins:
        other = without(stream, name, tmp_path / name)
        assert groups_by_name(other, span) == {one: whole[one] for one in whole if one != name}
        for at, plan in enumerate(plans):
            change = np.abs(sums(other, plan, span) - released[at]).sum(1)
            most[at] = max(most[at], (change.sum(), change.max()))
            assert change.max() <= plan.single * plan.steps * plan.grid
            assert change.sum() <= plan.joint * plan.steps * plan.grid
    # The bound is reached, so no other change could go unnoticed.
    assert most[0] == pytest.approx((2.0, 2.0), abs=1e-4)
    assert most[1] == pytest.approx((2.0 * T, 2.0), abs=1e-4)


def test_what_a_federation_sends_without_the_last_utterance(stream, tmp_path, monkeypatch):
    """Its files change in one round of one client, by at most an utterance's bound."""
    monkeypatch.setenv("FEDTOOLS_NOISE_KEY", str(tmp_path / "noise.key"))
    begins = begins_of(stream)
    last = max((name for name in begins if begins[name] < 36), key=begins.get)
    # It is the last one of its recording, too.
    folder = stream
    for name in begins:
        if begins[name] > begins[last]:
            folder = without(folder, name, tmp_path / f"without-{name}")
    config = {"task": "rescore", "rounds": T, "method_conf": {"groups": "clock", "span": 48.0}}
    config["method_conf"]["privacy"] = {"mechanism": "laplace", "cap": 2.0, "epsilon": 1.0}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    sent = []
    for at, data in enumerate((folder, without(folder, last, tmp_path / "less"))):
        path = tmp_path / str(at)
        arguments = ("--config", tmp_path / "c.yaml", "--method", "fmp", "--data", f"train={data}")
        inside("init", path, *arguments, "--set", "method_conf.sends=increments").ok()
        inside("rounds", path).ok()
        sent.append([])
        for number in range(1, T + 1):
            counts = load_file(path / f"round_{number:04d}" / "update.1.safetensors")["counts"]
            rows = read_tsv(path / f"round_{number:04d}" / "update.1.tsv", None)
            assert [row["client"] for row in rows] == list(CLIENTS)
            sent[-1].append(counts)
    change = np.abs(np.array(sent[0]) - np.array(sent[1])).sum(2)
    at = (int(begins[last] // 12), CLIENTS.index(last[:3]))
    assert 0 < change[at] <= 2.0 and change.sum() == change[at]


def test_times_of_a_table_without_segments(stream, tmp_path, cli):
    """utt2start is equivalent to segments, and is part of the data directory."""
    begins, data = begins_of(stream), tmp_path / "data"
    data.mkdir()
    for name in ("utt2client", "text", "utt2spk"):
        shutil.copy(stream / name, data)
    (data / "utt2start").write_text("".join(f"{name} {begins[name]}\n" for name in sorted(begins)))
    cli("rescore-stream", data, stream, tmp_path / "out").ok()
    assert not (tmp_path / "out" / "segments").exists()
    one, two = open_stream(stream), open_stream(tmp_path / "out")
    assert one.rescored.utterances == two.rescored.utterances
    assert one.begins.tolist() == two.begins.tolist() and one.begins.any()
    config = {"task": "rescore", "rounds": T, "method_conf": {"groups": "clock", "span": 48.0}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    arguments = ("--config", tmp_path / "c.yaml", "--method", "fmp", "--data")
    cli("init", tmp_path / "exp", *arguments, f"train={tmp_path / 'out'}").ok()
    sweep = ("rescore-sweep", tmp_path / "out", tmp_path / "o", "--set", "groups=clock")
    sweep += ("--set", "span=48", "--vary", "scale=1")
    cli(*sweep).ok()
    other = tmp_path / "out" / "utt2start"
    lines = other.read_text().splitlines(keepends=True)
    for bad, told in (
        (f"{lines[0].split()[0]} -1\n", "utt2start:1"),
        (f"{lines[0].split()[0]} soon\n", "utt2start:1"),
        (f"{lines[0].split()[0]} inf\n", "utt2start:1"),
        ("", lines[0].split()[0]),
    ):
        other.write_text("".join([bad, *lines[1:]]))
        cli(*sweep).fails(1, told)
    # Other times are other data.
    other.write_text("".join([f"{lines[0].split()[0]} 1000\n", *lines[1:]]))
    cli("rounds", tmp_path / "exp").fails(1, "utt2start")
    other.unlink()
    cli("init", tmp_path / "new", *arguments, f"train={tmp_path / 'out'}").fails(1, "utt2start")
    cli(*sweep).fails(1, "utt2start")


@pytest.mark.parametrize(
    ("table", "lines", "span"),
    [
        ("segments", ("a r 0.5 2", "b s 9 -1", "c r 3.25 7.5"), 9.0),
        ("segments", ("a r 0.5 2", "b s 3 -1", "c r 3.25 7.5"), 7.5),
        ("utt2start", ("a 0.5", "b 3", "c 3.25"), 3.25),
        # Times that separate nothing are ignored.
        ("segments", ("a r 0 -1", "b s 0 -1", "c t 0 -1"), None),
        (None, (), None),
    ],
)
def test_bounds_and_the_span_of_the_clock(tmp_path, table, lines, span):
    bounds_of(tmp_path, table, lines).ok()
    found = yaml.safe_load((tmp_path / "bounds.yaml").read_text())
    assert found.pop("span", None) == span
    # Three of four have no more words: utterances with 4, 1 and 2, clients with 5 and 2.
    assert found == {"word": 1.0, "utterance": 4.0, "user": 5.0}


@pytest.mark.parametrize(
    ("table", "lines", "said"),
    [
        ("segments", ("a r 0.5 2", "b s 9", "c r 3.25 7.5"), "segments:2: 's 9' is not a segment"),
        ("segments", ("a r 0.5 2", "b s 9 8", "c r 3.25 7.5"), "segments:2: a segment from 9 to 8"),
        ("utt2start", ("a 0.5", "b 3", "c soon"), "utt2start:3: 'soon' is not a number of seconds"),
        ("utt2start", ("a 0.5", "b nan", "c 1"), "utt2start:2: 'nan' is not a number of seconds"),
    ],
)
def test_bounds_of_malformed_times(tmp_path, table, lines, said):
    bounds_of(tmp_path, table, lines).fails(1, said)
    assert not (tmp_path / "bounds.yaml").exists()


def bounds_of(folder: Path, table: str | None, lines: Sequence[str]) -> Result:
    """Run bounds.py on three utterances of two clients, with a given table of times."""
    (folder / "text").write_text("a W W W W\nb W\nc W W\n")
    (folder / "utt2client").write_text("a x\nb x\nc y\n")
    if table:
        (folder / table).write_text("".join(f"{line}\n" for line in lines))
    return run(ROOT / "local" / "ami" / "bounds.py", folder, folder / "bounds.yaml")
