"""Tables and figures of keyword spotting, from files in the federation's formats."""

from __future__ import annotations

import argparse
import copy
import gzip
import math
import re
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, inside
from hypothesis import given, settings
from hypothesis import strategies as st
from keywords import CLASSES, CONFIG, config_file, pack
from matplotlib.axes import Axes
from prepared import content
from reported import has_blank_edges, png_chunks
from scipy.stats import ttest_1samp
from scripts import script

from fedtools.core.atomic import sha256
from fedtools.core.tables import read_tsv, write_tsv
from fedtools.data.clips import Clips
from fedtools.exchange.experiment import Experiment, write_clients, write_sums
from fedtools.exchange.ledger import COLUMNS as LEDGER
from fedtools.exchange.states import load_state, save_state
from fedtools.federation.federation import Federation
from fedtools.methods.fedkws_ui import Alo, FedKwsUi
from fedtools.models.training import load_model
from fedtools.score.detection import COLUMNS as DETECTION
from fedtools.tasks import facts_of
from fedtools.tasks.kws.model import tensors_of
from fedtools.tasks.kws.stacks import ClipBatches

# After `scripts`, which makes them importable:
# isort: split
from landscape import between, choose_clients, client_facts, landscape, train_on
from privacy import Accuracies
from runs import read_runs

PUBLISHED = ROOT / "conf" / "speechcommands" / "published.tsv"
ROUNDS = 9
ERRORS = ("client", "speaker", "utterance", "clip_tokens", "clip_errors")
TWELVE = (*CLASSES, *"abcdefgh")
WORDS = (*TWELVE, "up")


def make_run(
    root: Path,
    place: str,
    accuracy: float = 50.0,
    *,
    seed: int = 0,
    detection: tuple[int, int] | None = None,
    evaluated: int = ROUNDS,
    data: Path | None = None,
    train: str = "train",
    **options: object,
) -> Path:
    """Make an experiment of nine rounds, all of them evaluated; accuracy rises by 1 a round.

    Args:
        place: task/network/method.
        accuracy: after the last round.
        detection: false accepts and rejects of 20 negative and 30 positive clips.
        evaluated: the last evaluated round.
        options: options of the method.
    """
    path = root / place / f"seed{seed}"
    task, network, folder = place.split("/")
    method = folder.partition(".")[0]
    data = data or Path("dump") / task
    config = CONFIG | {
        "method": method,
        "method_conf": {"local_steps": 2, **options},
        "seed": seed,
        "rounds": ROUNDS,
        "clients": 0 if method == "centralized" else 2,
        "clients_per_round": 0.5,
        "sampling": "fixed",
        "data": {"train": str(data / train), "test": str(data / "test")},
        "model": {"network": network, "network_conf": SMALL[network]},
    }
    if method == "centralized":
        config["method_conf"] = {}
    config |= {"task": "kws", "average": 1, "evaluate_every": 1, "keep_updates": False}
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    sums = {split: data / of / "sha256sums" for split, of in (("train", train), ("test", "test"))}
    identities = {split: {"sha256sums": sha256(file)} for split, file in sums.items()}
    (path / "data.yaml").write_text(yaml.safe_dump(identities))
    (path / "classes.txt").write_text((data / "train" / "classes.txt").read_text())
    write_clients(path / "clients.txt", ["ann", "bob"] if config["clients"] else [])
    refreeze(path)
    rows = [
        (at, "all", 50, "1.0", 10, f"{accuracy - ROUNDS + at:.4f}") for at in range(evaluated + 1)
    ]
    write_table(path / "evaluate_test.tsv", facts_of("kws", "").header, rows)
    add_rounds(path, federated=method != "centralized")
    if detection:
        accepts, rejects = detection
        shares = (accepts / 50, rejects / 50, accepts / 20, rejects / 30)
        rows = [(ROUNDS, 50, 20, accepts, rejects, *(f"{100 * share:.4f}" for share in shares))]
        write_table(path / "detection_test.tsv", DETECTION, rows)
    return path


def refreeze(path: Path) -> None:
    """Update the checksums of an experiment's initial files."""
    names = ("config.yaml", "data.yaml", "clients.txt", "classes.txt")
    write_sums(path / "sha256sums", {name: path / name for name in names})


# Whether rounds are federated -> the files of all nine, which are the same in all experiments.
ROUND_FILES: dict[bool, dict[str, bytes]] = {}


def add_rounds(path: Path, *, federated: bool) -> None:
    """Complete all rounds of an experiment; of one of the same kind, they are copies."""
    if federated not in ROUND_FILES:
        for at in range(1, ROUNDS + 1):
            add_round(path, at, federated=federated)
        found = content(path).items()
        ROUND_FILES[federated] = {name: one for name, one in found if name.startswith("round_")}
    for name, one in ROUND_FILES[federated].items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(one)


def add_round(path: Path, at: int, *, federated: bool = True) -> None:
    """Complete a round of an experiment."""
    rows = [(at, "-", 0, 0, 0, 0, int(not federated), "0.1", "ok")]
    if federated:
        # One client has 40 clips, and 2 steps of 8 are 0.4 epochs; the other has 4, for 2 epochs.
        ann = (at, "ann", 1000, 500, 2, 0.4, 0, "0.1")
        bob = (at, "bob", 1000, 500, 2, 2, 0, "0.1")
        rows = [(*ann, "ok"), (*bob, "ok"), *rows]
    write_table(path / f"round_{at:04d}" / "ledger.tsv", LEDGER, rows)
    close_round(path, at)


def close_round(path: Path, at: int) -> None:
    """Mark a round as complete, with its present ledger."""
    save_state(path / f"round_{at + 1:04d}" / "global.safetensors", {})
    Experiment(path).round(at).close()


def write_table(path: Path, columns: tuple[str, ...], rows: list[tuple]) -> None:
    write_tsv(path, columns, [dict(zip(columns, row, strict=True)) for row in rows])


