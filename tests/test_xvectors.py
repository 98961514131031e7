"""Attack A2's network, on models whose speakers and differences are known."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from probes import asr_probe

from fedtools.attack.options import A2
from fedtools.attack.speakers.xvectors import (
    Differences,
    Training,
    View,
    XVectors,
    embeddings,
    train_xvectors,
)
from fedtools.core.errors import UserError

TRAINED, HELD_OUT = 16, 8


def moved(begun: dict[str, torch.Tensor], scale: float, seed: int) -> dict[str, torch.Tensor]:
    """Return the model after a random step of all parameters."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: scale * torch.randn(value.shape, generator=random)
        for name, value in begun.items()
        if value.is_floating_point() and "running" not in name
    }


def models_of(probe, own: float, noise: float) -> dict[str, dict[str, torch.Tensor]]:
    """Make two models of each speaker: a step of the speaker's, and one of the model's."""
    begun = copy.deepcopy(probe.models[0].state_dict())
    found = {}
    for speaker in range(TRAINED + HELD_OUT):
        step = moved(begun, own, speaker)
        for model in (0, 1):
            more = moved(begun, noise, 1000 + 2 * speaker + model)
            found[f"s{speaker:02d}-{model}"] = {
                name: begun[name] + step[name] + more[name] for name in step
            }
    return found


def averaged(view: View, network: XVectors, training: Training) -> dict[str, np.ndarray]:
    return {name: rows.mean(0) for name, rows in embeddings(view, network, training)}


def error_rate(vectors: dict[str, np.ndarray]) -> float:
    """Return how often a model's nearest other one, by cosine, is of another speaker, in %."""
    names = list(vectors)
    rows = np.stack([vectors[name] for name in names])
    rows -= rows.mean(0)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    near = (rows @ rows.T - 2 * np.eye(len(rows))).argmax(1)
    return 100 * np.mean([names[i][:3] != names[k][:3] for i, k in enumerate(near)])


@pytest.mark.parametrize(("own", "expected"), [(0.05, (0, 20)), (0.0, (60, 100))])
def test_speakers_that_were_not_trained_on_are_told(own, expected):
    probe = asr_probe("tdnn", 6)
    models = models_of(probe, own, 0.01)
    speakers = {name: name[:3] for name in models if int(name[1:3]) < TRAINED}
    asked = []

    def states(names: Sequence[str]) -> Iterator:
        asked.extend(names)
        return ((name, models[name]) for name in names)

    training = Training(2, A2(width=32, epochs=20, utterances=2))
    network = train_xvectors([View(probe, states, speakers)], training)
    assert set(asked) == set(speakers)
    others = {name: name[:3] for name in models if name not in speakers}
    found = averaged(View(probe, states, others), network, training)
    assert list(found) == list(others)
    least, most = expected
    assert least <= error_rate(found) <= most
    # However many models are held at a time.
    again = averaged(View(asr_probe("tdnn", 5), states, others), network, training)
    for name in others:
        np.testing.assert_allclose(again[name], found[name], rtol=1e-4, atol=1e-5)


def test_a_step_is_never_of_a_single_piece():
    """Seven models, six at a time, on three utterances, two at a time, leave one of both."""
    probe = asr_probe("tdnn", 6)
    models = dict(list(models_of(probe, 0.05, 0.01).items())[:7])
    speakers = {name: name[:3] for name in models}

    def states(names: Sequence[str]) -> Iterator:
        return ((name, models[name]) for name in names)

    view = View(probe, states, speakers)
    network = train_xvectors([view], Training(2, A2(width=8, utterances=2)))
    assert all(value.isfinite().all() for value in network.state_dict().values())
    alone = probe._replace(inputs=lambda: iter([next(probe.inputs())]))
    with pytest.raises(UserError, match="the Indicator has only one utterance; give at"):
        train_xvectors([View(alone, states, speakers)], Training(2, A2(width=8)))


