"""Pages for contributors and users: the commands they show work, from top to bottom."""

from __future__ import annotations

import io
import re
from pathlib import Path

import keywords
import numpy as np
import pytest
import soundfile
import yaml
from asr_checkout import TINY
from conftest import ROOT, ledger
from keyword_checkout import TINY as TINY_KEYWORDS
from pages import CONTRIBUTING, OWN_CORPUS, SET_UP, SITES, bash, blocks, make_checkout
from reported import has_blank_edges

from fedtools import __version__
from fedtools.report.options import own_command

# The section of egs/README.md on keywords.
KEYWORDS = "Keywords, to a table of accuracies"
# Sections of CONTRIBUTING.md whose commands are run here.
TYPED = ("A method", "A keyword network", "A task", "A corpus")


def kaldi_corpus(folder: Path) -> Path:
    """Write train and test in Kaldi's format: two utterances in a recording, one of each speaker
    without a gender, and no clients."""
    noise = np.random.default_rng(0)
    texts = ("a", "so", "so b")
    # The number of speakers that egs/README.md needs, whose options suit AN4, and some clients.
    for split, speakers in (("train", 42), ("test", 10)):
        tables: dict[str, list[str]] = {
            name: [] for name in "wav.scp segments text utt2spk spk2utt spk2gender".split()
        }
        (folder / split / "audio").mkdir(parents=True)
        for number in range(speakers):
            speaker = f"{split[1]}{number:02d}"
            audio = folder / split / "audio" / f"{speaker}.flac"
            content = io.BytesIO()
            soundfile.write(content, noise.normal(0, 0.1, 19200), 16000, format="FLAC")
            audio.write_bytes(content.getvalue())
            tables["wav.scp"].append(f"rec-{speaker} {audio}")
            utterances = [f"{speaker}-{part}" for part in range(2)]
            for part, name in enumerate(utterances):
                tables["segments"].append(f"{name} rec-{speaker} {0.6 * part} {0.6 * part + 0.55}")
                tables["text"].append(f"{name} {texts[(number + part) % 3]}")
                tables["utt2spk"].append(f"{name} {speaker}")
            tables["spk2utt"].append(" ".join([speaker, *utterances]))
            if number % 5:
                tables["spk2gender"].append(f"{speaker} {'mf'[number % 2]}")
        for name, lines in tables.items():
            (folder / split / name).write_text("\n".join(lines) + "\n")
    return folder


def clients_of(experiment: Path) -> list[str]:
    """Return the clients of an experiment's ledger, each repeated for every participation."""
    return [row["client"] for row in ledger(experiment) if row["client"] != "-"]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """Make a checkout, with packed clips at the keyword recipe's path."""
    root = make_checkout(tmp_path_factory.mktemp("pages"))
    packed = root / "egs/speechcommands/kws1/dump/mini/keywords"
    clips = {f"c{number}": [2, 2, 1 + number, 2] for number in range(18)}
    for split, clients in (("train", clips), ("valid", {"v": [1] * 4})):
        keywords.pack(packed / split, clients)
    return root


def test_no_block_is_left_out():
    """All blocks are run here, or tried with --help by test_readme.py."""
    tried = "".join(blocks(CONTRIBUTING, name) for name in (SET_UP, *TYPED))
    assert tried == blocks(CONTRIBUTING)


def test_methods_networks_tasks_and_recipes_are_added(checkout, tmp_path):
    """Sections run one after the other in one shell, unchanged."""
    script = "".join(f"echo '=== {name}'\n{blocks(CONTRIBUTING, name)}" for name in TYPED)
    done = bash(script, checkout).ok()
    said = dict(re.findall(r"^=== (.+)\n((?:(?!===).*\n)*)", done.out, flags=re.M))
    assert re.search(r"^mymethod +MyMethod +asr, kws, lm$", said["A method"], re.M)
    states = sorted((checkout / "mine/exp/mynet").glob("round_*/global.safetensors"))
    assert len({path.read_bytes() for path in states}) == 2
    assert len(clients_of(checkout / "mine/exp/mynet")) == 16
    # With FedKWS-UI and without FMP, since it is keyword spotting.
    able = re.findall(r"^(\w+) .*, mytask$", said["A task"], re.M)
    assert {"mymethod", "fedkws_ui"} <= set(able) and "fmp" not in able
    frozen = yaml.safe_load((checkout / "mine/exp/mytask/config.yaml").read_text())
    assert frozen["task"] == "mytask"
    assert "Stages: 1 data directories, 2 features." in said["A corpus"]
    # The recipe created by the page has working stages.
    corpus = kaldi_corpus(tmp_path / "corpus")
    recipe = checkout / "egs/mycorpus/asr1"
    bash(f"MYCORPUS='{corpus}' ./run.sh --tag fake", recipe).ok()
    frames = (recipe / "data/fake/test/utt2num_frames").read_text().splitlines()
    assert [line.split()[1] for line in frames] == ["53"] * 20


