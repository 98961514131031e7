"""Keyword spotting on disk: stacks, jobs and kills change no byte; what clients send adds up."""

from __future__ import annotations

import gc
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import fedtools, inside, run, torchless
from fedtools.client.parallel import clip_each, cross_entropy, tensors_of
from fedtools.files.means import COLUMNS as MEMBERS
from fedtools.files.updates import COLUMNS as UPDATES
from keyword_world import CLIENTS, CONFIG, begin, make_world
from safetensors.numpy import load_file, save_file
from torch.nn import Parameter

from fedtools.client.clips import ClipBatch, ClipFeatures
from fedtools.federation.evaluate import evaluate
from fedtools.federation.kws import KwsFederation
from fedtools.federation.steps import aggregate, sample, train_local
from fedtools.federation.tasks import TASKS, is_finished, open_federation
from fedtools.files.clips import Clip, Clips, write_clips
from fedtools.files.experiment import Experiment
from fedtools.files.ledger import read_ledger
from fedtools.files.provenance import records
from fedtools.files.tables import read_tsv
from fedtools.models.keywords import Network


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


def test_a_stack_is_cut_to_the_memory_and_says_so(world, tmp_path):
    def stacks(megabytes: int) -> tuple[int, str]:
        path = tmp_path / f"{megabytes}"
        begin(world, path, "fedavg", "training.stack=5", f"training.stack_mb={megabytes}")
        inside("sample", path).ok()
        said = inside("train-local", path).ok().err
        members = read_tsv(path / "round_0001" / "members.1.tsv", MEMBERS)
        return len({row["stack"] for row in members}), said

    number, said = stacks(1)
    assert number == 5
    (need,) = re.findall(r"1 clients are .*training.stack 5 needs training.stack_mb (\d+),", said)
    number, said = stacks(int(need))
    assert number == 1 and "trained at once" not in said


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
        settings += ["method_conf.smooth_by_utility=true", "training.grad_clip=0.1"]
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


class DoubleClips(ClipFeatures):
    def batch(self, *arguments: object) -> ClipBatch:
        batch = super().batch(*arguments)
        valid = None if batch.valid is None else batch.valid.double()
        return ClipBatch(batch.mfcc.double(), batch.labels, batch.weights.double(), valid)

    def plain(self, rows: slice) -> torch.Tensor:
        return super().plain(rows).double()


class DoubleFederation(KwsFederation):
    def features(self, role: str) -> ClipFeatures:
        return DoubleClips(Clips.read(self.data_path(role)), self.device)

    @cached_property
    def model(self) -> Network:
        """What the files are read into: single."""
        return super()._network(1)

    def _network(self, clients: int) -> Network:
        return super()._network(clients).double()


@pytest.mark.parametrize("method", ["fedavg", "fedmmd", "fedkws_ui"])
@pytest.mark.parametrize("network", NETWORKS)
def test_in_double_precision_they_agree_with_adamw_too(world, tmp_path, network, method):
    """In single precision they need not: where a gradient is zero, as of a bias before BatchNorm,
    AdamW makes whole steps of what rounding left of it."""
    settings = [f"model={yaml.safe_dump({'network': network, 'network_conf': NETWORKS[network]})}"]
    settings += ["training.optim=adamw", "training.optim_conf={lr: 0.005}", "training.stack=7"]
    if method == "fedkws_ui":
        settings += ["model.network_conf.head_share=0.6", "method_conf.private=head"]
    else:
        settings += ["method_conf.local_steps=0"]
    federation = DoubleFederation(begin(world, tmp_path / "exp", method, *settings))
    (clients,) = federation.units(CLIENTS, 1)
    stacked = [trained.shared for trained in federation.train(clients, 1)]
    start = federation.initial
    for name, ours in zip(clients, stacked, strict=True):
        ((theirs),) = [trained.shared for trained in federation.train([name], 1)]
        apart = sum((ours[key] - theirs[key]).square().sum() for key in ours)
        moved = sum((theirs[key] - start[key]).square().sum() for key in ours)
        assert moved > 0 and apart < 1e-8 * moved


