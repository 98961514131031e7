"""The federation on disk: its files, what the server refuses, and what it is told in one line."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import simulated
from conftest import fedtools, inside, ledger, torchless
from safetensors.numpy import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedtools.core.tables import read_tsv
from fedtools.data.datadir import DataDir, write_table

CLIENTS = ["au", "en", "in"]
GLOBAL = "round_0001/global.safetensors"


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Make data, tokens and a configuration that all tests of this module share."""
    root = tmp_path_factory.mktemp("world")
    simulated.data_dir(root / "train", CLIENTS, 10)
    simulated.data_dir(root / "valid", CLIENTS, 3, seed=1)
    simulated.config_file(root / "config.yaml")
    inside("train-tokens", root / "train" / "text", root / "tokens", "--token-type", "char").ok()
    return root


def begin(world: Path, path: Path, method: str = "fedavg", *more: str) -> list:
    return [
        "init",
        path,
        *("--config", world / "config.yaml", "--method", method),
        *("--data", f"train={world / 'train'}", "--data", f"valid={world / 'valid'}"),
        *("--asset", f"tokens={world / 'tokens'}", *more),
    ]


def states(path: Path) -> dict[str, bytes]:
    """Return the bytes of every global and personal state of an experiment."""
    files = [*path.glob("round_*/global.safetensors"), *path.glob("clients/*/round_*/personal*")]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def reference(world) -> dict[str, dict[str, bytes]]:
    """Run three rounds of each method without interruption, in one job and process."""
    found = {}
    for method in ("fedavg", "client", "centralized"):
        path = world / f"reference-{method}"
        inside(*begin(world, path, method)).ok()
        inside("rounds", path, "--to", "3").ok()
        found[method] = states(path)
    return found


def test_rounds_change_the_model(reference):
    for method in ("fedavg", "centralized"):
        globals_ = [reference[method][f"round_{n:04d}/global.safetensors"] for n in range(1, 5)]
        assert len(set(globals_)) == 4
    assert len([name for name in reference["client"] if "personal" in name]) == 9


def test_processes_give_the_same_bytes(world, reference, tmp_path):
    path = tmp_path / "exp"
    inside(*begin(world, path)).ok()
    fedtools("rounds", path, "--to", "3", "--nj", "3").ok()
    assert states(path) == reference["fedavg"]


@pytest.mark.parametrize("method", ["fedavg", "centralized"])
def test_each_round_tells_how_it_goes(world, cli, tmp_path, method):
    path = tmp_path / "exp" / "small" / method / "seed0"
    cli(*begin(world, path, method)).ok()
    said = cli("rounds", path, "--to", "2", "--evaluate", "valid").ok().err
    lines = [line for line in said.splitlines() if ": round " in line]
    measured = read_tsv(path / "evaluate_valid.tsv", None)
    for number, line in zip((1, 2), lines, strict=True):
        wers = [float(row["wer"]) for row in measured if row["round"] == str(number)]
        who, loss = "", r"[0-9.e+]+"
        if method == "fedavg":
            sent = read_tsv(path / f"round_{number:04d}" / "update.1.tsv", None)
            who, loss = "3 clients, ", f"{sum(float(row['loss']) for row in sent) / 3:.3g}"
            loss = re.escape(loss)
        begin_ = re.escape(f"small/{method}/seed0: round {number}/2, {who}loss ") + loss
        end = re.escape(f", valid WER {sum(wers) / 3:.1f} %, ") + r"[0-9.]+ s/round, [0-9:]+ left"
        assert re.fullmatch(begin_ + end, line), line


def test_a_progress_line_names_the_experiment_as_its_folder_does(world, cli, tmp_path, monkeypatch):
    """Names below `exp` are relative to it, even through a link; other names are as typed."""

    def first_words(folder: Path, typed: str, number: int) -> str:
        monkeypatch.chdir(folder)
        said = cli("rounds", typed, "--to", number).ok().err.splitlines()[-1]
        return said.partition(f": round {number}/{number}, ")[0]

    disk, exp, name = tmp_path / "disk", tmp_path / "exp", "dscnn/fedavg/seed0"
    disk.mkdir()
    exp.symlink_to("disk")
    cli(*begin(world, exp / name)).ok()
    assert first_words(tmp_path, f"exp/{name}", 1) == name
    assert first_words(tmp_path, f"disk/{name}", 2) == f"disk/{name}"
    exp.unlink()
    disk.rename(exp)
    assert first_words(exp / "dscnn", "fedavg/seed0", 3) == name


