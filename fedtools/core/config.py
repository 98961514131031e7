"""YAML configurations: strict parsing into frozen dataclasses, overrides, and fixed files."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import functools
import inspect
import re
import typing
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from fedtools.core.atomic import write_text
from fedtools.core.errors import UserError

# Modules with options import these types from here, except the command line, which must not import
# PyYAML.
from fedtools.core.ranges import AboveZero as AboveZero
from fedtools.core.ranges import Natural as Natural
from fedtools.core.ranges import NonNegative as NonNegative
from fedtools.core.ranges import Positive as Positive
from fedtools.core.ranges import Share as Share
from fedtools.core.text_files import read_text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic import TypeAdapter
    from yaml import SafeLoader as _AnyLoader
    from yaml import SafeLoader as _LoaderInC

    Section = dict[str, Any]
else:
    _AnyLoader, _LoaderInC = object, getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    # A plain dict: for keys that are not text, a section's owner has better errors than pydantic.
    Section = dict
"""A section of options that its owner checks."""

T = TypeVar("T", bound="DataclassInstance")

# With aliases, a few lines can make a tree of any size, which would be traversed and printed.
_MAX_NODES = 1 << 21
_MAX_DIGITS = 400
# The loader in C overflows its stack at some ten thousand levels, and a YAML file has ten.
_MAX_DEPTH = 100


class _Strict(_AnyLoader):
    """YAML 1.2's floats (`1e-4` is a number), and no duplicate keys."""

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        """Construct an integer; refuse thousands of digits, which Python does not even print."""
        if len(node.value) > _MAX_DIGITS:
            problem = f"an integer of {len(node.value)} digits"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return self.construct_yaml_int(node)

    def construct_scalar(self, node: Any) -> Any:
        """Construct a text; refuse half a character, which an escape such as \\ud800 makes."""
        if found := re.search("[\ud800-\udfff]", str(node.value)):
            problem = f"{found[0]!a} is no character of a text"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return super().construct_scalar(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for node_of_key, _ in node.value:
            if node_of_key.tag == "tag:yaml.org,2002:merge":
                problem = "'<<' merges nothing here: write its options out, or use a section"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=node_of_key.start_mark)
            if isinstance(node_of_key, yaml.ScalarNode):
                key = self.construct_object(node_of_key)
                if key in seen:
                    problem = f"{key!r} is duplicated"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=node_of_key.start_mark)
                seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_decimal(self, node: yaml.ScalarNode) -> str:
        return str(node.value)


class _Loader(_Strict, yaml.SafeLoader):
    """Loader in Python, whose errors users see."""


class _Fast(_Strict, _LoaderInC):
    """Loader in C, where PyYAML has it: ten times as fast."""


class _Written(_Loader):
    """Loader that keeps decimals as text: names of folders and options have 1e-4 as written."""


