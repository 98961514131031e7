"""Attacks on sent features: on data with known speakers, and by the command line."""

from __future__ import annotations

import itertools
import re
import shutil
import time
from pathlib import Path

import kaldiio
import numpy as np
import pytest
import simulated
import torch
from conftest import inside
from PIL import Image
from safetensors.torch import load_file
from scipy.stats import beta
from scipy.stats import t as student

from fedtools.attack.features.attack import Options, attack_speakers
from fedtools.attack.features.clustering import nearest, sort_speakers, vote
from fedtools.attack.features.figures import COLUMNS, Figure, Speakers, over_clients
from fedtools.attack.features.probe import parts_of, probe_speakers
from fedtools.attack.features.reconstruction import Inverter, read_server_data
from fedtools.attack.features.retrieval import find_speakers
from fedtools.attack.features.sent import Victim, Window, one_of_each, open_victim, window
from fedtools.audio.perturb import SPEED_TABLE
from fedtools.core.errors import UserError
from fedtools.core.tables import read_tsv, write_tsv
from fedtools.data.ark import FeatureReader, write_ark
from fedtools.data.datadir import DataDir
from fedtools.exchange.sent_features import sent_name
from fedtools.federation.federation import Federation
from fedtools.models.acoustic.asr import build_model
from fedtools.models.pooling import pooled
from fedtools.report.card import read_card

# Speakers per client, and utterances per speaker.
SPEAKERS, EACH = {"au": 12, "en": 3, "in": 1}, 4
BLOCKS = '["encoder.embed.*", "encoder.encoders.0.*"]'


def speech(path: Path, speakers: dict[str, int], seed: int) -> Path:
    """Make `simulated.data_dir` in which each speaker adds a pattern of its own to all frames."""
    whole = simulated.data_dir(path.with_name(f"{path.name}.raw"), list(speakers), 12 * EACH, seed)
    before, data = DataDir.read(whole), DataDir(path)
    reader, matrices = FeatureReader(before.feats_scp), []
    for client, count in speakers.items():
        for index, name in enumerate(before.client_utterances(client)[: count * EACH]):
            speaker = f"{client}-v{index % count:02d}"
            own = np.random.default_rng([7, *speaker.encode()]).normal(0, 1.5, simulated.BINS)
            renamed = f"{speaker}-{name[-3:]}"
            matrices.append((renamed, reader.read(name) + own.astype("f4")))
            data.text[renamed] = before.text[name]
            data.utt2spk[renamed], data.utt2client[renamed] = speaker, client
    path.mkdir()
    data.feats_scp = write_ark(path / "feats.ark", sorted(matrices))
    data.write()
    return path


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("world")
    speech(root / "train", SPEAKERS, 0)
    # The clients' three ways of speaking the letters.
    speech(root / "server", {"sa": 8, "sb": 8, "sc": 8}, 1)
    speech(root / "few", {"sa": 4, "sb": 4, "sc": 4}, 1)
    # Normalisation per utterance removes its speaker's pattern.
    model = {k: v for k, v in simulated.CONFIG["model"].items() if k != "normalize"}
    simulated.config_file(root / "c.yaml", model=model)
    inside("train-tokens", root / "train" / "text", root / "tokens", "--token-type", "char").ok()
    return root


def begin(world: Path, path: Path, *more: str, stage1: int = 1, stage2: int = 1) -> Path:
    method = f"method_conf={{personal: {BLOCKS}, stage1: {stage1}, stage2: {stage2}}}"
    inside(
        *("init", path, "--config", world / "c.yaml", "--method", "decouplefl", "--set", method),
        *("--data", f"train={world / 'train'}", "--asset", f"tokens={world / 'tokens'}", *more),
    ).ok()
    return path


@pytest.fixture(scope="module")
def done(world) -> Path:
    """Run an experiment of DecoupleFL from start to end."""
    path = begin(world, world / "done")
    inside("rounds", path).ok()
    return path


@pytest.fixture(scope="module")
def unchanged(world) -> Path:
    """Return sent features of clients whose extractors are the initial one, by utterance."""
    path = begin(world, world / "unchanged", "--set", "training.batch_bins=1", stage1=0)
    inside("rounds", path, "--to", "1").ok()
    return path


def attack(experiment: Path, out: Path, *more: str) -> dict[tuple[str, str, str], dict[str, str]]:
    """Return the rows of attacks.tsv by client, attack and measure."""
    inside("attack", "features", experiment, out, "--resamples", "100", *more).ok()
    rows = read_tsv(out / "attacks.tsv", COLUMNS)
    found = {(row["client"], row["attack"], row["measure"]): row for row in rows}
    assert len(found) == len(rows)
    return found


# --- matching utterances


