"""Pretrained encoders: equal to transformers on the same audio, whatever the padding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from pretrained_models import save_wave, save_whisper
from torch import Tensor, nn

from fedtools.audio.log_mel import LogMel
from fedtools.models.acoustic.asr import build_model
from fedtools.models.adapt.adaptation import Adapt
from fedtools.models.keywords import build_network
from fedtools.models.pretrained.build import build_encoder
from fedtools.models.pretrained.folder import Folder

KINDS = ("Wav2Vec2", "Hubert", "WavLM")
WAVES = [(kind, norm) for kind in KINDS for norm in ("layer", "group")]
LENGTHS = torch.tensor([30, 703, 1304, 2000])
TOKENS = ("<blank>", "a", "b")


@pytest.fixture(scope="module", params=WAVES, ids="-".join)
def wave(request, tmp_path_factory) -> Path:
    return save_wave(tmp_path_factory.mktemp("wave"), *request.param)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory) -> Path:
    return save_whisper(tmp_path_factory.mktemp("whisper"))


def encoder_of(folder: Path, window: int = 1, **adapt) -> nn.Module:
    how = Adapt(**{"kind": "none", **adapt})
    return build_encoder(Folder.open(folder), how, None, window)[0].eval()


def waves(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1)) - 0.3


def theirs(folder: Path, audio: Tensor) -> Tensor:
    """Return transformers' output for unmodified waveforms, (N, samples)."""
    extract = transformers.Wav2Vec2FeatureExtractor.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    given = extract(list(audio.numpy()), sampling_rate=16_000, return_tensors="pt")
    with torch.no_grad():
        return model(given.input_values).last_hidden_state


def assert_as_alone(encoder: nn.Module, inputs: Tensor, lengths: Tensor, within: float) -> None:
    """Check that each row of a batch, with any padding, equals the row alone."""
    found, numbers = encoder(inputs, lengths)
    for row, length in enumerate(lengths.tolist()):
        alone, [number] = encoder(inputs[row : row + 1, :length])
        assert number == numbers[row] == alone.shape[1]
        torch.testing.assert_close(found[row, :number], alone[0], rtol=0, atol=within)


def test_waves_are_encoded_as_by_transformers(wave):
    audio = waves(2, 2000)
    with torch.no_grad():
        found, lengths = encoder_of(wave)(audio[..., None])
    assert lengths.tolist() == [found.shape[1]] * 2
    torch.testing.assert_close(found, theirs(wave, audio), rtol=0, atol=1e-5)


def test_padding_changes_nothing(wave):
    encoder, audio = encoder_of(wave), waves(4, 2000, 1)
    with torch.no_grad():
        assert_as_alone(encoder, audio, LENGTHS, 1e-5)
        assert_as_alone(encoder.double(), audio.double(), LENGTHS, 1e-10)


def test_convolutions_begin_with_a_batch_normalisation(tmp_path):
    folder = save_wave(tmp_path / "h", "Hubert", "layer", conv_pos_batch_norm=True)
    encoder, audio = encoder_of(folder), waves(4, 2000, 1)
    with torch.no_grad():
        ours = encoder(audio)[0]
        assert_as_alone(encoder.double(), audio.double(), LENGTHS, 1e-10)
    torch.testing.assert_close(ours, theirs(folder, audio[..., 0]), rtol=0, atol=1e-5)


def test_waves_are_normalised_where_the_folder_says_so(tmp_path):
    folder = save_wave(tmp_path / "w", norm="layer")
    audio = waves(1, 800)
    louder = 3 * audio + 1
    with torch.no_grad():
        normal = encoder_of(folder)
        torch.testing.assert_close(
            normal(louder[..., None])[0], normal(audio[..., None])[0], rtol=0, atol=1e-4
        )
        # What is hardly heard is not as loud as speech, and silence stays silence.
        for quiet in (1e-4 * audio, 0 * audio):
            found = normal(quiet[..., None])[0]
            torch.testing.assert_close(found, theirs(folder, quiet), rtol=0, atol=1e-5)
        read = json.loads((folder / "preprocessor_config.json").read_text())
        (folder / "preprocessor_config.json").write_text(json.dumps(read | {"do_normalize": False}))
        plain = encoder_of(folder)
        for one in (audio, louder):
            found = plain(one[..., None])[0]
            torch.testing.assert_close(found, theirs(folder, one), rtol=0, atol=1e-5)