def test_each_client_is_clipped_alone():
    draw = torch.Generator().manual_seed(0)
    shapes = ((4, 3), (2,), (5, 1, 2))
    # The gradients of the first client are below the norm, those of the third are 0.
    scales = torch.tensor([0.1, 7.0, 0.0])
    stacked = [Parameter(torch.zeros(3, *shape)) for shape in shapes]
    for value in stacked:
        value.grad = torch.randn(value.shape, generator=draw)
        value.grad *= scales.view(-1, *[1] * (value.ndim - 1))
    alone = [[Parameter(value[client]) for value in stacked] for client in range(3)]
    for client, values in enumerate(alone):
        for value, whole in zip(values, stacked, strict=True):
            value.grad = whole.grad[client].clone()
        torch.nn.utils.clip_grad_norm_(values, 2.0)
    before = stacked[0].grad[:2].clone()
    clip_each(stacked, 2.0)
    for client, values in enumerate(alone):
        for value, whole in zip(values, stacked, strict=True):
            torch.testing.assert_close(whole.grad[client], value.grad)
    assert torch.equal(stacked[0].grad[0], before[0])
    assert not torch.allclose(stacked[0].grad[1], before[1])


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


def test_precision_on_a_gpu_is_as_configured(world, tmp_path):
    for wanted in ("true", "false"):
        path = begin(world, tmp_path / wanted, "fedavg", f"training.use_tf32={wanted}")
        open_federation(path)
        for backend in (torch.backends.cudnn, torch.backends.cuda.matmul):
            assert backend.allow_tf32 == (wanted == "true")


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


@pytest.mark.parametrize(("factor", "more"), [(torch.nan, 0.0), (1.0, 2e30)])
def test_a_loss_that_cannot_be_stays_its_clients_own(world, tmp_path, factor, more):
    def poisoned(network, batch):
        losses = cross_entropy(network, batch)
        sick = torch.arange(len(losses)) == 1
        return losses * torch.where(sick, factor, 1.0) + torch.where(sick, more, 0.0)

    federation = open_federation(begin(world, tmp_path / "exp", "fedavg"))
    sound, sick = (federation._stack(CLIENTS[:3], 1) for _ in range(2))
    expected, found = sound.fit(), sick.fit(loss=poisoned)
    assert [np.isnan(fitted.loss) for fitted in found] == [False, True, False]
    for client in (0, 2):
        assert found[client] == expected[client]
        ours, theirs = (tensors_of(stack.model, client) for stack in (sick, sound))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# Files that come in a round, and how many of them must be there: while its clients train, ...
TRAINING = [("clients/*/round_{0:04d}/private.safetensors", count) for count in (1, 2, 3, 4)]
# ... and before and after that.
AROUND = [
    ("round_{0:04d}/clients", 1),
    ("round_{0:04d}/members.1.tsv", 1),
    ("round_{0:04d}/update.1.tsv", 1),
    ("round_{1:04d}/global.safetensors", 1),
    ("round_{0:04d}/.done", 1),
]


def killed_at_work(
    path: Path, number: int, marks: list[tuple[str, int]], dice: random.Random
) -> bool:
    """Go on with the rounds, and kill -9 them in the midst of one; False if they ended first.

    Args:
        path: the experiment.
        number: the round, or a later one if this one has come too far.
        marks: of which one, not yet there, is waited for.
        dice: draws the mark, and how long after it the kill comes.
    """

    def there(mark: tuple[str, int]) -> bool:
        return len(list(path.glob(mark[0]))) >= mark[1]

    number = max(number, Experiment(path).last_round() + 1)
    ahead: list[tuple[str, int]] = []
    while not ahead:
        wanted = [(pattern.format(number, number + 1), count) for pattern, count in marks]
        ahead = [mark for mark in wanted if not there(mark)]
        number += 1
    mark = dice.choice(ahead)
    command = [sys.executable, "-m", "fedtools", "rounds", str(path), "--evaluate", "test"]
    run = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while run.poll() is None and not there(mark):
        time.sleep(0.001)
    time.sleep(dice.uniform(0, 0.05))
    run.kill()
    run.wait()
    assert run.returncode in (0, -signal.SIGKILL)
    return run.returncode != 0 and not is_finished(path, role="test")


def test_killed_at_random_it_goes_on_to_the_same_bytes(world, reference, tmp_path):
    seed = random.SystemRandom().randrange(1 << 30)
    dice = random.Random(seed)
    moments = ((1, TRAINING), (1, AROUND), (2, AROUND), (3, TRAINING))
    for name in "abcde":
        path = begin(world, tmp_path / name)
        if all(killed_at_work(path, *moment, dice) for moment in moments):
            break
    else:
        pytest.fail(f"the rounds always ended before the kill (seed {seed})")
    inside("rounds", path, "--evaluate", "test").ok()
    assert states(path) == states(reference), f"seed {seed}"
    name = "evaluate_test.tsv"
    assert (path / name).read_bytes() == (reference / name).read_bytes(), f"seed {seed}"
    assert events(path) == events(reference), f"seed {seed}"


