"""A page from the file beside it, which has what its tables are made of."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from pathlib import Path

import pytest
from conftest import inside
from reported import FIRST, make_experiment
from test_differences import PEOPLE, WORDS, data, wrong

from fedtools.core.tables import write_tsv
from fedtools.exchange.experiment import write_sums

HEAD = ("--section", "x", "--corpus", "Toy", "--release", "1", "--mini", "--command", "x")
DATE = ("--date", "2024-02-03")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Make a page with every kind of table: two methods, two seeds, one more table, other data."""
    root = tmp_path_factory.mktemp("record")
    drawn = random.Random(3)
    folder, everyone = data(root / "data"), [one for people in PEOPLE.values() for one in people]
    own = root / "own"
    own.mkdir()
    names = [f"s{number:02d}" for number in range(11)]
    (own / "text").write_text("".join(f"{one} yes yes\n" for one in names))
    (own / "utt2spk").write_text("".join(f"{one} {one}\n" for one in names))
    (root / "own.hyp").write_text("".join(f"{one} yes no\n" for one in names))
    inside("score", own, root / "own.hyp", root / "own-scores").ok()
    rows = []
    for name in ("Baseline", "FedAvg"):
        for seed in (0, 1):
            errors = {one: drawn.randint(2, 8) - (name == "FedAvg") for one in everyone}
            scores = root / name / f"scores{seed}"
            scores.mkdir(parents=True)
            inside("score", folder, wrong(scores / "hyp", errors), scores).ok()
            path = ""
            if name == "FedAvg":
                path = make_experiment(root / name / f"exp{seed}", size=3_000, client_epochs=0.5)
                make_seed(path, seed)
            rows.append(f"--row={name}={path}:{scores}")
    also = [row.replace("--row=", "--also=more=") for row in rows[2:]]
    write_tsv(root / "table.tsv", ["a", "b"], [{"a": "1 | 2", "b": "ü"}])
    (root / "RESULTS-map.png").write_bytes(b"")
    more = [f"--elsewhere=own={root / 'own-scores'}", f"--table=measured={root / 'table.tsv'}"]
    more += [f"--published=Zhu={root / 'table.tsv'}", "--reference", "Baseline", "--note", "So."]
    more += [f"--picture=a map={root / 'RESULTS-map.png'}", "--plot", root / "RESULTS-wer.png"]
    inside("report", root / "RESULTS.md", *HEAD, *DATE, *rows, *also, *more).ok()
    return root


def make_seed(experiment: Path, seed: int) -> None:
    """Change an experiment's seed."""
    config = experiment / "config.yaml"
    config.write_text(config.read_text().replace("seed: 7", f"seed: {seed}"))
    sums = {name: experiment / name for name in ("config.yaml", "clients.txt", FIRST)}
    write_sums(experiment / "sha256sums", sums)


RECORD = "RESULTS-x-errors.gz"


@pytest.fixture
def alone(made, tmp_path) -> Path:
    """Copy only the file, and the picture that it names, to a new folder."""
    for name in (RECORD, "RESULTS-map.png"):
        shutil.copy(made / name, tmp_path / name)
    return tmp_path


def again(folder: Path, *more: object, record: str = RECORD):
    return inside("report", folder / "RESULTS.md", "--from", folder / record, *more)


def rewritten(folder: Path, content: bytes) -> None:
    (folder / RECORD).write_bytes(gzip.compress(content, mtime=0))


def content(folder: Path) -> bytes:
    return gzip.decompress((folder / RECORD).read_bytes())


def test_a_page_made_again_is_the_same(made, alone):
    said = again(alone, *DATE).ok()
    for name in ("RESULTS.md", "RESULTS-x-intervals.tsv", "RESULTS-wer.png"):
        assert (alone / name).read_bytes() == (made / name).read_bytes(), name
    assert said.out.startswith("Toy 1 (mini)\n\nMethod") and not said.err
    page = (made / "RESULTS.md").read_text()
    for text in ("So.", "own: WER 50.0", "1 \\| 2", "| FedAvg "):
        assert text in page
    # No path of an experiment leaves the machine.
    assert str(made) not in content(made).decode()


def test_the_file_has_the_errors_of_every_utterance_and_seed(made):
    head, *tables = content(made).decode().split("\n\n")
    rows = json.loads(head)["rows"]
    (system,) = {row["scores"] for row in rows if (row["name"], row["seed"]) == ("FedAvg", 1)}
    lines = [line.split("\t") for line in tables[0].splitlines()]
    column = lines[0].index(f"{system}.wer")
    hypotheses = (made / "FedAvg/scores1/hyp").read_text().splitlines()
    by_hand = {line.split()[0]: line.split().count("no") for line in hypotheses}
    assert {line[2]: int(line[column]) for line in lines[1:]} == by_hand
    assert {line[lines[0].index("wer")] for line in lines[1:]} == {str(WORDS)}
    # 3 kB down and up, four rounds.
    assert {row["cost"]["client_bytes"] for row in rows if row["trained"]} == {24_000}


def test_a_missing_picture_is_left_out(alone):
    (alone / "RESULTS-map.png").unlink()
    said = again(alone).ok()
    assert said.err == f"{alone / 'RESULTS-map.png'}: left out, since it is missing\n"
    assert "a map" not in (alone / "RESULTS.md").read_text()


def test_other_options_are_refused(alone):
    again(alone, "--section", "y").fails(2, "--from")
    inside("report", alone / "RESULTS.md", "--section", "x").fails(2, "--row")


