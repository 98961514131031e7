"""Read-out of a constant part of a client's input, e.g. an i-vector, from a first layer's update.

A layer y = W [x; c] + b sees c in each frame. The gradient of its weights is then, in the columns
of c, dW_c = db c', and c = dW_c' db / |db|^2. This is exact for one or several steps of SGD, and
nearly so for Adam, whose steps keep little more than the signs of gradients whose signs do not
change. For values that are not constant, the same formula gives a mean over frames, weighted by
their contributions, which reflects a speaker's channel and voice.

Frames of padding contribute to db and not to dW_c. The factor of c is then not db, but the same
direction is read, with the wrong sign if padding contributes most of db.

In a convolution over time, each position of the kernel gives the same. The middle one is read,
which sees no padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fedtools.attack.updates import NotApplicable, Reader, Update
from fedtools.exchange.states import Spec
from fedtools.federation.federation import Federation
from fedtools.models.acoustic.asr import input_kind_of, represent
from fedtools.tasks.parts import CORPUS, MODELS

# Number of frames of the input that shows what the first layer receives.
_FRAMES = 64


@dataclass(frozen=True)
class First:
    """First layer of a network, which sees whole frames and has a bias that changes.

    Attributes:
        path: path of the module.
        shape: shape of the weight: (outputs, inputs) or (outputs, inputs, kernel).
    """

    path: str
    shape: tuple[int, ...]

    @property
    def tensors(self) -> tuple[str, str]:
        """Return the names of weight and bias."""
        return f"{self.path}.weight", f"{self.path}.bias"


def first_layer(federation: Federation, sent: Spec) -> First:
    """Return the first layer of the experiment's models.

    Args:
        sent: the tensors that clients send.

    Raises:
        NotApplicable: if nothing can be read out of it.
    """
    models = MODELS.of(federation.task)
    if models is None:
        raise NotApplicable("clients send no models")
    # In the order of definition, in which the first layer comes first.
    layers = [
        (path, one)
        for path, one in models.build().named_modules()
        if one._parameters or one._buffers or not one._modules
    ]
    state = federation.states.spec
    for number, (path, layer) in enumerate(layers):
        name = f"{path}.weight"
        frozen = getattr(layer, "weight", None)
        shape = state[name][0] if name in state else tuple(getattr(frozen, "shape", ()))
        if len(shape) < 2:
            continue
        if name not in sent:
            adapted = "adapt" in federation.experiment.options.model
            why = "adapters do not change it" if adapted else "clients keep it"
            raise NotApplicable(f"the first layer, {path}, is not sent: {why}")
        if isinstance(layer, nn.Embedding):
            raise NotApplicable(f"the first layer, {path}, is a table of words, without a bias")
        if f"{path}.bias" not in sent:
            raise NotApplicable(f"the first layer, {path}, has no bias")
        if len(shape) == 4 and shape[1] > 1 and shape[2] == 1:
            # A convolution over time, in the layout of `fedtools.models.stacked.Conv1d`.
            shape = (*shape[:2], shape[3])
        if len(shape) > 3:
            problem = "sees patches of its input, and shares its weights over values"
            raise NotApplicable(f"the first layer, {path}, {problem}")
        if number + 1 < len(layers) and "BatchNorm" in type(layers[number + 1][1]).__name__:
            problem = "BatchNorm follows directly and removes the mean: the bias does not change"
            raise NotApplicable(f"the first layer, {path}: {problem}")
        return First(path, shape)
    raise NotApplicable("no layer has weights")


def read_out(updates: Sequence[Update], first: First) -> np.ndarray:
    """Return the read-out of the first layer's input from each update: (models, inputs), float64.

    It is 0 for a model whose bias did not change.
    """
    weight, bias = first.tensors
    outputs, inputs = first.shape[:2]
    found = np.zeros((len(updates), inputs))
    for row, update in zip(found, updates, strict=True):
        with Reader([update]) as reader:
            moved = reader.read(bias, 0, np.empty((1, outputs)))[0]
            values = reader.read(weight, 0, np.empty((1, int(np.prod(first.shape)))))[0]
        row[:] = constant_of(values.reshape(first.shape), moved)
    return found


def constant_of(weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Return dW' db / |db|^2 for updates of a weight, (outputs, inputs[, kernel]), and a bias."""
    if weight.ndim > 2:
        weight = weight[:, :, weight.shape[2] // 2]
    with np.errstate(over="ignore", invalid="ignore"):
        length = float(bias @ bias)
        return weight.T @ bias / length if length else np.zeros(weight.shape[1])


def constant_columns(
    federation: Federation, clients: Iterable[str]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the values that are constant in clients' training data, and differ between clients.

    A value counts as constant if it equals that of the preceding frame in most frames: it is
    constant for a client, a recording or an utterance, or it is of an online i-vector that changes
    now and then, whose mean is then read out.

    No attacker has these data: they serve to evaluate the attack.

    Returns:
        (columns,), indices from 0 of the input's values; and client -> the mean frame, (inputs,).

    Raises:
        NotApplicable: if the input has no frames, or no such value.
    """
    corpus = CORPUS.of(federation.task)
    if corpus is None or input_kind_of(federation.experiment.options.model) == "wave":
        raise NotApplicable("the input has no frames of features")
    data = corpus.read("train")
    held, pairs, means = 0.0, 0, {}
    for client in clients:
        audio = corpus.gather(data, data.client_utterances(client), labelled=False)
        total, frames = 0.0, 0
        for index in range(len(audio)):
            matrix = audio.audio(index)
            # Zeros after an utterance are padding.
            matrix = matrix[matrix.any(1)].astype(np.float64)
            held = held + (np.diff(matrix, axis=0) == 0).sum(0)
            pairs += max(len(matrix) - 1, 0)
            total, frames = total + matrix.sum(0), frames + len(matrix)
        if frames:
            means[client] = total / frames
    if not pairs or not (found := np.flatnonzero((held > pairs / 2) & _differ(means))).size:
        raise NotApplicable("nothing in the clients' input is constant")
    return found, means


def _differ(means: dict[str, np.ndarray]) -> np.ndarray:
    return np.ptp(np.stack(list(means.values())), axis=0) > 0


@torch.no_grad()
def as_first_layer_sees(
    federation: Federation, first: First, number: int, frames: np.ndarray
) -> np.ndarray:
    """Return the input of the first layer of a round's global model for frames: (frames, inputs).

    Scaling and normalisation of the input are applied, as to an utterance of that frame alone.
    """
    federation.load_result(None, number - 1)
    model = federation.task.need(MODELS).build().eval()
    seen: list[torch.Tensor] = []
    layer = model.get_submodule(first.path)
    hook = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    device = next(model.parameters()).device
    found = []
    try:
        for frame in frames:
            speech = torch.tensor(frame, dtype=torch.float32, device=device).expand(1, _FRAMES, -1)
            lengths = torch.tensor([_FRAMES], device=device)
            represent(model, {"speech": speech, "speech_lengths": lengths})
            values = seen.pop()[0]
            # Convolutions have time as the last axis.
            values = values.T if len(first.shape) > 2 else values
            found.append(values[len(values) // 2].double().cpu().numpy())
    finally:
        hook.remove()
    return np.stack(found)
