"""Keyword spotting: initial files of an experiment, and the messages of a round of clients."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import keywords
import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, ledger, run
from keyword_world import CLIENTS, begin, make_world
from safetensors.numpy import load_file, save_file

from fedtools.core.provenance import records
from fedtools.core.tables import read_tsv
from fedtools.data.clips import Clip, Clips, write_clips
from fedtools.exchange.experiment import Experiment, write_sums
from fedtools.exchange.messages import COLUMNS
from fedtools.methods import METHODS
from fedtools.methods.fedavg import FedAvg


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Make packed clips and a configuration."""
    return make_world(tmp_path_factory.mktemp("world"))


def test_what_an_experiment_was_begun_with_is_not_what_it_is_continued_with(world, tmp_path):
    path = begin(world, tmp_path / "exp", "fedavg")
    known = yaml.safe_load((path / "software.yaml").read_text())
    assert known["torch"] == torch.__version__.split("+")[0]
    tracked = (ROOT / ".git").exists()
    head = run("git", "-C", ROOT, "rev-parse", "HEAD").ok().out.strip() if tracked else "unknown"
    assert known["git"].removesuffix("-dirty") == head
    assert records([path, tmp_path]).endswith("(1); not recorded (1)")
    (path / "software.yaml").unlink()
    begin(world, path, "fedavg")
    assert records([path]) == "not recorded (1)"


def test_commands_on_utterances_tell_that_clips_are_none(world, cli, tmp_path):
    path, said = begin(world, tmp_path / "exp", "fedavg"), "experiments of task kws have no corpus"
    where = str(path / "config.yaml")
    cli("decode", path, world / "test", tmp_path / "out", "--model", "start").fails(1, where, said)
    cli("export", path, tmp_path / "out").fails(1, where, said)


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
        write_clips(tmp_path / "train", again, clips.classes, [noise], clips.samples)
        assert (tmp_path / "train" / "clips.tsv").read_text() == table
        cli(*words, "--data", f"train={tmp_path / 'train'}").fails(1, "made with other data: train")

    # A label is changed by hand, ...
    labels = np.array(clips.labels)
    labels[-1] = (labels[-1] + 1) % len(clips.classes)
    np.save(tmp_path / "train" / "labels.npy", labels)
    train = f"train={tmp_path / 'train'}"
    cli(*words, "--data", train).fails(1, "not the file that was packed: labels.npy")

    # ... or clips of the same names have other audio; or only the noise does.
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
    refused("training.augment.noise=1", said="training.augment.noise=1: unknown option 'noise'")
    refused("model.network=dscn", said="dscnn")
    refused(
        "method_conf.conserve=work", method="fedkws_ui", said="input should be 'steps' or 'clips'"
    )
    refused("method_conf.optimizer=adagrad", method="fedopt", said="yogi")
    refused("method_conf.adaptivity=0", method="fedopt", said="adaptivity")
    refused(
        "method_conf.keep_optimizer=true", said="keep_optimizer: clients of task kws train together"
    )
    refused(method="client", said="Client needs optimizer, which task kws does not have")
    refused("clients_per_round=half", said="clients_per_round")
    refused("training.grad_clip=-1", said="grad_clip")
    refused(
        "training.use_tf32=maybe",
        said="option 'use_tf32' is 'maybe': input should be a valid boolean",
    )
    refused("training.optim_conf.lr=x", said="lr=x: training: optim_conf: option 'lr'")
    refused("rounds=true", said="option 'rounds' is True: input should be a valid integer")
    refused("rounds=2020-13-45", said="the value is not YAML")
    refused("model.network_conf.channels=0", said="channels must be at least 1")
    refused("model.network_conf=[a]", said="model: ['a'] must be a mapping")
    refused("model.network_config={}", said="did you mean 'network_conf'?")
    refused("model.network=[a]", said="unknown network")
    refused("model=dscnn", said="option 'model' is 'dscnn': input should be a mapping")
    refused("task=[a]", said="option 'task' is ['a']: input should be a valid string")
    refused("method_conf=[a]", said="option 'method_conf' is ['a']: input should be a mapping")
    refused("method_conf=5", said="option 'method_conf' is 5: input should be a mapping")
    refused(
        "keep_updates=sometimes",
        said="'keep_updates' is 'sometimes': input should be a valid boolean",
    )
    refused("clients_per_round=100", said="is 100, no number or share of 7 clients")
    refused("training.optim_conf.foreach=true", said="optim_conf: ")
    refused("training.optim_conf.differentiable=true", said="optim_conf: ")
    refused("method_conf.proximal=-1", method="fedprox", said="'proximal' is -1: input")
    refused("method_conf.discrepancy=-1", method="fedmmd", said="'discrepancy' is -1: input")
    for option in ("adversarial", "private_steps", "base_ratio"):
        refused(f"method_conf.{option}=-1", method="fedkws_ui", said=f"'{option}' is -1: input")


