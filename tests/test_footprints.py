"""Footprints and attack A1 against plain sums and loops over models with known layers."""

from __future__ import annotations

import copy
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from probes import ENCODERS, asr_probe

from fedtools.attack.options import A1, Part
from fedtools.attack.speakers.a1 import attack, distances, rho, unit
from fedtools.attack.speakers.footprint_files import Prints
from fedtools.attack.speakers.footprints import Moments, footprints
from fedtools.attack.speakers.layers import hidden_layers
from fedtools.attack.speakers.verify import COLUMNS, Model
from fedtools.attack.victims import Probe
from fedtools.core.tables import read_tsv
from fedtools.models.keywords import NETWORKS, build_network
from fedtools.tasks.kws.model import tensors_of


def shaken(state: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Change the values of all parameters and statistics."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: value + 0.1 * torch.rand(value.shape, generator=random)
        if value.is_floating_point()
        else value
        for name, value in state.items()
    }


def naive(model, state, others, layers, inputs, run) -> list[np.ndarray]:
    """Compute mean and deviation by numpy, with one hook per layer and all outputs in memory."""
    found = []
    for layer, axis in layers:
        kept: list[torch.Tensor] = []

        def see(_, __, out, kept=kept, axis=axis):
            while isinstance(out, tuple):
                out = out[0]
            kept.append(out.movedim(axis, -1).flatten(0, -2))

        handle = layer.register_forward_hook(see)
        for values in (others, state):
            model.load_state_dict(values)
            with torch.no_grad():
                for frames in inputs:
                    run(model, frames)
        handle.remove()
        half = len(kept) // 2
        apart = torch.cat(kept[half:]).double() - torch.cat(kept[:half]).double()
        found.append(np.stack([apart.numpy().mean(0), apart.numpy().std(0)]))
    return found


@pytest.mark.parametrize("part", get_args(Part))
@pytest.mark.parametrize("encoder", sorted(ENCODERS))
@pytest.mark.parametrize("held", [1, 3])
def test_footprints_are_those_of_each_layer_by_itself(encoder, part, held):
    probe = asr_probe(encoder, held)
    begun = copy.deepcopy(probe.models[0].state_dict())
    states = {f"m{n}": shaken(begun, n) for n in range(4)}
    found = dict(footprints(probe, iter(states.items()), part))
    assert list(found) == list(states)
    model = copy.deepcopy(probe.models[0])
    if encoder == "tdnn":
        layers = [(getattr(layer, part), 1) for layer in model.encoder.layers]
        names = ["tdnn1", "tdnn2", "tdnn3", "tdnn4"]
    else:
        layers = [(one, -1) for one in (model.encoder.embed, *model.encoder.encoders)]
        names = ["embed", "block1", "block2"]
    for name, state in states.items():
        assert list(found[name]) == names
        expected = naive(model, state, begun, layers, list(probe.inputs()), probe.run)
        for layer, values in zip(names, expected, strict=True):
            np.testing.assert_allclose(found[name][layer], values, atol=1e-5)
    # The global model is unchanged.
    for name, value in probe.models[0].state_dict().items():
        assert torch.equal(value, begun[name])


def test_nothing_above_the_last_layer_is_computed():
    probe = asr_probe("tdnn", 1)
    state = shaken(probe.models[0].state_dict(), 1)
    whole = dict(footprints(probe, iter([("m", state)]), "relu"))["m"]
    reached = []
    for model in probe.models:
        model.encoder.layers[2].register_forward_hook(lambda *_: reached.append(1))
    part = dict(footprints(probe, iter([("m", state)]), "relu", 2))["m"]
    # Once for each model, to find its layers.
    assert len(reached) <= 2
    assert list(part) == ["tdnn1", "tdnn2"]
    for name in part:
        assert np.array_equal(part[name], whole[name])


def test_what_a_client_does_not_send_is_the_global_models():
    probe = asr_probe("tdnn", 2)
    state = shaken(probe.models[0].state_dict(), 1)
    sent = {name: value for name, value in state.items() if name.startswith("encoder.layers.2.")}
    # Another model before it, whose tensors must not remain.
    found = dict(footprints(probe, iter([("all", state), ("x", state), ("part", sent)]), "norm"))
    assert not found["part"]["tdnn1"].any() and not found["part"]["tdnn2"].any()
    assert found["part"]["tdnn3"].any() and found["all"]["tdnn1"].any()


