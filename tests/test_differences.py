"""Columns of differences to other rows, of hypotheses whose errors are planted."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from conftest import inside
from reported import FIRST, make_experiment
from scipy.stats import t as student
from scipy.stats import ttest_1samp

from fedtools.core.tables import read_tsv
from fedtools.exchange.experiment import write_sums

PEOPLE = {client: [f"{client}{number:02d}" for number in range(12)] for client in ("au", "en")}
WORDS = 20
MAIN = ("wer", "average")


def data(path: Path) -> Path:
    path.mkdir()
    tables: dict[str, list[str]] = {name: [] for name in ("text", "utt2spk", "utt2client")}
    for client, people in PEOPLE.items():
        for one in people:
            for name, cell in zip(tables, (" ".join(["yes"] * WORDS), one, client), strict=True):
                tables[name].append(f"{one}-a {cell}\n")
    for name, lines in tables.items():
        (path / name).write_text("".join(lines), encoding="utf-8")
    return path


def wrong(path: Path, errors: dict[str, int]) -> Path:
    """Write hypotheses with a given number of wrong words per speaker."""
    lines = [
        f"{one}-a {' '.join(['no'] * errors[one] + ['yes'] * (WORDS - errors[one]))}\n"
        for people in PEOPLE.values()
        for one in people
    ]
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Make three methods' errors per speaker: the second is better by about a word."""
    root = tmp_path_factory.mktemp("differences")
    random, folder = np.random.default_rng(0), data(root / "data")
    everyone = [one for people in PEOPLE.values() for one in people]
    base = {one: int(random.integers(4, 10)) for one in everyone}
    errors = {
        "Baseline": base,
        "FedAvg": {one: base[one] - int(random.integers(0, 3)) for one in everyone},
        "Other": {one: base[one] + int(random.integers(-1, 2)) for one in everyone},
    }
    for name, own in errors.items():
        scores = root / name / "scores"
        scores.mkdir(parents=True)
        inside("score", folder, wrong(root / name / "hyp", own), scores).ok()
        make_experiment(root / name / "exp")
    return root, errors


