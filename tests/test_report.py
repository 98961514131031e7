"""Tables, RESULTS.md and its plot, from files as written by `score`, `rounds`, `evaluate`."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from conftest import run
from hypothesis import given, settings
from hypothesis import strategies as st
from reported import (
    CLIENTS,
    FIRST,
    LEDGER_2,
    ROWS,
    arguments,
    make_experiment,
    markdown_row,
    png_chunks,
)
from scipy.stats import norm, t

from fedtools.core.errors import UserError
from fedtools.core.tables import (
    count,
    format_markdown,
    format_table,
    number,
    read_tsv,
    size_text,
    with_deviation,
    write_tsv,
)
from fedtools.exchange.experiment import Experiment, write_sums
from fedtools.score.wer import COLUMNS as SCORE

COUNTS = ("wer_tokens", "wer_errors", "cer_tokens", "cer_errors")
UTTERANCE = ("client", "speaker", "utterance", *COUNTS)


def make_scores(path: Path, *wers: float, low: object = None, words: int = 120_000) -> Path:
    """Write scores of three clients, with CERs half the WERs and intervals of +- 1.

    Each client has 12 speakers of an utterance each; one of them is in all three.
    """
    rows, utterances = [], []
    for client, wer in zip(CLIENTS, wers, strict=True):
        errors = round(words * wer / 100)
        for place in range(12):
            own = (errors + place) // 12
            name = f"{client}{place}" if place else "anyone"
            values = (client, name, f"{client}-{place}", words // 12, own, words // 6, own)
            utterances.append(dict(zip(UTTERANCE, values, strict=True)))
    average = sum(wers) / 3
    for client, wer in zip((*CLIENTS, "average", "all"), (*wers, average, average), strict=True):
        total = 3 if client in ("average", "all") else 1
        row = {"client": client, "utterances": 12 * total, "words": words * total}
        row["speakers"] = 34 if total == 3 else 12
        row |= dict.fromkeys(("substitutions", "deletions", "insertions"), 1)
        for rate, value in (("wer", wer), ("cer", wer / 2)):
            row[rate] = f"{value:.2f}"
            row[f"{rate}_low"] = f"{value - 1:.2f}" if low is None else low
            row[f"{rate}_high"] = f"{value + 1:.2f}" if low is None else low
        rows.append(row)
    write_tsv(path / "wer.tsv", SCORE, rows)
    write_tsv(path / "utterances.tsv", UTTERANCE, utterances)
    return path


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Make a recipe's folder with three experiments and four scores, and change to it."""
    monkeypatch.chdir(tmp_path)
    make_experiment(Path("exp/client"), client_epochs=1)
    make_experiment(Path("exp/centralized"), server_epochs=1, drop=2)
    make_experiment(Path("exp/fedavg"), size=2_000_000, client_epochs=0.5)
    make_scores(Path("score/baseline"), 40, 30, 50)
    make_scores(Path("score/client"), 21, 20.01, 30)
    make_scores(Path("score/centralized"), 20, 22, 29)
    make_scores(Path("score/fedavg"), 23, 20.04, 28)
    return tmp_path


