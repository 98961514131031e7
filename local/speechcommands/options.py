"""Options that several scripts of the recipe have, and how their values are read."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from fedtools.federation.init import read_config

# A method, and options that a folder, or a row of a grid, names; of the last its value apart.
_PAIR = r"[a-z_]+=[^=,]+"
ROW = re.compile(rf"([a-z0-9_]+)(?:\.((?:{_PAIR},)*[a-z_]+)=([^=,]+))?")
# Of these, options of an experiment and not of its method.
OF_EXPERIMENT = ("rounds",)


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


def changes_of(option: str, value: str) -> list[tuple[str, str]]:
    """Each option that a setting names, with its value."""
    if not option:
        return []
    *before, last = option.split(",")
    return [*((name, text) for name, _, text in (one.partition("=") for one in before)),
            (last, value)]  # fmt: skip


def canonical(value: object) -> str:
    """An option's value, the same text for 0.3 and 0.30."""
    try:
        return f"{float(str(value)):g}"
    except ValueError:
        return str(value).lower()
