"""Aggregation of LoRA adapters by the mean of the products B_k A_k instead of the factors.

With client weights p_k, which sum to 1, and P = sum_k p_k B_k A_k, computed in float64:

    svd       B A is the matrix of rank r nearest to P (Eckart and Young): B = U S and A = V' with
              the r largest singular values, where A is scaled to its size at initialisation, and
              B inversely. (J. Bai et al.: Federated fine-tuning of large language
              models under heterogeneous tasks and client resources, FlexLoRA, NeurIPS 2024)
    residual  A = sum_k p_k A_k and B = sum_k p_k B_k; D, which is added to B A, grows by P - B A,
              so that the mean is exact. (R. Singhal et al.: FedEx-LoRA: exact aggregation for
              federated and efficient fine-tuning of large language models, ACL 2025)

`combine` averages all other tensors, and also the factors if `Adapt.combine` is "mean" (J. Zhang et
al.: Towards building the federated GPT: federated instruction tuning, FedIT, ICASSP 2024) or
"fixed_a" (Y. Sun et al.: Improving LoRA in privacy-preserving federated learning, FFA-LoRA, ICLR
2024).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedtools.core.errors import UserError
from fedtools.exchange.messages import Message, Opened, Refusal
from fedtools.exchange.states import Spec, check_finite, load_state, save_state, spec_of
from fedtools.models.adapt.adaptation import DELTA, FACTORS, OF_PRODUCTS, ROW_NORM
from fedtools.server.aggregate import Bound, combine, over_median

Weighted = Sequence[tuple[Message, float]]
# A (rank, inputs) and B (outputs, rank) of a layer.
Factors = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Adapters:
    """Options of adapter aggregation.

    Attributes:
        how: the value of `Adapt.combine`.
        state: the file of the state that the clients started from.
        title: prefix of the line that reports the share of the mean outside the factors.
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
    """Run `combine`, then replace the adapters in its output by the aggregated products.

    Clients whose products are too large for the data type of the tensors are refused as well, and
    those whose products changed too much: two factors within their bound have a product far from
    it.
    """
    kept, refusals = list(zip(messages, weights, strict=True)), list[Refusal]()
    while True:
        given = [message for message, _ in kept], [weight for _, weight in kept]
        found = combine(*given, out_path, spec, min_clients=min_clients, **options)
        kept = without(kept, found)
        refusals += found
        layers = layers_of(spec)
        if len(kept) < max(1, min_clients) or not layers:
            return refusals
        found = list(too_large(kept, layers, spec)) if adapters.how in OF_PRODUCTS else []
        if not (found := found or outside_products(kept, layers, spec, options.get("bound"))):
            if adapters.how in OF_PRODUCTS:
                put_products(kept, out_path, layers, adapters)
            return refusals
        kept = without(kept, found)
        refusals += found


def without(kept: Weighted, refused: Sequence[Refusal]) -> list[tuple[Message, float]]:
    """Return the messages of clients that are not refused, with their weights."""
    names = {one.client for one in refused}
    return [(message, weight) for message, weight in kept if message.client not in names]


def layers_of(spec: Spec) -> list[str]:
    """Return the paths of the layers of which both factors are sent."""
    down, up = FACTORS
    paths = [name.removesuffix(down) for name in spec if name.endswith(down)]
    return sorted(path for path in paths if path + up in spec)


def too_large(kept: Weighted, layers: Sequence[str], spec: Spec) -> Iterator[Refusal]:
    """Yield refusals of clients whose products could overflow the data type of the factors."""
    with Opened() as files, np.errstate(over="ignore"):
        for message, _ in kept:
            for layer in layers:
                down, up = factors_of(files, message, layer, spec)
                # The product of the factors' norms bounds all elements and singular values.
                bound = np.linalg.norm(down) * np.linalg.norm(up)
                if not bound <= np.finfo(spec[layer + FACTORS[0]][1]).max / 4:
                    yield Refusal(message.client, f"product too large in adapter {layer!r}")
                    break


