"""The command line itself; each group of commands registers with it."""

from __future__ import annotations

import typer

from fedtools import __version__

app = typer.Typer(
    name="fedtools",
    help="Federated learning in speech, from audio to a table.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        print(f"fedtools {__version__}")
        raise typer.Exit()


@app.callback()
def _main(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True),
) -> None:
    pass
