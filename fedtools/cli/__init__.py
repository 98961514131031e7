"""The command line: every command parses its arguments, calls one function, and prints.

One file for each heading of `fedtools --help`, two for decoding and scoring, and several for
attacks; nothing heavy is imported before a command runs, so that `fedtools --help` answers at once.
"""

from __future__ import annotations

import importlib
import sys

from fedtools.core.signals import INTERRUPTED, is_interrupt

# Importing a module registers its commands with `app`, which lists them in this order.
GROUPS = (
    "federation",
    "flower",
    "data",
    "language_models",
    "decode",
    "score",
    "rescore",
    "privacy",
    "report",
    "attack",
    "attack_card",
    "attack_inversion",
    "attack_membership",
    "attack_weights",
    "attack_attributes",
    "attack_utility",
    "attack_backdoor",
    "attack_speech",
)


def main() -> None:
    """Run the command line: exit with 0 (done), 1 (bad input, one line on stderr) or 2 (usage)."""
    try:
        _run()
    except BaseException as error:
        # A Ctrl-C may come while modules are imported, too.
        stopped = isinstance(error, SystemExit) and error.code == INTERRUPTED
        if not stopped and (isinstance(error, SystemExit) or not is_interrupt(error)):
            raise
        print("fedtools: interrupted; the same command continues from here", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _run() -> None:
    from fedtools.cli.app import app, narrowed
    from fedtools.core.errors import exit_with_message, harmless
    from fedtools.exchange.commands import running

    for name in GROUPS:
        importlib.import_module(f"fedtools.cli.{name}")
    try:
        with harmless(), exit_with_message("fedtools"), running(sys.argv[1:]):
            narrowed(app, sys.argv[1:])()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "fedtools":
            raise
        remedy = "run utils/setup.sh, or install it as README.md says"
        print(f"fedtools: Python module {error.name!r} is missing; {remedy}", file=sys.stderr)
        sys.exit(1)