def extracted(experiment: Path, world: Path) -> dict[str, np.ndarray]:
    """Return the initial model's features of every utterance, through ESPnet's own modules."""
    model_conf = {k: v for k, v in simulated.CONFIG["model"].items() if k != "normalize"}
    tokens = (experiment / "tokens.txt").read_text().split()
    model = build_model(model_conf, tokens).eval()
    model.load_state_dict(load_file(experiment / "init.safetensors"))
    found = {}
    for name, matrix in kaldiio.load_scp(str(world / "train" / "feats.scp")).items():
        with torch.no_grad():
            hidden, mask = model.encoder.embed(torch.tensor(matrix)[None], None)
            hidden, _ = model.encoder.encoders[0](hidden, mask)
        found[name] = hidden[0].numpy()
    return found


def test_sent_utterances_are_found_by_the_seed(world, unchanged):
    """Each utterance matches the matrix that the initial model makes, and no other is near it."""
    expected = extracted(unchanged, world)
    federation = Federation(unchanged)
    for client, speakers in SPEAKERS.items():
        victim = open_victim(federation, 1, client, 10**6)
        names, sent = victim.audio.names, victim.sent.names
        assert len(names) == len(set(sent)) == speakers * EACH
        assert sent != sorted(sent)
        for index, name in enumerate(names):
            truth, found = expected[name], victim.sent.load([index])["speech"][0].numpy()
            step = (truth.max() - truth.min()) / 65535
            np.testing.assert_allclose(found, truth, atol=step + 1e-5)
            assert victim.speaker_names[victim.speakers[index]] == name[: name.rindex("-")]
            same_length = [
                other for other in names if other != name and len(expected[other]) == len(found)
            ]
            assert all(np.abs(found - expected[other]).max() > 0.1 for other in same_length)


def test_unadapted_features_of_unchanged_extractors_are_what_was_sent(unchanged, tmp_path):
    rows = attack(unchanged, tmp_path / "out")
    for client in ("au", "en"):
        for centring in ("", ", each centred"):
            row = rows[client, f"I, same audio{centring}", "top1%"]
            assert (row["value"], row["utterances"]) == ("100.00", str(SPEAKERS[client] * EACH))
        for measure in ("kNN%", "NMI", "ARI"):
            sent, before = (
                float(rows[client, f"II, {kind}", measure]["value"])
                for kind in ("personalised", "unadapted")
            )
            assert sent == pytest.approx(before, abs=0.01)
        assert not any("after round" in attack for _, attack, _ in rows)


def test_some_utterances_are_those_of_all(unchanged):
    federation = Federation(unchanged)
    whole, part = (open_victim(federation, 1, "au", most) for most in (48, 20))
    sent = dict(zip(whole.audio.names, whole.sent.names, strict=True))
    assert len(part.audio) == 20
    assert part.sent.names == [sent[name] for name in part.audio.names]
    texts = DataDir.read(federation.task.data_path("train"), "text").text
    assert part.texts == [texts[name] for name in part.audio.names]


# --- vectors with known speakers


def drawn(spread: float, seed: int, speakers: int = 15, each: int = 10) -> tuple:
    """Draw vectors of two kinds around means of speakers, shifted against each other."""
    random = np.random.default_rng(seed)
    numbers = np.repeat(np.arange(speakers), each)
    means = random.normal(0, spread, (speakers, 16))[numbers]
    one, other = (means + random.normal(0, 1, means.shape) for _ in range(2))
    return one + 3, other - 3, Speakers(numbers, 500, seed, "c")


def by_name(figures) -> dict[tuple[str, str], Figure]:
    return {(figure.attack, figure.measure): figure for figure in figures}


def test_speakers_in_vectors_are_found():
    one, other, speakers = drawn(2.0, 0)
    found = by_name(find_speakers(one, other, speakers))
    for audio in ("same", "other"):
        # A shift between kinds hides nothing once each kind is centred.
        assert found[f"I, {audio} audio, each centred", "EER%"].value < 5
        assert found[f"I, {audio} audio, each centred", "top1%"].value > 95
        assert found[f"I, {audio} audio, each centred", "MRR"].value > 0.95
    found = by_name(sort_speakers("II", other, speakers, (0, "x")))
    assert found["II", "kNN%"].value > 95
    assert found["II", "NMI"].value > 0.9
    assert found["II", "ARI"].value > 0.8
    for figure in found.values():
        assert figure.low <= figure.value <= figure.high
        assert figure.low > figure.chance
        assert (figure.speakers, figure.utterances) == (15, 150)


def test_an_utterance_is_the_mean_and_deviation_of_its_frames():
    random, lengths = np.random.default_rng(0), [7, 4]
    features = random.normal(3, 2, (2, 7, 5)).astype("f4")
    found = pooled(torch.from_numpy(features), torch.tensor(lengths)).numpy()
    for row, matrix, length in zip(found, features, lengths, strict=True):
        own = matrix[:length].astype("f8")
        np.testing.assert_allclose(row, [*own.mean(0), *own.std(0)], rtol=1e-5)


