"""The command line itself; each group of commands registers with it."""

from __future__ import annotations

import copy
import functools
import inspect
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar, get_args, get_type_hints

import typer
from annotated_types import Ge, Le
from typer.core import TyperCommand, TyperGroup

from fedtools import __version__
from fedtools.core.errors import exit_with_message, harmless

# Of typer's own copy of click, or in earlier versions of click.
UsageError: Any = typer.BadParameter.__base__
Function = TypeVar("Function", bound=Callable[..., None])
# The headings in `fedtools --help`, in order.
Kind = Literal[
    "Federation",
    "Data",
    "Language models",
    "Decoding and scoring",
    "Rescoring",
    "Privacy",
    "Attacks",
    "Reports",
]


class Commands(TyperGroup):
    """A group of commands whose help lists them by kind, including those of nested groups."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a line for each command, wrapped on a narrow terminal, never truncated."""
        found = list(self._listed())
        width = max(len(name) for name, _ in found)
        for kind in get_args(Kind):
            rows = [
                (name.ljust(width), (one.help or "").partition("\n")[0].rstrip("."))
                for name, one in found
                if one.rich_help_panel == kind
            ]
            if rows:
                with formatter.section(kind):
                    formatter.write_dl(rows)

    def _listed(self, before: str = "") -> Iterator[tuple[str, Any]]:
        for name, one in self.commands.items():
            if isinstance(one, Commands):
                yield from one._listed(f"{before}{name} ")
            else:
                yield before + name, one


class Command(TyperCommand):
    """A command whose help ends with an example."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the example as a shell command, on several lines if it is long."""
        place, _, line = (self.epilog or "").partition(": ")
        words = " ".join(shlex.quote(word).replace(" ", "\0") for word in shlex.split(line))
        with formatter.section(f"Example {place}"):
            before = " " * formatter.current_indent
            # Keep an option and its value together, and leave room for the backslash.
            lines = textwrap.wrap(
                re.sub(r"(--[a-z-]+) (?!--)", "\\1\0", words),
                formatter.width - 2,
                initial_indent=before,
                subsequent_indent=f"{before}    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            formatter.write(" \\\n".join(lines).replace("\0", " ") + "\n")


def make_group(help_: str, **options: Any) -> typer.Typer:
    """Make an empty group of commands."""
    # Plain text: rich takes time to import, and its frames take columns from the text.
    return typer.Typer(
        cls=Commands, help=help_, no_args_is_help=True, rich_markup_mode=None, **options
    )


app = make_group(
    "Federated learning in speech, from audio to a table.",
    name="fedtools",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def narrowed(group: typer.Typer, words: Sequence[str]) -> typer.Typer:
    """Return a group with only the command that the first words name, or else with all.

    To make all commands from their functions takes longer than to run a short one.
    """
    word = words[0] if words else None
    commands = [one for one in group.registered_commands if one.name == word]
    groups = [copy.copy(one) for one in group.registered_groups if one.name == word]
    if not commands and not groups:
        return group
    for one in groups:
        one.typer_instance = narrowed(one.typer_instance, words[1:])
    found = copy.copy(group)
    found.registered_commands, found.registered_groups = commands, groups
    return found


def command(name: str, kind: Kind, to: typer.Typer = app) -> Callable[[Function], Function]:
    """Register a command, whose help is its docstring.

    Lists of commands show the docstring's first line. Its last paragraphs are `Reads: ...`,
    `Writes: ...` and `Example in <recipe>: fedtools ...`.
    """

    def register(function: Function) -> Function:
        text, _, example = inspect.cleandoc(function.__doc__ or "").partition("\n\nExample ")
        settings = {"help": text, "epilog": example, "rich_help_panel": kind}
        return to.command(name, cls=Command, **settings)(function)

    return register


def script(function: Callable[..., None], program: str, about: str | None) -> None:
    """Run a recipe's script as a command.

    Exit with 1 for bad input and with 2 for wrong usage, after one line on stderr.

    Args:
        function: its parameters are the arguments and options; a `typer.BadParameter` that it
            raises is wrong usage.
        program: the script's name.
        about: the help; the lines of all paragraphs but the first are printed as they are.
    """
    one = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    text = re.sub(r"\n\n+", "\n\n\b\n", (about or "").strip())

    @one.command(help=text, context_settings={"help_option_names": ["-h", "--help"]})
    @functools.wraps(function)
    def run(**given: Any) -> None:
        with exit_with_message(program):
            function(**given)

    with harmless():
        try:
            sys.exit(one(prog_name=program, standalone_mode=False))
        except UsageError as error:
            print(f"{program}: {error.format_message()}", file=sys.stderr)
            sys.exit(2)


def section_option(kind: type, name: str, *, help: str, **settings: Any) -> Any:
    """Return an option with the default and the range that a section's dataclass declares.

    Args:
        kind: the section's dataclass; its module must be quick to import.
        name: the field of the dataclass.
        settings: further settings of typer; `default=None` if a YAML file may set the option, too.
    """
    hint = get_type_hints(kind, include_extras=True)[name]
    # In `X | None`, the range belongs to X.
    ranges = [one for part in (hint, *get_args(hint)) for one in getattr(part, "__metadata__", ())]
    bounds: dict[str, Any] = {}
    for one in ranges:
        if isinstance(one, Ge):
            bounds["min"] = one.ge
        elif isinstance(one, Le):
            bounds["max"] = one.le
    return typer.Option(**{"default": getattr(kind, name), "help": help, **bounds, **settings})


def pair(text: str, option: str, form: str) -> tuple[str, str]:
    """Split NAME=VALUE; raise a usage error if a part is empty."""
    name, equals, value = text.partition("=")
    if not (name and equals and value and text.isprintable()):
        raise typer.BadParameter(f"{option} {text!r}: write {form}")
    return name, value


def _version(value: bool) -> None:
    if value:
        print(f"fedtools {__version__}")
        raise typer.Exit()


@app.callback()
def _main(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass
