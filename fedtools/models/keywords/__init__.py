"""Keyword networks, each for K clients at once, registered by name.

They are the networks in table 2 of X.-C. Li et al.: Avoid overfitting user specific information in
federated keyword spotting, Interspeech 2022. All take MFCC (K, B, frames, coefficients). Sizes that
the paper leaves open were chosen to match its numbers of parameters; the defaults are the paper's
networks:

                        12 classes          35 classes       (table 2)
    DSCNN               168.6 k             172.6 k          169 k, 173 k
    MHAttRNN            228.0 k             231.7 k          228 k, 232 k
    ResNet              237.9 k             238.9 k          238 k, 239 k
    Transformer         233.5 k             235.8 k          232 k, 234 k
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedtools.files.config import from_mapping, option_error, unknown
from fedtools.files.errors import UserError
from fedtools.files.registry import Registry
from fedtools.models.keywords.base import Network, Sizes
from fedtools.models.pretrained.folder import Folder
from fedtools.models.pretrained.options import is_pretrained

NETWORKS: Registry[type[Sizes]] = Registry(__name__, "network")


def build_network(
    config: Mapping[str, Any],
    classes: int,
    where: str | Path,
    *,
    clients: int = 1,
    bins: int = 40,
    frames: int = 98,
    base: Path | None = None,
    whole: bool = False,
) -> Network:
    """Build a network from its section of a configuration.

    Args:
        config: `network`, a name in `NETWORKS`; `network_conf`, fields of its `...Sizes`; `adapt`,
            fields of `Adapt`, if only a part is trained.
        classes: number of labels.
        where: source of `config`, for messages.
        clients: number of clients to train at once.
        bins, frames: numbers of coefficients and frames of the input.
        base: state of the network that is adapted, for a network with `adapt`.
        whole: whether to build frozen layers also if their outputs are cached.

    Raises:
        UserError: for options that are unknown or incompatible.
    """
    if is_pretrained(config):
        from fedtools.models.keywords.pretrained import build_pretrained

        return build_pretrained(config, classes, where, clients, whole)
    for key in config:
        if key not in (known := ("network", "network_conf", "adapt")):
            raise option_error(unknown(key, known), where, key, config[key])
    kind = NETWORKS.get(config.get("network"), where)
    sizes = from_mapping(kind, config.get("network_conf"), where)
    is_adapted = "adapt" in config
    # Frozen tensors have a client dimension of one.
    made = 1 if is_adapted else clients
    try:
        network = sizes.network(sizes, made, bins, frames, classes)
        if sizes.head_share:
            network.split_head(made, sizes.head_share)
    except ValueError as error:
        raise UserError(f"network_conf: {error}", path=where) from None
    if not is_adapted:
        return network
    from fedtools.models.keywords.adapted import adapt_network

    return adapt_network(base, network, config, where, clients)


def inputs_of(config: Mapping[str, Any]) -> tuple[str, int]:
    """Return a network's kind of input, see `fedtools.audio.front_end`, and values per frame."""
    if is_pretrained(config):
        folder = Folder.open(config.get("path", ""))
        return folder.inputs, folder.bins
    return "mfcc", 40
