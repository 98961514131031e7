"""FMP's noise by release, the ledger's account of all releases, and scores by hand."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path

import kaldiio
import numpy as np
import pytest
import yaml
from conftest import inside
from fmp_world import counts_after, sent, simulated
from rescored_world import CLIENTS, make_stream

from fedtools.core.tables import read_tsv

# In rounds 13 to 20 no client has utterances: each utterance is a group of its own.
ROUNDS, UTTERANCES = 20, 12


@pytest.fixture(scope="module")
def stream(tmp_path_factory) -> Path:
    return make_stream(tmp_path_factory.mktemp("world") / "stream", UTTERANCES)


@pytest.fixture(autouse=True)
def key(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FEDTOOLS_NOISE_KEY", str(tmp_path / "secret" / "noise.key"))


def federation(stream: Path, path: Path, rounds: int, seed: int = 0, **options) -> Path:
    config = {"task": "rescore", "rounds": rounds, "method_conf": options}
    path.with_suffix(".yaml").write_text(yaml.safe_dump(config))
    arguments = ("--config", path.with_suffix(".yaml"), "--method", "fmp", "--seed", seed)
    inside("init", path, *arguments, "--data", f"train={stream}").ok()
    inside("rounds", path).ok()
    return path


@pytest.mark.parametrize(
    ("sends", "mechanism", "trust"),
    [
        ("increments", "laplace", "client"),
        ("increments", "laplace", "server"),
        ("cumulative", "laplace", "client"),
        ("cumulative", "laplace", "server"),
        ("cumulative", "paper", "server"),
    ],
)
def test_equal_counts_have_other_noise_in_each_release(stream, tmp_path, sends, mechanism, trust):
    """No difference of two releases is free of noise, for any round, sender or experiment."""
    privacy = {"mechanism": mechanism, "epsilon": 0.5, "trust": trust}
    released: dict[tuple, np.ndarray] = {}
    for seed in (0, 1):
        path = federation(stream, tmp_path / f"{seed}", ROUNDS, seed, sends=sends, privacy=privacy)
        for number in range(UTTERANCES + 1, ROUNDS + 1):
            if trust == "client":
                messages = sent(path, number)
                assert set(messages) == set(CLIENTS)
            else:
                before = counts_after(path, number - 1) if sends == "increments" else 0.0
                messages = {"-": counts_after(path, number) - before}
            released |= {(seed, number, sender): one for sender, one in messages.items()}
    assert len(released) == 2 * (ROUNDS - UTTERANCES) * (3 if trust == "client" else 1)
    for one, other in combinations(released.values(), 2):
        # The paper's mechanism replaces negative values by 0.
        noisy = (one != 0) | (other != 0)
        assert (one == other)[noisy].mean() < 1 / 4


def test_smoothing_of_equation_8(stream, tmp_path):
    """With almost no noise, the marginal is equation 6's, of smoothed distributions."""
    privacy = {"mechanism": "paper", "epsilon": 1e9}
    path = federation(stream, tmp_path / "exp", 3, smoothing=0.3, privacy=privacy)
    unigram = np.array([int(row["count"]) + 1 for row in read_tsv(stream / "unigram.tsv", None)])
    unigram[0] = 0  # `</s>`
    for number in (1, 2, 3):
        messages = sent(path, number)
        smooth = {
            client: 0.7 * counts / counts.sum() + 0.3 * unigram / unigram.sum()
            for client, counts in messages.items()
        }
        total = sum(counts.sum() for counts in messages.values())
        expected = sum(messages[client].sum() * smooth[client] for client in messages) / total
        np.testing.assert_allclose(counts_after(path, number), expected, rtol=1e-6, atol=1e-9)


# --- the ledger


def words_of(stream: Path, name: str, sigma: float) -> dict[str, float]:
    """Return the words of an utterance's list, weighted by rank, with unknown words merged."""
    known, found = set((stream / "words.txt").read_text().split()), {}
    for line in (stream / "nbest.tsv").read_text().splitlines():
        utterance, rank, *_, words = line.split("\t")
        if utterance == name:
            weight = math.exp(-((int(rank) - 1) ** 2) / (2 * sigma**2))
            for word in words.split():
                word = word if word in known else "<unk>"
                found[word] = found.get(word, 0.0) + weight
    return found