SMALL = {
    "dscnn": {"channels": 4, "blocks": 1},
    "mhattrnn": {"heads": 2, "units": 4, "filters": 2},
    "resnet": {"channels": 4, "layers": 4},
    "transformer": {"layers": 1, "width": 8, "feedforward": 8},
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """Pack the clips of two tasks."""
    dump = tmp_path_factory.mktemp("packed") / "dump"
    for task, classes in (("keywords", TWELVE), ("words", WORDS)):
        counts = [10] * 4 + [0] * (len(classes) - 4)
        few = [4] + [0] * (len(classes) - 1)
        pack(dump / task / "train", {"ann": counts, "bob": few}, classes)
        pack(dump / task / "test", {"eve": [1] * len(classes)}, classes)
    return dump


@pytest.fixture
def recipe(packed, tmp_path, monkeypatch):
    """Make a recipe's folder with the data of two tasks, and change to it."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(packed, "dump")
    return tmp_path


def report(*more: str, root: str = "exp", mini: bool = True):
    name = ["--section=mini", "--mini"] if mini else ["--section=real"]
    corpus = ["--corpus", "Speech Commands", "--release", "v2", "--date", "2024-02-03"]
    return script("report.py", root, "RESULTS.md", *name, *corpus, *more)


def rows_of(caption: str) -> list[list[str]]:
    """Return the cells of the table below a caption of the page, without blanks and bold."""
    page = Path("RESULTS.md").read_text()
    table = page[page.index(caption) :].split("\n\n")[1]
    lines = [line.strip("| ").replace("*", "") for line in table.splitlines()]
    return [re.split(r" *\| *", line) for line in (lines[0], *lines[2:])]


def row_of(caption: str, *begin: str) -> list[str]:
    (row,) = [row for row in rows_of(caption) if row[: len(begin)] == list(begin)]
    return row[len(begin) :]


def test_accuracy_is_the_mean_of_the_last_five_over_seeds(recipe):
    # The mean of the last five of 42, ..., 50 is 48.
    make_run(Path("exp"), "keywords/dscnn/fedavg", 50)
    make_run(Path("exp"), "keywords/dscnn/fedavg", 53, seed=1)
    make_run(Path("exp"), "words/resnet/fedavg", 60)
    make_run(Path("exp"), "keywords/dscnn/fedkws_ui", 52)
    out = report().ok().out
    spread = statistics.stdev([48, 51])
    where = "accuracy (%) of federated training"
    assert rows_of(where)[0] == ["Method", "keywords DSCNN", "words ResNet"]
    assert row_of(where, "FedAvg") == [f"49.50 ± {spread:.2f} (2)", "58.00 (1)"]
    assert row_of(where, "FedKWS-UI") == ["50.00 (1)", "-"]
    page = Path("RESULTS.md").read_text()
    # Each of two clients sends and receives 1,500 bytes in nine rounds. Without counts by speaker,
    # there are no intervals; the difference is of the seed that both have.
    head = ["Method", "Accuracy (%)", "to first row", "MB/client", "Computation"]
    rows = [
        ["FedAvg, keywords DSCNN", "49.5", "-", "0.0135", "100 %"],
        ["FedKWS-UI, keywords DSCNN", "50.0", "2.0", "0.0135", "100 %"],
        ["FedAvg, words ResNet", "58.0", "-", "0.0135", "100 %"],
    ]
    assert rows_of("Speech Commands v2 (mini): summary.") == [head, *rows]
    assert "Without errors by clip (fedtools clip-scores), there are no intervals." in page
    # It is the first table, and what is printed.
    assert page.index("| Accuracy (%) ") < page.index("| Figures ")
    said = out.splitlines()
    assert said[0] == "Speech Commands v2 (mini)" and "\033" not in out
    assert [re.split("  +", line) for line in said[2:]] == [head, *rows]
    assert "**50.00 (1)**" in page and "**58.00 (1)**" in page and "**49.50" not in page
    assert "Seed: 0, 1." in page and "Rounds: 9." in page and "Date: 2024-02-03." in page


def test_tables_are_of_the_configured_rounds_whatever_was_run_or_measured_besides(recipe):
    paths = [make_run(Path("exp"), "keywords/dscnn/fedavg", 50, seed=seed) for seed in (0, 1)]
    for path in paths:
        replaced(path / "config.yaml", "evaluate_every: 1", "evaluate_every: 4")
    # Rounds 4, 8 and 9 of 0, ..., 9.
    report().ok()
    assert row_of("accuracy (%) of federated", "FedAvg") == ["48.00 ± 0.00 (2)"]
    page = Path("RESULTS.md").read_text()
    with open(paths[0] / "evaluate_test.tsv", "a") as file:
        file.writelines(f"{at}\tall\t50\t1.0\t10\t90.0\n" for at in range(10, 17))
    for at in range(10, 17):
        add_round(paths[0], at)
    report().ok()
    assert Path("RESULTS.md").read_text() == page


def planted(random, seeds: int, gain: float) -> list[dict[str, list[int]]]:
    """Return errors of 20 speakers after five rounds, by seed; fewer by `gain` clips on average."""
    people = [(f"s{number:02d}", random.integers(5, 12)) for number in range(20)]
    return [
        {name: random.binomial(1, 0.5, 5) + base - random.binomial(2, gain / 2)
         for name, base in people}
        for _ in range(seeds)
    ]  # fmt: skip


def test_higher_accuracy_with_three_seeds_is_in_bold(recipe):
    for method, gain in (("fedavg", 0.0), ("fedkws_ui", 1.6), ("fedprox", 0.0)):
        random = np.random.default_rng([4, int(10 * gain)])
        for seed, errors in enumerate(planted(random, 3, gain)):
            speakers_of(make_run(Path("exp"), f"keywords/dscnn/{method}", seed=seed), errors, 1)
    where = "accuracy (%) of federated training"
    for reference, better in (("FedAvg", ["FedKWS-UI"]), ("FedKWS-UI", [])):
        report("--reference", reference).ok()
        page = Path("RESULTS.md").read_text()
        cells = {name: row_of(where, name)[1] for name in ("FedAvg", "FedKWS-UI", "FedProx")}
        assert [name for name, cell in cells.items() if f"**{cell.strip('*')}**" in page] == better


def test_differences_are_of_the_same_speakers_seeds_and_evaluations(recipe):
    """With one seed, the interval is that of a paired t-test over speakers."""
    random = np.random.default_rng(4)
    errors = {}
    for method, gain in (("fedavg", 0.0), ("fedkws_ui", 1.6), ("fedprox", 0.1)):
        path = make_run(Path("exp"), f"keywords/dscnn/{method}")
        (errors[method],) = planted(np.random.default_rng(4) if not gain else random, 1, gain)
        speakers_of(path, errors[method], 1)
    report("--reference", "FedAvg").ok()
    where = "accuracy (%) of federated training"
    assert rows_of(where)[0] == ["Method", "keywords DSCNN", "to FedAvg"]
    for method, name in (("fedkws_ui", "FedKWS-UI"), ("fedprox", "FedProx")):
        own, other = (
            np.array([np.mean(errors[one][who]) for who in errors[one]])
            for one in (method, "fedavg")
        )
        told = ttest_1samp(100 * (other - own) / 20, 0)
        low, high = told.confidence_interval(0.95)
        _, cell = row_of(where, name)
        assert cell == f"{100 * (other - own).mean() / 20:.1f} [{low:.1f}, {high:.1f}]"
        # With one seed, nobody knows what another would change.
        page = Path("RESULTS.md").read_text()
        assert f"**{cell}**" not in page
    # The same differences are in the summary, with a t interval of the accuracy over speakers.
    for name, method in (("FedAvg", "fedavg"), ("FedKWS-UI", "fedkws_ui"), ("FedProx", "fedprox")):
        rates = 100 - 5 * np.array([np.mean(one) for one in errors[method].values()])
        low, high = ttest_1samp(rates, 0).confidence_interval(0.95)
        assert row_of("summary.", name) == [
            f"{rates.mean():.1f} [{low:.1f}, {high:.1f}]",
            row_of(where, name)[1],
            "0.0135",
            "100 %",
        ]
    accuracy, cell = row_of(where, "FedAvg")
    assert cell == "-"
    mean = np.mean([np.mean(one) for one in errors["fedavg"].values()])
    assert accuracy == f"{100 * (1 - mean / 20):.2f} (1)"
    assert "over test speakers, not adjusted" in page
    assert re.search(r"Differences above about \d\.\d points can be distinguished", page)
    report("--reference", "FedSgd").fails(1, "no row 'FedSgd' to compare with", "'FedAvg'")


def test_differences_are_of_the_seeds_that_both_have(recipe):
    random = np.random.default_rng(0)
    errors = {}
    for method, seeds in (("fedavg", 3), ("fedavg.rounds=27", 2), ("alo.adversarial=0.0", 1)):
        value = method.partition(".")[2]
        more = {"adversarial": 0.0} if "adversarial" in value else {}
        errors[method] = planted(random, seeds, 1.0 if "rounds" in value else 0.0)
        for seed, own in enumerate(errors[method]):
            path = make_run(Path("exp"), f"keywords/dscnn/{method}", seed=seed, **more)
            if "rounds" in value:
                replaced(path / "config.yaml", f"rounds: {ROUNDS}\n", "rounds: 27\n")
                replaced(path / "config.yaml", "evaluate_every: 1", "evaluate_every: 3")
                moved(path)
            speakers_of(path, own, 3 if "rounds" in value else 1)
    report("--reference", "FedAvg", "--reference", "FedAvg, rounds = 27").ok()
    where = "ablations, accuracy"
    header = ["Method", "keywords DSCNN", "to FedAvg", "to FedAvg, rounds = 27"]
    assert rows_of(where)[0] == header
    row = row_of(where, "FedAvg, rounds = 27")
    mean = {
        (method, seed): np.mean([np.mean(one) for one in own.values()])
        for method, found in errors.items()
        for seed, own in enumerate(found)
    }
    gain = np.mean([mean["fedavg", seed] - mean["fedavg.rounds=27", seed] for seed in (0, 1)])
    assert row[1].startswith(f"{100 * gain / 20:.1f} [") and row[2] == "-"
    lost = mean["fedavg", 0] - mean["alo.adversarial=0.0", 0]
    assert row_of(where, "ALO, lambda = 0")[1].startswith(f"{100 * lost / 20:.1f} [")
    assert "over seeds and test speakers" in Path("RESULTS.md").read_text()


def moved(path: Path) -> None:
    """Rename nine evaluations to rounds 3, 6, ..., 27."""
    rows = read_tsv(path / "evaluate_test.tsv", None)
    for row in rows:
        row["round"] = str(3 * int(row["round"]))
    write_tsv(path / "evaluate_test.tsv", facts_of("kws", "").header, rows)
    for at in range(ROUNDS + 1, 28):
        add_round(path, at)


def speakers_of(path: Path, errors: dict[str, list[int]], step: int) -> None:
    """Write speaker counts after the last five of nine rounds `step` apart, and accuracies."""
    rounds = range(step * (ROUNDS - 4), step * ROUNDS + 1, step)
    rows = [
        (at, name, 20, wrong[at // step - 5]) for at in rounds for name, wrong in errors.items()
    ]
    write_table(path / "speakers_test.tsv", ("round", "speaker", "clips", "errors"), rows)
    # Twenty clips of each speaker in five evaluations, the first ones wrong.
    clips = [
        ("all", name, f"{name}-{clip:02d}", 5, sum(one > clip for one in wrong))
        for name, wrong in errors.items()
        for clip in range(20)
    ]
    write_table(path / "errors_test.tsv", ERRORS, clips)
    measured = read_tsv(path / "evaluate_test.tsv", None)
    for row in measured:
        if (at := int(row["round"])) in rounds:
            wrong = sum(one[3] for one in rows if one[0] == at)
            row["accuracy"] = f"{100 * (1 - wrong / 20 / len(errors)):.4f}"
    write_tsv(path / "evaluate_test.tsv", facts_of("kws", "").header, measured)


def test_counts_by_speaker_that_do_not_fit_are_refused(recipe):
    paths = [make_run(Path("exp"), f"keywords/dscnn/{one}") for one in ("fedavg", "alt")]
    for path in paths:
        speakers_of(path, planted(np.random.default_rng(0), 1, 0.0)[0], 1)
    table = paths[1] / "speakers_test.tsv"
    kept = table.read_text()
    for old, new, said in (
        ("\n9\ts00\t20\t", "\n9\ts00\t20\t1", "accuracy"),
        ("\n9\ts00", "\n4\ts00", "round 4 is not one of"),
        ("\ts00\t", "\tother\t", "test clips differ from those of"),
        ("\n9\ts00\t20", "\n9\ts00\tx", "speakers_test.tsv:82"),
    ):
        table.write_text(kept.replace(old, new))
        report("--reference", "FedAvg").fails(1, said)
    table.unlink()
    report("--reference", "FedAvg").fails(1, "no counts by speaker", "run fedtools clip-scores")
    report().ok()


def test_errors_by_clip_that_do_not_fit_are_refused(recipe):
    paths = [make_run(Path("exp"), f"keywords/dscnn/{one}") for one in ("fedavg", "alt")]
    for path in paths:
        speakers_of(path, planted(np.random.default_rng(0), 1, 0.0)[0], 1)
    table = paths[1] / "errors_test.tsv"
    kept = table.read_text()
    for old, new, said in (
        ("s00-00\t5\t5", "s00-00\t5\t4", "accuracy"),
        ("\ts00-00", "\tother", "test clips of ALT are not those of FedAvg"),
        ("s00-00\t5", "s00-00\tx", "errors_test.tsv:2"),
    ):
        assert old in kept
        table.write_text(kept.replace(old, new, 1))
        report().fails(1, said)


def test_a_page_is_made_again_from_the_errors_of_clips(recipe):
    random = np.random.default_rng(7)
    for method in ("fedavg", "alt"):
        for seed in (0, 1):
            path = make_run(Path("exp"), f"keywords/dscnn/{method}", seed=seed)
            speakers_of(path, planted(random, 1, float(method == "alt"))[0], 1)
    said = report("--reference", "FedAvg").ok().out
    page, record = Path("RESULTS.md").read_text(), Path("RESULTS-mini-errors.gz")
    shutil.rmtree("exp")
    Path("RESULTS.md").unlink()
    again = ("remake.py", record, "RESULTS.md")
    assert script(*again).ok().out == said
    assert Path("RESULTS.md").read_text() == page
    content = gzip.decompress(record.read_bytes())
    assert content.count(b"\nall\t") == 20 * 20
    Path("RESULTS.md").unlink()
    for old, new, told in (
        (b"\t5\t5\t", b"\t5\t6\t", "no errors of clips for each seed"),
        (b"\t5\t5\t", b"\t4\t4\t", "no errors of clips for each seed"),
        (b"s00-01", b"s00-00", "'s00-00' is duplicated"),
        (b'"name": "mini"', b'"name": "../x"', "names no section"),
        (b'"bytes": ', b'"bytes": -', "costs below 0"),
        (b"## Speech", b"<!-- fedtools:mini end -->", "is not the text of a page"),
        (b'"kws1 report 1"', b'"kws1 report 2"', "format: "),
    ):
        assert old in content
        record.write_bytes(gzip.compress(content.replace(old, new, 1)))
        script(*again).fails(1, str(record), told)
    record.write_bytes(gzip.compress(content)[:-9])
    script(*again).fails(1, "cut off")
    assert not Path("RESULTS.md").exists()


def test_the_page_of_the_first_run_is_made_again(recipe):
    """The committed file is read as it was written, and gives the committed section."""
    kws1 = ROOT / "egs" / "speechcommands" / "kws1"
    script("remake.py", kws1 / "RESULTS-first-first-errors.gz", "RESULTS-first.md").ok()
    section = Path("RESULTS-first.md").read_text().partition("<!-- ")[2]
    assert section and section in (kws1 / "RESULTS-first.md").read_text()


def make_server(clips: int, accuracy: float, named: int | None = None) -> Path:
    """Make an experiment of a server that trains alone."""
    train = f"server{clips}"
    if not Path("dump/keywords", train).exists():
        pack(Path("dump/keywords", train), {"sam": [clips, *[0] * (len(TWELVE) - 1)]}, TWELVE)
    place = f"keywords/dscnn/centralized.server_clips={named or clips}"
    return make_run(Path("exp"), place, accuracy, train=train)


def test_servers_that_train_alone_are_rows_of_their_own(recipe):
    make_run(Path("exp"), "keywords/dscnn/fedavg", 50)
    make_run(Path("exp"), "keywords/dscnn/centralized", 60)
    report().ok()
    before = Path("RESULTS-mini-accuracy.png").read_bytes()
    make_server(25, 45), make_server(7, 40)
    done = report().ok()
    names = [row[:2] for row in rows_of("accuracy (%) of federated training")]
    # The mean of the last five of accuracies that rise by one.
    assert names == [
        ["Method", "keywords DSCNN"],
        ["Server alone, 7 clips", "38.00 (1)"],
        ["Server alone, 25 clips", "43.00 (1)"],
        ["FedAvg", "48.00 (1)"],
    ]
    page, said = Path("RESULTS.md").read_text(), " ".join(done.out.split())
    assert "ablations" not in page
    # Nine rounds of 0.4 and 2 epochs by two clients are 10.8; nine epochs of 7 of 44 clips are 1.4.
    computed = {row[0]: row[-1] for row in rows_of(": summary.")}
    assert computed["Server alone, 7 clips"] == "13 %" and computed["FedAvg"] == "100 %"
    text = "FedAvg reaches 48.0 % with 2 clients, whose clips stay with them. For as much, the "
    text += "server would have had to label more than 25 clips itself (7 clips: 38.0 %, 25 clips: "
    assert text in page and text in said
    # Clients and clips are those of the federation.
    assert row_of("clients and clips", "keywords", "mini")[1:3] == ["2", "44"]
    assert row_of("(table 2)", "DSCNN", "keywords")[2] == "60.00 (1)"
    costs = row_of("communication and computation", "keywords", "DSCNN", "Server alone, 7 clips")
    assert costs[-3:] == ["9", "-", "-"]
    assert Path("RESULTS-mini-accuracy.png").read_bytes() != before


def test_servers_clips_are_counted(recipe):
    make_run(Path("exp"), "keywords/dscnn/fedavg", 50)
    make_server(7, 40, named=8)
    report().fails(1, "server_clips is 7, but the folder says 8")


def test_servers_share_the_test_clips(recipe):
    make_run(Path("exp"), "keywords/dscnn/fedavg", 50)
    path = make_server(7, 40) / "config.yaml"
    path.write_text(path.read_text().replace("dump/keywords/test", "dump/words/test"))
    refreeze(path.parent)
    report().fails(1, "its data differ from those of exp/keywords/dscnn/fedavg/seed0")


def test_experiments_that_are_not_finished_are_left_out_and_named(recipe):
    make_run(Path("exp"), "keywords/dscnn/fedavg", 50)
    make_run(Path("exp"), "keywords/dscnn/fedavg", 90, seed=1, evaluated=8)
    left = make_run(Path("exp"), "keywords/dscnn/fedopt", 90)
    (left / "evaluate_test.tsv").unlink()
    report().ok()
    assert [row[0] for row in rows_of("accuracy (%) of federated")] == ["Method", "FedAvg"]
    assert row_of("accuracy (%) of federated", "FedAvg") == ["48.00 (1)"]
    page = Path("RESULTS.md").read_text()
    assert "keywords/dscnn/fedavg/seed1 (evaluated up to round 8 of 9)" in page
    assert "keywords/dscnn/fedopt/seed0 (evaluated up to round 0 of 9)" in page
    Path("RESULTS.md").unlink()
    report(root="exp/keywords").fails(1, "exp/keywords: no complete experiment", "fedtools init")
    assert not Path("RESULTS.md").exists()


def test_clients_and_centralised_training_stand_beside_the_paper(recipe):
    make_run(Path("exp"), "keywords/dscnn/centralized", 90)
    make_run(Path("exp"), "keywords/dscnn/centralized", 92, seed=1)
    make_run(Path("exp"), "keywords/resnet/fedavg", 60)
    report(f"--published={PUBLISHED}").ok()
    clients = "clients and clips"
    assert row_of(clients, "keywords", "mini") == ["12", "2", "44", "22.0", "40", "12"]
    published = ["12", "2,234", "45.6k", "20.4", "141", "4.9k"]
    assert row_of(clients, "keywords", "published") == published
    centralized = "networks and centralised"
    # 164 + 8 in front, 36 + 16 + 16 in the block, 60 in the head are 300 parameters.
    spread = statistics.stdev([90, 92])
    ours = f"91.00 ± {spread:.2f} (2)"
    assert row_of(centralized, "DSCNN", "keywords") == ["0.3k", "169k", ours, "97.19"]
    (one,) = read_runs("exp").get("keywords", "dscnn", "centralized")[:1]
    assert one.parameters == 300
    assert row_of(centralized, "ResNet", "keywords")[1:] == ["238k", "-", "97.89"]
    assert rows_of("Li et al. 2022, section 5")[2][:4] == ["12", "Transformer", "-", "72.71"]
    Path("RESULTS.md").unlink()
    report().ok()
    assert "ublished" not in Path("RESULTS.md").read_text().replace("published ones", "").replace(
        ", published", ""
    )


def test_false_accepts_and_rejects_stand_beside_the_paper(recipe):
    make_run(Path("exp"), "keywords/dscnn/fedopt", detection=(1, 6))
    make_run(Path("exp"), "keywords/dscnn/fedopt", seed=1, detection=(2, 3))
    make_run(Path("exp"), "keywords/resnet/fedopt", detection=(0, 3))
    make_run(Path("exp"), "keywords/dscnn/alt")
    report(f"--published={PUBLISHED}").ok()
    where = "false accepts and false rejects"
    ours = ["3.00 ± 1.41 (2)", "9.00 ± 4.24 (2)", "7.50 ± 3.54 (2)", "15.00 ± 7.07 (2)"]
    assert row_of(where, "keywords", "DSCNN", "FedOpt") == [*ours, "0.32", "3.19"]
    assert row_of(where, "keywords", "ResNet", "FedOpt")[4:] == ["-", "-"]
    assert "ALT" not in {row[2] for row in rows_of(where)}
    page = Path("RESULTS.md").read_text()
    assert "Negative classes are `_silence_` and `_unknown_`" in page
    make_run(Path("other"), "keywords/dscnn/fedavg")
    report(root="other").ok()
    assert "false accepts" not in Path("RESULTS.md").read_text()


def heard(path: Path, name: str, hours: float, rejects: list[float]) -> None:
    """Write an experiment's detected words in running speech."""
    row = (ROUNDS, 40, 3, f"{hours:.3f}", *rejects)
    columns = ("round", "utterances", "left_out", "hours")
    columns += tuple(f"rejects_at_{rate}" for rate in (1, 10, 100))
    write_table(path / f"false_alarms_{name}.tsv", columns, [row])
    points = [(3.0, 80.0, 0.0), (2.0, 60.0, 5.0), (-1.0, 10.0, 50.0)]
    write_table(
        path / f"curve_{name}.tsv", ("threshold", "false_rejects", "accepts_an_hour"), points
    )


def test_false_rejects_at_given_false_accepts(recipe):
    """The threshold is the lowest that gives no more; values are means over the seeds' own."""
    for seed, rejects in enumerate(([0.9, 0.4, 0.2, 0.0], [0.7, 0.3, 0.1, 0.0])):
        path = make_run(Path("exp"), "keywords/dscnn/fedavg", seed=seed)
        accepts = [0.0, 0.009, 0.04, 1.0]
        points = [(place, a, b) for place, (a, b) in enumerate(zip(rejects, accepts, strict=True))]
        rows = [(at, f"{a:.6f}", f"{b:.6f}") for at, a, b in reversed(points)]
        write_table(path / "det_test.tsv", ("threshold", "false_rejects", "false_accepts"), rows)
        heard(path, "an4", 0.8, [90.0 + seed, 50.0, 10.0])
    path = make_run(Path("exp"), "keywords/resnet/alo.adversarial=0.0", adversarial=0.0)
    heard(path, "an4", 0.8, [80.0, 40.0, 5.0])
    make_run(Path("exp"), "keywords/dscnn/fedprox")
    report().ok()
    where = "false rejects (%) at given false accepts"
    assert rows_of(where)[0][3:] == [
        *(f"FR at FA {share} %" for share in ("0.1", "1", "5")),
        *(f"an4 (0.8 h): FR at FA {rate} an hour" for rate in (1, 10, 100)),
    ]
    found = row_of(where, "keywords", "DSCNN", "FedAvg")
    means = ((80, 90), (35, 40), (15, 20))
    assert found[:3] == [
        f"{mean:.2f} ± {statistics.stdev([first, 2 * mean - first]):.2f} (2)"
        for mean, first in means
    ]
    assert found[3:] == ["90.50 ± 0.71 (2)", "50.00 ± 0.00 (2)", "10.00 ± 0.00 (2)"]
    other = row_of(where, "keywords", "ResNet", "ALO, lambda = 0")
    assert other == ["-", "-", "-", "80.00 (1)", "40.00 (1)", "5.00 (1)"]
    assert len(rows_of(where)) == 3
    check_png(Path("RESULTS-mini-detection.png"))
    assert "RESULTS-mini-detection.png" in Path("RESULTS.md").read_text()
    heard(path, "an4", 0.9, [80.0, 40.0, 5.0])
    report().fails(1, "0.9 hours of an4, but other runs have 0.8")
    replaced(path / "false_alarms_an4.tsv", f"{ROUNDS}\t", "4\t")
    report().fails(1, "figures of round 4, not of round 9", "run fedtools false-alarms again")


def test_the_legend_of_a_single_panel_fits(recipe):
    for method in ("fedavg", "fedkws_ui", "alt", "centralized"):
        path = make_run(Path("exp"), f"keywords/dscnn/{method}")
        rows = [(1, 0.9, 0.0), (0, 0.4, 0.1), (-1, 0.0, 1.0)]
        write_table(path / "det_test.tsv", ("threshold", "false_rejects", "false_accepts"), rows)
    report().ok()
    check_png(Path("RESULTS-mini-detection.png"))


def add_plan(path: Path, **changed: object) -> None:
    plan = {
        "clip": 0.5, "noise": 3.25, "delta": 1e-5, "epsilon": 7.999, "rounds": ROUNDS,
        "clients": 1398, "share": 1.0, "cohorts": 0, "coefficients": [1024],
        "simulated_users": 1.0, "accountant": "closed form", "listed": False, **changed,
    }  # fmt: skip
    (path / "privacy.yaml").write_text(yaml.safe_dump(plan))


def test_rows_of_user_level_privacy_have_their_epsilon(recipe):
    """By network, all clients before cohorts, real before simulated users, epsilon falling."""
    place, where = "keywords/dscnn/dpfedavg", "user-level privacy, task keywords"
    many = {"cohorts": 3, "coefficients": [1000, 500, 250]}
    thin = {"simulated_users": 10.0, "epsilon": 300.0}
    for seed, accuracy in ((0, 60), (1, 63)):
        add_plan(make_run(Path("exp"), f"{place}.epsilon=8", accuracy, seed=seed, epsilon=8))
    report().ok()
    page = Path("RESULTS.md").read_text()
    assert where not in page and not Path("RESULTS-mini-privacy-keywords.png").exists()
    add_plan(make_run(Path("exp"), f"{place}.epsilon=2", 50, epsilon=2), epsilon=1.999, noise=12)
    add_plan(make_run(Path("exp"), f"{place}.noise=0", 70, noise=0), epsilon=None, noise=0)
    add_plan(
        make_run(Path("exp"), f"{place}.epsilon=8,cohorts=3", 40, epsilon=8, cohorts=3), **many
    )
    more = f"{place}.epsilon=8,simulated_users=10"
    add_plan(make_run(Path("exp"), more, 65, epsilon=8, simulated_users=10), **thin)
    make_run(Path("exp"), "keywords/dscnn/fedavg", 55)
    report().ok()
    begin, spread = ["DSCNN", "all", "1,398", "sgd 1", "9", "0.5"], statistics.stdev([58, 61])
    assert rows_of(where)[1:] == [
        [*begin, "0", "-", "-", "68.00 (1)"],
        [*begin, "3.25", "8", "8", f"59.50 ± {spread:.2f} (2)"],
        [*begin, "12", "2", "2", "48.00 (1)"],
        ["DSCNN", "all", "13,980 simulated", *begin[3:], "3.25", "8", "300", "63.00 (1)"],
        ["DSCNN", "one of 3 cohorts, noise of 3 bands", *begin[2:], "3.25", "8", "8", "38.00 (1)"],
    ]
    assert Path("RESULTS.md").read_text().count("RESULTS-mini-privacy-keywords.png") == 1


def test_the_picture_of_epsilon_shows_rows_and_levels(recipe, monkeypatch):
    place, drawn = "keywords/dscnn/dpfedavg", {}
    for epsilon, accuracy in ((8, 60), (2, 50), (0.25, 20)):
        run = make_run(Path("exp"), f"{place}.epsilon={epsilon}", accuracy, epsilon=epsilon)
        add_plan(run, epsilon=float(epsilon))
    add_plan(make_run(Path("exp"), f"{place}.noise=0", 70, noise=0), epsilon=None, noise=0)
    few = {"data": Path("dump/keywords"), "train": "server4"}
    pack(Path("dump/keywords/server4"), {"zoe": [4] + [0] * 11}, TWELVE)
    make_run(Path("exp"), "keywords/dscnn/centralized.server_clips=4", 33, **few)

    points, level = Axes.errorbar, Axes.axhline

    def keep(axes, x, y, *more, label, **style):
        drawn[label] = list(zip(x, y, strict=True))
        return points(axes, x, y, *more, label=label, **style)

    def keep_level(axes, y, label, **style):
        drawn[label] = y
        return level(axes, y, label=label, **style)

    monkeypatch.setattr(Axes, "errorbar", keep)
    monkeypatch.setattr(Axes, "axhline", keep_level)
    Accuracies(read_runs("exp"), "keywords").draw(Path("privacy.png"), "title")
    # Evaluations rise by 1 a round, and the last five are meant.
    assert drawn == {
        "all": [(8, 58), (2, 48), (0.25, 18)], "no noise": 68, "Server alone, 4 clips": 31
    }  # fmt: skip


def test_private_models_stand_beside_the_shared_one(recipe):
    columns = ("round", "clients", "private_own", "private_test", "shared_own", "shared_test")
    place = "keywords/dscnn/alo.private_steps=10,adversarial=0.1"
    for seed in (0, 1):
        path = make_run(Path("exp"), place, seed=seed, private_steps=10, adversarial=0.1)
        write_table(path / "private.tsv", columns, [(ROUNDS, 2, 99 + seed, 30, 60, 50)])
    report().ok()
    where = "private models, accuracy"
    found = row_of(where, "keywords", "DSCNN", "ALO, private_steps = 10, lambda = 0.1")
    assert found == ["99.50 ± 0.71 (2)"] + [f"{value}.00 ± 0.00 (2)" for value in (30, 60, 50)]
    assert row_of("ablations, accuracy", "ALO, private_steps = 10, lambda = 0.1")
    other = path.parents[1] / "alo.private_steps=11,adversarial=0.1" / "seed1"
    shutil.copytree(path, other)
    report().fails(1, "private_steps is 10, but the folder says 11")


def test_ablations_are_sorted_and_hold_the_method_itself_with_their_seeds(recipe):
    make_run(Path("exp"), "keywords/dscnn/fedavg", 40)
    make_run(Path("exp"), "keywords/dscnn/alt", 41)
    make_run(Path("exp"), "keywords/dscnn/fedkws_ui", 60)
    make_run(Path("exp"), "keywords/resnet/fedkws_ui", 50)
    for value, accuracy in ((0.5, 30), (0.0, 55)):
        name = f"keywords/dscnn/fedkws_ui.smoothing={value}"
        make_run(Path("exp"), name, accuracy, smoothing=value)
    make_run(Path("exp"), "keywords/dscnn/fedkws_ui.adversarial=1e-05", 61, adversarial=1e-5)
    make_run(Path("exp"), "keywords/resnet/fedkws_ui.private_steps=3", 51, private_steps=3)
    make_run(Path("exp"), "keywords/dscnn/alt", 43, seed=1)
    make_run(Path("exp"), "keywords/dscnn/fedkws_ui", 90, seed=1)
    report().ok()
    assert rows_of("ablations, accuracy (%)")[1:] == [
        ["FedAvg", "38.00 (1)", "-"],
        ["ALT", "40.00 ± 1.41 (2)", "-"],
        ["FedKWS-UI", "73.00 ± 21.21 (2)", "48.00 (1)"],
        ["FedKWS-UI, mu = 0", "53.00 (1)", "-"],
        ["FedKWS-UI, mu = 0.2", "58.00 (1)", "-"],
        ["FedKWS-UI, mu = 0.5", "28.00 (1)", "-"],
        ["FedKWS-UI, lambda = 1e-05", "59.00 (1)", "-"],
        ["FedKWS-UI, lambda = 0.001", "58.00 (1)", "-"],
        ["FedKWS-UI, private_steps = 0", "-", "48.00 (1)"],
        ["FedKWS-UI, private_steps = 3", "-", "49.00 (1)"],
    ]
    # Changed options are not listed among the methods.
    assert len(rows_of("accuracy (%) of federated")) == 4


def test_costs_are_those_of_the_ledgers(recipe):
    path = make_run(Path("exp"), "keywords/dscnn/fedavg")
    make_run(Path("exp"), "keywords/dscnn/centralized")
    report().ok()
    where = "communication and computation"
    # Nine rounds of two clients and 1500 bytes; of 0.4 and 2 epochs, which are 2 steps each.
    # In batches of 8 clips, or of the 4 that one client has.
    fedavg = ["2", "12", "-", "-", "10.8", "-", "-", "27.00 kB"]
    assert row_of(where, "keywords", "DSCNN", "FedAvg") == fedavg
    centralized = ["-", "-", "-", "-", "-", "9", "-", "-"]
    assert row_of(where, "keywords", "DSCNN", "Centralized") == centralized
    refused = "2\tann\t1000\t0\t0\t0\t0\t0.1\trefused: a NaN"
    old = "2\tann\t1000\t500\t2\t0.4\t0\t0.1\tok"
    replaced(path / "round_0002" / "ledger.tsv", old, refused)
    report().ok()
    # 17 updates remain, 8 of them of 16 clips and 9 of 8.
    fedavg = ["2", "11.76", "-", "-", "10.6", "-", "1", "26.50 kB"]
    assert row_of(where, "keywords", "DSCNN", "FedAvg") == fedavg


def test_private_models_cost_steps_too(recipe):
    make_run(Path("exp"), "keywords/dscnn/alo")
    make_run(Path("exp"), "keywords/dscnn/alt")
    make_run(Path("exp"), "words/dscnn/alo", private_steps=7)
    report().ok()
    where = "communication and computation"
    assert row_of(where, "keywords", "DSCNN", "ALO")[:4] == ["2", "12", "2", "12"]
    assert row_of(where, "keywords", "DSCNN", "ALT")[:4] == ["2", "12", "-", "-"]
    assert row_of(where, "words", "DSCNN", "ALO")[:4] == ["2", "12", "7", "42"]


def test_methods_with_a_changed_option_have_costs_of_their_own(recipe):
    make_run(Path("exp"), "keywords/dscnn/alt", 60)
    path = make_run(Path("exp"), "keywords/dscnn/alt.conserve=clips", 55, conserve="clips")
    for at in range(1, ROUNDS + 1):
        table = path / f"round_{at:04d}" / "ledger.tsv"
        replaced(table, "bob\t1000\t500\t2\t2\t", "bob\t1000\t500\t4\t4\t")
    report().ok()
    where = "communication and computation"
    assert row_of(where, "keywords", "DSCNN", "ALT")[:2] == ["2", "12"]
    # Four steps by the client with 4 clips.
    assert row_of(where, "keywords", "DSCNN", "ALT, conserve = clips")[:2] == ["3", "16"]
    where = "ablations, accuracy (%)"
    assert row_of(where, "ALT, conserve = clips") == ["53.00 (1)"]
    assert row_of(where, "ALT, conserve = steps") == row_of(where, "ALT") == ["58.00 (1)"]


def test_a_client_that_was_never_sampled_counts_in_the_mean(recipe):
    path = make_run(Path("exp"), "keywords/dscnn/fedavg")
    for at in range(1, ROUNDS + 1):
        table = path / f"round_{at:04d}" / "ledger.tsv"
        rows = [line for line in table.read_text().splitlines() if "bob" not in line]
        table.write_text("\n".join([*rows, ""]))
        close_round(path, at)
    report().ok()
    assert row_of("communication and computation", "keywords", "DSCNN", "FedAvg")[4] == "1.8"


def test_settings_tell_what_the_networks_were_trained_with(recipe):
    make_run(Path("exp"), "keywords/dscnn/fedavg")
    make_run(Path("exp"), "keywords/dscnn/alt", local_steps=3)
    make_run(Path("exp"), "keywords/dscnn/centralized")
    report().ok()
    both = ["sgd", "0.05", "0", "blocks=1 channels=4"]
    assert row_of("settings", "DSCNN", "federated") == ["9", "50 %", "2, 3", "8", *both]
    assert row_of("settings", "DSCNN", "centralised") == ["9", "-", "-", "8", *both]
    path = make_run(Path("exp"), "keywords/resnet/fedavg")
    replaced(path / "config.yaml", "optim: sgd", "optim: adamw")
    report("--config", "full.yaml").ok()
    # torch's defaults.
    assert row_of("settings", "ResNet", "federated")[6] == "0.01"
    captions = re.findall(r"^(?:\*\*|## )(.*)", Path("RESULTS.md").read_text(), re.MULTILINE)
    assert all("(mini), full.yaml" in line for line in captions if "Published" not in line)


def test_options_that_figure_3_does_not_have_are_in_its_table(recipe):
    make_run(Path("exp"), "keywords/dscnn/fedkws_ui")
    make_run(Path("exp"), "keywords/dscnn/fedkws_ui.private_steps=3", private_steps=3)
    report().ok()
    assert row_of("ablations", "FedKWS-UI, private_steps = 3") == ["48.00 (1)"]
    assert "ablation.png" not in Path("RESULTS.md").read_text()


def test_seeds_of_other_options_are_no_seeds_of_the_same(recipe):
    make_run(Path("exp"), "keywords/dscnn/fedavg", seed=0)
    path = make_run(Path("exp"), "keywords/dscnn/fedavg", seed=1)
    report().ok()
    replaced(path / "config.yaml", "batch_size: 8", "batch_size: 9")
    other = "not another seed of exp/keywords/dscnn/fedavg/seed0: training.batch_size: 8 -> 9"
    report().fails(1, f"seed1/config.yaml: {other}")


def test_what_was_begun_with_other_clips_is_not_reported(recipe):
    make_run(Path("exp"), "keywords/dscnn/fedavg")
    pack(Path("dump/keywords/test"), {"ann": [1] * 4, "eve": [1] * 4}, CLASSES)
    make_run(Path("exp"), "keywords/dscnn/alt")
    said = "dump/keywords/test: not the sha256sums that exp/keywords/dscnn/fedavg/seed0 began with"
    report().fails(1, said)
    assert not Path("RESULTS.md").exists()


def test_test_clips_in_training_are_said_in_every_caption(recipe):
    # Ann's clips include those of the training set that have the same numbers.
    pack(Path("dump/keywords/test"), {"ann": [1] * 4, "eve": [1] * 4}, CLASSES)
    make_run(Path("exp"), "keywords/dscnn/fedavg", detection=(1, 1))
    make_run(Path("exp"), "keywords/dscnn/alt")
    report().ok()
    captions = re.findall(r"^(?:## .*|\*\*.*|!\[.*)$", Path("RESULTS.md").read_text(), re.M)
    assert len(captions) > 8
    assert all("[4 of 8 test clips are in training]" in text for text in captions)


def replaced(path: Path, old: str, new: str) -> None:
    """Replace a text that exists, and update the checksums."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    if path.name == "ledger.tsv":
        close_round(path.parent.parent, int(path.parent.name[-4:]))
    if path.name == "config.yaml":
        refreeze(path.parent)


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("config.yaml", "method: fedavg", "method: fedopt", "config.yaml: method is fedopt"),
        (
            "config.yaml",
            "network: dscnn",
            "network: resnet",
            "network is resnet, but the folder says",
        ),
        ("config.yaml", "seed: 0", "seed: 7", "seed is 7, but the folder says 0"),
        ("config.yaml", "seed: 0", "sed: 0", "unknown option 'sed', did you mean 'seed'"),
        ("config.yaml", "task: kws", "task: asr", "not a keyword network and method"),
        ("config.yaml", "dump/keywords/train", "dump/words/train", "data differ from those of"),
        ("evaluate_test.tsv", "41.0000", "x", "evaluate_test.tsv:2: accuracy is 'x'"),
        ("evaluate_test.tsv", "clips", "words", "evaluate_test.tsv:1: the header"),
        ("round_0001/ledger.tsv", "bob", "eve", "'eve' is not in the training data"),
        ("round_0003/ledger.tsv", "1000", "1 kB", "round_0003/ledger.tsv:2: bytes_down is '1 kB'"),
        (
            "detection_test.tsv",
            "9\t50",
            "8\t50",
            "detection_test.tsv:2: figures of round 8, not of round 9",
        ),
        ("detection_test.tsv", "fa\t", "fo\t", "detection_test.tsv:1: the header"),
    ],
)
def test_damaged_experiments_are_refused(recipe, file, old, new, said):
    make_run(Path("exp"), "keywords/dscnn/alt")
    path = make_run(Path("exp"), "keywords/dscnn/fedavg", detection=(1, 1))
    replaced(path / file, old, new)
    report().fails(1, said)
    assert not list(recipe.glob("RESULTS*"))


def test_folders_that_name_what_is_not_so_are_refused(recipe):
    make_run(Path("a"), "keywords/dscnn/fedkws_ui.smoothing=0.3", smoothing=0.1)
    report(root="a").fails(1, "smoothing is 0.1, but the folder says 0.3")
    make_run(Path("b"), "keywords/dscnn/fedkws_ui.smooth=0.3")
    report(root="b").fails(1, "'smooth', did you mean 'smoothing'?")
    make_run(Path("c"), "keywords/dscnn/fedkws_ui.smoothing=0.3", smoothing=0.3)
    make_run(Path("c"), "keywords/dscnn/fedkws_ui.smoothing=0.30", smoothing=0.3)
    report(root="c").fails(1, "seed 0 of this setting appears twice")


def test_mini_is_said_in_every_caption_of_a_mini_corpus_only(recipe):
    make_run(Path("exp"), "keywords/dscnn/fedavg", detection=(1, 1))
    make_run(Path("exp"), "keywords/dscnn/alt")
    make_run(Path("exp"), "keywords/dscnn/fedkws_ui.smoothing=0.3", smoothing=0.3)
    for section in ("mini", "real"):
        Path(f"RESULTS-{section}-clients-keywords.png").write_bytes(b"")
        Path(f"RESULTS-{section}-clients-none.png").write_bytes(b"")
    for mini in (True, False):
        report(f"--published={PUBLISHED}", mini=mini).ok()
        page = Path("RESULTS.md").read_text()
        Path("RESULTS.md").unlink()
        captions = re.findall(r"^(?:## .*|\*\*.*|!\[.*)$", page, re.M)
        assert "![Clients of task keywords (figure 1), Speech Commands v2" in captions[-1]
        published = [text for text in captions if text.startswith("**Published, not measured")]
        assert len(published) == 1 and "mini" not in published[0]
        others = [text for text in captions if text not in published]
        assert len(others) == 13
        assert ["mini" in text for text in others] == [mini] * 13


def test_pictures_are_found_whatever_the_page_is_called(recipe):
    make_run(Path("exp"), "keywords/dscnn/fedavg")
    named = ["--section=s", "--corpus=c", "--release=r"]
    script("report.py", "exp", "my results.md", *named).ok()
    links = re.findall(r"!\[.*\]\((.*)\)", Path("my results.md").read_text())
    assert links == ["my%20results-s-accuracy.png"]
    assert Path("my results-s-accuracy.png").exists()


def test_other_sections_stay_and_damaged_markers_are_refused(recipe):
    make_run(Path("exp"), "keywords/dscnn/fedavg")
    Path("RESULTS.md").write_text("# By hand\n")
    report().ok()
    report(mini=False).ok()
    page = Path("RESULTS.md").read_text()
    report(mini=False).ok()
    assert Path("RESULTS.md").read_text() == page
    assert page.startswith("# By hand\n\n<!-- fedtools:mini begin -->")
    Path("RESULTS.md").write_text(page.replace("<!-- fedtools:mini end -->", ""))
    for picture in recipe.glob("*.png"):
        picture.unlink()
    report().fails(1, "'mini' are damaged")
    assert not list(recipe.glob("*.png"))


def check_png(path: Path) -> None:
    data = path.read_bytes()
    assert len(data) < 150_000
    assert not {b"tEXt", b"tIME", b"zTXt", b"iTXt"} & set(png_chunks(data))
    assert has_blank_edges(path), f"{path} is cut off"


PICTURES = [Path(f"RESULTS-mini-{name}.png") for name in ("accuracy", "ablation")]


def test_pictures_of_everything_are_small(recipe):
    names = "fedavg fedprox fedmmd fedopt fedkws_ui alo alt".split()
    for task in ("keywords", "words"):
        for network in SMALL:
            for index, method in enumerate(names):
                make_run(Path("exp"), f"{task}/{network}/{method}", 50 + 3 * index)
    make_run(Path("exp"), "keywords/dscnn/fedavg", 54, seed=1)
    make_run(Path("exp"), "keywords/dscnn/fedkws_ui.smoothing=0.3", smoothing=0.3)
    report().ok()
    for path in PICTURES:
        check_png(path)
        assert f"]({path})" in Path("RESULTS.md").read_text()


def test_pictures_show_what_was_measured(recipe):
    path = make_run(Path("exp"), "keywords/dscnn/fedavg")
    make_run(Path("exp"), "keywords/dscnn/alt")
    drawn = []
    for _ in range(2):
        report().ok()
        drawn.append([path.read_bytes() for path in PICTURES])
    assert drawn[0] == drawn[1]
    replaced(path / "evaluate_test.tsv", "48.0000", "60.0000")
    report().ok()
    for path, old in zip(PICTURES, drawn[0], strict=True):
        assert path.read_bytes() != old


# --- figures 1 and 4, from packed clips


def test_clients_are_drawn_with_what_adaptive_local_training_says(recipe):
    train = pack(Path("train"), {"ann": [4] * 4, "bob": [8, 0, 0, 0], "cat": [4, 4, 0, 0]})
    clips = Clips.read(train)
    facts = client_facts(clips, FedKwsUi(), 32)
    ann, bob, cat = facts
    assert (ann.clips, ann.entropy, ann.utility) == (16, pytest.approx(1), pytest.approx(1))
    assert (bob.clips, bob.entropy, bob.utility) == (8, 0, 0)
    # Half of the largest client's clips, and one bit of two.
    assert (cat.clips, cat.entropy, cat.utility) == (8, pytest.approx(0.5), pytest.approx(0.5))
    assert [client.ratio for client in facts] == pytest.approx([2, 0, 1])
    # An epoch of 16, 8 and 8 clips: batches of 4 divide the same work differently.
    facts = client_facts(clips, FedKwsUi(local_steps=0), 4)
    assert [client.ratio for client in facts] == pytest.approx([8 / 5, 0, 4 / 5])
    Path("own.yaml").write_text("method_conf: {base_ratio: 9.0}\n")
    for name, more in (("a", []), ("c", ["--config", "own.yaml"])):
        script("plot_clients.py", train, f"{name}.png", *more).ok()
        check_png(Path(f"{name}.png"))
    assert Path("a.png").read_bytes() != Path("c.png").read_bytes()
    # Options for tasks of four classes, and for other tasks, which give the same bytes again.
    for classes, same in ((4, "c"), (5, "a")):
        path = f"{classes}.yaml"
        section = f"tasks: {{'{classes}': {{fedkws_ui: {{method_conf: {{base_ratio: 9.0}}}}}}}}\n"
        Path(path).write_text(section)
        script("plot_clients.py", train, "d.png", "--config", path).ok()
        assert Path("d.png").read_bytes() == Path(f"{same}.png").read_bytes()
    Path("d.png").unlink()
    Path("own.yaml").write_text("method_conf: {ratio: 9.0}\n")
    own = "--config", "own.yaml"
    script("plot_clients.py", train, "d.png", *own).fails(1, "own.yaml:1: ", "'ratio'")
    one = pack(Path("one"), {"ann": [4, 0, 0, 0], "bob": [0, 3, 0, 0]})
    script("plot_clients.py", one, "d.png").fails(1, "one: no client has clips of two labels")
    script("plot_clients.py", "none", "d.png").fails(1, "none/clips.tsv: no packed clips")
    script("plot_clients.py", train, "d.jpg").fails(2)
    assert not Path("d.png").exists()


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """Train a centralised experiment of two rounds over three clients, beside its data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("begun"))
        pack(Path("train"), {"ann": [6] * 4, "bob": [20, 1, 0, 0], "cat": [1, 1, 1, 1]})
        pack(Path("test"), {"eve": [6] * 4})
        training = {"optim": "sgd", "optim_conf": {"lr": 0.1, "momentum": 0.9}, "batch_size": 8}
        config_file(Path("config.yaml"), training=training, method_conf={})
        data = ("--data", "train=train", "--data", "test=test")
        options = ("--config", "config.yaml", "--method", "centralized")
        inside("init", "central", *options, *data).ok()
        inside("rounds", "central", "--to", "2").ok()
        return Path.cwd()


@pytest.fixture
def centralized(begun, tmp_path, monkeypatch) -> Path:
    """Return a copy of the experiment, in the current folder."""
    shutil.copytree(begun, tmp_path / "of two rounds")
    monkeypatch.chdir(tmp_path / "of two rounds")
    return Path("central")


def test_a_landscape_has_the_models_at_its_corners(cli, centralized):
    before = sorted(centralized.rglob("*"))
    cli("evaluate", centralized, "--split", "test").ok()
    whole = float(read_tsv(centralized / "evaluate_test.tsv", None)[-1]["accuracy"])
    options = ("--points", 13, "--epochs", 4)
    out = script("landscape.py", centralized, "a.png", *options).ok().out
    models = dict(line.rsplit(maxsplit=1) for line in out.splitlines()[1:])
    assert float(models["theta_0"]) == pytest.approx(whole, abs=0.01)
    grid = {
        (row["panel"], row["gamma_1"], row["gamma_2"]): float(row["accuracy"])
        for row in read_tsv("a.tsv", None)
    }
    assert len(grid) == 2 * 13 * 13
    one, zero = "1.0000", "0.0000"
    for panel, at_one in (("overfitted", "theta_1"), ("alo", "theta_1 by ALO")):
        corners = (zero, zero, "theta_0"), (one, zero, at_one), (zero, one, "theta_2")
        for g1, g2, name in corners:
            assert grid[panel, g1, g2] == pytest.approx(float(models[name]), abs=0.01)
    # If gamma_1 is 0, the client that trained theta_1 does not matter.
    for (panel, g1, g2), accuracy in grid.items():
        if (panel, g1) == ("overfitted", zero):
            assert grid["alo", g1, g2] == accuracy
    check_png(Path("a.png"))
    for name in "bc":
        script("landscape.py", centralized, f"{name}.png", "--points", 2, "--epochs", 4).ok()
    for kind in ("tsv", "png"):
        assert Path(f"b.{kind}").read_bytes() == Path(f"c.{kind}").read_bytes()
    new = {path for path in set(centralized.rglob("*")) - set(before) if path.is_file()}
    aside = {"tensorboard", ".locks"}
    assert {path.name for path in new if not aside & set(path.parts)} == {"evaluate_test.tsv"}


