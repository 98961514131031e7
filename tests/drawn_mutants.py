"""Draw silent changes of fedtools' sources by a seed: the same for a commit, and valid Python."""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path

ROOMS = ("methods", "client", "server", "core", "data", "exchange", "privacy", "tasks")
KINDS = ("comparison", "plus-minus-one", "deletion", "swap")
COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
# What these say is compared with no oracle, nor is it computed with.
MESSAGES = {"print", "log", "note", "say", "tell", "Missing"}
# Swapped arguments make no difference to the first two, and an exception of the others.
UNSWAPPED = {"max", "min", "isinstance", "issubclass", "getattr", "hasattr", "setattr"}
DELETED = (ast.Raise, ast.Assert, ast.AugAssign, ast.Continue, ast.Break)


@dataclass(frozen=True)
class Edit:
    """A replacement of bytes of a source."""

    line: int
    kind: str
    begin: int
    end: int
    new: bytes


def draw(root: Path, number: int, seed: int) -> list[dict[str, str]]:
    """Return changes, as many of each kind in each room as there are, by turns.

    Args:
        root: a checkout.
        number: how many.
        seed: of the draw.

    Returns:
        entries of `mutants.py`: their names, files, old texts, which occur once, and new texts.
    """
    found: dict[tuple[str, str], list[tuple[Path, Edit]]] = defaultdict(list)
    for room in ROOMS:
        for path in sorted((root / "fedtools" / room).rglob("*.py")):
            for edit in edits(path):
                found[edit.kind, room].append((path, edit))
    pools = [found[key] for key in product(KINDS, ROOMS)]
    for place, pool in enumerate(pools):
        random.Random(f"{seed} {place}").shuffle(pool)
    drawn: dict[str, dict[str, str]] = {}
    while len(drawn) < number and any(pools):
        for pool in pools:
            if pool and len(drawn) < number:
                path, edit = pool.pop()
                name = f"{path.relative_to(root)}:{edit.line}:{edit.kind}"
                if name not in drawn and (entry := _entry(path, edit)):
                    drawn[name] = {"name": name, "file": str(path.relative_to(root)), **entry}
    return list(drawn.values())


def edits(path: Path) -> Iterator[Edit]:
    """Yield all changes that could be drawn from a file."""
    data = path.read_bytes()
    starts = [0, *accumulate(len(line) for line in data.splitlines(keepends=True))]

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        end_line, end_column = node.end_lineno or 0, node.end_col_offset or 0
        return starts[node.lineno - 1] + node.col_offset, starts[end_line - 1] + end_column

    for node in _computed(ast.parse(data)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            begin, end = span(node.left)[1], span(node.comparators[0])[0]
            old, new = (text.encode() for text in COMPARISONS[type(node.ops[0])])
            if old in data[begin:end]:
                changed = data[begin:end].replace(old, new, 1)
                yield Edit(node.lineno, "comparison", begin, end, changed)
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            for value in (node.value + 1, node.value - 1):
                yield Edit(node.lineno, "plus-minus-one", *span(node), str(value).encode())
        elif isinstance(node, ast.stmt) and _is_deleted(node):
            yield Edit(node.lineno, "deletion", *span(node), b"pass")
        elif isinstance(node, ast.Call) and _is_swapped(node):
            (begin, first), (second, end) = map(span, node.args[:2])
            changed = data[second:end] + data[first:second] + data[begin:first]
            yield Edit(node.lineno, "swap", begin, end, changed)


def _computed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those below it, without imports, annotations, decorators and messages."""
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.JoinedStr)):
        return
    if isinstance(node, (ast.Call, ast.If)) and _is_idle(node):
        return
    # A statement whose only call is a message is idle, too.
    if not (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _is_idle(node.value)
    ):
        yield node
    if isinstance(node, ast.Raise):
        return
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _computed(child)


def _called(node: ast.Call) -> str:
    """Return the last name of what is called."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _is_idle(node: ast.Call | ast.If) -> bool:
    """Return whether a node is a message, or is never run."""
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return _called(node) in MESSAGES or _called(node).endswith("Error")


def _is_deleted(node: ast.stmt) -> bool:
    """Return whether a statement's deletion goes unnoticed until its effect is missed."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.Assign):
        return all(isinstance(one, (ast.Attribute, ast.Subscript)) for one in node.targets)
    return isinstance(node, DELETED)


def _is_swapped(node: ast.Call) -> bool:
    first = node.args[:2]
    if len(first) < 2 or any(isinstance(one, ast.Starred) for one in first):
        return False
    return _called(node) not in UNSWAPPED and ast.dump(first[0]) != ast.dump(first[1])


def _entry(path: Path, edit: Edit) -> dict[str, str] | None:
    """Return an edit's lines before and after, with as many above them as make them unique."""
    data = path.read_bytes()
    changed = data[: edit.begin] + edit.new + data[edit.end :]
    try:
        if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(data)):
            return None
    except SyntaxError:
        return None
    begin = data.rfind(b"\n", 0, edit.begin) + 1
    end = data.find(b"\n", edit.end)
    while data.count(data[begin:end]) > 1:
        begin = data.rfind(b"\n", 0, begin - 1) + 1
    new = data[begin : edit.begin] + edit.new + data[edit.end : end]
    return {"old": data[begin:end].decode(), "new": new.decode()}