@pytest.mark.parametrize(
    ("sends", "unit"),
    [
        *(
            (sends, unit)
            for sends in ("increments", "cumulative")
            for unit in ("word", "utterance")
        ),
        ("cumulative", "paper"),
    ],
)
def test_the_ledger_is_of_the_words_of_every_round(stream, tmp_path, cli, sends, unit):
    """Counted by time, there are five utterances in groups 1 and 2, and two in group 3."""
    epsilon, sigma, rounds, span = 0.25, 1.0, 3, 80.0
    privacy = {"mechanism": "laplace", "unit": unit} if unit != "paper" else {"mechanism": unit}
    options = {"sends": sends, "sigma": sigma, "privacy": privacy | {"epsilon": epsilon}}
    path = federation(stream, tmp_path / "exp", rounds, groups="clock", span=span, **options)
    cli("privacy", path).ok()
    rows = read_tsv(path / "dp.tsv", None)
    segments = [line.split() for line in (stream / "segments").read_text().splitlines()]
    round_of = {name: int(float(begin) // (span / 4)) + 1 for name, _, begin, _ in segments}
    heard = {name: words_of(stream, name, sigma) for name in round_of if round_of[name] <= rounds}
    # The new part of a client's counts in each round: words, utterances, or cumulative counts.
    size = {"word": len, "utterance": lambda _: 1, "paper": lambda words: sum(words.values())}[unit]
    new = np.array([
        [
            sum(size(heard[name]) for name in heard if round_of[name] == at and name[:3] == client)
            for client in CLIENTS
        ]
        for at in range(1, rounds + 1)
    ])  # fmt: skip
    assert len({tuple(row) for row in new}) > 1 and new.any(1).all()
    in_release = np.cumsum(new, 0) if sends == "cumulative" else new
    widest = max(len(words) for words in heard.values())
    heaviest = max(sum(words.values()) for words in heard.values())
    word = max(max(words.values()) for words in heard.values())
    # Laplace noise covers all releases: with cumulative counts, each gets a share.
    share = epsilon / rounds if sends == "cumulative" and unit != "paper" else epsilon
    utterance = {"word": widest, "utterance": 1, "paper": heaviest}[unit]
    inside_it = {"word": 1, "utterance": 2, "paper": word}[unit]
    again = rounds if sends == "cumulative" else 1
    expected = [(inside_it * share, utterance * share, users.max() * share) for users in in_release]
    expected += [
        (inside_it * share * again, utterance * share * again, in_release.sum(0).max() * share)
    ]
    for row, epsilons in zip(rows, expected, strict=True):
        found = [float(row[f"epsilon_{level}"]) for level in ("word", "utterance", "user")]
        assert found == pytest.approx(epsilons, rel=1e-5)


# --- scores


def test_what_is_added(tmp_path):
    """All parts of a score have the weights of the options."""
    stream = make_stream(tmp_path / "stream", UTTERANCES)
    lists: dict[str, list[list[str]]] = {}
    for line in (stream / "nbest.tsv").read_text().splitlines():
        lists.setdefault(line.split("\t")[0], []).append(line.split("\t"))
    scores, found = kaldiio.load_scp(str(stream / "nnlm.scp")), {}
    known = set((stream / "words.txt").read_text().split())
    # Three words map to `<unk>`, as in `make_stream`.
    for name, one in lists.items():
        at, totals = 0, []
        for _, _, acoustic, lm, words in one:
            split = words.split()
            nnlm = float(scores[name][at : at + len(split) + 1].sum())
            nnlm -= math.log(3) * sum(word not in known for word in split)
            at += len(split) + 1
            totals.append(float(acoustic) + 1.3 * (0.7 * float(lm) + 0.3 * nnlm) + 0.5 * len(split))
        found[name] = one[totals.index(max(totals))][4]
    weights = {"lm_weight": 1.3, "word_score": 0.5, "nnlm": 0.3, "scale": 0.0}
    assert simulated(stream, **weights) == found
    # The weights make a difference; all hypotheses have the same number of words.
    for name in ("lm_weight", "nnlm"):
        assert simulated(stream, **(weights | {name: 0.0})) != found, name


def test_no_honest_client_can_be_refused_for_its_words(stream, tmp_path, cli):
    """A refusal would reveal, without noise, that the client said that many words."""
    longest = dict.fromkeys(CLIENTS, 0)
    for line in (stream / "utt2client").read_text().splitlines():
        utterance, client = line.split()
        lists = [
            row.split("\t")[4].split()
            for row in (stream / "nbest.tsv").read_text().splitlines()
            if row.split("\t")[0] == utterance
        ]
        # Including the sentence's end.
        longest[client] += 1 + max(map(len, lists))
    most = max(longest.values())
    privacy = {"mechanism": "laplace", "epsilon": 5.0, "cap": 2.0}
    for words in (most - 1, most):
        options = {"max_words": float(words), "privacy": privacy}
        config = {"task": "rescore", "rounds": 2, "method_conf": options}
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
        path = tmp_path / f"exp{words}"
        arguments = ("--config", tmp_path / "c.yaml", "--method", "fmp")
        result = cli("init", path, *arguments, "--data", f"train={stream}")
        if words < most:
            result.fails(1, f"may count {most} words, over max_words of {words}")
            assert not path.exists()
        else:
            result.ok()
