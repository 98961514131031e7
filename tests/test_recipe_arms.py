"""The AMI recipe's arms on a fake corpus: near and far text, and FMP compared with controls."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import ROOT, run
from fakes_ami import ami, plain, some_meetings
from scripts import load, program
from test_recipe_rescore import TINY, call

from fedtools.core.tables import read_tsv, write_tsv
from fedtools.data.datadir import read_table
from fedtools.score.utterances import Utterances

ARMS = ("near", "far")
CHAT = "I LIKE WHAT SAYS THE DOG\nNOW HELLO THERE SO WHAT IS NEW\n"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("arms") / "a checkout"
    made = shutil.ignore_patterns("data", "dump", "exp", "downloads")
    shutil.copytree(ROOT / "egs" / "ami", root / "egs" / "ami", symlinks=True, ignore=made)
    for name in ("conf", "fedtools", "local", "utils", "setup.py"):
        (root / name).symlink_to(ROOT / name)
    meetings = some_meetings()
    # Another series of eval, in which a stand-in exists.
    meetings["EN2002a"] = [
        plain("EN2002a", agent, place, f"MEE9{place}0",
              [(1.0 + place + 4 * turn, 1.9 + place + 4 * turn, f"so says {agent} too")
               for turn in range(4)])
        for place, agent in enumerate("AB")
    ]  # fmt: skip
    ami(root, meetings)
    recipe = root / "egs" / "ami" / "rescore1"
    (recipe / "downloads").mkdir()
    (recipe / "downloads" / "chitchat.txt").write_text(30 * CHAT)
    (recipe / "meetings.txt").write_text(20 * "NOW SAYS THE MEETING\n")
    (recipe / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    options = ("--arms", " ".join(ARMS), "--background", "meetings.txt", "--order", "2")
    call(recipe, *options, "--rounds", "2", "--seeds", "0 1").ok()
    return recipe


def test_what_each_arm_is_made_of(recipe):
    """Lists and neural models of near and far text are as configured."""
    arms = recipe / "exp" / "fake" / "arms"
    words = {
        arm: (arms / arm / "nnlm" / "seed0" / "stream_eval" / "words.txt").read_text().split()
        for arm in ARMS
    }
    assert "MEETING" in words["near"] and "DOG" not in words["near"]
    assert "DOG" in words["far"] and "MEETING" not in words["far"]
    lists = {
        arm: (arms / arm / "nnlm" / "seed0" / "stream_eval" / "nbest.tsv").read_bytes()
        for arm in ARMS
    }
    assert lists["far"] != lists["near"]
    for arm in ARMS:
        config = yaml.safe_load((arms / arm / "nnlm" / "seed1" / "config.yaml").read_text())
        assert config["seed"] == 1
    # One acoustic model, whose seed differs from all seeds of neural models.
    assert [path.name for path in (recipe / "exp" / "fake" / "am").iterdir()] == ["seed0"]


def test_rows_of_all_arms(recipe):
    arms, data = recipe / "exp" / "fake" / "arms", recipe / "data" / "fake" / "eval"
    named = yaml.safe_load((ROOT / "conf" / "ami" / "fmp.yaml").read_text())["sweeps"]["rows"]
    total = sum(len(words.split()) for words in read_table(data / "text").values())
    persons = set(read_table(data / "utt2person").values())
    for arm in ARMS:
        for seed in (0, 1):
            rows = read_tsv(arms / arm / "rows" / f"seed{seed}.tsv", None)
            assert {row["row"] for row in rows} == named.keys()
            own = [row for row in rows if (row["row"], row["scored"]) == ("fmp", "all")]
            assert {row["person"] for row in own} == persons
            assert sum(int(row["words"]) for row in own) == total
    # Lambda is from dev, and table 4 from the far arm alone.
    assert (arms / "far" / "sweeps" / "seed1" / "doubt_user.tsv").exists()
    assert not (arms / "near" / "sweeps").exists()
    page = (recipe / "exp" / "fake" / "RESULTS.md").read_text()
    assert page.count("| NNLM ") == 2 and "| nothing released (alpha 0, beta 0.75)" in page
    assert "undecided (too few persons)" in page


def test_the_reports_differences(recipe, tmp_path):
    """Verdicts of many persons with known errors, and figures in % of the arm's NNLM, are right."""
    persons = [f"P{number:02}" for number in range(12)]
    random = np.random.default_rng(0)
    rates = {"nnlm": 20, "fmp": 18, "alpha": 19, "beta25": 19, "other25": 20, "beta75": 20}
    rates |= {"other75": 20, "static": 20, "refreshed": 18, "adapted": 18, "posterior": 18}
    rates |= {"reference": 15}
    for seed in (0, 1):
        rows = []
        for row, rate in rates.items():
            for scored in ("all", "without"):
                for person in persons:
                    errors = 10 * rate + int(random.integers(-2, 3))
                    figures = (row, scored, person, 1000, errors)
                    names = ("row", "scored", "person", "words", "errors")
                    rows.append(dict(zip(names, figures, strict=True)))
        write_tsv(tmp_path / "arms" / "far" / "rows" / f"seed{seed}.tsv", list(rows[0]), rows)
    shutil.copytree(
        recipe / "exp" / "fake" / "arms" / "far" / "sweeps", tmp_path / "arms" / "far" / "sweeps"
    )
    for seed in (0, 1):
        folder = tmp_path / "arms" / "far" / "nnlm" / f"seed{seed}"
        folder.mkdir(parents=True)
        for unit in ("utterance", "user"):
            (folder / f"doubt_{unit}.yaml").write_text("doubt: 0.5\n")
        (folder / "weights.yaml").write_text("lm_weight: 1.25\nword_score: -0.5\n")
        (folder / "scale.yaml").write_text(f"scale: {seed / 2}\n")
    page = tmp_path / "RESULTS.md"
    options = (
        "--arms",
        "far",
        "--seeds",
        "0 1",
        "--rounds",
        "10",
        "--section",
        "x",
        "--corpus",
        "AMI",
    )
    options += ("--release", "x", "--command", "run.sh")
    report = (ROOT / "local" / "ami" / "arms.py", tmp_path / "arms", page, *options)
    said = run(*report, cwd=recipe).ok().out
    text = page.read_text()
    check_summary(text, rates)
    record = tmp_path / "RESULTS-x-errors.gz"
    page.unlink()
    assert program("local/ami/remake.py", record, page).ok().out == said
    assert page.read_text() == text
    # Words and errors of each person, of two seeds and four rows.
    lines = gzip.decompress(record.read_bytes()).decode().partition("\n\n")[2].splitlines()
    assert len(lines) == 13 and lines[1].startswith("all\tP00\tP00\t1000\t")
    assert len(lines[1].split("\t")) == 4 + 2 * 4
    assert "below -2 % of NNLM): **yes**, -10." in text or "NNLM): **yes**, -9." in text
    assert "counts is below 0): **yes**, -" in text and "12,000 words of 12 persons" in text
    (line,) = (line for line in text.splitlines() if "1.25, 1.25" in line)
    assert [cell.strip() for cell in line.split("|")][3:5] == ["-0.5, -0.5", "0, 0.5"]
    (line,) = (line for line in text.splitlines() if line.startswith("| a bound"))
    assert "**-25." in line or "**-24." in line
    (line,) = (line for line in text.splitlines() if line.startswith("| beta alone (0.75)"))
    assert "**" not in line


