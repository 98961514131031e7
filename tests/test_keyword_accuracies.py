"""A table of accuracies from single commands: `fedtools report` of keyword experiments."""

from __future__ import annotations

import gzip
import re
import shutil
from collections import defaultdict
from pathlib import Path

import kaldiio
import keywords
import numpy as np
import pytest
from conftest import inside, ledger
from scipy.stats import ttest_1samp

SEEDS, EACH, ROUNDS = (0, 1), 12, 7
CORPUS = ("--section", "toy", "--corpus", "Toy", "--release", "1.0")


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Train FedAvg with two seeds, and a server on all clips, and score their test clips."""
    root = tmp_path_factory.mktemp("accuracies")
    keywords.pack(root / "train", {f"a{n:02d}": [3] * 4 for n in range(6)}, length=16000)
    keywords.pack(root / "test", {f"t{n:02d}": [0, 4, 4, 4] for n in range(11)}, length=16000)
    # Two of the three test clips are of the training data.
    keywords.pack(root / "seen", {"a00": [1, 0, 1, 0], "new": [0, 0, 0, 1]}, length=16000)
    keywords.config_file(
        root / "config.yaml",
        rounds=ROUNDS,
        clients_per_round=4,
        training={"optim": "adamw", "optim_conf": {"lr": 0.02}, "batch_size": 8},
    )
    for seed in SEEDS:
        begin(root, f"fedavg{seed}", "--seed", seed)
        begin(root, f"central{seed}", "--seed", seed, method="centralized")
    begin(root, "unfinished")
    for path in (root / "exp").iterdir():
        inside("rounds", path, *(("--to", 2) if path.name == "unfinished" else ())).ok()
        inside("clip-scores", path).ok()
    return root


def begin(root: Path, name: str, *more: object, method: str = "fedavg", test: str = "test") -> Path:
    data = ("--data", f"train={root / 'train'}", "--data", f"test={root / test}")
    path = root / "exp" / name
    inside("init", path, "--config", root / "config.yaml", "--method", method, *data, *more).ok()
    return path


def report(page: Path, *rows: str):
    return inside("report", page, *CORPUS, *(word for row in rows for word in ("--row", row)))


def right_by_speaker(path: Path, test: Path) -> np.ndarray:
    """Count each speaker's right clips from the scores, in %, in rounds 3 to 7."""
    classes = (test / "classes.txt").read_text().split()
    found = defaultdict(list)
    rounds = sorted((path / "scores_test").glob("*.scp"))
    assert [one.stem for one in rounds] == [f"round_{at:04d}" for at in range(3, 8)]
    for scp in rounds:
        scores = dict(kaldiio.load_scp(str(scp)))
        for line in (test / "clips.tsv").read_text().splitlines()[1:]:
            name, speaker, label, *_ = line.split("\t")
            found[speaker].append(classes[int(np.argmax(scores[name]))] == label)
    assert {len(one) for one in found.values()} == {5 * EACH}
    return np.array([100 * np.mean(one) for one in found.values()])


