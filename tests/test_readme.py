"""The README files: all commands run, all options are known, all files exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from conftest import ROOT, fedtools, inside
from pages import CONTRIBUTING, OWN_CORPUS, SET_UP, SITES, bash, blocks

TOP = ROOT / "README.md"
RECIPES = sorted((ROOT / "egs").glob("*/*/README.md"))
READMES = [TOP, *RECIPES, ROOT / "fedtools/README.md", ROOT / "tests/bench/README.md"]
ROBUST = ROOT / "fedtools/server/robust/README.md"
PAGES = [*READMES, ROBUST, CONTRIBUTING, OWN_CORPUS, SITES, ROOT / "CHANGELOG.md"]


def commands(page: Path, heading: str = "") -> list[str]:
    """Return the lines of a page's shell blocks, or of a section's, without comments."""
    whole = blocks(page, heading).replace("\\\n", " ")
    lines = (line.split("#")[0].strip() for line in whole.splitlines())
    return [line for line in lines if line]


# Commands that take hours, or set up an environment. test_pages.py runs the rest of the other
# pages.
RUNS = [(page, line) for page in READMES for line in commands(page) if "run.sh" in line]
RUNS += [(CONTRIBUTING, line) for line in commands(CONTRIBUTING, SET_UP)]


def test_there_are_commands():
    top = commands(TOP)
    assert top == ["egs/speechcommands/kws1/run.sh", "tests/run.sh"]
    assert len(RECIPES) == len(list((ROOT / "egs").glob("*/*/run.sh")))
    assert {page for page, _ in RUNS} >= {TOP, *RECIPES}


@pytest.mark.parametrize(("page", "line"), RUNS, ids=[line for _, line in RUNS])
def test_commands_parse(page, line):
    """With --help appended, the scripts succeed after reading the preceding options."""
    option = "--version" if line.startswith("tests/") else "--help"
    # A line of a loop has the loop's variable.
    bash(f"set +u; {line} {option}", page.parent).ok()


SCRIPTS = [
    (page, script)
    for page in PAGES
    for script in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)
]


@pytest.mark.parametrize(("page", "script"), SCRIPTS, ids=[str(page) for page, _ in SCRIPTS])
def test_scripts_parse(page, script):
    """Every command of a script with variables and loops succeeds with --help appended."""
    of_command = r"^(\s*)((?:\./|utils/|local/)\S+|fedtools)(?= )"
    changed, count = re.subn(of_command, r"\1with_help \2", script, flags=re.M)
    assert count
    bash(f'with_help() {{ "$@" --help; }}\n{changed}', page.parent).ok()


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_options_of_the_recipes_are_known(page):
    here = page.parent / "run.sh"
    scripts = [here] if here.exists() else list((ROOT / "egs").glob("*/*/run.sh"))
    texts = [path.read_text() for path in scripts]
    known = {"help"}.union(*(re.findall(r"^([a-z_]+)=", text, flags=re.M) for text in texts))
    told = re.findall(r"`(\./run\.sh [^`]*)`", page.read_text(encoding="utf-8"))
    if page in RECIPES:
        told += re.findall(r"^\| (`--[^|]*) \|", page.read_text(encoding="utf-8"), flags=re.M)
    told += [line for line in commands(page) if "/run.sh" in line]
    mentioned = {o.replace("-", "_") for line in told for o in re.findall(r"--([a-z_-]+)", line)}
    assert mentioned <= known, mentioned - known


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_fedtools_commands_exist(page):
    for name in set(re.findall(r"`fedtools ([a-z-]+)", page.read_text(encoding="utf-8"))):
        inside(name, "--help").ok()


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_files_are_there(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", text):
        there = (page.parent / target if target else page).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.+)$", there, flags=re.M)
        slugs = {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}
        assert anchor in slugs, f"{target}#{anchor}"
    folders = "egs|conf|local|fedtools|utils|tests"
    for name in re.findall(rf"`((?:{folders})/[a-zA-Z0-9_./]*)`", text):
        assert (page.parent / name).exists() or (ROOT / name).exists(), name


def test_the_table_is_that_of_the_results():
    """The README repeats the first rows of a page's summary, and has no figures of its own."""
    found = re.findall(r"<!-- summary of (\S+) -->\n\n(.*?)\n\n", TOP.read_text(), flags=re.S)
    assert len(found) == 1
    for name, table in found:
        header, _, *rows = (cells(line) for line in table.splitlines())
        results = [cells(line) for line in (ROOT / name).read_text(encoding="utf-8").splitlines()]
        assert len(header) == 5 and len(rows) >= 4
        summary = results[results.index(header) :]
        summary = summary[: summary.index([""])]
        assert [row for row in summary if row in rows] == rows


def cells(line: str) -> list[str]:
    """Return the cells of a table's line."""
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_methods_are_those_of_the_command():
    shown = re.findall(r"^```text\n(name .*?)```$", TOP.read_text(), flags=re.S | re.M)
    # In a process of its own: other tests add methods to this one.
    assert shown == [fedtools("methods").ok().out]


def test_the_method_shown_is_that_of_the_package():
    """Its lines are fedprox.py's, in order, without imports, docstrings and types."""
    (shown,) = re.findall(r"^```python\n(.*?)```$", TOP.read_text(), flags=re.S | re.M)
    there = ast.parse((ROOT / "fedtools/methods/fedprox.py").read_text())
    (method,) = (one for one in there.body if isinstance(one, ast.ClassDef))
    kept = {"proximal", "objective"}
    method.body = [one for one in method.body if name_of(one) in kept]
    for one in ast.walk(method):
        if isinstance(one, ast.FunctionDef):
            one.returns = None
            one.body = [
                line
                for line in one.body
                if not isinstance(line, ast.ImportFrom)
                and not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
            ]
        if isinstance(one, ast.arg):
            one.annotation = None
    assert ast.unparse(method) == ast.unparse(ast.parse(shown))


def name_of(statement: ast.stmt) -> str:
    if isinstance(statement, ast.FunctionDef):
        return statement.name
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return statement.target.id
    return ""