def test_what_all_have_in_common_is_taken_away_before_sorting():
    """Speakers that differ along the common mean are separated, though angles are small there."""
    random, numbers = np.random.default_rng(0), np.repeat([0, 1], 20)
    vectors = random.normal(0, 0.1, (40, 6))
    vectors[:, 0] += 10 + numbers
    found = by_name(sort_speakers("II", vectors, Speakers(numbers, 100, 0, "x"), (0, "x")))
    assert found["II", "kNN%"].value == 100
    assert found["II", "NMI"].value == found["II", "ARI"].value == 1


def test_a_probe_finds_speakers_in_what_hardly_varies():
    """A probe finds speakers in low variance after whitening, trained on other utterances only."""
    random, numbers = np.random.default_rng(0), np.repeat(np.arange(12), 20)
    vectors = random.normal(0, 100, (240, 16)) + 1000
    vectors[:, :4] = random.normal(0, 1e-3, (12, 4))[numbers] + random.normal(0, 1e-4, (240, 4))
    speakers = Speakers(numbers, 200, 0, "c")
    found = by_name([*probe_speakers("probe", vectors, speakers, (0, "x"))])["probe", "named%"]
    assert found.value > 80 and found.low > found.chance == pytest.approx(100 / 12)
    assert by_name(sort_speakers("II", vectors, speakers, (0, "x")))["II", "kNN%"].value < 30
    noise = random.normal(0, 1, (240, 500))
    (found,) = probe_speakers("probe", noise, speakers, (0, "x"))
    # Trained on these very vectors it would name all of them; three deviations of 240 at 8 %.
    assert found.value == pytest.approx(100 / 12, abs=5.4)


def test_a_probe_is_taught_with_four_fifths_of_each_speaker():
    numbers = np.repeat([0, 1, 2], [10, 5, 1])
    parts = parts_of(np.random.default_rng(1).permutation(numbers), np.random.default_rng(0))
    assert sorted(np.bincount(parts, minlength=5)) == [3, 3, 3, 3, 4]
    parts = parts_of(numbers, np.random.default_rng(0))
    for speaker, each in ((0, 2), (1, 1)):
        assert np.bincount(parts[numbers == speaker]).tolist() == [each] * 5


@pytest.mark.parametrize("seed", [3, 4])
def test_vectors_without_speakers_are_at_chance(seed):
    one, other, speakers = drawn(0.0, seed)
    figures = [*find_speakers(one, other, speakers), *sort_speakers("II", other, speakers, (0,))]
    assert len(figures) == 15
    for figure in figures:
        assert figure.low <= figure.chance <= figure.high, figure


def test_copies_of_a_recording_are_no_other_audio(tmp_path):
    """Three near-identical copies without speaker information are found and sorted at chance."""
    random = np.random.default_rng(5)
    speakers, each, copies = 12, 20, ("", "sp0.9-", "sp1.1-")
    numbers = np.tile(np.repeat(np.arange(speakers), each), len(copies))
    names = [f"{copy}{n:03d}" for copy in copies for n in range(speakers * each)]
    once = random.normal(size=(2, speakers * each, 16))
    kinds = {
        kind: np.tile(values, (len(copies), 1)) + random.normal(0, 0.01, (len(names), 16))
        for kind, values in zip(("unadapted", "personalised"), once, strict=True)
    }
    recorded = one_of_each(names, {name: name[-3:] for name in names})
    victim = Victim("c", [f"s{n}" for n in range(speakers)], numbers, None, None, None, recorded)
    found = by_name(attack_speakers(victim, kinds, tmp_path, Options(resamples=200)))
    assert len(found) == 20
    for (_, measure), figure in found.items():
        assert figure.utterances == speakers * each
        if measure in ("top1%", "kNN%", "named%"):
            # Three standard deviations of 240 utterances at 8 %; the copies would make 100.
            assert figure.value == pytest.approx(figure.chance, abs=5.4), figure


def test_of_a_recording_that_was_drawn_at_some_speeds_one_is_taken():
    names = ["b", "sp0.9-a", "sp0.9-b", "sp0.9-c", "sp1.1-a"]
    assert one_of_each(names, {name: name[-1] for name in names}).tolist() == [0, 1, 3]


def test_chance_of_other_audio_leaves_the_query_out():
    one, other, speakers = drawn(0.0, 0)
    found = by_name(find_speakers(one, other, speakers))
    assert found["I, same audio", "top1%"].chance == pytest.approx(100 * 10 / 150)
    assert found["I, other audio", "top1%"].chance == pytest.approx(100 * 9 / 149)


def test_draws_want_ten_speakers():
    for count, known in ((9, False), (10, True)):
        one, other, speakers = drawn(1.0, 0, count, 4)
        for figure in find_speakers(one, other, speakers):
            found = np.isfinite([figure.low, figure.high])
            assert found.all() if known or figure.measure != "MRR" else not found.any()


