"""Federations of adapters on ESPnet's models: states, bytes, personal parts, a frozen base."""

from __future__ import annotations

import shutil
from pathlib import Path

import asr_world
import keyword_world
import numpy as np
import pytest
import simulated
import torch
from asr_world import TRAINING, begin, load, tokens_of
from conftest import contents, inside, ledger
from pretrained_models import save_whisper
from safetensors.numpy import load_file, save_file
from test_adapters import CONFORMER

from fedtools.models.acoustic.asr import build_model, losses, outputs

MODEL = CONFORMER | {
    "normalize": "utterance_mvn",
    "specaug": "specaug",
    "specaug_conf": {"apply_time_warp": False, "time_mask_width_range": [0, 4]},
}
MODEL["encoder_conf"] = CONFORMER["encoder_conf"] | {"dropout_rate": 0.1}
TDNN = {
    "input_size": simulated.BINS,
    "encoder": "tdnn",
    # The last convolution has a dilation.
    "encoder_conf": {"output_size": 16, "contexts": [1, 3, 6]},
}
FAST = TRAINING | {"optim_conf": {"lr": 0.01}, "scheduler": None, "scheduler_conf": {}}
ADAPT = {"rank": 2, "targets": ["*linear_q", "*linear_v"]}
# Two layers, each of two 16 x 16 matrices.
LORA = [
    f"encoder.encoders.{block}.self_attn.{layer}.{name}"
    for block in (0, 1)
    for layer in ("linear_q", "linear_v")
    for name in ("lora_a", "lora_b")
]
HEAD = ["ctc.ctc_lo.bias", "ctc.ctc_lo.weight"]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Make data, and a model that has been trained on them."""
    root = asr_world.make_world(tmp_path_factory.mktemp("adapted"))
    for name, model in (("conformer", MODEL), ("tdnn", TDNN)):
        simulated.config_file(root / f"{name}.yaml", model=model, training=FAST)
        path = begin(root, root / name, "centralized", config=name)
        inside("rounds", path, "--to", "1").ok()
        inside("average", path).ok()
        shutil.copy(path / "model.safetensors", root / f"{name}.safetensors")
    return root


def start(world: Path, name: str = "conformer") -> tuple[str, ...]:
    return "--start", str(world / f"{name}.safetensors")


def adapted(world: Path, path: Path, how: dict, *more: str, method="fedavg", base="conformer"):
    """Make an experiment that adapts a model."""
    model = (MODEL if base == "conformer" else TDNN) | {"adapt": how}
    config = path.parent / f"{path.name}.yaml"
    simulated.config_file(config, model=model, training=FAST)
    return inside(
        *("init", path, "--config", config, "--method", method),
        *("--data", f"train={world / 'train'}", "--data", f"valid={world / 'valid'}"),
        *("--asset", f"tokens={world / 'tokens'}", *more),
    )


def size_of(path: Path) -> int:
    return path.stat().st_size


def sent(path: Path, number: int = 1) -> dict[str, np.ndarray]:
    return load_file(path / f"round_{number:04d}/update.1.safetensors")


def state_of(path: Path, number: int) -> dict[str, np.ndarray]:
    return load_file(path / f"round_{number:04d}/global.safetensors")


def test_only_what_is_trained_is_kept_and_sent(world, tmp_path):
    path = tmp_path / "e"
    said = adapted(world, path, ADAPT, *start(world)).ok().err
    base = load_file(world / "conformer.safetensors")
    statistics = (".running_mean", ".running_var", ".num_batches_tracked")
    whole = sum(x.size for name, x in base.items() if not name.endswith(statistics))
    low = 4 * 2 * 2 * 16
    trained = low + sum(base[name].size for name in HEAD)
    share = f"{100 * trained / (whole + low):.1f}"
    expected = f"trains {trained / 1e3:.1f} of {(whole + low) / 1e3:.1f} k parameters ({share} %)\n"
    assert said == expected
    assert (path / "base.safetensors").read_bytes() == (
        world / "conformer.safetensors"
    ).read_bytes()
    assert "  base.safetensors\n" in (path / "sha256sums").read_text()
    inside("rounds", path, "--to", "2").ok()
    assert sorted(load_file(path / "init.safetensors")) == sorted(LORA + HEAD)
    assert sorted(state_of(path, 2)) == sorted(sent(path)) == sorted(LORA + HEAD)
    first = load_file(path / "init.safetensors")
    for name in HEAD:
        np.testing.assert_array_equal(first[name], base[name])
    assert not any(first[name].any() for name in LORA if name.endswith("lora_b"))
    rows = [row for row in ledger(path) if row["client"] != "-"]
    assert {int(row["bytes_up"]) for row in rows} == {4 * trained}
    down = size_of(path / "round_0001/global.safetensors")
    assert [int(row["bytes_down"]) for row in rows if row["round"] == "1"] == [down] * 3
    assert 4 * trained < down < 4 * trained + 2000


def model_after(path: Path, world: Path, number: int, model: dict = MODEL):
    """Return ESPnet's model with the base's tensors plus the adapters' products, computed here."""
    state = load_file(path / "base.safetensors")
    found = load_file(path / "init.safetensors") | state_of(path, number)
    for name in list(found):
        stem = name.removesuffix(".lora_b")
        if stem != name:
            product = found[name].astype("f8") @ found[f"{stem}.lora_a"].astype("f8")
            product += found.get(f"{stem}.lora_delta", 0)
            weight = state[f"{stem}.weight"]
            state[f"{stem}.weight"] = (weight + 8.0 * product.reshape(weight.shape)).astype("f4")
    state |= {name: found[name] for name in HEAD}
    return load(build_model(model, tokens_of(world)), state).eval()


