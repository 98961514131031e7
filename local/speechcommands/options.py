"""Options that several scripts of the recipe have, and how their values are read."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from fedtools.federation.init import read_config


def whole(text: str) -> int:
    """Read a whole number from 1."""
    if not re.fullmatch(r"[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError("a whole number from 1 is wanted")
    return int(text)


def png(text: str) -> Path:
    """Read the name of a picture."""
    if not text.endswith(".png"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .png")
    return Path(text)


def add_config(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --config and --section; `what` says what is read from the YAML."""
    parser.add_argument("--config", type=Path, metavar="YAML", help=what)
    section = "a section of the YAML laid over its top level; one that ends in ? may be missing"
    parser.add_argument("--section", action="append", default=[], metavar="NAME", help=section)


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line; wrong usage exits 2."""
    options = parser.parse_args()
    if options.section and not options.config:
        parser.error("--section: give the --config that has it")
    return options


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    """What the YAML has with its sections laid over it; nothing without a YAML."""
    return read_config(options.config, options.section, []) if options.config else {}