def test_the_tables_have_costs_rates_and_the_best_in_bold(cli, recipe):
    out = cli(*arguments()).ok().out
    page = Path("RESULTS.md").read_text()
    # The first table has five columns, and is printed below the name of the corpus. FedAvg's
    # difference to Baseline is (23 + 20.04 + 28 - 40 - 30 - 50) / 3.
    head = ["Method", "WER (%)", "to first row", "MB/client", "Computation"]
    first = [line for line in page.splitlines() if line.startswith("| ")][:5]
    said = out.splitlines()
    assert said[:2] == ["Common Voice accents 22.0 (mini)", ""] and len(said) == 7
    rows = [re.split("  +", line) for line in said[2:]]
    assert rows == [[c.strip(" *") for c in line.strip("|").split("|")] for line in first]
    assert rows[:2] == [head, ["Baseline", "40.0 [39.0, 41.0]", "-", "-", "-"]]
    assert rows[4][:2] == ["FedAvg", "23.7 [22.7, 24.7]"] and rows[4][3:] == ["16.0", "50 %"]
    assert rows[4][2].startswith("-16.3 [")
    # 2 MB down and up, three clients, four rounds.
    assert markdown_row(page, "Baseline")[:4] == ["-", "-", "-", "-"]
    assert markdown_row(page, "Client")[:4] == ["-", "-", "4", "-"]
    assert markdown_row(page, "Centralized")[:4] == ["-", "-", "-", "4"]
    assert markdown_row(page, "FedAvg")[:4] == ["16.00 MB", "48.00 MB", "2", "-"]
    # 20.01 and 20.04 look equal, so that both are marked as best.
    assert markdown_row(page, "Client")[4:8] == ["21.0", "**20.0**", "30.0", "**23.7**"]
    assert markdown_row(page, "FedAvg")[4:8] == ["23.0", "**20.0**", "**28.0**", "**23.7**"]
    # Three clients, four rounds, five steps each.
    assert markdown_row(page, "Baseline")[8:] == ["-", "-", "-", "-"]
    assert markdown_row(page, "Client")[8:] == ["100 %", "60", "-", "-"]
    assert markdown_row(page, "FedAvg")[8:] == ["50 %", "60", "-", "-"]
    assert markdown_row(page, "FedAvg", 1)[0] == "23.0 [22.0, 24.0]"
    # Those of every rate and table are in a file of their own, which the page names.
    assert "(RESULTS-mini-intervals.tsv)" in page
    kept = [line.split("\t") for line in Path("RESULTS-mini-intervals.tsv").read_text().split("\n")]
    difference = ["difference", "difference_low", "difference_high"]
    assert kept[0] == [
        *("table", "method", "rate", "client", "value", "low", "high"),
        *(*difference, "bytes", "computation"),
    ]
    # Four methods, two rates, three clients and their mean.
    assert len(kept) == 1 + 4 * 2 * 4 + 1
    assert ["main", "FedAvg", "wer", "australia", "23.00", "22.00", "24.00", *"-----"] in kept
    assert ["main", "FedAvg", "cer", "australia", "11.50", "10.50", "12.50", *"-----"] in kept
    (row,) = (line for line in kept if line[:4] == ["main", "FedAvg", "wer", "average"])
    # Bytes of four rounds of 2 MB, both ways; half an epoch in each.
    assert row[7] == "-16.32" and row[10:] == ["16000000", "2.0000"]
    speakers = "34 speakers (australia 12, england 12, indian 12)"
    assert f"on 36 utterances, 360000 words, {speakers}." in page
    assert "seeds" not in page


def make_seed(seed: int, *wers: float, drop: float) -> str:
    """Add FedAvg with another seed; return its row."""
    experiment = make_experiment(Path(f"exp/fedavg{seed}"), size=2_000_000, drop=drop)
    text = (experiment / "config.yaml").read_text().replace("seed: 7", f"seed: {seed}")
    (experiment / "config.yaml").write_text(text)
    sums = {name: experiment / name for name in ("config.yaml", "clients.txt", FIRST)}
    write_sums(experiment / "sha256sums", sums)
    make_scores(Path(f"score/fedavg{seed}"), *wers)
    return f"--row=exp/fedavg{seed}:score/fedavg{seed}"


def test_rows_of_one_name_are_the_mean_over_seeds(cli, recipe):
    rows = [make_seed(0, 20, 30, 40, drop=1), make_seed(1, 22, 33, 40, drop=3)]
    rows += [make_seed(2, 27, 36, 40, drop=5), "--row=Client=exp/client:score/client"]
    same = [make_scores(Path(f"score/own{n}"), 10 + n, 20, 30) for n in range(3)]
    own = [f"--elsewhere=own={path}" for path in same]
    more = ["--plot", "wer.png", *rows[:3], *own]
    cli(*arguments(*more, FedAvg="exp/fedavg:score/fedavg")).ok()
    page = Path("RESULTS.md").read_text()
    # 20, 22, 27 and 23: mean 23, standard deviation sqrt((9 + 1 + 16 + 0) / 3) = 2.94.
    cells = markdown_row(page, "FedAvg")
    assert cells[4].strip("*") == "23.0 ± 2.9"
    # Bounds are 1 below and above each of them, and seeds vary as well.
    speakers, seeds = 1 / norm.ppf(0.975) ** 2, 26 / 3 / 4
    half = t.ppf(0.975, (speakers + seeds) ** 2 / (seeds**2 / 3)) * (speakers + seeds) ** 0.5
    assert markdown_row(page, "FedAvg", 1)[0] == f"23.0 [{23 - half:.1f}, {23 + half:.1f}]"
    assert "Means ± standard deviations over 4 seeds." in page
    assert "Seed: 0, 1, 2, 7." in page
    # (10 + 20 + 30) / 3 = 20, and a third more for each of the others: a variance of 1 / 9.
    half = (speakers + 1 / 27) ** 0.5
    half *= t.ppf(0.975, (speakers + 1 / 27) ** 2 / ((1 / 27) ** 2 / 2))
    assert f"own: WER 20.3 [{61 / 3 - half:.1f}, {61 / 3 + half:.1f}] %" in page
    # Methods have different numbers of seeds.
    cli(*arguments(*rows, FedAvg="exp/fedavg:score/fedavg")).fails(1, "FedAvg 4, Client 1")


