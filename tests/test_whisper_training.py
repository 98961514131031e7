"""What a Whisper is trained on: prompts, labels, windows; a round against transformers' loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import kaldiio
import numpy as np
import pytest
import simulated
import torch
import transformers
import yaml
from conftest import inside
from pretrained_models import IDS, save_recogniser
from safetensors.torch import load_file
from torch import Tensor

from fedtools.data.ark import write_ark
from fedtools.data.datadir import DataDir
from fedtools.federation.federation import Federation
from fedtools.lm.whisper_tokens import WhisperTokens
from fedtools.models.acoustic.asr import outputs
from fedtools.models.pretrained.encoders import WhisperEncoder
from fedtools.models.pretrained.whisper import Whisper
from fedtools.tasks.asr.data import Utterances
from fedtools.tasks.parts import CORPUS, MODELS

START, END, NO_TIMES = (
    IDS[mark] for mark in ("<|startoftranscript|>", "<|endoftext|>", "<|notimestamps|>")
)
# The longest input of the models here: two seconds.
FRAMES = 200
RATE = 0.5


def several(folder: Path, languages: list[str]) -> Path:
    """Save a multilingual model, which can translate, too."""
    path = save_recogniser(folder, multilingual=True, bins=simulated.BINS)
    where = path / "generation_config.json"
    settings = json.loads(where.read_text())
    settings["task_to_id"] |= {"translate": IDS["z"]}
    settings["lang_to_id"] = {f"<|{one}|>": IDS[f"<|{one}|>"] for one in languages}
    where.write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize("default", [None, "en", "de"])
def test_each_utterance_has_the_prompt_of_its_language(tmp_path, default):
    """That of utt2lang, in any order, and the default only where there is none; to transcribe."""
    folder = several(tmp_path / "w", ["de", "en"])
    data = DataDir.read(simulated.data_dir(tmp_path / "d", ["au"], 4, log_mel=True))
    spoken = dict(zip(data.utterances, ["de", "en", "de", "en"], strict=True))
    if default:
        spoken.popitem()
    data.others["utt2lang"] = spoken
    tokens = WhisperTokens.load(folder, default)
    for names in (data.utterances, data.utterances[::-1], data.utterances[1:]):
        found = Utterances(data, names, tokens, 10**6)
        batch = found.load(range(len(names)))
        for name, prompt in zip(names, batch["prompt"].tolist(), strict=True):
            language = IDS[f"<|{spoken.get(name, default)}|>"]
            assert prompt == [START, language, IDS["<|transcribe|>"], NO_TIMES]


def test_nothing_is_dropped_in_training(tmp_path):
    """transformers drops values in all places; an encoder and a decoder here in none."""
    often = {"dropout": 0.5, "attention_dropout": 0.5, "activation_dropout": 0.5}
    sizes = {"bins": simulated.BINS, "max_source_positions": FRAMES // 2}
    folder = save_recogniser(tmp_path / "w", **sizes, **often, encoder_layerdrop=0.5)
    model = Whisper({"network": "hf", "path": str(folder), "adapt": {"kind": "full"}}, "x", None)
    theirs = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    mel, text = torch.randn(1, FRAMES, simulated.BINS), [3, 1, 4]
    given = torch.tensor([[START, NO_TIMES, *text]])
    with torch.no_grad():
        logits = theirs(input_features=mel.transpose(1, 2), decoder_input_ids=given).logits
    wanted = torch.nn.functional.cross_entropy(
        logits[0, 1:], torch.tensor([*text, END]), reduction="sum"
    )
    batch = {"prompt": torch.tensor([[START, NO_TIMES]]), "text": torch.tensor([text])}
    batch["text_lengths"] = torch.tensor([len(text)])
    found = model.train().losses(*model.encode(mel, torch.tensor([FRAMES])), batch)
    torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-4)


def in_window(mel: Tensor) -> Tensor:
    """Return features up to the end of the window: silence is 80 dB below the loudest."""
    silence = mel.max() - 2
    return torch.nn.functional.pad(mel, (0, 0, 0, FRAMES - len(mel)), value=silence.item())


def test_silence_of_a_window_is_that_of_the_audio_itself(tmp_path):
    """SpecAugment hides the loudest frames of the audio, not of what silence is measured on."""
    folder = save_recogniser(tmp_path / "w", bins=simulated.BINS, max_source_positions=FRAMES // 2)
    theirs = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    mel = torch.randn(120, simulated.BINS).tanh()
    mel[30] = 3.0

    def quiet(frames: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        hidden = frames.clone()
        hidden[:, 25:35] = 0.0
        return hidden, lengths

    expected = in_window(mel)
    expected[25:35] = 0.0
    with torch.no_grad():
        wanted = theirs.model.encoder(expected.T[None]).last_hidden_state
        encoder = WhisperEncoder(theirs.model.encoder, 2)
        found, lengths = encoder(mel[None], torch.tensor([120]), quiet)
    assert lengths.tolist() == [FRAMES // 2]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("whisper") / "w"
    return save_recogniser(path, bins=simulated.BINS, max_source_positions=FRAMES // 2)


@pytest.fixture(scope="module")
def begin(folder, tmp_path_factory) -> Callable[..., Path]:
    """Return a function that makes an experiment of one client with utterances of 1 and 2 s."""
    root, random = tmp_path_factory.mktemp("world"), np.random.default_rng(0)
    data, matrices, count = DataDir(root / "train"), [], iter(range(99))
    for number, (words, frames) in enumerate(
        {"ab c": 200, "d": 100, "bad": 100, "e f": 200}.items()
    ):
        name = f"au-{number}"
        data.text[name], data.utt2spk[name], data.utt2client[name] = words, "au", "au"
        matrices.append((name, random.uniform(-1, 0.9, (frames, simulated.BINS)).astype("f4")))
    data.path.mkdir()
    data.feats_scp = write_ark(data.path / "feats.ark", matrices)
    data.write()

    def make(*settings: str) -> Path:
        model = {"network": "hf", "path": str(folder), "criterion": "seq2seq", "window": 2}
        training = {"optim": "sgd", "optim_conf": {"lr": RATE}, "grad_clip": 0.0}
        config = {"task": "asr", "model": model | {"adapt": {"kind": "full"}}, "rounds": 1}
        (root / "c.yaml").write_text(yaml.safe_dump(config | {"training": training}))
        more = [word for one in settings for word in ("--set", one)]
        path = root / f"e{next(count)}"
        inside(
            *("init", path, "--config", root / "c.yaml", "--method", "fedavg", *more),
            *("--data", f"train={root / 'train'}", "--asset", f"tokens={folder}"),
        ).ok()
        return path

    return make


def transcripts(path: Path) -> dict[str, list[int]]:
    """Return the tokens of a text: letters, each word after a blank."""
    lines = (line.split() for line in (path / "text").read_text().splitlines())
    return {name: [IDS[one] for word in words for one in ("Ġ", *word)] for name, *words in lines}


def test_a_round_in_a_window_is_a_step_on_transformers_loss(begin, folder):
    """Of all utterances at once, each by itself in their model; with silence up to 2 s."""
    path = begin()
    train = path.parent / "train"
    theirs = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    theirs.model.encoder.embed_positions.requires_grad_(False)
    features, losses = kaldiio.load_scp(str(train / "feats.scp")), []
    texts = transcripts(train)
    assert len({len(features[name]) for name in texts}) > 1
    for name, tokens in texts.items():
        mel = in_window(torch.tensor(features[name]))
        row = torch.tensor([[START, NO_TIMES, *tokens, END]])
        labels = row[:, 1:].clone()
        labels[0, 0] = -100
        mean = theirs(input_features=mel.T[None], decoder_input_ids=row[:, :-1], labels=labels).loss
        losses.append(mean * (len(tokens) + 1))
    torch.stack(losses).mean().backward()
    inside("rounds", path).ok()
    found = load_file(path / "round_0002/global.safetensors")
    moved = 0
    for name, value in theirs.model.named_parameters():
        if value.requires_grad and name in found:
            expected = value.detach() - RATE * value.grad
            torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=2e-5)
            moved += (found[name] - value).abs().max().item() > 1e-3
    assert moved > 20


def test_a_teachers_labels_are_its_own_for_each_utterance_of_a_batch(begin):
    """Encoder and decoder are the teacher's, and utterances of other lengths change nothing."""
    path = begin("training.search.no_repeat_ngram_size=0", "model.window=1")
    task = Federation(path).task
    models, data = task.need(MODELS), task.need(CORPUS).utterances("train", "au")
    student, teacher = models.build(), models.build(use="teacher")
    with torch.no_grad():
        torch.manual_seed(3)
        for value in teacher.parameters():
            value.add_(torch.randn_like(value) * 0.3)
        for value in student.parameters():
            value.zero_()
    theirs = transformers.WhisperForConditionalGeneration.from_pretrained(
        task.experiment.options.model["path"]
    )
    theirs.model.load_state_dict(teacher.state_dict(), strict=False)
    theirs.eval()
    batch = data.load(range(len(data)))
    lengths = batch["speech_lengths"].tolist()
    assert len(set(lengths)) > 1
    with torch.no_grad():
        found = models.transcribe(teacher, outputs(teacher, batch), batch)
        encoded = [
            whole_encoder(theirs, batch["speech"][row, :length])
            for row, length in enumerate(lengths)
        ]
    assert found == [by_greedy(theirs, one) for one in encoded]
    assert len({tuple(one) for one in found}) > 1


def whole_encoder(theirs, mel: Tensor) -> Tensor:
    """Return their encoder's output for less than a window, by its own layers."""
    encoder = theirs.model.encoder
    hidden = torch.nn.functional.gelu(encoder.conv1(mel.T[None]))
    hidden = torch.nn.functional.gelu(encoder.conv2(hidden)).transpose(1, 2)
    hidden = hidden + encoder.embed_positions.weight[: hidden.shape[1]]
    for layer in encoder.layers:
        hidden = layer(hidden, None)
    return encoder.layer_norm(hidden)


def by_greedy(theirs, encoded: Tensor) -> list[int]:
    """Return the most probable tokens, one after the other."""
    said = [START, NO_TIMES]
    while len(said) < 40:
        with torch.no_grad():
            given = torch.tensor([said])
            logits = theirs(encoder_outputs=(encoded,), decoder_input_ids=given).logits
        if (best := int(logits[0, -1].argmax())) == END:
            break
        said.append(best)
    return said[2:]
