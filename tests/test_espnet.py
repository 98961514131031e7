"""ESPnet's own files: its decoder reads ours, and nothing but tensors that fit is read."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
import simulated
import torch
import yaml
from conftest import ROOT
from safetensors.numpy import load_file

from fedtools.files.ark import FeatureReader
from fedtools.files.datadir import DataDir


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A trained experiment and its export."""
    from conftest import inside

    root = tmp_path_factory.mktemp("espnet")
    for name, seed in (("train", 0), ("valid", 1)):
        simulated.data_dir(root / name, ["au", "en"], 4, seed)
    simulated.config_file(root / "config.yaml", average=1)
    text = root / "train" / "text"
    inside("train-tokens", text, root / "tokens", "--token-type", "char").ok()
    inside(
        "init", root / "exp", "--config", root / "config.yaml", "--method", "fedavg",
        "--data", f"train={root / 'train'}", "--data", f"valid={root / 'valid'}",
        "--asset", f"tokens={root / 'tokens'}",
    ).ok()  # fmt: skip
    inside("rounds", root / "exp", "--to", "1").ok()
    inside("average", root / "exp").ok()
    inside("export", root / "exp", root / "espnet").ok()
    return root


def test_an_export_is_the_same_bytes_each_time(world, tmp_path, cli):
    """Without the names of host, process or temporary file, which torch.save writes of a path."""
    cli("export", world / "exp", tmp_path / "again").ok()
    for name in ("model.pth", "tokens.txt"):
        assert (tmp_path / "again" / name).read_bytes() == (world / "espnet" / name).read_bytes()


SPEECH2TEXT = """
import importlib.util, sys, types, warnings
warnings.simplefilter("ignore")

# ESPnet's decoder imports its tasks, and these import front ends, tokenizers and losses of other
# models from packages that need not be here. None of it is called for a model on features.
FOREIGN = (
    "torchaudio g2p_en einops hydra omegaconf opt_einsum h5py jaconv pypinyin jamo "
    "nltk ci_sdr fast_bss_eval tacotron_cleaner"
)

class Foreign(types.ModuleType):
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in FOREIGN.split():
            return importlib.util.spec_from_loader(name, Finder)
    @staticmethod
    def create_module(spec):
        return Foreign(spec.name)
    @staticmethod
    def exec_module(module):
        pass

sys.meta_path.append(Finder)
import numpy as np
import torch
from espnet2.bin.asr_inference import Speech2Text
folder, features = sys.argv[1:]
decode = Speech2Text(f"{folder}/config.yaml", f"{folder}/model.pth", ctc_weight=1.0, beam_size=5)
matrix = np.load(features)
with torch.no_grad():
    speech = torch.from_numpy(matrix)[None]
    encoded = decode.asr_model.encode(speech, torch.tensor([len(matrix)]))[0]
    np.save(features + ".out.npy", decode.asr_model.ctc.log_softmax(encoded)[0].numpy())
print("decoded", repr(decode(matrix)[0][0]))
"""


def test_espnet_decodes_our_model(world, tmp_path):
    """The same posteriors in ESPnet's Speech2Text as in ours."""
    data = DataDir.read(world / "valid")
    name = data.utterances[0]
    matrix = FeatureReader(data.feats_scp).read(name)
    np.save(tmp_path / "features.npy", matrix)
    done = subprocess.run(
        [sys.executable, "-c", SPEECH2TEXT, world / "espnet", tmp_path / "features.npy"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert "decoded" in done.stdout
    from fedtools.federation.asr import AsrFederation
    from fedtools.federation.evaluate import load_average
    from fedtools.models.asr import log_posteriors

    federation = AsrFederation(world / "exp")
    load_average(federation, "")
    batch = {
        "speech": torch.from_numpy(matrix)[None],
        "speech_lengths": torch.tensor([len(matrix)]),
    }
    with torch.no_grad():
        ours = log_posteriors(federation.model.eval(), batch)[0][0].numpy()
    theirs = np.load(tmp_path / "features.npy.out.npy")
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_what_espnet_does_not_append_is_told(world, cli, tmp_path):
    """Frames behind the end are in an experiment's options; its decoding has them."""
    from fedtools.federation.asr import AsrFederation

    assert not cli("export", world / "exp", tmp_path / "none").ok().err
    cli(
        "init", tmp_path / "exp", "--config", world / "config.yaml", "--method", "fedavg",
        "--data", f"train={world / 'train'}", "--data", f"valid={world / 'valid'}",
        "--asset", f"tokens={world / 'tokens'}", "--start", world / "exp" / "model.safetensors",
        "--set", "training.end_frames=4",
    ).ok()  # fmt: skip
    federation = AsrFederation(tmp_path / "exp")
    for split in ("train", "valid"):
        data = DataDir.read(world / split)
        found = federation.utterances(split, "au")
        recorded = [FeatureReader(data.feats_scp).num_frames(name) for name in found.names]
        assert found.load([0])["speech_lengths"].tolist() == [recorded[0] + 4]
        assert found.frames.tolist() == [frames + 4 for frames in recorded]
    cli("rounds", tmp_path / "exp", "--to", "1").ok()
    cli("average", tmp_path / "exp").ok()
    told = cli("export", tmp_path / "exp", tmp_path / "espnet").ok().err
    assert "append them to the features" in told and "4 frames of zeros" in told


def test_round_trip(world, cli, tmp_path):
    folder = world / "espnet"
    cli("import", folder / "config.yaml", folder / "model.pth", tmp_path / "back").ok()
    ours = load_file(world / "exp" / "model.safetensors")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert ours.keys() == back.keys()
    assert all(np.array_equal(ours[name], back[name]) for name in ours)
    imported = tmp_path / "back"
    config = yaml.safe_load((imported / "model.yaml").read_text())
    config["training"] = simulated.CONFIG["training"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    cli(
        "init", tmp_path / "exp", "--config", tmp_path / "config.yaml", "--method", "fedavg",
        "--data", f"train={world / 'train'}", "--asset", f"tokens={imported}",
        "--start", imported / "model.safetensors",
    ).ok()  # fmt: skip
    cli("rounds", tmp_path / "exp", "--to", "1").ok()


class Evil:
    def __reduce__(self):
        return (print, ("run",))


@pytest.mark.parametrize("damage", ["pickle", "cut", "missing", "extra", "shape", "frontend"])
def test_refused_models(world, cli, tmp_path, damage):
    state = torch.load(world / "espnet" / "model.pth", weights_only=True)
    config = yaml.safe_load((world / "espnet" / "config.yaml").read_text())
    name = "ctc.ctc_lo.bias"
    said = name
    if damage == "missing":
        del state[name]
    elif damage == "extra":
        state[said := "encoder.more"] = torch.zeros(2)
    elif damage == "shape":
        state[name] = state[name][:-1]
    elif damage == "frontend":
        config["frontend"], said = "default", "waveforms"
    torch.save(state, tmp_path / "model.pth")
    if damage == "pickle":
        (tmp_path / "model.pth").write_bytes(pickle.dumps({name: Evil()}))
        said = "not a file of tensors"
    elif damage == "cut":
        (tmp_path / "model.pth").write_bytes((tmp_path / "model.pth").read_bytes()[:1000])
        said = "not a file of tensors"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    result = cli("import", tmp_path / "config.yaml", tmp_path / "model.pth", tmp_path / "out")
    result.fails(1, said)
    assert not (tmp_path / "out" / "model.safetensors").exists()
