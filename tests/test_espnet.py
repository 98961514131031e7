"""ESPnet's own files: its decoder reads our exports, and only fitting tensors are read."""

from __future__ import annotations

import pickle
import sys

import numpy as np
import pytest
import simulated
import torch
import yaml
from conftest import run
from safetensors.numpy import load_file

from fedtools.data.ark import FeatureReader
from fedtools.data.datadir import DataDir


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Make a trained experiment and its export."""
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
    """Exports exclude host, process and file names, which torch.save writes for a path."""
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
    """ESPnet's Speech2Text computes the same posteriors as we do."""
    data = DataDir.read(world / "valid")
    name = data.utterances[0]
    matrix = FeatureReader(data.feats_scp).read(name)
    np.save(tmp_path / "features.npy", matrix)
    words = ("-c", SPEECH2TEXT, world / "espnet", tmp_path / "features.npy")
    assert "decoded" in run(sys.executable, *words).ok().out
    from fedtools.federation.evaluate import load_average
    from fedtools.federation.federation import Federation
    from fedtools.models.acoustic.asr import log_posteriors

    federation = Federation(world / "exp")
    load_average(federation, "")
    batch = {
        "speech": torch.from_numpy(matrix)[None],
        "speech_lengths": torch.tensor([len(matrix)]),
    }
    with torch.no_grad():
        ours = log_posteriors(federation.task.models.build().eval(), batch)[0][0].numpy()
    theirs = np.load(tmp_path / "features.npy.out.npy")
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_what_espnet_does_not_append_is_told(world, cli, tmp_path):
    """Trailing frames are an option of experiments, but not of ESPnet's decoding."""
    from fedtools.federation.federation import Federation

    assert not cli("export", world / "exp", tmp_path / "none").ok().err
    cli(
        "init", tmp_path / "exp", "--config", world / "config.yaml", "--method", "fedavg",
        "--data", f"train={world / 'train'}", "--data", f"valid={world / 'valid'}",
        "--asset", f"tokens={world / 'tokens'}", "--start", world / "exp" / "model.safetensors",
        "--set", "training.end_frames=4",
    ).ok()  # fmt: skip
    federation = Federation(tmp_path / "exp")
    for split in ("train", "valid"):
        data = DataDir.read(world / split)
        found = federation.task.corpus.utterances(split, "au")
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


# --- other ESPnet models --------------------------------------------------------------------------

CHARACTERS = ["<blank>", "<unk>", "<space>", *"abcd", "<sos/eos>"]
SIZES = {"output_size": 16, "attention_heads": 2, "linear_units": 32, "num_blocks": 2}


def foreign(folder, tokens=CHARACTERS, encoder_conf=SIZES, **options):
    """Return config.yaml, model.pth and the model on features that ESPnet's own classes make."""
    from espnet2.asr.ctc import CTC
    from espnet2.asr.encoder.conformer_encoder import ConformerEncoder
    from espnet2.asr.espnet_model import ESPnetASRModel
    from espnet2.layers.utterance_mvn import UtteranceMVN

    torch.manual_seed(0)
    model = ESPnetASRModel(
        vocab_size=len(tokens), token_list=tokens, frontend=None, specaug=None,
        normalize=UtteranceMVN(), preencoder=None, postencoder=None, decoder=None,
        joint_network=None, encoder=ConformerEncoder(simulated.BINS, **encoder_conf),
        ctc=CTC(len(tokens), 16), ctc_weight=1.0,
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / "model.pth")
    config = {
        "token_list": tokens, "token_type": "char", "bpemodel": None, "g2p": None, "cleaner": None,
        "non_linguistic_symbols": None, "input_size": simulated.BINS, "frontend": None,
        "normalize": "utterance_mvn", "encoder": "conformer", "encoder_conf": encoder_conf,
        "preencoder": None, "postencoder": None, "model": "espnet", "use_lang_prompt": False,
        "model_conf": {"ctc_weight": 0.3}, "preprocessor": "default", "aux_ctc_tasks": [],
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config | options, allow_unicode=True))
    return model.eval()


def take_over(cli, folder):
    return cli("import", folder / "config.yaml", folder / "model.pth", folder / "out")