def exact(value: float, trials: int) -> list[float]:
    """Return Clopper and Pearson's interval of a rate in %, by quantiles of beta distributions."""
    errors = value / 100 * trials
    low = beta.ppf(0.025, errors, trials - errors + 1) if value else 0.0
    high = beta.ppf(0.975, errors + 1, trials - errors) if value < 100 else 1.0
    return pytest.approx([100 * low, 100 * high])


@pytest.mark.parametrize("count", [2, 3, 5, 9, 12])
def test_each_of_few_speakers_is_a_trial(count):
    """If all n of n trials are right, the bound is the rate at which 2.5 % of n would all be.

    From ten speakers on, draws of them have no error either, so that their interval has no width.
    """
    numbers = np.repeat(np.arange(count), 6)
    vectors = np.eye(count)[numbers] + np.random.default_rng(0).normal(0, 1e-3, (6 * count, count))
    speakers = Speakers(numbers, 50, 0, "c")
    figures = [
        *find_speakers(vectors, vectors, speakers),
        *sort_speakers("II", vectors, speakers, (0,)),
        *probe_speakers("probe", vectors, speakers, (0,)),
    ]
    bound = 100 * 0.025 ** (1 / count)
    measures = {figure.measure for figure in figures}
    assert measures == {"EER%", "top1%", "MRR", "kNN%", "NMI", "ARI", "named%"}
    for figure in figures:
        if figure.measure == "EER%":
            assert [figure.value, figure.low, figure.high] == pytest.approx([0, 0, 100 - bound])
        elif figure.measure.endswith("%"):
            assert [figure.value, figure.low, figure.high] == pytest.approx([100, bound, 100])
        else:
            assert figure.value == pytest.approx(1)
            assert np.isnan([figure.low, figure.high]).all() == (count < 10)
        (mean,) = over_clients([figure], 0)
        assert [mean.low, mean.high] == pytest.approx([figure.low, figure.high], nan_ok=True)


def test_one_speaker_has_no_interval_and_few_have_none_of_word_errors():
    alone = Speakers(np.zeros(4, int), 50, 0, "c")
    figure = alone.ratio("probe", "named%", np.ones(4), np.ones(4), 25, 100)
    assert figure.value == 100 and np.isnan([figure.low, figure.high]).all()
    (mean,) = over_clients([figure], 0)
    assert mean.speakers == 1 and np.isnan([mean.low, mean.high]).all()
    three = Speakers(np.array([0, 1, 2]), 50, 0, "c")
    right, words = np.array([1, 0, 0]), np.ones(3)
    known, unknown = (
        three.ratio("x", measure, right, words, 50, 100) for measure in ("kNN%", "WER%")
    )
    # By hand: at 0.84 %, one of three is right in 2.5 % of cases; at 90.57 % at most one is.
    assert [known.low, known.high] == pytest.approx([0.840, 90.570], abs=1e-3)
    assert 1 - (1 - known.low / 100) ** 3 == pytest.approx(0.025)
    wrong = 1 - known.high / 100
    assert wrong**3 + 3 * wrong**2 * (1 - wrong) == pytest.approx(0.025)
    assert np.isnan([unknown.low, unknown.high]).all()


def test_few_speakers_of_several_clients_count_as_in_the_smallest():
    figures = [
        Speakers(np.arange(count), 50, 0, "c").ratio("x", "kNN%", right, np.ones(count), 50, 100)
        for count, right in ((2, np.array([1, 0])), (5, np.array([1, 1, 1, 1, 0])))
    ]
    (mean,) = over_clients(figures, 0)
    assert mean.value == 65 and mean.speakers == 7
    assert [mean.low, mean.high] == exact(65, 2 * 2)


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_the_card_shades_what_guesses_do_not_reach(tmp_path, count):
    """Naming all speakers shows a leak if at most one in 40 ways of guessing names them all."""
    numbers = np.repeat(np.arange(count), 5)
    vectors = np.eye(count)[numbers]
    speakers = Speakers(numbers, 50, 0, "c")
    figures = over_clients(probe_speakers("probe", vectors, speakers, (0,)), 0)
    write_tsv(tmp_path / "attacks.tsv", COLUMNS, [one.row("average") for one in figures])
    (cell,) = read_card(tmp_path).cells
    ways = list(itertools.product(range(count), repeat=count))
    lucky = sum(way == tuple(range(count)) for way in ways) / len(ways)
    assert (cell.leak > 0) == (lucky <= 1 / 40) == (count >= 4)
    assert cell.text == f"100.0 [{100 * 0.025 ** (1 / count):.1f}, 100.0]"
    assert cell.counts == f"{count} people, {5 * count} trials"


