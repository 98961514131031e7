"""Robust rules in federations: what `init` refuses, rounds by real commands, kills, the ledger."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import signal
import time

import asr_world
import keyword_world
import keywords
import numpy as np
import pytest
import yaml
from conftest import ROOT, inside, ledger
from safetensors.numpy import load_file, save_file
from test_aggregate import sent
from test_robust import by_paper, flat

from fedtools.exchange.experiment import Experiment
from fedtools.methods import make_method
from fedtools.server.robust import make_rule
from fedtools.tasks import facts_of

RULES = {
    "clip": {"rule": "clip"},
    "clip-server": {"rule": "clip", "norm": "server", "statistics": "server"},
    "median": {"rule": "median"},
    "multi_krum": {"rule": "multi_krum", "attackers": 0.3},
    "geometric_median": {"rule": "geometric_median"},
    "fltrust": {"rule": "fltrust"},
}
# The root's only client has the name by which the server trains, so that a federation of it alone
# trains as the server does.
SERVER = "server"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = keyword_world.make_world(tmp_path_factory.mktemp("world"), length=2800)
    keywords.pack(folder / "root", {SERVER: [6, 5, 4, 3]}, length=2800)
    return folder


def settings_of(options: dict) -> str:
    words = ", ".join(f"{name}: {value}" for name, value in options.items())
    return f"method_conf.robust={{{words}}}"


def begin(world, path, options, *settings, method="fedavg", root=True, train="train"):
    """Begin an experiment of all clients with a rule; return what init says."""
    settings = ("clients_per_round=1.0", "keep_updates=true", *settings)
    if options is not None:
        settings = (settings_of(options), *settings)
    words = [word for setting in settings for word in ("--set", setting)]
    data = ["--data", f"train={world / train}"]
    data += ["--data", f"root={world / 'root'}"] if root else []
    return inside(
        *("init", path, "--config", world / "config.yaml", "--method", method, *data, *words)
    )


def rounds(path, to):
    return inside("rounds", path, "--to", to).ok()


@pytest.fixture(scope="module")
def plain(world, tmp_path_factory):
    """Return three rounds of the mean, and one of a federation of the root alone."""
    folder = tmp_path_factory.mktemp("plain")
    begin(world, folder / "mean", None).ok()
    rounds(folder / "mean", 1)
    begin(world, folder / "root", None, train="root").ok()
    rounds(folder / "root", 1)
    return folder


def parts_of(state):
    names = [name for name in state if not name.endswith(("running_mean", "running_var"))]
    return {
        "an update": names,
        "statistics": [name for name in state if name not in names],
    }


@pytest.mark.parametrize("name", RULES)
def test_rounds_by_a_rule(world, plain, tmp_path, name):
    """Single commands and `rounds` give the same bytes, which are what the paper says."""
    options, one, two = RULES[name], tmp_path / "one", tmp_path / "two"
    begin(world, one, options).ok()
    shutil.copytree(one, two)
    rounds(one, 2)
    inside("sample", two, "--nj", 3).ok()
    for job in (1, 2, 3):
        inside("train-local", two, "--job", job).ok()
    inside("aggregate", two).ok()
    file = "round_0002/global.safetensors"
    assert (one / file).read_bytes() == (two / file).read_bytes()
    states = [load_file(one / f"round_{n:04}/global.safetensors") for n in (1, 2, 3)]
    updates = [{c: t for c, (_, t) in sent(one / f"round_{n:04}").items()} for n in (1, 2)]
    # The clients train as without a rule, and from the same state.
    same = {c: t for c, (_, t) in sent(plain / "mean" / "round_0001").items()}
    for client, tensors in updates[0].items():
        for key, value in tensors.items():
            np.testing.assert_array_equal(value, same[client][key])
    (trained,) = (tensors for _, tensors in sent(plain / "root" / "round_0001").values())
    assert load_file(plain / "root" / "round_0001/global.safetensors").keys() == states[0].keys()
    parts = parts_of(states[0])
    ones = [1.0] * len(updates[0])
    found, bounds = by_paper(options["rule"], options, updates[0], states[0], ones, trained, parts)
    for key, value in states[1].items():
        np.testing.assert_allclose(value, found[key], rtol=0, atol=1e-6, err_msg=key)
    if options["rule"] == "clip":
        # The bound of the first round stays: not that of the second round's updates.
        for part, names in parts.items():
            moved = [flat(one, names) - flat(states[1], names) for one in updates[1].values()]
            factors = [min(1, bounds[part] / np.linalg.norm(update)) for update in moved]
            step = np.mean([f * update for f, update in zip(factors, moved, strict=True)], axis=0)
            expected = flat(states[1], names) + step
            np.testing.assert_allclose(flat(states[2], names), expected, rtol=0, atol=1e-6)
    statuses = [row["status"] for row in ledger(one) if row["client"] != "-"]
    told = {"clip": {"ok", "clipped"}, "multi_krum": {"ok", "left out by the robust rule"}}
    if name in told:
        assert set(statuses) == told[name]
    left = sum(status.startswith("left out") for status in statuses)
    # Of seven clients three thirds, rounded up, but no more than two: below half of them.
    assert left == (4 if name == "multi_krum" else left)
    assert "refused" not in " ".join(statuses)
    server = [row for row in ledger(one) if row["client"] == "-"]
    trains = {"fltrust": [4, 4], "clip-server": [4, 0]}.get(name, [0, 0])
    assert [int(row["steps"]) for row in server] == trains
    epochs = [4 / math.ceil(18 / 8) if steps else 0.0 for steps in trains]
    assert [float(row["server_epochs"]) for row in server] == pytest.approx(epochs, rel=1e-4)


def test_a_kill_and_a_reset_change_no_byte(world, tmp_path):
    """The recorded bound of the first round outlives both."""
    reference, killed = tmp_path / "reference", tmp_path / "killed"
    for path in (reference, killed):
        begin(world, path, RULES["clip-server"], "clients_per_round=2").ok()
    rounds(reference, 3)
    kill_rounds(killed, 3, "round_0002/global.safetensors")
    rounds(killed, 3)
    assert same(reference, killed)
    # Killed after all files of a round but its mark were written.
    (killed / "round_0003/.done").unlink()
    rounds(killed, 3)
    assert same(reference, killed)
    inside("reset", killed, "--round", 2).ok()
    rounds(killed, 3)
    assert same(reference, killed)


def kill_rounds(path, to, file) -> None:
    """Run rounds in a fork of this process, and kill it once a file is there."""
    process = os.fork()
    if not process:
        try:
            inside("rounds", path, "--to", to)
        finally:
            os._exit(0)
    while not (path / file).exists() and not (path / f"round_{to:04}/.done").exists():
        time.sleep(0.002)
    os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) and not (path / f"round_{to:04}/.done").exists()


def same(one, other) -> bool:
    """Return whether two experiments have the same states, and the same recorded bound."""
    names = [f"round_{n:04}/global.safetensors" for n in (2, 3, 4)]
    names.append("server/round_0001/rule.safetensors")
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


@pytest.mark.parametrize("name", ["clip", "median", "multi_krum", "fltrust"])
def test_a_client_that_sends_ten_times_its_update(world, plain, tmp_path, name):
    """By the default bound it is not refused; every rule stays nearer to the honest clients' mean.

    Seven clients of other classes have so little in common that no rule can stay close to it.
    """
    path = tmp_path / "exp"
    begin(world, path, RULES[name]).ok()
    base = load_file(path / "round_0001/global.safetensors")
    names = parts_of(base)["an update"]
    inside("sample", path, "--nj", 1).ok()
    inside("train-local", path, "--job", 1).ok()
    file = path / "round_0001/update.1.safetensors"
    tensors = load_file(file)
    honest = np.array([
        flat({key: value[row] for key, value in tensors.items()}, names) - flat(base, names)
        for row in range(1, 7)
    ])  # fmt: skip
    for key in names:
        tensors[key][0] = base[key] - 10 * (tensors[key][0] - base[key])
    save_file(tensors, file, {"content": ""})
    inside("aggregate", path).ok()
    statuses = [row["status"] for row in ledger(path)]
    assert not any(status.startswith("refused") for status in statuses)
    good = honest.mean(0)
    step = flat(load_file(path / "round_0002/global.safetensors"), names) - flat(base, names)
    far = flat({key: value[0] for key, value in tensors.items()}, names) - flat(base, names)
    off_by_mean = np.linalg.norm((6 * good + far) / 7 - good)
    assert off_by_mean > 1.2 * np.linalg.norm(good)
    assert np.linalg.norm(step - good) < 0.75 * off_by_mean


@pytest.mark.parametrize(
    ("method", "options", "settings", "said"),
    [
        ("fedavg", RULES["fltrust"], [], "give --data root=FOLDER"),
        ("fedavg", RULES["clip-server"], [], "give --data root=FOLDER"),
        ("fednorm", RULES["fltrust"], [], "fltrust trains on data of the server's own, which has"),
        ("fedavg", {"rule": "krum"}, [], "unknown robust rule 'krum'; known: clip, fltrust, geo"),
        ("fedavg", {"rule": "multi_krum", "attackers": 0.6}, [], "less than 0.5"),
        ("fedavg", {"attackers": 0.2}, [], "no rule is named"),
        ("centralized", RULES["median"], [], "robust: Centralized has no use for a rule"),
        ("dpfedavg", RULES["clip"], ["method_conf.epsilon=1"], "DP-FedAvg has no use for a rule"),
        (
            "fedavg",
            RULES["median"],
            ["model={network: dscnn, network_conf: {channels: 6, blocks: 1}, adapt: {rank: 2}}"],
            "is a factor of an adapter, whose coordinates mean nothing",
        ),
    ],
)
def test_what_init_refuses(world, plain, tmp_path, method, options, settings, said):
    if any("adapt" in one for one in settings):
        more = ("--start", plain / "mean" / "init.safetensors")
        words = [w for s in (settings_of(options), *settings) for w in ("--set", s)]
        result = inside(
            *("init", tmp_path / "exp", "--config", world / "config.yaml", "--method", method),
            *("--data", f"train={world / 'train'}", *words, *more),
        )
    else:
        result = begin(world, tmp_path / "exp", options, *settings, method=method, root=False)
    result.fails(1, said)
    assert not (tmp_path / "exp" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("method", "task", "options", "said"),
    [
        ("fmp", "rescore", {}, "clients send counts, which the server adds up"),
        ("decouplefl", "asr", {}, "clients send features, and the server trains on them"),
        ("joint", "asr", {}, "the server trains alone"),
        ("client", "asr", {}, "clients send nothing"),
        ("fedavg", "lm", {"robust": RULES["fltrust"]}, "unlike this task"),
        ("fedavg", "asr", {"robust": RULES["fltrust"], "keep_optimizer": True}, "no optimiser"),
    ],
)
def test_methods_and_tasks_without_a_use_say_why(method, task, options, said):
    made = make_method(method, {"robust": RULES["clip"], **options}, "c.yaml")
    with pytest.raises(ValueError, match=said):
        made.check(task, facts_of(task, "c.yaml").parts, {})


@pytest.mark.parametrize("method", ["fedkws_ui", "fedopt"])
def test_other_methods_take_a_rule(world, tmp_path, method):
    """FedOpt's step goes towards what the rule makes; the server trains by the method's update."""
    few = "clients_per_round=2"
    begin(world, tmp_path / "exp", RULES["fltrust"], few, method=method).ok()
    said = rounds(tmp_path / "exp", 2).err
    assert "refused" not in said
    state = load_file(tmp_path / "exp" / "round_0003/global.safetensors")
    assert all(np.isfinite(value).all() for value in state.values())


def test_the_configuration_says_no_more_than_before_without_a_rule(world, plain, tmp_path):
    """Its bytes are part of messages, and of noise; with a rule the defaults of its options are."""
    text = (plain / "mean" / "config.yaml").read_text()
    assert "robust" not in text and "max_norm_ratio" in text
    begin(world, tmp_path / "exp", RULES["geometric_median"]).ok()
    defaults = Experiment(tmp_path / "exp").options.defaults["method_conf"]
    assert defaults["robust"] == {"iterations": 10, "smoothing": 1e-06}


def test_clients_are_shown_without_shares_that_they_do_not_have(world, plain, tmp_path):
    begin(world, tmp_path / "exp", RULES["multi_krum"]).ok()
    rounds(tmp_path / "exp", 1)
    *_, last = table = inside("show", tmp_path / "exp", "--clients").ok().out.splitlines()
    assert not any("%" in line for line in table) and last.startswith("server")
    *_, last = inside("show", plain / "mean", "--clients").ok().out.splitlines()
    assert "100.0 %" in last


def test_the_command_of_the_page(world, tmp_path):
    """As it stands there, with the world's folders in place of its names."""
    page = (ROOT / "fedtools/server/robust/README.md").read_text()
    (block,) = re.findall(r"```sh\n(.*?)```", page, flags=re.S)
    places = {"EXP": tmp_path / "exp", "conf.yaml": world / "config.yaml"}
    places |= {"CLIENTS": world / "train", "OWN": world / "root"}
    for name, place in places.items():
        block = re.sub(rf"(?<![\w.]){name}\b", str(place), block)
    program, *words = shlex.split(block.replace("\\\n", " "))
    assert program == "fedtools"
    inside(*words).ok()
    options = re.findall(r"`?robust: (\{.*?\})", page)
    assert Experiment(tmp_path / "exp").options.method_conf["robust"] == {"rule": "fltrust"}
    for text in options:
        make_rule(yaml.safe_load(text), "page")