def measured_loss(path: Path, client: str) -> float:
    """Return a client's losses from `fedtools rounds --to 2 --evaluate valid`."""
    rows = (line.split("\t") for line in (path / "evaluate_valid.tsv").read_text().splitlines())
    (row,) = [row for row in rows if row[:2] == ["2", client]]
    return float(row[3])


@pytest.mark.parametrize("combine", ["mean", "fixed_a", "svd", "residual"])
def test_each_way_to_combine(world, tmp_path, combine):
    path = tmp_path / "e"
    adapted(world, path, ADAPT | {"combine": combine}, *start(world)).ok()
    said = inside("rounds", path, "--to", "2", "--evaluate", "valid").ok().err
    up = [name for name in LORA if combine != "fixed_a" or name.endswith("lora_b")]
    deltas = [f"{x.removesuffix('.lora_b')}.lora_delta" for x in LORA if x.endswith("lora_b")]
    given = deltas if combine == "residual" else []
    assert sorted(sent(path)) == sorted(up + HEAD)
    assert sorted(state_of(path, 2)) == sorted(up + HEAD + given)
    rows = [row for row in ledger(path) if row["client"] != "-"]
    assert all(row["status"] == "ok" for row in rows)
    size = sum(value[0].nbytes for value in sent(path).values())
    assert {int(row["bytes_up"]) for row in rows} == {size}
    down = {number: size_of(path / f"round_{number:04d}/global.safetensors") for number in (1, 2)}
    assert all(int(row["bytes_down"]) == down[int(row["round"])] for row in rows)
    if combine == "residual":
        assert down[2] > size + 4 * 4 * 16 * 16
    told = 2 if combine in ("svd", "residual") else 0
    assert said.count("% of the mean of the adapters") == told
    # The clients' updates of round 2 are averaged as dense changes of the base's weights.
    update, start_of = sent(path, 2), load_file(path / "init.safetensors") | state_of(path, 2)
    after = load_file(path / "init.safetensors") | state_of(path, 3)
    for stem in (name.removesuffix(".lora_b") for name in LORA if name.endswith("lora_b")):
        down_of = update.get(f"{stem}.lora_a", after[f"{stem}.lora_a"][None].repeat(3, 0))
        products = update[f"{stem}.lora_b"].astype("f8") @ down_of.astype("f8")
        dense = products.mean(0) + start_of.get(f"{stem}.lora_delta", 0)
        ours = after[f"{stem}.lora_b"].astype("f8") @ after[f"{stem}.lora_a"].astype("f8")
        ours += after.get(f"{stem}.lora_delta", 0)
        left, values, right = np.linalg.svd(dense)
        best = left[:, :2] * values[:2] @ right[:2]
        scale = np.abs(dense).max()
        assert scale > 1e-4
        if combine in ("fixed_a", "residual"):
            np.testing.assert_allclose(ours, dense, rtol=0, atol=1e-5 * scale)
        elif combine == "svd":
            np.testing.assert_allclose(ours, best, rtol=0, atol=1e-5 * scale)
        else:
            assert np.abs(ours - dense).max() > 1e-3 * scale
    # The measured model is that of the merged weights.
    batch = asr_world.batch_of(world, "valid", "au")
    plain = model_after(path, world, 3)
    with torch.no_grad():
        loss = losses(plain, *outputs(plain, batch), batch).mean().item()
    assert measured_loss(path, "au") == pytest.approx(loss, rel=1e-4)


