"""Clients from data directories: no utterance lost or duplicated, and the requested skew."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import fedtools
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtools.core.errors import UserError
from fedtools.data.datadir import DataDir, invert
from fedtools.data.partition import PartitionConfig, partition

ACCENTS = ["us", "england", "indian", "scotland"]


def corpus(speakers: int, each: int, path: Path = Path("data")) -> DataDir:
    """Make speakers with one accent each, in turn; every utterance also says one of ten words."""
    spk2accent = {f"s{i:03}": ACCENTS[i % len(ACCENTS)] for i in range(speakers)}
    utt2spk = {f"{spk}-{j:03}": spk for spk in spk2accent for j in range(each)}
    return DataDir(
        path,
        wav_scp={utt: f"/audio/{utt}.wav" for utt in utt2spk},
        text=dict.fromkeys(utt2spk, "A B"),
        utt2spk=utt2spk,
        others={
            "utt2accent": {utt: spk2accent[spk] for utt, spk in utt2spk.items()},
            "utt2word": {utt: f"w{i % 10}" for i, utt in enumerate(utt2spk)},
        },
    )


@pytest.fixture
def data(tmp_path) -> Path:
    corpus(20, 10, tmp_path / "data").write()
    return tmp_path / "data"


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> DataDir:
    path = tmp_path_factory.mktemp("words")
    corpus(100, 40, path).write()
    return DataDir.read(path)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


@settings(max_examples=150, deadline=None)
@given(
    speakers=st.integers(1, 12),
    each=st.integers(1, 9),
    scheme=st.sampled_from(["iid", "quantity"]),
    clients=st.integers(1, 15),
    alpha=st.floats(1e-6, 1e6),
    seed=st.integers(0, 2**70),
    least=st.integers(1, 8),
    whole=st.booleans(),
)
def test_every_utterance_once_and_the_minimum_kept(
    speakers, each, scheme, clients, alpha, seed, least, whole
):
    data = corpus(speakers, each)
    config = PartitionConfig(scheme, clients, alpha, "", seed, least, whole)
    try:
        result = partition(data, config)
    except UserError as error:
        units = speakers if whole else speakers * each
        # Whole speakers may not divide; single utterances always do if there are enough.
        assert units < clients or speakers * each < clients * least or (whole and least > 1), error
        return
    assert list(result.utt2client) == data.utterances
    sizes = Counter(result.utt2client.values())
    assert len(sizes) == clients and min(sizes.values()) >= least
    assert result.sizes() == sorted(sizes.values())
    if whole:
        assert len({(data.utt2spk[u], c) for u, c in result.utt2client.items()}) == speakers
    elif scheme == "iid":
        assert max(sizes.values()) - min(sizes.values()) <= 1 and result.moved == 0


def label_counts(data: DataDir, config: PartitionConfig) -> np.ndarray:
    """Return counts, (labels, clients)."""
    utt2client = partition(data, config).utt2client
    labels, clients = (
        sorted(set(data.others["utt2word"].values())),
        sorted(set(utt2client.values())),
    )
    counts = np.zeros((len(labels), config.clients))
    for utt, client in utt2client.items():
        counts[labels.index(data.others["utt2word"][utt]), clients.index(client)] += 1
    return counts


@pytest.mark.parametrize("alpha", [0.3, 1.0, 10.0])
def test_dirichlet_proportions_have_the_variance_of_the_law(words, alpha):
    clients, squares = 8, []
    for seed in range(15):
        config = PartitionConfig("dirichlet", clients, alpha, "utt2word", seed)
        counts = label_counts(words, config)
        assert (counts.sum(axis=1) == 400).all()
        squares.append((counts / 400 - 1 / clients) ** 2)
    expected = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert np.mean(squares) == pytest.approx(expected, rel=0.2)


def test_large_alpha_is_even_and_small_alpha_is_one_owner_a_label(words):
    even = label_counts(words, PartitionConfig("dirichlet", 4, 1e6, "utt2word", 1))
    assert np.abs(even - 100).max() <= 2
    one = label_counts(words, PartitionConfig("dirichlet", 4, 1e-3, "utt2word", 1))
    assert (one.max(axis=1) >= 395).all()


def test_iid_clients_have_the_labels_of_the_whole(words):
    counts = label_counts(words, PartitionConfig("iid", 4, seed=2))
    # Hypergeometric: 100 +- 8; six standard deviations.
    assert np.abs(counts - 100).max() < 50 and (counts.sum(axis=0) == 1000).all()


def test_quantity_has_the_variance_of_the_law(words):
    squares = []
    for seed in range(60):
        sizes = partition(words, PartitionConfig("quantity", 5, 0.5, seed=seed)).sizes()
        squares.append((np.array(sizes) / len(words.utterances) - 0.2) ** 2)
    assert np.mean(squares) == pytest.approx(0.2 * 0.8 / 3.5, rel=0.2)


def test_speakers_of_an_accent_stay_whole():
    data = corpus(40, 5)
    data.others = {}
    config = PartitionConfig("iid", 7, seed=1, keep_speakers=True)
    owners = {(data.utt2spk[u], c) for u, c in partition(data, config).utt2client.items()}
    assert len(owners) == 40
    assert set(Counter(client for _, client in owners).values()) == {5, 6}


def test_the_same_seed_is_the_same_bytes_and_another_is_not(data, tmp_path, cli):
    def call(out: str, *options) -> dict[str, bytes]:
        scheme = ("--scheme", "dirichlet", "--alpha", 0.5, "--by", "utt2accent", "--clients", 5)
        cli("partition", data, tmp_path / out, *scheme, *options).ok()
        return contents(tmp_path / out)

    first = call("a", "--seed", 1)
    assert call("b", "--seed", 2)["utt2client"] != first["utt2client"]
    assert call("c", "--seed", 1) == first
    # Over an earlier partition, of which nothing is left.
    (tmp_path / "b/utt2dur").write_text("stranger 1\n")
    assert call("b", "--seed", 1) == first
    # In a process of its own, with another hash seed.
    out = tmp_path / "d"
    options = "--scheme dirichlet --alpha 0.5 --by utt2accent --clients 5 --seed 1".split()
    fedtools("partition", data, out, *options, env={"PYTHONHASHSEED": "7"}).ok()
    assert contents(out) == first


def test_the_whole_data_directory_comes_along(data, tmp_path, cli):
    result = cli("partition", data, tmp_path / "out", "--scheme", "iid", "--clients", 12).ok()
    head, row = (line.split() for line in result.out.splitlines())
    assert dict(zip(head, row, strict=True)) == {
        "scheme": "iid", "clients": "12", "utterances": "200", "smallest": "16",
        "median": "17", "largest": "17", "moved": "0",
    }  # fmt: skip
    before, after = contents(data), contents(tmp_path / "out")
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"utt2client", "client2utt"}
    tables = DataDir.read(tmp_path / "out")
    assert list(invert(tables.utt2client)) == [f"client{i:02}" for i in range(1, 13)]


def test_clients_by_a_map(data, tmp_path, cli):
    cli("partition", data, tmp_path / "out", "--scheme", "map", "--by", "utt2spk").ok()
    out = tmp_path / "out"
    assert (out / "utt2client").read_bytes() == (out / "utt2spk").read_bytes()
    assert (out / "client2utt").read_bytes() == (out / "spk2utt").read_bytes()
    cli(
        "partition", data, tmp_path / "no", "--scheme", "map", "--by", "utt2spk",
        "--min-utterances", 11,
    ).fails(1, "utt2spk", "'s000' has 10 utterances, 11 are required")  # fmt: skip
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [("s000-000 ../x", "utt2accent:1: "), ("s000-000a us", "utt2accent:1: 's000-000a' is not in")],
)
def test_a_map_that_cannot_be_used(data, tmp_path, cli, line, said):
    lines = (data / "utt2accent").read_text().splitlines()
    (data / "utt2accent").write_text("\n".join([line, *lines[1:]]) + "\n")
    options = ("--scheme", "map", "--by", "utt2accent")
    cli("partition", data, tmp_path / "out", *options).fails(1, said)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_shared_out_is_told(data, tmp_path, cli):
    def fails(said: str, *options) -> None:
        cli("partition", data, tmp_path / "out", *options).fails(1, said)
        assert not (tmp_path / "out").exists()

    fails("too few for 201 clients", "--scheme", "iid", "--clients", 201)
    iid = ("--scheme", "iid", "--clients", 10)
    fails("at least 21 utterances", *iid, "--min-utterances", 21)
    fails("20 speakers are too few", "--scheme", "iid", "--clients", 21, "--keep-speakers")
    fails("no partition found with 11", "--scheme", "iid", "--clients", 18, "--keep-speakers",
          "--min-utterances", 11)  # fmt: skip
    dirichlet = ("--scheme", "dirichlet", "--clients", 3, "--alpha", 1)
    fails("utt2nothing", *dirichlet, "--by", "utt2nothing")
    fails("several labels: w0, w1", *dirichlet, "--by", "utt2word", "--keep-speakers")


@pytest.mark.parametrize(
    "options",
    [
        "--scheme iid",
        "--scheme iid --clients 3 --alpha 1",
        "--scheme iid --clients 3 --by utt2spk",
        "--scheme dirichlet --clients 3 --alpha 1",
        "--scheme quantity --clients 3",
        "--scheme quantity --clients 3 --alpha 0",
        "--scheme quantity --clients 3 --alpha nan",
        "--scheme map --by utt2spk --clients 3",
        "--scheme map --by utt2spk --keep-speakers",
        "--scheme map --by ../utt2spk",
        "--scheme map --by utt2/../x",
        "--scheme other --clients 3",
        "--scheme iid --clients 0",
        "--scheme iid --clients 3 --min-utterances 0",
    ],
)
def test_wrong_usage_exits_2(data, tmp_path, cli, options):
    cli("partition", data, tmp_path / "out", *options.split()).fails(2)
