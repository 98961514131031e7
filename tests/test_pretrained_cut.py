"""Pretrained models cut in two: an extractor at its client, and a classifier on its features."""

from __future__ import annotations

import shutil
from pathlib import Path

import kaldiio
import numpy as np
import pytest
import simulated
import torch
import yaml
from conftest import Result, inside, ledger
from decouplefl_world import stages
from pretrained_models import IDS, save_recogniser, save_wave
from safetensors.numpy import load_file, save_file
from torch import nn

from fedtools.core.errors import UserError
from fedtools.data.ark import write_ark
from fedtools.data.datadir import DataDir, read_table
from fedtools.lm.whisper_tokens import WhisperTokens
from fedtools.models.acoustic.asr import build_model, outputs, positions
from fedtools.models.acoustic.extractor import Cut
from fedtools.models.adapt.adapters import Trained
from fedtools.models.pretrained.folder import import_transformers
from fedtools.tasks.asr.model import cut_above

BINS = simulated.BINS
TOKENS = ["<blank>", "a", "b", "<sos/eos>"]
LORA = {"kind": "lora", "rank": 2}
PERSONAL = ["encoder.layers.[0-1].*"]
SAVERS = {
    "whisper": lambda path: save_recogniser(path, bins=BINS),
    "seq2seq": lambda path: save_recogniser(path, bins=BINS),
    "wav2vec": lambda path: save_wave(path),
    "wav2vec base": lambda path: save_wave(path, norm="group"),
    "wavlm": lambda path: save_wave(path, "WavLM"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    for name, save in SAVERS.items():
        save(root / name)
    return root


def build(folders: Path, kind: str, **options: object) -> nn.Module:
    """Build a model in which no adapter is zero."""
    config = {"network": "hf", "path": str(folders / kind), **options}
    tokens = [*IDS] if kind == "seq2seq" else TOKENS
    config |= {"criterion": "seq2seq"} if kind == "seq2seq" else {}
    torch.manual_seed(0)
    model = build_model(config, tokens)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * 0.1)
    return model.eval()


def cut_of(model: nn.Module, *starts: str) -> Cut:
    """Return the cut above the parameters whose names start with one of `starts`."""
    names = [name for name, _ in model.named_parameters() if name.startswith(starts)]
    return Cut.above(model, names, 1 if hasattr(model.encoder, "conv_layers") else BINS)


def audio(kind: str) -> dict[str, torch.Tensor]:
    random, bins = torch.Generator().manual_seed(1), 1 if kind.startswith("wav") else BINS
    lengths = torch.tensor([300, 200, 100])
    speech = torch.randn(3, 300, bins, generator=random)
    for row, length in enumerate(lengths):
        speech[row, length:] = 0
    return {"speech": speech, "speech_lengths": lengths}


@pytest.mark.parametrize("kind", SAVERS)
@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_the_two_parts_are_the_model(folders, kind, layers):
    """In a batch, features and outputs equal those of an utterance alone, whatever the padding."""
    model = build(folders, kind, adapt=LORA | {"also": ["*layer_norm*"]})
    if layers == 4:
        # The last normalisation, which the base of wav2vec 2.0 has below its layers.
        layers -= not isinstance(model.encoder.layer_norm, Trained)
    upper = [f"encoder.layers.{layer}." for layer in range(layers, 3)]
    upper += ["encoder.layer_norm."] * (layers < 4)
    names = [name for name, _ in model.named_parameters() if name.startswith("encoder.")]
    personal = [name for name in names if not name.startswith(tuple(upper))]
    cut, batch = cut_of(model, *personal), audio(kind)
    assert cut.blocks == layers and cut.step == model.encoder.step and cut.size == 32
    with torch.no_grad():
        whole, counts = outputs(model, batch)
        features, lengths = cut.extract(model, batch)
        parts = cut.classify(model, features, lengths)
        assert lengths.tolist() == counts.tolist()
        for row, length in enumerate(batch["speech_lengths"]):
            lone = {"speech": batch["speech"][row : row + 1, :length]}
            alone, own = cut.extract(model, lone | {"speech_lengths": length[None]})
            size = int(own)
            assert size == lengths[row] == positions(model, int(length))
            torch.testing.assert_close(alone[0], features[row, :size], rtol=0, atol=1e-5)
            torch.testing.assert_close(parts[row, :size], whole[row, :size], rtol=0, atol=1e-5)
            padded = torch.cat([alone, torch.full((1, 3, cut.size), 7.0)], 1)
            for given in (alone, padded):
                found = cut.classify(model, given, own)[0, :size]
                torch.testing.assert_close(found, whole[row, :size], rtol=0, atol=1e-5)


def test_from_what_is_kept_of_frozen_layers(folders):
    how = LORA | {"targets": ["layers.[12].*"]}
    model = build(folders, "whisper", adapt=how, cache_frozen=True)
    cut, batch = cut_of(model, "encoder.layers.1."), audio("whisper")
    assert (model.depth, cut.blocks) == (1, 2)
    with torch.no_grad():
        hidden, lengths = model.encoder.lower(*batch.values(), model.depth)
        found, sizes = cut.extract(model, {"hidden": hidden, "speech_lengths": lengths})
        expected, counts = cut.extract(model, batch)
    assert sizes.tolist() == counts.tolist()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


REFUSED = {
    "a layer is left out": ("whisper", {}, "encoder.layers.1.", "encoder.layers.1", "layers.0"),
    "a half layer": ("whisper", {}, "encoder.layers.0.fc1.", "encoder.layers.0.fc1", "layers.0."),
    "the head": ("whisper", {}, "ctc.", "ctc.ctc_lo.weight is personal", "encoder.layers.0"),
    "nothing": ("whisper", {}, "nothing", "no trained parameter is personal"),
    "all": ("whisper", {}, "", "all trained parameters are personal"),
    "a bias of all layers": (
        "wavlm",
        {"targets": ["layers.*"], "also": ["*rel_attn_embed*"]},
        "encoder.layers.0.",
        "encoder.layers.0.attention.rel_attn_embed.weight is personal",
        "encoder.layers.1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_bottom_is_refused_by_name(folders, case):
    kind, how, start, *said = REFUSED[case]
    model = build(folders, kind, adapt=LORA | how)
    names = [name for name, _ in model.named_parameters() if name.startswith(start)]
    config = {"network": "hf", "path": str(folders / kind)}
    with pytest.raises(UserError) as raised:
        cut_above(model, names, config, "config.yaml")
    for part in ("config.yaml: method_conf.personal: ", *said):
        assert part in str(raised.value)
    assert "\n" not in str(raised.value)


# --- a federation


@pytest.fixture(scope="module")
def world(tmp_path_factory, folders) -> Path:
    root = tmp_path_factory.mktemp("world")
    simulated.data_dir(root / "train", ["au", "en"], 5, log_mel=True)
    inside("train-tokens", root / "train" / "text", root / "tokens", "--token-type", "char").ok()
    return root


def begin(
    world: Path,
    folders: Path,
    path: Path,
    *more: str,
    kind: str = "whisper",
    method: str = "decouplefl",
    **model: object,
) -> Result:
    config = {
        "task": "asr",
        "model": {"network": "hf", "path": str(folders / kind), "adapt": LORA, **model},
        "training": {
            "optim": "adamw",
            "optim_conf": {"lr": 0.01},
            "batch_bins": 8000,
            "num_threads": 1,
            "save_interval_steps": 1,
        },
        "method_conf": {"personal": PERSONAL, "bits": 32},
    }
    path.with_suffix(".yaml").write_text(yaml.safe_dump(config))
    tokens = folders / "seq2seq" if model.get("criterion") else world / "tokens"
    return inside(
        *("init", path, "--config", path.with_suffix(".yaml"), "--method", method, *more),
        *("--data", f"train={world / 'train'}", "--asset", f"tokens={tokens}"),
    )


@pytest.fixture(scope="module")
def decoupled(world, folders) -> Path:
    path = world / "decoupled"
    begin(world, folders, path, *stages(2, 2)).ok()
    inside("rounds", path).ok()
    return path


def is_personal(name: str) -> bool:
    return name.startswith(("encoder.layers.0.", "encoder.layers.1."))


def test_adapters_of_the_extractor_stay_at_their_clients(decoupled):
    """Stage 1 trains only these, stage 2 all others; no message has them, nor the base."""
    begun = load_file(decoupled / "init.safetensors")
    own = {name for name in begun if is_personal(name)}
    assert own and len(begun) > len(own)
    sent = [load_file(one) for one in sorted(decoupled.glob("round_*/global.safetensors"))]
    assert len(sent) == 7 and all(one.keys() == begun.keys() - own for one in sent)
    assert not list(decoupled.glob("round_*/update.*.safetensors"))
    for name in sent[0]:
        assert all(np.array_equal(one[name], begun[name]) for one in sent[:3])
    moved = [name for name in sent[0] if not np.array_equal(sent[5][name], begun[name])]
    assert "ctc.ctc_lo.weight" in moved and any("layers.2" in name for name in moved)
    states = [
        load_file(decoupled / f"clients/{client}/round_0002/personal.safetensors")
        for client in ("au", "en")
    ]
    assert all(state.keys() == own for state in states)
    name = "encoder.layers.1.fc1.lora_b"
    assert len({one[name].tobytes() for one in (begun, *states)}) == 3


def test_features_are_those_of_the_extractor_and_in_the_ledger(world, folders, decoupled):
    model = build(folders, "whisper", adapt=LORA)
    state = load_file(decoupled / "init.safetensors")
    places = dict(line.split() for line in (world / "train/feats.scp").open())
    tokens = (world / "tokens/tokens.txt").read_text().split()
    model.ctc.ctc_lo = nn.Linear(model.encoder.size, len(tokens))
    rows = {(row["client"], int(row["round"])): row for row in ledger(decoupled)}
    assert {row["status"] for row in rows.values()} == {"ok"}
    for client in ("au", "en"):
        own = load_file(decoupled / f"clients/{client}/round_0002/personal.safetensors")
        tensors = {name: torch.tensor(value) for name, value in (state | own).items()}
        model.load_state_dict(tensors)
        files = [decoupled / f"round_0003/features.{client}.{kind}" for kind in ("ark", "scp")]
        sent = list(dict(kaldiio.load_ark(str(files[0]))).values())
        expected = []
        for name, place in places.items():
            if name.startswith(client):
                speech = torch.tensor(kaldiio.load_mat(place))[None]
                with torch.no_grad():
                    hidden, _, _ = model.encoder.embed(speech, None)
                    for layer in model.encoder.layers[:2]:
                        hidden = layer(hidden, None)
                expected.append(hidden[0].numpy())
        assert len(sent) == len(expected) == 5
        for matrix in sent:
            assert any(
                one.shape == matrix.shape and np.allclose(one, matrix, atol=1e-4)
                for one in expected
            )
        size = sum(path.stat().st_size for path in files)
        assert [int(rows[client, at]["bytes_up"]) for at in (1, 2, 3)] == [0, 0, size]
        assert size > sum(4 * matrix.size for matrix in sent)


def test_features_from_frozen_layers_that_are_kept(world, folders, tmp_path):
    """Layers below the lowest adapter are computed once, and the sent features are unchanged."""
    how = LORA | {"targets": ["layers.[12].*"]}
    sent = []
    for name, model in (("plain", {}), ("kept", {"cache_frozen": True})):
        more = ("--set", "method_conf.personal=[encoder.layers.1.*]", *stages(1, 1))
        begin(world, folders, tmp_path / name, *more, adapt=how, **model).ok()
        inside("rounds", tmp_path / name).ok()
        arks = sorted((tmp_path / name).glob("round_0002/features.*.ark"))
        sent.append([one for ark in arks for one in kaldiio.load_ark(str(ark))])
        assert bool(list((world / "train").glob("frozen/*/*.npy"))) is (name == "kept")
    assert len(sent[0]) == len(sent[1]) == 10
    for (one, matrix), (two, other) in zip(*sent, strict=True):
        assert one == two
        np.testing.assert_allclose(matrix, other, rtol=0, atol=1e-3)


def test_whisper_itself(world, folders, tmp_path):
    """The server trains the upper layers and the decoder."""
    path = tmp_path / "e"
    begin(world, folders, path, *stages(1, 1), criterion="seq2seq").ok()
    inside("rounds", path).ok()
    sent = load_file(path / "round_0004/global.safetensors")
    assert any(name.startswith("decoder.") for name in sent)
    assert not any(is_personal(name) for name in sent)
    assert {row["status"] for row in ledger(path)} <= {"ok", "collapsed"}
    inside("attack", "features", path, tmp_path / "out").fails(1, "criterion seq2seq")


def talkative(folder: Path, out: Path) -> Path:
    """Make a Whisper that writes letters, depending on place and audio, and ends at times."""
    shutil.copytree(folder, out)
    state = load_file(out / "model.safetensors")
    for name, value in state.items():
        if name.endswith("decoder.embed_tokens.weight"):
            value *= 5
            end = {"<|endoftext|>": 1.1}
            value[:, 0] = [1 if len(one) == 1 else end.get(one, -1) for one in IDS]
        elif name.endswith("decoder.layer_norm.bias"):
            value[0] = 9
        elif name.endswith("decoder.embed_positions.weight"):
            value *= 100
        elif name.endswith(("encoder_attn.out_proj.weight", "encoder_attn.v_proj.weight")):
            value *= 30
    save_file(state, out / "model.safetensors", {"format": "pt"})
    return out


def test_whispers_decoder_labels_what_was_sent_once(world, folders, tmp_path):
    """They are what `transformers` writes by greedy search on the same features, and no more."""
    path, beam = tmp_path / "e", ("--set", "training.server_labels=beam")
    search = ("--set", "training.search={beam: 1}")
    folder = talkative(folders / "seq2seq", tmp_path / "seq2seq")
    begin(
        world, tmp_path, path, *stages(0, 2), *beam, *search, kind="seq2seq", criterion="seq2seq"
    ).ok()
    inside("rounds", path).ok()
    tokens = WhisperTokens.load(folder)
    whole = import_transformers().WhisperForConditionalGeneration.from_pretrained(folder).eval()
    lengths = set()
    for client in ("au", "en"):
        (file,) = path.glob(f"server/labels/{client}.*")
        labels = read_table(file, values="optional")
        sent = dict(kaldiio.load_ark(str(path / f"round_0001/features.{client}.ark")))
        assert labels.keys() == sent.keys()
        for name, matrix in sent.items():
            hidden = torch.tensor(matrix)[None]
            with torch.no_grad():
                # Adapters not yet trained give zeros.
                for layer in whole.model.encoder.layers[2:]:
                    hidden = layer(hidden, None)
                encoded = whole.model.encoder.layer_norm(hidden)
            said = tokens.prompt(None)
            # A second of features is 50 frames; this many tokens a second, and a few more, at most.
            for _ in range(round(15 * len(matrix) / 50) + 10):
                given = torch.tensor([said])
                with torch.no_grad():
                    out = whole(encoder_outputs=(encoded,), decoder_input_ids=given)
                if (best := int(out.logits[0, -1].argmax())) == tokens.end:
                    break
                said.append(best)
            assert labels[name] == tokens.decode(said[len(tokens.prompt(None)) :])
            lengths.add(len(said))
    assert min(lengths) > len(tokens.prompt(None))


@pytest.mark.parametrize(("seconds", "code"), [(1.9, 1), (2.1, 0)])
def test_hours_of_waveforms_are_of_samples(world, folders, tmp_path, seconds, code):
    """Clients have 2 s each."""
    data, matrices = DataDir(tmp_path / "train"), []
    for name in ("au-1", "au-2", "en-1", "en-2"):
        wave = np.random.default_rng([*name.encode()]).normal(0, 0.1, (16_000, 1))
        matrices.append((name, wave.astype("f4")))
        data.utt2spk[name] = data.utt2client[name] = name[:2]
        data.text[name] = "ab"
    data.path.mkdir()
    data.feats_scp = write_ark(data.path / "feats.ark", matrices)
    data.write()
    (tmp_path / "tokens").symlink_to(world / "tokens")
    hours = ("--set", f"method_conf.max_hours={seconds / 3600}", *stages(0, 1))
    personal = ("--set", "method_conf.personal=[encoder.feature_projection.*]")
    begin(tmp_path, folders, tmp_path / "e", *hours, *personal, kind="wav2vec").ok()
    done = inside("rounds", tmp_path / "e", "--to", "1")
    if code:
        done.fails(1, "799 frames of 32 values", "at most 4000 and 1520 of 32 are taken")
    else:
        done.ok()


@pytest.mark.parametrize("model", [{}, {"cache_frozen": True}, {"criterion": "seq2seq"}])
def test_jointly(world, folders, tmp_path, model):
    """The clients' extractors are trained with one classifier."""
    path, how = tmp_path / "e", LORA | {"targets": ["*layers.[12].*"]}
    conf = ("--set", "method_conf={personal: [encoder.layers.1.*]}", "--set", "rounds=1")
    begin(world, folders, path, *conf, method="joint", adapt=how, **model).ok()
    inside("rounds", path).ok()
    begun, ended = (
        load_file(path / f"{name}.safetensors") for name in ("init", "round_0002/global")
    )
    moved = {name for name in ended if not np.array_equal(ended[name], begun[name])}
    assert any("layers.2" in name for name in moved)


def test_jointly_on_labels_of_a_teacher_with_a_decoder(world, folders, tmp_path):
    path, how = tmp_path / "e", LORA | {"targets": ["*layers.[12].*"]}
    conf = ("--set", "method_conf={personal: [encoder.layers.1.*]}", "--set", "rounds=1")
    conf += ("--set", "training.labels=continuous")
    begin(world, folders, path, *conf, method="joint", adapt=how, criterion="seq2seq").ok()
    inside("rounds", path).ok()
    assert (path / "round_0002/global.safetensors").exists()


def test_against_speakers(world, folders, tmp_path):
    path, more = tmp_path / "e", ("--set", "method_conf.speaker_invariance=1.0")
    begin(world, folders, path, *stages(1, 0), *more).ok()
    assert "without speaker invariance" not in inside("rounds", path).ok().err
    assert list(path.glob("clients/au/round_0001/speakers.safetensors"))


def test_attacks_on_what_is_sent(world, folders, decoupled, tmp_path):
    out = tmp_path / "out"
    inside("attack", "features", decoupled, out, "--resamples", "20").ok()
    rows = [line.split("\t") for line in (out / "attacks.tsv").read_text().splitlines()]
    assert {"au", "en"} <= {row[0] for row in rows}
    assert any("WER" in cell or "CER" in cell for row in rows for cell in row)
    server = shutil.copytree(world / "train", tmp_path / "server")
    done = inside("attack", "features", decoupled, out, "--server-data", server)
    done.fails(1, "attack IV", "the model takes log_mel", "leave out --server-data")


def test_extractors_that_are_no_bottom_are_refused_before_anything_is_made(
    world, folders, tmp_path
):
    more = ("--set", "method_conf.personal=[encoder.layers.1.*]")
    said = begin(world, folders, tmp_path / "e", *more)
    said.fails(1, "method_conf.personal: encoder.layers.1", "is personal, but encoder.layers.0")
    assert not (tmp_path / "e").exists()