def test_rounds_are_run_by_one_process_at_a_time(world, cli, tmp_path):
    path = begin(world, tmp_path / "exp", "fedavg")
    with Experiment(path).alone():
        run = fedtools("rounds", path, "--to", "1")
        run.fails(1, f"{path}: another process is running its rounds; wait for it")
    assert not (path / "round_0001" / "clients").exists()
    cli("rounds", path, "--to", "1").ok()


def test_what_another_command_measures_meanwhile_stays(world, tmp_path):
    path = begin(world, tmp_path / "exp", "fedavg", "rounds=1")
    inside("rounds", path).ok()

    class Slow(KwsFederation):
        def measure(self, role: str, client: str) -> dict[str, object]:
            inside("evaluate", path, "--role", role, "--every", "2").ok()
            return super().measure(role, client)

    evaluate(Slow(path), [1], "test")
    rows = read_tsv(path / "evaluate_test.tsv", ("round", "client", *TASKS["kws"].columns))
    assert [row["round"] for row in rows] == ["0", "1"]


def events(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.glob("tensorboard/*/*")}


def test_the_last_round_is_measured_too(world, tmp_path):
    path = begin(world, tmp_path / "exp", "fedavg", "rounds=3")
    inside("rounds", path, "--evaluate", "test").ok()
    rows = read_tsv(path / "evaluate_test.tsv", ("round", "client", *TASKS["kws"].columns))
    assert [row["round"] for row in rows] == ["0", "2", "3"]
    assert is_finished(path, role="test")


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
    said = "round_0001: 3 of 5 updates can be used, min_clients is 5", "remove their update"
    cli("aggregate", path).fails(1, *said)
    assert not (path / "round_0002" / "global.safetensors").exists()


def test_what_an_experiment_was_begun_with_is_not_what_it_is_continued_with(world, tmp_path):
    path = begin(world, tmp_path / "exp", "fedavg")
    known = yaml.safe_load((path / "software.yaml").read_text())
    assert known["torch"] == torch.__version__.split("+")[0]
    assert re.fullmatch("[0-9a-f]{40}(-dirty)?|unknown", known["git"])
    assert records([path, tmp_path]).endswith("(1); not recorded (1)")
    (path / "software.yaml").unlink()
    begin(world, path, "fedavg")
    assert records([path]) == "not recorded (1)"


def test_other_data_of_the_same_name(world, cli, tmp_path):
    shutil.copytree(world / "train", tmp_path / "train")
    words = ("init", tmp_path / "exp", "--config", world / "config.yaml", "--method", "centralized")
    cli(*words, "--data", f"train={tmp_path / 'train'}").ok()
    cli(*words, "--data", f"train={tmp_path / 'train'}").ok()
    clips = Clips.read(tmp_path / "train")
    table = (tmp_path / "train" / "clips.tsv").read_text()

    def pack(loudest: int, noise: np.ndarray) -> None:
        again = []
        for line, wave in zip(table.splitlines()[1:], waves, strict=True):
            *names, samples = line.split("\t")
            again.append(Clip(*names, np.minimum(wave[: int(samples)], loudest)))
        write_clips(tmp_path / "train", again, clips.classes, [noise])
        assert (tmp_path / "train" / "clips.tsv").read_text() == table
        cli(*words, "--data", f"train={tmp_path / 'train'}").fails(1, "made with other data: train")

    # A label is changed by hand, ...
    labels = np.array(clips.labels)
    labels[-1] = (labels[-1] + 1) % len(clips.classes)
    np.save(tmp_path / "train" / "labels.npy", labels)
    train = f"train={tmp_path / 'train'}"
    cli(*words, "--data", train).fails(1, "not the file that was packed: labels.npy")

    # ... or the same clips by name sound otherwise; or only the noise does.
    waves, noise = np.array(clips.waves), np.array(clips.noise)
    pack(1000, noise)
    pack(32767, noise[::-1])


