"""The code that an experiment began with: defaults of options, and files of the user's own.

    EXP/config.yaml   its section `defaults`: values of the options that were not given
    EXP/code.yaml     SHA-256 of files that are neither fedtools' nor an installed package's

Both are compared whenever an experiment is opened, since a method that changed between two rounds
gives results of neither.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedtools.client.attackers.options import SECTION, Attackers
from fedtools.core.atomic import sha256
from fedtools.core.config import declared, fix, read_yaml
from fedtools.core.errors import UserError
from fedtools.core.registry import own_folders
from fedtools.exchange.experiment import Experiment
from fedtools.exchange.options import Options
from fedtools.methods import sections_of
from fedtools.methods.base import Method
from fedtools.tasks.base import Task

CODE = "code.yaml"
_PACKAGE = Path(__file__).resolve().parent.parent
_REMEDY = "put the code back, or begin another experiment"


def kinds_of(options: Options, method: Method, task: type[Task[Any]]) -> dict[str, type]:
    """Return the classes of an experiment's sections, by names such as "model.network_conf"."""
    rule = {"method_conf.robust": type(method.rule)}
    own = {SECTION: Attackers} if options.attackers else {}
    return {**sections_of(type(method)), **rule, **task.kinds(options), **own}


def defaults_of(options: Options, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return the values of options that were not given, in sections as in the configuration."""
    found: dict[str, Any] = {}
    for section, kind in kinds.items():
        given: Any = vars(options)
        for name in section.split("."):
            given = given.get(name) if isinstance(given, Mapping) else None
        for name, value in defaults(kind).items():
            # A section of options is in `kinds` itself.
            if name not in (given or {}) and f"{section}.{name}" not in kinds:
                place = found
                for part in section.split("."):
                    place = place.setdefault(part, {})
                place[name] = value
    return found


def defaults(kind: type) -> dict[str, Any]:
    """Return the defaults of a class's options as they read in YAML; those without are left out."""
    read = {name: _as_read(value) for name, value in declared(kind).items()}
    return {name: value for name, value in read.items() if value is not NotImplemented}


def _as_read(value: Any) -> Any:
    """Return a value as YAML reads it back; NotImplemented for one that YAML does not have."""
    if isinstance(value, (list, tuple)):
        return [_as_read(one) for one in value]
    return value if isinstance(value, (str, int, float, dict, type(None))) else NotImplemented


def write_code(experiment: Path, own: Mapping[str, Path]) -> None:
    """Write the sums of the user's own files of a new experiment, if there are any."""
    if own:
        sums = {module: sha256(file) for module, file in own.items()}
        fix(experiment / CODE, sums, "other code")


def check_code(experiment: Experiment, method: Method, task: type[Task[Any]]) -> None:
    """Raise a `UserError` if the code has changed since an experiment began.

    Files are compared that are the user's own, and the defaults of all options that were not given.
    """
    kinds = kinds_of(experiment.options, method, task)
    path = experiment.path / CODE
    known = read_yaml(path) if path.exists() else {}
    for module, file in own_files(kinds.values(), task).items() if known else ():
        if known.get(module) != sha256(file):
            problem = f"changed since {experiment.path} began with it"
            raise UserError(problem, path=file, remedy=_REMEDY)
    now = defaults_of(experiment.options, kinds)
    for name, (old, new) in _changes(experiment.options.defaults, now):
        problem = f"the default of {name} was {old!r} when the experiment began, and is {new}"
        raise UserError(problem, path=experiment.path / "config.yaml", remedy=_REMEDY)


def _changes(old: Mapping[str, Any], new: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names of values that are not as they were, with both; new names do not count."""
    there = new if isinstance(new, Mapping) else {}
    for name, value in old.items():
        if isinstance(value, Mapping) and isinstance(there.get(name), Mapping):
            yield from _changes(value, there[name], f"{place}{name}.")
        elif name not in there:
            yield f"{place}{name}", (value, "no option now")
        elif there[name] != value:
            yield f"{place}{name}", (value, f"{there[name]!r} now")


def own_files(kinds: Iterable[type], task: type) -> dict[str, Path]:
    """Return the user's own files that classes depend on, by the names of their modules.

    These are the files of the classes, of the classes that they are derived from, and whatever
    these files import.
    """
    bases = (base for kind in (*kinds, task) for base in kind.__mro__)
    left = list(dict.fromkeys(base.__module__ for base in bases))
    found: dict[str, Path] = {}
    for module in left:
        file = None if module in found else _file_of(module)
        if file and _is_own(Path(file)):
            found[module] = Path(file)
            # Files of a task's folder, which registers it, come with their package.
            left += filter(None, [module.rpartition(".")[0], *_imported(module, Path(file))])
    return dict(sorted(found.items()))


def _file_of(module: str) -> str | None:
    """Return a module's file; a package is not imported to look for modules in it."""
    if module in sys.modules:
        return getattr(sys.modules[module], "__file__", None)
    above = module.rpartition(".")[0]
    if above and not hasattr(sys.modules.get(above), "__path__"):
        return None
    spec = find_spec(module)
    return spec.origin if spec and spec.has_location else None


def _imported(module: str, file: Path) -> Iterator[str]:
    """Yield the names of all modules that a file may import, also within functions."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) + 1 - node.level] if node.level else []
            start = ".".join([*above, *([node.module] if node.module else [])])
            yield start
            yield from (f"{start}.{name.name}" for name in node.names)


def _is_own(file: Path) -> bool:
    """Return whether a file is in $FEDTOOLS_PATH, or else in no folder of installed packages."""
    file = file.resolve()
    if any(file.is_relative_to(folder) for folder in own_folders()):
        return True
    return not any(file.is_relative_to(folder) for folder in _installed())


@cache
def _installed() -> tuple[Path, ...]:
    """Return the folders of fedtools, Python and the packages of its environment."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return (_PACKAGE, *(Path(sysconfig.get_path(name)).resolve() for name in names))