def test_the_servers_own_utterances(tmp_path):
    """In speech recognition, too, it trains as a client of that data alone would."""
    asr = asr_world.make_world(tmp_path / "world")
    asr_world.some_data(asr / "root", {SERVER: 4}, 2)
    kept = ("--set", "keep_updates=true")
    for train in ("train", "root"):
        rule = settings_of(RULES["fltrust"] if train == "train" else {"rule": "mean"})
        inside(
            *("init", tmp_path / train, "--config", asr / "plain.yaml", "--method", "fedavg"),
            *("--data", f"train={asr / train}", "--data", f"root={asr / 'root'}"),
            *("--asset", f"tokens={asr / 'tokens'}", "--set", rule, *kept),
        ).ok()
        rounds(tmp_path / train, 1)
    first, second = (load_file(tmp_path / f"train/round_000{n}/global.safetensors") for n in (1, 2))
    (trained,) = (tensors for _, tensors in sent(tmp_path / "root" / "round_0001").values())
    updates = {c: tensors for c, (_, tensors) in sent(tmp_path / "train" / "round_0001").items()}
    parts = {"an update": list(first)}
    found, _ = by_paper("fltrust", {}, updates, first, [1.0] * 3, trained, parts)
    assert max(np.abs(found[key] - first[key]).max() for key in found) > 1e-4
    for key, value in second.items():
        np.testing.assert_allclose(value, found[key], rtol=0, atol=1e-6, err_msg=key)
