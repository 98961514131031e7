"""Compiled code that forks of `fork_server.py` would read, or compile, again.

A command imports some 130 modules of fedtools. To read them, and to compile the methods that
dataclasses write as text, takes a third of a small command's processor time. A server keeps the
code, but runs none of it: each fork imports our modules itself.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import importlib
import marshal
import os
import re
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parent.parent
# Path -> the file's time and size, and the code.
_modules: dict[str, tuple[tuple[int, int], CodeType]] = {}
_texts: dict[str, CodeType] = {}
_read = SourceFileLoader.get_code


def keep_code(preloaded: bool) -> None:
    """Keep the code of fedtools' modules in this process, for its forks.

    Args:
        preloaded: whether what the modules import is imported already; otherwise only they are
            kept, and not what they compile.
    """
    for path in sorted((ROOT / "fedtools").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        # A file that does not compile is reported by the fork that imports it.
        with contextlib.suppress(SyntaxError):
            if code := _read(SourceFileLoader(name, str(path)), name):
                _modules[str(path)] = _state(str(path)), code
    SourceFileLoader.get_code = _get_code  # type: ignore[method-assign]
    if preloaded:
        texts, patterns = marshal.loads(_in_child())
        for text in texts:
            _texts[text] = compile(text, "<string>", "exec")
        for pattern, flags in patterns:
            re.compile(pattern, flags)
        # The name that this module looks up.
        dataclasses.exec = _exec  # type: ignore[attr-defined]


def _state(path: str) -> tuple[int, int]:
    # A `Path` would take longer to make.
    found = os.stat(path)  # noqa: PTH116
    return found.st_mtime_ns, found.st_size


def _get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
    """Stand in for `SourceFileLoader.get_code`."""
    state, code = _modules.get(loader.path, (None, None))
    return code if state and state == _state(loader.path) else _read(loader, name)


def _exec(text: str, names: dict[str, object], found: dict[str, object]) -> None:
    """Stand in for `exec` in `dataclasses`."""
    builtins.exec(_texts.get(text) or text, names, found)


def _in_child() -> bytes:
    """Return the texts and regular expressions that our modules compile when they are imported."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(ours)
            with open(theirs, "wb") as file:
                file.write(marshal.dumps(_compiled()))
        finally:
            os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as file:
        found = file.read()
    os.waitpid(child, 0)
    return found or marshal.dumps(([], []))


def _compiled() -> tuple[list[str], list[tuple[str, int]]]:
    texts: set[str] = set()

    def record(text: str, names: dict[str, object], found: dict[str, object]) -> None:
        texts.add(text)
        builtins.exec(text, names, found)

    dataclasses.exec = record  # type: ignore[attr-defined]
    before = {*re._cache}  # type: ignore[attr-defined]
    sys.path.insert(0, str(ROOT))
    for path in _modules:
        name = ".".join(Path(path).relative_to(ROOT).with_suffix("").parts)
        if not name.endswith("__main__"):
            # One that cannot be imported is reported by the fork that needs it.
            with contextlib.suppress(Exception):
                importlib.import_module(name.removesuffix(".__init__"))
    found = {*re._cache} - before  # type: ignore[attr-defined]
    patterns = [(pattern, flags) for kind, pattern, flags in found if kind is str]
    return sorted(texts), sorted(patterns)