def test_a_landscape_is_between_the_least_and_the_most_useful_client(centralized):
    federation = Federation(centralized)
    names = [client.name for client in choose_clients(federation, 20, Alo())]
    assert names == ["bob", "ann"]
    assert [client.name for client in choose_clients(federation, 1, Alo())] == ["bob", "ann"]
    script("landscape.py", centralized, "a.png", "--min-clips", 22).fails(
        1, "1 of 3 clients have at least 22 clips"
    )
    script("landscape.py", centralized, "a.png", "--points", 1).fails(2, "--points")
    pack(Path("train"), {"ann": [6] * 4})
    said = "train: not the sha256sums that central began with"
    script("landscape.py", centralized, "a.png").fails(1, said)
    assert not Path("a.tsv").exists()


def test_alo_works_against_the_very_model_of_the_landscape(tmp_path, centralized):
    federation = Federation(centralized)
    federation.load_result(None, 2)
    bob, _ = choose_clients(federation, 20, Alo())
    first = train_on(federation, bob, 4, tmp_path / "a", None)
    against = train_on(federation, bob, 4, tmp_path / "b", Alo())
    private = load_state(tmp_path / "b" / "round_0003" / "private.safetensors")
    assert private.keys() == first.keys() == against.keys()
    for name, value in private.items():
        assert np.array_equal(value, first[name].numpy())
    assert any(not torch.equal(first[name], against[name]) for name in first)
    assert not (tmp_path / "a").exists()


