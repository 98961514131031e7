"""The ledger: each round's rows are in its own folder, all or none; reading concatenates them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from conftest import ledger
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtools.core.errors import UserError
from fedtools.core.tables import read_tsv
from fedtools.exchange.experiment import Experiment, write_clients, write_sums
from fedtools.exchange.ledger import COLUMNS, SERVER_ROW, LedgerRow, read_ledger, write_ledger

CONFIG = """\
method: fedavg
task: asr
method_conf: {}
clients_per_round: null
sampling: fixed
rounds: 9
average: 1
evaluate_every: 1
keep_updates: true
model: {}
training: {}
seed: 0
data: {}
clients: 3
"""


def make(path: Path) -> Experiment:
    """Make an experiment that has begun."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(CONFIG)
    write_clients(path / "clients.txt", ["c0", "c1", "c2"])
    write_sums(path / "sha256sums", {n: path / n for n in ("config.yaml", "clients.txt")})
    return Experiment(path)


def rows(round: int, clients: int = 3, seconds: float = 1.5) -> list[LedgerRow]:
    return [
        LedgerRow(round, f"c{number}", 400, 404, 7, 2.0, 0.0, seconds, "ok")
        for number in range(clients)
    ]


def close(experiment: Experiment, number: int, content) -> None:
    """Write a round's ledger, from rows or text, and complete the round."""
    folder = experiment.round(number).path
    folder.mkdir(exist_ok=True)
    if isinstance(content, str):
        (folder / "ledger.tsv").write_text(content)
    else:
        write_ledger(folder / "ledger.tsv", content)
    following = experiment.round(number + 1).global_state
    following.parent.mkdir(exist_ok=True)
    following.write_text(f"state {number + 1}")
    experiment.round(number).close()


@pytest.fixture
def experiment(tmp_path) -> Experiment:
    return make(tmp_path / "exp")


def test_rounds_come_back_and_any_tool_reads_them(experiment):
    odd = LedgerRow(2, "d", 0, 1 << 40, 3, 0.25, 1.0, 0.0, "was\tnot\nsampled")
    server = LedgerRow(2, SERVER_ROW, 0, 0, 5, 0.0, 1.0, 0.125, "ok")
    assert list(read_ledger(experiment)) == []
    close(experiment, 1, rows(1))
    close(experiment, 2, [*rows(2), odd, server])
    expected = [*rows(1), *rows(2), odd._replace(status="was not sampled"), server]
    assert list(read_ledger(experiment)) == expected
    assert len(read_tsv(experiment.round(2).ledger, COLUMNS)) == 5
    assert [row["client"] for row in ledger(experiment.path)] == [row.client for row in expected]


@settings(max_examples=40, deadline=None)
@given(order=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.booleans()), max_size=12))
def test_a_rerun_replaces_its_round(tmp_path_factory, order):
    """Rows count once their round and all earlier ones are complete, and only the newest rows."""
    experiment = make(tmp_path_factory.mktemp("ledger") / "exp")
    complete: dict[int, list[LedgerRow]] = {}
    for time, (number, clients, closes) in enumerate(order):
        if number > 1 and number - 1 not in complete:
            continue
        # A repeated round is opened first, with those after it.
        for later in range(number, 6):
            complete.pop(later, None)
            experiment.round(later).done.unlink(missing_ok=True)
        made = rows(number, clients, seconds=time)
        close(experiment, number, made)
        if closes:
            complete[number] = made
        else:
            experiment.round(number).done.unlink()
        assert list(read_ledger(experiment)) == [
            row for r in sorted(complete) for row in complete[r]
        ]


def test_many_rows(experiment):
    for number in (1, 2, 3):
        close(
            experiment,
            number,
            [row._replace(client=f"c{i}") for i, row in enumerate(rows(number) * 1700)],
        )
    found = list(read_ledger(experiment))
    assert len(found) == 3 * 5100 and sum(row.bytes_up for row in found) == 3 * 5100 * 404


