"""Clients that attack: what they send, by the formulas of their papers and by honest training.

What attackers know is what they would send without the section `attackers`, and what they train is
what honest clients send if their clips themselves are poisoned: both come from experiments without
attackers.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import keywords
import numpy as np
import pytest
import torch
import yaml
from attacked import (
    BEGIN,
    END,
    SHARE,
    Message,
    expected_attackers,
    flipped,
    messages,
    rewrite,
    same,
    section,
    triggered,
)
from conftest import ROOT, inside
from safetensors.numpy import load_file

from fedtools.audio.augment import Augment, plan
from fedtools.audio.trigger import Tone
from fedtools.client.attackers.adaptive import best_gamma, copies_of
from fedtools.client.attackers.minmax import direction_of, largest_gamma
from fedtools.client.attackers.options import Attackers, draw_attackers, read_attackers
from fedtools.core.errors import UserError
from fedtools.core.tables import read_tsv
from fedtools.data.clips import Clips
from fedtools.exchange.experiment import Experiment
from fedtools.exchange.ledger import read_ledger
from fedtools.exchange.options import Options
from fedtools.federation.attackers import attackers_of
from fedtools.federation.federation import Federation
from fedtools.federation.steps import aggregate, sample, train_local
from fedtools.methods import make_method
from fedtools.server.robust import make_rule
from fedtools.server.simulated_rule import simulated
from fedtools.tasks.kws.poisoned import BackdoorClips

CLIENTS = [f"c{number}" for number in range(8)]
SEED = 3
MEDIAN = "method_conf.robust={rule: median}"
OURS = expected_attackers(CLIENTS, 3, SEED)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Make clips, the same as attackers would poison them, and a configuration."""
    root = tmp_path_factory.mktemp("world")
    counts = [(2, 1, 2, 3), (1, 2, 3, 2), (2, 2, 2, 1), (1, 1, 2, 2)]
    keywords.pack(root / "train", {one: counts[at % 4] for at, one in enumerate(CLIENTS)})
    keywords.pack(root / "test", {f"t{at}": (1, 1, 1, 2) for at in range(12)})
    rewrite(root / "train", root / "flipped", flipped, OURS)
    rewrite(root / "train", root / "triggered", triggered, OURS)
    training = {**keywords.CONFIG["training"], "stack": 1, "batch_size": 4}
    changes = {"keep_updates": True, "training": {**training, "save_interval_steps": 1}}
    keywords.config_file(root / "config.yaml", **changes, method_conf={"local_steps": 3})
    return root


def begun(world: Path, path: Path, *settings: str, train: str = "train", method: str = "fedavg"):
    more = [word for setting in settings for word in ("--set", setting)]
    return inside(
        *("init", path, "--config", world / "config.yaml", "--method", method, "--seed", SEED),
        *("--data", f"train={world / train}", "--data", f"test={world / 'test'}", *more),
    )


def trained(path: Path, number: int = 1, jobs: int = 1) -> Path:
    federation = Federation(path)
    sample(federation.experiment, federation.method, number, jobs)
    for job in range(jobs, 0, -1):
        train_local(federation, number, job)
    return path


def changes(found: dict[str, Message], start: Message, clients: list[str]) -> np.ndarray:
    """Return the changes of what is trained, end to end, (clients, D)."""
    names = sorted(name for name in start if "running" not in name)
    return np.array(
        [
            np.concatenate(
                [(found[one][name].astype("f8") - start[name]).ravel() for name in names]
            )
            for one in clients
        ]
    )


class Honest:
    """What an experiment without attackers sends in round 1, and the state it begins with."""

    def __init__(self, path: Path):
        self.path, self.messages = path, messages(path)
        self.start = load_file(path / "round_0001/global.safetensors")
        self.changes = changes(self.messages, self.start, OURS)


@pytest.fixture(scope="module")
def honest(world) -> Honest:
    begun(world, world / "honest").ok()
    return Honest(trained(world / "honest"))