def test_a_model_with_a_head_has_the_same_encoder(tmp_path):
    folder = save_wave(tmp_path / "ctc", head="ForCTC")
    audio = waves(1, 800)
    with torch.no_grad():
        found = encoder_of(folder)(audio[..., None])[0]
    torch.testing.assert_close(found, theirs(folder, audio), rtol=0, atol=1e-5)


def test_adapters_of_attention_are_called(wave):
    torch.manual_seed(0)
    for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
        encoder, audio = encoder_of(wave, kind="lora", targets=(f"*{part}",)), waves(2, 800, 1)
        before = encoder(audio)[0]
        for name, value in encoder.named_parameters():
            assert part in name
            value.data.add_(torch.randn_like(value))
        after = encoder(audio)[0]
        assert (after - before).abs().max() > 1e-3
        after.square().sum().backward()
        grads = {name: value.grad for name, value in encoder.named_parameters()}
        assert len(grads) == 6
        assert all(grad is not None and grad.abs().max() > 0 for grad in grads.values()), grads


@pytest.mark.parametrize(("kind", "norm"), [("WavLM", "group"), ("Wav2Vec2", "group")])
def test_a_stack_is_as_its_clients_one_by_one(tmp_path, kind, norm):
    folder = save_wave(tmp_path / kind, kind, norm)
    config = {"network": "hf", "path": str(folder), "adapt": {"kind": "full"}}
    both, one = (build_network(config, 4, "x", clients=n).double().eval() for n in (2, 1))
    torch.manual_seed(0)
    for value in both.parameters():
        value.data.add_(torch.randn_like(value) * 0.1)
    audio = waves(2, 3, 800, 1).double()
    with torch.no_grad():
        found = both(audio)
        for client in range(2):
            for name, value in one.state_dict().items():
                value.copy_(both.state_dict()[name][client : client + 1])
            alone = one(audio[client : client + 1])
            torch.testing.assert_close(found[client], alone[0], rtol=1e-10, atol=1e-10)


def test_what_is_trained_in_full_is_the_whole_encoder(wave):
    model = transformers.AutoModel.from_pretrained(wave)
    encoder = encoder_of(wave, kind="full")
    ours = sum(value.numel() for value in encoder.parameters())
    # Direction and length of the weight-normalised kernel, and the embedding of masked frames.
    length = model.encoder.pos_conv_embed.conv.parametrizations.weight.original0.numel()
    assert ours == sum(p.numel() for p in model.parameters()) - length - encoder.size
    assert not encoder_of(wave).state_dict()


@pytest.mark.parametrize("kind", ["whisper", "wave"])
def test_frozen_parts_draw_nothing_in_training(tmp_path, kind):
    drop = dict.fromkeys(("attention_dropout", "activation_dropout"), 0.5)
    if kind == "whisper":
        folder = save_whisper(tmp_path / "w", dropout=0.5, encoder_layerdrop=0.5, **drop)
        speech = waves(1, 200, 80)
    else:
        drop |= {"layerdrop": 0.5, "mask_time_prob": 0.5, "apply_spec_augment": True}
        drop |= {"hidden_dropout": 0.5, "feat_proj_dropout": 0.5}
        folder = save_wave(tmp_path / "w", **drop)
        speech = waves(1, 2000, 1)
    config = {"network": "hf", "path": str(folder), "adapt": {"kind": "none"}}
    model = build_model(config, TOKENS).train()
    lengths = torch.tensor([speech.shape[1]])
    before = torch.random.get_rng_state()
    first, second = (model.encode(speech, lengths)[0] for _ in range(2))
    assert torch.equal(first, second) and torch.equal(before, torch.random.get_rng_state())
    network = build_network(config, 4, "x").train()
    assert torch.equal(network(speech[None]), network(speech[None]))