def test_a_corpus_of_ones_own_becomes_a_table(tmp_path):
    root = make_checkout(tmp_path)
    corpus = kaldi_corpus(tmp_path / "corpus")
    (root / "conf/commonvoice/an4.yaml").write_text(yaml.safe_dump(TINY))
    script = blocks(OWN_CORPUS, "From data directories to a table")
    assert script + blocks(OWN_CORPUS, KEYWORDS) == blocks(OWN_CORPUS)
    assert script.count("/corpora/mycorpus") == 1
    bash(script.replace("/corpora/mycorpus", f"'{corpus}'"), root / "egs").ok()
    here = root / "egs/mycorpus/asr1"
    # 42 speakers, less the server's and those of the validation set: each is a client.
    clients = clients_of(here / "exp/fedavg")
    assert len(clients) == 2 * 4 and len(set(clients)) == 4
    owners = (here / "data/eval_test/utt2client").read_text()
    assert re.findall("^(.+) unknown$", owners, re.M) == ["e00-0", "e00-1", "e05-0", "e05-1"]
    page = (here / "RESULTS.md").read_text()
    assert re.search(r"^\| Method .*\| +f \| +m \| +unknown \| +AVG \|", page, re.M)
    assert re.search(r"^\| Baseline ", page, re.M) and re.search(r"^\| FedAvg ", page, re.M)
    assert (here / "RESULTS.png").stat().st_size


def words_of(folder: Path, names: list[str]) -> Path:
    """Write a data directory with a tone for each name, which is SPEAKER-WORD."""
    folder.mkdir(parents=True)
    for number, name in enumerate(names):
        pitch = 0.1 if name.endswith(("ja", "yes")) else 0.4
        tone = np.sin(np.arange(16000) * pitch + number)
        soundfile.write(folder / f"{name}.wav", 0.1 * tone, 16000)
    owners = dict.fromkeys(name.partition("-")[0] for name in names)
    lines = {
        "wav.scp": [f"{name} {folder}/{name}.wav" for name in names],
        "text": [f"{name} {name.partition('-')[2]}" for name in names],
        "utt2spk": [f"{name} {name.partition('-')[0]}" for name in names],
        "spk2utt": [
            " ".join([owner, *(name for name in names if name.startswith(f"{owner}-"))])
            for owner in owners
        ],
    }
    for table, rows in lines.items():
        (folder / table).write_text("\n".join(rows) + "\n")
    return folder


def test_sites_come_to_a_table(tmp_path):
    """Three folders with blanks in their path, between which only cp and mv carry files."""
    for site, people in (("east", "ab"), ("west", "cde")):
        names = [f"{one}1-{word}" for one in people for word in ("no", "yes")]
        words_of(tmp_path / "data" / site, names)
    config, place = tmp_path / "a config.yaml", tmp_path / "a place"
    config.write_text(yaml.safe_dump(TINY_KEYWORDS))
    place.mkdir()
    script = blocks(SITES, "By files")
    done = bash(f"DATA='{tmp_path / 'data'}' CONFIG='{config}'\n{script}", place).ok()
    sums = re.search(r"^4? *3 +2 +5 +10 +\d+ +[\d.]+$", done.out, re.M)
    assert sums, done.out
    assert len(clients_of(place / "server/exp")) == 3 * 5
    fingerprint = re.search(r"fingerprint ([0-9a-f]{64})", done.out)[1]
    assert fingerprint in (place / "east/site.yaml").read_text()
    for site in ("east", "west"):
        assert not [*(place / "server").rglob("*.wav"), *(place / "server").rglob(f"{site}.key")]