def collapse(experiment: str, *rows: tuple[int, str]) -> None:
    """Record in the ledger that labels of these rounds and clients ("-": the server) were empty."""
    for at, client in rows:
        path = Path(experiment, f"round_{at:04d}", "ledger.tsv")
        lines = path.read_text().splitlines(keepends=True)
        (index,) = (n for n, line in enumerate(lines) if line.split("\t")[1] == client)
        assert lines[index].endswith("\tok\n")
        lines[index] = lines[index].removesuffix("ok\n") + "collapsed\n"
        path.write_text("".join(lines))
        Experiment(experiment).round(at).close()


MEANING = "† pseudo-labels collapsed: in a round at least 95 % of them were empty."
MEANING += " Training went on."


def test_collapsed_pseudo_labels_are_marked_in_the_tables(cli, recipe):
    """They are listed by method, seed and client; other rows are unchanged."""
    other = make_seed(2, 20, 30, 40, drop=1)
    more = [other, f"--also=more={other.removeprefix('--row=')}"]
    more += ["--also=more=Baseline=:score/baseline", "--also=rest=Client=" + ROWS["Client"]]
    rows = {"FedAvg": ROWS["FedAvg"]}
    cli(*arguments(*more, **rows)).ok()
    before = Path("RESULTS.md").read_text()
    assert "†" not in before and "collapsed" not in before
    collapse("exp/fedavg", (1, "england"), (3, "england"), (3, "-"))
    collapse("exp/fedavg2", (4, "-"))
    out = cli(*arguments(*more, **rows)).ok().out
    assert "\nFedAvg † " in out
    page = Path("RESULTS.md").read_text()
    note = f"{MEANING} FedAvg, seed 7: england in 2 rounds, the server in 1 round"
    assert f"{note}; FedAvg, seed 2: the server in 1 round." in page
    # The summary, the main table, that of its intervals, and a further one; each with its figures.
    marked = [line for line in page.splitlines() if line.startswith("| FedAvg † ")]
    plain = [line for line in before.splitlines() if line.startswith("| FedAvg ")]
    assert len(marked) == len(plain) == 4
    for line, other in zip(marked, plain, strict=True):
        assert line.split()[3:] == other.split()[2:]
    further = page.partition("more**, as above.")[2]
    assert further.index("| Baseline |") < further.index(
        f"{MEANING} FedAvg, seed 2: the server in 1 round."
    )
    assert page.count("†") == 4 + 2 and "Baseline †" not in page and "Client †" not in page


def test_of_many_collapsed_clients_a_few_are_named(cli, recipe):
    collapse("exp/fedavg", *((at, client) for at in (1, 3, 4) for client in CLIENTS))
    clients = [f"c{number}" for number in range(4)]
    path = Path("exp/fedavg/round_0004/ledger.tsv")
    last = "4\t{}\t0\t0\t0\t1\t0\t0.5\tcollapsed\n"
    path.write_text(path.read_text() + "".join(map(last.format, clients)))
    Experiment("exp/fedavg").round(4).close()
    cli(*arguments(FedAvg=ROWS["FedAvg"])).ok()
    named = [f"{client} in 3 rounds" for client in CLIENTS] + ["c0 in 1 round", "c1 in 1 round"]
    assert f" FedAvg, seed 7: {', '.join(named)}, and 2 more." in Path("RESULTS.md").read_text()


def test_a_collapse_while_newcomers_adapt_is_marked_in_their_row(cli, recipe):
    """Newcomers train in an experiment of their own, which has their scores."""
    shutil.copytree("exp/client", "exp/fedavg/newcomers")
    shutil.copytree("score/client", "exp/fedavg/newcomers/decode")
    also = "--also=new=FedAvg, adapted=exp/fedavg:exp/fedavg/newcomers/decode"
    rows = {"FedAvg": ROWS["FedAvg"]}
    cli(*arguments(also, **rows)).ok()
    assert "†" not in Path("RESULTS.md").read_text()
    collapse("exp/fedavg/newcomers", (1, "england"))
    cli(*arguments(also, **rows)).ok()
    page = Path("RESULTS.md").read_text()
    assert f"{MEANING} FedAvg, adapted, seed 7: england in 1 round." in page
    assert "| FedAvg, adapted † " in page and "| FedAvg † " not in page
    # A collapse in training counts there, too.
    collapse("exp/fedavg", (1, "england"), (3, "-"))
    cli(*arguments(also, **rows)).ok()
    said = "FedAvg, adapted, seed 7: england in 2 rounds, the server in 1 round."
    assert f"{MEANING} {said}" in Path("RESULTS.md").read_text()