def cells(page: Path) -> dict[str, list[str]]:
    """Return name -> the other cells of the page's only table, without bold."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    rows = [re.split(r" *\| *", line.strip("| ").replace("*", "")) for line in lines]
    assert rows[0] == ["Method", "Accuracy (%)", "to first row", "MB/client", "Computation"]
    return {name: rest for name, *rest in rows[1:]}


def test_experiments_become_a_table(world, tmp_path):
    """Intervals are t intervals over speakers with as many clips, or if all are right, exact."""
    page = tmp_path / "R.md"
    fedavg, central = world / "exp/fedavg0", world / "exp/central0"
    done = report(page, str(fedavg), f"All clips={central}").ok()
    ours, theirs = (right_by_speaker(path, world / "test") for path in (fedavg, central))
    assert ours.std() > 1 and set(theirs) == {100}
    table = cells(page)
    low, high = ttest_1samp(ours, 0).confidence_interval(0.95)
    assert table["FedAvg"][0] == f"{ours.mean():.1f} [{low:.1f}, {high:.1f}]"
    # At this rate all of 11 speakers would be right in 2.5 % of cases.
    assert table["All clips"][0] == f"100.0 [{100 * 0.025 ** (1 / 11):.1f}, 100.0]"
    low, high = ttest_1samp(theirs - ours, 0).confidence_interval(0.95)
    gap = f"{(theirs - ours).mean():.1f} [{low:.1f}, {high:.1f}]"
    assert [row[1] for row in table.values()] == ["-", gap]
    # Bytes of all messages, of six clients of whom four are sampled in each round.
    sent = sum(int(row["bytes_down"]) + int(row["bytes_up"]) for row in ledger(fedavg))
    assert float(table["FedAvg"][2]) == pytest.approx(sent / 6 / 1e6, rel=5e-3)
    assert table["All clips"][2] == "-"
    # Two steps of 8 of 12 clips are 4 / 3 epochs, for 4 of 6 clients in 7 rounds; a server has 7.
    epochs = 7 * 4 / 3 * 4 / 6
    assert [row[3] for row in table.values()] == [f"{100 * epochs / 7:.0f} %", "100 %"]
    text = page.read_text()
    assert "Test data: 132 clips of 4 classes by 11 speakers;" in text
    assert "Seed: 0." in text and "Rounds: 7." in text and "in training:" not in text
    assert "tuned" not in text
    # What is printed is the table, below the corpus.
    printed = [re.split("  +", line) for line in done.out.splitlines()]
    assert printed[0] == ["Toy 1.0"] and printed[3:] == [
        [name, *row] for name, row in table.items()
    ]


def test_experiments_of_one_name_are_seeds(world, tmp_path):
    page = tmp_path / "R.md"
    rows = [f"{name}={world}/exp/{folder}{seed}" for seed in SEEDS
            for name, folder in (("{}", "fedavg"), ("Server", "central"))]  # fmt: skip
    report(page, *rows).ok()
    means = {
        folder: np.mean([right_by_speaker(world / f"exp/{folder}{seed}", world / "test")
                         for seed in SEEDS])
        for folder in ("fedavg", "central")
    }  # fmt: skip
    table = cells(page)
    assert table["FedAvg"][0].startswith(f"{means['fedavg']:.1f} [")
    assert table["Server"][0].startswith(f"{means['central']:.1f} [")
    assert table["Server"][1].startswith(f"{means['central'] - means['fedavg']:.1f} [")
    assert "Seed: 0, 1." in page.read_text()


def test_the_section_is_made_again_without_experiments(world, tmp_path):
    page, again = tmp_path / "R.md", tmp_path / "again.md"
    page.write_text("# Mine\n\nWords.\n")
    said = report(page, str(world / "exp/fedavg0"), str(world / "exp/central0")).ok().out
    assert page.read_text().startswith("# Mine\n\nWords.\n\n<!-- fedtools:toy begin -->")
    again.write_text("# Mine\n\nWords.\n")
    record = tmp_path / "R-toy-errors.gz"
    assert inside("report", again, "--from", record).ok().out == said
    assert again.read_text() == page.read_text()
    inside("report", again, "--from", record, "--date", "2024-02-03").fails(2, "its own date")
    content = gzip.decompress(record.read_bytes())
    record.write_bytes(gzip.compress(content.replace(b"\t5\t", b"\t4\t", 1)))
    inside("report", again, "--from", record).fails(1, "no errors of clips for each seed")
    assert again.read_text() == page.read_text()


def test_test_clips_in_training_are_named_and_few_speakers_have_no_interval(world, tmp_path):
    path = begin(world, "seen", test="seen")
    inside("rounds", path).ok()
    inside("clip-scores", path).ok()
    report(tmp_path / "R.md", str(path)).ok()
    text = (tmp_path / "R.md").read_text()
    assert "**Test clips that are in training: 2 of 3 for FedAvg.**" in text
    assert "by 3 speakers" in text and "Fewer than 10 have no intervals." in text
    assert re.fullmatch(r"\d+\.\d", cells(tmp_path / "R.md")["FedAvg"][0])
    both = report(tmp_path / "R.md", str(world / "exp/fedavg0"), f"Seen={path}")
    both.fails(1, f"{path}: its test clips are not those of {world}/exp/fedavg0")
    shutil.rmtree(path)


def test_bad_input_is_one_line(world, tmp_path):
    page, good = tmp_path / "R.md", str(world / "exp/fedavg0")
    for rows, said in (
        ([str(world / "exp/unfinished")], "not finished: 2 of 7 rounds; run fedtools rounds"),
        ([str(tmp_path)], "no experiment here; run fedtools init"),
        ([good, good], "'FedAvg' is duplicated, with seed 0; give it a name"),
        ([good, f"FedAvg={world}/exp/central1"], "not another seed of"),
        ([good, f"Server={world}/exp/central1"], "'Server' has no seed in common with 'FedAvg'"),
    ):
        report(page, *rows).fails(1, said)
    for rows, more, said in (
        ([good, f"A={good}:{good}"], [], "in all"),
        ([good], ["--reference", "FedAvg"], "is of keyword spotting"),
        (["=x"], [], "[NAME=]EXP_DIR of keyword spotting"),
        ([""], [], "[NAME=]EXP_DIR of keyword spotting"),
    ):
        named = [word for row in rows for word in ("--row", row)]
        inside("report", page, *CORPUS, *named, *more).fails(2, said)
    assert list(tmp_path.iterdir()) == []


def test_counts_of_other_evaluations_are_refused(world, tmp_path):
    path = shutil.copytree(world / "exp/fedavg0", tmp_path / "exp")
    by_clip, by_speaker = path / "errors_test.tsv", path / "speakers_test.tsv"
    clips, speakers = by_clip.read_text(), by_speaker.read_text()
    for table, old, new, said in (
        (by_speaker, "\n7\t", "\n2\t", "of rounds 2, 3, 4, 5, 6, not of 3, 4, 5, 6, 7"),
        (by_clip, "\t5\t", "\t4\t", "not errors of 5 evaluations"),
        (by_clip, "\t5\t", "\tx\t", "errors_test.tsv:2"),
    ):
        assert old in table.read_text()
        table.write_text(table.read_text().replace(old, new))
        report(tmp_path / "R.md", str(path)).fails(
            1, said, "run fedtools" if new != "\tx\t" else ""
        )
        by_clip.write_text(clips)
        by_speaker.write_text(speakers)
    # Accuracies by round that were recorded must be those of the clips.
    inside("evaluate", path, "--split", "test").ok()
    report(tmp_path / "R.md", str(path)).ok()
    evaluation = path / "evaluate_test.tsv"
    lines = evaluation.read_text().splitlines()
    lines[-1] = re.sub(r"[^\t]+$", "1.5000", lines[-1])
    evaluation.write_text("\n".join(lines) + "\n")
    report(tmp_path / "R.md", str(path)).fails(1, "but evaluate_test.tsv has")
    by_clip.unlink()
    report(tmp_path / "R.md", str(path)).fails(1, "no errors by clip; run fedtools clip-scores")
