"""Collect the pages of the documentation site, see utils/site.sh.

    OUT/mkdocs.yml                  mkdocs.yml of this folder, with the pages in their order
    OUT/docs/README.md, egs/ ...    the repository's pages at the same paths, with their pictures
    OUT/docs/commands/              a page for each command: what `fedtools COMMAND --help` prints
    OUT/docs/methods.md             what `fedtools methods` prints, and the methods' docstrings
    OUT/docs/privacy.md             privacy.md of this folder, and docstrings of fedtools.privacy

A link to a file of the repository that is no page becomes one below --source, or without --source
its words alone. A link to a missing file is kept, so that `mkdocs build --strict` reports it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import os
import pkgutil
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import typer
import yaml

import fedtools
import fedtools.privacy
from fedtools.cli import GROUPS
from fedtools.cli.app import Commands, Kind, app
from fedtools.methods import METHODS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# The repository's pages.
PAGES = ("*.md", "egs/*.md", "egs/*/*/*.md", "fedtools/*.md", "tests/bench/*.md")
PICTURES = {".png", ".svg"}
# Blocks of code are matched first, so that nothing in them is taken for a link.
CODE_OR_LINK = re.compile(
    r"^```.*?^```|(?P<code>`[^`]+`)|(?P<words>!?\[[^\]]*\])\((?P<target>[^)\s]+)\)", re.M | re.S
)


class Links:
    """The links of all pages, as the site has them.

    Attributes:
        pages: paths of all pages.
        commands: names of all commands.
        source: the address of the repository's files, or None.
        pictures: paths of the pictures that pages have shown so far.
    """

    def __init__(self, pages: set[str], commands: set[str], source: str | None):
        self.pages, self.commands, self.source = pages, commands, source
        self.pictures: set[str] = set()

    def rewrite(self, page: str, text: str) -> str:
        """Return a page's text with links to what the site has, and names of commands as links."""

        def replace(found: re.Match[str]) -> str:
            if found["words"]:
                return self.link(page, found["words"], found["target"])
            command = self.command_in(found["code"] or "")
            if command is None or page_of(command) == page:
                return found[0]
            return f"[{found[0]}]({relative(page_of(command), page)})"

        return CODE_OR_LINK.sub(replace, text)

    def command_in(self, code: str) -> str | None:
        """Return the command that a span of code begins with, or None."""
        words = code.strip("`").split()
        for size in (3, 2):
            name = " ".join(words[1:size])
            if words[:1] == ["fedtools"] and name in self.commands:
                return name
        return None

    def link(self, page: str, words: str, target: str) -> str:
        """Return a link to a page, a picture or a file of the repository."""
        path, hash_, anchor = target.partition("#")
        file = os.path.normpath(Path(page).parent / path)
        is_relative = path and not re.match(r"/|\w+:", path)
        if not is_relative or file in self.pages or not (ROOT / file).exists():
            return f"{words}({target})"
        if f"{file}/README.md" in self.pages:
            return f"{words}({relative(f'{file}/README.md', page)}{hash_}{anchor})"
        if Path(file).suffix in PICTURES:
            self.pictures.add(file)
            return f"{words}({target})"
        # A recipe's local/ is a link to a folder at the top.
        file = os.path.relpath((ROOT / file).resolve(), ROOT)
        return f"{words}({self.source}/{file}{hash_}{anchor})" if self.source else words[1:-1]


def relative(page: str, start: str) -> str:
    """Return the path of a page as another page links to it."""
    return os.path.relpath(page, Path(start).parent)


def page_of(command: str) -> str:
    """Return the path of a command's page."""
    return f"commands/{command.replace(' ', '/')}.md"


def list_commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all commands by their names, such as "attack a1"."""
    for name, one in group.commands.items():
        if isinstance(one, Commands):
            yield from list_commands(one, f"{before}{name} ")
        else:
            yield before + name, one


def run_fedtools(*arguments: str) -> str:
    """Return what a command prints, in this process."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        typer.main.get_command(app)(arguments, "fedtools", standalone_mode=False)
    return out.getvalue()


def make_commands(kinds: dict[str, dict[str, str]]) -> dict[str, str]:
    """Make the list of commands, and a page for each command.

    Args:
        kinds: the summary of each command, by kind and name.
    """
    pages = {"commands/index.md": "# Commands\n"}
    for kind, summaries in kinds.items():
        rows = [f"| `fedtools {name}` | {summary} |" for name, summary in summaries.items()]
        pages["commands/index.md"] += f"\n## {kind}\n\n| command | what it does |\n|---|---|\n"
        pages["commands/index.md"] += "".join(f"{row}\n" for row in rows)
        for name, summary in summaries.items():
            shown = run_fedtools(*name.split(), "--help")
            text = f"# fedtools {name}\n\n{summary}\n\n```text\n{shown}```\n"
            recipe = re.search(r"^Example in (\S+):$", shown, re.M)
            if recipe:
                target = relative(f"{recipe[1]}/README.md", page_of(name))
                text += f"\nThe recipe of the example: [`{recipe[1]}`]({target}).\n"
            others = ", ".join(f"`fedtools {one}`" for one in summaries if one != name)
            pages[page_of(name)] = text + (f"\nSee also {others}.\n" if others else "")
    return pages


