"""Keyword spotting on disk: stacks, jobs and kills change no byte; what clients send adds up."""

from __future__ import annotations

import gc
import random
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import fedtools, inside, torchless
from keyword_world import CLIENTS, CONFIG, begin, make_world
from safetensors.numpy import load_file, save_file
from torch.nn import Parameter

from fedtools.client.parallel import cross_entropy, tensors_of
from fedtools.federation.evaluate import evaluate
from fedtools.federation.steps import aggregate, sample, train_local
from fedtools.federation.tasks import open_federation
from fedtools.files.ledger import read_ledger
from fedtools.files.means import COLUMNS as MEMBERS
from fedtools.files.tables import read_tsv
from fedtools.files.updates import COLUMNS as UPDATES


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Packed clips and a configuration."""
    return make_world(tmp_path_factory.mktemp("world"))


def states(path: Path) -> dict[str, bytes]:
    return {file.parent.name: file.read_bytes() for file in path.glob("round_*/global.safetensors")}


@pytest.fixture(scope="module")
def reference(world) -> Path:
    """Four rounds of FedKWS-UI, left alone."""
    path = begin(world, world / "reference")
    inside("rounds", path, "--evaluate", "test").ok()
    return path


def test_nothing_left_to_do_is_found_out_without_torch(world, reference, tmp_path):
    path, without = tmp_path / "exp", torchless(tmp_path / "torchless")
    shutil.copytree(reference, path)
    rounds = ["rounds", path, "--evaluate", "test"]
    data = ["--train", world / "train", "--test", world / "test"]
    options = ["--config", world / "config.yaml", "--method", "fedkws_ui"]
    fedtools("init", path, *options, *data, env=without).ok()
    assert "all rounds are complete" in fedtools(*rounds, env=without).ok().err
    (path / "evaluate_test.tsv").unlink()
    fedtools(*rounds, env=without).fails(1, "'torch' is missing")


def test_it_learns_and_says_so(reference):
    rows = read_tsv(
        reference / "evaluate_test.tsv",
        ("round", "client", "clips", "loss", "errors", "accuracy"),
    )
    assert [row["round"] for row in rows] == ["0", "2", "4"]
    assert all(int(row["clips"]) == 40 for row in rows)
    for row in rows:
        assert float(row["accuracy"]) == pytest.approx(100 - 2.5 * int(row["errors"]), abs=1e-3)
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])


@pytest.mark.parametrize("jobs", [1, 3])
def test_single_commands_and_jobs_give_the_same_bytes(world, reference, cli, tmp_path, jobs):
    path = begin(world, tmp_path / "exp")
    for _ in range(4):
        cli("sample", path, "--nj", jobs).ok()
        for job in range(jobs, 0, -1):
            cli("train-local", path, "--job", job).ok()
        cli("aggregate", path).ok()
    assert states(path) == states(reference)


def test_another_number_of_jobs_begins_a_round_anew(world, reference, cli, tmp_path):
    path = begin(world, tmp_path / "exp")
    cli("sample", path, "--nj", 3).ok()
    for job in (1, 2, 3):
        cli("train-local", path, "--job", job).ok()
    cli("sample", path, "--nj", 1).ok()
    cli("train-local", path).ok()
    cli("aggregate", path).ok()
    assert states(path)["round_0002"] == states(reference)["round_0002"]


def test_kept_updates_have_the_same_mean(world, reference, tmp_path):
    path = begin(world, tmp_path / "exp", "fedkws_ui", "keep_updates=true")
    inside("rounds", path, "--to", "1", "--nj", "1").ok()
    assert not list(path.glob("round_0001/members.*"))
    kept = load_file(path / "round_0002" / "global.safetensors")
    summed = load_file(reference / "round_0002" / "global.safetensors")
    for name, value in kept.items():
        np.testing.assert_allclose(summed[name], value, rtol=1e-5, atol=1e-6)
    sent = load_file(path / "round_0001" / "update.1.safetensors")
    clients = (path / "round_0001" / "clients").read_text().split()
    assert {len(value) for value in sent.values()} == {len(clients)}


NETWORKS = {
    "dscnn": {"channels": 6, "blocks": 1},
    "mhattrnn": {"heads": 2, "units": 4, "filters": 2},
    "resnet": {"channels": 4, "layers": 5, "pool_frames": 4, "pool_bins": 4},
    "transformer": {"layers": 1, "width": 8, "heads": 2, "feedforward": 8},
}
METHODS = ["fedavg", "fedprox", "fedmmd", "fedopt", "fedkws_ui", "alo", "alt", "released"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("network", NETWORKS)
def test_stack_and_sequence_agree(world, tmp_path, network, method):
    """The updates of ragged clients, each within 1e-4 of its norm."""
    settings = [f"model={yaml.safe_dump({'network': network, 'network_conf': NETWORKS[network]})}"]
    if method == "released":
        method = "fedkws_ui"
        settings += ["model.network_conf.head_share=0.6", "method_conf.private=head"]
        settings += ["method_conf.smooth_by_utility=true", "training.grad_clip=5"]
    if method in ("fedavg", "fedprox", "fedmmd", "fedopt", "alo"):
        # An epoch: as many steps as the client's clips need. The others adapt them anyway.
        settings += ["method_conf.local_steps=0"]
    for stack in (1, 5):
        more = f"training.stack={stack}", "keep_updates=true"
        path = begin(world, tmp_path / str(stack), method, *settings, *more)
        inside("rounds", path, "--to", "1", "--nj", "1").ok()
    start = load_file(tmp_path / "1" / "round_0001" / "global.safetensors")
    alone, stacked = (
        load_file(tmp_path / name / "round_0001" / "update.1.safetensors") for name in ("1", "5")
    )
    for client in range(CONFIG["clients_per_round"]):
        apart = distance(stacked, alone, client)
        # Not of BatchNorm's running statistics, which move by far more than what is trained.
        trained = {name: [start[name]] * 5 for name in start if "running" not in name}
        assert apart < 1e-4 * distance(trained, alone, client)


def distance(one: dict, other: dict, client: int) -> float:
    """The norm of the difference of two updates of a client."""
    return sum(np.square(one[name][client] - other[name][client]).sum() for name in one) ** 0.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("network", NETWORKS)
def test_on_a_gpu(world, tmp_path, network):
    """A round of FedKWS-UI ends near to where it ends on a CPU."""
    model = f"model={yaml.safe_dump({'network': network, 'network_conf': NETWORKS[network]})}"
    ended = []
    for ngpu in ("0", "1"):
        path = begin(world, tmp_path / ngpu, "fedkws_ui", model)
        inside("rounds", path, "--to", "1", "--nj", "1", "--ngpu", ngpu, "--evaluate", "test").ok()
        ended.append(load_file(path / "round_0002" / "global.safetensors"))
    for name, value in ended[0].items():
        np.testing.assert_allclose(ended[1][name], value, rtol=1e-2, atol=1e-3)


def test_ledger(reference):
    rows = [row for row in read_ledger(reference / "ledger.tsv") if row.client != "-"]
    assert len(rows) == 20
    down = (reference / "round_0001" / "global.safetensors").stat().st_size
    assert rows[0].bytes_down == down and 0 < rows[0].bytes_up < down
    # The one clip of the smallest client has no entropy: one step, the least there is.
    smallest = [row for row in rows if row.client == CLIENTS[-1]]
    assert smallest and all(row.client_epochs == 1 for row in smallest)


def held() -> int:
    """Bytes of all that lives: torch's tensors, and what Python and numpy have allocated."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, Parameter)]
    storages = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values()) + tracemalloc.get_traced_memory()[0]


