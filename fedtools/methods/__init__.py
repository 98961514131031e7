"""One file for each published method; it reads like the paper, with the citation on top."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedtools.methods.base import Method

# name on the command line -> "module:class"; a method is imported only when it is used.
METHODS = {
    "client": "fedtools.methods.client:Client",
    "centralized": "fedtools.methods.centralized:Centralized",
    "fedavg": "fedtools.methods.fedavg:FedAvg",
    "fedprox": "fedtools.methods.fedprox:FedProx",
    "fedmmd": "fedtools.methods.fedmmd:FedMmd",
    "fedopt": "fedtools.methods.fedopt:FedOpt",
    "fedkws_ui": "fedtools.methods.fedkws_ui:FedKwsUi",
    "alo": "fedtools.methods.fedkws_ui:Alo",
    "alt": "fedtools.methods.fedkws_ui:Alt",
}

# Only the server trains in these.
_WITHOUT_CLIENTS = ("centralized",)


def has_clients(name: str) -> bool:
    """Whether clients take part in a method's training."""
    return name not in _WITHOUT_CLIENTS


def make_method(name: str, options: Mapping[str, Any] | None, where: str | Path) -> Method:
    """Make a method from its name and options; a `UserError` names what is unknown."""
    import importlib

    from fedtools.files.config import from_mapping, unknown
    from fedtools.files.errors import UserError

    if name not in METHODS:
        raise UserError(f"method: {unknown(name, METHODS)}", path=where)
    module, _, attribute = METHODS[name].partition(":")
    return from_mapping(getattr(importlib.import_module(module), attribute), options, where)