def begin(cli, world, folder):
    """Begin an experiment with an imported model, and return the command's output."""
    config = yaml.safe_load((folder / "out" / "model.yaml").read_text())
    config |= {"training": simulated.CONFIG["training"], "rounds": 1}
    (folder / "c.yaml").write_text(yaml.safe_dump(config))
    return cli(
        "init", folder / "exp", "--config", folder / "c.yaml", "--method", "fedavg",
        "--data", f"train={world / 'train'}", "--data", f"valid={world / 'valid'}",
        "--asset", f"tokens={folder / 'out'}", "--start", folder / "out" / "model.safetensors",
    ).ok()  # fmt: skip


def begun(cli, world, folder):
    """Return the experiment."""
    from fedtools.federation.federation import Federation

    begin(cli, world, folder)
    federation = Federation(folder / "exp")
    federation.load_result(None, 0)
    return federation


def test_transcripts_in_another_case_are_warned_of(cli, world, tmp_path):
    foreign(tmp_path, [*CHARACTERS[:3], *"ABCD", "<sos/eos>"])
    take_over(cli, tmp_path).ok()
    said = begin(cli, world, tmp_path).err
    for split in ("train", "valid"):
        assert f"warning: {world / split / 'text'}: " in said
    assert f"{tmp_path / 'out' / 'tokens.txt'} lacks a, b, c, d, so that" in said


@pytest.mark.parametrize(
    "more", [{}, {"interctc_layer_idx": [1]}, {"interctc_layer_idx": [1], "conditioning": True}]
)
def test_a_model_with_intermediate_ctc_gives_espnets_posteriors(cli, world, tmp_path, more):
    from fedtools.models.acoustic.asr import log_posteriors

    conf = SIZES | {key: value for key, value in more.items() if key != "conditioning"}
    conf["interctc_use_conditioning"] = "conditioning" in more
    theirs = foreign(tmp_path, encoder_conf=conf, model_conf={"interctc_weight": 0.5})
    done = take_over(cli, tmp_path).ok()
    assert "left out: interctc_weight 0.5" in done.out
    federation = begun(cli, world, tmp_path)
    speech = torch.randn(1, 90, simulated.BINS, generator=torch.Generator().manual_seed(1))
    batch = {"speech": speech, "speech_lengths": torch.tensor([90])}
    with torch.no_grad():
        ours, _ = log_posteriors(federation.task.models.build().eval(), batch)
        encoded = theirs.encode(speech.clone(), batch["speech_lengths"])[0]
        encoded = encoded[0] if isinstance(encoded, tuple) else encoded
        wanted = theirs.ctc.log_softmax(encoded)
    np.testing.assert_allclose(ours.numpy(), wanted.numpy(), atol=1e-5)
    cli("rounds", tmp_path / "exp", "--to", "1").ok()


def test_intermediate_losses_are_not_trained_and_that_is_told(cli, world, tmp_path):
    model = simulated.CONFIG["model"] | {"model_conf": {"interctc_weight": 0.5}}
    simulated.config_file(tmp_path / "c.yaml", model=model)
    cli(
        "init", tmp_path / "exp", "--config", tmp_path / "c.yaml", "--method", "fedavg",
        "--data", f"train={world / 'train'}", "--asset", f"tokens={world / 'tokens'}",
    ).fails(1, "interctc_weight: losses of intermediate layers")  # fmt: skip


def test_non_linguistic_symbols_are_one_token(cli, world, tmp_path):
    from espnet2.text.char_tokenizer import CharTokenizer

    from fedtools.lm.tokens import Tokenizer

    symbols = ["<NOISE>", "<NO>", "[laugh]"]
    foreign(tmp_path, [*CHARACTERS[:-1], *symbols, "<sos/eos>"], non_linguistic_symbols="n.txt")
    take_over(cli, tmp_path).ok()
    ours = Tokenizer.load(tmp_path / "out")
    theirs = CharTokenizer(non_linguistic_symbols=symbols)
    for words in ("ab <NOISE> cd", "<NO> a", "a[laugh] b", "ab<NOISE><NO>cd", "<NOISE>"):
        assert ours.split(words) == theirs.text2tokens(words)
        assert ours.decode(ours.encode(words)) == words
    assert "warning" not in begin(cli, world, tmp_path).err
    # The way back: ESPnet's decoder gets these options.
    cli("rounds", tmp_path / "exp", "--to", "1").ok()
    cli("average", tmp_path / "exp").ok()
    cli("export", tmp_path / "exp", tmp_path / "back").ok()
    exported = yaml.safe_load((tmp_path / "back" / "config.yaml").read_text())
    assert exported["non_linguistic_symbols"] == symbols