@pytest.mark.parametrize(("method", "keep_updates"), [("fedkws_ui", "false"), ("fedopt", "true")])
def test_memory_is_flat(world, tmp_path, method, keep_updates):
    """A federation holds after many rounds what it held after a few: no round leaves a model."""
    settings = [f"keep_updates={keep_updates}", "model.network_conf.channels=80"]
    federation = open_federation(begin(world, tmp_path / "exp", method, *settings))
    tracemalloc.start()
    try:
        after = []  # a few kB a round go into Python's caches of patterns, which are bounded
        for number in range(1, 13):
            sample(federation, number, 1)
            train_local(federation, number, 1)
            aggregate(federation, number)
            evaluate(federation, [number], "test")
            after.append(held())
    finally:
        tracemalloc.stop()
    model = federation.experiment.init.stat().st_size
    assert after[11] - after[5] < model, after


def test_private_models_stay_at_the_client(reference):
    kept = {path.name for path in reference.glob("clients/*/round_*/*")}
    assert kept == {"private.safetensors"}
    for client in reference.glob("clients/*"):
        assert len(list(client.iterdir())) == 1


def test_diverged_clients_are_left_out(world, cli, tmp_path):
    path = begin(world, tmp_path / "exp", "fedavg", "training.optim_conf.lr=1e30")
    cli("sample", path).ok()
    said = cli("train-local", path).ok().err
    rows = read_tsv(path / "round_0001" / "members.1.tsv", MEMBERS)
    left_out = [row["client"] for row in rows if row["status"] != "ok"]
    assert left_out and all(f"{client}: left out: diverged" in said for client in left_out)
    assert len(left_out) == len(rows)
    cli("aggregate", path).fails(1, "0 of 5 updates can be used", "diverged")


