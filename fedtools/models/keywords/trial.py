"""A trial of a keyword network: shapes, and that clients do not depend on each other.

A network of the user's own with layers that have no client dimension would train nonsense: row 0 of
such a layer's weight would be taken for client 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtools.core.errors import UserError
from fedtools.core.registry import line_in
from fedtools.models.keywords import make_network, sizes_of
from fedtools.models.keywords.base import Network, Sizes

# Different numbers, so that no dimension is taken for another one.
_CLIENTS, _CLIPS = (2, 3), 4
_INPUT = "the input is (clients, clips, frames, coefficients), features (clients, clips, values)"
_REMEDY = f"{_INPUT}: see 'A keyword network' in CONTRIBUTING.md"


def try_network(
    config: Mapping[str, Any], classes: int, where: str | Path, frames: int, bins: int = 40
) -> None:
    """Raise a `UserError` that names its file unless a network works for any number of clients.

    Those of this package do. Torch's generator stays as it is. Arguments are those of
    `build_network`.
    """
    sizes = sizes_of(config, where)
    file = Path(inspect.getfile(type(sizes).network))
    if file.is_relative_to(Path(__file__).parent):
        return
    with torch.random.fork_rng(devices=[]):
        try:
            _try(sizes, where, file, (bins, frames, classes))
        except UserError:
            raise
        except Exception as error:
            first = next(iter(str(error).splitlines()), "")
            problem = f"{type(sizes).network.__name__} fails: {type(error).__name__}: {first}"
            line = line_in(error, file)
            raise UserError(problem, path=file, line=line, remedy=_REMEDY) from None


def _try(sizes: Sizes, where: str | Path, file: Path, shape: tuple[int, int, int]) -> None:
    bins, frames, classes = shape
    for clients in _CLIENTS:
        network = make_network(sizes, where, clients, bins, frames, classes)
        _check_tensors(network, clients, file)
    # Fewer clients than the layers have: those that still train in a stack.
    for count in (clients, clients - 1):
        mfcc = torch.randn(count, _CLIPS, frames, bins)
        valid = torch.ones(count, _CLIPS)
        valid[0, -1] = 0
        network.train()
        _check_shapes(network, mfcc, valid, classes, file)
        network.eval()
        with torch.no_grad():
            before = network(mfcc)
            mfcc[-1] = torch.randn_like(mfcc[-1])
            after = network(mfcc)
        if not torch.allclose(before[:-1], after[:-1], atol=1e-4):
            problem = "the input of one client changes the output of another"
            raise UserError(problem, path=file, remedy=_REMEDY)


def _check_tensors(network: Network, clients: int, file: Path) -> None:
    """Raise a `UserError` unless all tensors have a client dimension, and there is a head."""
    if "head" not in dict(network.named_children()):
        remedy = "set self.head = Linear(clients, values, classes), of fedtools.models.stacked"
        raise UserError("the network has no head", path=file, remedy=remedy)
    for name, value in network.state_dict().items():
        if not value.ndim or len(value) != clients:
            problem = f"{name} is {list(value.shape)} for {clients} clients: no client dimension"
            remedy = "take the layers of fedtools.models.stacked, such as Linear(clients, ...)"
            raise UserError(problem, path=file, remedy=remedy)


def _check_shapes(network: Network, mfcc: Tensor, valid: Tensor, classes: int, file: Path) -> None:
    """Raise a `UserError` unless features and logits have the shapes that training expects."""
    features = network.features(mfcc, valid)
    if features.ndim != 3 or features.shape[:2] != mfcc.shape[:2]:
        wanted = f"[{len(mfcc)}, {_CLIPS}, values]"
        problem = f"features are {list(features.shape)}, not {wanted}"
        raise UserError(problem, path=file, remedy=_REMEDY)
    found = network(mfcc, valid)
    wanted = [len(mfcc), _CLIPS, classes]
    if list(found.shape) != wanted:
        problem = f"logits are {list(found.shape)}, not {wanted}: (clients, clips, classes)"
        raise UserError(problem, path=file, remedy=_REMEDY)