def test_scores_on_other_data_have_a_line_of_their_own(cli, recipe):
    make_scores(recipe / "score" / "own", 10.0, 11.0, 12.0, words=150_000)
    cli(*arguments("--elsewhere", "on its own accents=score/own")).ok()
    page = Path("RESULTS.md").read_text()
    line = "on its own accents: WER 11.0 [10.0, 12.0] % on 36 utterances, 450000 words, 34 speakers"
    assert f"Common Voice accents 22.0 (mini), {line}" in page
    cli(*arguments("--elsewhere", "own=score/none")).fails(1, "score/none")
    cli(*arguments("--elsewhere", "score/own")).fails(2)


def test_the_page_says_where_the_figures_come_from(cli, recipe):
    cli(*arguments("--plot", "wer.png")).ok()
    page = Path("RESULTS.md").read_text()
    for fact in (
        "fedtools report RESULTS.md --section=mini",
        "release 22.0",
        "Date: 2024-02-03.",
        "Git, of this report: unknown.",
        "Experiments begun with: not recorded (3).",
        "Seed: 7.",
        "Rounds: 4.",
        "![WER by round, Common Voice accents 22.0 (mini)](wer.png)",
    ):
        assert fact in page
    for method in ("client", "fedavg"):
        Path("exp", method, "software.yaml").write_text("git: abc\ntorch: 2.13.0\n")
    cli(*arguments()).ok()
    known = "begun with: git abc, torch 2.13.0 (2); not recorded (1)."
    assert known in Path("RESULTS.md").read_text()
    cli(*arguments("--command", "./run.sh")).ok()
    assert "```\n./run.sh\n```" in Path("RESULTS.md").read_text()


def test_mini_is_said_in_every_caption_of_a_mini_corpus_only(cli, recipe):
    write_tsv("paper.tsv", ["Method", "AVG"], [{"Method": "FedAvg", "AVG": "17.5"}])
    paper = "--published=Zhu et al. 2022, table 3=paper.tsv"
    for mini in (True, False):
        cli(*arguments("--plot=wer.png", paper, mini=mini)).ok()
        page = Path("RESULTS.md").read_text()
        Path("RESULTS.md").unlink()
        captions = re.findall(r"^(?:## .*|\*\*.*|!\[.*)$", page, re.M)
        assert len(captions) == 7
        assert ["mini" in caption for caption in captions] == [mini] * 6 + [False]
        assert captions[6].startswith("**Published, not measured here: Zhu et al.")
        assert page.rindex("| FedAvg | 17.5 |") > page.index(captions[6])


def test_a_section_is_replaced_and_the_rest_stays(cli, recipe):
    Path("RESULTS.md").write_text("# My results\n\nby hand\n")
    cli(*arguments()).ok()
    cli(*arguments(mini=False)).ok()
    before = Path("RESULTS.md").read_text()
    assert before.startswith("# My results\n\nby hand\n\n<!-- fedtools:mini begin -->\n")
    cli(*arguments(mini=False)).ok()
    assert Path("RESULTS.md").read_text() == before
    Path("RESULTS.md").write_text(before + "\nafter\n")
    make_scores(Path("score/fedavg"), 4, 4, 4)
    cli(*arguments()).ok()
    mini, real = Path("RESULTS.md").read_text().split("<!-- fedtools:mini end -->")
    assert markdown_row(mini, "FedAvg")[4] == "**4.0**"
    assert real == before.split("<!-- fedtools:mini end -->")[1] + "\nafter\n"


@pytest.mark.parametrize(
    "old",
    [
        "<!-- fedtools:mini begin -->\n",
        "<!-- fedtools:mini end -->\n<!-- fedtools:mini begin -->\n",
        "<!-- fedtools:mini begin -->\n<!-- fedtools:mini end -->\n<!-- fedtools:mini end -->\n",
    ],
)
def test_damaged_markers_are_refused(cli, recipe, old):
    Path("RESULTS.md").write_text(old)
    cli(*arguments("--plot", "wer.png")).fails(1, "RESULTS.md: ", "'mini' are damaged", "leave one")
    assert Path("RESULTS.md").read_text() == old
    assert not Path("wer.png").exists()


