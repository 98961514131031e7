"""The time delay network: against the plain formula, frame by frame."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedtools.models.acoustic.asr import build_model, log_posteriors, shortest_input
from fedtools.models.acoustic.tdnn import TdnnEncoder

TOKENS = ["<blank>", "a", "b", "<sos/eos>"]
SMALL = {"output_size": 8, "contexts": [1, 1, 3, 3]}


def model(**options):
    torch.manual_seed(0)
    config = {"input_size": 5, "encoder": "tdnn", "encoder_conf": {**SMALL, **options}}
    return build_model(config, TOKENS)


def by_hand(encoder: TdnnEncoder, frames: np.ndarray) -> np.ndarray:
    """Return every third frame of the last layer, from frames t - c, t, t + c one layer below."""
    mean, var = (getattr(encoder.scale, f"running_{name}").numpy() for name in ("mean", "var"))
    values = (frames - mean) / np.sqrt(var + encoder.scale.eps)
    for layer, context in zip(encoder.layers, SMALL["contexts"], strict=True):
        weight = layer.affine.weight.detach().numpy()
        mean, var = (getattr(layer.norm, f"running_{name}").numpy() for name in ("mean", "var"))

        def at(frame: int, values=values) -> np.ndarray:
            return values[frame] if 0 <= frame < len(values) else np.zeros(values.shape[1])

        # Unused frames are computed here all the same.
        rows = []
        for frame in range(len(values)):
            parts = (weight[:, :, k] @ at(frame + (k - 1) * context) for k in range(3))
            hidden = np.maximum(sum(parts) + layer.affine.bias.detach().numpy(), 0)
            rows.append((hidden - mean) / np.sqrt(var + layer.norm.eps))
        values = np.array(rows)
    return values[::3]


@pytest.mark.parametrize("length", [1, 2, 3, 20, 21])
def test_frames_are_those_of_the_formula(length):
    network = model()
    for norm in [network.encoder.scale, *(layer.norm for layer in network.encoder.layers)]:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    speech = torch.randn(1, length, 5)
    with torch.no_grad():
        found, lengths, _ = network.encoder.eval()(speech, torch.tensor([length]))
    assert lengths.tolist() == [-(-length // 3)]
    expected = by_hand(network.encoder, speech[0].numpy())
    np.testing.assert_allclose(found[0].numpy(), expected, atol=1e-4)


@pytest.mark.parametrize("fixed", [False, True])
def test_a_fixed_scale_is_used_in_training_and_not_changed(fixed):
    encoder = model(fixed_scale=fixed).train().encoder
    encoder.scale.running_mean.fill_(3.0)
    speech = torch.randn(2, 20, 5)
    with torch.no_grad():
        one, _, _ = encoder(speech, torch.tensor([20, 20]))
        shifted, _, _ = encoder(speech + 1, torch.tensor([20, 20]))
    assert encoder.layers[0].norm.training
    assert (encoder.scale.running_mean == 3).all() == fixed
    # A batch's own mean would cancel a constant added to all frames.
    assert torch.allclose(one, shifted, atol=1e-4) != fixed


def test_padding_is_not_heard():
    network = model().eval()
    speech, lengths = torch.randn(3, 40, 5), torch.tensor([40, 22, 7])
    with torch.no_grad():
        together, frames = log_posteriors(network, {"speech": speech, "speech_lengths": lengths})
        for row, length in enumerate(lengths.tolist()):
            alone = {
                "speech": speech[row : row + 1, :length],
                "speech_lengths": lengths[row : row + 1],
            }
            found, _ = log_posteriors(network, alone)
            assert frames[row] == found.shape[1]
            torch.testing.assert_close(together[row, : frames[row]], found[0], atol=1e-5, rtol=0)
    assert shortest_input(network) == 1


def test_the_papers_size():
    """It has thirteen layers of 512, below 3,664 states, on MFCC and i-vector."""
    encoder = TdnnEncoder(140)
    assert [layer.affine.dilation[0] for layer in encoder.layers] == [1] * 13
    assert [layer.step for layer in encoder.layers] == [1] * 5 + [3] + [1] * 7
    own = sum(value.numel() for value in encoder.parameters())
    assert own == 140 * 512 * 3 + 12 * 512 * 512 * 3 + 13 * 512


@pytest.mark.parametrize(
    ("contexts", "subsampling"), [([], 3), ([3, 1], 3), ([3, 3], 3), ([1, 1], 3), ([1, 3, 2], 3)]
)
def test_contexts_that_do_not_fit_are_refused(contexts, subsampling):
    with pytest.raises(ValueError, match="contexts"):
        TdnnEncoder(5, 8, contexts, subsampling)


def test_all_frames_without_subsampling():
    encoder = TdnnEncoder(5, 8, [1, 2], subsampling=1).eval()
    out, lengths, _ = encoder(torch.randn(1, 9, 5), torch.tensor([9]))
    assert out.shape == (1, 9, 8) and lengths.tolist() == [9]
