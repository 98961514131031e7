"""Arks: written values are read back, by every route; damage is one line, never a traceback."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import struct
from pathlib import Path

import kaldiio
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedtools.core.errors import UserError
from fedtools.data.ark import AUTOMATIC, MAX_OPEN_FILES, FeatureReader, write_ark

SHAPES = [(1, 3), (7, 3), (9, 3), (40, 3), (2, 3), (300, 3)]


def matrices(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        f"utt{index}": random.standard_normal(shape).astype(np.float32)
        for index, shape in enumerate(SHAPES)
    }


def assert_same(read: np.ndarray, written: np.ndarray) -> None:
    assert read.dtype == np.float32 and read.flags.writeable and read.flags.aligned
    np.testing.assert_array_equal(read, written)


@pytest.fixture
def ark(tmp_path) -> Path:
    write_ark(tmp_path / "feats.ark", matrices().items())
    return tmp_path / "feats.ark"


def scp_of(ark: Path) -> dict[str, str]:
    """Return the scp that Kaldi's layout implies, found by walking through the ark."""
    scp, position = {}, 0
    for utt, matrix in kaldiio.load_ark(str(ark)):
        position += len(utt) + 1
        scp[utt] = f"{ark}:{position}"
        position += 15 + matrix.nbytes
    return scp


def test_kaldiio_reads_what_we_write_and_the_scp_is_right(ark):
    for utt, matrix in kaldiio.load_ark(str(ark)):
        np.testing.assert_array_equal(matrix, matrices()[utt])
    assert write_ark(ark, matrices().items()) == scp_of(ark)
    assert ark.read_bytes()[:20] == b"utt0 \0BFM \4\1\0\0\0\4\3\0\0\0"


def test_every_route_reads_the_same(ark):
    reader, expected = FeatureReader(scp_of(ark)), matrices()
    for utt, matrix in expected.items():
        assert_same(reader.read(utt), matrix)
        assert reader.num_frames(utt) == len(matrix) and reader.shape(utt) == matrix.shape
    wanted = ["utt4", "utt0", "utt5", "utt0", "utt1"]
    for utt, matrix in zip(wanted, reader.read_many(wanted), strict=True):
        assert_same(matrix, expected[utt])
    assert reader.read_many([]) == []


def test_one_client_is_one_read(tmp_path, monkeypatch):
    many = {f"u{i:04}": np.full((20, 80), i, np.float32) for i in range(200)}
    reader = FeatureReader(write_ark(tmp_path / "a.ark", many.items()))
    utts = list(many)
    for utt in utts:
        reader.num_frames(utt)
    reads, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *a: reads.append(1) or preadv(*a))
    read = reader.read_many(utts[50:150])
    assert len(reads) == 1
    assert [int(matrix[0, 0]) for matrix in read] == list(range(50, 150))


def test_utterances_far_apart_and_in_several_arks(tmp_path):
    scp, expected = {}, {}
    for index in range(3):
        some = {f"a{index}-{u}": m + index for u, m in matrices(index).items()}
        some[f"a{index}-big"] = np.full((500, 80), index, np.float32)
        expected |= some
        kind = AUTOMATIC if index == 1 else None
        scp |= write_ark(tmp_path / f"{index}.ark", some.items(), compress=kind)
    utts = sorted(expected, key=lambda utt: utt[::-1])
    for utt, matrix in zip(utts, FeatureReader(scp).read_many(utts), strict=True):
        tolerance = 0.1 if utt.startswith("a1") else 0
        np.testing.assert_allclose(matrix, expected[utt], atol=tolerance)


