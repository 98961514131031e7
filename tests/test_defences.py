"""Defences on updates, each against independent arithmetic, on the files of a federation."""

from __future__ import annotations

import shutil
from fnmatch import fnmatchcase
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import simulated
import yaml
from conftest import ROOT, inside
from safetensors.numpy import load_file, save_file
from simulated import one_speaker_each

from fedtools.attack.defences import Defence, defended, partition
from fedtools.attack.speakers.footprint_files import read_footprints
from fedtools.attack.victims import find_victims
from fedtools.core.errors import UserError
from fedtools.federation.federation import Federation
from fedtools.models.acoustic.asr import build_model
from fedtools.models.keywords import build_network
from fedtools.tasks.kws.model import tensors_of

CLIENTS = [f"{speaker}-m{number}" for speaker in ("ann", "bob", "cat") for number in (1, 2)]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("world")
    one_speaker_each(simulated.data_dir(root / "train", CLIENTS, 3))
    simulated.data_dir(root / "valid", ["au"], 6, seed=5)
    inside("train-tokens", root / "train" / "text", root / "tokens", "--token-type", "char").ok()
    model = {
        "input_size": simulated.BINS,
        "encoder": "tdnn",
        "encoder_conf": {"output_size": 12, "contexts": [1, 1, 3]},
    }
    simulated.config_file(root / "c.yaml", model=model)
    inside(
        *("init", root / "exp", "--config", root / "c.yaml", "--method", "fedavg"),
        *("--data", f"train={root / 'train'}", "--data", f"valid={root / 'valid'}"),
        *("--asset", f"tokens={root / 'tokens'}", "--set", "method_conf.local_epochs=3"),
    ).ok()
    inside("rounds", root / "exp").ok()
    return root


def seen(world: Path, text: str, seed: int = 0) -> dict[str, dict[str, np.ndarray]]:
    """Return each client's update behind a defence."""
    federation = Federation(world / "exp")
    victims = find_victims(federation, [1])
    start = load_file(world / "exp" / "round_0001" / "global.safetensors")
    states = defended(federation, victims, 1, text, seed).states(CLIENTS)
    return {
        name: {key: value.astype(np.float64) - start[key] for key, value in state.items()}
        for name, state in states
    }


def flat(update: dict[str, np.ndarray], statistics: bool = False) -> np.ndarray:
    """Return the weights of an update as a vector, or its statistics."""
    names = [key for key in sorted(update) if ("running_" in key) == statistics]
    return np.concatenate([update[key].ravel() for key in names])


def test_none_is_what_was_sent(world):
    sent = load_file(world / "exp" / "round_0001" / "update.1.safetensors")
    start = load_file(world / "exp" / "round_0001" / "global.safetensors")
    for text in ("", "none"):
        for row, client in enumerate(CLIENTS):
            for key, value in seen(world, text)[client].items():
                assert np.array_equal(value, sent[key][row].astype(np.float64) - start[key])


def test_clipping_and_noise(world):
    plain, clipped = seen(world, "none"), seen(world, "clip=0.5")
    bound = 0.5 * np.median([np.linalg.norm(flat(update)) for update in plain.values()])
    noisy = {seed: seen(world, "clip=0.5+noise=2", seed) for seed in (0, 0, 1)}
    for client in CLIENTS:
        one, other = flat(plain[client]), flat(clipped[client])
        assert np.linalg.norm(other) == pytest.approx(bound, rel=1e-3)
        assert one @ other / np.linalg.norm(one) / bound == pytest.approx(1, abs=1e-3)
        noise = flat(noisy[0][client]) - other
        # Twice the root mean square of an update whose norm is the bound.
        assert noise.std() == pytest.approx(2 * bound / np.sqrt(len(one)), rel=0.1)
        assert abs(noise.mean()) < 5 * noise.std() / np.sqrt(len(noise))
        assert not np.array_equal(flat(noisy[0][client]), flat(noisy[1][client]))
    first, second = (flat(noisy[0][client]) - flat(clipped[client]) for client in CLIENTS[:2])
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.2
    # A bound above all norms changes nothing.
    wide = seen(world, "clip=1000")
    for client in CLIENTS:
        np.testing.assert_allclose(flat(wide[client]), flat(plain[client]), atol=1e-7)


VARIANCE = "encoder.scale.running_var"


def swollen(world: Path, out: Path, factor: float) -> Path:
    """Copy the world and scale the change of one tensor of statistics in all updates."""
    shutil.copytree(world / "exp", out / "exp")
    folder = out / "exp" / "round_0001"
    start, update = load_file(folder / "global.safetensors"), folder / "update.1.safetensors"
    sent = load_file(update)
    change = np.abs(sent[VARIANCE] - start[VARIANCE])
    sent[VARIANCE] = (start[VARIANCE] + factor * change).astype(np.float32)
    save_file(sent, update)
    return out