def outside_products(
    kept: Weighted, layers: Sequence[str], spec: Spec, bound: Bound | None
) -> list[Refusal]:
    """Return refusals of clients whose products changed too much, see `over_median`."""
    if bound is None or not (bound.ratio > 0 and len(kept) > 1):
        return []
    begun = load_state(bound.sent_state)
    down, up = FACTORS
    before = {
        layer: (begun[layer + down].astype("f8"), begun[layer + up].astype("f8"))
        for layer in layers
    }
    norms = []
    with Opened() as files:
        for message, _ in kept:
            own = {layer: factors_of(files, message, layer, spec) for layer in layers}
            norms.append(math.hypot(*(_apart(own[layer], before[layer]) for layer in layers)))

    def state() -> float:
        return math.hypot(*(float(np.linalg.norm(up @ down)) for down, up in before.values()))

    return [
        Refusal(kept[index][0].client, f"products of norm {norms[index]:.3g}, {limit}")
        for index, limit in over_median(norms, bound.ratio, state)
    ]


def _apart(own: Factors, before: Factors) -> float:
    """Return the norm of the difference of two products, without computing the products."""
    (down, up), (down_before, up_before) = own, before
    ups, downs = np.hstack([up, -up_before]), np.vstack([down, down_before])
    return math.sqrt(max(0.0, float(((ups.T @ ups) * (downs @ downs.T)).sum())))


def factors_of(files: Opened, message: Message, layer: str, spec: Spec) -> Factors:
    """Read A_k (r, inputs) and B_k (outputs, r) of a client, as float64."""
    found = []
    for end in FACTORS:
        shape, kind = spec[layer + end]
        values = np.empty(shape, kind)
        if not files.read(message, layer + end, 0, values):
            # `combine` could read it just before.
            raise UserError("the file changed while it was read", path=message.path)
        found.append(values.astype(np.float64))
    return found[0], found[1]


def mean_product(kept: Weighted, layer: str, spec: Spec) -> np.ndarray:
    """Compute P of a layer, (outputs, inputs), adding clients in their order."""
    whole = math.fsum(weight for _, weight in kept)
    return sum_of_products([(message, weight / whole) for message, weight in kept], layer, spec)


def sum_of_products(kept: Weighted, layer: str, spec: Spec) -> np.ndarray:
    """Compute the weighted sum of a layer's products, (outputs, inputs), in the clients' order."""
    import torch

    down, up = (spec[layer + end][0] for end in FACTORS)
    # In torch, whose number of threads the experiment fixes.
    total = torch.zeros(up[0], down[1], dtype=torch.float64)
    with Opened() as files:
        for message, weight in kept:
            factors = factors_of(files, message, layer, spec)
            low, high = (torch.from_numpy(factor) for factor in factors)
            total.addmm_(high, low, alpha=weight)
    return total.numpy()


def nearest(product: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return A (rank, inputs) and B (outputs, rank) whose product B A is nearest to a matrix.

    Each row of A has the norm of rows at initialisation, so that a step of B is as long as there,
    and its element of largest magnitude is positive. A row that `product` does not need has a zero
    column in B, so it can still be trained, as at initialisation.
    """
    import torch

    left, values, right = torch.linalg.svd(torch.from_numpy(product), full_matrices=False)
    up, down = (left * values)[:, :rank].numpy(), right[:rank].numpy()
    largest = np.abs(down).argmax(1)[:, None]
    signs = np.where(np.take_along_axis(down, largest, 1) < 0, -1.0, 1.0)
    # The factors of a layer narrower than the rank are padded with zeros.
    rest, size = rank - len(down), signs * ROW_NORM
    return np.pad(down * size, ((0, rest), (0, 0))), np.pad(up / size.T, ((0, 0), (0, rest)))


def put_products(
    kept: Weighted,
    path: Path,
    layers: Sequence[str],
    adapters: Adapters,
    sent: float | None = None,
) -> None:
    """Replace the averaged factors in a state file by the aggregated products of the clients.

    Args:
        kept: the messages, with weights of any scale, or if `sent` is given with shares.
        path: the state file.
        layers: the adapters.
        adapters: their options.
        sent: the share of the products that the server sent.
    """
    state, before = load_state(path), load_state(adapters.state)
    beyond = total = 0.0
    for layer in layers:
        down, up = (layer + end for end in FACTORS)
        own = spec_of({name: state[name] for name in (down, up)})
        if sent is None:
            product = mean_product(kept, layer, own)
        else:
            product = sum_of_products(kept, layer, own)
            product += sent * (before[up].astype(np.float64) @ before[down].astype(np.float64))
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
    fate = "added to the base" if adapters.how == "residual" else "lost"
    print(f"{adapters.title}: {share:.2f} % of the mean of the adapters is {fate}", file=sys.stderr)