def test_rounds_are_ordered_as_numbers(world, tmp_path):
    """Round 10000 comes after round 9999, in spite of alphabetical order."""
    experiment = Experiment(begin(world, tmp_path / "exp"))
    for number in (9998, 9999, 10000):
        experiment.own(CLIENTS[0], number).save("private", {"x": np.array([number])})
    own = experiment.own(CLIENTS[0], 10001)
    assert own.load("private")["x"].tolist() == [10000]
    own.drop_old(keep=1)
    kept = experiment.client_dir(CLIENTS[0]).rglob("*.safetensors")
    assert [path.parent.name for path in kept] == ["round_10000"]


def test_data_that_changed_meanwhile_are_not_used(world, cli, tmp_path):
    """Every reader checks them, since there may be no `init` between."""
    mine = tmp_path / "world"
    for name in ("train", "test"):
        shutil.copytree(world / name, mine / name)
    shutil.copy(world / "config.yaml", mine)
    path = begin(mine, tmp_path / "exp", "fedavg", "rounds=2")
    cli("rounds", path, "--to", "1", "--evaluate", "test").ok()
    for split, commands in (
        ("train", ("train-local",)),
        ("test", ("evaluate", "detection", "rounds")),
    ):
        other = world / ("test" if split == "train" else "train")
        shutil.rmtree(mine / split)
        shutil.copytree(other, mine / split)
        for command in commands:
            more = {
                "evaluate": ["--split", "test"],
                "rounds": ["--to", "1", "--evaluate", "test"],
            }
            if command == "train-local":
                cli("sample", path).ok()
            said = f"{mine / split}: not the sha256sums that {path} began with"
            cli(command, path, *more.get(command, [])).fails(1, said)
        shutil.rmtree(mine / split)
        shutil.copytree(world / split, mine / split)
    cli("rounds", path, "--evaluate", "test").ok()


@pytest.mark.parametrize(
    ("file", "content", "command", "said"),
    [
        (
            "round_0001/jobs",
            b"",
            "train-local",
            "round_0001/jobs: '' is not a valid number of jobs",
        ),
        (
            "round_0001/jobs",
            b"x\n",
            "aggregate",
            "round_0001/jobs: 'x' is not a valid number of jobs",
        ),
        ("round_0001/clients", b"\xff\n", "train-local", "round_0001/clients:1: not UTF-8"),
        (
            "evaluate_test.tsv",
            b"round\tclient\tclips\tloss\terrors\taccuracy\nx\tall\t1\t1\t1\t1\n",
            "evaluate",
            "evaluate_test.tsv:2: round is 'x', not a whole number",
        ),
        ("data.yaml", b"- 1\n", "evaluate", "data.yaml: changed since the experiment began"),
        ("sha256sums", b"x\n", "evaluate", "sha256sums:1: not a sum and a name"),
        ("sha256sums", b"", "evaluate", "config.yaml: changed since the experiment began"),
    ],
)
def test_damaged_files_are_told_in_one_line(trained, cli, file, content, command, said):
    (trained / file).write_bytes(content)
    more = ["--split", "test"] if command == "evaluate" else []
    cli(command, trained, *more).fails(1, said)