def test_nothing_left_to_do_is_found_out_without_torch(world, tmp_path):
    path, without = tmp_path / "exp", torchless(tmp_path / "torchless")
    rounds = ["rounds", path, "--to", "2", "--evaluate", "valid"]
    fedtools(*begin(world, path), env=without).fails(1, "'torch' is missing")
    assert not path.exists()
    inside(*begin(world, path)).ok()
    fedtools(*rounds, env=without).fails(1, "'torch' is missing")
    inside(*rounds).ok()
    table = path / "evaluate_valid.tsv"
    made, measured = states(path), table.read_text()
    fedtools(*begin(world, path), env=without).ok()
    assert "all rounds are complete" in fedtools(*rounds, env=without).ok().err
    fedtools("rounds", path, "--to", "3", env=without).fails(1, "'torch' is missing")

    # A removed file is made again.
    table.write_text(measured[: measured.rindex("2\tin\t")])
    inside(*rounds).ok()
    assert table.read_text() == measured
    (path / "round_0002/.done").unlink()
    (path / "round_0003/global.safetensors").unlink()
    inside(*rounds).ok()
    assert states(path) == made
    shutil.rmtree(path / "round_0001")
    inside(*begin(world, path)).ok()
    assert (path / "round_0001/global.safetensors").exists()


def test_a_checkpoint_is_taken_up(world, reference, cli, tmp_path, monkeypatch):
    """A training stopped between two steps resumes at its checkpoint, not at the start."""
    from fedtools.client.trainer import Trainer

    path = tmp_path / "exp"
    cli(*begin(world, path)).ok()
    steps = []
    real = Trainer._backward

    def stop(*arguments):
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(Trainer, "_backward", stop)
    cli("rounds", path, "--to", "1").fails(130, "interrupted")
    assert (path / "clients" / "au" / "checkpoint.safetensors").exists()
    first = len(steps)
    monkeypatch.setattr(Trainer, "_backward", lambda *a: (steps.append(1), real(*a))[1])
    cli("rounds", path, "--to", "1").ok()
    whole = sum(
        int(line.split("\t")[2])
        for line in (path / "round_0001" / "update.1.tsv").read_text().splitlines()[1:]
    )
    assert len(steps) - first == whole - 2
    for name, content in states(path).items():
        assert content == reference["fedavg"][name]


def test_plain_mean(world, cli, tmp_path):
    """By equation 2, the next global state is the mean of the client updates."""
    path = tmp_path / "exp"
    cli(*begin(world, path)).ok()
    cli("rounds", path, "--to", "1").ok()
    sent = load_file(path / "round_0001" / "update.1.safetensors")
    new = load_file(path / "round_0002" / "global.safetensors")
    assert set(sent) == set(new)
    for name, value in new.items():
        np.testing.assert_array_equal(
            value, sent[name].astype("f8").mean(axis=0).astype("f4"), err_msg=name
        )


@pytest.mark.parametrize("method", ["fedavg", "client"])
def test_the_server_needs_nothing_of_the_clients(world, reference, cli, tmp_path, method):
    """Aggregation gives the same when the clients' folders are inaccessible."""
    path = tmp_path / "exp"
    cli(*begin(world, path, method)).ok()
    cli("sample", path).ok()
    cli("train-local", path).ok()
    shutil.move(path / "clients", tmp_path / "elsewhere")
    cli("aggregate", path).ok()
    name = "round_0002/global.safetensors"
    assert (path / name).read_bytes() == reference[method][name]