def test_the_git_hash_counts_changes_but_its_own(cli, recipe):
    def git(*command: str) -> str:
        me = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        return run("git", *me, *command, cwd=recipe).ok().out.strip()

    def said() -> str:
        cli(*arguments("--plot", "wer.png")).ok()
        return re.search(r"Git, of this report: (.*)\.", Path("RESULTS.md").read_text())[1]

    Path(".gitignore").write_text("exp\nscore\n")
    git("init", "-q")
    git("add", ".gitignore")
    git("commit", "-qm", "x")
    head = git("rev-parse", "HEAD")
    assert said() == said() == head
    Path("RESULTS-other.png").write_text("")
    assert said() == head
    Path("new.py").write_text("")
    assert said() == f"{head}-dirty"


def test_the_plot_is_small_and_the_same_bytes_again(cli, recipe):
    rows = dict(ROWS)
    for index in range(4):
        make_experiment(Path(f"exp/m{index}"), client_epochs=1, drop=index / 3)
        rows[f"Method {index}"] = f"exp/m{index}:score/client"
    pictures = []
    for _ in range(2):
        cli(*arguments("--plot", "wer.png", **rows)).ok()
        pictures.append(Path("wer.png").read_bytes())
    assert pictures[0] == pictures[1]
    assert len(pictures[0]) < 60_000
    assert not {b"tEXt", b"tIME", b"zTXt", b"iTXt"} & set(png_chunks(pictures[0]))
    # The plot shows the measured values: another value, another plot.
    text = Path("exp/m1/evaluate_valid.tsv").read_text()
    Path("exp/m1/evaluate_valid.tsv").write_text(text.replace("50.0000", "70.0000"))
    cli(*arguments("--plot", "wer.png", **rows)).ok()
    assert Path("wer.png").read_bytes() != pictures[0]


def test_a_plot_of_nothing_is_refused(cli, recipe):
    cli(*arguments("--plot", "wer.png", Baseline=":score/baseline")).fails(
        1, "evaluate_valid.tsv", "--plot"
    )
    assert not Path("RESULTS.md").exists()


def test_a_missing_picture_is_refused(cli, recipe):
    named = arguments("--picture", "map=map.png", Baseline=":score/baseline")
    cli(*named).fails(1, "map.png: picture is missing")
    assert not Path("RESULTS.md").exists()
    Path("map.png").write_bytes(b"")
    cli(*named).ok()
    assert "](map.png)" in Path("RESULTS.md").read_text()


def replaced(path: str, old: str, new: str) -> None:
    text = Path(path).read_text()
    assert old in text
    Path(path).write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("path", "old", "new", "said"),
    [
        ("score/fedavg/wer.tsv", "23.00", "x", "wer.tsv:2: wer is 'x'"),
        ("score/fedavg/wer.tsv", "23.00", "nan", "wer.tsv:2: wer is 'nan'"),
        ("score/fedavg/wer.tsv", "\t120000\t", "\t4.5\t", "wer.tsv:2: words is '4.5'"),
        (
            "score/fedavg/wer.tsv",
            "\t120000\t",
            "\t120001\t",
            "wer.tsv: the clients' words are 360001",
        ),
        ("score/fedavg/wer.tsv", "england", "wales", "not the utterances and errors of wer.tsv"),
        ("score/fedavg/wer.tsv", "client\t", "speaker\t", "wer.tsv:1: the header"),
        ("score/fedavg/wer.tsv", "\t120000\t", "\t120000\t\t", "wer.tsv:2: 14 fields"),
        ("score/fedavg/wer.tsv", "\t12\t", "\t13\t", "not the utterances and errors of wer.tsv"),
        ("score/fedavg/wer.tsv", "average", "mean", "the last rows are not average and all"),
        ("exp/fedavg/config.yaml", "seed: 7", "seed: 8", "changed since the experiment began"),
        (
            "exp/fedavg/sha256sums",
            "config.yaml",
            "config_yaml",
            "changed since the experiment began",
        ),
        ("exp/fedavg/sha256sums", "  ", " ", "sha256sums:1: not a sum and a name"),
        (
            f"exp/fedavg/{LEDGER_2}",
            "2000000",
            "2000001",
            "ledger.tsv: changed since it was written",
        ),
        ("exp/fedavg/evaluate_valid.tsv", "england", "australia", "tsv:3: round 0 of 'australia'"),
        ("exp/fedavg/evaluate_valid.tsv", "england", "wales", "round 1 has other clients"),
        ("exp/fedavg/evaluate_valid.tsv", "50.0000", "-1", "tsv:2: wer is '-1'"),
    ],
)
def test_damaged_inputs_are_refused(cli, recipe, path, old, new, said):
    replaced(path, old, new)
    cli(*arguments("--plot", "wer.png")).fails(1, said)
    assert not Path("RESULTS.md").exists()
    assert not Path("wer.png").exists()


