"""Sent features: training uses exactly the checked ones, limited relative to other clients."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import simulated
from asr_world import TRAIN, TRAINING, begin, model_of, some_data
from conftest import inside, ledger
from decouplefl_world import CUT, TEACHER, stages

from fedtools.data.ark import FeatureReader
from fedtools.exchange import sent_features
from fedtools.exchange.sent_features import sent_name, write_features
from fedtools.server.server import Server
from fedtools.server.shares import taken_of

LAST = "round_0003/global.safetensors"


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("features")
    some_data(root / "train", TRAIN, 0)
    some_data(root / "valid", {"au": 2, "en": 4, "in": 3}, 1)
    simulated.config_file(root / "plain.yaml", model=model_of(0.0), training=TRAINING)
    inside("train-tokens", root / "train" / "text", root / "tokens", "--token-type", "char").ok()
    return root


def sending(world: Path, path: Path, *more: str) -> Path:
    """Make an experiment up to the aggregation of its first round, in which features are sent."""
    begin(world, path, "decouplefl", *CUT, *TEACHER, *stages(0, 1), *more)
    inside("sample", path, "--nj", "3").ok()
    for job in ("1", "2", "3"):
        inside("train-local", path, "--job", job).ok()
    return path


@pytest.fixture(scope="module")
def sent(world) -> Path:
    return sending(world, world / "sent")


@pytest.fixture(scope="module")
def honest(sent, world) -> bytes:
    """Return the last state, from unmodified features."""
    path = shutil.copytree(sent, world / "honest")
    inside("rounds", path).ok()
    return (path / LAST).read_bytes()


def refused(path: Path) -> dict[str, str]:
    rows = (row for row in ledger(path) if row["round"] == "1")
    return {row["client"]: row["status"] for row in rows if row["status"] != "ok"}


@pytest.fixture
def poison(sent, tmp_path):
    """Return a copy of the experiment, its ark of en, and a function that replaces its features."""
    path = Path(shutil.copytree(sent, tmp_path / "exp"))
    ark = path / "round_0001" / "features.en.ark"
    other = ark.read_bytes()[:-40] + bytes(40)
    return path, ark, lambda *_: ark.write_bytes(other)


def test_exchanged_while_they_are_checked(poison, monkeypatch):
    path, _, exchange = poison
    shapes = sent_features._check_shapes
    monkeypatch.setattr(sent_features, "_check_shapes", lambda *all: [shapes(*all), exchange()][0])
    inside("aggregate", path).ok()
    assert list(refused(path)) == ["en"] and "features.en.ark: changed" in refused(path)["en"]


def test_exchanged_before_the_round_is_closed(poison, monkeypatch, honest):
    """The checksum used in later rounds is of the checked file, not of a replacement."""
    path, ark, exchange = poison
    before = ark.read_bytes()
    monkeypatch.setattr(Server, "lower_shares", exchange)
    inside("aggregate", path).ok()
    inside("rounds", path).fails(1, f"{ark}: changed since it was written")
    ark.write_bytes(before)
    inside("rounds", path).ok()
    assert (path / LAST).read_bytes() == honest


def test_exchanged_while_they_are_trained_on(poison, monkeypatch, honest):
    path, ark, exchange = poison
    before = ark.read_bytes()
    inside("aggregate", path).ok()
    read = FeatureReader.read_many
    with monkeypatch.context() as patch:
        patch.setattr(FeatureReader, "read_many", lambda *all: [exchange(), read(*all)][1])
        inside("rounds", path).fails(1, f"{ark}: changed")
    ark.write_bytes(before)
    inside("rounds", path).ok()
    assert (path / LAST).read_bytes() == honest


STRANGE = {
    "fifo": lambda path, moved: os.mkfifo(path),
    "symbolic link": lambda path, moved: path.symlink_to(moved),
    "hard link": lambda path, moved: path.hardlink_to(moved),
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("suffix", ["ark", "scp"])
def test_no_file_of_its_own(sent, tmp_path, kind, suffix):
    """A FIFO does not block and a link is not followed, before the round is closed and after."""
    for after in (False, True):
        path = Path(shutil.copytree(sent, tmp_path / str(after)))
        if after:
            inside("aggregate", path).ok()
        file = path / "round_0001" / f"features.en.{suffix}"
        STRANGE[kind](file, file.rename(path / "moved"))
        if after:
            inside("rounds", path).fails(1, f"{file}: ")
        else:
            inside("aggregate", path).ok()
            assert list(refused(path)) == ["en"] and file.name in refused(path)["en"]


def lie(path: Path, client: str, matrices: list[np.ndarray]) -> None:
    """Have a client send these features, and report this number of frames."""
    folder = path / "round_0001"
    named = ((sent_name(client, number), one) for number, one in enumerate(matrices))
    size = write_features(folder, client, named, 16)
    for table in folder.glob("update.*.tsv"):
        header, *rows = (line.split("\t") for line in table.read_text().splitlines())
        for row in rows:
            if row[0] == client:
                row[header.index("utterances")] = str(len(matrices))
                row[header.index("bytes")] = str(size)
        table.write_text("".join("\t".join(row) + "\n" for row in [header, *rows]))


@pytest.mark.parametrize(("frames", "what"), [([2] * 500, "utterances"), ([100] * 40, "frames")])
def test_far_more_than_others(world, sent, tmp_path, frames, what, monkeypatch):
    """At most a multiple of the median is used, and messages name the limited client."""
    ratio = 10
    path = sending(world, tmp_path / "exp", "--set", f"method_conf.max_weight_ratio={ratio}")
    width = next(iter(list_of(path, "au").values())).shape[1]
    random = np.random.default_rng(0)
    lie(path, "in", [random.standard_normal((size, width)) for size in frames])
    done = inside("aggregate", path).ok()
    assert "round 1, in: only " in done.err
    assert f" of {len(frames) if what == 'utterances' else 4000} {what} are used" in done.err
    assert refused(path) == {"in": "weight lowered"}
    trained = []
    load = FeatureReader.read_many
    monkeypatch.setattr(
        FeatureReader, "read_many", lambda self, utts: [trained.extend(utts), load(self, utts)][1]
    )
    inside("rounds", path).ok()
    of_client = {name: {utt for utt in trained if utt.startswith(f"{name}-")} for name in TRAIN}
    assert {name: len(of_client[name]) for name in ("au", "en")} == {"au": 9, "en": 6}
    totals = sorted(sum(map(len, list_of(path, name).values())) for name in TRAIN)
    most = ratio * 9 if what == "utterances" else ratio * totals[1] // 100
    assert 1 <= len(of_client["in"]) == most


def test_clients_that_have_most_of_the_servers_data_are_named(world, tmp_path):
    """Each is within its bound, 20 times the median, and two of eight have more than half."""
    names = [f"c{number}" for number in range(8)]
    some_data(tmp_path / "train", dict.fromkeys(names, 2), 0)
    some_data(tmp_path / "valid", dict.fromkeys(names, 1), 1)
    for name in ("plain.yaml", "tokens"):
        (tmp_path / name).symlink_to(world / name)
    path = sending(tmp_path, tmp_path / "exp")
    width = next(iter(list_of(path, "c0").values())).shape[1]
    random = np.random.default_rng(0)
    honest = sum(map(len, list_of(path, "c0").values()))
    for name in names[:2]:
        lie(path, name, [random.standard_normal((honest // 4, width)) for _ in range(40)])
    told = inside("aggregate", path).ok().err
    frames = {name: sum(map(len, list_of(path, name).values())) for name in names}
    shares = [frames[name] / sum(frames.values()) for name in names[:2]]
    each = ", ".join(f"{name} ({share:.0%})" for name, share in zip(names, shares, strict=False))
    assert f"round 1: 2 of 8 clients have {sum(shares):.0%} of all frames: {each}\n" in told
    assert refused(path) == {"c0": "large share", "c1": "large share"}
    # They are used all the same.
    inside("rounds", path).ok()


def list_of(path: Path, client: str) -> dict[str, np.ndarray]:
    import kaldiio

    return dict(kaldiio.load_ark(str(path / "round_0001" / f"features.{client}.ark")))


class Lengths:
    """A reader of utterances of these lengths."""

    def __init__(self, *lengths: int):
        self.scp = {f"u{number}": "" for number in range(len(lengths))}
        self._lengths = lengths

    def num_frames(self, utt: str) -> int:
        return self._lengths[int(utt[1:])]


def test_what_is_taken():
    """The limits are 2 x the median of 2, 3 and 4 utterances and of 20, 30 and 400 frames."""
    given = {"a": Lengths(10, 10), "b": Lengths(10, 10, 10), "c": Lengths(25, 25, 50, 300)}
    taken = {name: len(utts) for name, utts in taken_of(given, 2.0).items()}
    assert taken == {"a": 2, "b": 3, "c": 2}
    assert {name: len(utts) for name, utts in taken_of(given, 0.0).items()} == {
        "a": 2,
        "b": 3,
        "c": 4,
    }
    # At least one is always used.
    assert len(taken_of({"a": Lengths(1), "b": Lengths(1), "c": Lengths(99, 1)}, 2.0)["c"]) == 1