CONVOLUTIONS = [f"encoder.layers.{n}.affine.lora_{name}" for n in range(3) for name in "ab"]


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ({"rank": 2}, CONVOLUTIONS),
        ({"rank": 2, "combine": "svd"}, CONVOLUTIONS),
        ({"rank": 2, "combine": "residual"}, CONVOLUTIONS),
        ({"rank": 2, "combine": "fixed_a", "targets": ["*2.affine"]}, CONVOLUTIONS[5:]),
        ({"kind": "bias"}, [f"encoder.layers.{n}.affine.bias" for n in range(3)]),
        ({"kind": "head", "also": ["layers.0.*"]},
         [f"encoder.layers.0.affine.{name}" for name in ("bias", "weight")]),
        ({"kind": "head"}, []),
    ],
    ids=str,
)  # fmt: skip
def test_a_tdnn_is_adapted(world, tmp_path, how, names):
    path = tmp_path / "e"
    adapted(world, path, how, *start(world, "tdnn"), base="tdnn").ok()
    inside("rounds", path, "--to", "2", "--evaluate", "valid").ok()
    assert sorted(sent(path)) == sorted(names + HEAD)
    first = load_file(path / "init.safetensors")
    last = first | state_of(path, 3)
    assert all((last[name] != first[name]).any() for name in names + HEAD)
    plain = model_after(path, world, 3, TDNN)
    with torch.no_grad():
        for name, value in plain.named_parameters():
            if name in names:
                value.copy_(torch.tensor(last[name]))
        batch = asr_world.batch_of(world, "valid", "au")
        loss = losses(plain, *outputs(plain, batch), batch).mean().item()
    assert measured_loss(path, "au") == pytest.approx(loss, rel=1e-4)


def test_a_tdnn_is_not_cut_in_two(world, tmp_path):
    chosen = ("--set", "method_conf.personal=['encoder.layers.0.*']")
    done = adapted(world, tmp_path / "e", {"rank": 2}, *start(world, "tdnn"), *chosen,
                   method="decouplefl", base="tdnn")  # fmt: skip
    problem = "an encoder without blocks, such as tdnn, cannot be cut in two"
    done.fails(1, f"method_conf.personal: {problem}")