@pytest.mark.parametrize(
    ("path", "old", "new", "said"),
    [
        ("config.yaml", "seed: 7", "seed: x", "option 'seed' is 'x': input should be a valid int"),
        ("config.yaml", "seed: 7\n", "", "config.yaml: option 'seed' is missing"),
        ("config.yaml", "seed: 7", "seed: [", "config.yaml:"),
        (LEDGER_2, "2000000", "2MB", "ledger.tsv:2: bytes_down is '2MB'"),
        (LEDGER_2, "round", "lap", "ledger.tsv:1: "),
        (LEDGER_2, "2\t-\t", "3\t-\t", "ledger.tsv:5: '-' is of another round"),
    ],
)
def test_what_has_the_right_sum_is_checked_too(cli, recipe, path, old, new, said):
    replaced(f"exp/fedavg/{path}", old, new)
    if path == LEDGER_2:
        experiment = Experiment("exp/fedavg")
        experiment.round(2).close()
    else:
        write_sums(Path("exp/fedavg/sha256sums"), {path: Path("exp/fedavg", path)})
    cli(*arguments()).fails(1, said)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("score/fedavg/wer.tsv", "score/fedavg/wer.tsv: cannot be read"),
        ("exp/fedavg/config.yaml", "exp/fedavg: no experiment here"),
        ("exp/fedavg/sha256sums", "exp/fedavg: no experiment here"),
        (f"exp/fedavg/{LEDGER_2}", f"{LEDGER_2}: missing; run fedtools reset"),
    ],
)
def test_missing_inputs_are_refused(cli, recipe, path, said):
    Path(path).unlink()
    cli(*arguments()).fails(1, said)


def test_a_page_that_is_no_text_is_refused(cli, recipe):
    Path("RESULTS.md").write_bytes(b"\xff\xfe")
    cli(*arguments()).fails(1, "RESULTS.md:1: UTF-16, not UTF-8")


def test_an_unknown_interval_is_left_out(cli, recipe):
    make_scores(Path("score/fedavg"), 23, 20, 28, low="-")
    cli(*arguments()).ok()
    assert markdown_row(Path("RESULTS.md").read_text(), "FedAvg", 1)[0] == "23.0"


@pytest.mark.parametrize(
    "wrong",
    [
        ["--row=FedAvg"],
        ["--row=X=score/client"],
        ["--row=X=exp/client:"],
        ["--section=Mini corpus"],
        ["--plot=wer.jpg"],
        ["--plot=elsewhere/wer.png"],
        ["--published=paper.tsv"],
        ["--date=yesterday"],
    ],
)
def test_usage_errors(cli, recipe, wrong):
    cli(*arguments(*wrong)).fails(2, wrong[0].split("=")[0])
    assert not Path("RESULTS.md").exists()


def test_a_name_that_comes_twice_is_refused(cli, recipe):
    for row, said in {
        "FedAvg=:score/fedavg": "'FedAvg' is duplicated",
        "exp/fedavg:score/fedavg": "'FedAvg' is duplicated, with seed 7",
        "Baseline=:score/baseline": "'Baseline' is duplicated, with the same scores",
    }.items():
        cli(*arguments(f"--row={row}")).fails(1, said, "--row NAME=")
    assert not Path("RESULTS.md").exists()


def test_a_mean_has_a_deviation_where_there_are_several_values():
    write = "{:.2f}".format
    assert with_deviation([1.0, 2.0, 6.0], write) == "3.00 ± 2.65"
    assert with_deviation([1.0], write) == "1.00"


def test_a_row_without_a_name_has_the_methods_title(cli, recipe):
    cli(*arguments("--row=exp/fedavg:score/fedavg", Client=ROWS["Client"])).ok()
    assert markdown_row(Path("RESULTS.md").read_text(), "FedAvg")[1] == "48.00 MB"