class _FastWritten(_Fast):
    """The same in C."""


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes texts that `_Loader` would take for numbers, such as the speaker 1e5."""


for _strict in (_Loader, _Fast):
    _strict.add_constructor("tag:yaml.org,2002:int", _strict.construct_integer)
for _written in (_Written, _FastWritten):
    _written.add_constructor("tag:yaml.org,2002:float", _written.construct_decimal)
for _kind in (_Loader, _Fast, _Written, _FastWritten, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )


def read_yaml(path: str | Path, *, as_written: bool = False) -> dict[str, Any]:
    """Read a YAML mapping; raise a `UserError` naming file and line of a fault.

    Args:
        as_written: whether to keep decimals as the text in the file.
    """
    return parse_yaml(read_text(path), path, as_written=as_written)


def parse_yaml(text: str, path: str | Path, *, as_written: bool = False) -> dict[str, Any]:
    """Parse the text of a file that has been read; see `read_yaml`."""
    try:
        content = _parse(text, as_written)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise UserError(f"not YAML: {error.problem}", path=path, line=line) from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"not YAML: {error}", path=path) from None
    if not isinstance(content, dict):
        raise UserError("must be a mapping of options", path=path)
    return content


def _parse(text: str, as_written: bool = False) -> Any:
    """Parse a YAML text; see `read_yaml`.

    Raises:
        yaml.YAMLError, ValueError: if it is not YAML (or has an invalid date), is nested too
            deeply, or is endless because of aliases.
    """
    if _is_flat(text):
        # A text with a fault is read once more, for the error.
        with contextlib.suppress(yaml.YAMLError, ValueError):
            return _loaded(_FastWritten(text) if as_written else _Fast(text))
    return _loaded(_Written(text) if as_written else _Loader(text))


def _is_flat(text: str) -> bool:
    """Return whether a text is YAML of so few levels that the loader in C does not overflow.

    A text with a tab is not, since the two loaders accept them in other places.
    """
    if "\t" in text:
        return False
    depth, begin = 0, (yaml.MappingStartEvent, yaml.SequenceStartEvent)
    try:
        for event in yaml.parse(text, Loader=_Fast):
            depth += isinstance(event, begin)
            depth -= isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent))
            if depth > _MAX_DEPTH:
                return False
    except (yaml.YAMLError, ValueError, RecursionError):
        return False
    return True


def _loaded(loader: Any) -> Any:
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}) > _MAX_NODES:
            raise ValueError("aliases within aliases")
        return loader.construct_document(node)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except (AttributeError, LookupError, TypeError) as error:
        # PyYAML does not check the value of a tag, as in "!!bool x".
        raise ValueError(f"a value that does not fit its tag: {error}") from None
    finally:
        loader.dispose()


def _size(node: yaml.Node, known: dict[yaml.Node, float]) -> float:
    """Return the number of nodes of a tree with all aliases expanded."""
    if node not in known:
        # A node that contains itself is endless.
        known[node] = float("inf")
        known[node] = 1 + sum(_size(child, known) for child in _children(node))
    return known[node]


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def option_error(problem: str, where: str | Path, name: str, *value: Any) -> UserError:
    """Return an error about an option, naming its line if the option is unique in the file.

    Args:
        problem: what is wrong with the option.
        where: the YAML file, or "FILE: SECTION"; options may come from elsewhere, too.
        name: the option's own name, without that of its section.
        value: the option's value, to find its line; without it, any value matches.
    """
    path, colon, section = str(where).partition(": ")
    lines = []
    with contextlib.suppress(UserError, yaml.YAMLError, ValueError, RecursionError):
        text = read_text(path)
        loader = _Fast(text) if _is_flat(text) else _Loader(text)
        root = loader.get_single_node()
        nodes = [root] if root else []
        for node in nodes:
            nodes += _children(node)
            for key, child in node.value if isinstance(node, yaml.MappingNode) else ():
                same = not value or loader.construct_document(child) == value[0]
                if key.value == str(name) and same:
                    lines.append(key.start_mark.line + 1)
    place = f"{section}: " if colon else ""
    line = lines[0] if len(lines) == 1 else None
    if not lines and (setting := _setting_of(section, str(name))):
        path = f"--set {setting}"
    return UserError(f"{place}{problem}", path=path, line=line)


# Settings of the command line, which messages name in place of a file that lacks the option.
_settings: ContextVar[Sequence[str]] = ContextVar("settings", default=())


@contextlib.contextmanager
def set_by(settings: Sequence[str]) -> Iterator[None]:
    """Let messages about options that are set within name `settings`, see `override`."""
    before = _settings.set(settings)
    try:
        yield
    finally:
        _settings.reset(before)


def _setting_of(section: str, name: str) -> str:
    """Return the last of the settings that sets an option of a section; "" if none does."""
    for setting in reversed(_settings.get()):
        keys = setting.partition("=")[0].split(".")
        if name in keys and set(section.replace(": ", ".").split(".")) - {""} <= set(keys):
            return setting
    return ""


def lookup(path: str | Path, key: str, *, as_written: bool = False) -> Any:
    """Read the value of a key such as "tokens.vocab_size"; raise a `UserError` if it is missing.

    Args:
        as_written: see `read_yaml`.
    """
    value: Any = read_yaml(path, as_written=as_written)
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise UserError(f"no option {key!r}", path=path)
        value = value[part]
    return value


def write_yaml(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write a mapping as YAML, in its order, atomically."""
    write_text(path, yaml.dump(dict(content), Dumper=_Dumper, sort_keys=False))


