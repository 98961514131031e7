"""The attack on updates: against numpy by hand, and on updates of a planted truth."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import keywords
import numpy as np
import pytest
import updates_world
from conftest import inside
from fmp_world import begin as begin_counts
from rescored_world import make_stream
from safetensors.numpy import load_file, save_file
from scipy.stats import binom
from updates_world import begin, data_with_constants, plant, sent, speakers

from fedtools.attack.speakers.cohort import blocks, combine, cosines, normed, score_pairs
from fedtools.attack.speakers.verify import COLUMNS
from fedtools.attack.updates import find_updates, multiply, parts_of
from fedtools.core.tables import read_tsv
from fedtools.federation.federation import Federation
from fedtools.score.calibration import cllr, fit_ratios
from fedtools.score.verification import equal_error_rate

PEOPLE, TALKS, MODELS = speakers(12), ("a", "b"), (1, 2)
CLIENTS = [f"{one}-{talk}{number}" for one in PEOPLE for talk in TALKS for number in MODELS]
FEW = ("--resamples", "20", "--others", "0", "--set", "weights.scores=parts")


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Make twelve speakers with two talks of two models each, and models of six other people."""
    root = tmp_path_factory.mktemp("updates")
    data_with_constants(root / "exp_train", CLIENTS, 1)
    begin(root, "exp")
    known = [f"{one}-a{number}" for one in speakers(6, "k") for number in MODELS]
    data_with_constants(root / "known_train", known, 1, seed=3)
    begin(root, "known", "--start", str(root / "exp" / "init.safetensors"))
    lines = ["model\tspeaker\tgender\ttalks\n"]
    lines += [f"{one}\t{one[:3]}\tf\t{one[:5]}\n" for one in [*CLIENTS, *known]]
    (root / "models.tsv").write_text("".join(lines))
    return root