FROZEN = ("config.yaml", "data.yaml", "clients.txt", "classes.txt", "init.safetensors")


@pytest.mark.parametrize("file", [*FROZEN, "round_0001/global.safetensors"])
def test_what_was_frozen_cannot_be_changed(trained, cli, file):
    """A changed bit, or another file, is found, even with valid values."""
    path, aside = trained / file, trained / "aside"
    whole = bytearray(path.read_bytes())
    whole[-2] ^= 1
    for damage, said in (
        (lambda: path.write_bytes(whole), f"{path}: changed since "),
        (lambda: path.unlink(), f"{trained}: no experiment" if file == FROZEN[0] else "missing"),
    ):
        shutil.copy(path, aside)
        damage()
        for command in ("train-local", "aggregate"):
            cli(command, trained).fails(1, said)
        shutil.move(aside, path)
    cli("aggregate", trained).ok()


def test_a_damaged_configuration_is_told_in_one_line(trained, cli):
    config = trained / "config.yaml"
    whole = yaml.safe_load(config.read_text())

    def refused(text: str, said: str) -> None:
        config.write_text(text)
        cli("train-local", trained).fails(1, "config.yaml: changed since the experiment began")
        # With a matching checksum, the content is checked.
        kept = (trained / "sha256sums").read_text()
        write_sums(trained / "sha256sums", {"config.yaml": config})
        cli("train-local", trained).fails(1, said)
        (trained / "sha256sums").write_text(kept)

    frozen = set(whole) - {"start", "classes.txt", "defaults"}
    assert len(frozen) == 14
    for name in sorted(frozen):
        rest = {key: whole[key] for key in whole if key != name}
        refused(yaml.safe_dump(rest), f"config.yaml: option {name!r} is missing")
    refused(yaml.safe_dump(whole | {"rounds": "x"}), "option 'rounds' is 'x': input should be")
    refused(
        yaml.safe_dump(whole | {"clients": ["a"]}), "option 'clients' is ['a']: input should be"
    )
    refused("a: 2020-13-45\n", "config.yaml: not YAML: month must be in 1..12")


def test_a_full_disk_is_told_in_one_line(world, tmp_path):
    init = ["init", tmp_path / "exp", "--config", world / "config.yaml", "--method", "fedavg"]
    command = [sys.executable, "-m", "fedtools", *init, "--data", f"train={world / 'train'}"]
    # A limit on sizes fails like a full disk; Python would keep truncated bytecode.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    limited = run("bash", "-c", 'ulimit -f 2; exec "$@"', "-", *command, env=environment)
    limited.fails(1, "exp/init.safetensors: File too large")


def test_all_clients_diverge(world, cli, tmp_path):
    path = begin(world, tmp_path / "exp", "fedavg", "training.optim_conf.lr=1e30")
    cli("sample", path).ok()
    cli("train-local", path).ok()
    said = "round_0001: 0 of 5 updates can be used", "experiment with a lower learning rate"
    cli("aggregate", path).fails(1, *said)


@pytest.fixture
def trained(world, cli, tmp_path) -> Path:
    """Make an experiment whose clients have trained in round one, in two jobs."""
    path = begin(world, tmp_path / "exp", "fedavg")
    cli("sample", path, "--nj", 2).ok()
    for job in (1, 2):
        cli("train-local", path, "--job", job).ok()
    return path


