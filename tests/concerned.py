"""Find the tests that a change of some lines concerns, in a result of `covered.py`."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from covered import covered_lines, read_seconds, read_sources


class OutdatedMap(Exception):
    """An error about a map of other sources."""


def run_lines(text: str, changed: range) -> set[int]:
    """Return the lines whose tests are concerned by a change.

    Args:
        text: a module.
        changed: some of its lines.

    Returns:
        the lines of the statements that change, or those of all functions if one of these is run
        only once a process: outside a function, or in one whose results are cached.
    """
    lines, bodies, once = set(changed), set(), False

    def visit(node: ast.AST, runs_once: bool) -> None:
        nonlocal once
        body = getattr(node, "body", None)
        if isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            begin = getattr(node, "lineno", 0) or node.pattern.lineno
            end = node.end_lineno if not body else max(begin, body[0].lineno - 1)
            header = {*range(begin, end + 1)}
            header.update(one.lineno for one in getattr(node, "decorator_list", ()))
            if header & {*changed}:
                lines.update(header)
                once |= runs_once
            if not runs_once:
                bodies.update(header)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            runs_once = any("cache" in ast.unparse(one) for one in node.decorator_list)
        for child in ast.iter_child_nodes(node):
            visit(child, runs_once)

    visit(ast.parse(text), True)
    return bodies or lines if once else lines


@dataclass
class Map:
    """Which tests run which lines, and how long they take."""

    path: Path
    sources: dict[str, list[str]] = field(init=False)
    seconds: dict[str, float] = field(init=False)
    unusable: set[str] = field(init=False)
    _phases: dict[str, list[tuple[str, set[int]]]] = field(init=False)

    def __post_init__(self) -> None:
        self.sources = read_sources(self.path)
        self.seconds, self.unusable = read_seconds(self.path)
        self._phases = defaultdict(list)
        for name, phase, lines in covered_lines(self.path):
            if phase:
                self._phases[name].append((phase, lines))

    def concerned(self, name: str, text: str, changed: range) -> list[str]:
        """Return the tests of a file's lines, in the order in which they are to run."""
        if self.sources.get(name) != text.splitlines():
            raise OutdatedMap(f"{self.path}: {name} has changed: measure again")
        lines = run_lines(text, changed)
        tests: dict[str, set[str]] = defaultdict(set)
        for phase, ran in self._phases[name]:
            if ran & lines:
                test, _, kind = phase.rpartition(" (")
                file = test.partition("::")[0]
                shared = kind == "setup)"
                tests[file].update(self._of_file(file) if shared else {test})
        cost = self.seconds.get
        kept = [sorted(one - self.unusable, key=lambda t: cost(t, 0)) for one in tests.values()]
        kept.sort(key=lambda some: sum(cost(test, 0) for test in some))
        return [test for some in kept for test in some]

    def _of_file(self, file: str) -> set[str]:
        return {test for test in self.seconds if test.startswith(f"{file}::")}

    def within(self, tests: list[str], budget: float) -> list[str]:
        """Return the first tests that take no longer than a budget, one at least."""
        left, number = budget, 0
        for number, test in enumerate(tests, 1):
            left -= self.seconds.get(test, 0)
            if left < 0 and number > 1:
                return tests[: number - 1]
        return tests[:number]
