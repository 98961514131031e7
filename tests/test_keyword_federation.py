"""Keyword spotting on disk: stacks change no update by more than rounding; updates add up."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import fedtools, inside, ledger, torchless
from keyword_world import CLIENTS, CONFIG, begin, make_world
from safetensors.numpy import load_file
from torch import nn
from torch.nn import Parameter

from fedtools.audio.front_end import ScaledMfcc
from fedtools.client.objective import Objective
from fedtools.client.trainer import clip
from fedtools.core.locks import lock
from fedtools.core.tables import read_tsv
from fedtools.data.clips import Clips
from fedtools.exchange.messages import COLUMNS
from fedtools.federation.evaluate import evaluate
from fedtools.federation.evaluations import is_finished
from fedtools.federation.federation import Federation
from fedtools.federation.steps import aggregate, sample, train_local
from fedtools.models.keywords.clip_batch import ClipBatch
from fedtools.tasks import facts_of
from fedtools.tasks.kws.clips import ClipFeatures
from fedtools.tasks.kws.model import cross_entropy


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Make packed clips and a configuration."""
    return make_world(tmp_path_factory.mktemp("world"))


def states(path: Path) -> dict[str, bytes]:
    return {file.parent.name: file.read_bytes() for file in path.glob("round_*/global.safetensors")}


@pytest.fixture(scope="module")
def reference(world) -> Path:
    """Run four rounds of FedKWS-UI without interruption."""
    path = begin(world, world / "reference")
    inside("rounds", path, "--evaluate", "test").ok()
    return path


def test_nothing_left_to_do_is_found_out_without_torch(world, reference, tmp_path):
    path, without = tmp_path / "exp", torchless(tmp_path / "torchless")
    shutil.copytree(reference, path)
    rounds = ["rounds", path, "--evaluate", "test"]
    data = ["--data", f"train={world / 'train'}", "--data", f"test={world / 'test'}"]
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


def test_a_stack_is_cut_to_the_memory_and_says_so(world, tmp_path, capsys):
    def stacks(megabytes: int) -> tuple[int, str]:
        settings = "training.batch_size=24", "training.stack=5", f"training.stack_mb={megabytes}"
        path = begin(world, tmp_path / f"{megabytes}", "fedavg", *settings)
        units = Federation(path).task.units(CLIENTS[:5], 1)
        assert sorted(client for unit in units for client in unit) == CLIENTS[:5]
        return len(units), capsys.readouterr().err

    number, said = stacks(1)
    assert number == 5
    (need,) = re.findall(r"1 clients are .*training.stack 5 needs training.stack_mb (\d+),", said)
    number, said = stacks(int(need))
    assert number == 1 and "trained at once" not in said


def test_kept_updates_change_no_byte(world, reference, tmp_path):
    path = begin(world, tmp_path / "exp", "fedkws_ui", "keep_updates=true")
    inside("rounds", path, "--evaluate", "test").ok()
    assert states(path) == states(reference)
    assert ledger_without_seconds(path) == ledger_without_seconds(reference)
    name = "evaluate_test.tsv"
    assert (path / name).read_bytes() == (reference / name).read_bytes()
    for number in range(1, 5):
        folder = f"round_{number:04d}"
        assert not list(reference.glob(f"{folder}/update.*"))
        assert len(list(path.glob(f"{folder}/update.*"))) == 2
        rows = read_tsv(path / folder / "update.1.tsv", COLUMNS)
        tensors = load_file(path / folder / "update.1.safetensors")
        sent: dict[str, dict[str, np.ndarray]] = {}
        for index, row in enumerate(rows):
            sent[row["client"]] = {name: value[index] for name, value in tensors.items()}
        assert sorted(sent) == sorted((path / folder / "clients").read_text().split())
        for name, value in load_file(path / f"round_{number + 1:04d}/global.safetensors").items():
            mean = np.mean([tensors[name].astype("f8") for tensors in sent.values()], axis=0)
            np.testing.assert_allclose(value, mean, rtol=1e-6, atol=1e-9)


def ledger_without_seconds(path: Path) -> list[dict[str, str]]:
    return [row | {"seconds": ""} for row in ledger(path)]


# Kills the process that removes a message of a complete round.
KILLER = """
import os, pathlib, signal

unlink = pathlib.Path.unlink

def kill_or_unlink(path, *more, **named):
    done = path.parent / ".done"
    if path.match(os.environ["KILL_IN"] + "/update.*") and done.exists():
        os.kill(os.getpid(), signal.SIGKILL)
    unlink(path, *more, **named)

pathlib.Path.unlink = kill_or_unlink
"""