WORDS = ["<blank>", "<unk>", "a", "ab", "cd", "ccd", "<sos/eos>"]


@pytest.mark.parametrize(("kind", "g2p"), [("word", "g2p_en"), ("phn", "none"), ("phn", None)])
def test_words_and_phones_are_tokens(cli, tmp_path, kind, g2p):
    from espnet2.text.word_tokenizer import WordTokenizer

    from fedtools.lm.tokens import Tokenizer

    foreign(tmp_path, WORDS, token_type=kind, g2p=g2p)
    take_over(cli, tmp_path).ok()
    tokenizer = Tokenizer.load(tmp_path / "out")
    assert tokenizer.token_type == "word"
    for sentence in ("ab cd a", "ccd", "ab zz <unk> a"):
        wanted = [word if word in WORDS else "<unk>" for word in sentence.split()]
        assert tokenizer.split(sentence) == wanted
        assert tokenizer.encode(sentence) == [WORDS.index(word) for word in wanted]
        assert tokenizer.decode(tokenizer.encode(sentence)) == " ".join(wanted)
    assert tokenizer.split("ab cd a") == WordTokenizer().text2tokens("ab cd a")


def test_words_that_are_tokens_are_trained_found_and_go_back(cli, world, tmp_path):
    foreign(tmp_path, WORDS, token_type="word")
    take_over(cli, tmp_path).ok()
    begun(cli, world, tmp_path)
    cli("rounds", tmp_path / "exp", "--to", "1").ok()
    cli("average", tmp_path / "exp").ok()
    (tmp_path / "text").write_text("u1 ab cd a\nu2 ccd ab a\n")
    cli("train-lm", tmp_path / "text", tmp_path / "lm", "--order", 2).ok()
    data = world / "valid"
    cli("decode", tmp_path / "exp", data, tmp_path / "greedy").ok()
    cli("decode", tmp_path / "exp", data, tmp_path / "beam", "--lm", tmp_path / "lm").ok()
    found = (tmp_path / "beam" / "nbest.tsv").read_text().split("\n")[:-1]
    assert {word for line in found for word in line.split("\t")[4].split()} <= set(WORDS[2:-1])
    cli("export", tmp_path / "exp", tmp_path / "back").ok()
    exported = yaml.safe_load((tmp_path / "back" / "config.yaml").read_text())
    assert exported["token_type"] == "word" and exported["token_list"] == WORDS


@pytest.mark.parametrize("space", ["\xa0", "\u3000"])
def test_a_token_that_is_a_space_of_another_kind(cli, world, tmp_path, space):
    foreign(tmp_path, [*CHARACTERS[:3], space, *CHARACTERS[3:]])
    take_over(cli, tmp_path).ok()
    tokenizer = begun(cli, world, tmp_path).task.tokenizer
    assert tokenizer.decode([4, 3, 5]) == "a b"
    assert tokenizer.split(f"a{space}b") == ["a", "<space>", "b"]


def test_a_token_list_in_a_file(cli, world, tmp_path):
    foreign(tmp_path, token_list="data/token_list/char/tokens.txt")
    take_over(cli, tmp_path).fails(1, "tokens.txt: cannot be read", "put it next to config.yaml")
    (tmp_path / "tokens.txt").write_text("".join(f"{token}\n" for token in CHARACTERS))
    take_over(cli, tmp_path).ok()
    assert begun(cli, world, tmp_path).task.tokenizer.tokens == CHARACTERS


