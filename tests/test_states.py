"""Model states: the library's own bytes, and detection of all damage."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedtools.files.errors import UserError
from fedtools.files.states import load_state, make_header, read_layout, save_state, spec_of

TENSOR = st.sampled_from(["float32", "float64", "int64", "bool"]).flatmap(
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


@pytest.mark.parametrize("tensor", [torch.ones(2, dtype=torch.bfloat16), np.ones(2, "int32")])
def test_other_types_are_refused(path, tensor):
    for attempt in (lambda: save_state(path, {"gate": tensor}), lambda: spec_of({"gate": tensor})):
        with pytest.raises(UserError, match=r"'gate' is (bfloat16|int32).*convert it"):
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


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 8 + b"x" * 100,
        (100 << 20).to_bytes(8, "little") + b"{}",
        with_header(b"{}" + b" " * (5 << 20), 0),
        with_header(b"[" * 100_000),
        with_header(b"\xff\xfe"),
        with_header(b'{"a": 1e999}'),
        with_header(b'{"a": ' + b"9" * 10_000 + b"}"),
        with_header([1, 2]),
        with_header({"a": 3}),
        with_header({"a" * 5000: entry(kind="F8")}),
        with_header({"a\n\t\x1b[31m": entry(kind=["F32"])}),
        with_header({"a": entry(kind="BF16", offsets=(0, 4))}),
        with_header({"a": entry(shape=(-2,))}),
        with_header({"a": entry(shape=(True, 2))}),
        with_header({"a": entry(shape=(2.0,))}),
        with_header({"a": entry(shape=[1] * 40 + [2])}),
        with_header({"a": entry(shape=(1 << 62, 1 << 62))}),
        with_header({"a": entry(shape=(1 << 62,), offsets=(0, 1 << 64))}),
        with_header(shaped(b"0,%d" % (1 << 63)), 0),
        with_header(shaped(b"%d,0,%d" % (1 << 40, 1 << 40)), 0),
        with_header(shaped(b"1" + b"0" * 4000), 0),
        with_header(shaped(b"1" + b"0" * 4000 + b",1" + b"0" * 4000), 0),
        with_header(shaped(b",".join([b"9" * 4000] * 32)), 0),
        with_header(shaped(b"0,1" + b"0" * 4000), 0),
        with_header(shaped(b"-0"), 0),
        with_header(shaped(b"1e0,2"), 0),
        with_header(shaped(b"NaN"), 0),
        *(with_header(nested(depth), 0) for depth in (100, 900, 960, 990, 1000, 50_000)),
        with_header({"__metadata__": {"format": 1}}, 0),
        with_header({"__metadata__": ["pt"]}, 0),
        with_header(b'{"__metadata__":{},"__metadata__":{}}', 0),
        with_header({"a": entry(offsets=(8, 0))}),
        with_header({"a": entry(offsets=(0, 8, 9))}),
        with_header({"a": entry(extra=1)}),
        with_header({"a": entry(), "b": entry()}),
        with_header({"a": entry(), "b": entry(offsets=(4, 12))}, 12),
        with_header({"a": entry(), "b": entry(offsets=(16, 24))}, 24),
        with_header(b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2)),
    ],
)
def test_headers_that_lie(path, content):
    message = damaged(path, content)
    assert message.isprintable()


@given(data=st.data())
@settings(deadline=None)
def test_any_damage_is_harmless(path, data):
    content = bytearray(safetensors.numpy.save(GOOD))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        load_state(path, spec_of(GOOD))
    except UserError as error:
        assert str(path) in str(error)


def test_no_plain_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, said in (("pipe", "not a regular file"), ("none", "No such file"), (".", "regular")):
        with pytest.raises(UserError, match=said):
            load_state(tmp_path / name)


def test_metadata_of_others_is_passed_over(path):
    path.write_bytes(safetensors.numpy.save(GOOD, metadata={"format": "pt", "x": "y"}))
    assert np.array_equal(load_state(path, spec_of(GOOD))["a"], GOOD["a"])
