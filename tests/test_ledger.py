"""The ledger: whole rounds only, whatever happens while one is written."""

from __future__ import annotations

import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtools.files.errors import UserError
from fedtools.files.ledger import COLUMNS, LedgerRow, append_round, read_ledger
from fedtools.files.tables import read_tsv


def rows(round: int, clients: int = 3, seconds: float = 1.5) -> list[LedgerRow]:
    return [
        LedgerRow(round, f"c{number}", 400, 404, 2.0, 0.0, seconds, "ok")
        for number in range(clients)
    ]


def test_rounds_come_back_and_any_tool_reads_them(tmp_path):
    path = tmp_path / "ledger.tsv"
    odd = LedgerRow(2, "d", 0, 1 << 40, 0.25, 1.0, 0.0, "was\tnot\nsampled")
    append_round(path, 1, rows(1))
    append_round(path, 2, [*rows(2), odd])
    assert list(read_ledger(path)) == [*rows(1), *rows(2), odd._replace(status="was not sampled")]
    assert len(read_tsv(path, COLUMNS)) == 7


@settings(max_examples=40, deadline=None)
@given(order=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=12))
def test_a_rerun_replaces_its_round(tmp_path_factory, order):
    path = tmp_path_factory.mktemp("ledger") / "ledger.tsv"
    expected: dict[int, list[LedgerRow]] = {}
    for count, (round, clients) in enumerate(order):
        expected[round] = rows(round, clients, seconds=count)
        append_round(path, round, expected[round])
        assert list(read_ledger(path)) == [row for r in sorted(expected) for row in expected[r]]


def test_rounds_longer_than_one_look_back(tmp_path):
    path = tmp_path / "ledger.tsv"
    for round in (1, 2, 2, 3, 3):
        append_round(path, round, rows(round, 5000))
    assert list(read_ledger(path)) == [row for r in (1, 2, 3) for row in rows(r, 5000)]


def test_a_round_cut_short_anywhere_is_left_out_and_mended(tmp_path, monkeypatch):
    path = tmp_path / "ledger.tsv"
    append_round(path, 1, rows(1))
    before = path.read_bytes()
    append_round(path, 2, rows(2))
    whole = path.read_bytes()
    block = whole[len(before) :]
    # What a kill leaves: any number of the bytes, as long as the first of them is not committed.
    for length in range(1, len(block) + 1):
        path.write_bytes(before + b"#" + block[1:length])
        assert list(read_ledger(path)) == rows(1)
        append_round(path, 2, rows(2))
        assert path.read_bytes() == whole

    class Killed(BaseException):
        pass

    def kill(*_):
        raise Killed

    for call in ("fsync", "pwrite"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, kill)
            with pytest.raises(Killed):
                append_round(path, 3, rows(3))
        assert list(read_ledger(path)) == [*rows(1), *rows(2)]


def test_appending_does_not_read_the_whole(tmp_path):
    path = tmp_path / "ledger.tsv"
    append_round(path, 0, rows(0, 100_000))
    times = [time.process_time()]
    assert len(list(read_ledger(path))) == 100_000
    times.append(time.process_time())
    for round in range(1, 21):
        append_round(path, round, rows(round, 10))
    times.append(time.process_time())
    assert times[2] - times[1] < 5 * (times[1] - times[0])


@pytest.mark.parametrize(
    ("content", "line"),
    [("", 1), ("round\tclient\n", 1), ("\t".join(COLUMNS) + "\n1\ta\tx\t1\t1\t1\t1\tok\n", 2)],
)
def test_what_is_no_ledger(tmp_path, content, line):
    path = tmp_path / "ledger.tsv"
    path.write_text(content)
    with pytest.raises(UserError, match=rf"ledger.tsv:{line}: "):
        list(read_ledger(path))


def test_it_is_not_taken_for_one(tmp_path):
    path = tmp_path / "ledger.tsv"
    path.write_text("round\tclient\n")
    with pytest.raises(UserError, match="no ledger"):
        append_round(path, 1, rows(1))
    path.write_text("\t".join(COLUMNS) + "\nnonsense\n")
    with pytest.raises(UserError, match="malformed row"):
        append_round(path, 1, rows(1))
    with pytest.raises(UserError, match="cannot be read"):
        list(read_ledger(tmp_path / "none"))
    with pytest.raises(ValueError, match="not a row of round 2"):
        append_round(tmp_path / "new", 2, rows(1))