def test_weighting_by_data(world, cli, tmp_path):
    path = tmp_path / "exp"
    cli(*begin(world, path, "fedavg", "--set", "method_conf.weighting=utterances")).ok()
    cli("sample", path).ok()
    cli("train-local", path).ok()
    table = path / "round_0001" / "update.1.tsv"
    lines = [line.split("\t") for line in table.read_text().splitlines()]
    for line, count in zip(lines[1:], ("1", "2", "5"), strict=True):
        line[1:3] = count, "1"
    table.write_text("".join("\t".join(line) + "\n" for line in lines))
    cli("aggregate", path).ok()
    sent = load_file(path / "round_0001" / "update.1.safetensors")["ctc.ctc_lo.bias"].astype("f8")
    new = load_file(path / "round_0002" / "global.safetensors")["ctc.ctc_lo.bias"]
    np.testing.assert_allclose(new, np.average(sent, axis=0, weights=[1, 2, 5]), rtol=1e-6)


def _edit(path: Path, change) -> None:
    tensors = load_file(path)
    tensors = change(tensors) or tensors
    save_file(tensors, path)


def _nan(tensors):
    tensors["ctc.ctc_lo.bias"][1, 0] = np.nan


def _too_many(tensors):
    tensors["more"] = np.zeros((3, 2), "f4")


def _too_few(tensors):
    del tensors["ctc.ctc_lo.bias"]


def _shape(tensors):
    tensors["ctc.ctc_lo.bias"] = tensors["ctc.ctc_lo.bias"][:, :-1].copy()


@pytest.mark.parametrize(
    ("change", "said", "left"),
    [
        (_nan, "NaN or Inf", 2),
        (_too_many, "more", 0),
        (_too_few, "ctc_lo.bias", 0),
        (_shape, "", 0),
    ],
)
def test_refused_updates(world, cli, tmp_path, change, said, left):
    path = tmp_path / "exp"
    cli(*begin(world, path)).ok()
    cli("sample", path).ok()
    cli("train-local", path).ok()
    _edit(path / "round_0001" / "update.1.safetensors", change)
    result = cli("aggregate", path)
    if left:
        result.ok()
        assert "refused" in result.err
        status = [row["status"] for row in ledger(path)]
        assert status[:3].count("ok") == left
        assert any(said in text for text in status)
        # A refused update was sent, and counts as traffic.
        (size,) = {row["bytes_up"] for row in ledger(path)[:3]}
        assert int(size) > 0
    else:
        result.fails(1, said, "min_clients")
        assert not (path / "round_0001" / ".done").exists()
        assert not (path / "round_0002").exists()


def test_min_clients(world, cli, tmp_path):
    path = tmp_path / "exp"
    cli(*begin(world, path, "fedavg", "--set", "method_conf.min_clients=3")).ok()
    cli("sample", path).ok()
    cli("train-local", path).ok()
    _edit(path / "round_0001" / "update.1.safetensors", _nan)
    cli("aggregate", path).fails(1, "2 of 3", "en", "NaN")


def test_another_base_is_refused(world, cli, tmp_path):
    path = tmp_path / "exp"
    cli(*begin(world, path)).ok()
    cli("sample", path).ok()
    cli("train-local", path).ok()
    table = path / "round_0001" / "update.1.tsv"
    lines = table.read_text().splitlines()
    fields = lines[2].split("\t")
    assert fields[8] == hashlib.sha256((path / GLOBAL).read_bytes()).hexdigest()
    fields[8] = "0" * 64
    table.write_text("\n".join([*lines[:2], "\t".join(fields), *lines[3:]]) + "\n")
    cli("aggregate", path).ok()
    assert [row["status"][:7] for row in ledger(path)] == ["ok", "refused", "ok", "ok"]
    size = ledger(path)[0]["bytes_up"]
    assert [row["bytes_up"] for row in ledger(path)] == [size, size, size, "0"]


