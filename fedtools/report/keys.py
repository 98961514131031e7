"""The options of a class, with their meaning: for `fedtools methods NAME` and the reference.

An option's meaning stands in its class's docstring, its default and its values in its field. There
is no other place, so that what is printed is as the code is.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import yaml

from fedtools.core.config import declared
from fedtools.core.tables import format_table
from fedtools.methods import METHODS, sections_of

# Names of bounds, as in annotated_types.
_BOUNDS = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}
_TYPES = {bool: "true, false", int: "integer", float: "number", str: "text", dict: "section"}


@dataclasses.dataclass(frozen=True)
class Key:
    """One option, with all as text.

    Attributes:
        name: within its section.
        default: as it reads in YAML; "required" without one.
        values: its type and range.
        meaning: from the docstring of `owner`.
        owner: the class that declares it.
    """

    name: str
    default: str
    values: str
    meaning: str
    owner: type


def keys_of(kind: type) -> list[Key]:
    """Return the options of a class: a dataclass's fields, or another class's arguments."""
    meanings, of_class = dict(_meanings(kind)), dataclasses.is_dataclass(kind)
    hints = typing.get_type_hints(kind if of_class else kind.__init__, include_extras=True)
    return [
        Key(name, _in_yaml(default), _values(hints[name]), *meanings.get(name, ("", kind)))
        for name, default in declared(kind).items()
        if of_class or default is not dataclasses.MISSING
    ]


def _meanings(kind: type) -> Iterator[tuple[str, tuple[str, type]]]:
    """Yield name -> (meaning, class) of the documented attributes, those of subclasses last."""
    for one in reversed(kind.__mro__):
        text = inspect.cleandoc(vars(one).get("__doc__") or "")
        _, _, attributes = re.sub(r"\n(Attributes|Args):\n", "\0", f"\n{text}\n").partition("\0")
        for entry in re.split(r"\n    (?=\w)", f"\n{attributes}".partition("\n\n")[0]):
            names, colon, meaning = entry.partition(": ")
            if colon and re.fullmatch(r"\w+(, \w+)*", names):
                told = " ".join(meaning.split())
                yield from ((name, (told, one)) for name in names.split(", "))


def _in_yaml(value: Any) -> str:
    """Return a default on one line of YAML."""
    if value is dataclasses.MISSING:
        return "required"
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=1000).strip()
    return text.removesuffix("...").strip()


def _values(hint: Any) -> str:
    """Return a type and its range in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        bounds = [
            f"{words} {getattr(one, name)}"
            for one in hint.__metadata__
            for name, words in _BOUNDS.items()
            if hasattr(one, name)
        ]
        return " ".join([_values(arguments[0]), *bounds])
    if origin is Literal:
        return ", ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if one is type(None) else _values(one) for one in arguments)
    if origin is tuple:
        several = len(arguments) == 2 and arguments[1] is Ellipsis
        return f"list of {_values(arguments[0])}" if several else f"list of {len(arguments)}"
    if origin in (dict, list) or (isinstance(origin, type) and issubclass(origin, Sequence)):
        return "section" if origin is dict else f"list of {_values(arguments[0])}"
    return _TYPES.get(hint, str(hint))


def method_text(name: str) -> str:
    """Return a method's options and their meanings in plain text."""
    method = METHODS.get(name, None)
    keys = [
        (f"{section}.{key.name}", key)
        for section, kind in sections_of(method).items()
        for key in keys_of(kind)
    ]
    rows = [[name, key.default, key.values, key.owner.__name__] for name, key in keys]
    summary = inspect.cleandoc(method.__doc__ or "").partition("\n")[0]
    told = [
        textwrap.fill(f"{name}: {key.meaning}", 100, subsequent_indent="    ")
        for name, key in keys
        if key.meaning
    ]
    table = format_table(("option", "default", "values", "of"), rows, "llll")
    return "\n".join([summary, "", table, *told, ""])