def test_a_file_cut_or_changed_at_any_byte_is_one_line(alone):
    whole = (alone / RECORD).read_bytes()
    drawn = random.Random(59)
    for _ in range(12):
        at = drawn.randrange(len(whole))
        (alone / RECORD).write_bytes(whole[:at])
        again(alone).fails(1, RECORD)
        # The header's time, flags and system are not content.
        at = drawn.randrange(10, len(whole))
        changed = bytes([whole[at] ^ (1 << drawn.randrange(8))])
        (alone / RECORD).write_bytes(whole[:at] + changed + whole[at + 1 :])
        again(alone).fails(1, RECORD)
    (alone / RECORD).write_bytes(whole + b"x")
    again(alone).fails(1, "bytes after the end")
    assert {path.name for path in alone.iterdir()} == {RECORD, "RESULTS-map.png"}


def test_a_small_file_that_unpacks_to_a_large_one_is_refused(alone):
    rewritten(alone, content(alone) + b"\n" * (130 << 20))
    assert (alone / RECORD).stat().st_size < 1 << 20
    again(alone).fails(1, RECORD, "bytes uncompressed")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("au00-a\t", "au01-a\t", "utterance 'au01-a' is duplicated"),
        ("\tau00-a\t20\t", "\tau00-a\t20\t1\t", "fields, unlike the header"),
        ("\tau00-a\t20\t", "\tau00-a\t-1\t", "'-1' is not a number of words"),
        ("\tau00-a\t20\t", "\tau00-a\t٣\t", "'٣' is not a number of words"),
        ("\tau00-a\t20\t", "\tau00-a\t1000000000\t", "is not a number of words"),
        ("au\tau00\t", "average\tau00\t", "named 'average'"),
        ("au\tau00\t", "all\tau00\t", "named 'all'"),
        ("au\tau00\t", "a u\tau00\t", "'a u' is not a name"),
        ("au\tau00\t", "<!--\tau00\t", "is not a name"),
        ("au\tau00\t", "new\tau00\t", "intervals are not of"),
        ("utterance\twer\tcer\t0.wer", "utterance\twer\tcer\t9.wer", "the header is"),
        ("client\tspeaker", "speaker\tclient", "the header is"),
        ("\n\nclient", "\nclient", "no empty line"),
        ('{"format": "fedtools report 1"', '{"format": "fedtools report 2"', "format: "),
        ('"section": "x"', '"section": "../x"', "--section"),
        ('"section": "x"', '"section": 1', "page.section: "),
        ('"note": "So."', '"note": "<!-- fedtools:x end -->"', "is not the text of a page"),
        ('"note": "So."', '"note": "a\\u001b[2J"', "is not the text of a page"),
        ('"note": "So."', '"note": "So.", "more": 1', "page.more: "),
        ('"plot": "RESULTS-wer.png"', '"plot": "../RESULTS-wer.png"', "does not belong to"),
        ('"plot": "RESULTS-wer.png"', '"plot": "RESULTS.md"', "does not belong to"),
        ('"references": ["Baseline"]', '"references": ["Nobody"]', "no row 'Nobody'"),
        ('"client_bytes": 24000.0', '"client_bytes": NaN', "client_bytes"),
        ('"client_bytes": 24000.0', '"client_bytes": -1.0', "costs are not"),
        ('"client_bytes": 24000.0', '"others": 24000.0', "costs are not"),
        ('"methods": [0, 1', '"methods": [0, 99', "rows that are not there"),
        ('"methods": [0, 1', '"methods": [0, -1', "rows that are not there"),
        ('"methods": [0, 1', '"methods": [0, 0', "is duplicated"),
        ('"scores": 0', '"scores": 99', "no errors of system 99"),
        ('["1 | 2", "ü"]', '["1 | 2"]', "other cells than its header"),
    ],
)
def test_what_is_wrong_in_the_file_is_one_line(alone, old, new, said):
    text = content(alone).decode()
    assert old in text
    rewritten(alone, text.replace(old, new, 1).encode())
    again(alone).fails(1, RECORD if "Nobody" not in new else said, said)
    assert {path.name for path in alone.iterdir()} == {RECORD, "RESULTS-map.png"}


@pytest.mark.parametrize("text", ["", "\n", "[" * 100_000, '{"format": 1', "x\n\nclient\n"])
def test_what_is_no_such_file_is_one_line(alone, text):
    rewritten(alone, text.encode())
    again(alone).fails(1, RECORD)
    (alone / RECORD).write_text(text)
    again(alone).fails(1, RECORD)


def test_a_file_that_is_larger_than_usual_is_said(tmp_path):
    drawn = random.Random(0)
    names = [f"{drawn.getrandbits(128):032x}" for _ in range(14_000)]
    (tmp_path / "data").mkdir()
    for table, value in (("text", "yes"), ("utt2spk", None), ("hyp", "no")):
        lines = [f"{name} {value or name}\n" for name in sorted(names)]
        (tmp_path / "data" / table).write_text("".join(lines))
    inside("score", tmp_path / "data", tmp_path / "data/hyp", tmp_path, "--resamples", 10).ok()
    row = f"--row=A=:{tmp_path}"
    said = inside("report", tmp_path / "RESULTS.md", *HEAD, row).ok()
    size = (tmp_path / RECORD).stat().st_size
    assert size > 200_000
    assert said.err == f"{tmp_path / RECORD}: {size / 1000:.0f} kB, more than 200\n"
    again(tmp_path).ok()