@pytest.mark.parametrize(
    "sizes", [(7, 7, 6), (10, 4, 1, 1, 1), (1,) * 12], ids=["few", "some alone", "all alone"]
)
def test_the_mean_over_clients_has_an_interval_of_all_speakers(sizes):
    """With one utterance per speaker, a client's value is the mean of its speakers'."""
    random = np.random.default_rng(3)
    values = [random.normal(50 + 2 * n, 10, size) for n, size in enumerate(sizes)]
    figures = []
    for n, one in enumerate(values):
        speakers = Speakers(np.arange(len(one)), 20_000, 0, f"c{n}")
        figures.append(speakers.ratio("III", "WER%", one, np.ones(len(one)), 30.0 + n))
    (found,) = over_clients(figures, 0)
    assert found.value == pytest.approx(np.mean([one.mean() for one in values]))
    assert found.chance == pytest.approx(30 + (len(sizes) - 1) / 2)
    assert found.speakers == found.utterances == sum(sizes)
    # The textbook's interval of a sum of means. Clients of one speaker are a sample of such ones.
    alone = np.concatenate([one for one in values if len(one) == 1] or [[]])
    groups = [(one, 1) for one in values if len(one) > 1] + [(alone, len(alone))] * any(alone)
    parts = [(clients**2 * one.var(ddof=1) / len(one), len(one) - 1) for one, clients in groups]
    variance = sum(part for part, _ in parts)
    free = variance**2 / sum(part**2 / less for part, less in parts)
    middle = (found.low + found.high) / 2
    half = student.ppf(0.975, free) * np.sqrt(variance) / len(values)
    assert found.high - found.low == pytest.approx(2 * half, rel=0.04)
    assert middle == pytest.approx(found.value, abs=0.06 * half)


@pytest.mark.parametrize("sizes", [(6, 7, 8), (2,) * 6, (2, 2, 20), (3, 30, 30), (1,) * 12])
def test_the_interval_of_clients_means_holds_the_truth(sizes):
    """Percentiles of the draws alone hold it in 91, 77, 68, 79 and 92 % of such cases."""
    random, held, number_of_worlds = np.random.default_rng(1), 0, 300
    for world in range(number_of_worlds):
        figures = [
            Speakers(np.arange(n), 200, world, f"c{number}").ratio(
                "III", "WER%", random.normal(50, 10, n), np.ones(n)
            )
            for number, n in enumerate(sizes)
        ]
        (found,) = over_clients(figures, world)
        held += found.low <= 50 <= found.high
    assert 0.9 < held / number_of_worlds < 0.995


def test_one_client_of_one_speaker_tells_no_spread_of_such_clients():
    figures = [
        Speakers(np.arange(n), 50, 0, "c").ratio("x", "kNN%", np.arange(n) % 2, np.ones(n), 50, 100)
        for n in (20, 20, 1)
    ]
    (mean,) = over_clients(figures, 0)
    assert [mean.low, mean.high] == exact(mean.value, 3)


def test_the_mean_over_clients_wants_ten_speakers_and_values():
    def figure(count: int, value: float) -> Figure:
        speakers = Speakers(np.arange(count), 50, 0, "c")
        return speakers.ratio("III", "WER%", value * np.ones(count), np.ones(count))

    nine, ten = (over_clients([figure(5, 1.0), figure(n, 2.0)], 0)[0] for n in (4, 5))
    assert np.isnan([nine.low, nine.high]).all() and nine.value == 1.5
    assert (ten.low, ten.high, ten.speakers) == (1.5, 1.5, 10)
    assert over_clients([figure(10, np.nan), figure(10, 2.0)], 0)[0].value == 2
    assert over_clients([figure(10, np.nan)], 0) == []


@pytest.mark.parametrize(("count", "known"), [(2, False), (5, True)])
def test_draws_of_one_speaker_alone_say_nothing_of_attacks_on_speakers(count, known):
    """With two speakers, half of the draws have one alone: too many for an interval of the mean."""
    one, other, speakers = drawn(1.0, 0, count, 10)
    of_many = (speakers.draws > 0).sum(1) > 1
    assert 0 < (~of_many).sum() < 300
    figures = [*find_speakers(one, other, speakers), *sort_speakers("II", other, speakers, (0,))]
    for figure in figures:
        (mean,) = over_clients([figure] * 5, 0)
        lost = np.isnan(figure.drawn)
        if figure.measure in ("EER%", "NMI", "ARI"):
            assert (lost == ~of_many).all()
            if figure.measure == "EER%" and not known:
                # Five clients of two speakers are ten trials.
                assert [mean.low, mean.high] == exact(mean.value, 10)
            else:
                assert np.isfinite([mean.low, mean.high]).all() == known
        else:
            assert not lost.any() and mean.low <= mean.value <= mean.high