def test_both_panels_of_a_landscape_are_of_the_right_client_and_model(tmp_path, centralized):
    """A corner is the accuracy of a model trained here, by its panel's loss, on these clips."""
    federation = Federation(centralized)
    options = argparse.Namespace(
        min_clips=20, epochs=4, points=13, split="test", clips=1000, experiment=centralized
    )
    found = landscape(federation, Alo(), options)
    assert (found.inferior.name, found.qualified.name) == ("bob", "ann")
    data = federation.task.clips.features("train").clips
    starts, steps = load_state(centralized / "round_0003/global.safetensors"), {}
    # Bob has 21 clips and Ann 24, in batches of eight: four epochs take this many steps.
    trained = {}
    for name, against in (("bob", None), ("ann", None), ("bob", "bob")):
        steps[name] = math.ceil(4 * {"bob": 21, "ann": 24}[name] / 8)
        network = federation.task.models.build()
        load_model(tensors_of(network), starts)
        private = trained.get((against, None))
        key = (federation.experiment.seed, 3, "train" if against else "private")
        batches = ClipBatches(
            federation.task.clips.features("train"),
            [name],
            [data.rows(name)],
            [steps[name]],
            federation.task.training,
            key,
        )
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        network.train()
        for (batch,) in batches.stream(0):
            log_probs = network(batch.mfcc)[0].log_softmax(-1)
            labels = batch.labels[0]
            loss = torch.nn.functional.nll_loss(log_probs, labels)
            if private is not None:
                loss = 0.8 * loss - 0.2 * log_probs.mean()
                with torch.no_grad():
                    theirs = probabilities(federation, private, batch.mfcc)
                # Negative distillation: away from what the overfitted model predicts.
                loss = loss + 0.001 * (theirs * log_probs).sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state = tensors_of(network)
        trained[name, against] = {one: value.detach().clone() for one, value in state.items()}
    accuracies = {key: accuracy_of(federation, state) for key, state in trained.items()}
    assert len(set(accuracies.values())) > 1
    assert found.models["theta_1"] == pytest.approx(accuracies["bob", None], abs=1e-6)
    assert found.models["theta_2"] == pytest.approx(accuracies["ann", None], abs=1e-6)
    assert found.models["theta_1 by ALO"] == pytest.approx(accuracies["bob", "bob"], abs=1e-6)
    one, zero = (np.argmin(abs(found.gammas - at)) for at in (1, 0))
    corner = {name: grid[one, zero] for name, grid in found.accuracy.items()}
    assert corner == {
        "overfitted": pytest.approx(accuracies["bob", None], abs=1e-6),
        "alo": pytest.approx(accuracies["bob", "bob"], abs=1e-6),
    }