def check_summary(page: str, rates: dict[str, int]) -> None:
    """Compare the first table with the errors of `test_the_reports_differences`, in tenths."""
    first = page.partition("| Method")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in first]
    names = ("NNLM", "FMP", "alpha alone (0.5)", "beta alone (0.25)")
    assert [row[0] for row in cells] == [f"far: {name}" for name in names]
    for row, name in zip(cells, ("nnlm", "fmp", "alpha", "beta25"), strict=True):
        assert float(row[1].split()[0]) == pytest.approx(rates[name], abs=0.15)
        assert row[3:] == ["-", "-"]
    assert cells[0][2] == "-"
    value, low, high = (float(one.strip("[],")) for one in cells[1][2].split())
    assert low < value == pytest.approx(-2, abs=0.15) and value < high < 0


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [(-9.0, -2.1, "yes"), (-9.0, -1.9, "undecided"), (-1.9, 3.0, "no"), (np.nan, np.nan, "undec")],
)
def test_verdicts(low, high, told):
    arms = load("ami", "arms")[0]
    # A WER of 20 %, so that a point is 5 % of it.
    words, errors = {"wer": np.array([100])}, {"wer": np.array([20])}
    base = arms.Row("", "", {0: Utterances([("all", "P", "P")], words, errors)})
    found = arms.Difference((low + high) / 10, low / 5, high / 5, 0.5)
    assert arms.decide(found, base, -2.0).startswith(told)


def test_arms_that_are_refused(recipe):
    options = ("--background", "meetings.txt", "--tag", "other")
    call(recipe, *options, "--arms", "near wide").fails(2, "'wide'")
    call(recipe, "--tag", "other", "--arms", "near").fails(2, "--background")
    call(recipe, "--tag", "other", "--am_seed", "0").fails(2, "--am_seed needs --arms")
    text = ("--lm_text", "background", "--stop_stage", "0")
    call(recipe, "--tag", "other", *text).fails(2, "give --background")


def test_text_of_chat(tmp_path):
    """Sentences of messages are normalised like words of meetings; other JSON is refused."""
    chat = ROOT / "local" / "ami" / "chat.py"
    message = '{"text": "Hi! I\'m ok... you? T.V. 4 me", "sender": "x"}'
    (tmp_path / "a.json").write_text(f'{{"1": {{"messages": [[{message}, {{"text": ":-)"}}]]}}}}')
    run(chat, tmp_path / "a.json", tmp_path / "out").ok()
    assert (tmp_path / "out").read_text() == "HI\nI'M OK\nYOU\nT V\n4 ME\n"
    for content, told in (("[1]", "not conversations"), ("{", "not JSON"), ("{}", "no words")):
        (tmp_path / "b.json").write_text(content)
        run(chat, tmp_path / "b.json", tmp_path / "none").fails(1, "b.json", told)
    # Existing files are not fetched again.
    run(ROOT / "local" / "ami" / "chat.sh", tmp_path / "out").ok()
    run(ROOT / "local" / "ami" / "chat.sh").fails(2, "give a file")