def test_speakers_of_one_utterance_ask_for_no_other():
    random = np.random.default_rng(0)
    speakers = Speakers(np.array([0, 0, 1, 2]), 50, 0, "c")
    found = by_name(find_speakers(random.normal(size=(4, 3)), random.normal(size=(4, 3)), speakers))
    for measure in ("EER%", "top1%", "MRR"):
        figure = found["I, other audio", measure]
        assert (figure.speakers, figure.utterances) == (1, 2)
    alone = Speakers(np.arange(4), 50, 0, "c")
    for figure in find_speakers(random.normal(size=(4, 3)), random.normal(size=(4, 3)), alone):
        assert np.isnan(figure.value) == figure.attack.startswith("I, other")


def test_neighbours_vote_and_the_nearest_breaks_ties():
    assert vote(np.array([[1, 2, 2], [3, 1, 2], [2, 1, 1]])).tolist() == [2, 3, 1]
    places = np.array([[1, 0], [1, 0.1], [0, 1], [1, 0.3]])
    assert nearest(places, 2).tolist() == [[1, 3], [3, 0], [3, 1], [1, 0]]


# --- the command


def test_all_attacks(done, world, tmp_path):
    """Speakers' patterns survive, and so does the speech once features are rescaled."""
    rows = attack(done, tmp_path / "out", "--server-data", world / "server", "--epochs", "30")
    assert {client for client, *_ in rows} == {"-", *SPEAKERS, "average"}
    neighbours = rows["au", "II, personalised", "kNN%"]
    assert float(neighbours["low"]) > float(neighbours["chance"])
    assert (neighbours["speakers"], neighbours["utterances"]) == ("12", "48")
    of_three = rows["en", "II, personalised", "kNN%"]
    bounds = [float(of_three[name]) for name in ("low", "high")]
    assert bounds == pytest.approx(exact(float(of_three["value"]), 3).expected, abs=0.01)
    assert rows["en", "II, personalised", "NMI"]["low"] == "-"
    assert rows["en", "III, initial classifier", "WER%"]["low"] == "-"
    mean, own = (rows[client, "II, personalised", "kNN%"] for client in ("average", "en"))
    between = (float(neighbours["value"]) + float(own["value"])) / 2
    assert float(mean["value"]) == pytest.approx(between, abs=0.01)
    assert (mean["speakers"], mean["utterances"]) == ("15", "60")
    assert float(mean["chance"]) < float(mean["low"]) <= between <= float(mean["high"])
    of_one = {attack for client, attack, _ in rows if client == "in"}
    assert all(attack.startswith(("III", "IV")) for attack in of_one)
    for client in SPEAKERS:
        for name in ("III, initial classifier", "III, classifier after round 4"):
            assert float(rows[client, name, "WER%"]["value"]) >= 0
    row = rows["au", "IV, recovered, rescaled", "MCD dB, centred"]
    as_sent = rows["au", "IV, recovered", "MCD dB, centred"]
    assert float(row["value"]) < min(float(row["chance"]), float(as_sent["value"]))
    held = rows["-", "IV, held out", "MCD dB"]
    assert float(held["value"]) < float(held["chance"])
    for client, pictured in (("au", True), ("en", True), ("in", False)):
        path = tmp_path / "out" / f"tsne.{client}.png"
        assert path.exists() == pictured
        if pictured:
            assert Image.open(path).format == "PNG" and path.stat().st_size < 50_000


def test_the_server_reads_and_inverts_features_of_its_own_extractor(unchanged, world, tmp_path):
    """Attack III is then plain decoding, except for quantisation; IV beats a mean frame."""
    rows = attack(unchanged, tmp_path / "out", "--server-data", world / "few", "--epochs", "12")
    for client in SPEAKERS:
        sent, plain = (
            float(rows[client, name, "WER%"]["value"])
            for name in ("III, initial classifier", "IV, true filterbanks")
        )
        assert sent == pytest.approx(plain, abs=5)
        row = rows[client, "IV, recovered", "MCD dB, centred"]
        assert float(row["value"]) < float(row["chance"])
    assert float(rows["au", "IV, recovered", "MCD dB"]["high"]) < float(
        rows["au", "IV, recovered", "MCD dB"]["chance"]
    )


