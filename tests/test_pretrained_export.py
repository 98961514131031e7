"""Trained pretrained models, exported for transformers and peft."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import keywords
import numpy as np
import pytest
import simulated
import torch
import transformers
import yaml
from commands import inside
from peft import PeftModel
from pretrained_models import IDS, save_recogniser, save_wave, save_whisper
from safetensors.torch import load_file, save_file

from fedtools.core.errors import UserError
from fedtools.data.ark import write_ark
from fedtools.data.datadir import DataDir
from fedtools.models.acoustic.asr import build_model
from fedtools.models.adapt.adaptation import Adapt
from fedtools.models.keywords import build_network
from fedtools.models.pretrained.export import export_adapters, export_folder
from fedtools.models.pretrained.folder import Folder

BINS = simulated.BINS
LORA = {"kind": "lora", "rank": 2, "alpha": 6.0}
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("export")
    keywords.pack(root / "clips", {f"c{number}": [2, 1, 2, number] for number in range(1, 4)})
    save_whisper(root / "clips_whisper")
    save_recogniser(root / "whisper", bins=BINS)
    simulated.data_dir(root / "speech", ["au", "en"], 3, log_mel=True)
    inside("train-tokens", root / "speech" / "text", root / "tokens", "--token-type", "char").ok()
    return root


def init(world: Path, path: Path, base: Path, kind: str, adapt: dict, *more: str) -> Any:
    model = {"network": "hf", "path": str(base), "adapt": adapt}
    assets: tuple = ()
    if kind != "kws":
        model["criterion"] = kind
        assets = ("--asset", f"tokens={base if kind == 'seq2seq' else world / 'tokens'}")
    config = {"task": "kws" if kind == "kws" else "asr", "rounds": 1, "model": model}
    file = path.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config))
    data = world / ("clips" if kind == "kws" else "speech")
    return inside(
        *("init", path, "--config", file, "--method", "fedavg", *assets, *more),
        *("--data", f"train={data}", "--data", f"valid={data}"),
    )


def stir(value: torch.Tensor) -> torch.Tensor:
    return value + torch.randn_like(value) * 0.2 if value.is_floating_point() else value


@pytest.fixture(params=["seq2seq", "ctc", "kws"])
def begun(request, world, tmp_path):
    """Make an experiment, and its averaged model, which is far from the initial one."""
    base = world / ("clips_whisper" if request.param == "kws" else "whisper")
    path = tmp_path / "exp"
    init(world, path, base, request.param, LORA).ok()
    torch.manual_seed(7)
    average = {name: stir(value) for name, value in load_file(path / "init.safetensors").items()}
    save_file(average, path / "model.safetensors")
    return request.param, base, path, average


def test_a_full_disk_is_an_error_of_one_line(begun, tmp_path):
    _, _, path, _ = begun
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    try:
        told = inside("export", path, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    told.fails(1, "safetensors: File too large")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("*.tmp"))


def ours_of(kind: str, base: Path, average: dict[str, torch.Tensor], words: int) -> torch.nn.Module:
    config = {"network": "hf", "path": str(base), "adapt": LORA}
    if kind == "kws":
        model = build_network(config, words, "x", clients=1)
        average = {name: value[None] for name, value in average.items()}
    else:
        tokens = ["<blank>"] + ["x"] * (words - 1)
        model = build_model(config | {"criterion": kind}, tokens)
    model.load_state_dict(average)
    return model.double().eval()


def check_whisper(kind: str, ours: Any, theirs: Any, head: dict[str, torch.Tensor]) -> None:
    """Check that encoder, decoder and head are the same."""
    bins = theirs.config.num_mel_bins
    mel = torch.randn(2, 400, bins, dtype=torch.double)
    theirs = theirs.double().eval()
    with torch.no_grad():
        wanted, lengths = ours.encoder(mel, torch.tensor([400, 400]))
        found = theirs.get_encoder()(mel.transpose(1, 2)).last_hidden_state
        torch.testing.assert_close(found, wanted, **TOLERANCE)
        if kind == "seq2seq":
            text = torch.tensor([[IDS["<|startoftranscript|>"], 3, 1, 4]] * 2)
            logits = theirs(input_features=mel.transpose(1, 2), decoder_input_ids=text).logits
            torch.testing.assert_close(logits, ours._decode(text, wanted, lengths), **TOLERANCE)
        elif kind == "ctc":
            weight, bias = (head[f"ctc.ctc_lo.{name}"].double() for name in ("weight", "bias"))
            torch.testing.assert_close(
                found @ weight.T + bias, ours.ctc.ctc_lo(wanted), **TOLERANCE
            )
        else:
            weight, bias = (head[f"head.{name}"].double() for name in ("weight", "bias"))
            logits = found.mean(1) @ weight.T + bias
            torch.testing.assert_close(logits, ours(mel[None])[0], **TOLERANCE)


def test_transformers_and_peft_load_what_was_exported(world, begun, tmp_path):
    kind, base, path, average = begun
    whole, adapters = tmp_path / "whole", tmp_path / "adapters"
    said = inside("export", path, whole).ok().err
    inside("export", path, adapters, "--adapters").ok()
    assert (
        ("no place for the head" in said)
        == (kind != "seq2seq")
        == (whole / "head.safetensors").exists()
    )
    labels = {"kws": "classes.txt", "ctc": "tokens.txt"}.get(kind)
    assert labels is None or (whole / labels).read_bytes() == (path / labels).read_bytes()
    for name in ("tokenizer.json", "generation_config.json"):
        if (base / name).exists():
            assert (whole / name).read_bytes() == (base / name).read_bytes()
    words = len((path / labels).read_text().splitlines()) if labels else 1
    head = load_file(whole / "head.safetensors") if labels else {}
    ours = ours_of(kind, base, average, words)
    loaded = transformers.WhisperForConditionalGeneration.from_pretrained(whole)
    assert loaded.dtype == torch.float32
    check_whisper(kind, ours, loaded, head)
    loaded = transformers.WhisperForConditionalGeneration.from_pretrained(base)
    check_whisper(kind, ours, PeftModel.from_pretrained(loaded, adapters).get_base_model(), head)
    trained = set(load_file(base / "model.safetensors")) ^ set(
        load_file(whole / "model.safetensors")
    )
    # No adapter of the output layer, which would untie it from the table of tokens.
    assert not trained
    init(world, tmp_path / "again", whole, kind, LORA).ok()
    inside("export", path, whole).fails(1, "already exists")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("kind", ["seq2seq", "ctc", "kws"])
def test_a_client_takes_its_own_adapters_away(world, tmp_path, kind):
    base, path = world / ("clips_whisper" if kind == "kws" else "whisper"), tmp_path / "exp"
    personal = ("--set", "method_conf.personal=['*lora*']", "--set", "training.optim_conf.lr=0.1")
    init(world, path, base, kind, LORA, *personal, "--set", "training.optim=sgd").ok()
    inside("rounds", path).ok()
    inside("average", path, "--best", "1").ok()
    client = "c2" if kind == "kws" else "en"
    labels = {"kws": "classes.txt", "ctc": "tokens.txt"}.get(kind)
    words = len((path / labels).read_text().splitlines()) if labels else 1
    (kept,) = path.glob(f"clients/{client}/round_*/personal.safetensors")
    own = load_file(kept)
    assert all("lora" in name for name in own)
    assert any(value.any() for name, value in own.items() if name.endswith("lora_b"))
    state = load_file(path / "round_0002/global.safetensors") | own
    ours = ours_of(kind, base, state, words)
    for options in ((), ("--adapters",)):
        out = tmp_path / f"out{len(options)}"
        inside("export", path, out, "--client", client, *options).ok()
        head = load_file(out / "head.safetensors") if labels else {}
        theirs = transformers.WhisperForConditionalGeneration.from_pretrained(
            base if options else out
        )
        if options:
            theirs = PeftModel.from_pretrained(theirs, out).get_base_model()
        check_whisper(kind, ours, theirs, head)
    inside("export", path, tmp_path / "nobody", "--client", "nobody").fails(
        1, "client 'nobody' has no averaged model"
    )
    assert not (tmp_path / "nobody").exists()


@pytest.mark.parametrize("begun", ["seq2seq"], indirect=True)
def test_the_precision_is_that_of_the_base_where_asked_for(begun, world, tmp_path):
    _, base, _, _ = begun
    half = tmp_path / "half"
    half.mkdir()
    for file in base.iterdir():
        (half / file.name).write_bytes(file.read_bytes())
    transformers.WhisperForConditionalGeneration.from_pretrained(base).half().save_pretrained(half)
    path = tmp_path / "halved"
    init(world, path, half, "seq2seq", LORA).ok()
    (path / "model.safetensors").write_bytes((path / "init.safetensors").read_bytes())
    for options, dtype in (((), torch.float32), (("--as-base",), torch.float16)):
        out = tmp_path / str(dtype)
        inside("export", path, out, *options).ok()
        tensors = load_file(out / "model.safetensors")
        assert {value.dtype for value in tensors.values()} == {dtype}
        loaded = transformers.WhisperForConditionalGeneration.from_pretrained(out)
        assert loaded.dtype == dtype
        # Untrained adapters change nothing.
        for name, value in load_file(half / "model.safetensors").items():
            assert torch.equal(tensors[name], value.to(dtype))


def test_an_adapter_of_the_output_layer_is_exported_beside_the_table_of_tokens(world, tmp_path):
    base, how = world / "whisper", LORA | {"targets": ["*", "proj_out"]}
    config = {"network": "hf", "path": str(base), "criterion": "seq2seq", "adapt": how}
    model = build_model(config, [])
    assert "proj_out.lora_a" in model.state_dict()
    assert "proj_out.lora_a" not in build_model(config | {"adapt": LORA}, []).state_dict()
    torch.manual_seed(3)
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(stir(value))
    export_folder(tmp_path / "out", Folder.open(base), model, model.state_dict(), [])
    names = [set(load_file(path / "model.safetensors")) for path in (base, tmp_path / "out")]
    assert names[1] - names[0] == {"proj_out.weight"} and names[0] <= names[1]
    loaded = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / "out")
    check_whisper("seq2seq", model.double().eval(), loaded, {})


@pytest.mark.parametrize(("length", "warned"), [(1e-4, True), (1.0, False)])
def test_what_rounding_to_the_base_loses_is_reported(world, tmp_path, length, warned):
    base, half = world / "whisper", tmp_path / "half"
    shutil.copytree(base, half)
    whole = transformers.WhisperForConditionalGeneration.from_pretrained(base)
    whole.to(torch.bfloat16).save_pretrained(half)
    config = {"network": "hf", "path": str(half), "criterion": "seq2seq", "adapt": LORA}
    model = build_model(config, [])
    torch.manual_seed(3)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("lora_b"):
                value.copy_(torch.randn_like(value) * length)
    given = Folder.open(half), model, model.state_dict(), []
    assert export_folder(tmp_path / "single", *given) == []
    (note,) = export_folder(tmp_path / "rounded", *given, as_base=True)
    begun, exact, rounded = (
        load_file(path / "model.safetensors")
        for path in (half, tmp_path / "single", tmp_path / "rounded")
    )
    norms = [
        sum((one[name].double() - exact[name].double()).square().sum() for name in exact) ** 0.5
        for one in (rounded, begun)
    ]
    assert f"relative error of {100 * norms[0] / norms[1]:.2g} %" in note
    assert note.startswith("warning: ") is warned
    assert ("without --as-base" in note) is warned


def test_a_head_that_is_not_used_is_told(tmp_path):
    data = simulated.data_dir(tmp_path / "data", ["au"], 2, log_mel=True)
    inside("train-tokens", data / "text", tmp_path / "tokens", "--token-type", "char").ok()
    for head, said in (("ForCTC", True), ("Model", False)):
        base = save_wave(tmp_path / head, head=head)
        waves = [(f"au-{n}", np.random.default_rng(n).normal(0, 0.1, (16_000, 1))) for n in (1, 2)]
        folder = DataDir(tmp_path / f"waves {head}")
        folder.path.mkdir()
        for name, _ in waves:
            folder.utt2spk[name] = folder.utt2client[name] = "au"
            folder.text[name] = "ab"
        folder.feats_scp = write_ark(
            folder.path / "feats.ark", [(name, wave.astype("f4")) for name, wave in waves]
        )
        folder.write()
        path = tmp_path / f"exp {head}"
        done = init_on(folder.path, path, base, tmp_path / "tokens").ok()
        assert ("its own head (lm_head.bias, ...) is not used" in done.err) is said
        (path / "model.safetensors").write_bytes((path / "init.safetensors").read_bytes())
        done = inside("export", path, tmp_path / f"out {head}").ok()
        assert ("as it was, untrained" in done.err) is said


def init_on(data: Path, path: Path, base: Path, tokens: Path) -> Any:
    """Begin an experiment with a CTC layer on a pretrained encoder."""
    model = {"network": "hf", "path": str(base), "adapt": LORA}
    path.with_suffix(".yaml").write_text(yaml.safe_dump({"task": "asr", "model": model}))
    return inside(
        *("init", path, "--config", path.with_suffix(".yaml"), "--method", "fedavg"),
        *("--data", f"train={data}", "--asset", f"tokens={tokens}"),
    )


@pytest.mark.parametrize(
    ("kind", "norm", "how"),
    [
        ("Wav2Vec2", "group", {"kind": "full"}),
        ("Wav2Vec2", "layer", LORA),
        ("Wav2Vec2 ForCTC", "layer", {"kind": "full"}),
        ("Hubert", "layer", {"kind": "full"}),
        ("WavLM", "layer", {"kind": "full"}),
        ("WavLM", "group", LORA | {"targets": ["*_dense", "*gru_rel_pos_linear"]}),
        ("Hubert", "group", LORA | {"targets": ["*.q_proj", "conv_layers.?.conv"]}),
    ],
)
def test_encoders_of_waveforms_go_back(tmp_path, kind, norm, how):
    kind, _, head = kind.partition(" ")
    base = save_wave(tmp_path / "base", kind, norm, head or "Model")
    config = {"network": "hf", "path": str(base), "adapt": how}
    model = build_model(config, ["<blank>", "a", "b"])
    torch.manual_seed(3)
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(stir(value))
    folder, state = Folder.open(base), model.state_dict()
    export_folder(tmp_path / "whole", folder, model, state, [])
    names = [set(load_file(path / "model.safetensors")) for path in (base, tmp_path / "whole")]
    assert names[0] == names[1]
    waves = torch.randn(2, 3000, dtype=torch.double)
    ours = model.double().eval().encoder
    ours._normalized = False
    wanted, _ = ours(waves[..., None])
    theirs = [transformers.AutoModel.from_pretrained(tmp_path / "whole")]
    if how["kind"] == "lora":
        export_adapters(tmp_path / "low", folder, model, state, [], Adapt(**how))
        theirs.append(PeftModel.from_pretrained(transformers.AutoModel.from_pretrained(base),
                                                tmp_path / "low"))  # fmt: skip
    for one in theirs:
        found = one.double().eval()(waves).last_hidden_state
        torch.testing.assert_close(found, wanted, **TOLERANCE)
    assert json.loads((tmp_path / "whole" / "config.json").read_text()) == folder.config


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"kind": "bias"}, "adapt: kind bias: peft's files hold only adapters of kind lora"),
        (
            LORA | {"also": ["*layer_norm*"]},
            "adapt: also: peft's files hold only adapters of kind lora",
        ),
        (
            LORA | {"combine": "residual"},
            "adapt: combine residual: peft's files hold only adapters of kind lora",
        ),
        (
            LORA | {"targets": ["pos_conv_embed.*"]},
            "differ from ours for encoder.pos_conv_embed.conv",
        ),
        (LORA, "transformers' WavLM ignores an adapter of encoder.layers.0.attention."),
    ],
)
def test_what_is_no_adapter_is_not_exported_as_one(tmp_path, how, said):
    base = save_wave(tmp_path / "base", "WavLM")
    how = {**how, "also": tuple(how.get("also", ()))}
    model = build_model({"network": "hf", "path": str(base), "adapt": how}, ["<blank>", "a"])
    with pytest.raises(UserError, match=said):
        export_adapters(
            tmp_path / "out", Folder.open(base), model, model.state_dict(), [], Adapt(**how)
        )
    assert not (tmp_path / "out").exists()


def test_options_of_pretrained_models_are_not_of_others(tmp_path):
    data = simulated.data_dir(tmp_path / "data", ["au"], 3)
    inside("train-tokens", data / "text", tmp_path / "tokens", "--token-type", "char").ok()
    config = simulated.config_file(tmp_path / "config.yaml")
    inside(
        *("init", tmp_path / "exp", "--config", config, "--method", "fedavg"),
        *("--data", f"train={data}", "--asset", f"tokens={tmp_path / 'tokens'}"),
    ).ok()
    for option in ("--adapters", "--as-base"):
        inside("export", tmp_path / "exp", tmp_path / "out", option).fails(2, "network hf")
    inside("export", tmp_path, tmp_path / "out", "--adapters", "--as-base").fails(2, "--as-base")