def override(config: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Return `config` with settings such as "training.optim_conf.lr=1e-4", whose value is YAML."""
    config = copy.deepcopy(config)
    for setting in settings:
        keys, equals, value = setting.partition("=")
        if not equals:
            raise UserError(f"--set {setting!r} has no '='", remedy="write --set a.b=value")
        *parents, last = keys.split(".")
        place = config
        for key in parents:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise UserError(f"--set {setting!r}: {key!r} holds a value, not options")
        try:
            place[last] = _parse(value)
        except (yaml.YAMLError, ValueError):
            raise UserError(f"--set {setting!r}: the value is not YAML") from None
    return config


def merge(
    config: Mapping[str, Any], over: Mapping[str, Any], where: str | Path = "options"
) -> dict[str, Any]:
    """Return `config` merged with `over`, which takes precedence, mapping by mapping.

    Raises:
        UserError: if a mapping would replace a value, and hide that the value is wrong.
    """
    merged = dict(config)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, dict) and not isinstance(below, dict | None):
            problem = f"option {key!r} is {_short(below)}: input should be a mapping"
            raise option_error(problem, where, key, below)
        if isinstance(value, dict) and isinstance(below, dict):
            merged[key] = merge(below, value, where)
        else:
            merged[key] = value
    return merged


@functools.cache
def _hints_of(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def from_mapping(kind: type[T], options: Mapping[str, Any] | None, where: str | Path) -> T:
    """Make a frozen dataclass from options; raise a `UserError` for unknown names or bad values.

    Args:
        kind: a dataclass whose annotations define the valid values in pydantic's strict mode
            (`Positive`, `Literal["sgd", "adam"]`). NaN and Inf are never valid.
        options: name -> value; None is the same as {}.
        where: the source of the options, for messages.
    """
    if not isinstance(options, Mapping | None):
        raise UserError(f"{_short(options)} must be a mapping", path=where)
    options = dict(options or {})
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints = _hints_of(kind)
    for name, value in options.items():
        if name not in fields:
            raise option_error(unknown(name, fields), where, name, value)
    # An empty section is the same as a missing one.
    options = {k: v for k, v in options.items() if not (v is None and hints[k] is dict)}
    typed = {name: checked(name, value, hints[name], where) for name, value in options.items()}
    missing = [
        name
        for name, field in fields.items()
        if name not in options and field.default is field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UserError(f"option {missing[0]!r} is missing", path=where)
    try:
        return kind(**typed)
    except (ValueError, UserError) as error:
        # Checks name the faulty option, in their first words or as the only option in the message.
        named = re.findall(r"^option '(\w+)'", str(error))
        named = named or [name for name in options if re.search(rf"\b{name}\b", str(error))]
        if len(named) != 1:
            raise UserError(str(error), path=where) from None
        raise option_error(str(error), where, named[0], options[named[0]]) from None


def declared(kind: type) -> dict[str, Any]:
    """Return the defaults of a class's options by name; `dataclasses.MISSING` for none.

    Fields whose metadata name what they are `set_by` are no options.

    Args:
        kind: a dataclass, or a class with options as arguments, such as ESPnet's.
    """
    if not dataclasses.is_dataclass(kind):
        empty, arguments = inspect.Parameter.empty, inspect.signature(kind).parameters.values()
        return {
            one.name: dataclasses.MISSING if one.default is empty else one.default
            for one in arguments
        }
    return {
        one.name: one.default
        if one.default_factory is dataclasses.MISSING
        else one.default_factory()
        for one in dataclasses.fields(kind)
        if "set_by" not in one.metadata
    }


def read_section(
    kind: type[T], config: str | Path | None, section: str, settings: Sequence[str] = ()
) -> T:
    """Make a frozen dataclass from a section of a YAML file, or without a file from defaults.

    Args:
        settings: overrides "section.name=value".

    Raises:
        UserError: if a setting is of another section, which would have no effect.
    """
    for setting in settings:
        if not setting.startswith(f"{section}."):
            remedy = f"write --set {section}.option=value"
            raise UserError(f"--set {setting!r} is not in the section {section!r}", remedy=remedy)
    content = override(read_yaml(config) if config else {}, settings)
    where = f"{config}: {section}" if config else section
    with set_by(settings):
        return from_mapping(kind, content.get(section), where)


def unknown(name: str, known: Sequence[str] | Mapping[str, Any], what: str = "option") -> str:
    """Return a message about an unknown option, method, ... that names the nearest known one."""
    near = difflib.get_close_matches(str(name), [str(key) for key in known], n=1)
    hint = f", did you mean {near[0]!r}?" if near else f"; known: {', '.join(map(str, known))}"
    return f"unknown {what} {name!r}{hint}"


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield "name: old -> new" for every option that differs between two configurations."""
    for key in dict.fromkeys([*old, *new]):
        name = f"{prefix}{key}"
        one, two = old.get(key), new.get(key)
        if isinstance(one, dict) and isinstance(two, dict):
            yield from differences(one, two, f"{name}.")
        elif one != two:
            yield f"{name}: {_short(one)} -> {_short(two)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]} ... {text[-16:]}"


def fix(path: Path, config: Mapping[str, Any], made_with: str = "another configuration") -> None:
    """Write `config` to `path` if there is no file, and else check that it is the same.

    Raises:
        UserError: naming the first option that differs from the file.
    """
    if path.exists():
        changed = list(differences(read_yaml(path), config))
        if changed:
            more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
            problem = f"made with {made_with}: {changed[0]}{more}"
            remedy = f"keep the option, or remove {path.parent} to begin anew"
            raise UserError(problem, path=path, remedy=remedy)
    else:
        write_yaml(path, config)


def checked(name: str, value: Any, hint: Any, where: str | Path) -> Any:
    """Return an option's value, checked against its type; see `from_mapping`."""
    # Imported here because not every command that reads YAML checks options.
    from pydantic import ValidationError

    # Lists of YAML become tuples, which are immutable.
    listed = isinstance(value, list) and typing.get_origin(hint) is tuple
    try:
        if type(value) is int and abs(value) >> 63:
            raise option_error(f"option {name!r} is {_short(value)}: too large", where, name)
        return _adapter(hint).validate_python(tuple(value) if listed else value)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"].replace("tuple", "list")
        reason = reason.replace("valid dictionary", "mapping")
        problem = f"option {name!r} is {_short(value)}: {reason[0].lower()}{reason[1:]}"
        # NaN is not equal to itself, so that its line cannot be found by value.
        known = () if value != value else (value,)
        raise option_error(problem, where, name, *known) from None


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False))
