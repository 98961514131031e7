"""`fedtools decode` keeps results of the same models and search, and makes the rest anew."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import simulated
from conftest import inside

from fedtools.data.ark import write_ark
from fedtools.data.datadir import DataDir, write_table


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Make an experiment of two rounds."""
    root = tmp_path_factory.mktemp("world")
    data = simulated.data_dir(root / "data", ["au", "in"], 6)
    config = simulated.config_file(root / "config.yaml")
    inside("train-tokens", data / "text", root / "tokens", "--token-type", "char").ok()
    begin = (
        "init",
        root / "exp",
        "--config",
        config,
        "--method",
        "fedavg",
        "--data",
        f"train={data}",
    )
    inside(*begin, "--data", f"valid={data}", "--asset", f"tokens={root / 'tokens'}").ok()
    inside("rounds", root / "exp", "--to", "2").ok()
    return root


def test_hypotheses_follow_the_model_and_the_jobs(world, cli):
    out = world / "out"
    listed = out / "nbest.1.tsv"

    def decode(*more: object) -> tuple[int, bytes]:
        cli("decode", world / "exp", world / "data", out, *more).ok()
        return listed.stat().st_mtime_ns, listed.read_bytes()

    first = decode("--model", "round:1")
    assert decode("--model", "round:1") == first
    second = decode("--model", "round:2")
    assert second[1] != first[1]
    assert decode("--model", "round:1")[1] == first[1]
    half = decode("--model", "round:1", "--nj", 2, "--job", 1)
    assert half[1] != first[1] and first[1].startswith(half[1])


def test_hypotheses_follow_the_search(world, cli):
    out, listed = world / "searched", []
    for name, text in (("one", "a\nb a\n"), ("two", "b b b\nc\n")):
        (world / name).write_text(text)
        lm = ("--plain", world / name, world / f"lm-{name}", "--order", "2")
        cli("train-lm", *lm).ok()
    simulated.config_file(world / "short.yaml", decode={"nbest": 1})
    for lm, more in (("one", ()), ("two", ()), ("two", ("--config", world / "short.yaml"))):
        words = ("--model", "round:1", "--lm", world / f"lm-{lm}", *more)
        cli("decode", world / "exp", world / "data", out, *words).ok()
        listed.append((out / "nbest.1.tsv").read_text().splitlines())
    assert listed[0] != listed[1] and len(listed[2]) == 12 < len(listed[1])


def test_the_configured_weights_order_the_lists(world, cli):
    """Weights also decide which hypotheses exist: cheap words are many, costly words few."""
    (world / "text-ab").write_text("a\nb a\na b\n")
    cli("train-lm", "--plain", world / "text-ab", world / "lm-ab", "--order", "2").ok()
    first = {}
    for weight, word_score in ((0.0, 6.0), (3.0, -6.0)):
        options = {"lm_weight": weight, "word_score": word_score, "nbest": 10, "beam_size": 50}
        config = simulated.config_file(world / "weights.yaml", decode=options)
        out = world / f"weights{weight}"
        words = ("--model", "round:1", "--lm", world / "lm-ab", "--config", config)
        cli("decode", world / "exp", world / "data", out, *words).ok()
        lists: dict[str, list[float]] = {}
        counts: dict[str, list[int]] = {}
        for line in (out / "nbest.tsv").read_text().splitlines():
            utterance, _, acoustic, lm, text = line.split("\t")
            counts.setdefault(utterance, []).append(len(text.split()))
            total = float(acoustic) + weight * float(lm) + word_score * counts[utterance][-1]
            lists.setdefault(utterance, []).append(total)
        for totals in lists.values():
            assert all(better >= worse - 1e-4 for better, worse in pairwise(totals))
        first[word_score] = [found[0] for found in counts.values()]
    assert len(first[6.0]) == 12
    assert all(many > few for many, few in zip(first[6.0], first[-6.0], strict=True))


def test_a_job_that_was_killed_is_made_again(world, cli):
    out = world / "killed"
    cli("decode", world / "exp", world / "data", out, "--model", "round:1").ok()
    whole = (out / "nbest.1.tsv").read_bytes()
    (out / "nbest.1.tsv").unlink()
    cli("decode", world / "exp", world / "data", out, "--model", "round:1").ok()
    assert (out / "nbest.1.tsv").read_bytes() == whole


def test_features_of_another_size_are_named(world, cli, tmp_path):
    """They are refused at the start, and in data that only decoding reads."""
    data = simulated.data_dir(tmp_path / "data", ["au"], 3)
    names = DataDir.read(data).utterances
    places = write_ark(tmp_path / "wide.ark", ((name, np.ones((60, 40), "f4")) for name in names))
    write_table(data / "feats.scp", places)
    config = simulated.config_file(tmp_path / "config.yaml")
    begin = ("init", tmp_path / "exp", "--config", config, "--method", "fedavg")
    begin = (*begin, "--data", f"train={data}", "--asset", f"tokens={world / 'tokens'}")
    cli(*begin).fails(1, f"{data}/feats.scp: 40 values in a frame", "input_size is")
    assert not (tmp_path / "exp").exists()
    result = cli("decode", world / "exp", data, tmp_path / "out", "--model", "round:1")
    result.fails(1, f"{data}/feats.scp: 40 values in a frame")


def test_damaged_features_are_named(world, cli, tmp_path):
    """Features that give NaN posteriors are named, not decoded to silence."""
    data = shutil.copytree(world / "data", tmp_path / "data")
    name, place = (data / "feats.scp").read_text().splitlines()[2].split()
    ark, offset = place.rsplit(":", 1)
    raw = bytearray(Path(ark).read_bytes())
    # The first frame: behind "\0BFM " and two numbers of rows and columns, 5 bytes each.
    raw[int(offset) + 15 : int(offset) + 335] = np.full(80, 3e38, np.float32).tobytes()
    (tmp_path / "huge.ark").write_bytes(raw)
    lines = (data / "feats.scp").read_text().replace(place, f"{tmp_path}/huge.ark:{offset}")
    (data / "feats.scp").write_text(lines)
    result = cli("decode", world / "exp", data, tmp_path / "out", "--model", "round:1")
    result.fails(1, f"{data}/feats.scp: ", f"posteriors of {name!r} are NaN")


def test_clients_own_words_are_favoured_at_this_client(world, cli):
    """Other clients' lists are unchanged; so is the list of a client without its own words."""
    (world / "text").write_text("a\nb a\na b\n")
    cli("train-lm", "--plain", world / "text", world / "lm", "--order", "2").ok()
    table, out = world / "phrases.tsv", world / "own"

    def lists(*more: object) -> dict[str, list[str]]:
        cli("decode", world / "exp", world / "data", out, "--model", "round:1", "--lm",
            world / "lm", *more).ok()  # fmt: skip
        found: dict[str, list[str]] = {}
        for line in (out / "nbest.tsv").read_text().splitlines():
            found.setdefault(line.split("\t")[0], []).append(line)
        return found

    plain = lists()
    clients = DataDir.read(world / "data", "utt2client").utt2client
    word = "bab"
    table.write_text(f"client\tphrase\nau\t{word}\n")
    favoured = lists("--phrases", table, "--bonus", "50")
    for name in plain:
        if clients[name] == "au":
            assert favoured[name] != plain[name] and word in favoured[name][0].split("\t")[4]
        else:
            assert favoured[name] == plain[name]
    assert lists("--phrases", table, "--bonus", "0") == plain
    cli("decode", world / "exp", world / "data", out, "--phrases", table).fails(2, "--phrases")