REFUSED = [
    ({"token_type": "whisper_multilingual"}, "token_type 'whisper_multilingual': only types"),
    ({"token_type": "hugging_face"}, "token_type 'hugging_face'"),
    ({"token_type": "phn", "g2p": "g2p_en"}, "g2p 'g2p_en' is not supported"),
    ({"token_type": "bpe"}, "bpemodel is None"),
    ({"token_type": "bpe", "bpemodel": "none.model"}, "put it next to config.yaml"),
    ({"token_list": 3}, "token_list is not a list"),
    ({"token_list": [*CHARACTERS[:3], "a", *CHARACTERS[3:]]}, "token 5: 'a' is duplicated"),
    ({"token_list": ["<unk>", "<blank>", *CHARACTERS[2:]]}, "token 1: '<blank>' belongs there"),
    ({"token_list": ["<blank>", "<space>", "<unk>", "a", "<sos/eos>"]}, "'<unk>' belongs"),
    ({"token_list": [*CHARACTERS[:-1], "<sos>", "<eos>"]}, "not '<eos>'"),
    ({"token_list": [*CHARACTERS[:3], 7, "<sos/eos>"]}, "token 4: 7 is no token"),
    ({"token_list": [*CHARACTERS[:3], "a b", "<sos/eos>"]}, "token 4: 'a b' is no token"),
    ({"token_list": ["<blank>"]}, "'<unk>' belongs"),
    ({"token_list": []}, "'<blank>' belongs"),
    ({"frontend": "s3prl"}, "frontend 's3prl': the model works on waveforms"),
    ({"input_size": None}, "input_size None: the model works on waveforms"),
    ({"preencoder": "linear"}, "preencoder 'linear' changes what the encoder sees"),
    ({"postencoder": "length_adaptor"}, "postencoder 'length_adaptor'"),
    ({"encoder": "contextual_block_conformer"}, "encoder: unknown option 'contextual_block_conf"),
    ({"encoder": "whisper"}, "encoder: unknown option 'whisper'"),
    ({"normalize": "rms"}, "normalize: unknown option 'rms'"),
    ({"model": "maskctc"}, "model 'maskctc'"),
    ({"preprocessor": "multi"}, "preprocessor 'multi'"),
    ({"cleaner": "tacotron"}, "cleaner 'tacotron'"),
    ({"speech_volume_normalize": 0.5}, "speech_volume_normalize 0.5"),
    ({"use_lang_prompt": True}, "use_lang_prompt True"),
    ({"use_nlp_prompt": True}, "use_nlp_prompt True"),
    ({"use_adapter": True}, "use_adapter True"),
    ({"aux_ctc_tasks": ["phn"]}, "aux_ctc_tasks ['phn']"),
    ({"model_conf": {"ctc_weight": 0.0}}, "ctc_weight 0"),
    ({"model_conf": {"sym_blank": "<b>"}}, "sym_blank '<b>'"),
    ({"ctc_conf": {"ctc_type": "warpctc"}}, "ctc_conf: ctc_type"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_what_would_be_lost_is_refused_by_its_name(cli, tmp_path, options, said):
    foreign(tmp_path, **options) if "token_list" not in options else foreign(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | options))
    take_over(cli, tmp_path).fails(1, said)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_decoders_are_left_out_and_that_is_told(cli, tmp_path):
    foreign(tmp_path, decoder="transducer")
    state = torch.load(tmp_path / "model.pth", weights_only=True)
    more = {"decoder.embed.weight": torch.zeros(2), "joint_network.lin_enc.weight": torch.zeros(2)}
    torch.save(state | more, tmp_path / "model.pth")
    done = take_over(cli, tmp_path).ok()
    assert "left out: 2 tensors of the transducer; CTC alone" in done.out
    torch.save({n: v for n, v in state.items() if n[:3] != "ctc"}, tmp_path / "model.pth")
    take_over(cli, tmp_path).fails(1, "no tensor of a CTC layer")


def test_a_bpe_model_is_the_one_that_the_tokens_are_of(cli, world, tmp_path):
    text = world / "train" / "text"
    for name, size in (("one", 12), ("other", 14)):
        cli("train-tokens", text, tmp_path / name, "--vocab-size", size).ok()
    tokens = (tmp_path / "one" / "tokens.txt").read_text().split("\n")[:-1]
    foreign(tmp_path / "m", tokens, token_type="bpe", bpemodel="exp/bpe.model")
    for name in ("other", "one"):
        (tmp_path / "m" / "bpe.model").write_bytes((tmp_path / name / "bpe.model").read_bytes())
        done = take_over(cli, tmp_path / "m")
        if name == "other":
            done.fails(1, "bpe.model: the model's piece", "is not in")
    begun(cli, world, tmp_path / "m")