@pytest.mark.parametrize(
    ("personal", "shared"),
    [
        (["*lora*"], HEAD),
        (["ctc.*"], LORA),
        (["*lora_b", "ctc.*"], LORA[::2]),
        (["*lora_b"], CONVOLUTIONS[::2] + HEAD),
    ],
    ids=["adapters", "head", "both", "tdnn"],
)
def test_a_part_is_personal(request, world, tmp_path, personal, shared):
    path = tmp_path / "e"
    chosen = f"method_conf.personal={personal}"
    base = "tdnn" if "tdnn" in request.node.name else "conformer"
    how = ADAPT if base == "conformer" else {"rank": 2}
    adapted(world, path, how, *start(world, base), "--set", chosen, base=base).ok()
    inside("rounds", path, "--to", "2", "--evaluate", "valid").ok()
    assert sorted(sent(path)) == sorted(state_of(path, 2)) == sorted(shared)
    low = LORA if base == "conformer" else CONVOLUTIONS
    own = sorted(set(low + HEAD) - set(shared))
    kept = [load_file(one) for one in path.glob("clients/*/round_0002/personal.safetensors")]
    assert len(kept) == 3 and all(sorted(one) == own for one in kept)
    assert any((kept[0][name] != kept[-1][name]).any() for name in own)


@pytest.mark.parametrize(
    ("how", "more", "method", "said"),
    [
        ({"combine": "svd"}, ["method_conf.personal=['*lora*']"], "fedavg", "lora_a cannot be"),
        ({"combine": "residual"}, ["method_conf.personal=['*lora_b']"], "fedavg", "lora_b cannot"),
        ({"combine": "svd"}, [], "fedopt", "FedOpt does not support svd, only mean, fixed_a"),
        ({"combine": "residual"}, [], "fedopt", "combine: FedOpt does not support residual"),
        ({"combine": "svd"}, ["method_conf.keep_optimizer=true"], "fedavg", "keep_optimizer"),
        ({"combine": "median"}, [], "fedavg", "combine"),
        ({"targets": ["*q_proj"]}, [], "fedavg", "or convolution matches '*q_proj'; there are"),
        ({"kind": "bias", "also": ["*x*y"]}, [], "fedavg", "also: no parameter matches '*x*y'"),
        ({"rank": 0}, [], "fedavg", "rank"),
        ({}, ["method_conf.personal=['*lora_b']"], "decouplefl", "an extractor is encoder.embed.*"),
    ],
)
def test_what_does_not_fit_is_refused(world, tmp_path, how, more, method, said):
    settings = [word for one in more for word in ("--set", one)]
    path = tmp_path / "e"
    adapted(world, path, ADAPT | how, *start(world), *settings, method=method).fails(1, said)
    assert not path.exists()


def test_fedopt_takes_its_step_on_adapters(world, tmp_path):
    chosen = ("--set", "method_conf={optimizer: sgd, learning_rate: 1.0, momentum: 0.0}")
    paths = []
    for method, more in (("fedopt", chosen), ("fedavg", ())):
        paths.append(tmp_path / method)
        how = ADAPT | {"combine": "fixed_a"}
        adapted(world, paths[-1], how, *start(world), *more, method=method).ok()
        inside("rounds", paths[-1], "--to", "1").ok()
    one, other = (state_of(path, 2) for path in paths)
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=0, atol=1e-6)


def test_a_base_is_needed_and_of_the_same_model(world, tmp_path):
    adapted(world, tmp_path / "e", ADAPT).fails(1, "adapt without a trained model", "--start")
    other = start(world, "tdnn")
    adapted(world, tmp_path / "e", ADAPT, *other).fails(1, "tdnn.safetensors", "tensor ")
    simulated.config_file(tmp_path / "plain.yaml", model=MODEL, training=FAST)
    inside(
        *("init", tmp_path / "e", "--config", tmp_path / "plain.yaml", "--method", "fedavg"),
        *("--data", f"train={world / 'train'}", "--asset", f"tokens={world / 'tokens'}"),
        *("--asset", f"base={world}", *start(world)),
    ).fails(1, "asset base needs a model with adapt")
    assert not (tmp_path / "e").exists()


