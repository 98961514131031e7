"""An utterance in a batch, against ESPnet's own encoder on it alone."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from espnet.nets.pytorch_backend.transformer.subsampling import TooShortUttError
from espnet2.asr.encoder.branchformer_encoder import BranchformerEncoder
from espnet2.asr.encoder.conformer_encoder import ConformerEncoder
from espnet2.asr.encoder.transformer_encoder import TransformerEncoder
from espnet2.layers.global_mvn import GlobalMVN
from espnet2.layers.utterance_mvn import UtteranceMVN

from fedtools.models.acoustic.asr import (
    build_model,
    log_posteriors,
    losses,
    outputs,
    shortest_input,
)
from fedtools.models.acoustic.extractor import BlockCut
from fedtools.models.acoustic.padding import embed

BINS = 16
ENCODERS = {
    "transformer": TransformerEncoder,
    "conformer": ConformerEncoder,
    "branchformer": BranchformerEncoder,
}
NORMALIZERS = {"utterance_mvn": UtteranceMVN, "global_mvn": GlobalMVN}
# Every remainder of every input layer's step, and some lengths just long enough.
LENGTHS = [140, *range(97, 106), 15, 23, 24]

SIZES = {"output_size": 16, "attention_heads": 2, "num_blocks": 2}
TRANSFORMER = {**SIZES, "linear_units": 24}
CONFORMER = {**TRANSFORMER, "cnn_module_kernel": 7, "macaron_style": True}
BRANCHFORMER = {**SIZES, "cgmlp_linear_units": 24, "cgmlp_conv_kernel": 7}
LATEST = {"rel_pos_type": "latest"}
# Non-default positional encodings, whose options the encoders name differently.
ABSOLUTE = {**LATEST, "pos_enc_layer_type": "abs_pos"}
BY_CONVOLUTION = {"pos_enc_layer_type": "conv"}
WIDE = {"positionwise_layer_type": "conv1d", "positionwise_conv_kernel_size": 3}
LINEAR = {"positionwise_layer_type": "conv1d-linear", "positionwise_conv_kernel_size": 5}

MVN = ("utterance_mvn", {})
VARIANCE = ("utterance_mvn", {"norm_vars": True})
VARIANCE_ALONE = ("utterance_mvn", {"norm_vars": True, "norm_means": False})
GLOBAL = ("global_mvn", {})
GLOBAL_VARIANCE = ("global_mvn", {"norm_means": False})
NONE = (None, {})

CASES = [
    ("transformer", {**TRANSFORMER, "input_layer": layer, **more}, normalize)
    for layer, more, normalize in [
        ("conv2d", {}, MVN),
        ("conv2d", WIDE, VARIANCE),
        ("conv2d1", LINEAR, GLOBAL),
        ("conv2d2", {}, VARIANCE),
        ("conv2d6", {}, NONE),
        ("conv2d8", {}, VARIANCE_ALONE),
        ("conv1d2", BY_CONVOLUTION, GLOBAL_VARIANCE),
        ("linear", BY_CONVOLUTION, VARIANCE),
        ("wav2vec", WIDE, VARIANCE),
        (None, {}, VARIANCE),
    ]
]
CASES += [
    ("conformer", {**CONFORMER, "input_layer": layer, **more}, normalize)
    for layer, more, normalize in [
        ("conv2d", LATEST, VARIANCE),
        ("conv2d", {}, MVN),
        ("conv2d", {"zero_triu": True}, NONE),
        ("conv2d1", {}, GLOBAL),
        ("conv2d2", {**LATEST, "zero_triu": True}, VARIANCE_ALONE),
        ("conv2d6", {**ABSOLUTE, "selfattention_layer_type": "selfattn", **WIDE}, GLOBAL),
        ("conv2d8", {**LATEST, **LINEAR}, GLOBAL_VARIANCE),
        ("linear", {**BY_CONVOLUTION, "selfattention_layer_type": "selfattn"}, MVN),
        (None, {}, VARIANCE),
    ]
]
CASES += [
    ("branchformer", {**BRANCHFORMER, "input_layer": layer, **more}, normalize)
    for layer, more, normalize in [
        ("conv2d", {}, VARIANCE),
        ("conv2d", {"rel_pos_type": "legacy", "use_linear_after_conv": True}, MVN),
        ("conv2d1", {"merge_method": "learned_ave"}, GLOBAL),
        ("conv2d2", {**ABSOLUTE, "attention_layer_type": "fast_selfattn"}, VARIANCE),
        ("conv2d6", {"merge_method": "fixed_ave", "cgmlp_weight": 0.3}, NONE),
        ("conv2d8", {"rel_pos_type": "legacy", "merge_method": "learned_ave"}, VARIANCE_ALONE),
        ("linear", {**ABSOLUTE, "attention_layer_type": "selfattn"}, GLOBAL_VARIANCE),
    ]
]


@pytest.fixture(scope="module")
def statistics(tmp_path_factory) -> str:
    """Write an ESPnet statistics file for global_mvn."""
    path = tmp_path_factory.mktemp("statistics") / "feats_stats.npz"
    mean = np.arange(BINS) / 2
    np.savez(path, count=10, sum=10 * mean, sum_square=10 * (mean**2 + 1 + np.arange(BINS)))
    return str(path)


def utterances(lengths: list[int]) -> list[torch.Tensor]:
    """Return speech whose mean is far from 0."""
    random = torch.Generator().manual_seed(1)
    bias = 5 + torch.arange(BINS) / 4
    return [torch.randn(length, BINS, generator=random) * 2 + bias for length in lengths]


def batch_of(speech: list[torch.Tensor], padding: float = 0.0) -> dict[str, torch.Tensor]:
    return {
        "speech": torch.nn.utils.rnn.pad_sequence(speech, True, padding_value=padding),
        "speech_lengths": torch.tensor([len(one) for one in speech]),
    }


def model_of(encoder: str, options: dict, normalize: tuple, statistics: str) -> torch.nn.Module:
    name, conf = normalize
    conf = {**conf, "stats_file": statistics} if name == "global_mvn" else conf
    config = {"input_size": BINS, "encoder": encoder, "encoder_conf": options}
    if name:
        config |= {"normalize": name, "normalize_conf": conf}
    torch.manual_seed(0)
    model = build_model(config, ["<blank>", "a", "b", "<sos/eos>"]).eval()
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm1d):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
    return model


def alone_in_espnet(
    model: torch.nn.Module, encoder: str, options: dict, normalize: tuple, statistics: str
):
    """Return log posteriors of lone utterances by ESPnet's classes, with the model's parameters."""
    own = ENCODERS[encoder](input_size=BINS, **options).eval()
    own.load_state_dict(model.encoder.state_dict())
    name, conf = normalize
    conf = {**conf, "stats_file": statistics} if name == "global_mvn" else conf
    normalizer = NORMALIZERS[name](**conf) if name else lambda x, lengths: (x, lengths)

    @torch.no_grad()
    def heard(speech: torch.Tensor) -> torch.Tensor:
        encoded, lengths, _ = own(*normalizer(speech[None].clone(), torch.tensor([len(speech)])))
        assert lengths.tolist() == [encoded.shape[1]]
        return model.ctc.log_softmax(encoded)[0]

    return heard


@pytest.mark.parametrize(("encoder", "options", "normalize"), CASES)
def test_in_a_batch_as_alone(encoder, options, normalize, statistics):
    """Lengths are equal and log posteriors within 1e-4, whatever follows an utterance's end."""
    model = model_of(encoder, options, normalize, statistics)
    heard = alone_in_espnet(model, encoder, options, normalize, statistics)
    speech = utterances(LENGTHS)
    batch = batch_of(speech, padding=7.0)
    with torch.no_grad():
        # A copy works too: some methods keep one.
        found = [log_posteriors(copy.deepcopy(model), batch)]
        # Cut in two as by DecoupleFL, with the extractor's output padded again.
        features, lengths = BlockCut(1).extract(model, batch)
        parts = [one[:length] for one, length in zip(features, lengths.tolist(), strict=True)]
        parts = torch.nn.utils.rnn.pad_sequence(parts, True)
        found.append((BlockCut(1).classify(model, parts, lengths), lengths))
        for row, one in enumerate(speech):
            wanted = heard(one)
            for log_probs, lengths in found:
                assert lengths[row] == len(wanted)
                torch.testing.assert_close(log_probs[row, : len(wanted)], wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("layer", "least"),
    [("conv2d", 7), ("conv2d1", 5), ("conv2d2", 7), ("conv2d6", 11), ("conv2d8", 15)],
)
def test_too_short_in_a_batch_as_alone(layer, least):
    """ESPnet refuses a lone utterance without one frame; a batch does not hide it."""
    model = model_of("conformer", {**CONFORMER, "input_layer": layer}, NONE, "")
    assert shortest_input(model) == least
    with torch.no_grad():
        _, lengths = log_posteriors(model, batch_of(utterances([90, least])))
        assert lengths[1] == 1
        for speech in (utterances([least - 1]), utterances([90, least - 1])):
            with pytest.raises(TooShortUttError, match=str(least)):
                log_posteriors(model, batch_of(speech))


