"""The documentation site: its pages are the repository's, and a broken link fails the build."""

from __future__ import annotations

import ast
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from conftest import ROOT, fedtools, inside, run
from markdown_it import MarkdownIt

BUILD = ROOT / "utils/site.sh"
SOURCE = "https://files.example/fedtools"
PAGES = sorted(
    path.relative_to(ROOT)
    for path in [
        *ROOT.glob("*.md"),
        *ROOT.glob("egs/*.md"),
        *ROOT.glob("egs/*/*/*.md"),
        *ROOT.glob("fedtools/*.md"),
        ROOT / "tests/bench/README.md",
    ]
)
COMMANDS = [
    re.split(r"  +", line[2:])[0]
    for line in inside("--help").ok().out.partition("Federation:")[2].splitlines()
    if line.startswith("  ")
]
# Elements with a page's content, in both renderings.
ELEMENTS = "table tr td th li ul ol h1 h2 h3 h4 img em strong".split()


class Page(HTMLParser):
    """Text and links of an HTML file.

    Args:
        text: the HTML.
        article: whether to read only the page's <article>.
    """

    def __init__(self, text: str, article: bool = False):
        super().__init__()
        self.within, self.article, self.anchor = not article, article, False
        self.elements: Counter[str] = Counter()
        self.words, self.blocks = "", [""]
        self.links: list[tuple[str, str]] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.anchors |= {value for name in ("id", "name") if (value := values.get(name))}
        self.links += [(tag, value) for name in ("href", "src") if (value := values.get(name))]
        self.within |= self.article and tag == "article"
        # After each heading, the site has a link to it.
        self.anchor |= values.get("class") == "headerlink"
        if self.within and not self.anchor:
            self.elements[tag] += 1
        if tag == "pre":
            self.blocks.append("")

    def handle_endtag(self, tag: str) -> None:
        self.within &= not (self.article and tag == "article")
        self.anchor &= tag != "a"
        if tag == "pre":
            self.blocks.append("")

    def handle_data(self, text: str) -> None:
        if self.within and not self.anchor:
            self.words += text
            self.blocks[-1] += text


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Build the site of this checkout over another one."""
    out = tmp_path_factory.mktemp("a folder") / "site"
    (out / "assets").mkdir(parents=True)
    (out / "assets/iframe-worker.js").touch()
    (out / "old.html").touch()
    built = run(BUILD, "--source", f"{SOURCE}/", out).ok()
    assert str(out / "index.html") in built.err
    assert not (out / "old.html").exists()
    return out


def html_of(page: Path) -> Path:
    """Return the file of a page, below the site's folder."""
    return page.with_name("index.html") if page.stem == "README" else page.with_suffix(".html")


def read(path: Path) -> Page:
    """Return the article of a page."""
    return Page(path.read_text(encoding="utf-8"), article=True)


def words(text: str) -> str:
    """Return a text without its line breaks."""
    return " ".join(text.split())


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_page_reads_as_commonmark_says(site, page):
    """Another renderer produces the same words, tables, lists and images."""
    shown = read(site / html_of(page))
    text = (ROOT / page).read_text(encoding="utf-8")
    expected = Page(MarkdownIt("commonmark").enable("table").render(text))
    assert words(shown.words) == words(expected.words)
    assert [shown.elements[one] for one in ELEMENTS] == [expected.elements[one] for one in ELEMENTS]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_a_page_with_its_help(site, name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    # So that usage names the program "fedtools", not "python -m pytest".
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)
    page = f"commands/{name.replace(' ', '/')}.html"
    assert inside(*name.split(), "--help").ok().out in read(site / page).blocks
    listed = Page((site / "commands/index.html").read_text(encoding="utf-8")).links
    assert ("a", page.removeprefix("commands/")) in listed


def docstrings(room: str) -> Iterator[tuple[str, str]]:
    """Yield the docstrings of a package's modules, by their names."""
    for path in sorted((ROOT / "fedtools" / room).glob("*.py")):
        source = path.read_text(encoding="utf-8")
        if room == "privacy" or "METHODS.register(" in source:
            yield path.stem, ast.get_docstring(ast.parse(source))


@pytest.mark.parametrize("room", ["methods", "privacy"])
def test_docstrings_are_shown_as_they_are(site, room):
    shown = words(read(site / f"{room}.html").words)
    found = dict(docstrings(room))
    assert len(found) > 5
    for name, text in found.items():
        # Docstrings use code and lists of Markdown.
        assert words(re.sub(r"`|^- ", "", text, flags=re.M)) in shown, name


def test_methods_are_those_of_the_command(site):
    page = read(site / "methods.html")
    rows = fedtools("methods").ok().out.splitlines()
    assert page.elements["tr"] == len(rows) > 10
    for row in rows:
        assert words(row) in words(page.words)


def test_links_lead_somewhere(site):
    """Links between pages and to anchors, images, styles, scripts exist; none is on a network."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    # The page shown instead of a missing one has addresses relative to the server.
    del pages[site / "404.html"]
    pictures, sources = 0, []
    for path, page in pages.items():
        for tag, link in page.links:
            if re.match(r"\w+:", link):
                assert tag == "a", f"{path}: {link} is on a network"
                sources += [link] if link.startswith(SOURCE) else []
                continue
            target, _, anchor = link.partition("#")
            file = (path.parent / unquote(target)).resolve() if target else path
            assert file.is_file(), f"{path}: {link}"
            assert not anchor or unquote(anchor) in pages[file].anchors, f"{path}: {link}"
            pictures += tag == "img" and file.suffix in (".png", ".svg")
    assert pictures == sum(len(re.findall(r"!\[", (ROOT / page).read_text())) for page in PAGES)
    assert f"{SOURCE}/fedtools/methods/fedprox.py" in sources
    for link in sources:
        assert (ROOT / link.removeprefix(f"{SOURCE}/")).exists(), link


def test_without_a_source_links_to_other_files_are_words(tmp_path):
    run(sys.executable, ROOT / "utils/site/pages.py", tmp_path).ok()
    text = (tmp_path / "docs/fedtools/README.md").read_text(encoding="utf-8")
    assert "`methods/fedprox.py`" in text and "](methods/" not in text
    assert "](fedtools/README.md)" in (tmp_path / "docs/README.md").read_text(encoding="utf-8")


def test_broken_links_fail_the_build(tmp_path):
    copy = tmp_path / "a check out"
    for folder in ("egs", "fedtools", "utils", "tests/bench"):
        ignored = shutil.ignore_patterns("*.pyc", "exp", "dump", "data", "downloads")
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=ignored)
    page = "# Title\n\n[a](egs/ami/rescore1/README.md#nowhere), [b](egs/none.md), [c](#none)\n\n"
    (copy / "README.md").write_text(f"{page}![d](egs/none.png) [e](README.md#title)\n")
    done = run(copy / "utils/site.sh", tmp_path / "site")
    assert done.code != 0
    for target in ("README.md#nowhere", "egs/none.md", "#none", "egs/none.png"):
        assert f"'{target}'" in done.err.replace("egs/ami/rescore1/README.md#", "README.md#")
    assert "#title" not in done.err
    assert not (tmp_path / "site").exists()


def test_only_a_site_is_replaced(tmp_path):
    (tmp_path / "thesis.txt").write_text("years")
    run(BUILD, tmp_path).fails(1, f"{tmp_path} exists and is not a site")
    run(BUILD, tmp_path / "thesis.txt").fails(1, "exists and is not a site")
    run(BUILD, "one", "two").fails(2, "'two'")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
