"""The options of all commands that write a section of RESULTS.md."""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any, TypeVar

from fedtools.report.page import Corpus, Page

Kind = TypeVar("Kind", bound=Page)

SECTION = re.compile(r"[a-z0-9][a-z0-9-]*")


def add_page_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a recipe's own report, for `page_of`."""
    add = parser.add_argument
    add("--section", required=True, help="the section to write, e.g. mini")
    add("--corpus", required=True, help="name of the corpus")
    add("--release", required=True, help="release of the corpus")
    add("--mini", action="store_true", help="mark the corpus as a mini corpus in every caption")
    add("--command", help="the command that made the figures (default: this command)")
    add("--date", type=date, help="date of the report, as 2024-02-03 (default: today)")


def date(text: str) -> datetime.date:
    """Read a date as 2024-02-03."""
    return datetime.date.fromisoformat(text)


def page_of(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    kind: type[Kind],
    **more: Any,
) -> Kind:
    """Make a page from the options of `add_page_options`; wrong usage exits 2."""
    names = ("section", "corpus", "release", "mini", "command", "date")
    try:
        return kind(**page_facts(*(getattr(options, name) for name in names)), **more)
    except ValueError as error:
        parser.error(str(error))


def own_command(program: str = "") -> str:
    """Return this process's command, without the folders above the current and the user's own.

    Args:
        program: what it begins with; by default the name of the running script.
    """
    words = [program or Path(sys.argv[0]).name, *sys.argv[1:]]
    home = os.environ.get("HOME", "").rstrip("/")
    for folder, short in ((str(Path.cwd()).rstrip("/"), "."), (home, "~")):
        # At the start of a path, which may follow a name, and no part of a longer name.
        path = re.compile(rf"(^|[=:]){re.escape(folder)}(?=/|:|$)")
        words = [path.sub(rf"\1{short}", word) for word in words] if folder else words
    return shlex.join(re.sub(r"(^|[=:])\./", r"\1", word) for word in words)


def page_facts(
    section: str,
    corpus: str,
    release: str,
    mini: bool,
    command: str | None,
    date: datetime.date | None,
) -> dict[str, Any]:
    """Return the attributes that every `Page` has.

    Raises:
        ValueError: if the section's name is malformed.
    """
    if not SECTION.fullmatch(section):
        raise ValueError(f"--section {section!r}: use small letters, digits and '-'")
    return {
        "section": section,
        "corpus": Corpus(corpus, release, mini),
        "command": command or own_command(),
        "date": date,
    }