@pytest.mark.parametrize("text", ["clip=0.5", "noise=0.3", "clip=1+noise=0.3"])
def test_a_huge_variance_changes_nothing_for_the_weights(world, tmp_path, text):
    """Raw cepstra change a variance hundreds of times more than all weights together."""
    plain = seen(world, "none")
    huge = swollen(world, tmp_path, 1e5)
    before, found = seen(world, text), seen(huge, text)
    for client in CLIENTS:
        np.testing.assert_allclose(flat(found[client]), flat(before[client]), atol=1e-6)
        noise = flat(found[client]) - flat(plain[client])
        if text == "noise=0.3":
            rms = np.sqrt(np.mean(flat(plain[client]) ** 2))
            assert np.sqrt(np.mean(noise**2)) == pytest.approx(0.3 * rms, rel=0.1)


def test_statistics_have_norms_and_noise_of_their_own(world, tmp_path):
    huge = swollen(world, tmp_path, 1e5)
    plain, clipped = seen(huge, "none"), seen(huge, "clip=0.5")
    noisy = [seen(huge, "clip=0.5+noise=2", seed) for seed in range(12)]
    names = [key for key in plain["ann-m1"] if "running_" in key]
    assert VARIANCE in names and len(names) > 4
    for key in names:
        norms = {client: np.linalg.norm(plain[client][key]) for client in CLIENTS}
        bound = 0.5 * np.median(list(norms.values()))
        apart = []
        for client in CLIENTS:
            expected = plain[client][key] * min(1, bound / norms[client])
            np.testing.assert_allclose(clipped[client][key], expected, rtol=1e-3, atol=1e-6)
            apart += [one[client][key] - clipped[client][key] for one in noisy]
        if key.endswith("mean"):  # Variances have a minimum.
            spread = 2 * bound / np.sqrt(len(apart[0]))
            assert np.std(apart) == pytest.approx(spread, rel=0.15)


def test_norms_are_of_what_is_sent(world):
    """Personal tensors are in no norm, and in no median of norms."""
    plain = seen(world, "none")
    found = seen(world, "clip=0.5+keep=encoder.layers.*")
    norms, sent = {}, {}
    for client, update in plain.items():
        sent[client] = {k: v for k, v in update.items() if not k.startswith("encoder.layers.")}
        norms[client] = np.linalg.norm(flat(sent[client]))
    bound = 0.5 * np.median(list(norms.values()))
    for client in CLIENTS:
        assert np.linalg.norm(flat(found[client])) == pytest.approx(bound, rel=1e-3)


def test_bits(world):
    plain, rounded = seen(world, "none"), seen(world, "bits=3")
    for client in CLIENTS:
        for key, value in rounded[client].items():
            known = plain[client][key]
            step = (known.max() - known.min()) / 7
            assert np.abs(value - known).max() <= step / 2 + 1e-6
            assert len(np.unique(np.round((value - known.min()) / (step or 1), 2))) <= 8


def test_what_is_kept_is_not_there(world):
    found = seen(world, "keep=encoder.layers.0.*,ctc.*")["ann-m1"]
    assert found and not [key for key in found if key.startswith(("encoder.layers.0.", "ctc."))]
    assert any(key.startswith("encoder.layers.1.") for key in found)


def test_a_pattern_that_matches_nothing_is_refused(world):
    with pytest.raises(UserError, match=r"no tensor that is sent matches 'encoder\.encoders\.\*'"):
        seen(world, "keep=ctc.*,encoder.encoders.*")


def test_to_send_nothing_is_no_defence(world):
    with pytest.raises(UserError, match=r"'bits=8\+keep=\*': nothing is sent; keep fewer"):
        seen(world, "bits=8+keep=*")


def default_keep(corpus: str) -> list[list[str]]:
    """Return the patterns of a recipe's defences that share only some layers."""
    words = yaml.safe_load((ROOT / "conf" / corpus / "mini.yaml").read_text())["updates"][
        "defences"
    ]
    return [word.removeprefix("keep=").split(",") for word in words if word.startswith("keep=")]


def test_defaults_share_only_some_layers():
    """The defaults are FedNorm's, without normalisation, and FedExtract's, without low layers."""
    config = yaml.safe_load((ROOT / "conf/tedlium3/mini.yaml").read_text())["model"]
    tdnn = build_model({**config, "criterion": "ctc"}, ["<blank>", "a", "<sos/eos>"])
    config = yaml.safe_load((ROOT / "conf/speechcommands/mini.yaml").read_text())
    network = build_network(config["networks"]["mhattrnn"]["model"], 4, "here")
    for corpus, names, norms, low, high in (
        ("tedlium3", tdnn.state_dict(), ("running_",), "layers.5.", "layers.6."),
        ("speechcommands", tensors_of(network), ("_norm.",), "second", "recurrent.0."),
    ):
        sent = [
            [name for name in names if not any(fnmatchcase(name, one) for one in patterns)]
            for patterns in default_keep(corpus)
        ]
        assert len(sent) == 2 and all(0 < len(one) < len(names) for one in sent)
        # Integers are never sent.
        floats = [name for name in names if names[name].is_floating_point()]
        apart = {name for name in floats if any(norm in name for norm in norms)}
        assert apart and set(sent[0]) & set(floats) == set(floats) - apart
        assert not any(low in name for name in sent[1])
        assert any(high in name for name in sent[1])