@pytest.fixture(scope="module")
def seeds(world):
    """Make two more seeds of each method, whose errors differ by a word now and then."""
    root, errors = world
    for number in (1, 2):
        for name, own in errors.items():
            random = np.random.default_rng([number, ord(name[0])])
            moved = {one: int(count + random.integers(-1, 2)) for one, count in own.items()}
            another(root, f"{name}{number}", moved, 7 + number)
    return [["Baseline", "FedAvg", "Other"][place // 3] + ["", "1", "2"][place % 3]
            for place in range(9)]  # fmt: skip


def another(root: Path, name: str, errors: dict[str, int], seed: int) -> None:
    """Make an experiment of another seed, with its scores."""
    scores = root / name / "scores"
    scores.mkdir(parents=True)
    inside("score", root / "data", wrong(root / name / "hyp", errors), scores).ok()
    make_experiment(root / name / "exp")
    config = root / name / "exp" / "config.yaml"
    config.write_text(config.read_text().replace("seed: 7", f"seed: {seed}"))
    sums = {part: config.parent / part for part in ("config.yaml", "clients.txt", FIRST)}
    write_sums(config.parent / "sha256sums", sums)


def report(world, *options: object, names=("Baseline", "FedAvg", "Other"), page="RESULTS.md"):
    """Report some folders; a number after a method's name is a seed's."""
    root, _ = world
    rows = [f"{name.rstrip('12')}={root / name / 'exp'}:{root / name / 'scores'}" for name in names]
    given = [word for row in rows for word in ("--row", row)]
    about = ("--section", "x", "--corpus", "Toy", "--release", "1", "--command", "x")
    return inside("report", root / page, *about, *given, *options)


def table(page: Path, caption: str = "communication, computation") -> dict[str, dict[str, str]]:
    """Return method -> heading -> cell of the table below a caption."""
    text = page.read_text(encoding="utf-8").partition(caption)[2].split("\n\n")[1]
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    head = [cell.strip() for cell in lines[0]]
    rows = [[cell.strip() for cell in line] for line in lines[2:]]
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def numbers(cell: str) -> list[float]:
    return [float(one) for one in re.findall(r"-?[0-9.]+", cell)]


def test_errors_by_utterance_are_those_of_the_hypotheses(world):
    root, errors = world
    for name, own in errors.items():
        rows = read_tsv(root / name / "scores" / "utterances.tsv", None)
        assert {row["utterance"]: int(row["wer_errors"]) for row in rows} == {
            f"{one}-a": number for one, number in own.items()
        }
        assert {int(row["wer_tokens"]) for row in rows} == {WORDS}
        assert all(row["client"] == row["speaker"][:2] for row in rows)
        assert all(row["speaker"] == row["utterance"][:-2] for row in rows)


def test_the_summary_has_the_difference_to_the_first_row(world):
    """Clients of as many speakers and words: two groups of a paired difference."""
    root, errors = world
    report(world, page="SUMMARY.md").ok()
    found = table(root / "SUMMARY.md", "summary.**")
    kept = read_tsv(root / "SUMMARY-x-intervals.tsv", None)
    whole = {row["method"]: row for row in kept if (row["rate"], row["client"]) == MAIN}
    # One seed: an equal method would look better as often as not by far.
    assert not any("**" in row["to first row"] for row in found.values())
    assert found["Baseline"]["to first row"] == "-"
    for name in ("FedAvg", "Other"):
        gaps = np.array([
            [100 * (errors[name][one] - errors["Baseline"][one]) / WORDS for one in people]
            for people in PEOPLE.values()
        ])  # fmt: skip
        # The mean of two means of 12, whose variances are estimated apart.
        half = student.ppf(0.975, 24 - 2) * np.sqrt((gaps.var(1, ddof=1) / 12).sum()) / 2
        by_hand = [gaps.mean(), gaps.mean() - half, gaps.mean() + half]
        assert numbers(found[name]["to first row"]) == pytest.approx(by_hand, abs=0.051)
        columns = ("difference", "difference_low", "difference_high")
        told = [float(whole[name][column]) for column in columns]
        assert told == pytest.approx(by_hand, abs=0.0051)


def test_differences_are_of_the_mean_over_clients(world):
    _, errors = world
    report(world, "--reference", "Baseline", "--reference", "FedAvg").ok()
    found = table(world[0] / "RESULTS.md")
    for reference in ("Baseline", "FedAvg"):
        for name, own in errors.items():
            cell = found[name][f"to {reference}"]
            if name == reference:
                assert cell == "-"
                continue
            gaps = {one: 100 * (own[one] - errors[reference][one]) / WORDS for one in own}
            of_clients = [np.mean([gaps[one] for one in people]) for people in PEOPLE.values()]
            value, low, high = numbers(cell)
            assert value == pytest.approx(np.mean(of_clients), abs=0.051)
            assert low < value < high
    # Both clients have as many speakers and words: nearly a paired test of all speakers.
    gaps = [errors["FedAvg"][one] - errors["Baseline"][one] for one in errors["FedAvg"]]
    by_hand = ttest_1samp(100 * np.array(gaps) / WORDS, 0).confidence_interval(0.95)
    assert numbers(found["FedAvg"]["to Baseline"])[1:] == pytest.approx(by_hand, abs=0.4)


def test_what_is_better_is_in_bold_and_nothing_else(world, seeds):
    report(world, "--reference", "Baseline", names=seeds, page="BOLD.md").ok()
    page = world[0] / "BOLD.md"
    found = table(page)
    assert found["FedAvg"]["to Baseline"].startswith("**")
    assert not found["Other"]["to Baseline"].startswith("**")
    assert not any(
        "**" in cell for row in found.values() for name, cell in row.items() if "to " not in name
    )
    summary = table(page, "summary.**")
    bold = {name for name, row in summary.items() if "**" in row["to first row"]}
    assert bold == {"FedAvg"}
    report(world, "--reference", "FedAvg", names=seeds, page="BOLD.md").ok()
    found = table(page)
    assert not found["Baseline"]["to FedAvg"].startswith("**")


def test_one_seed_has_no_bold(world):
    report(world, "--reference", "Baseline").ok()
    found = table(world[0] / "RESULTS.md")
    assert "**" not in found["FedAvg"]["to Baseline"]
    text = (world[0] / "RESULTS.md").read_text(encoding="utf-8")
    assert text.count("which rows of one seed do not have") == 2


def test_page_says_which_difference_could_be_told(world):
    root, _ = world
    report(world, "--reference", "Baseline").ok()
    found = table(world[0] / "RESULTS.md")
    text = (root / "RESULTS.md").read_text(encoding="utf-8")
    halves = []
    for name in ("FedAvg", "Other"):
        _, low, high = numbers(found[name]["to Baseline"])
        halves.append((high - low) / 2)
    told = float(re.search(r"Differences above about ([0-9.]+) points", text)[1])
    assert told == pytest.approx(np.median(halves), abs=0.11)


def test_seeds_are_paired_in_order(world):
    """A second seed with the opposite gap leaves no difference."""
    root, errors = world
    turned = {one: 2 * errors["Baseline"][one] - errors["FedAvg"][one] for one in errors["FedAvg"]}
    another(root, "turned", turned, 8)
    scores = root / "turned" / "scores"
    base = root / "Baseline"
    rows = [
        f"Baseline=:{base / 'scores'}",
        f"FedAvg={root / 'FedAvg/exp'}:{root / 'FedAvg/scores'}",
    ]
    second = root / "copy" / "scores"
    second.mkdir(parents=True)
    inside("score", root / "data", base / "hyp", second).ok()
    rows += [f"Baseline=:{second}", f"FedAvg={root / 'turned/exp'}:{scores}"]
    given = [word for row in rows for word in ("--row", row)]
    about = ("--section", "y", "--corpus", "Toy", "--release", "1", "--command", "x")
    done = inside("report", root / "SEEDS.md", *about, *given, "--reference", "Baseline")
    done.ok()
    value, low, high = numbers(table(root / "SEEDS.md")["FedAvg"]["to Baseline"])
    assert value == 0 and low < -5 and high > 5


def test_what_cannot_be_compared_is_one_line(world):
    root, _ = world
    report(world, "--reference", "Nobody").fails(1, "no row 'Nobody'", "there are Baseline, FedAvg")
    path = root / "Other" / "scores" / "utterances.tsv"
    kept = path.read_bytes()
    path.unlink()
    report(world, "--reference", "Baseline").fails(1, str(path), "run fedtools score again")
    for old, new in ((b"\t20\t", b"\t21\t"), (b"\nen\t", b"\nau\t"), (b"-a\t", b"-a\t\t")):
        path.write_bytes(kept.replace(old, new, 1))
        report(world).fails(1, str(path))
    # As many words in all, but of other utterances.
    lines = kept.split(b"\n")
    lines[1] = lines[1].replace(b"\t20\t", b"\t21\t")
    lines[2] = lines[2].replace(b"\t20\t", b"\t19\t")
    path.write_bytes(b"\n".join(lines))
    report(world, "--reference", "Baseline").fails(1, f"{path.parent}: not the test data of Base")
    path.write_bytes(kept)