def test_bad_options(world, cli, tmp_path):
    def refused(*settings: str, method: str = "fedavg", said: str) -> None:
        more = [word for setting in settings for word in ("--set", setting)]
        cli(
            *("init", tmp_path / "exp", "--config", world / "config.yaml", "--method", method),
            *("--data", f"train={world / 'train'}", *more),
        ).fails(1, said)
        assert not (tmp_path / "exp").exists()

    refused("task=kwss", said="kws")
    refused("clients_per_rond=2", said="clients_per_round")
    refused("trainning.stack=1", said="training")
    refused("training.stack=0", said="stack")
    refused("training.augment.noise=1", said="config.yaml: augment: unknown option 'noise'")
    refused("model.network=dscn", said="dscnn")
    refused("method_conf.private=heads", method="fedkws_ui", said="not model or head")
    refused("method_conf.optimizer=adagrad", method="fedopt", said="yogi")
    refused("method_conf.adaptivity=0", method="fedopt", said="adaptivity")
    refused("method_conf.private=head", method="fedkws_ui", said="head_share")
    refused("method_conf.keep_optimizer=true", said="keep_optimizer is for task asr")
    refused(method="client", said="Client is for task asr")
    refused("clients_per_round=half", said="clients_per_round")
    refused("training.grad_clip=-1", said="grad_clip")
    refused("training.use_tf32=maybe", said="option 'use_tf32' is 'maybe', not bool")
    refused("training.optim_conf.lr=x", said="config.yaml: optim_conf")
    refused("rounds=true", said="option 'rounds' is True, not a whole number from 1")
    refused("rounds=2020-13-45", said="the value is not YAML")
    refused("model.network_conf.channels=0", said="channels must be at least 1")
    refused("model.network_conf.head_share=0.01", said="leaves a head without any")
    refused("model.network_conf=[a]", said="is not name: value")
    refused("model.network_config={}", said="did you mean 'network_conf'?")
    refused("model.network=[a]", said="unknown option")
    refused("model=dscnn", said="section 'model' is 'dscnn', not name: value")
    refused("task=[a]", said="unknown option")
    refused("method_conf=[a]", said="section 'method_conf' is ['a'], not name: value")
    refused("method_conf=5", said="section 'method_conf' is 5, not name: value")
    refused("keep_updates=sometimes", said="not true or false")
    refused("clients_per_round=100", said="is 100, no number or share of 7 clients")
    refused("training.optim_conf.foreach=true", said="optim_conf: ")
    refused("training.optim_conf.differentiable=true", said="optim_conf: ")
    refused("method_conf.proximal=-1", method="fedprox", said="proximal -1.0 is not")
    refused("method_conf.discrepancy=-1", method="fedmmd", said="discrepancy -1.0")
    for option in ("adversarial", "private_steps", "base_ratio", "full_size"):
        refused(f"method_conf.{option}=-1", method="fedkws_ui", said=f"{option} -1")


def test_rounds_are_ordered_as_numbers(world, tmp_path):
    """Round 10000 comes after round 9999, although its name does not."""
    experiment = Experiment(begin(world, tmp_path / "exp"))
    owner = experiment.client_dir(CLIENTS[0])
    for number in (9998, 9999, 10000):
        folder = experiment.personal_dir(owner, number)
        folder.mkdir(parents=True)
        (folder / "private.safetensors").touch()
    latest = experiment.last_personal(owner, 10001, "private.safetensors")
    assert latest == experiment.personal_dir(owner, 10000) / "private.safetensors"
    experiment.drop_old_rounds(owner, keep=1)
    assert experiment.personal_rounds(owner) == [10000]


def test_data_that_changed_meanwhile_are_not_used(world, cli, tmp_path):
    """Whoever opens them looks: there may be no `init` between."""
    mine = tmp_path / "world"
    for name in ("train", "test"):
        shutil.copytree(world / name, mine / name)
    shutil.copy(world / "config.yaml", mine)
    path = begin(mine, tmp_path / "exp", "fedavg", "rounds=2")
    cli("rounds", path, "--to", "1", "--evaluate", "test").ok()
    for role, commands in (
        ("train", ("train-local", "landscape")),
        ("test", ("evaluate", "detection", "rounds")),
    ):
        other = world / ("test" if role == "train" else "train")
        shutil.rmtree(mine / role)
        shutil.copytree(other, mine / role)
        for command in commands:
            more = {
                "evaluate": ["--role", "test"],
                "landscape": [tmp_path / "no.png"],
                "rounds": ["--to", "1", "--evaluate", "test"],
            }
            if command == "train-local":
                cli("sample", path).ok()
            said = f"{role}/sha256sums: not the data that {path} began with"
            cli(command, path, *more.get(command, [])).fails(1, said)
        shutil.rmtree(mine / role)
        shutil.copytree(world / role, mine / role)
    cli("rounds", path, "--evaluate", "test").ok()