def test_the_same_command_gives_the_same_bytes(done, world, tmp_path, cli):
    more = ("--server-data", world / "few", "--epochs", "2", "--clients", "en")
    kept = tmp_path / "decoders"
    for name, keep in (("one", ()), ("two", ("--decoders", kept)), ("three", ("--decoders", kept))):
        started = time.time()
        options = ("--resamples", "50", *more, *keep)
        result = cli("attack", "features", done, tmp_path / name, *options).ok()
    one, two, three = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("one", "two", "three")
    )
    assert set(one) == {"attacks.tsv", "tsne.en.png"} and one == two == three
    (decoder,) = kept.iterdir()
    assert decoder.stat().st_mtime < started, "a decoder that is kept is not trained again"
    other = ("--epochs", "1", "--decoders", kept, "--server-data", world / "few")
    cli("attack", "features", done, tmp_path / "four", "--clients", "en", *other).ok()
    assert len(list(kept.iterdir())) == 2, "a decoder trained otherwise is another one"
    # The same tensors in a model with normalisation are another extractor.
    normal = ("--set", "model.normalize=utterance_mvn", "--start", done / "init.safetensors")
    path = begin(world, tmp_path / "normal", *normal, stage1=0)
    cli("rounds", path, "--to", "1").ok()
    options = ("--resamples", "50", *more, "--decoders", kept)
    cli("attack", "features", path, tmp_path / "five", *options).ok()
    assert len(list(kept.iterdir())) == 3
    lines = result.out.splitlines()
    assert lines[0].split() == list(COLUMNS)
    assert len(lines) == len(read_tsv(tmp_path / "one" / "attacks.tsv", COLUMNS)) + 1


def test_a_client_of_one_speaker_and_one_that_was_refused(world, tmp_path, cli):
    path = begin(world, tmp_path / "exp", stage1=0)
    cli("sample", path).ok()
    cli("train-local", path).ok()
    scp = path / "round_0001" / "features.en.scp"
    scp.write_text(scp.read_text().replace("features.en.ark", "features.au.ark"))
    cli("aggregate", path).ok()
    result = cli("attack", "features", path, tmp_path / "out").ok()
    assert "in: a single speaker" in result.err
    assert re.search(r"^en: not attacked: .+\.scp", result.err, re.MULTILINE)
    rows = read_tsv(tmp_path / "out" / "attacks.tsv", COLUMNS)
    assert {row["attack"] for row in rows if row["client"] == "in"} == {"III, initial classifier"}
    assert not any(row["client"] == "en" for row in rows)
    out = tmp_path / "nobody"
    result = cli("attack", "features", path, out, "--clients", "en")
    assert result.code == 1
    assert "en: not attacked" in result.err and "no client has features to attack" in result.err
    assert not out.exists()


def test_transcripts_that_were_held_back_or_are_not_there(world, tmp_path, cli):
    """Training without labels reads no text; attacks read it where it exists."""
    shutil.copytree(world / "train", tmp_path / "train")
    for name in ("c.yaml", "tokens"):
        (tmp_path / name).symlink_to(world / name)
    path = begin(tmp_path, tmp_path / "exp", "--set", "training.labels=continuous", stage1=0)
    cli("rounds", path, "--to", "1").ok()
    measured, one = ("en", "III, initial classifier", "WER%"), ("--clients", "en")
    found = attack(path, tmp_path / "with", *one)[measured]
    # A model's labels may replace transcripts, which are then given.
    text = tmp_path / "train" / "text"
    right = text.read_text()
    text.write_text(re.sub(r"(?m)^(\S+) .*$", r"\1 x", right))
    (tmp_path / "right").write_text(right)
    others = attack(path, tmp_path / "others", *one)
    assert others[measured]["value"] != found["value"]
    given = attack(path, tmp_path / "given", *one, "--text", tmp_path / "right")
    assert given[measured] == found
    (tmp_path / "train" / "text").unlink()
    result = cli("attack", "features", path, tmp_path / "without").ok()
    assert result.err.count("the train data have no text") == len(SPEAKERS)
    rows = read_tsv(tmp_path / "without" / "attacks.tsv", COLUMNS)
    measures = {"EER%", "top1%", "MRR", "kNN%", "NMI", "ARI", "named%"}
    assert {row["measure"] for row in rows} == measures


def test_mistakes_are_told_in_one_line(done, world, tmp_path, cli):
    out = tmp_path / "out"
    cli("attack", "features", done, out, "--clients", "xx").fails(1, "'xx'", "au, en, in")
    cli("attack", "features", done, out, "--clients", ",").fails(2, "--clients")
    mine = ("--server-data", world / "train")
    cli("attack", "features", done, out, *mine).fails(1, "belong to clients", "give speech that")
    early = begin(world, tmp_path / "early")
    cli("attack", "features", early, out).fails(1, "round 2", "fedtools rounds")
    silent = begin(world, tmp_path / "silent", stage2=0)
    cli("attack", "features", silent, out).fails(1, "stage2")
    plain = tmp_path / "plain"
    options = ("--data", f"train={world / 'train'}", "--asset", f"tokens={world / 'tokens'}")
    cli("init", plain, "--config", world / "c.yaml", "--method", "fedavg", *options).ok()
    cli("attack", "features", plain, out).fails(1, "config.yaml", "decouplefl")
    assert not out.exists()


def at_speeds(whole: DataDir, path: Path, names: list[str]) -> Path:
    """Make some utterances at two speeds, here with the same features."""
    data = DataDir(path, others={SPEED_TABLE: {}})
    for name in names:
        for prefix, speed in (("", "1.0"), ("sp0.9-", "0.9")):
            data.utt2spk[prefix + name] = prefix + whole.utt2spk[name]
            data.feats_scp[prefix + name] = whole.feats_scp[name]
            data.others[SPEED_TABLE][prefix + name] = speed
    path.mkdir()
    data.write()
    return path