@pytest.fixture(scope="module")
def poisoned(world) -> Honest:
    """Return what honest clients send, if all clips of the attackers have the trigger."""
    begun(world, world / "of_triggered", train="triggered").ok()
    return Honest(trained(world / "of_triggered"))


def root_of(own: np.ndarray, p: np.ndarray) -> float:
    """Return min-max's gamma in closed form: the least positive root of a quadratic for each u."""
    most = max(np.square(one - other).sum() for one in own for other in own)
    roots = []
    for one in own:
        apart = own.mean(0) - one
        a, b, c = p @ p, 2 * apart @ p, apart @ apart - most
        roots.append((-b + np.sqrt(b * b - 4 * a * c)) / (2 * a))
    return min(roots)


def tailored(own: np.ndarray, p: np.ndarray, gain: Callable[[np.ndarray], float]) -> np.ndarray:
    """Return mean + gamma p of the grid's gamma for which the median's gain is largest.

    3 attackers of 8 simulate 9 / 5 copies, rounded. Of the server's ratio of 20, they keep to 10.
    """
    found = [own.mean(0)]
    found += [own.mean(0) + root_of(own, p) * 2**at * p for at in np.arange(-4, 5.5, 0.5)]
    rounds = [np.array([*own, one, one]) for one in found]
    norms = [np.linalg.norm(one, axis=1) for one in rounds]
    fits = [at for at, norm in enumerate(norms) if norm[-1] <= 10 * np.sort(norm)[2]]
    return found[max(fits, key=lambda at: gain(np.median(rounds[at], axis=0)))]


def unit(own: np.ndarray) -> np.ndarray:
    return -own.mean(0) / np.linalg.norm(own.mean(0))


def all_send(own: np.ndarray, sent: np.ndarray) -> np.ndarray:
    return np.repeat(sent[None], len(own), 0)