def flat(state: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([state[name].reshape(-1) for name in sorted(state)])


def by_hand(updates: np.ndarray, one: int, other: int, cohort: list[int]) -> float:
    """Return the cosine of two updates, centred on the mean of some others."""
    middle = updates[cohort].mean(0)
    a, b = updates[one] - middle, updates[other] - middle
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def scores_of(path: Path) -> dict[tuple[str, str], float]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {(one, other): float(score) for one, other, score in lines}


def rates(folder: Path, trials: str = "easy") -> dict[str, float]:
    rows = read_tsv(folder / "weights.tsv", COLUMNS)
    return {row["layer"]: float(row["EER%"]) for row in rows if row["trials"] == trials}


# --- products and cosines


@pytest.mark.parametrize("piece_bytes", [64, 5000, 1 << 20])
def test_products_of_files_are_those_of_whole_updates(world, piece_bytes):
    found = find_updates(Federation(world / "exp"), [1])
    assert list(found.models) == CLIENTS
    whole, parts = sent(world / "exp"), parts_of(found.spec)
    assert sorted(name for names in parts.values() for name in names) == sorted(whole["s00-a1"])
    for one in multiply(list(found.models.values()), parts, piece_bytes):
        rows = np.stack([flat({n: whole[c][n] for n in parts[one.part]}) for c in CLIENTS])
        np.testing.assert_allclose(one.squares, (rows**2).sum(1), rtol=1e-4)
        # From any origin: distances are those of the updates.
        lengths = np.diagonal(one.products)
        apart = lengths[:, None] + lengths - 2 * one.products
        expected = ((rows[:, None] - rows) ** 2).sum(2)
        np.testing.assert_allclose(apart, expected, rtol=1e-3, atol=1e-4 * expected.max())


def test_what_all_have_in_common_costs_no_digits(world, tmp_path):
    """The common part is a thousand times as large as the rest."""
    path = shutil.copytree(world / "exp", tmp_path / "exp")
    common, own = np.random.default_rng(0), np.random.default_rng(1)
    shared = {k: 100 * common.normal(size=v.shape) for k, v in sent(path)["s00-a1"].items()}
    plant(
        path, lambda _, start: {k: shared[k] + own.normal(0, 0.1, shared[k].shape) for k in start}
    )
    found = find_updates(Federation(path), [1])
    parts, whole = parts_of(found.spec), sent(path)
    some = blocks([name[:3] for name in CLIENTS], np.zeros(len(CLIENTS), bool), 0)
    for one in multiply(list(found.models.values()), parts):
        rows = np.stack([flat({n: whole[c][n] for n in parts[one.part]}) for c in CLIENTS])
        scores = score_pairs(one.products, some, cosines)
        block = some[1]
        pairs = [(block.rows[0], block.columns[1]), (block.rows[2], block.columns[0])]
        for pair in pairs:
            expected = by_hand(rows, *pair, block.cohort.tolist())
            assert scores[pair] == pytest.approx(expected, abs=2e-3)


def test_scores_are_cosines_centred_on_the_models_of_a_cohort(world, tmp_path):
    cohort = ("--cohort", world / "known", "--models", world / "models.tsv")
    inside("attack", "weights", world / "exp", tmp_path, *cohort, *FEW).ok()
    whole = sent(world / "exp") | sent(world / "known")
    names = list(whole)
    others = [index for index, name in enumerate(names) if name.startswith("k")]
    for part, tensors in (
        ("encoder.layers.0", ("affine.weight", "affine.bias")),
        ("encoder.layers.2.statistics", ("norm.running_mean", "norm.running_var")),
    ):
        layer = part.removesuffix(".statistics")
        rows = np.stack([flat({n: whole[c][f"{layer}.{n}"] for n in tensors}) for c in names])
        found = scores_of(tmp_path / f"weights.{part}.easy")
        assert len(found) == len(CLIENTS) * (len(CLIENTS) - 1) // 2
        for one, other in list(found)[::97]:
            expected = by_hand(rows, names.index(one), names.index(other), others)
            assert found[one, other] == pytest.approx(expected, abs=1e-4)


def test_a_pair_is_scored_by_models_of_neither_of_its_people():
    """Without a given cohort: by brute force, and all of the pairs."""
    people = [f"p{number // 2}" for number in range(14)]
    rows = np.random.default_rng(0).normal(size=(14, 9))
    some = blocks(people, np.zeros(14, bool), 0)
    found = score_pairs(rows @ rows.T, some, cosines)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, found.T)
    seen = set()
    for block in some:
        tested = {people[index] for index in (*block.rows, *block.columns)}
        assert not tested & {people[index] for index in block.cohort}
        for one in block.rows:
            for other in block.columns:
                seen |= {(one, other), (other, one)}
                expected = by_hand(rows, one, other, block.cohort.tolist())
                assert found[one, other] == pytest.approx(expected, abs=1e-9)
    assert seen == {(one, other) for one in range(14) for other in range(14)}


def test_normed_scores_are_deviations_from_those_with_the_cohort():
    rows = np.random.default_rng(0).normal(size=(9, 5))
    known = np.arange(9) >= 4
    (block,) = blocks([f"p{number}" for number in range(9)], known, 0)
    found = normed(rows @ rows.T, block)
    cohort = [4, 5, 6, 7, 8]
    for one, other in combinations(range(4), 2):
        sides = []
        for side in (one, other):
            others = [by_hand(rows, side, index, cohort) for index in cohort]
            score = by_hand(rows, one, other, cohort)
            sides.append((score - np.mean(others)) / np.std(others))
        assert found[one, other] == pytest.approx(np.mean(sides), abs=1e-9)


# --- planted speakers