@pytest.mark.parametrize("name", sorted(NETWORKS.names()))
def test_layers_of_keyword_networks(name):
    """All layers with parameters are found, in the order of execution."""
    torch.manual_seed(0)
    network = build_network({"network": name}, 4, "here").eval()
    clips = torch.randn(1, 3, 98, 40)
    probe = Probe(
        [network, copy.deepcopy(network)],
        tensors_of,
        lambda one, values: one(values),
        lambda: iter([clips]),
    )
    found = dict(footprints(probe, iter([("m", shaken(tensors_of(network), 1))]), "norm"))["m"]
    assert next(iter(found)) in ("first", "embed") and list(found)[-1] == "head"
    assert found["head"].shape == (2, 4)
    with torch.no_grad():
        apart = (probe.models[1](clips) - network(clips))[0].double().numpy()
    np.testing.assert_allclose(found["head"], [apart.mean(0), apart.std(0)], atol=1e-5)
    layers = hidden_layers(network, lambda one: one(clips), "norm")
    assert all(found[layer.name].shape[1] > 0 for layer in layers)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=6),
    st.floats(-1e4, 1e4),
    st.integers(0, 2**31),
)
def test_moments_of_parts_are_those_of_the_whole(sizes, middle, seed):
    values = middle + np.random.default_rng(seed).normal(size=(sum(sizes), 3))
    moments = Moments()
    for part in np.split(values, np.cumsum(sizes)[:-1]):
        moments.add(torch.from_numpy(part))
    expected = [values.mean(0), values.std(0)]
    np.testing.assert_allclose(moments.result(), expected, rtol=1e-9, atol=1e-9 * (1 + abs(middle)))


def test_rho_is_equation_4():
    random = np.random.default_rng(0)
    prints = random.normal(size=(6, 2, 5))
    prints[:, 1] **= 2
    norm = np.linalg.norm
    for alpha in ((1.0, 10.0), (1.0, 0.0), (0.0, 1.0)):
        found = rho(prints, prints[:4], alpha)
        assert found.shape == (6, 4)
        for i, one in enumerate(prints):
            for k, other in enumerate(prints[:4]):
                expected = sum(
                    weight * norm(one[row] - other[row]) / (norm(one[row]) * norm(other[row]))
                    for row, weight in enumerate(alpha)
                )
                assert found[i, k] == pytest.approx(expected, abs=1e-7)
    assert np.array_equal(rho(prints), rho(prints, prints))


def test_a_model_that_hardly_moved_leaves_the_others_distances_alone():
    prints = np.random.default_rng(0).normal(size=(12, 5))
    prints[3] *= 1e-10
    prints[4] = prints[3] + prints[5] * 1e-13
    norm = np.linalg.norm
    expected = [[norm(one - two) / (norm(one) * norm(two)) for two in prints] for one in prints]
    assert distances(prints) == pytest.approx(np.array(expected), rel=1e-9, abs=1e-6)


def test_a_model_that_did_not_move_is_like_nobody():
    prints = np.random.default_rng(0).normal(size=(3, 5))
    prints[1] = 0
    found = distances(prints)
    assert np.isinf(found[1]).all() and np.isinf(found[:, 1]).all()
    assert np.isfinite(found[[0, 0, 2], [0, 2, 2]]).all()


def test_of_unit_vectors_it_is_the_distance_of_directions():
    """The other reading of "L2-normalised": the length of a model's change does not matter."""
    prints = np.random.default_rng(0).normal(size=(6, 2, 5))
    directions = prints / np.linalg.norm(prints, axis=2, keepdims=True)
    found = rho(unit(prints), alpha=(1.0, 10.0))
    for i, one in enumerate(directions):
        for k, other in enumerate(directions):
            expected = np.linalg.norm(one - other, axis=1) @ (1.0, 10.0)
            assert found[i, k] == pytest.approx(expected, abs=1e-6)
    lengths = np.linspace(0.1, 9, 6)[:, None, None]
    np.testing.assert_allclose(rho(unit(lengths * prints)), rho(unit(prints)), atol=1e-6)
    assert not np.allclose(rho(lengths * prints), rho(prints))


