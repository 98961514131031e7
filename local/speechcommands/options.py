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


def config_for(method: str, classes: int, path: Path | None) -> dict[str, Any]:
    """What a YAML says of a method on a task of so many classes; nothing without a YAML.

    The sections methods.<method> and tasks.<classes>.<method> are laid over its top level, as
    experiments.py has it done.
    """
    sections = [f"methods.{method}?", f"tasks.{classes}.{method}?"]
    return read_config(path, sections, []) if path else {}