@pytest.mark.parametrize("method", [None, 1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_kind_that_kaldi_writes(tmp_path, method, dtype):
    written = {utt: matrix.astype(dtype) for utt, matrix in matrices().items()}
    path = str(tmp_path / "x.ark")
    kaldiio.save_ark(path, written, scp=path + ".scp", compression_method=method)
    scp = dict(line.split() for line in Path(path + ".scp").read_text().splitlines())
    reader = FeatureReader(scp)
    for utt, matrix in reader.scp.items():
        read = reader.read(utt)
        assert reader.shape(utt) == read.shape == written[utt].shape
        assert_same(read, kaldiio.load_mat(matrix).astype(np.float32))


def test_a_file_of_one_matrix_needs_no_offset(tmp_path):
    kaldiio.save_mat(str(tmp_path / "one.mat"), matrices()["utt1"])
    reader = FeatureReader({"utt1": str(tmp_path / "one.mat")})
    assert_same(reader.read("utt1"), matrices()["utt1"])


def test_open_files_are_bounded(tmp_path):
    scp = {}
    for index in range(2 * MAX_OPEN_FILES):
        scp |= write_ark(tmp_path / f"{index}.ark", [(f"u{index}", np.ones((2, 2)) * index)])
    reader = FeatureReader(scp)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(2):
        for index, matrix in enumerate(reader.read_many(list(scp))):
            assert matrix[0, 0] == index
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + MAX_OPEN_FILES


def read_in_child(reader: FeatureReader, utts: list[str]) -> list[float]:
    return [float(reader.read(utt).sum()) for _ in range(200) for utt in utts]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_can_share_a_reader(ark, method):
    reader, expected = FeatureReader(scp_of(ark)), matrices()
    reader.read("utt0")
    orders = [list(expected), list(expected)[::-1]]
    with multiprocessing.get_context(method).Pool(2) as pool:
        results = pool.starmap(read_in_child, [(reader, utts) for utts in orders])
    for utts, sums in zip(orders, results, strict=True):
        assert sums == [float(expected[utt].sum()) for _ in range(200) for utt in utts]


def header(rows: int, columns: int, kind: bytes = b"FM") -> bytes:
    if kind.startswith(b"CM"):
        return b"\0B" + kind + b" " + struct.pack("<ffii", 0.0, 1.0, rows, columns)
    return b"\0B" + kind + b" " + struct.pack("<cici", b"\4", rows, b"\4", columns)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "byte 0"),
        (b"\0B", "kind of matrix"),
        (b"\0BFM \4\1\0", "ends within its header"),
        (b"\0BCM \0\0\0\0", "ends within its header"),
        (header(2, 2) + bytes(15), "need 16 bytes, the file has 15"),
        (header(2**31 - 1, 2**31 - 1), "2147483647 x 2147483647"),
        (header(2**31 - 1, 1, b"CM3") + bytes(99), "2147483647 x 1"),
        (header(10, 10, b"CM") + bytes(100), "need 180 bytes"),
        (header(-1, -4) + bytes(99), "-1 x -4"),
        (header(0, 80), "0 x 80"),
        (b"\0BFM \5" + header(1, 1)[6:] + bytes(9), "wrong header"),
        (b"\0BFV \4\3\0\0\0" + bytes(12), "b'FV'"),
        (b" [ 1 2 3 ]\n", "no binary matrix"),
        (b"PKL" + pickle.dumps(os.getcwd), "no binary matrix"),
        (b"RIFF" + bytes(99), "no binary matrix"),
    ],
)
def test_damage_is_told_with_file_and_utterance(tmp_path, content, said):
    (tmp_path / "bad.ark").write_bytes(content)
    reader = FeatureReader({"someone-1": f"{tmp_path}/bad.ark:0"})
    for call in (reader.read, reader.num_frames, lambda utt: reader.read_many([utt])):
        with pytest.raises(UserError) as caught:
            call("someone-1")
        for text in (said, "bad.ark", "someone-1"):
            assert text in str(caught.value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{dir}/none.ark:3", "No such file"),
        ("{dir}:3", "not a regular file"),
        ("{ark}:99999", "byte 99999"),
        ("{ark}:" + "9" * 30, "no file is"),
        ("{ark}:6", "no binary matrix at byte 6"),
        ("{ark}:-5", "No such file"),
        ("touch {dir}/ran |", "pipes"),
        ("| touch {dir}/ran", "pipes"),
        ("{ark}:5[0:3]", "ranges"),
    ],
)
def test_bad_scp_entries(ark, tmp_path, value, said):
    reader = FeatureReader({"utt0": value.format(dir=tmp_path, ark=ark)})
    with pytest.raises(UserError, match="utt0") as caught:
        reader.read("utt0")
    assert said in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_an_utterance_that_is_not_there(ark):
    with pytest.raises(UserError, match="'stranger'"):
        FeatureReader(scp_of(ark)).read("stranger")


def test_an_ark_that_shrinks_while_it_is_read(ark):
    reader = FeatureReader(scp_of(ark))
    assert reader.num_frames("utt5") == 300
    os.truncate(ark, ark.stat().st_size - 4)
    with pytest.raises(UserError, match="utt5"):
        reader.read("utt5")


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), kind=st.sampled_from([None, 2, 3]))
def test_no_damage_is_a_traceback(tmp_path, data, kind):
    """Bytes overwritten and the end cut off give a matrix of a bounded size, or a `UserError`."""
    path = str(tmp_path / "x.ark")
    kaldiio.save_ark(path, matrices(), scp=path + ".scp", compression_method=kind)
    scp = dict(line.split() for line in Path(path + ".scp").read_text().splitlines())
    raw = bytearray(Path(path).read_bytes())
    # Damage to headers matters most, so damage these preferably.
    utt = data.draw(st.sampled_from(sorted(scp)))
    place = int(scp[utt].rpartition(":")[2]) + data.draw(st.integers(0, 30))
    new = data.draw(st.binary(min_size=1, max_size=8))
    raw[place : place + len(new)] = new
    cut = data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw))))
    Path(path).write_bytes(raw[:cut])
    reader = FeatureReader(scp)
    for name in scp:
        try:
            assert reader.read(name).nbytes <= 4 * len(raw)
        except UserError as error:
            assert name in str(error) and "x.ark" in str(error)


def test_a_failed_write_leaves_the_old_ark(ark):
    before = ark.read_bytes()

    def failing():
        yield "new", np.ones((5, 3), np.float32)
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError):
        write_ark(ark, failing())
    assert ark.read_bytes() == before and [file.name for file in ark.parent.iterdir()] == [ark.name]