def test_statistics_of_what_is_frozen_stay(world, tmp_path):
    for base, how in (("conformer", {"kind": "bias"}), ("tdnn", {"kind": "full"})):
        path = tmp_path / base
        adapted(world, path, how, *start(world, base), base=base).ok()
        inside("rounds", path, "--to", "1").ok()
        names = state_of(path, 2)
        assert names and not any("running" in name or "num_batches" in name for name in names)
        if how["kind"] == "bias":
            assert all(name.endswith("bias") or name in HEAD for name in names)
            assert "encoder.encoders.0.conv_module.norm.bias" in names
    config = MODEL | {"adapt": {"kind": "full"}}
    model = build_model(config, tokens_of(world), base=world / "conformer.safetensors").train()
    before = {name: value.clone() for name, value in model.named_buffers()}
    batch = asr_world.batch_of(world, "train", "en")
    # SpecAugment is removed, since it stays random in training mode.
    model.specaug = None
    found, again = (outputs(model, batch)[0] for _ in range(2))
    assert torch.equal(found, again)
    assert torch.equal(found, outputs(model.eval(), batch)[0])
    for name, value in model.named_buffers():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("what", ["base", "rank", "delta", "frozen_a"])
def test_a_client_that_sends_something_else_is_refused(world, tmp_path, what):
    path = tmp_path / "e"
    combine = {"delta": "residual", "frozen_a": "fixed_a"}.get(what, "mean")
    adapted(world, path, ADAPT | {"combine": combine}, *start(world)).ok()
    inside("sample", path, "--round", "1", "--nj", "3").ok()
    for job in ("1", "2", "3"):
        inside("train-local", path, "--round", "1", "--job", job).ok()
    file = path / "round_0001/update.2.safetensors"
    update, stem = load_file(file), LORA[0].removesuffix(".lora_a")
    whole = load_file(path / "base.safetensors")[f"{stem}.weight"][None]
    name = f"{stem}.lora_a"
    if what == "base":
        name = f"{stem}.weight"
        update[name] = whole
    elif what == "rank":
        update[name] = update[name].repeat(2, 1)
    elif what == "delta":
        name = f"{stem}.lora_delta"
        update[name] = whole
    else:
        update[name] = whole[:, :2]
    save_file(update, file)
    said = inside("aggregate", path, "--round", "1").ok().err
    problem = "is float32 of shape" if what == "rank" else "does not belong there"
    rows = [row for row in ledger(path) if "refused" in row["status"]]
    assert len(rows) == 1 and name in rows[0]["status"] and problem in rows[0]["status"]
    assert f"round 1, {rows[0]['client']}: refused: " in said and name in said


COMMANDS = {
    "sample": ["--round", "2"],
    "train-local": ["--round", "1", "--job", "1"],
    "aggregate": ["--round", "1"],
    "rounds": ["--to", "2"],
    "evaluate": [],
    "average": [],
    "reset": ["--round", "1"],
}


def test_a_base_that_has_changed_is_refused(world, tmp_path):
    path = tmp_path / "e"
    adapted(world, path, ADAPT, *start(world)).ok()
    inside("rounds", path, "--to", "1").ok()
    state = load_file(path / "base.safetensors")
    state[HEAD[0]][0] += 1
    save_file(state, path / "base.safetensors")
    before = contents(path.rglob("*"))
    for command, more in COMMANDS.items():
        said = inside(command, path, *more)
        said.fails(
            1, "base.safetensors: changed since the experiment began", "put the original back"
        )
    data = world / "valid"
    decode = inside("decode", path, data, tmp_path / "d", "--model", "round:1")
    decode.fails(1, "base.safetensors: changed since the experiment began")
    adapted(world, path, ADAPT, *start(world)).fails(
        1, "base.safetensors: changed since the experiment"
    )
    (path / "base.safetensors").unlink()
    inside("rounds", path, "--to", "2").fails(1, "base.safetensors: missing")
    del before[path / "base.safetensors"]
    assert contents(x for x in path.rglob("*") if "lock" not in x.name).items() <= before.items()


def test_a_folder_that_has_changed_is_refused(tmp_path):
    folder = save_whisper(tmp_path / "whisper")
    world = keyword_world.make_world(tmp_path)
    model = f"model={{network: hf, path: {folder}, adapt: {{rank: 2}}}}"
    path = keyword_world.begin(world, tmp_path / "e", "fedavg", model, "clients_per_round=2")
    inside("rounds", path, "--to", "1").ok()
    whole = load_file(folder / "model.safetensors")
    whole["model.encoder.conv1.bias"][0] += 1
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    for command, more in COMMANDS.items():
        inside(command, path, *more).fails(1, "not the pretrained model that the experiment began")


