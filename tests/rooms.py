"""Print the number of modules and of lines of code in each room of fedtools.

    python3 tests/rooms.py [CHECKOUT]

Lines of code are those with a token that is no comment and no docstring.
"""

from __future__ import annotations

import ast
import sys
import tokenize
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fedtools.core.tables import format_table

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def count(path: Path) -> int:
    """Return a file's lines of code."""
    with tokenize.open(path) as file:
        text = file.read()
    texts = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            texts |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = set[int]()
    with open(path, "rb") as binary:
        for token in tokenize.tokenize(binary.readline):
            if token.type not in LAYOUT:
                lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - texts)


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
    modules, lines = Counter[str](), Counter[str]()
    for path in sorted((root / "fedtools").rglob("*.py")):
        room = str(path.parent.relative_to(root))
        modules[room] += 1
        lines[room] += count(path)
    rows = [(room, modules[room], lines[room]) for room in modules]
    total = ("all", modules.total(), lines.total())
    print(format_table(("room", "modules", "lines"), [*rows, total]), end="")


if __name__ == "__main__":
    main()
