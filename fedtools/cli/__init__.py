"""The command line: every command parses its arguments, calls one function, and prints.

One file for each group of commands; nothing heavy is imported before a command runs, so that
`fedtools --help` answers at once.
"""

from __future__ import annotations

import importlib
import sys

from fedtools.cli.app import app, narrowed

# Importing a module registers its commands with `app`, which lists them in this order.
GROUPS = (
    "federation",
    "features",
    "data",
    "lm",
    "decode",
    "report",
    "keywords",
    "rescore",
    "fmp",
    "attack",
    "attack_card",
    "attack_inversion",
    "attack_membership",
    "attack_weights",
    "attack_attributes",
    "attack_utility",
    "attack_speech",
)


def main() -> None:
    """Run the command line: exit with 0 (done), 1 (bad input, one line on stderr) or 2 (usage)."""
    for name in GROUPS:
        importlib.import_module(f"fedtools.cli.{name}")
    from fedtools.files.errors import exit_with_message

    try:
        with exit_with_message("fedtools"):
            narrowed(app, sys.argv[1:])()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "fedtools":
            raise
        remedy = "run utils/setup.sh, or install it as README.md says"
        print(f"fedtools: Python module {error.name!r} is missing; {remedy}", file=sys.stderr)
        sys.exit(1)
    except SystemExit as stop:
        if stop.code == 130:
            print("fedtools: interrupted; the same command continues from here", file=sys.stderr)
        raise