@pytest.mark.parametrize("combine", ["svd", "residual"])
def test_clients_that_train_as_a_stack(tmp_path, combine):
    folder = save_whisper(tmp_path / "whisper")
    world = keyword_world.make_world(tmp_path)
    how = f"{{rank: 1, targets: ['*fc1'], combine: {combine}}}"
    settings = (f"model={{network: hf, path: {folder}, adapt: {how}}}", "clients_per_round=4")
    settings += ("keep_updates=true", "training.optim_conf.lr=0.5")
    path = keyword_world.begin(world, tmp_path / "e", "fedprox", *settings)
    said = inside("rounds", path, "--to", "2").ok().err
    assert said.count("% of the mean of the adapters") == 2
    update, before, after = sent(path, 2), state_of(path, 2), state_of(path, 3)
    assert len(update["head.weight"]) == 4
    for stem in (name.removesuffix(".lora_b") for name in update if name.endswith(".lora_b")):
        low, high = (update[f"{stem}.{name}"].astype("f8") for name in ("lora_a", "lora_b"))
        dense = (high @ low).mean(0)
        ours = after[f"{stem}.lora_b"].astype("f8") @ after[f"{stem}.lora_a"].astype("f8")
        scale = np.abs(dense).max()
        if combine == "residual":
            # A delta of every layer, made by the previous round.
            given = before[f"{stem}.lora_delta"]
            assert np.abs(given).max() > 1e-3 * scale > 0
            dense, ours = dense + given, ours + after[f"{stem}.lora_delta"]
        else:
            left, values, right = np.linalg.svd(dense)
            dense = left[:, :1] * values[:1] @ right[:1]
        np.testing.assert_allclose(ours, dense, rtol=0, atol=1e-5 * scale)


def test_the_whole_model_is_exported(world, tmp_path):
    path = tmp_path / "e"
    adapted(world, path, ADAPT | {"combine": "residual"}, *start(world)).ok()
    inside("rounds", path, "--to", "1").ok()
    inside("average", path).ok()
    inside("export", path, tmp_path / "out").ok()
    saved = torch.load(tmp_path / "out/model.pth", weights_only=True)
    ours = {name: value.numpy() for name, value in saved.items()}
    theirs = load_file(world / "conformer.safetensors")
    assert ours.keys() == theirs.keys()
    batch = asr_world.batch_of(world, "valid", "en")
    exported = load(build_model(MODEL, tokens_of(world)), ours).eval()
    found, expected = (outputs(one, batch)[0] for one in (exported, model_after(path, world, 2)))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    inside("average", path, "--best", "2").fails(1, "adapters of 2 rounds cannot be averaged")


def test_what_is_frozen_whole_is_measured_and_not_trained(world, tmp_path):
    path = tmp_path / "e"
    said = adapted(world, path, {"kind": "none"}, *start(world)).ok().err
    assert said.startswith("trains 0.0 of ")
    inside("evaluate", path).ok()
    inside("rounds", path, "--to", "1").fails(1, "the model has no trainable parameters")


def test_newcomers_begin_with_adapters(world, tmp_path):
    path = tmp_path / "e"
    chosen = ("--set", "method_conf.personal=['*lora*']")
    adapted(world, path, ADAPT, *start(world), *chosen).ok()
    inside("rounds", path, "--to", "1", "--evaluate", "valid").ok()
    inside("average", path).ok()
    inside("adapt", path, world / "valid", tmp_path / "new", "--epochs", "1").ok()
    inside("rounds", tmp_path / "new").ok()
    one, other = (x / "base.safetensors" for x in (path, tmp_path / "new"))
    assert one.read_bytes() == other.read_bytes()
    # The shared part is unchanged.
    assert sorted(state_of(tmp_path / "new", 2)) == HEAD
