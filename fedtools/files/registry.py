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
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Generic, TypeVar

from fedtools.files.config import unknown
from fedtools.files.errors import UserError

T = TypeVar("T")

_PACKAGE = Path(__file__).resolve().parent.parent


class Registry(Generic[T]):
    """What the modules of a package register; a module is imported when one of its names is used.

    Args:
        package: the package's name; made while that package is imported.
        what: what is registered, for messages: "method".
    """

    def __init__(self, package: str, what: str):
        self._package, self._what = package, what
        self._found: dict[str, T] = {}
        self._modules: dict[str, str] = {}
        folders = os.environ.get("FEDTOOLS_PATH", "").split(os.pathsep)
        last = package.rpartition(".")[2]
        own = [str(Path(os.path.realpath(folder)) / last) for folder in folders if folder]
        sys.modules[package].__path__.extend(dict.fromkeys(own))

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that makes a class, or an object, known by a name."""

        def keep(registered: T) -> T:
            known = self._modules.get(name, module)
            if known != module:
                problem = f"registers the {self._what} {name!r}, which {_file_of(known)} is"
                remedy = "choose another name"
                raise UserError(problem, path=_file_of(module), remedy=remedy)
            self._found[name], self._modules[name] = registered, module
            return registered

        # What is registered need not be a class, which would know its module.
        module = sys._getframe(1).f_globals["__name__"]

        return keep

    def get(self, name: object, where: str | Path | None) -> T:
        """What is registered by a name; a `UserError` names the nearest known one.

        Args:
            where: what the name was read from, if it was a file.
        """
        self._check_hidden()
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

    def _check_hidden(self) -> None:
        """Refuse a user's file that one of the same name hides, so that it is never imported."""
        files: dict[str, Path] = {}
        for folder in sys.modules[self._package].__path__:
            for file in sorted(Path(folder).glob("*.py")):
                if file.stem != "__init__" and file.stem in files:
                    problem = f"never imported: {files[file.stem]} has the same name"
                    raise UserError(problem, path=file, remedy="rename it")
                files[file.stem] = file

    def _import(self, module: str) -> None:
        """Import a file; whatever a user's own does wrong is an error that names it."""
        try:
            importlib.import_module(module)
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:
            path = str(getattr(find_spec(module), "origin", module))
            # The package's own files lack nothing but what is not installed, which is said above.
            if Path(path).is_relative_to(_PACKAGE):
                raise
            lines = [one.lineno for one in traceback.extract_tb(error.__traceback__)
                     if one.filename == path]  # fmt: skip
            last = lines[-1] if lines else None
            line = error.lineno if isinstance(error, SyntaxError) else last
            problem = f"cannot be imported: {type(error).__name__}: {error}"
            raise UserError(problem, path=path, line=line) from None


def _file_of(module: str) -> str:
    return str(getattr(sys.modules.get(module), "__file__", module))
