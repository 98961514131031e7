"""Keyword networks of which a part is trained, on top of the network that they begin with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedtools.models.base import adapt_to
from fedtools.models.copies import copy_of
from fedtools.models.keywords.base import HEADS, Network


def adapt_network(
    base: Path | None, network: Network, config: Mapping[str, Any], where: str | Path, clients: int
) -> Network:
    """A network for so many clients that has a base, frozen but for what is trained.

    That is what `Adapt` says of all but the heads, and the heads, except with kind "none". What is
    frozen is held once.

    Args:
        network: for one client.
        base, config, where: as of `adapt_to`, as are the errors.
    """
    tensors = {name: value[0] for name, value in network.state_dict().items()}
    heads = {name: child for name, child in network.named_children() if name in HEADS}
    for name in heads:
        delattr(network, name)
    how = adapt_to(base, tensors, network, config, where)
    for name, head in heads.items():
        setattr(network, name, head)
    network.is_adapted, network.has_fixed_head = True, how.kind == "none"
    return copy_of(network, clients).requires_grad_()
