"""The keyword networks, each for K clients at once; a network is found by its name.

Those of table 2 in X.-C. Li et al.: Avoid overfitting user specific information in federated
keyword spotting, Interspeech 2022. All take MFCC (K, B, frames, coefficients). Where the paper
leaves a size open, the one that meets its number of parameters was taken; the defaults are the
paper's networks:

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
) -> Network:
    """Make a network from its section of a configuration.

    Args:
        config: `network`, a name in `NETWORKS`; `network_conf`, fields of its `...Sizes`; `adapt`,
            fields of `Adapt`, where a part is trained.
        classes: the number of labels.
        where: what `config` was read from, for messages.
        clients: how many clients it trains at once.
        bins, frames: coefficients and frames of its input.
        base: of a network with `adapt`: the state of the network that is adapted.

    Raises:
        UserError: for options that are unknown or do not fit each other.
    """
    if is_pretrained(config):
        from fedtools.models.keywords.pretrained import build_pretrained

        return build_pretrained(config, classes, where, clients)
    for key in config:
        if key not in (known := ("network", "network_conf", "adapt")):
            raise option_error(unknown(key, known), where, key, config[key])
    kind = NETWORKS.get(config.get("network"), where)
    sizes = from_mapping(kind, config.get("network_conf"), where)
    is_adapted = "adapt" in config
    # What is frozen has a client dimension of one.
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
    """What a network takes, see `fedtools.audio.front_end`, and how many values of a frame."""
    if is_pretrained(config):
        folder = Folder.open(config.get("path", ""))
        return folder.inputs, folder.bins
    return "mfcc", 40