def sent(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Return client -> its tensors in a job's file, in the order of its rows."""
    found = {}
    for table in sorted(path.glob("round_0001/update.*.tsv")):
        tensors = load_file(table.with_suffix(".safetensors"))
        for index, row in enumerate(read_tsv(table, COLUMNS)):
            found[row["client"]] = {name: value[index] for name, value in tensors.items()}
    return found


def assert_refused(
    cli,
    path: Path,
    rows: dict[str, dict[str, np.ndarray]],
    refused: dict[str, str],
    copies: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Check that a round refuses some clients, reports why, and averages the other clients.

    Args:
        rows: each client's update.
        refused: client -> a part of the reason.
        copies: refused client -> how often its tensors occur; 0 for clients not listed.
    """
    shown = cli("aggregate", path).ok().err
    lines = [line for line in shown.splitlines() if ": refused: " in line]
    assert {line.split()[2] for line in lines} == {f"{client}:" for client in refused}
    listed = {row["client"]: row for row in ledger(path) if row["client"] != "-"}
    assert listed.keys() == rows.keys()
    for client, row in listed.items():
        if client in refused:
            assert refused[client] in row["status"]
            assert any(f"{client}: " in line and refused[client] in line for line in lines)
            size = sum(value.nbytes for value in rows[client].values())
            assert size > 0
            came = str(size * copies.get(client, 0))
            assert (row["bytes_up"], row["client_epochs"]) == (came, "0")
        else:
            assert row["status"] == "ok" and int(row["bytes_up"]) > 0
    left = [tensors for client, tensors in rows.items() if client not in refused]
    for name, value in load_file(path / "round_0002" / "global.safetensors").items():
        mean = np.mean([tensors[name].astype(np.float64) for tensors in left], axis=0)
        np.testing.assert_allclose(value, mean, rtol=1e-6, atol=1e-9)


def change_row(table: Path, line: int, **values: str) -> str:
    """Change fields of a row; return its client."""
    lines = table.read_text().splitlines()
    fields = lines[line].split("\t")
    client = fields[0]
    for name, value in values.items():
        fields[COLUMNS.index(name)] = value
    lines[line] = "\t".join(fields)
    table.write_text("".join(f"{text}\n" for text in lines))
    return client


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("steps", "9" * 15, "999999999999999 steps of"),
        ("utterances", "9" * 12, "999999999999 utterances cannot be"),
        ("loss", "nan", "the loss is 'nan', not a finite number"),
        ("loss", "1e308", "a loss of 1e+308 cannot be"),
        ("seconds", "-1", "-1 seconds cannot be"),
        ("bytes", "1", "1 bytes announced"),
        ("base", "0" * 64, "started from another global state"),
    ],
)
def test_clients_are_not_believed(trained, cli, column, value, said):
    """A client with invalid figures is lost, and no other one of its stack."""
    rows = sent(trained)
    table = trained / "round_0001" / "update.2.tsv"
    client = change_row(table, 1, **{column: value})
    assert len(rows) == 5 and len(read_tsv(table, COLUMNS)) == 3
    assert_refused(cli, trained, rows, {client: said}, {client: 1})
    assert "update.2.tsv:2: " in (trained / "round_0001" / "ledger.tsv").read_text()


def test_damaged_tables(trained, cli, tmp_path):
    """An unreadable table loses its job."""
    table = Path("round_0001", "update.2.tsv")
    whole = (trained / table).read_text()
    clients = [line.split("\t")[0] for line in whole.splitlines()[1:]]
    for number, (damaged, said) in enumerate(
        (
            (whole.replace(clients[0], "../x"), "update.2.tsv:2: client '../x' is not usable as"),
            (whole.replace("\tok", "\tok\tok", 1), "update.2.tsv:2: 11 fields, the header has 10"),
            (whole[:-1], f"update.2.tsv:{whole.count(chr(10))}: the last line has no end"),
        )
    ):
        path = tmp_path / str(number)
        shutil.copytree(trained, path)
        (path / table).write_text(damaged)
        assert_refused(cli, path, sent(trained), dict.fromkeys(clients, said))


def test_a_client_of_another_job(trained, cli):
    """A table that lists it costs its job the job's own clients; the client keeps its message."""
    rows = sent(trained)
    table = trained / "round_0001" / "update.2.tsv"
    own = [row["client"] for row in read_tsv(table, COLUMNS)]
    other = read_tsv(trained / "round_0001" / "update.1.tsv", COLUMNS)[0]["client"]
    change_row(table, 1, client=other)
    said = f"update.2.tsv:2: {other!r} is no client of this job"
    assert_refused(cli, trained, rows, dict.fromkeys(own, said))


def test_too_few_clients_write_nothing(world, cli, tmp_path):
    """min_clients counts clients; no next state is written after the error."""
    path = begin(world, tmp_path / "exp", "fedavg", "method_conf.min_clients=5")
    cli("sample", path).ok()
    cli("train-local", path).ok()
    update = path / "round_0001" / "update.1.safetensors"
    whole = load_file(update)
    damaged = {name: value.copy() for name, value in whole.items()}
    next(iter(damaged.values()))[0] = np.nan
    save_file(damaged, update)
    said = "round_0001: 4 of 5 updates can be used, min_clients is 5"
    cli("aggregate", path).fails(1, said, "NaN or Inf in tensor", "fedtools reset")
    assert not list(path.glob("round_0002/*"))
    save_file(whole, update)
    change_row(path / "round_0001" / "update.1.tsv", 1, steps="x")
    cli("aggregate", path).fails(1, said, "update.1.tsv:2: ")
    assert not list(path.glob("round_0002/*"))


TWENTY = [f"c{number:02d}" for number in range(20)]


@METHODS.register("poisoned")
class Poisoned(FedAvg):
    """A network for which one client's loss is NaN, and another's 1e308."""

    title = "Poisoned"

    def objective(self, client):
        names, plain = client.unit.names, client.objective
        factor = torch.tensor([torch.nan if name == TWENTY[3] else 1.0 for name in names])
        more = torch.tensor([1e308 if name == TWENTY[11] else 0.0 for name in names])
        return plain.replaced(
            lambda network, batch: (
                plain.loss(network, batch) * factor[: len(batch.labels)]
                + more[: len(batch.labels)].double()
            )
        )


@pytest.fixture(scope="module")
def twenty(tmp_path_factory) -> Path:
    """Make clips of twenty clients, who train in one stack."""
    root = tmp_path_factory.mktemp("twenty")
    random = np.random.default_rng(0)
    counts = {name: random.integers(1, 4, len(keywords.CLASSES)) for name in TWENTY}
    keywords.pack(root / "train", counts)
    keywords.pack(root / "test", {"eve": [2] * len(keywords.CLASSES)})
    training = keywords.CONFIG["training"] | {"stack": 20}
    keywords.config_file(root / "config.yaml", training=training)
    return root


def test_two_of_twenty_stacked_clients_are_poisoned(twenty, cli, tmp_path):
    """One sends a NaN, one a loss of 1e308; the other 18 are as if trained without them.

    Once their training diverges, and once their messages are forged.
    """
    for method in ("poisoned", "fedavg"):
        path = begin(twenty, tmp_path / method, method)
        cli("sample", path).ok()
        cli("train-local", path).ok()
    diverged, edited = tmp_path / "poisoned", tmp_path / "fedavg"
    rows = sent(edited)
    assert list(rows) != TWENTY and sorted(rows) == TWENTY
    bad = TWENTY[3], TWENTY[11]
    for client in bad:
        assert all(not value.any() for value in sent(diverged)[client].values())
    assert_refused(cli, diverged, rows, dict.fromkeys(bad, "diverged: loss"))
    update = edited / "round_0001" / "update.1.safetensors"
    tensors = load_file(update)
    next(iter(tensors.values()))[list(rows).index(bad[0])] = np.nan
    save_file(tensors, update)
    change_row(update.with_suffix(".tsv"), 1 + list(rows).index(bad[1]), loss="1e308")
    said = {bad[0]: "NaN or Inf in tensor", bad[1]: "a loss of 1e+308"}
    assert_refused(cli, edited, rows, said, dict.fromkeys(bad, 1))
    state = "round_0002/global.safetensors"
    assert (diverged / state).read_bytes() == (edited / state).read_bytes()