def test_differences_are_equation_1():
    probe = asr_probe("tdnn", 2)
    begun = copy.deepcopy(probe.models[0].state_dict())
    for model in probe.models[1:]:
        model.load_state_dict({**begun, "encoder.layers.1.affine.bias": torch.full((8,), 2.0)})
    for part in ("relu", "norm"):
        differences = Differences(probe, 2, part)
        found = differences.of(2, differences.inputs[1])
        assert found.shape == (2, 11, 8)
        assert torch.equal(found[0], found[1])
    # Before the nonlinearity, only a bias changes.
    before = []
    layer = probe.models[0].encoder.layers[1].affine
    handle = layer.register_forward_hook(lambda _, __, out: before.append(out[0].T))
    found = Differences(probe, 2, "relu").of(1, differences.inputs[0])[0]
    handle.remove()
    more = 2.0 - begun["encoder.layers.1.affine.bias"]
    expected = (before[-1] + more).relu() - before[-1].relu()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    # Below the changed layer there is no difference.
    assert not Differences(probe, 1, "relu").of(1, differences.inputs[0]).any()


def test_models_of_every_round_are_trained_on():
    """Each view's models are used once in each epoch."""
    probe, views, asked = asr_probe("tdnn", 3), [], []
    models = models_of(probe, 0.05, 0.01)

    def states(names: Sequence[str]) -> Iterator:
        asked.extend(names)
        return ((name, models[name]) for name in names)

    names = list(models)
    for some in (names[:6], names[6:10]):
        views.append(View(probe, states, {name: name[:3] for name in some}))
    train_xvectors(views, Training(2, A2(width=8, epochs=3, utterances=2)))
    assert Counter(asked) == dict.fromkeys(names[:10], 3)


def test_embeddings_are_of_single_utterances():
    """They are in order, of different lengths, and equal plain hooks, one model at a time."""
    probe = asr_probe("tdnn", 2)
    models = dict(list(models_of(probe, 0.5, 0.1).items())[:3])
    speakers = {name: name[:3] for name in models}

    def states(names: Sequence[str]) -> Iterator:
        return ((name, models[name]) for name in names)

    torch.manual_seed(1)
    network = XVectors(8, 16, 3).eval()
    begun, model = probe.models[0].state_dict(), copy.deepcopy(probe.models[0])
    found = dict(embeddings(View(probe, states, speakers), network, Training(2)))
    assert list(found) == list(models)
    seen: list[torch.Tensor] = []
    model.encoder.layers[1].relu.register_forward_hook(lambda *given: seen.append(given[2]))
    for name, state in models.items():
        each = []
        for frames in probe.inputs():
            seen.clear()
            for values in (begun, {**begun, **state}):
                model.load_state_dict(values)
                with torch.no_grad():
                    model.encode(frames.clone(), torch.tensor([frames.shape[1]]))
            apart = (seen[1] - seen[0]).transpose(1, 2)
            with torch.no_grad():
                each.append(network.embed(apart)[0].double().numpy())
        assert len(each) == 3 and np.ptp(each, 0).max() > 1e-3
        np.testing.assert_allclose(found[name], each, atol=1e-5)


def test_what_is_not_finite_is_refused_or_told(capsys):
    """A model with finite weights and non-finite activations is refused, or reported."""
    probe = asr_probe("tdnn", 3)
    models = dict(list(models_of(probe, 0.05, 0.01).items())[:4])
    models["s00-1"]["encoder.layers.0.affine.weight"] *= 1e38
    speakers = {name: name[:3] for name in models}

    def states(names: Sequence[str]) -> Iterator:
        return ((name, models[name]) for name in names)

    torch.manual_seed(1)
    network = XVectors(8, 16, 2).eval()
    view = View(probe, states, speakers)
    assert [name for name, _ in embeddings(view, network, Training(2))] == [
        "s00-0",
        "s01-0",
        "s01-1",
    ]
    assert "s00-1: refused: embeddings are not finite" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"attack A2, layer 2: the loss is nan; lower a2\.rate"):
        train_xvectors([view], Training(2, A2(width=8, epochs=1)))
