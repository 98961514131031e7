"""Federated methods: one file per published method, which follows and cites its paper.

A method says what a client and the server do in a round. How they train, send and average is in
`client` and `server`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtools.core.config import from_mapping
from fedtools.core.registry import Registry, undeclared

if TYPE_CHECKING:
    from fedtools.methods.base import Method


def _lacks(method: type) -> str:
    """Return what a method's class lacks, or "" if it is complete."""
    from fedtools.methods.base import Method

    if not (isinstance(method, type) and issubclass(method, Method)):
        return "is no class derived from Method"
    if not isinstance(getattr(method, "title", None), str):
        return "has no title, its name in tables: title: ClassVar[str]"
    return undeclared(method)


METHODS: Registry[type[Method]] = Registry(__name__, "method", _lacks)


def sections_of(method: type[Method]) -> dict[str, type]:
    """Return the classes of a method's options, by the names of their sections."""
    own = {f"method_conf.{name}": kind for name, kind in method.sections.items()}
    return {"method_conf": method, **own}


def make_method(name: object, options: Mapping[str, Any] | None, where: str | Path) -> Method:
    """Make a method from its name and options; raise a `UserError` for what is unknown."""
    return from_mapping(METHODS.get(name, where), options, f"{where}: method_conf")