def test_specaugment_masks_what_the_convolutions_give(tmp_path):
    folder = save_wave(tmp_path / "w")
    options = {"apply_time_warp": False, "time_mask_width_range": [10, 20], "num_time_mask": 1}
    model = {"network": "hf", "path": str(folder), "specaug": "specaug", "specaug_conf": options}
    built, speech = build_model(model, TOKENS), waves(1, 2000, 1)
    given, lengths = speech.clone(), torch.tensor([2000])
    seen = []
    built.specaug.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape))
    plain = built.eval().encode(given, lengths)[0]
    masked = built.train().encode(given, lengths)[0]
    assert (plain - masked).abs().max() > 1e-3 and torch.equal(given, speech)
    assert seen == [(1, *plain.shape[1:])]


def test_whisper_is_encoded_as_by_transformers(whisper):
    mel = waves(2, 400, 80)
    model = transformers.WhisperModel.from_pretrained(whisper).eval()
    with torch.no_grad():
        wanted = model.encoder(mel.transpose(1, 2)).last_hidden_state
        found, lengths = encoder_of(whisper)(mel)
    assert lengths.tolist() == [200, 200]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_padding_changes_nothing_for_whisper(whisper):
    encoder, mel, lengths = encoder_of(whisper), waves(3, 400, 80), torch.tensor([100, 300, 400])
    with torch.no_grad():
        assert_as_alone(encoder, mel, lengths, 1e-5)
        assert_as_alone(encoder.double(), mel.double(), lengths, 1e-10)


def test_the_rest_of_a_second_is_silence_to_whisper(whisper):
    clip = waves(1, 20_800) * 1000
    filled = torch.nn.functional.pad(clip, (0, 11_200))
    short, long = LogMel()(clip), LogMel()(filled)
    assert short.shape == (1, 200, 80) and torch.equal(short, long)
    extract = transformers.WhisperFeatureExtractor(chunk_length=2)
    wanted = extract((clip[0] / 32768).numpy(), sampling_rate=16_000, return_tensors="pt")
    torch.testing.assert_close(short, wanted.input_features.transpose(1, 2), rtol=0, atol=1e-4)


def test_a_window_is_filled_with_silence(whisper):
    clips = [waves(1, 20_000) * 1000, waves(1, 50_000) * 200]
    mels = [LogMel()(clip)[0] for clip in clips]
    assert [len(mel) for mel in mels] == [200, 400]
    lengths = torch.tensor([200, 400])
    # The tiny one takes 4 s.
    for window, heard in ((1, (200, 400)), (3, (300, 400)), (10, (400, 400))):
        encoder, batch = encoder_of(whisper, window), torch.full((2, 400, 80), 9.0)
        for row, mel in zip(batch, mels, strict=True):
            row[: len(mel)] = mel
        with torch.no_grad():
            found, positions = encoder(batch, lengths)
            assert_as_alone(encoder.double(), batch.double(), lengths, 1e-10)
            assert positions.tolist() == [frames // 2 for frames in heard]
            assert encoder.positions(lengths.numpy()).tolist() == positions.tolist()
            plain = encoder_of(whisper)
            for row, clip, frames in zip(found, clips, heard, strict=True):
                filled = torch.nn.functional.pad(clip, (0, 160 * frames - clip.shape[1]))
                wanted = plain(LogMel()(filled))[0][0]
                torch.testing.assert_close(row[: frames // 2], wanted, rtol=0, atol=1e-4)


def test_windows_are_of_ten_seconds_where_a_decoder_writes(tmp_path):
    path, frames = save_whisper(tmp_path / "w", max_source_positions=1500), torch.randn(1, 160, 80)
    # 50 positions a second; without a window, an utterance is as long as it is.
    for criterion, window, positions in (
        ("seq2seq", None, 500), ("seq2seq", 30, 1500), ("seq2seq", 1, 80), ("ctc", None, 80),
    ):  # fmt: skip
        config = {"network": "hf", "path": str(path), "criterion": criterion, "adapt": {}}
        model = build_model(config | ({"window": window} if window else {}), TOKENS)
        assert model.eval().encode(frames, torch.tensor([160]))[1].tolist() == [positions]