def test_tuned_weights_are_told_and_edges_warned_of(cli, recipe):
    tuned = "tuned_on: valid\n"
    Path("score/client/weights.yaml").write_text(f"lm_weight: 0.7\nword_score: 1.5\n{tuned}")
    Path("score/fedavg/weights.yaml").write_text(f"lm_weight: 0.0\nword_score: 3.0\n{tuned}")
    cli(*arguments()).ok()
    page = Path("RESULTS.md").read_text()
    told = "LM weight and word score, tuned on validation data: Client 0.7 and 1.5; FedAvg 0 and 3."
    assert told in page and "Warning" not in page
    Path("score/fedavg/weights.yaml").write_text(f"lm_weight: 5.0\nword_score: 8.0\n{tuned}")
    cli(*arguments()).ok()
    warning = "at an edge of the values tried: FedAvg LM weight 5, FedAvg word score 8."
    assert warning in Path("RESULTS.md").read_text()
    # Nobody tuned these, and no edge was tried.
    Path("score/fedavg/weights.yaml").write_text("lm_weight: 5.0\nword_score: 8.0\n")
    cli(*arguments()).ok()
    page = Path("RESULTS.md").read_text()
    told = (
        "tuned on validation data: Client 0.7 and 1.5. LM weight and word score, as given: FedAvg"
    )
    assert f"{told} 5 and 8." in page and "Warning" not in page
    # Weights that were tuned on what is scored are not called anything else.
    for name, how in (
        ("eval_test", "tuned on eval_test"),
        ("validated", "tuned on validated"),
        ("eval_valid", "tuned on validation data"),
        ("dev-clean", "tuned on validation data"),
    ):
        text = f"lm_weight: 0.7\nword_score: 1.5\ntuned_on: {name}\n"
        Path("score/client/weights.yaml").write_text(text)
        cli(*arguments()).ok()
        assert f"LM weight and word score, {how}: Client 0.7" in Path("RESULTS.md").read_text()
    Path("score/fedavg/weights.yaml").write_text("lm_weight: x\nword_score: 8.0\n")
    cli(*arguments()).fails(1, "score/fedavg/weights.yaml:1: ")


def test_a_published_table_needs_rows(cli, recipe):
    Path("paper.tsv").write_text("Method\tAVG\n")
    cli(*arguments("--published=Paper=paper.tsv")).fails(1, "paper.tsv: a header but no row")


def test_show_sums_the_ledger_up(cli, recipe):
    lines = cli("show", "exp/fedavg").ok().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [*CLIENTS, "server", "total"]
    assert lines[2].split()[1:] == ["4", "8.00", "MB", "8.00", "MB", "2", "-", "2.0", "1", "0"]
    assert lines[5].split()[1:] == ["4", "24.00", "MB", "24.00", "MB", "6", "-", "7.0", "1", "0"]
    # A reopened round, and those after it, do not count.
    Path("exp/fedavg/round_0003/.done").unlink()
    assert cli("show", "exp/fedavg").ok().out.splitlines()[5].split()[1:3] == ["2", "12.00"]
    Path("exp/fedavg/round_0001/.done").unlink()
    cli("show", "exp/fedavg").fails(1, "exp/fedavg: no round yet")
    cli("show", "exp/none").fails(1, "exp/none: no experiment here")


def test_what_goes_up_is_counted_beside_what_goes_down(cli, recipe):
    """Traffic up and down differs here, and neither is counted twice or as the other."""
    make_experiment(Path("exp/uneven"), size=2_000_000, up=500_000, client_epochs=1)
    # Four rounds of three clients.
    lines = cli("show", "exp/uneven").ok().out.splitlines()
    assert lines[1].split()[2:6] == ["8.00", "MB", "2.00", "MB"]
    assert lines[5].split()[2:6] == ["24.00", "MB", "6.00", "MB"]
    cli(*arguments(Uneven="exp/uneven:score/fedavg")).ok()
    page = Path("RESULTS.md").read_text()
    assert markdown_row(page, "Uneven")[:2] == ["10.00 MB", "30.00 MB"]


def test_sizes_are_decimal():
    assert [size_text(n) for n in (0, 999, 1000, 20_700_000_000)] == [
        "-",
        "999 B",
        "1.00 kB",
        "20.70 GB",
    ]


# --- further tables

fields = st.text(st.characters(blacklist_characters="\t\n\0", blacklist_categories=["Cs"]))