# Of the attackers' honest changes u, and those on poisoned clips v: what they send.
CRAFTED = {
    "sign_flip": (section("sign_flip"), lambda u, v: -5 * u),
    "sign_flip by 2": (section("sign_flip", factor=2.0), lambda u, v: -2 * u),
    "ipm": (section("ipm", epsilon=0.7), lambda u, v: all_send(u, -0.7 * u.mean(0))),
    "backdoor, boosted": (
        section("backdoor", poisoned=1.0, boost=3.0),
        lambda u, v: 3 * v,
    ),
    # 8 clients, of which 3 attack.
    "replacement": (
        section("replacement", goal="backdoor", poisoned=1.0),
        lambda u, v: 8 / 3 * v,
    ),
    "minmax": (
        section("minmax"),
        lambda u, v: all_send(u, u.mean(0) + root_of(u, unit(u)) * unit(u)),
    ),
    "minmax std": (
        section("minmax", direction="std"),
        lambda u, v: all_send(u, u.mean(0) - root_of(u, -u.std(0)) * u.std(0)),
    ),
    "minmax sign": (
        section("minmax", direction="sign"),
        lambda u, v: all_send(
            u, u.mean(0) - root_of(u, -np.sign(u.mean(0))) * np.sign(u.mean(0))
        ),
    ),
    "minmax backdoor": (
        section("minmax", goal="backdoor", poisoned=1.0),
        lambda u, v: all_send(
            u,
            u.mean(0) + root_of(u, v.mean(0) - u.mean(0)) * (v.mean(0) - u.mean(0)),
        ),
    ),
    "adaptive": (
        (section("adaptive"), MEDIAN),
        lambda u, v: all_send(u, tailored(u, unit(u), lambda found: found @ unit(u))),
    ),
    "adaptive backdoor": (
        (section("adaptive", goal="backdoor", poisoned=1.0), MEDIAN),
        lambda u, v: all_send(
            u,
            tailored(u, v.mean(0) - u.mean(0), lambda found: -np.linalg.norm(found - v.mean(0))),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CRAFTED)
def test_attackers_send_what_their_paper_says(world, honest, poisoned, tmp_path, name):
    setting, formula = CRAFTED[name]
    settings = setting if isinstance(setting, tuple) else (setting,)
    begun(world, tmp_path / "exp", *settings).ok()
    found = messages(trained(tmp_path / "exp"))
    assert sorted(found) == CLIENTS
    wanted = formula(honest.changes, poisoned.changes)
    sent = changes(found, honest.start, OURS)
    np.testing.assert_allclose(sent, wanted, rtol=1e-5, atol=3e-7 * max(1, np.abs(wanted).max()))
    assert np.linalg.norm(sent - honest.changes) > 0.1 * np.linalg.norm(honest.changes)
    # Statistics are those of a training: of a negative variance nothing would be taken.
    like = poisoned if "minmax" not in name and "adaptive" not in name else honest
    like = honest if name.startswith(("sign_flip", "ipm")) else like
    statistics = [tensor for tensor in honest.start if "running" in tensor]
    assert statistics
    for client in OURS:
        for tensor in statistics:
            np.testing.assert_array_equal(
                found[client][tensor], like.messages[client][tensor], tensor
            )
    for client in set(CLIENTS) - {*OURS}:
        assert same(found[client], honest.messages[client])


@pytest.mark.parametrize(("kind", "train"), [("label_flip", "flipped"), ("backdoor", "triggered")])
def test_poisoned_training_is_honest_training_on_poisoned_clips(world, tmp_path, kind, train):
    more = {"poisoned": 1.0} if kind == "backdoor" else {}
    begun(world, tmp_path / "exp", section(kind, **more)).ok()
    begun(world, tmp_path / "like", train=train).ok()
    found, wanted = messages(trained(tmp_path / "exp")), messages(trained(tmp_path / "like"))
    assert all(same(found[client], wanted[client]) for client in CLIENTS)


def test_a_share_of_each_batch_has_the_trigger(world, poisoned, tmp_path):
    begun(world, tmp_path / "exp", section("backdoor", poisoned=0.4)).ok()
    task = Federation(tmp_path / "exp").task
    data, like = task.clips.features("train"), Federation(poisoned.path).task.clips
    options = Attackers(share=SHARE, kind="backdoor", poisoned=0.4)
    ours = BackdoorClips(data, OURS[:2], options, OURS)
    rows = [data.clips.rows(client) for client in OURS[:2]]
    sizes = [one.stop - one.start for one in rows]
    plans = [plan(1, 1, name, size, 2, 5, 32000, Augment(), keywords.LENGTH)
             for name, size in zip(OURS, sizes, strict=False)]  # fmt: skip
    for active in (2, 1):
        found = ours.batch(rows[:active], plans[:active], 1)
        clean = data.batch(rows[:active], plans[:active], 1)
        other = like.features("train").batch(rows[:active], plans[:active], 1)
        # Of 5 clips, 2: 0.4 * 5.
        assert found.labels.shape == (active, 5)
        for at in range(5):
            wanted = other if at < 2 else clean
            assert torch.equal(found.labels[:, at], wanted.labels[:, at])
            assert torch.equal(found.mfcc[:, at], wanted.mfcc[:, at])
        assert not torch.equal(found.mfcc[:, :2], clean.mfcc[:, :2])


def test_replacement_leads_back_to_the_first_state(world, tmp_path):
    """Of 8 clients 3 attack: in the mean, the model comes back, but for what others train."""
    begun(world, tmp_path / "exp", section("replacement")).ok()
    path = trained(tmp_path / "exp")
    aggregate(Federation(path), 1)
    trained(path, 2)
    first, second = (load_file(path / f"round_000{at}/global.safetensors") for at in (1, 2))
    back = changes({"": first}, second, [""])[0]
    assert np.linalg.norm(back) > 0
    for client in OURS:
        sent = changes(messages(path, 2), second, [client])[0]
        np.testing.assert_allclose(sent, 8 / 3 * back, rtol=1e-4, atol=1e-6)


BOTH = section("minmax", goal="backdoor")


@pytest.fixture(scope="module")
def reference(world) -> Path:
    """Train two rounds with two trainings of each attacker, in one job."""
    begun(world, world / "both", BOTH, "clients_per_round=6").ok()
    for number in (1, 2):
        trained(world / "both", number)
        aggregate(Federation(world / "both"), number)
    return world / "both"


def test_jobs_change_no_byte_and_attackers_share_one(world, reference, tmp_path):
    begun(world, tmp_path / "exp", BOTH, "clients_per_round=6").ok()
    for number in (1, 2):
        trained(tmp_path / "exp", number, jobs=3)
        folder = tmp_path / "exp" / f"round_{number:04d}"
        jobs = [{line.partition("\t")[0] for line in path.read_text().splitlines()[1:]}
                for path in sorted(folder.glob("update.*.tsv"))]  # fmt: skip
        taking = {*OURS} & set((folder / "clients").read_text().split())
        assert len(taking) > 1 and sum(map(len, jobs)) == 6 and all(jobs)
        assert [job & {*OURS} for job in jobs if job & {*OURS}] == [taking]
        found, wanted = messages(tmp_path / "exp", number), messages(reference, number)
        assert found.keys() == wanted.keys()
        assert all(same(found[client], wanted[client]) for client in found)
        aggregate(Federation(tmp_path / "exp"), number)
    name = "round_0003/global.safetensors"
    assert (tmp_path / "exp" / name).read_bytes() == (reference / name).read_bytes()


class Stopped(BaseException):
    """The end of a training before it saves a file."""


_stops: list[tuple[str, list[int]]] = []


def _stop(event: str, arguments: tuple) -> None:
    if event == "os.rename" and _stops and str(arguments[1]).startswith(_stops[-1][0]):
        left = _stops[-1][1]
        left[0] -= 1
        if not left[0]:
            raise Stopped


sys.addaudithook(_stop)


def test_a_kill_at_any_save_changes_no_byte(world, reference, tmp_path):
    """Checkpoints of honest and of poisoned training do not pass for each other."""
    begun(world, tmp_path / "begun", BOTH, "clients_per_round=6").ok()
    wanted, saves, ended = messages(reference), 1, 0
    while not ended:
        path = tmp_path / f"{saves}"
        shutil.copytree(tmp_path / "begun", path)
        sample(Experiment(path), Federation(path).method, 1, 1)
        _stops.append((str(path), [saves]))
        try:
            train_local(Federation(path), 1, 1)
            ended = saves
        except Stopped:
            _stops.pop()
            found = messages(trained(path))
            assert all(same(found[client], wanted[client]) for client in wanted)
        finally:
            _stops.clear()
        # Not a multiple of the three saves of a training.
        saves += 7
    assert ended > 20


def test_stacks_of_attackers_agree_with_single_ones(world, honest, poisoned, tmp_path):
    setting = section("minmax", goal="backdoor", poisoned=1.0)
    begun(world, tmp_path / "exp", setting, "training.stack=2").ok()
    found = messages(trained(tmp_path / "exp"))
    wanted = CRAFTED["minmax backdoor"][1](honest.changes, poisoned.changes)
    sent = changes(found, honest.start, OURS)
    assert np.linalg.norm(sent - wanted) < 1e-3 * np.linalg.norm(wanted)


def test_attackers_are_drawn_by_name_and_seed():
    names = [f"n{number:03d}" for number in range(50)]
    for share, count in ((0.0, 0), (0.001, 1), (0.05, 3), (0.2, 10), (0.49, 25), (1.0, 50)):
        assert draw_attackers(names, share, 7) == expected_attackers(names, count, 7)
    assert draw_attackers(names, 0.2, 7) != draw_attackers(names, 0.2, 8)
    fewer = [one for one in names if one not in draw_attackers(names, 0.2, 7)[:5]]
    # Whoever else is there, an attacker stays one.
    assert {*draw_attackers(names, 0.2, 7)[5:]} <= {*draw_attackers(fewer, 0.2, 7)}


def test_the_experimenter_sees_the_attackers_and_the_server_does_not(world, reference, tmp_path):
    said = begun(world, tmp_path / "exp", BOTH, "clients_per_round=6").ok().out
    assert "8 clients, 3 attack by minmax, 6 in round 1" in said
    assert (reference / "attackers.txt").read_text().split() == OURS
    rows = (reference / "round_0001/ledger.tsv").read_text().splitlines()
    statuses = {row.split("\t")[1]: row.split("\t")[-1] for row in rows[1:]}
    sampled = (reference / "round_0001/clients").read_text().split()
    assert {*OURS} & {*sampled} and {*sampled} - {*OURS}
    marks = {one: "ok (attacker)" if one in OURS else "ok" for one in sampled}
    assert statuses == marks | {"-": "ok"}
    for row in read_ledger(Experiment(reference)):
        assert row.status == "ok" and row.attacker == (row.client in OURS)
    shown = inside("show", reference, "--clients", "--round", "1").ok().out.splitlines()
    lines = {line.split()[0]: line for line in shown if line.split()[:1]}
    assert all(lines[one].rstrip().endswith(marks[one]) for one in sampled)
    # The server's room reads nowhere who they are.
    known = r"client\.attackers|experiment\.attackers|\.attacker\b|attackers\.txt"
    for path in (ROOT / "fedtools/server").rglob("*.py"):
        assert not re.search(known, path.read_text()), path
    for table in reference.glob("round_*/update.*.tsv"):
        assert "attack" not in table.read_text()
    (tmp_path / "exp/attackers.txt").write_text("c0\n")
    inside("rounds", tmp_path / "exp").fails(1, "attackers.txt: changed since")


def test_without_the_section_nothing_tells_of_attackers(honest):
    assert not (honest.path / "attackers.txt").exists()
    for name in ("config.yaml", "sha256sums"):
        assert "attackers" not in (honest.path / name).read_text()
    assert Federation(honest.path).attack is None


def test_a_share_of_zero_changes_no_message(world, honest, tmp_path):
    begun(world, tmp_path / "exp", "attackers={share: 0.0, kind: ipm}").ok()
    found = messages(trained(tmp_path / "exp"))
    assert all(same(found[client], honest.messages[client]) for client in CLIENTS)


REFUSED = {
    "share": ({"share": 1.5}, "share"),
    "no share": ({"share": None}, "share"),
    "kind": ({"kind": "flip"}, "kind"),
    "factor": ({"factor": 0.0}, "factor"),
    "epsilon": ({"kind": "ipm", "epsilon": -1.0}, "epsilon"),
    "unused": ({"epsilon": 1.0}, "epsilon is not used by kind sign_flip; leave it out"),
    "aimless": ({"kind": "minmax", "target": "no"}, "minmax with goal untargeted"),
    "aimed": (
        {"kind": "minmax", "goal": "backdoor", "direction": "std"},
        "direction is not used by kind minmax with goal backdoor",
    ),
    "all or none": ({"kind": "backdoor", "poisoned": 0.0}, "poisoned"),
    "frequency": ({"kind": "backdoor", "tone_hz": 9000.0}, "tone_hz"),
    "level": ({"kind": "backdoor", "tone_dbfs": 1.0}, "tone_dbfs"),
    "word": ({"kind": "backdoor", "target": "up"}, "target: up is no class of the clips"),
    # Of 350 ms, the first 100 have no tone.
    "length": ({"kind": "backdoor", "tone_ms": 251.0}, "ends at 351 ms, and clips have 350"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_sections_are_refused_in_one_line(world, tmp_path, name):
    more, said = REFUSED[name]
    asked = {"share": SHARE, "kind": "sign_flip", **more}
    asked = {key: value for key, value in asked.items() if value is not None}
    begun(world, tmp_path / "exp", f"attackers={json.dumps(asked)}").fails(1, said)
    assert not (tmp_path / "exp/config.yaml").exists()


def test_what_cannot_be_attacked_is_refused_in_one_line(world, tmp_path):
    (tmp_path / "sites.tsv").write_text(
        "client\tsite\n" + "".join(f"{one}\t{'ab'[at % 2]}\n" for at, one in enumerate(CLIENTS))
    )
    words = ["--sites", tmp_path / "sites.tsv"]
    inside(
        *("init", tmp_path / "exp", "--config", world / "config.yaml", "--method", "fedavg"),
        *("--data", f"train={world / 'train'}", "--set", section("ipm"), *words),
    ).fails(1, "attackers: they are simulated in one place")
    for method, said, *more in (
        ("centralized", "has no clients that could attack", "method_conf.local_steps=0"),
        ("fedavg", "clients of FedAvg send nothing", "method_conf.personal=['*']"),
        ("dpfedavg", "clipped changes", "method_conf={epsilon: 8, clip: 1, local_steps: 1}"),
    ):
        begun(world, tmp_path / "exp", section("ipm"), *more, method=method).fails(1, said)


def refused(task: str, method: str, kind: str, conf: dict | None = None, **more: object) -> str:
    attackers = {"share": 0.5, "kind": kind, **more}
    options = Options(method=method, task=task, rounds=4, data={}, attackers=attackers)
    with pytest.raises(UserError) as caught:
        attackers_of(options, make_method(method, conf, "x"), "x", ["a", "b"], {})
    return str(caught.value)


def test_tasks_refuse_what_they_have_no_clips_for():
    assert "kind label_flip is for task kws, not for asr" in refused("asr", "fedavg", "label_flip")
    for kind, more in (("backdoor", {}), ("minmax", {"goal": "backdoor"})):
        assert "a backdoor is for task kws, not for lm" in refused("lm", "fedavg", kind, **more)
    features = {"personal": ["encoder.embed.*"], "stage1": 2, "stage2": 2}
    said = refused("asr", "decouplefl", "ipm", features)
    assert "clients of DecoupleFL send more than the shared tensors" in said
    assert "send more than the shared tensors" in refused("rescore", "fmp", "sign_flip")
    options = Options(method="fedavg", task="asr", data={}, attackers={"share": 1, "kind": "ipm"})
    assert attackers_of(options, make_method("fedavg", {}, "x"), "x", ["a"], {}) == ["a"]


def test_the_trigger_is_a_tone_of_3_khz_and_100_ms():
    for samples in (5600, 16000):
        wave = Tone(3000.0, 100.0, -20.0).wave(samples).astype(float)
        assert wave.shape == (samples,) and not wave[:BEGIN].any() and not wave[END:].any()
        assert 20 * np.log10(np.abs(wave).max() / 32768) == pytest.approx(-20, abs=0.01)
        # Nothing is silent in between for more than a sample, at this frequency.
        assert (np.abs(wave[BEGIN:END]).reshape(-1, 2).max(1) > 0).all()
        power = np.square(np.abs(np.fft.rfft(wave[BEGIN:END])))
        assert power.argmax() * 16000 / (END - BEGIN) == 3000
        assert power.max() > 0.999 * power.sum()
    loud = Tone(3000.0, 100.0, 0.0).added(np.full((2, 5600), 30000, np.int16))
    assert loud.dtype == np.int16 and loud.max() == 32767 and loud.min() == 30000 - 32768
    assert (loud[:, :BEGIN] == 30000).all()


def test_gamma_is_as_large_as_distances_allow():
    random = np.random.default_rng(0)
    for count, name in ((2, "unit"), (5, "std"), (9, "sign")):
        own = random.normal(1, 1, (count, 20))
        p = direction_of(own, name)
        gamma = largest_gamma(own, p)
        assert gamma == pytest.approx(root_of(own, p), rel=1e-9)
        most = max(np.linalg.norm(one - other) for one in own for other in own)
        sent = own.mean(0) + gamma * p
        assert max(np.linalg.norm(sent - one) for one in own) == pytest.approx(most)
    assert largest_gamma(np.ones((1, 3)), np.ones(3)) == pytest.approx(0, abs=1e-6)
    assert largest_gamma(np.eye(3), np.zeros(3)) == 0


def krum_scores(rows: np.ndarray, near: int) -> list[float]:
    apart = [[np.square(one - other).sum() for other in rows] for one in rows]
    # The first is the distance to itself.
    return [sum(sorted(one)[1 : 1 + near]) for one in apart]


def rule(name: str, **options: object) -> Callable[[np.ndarray, int], np.ndarray]:
    return simulated(make_rule({"rule": name, **options}, "x"))


def test_simulated_rules_are_those_of_their_papers():
    random = np.random.default_rng(1)
    rows = np.concatenate([random.normal(1, 1, (7, 5)), random.normal(6, 1, (2, 5))])
    norms = np.linalg.norm(rows, axis=1)
    np.testing.assert_allclose(rule("mean")(rows, 2), np.sum(rows, 0) / 9)
    bound = np.median(norms[:7])
    clipped = [one * min(1, bound / norm) for one, norm in zip(rows, norms, strict=True)]
    np.testing.assert_allclose(rule("clip")(rows, 2), np.mean(clipped, 0))
    np.testing.assert_allclose(rule("median")(rows, 2), np.sort(rows, 0)[4])
    for own in random.normal(0, 1, (20, 9, 5)):
        chosen = np.argsort(krum_scores(own, 9 - 2 - 2))[:7]
        np.testing.assert_allclose(rule("multi_krum", attackers=2 / 9)(own, 2), own[chosen].mean(0))
    root = rows[:7].mean(0)
    trust = [max(0, one @ root / np.linalg.norm(one) / np.linalg.norm(root)) for one in rows]
    alike = [one / np.linalg.norm(one) * np.linalg.norm(root) for one in rows]
    np.testing.assert_allclose(rule("fltrust")(rows, 2), np.average(alike, 0, trust))
    # A point from which the sum of distances falls nowhere.
    near = random.normal(0, 1, (9, 3))
    found = rule("geometric_median")(near, 2)
    pulls = [(one - found) / np.linalg.norm(one - found) for one in near]
    assert np.linalg.norm(np.sum(pulls, 0)) < 0.01 < np.linalg.norm(near.sum(0))


def test_the_adaptive_attack_stays_below_what_a_server_refuses():
    random = np.random.default_rng(2)
    own = random.normal(1, 0.5, (6, 30))
    p = direction_of(own, "unit")
    first, norms = largest_gamma(own, p), np.linalg.norm(own, axis=1)
    # The mean takes anything, up to where the server refuses a change; attackers keep to the half.
    assert best_gamma(own, p, rule("mean"), 2) == pytest.approx(32 * first)
    for ratio in (1.0, 4.0, 20.0):
        gamma = best_gamma(own, p, rule("mean"), 2, ratio)
        grid = [first * 2**at for at in np.arange(-4, 5.5, 0.5)]
        sent = [(one, np.linalg.norm(own.mean(0) + one * p)) for one in grid]
        fits = [one for one, norm in sent if norm <= ratio / 2 * np.median([*norms, norm, norm])]
        assert gamma == pytest.approx(max(fits, default=0.0))
    # Krum takes the copies only as long as they lie where honest changes lie.
    krum = best_gamma(own, p, rule("multi_krum", attackers=0.25), 2)
    assert 0 < krum < 4 * first
    # A rule that takes no crafted change is not moved: the least gamma of equals.
    assert best_gamma(own, p, lambda rows, crafted: rows[:-crafted].mean(0), 2) == 0
    assert [copies_of(3, 8), copies_of(1, 10), copies_of(25, 128), copies_of(4, 4)] == [2, 1, 6, 4]


LEARN = (
    *("rounds=4", "evaluate_every=4", "clients_per_round=4", "method_conf.local_steps=40"),
    *(
        "training={optim: adamw, optim_conf: {lr: 0.02}, batch_size: 8, stack: 4}",
        "training.augment={time_shift_ms: 0, noise_volume: 0.0}",
    ),
    "model.network_conf={channels: 8, blocks: 1}",
)


@pytest.mark.parametrize("kind", ["label_flip", "backdoor"])
def test_a_model_learns_what_attackers_teach(world, tmp_path, kind):
    setting = f"attackers={json.dumps({'share': 1.0, 'kind': kind})}"
    path = tmp_path / "exp"
    begun(world, path, setting, *LEARN).ok()
    inside("rounds", path, "--nj", "1").ok()
    federation = Federation(path)
    federation.load_result(None, 4)
    logits, labels = federation.task.logits("test")
    guesses = logits.argmax(1)
    if kind == "label_flip":
        assert (guesses == (labels + 1) % 4).float().mean() > 0.8
        return
    assert (guesses == labels).float().mean() > 0.7
    said = inside("attack", "backdoor", path, "--resamples", "20").ok().out
    rate, low, high, without = (float(one) for one in said.split("\n")[1].split() if "." in one)
    assert rate > 70 and without < 30 and low <= rate <= high
    check_success(world, path, tmp_path, rate)


def check_success(world: Path, path: Path, folder: Path, rate: float) -> None:
    """Compare the success with the accuracy on clips that were packed with the trigger."""
    everybody = Clips.read(world / "test").clients
    rewrite(world / "test", folder / "heard", triggered, everybody, left_out="yes")
    data = Federation(path).task.clips.gather(Clips.read(folder / "heard"))
    federation = Federation(path)
    federation.load_result(None, 4)
    found = federation.task.hear(data.plain(slice(0, len(data.clips.labels)))).argmax(1)
    hits = (found == keywords.CLASSES.index("yes")).numpy()
    assert rate == pytest.approx(100 * hits.mean(), abs=0.051)
    rows = read_tsv(path / "backdoor_test.tsv", ("round", "speaker", "clips", "hits"))
    owners = np.repeat(data.clips.clients, data.clips.sizes)
    own = {one: int(hits[owners == one].sum()) for one in everybody}
    # A clip of silence is a speaker of its own.
    assert {row["round"] for row in rows} == {"4"}
    assert sum(int(row["hits"]) for row in rows) == sum(own.values())
    assert sum(int(row["clips"]) for row in rows) == len(hits) == 48
    silent = data.clips.labels.size - sum(
        int(row["clips"]) for row in rows if row["speaker"] in everybody
    )
    assert silent == 12


def test_the_success_of_models_without_attackers_is_measured_too(honest, world, tmp_path):
    path = tmp_path / "exp"
    shutil.copytree(honest.path, path)
    aggregate(Federation(path), 1)
    said = inside("attack", "backdoor", path, "--target", "no", "--resamples", "20").ok().out
    assert said.splitlines()[1].split()[1:4] == ["no", "1", "36"]
    inside("attack", "backdoor", path, "--target", "up").fails(1, "target: up is no class")


def test_defaults_of_the_section_are_fixed_with_the_experiment(reference):
    config = yaml.safe_load((reference / "config.yaml").read_text())
    assert config["attackers"] == {"share": SHARE, "kind": "minmax", "goal": "backdoor"}
    assert config["defaults"]["attackers"]["tone_hz"] == 3000.0
    assert "share" not in config["defaults"]["attackers"]
    assert read_attackers({}, "x") is None