def test_speakers_are_looked_for_in_one_copy_of_a_recording(unchanged, world, tmp_path):
    """Figures equal those of an experiment without the copies."""
    whole = DataDir.read(world / "train")
    for name in ("c.yaml", "tokens"):
        (tmp_path / name).symlink_to(world / name)
    data = DataDir.read(at_speeds(whole, tmp_path / "train", whole.utterances), "utt2spk")
    for prefix in ("", "sp0.9-"):
        data.text |= {prefix + name: text for name, text in whole.text.items()}
        data.utt2client |= {prefix + name: client for name, client in whole.utt2client.items()}
    data.write()
    more = ("--set", "training.batch_bins=1", "--start", unchanged / "init.safetensors")
    path = begin(tmp_path, tmp_path / "exp", *more, stage1=0)
    inside("rounds", path, "--to", "1").ok()
    once, copied = (attack(one, tmp_path / one.name) for one in (unchanged, path))
    assert once.keys() == copied.keys()
    for key, row in once.items():
        speakers = key[1].startswith(("I,", "II,", "probe,"))
        expected = row if speakers else row | {"utterances": f"{2 * int(row['utterances'])}"}
        assert copied[key] == expected


def test_speech_of_one_server_speaker_is_held_out_at_all_speeds(world, done, tmp_path):
    whole, federation = DataDir.read(world / "server"), Federation(done)
    names = [name for name in whole.utterances if whole.utt2spk[name] == "sa-v00"]
    path = at_speeds(whole, tmp_path / "one", names)
    for seed in range(5):
        train, held, numbers = read_server_data(federation, path, SPEAKERS, seed)
        assert set(numbers) == {0}
        recordings = [{n.removeprefix("sp0.9-") for n in part.names} for part in (train, held)]
        assert not recordings[0] & recordings[1] and set(names) == recordings[0] | recordings[1]
        assert all(
            len(part) == 2 * len(n) for part, n in zip((train, held), recordings, strict=True)
        )
    with pytest.raises(UserError, match="one: a single recording cannot be both"):
        shutil.rmtree(path)
        read_server_data(federation, at_speeds(whole, path, names[:1]), SPEAKERS, 0)


def test_speakers_of_the_server_are_held_out_as_a_whole(world, done):
    """No speaker of the decoder's training set is in its evaluation set."""
    owner, federation = DataDir.read(world / "server").utt2spk, Federation(done)
    drawn = set()
    for seed in range(5):
        parts = read_server_data(federation, world / "server", SPEAKERS, seed)[:2]
        train, held = ({owner[name] for name in part.names} for part in parts)
        assert held and not train & held and train | held == set(owner.values())
        assert sum(len(part) for part in parts) == len(owner)
        drawn.add(frozenset(held))
    assert len(drawn) > 1


def test_clients_speech_at_another_speed_is_still_theirs(world, done, tmp_path):
    whole = DataDir.read(world / "train")
    name = whole.client_utterances("en")[0]
    path = at_speeds(whole, tmp_path / "data", [name])
    data = DataDir.read(path, "utt2spk", "feats.scp")
    data.restrict([f"sp0.9-{name}"]).write()
    with pytest.raises(UserError, match=f"1 utterances belong to clients, such as '{name}'"):
        read_server_data(Federation(done), path, SPEAKERS, 0)


def test_features_of_other_audio_are_refused(world, tmp_path, cli):
    """The server accepts them, since it has nothing to compare them with."""
    path = begin(world, tmp_path / "exp", stage1=0)
    cli("sample", path).ok()
    cli("train-local", path).ok()
    scp = path / "round_0001" / "features.en.scp"
    scp.write_text(scp.read_text().replace(sent_name("en", 11), sent_name("en", 99)))
    cli("aggregate", path).ok()
    cli("attack", "features", path, tmp_path / "out").fails(1, "features.en.scp", "restore the")


# --- recovering filterbanks


def test_where_frames_lie(done):
    assert window(Federation(done)) == Window(4, 7)
    assert Window(4, 7).offset == 1 and Window(1, 1).offset == 0


def test_what_is_recovered_does_not_depend_on_the_batch():
    torch.manual_seed(0)
    inverter = Inverter(6, 5, Window(4, 7)).eval()
    features = torch.randn(2, 9, 6)
    with torch.no_grad():
        both = inverter.filterbanks(features, torch.tensor([9, 5]))
        alone = inverter.filterbanks(features[1:, :5], torch.tensor([5]))
    assert both.shape == (2, 36, 5)
    np.testing.assert_allclose(both[1, :20], alone[0], atol=1e-5)