@given(rows=st.lists(st.tuples(fields, fields), max_size=5))
@settings(max_examples=60, deadline=None)
def test_a_table_is_read_as_it_was_written(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("tsv") / "t.tsv"
    rows = [dict(zip(("a", "b"), row, strict=True)) for row in rows]
    write_tsv(path, ("a", "b"), rows)
    assert read_tsv(path, ("a", "b")) == read_tsv(path, None) == rows


@given(st.binary(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_a_table_or_an_error(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("tsv") / "t.tsv"
    path.write_bytes(content)
    for columns in (("a", "b"), None):
        try:
            assert all(isinstance(row, dict) for row in read_tsv(path, columns))
        except UserError as error:
            assert str(error).startswith(f"{path}:")
            assert "\n" not in str(error)


def test_bad_tables_are_refused_by_line(tmp_path):
    path = tmp_path / "t.tsv"
    for content, said in (
        (b"a\tb\n1\t2\n3\n", "t.tsv:3: 1 fields"),
        (b"a\tb\n1\t2", "t.tsv:2: the last line has no end"),
        (b"a\tb\n1\t\xff\n", "t.tsv:2: not UTF-8"),
        (b"", "t.tsv:1: the header is ''"),
        (b"b\ta\n", "expected a b"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=re.escape(said)):
            read_tsv(path, ("a", "b"))
    path.write_bytes(b"a\ta\n")
    with pytest.raises(UserError, match="duplicated"):
        read_tsv(path, None)
    with pytest.raises(ValueError, match="tab"):
        write_tsv(path, ["a"], [{"a": "x\ty"}])
    assert path.read_bytes() == b"a\ta\n"


@pytest.mark.parametrize("text", ["", "x", "-1", "nan", "inf", "1e999"])
def test_only_plain_numbers_are_numbers(text):
    with pytest.raises(UserError, match=r"t\.tsv:3: n is"):
        number({"n": text}, "n", "t.tsv", 3)
    with pytest.raises(UserError, match=r"t\.tsv:3: n is"):
        count({"n": text}, "n", "t.tsv", 3)
    with pytest.raises(UserError):
        count({"n": "٣"}, "n", "t.tsv", 3)
    assert count({"n": "12"}, "n", "t.tsv", 3) == 12


def test_printed_tables_are_aligned():
    assert format_table(["name", "n"], [["a", 1], ["long one", 100]]) == (
        "name        n\na           1\nlong one  100\n"
    )
    assert format_markdown(["a|b", "n"], [["x", 10]]) == (
        "| a\\|b |  n |\n|:-----|---:|\n| x    | 10 |\n"
    )


def test_attacks_are_means_over_clients_and_spread_over_seeds(tmp_path, cli):
    """Values are each seed's averages, without single clients or the server."""
    columns = ("client", "attack", "measure", "value", "low", "high", "chance")
    seeds = {"0": ("30.00", "20.00", "40.00"), "1": ("40.00", "26.00", "48.00")}
    for seed, (value, low, high) in seeds.items():
        rows = [
            ("-", "IV", "MCD dB", "1.00", "-", "-", "7.00"),
            ("au", "I", "top1%", "99.00", "98.00", "100.00", "10.00"),
            ("average", "I", "top1%", value, low, high, "10.00"),
            ("average", "II", "NMI", "0.5", *(("-", "-") if seed == "0" else (".4", ".6")), "-"),
        ]
        write_tsv(tmp_path / seed, columns, [dict(zip(columns, row, strict=True)) for row in rows])
    pairs = [f"A={tmp_path / '0'}", f"A={tmp_path / '1'}", f"B={tmp_path / '1'}"]
    cli("attack", "merge", tmp_path / "out.tsv", *pairs).ok()
    # Seeds and speakers: 7.07^2 / 2, and the mean square of half-widths of 10 and 11 points.
    squares = 25.0, (10**2 + 11**2) / 2 / norm.ppf(0.975) ** 2
    half = t.ppf(0.975, sum(squares) ** 2 / squares[0] ** 2) * sum(squares) ** 0.5
    assert (tmp_path / "out.tsv").read_text().splitlines() == [
        "Attack\tMeasure\tChance\tA\tB",
        f"I\ttop1%\t10.0\t35.0 ± 7.1 [{35 - half:.1f}, {35 + half:.1f}]\t40.0 [26.0, 48.0]",
        "II\tNMI\t-\t0.50 ± 0.00\t0.50 [0.40, 0.60]",
    ]
    # Exact bounds are on one side of 100 %.
    for seed, value, low in (("0", "100.00", "69.20"), ("1", "100.00", "60.00")):
        best = dict(
            zip(columns, ("average", "I", "top1%", value, low, value, "10.00"), strict=True)
        )
        write_tsv(tmp_path / seed, columns, [best])
    cli("attack", "merge", tmp_path / "out.tsv", *pairs).ok()
    *_, mean, alone = (tmp_path / "out.tsv").read_text().splitlines()[1].split("\t")
    assert (mean, alone) == ("100.0 ± 0.00 [64.6, 100.0]", "100.0 [60.0, 100.0]")
    (tmp_path / "0").write_text("client\tvalue\nau\t1\n")
    done = cli("attack", "merge", tmp_path / "out.tsv", *pairs)
    done.fails(1, "0:2: not a row of attack features")
    write_tsv(tmp_path / "0", columns, [dict.fromkeys(columns, "1")])
    merged = cli("attack", "merge", tmp_path / "out.tsv", *pairs)
    merged.fails(1, "0: no row of average", "run fedtools attack features again")