def test_a_kill_while_it_is_written_leaves_the_round_open(experiment, monkeypatch):
    """The file is the old or the new one, and counts only once the round is complete."""
    close(experiment, 1, rows(1))

    class Killed(BaseException):
        pass

    def kill(*_):
        raise Killed

    path = experiment.round(2).ledger
    for call in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, kill)
            with pytest.raises(Killed):
                write_ledger(path, rows(2))
        assert [file.name for file in path.parent.iterdir()] == ["global.safetensors"]
        assert list(read_ledger(experiment)) == rows(1)
    write_ledger(path, rows(2))
    before = path.read_bytes()
    experiment.round(3).path.mkdir()
    experiment.round(3).global_state.write_text("state 3")
    for call in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, kill)
            with pytest.raises(Killed):
                write_ledger(path, rows(2, 1))
            with pytest.raises(Killed):
                experiment.round(2).close()
        assert path.read_bytes() == before
        assert list(read_ledger(experiment)) == rows(1)
    close(experiment, 2, rows(2))
    assert list(read_ledger(experiment)) == [*rows(1), *rows(2)]


def test_no_change_of_a_complete_round_goes_unnoticed(experiment):
    """A byte is flipped, a line removed, commented out or doubled, the file cut off or missing."""
    for number in (1, 2, 3):
        close(experiment, number, rows(number))
    path = experiment.round(2).ledger
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    changes = [whole[:length] for length in range(len(whole))]
    changes += [
        whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 7)
    ]
    changes += [
        b"".join([lines[0], b"#" + lines[1], *lines[2:]]),
        b"".join(lines[:2]),
        b"".join([*lines, lines[-1]]),
        whole.replace(b"404", b"1e400", 1),
    ]
    for content in changes:
        path.write_bytes(content)
        with pytest.raises(
            UserError, match=r"round_0002/ledger.tsv: changed since it was written.*reset"
        ):
            list(read_ledger(experiment))
    path.unlink()
    with pytest.raises(UserError, match=r"round_0002/ledger.tsv: missing; run fedtools reset"):
        list(read_ledger(experiment))
    os.mkfifo(path)
    with pytest.raises(UserError, match="changed since it was written"):
        list(read_ledger(experiment))
    path.unlink()
    path.write_bytes(whole)
    assert len(list(read_ledger(experiment))) == 9
    experiment.round(2).done.write_text("nonsense\n")
    with pytest.raises(UserError, match=r"\.done:1: not a sum"):
        list(read_ledger(experiment))


def test_a_folder_that_is_gone_is_not_passed_over(experiment):
    """The rounds after it are no longer complete, and their rows are not read."""
    for number in (1, 2, 3):
        close(experiment, number, rows(number))
    shutil.rmtree(experiment.round(2).path)
    assert list(read_ledger(experiment)) == rows(1)


HEADER = "\t".join(COLUMNS) + "\n"
GOOD = "1\ta\t400\t404\t7\t2\t0\t1.500\tok\n"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("", 1),
        ("round\tclient\n", 1),
        (HEADER + GOOD + GOOD, 3),
        (HEADER + GOOD.replace("1\ta", "2\ta"), 2),
        (HEADER + GOOD + "#" + GOOD, 3),
        (HEADER + GOOD.replace("404", "x"), 2),
        (HEADER + GOOD.replace("404", "-1"), 2),
        (HEADER + GOOD.replace("404", "1e400"), 2),
        (HEADER + GOOD.replace("404", "4.5"), 2),
        (HEADER + GOOD.replace("\t2\t", "\t1e400\t"), 2),
        (HEADER + GOOD.replace("\t2\t", "\tnan\t"), 2),
        (HEADER + GOOD.replace("1.500", "-1"), 2),
        (HEADER + GOOD.replace("1.500", ""), 2),
        (HEADER + GOOD.replace("\ta\t", "\t../x\t"), 2),
        (HEADER + GOOD.replace("\tok", ""), 2),
        (HEADER + GOOD[:-1], 2),
        (HEADER + "nonsense\n", 2),
        (HEADER.replace("steps\t", "") + GOOD.replace("\t7\t", "\t"), 1),
    ],
)
def test_what_is_no_ledger(experiment, content, line):
    """An invalid ledger with a matching checksum is refused, too."""
    close(experiment, 1, content)
    with pytest.raises(UserError, match=rf"ledger.tsv:{line}: "):
        list(read_ledger(experiment))