def planted(kind: str) -> Callable[[str, dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Make changes with a direction of the speaker, the talk or neither, and equal noise."""
    directions: dict[str, np.random.Generator] = {}
    noise = np.random.default_rng(9)

    def change(client: str, start: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        key = {"speaker": client[:3], "channel": client[:5], "nothing": ""}[kind]
        seed = [ord(letter) for letter in key] or [0]
        directions[client] = np.random.default_rng(seed)
        return {
            name: 0.01 * directions[client].normal(size=value.shape)
            + 0.01 * noise.normal(size=value.shape)
            for name, value in sorted(start.items())
        }

    return change


@pytest.fixture(scope="module", params=["speaker", "channel", "nothing"])
def truth(request, world, tmp_path_factory) -> tuple[str, Path]:
    root = tmp_path_factory.mktemp(request.param)
    path = shutil.copytree(world / "exp", root / "exp")
    plant(path, planted(request.param))
    options = ("--models", world / "models.tsv", *FEW)
    inside("attack", "weights", path, root / "out", *options).ok()
    return request.param, root / "out"


def test_planted_speakers_are_found_and_others_are_not(truth):
    """Planted directions separate a speaker's recordings from trials of other speakers."""
    kind, out = truth
    errors = {trials: rates(out, trials) for trials in ("easy", "same", "other")}
    assert {"encoder.layers.0", "all", "together"} <= errors["easy"].keys()
    for part in ("encoder.layers.0", "encoder.layers.2", "all", "together"):
        scores = scores_of(out / f"weights.{part}.easy")
        pairs = np.array([
            "same" if one[:5] == other[:5] else "other" if one[:3] == other[:3] else "nobody"
            for one, other in scores
        ])  # fmt: skip
        values = np.array(list(scores.values()))
        found = {}
        for recording in ("same", "other"):
            chosen = pairs == "nobody"
            chosen |= pairs == recording
            found[recording] = equal_error_rate(values[chosen], pairs[chosen] == recording)
            # All pairs are in the trials, so that this is the table's figure, too.
            assert errors[recording][part] == pytest.approx(found[recording], abs=0.01)
            count = int((pairs == recording).sum())
            known = kind == "speaker" or (kind == "channel" and recording == "same")
            if known:
                assert found[recording] < 2, (part, recording)
            else:
                low, high = 100 * np.array(binom.interval(0.9999, count, 0.5)) / count
                assert low <= found[recording] <= high, (part, recording, found)
        if kind == "speaker":
            assert errors["easy"][part] < 2


def test_ratios_of_planted_speakers_are_worth_something(truth):
    kind, out = truth
    row = next(r for r in read_tsv(out / "weights.tsv", COLUMNS) if r["layer"] == "together")
    assert (row["scores"], row["trials"]) == ("regression", "easy")
    scores = scores_of(out / "weights.together.easy")
    same = np.array([one[:3] == other[:3] for one, other in scores])
    expected = cllr(np.array(list(scores.values())), same)
    assert float(row["Cllr"]) == pytest.approx(expected, abs=2e-3)
    assert float(row["Cllr"]) < 0.2 if kind == "speaker" else float(row["Cllr"]) > 0.4


# --- the regression


def layers_of(seed: int, people: list[str], told: float = 3.0) -> list[np.ndarray]:
    """Return products of two layers, of which the first separates people."""
    random = np.random.default_rng(seed)
    own = {one: random.normal(0, told, 20) for one in sorted(set(people))}
    first = np.stack([own[one] for one in people]) + random.normal(size=(len(people), 20))
    rows = first, random.normal(size=(len(people), 20))
    return [one @ one.T for one in rows]


def test_a_regression_has_never_seen_whom_it_is_tested_on():
    """Speaker labels within a block do not change that block's regression."""
    people = [f"p{number // 2:02d}" for number in range(40)]
    layers = layers_of(0, people)
    some = blocks(people, np.zeros(40, bool), 0)
    _, fitted = combine(layers, people, some, others=0, seed=0)
    assert len(fitted) == len(some) == 15
    for number, (block, before) in enumerate(zip(some, fitted, strict=True)):
        liar = list(people)
        tested = sorted({*block.rows, *block.columns})
        for index in tested:
            liar[index] = people[tested[(tested.index(index) + 1) % len(tested)]]
        _, (after,) = combine(layers, liar, [block], others=0, seed=0)
        np.testing.assert_array_equal(after.weights, before.weights, err_msg=str(number))
        assert after.offset == before.offset
        # Their updates, too: planted ones, far apart.
        moved = [one.copy() for one in layers]
        for one in moved:
            one[np.ix_(tested, tested)] *= 7
        _, (after,) = combine(moved, people, [block], others=0, seed=0)
        np.testing.assert_array_equal(after.weights, before.weights)
    # Other labels of its training people give another regression.
    liar = [people[(index * 7) % 40] for index in range(40)]
    _, others = combine(layers, liar, some[:1], others=0, seed=0)
    assert not np.allclose(others[0].weights, fitted[0].weights)


def test_ratios_are_calibrated_on_scores_whose_ratios_are_known():
    """For two normal distributions, the ratio is linear with known weights and offset."""
    random = np.random.default_rng(0)
    targets = np.arange(22_000) < 2_000
    middles = np.array([[0.0, 0.0, 0.0], [2.0, -1.0, 0.0]])
    scores = middles[targets.astype(int)] + random.normal(size=(22_000, 3))
    found = fit_ratios(scores, targets)
    # log N(x; m, 1) - log N(x; 0, 1) = m x - m m / 2, whatever the numbers of trials.
    np.testing.assert_allclose(found.weights, middles[1], atol=0.1)
    assert found.offset == pytest.approx(-2.5, abs=0.15)


# --- refusals


def parts(folder: Path) -> dict[str, str]:
    return {row["part"]: row["status"] for row in read_tsv(folder / "parts.tsv", None)}


@pytest.mark.parametrize(
    ("network", "why"),
    [
        ("dscnn", "sees patches of its input"),
        ("mhattrnn", "sees patches of its input"),
        ("resnet", "has no bias"),
        ("transformer", ""),
    ],
)
def test_keyword_networks(tmp_path, network, why):
    people = speakers(6)
    small = {"dscnn": {"channels": 4, "blocks": 1}, "resnet": {"channels": 4, "layers": 4}}
    small["mhattrnn"] = {"units": 4, "heads": 2, "layers": 1, "filters": 2}
    small["transformer"] = {"width": 8, "heads": 2, "layers": 1, "feedforward": 8}
    model = {"network": network, "network_conf": small[network]}
    keywords.config_file(tmp_path / "c.yaml", rounds=2, keep_updates=True, model=model)
    clips = keywords.pack(tmp_path / "train", {one: [0, 0, 4, 4] for one in people})
    valid = keywords.pack(tmp_path / "valid", {"zoe": [2, 2, 4, 4]})
    inside(
        *("init", tmp_path / "exp", "--config", tmp_path / "c.yaml", "--method", "fedavg"),
        *("--data", f"train={clips}", "--data", f"valid={valid}"),
        *("--set", "clients_per_round=null"),
    ).ok()
    inside("rounds", tmp_path / "exp").ok()
    two = ("--round", "1", "--round", "2")
    done = inside("attack", "weights", tmp_path / "exp", tmp_path / "out", *two, *FEW).ok()
    found = parts(tmp_path / "out")
    assert found["head"] == "ok" and found["together"] == "ok"
    assert rates_are_there(tmp_path / "out", "head")
    if why:
        assert found["input"].startswith("not applicable: the first layer, first, ")
        assert why in found["input"] and why in done.err
    else:
        assert found["input"] == "ok"
        assert found["constant"] == "not applicable: the input has no frames of features"


def rates_are_there(folder: Path, part: str) -> bool:
    rows = read_tsv(folder / "weights.tsv", COLUMNS)
    return any(row["layer"] == part and 0 <= float(row["low"]) <= 100 for row in rows)


def test_counts_of_words_are_compared_and_nothing_is_read_out_of_them(tmp_path):
    """Rescoring clients send no models: a client is compared with itself."""
    path = begin_counts(make_stream(tmp_path / "stream"), tmp_path / "exp")
    two = ("--round", "1", "--round", "2")
    inside("attack", "weights", path, tmp_path / "out", *two, *FEW).ok()
    found = parts(tmp_path / "out")
    assert found["counts"] == "ok"
    assert found["input"] == "not applicable: clients send no models"
    assert found["together"].startswith("not applicable: no cohort: models of 2 people")
    assert rates_are_there(tmp_path / "out", "counts")


def test_where_clients_send_nothing_a_line_says_so(world, tmp_path):
    path = tmp_path / "exp"
    inside(
        *("init", path, "--config", world / "exp.yaml", "--method", "centralized"),
        *("--data", f"train={world / 'exp_train'}", "--asset", f"tokens={world / 'tokens'}"),
        *("--set", "rounds=1"),
    ).ok()
    inside("rounds", path).ok()
    done = inside("attack", "weights", path, tmp_path / "out").ok()
    assert done.err == "all: not applicable: in round 1 clients send no tensors\n"
    assert parts(tmp_path / "out") == {"all": done.err.strip().removeprefix("all: ")}
    assert read_tsv(tmp_path / "out" / "weights.tsv", COLUMNS) == []


# --- files of others


def changed(world: Path, folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> Path:
    path = shutil.copytree(world / "exp", folder / "exp")
    update = path / "round_0001" / "update.1.safetensors"
    state = load_file(update)
    change(state)
    save_file(state, update)
    return path


def test_updates_that_are_not_finite_or_nothing_are_refused_by_name(world, tmp_path):
    start = load_file(world / "exp" / "round_0001" / "global.safetensors")

    def change(state: dict[str, np.ndarray]) -> None:
        state["encoder.layers.1.affine.weight"][0, 0, 0, 0] = np.nan
        state["ctc.ctc_lo.bias"][1, 0] = 3e38
        for name, value in state.items():
            value[2] = start[name]

    path = changed(world, tmp_path, change)
    rows = read_tsv(path / "round_0001" / "update.1.tsv", None)
    nan, large, still = (row["client"] for row in rows[:3])
    done = inside("attack", "weights", path, tmp_path / "out", *FEW).ok()
    assert f"{nan}: refused: NaN or Inf in encoder.layers.1\n" in done.err
    assert f"{large}: refused: NaN or Inf in ctc.ctc_lo\n" in done.err
    assert f"{still}: refused: nothing was changed\n" in done.err
    left = {one for pair in scores_of(tmp_path / "out" / "weights.all.easy") for one in pair}
    assert left == {*CLIENTS} - {nan, large, still}
    # The others' scores are the same as without them.
    inside("attack", "weights", world / "exp", tmp_path / "whole", *FEW).ok()
    for name in ("encoder.layers.3", "encoder.layers.1.statistics"):
        some = [scores_of(tmp_path / out / f"weights.{name}.easy") for out in ("out", "whole")]
        shared = np.array([[one[pair] for one in some] for pair in some[0]])
        assert np.corrcoef(shared.T)[0, 1] > 0.99


def test_hostile_files_are_told_in_a_line(world, tmp_path):
    def shorten(state: dict[str, np.ndarray]) -> None:
        state["ctc.ctc_lo.bias"] = state["ctc.ctc_lo.bias"][:, :-1].copy()

    path = changed(world, tmp_path, shorten)
    done = inside("attack", "weights", path, tmp_path / "out")
    why = "s00-a1: refused: update.1.safetensors: tensor 'ctc.ctc_lo.bias' is float32 of shape"
    done.fails(1, "no model with a known speaker is left", why)
    for one in path.glob("round_0001/update.*"):
        one.unlink()
    done = inside("attack", "weights", path, tmp_path / "out")
    done.fails(1, "client updates are missing", "keep_updates: true")
    other = ("--set", "weights.constant=[4, 2]")
    inside("attack", "weights", world / "exp", tmp_path / "x", *other).fails(1, "constant")
    inside("attack", "weights", world / "exp").fails(2, "EXP... OUT")
    both = ("--cohort", world / "exp")
    done = inside("attack", "weights", world / "exp", tmp_path / "x", *both)
    done.fails(1, "'s00-a1' is also in another experiment")
    far = ("--set", "weights.constant=[20, 99]")
    inside("attack", "weights", world / "exp", tmp_path / "x", *far).fails(1, "has 26 values")


def test_other_networks_are_not_compared(world, tmp_path):
    model = updates_world.MODEL | {"encoder_conf": updates_world.ENCODER | {"output_size": 8}}
    data_with_constants(tmp_path / "other_train", ["k00-a1", "k00-a2"], 1)
    shutil.copytree(world / "tokens", tmp_path / "tokens")
    other = begin(tmp_path, "other", model=model)
    done = inside("attack", "weights", world / "exp", tmp_path / "out", "--cohort", other)
    done.fails(1, f"{other}: the tensors sent differ from those of {world / 'exp'}")


# --- defences


def test_updates_behind_a_defence_are_those_that_other_attacks_see(world, tmp_path):
    """Each attacker enrols, and centres on, its own version."""
    from fedtools.attack.defences import defended
    from fedtools.attack.victims import find_victims

    federation = Federation(world / "exp")
    victims = find_victims(federation, [1])
    text = "clip=1+noise=0.5"
    seen = dict(defended(federation, victims, 1, text, 3).states(CLIENTS))
    start = load_file(world / "exp" / "round_0001" / "global.safetensors")
    options = ("--defence", text, "--seed", "3", "--models", world / "models.tsv", *FEW)
    inside("attack", "weights", world / "exp", tmp_path, *options).ok()
    names = ("encoder.layers.1.affine.weight", "encoder.layers.1.affine.bias")
    plain, drawn = sent(world / "exp"), np.random.default_rng(0)
    before = np.stack([flat({n: plain[c][n] for n in names}) for c in CLIENTS])
    rows = np.stack([flat({n: seen[c][n].astype("f8") - start[n] for n in names}) for c in CLIENTS])
    some = blocks([name[:3] for name in CLIENTS], np.zeros(len(CLIENTS), bool), 3)
    cohorts = {}
    for block in some:
        for one in block.rows:
            for other in block.columns:
                cohorts[one, other] = cohorts[other, one] = block.cohort
    versions = {
        "ignorant": (before, rows, before),
        "lazy-informed": (rows, rows, before),
        "semi-informed": (rows, rows, rows),
    }
    for attacker, (enrolled, tested, learnt) in versions.items():
        scores = scores_of(tmp_path / f"weights.encoder.layers.1.{attacker}.easy")
        assert len(scores) == len(CLIENTS) * (len(CLIENTS) - 1) // 2
        for number in drawn.choice(len(scores), 200):
            one, other = list(scores)[number]
            place = CLIENTS.index(one), CLIENTS.index(other)
            middle = learnt[cohorts[place]].mean(0)
            a, b = enrolled[place[0]] - middle, tested[place[1]] - middle
            expected = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
            assert scores[one, other] == pytest.approx(expected, abs=1e-4)
    # The readout is of the sent tensors.
    assert len(read_tsv(tmp_path / "readout.tsv", None)) == len(CLIENTS)
    # Kept tensors are missing, and no models are left.
    options = ("--defence", "keep=encoder.layers.0.*", *FEW)
    done = inside("attack", "weights", world / "exp", tmp_path / "kept", *options).ok()
    found = parts(tmp_path / "kept")
    assert "encoder.layers.0" not in found and "encoder.layers.1" in found
    assert "encoder.layers.0.affine, is not sent: clients keep it" in found["input"]
    assert "not sent" in done.err
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".safetensors"]
