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
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedtools.core.config import from_mapping, option_error, unknown
from fedtools.core.errors import UserError
from fedtools.core.registry import Registry, undeclared
from fedtools.models.keywords.base import Network, Sizes
from fedtools.models.pretrained.folder import Folder
from fedtools.models.pretrained.options import is_pretrained


def _lacks(sizes: type) -> str:
    """Return what the class of a network's options lacks, or "" if it is complete."""
    if not (isinstance(sizes, type) and issubclass(sizes, Sizes)):
        return "is no class of options derived from Sizes"
    network = getattr(sizes, "network", None)
    if not (isinstance(network, type) and issubclass(network, Network)):
        return "has options without network, the class derived from Network"
    if not isinstance(getattr(sizes, "title", None), str):
        return "has options without title, its name in tables"
    return undeclared(sizes)


NETWORKS: Registry[type[Sizes]] = Registry(__name__, "network", _lacks)


def build_network(
    config: Mapping[str, Any],
    classes: int,
    where: str | Path,
    *,
    clients: int = 1,
    bins: int = 40,
    frames: int = 98,
    base: Path | None = None,
    projection: Path | None = None,
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
        projection: file of the projection, for a pretrained network with `normalise: projection`.
        whole: whether to build frozen layers also if their outputs are cached.

    Raises:
        UserError: for options that are unknown or incompatible.
    """
    if is_pretrained(config):
        from fedtools.models.keywords.pretrained import build_pretrained

        return build_pretrained(config, classes, where, clients, projection, whole)
    for key in config:
        if key not in (known := ("network", "network_conf", "adapt")):
            raise option_error(unknown(key, known), where, key, config[key])
    sizes = sizes_of(config, where)
    is_adapted = "adapt" in config
    # Frozen tensors have a client dimension of one.
    network = make_network(sizes, where, 1 if is_adapted else clients, bins, frames, classes)
    if not is_adapted:
        return network
    from fedtools.models.keywords.adapted import adapt_network

    return adapt_network(base, network, config, where, clients)


def make_network(
    sizes: Sizes, where: str | Path, clients: int, bins: int, frames: int, classes: int
) -> Network:
    """Make a network of the given options, with all of its own layers; raises a `UserError`."""
    try:
        return sizes.network(sizes, clients, bins, frames, classes)
    except ValueError as error:
        raise UserError(f"network_conf: {error}", path=where) from None


def sizes_of(config: Mapping[str, Any], where: str | Path) -> Sizes:
    """Return a network's options; an error about one of another network names that network."""
    kind, given = NETWORKS.get(config.get("network"), where), config.get("network_conf")
    known = [field.name for field in fields(kind)]
    for name in given if isinstance(given, Mapping) else ():
        if name not in known:
            others = [
                other
                for other in NETWORKS.names()
                if name in [field.name for field in fields(NETWORKS.get(other, where))]
            ]
            problem = f"network_conf of {config['network']}: {unknown(name, known)}"
            if others:
                problem += f"; {', '.join(others)} {'has' if len(others) == 1 else 'have'} it"
                problem += ": leave out that section, or set model.network_conf={}"
            raise option_error(problem, where, name, given[name])
    return from_mapping(kind, given, where)


def inputs_of(config: Mapping[str, Any]) -> tuple[str, int]:
    """Return a network's kind of input, see `fedtools.audio.front_end`, and values per frame."""
    if is_pretrained(config):
        folder = Folder.open(config.get("path", ""))
        return folder.inputs, folder.bins
    return "mfcc", 40
