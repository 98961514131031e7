"""YAML configurations: strict reading into frozen dataclasses, overrides, and freezing."""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from fedtools.files.atomic import write_text
from fedtools.files.errors import UserError

T = TypeVar("T")


class _Loader(yaml.SafeLoader):
    """YAML 1.2's floats (`1e-4` is a number, not a string) and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                line = node.value[index][0].start_mark.line + 1
                raise yaml.MarkedYAMLError(problem=f"{key!r} comes twice (line {line})")
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would take for a number, such as the speaker 1e5."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML mapping; a `UserError` names file and line of what is wrong."""
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", path=path) from None
    except UnicodeDecodeError:
        raise UserError("not UTF-8", path=path) from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise UserError(f"not YAML: {error.problem}", path=path, line=line) from None
    # A ValueError is of what looks like a date and is none.
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"not YAML: {error}", path=path) from None
    if not isinstance(content, dict):
        raise UserError("a mapping of options is expected", path=path)
    return content


def lookup(path: str | Path, key: str) -> Any:
    """The value of a key such as "tokens.vocab_size"; a `UserError` if the file lacks it."""
    value: Any = read_yaml(path)
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise UserError(f"no option {key!r}", path=path)
        value = value[part]
    return value


def write_yaml(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write a mapping as YAML, in its own order, atomically."""
    write_text(path, yaml.dump(dict(content), Dumper=_Dumper, sort_keys=False))


def override(config: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Return `config` changed by settings such as "training.optim_conf.lr=1e-4" (value: YAML)."""
    config = _copy(config)
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
            place[last] = yaml.load(value, _Loader)
        except (yaml.YAMLError, ValueError):
            raise UserError(f"--set {setting!r}: the value is not YAML") from None
    return config


def merge(config: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with `over` laid over it, mapping by mapping."""
    merged = dict(config)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def from_mapping(kind: type[T], options: Mapping[str, Any] | None, where: str | Path) -> T:
    """Make a frozen dataclass from options, refusing unknown names and values of another type.

    Args:
        kind: a dataclass with simple fields (bool, int, float, str, dict, tuple, and None).
        options: name -> value; None is the same as {}.
        where: what the options were read from, for messages.
    """
    if not isinstance(options or {}, Mapping):
        raise UserError(f"{options!r} is not name: value", path=where)
    options = dict(options or {})
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    for name, value in options.items():
        if name not in fields:
            raise UserError(unknown(name, fields), path=where)
        options[name] = _checked(name, value, hints[name], where)
    missing = [
        name
        for name, field in fields.items()
        if name not in options
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UserError(f"option {missing[0]!r} is missing", path=where)
    try:
        return kind(**options)
    except (ValueError, UserError) as error:
        raise UserError(str(error), path=where) from None


def unknown(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """A message for an unknown option that names the nearest known one."""
    near = difflib.get_close_matches(str(name), [str(key) for key in known], n=1)
    hint = f", did you mean {near[0]!r}?" if near else f"; known: {', '.join(map(str, known))}"
    return f"unknown option {name!r}{hint}"


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield "name: old -> new" for every option that two configurations do not share."""
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


def freeze(path: Path, config: Mapping[str, Any], made_with: str = "another configuration") -> None:
    """Write `config` to `path` once; later, insist that it is still the same.

    Raises:
        UserError: naming the first option that differs from the file.
    """
    if path.exists():
        changed = list(differences(read_yaml(path), config))
        if changed:
            more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
            raise UserError(
                f"made with {made_with}: {changed[0]}{more}",
                path=path,
                remedy=f"keep the option, or remove {path.parent} to begin anew",
            )
    else:
        write_yaml(path, config)


def _checked(name: str, value: Any, hint: Any, where: str | Path) -> Any:
    kinds = typing.get_args(hint) or (hint,)
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    origins = tuple(typing.get_origin(kind) or kind for kind in kinds)
    if isinstance(value, bool) and bool not in origins:
        origins = ()
    if not isinstance(value, origins):
        wanted = " or ".join(getattr(kind, "__name__", str(kind)) for kind in origins) or "other"
        raise UserError(f"option {name!r} is {value!r}, not {wanted}", path=where)
    return value


def _copy(config: Any) -> Any:
    return (
        {key: _copy(value) for key, value in config.items()} if isinstance(config, dict) else config
    )