def probabilities(federation: Federation, state: dict, mfcc: torch.Tensor) -> torch.Tensor:
    """Return a whole private model's predictions in evaluation mode."""
    network = copy.deepcopy(federation.task.models.build())
    load_model(tensors_of(network), state)
    return network.eval()(mfcc)[0].softmax(-1)


def accuracy_of(federation: Federation, state: dict) -> float:
    federation.task.load({name: value.numpy() for name, value in state.items()}, 3)
    logits, labels = federation.task.logits("test")
    return 100 * float((logits.argmax(1) == labels).double().mean())


numbers = st.floats(-3, 3, width=32)


@settings(max_examples=40)
@given(st.lists(st.tuples(*[numbers] * 3), min_size=1), st.floats(-0.1, 1.1), st.floats(-0.1, 1.1))
def test_models_are_mixed_tensor_by_tensor(values, g1, g2):
    columns = [torch.tensor(column) for column in zip(*values, strict=True)]
    states = [{"weight": column, "norm.running_var": column.abs()} for column in columns]
    mixed = between(*states, g1, g2)
    base, one, two = (column.double().numpy() for column in columns)
    expected = base + g1 * (one - base) + g2 * (two - base)
    assert np.allclose(mixed["weight"].numpy(), expected, atol=1e-5)
    least = np.abs(np.stack([base, one, two])).min(0)
    assert (mixed["norm.running_var"].numpy() >= least.astype("f4")).all()
    for (g1, g2), state in zip(((0, 0), (1, 0), (0, 1)), states, strict=True):
        exact = between(*states, g1, g2)
        assert all(torch.equal(exact[name], state[name]) for name in state)