@pytest.mark.parametrize("name", ["nobody", "au", "server"])
def test_strangers_and_others_clients_cost_a_job_its_own(world, cli, tmp_path, name):
    """A job whose table lists another job's client, or an unsampled one, loses its own client."""
    path = tmp_path / "exp"
    cli(*begin(world, path)).ok()
    cli("sample", path, "--nj", "3").ok()
    for job in ("1", "2", "3"):
        cli("train-local", path, "--job", job).ok()
    table = path / "round_0001" / "update.2.tsv"
    header, own = table.read_text().splitlines()
    client, _, rest = own.partition("\t")
    assert client != "au"
    table.write_text(f"{header}\n{own}\n{name}\t{rest}\n")
    _edit(table.with_suffix(".safetensors"), _twice)
    cli("aggregate", path).ok()
    rows = {row["client"]: row for row in ledger(path)}
    assert rows.keys() == {"au", "en", "in", "-"}
    refused = [one for one, row in rows.items() if row["status"] != "ok"]
    assert refused == [client]
    assert f"update.2.tsv:3: {name!r} is no client of this job" in rows[client]["status"]
    tensors = [load_file(path / f"round_0001/update.{job}.safetensors") for job in (1, 3)]
    new = load_file(path / "round_0002/global.safetensors")
    for key, value in new.items():
        mean = np.mean([one[key][0].astype("f8") for one in tensors], 0)
        np.testing.assert_allclose(value, mean, rtol=1e-6, atol=1e-9)


def _twice(tensors):
    return {name: np.concatenate([rows, rows]) for name, rows in tensors.items()}


def test_diverged_client_is_left_out(world, cli, tmp_path):
    path, bad = tmp_path / "exp", tmp_path / "bad"
    shutil.copytree(world / "train", bad)
    from fedtools.data.ark import FeatureReader, write_ark
    from fedtools.data.datadir import DataDir

    data = DataDir.read(bad)
    reader = FeatureReader(data.feats_scp)
    matrices = [
        (name, reader.read(name) * np.float32(1e37 if name.startswith("en") else 1))
        for name in data.utterances
    ]
    data.feats_scp = write_ark(bad / "feats.ark", matrices)
    data.write()
    cli(*begin(world, path), "--data", f"train={bad}").fails(2, "each once")
    arguments = begin(world, path)
    arguments[arguments.index(f"train={world / 'train'}")] = f"train={bad}"
    cli(*arguments).ok()
    cli("sample", path).ok()
    result = cli("train-local", path).ok()
    assert "en: left out: diverged: loss nan" in result.err
    cli("aggregate", path).ok()
    row = ledger(path)[1]
    assert row["status"].startswith("refused: left out by its job: diverged")
    assert row["bytes_up"] == "0"


def test_methods_are_listed_by_task(cli):
    names = [line.split()[0] for line in cli("methods", "--task", "asr").ok().out.splitlines()]
    recipe = {"client", "centralized", "fedavg", "fednorm", "fedextract", "decouplefl", "joint"}
    assert recipe <= {*names} and not {"alo", "fedkws_ui", "fmp"} & {*names}
    assert "FedKWS-UI" in cli("methods", "fedkws_ui", "fedavg").ok().out
    cli("methods", "fedavg", "fedkws").fails(1, "unknown method 'fedkws'", "fedkws_ui")
    cli("methods", "alo", "--task", "asr").fails(1, "alo is for task kws, not asr")
    cli("methods", "--task", "tts").fails(1, "task", "tts")


def test_commands_refuse_what_cannot_be(world, cli, tmp_path):
    path = tmp_path / "exp"
    cli("rounds", path, "--to", "1").fails(1, "no experiment here", "fedtools init")
    cli(*begin(world, path, "fedsomething")).fails(1, "unknown method", "fedavg")
    cli(*begin(world, path, "fedavg", "--set", "training.optim=sdg")).fails(1, "optim", "sgd")
    cli(*begin(world, path, "fedavg", "--set", "training.lr=1")).fails(1, "unknown option 'lr'")
    cli(*begin(world, path, "fedavg", "--set", "model.encoder=conformr")).fails(1, "conformer")
    cli(*begin(world, path, "fedavg", "--set", "model.encoder_conf.heads=1")).fails(1, "heads")
    assert not path.exists()
    cli(*begin(world, path)).ok()
    cli(*begin(world, path)).ok()
    cli(*begin(world, path, "fedavg", "--seed", "3")).fails(1, "config.yaml", "seed: 0 -> 3")
    cli("aggregate", path).fails(1, "clients", "fedtools sample")
    cli("sample", path, "--nj", "2").ok()
    cli("train-local", path, "--job", "1").ok()
    cli("aggregate", path).fails(1, "update.2.tsv", "train-local --job 2")
    cli("sample", path, "--round", "2").fails(1, "round 1 is not complete")
    cli("rounds", path, "--to", "0").fails(2)