def planted_prints(seed: int) -> tuple[Prints, dict[str, Model]]:
    """Make deviations with a speaker's direction, below a common part and lengths of models."""
    random = np.random.default_rng(seed)
    names = [f"s{number:02d}-{half}" for number in range(24) for half in "ab"]
    speakers = {name: random.normal(size=30) for name in sorted({name[:3] for name in names})}
    common, rows = 20 * random.normal(size=(2, 30)), []
    for name in names:
        noise = random.normal(size=(2, 30))
        vectors = common + noise + np.stack([np.zeros(30), 2 * speakers[name[:3]]])
        rows.append(random.uniform(0.8, 1.25) * vectors)
    prints = Prints(names, [name[:3] for name in names], {"h1": np.stack(rows)})
    return prints, {name: Model(name[:3]) for name in names}


def rates(out, prints, models, **more) -> dict[str, float]:
    attack(prints, models, out, A1(others=0, **more), resamples=20)
    rows = read_tsv(out / "a1.tsv", COLUMNS)
    return {row["scores"]: float(row["EER%"]) for row in rows}


def test_a_cohort_takes_away_what_all_models_have_in_common(tmp_path):
    prints, models = planted_prints(0)
    # Scaled to one length, which a mean over models removes.
    lengths = np.linalg.norm(prints.layers["h1"], axis=2, keepdims=True)
    even = Prints(prints.models, prints.speakers, {"h1": prints.layers["h1"] / lengths})
    scores = ("literal", "unit", "cohort")
    found = rates(tmp_path / "all", prints, models, scores=scores)
    ways = ("both", "means", "deviations")
    assert list(found) == [
        way if score == "literal" else f"{way}, {score}" for score in scores for way in ways
    ]
    # The length of a model's change hides the speaker from equation 4, but not from directions.
    assert found["deviations, unit"] < 5 < 15 < found["deviations"]
    assert 30 < found["means, unit"] < 70
    centred = rates(tmp_path / "even", even, models, scores=("cohort",))
    assert centred["deviations, cohort"] < 3 and 30 < centred["means, cohort"] < 70
    # The default is unchanged.
    rates(tmp_path / "default", prints, models)
    for path in (tmp_path / "default").glob("a1.h1.*"):
        assert path.read_bytes() == (tmp_path / "all" / path.name).read_bytes()
    assert {path.name.partition(".")[0] for path in (tmp_path / "all").glob("a1*.h1.easy")} == {
        "a1", "a1-unit", "a1-cohort",
    }  # fmt: skip


def test_a_cohort_that_is_given_is_in_no_trial_and_decides_alone(tmp_path):
    prints, models = planted_prints(1)
    cohort = {name: model for name, model in models.items() if name > "s16"}
    attacked = {name: model for name, model in models.items() if name not in cohort}
    options = A1(scores=("cohort",), others=0)
    attack(prints, attacked, tmp_path / "some", options, cohort=cohort, resamples=20)
    lines = (tmp_path / "some" / "a1-cohort.h1.easy").read_text().splitlines()
    whole = {(one, other): float(score) for one, other, score in map(str.split, lines)}
    assert {name for pair in whole for name in pair} == set(attacked)
    # A score does not depend on the other attacked models.
    few = dict(list(attacked.items())[:8])
    attack(prints, few, tmp_path / "few", options, cohort=cohort, resamples=20)
    lines = (tmp_path / "few" / "a1-cohort.h1.easy").read_text().splitlines()
    assert len(lines) == 28
    for one, other, score in map(str.split, lines):
        assert float(score) == pytest.approx(whole[one, other], abs=1e-5)
    # By hand: cosines from the cohort's mean, in units of each model's deviations with the cohort.
    rows = prints.layers["h1"]
    place = {name: index for index, name in enumerate(prints.models)}
    known = [place[name] for name in cohort]
    expected = 0.0
    for row in (0, 1):
        apart = rows[:, row] - rows[known, row].mean(0)
        apart /= np.linalg.norm(apart, axis=1, keepdims=True)
        a, b = (apart[place[name]] for name in ("s00-a", "s03-b"))
        sides = [(a @ b, apart[known] @ one) for one in (a, b)]
        expected += np.mean([(score - others.mean()) / others.std() for score, others in sides])
    assert whole["s00-a", "s03-b"] == pytest.approx(expected, abs=1e-5)
