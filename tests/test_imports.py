"""Every name that a Python file imports from fedtools exists, in functions and benches too."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from rooms import count

FILES = sorted(
    path
    for folder in ("fedtools", "local", "tests", "utils")
    for path in (ROOT / folder).rglob("*.py")
    if not path.is_symlink()
)


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Yield modules of fedtools that a file imports, each with a name from it, or with ""."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def missing(path: Path) -> Iterator[str]:
    for module, name in imported(path):
        if module.partition(".")[0] == "fedtools":
            try:
                found = importlib.import_module(module)
                if name and not hasattr(found, name):
                    importlib.import_module(f"{module}.{name}")
            except ImportError as error:
                yield f"{path.relative_to(ROOT)}: {error}"


def test_what_is_imported_exists():
    assert len(FILES) > 500
    assert not [said for path in FILES for said in missing(path)]


@pytest.mark.parametrize("line", ["from fedtools.core import nothing", "import fedtools.nothing"])
def test_what_does_not_exist_is_found(tmp_path, monkeypatch, line):
    monkeypatch.setattr("test_imports.ROOT", tmp_path)
    (tmp_path / "a.py").write_text(f"def late():\n    {line}\n")
    assert [said.partition(":")[0] for said in missing(tmp_path / "a.py")] == ["a.py"]


def test_lines_of_code_are_counted(tmp_path):
    text = '"""A module.\n\nMore.\n"""\n\n# No code.\nX = [\n    1,  # one\n]\n'
    text += 'def f():\n    """Say."""\n    return """two\nlines"""\n'
    (tmp_path / "a.py").write_text(text)
    assert count(tmp_path / "a.py") == 6
