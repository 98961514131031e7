"""Attack A2 by its command: on client updates with a planted speaker direction."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import kaldiio
import numpy as np
import pytest
from conftest import inside
from updates_world import begin, data_with_constants, plant, speakers

from fedtools.attack.defences import defended, groups_of
from fedtools.attack.knowledge import ATTACKERS
from fedtools.attack.options import A2
from fedtools.attack.speakers.a2 import A2Setup, Side, _learnt, _part
from fedtools.attack.speakers.verify import COLUMNS
from fedtools.attack.speakers.xvectors import Training
from fedtools.attack.victims import Victims, sound_victims
from fedtools.core.errors import UserError
from fedtools.core.tables import read_tsv
from fedtools.federation.federation import Federation

PEOPLE, TALKS, MODELS = speakers(16), ("a", "b"), (1, 2)
CLIENTS = [f"{one}-{talk}{number}" for one in PEOPLE for talk in TALKS for number in MODELS]
# One model of each of two talks.
KNOWN = [f"{one}-{talk}1" for one in speakers(40, "k") for talk in TALKS]
WAYS = ["PLDA", "PLDA, cohort", "cosine", "cosine, cohort"]
SMALL = ("--layer", "2", "--set", "a2.width=24", "--set", "a2.epochs=12")
FEW = ("--resamples", "20", "--others", "0")
State = dict[str, np.ndarray]
Change = Callable[[str, State], State]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make two experiments of other speakers with one initial model, and speech of any speaker."""
    root = tmp_path_factory.mktemp("a2")
    data_with_constants(root / "exp_train", CLIENTS, 1)
    begin(root, "exp")
    data_with_constants(root / "known_train", KNOWN, 1, seed=3)
    begin(root, "known", "--start", str(root / "exp" / "init.safetensors"))
    data_with_constants(root / "indicator", ["xen", "yan"], 2, seed=5)
    lines = ["model\tspeaker\tgender\ttalks\n"]
    lines += [f"{one}\t{one[:3]}\tf\t{one[:5]}\n" for one in CLIENTS]
    (root / "models.tsv").write_text("".join(lines))
    return root


