"""Registries of methods, networks and tasks by name, each in a file of its own.

`fedtools/methods/fedprox.py` registers "fedprox"; no other file needs to know about it. Users' own
files lie in the folders of the environment variable FEDTOOLS_PATH (separated by ":"), under the
last part of the package's name: `$FEDTOOLS_PATH/methods/mine.py` is `fedtools.methods.mine`.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Generic, TypeVar

from fedtools.core.config import unknown
from fedtools.core.errors import UserError

T = TypeVar("T")

_PACKAGE = Path(__file__).resolve().parent.parent
_OWN = "FEDTOOLS_PATH"


def own_folders() -> list[Path]:
    """Return the folders of $FEDTOOLS_PATH, without links."""
    folders = os.environ.get(_OWN, "").split(os.pathsep)
    return [Path(os.path.realpath(folder)) for folder in folders if folder]


class Registry(Generic[T]):
    """The objects that a package's modules register; modules are imported when they are needed.

    Args:
        package: the package's name; the registry is made while that package is imported.
        what: the kind of object, for messages: "method".
        check: returns what an object lacks, or "".
    """

    def __init__(self, package: str, what: str, check: Callable[[T], str] = lambda found: ""):
        self._package, self._what, self._check = package, what, check
        self._found: dict[str, T] = {}
        self._modules: dict[str, str] = {}
        last = package.rpartition(".")[2]
        own = [str(folder / last) for folder in own_folders()]
        sys.modules[package].__path__.extend(dict.fromkeys(own))

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers a class, or an object, by a name."""

        def keep(registered: T) -> T:
            known = self._modules.get(name, module)
            if known != module:
                problem = f"registers the {self._what} {name!r}, as does {_file_of(known)}"
                remedy = "choose another name"
                raise UserError(problem, path=_file_of(module), remedy=remedy)
            if lacks := self._check(registered):
                remedy = f"see 'A {self._what}' in CONTRIBUTING.md"
                problem = f"the {self._what} {name!r} {lacks}"
                raise UserError(problem, path=_file_of(module), remedy=remedy)
            self._found[name], self._modules[name] = registered, module
            return registered

        # The module of the caller; a registered object may not know its module, as a class does.
        module = sys._getframe(1).f_globals["__name__"]

        return keep

    def get(self, name: object, where: str | Path | None) -> T:
        """Return the object registered by a name; raise a `UserError` that names the nearest one.

        Args:
            where: the file that the name was read from, if any.
        """
        self._check_hidden()
        # A file usually registers its own name, so that other files need not be imported.
        if isinstance(name, str) and name not in self._found and name.isidentifier():
            module = f"{self._package}.{name}"
            if find_spec(module):
                self._import(module)
        if not isinstance(name, str) or (name not in self._found and name not in self.names()):
            problem = unknown(str(name), self.names(), self._what)
            raise UserError(problem, path=where, remedy=self._remedy(str(name), problem))
        return self._found[name]

    def _remedy(self, name: str, problem: str) -> str | None:
        """Return where an unknown name was looked for, and what to do about a file of that name."""
        file = Path(self._package.rpartition(".")[2], f"{name}.py")
        for folder in (Path.cwd(), *Path.cwd().parents):
            own = folder / "fedtools" / file
            if name.isidentifier() and own.is_file() and not own.is_relative_to(_PACKAGE):
                return f"{own} is not in the package that runs, {_PACKAGE}: run pip install -e ."
        if "did you mean" in problem:
            return None
        places = [place for place in os.environ.get(_OWN, "").split(os.pathsep) if place]
        if not places:
            return f"${_OWN}, for {file.parent} of your own, is not set"
        return f"it is not in {', '.join(f'{place}/{file.parent}' for place in places)} either"

    def names(self) -> list[str]:
        """Return all names, in alphabetical order."""
        for module in pkgutil.iter_modules(sys.modules[self._package].__path__):
            self._import(f"{self._package}.{module.name}")
        return sorted(self._found)

    def _check_hidden(self) -> None:
        """Raise a `UserError` if a user's file is never imported, hidden by one of its name."""
        files: dict[str, Path] = {}
        for folder in sys.modules[self._package].__path__:
            for file in sorted(Path(folder).glob("*.py")):
                if file.stem != "__init__" and file.stem in files:
                    problem = f"never imported: {files[file.stem]} has the same name"
                    raise UserError(problem, path=file, remedy="rename it")
                files[file.stem] = file

    def _import(self, module: str) -> None:
        """Import a file; raise a `UserError` that names a user's file with any error in it."""
        try:
            importlib.import_module(module)
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:
            path = str(getattr(find_spec(module), "origin", module))
            # The package's own files can fail only for missing packages, which the caller reports.
            if Path(path).is_relative_to(_PACKAGE):
                raise
            line = error.lineno if isinstance(error, SyntaxError) else line_in(error, path)
            problem = f"cannot be imported: {type(error).__name__}: {error}"
            raise UserError(problem, path=path, line=line) from None


def undeclared(kind: type) -> str:
    """Return what a class of options lacks if some of its own are not those of a dataclass."""
    known = {field.name for field in dataclasses.fields(kind)}
    for name, hint in vars(kind).get("__annotations__", {}).items():
        if name not in known and "ClassVar" not in str(hint):
            return f"has an option {name!r}, but is no dataclass: @dataclass(frozen=True)"
    return ""


def line_in(error: BaseException, path: str | Path) -> int | None:
    """Return the last line of a file in the traceback of an error; None if it has none."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return lines[-1] if lines else None


def _file_of(module: str) -> str:
    return str(getattr(sys.modules.get(module), "__file__", module))