@pytest.mark.parametrize(
    ("file", "content", "command", "said"),
    [
        ("round_0001/jobs", b"", "train-local", "round_0001/jobs: '' is no number of jobs"),
        ("round_0001/jobs", b"x\n", "aggregate", "round_0001/jobs: 'x' is no number of jobs"),
        ("round_0001/clients", b"\xff\n", "train-local", "round_0001/clients:1: not UTF-8"),
        (
            "evaluate_test.tsv",
            b"round\tclient\tclips\tloss\terrors\taccuracy\nx\tall\t1\t1\t1\t1\n",
            "evaluate",
            "evaluate_test.tsv:2: round is 'x', not a whole number",
        ),
        ("data.yaml", b"- 1\n", "evaluate", "data.yaml: a mapping of options is expected"),
    ],
)
def test_damaged_files_are_told_in_one_line(trained, cli, file, content, command, said):
    (trained / file).write_bytes(content)
    more = ["--role", "test"] if command == "evaluate" else []
    cli(command, trained, *more).fails(1, said)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(b"x\n"), "seconds.1.tsv:1: the header"),
        (lambda path: path.write_text("client\tseconds\n1e1\t-1\n"), "seconds.1.tsv:2: "),
        (lambda path: (path.unlink(), os.mkfifo(path)), "seconds.1.tsv: not a plain file"),
    ],
)
def test_a_round_does_not_depend_on_what_jobs_say_of_their_time(trained, cli, damage, said):
    damage(trained / "round_0001" / "log" / "seconds.1.tsv")
    assert said in cli("aggregate", trained).ok().err
    rows = [row for row in read_ledger(trained / "ledger.tsv") if row.client != "-"]
    assert {row.status for row in rows} == {"ok"} and {row.seconds == 0 for row in rows} > {False}


def test_a_damaged_configuration_is_told_in_one_line(trained, cli):
    config = trained / "config.yaml"
    whole = yaml.safe_load(config.read_text())
    frozen = set(whole) - {"start", "classes.txt"}
    assert len(frozen) == 13
    for name in sorted(frozen):
        config.write_text(yaml.safe_dump({key: whole[key] for key in whole if key != name}))
        cli("train-local", trained).fails(1, f"config.yaml: no option {name!r}")
    config.write_text(yaml.safe_dump(whole | {"rounds": "x"}))
    cli("train-local", trained).fails(1, "config.yaml: option 'rounds' cannot be 'x'")
    config.write_text(yaml.safe_dump(whole | {"clients": [1, "../x"]}))
    cli("train-local", trained).fails(1, "config.yaml: client '../x' is not usable")
    config.write_text("a: 2020-13-45\n")
    cli("train-local", trained).fails(1, "config.yaml: not YAML: month must be in 1..12")


def test_a_full_disk_is_told_in_one_line(world, tmp_path):
    init = ["init", tmp_path / "exp", "--config", world / "config.yaml", "--method", "fedavg"]
    command = [sys.executable, "-m", "fedtools", *init, "--data", f"train={world / 'train'}"]
    # A limit on sizes fails as a disk does; Python would keep what it compiled cut short.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    limited = run("bash", "-c", 'ulimit -f 2; exec "$@"', "-", *command, env=environment)
    limited.fails(1, "exp/init.safetensors: File too large")


def test_all_clients_diverge(world, cli, tmp_path):
    path = begin(world, tmp_path / "exp", "fedavg", "training.optim_conf.lr=1e30")
    cli("sample", path).ok()
    cli("train-local", path).ok()
    said = "round_0001: 0 of 5 updates can be used", "begin anew with a lower learning rate"
    cli("aggregate", path).fails(1, *said)


@pytest.fixture
def trained(world, cli, tmp_path) -> Path:
    """An experiment whose clients have trained in round one, in two jobs."""
    path = begin(world, tmp_path / "exp", "fedavg")
    cli("sample", path, "--nj", 2).ok()
    for job in (1, 2):
        cli("train-local", path, "--job", job).ok()
    return path


def stacks_in(folder: Path) -> dict[str, list[str]]:
    """The clients of each stack of a round, as its tables have them."""
    stacks: dict[str, list[str]] = {}
    for table in sorted(folder.glob("members.*.tsv")):
        for row in read_tsv(table, MEMBERS):
            stacks.setdefault(row["stack"], []).append(row["client"])
    return stacks