def direction(key: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([ord(letter) for letter in key + name]).normal(size=shape)


def moved(start: State, amount: Callable[[str, tuple[int, ...]], np.ndarray]) -> State:
    """Return a change of all trained tensors; statistics of BatchNorm are unchanged."""
    return {
        name: 0 * value if "running" in name else amount(name, value.shape)
        for name, value in start.items()
    }


def planted(kind: str) -> Change:
    """Return changes with a direction of the speaker, the talk or neither, and less noise."""

    def change(client: str, start: State) -> State:
        key = {"speaker": client[:3], "channel": client[:5], "nothing": client}[kind]
        return moved(
            start,
            lambda name, shape: (
                0.1 * direction(key, name, shape) + 0.02 * direction(f"{client} noise", name, shape)
            ),
        )

    return change


def changed(world: Path, folder: Path, change: Change) -> list[Path]:
    """Copy both experiments with planted client updates."""
    paths = [shutil.copytree(world / name, folder / name) for name in ("known", "exp")]
    for path in paths:
        plant(path, change)
    return paths


def run(world: Path, paths: list[Path], out: Path, *more: str) -> list[dict[str, str]]:
    options = ("--indicator", world / "indicator", "--models", world / "models.tsv")
    inside("attack", "a2", *paths, out, *options, *SMALL, *FEW, *more).ok()
    return read_tsv(out / "a2.h2.tsv", COLUMNS)


def tells_nothing(row: dict[str, str]) -> bool:
    return 30 < float(row["EER%"]) < 70 and float(row["low"]) < 50 < float(row["high"])


@pytest.mark.parametrize("kind", ["speaker", "channel", "nothing"])
def test_planted_speakers_are_found_and_others_are_not(world, tmp_path, kind):
    """Planted directions separate a speaker's recordings from trials of other speakers."""
    rows = run(world, changed(world, tmp_path, planted(kind)), tmp_path / "out")
    found = {(row["scores"], row["trials"]): row for row in rows}
    assert list(dict.fromkeys(row["scores"] for row in rows)) == WAYS
    assert {(row["defence"], row["attacker"]) for row in rows} == {("none", "-")}
    counts = {row["trials"]: (row["targets"], row["others"]) for row in rows}
    rest = str(16 * 15 * 16 // 2)
    assert counts == {"easy": ("96", rest), "same": ("32", rest), "other": ("64", rest)}
    for way in WAYS:
        for trials in ("same", "other"):
            row = found[way, trials]
            if kind == "speaker":
                assert float(row["EER%"]) < 15, (way, trials)
            elif kind == "nothing" or trials == "other":
                assert tells_nothing(row), (way, trials, row)
            elif way.startswith("cosine"):
                # PLDA has learnt from pairs of two talks without a shared direction.
                assert float(row["EER%"]) < 15, (way, trials)
        row = found[way, "easy"]
        assert (row["Cllr"] == "-") == way.startswith("cosine")
        if row["Cllr"] != "-":
            assert float(row["Cllr"]) < (0.5 if kind == "speaker" else 1.1)


def test_the_network_has_not_seen_whom_plda_learns_from(world, tmp_path):
    """Other models of PLDA's training speakers change only their own embeddings."""

    def embeddings(name: str, others: set[str]) -> dict[str, np.ndarray]:
        """Return unchanged models' embeddings, except of some speakers, which show channels."""

        def change(client: str, start: State) -> State:
            return planted("channel" if client[:3] in others else "nothing")(client, start)

        paths, out = changed(world, tmp_path / name, change), tmp_path / name / "out"
        run(world, paths, out, "--set", "a2.epochs=2")
        return {key: rows[0] for key, rows in kaldiio.load_scp(str(out / "a2.h2.scp")).items()}

    before = embeddings("before", set())
    left = {key[:3] for key in before} - {*PEOPLE}
    assert len(left) == 20 and before.keys() == {*CLIENTS} | {k for k in KNOWN if k[:3] in left}
    after = embeddings("after", left)
    assert after.keys() == before.keys()
    for key, row in before.items():
        assert np.array_equal(row, after[key]) == (key in CLIENTS), key
    trained = sorted({key[:3] for key in KNOWN} - left)
    after = embeddings("trained", {trained[0]})
    assert not any(np.array_equal(row, after[key]) for key, row in before.items())


def test_models_that_run_to_no_numbers_are_refused_by_name(world, tmp_path):
    """Models with finite weights but non-finite activations are refused by name."""
    out, few = tmp_path / "out", ("--set", "a2.epochs=1")
    run(world, [world / "known", world / "exp"], out, *few)
    lines = (out / "a2.h2.scp").read_text().splitlines()
    left = sorted({line[:3] for line in lines} - {*PEOPLE})

    def change(client: str, start: State) -> State:
        huge = client == "s00-a1" or client[:3] in left[5:]
        return moved(
            start, lambda name, shape: (3e37 if huge else 0.1) * direction(client, name, shape)
        )

    paths = changed(world, tmp_path, change)
    command = ("attack", "a2", *paths, out, "--indicator", world / "indicator", *SMALL, *FEW, *few)
    done = inside(*command)
    *before, last = done.err.splitlines()
    assert done.code == 1 and "known/config.yaml: the network is not trained on 5 people" in last
    names = [line.partition(": refused: embeddings")[0] for line in before]
    assert {name[:3] for name in names if name in KNOWN} == {*left[5:]}
    shutil.rmtree(paths[0])
    shutil.copytree(world / "known", paths[0])
    assert "s00-a1: refused: embeddings are not finite" in inside(*command).ok().err
    trials = [line.split()[:2] for line in (out / "trials.easy").read_text().splitlines()]
    assert {name for pair in trials for name in pair} == {*CLIENTS} - {"s00-a1"}


def test_who_knows_the_defence_sees_more(world, tmp_path):
    """An attacker who knows the defence trains on whole models and sees more."""

    def change(client: str, start: State) -> State:
        def amount(name: str, shape: tuple[int, ...]) -> np.ndarray:
            size = 0.3 if name.startswith("encoder.layers.0.") else 0.05
            own = size * direction(client[:3], name, shape)
            return own + 0.01 * direction(f"{client} noise", name, shape)

        return moved(start, amount)

    paths, out = changed(world, tmp_path, change), tmp_path / "out"
    defence = "keep=encoder.layers.0.*"
    rows = run(world, paths, out, "--defence", defence)
    assert {row["defence"] for row in rows} == {defence}
    assert [(row["attacker"], row["scores"]) for row in rows if row["trials"] == "easy"] == [
        (attacker, way) for attacker in ATTACKERS for way in WAYS
    ]
    found = {(row["attacker"], row["scores"]): row for row in rows if row["trials"] == "easy"}
    for way in WAYS:
        assert tells_nothing(found["ignorant", way])
        assert float(found["semi-informed", way]["EER%"]) < 12
        assert float(found["lazy-informed", way]["EER%"]) < 45
    for way in WAYS[:2]:
        costs = [float(found[one, way]["Cllr"]) for one in ATTACKERS]
        assert costs[0] > costs[1] > 1 > 0.6 > costs[2]
    # Enrolled models of each attacker: whole ones, sent ones, and sent ones by a new network.
    seen = {one: dict(kaldiio.load_scp(str(out / f"a2.h2.{one}.scp")).items()) for one in ATTACKERS}
    for client in CLIENTS:
        assert not np.array_equal(seen["ignorant"][client], seen["lazy-informed"][client])
    for key in seen["ignorant"].keys() - {*CLIENTS}:
        assert np.array_equal(seen["ignorant"][key], seen["lazy-informed"][key])
        assert not np.array_equal(seen["ignorant"][key], seen["semi-informed"][key])
    assert (out / "a2.h2.semi-informed.other").exists()
    # Without it, none of the three finds anything.
    run(world, paths, out, "--set", "a2.epochs=1", "--defence", "none")
    assert {row["attacker"] for row in read_tsv(out / "a2.h2.tsv", COLUMNS)} == {"-"}
    assert not [path.name for path in out.iterdir() if "informed" in path.name]


def test_those_known_are_in_no_mean_with_those_under_attack(world):
    """Means are over models of one experiment and part, never over known and attacked ones."""
    known, attacked = (Federation(world / name) for name in ("known", "exp"))
    setup = A2Setup()
    with known.settings():
        sides = [
            Side.open(one, sound_victims(one, [1]), world / "indicator", setup, 2)
            for one in (known, attacked)
        ]
        some = {name[:3] for name in KNOWN[:20]}
        (view,) = sides[0].of(some).views("mean=3", 7)
        (other,) = sides[1].views("mean=3", 7)
    whole = [
        {name: state_of(one, name) for name in names}
        for one, names in ((known, KNOWN[:20]), (attacked, CLIENTS))
    ]
    for of, states in ((view, whole[0]), (other, whole[1])):
        names = list(states)
        rows = np.stack([states[name] for name in names])
        for name, state in of.states(names[:4]):
            seen = flat(state)
            # The mean of its own and two or three others of the same experiment and part.
            weights, *_ = np.linalg.lstsq(rows.T, seen, rcond=None)
            chosen = [names[index] for index in np.flatnonzero(weights > 0.2)]
            assert 3 <= len(chosen) <= 4 and name in chosen
            assert len({one[:3] for one in chosen}) == len(chosen)
            np.testing.assert_allclose(rows.T @ weights, seen, atol=1e-4)


def test_means_to_learn_from_are_within_a_part(world):
    """No back end that calibrates a part's scores has learnt from an update in the part's means."""
    known = Federation(world / "known")
    with known.settings():
        victims = sound_victims(known, [1])
        side = Side.open(known, victims, world / "indicator", A2Setup(), 2)
        names = KNOWN[:24]
        left = side.of({name[:3] for name in names})
        part = {name: int(name[1:3]) % 2 for name in names}
        groups = groups_of(known, left.victims, [1], "mean=2", 7, part)
        (view,) = left.views("mean=2", 7, part)
        seen = {name: flat(state) for name, state in view.states(names)}
    whole = {name: state_of(known, name) for name in names}
    for name in names:
        assert {part[one] for one in groups[name]} == {part[name]} and len(groups[name]) >= 2
        mean = np.mean([whole[one] for one in groups[name]], 0)
        np.testing.assert_allclose(seen[name], mean, atol=1e-4)
    people = {name[:3]: name[:3] for name in names}
    rows = {name: np.zeros((1, 2)) for name in names}
    learnt = _learnt(left, rows, people, part, groups)
    assert learnt.parts.tolist() == [part[name] for name in names]
    for one, name in enumerate(names):
        for other, second in enumerate(names):
            assert learnt.shared[one, other] == (one != other and second in groups[name])


def flat(state: State) -> np.ndarray:
    kept = sorted(name for name in state if "running" not in name)
    return np.concatenate([np.asarray(state[name], float).reshape(-1) for name in kept])


def state_of(federation: Federation, client: str) -> np.ndarray:
    ((_, state),) = sound_victims(federation, [1]).states([client])
    return flat(state)


def test_people_are_dealt_whole(tmp_path):
    """Both talks of a speaker are in one part; speakers with two models are in equal shares."""
    speakers_of, people = {}, {}
    for number in range(40):
        for talk in ("a", "b"):
            speaker = f"p{number:02d}{talk}"
            people[speaker] = f"p{number:02d}"
            for model in range(2 if number % 4 == 0 else 1):
                speakers_of[f"{speaker}-{model}"] = speaker
    victims = Victims(dict.fromkeys(speakers_of), {}, speakers_of)
    dealt = set()
    for seed in range(3):
        training = Training(1, A2(network=0.4), seed=seed)
        trained, left = _part(victims, people, training, tmp_path)
        assert trained | left == people.keys() and not trained & left
        owners = [{people[speaker] for speaker in some} for some in (trained, left)]
        assert not owners[0] & owners[1] and [len(one) for one in owners] == [16, 24]
        with_two = [sum(int(one[1:]) % 4 == 0 for one in some) for some in owners]
        assert with_two == [4, 6]
        assert _part(victims, people, training, tmp_path) == (trained, left)
        dealt.add(frozenset(trained))
    assert len(dealt) == 3
    few = Victims(dict.fromkeys(list(speakers_of)[:18]), {}, speakers_of)
    with pytest.raises(UserError, match="the network is trained on 1 people with two models"):
        _part(few, people, Training(1, A2()), tmp_path)


def test_models_with_an_update_in_common_are_in_no_trial(world, tmp_path):
    """Models that share an update are in no trial of an ignorant attacker."""
    paths = [world / "known", world / "exp"]
    run(world, paths, tmp_path, "--set", "a2.epochs=1", "--defence", "mean=2")
    attacked = Federation(world / "exp")
    with attacked.settings():
        seen = defended(attacked, sound_victims(attacked, [1]), 1, "mean=2", 0)
        groups = {name: set(seen.group(name)) for name in CLIENTS}
    every = {tuple(line.split()[:2]) for line in (tmp_path / "trials.easy").open()}
    for attacker, shared in (
        ("ignorant", lambda one, other: one in groups[other]),
        ("semi-informed", lambda one, other: groups[one] & groups[other]),
    ):
        scored = {tuple(line.split()[:2]) for line in (tmp_path / f"a2.h2.{attacker}.easy").open()}
        assert scored == {pair for pair in every if not shared(*pair)}
        assert scored != every
