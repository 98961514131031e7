"""Keyword networks of which only a part is trained, starting from a base network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedtools.models.adapt.base import adapt_to
from fedtools.models.adapt.copies import copy_of
from fedtools.models.keywords.base import Network


def adapt_network(
    base: Path | None, network: Network, config: Mapping[str, Any], where: str | Path, clients: int
) -> Network:
    """Return a network for several clients that starts from a base, frozen but for a part.

    Trained are the parameters that `Adapt` selects outside the head, and the head, except with
    kind "none". Frozen tensors are held once for all clients.

    Args:
        network: the network for one client.
        clients: number of clients.
        base, config, where: see `adapt_to`, whose errors are raised.
    """
    tensors = {name: value[0] for name, value in network.state_dict().items()}
    head = network.head
    del network.head
    how = adapt_to(base, tensors, network, config, where)
    network.head = head
    network.is_adapted, network.has_fixed_head = True, how.kind == "none"
    return copy_of(network, clients).requires_grad_()
