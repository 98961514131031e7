"""Methods and networks by name, each found in a file of its own.

`fedtools/methods/fedprox.py` registers "fedprox"; nothing else has to know of it. Files of users
lie in folders named by the environment variable FEDTOOLS_PATH (separated by ":"), under the last
part of the package's name: `$FEDTOOLS_PATH/methods/mine.py` is `fedtools.methods.mine`.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Generic, TypeVar

from fedtools.files.config import unknown
from fedtools.files.errors import UserError

T = TypeVar("T")


class Registry(Generic[T]):
    """What the modules of a package register; a module is imported when one of its names is used.

    Args:
        package: the package's name; made while that package is imported.
        what: what is registered, for messages: "method".
    """

    def __init__(self, package: str, what: str):
        self._package, self._what = package, what
        self._found: dict[str, T] = {}
        folders = os.environ.get("FEDTOOLS_PATH", "").split(os.pathsep)
        last = package.rpartition(".")[2]
        own = [str(Path(folder).resolve() / last) for folder in folders if folder]
        sys.modules[package].__path__.extend(own)

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that makes a class known by a name."""

        def keep(registered: T) -> T:
            self._found[name] = registered
            return registered

        return keep

    def get(self, name: object, where: str | Path | None) -> T:
        """What is registered by a name; a `UserError` names the nearest known one.

        Args:
            where: what the name was read from, if it was a file.
        """
        # A file usually has the name of what it registers: the others need not be imported.
        if isinstance(name, str) and name not in self._found and name.isidentifier():
            module = f"{self._package}.{name}"
            if find_spec(module):
                self._import(module)
        if not isinstance(name, str) or (name not in self._found and name not in self.names()):
            raise UserError(unknown(str(name), self.names(), self._what), path=where)
        return self._found[name]

    def names(self) -> list[str]:
        """All names, in alphabetical order."""
        for module in pkgutil.iter_modules(sys.modules[self._package].__path__):
            self._import(f"{self._package}.{module.name}")
        return sorted(self._found)

    def _import(self, module: str) -> None:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            raise
        except (SyntaxError, ImportError, AttributeError, NameError, TypeError) as error:
            path = getattr(find_spec(module), "origin", module)
            problem = f"cannot be imported: {type(error).__name__}: {error}"
            raise UserError(problem, path=path) from None