def test_nan_of_one_client_stays_its_own(world, tmp_path):
    def poisoned(network, batch):
        losses = cross_entropy(network, batch)
        return losses * torch.where(torch.arange(len(losses)) == 1, torch.nan, 1.0)

    federation = open_federation(begin(world, tmp_path / "exp", "fedavg"))
    sound, sick = (federation._stack(CLIENTS[:3], 1) for _ in range(2))
    expected, found = sound.fit(), sick.fit(loss=poisoned)
    assert [np.isnan(fitted.loss) for fitted in found] == [False, True, False]
    for client in (0, 2):
        assert found[client] == expected[client]
        ours, theirs = (tensors_of(stack.model, client) for stack in (sick, sound))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


KILLED = "import sys; from fedtools.cli import main; main()"


def test_killed_at_random_it_goes_on_to_the_same_bytes(world, reference, tmp_path):
    path = begin(world, tmp_path / "exp")
    command = [sys.executable, "-c", KILLED, "rounds", str(path), "--evaluate", "test"]
    dice = random.Random(5)
    for _ in range(4):
        run = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        time.sleep(dice.uniform(2.5, 5.5))
        run.send_signal(signal.SIGKILL)
        run.wait()
    inside("rounds", path, "--evaluate", "test").ok()
    assert states(path) == states(reference)
    name = "evaluate_test.tsv"
    assert (path / name).read_bytes() == (reference / name).read_bytes()


def test_a_private_model_that_diverged_is_not_kept(world, cli, tmp_path):
    """Its client would be left out for ever."""
    path = begin(world, tmp_path / "exp", "fedkws_ui", "training.optim_conf.lr=1e30")
    cli("sample", path).ok()
    said = cli("train-local", path).ok().err
    assert "left out: diverged" in said
    for kept in path.glob("clients/*/round_*/private.safetensors"):
        assert all(np.isfinite(value).all() for value in load_file(kept).values())


def spoil_a_stack(cli, path: Path) -> None:
    """Train in round one, and put a NaN into the first stack of clients."""
    cli("sample", path).ok()
    cli("train-local", path).ok()
    update = path / "round_0001" / "update.1.safetensors"
    tensors = load_file(update)
    next(iter(tensors.values()))[0] = np.nan
    save_file(tensors, update)