def escape(line: str) -> str:
    """Escape characters of Markdown, but for code, so that they mean themselves."""

    def replace(found: re.Match[str]) -> str:
        # Python-Markdown knows no backslash before this one.
        return found[1] or ("&lt;" if found[2] == "<" else f"\\{found[2]}")

    return re.sub(r"(`[^`]*`)|([<*\\])", replace, line)


def read_docstring(module: str) -> str:
    """Return a module's docstring as Markdown, with the path of its file."""
    found = importlib.import_module(module)
    lines = inspect.cleandoc(found.__doc__ or "").splitlines()
    text = "\n".join(line if line.startswith("    ") else escape(line) for line in lines)
    file = os.path.relpath(found.__file__ or "", Path(fedtools.__file__).parent.parent)
    return f"{text}\n\nSource: [`{file}`]({file})\n"


def make_methods() -> str:
    """Make the page of methods: the table, then the docstring of each file."""
    rows = [re.split(r"  +", line) for line in run_fedtools("methods").splitlines()]
    table = [f"| {' | '.join(row)} |\n" for row in rows]
    text = f"# Methods\n\n{table[0]}|---|---|---|\n{''.join(table[1:])}"
    modules: dict[str, list[str]] = {}
    for name, title, *_ in rows[1:]:
        modules.setdefault(METHODS.get(name, None).__module__, []).append(title)
    for module, titles in modules.items():
        text += f"\n## {', '.join(titles)}\n\n{read_docstring(module)}"
    return text


def make_privacy() -> str:
    """Make the page of privacy: the one of this folder, then the docstrings of fedtools.privacy."""
    text = (HERE / "privacy.md").read_text(encoding="utf-8")
    text += f"\n## How counts are released\n\n{read_docstring('fedtools.privacy')}"
    for module in pkgutil.iter_modules(fedtools.privacy.__path__):
        text += f"\n### {module.name}\n\n{read_docstring(f'fedtools.privacy.{module.name}')}"
    return text


def make_navigation(own: list[str], kinds: dict[str, dict[str, str]]) -> list[Any]:
    """Return mkdocs's list of pages in their order; `own` are the repository's."""
    recipes: list[Any] = [page for page in own if re.fullmatch(r"egs/[^/]*", page)]
    for folder in sorted({str(Path(page).parent) for page in own if page.count("/") == 3}):
        pages = [page for page in own if str(Path(page).parent) == folder]
        names = {"README": "Recipe", "RESULTS": "Results"}
        listed = [{names.get(Path(page).stem, Path(page).stem): page} for page in pages]
        recipes.append({folder.removeprefix("egs/"): listed})
    commands: list[Any] = [{"All commands": "commands/index.md"}]
    for kind, summaries in kinds.items():
        commands.append({kind: [{name: page_of(name)} for name in summaries]})
    navigation: list[Any] = [
        {"Overview": "README.md"},
        {"Recipes": recipes},
        {"Commands": commands},
        {"The folder of a federation": "fedtools/README.md"},
        {"Options": "fedtools/OPTIONS.md"},
        {"Methods": "methods.md"},
        {"Privacy": "privacy.md"},
        {"Speeds": "tests/bench/README.md"},
    ]
    placed = {"README.md", "fedtools/README.md", "fedtools/OPTIONS.md", "tests/bench/README.md"}
    return navigation + [page for page in own if page not in placed and "egs/" not in page]


def main() -> int:
    parser = argparse.ArgumentParser(description="Collect the pages of the documentation site.")
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument("--source", metavar="URL", help="the address of the repository's files")
    options = parser.parse_args()
    for name in GROUPS:
        importlib.import_module(f"fedtools.cli.{name}")
    kinds: dict[str, dict[str, str]] = {kind: {} for kind in get_args(Kind)}
    for name, command in list_commands(typer.main.get_command(app)):
        kinds[command.rich_help_panel][name] = command.help.partition("\n")[0]

    files = sorted(path for pattern in PAGES for path in ROOT.glob(pattern))
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}
    own = list(texts)
    texts |= make_commands(kinds)
    texts |= {"methods.md": make_methods(), "privacy.md": make_privacy()}
    names = {name for summaries in kinds.values() for name in summaries}
    links = Links(set(texts), names, options.source)
    docs = options.out / "docs"
    for page, text in texts.items():
        (docs / page).parent.mkdir(parents=True, exist_ok=True)
        (docs / page).write_text(links.rewrite(page, text), encoding="utf-8")
    for picture in links.pictures:
        shutil.copy(ROOT / picture, docs / picture)
    shutil.copytree(HERE / "assets", docs / "assets")
    settings = {
        "INHERIT": str(HERE / "mkdocs.yml"),
        "docs_dir": "docs",
        "nav": make_navigation(own, kinds),
    }
    (options.out / "mkdocs.yml").write_text(yaml.safe_dump(settings, sort_keys=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