def assert_refused(cli, path: Path, stacks: dict[str, list[str]], lost: list[str], said: str):
    """The round goes on without some stacks, and says why; the next state is the others' mean."""
    shown = cli("aggregate", path).ok().err
    refused = {client for stack in lost for client in stacks[stack]}
    rows = [row for row in read_ledger(path / "ledger.tsv") if row.client != "-"]
    assert {row.client for row in rows} == {name for of in stacks.values() for name in of}
    assert {row.client for row in rows if row.status != "ok"} == refused
    assert all(said in row.status and row.client_epochs == 0 for row in rows if row.status != "ok")
    lines = [line for line in shown.splitlines() if ": refused: " in line]
    assert {line.split()[2] for line in lines} == {f"{client}:" for client in refused}
    assert all(said in line for line in lines)
    weights, sums = 0, {}
    for table in sorted(path.glob("round_0001/update.*.tsv")):
        tensors = load_file(table.with_suffix(".safetensors"))
        for index, row in enumerate(read_tsv(table, UPDATES)):
            if row["client"] not in lost:
                weight = len(stacks[row["client"]])
                weights += weight
                for name, value in tensors.items():
                    sums[name] = sums.get(name, 0) + weight * value[index].astype(np.float64)
    for name, value in load_file(path / "round_0002" / "global.safetensors").items():
        np.testing.assert_allclose(value, sums[name] / weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("weight", "1e12", "utterances is 1e+12, expected 1"),
        ("steps", "9" * 15, "and 999999999999999 steps cannot be"),
        ("utterances", "9" * 12, "999999999999 utterances and"),
        ("loss", "nan", "the loss is 'nan', no finite number"),
    ],
)
def test_members_are_not_believed(trained, cli, column, value, said):
    """What one client's row says loses the stack that its tensors are in, and no other."""
    stacks = stacks_in(trained / "round_0001")
    table = trained / "round_0001" / "members.2.tsv"
    header, first, *others = table.read_text().splitlines()
    fields = first.split("\t")
    fields[MEMBERS.index(column)] = value
    table.write_text("\n".join([header, "\t".join(fields), *others]) + "\n")
    assert len(stacks) == 3 and len({line.split("\t")[0] for line in (first, *others)}) == 2
    assert_refused(cli, trained, stacks, [fields[0]], said)
    assert "members.2.tsv:2: " in (trained / "ledger.tsv").read_text()


def test_damaged_members(trained, cli, tmp_path):
    """A table that cannot be read loses its job."""
    table = Path("round_0001", "members.2.tsv")
    whole = (trained / table).read_text()
    stacks = stacks_in(trained / "round_0001")
    lost = sorted({line.split("\t")[0] for line in whole.splitlines()[1:]})
    client = stacks[lost[0]][0]
    for number, (damaged, said) in enumerate(
        (
            (whole.replace(client, "../x"), "members.2.tsv:2: client '../x' is not usable as an"),
            (whole.replace("\tok", "\tok\tok", 1), "members.2.tsv:2: 8 fields, the header has 7"),
            (whole[:-1], f"members.2.tsv:{whole.count(chr(10))}: the last line has no end"),
        )
    ):
        path = tmp_path / str(number)
        shutil.copytree(trained, path)
        (path / table).write_text(damaged)
        assert_refused(cli, path, stacks, lost, said)


def test_a_member_who_comes_twice(trained, cli):
    """Nobody can say which of the two is the right one; here both are in the same stack."""
    stacks = stacks_in(trained / "round_0001")
    table = trained / "round_0001" / "members.2.tsv"
    row = table.read_text().splitlines()[1]
    table.write_text(f"{table.read_text()}{row}\n")
    stack, client = row.split("\t")[:2]
    assert_refused(cli, trained, stacks, [stack], f"members.2.tsv:2: {client} came 2 times")


def test_too_few_believed_members_are_an_error(world, cli, tmp_path):
    path = begin(world, tmp_path / "exp", "fedavg", "method_conf.min_clients=5")
    cli("sample", path).ok()
    cli("train-local", path).ok()
    table = path / "round_0001" / "members.1.tsv"
    table.write_text(table.read_text().replace("\t1.0\tok", "\t1e12\tok", 1))
    said = ("3 of 5 updates can be used, min_clients is 5", "members.1.tsv:2: the weight of")
    cli("aggregate", path).fails(1, *said)
    assert not (path / "round_0002" / "global.safetensors").exists()