def test_no_path_from_a_client_name(world, cli, tmp_path):
    evil = tmp_path / "evil"
    shutil.copytree(world / "train", evil)
    for name in ("utt2client", "client2utt"):
        text = (evil / name).read_text()
        (evil / name).write_text(
            "".join(sorted(line.replace(" au", " ../au") + "\n" for line in text.splitlines()))
        )
    arguments = begin(world, tmp_path / "exp")
    arguments[arguments.index(f"train={world / 'train'}")] = f"train={evil}"
    cli(*arguments).fails(1, "../au", "not usable as an id")
    assert not (tmp_path / "exp").exists()
    path = tmp_path / "good"
    cli(*begin(world, path)).ok()
    cli("sample", path).ok()
    (path / "round_0001" / "clients").write_text("../../x\n")
    cli("train-local", path).fails(1, "clients:1", "'../../x' is no client")


def test_evaluate_average_and_ledger(world, reference, cli):
    for method in ("fedavg", "client", "centralized"):
        path = world / f"reference-{method}"
        table = cli("evaluate", path).ok().out
        assert table.count("\n") >= 1 + 4 * 3
        before = (path / "evaluate_valid.tsv").read_bytes()
        cli("evaluate", path).ok()
        assert (path / "evaluate_valid.tsv").read_bytes() == before
        files = cli("average", path, "--best", "2").ok().out.split()
        assert len(files) == (4 if method == "client" else 1)
        for file in files:
            assert all(np.isfinite(value).all() for value in load_file(file).values())
    events = EventAccumulator(str(world / "reference-fedavg" / "tensorboard" / "valid"))
    events.Reload()
    assert [event.step for event in events.Scalars("wer/au")] == [0, 1, 2, 3]
    rows = ledger(world / "reference-fedavg")
    size = (world / "reference-fedavg/round_0001/global.safetensors").stat().st_size
    assert {row["bytes_down"] for row in rows if row["client"] in CLIENTS} == {str(size)}
    sent = load_file(world / "reference-fedavg/round_0001/update.1.safetensors").values()
    each = sum(value.nbytes for value in sent) // len(CLIENTS)
    assert {row["bytes_up"] for row in rows if row["client"] in CLIENTS} == {str(each)}
    for row in ledger(world / "reference-client"):
        assert (row["bytes_down"], row["bytes_up"]) == ("0", "0")


def test_characters_are_evaluated_where_there_are_no_spaces(world, cli, tmp_path):
    for name in ("train", "valid"):
        data = shutil.copytree(world / name, tmp_path / name)
        write_table(data / "utt2lang", dict.fromkeys(DataDir.read(data, "text").text, "zh-CN"))
    path = tmp_path / "exp"
    for name in ("tokens", "config.yaml"):
        (tmp_path / name).symlink_to(world / name)
    cli(*begin(tmp_path, path, "fedavg")).ok()
    assert "valid CER " in cli("rounds", path, "--to", "1", "--evaluate", "valid").ok().err
    note, _, header, *rows = cli("evaluate", path).ok().out.splitlines()
    assert note == "CER by character, without spaces: the language is written without them"
    assert header.split() == "round client utterances loss characters errors cer".split()
    data = DataDir.read(tmp_path / "valid", "text", "utt2client")
    for row in rows:
        _, client, _, _, characters, errors, rate = row.split()
        spoken = [data.text[name] for name in data.client_utterances(client)]
        assert int(characters) == sum(len(text.replace(" ", "")) for text in spoken)
        assert float(rate) == pytest.approx(100 * int(errors) / int(characters), abs=1e-3)


def test_training_learns(world, cli, tmp_path):
    """On data with known truth, a few epochs halve the validation loss."""
    path = tmp_path / "exp"
    cli(*begin(world, path, "fedavg", "--set", "method_conf.local_epochs=8")).ok()
    cli("rounds", path, "--to", "6").ok()
    cli("evaluate", path).ok()
    rows = [line.split("\t") for line in (path / "evaluate_valid.tsv").read_text().splitlines()[1:]]
    loss = {n: np.mean([float(row[3]) for row in rows if row[0] == str(n)]) for n in (0, 6)}
    assert loss[6] < 0.5 * loss[0], loss
