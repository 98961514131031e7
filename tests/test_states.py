"""Model states: the library's own bytes, and detection of all damage."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import safetensors.numpy
import torch
from damaged import SEEDS, damage, read_or_refused
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedtools.core.errors import UserError
from fedtools.exchange.states import load_state, make_header, read_layout, save_state, spec_of

TENSOR = st.sampled_from(["float32", "float64", "int64", "int32", "bool"]).flatmap(
    lambda kind: arrays.arrays(kind, arrays.array_shapes(min_dims=0, min_side=0, max_side=3))
)
STATE = st.dictionaries(st.text(max_size=8).filter(lambda n: n != "__metadata__"), TENSOR)
GOOD = {"a": np.arange(6, dtype="float32").reshape(2, 3), "b": np.ones(2, "int64")}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("states") / "state.safetensors"


@given(state=STATE)
@settings(max_examples=50, deadline=None)
def test_states_come_back_and_are_the_librarys(path, state):
    save_state(path, state)
    written = path.read_bytes()
    back = load_state(path, spec_of(state))
    assert list(back) == sorted(state)
    for name, tensor in state.items():
        assert back[name].dtype == tensor.dtype and back[name].flags.writeable
        np.testing.assert_array_equal(back[name], tensor)
    assert written == safetensors.numpy.save(state)
    header, layout = make_header(spec_of(state))
    assert written.startswith(header) and layout == read_layout(path)
    header, layout = make_header(spec_of(state), "of whom")
    path.write_bytes(safetensors.numpy.save(state, {"content": "of whom"}))
    assert path.read_bytes().startswith(header) and layout == read_layout(path)
    save_state(path, dict(reversed(state.items())))
    assert path.read_bytes() == written


def test_no_tensor_at_all(path):
    save_state(path, {})
    assert load_state(path, {}) == {}
    assert spec_of({}) == {}


def test_torch_tensors_and_views(path):
    matrix = torch.arange(6.0).reshape(2, 3)
    state = {
        "weight": torch.nn.Parameter(matrix.t()),
        "steps": torch.tensor(3),
        "mask": torch.tensor([True, False]),
        "view": np.arange(10.0)[::3],
    }
    assert spec_of(state) == {
        "mask": ((2,), "bool"),
        "steps": ((), "int64"),
        "view": ((4,), "float64"),
        "weight": ((3, 2), "float32"),
    }
    save_state(path, state)
    back = load_state(path)
    assert np.array_equal(back["weight"], matrix.numpy().T)
    assert back["steps"] == 3 and back["view"].tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize("tensor", [torch.ones(2, dtype=torch.bfloat16), np.ones(2, "int16")])
def test_other_types_are_refused(path, tensor):
    for attempt in (lambda: save_state(path, {"gate": tensor}), lambda: spec_of({"gate": tensor})):
        with pytest.raises(UserError, match=r"'gate' is (bfloat16|int16).*convert it"):
            attempt()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"a": ((2, 3), "float32")}, "'b' does not belong"),
        ({"a": ((2, 3), "float32"), "b": ((2,), "int64"), "c": ((), "bool")}, "'c' is missing"),
        ({"a": ((3, 2), "float32"), "b": ((2,), "int64")}, "'a' is float32 of shape"),
        ({"a": ((2, 3), "float64"), "b": ((2,), "int64")}, "expected float64"),
    ],
)
def test_another_state_than_expected(path, spec, said):
    save_state(path, GOOD)
    with pytest.raises(UserError) as error:
        load_state(path, spec)
    assert said in str(error.value) and str(path) in str(error.value)


def damaged(path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        load_state(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and len(message) < 400
    return message


def test_cut_off_anywhere(path):
    whole = safetensors.numpy.save(GOOD)
    for length in range(len(whole)):
        damaged(path, whole[:length])
    assert f"{len(whole) + 1} bytes long" in damaged(path, whole + b"x")


def with_header(header: object, data: int = 8) -> bytes:
    # In the library's format, since any header with a space would be refused for that.
    text = (
        header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    )
    return len(text).to_bytes(8, "little") + text + bytes(data)


def entry(kind="F32", shape=(2,), offsets=(0, 8), **more) -> dict:
    return {"dtype": kind, "shape": list(shape), "data_offsets": list(offsets), **more}


def shaped(sizes: bytes) -> bytes:
    return b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,0]}}' % sizes


def nested(depth: int) -> bytes:
    """Return metadata that Python can read at some depths, and not print."""
    return b'{"__metadata__":' + b'{"a":' * depth + b'"x"' + b"}" * depth + b"}"


LONG, WRONG, ODD = "a header of ", "the header is not what it should be", "the header's "
TOO_LONG = (4 << 20) + 1


@pytest.mark.parametrize(
    ("said", "content"),
    [
        (f"{LONG}{TOO_LONG} bytes", TOO_LONG.to_bytes(8, "little") + b"{}" + b" " * TOO_LONG),
        (LONG, b"\xff" * 8 + b"x" * 100),
        (WRONG, with_header(b"\xff\xfe")),
        (WRONG, with_header(b"[" * 100_000)),
        (WRONG, with_header(b'{"a": ' + b"9" * 10_000 + b"}")),
        (WRONG, with_header([1, 2])),
        (WRONG, with_header({"__metadata__": {"format": 1}}, 0)),
        (WRONG, with_header({"__metadata__": ["pt"]}, 0)),
        # Metadata that Python can read at some depths, and not print.
        *((WRONG, with_header(nested(depth), 0)) for depth in (100, 900, 960, 990, 1000, 50_000)),
        (ODD, with_header(b'{"__metadata__":{},"__metadata__":{}}', 0)),
        (f"{ODD}'a' is wrong", with_header({"a": 3})),
        (ODD, with_header({"a" * 5000: entry(kind="F8")})),
        (f"{ODD}'a\\n\\t\\x1b[31m' is", with_header({"a\n\t\x1b[31m": entry(kind=["F32"])})),
        (f"{ODD}'a' is wrong", with_header({"a": entry(kind="BF16", offsets=(0, 4))})),
        (ODD, with_header({"a": entry(shape=(-2,))})),
        (ODD, with_header({"a": entry(shape=(True, 2))})),
        (ODD, with_header({"a": entry(shape=(2.0,))})),
        (ODD, with_header({"a": entry(shape=[1] * 31 + [2, 1])})),
        (ODD, with_header({"a": entry(shape=(1 << 62, 1 << 62))})),
        (ODD, with_header({"a": entry(shape=(1 << 62,), offsets=(0, 1 << 64))})),
        (ODD, with_header(shaped(b"0,%d" % ((1 << 60) + 1)), 0)),
        (ODD, with_header(shaped(b"%d,0,%d" % (1 << 40, 1 << 40)), 0)),
        (ODD, with_header(shaped(b"1" + b"0" * 4000 + b",1" + b"0" * 4000), 0)),
        (ODD, with_header(shaped(b",".join([b"9" * 4000] * 32)), 0)),
        (ODD, with_header(shaped(b"-0"), 0)),
        (ODD, with_header(shaped(b"NaN"), 0)),
        (ODD, with_header({"a": entry(offsets=(8, 0))})),
        (ODD, with_header({"a": entry(offsets=(0, 8, 9))})),
        (ODD, with_header({"a": entry(extra=1)})),
        (f"{ODD}'b' is wrong", with_header({"a": entry(), "b": entry(offsets=(4, 12))}, 12)),
        (f"{ODD}'b' is wrong", with_header({"a": entry(), "b": entry(offsets=(16, 24))}, 24)),
        (f"{ODD}'b' is wrong", with_header({"b": entry(), "a": entry(offsets=(8, 16))}, 16)),
        (
            f"{ODD}'order' is wrong",
            with_header(b"{%s,%s}" % ((with_header({"a": entry()})[9:-9],) * 2)),
        ),
    ],
)
def test_headers_that_lie(path, said, content):
    message = damaged(path, content)
    assert message.isprintable() and message.startswith(f"{path}: {said}"), message


def test_the_longest_headers_and_shapes(path):
    """What is one larger is refused above."""
    path.write_bytes((TOO_LONG - 1).to_bytes(8, "little") + b"{}" + b" " * (TOO_LONG - 3))
    assert load_state(path) == {}
    for shape in ([1] * 31 + [2], [0, 1 << 60]):
        offsets = (0, 4 * math.prod(shape))
        path.write_bytes(with_header({"a": entry(shape=shape, offsets=offsets)}, offsets[1]))
        assert read_layout(path).spec == {"a": (tuple(shape), "float32")}


@given(seed=SEEDS)
@settings(max_examples=300)
def test_a_damaged_state_is_refused_or_read_as_the_library_reads_it(seed):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        path.write_bytes(safetensors.numpy.save(GOOD))
        damage(path, seed)
        found = read_or_refused(lambda: load_state(path), path)
        if found is not None:
            theirs = safetensors.numpy.load(path.read_bytes())
            assert found.keys() == theirs.keys()
            for name, tensor in found.items():
                assert tensor.dtype == theirs[name].dtype and tensor.shape == theirs[name].shape
                assert tensor.tobytes() == theirs[name].tobytes()


def test_no_plain_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, said in (("pipe", "not a regular file"), ("none", "No such file"), (".", "regular")):
        with pytest.raises(UserError, match=said):
            load_state(tmp_path / name)


def test_metadata_of_others_is_passed_over(path):
    path.write_bytes(safetensors.numpy.save(GOOD, metadata={"format": "pt", "x": "y"}))
    assert np.array_equal(load_state(path, spec_of(GOOD))["a"], GOOD["a"])