def groups_in(world: Path, found: dict[str, dict[str, np.ndarray]]) -> dict[str, set[str]]:
    """Return the models whose mean was sent for each model, from the tensors alone."""
    plain, key = seen(world, "none"), "encoder.layers.0.affine.weight"
    members = {}
    for client, update in found.items():
        (members[client],) = (
            {*group}
            for count in range(1, len(CLIENTS) + 1)
            for group in combinations(CLIENTS, count)
            if np.allclose(update[key], sum(plain[one][key] for one in group) / count, atol=1e-6)
        )
    return members


def test_means_are_of_a_partition_of_the_clients(world):
    """As in secure aggregation, each client is in one group, with others of other speakers."""
    members = groups_in(world, seen(world, "mean=3"))
    for client, group in members.items():
        assert client in group and len(group) == 3 and len({one[:3] for one in group}) == 3
        # Whoever is in it has the same group.
        assert all(members[one] == group for one in group)
    with pytest.raises(UserError, match="mean=9, but there are 6 models; use a smaller mean"):
        seen(world, "mean=9")


def test_whom_a_mean_is_of_is_drawn(world):
    """Each of the four other models is drawn at times, in varying combinations."""
    met = {frozenset(groups_in(world, seen(world, "mean=3", seed))["ann-m1"]) for seed in range(12)}
    assert len(met) > 2 and set.union(*map(set, met)) == {"ann-m1", *CLIENTS[2:]}


def test_a_partition_has_as_many_groups_as_there_can_be():
    """People of one to five models: groups of at least four, of almost one size."""
    names = [f"p{person:02d}-{number}" for person in range(23) for number in range(1 + person % 5)]
    speakers = {name: name[:3] for name in names}
    for seed in range(20):
        groups = partition(names, speakers, 4, np.random.default_rng(seed))
        assert sorted(name for group in groups for name in group) == names
        sizes = {len(group) for group in groups}
        assert len(groups) == len(names) // 4 and min(sizes) >= 4 and max(sizes) - min(sizes) <= 1
        assert all(len({name[:3] for name in group}) == len(group) for group in groups)
    # More models of a speaker than groups: some are together.
    many = partition(
        [f"p00-{number}" for number in range(5)], speakers, 2, np.random.default_rng(0)
    )
    assert sorted(map(len, many)) == [2, 3]


def test_two_groups_are_seldom_of_the_same_people():
    """Two models each: dealt in turn, the first and the second ones would be of the same people."""
    names = [f"p{person:02d}-{number}" for person in range(40) for number in range(2)]
    speakers = {name: name[:3] for name in names}
    found = [
        frozenset(name[:3] for name in group)
        for seed in range(20)
        for group in partition(names, speakers, 4, np.random.default_rng(seed))
    ]
    assert len(set(found)) > 0.99 * len(found)


def test_who_is_aggregated_with_a_refused_model_is_refused_too(world, tmp_path):
    path = shutil.copytree(world / "exp", tmp_path / "exp")
    update = path / "round_0001" / "update.1.safetensors"
    sent = load_file(update)
    sent["ctc.ctc_lo.bias"][0] = np.nan
    save_file(sent, update)
    options = ("--indicator", world / "valid", "--round", "1", "--defence", "mean=3")
    done = inside("attack", "footprints", path, tmp_path / "out", *options).ok()
    together = groups_in(world, seen(world, "mean=3"))["ann-m1"]
    assert "ann-m1: refused: NaN or Inf" in done.err
    for one in together - {"ann-m1"}:
        assert f"{one}: refused: aggregated with 'ann-m1': NaN or Inf" in done.err
    found = read_footprints(tmp_path / "out")
    # Each mean is listed next to the embeddings.
    assert {name: {*found.groups[name]} for name in found.models} == dict.fromkeys(
        sorted({*CLIENTS} - together), {*CLIENTS} - together
    )


def test_footprints_behind_a_defence(world, tmp_path):
    exp = world / "exp"
    prints = {}
    for name, more in (("none", ()), ("noise", ("--defence", "clip=1+noise=3"))):
        options = ("--indicator", world / "valid", "--round", "1", *more)
        inside("attack", "footprints", exp, tmp_path / name, *options).ok()
        prints[name] = read_footprints(tmp_path / name)
    spread = {name: one.layers["tdnn3"][:, 1].mean() for name, one in prints.items()}
    assert spread["noise"] > 1.5 * spread["none"]


@pytest.mark.parametrize(
    "text",
    [
        *("clip", "clip=x", "noise=-1", "bits=0", "bits=32", "mean=0", "bits=8+bits=4", "x=1"),
        *("+", "clip=0", "clip=1+noise=0", "noise=0.00", "mean=1", "keep="),
    ],
)
def test_what_is_no_defence_is_refused(text):
    with pytest.raises(UserError, match=r"defence .* of "):
        Defence.parse(text)


def test_small_numbers_are_defences():
    assert Defence.parse("clip=0.05+noise=10+mean=10") == Defence(clip=0.05, noise=10, mean=10)