@pytest.mark.parametrize("goes_on", [["rounds"], ["aggregate", "--round", "2"]])
def test_updates_that_a_kill_left_are_removed(world, reference, cli, tmp_path, goes_on):
    """A kill between `.done` and their removal leaves them; in the last round, too."""
    path = begin(world, tmp_path / "exp", "fedkws_ui", "rounds=2")
    (tmp_path / "killer").mkdir()
    (tmp_path / "killer" / "sitecustomize.py").write_text(KILLER)
    python = os.pathsep.join([str(tmp_path / "killer"), os.environ.get("PYTHONPATH", "")])
    for name in ("round_0001", "round_0002"):
        killed = fedtools("rounds", path, env={"KILL_IN": name, "PYTHONPATH": python})
        assert killed.code == -signal.SIGKILL and (path / name / ".done").exists()
        left = {file.parent.name for file in path.glob("round_*/update.*")}
        assert left == {name}
    assert not is_finished(path)
    cli(goes_on[0], path, *goes_on[1:]).ok()
    assert not list(path.glob("round_*/update.*")) and is_finished(path)
    assert states(path)["round_0003"] == states(reference)["round_0003"]


NETWORKS = {
    "dscnn": {"channels": 6, "blocks": 1},
    "mhattrnn": {"heads": 2, "units": 4, "filters": 2},
    "resnet": {"channels": 4, "layers": 5, "pool_frames": 4, "pool_bins": 4},
    "transformer": {"layers": 1, "width": 8, "heads": 2, "feedforward": 8},
}
METHODS = ["fedavg", "fedprox", "fedmmd", "fedopt", "fedkws_ui", "alo", "alt", "clipped"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("network", NETWORKS)
def test_stack_and_sequence_agree(world, tmp_path, network, method):
    """Updates of clients of unequal size agree after a few steps, each within 1e-3 of its norm.

    Steps multiply rounding differences: to 3e-4 on one kind of processor, less on others.
    The test in double precision, below, detects mistakes.
    """
    settings = [f"model={yaml.safe_dump({'network': network, 'network_conf': NETWORKS[network]})}"]
    if method == "clipped":
        method = "fedkws_ui"
        settings += ["training.grad_clip=0.1"]
    if method in ("fedavg", "fedprox", "fedmmd", "fedopt", "alo"):
        # An epoch: as many steps as the client's clips need. The other methods adapt them anyway.
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
        # Excludes BatchNorm's running statistics, which change far more than trained tensors.
        trained = {name: [start[name]] * 5 for name in start if "running" not in name}
        assert apart < 1e-3 * distance(trained, alone, client)


class DoubleClips(ClipFeatures):
    def batch(self, *arguments: object) -> ClipBatch:
        batch = super().batch(*arguments)
        valid = None if batch.valid is None else batch.valid.double()
        return ClipBatch(batch.mfcc.double(), batch.labels, batch.weights.double(), valid)

    def plain(self, rows: slice) -> torch.Tensor:
        return super().plain(rows).double()


def doubled(path: Path) -> Federation:
    """Make an experiment whose networks and features are of double precision, unlike its files."""
    federation = Federation(path)
    _ = federation.states
    task = federation.task
    # Stacks are cut before: what a step needs is measured in the files' precision.
    task.units(CLIENTS, 1)
    single = task.models.build
    task.models.build = lambda clients=1, use="": single(clients, f"double {use}").double()
    task.clips.features = lambda split: DoubleClips(
        Clips.read(task.data_path(split)), ScaledMfcc(), task.device
    )
    return federation


def trained(federation: Federation, clients: list[str]) -> list[dict[str, torch.Tensor]]:
    """Return the updates of a stack's clients in round one."""
    sent = federation.work(clients, 1, federation.method.phase(1))
    assert not any(report.reason for report in sent.reports)
    rows = {report.client: index for index, report in enumerate(sent.reports)}
    return [
        {name: value[rows[client]].clone() for name, value in sent.tensors.items()}
        for client in clients
    ]


ADAMW = ("training.optim=adamw", "training.optim_conf={lr: 0.005}")


@pytest.mark.parametrize(
    ("method", "optim"),
    [("fedavg", "sgd"), ("fedavg", "adamw"), ("fedmmd", "adamw"), ("fedkws_ui", "adamw")],
)
@pytest.mark.parametrize("network", NETWORKS)
def test_in_double_precision_they_agree_after_eight_steps(world, tmp_path, network, method, optim):
    """Updates agree; in single precision, rounding errors have grown. Measured with these networks,
    updates of SGD differ by 5e-5 of their norm at a rate of 0.02, and by 1e-3 at 0.1 (DSCNN; the
    other networks by less); those of AdamW by their whole norm at worst (ResNet), since AdamW makes
    whole steps of rounding errors in zero gradients, such as that of a bias before BatchNorm."""
    settings = [f"model={yaml.safe_dump({'network': network, 'network_conf': NETWORKS[network]})}"]
    settings += [*(ADAMW if optim == "adamw" else ()), "training.stack=7"]
    settings += ["method_conf.local_steps=8"]
    federation = doubled(begin(world, tmp_path / "exp", method, *settings))
    (clients,) = federation.task.units(CLIENTS, 1)
    # With the experiment's single thread, as in a round: with more, two workers wait for each
    # other.
    with federation.settings():
        stacked = trained(federation, clients)
        alone = [trained(federation, [name])[0] for name in clients]
    assert all(value.dtype == torch.float64 for value in stacked[0].values())
    start = {name: torch.tensor(value) for name, value in federation.states.initial.items()}
    for ours, theirs in zip(stacked, alone, strict=True):
        apart = sum((ours[key] - theirs[key]).square().sum() for key in ours).sqrt()
        moved = sum((theirs[key] - start[key]).square().sum() for key in ours).sqrt()
        assert moved > 0 and apart < 1e-6 * moved


def test_each_client_is_clipped_alone():
    draw = torch.Generator().manual_seed(0)
    shapes = ((4, 3), (2,), (5, 1, 2))
    # The first client's gradients are below the norm, the third's are 0.
    scales = torch.tensor([0.1, 7.0, 0.0])
    network = nn.Module()
    for number, shape in enumerate(shapes):
        network.register_parameter(f"p{number}", Parameter(torch.zeros(3, *shape)))
    stacked = list(network.parameters())
    for value in stacked:
        value.grad = torch.randn(value.shape, generator=draw)
        value.grad *= scales.view(-1, *[1] * (value.ndim - 1))
    alone = [[Parameter(value[client]) for value in stacked] for client in range(3)]
    for client, values in enumerate(alone):
        for value, whole in zip(values, stacked, strict=True):
            value.grad = whole.grad[client].clone()
        torch.nn.utils.clip_grad_norm_(values, 2.0)
    before = stacked[0].grad[:2].clone()
    clip(network, 2.0, stacked=True)
    for client, values in enumerate(alone):
        for value, whole in zip(values, stacked, strict=True):
            torch.testing.assert_close(whole.grad[client], value.grad)
    assert torch.equal(stacked[0].grad[0], before[0])
    assert not torch.allclose(stacked[0].grad[1], before[1])


def distance(one: dict, other: dict, client: int) -> float:
    """Return the norm of the difference of two updates of a client."""
    return sum(np.square(one[name][client] - other[name][client]).sum() for name in one) ** 0.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("network", NETWORKS)
def test_on_a_gpu(world, tmp_path, network):
    """A round of FedKWS-UI on a GPU ends near the result on a CPU."""
    model = f"model={yaml.safe_dump({'network': network, 'network_conf': NETWORKS[network]})}"
    ended = []
    for ngpu in ("0", "1"):
        path = begin(world, tmp_path / ngpu, "fedkws_ui", model)
        inside("rounds", path, "--to", "1", "--nj", "1", "--ngpu", ngpu, "--evaluate", "test").ok()
        ended.append(load_file(path / "round_0002" / "global.safetensors"))
    for name, value in ended[0].items():
        np.testing.assert_allclose(ended[1][name], value, rtol=1e-2, atol=1e-3)


def test_precision_on_a_gpu_is_as_configured(world, tmp_path):
    backends = torch.backends.cudnn, torch.backends.cuda.matmul
    for wanted in ("true", "false"):
        path = begin(world, tmp_path / wanted, "fedavg", f"training.use_tf32={wanted}")
        before = [backend.allow_tf32 for backend in backends]
        with Federation(path).settings():
            assert all(backend.allow_tf32 == (wanted == "true") for backend in backends)
        assert before == [backend.allow_tf32 for backend in backends]


def test_ledger(reference):
    rows = [row for row in ledger(reference) if row["client"] != "-"]
    assert len(rows) == 20
    path = reference / "round_0001" / "global.safetensors"
    elements = sum(value.nbytes for value in load_file(path).values())
    assert {int(row["bytes_down"]) for row in rows} == {path.stat().st_size}
    assert {int(row["bytes_up"]) for row in rows} == {elements}
    # The one clip of the smallest client has no entropy: one step, the minimum.
    smallest = [row for row in rows if row["client"] == CLIENTS[-1]]
    assert smallest and all(float(row["client_epochs"]) == 1 for row in smallest)


def held() -> int:
    """Return the bytes of all live objects: torch's tensors, Python's and numpy's allocations."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, Parameter)]
    storages = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values()) + tracemalloc.get_traced_memory()[0]


@pytest.mark.parametrize(("method", "keep_updates"), [("fedkws_ui", "false"), ("fedopt", "true")])
def test_memory_is_flat(world, tmp_path, method, keep_updates):
    """Memory is the same after many rounds as after a few: no round leaks a model."""
    settings = [f"keep_updates={keep_updates}", "model.network_conf.channels=80"]
    # A leak would grow however many steps a round has.
    settings.append("method_conf.local_steps=1")
    federation = Federation(begin(world, tmp_path / "exp", method, *settings))
    tracemalloc.start()
    try:
        after = {}  # a few kB a round go into Python's caches of patterns, which are bounded
        for number in range(1, 9):
            sample(federation.experiment, federation.method, number, 1)
            train_local(federation, number, 1)
            aggregate(federation, number)
            evaluate(federation, [number], "test")
            if number in (4, 8):
                after[number] = held()
    finally:
        tracemalloc.stop()
    model = federation.experiment.init.stat().st_size
    assert after[8] - after[4] < model, after


def test_private_models_stay_at_the_client(reference):
    kept = {path.name for path in reference.glob("clients/*/round_*/*")}
    assert kept == {"private.safetensors"}
    for client in reference.glob("clients/*"):
        assert len(list(client.iterdir())) == 1


def test_diverged_clients_are_left_out(world, cli, tmp_path):
    path = begin(world, tmp_path / "exp", "fedavg", "training.optim_conf.lr=1e30")
    cli("sample", path).ok()
    said = cli("train-local", path).ok().err
    rows = read_tsv(path / "round_0001" / "update.1.tsv", COLUMNS)
    left_out = [row["client"] for row in rows if row["status"] != "ok"]
    assert left_out and all(f"{client}: left out: diverged" in said for client in left_out)
    assert len(left_out) == len(rows)
    cli("aggregate", path).fails(1, "0 of 5 updates can be used", "diverged")


@pytest.mark.parametrize(("factor", "more"), [(torch.nan, 0.0), (1.0, 2e30)])
def test_a_loss_that_cannot_be_stays_its_clients_own(world, tmp_path, factor, more):
    def poisoned(network, batch):
        losses = cross_entropy(network, batch)
        sick = torch.arange(len(losses)) == 1
        return losses * torch.where(sick, factor, 1.0) + torch.where(sick, more, 0.0)

    federation = Federation(begin(world, tmp_path / "exp", "fedavg"))
    results, models = [], []
    for loss in (None, poisoned):
        place = federation.client(CLIENTS[:3], 1)
        results.append(place.train(loss and Objective(loss)))
        models.append({name: value.clone() for name, value in place.model.state_dict().items()})
    expected, found = results
    assert ["diverged" in fitted.reason for fitted in found] == [False, True, False]
    for client in (0, 2):
        assert found[client] == expected[client]
        assert all(
            torch.equal(models[1][name][client], models[0][name][client]) for name in models[0]
        )


def test_rounds_are_run_by_one_process_at_a_time(world, cli, tmp_path):
    path = begin(world, tmp_path / "exp", "fedavg")
    said = f"{path}: another process is writing to this experiment (rounds); wait for it"
    with lock(path, "rounds"):
        fedtools("rounds", path, "--to", "1").fails(1, said)
        for command in ("rounds", "sample", "train-local", "aggregate"):
            cli(command, path).fails(1, said)
        cli("reset", path, "--round", "1").fails(1, said)
    assert not (path / "round_0001" / "clients").exists()
    cli("rounds", path, "--to", "1").ok()


def test_what_another_command_measures_meanwhile_stays(world, tmp_path):
    path = begin(world, tmp_path / "exp", "fedavg", "rounds=1")
    inside("rounds", path).ok()

    federation = Federation(path)
    measure = federation.task.measure

    def slow(split: str, client: str) -> dict[str, object]:
        inside("evaluate", path, "--split", split, "--every", "2").ok()
        return measure(split, client)

    federation.task.measure = slow
    evaluate(federation, [1], "test")
    rows = read_tsv(path / "evaluate_test.tsv", ("round", "client", *facts_of("kws", "").columns))
    assert [row["round"] for row in rows] == ["0", "1"]


def test_the_last_round_is_measured_too(world, tmp_path):
    path = begin(world, tmp_path / "exp", "fedavg", "rounds=3")
    inside("rounds", path, "--evaluate", "test").ok()
    rows = read_tsv(path / "evaluate_test.tsv", ("round", "client", *facts_of("kws", "").columns))
    assert [row["round"] for row in rows] == ["0", "2", "3"]
    assert is_finished(path, split="test")


def test_a_private_model_that_diverged_is_not_kept(world, cli, tmp_path):
    """A saved one would exclude its client from all later rounds."""
    path = begin(world, tmp_path / "exp", "fedkws_ui", "training.optim_conf.lr=1e30")
    cli("sample", path).ok()
    said = cli("train-local", path).ok().err
    assert "left out: diverged" in said
    for kept in path.glob("clients/*/round_*/private.safetensors"):
        assert all(np.isfinite(value).all() for value in load_file(kept).values())
