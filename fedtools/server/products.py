"""The mean of what clients' adapters do: of the products B_k A_k, not of the factors.

With p_k the clients' weights, which sum to 1, and P = sum_k p_k B_k A_k, streamed in float64,

    svd       B A is the matrix of rank r nearest to P (Eckart and Young): B = U S, A = V', of the r
              largest singular values. (J. Bai et al.: Federated fine-tuning of large language
              models under heterogeneous tasks and client resources, FlexLoRA, NeurIPS 2024)
    residual  A = sum_k p_k A_k, B = sum_k p_k B_k, and D, which is added to B A, grows by P - B A,
              so that nothing is lost. (R. Singhal et al.: FedEx-LoRA: exact aggregation for
              federated and efficient fine-tuning of large language models, ACL 2025)

All other tensors, and with `Adapt.combine` "mean" (J. Zhang et al.: Towards building the federated
GPT: federated instruction tuning, FedIT, ICASSP 2024) or "fixed_a" (Y. Sun et al.: Improving LoRA
in privacy-preserving federated learning, FFA-LoRA, ICLR 2024) these too, are left to `combine`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedtools.files.errors import UserError
from fedtools.files.messages import Message, Refusal
from fedtools.files.states import Spec, check_finite, load_state, save_state, spec_of
from fedtools.models.adaptation import DELTA, FACTORS, OF_PRODUCTS
from fedtools.server.aggregate import combine
from fedtools.server.opened import Opened

Weighted = Sequence[tuple[Message, float]]


@dataclass(frozen=True)
class Adapters:
    """What is made of clients' adapters.

    Attributes:
        how: `Adapt.combine`.
        state: the file of what clients began with.
        title: of the line that says what the factors cannot hold.
    """

    how: str
    state: Path
    title: str


def combine_models(
    messages: Sequence[Message],
    weights: Sequence[float],
    out_path: Path,
    spec: Spec,
    adapters: Adapters,
    *,
    min_clients: int = 1,
    **options: Any,
) -> list[Refusal]:
    """`combine`, and then the adapters in what it wrote as their products have it.

    A client whose products are too large for the type of the tensors is refused, too.
    """
    kept, refusals = list(zip(messages, weights, strict=True)), list[Refusal]()
    while True:
        given = [message for message, _ in kept], [weight for _, weight in kept]
        found = combine(*given, out_path, spec, min_clients=min_clients, **options)
        kept = _without(kept, found)
        refusals += found
        layers = layers_of(spec) if adapters.how in OF_PRODUCTS else []
        if len(kept) < max(1, min_clients) or not layers:
            return refusals
        if not (found := list(_too_large(kept, layers, spec))):
            _put_products(kept, out_path, layers, adapters)
            return refusals
        kept = _without(kept, found)
        refusals += found


def _without(kept: Weighted, refused: Sequence[Refusal]) -> list[tuple[Message, float]]:
    names = {one.client for one in refused}
    return [(message, weight) for message, weight in kept if message.client not in names]


def layers_of(spec: Spec) -> list[str]:
    """The paths of the layers of which both factors are sent."""
    down, up = FACTORS
    paths = [name.removesuffix(down) for name in spec if name.endswith(down)]
    return sorted(path for path in paths if path + up in spec)


def _too_large(kept: Weighted, layers: Sequence[str], spec: Spec) -> Iterator[Refusal]:
    """The clients of whose products the mean could not be written."""
    with Opened() as files, np.errstate(over="ignore"):
        for message, _ in kept:
            for layer in layers:
                down, up = _factors(files, message, layer, spec)
                # No element, and no singular value, is over the product of the factors' norms.
                bound = np.linalg.norm(down) * np.linalg.norm(up)
                if not bound <= np.finfo(spec[layer + FACTORS[0]][1]).max / 4:
                    yield Refusal(message.client, f"too large a product in adapter {layer!r}")
                    break


def _factors(
    files: Opened, message: Message, layer: str, spec: Spec
) -> tuple[np.ndarray, np.ndarray]:
    """A_k (r, inputs) and B_k (outputs, r) of a client, float64."""
    found = []
    for end in FACTORS:
        shape, kind = spec[layer + end]
        values = np.empty(shape, kind)
        if not files.read(message, layer + end, 0, values):
            # `combine` has read it a moment ago.
            raise UserError("changed while it was read", path=message.path)
        found.append(values.astype(np.float64))
    return found[0], found[1]


def mean_product(kept: Weighted, layer: str, spec: Spec) -> np.ndarray:
    """P of a layer, (outputs, inputs): one client after the other, in their order."""
    import torch

    down, up = (spec[layer + end][0] for end in FACTORS)
    # By torch, since the experiment says how many threads that has.
    total = torch.zeros(up[0], down[1], dtype=torch.float64)
    whole = math.fsum(weight for _, weight in kept)
    with Opened() as files:
        for message, weight in kept:
            factors = _factors(files, message, layer, spec)
            low, high = (torch.from_numpy(factor) for factor in factors)
            total.addmm_(high, low, alpha=weight / whole)
    return total.numpy()


def nearest(product: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """A (rank, inputs) and B (outputs, rank) whose product B A is nearest to a matrix.

    The largest element of each row of A is positive, and its norm is 1: a row that P has no use for
    can be trained all the same, since its column of B is 0, as at the beginning.
    """
    import torch

    left, values, right = torch.linalg.svd(torch.from_numpy(product), full_matrices=False)
    up, down = (left * values)[:, :rank].numpy(), right[:rank].numpy()
    largest = np.abs(down).argmax(1)[:, None]
    signs = np.where(np.take_along_axis(down, largest, 1) < 0, -1.0, 1.0)
    # Of a layer narrower than the rank the rest is zeros.
    rest = rank - len(down)
    return np.pad(down * signs, ((0, rest), (0, 0))), np.pad(up * signs.T, ((0, 0), (0, rest)))


def _put_products(kept: Weighted, path: Path, layers: Sequence[str], adapters: Adapters) -> None:
    """Put into a state, the mean of what clients sent, what their products make of it."""
    state, before = load_state(path), load_state(adapters.state)
    beyond = total = 0.0
    for layer in layers:
        down, up = (layer + end for end in FACTORS)
        product = mean_product(kept, layer, spec_of({name: state[name] for name in (down, up)}))
        if adapters.how == "svd":
            best = nearest(product, len(state[down]))
            for name, factor in zip((down, up), best, strict=True):
                state[name] = factor.astype(state[name].dtype)
        rest = product - state[up].astype(np.float64) @ state[down].astype(np.float64)
        if adapters.how == "residual":
            name = layer + DELTA
            state[name] = (before[name] + rest).astype(before[name].dtype)
        beyond, total = beyond + np.square(rest).sum(), total + np.square(product).sum()
    check_finite(state, path)
    save_state(path, dict(sorted(state.items())))
    share = 100 * beyond / total if total else 0.0
    goes = "goes into the base" if adapters.how == "residual" else "is lost"
    print(f"{adapters.title}: {share:.2f} % of the mean of the adapters {goes}", file=sys.stderr)