def test_keywords_of_ones_own_become_a_table(tmp_path):
    root, corpus = make_checkout(tmp_path), tmp_path / "a corpus"
    for split, people in (("train", 6), ("test", 10)):
        names = [f"{split[1]}{one}-{word}" for one in range(people) for word in ("ja", "no")]
        words_of(corpus / split, names)
    (root / "conf/speechcommands/mini.yaml").write_text(yaml.safe_dump(TINY_KEYWORDS))
    script = blocks(OWN_CORPUS, KEYWORDS)
    assert script.count("/corpora/mywords") == 1
    bash(script.replace("/corpora/mywords", f"'{corpus}'"), root / "egs").ok()
    here = root / "egs/mywords/kws1"
    clients = clients_of(here / "exp/fedkws_ui")
    assert len(clients) == 2 * 3 and set(clients) <= {f"r{number}" for number in range(6)}
    assert (here / "classes.txt").read_text() == "ja\nno\n"
    page = (here / "RESULTS.md").read_text()
    for method in ("FedAvg", "FedKWS-UI"):
        assert re.search(rf"^\| {method} +\| +\d+\.\d \[.+\| +\d+ % \|$", page, re.M)
    assert "Test data: 20 clips of 2 classes by 10 speakers;" in page


def test_the_citation_fits_the_package_and_the_readme():
    """The version, the licence, and the papers of the README's table with all their details."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software"
    assert (cited["title"], cited["version"]) == ("fedtools", __version__)
    assert cited["message"] and cited["authors"] == [{"name": "fedtools developers"}]
    assert cited["license"] == re.search('license="(.+)"', (ROOT / "setup.py").read_text())[1]
    assert re.match(r"\s+Apache License\s+Version 2.0", (ROOT / "LICENSE").read_text())
    papers = re.findall(r"^\| \[`egs/.+?\|.+?\| (.+?) \|", (ROOT / "README.md").read_text(), re.M)
    found = []
    for one in cited["references"]:
        assert one["type"] == "conference-paper"
        first, *others = (author["family-names"] for author in one["authors"])
        authors = f"{first} et al." if len(others) > 1 else " and ".join([first, *others])
        found.append(f"{authors}, {one['title']}, {one['conference']['name']}")
        assert one["conference"]["name"].endswith(str(one["year"]))
    assert len(papers) == 4 and sorted(papers) == sorted(found)


def test_the_changelog_has_a_section_for_the_next_release():
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## \[Unreleased\]$", changes, re.M)


def test_no_picture_of_a_results_page_is_cut_off():
    pictures = sorted(ROOT.glob("egs/*/*/RESULTS*.png"))
    assert len(pictures) > 20
    assert [path.name for path in pictures if not has_blank_edges(path)] == []


def test_a_command_on_a_page_names_no_user(tmp_path, monkeypatch):
    """The default is this process's command, which may have absolute paths."""
    home = tmp_path / "home/eve"
    (home / "work").mkdir(parents=True)
    monkeypatch.chdir(home / "work")
    monkeypatch.setenv("HOME", str(home))
    words = [f"{home}/.venv/bin/fedtools", "report", f"{home}/work/R.md", f"a={home}/exp/a b", "x"]
    monkeypatch.setattr("sys.argv", words)
    assert own_command() == "fedtools report R.md 'a=~/exp/a b' x"
    # Neither folder is part of another name, or of a URL.
    others = [f"{home}ly/a", f"/mnt{home}/b", "https://a.b/c", f"{home}/work", f"{home}", "./d"]
    monkeypatch.setattr("sys.argv", ["fedtools", *others])
    found = [f"{home}ly/a", f"/mnt{home}/b", "https://a.b/c", ".", "'~'", "d"]
    assert own_command() == " ".join(["fedtools", *found])
    monkeypatch.chdir("/")
    assert own_command().split()[3] == "https://a.b/c"