def test_one_hundred_and_one_frames():
    """24 frames of conv2d, by hand: 50 and then 24 windows of three frames, every second one."""
    model = model_of("transformer", {**TRANSFORMER, "input_layer": "conv2d"}, NONE, "")
    speech = batch_of(utterances([200, 101, 101]))
    with torch.no_grad():
        for lengths in (
            log_posteriors(model, speech)[1],
            embed(model.encoder, speech["speech"], speech["speech_lengths"])[1].sum((1, 2)),
        ):
            assert lengths.tolist() == [49, 24, 24]


def test_padding_has_no_gradient():
    """In training, too, an utterance's loss and gradient do not depend on its padding.

    With a transformer, since a conformer's BatchNorm statistics are of all frames.
    """
    options = {**TRANSFORMER, **WIDE, "dropout_rate": 0.0, "positional_dropout_rate": 0.0}
    model = model_of("transformer", options, VARIANCE, "").train()
    speech = utterances([80, 53])
    text = {"text": torch.tensor([[1, 2], [2, 1]]), "text_lengths": torch.tensor([2, 2])}
    gradients = []
    for batches in ([speech], [speech[:1], speech[1:]]):
        model.zero_grad()
        for part in batches:
            batch = batch_of(part) | {name: value[: len(part)] for name, value in text.items()}
            if part is batches[-1] and len(batches) == 2:
                batch |= {name: value[1:] for name, value in text.items()}
            losses(model, *outputs(model, batch), batch).sum().backward()
        gradients.append([value.grad.clone() for value in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_after_a_longer_utterance_than_positions_there_are():
    """A longer one enlarges ESPnet's table of older relative positions and shifts its indexing."""
    options = {**CONFORMER, "input_layer": "conv2d", "max_pos_emb_len": 30}
    model = model_of("conformer", options, NONE, "")
    heard = alone_in_espnet(model, "conformer", options, NONE, "")
    (short,) = utterances([80])
    wanted = heard(short)
    with torch.no_grad():
        log_posteriors(model, batch_of(utterances([300])))
        found, _ = log_posteriors(model, batch_of([short]))
    torch.testing.assert_close(found[0], wanted, atol=1e-5, rtol=0)
