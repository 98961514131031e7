"""Federated methods: one file per published method, which follows and cites its paper."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtools.files.config import from_mapping
from fedtools.files.registry import Registry

if TYPE_CHECKING:
    from fedtools.methods.base import Method

METHODS: Registry[type[Method]] = Registry(__name__, "method")


def make_method(name: object, options: Mapping[str, Any] | None, where: str | Path) -> Method:
    """Make a method from its name and options; raise a `UserError` for what is unknown."""
    return from_mapping(METHODS.get(name, where), options, f"{where}: method_conf")