def test_a_refused_stack_is_that_of_its_clients(world, cli, tmp_path):
    path = begin(world, tmp_path / "exp", "fedavg")
    spoil_a_stack(cli, path)
    cli("aggregate", path).ok()
    members = read_tsv(path / "round_0001" / "members.1.tsv", MEMBERS)
    stack = read_tsv(path / "round_0001" / "update.1.tsv", UPDATES)[0]["client"]
    refused = {row["client"] for row in members if row["stack"] == stack}
    rows = [row for row in read_ledger(path / "ledger.tsv") if row.client != "-"]
    assert {row.client for row in rows} == {row["client"] for row in members}
    assert refused == {row.client for row in rows if row.status != "ok"}
    assert all("NaN" in row.status for row in rows if row.client in refused)


def test_too_few_clients_write_nothing(world, cli, tmp_path):
    """min_clients counts clients, not stacks; no next state is there after the error."""
    path = begin(world, tmp_path / "exp", "fedavg", "method_conf.min_clients=5")
    spoil_a_stack(cli, path)
    cli("aggregate", path).fails(1, "3 of 5 updates can be used, min_clients is 5")
    assert not (path / "round_0002" / "global.safetensors").exists()


def test_other_data_of_the_same_name(world, cli, tmp_path):
    shutil.copytree(world / "train", tmp_path / "train")
    words = ("init", tmp_path / "exp", "--config", world / "config.yaml", "--method", "centralized")
    cli(*words, "--train", tmp_path / "train").ok()
    cli(*words, "--train", tmp_path / "train").ok()
    table = tmp_path / "train" / "clips.tsv"
    table.write_text(table.read_text().replace("\tyes\t", "\tno\t", 1))
    cli(*words, "--train", tmp_path / "train").fails(1, "data.yaml: made with other data: train")


def test_bad_options(world, cli, tmp_path):
    def refused(*settings: str, method: str = "fedavg", said: str) -> None:
        more = [word for setting in settings for word in ("--set", setting)]
        cli(
            *("init", tmp_path / "exp", "--config", world / "config.yaml", "--method", method),
            *("--train", world / "train", *more),
        ).fails(1, said)
        assert not (tmp_path / "exp").exists()

    refused("task=kwss", said="kws")
    refused("training.stack=0", said="stack")
    refused("training.augment.noise=1", said="noise_volume")
    refused("model.network=dscn", said="dscnn")
    refused("method_conf.private=heads", method="fedkws_ui", said="not model or head")
    refused("method_conf.optimizer=adagrad", method="fedopt", said="yogi")
    refused("method_conf.adaptivity=0", method="fedopt", said="adaptivity")
    refused("method_conf.private=head", method="fedkws_ui", said="head_share")
    refused("method_conf.keep_optimizer=true", said="keep_optimizer is for task asr")
    refused(method="client", said="Client is for task asr")
    refused("clients_per_round=half", said="clients_per_round")
    refused("training.grad_clip=-1", said="grad_clip")
    refused("training.optim_conf.lr=x", said="optim_conf")
    refused("model.network_conf.channels=0", said="channels must be at least 1")
    refused("model.network_conf.head_share=0.01", said="leaves a head without any")
    refused("model.network_conf=[a]", said="is not name: value")


def test_damaged_members(world, cli, tmp_path):
    path = begin(world, tmp_path / "exp", "fedavg")
    cli("sample", path).ok()
    cli("train-local", path).ok()
    table = path / "round_0001" / "members.1.tsv"
    whole = table.read_text()
    client = whole.splitlines()[1].split("\t")[1]
    for damaged, said in (
        (whole.replace(client, "../x"), "not usable as an id"),
        (whole + whole.splitlines()[1] + "\n", "comes twice"),
        (whole.replace("\tok", "\tok\tok"), "members.1.tsv"),
    ):
        table.write_text(damaged)
        cli("aggregate", path).fails(1, "members.1.tsv", said)
    table.write_text(whole)
    cli("aggregate", path).ok()
