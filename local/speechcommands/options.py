"""Options that several scripts of the recipe share, and readers of their values."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from fedtools.federation.init import read_config

# A method, and changed options, as the name of a folder or of a grid's row has them.
_PAIR = "[a-z_]+=[^=,]+"
ROW = re.compile(rf"([a-z0-9_]+)(?:\.({_PAIR}(?:,{_PAIR})*))?")
# Options among these that belong to the experiment and not to its method.
OF_EXPERIMENT = ("rounds",)
# The option of a row whose training data are the server's own: the number of its clips.
SERVER_CLIPS = "server_clips"


def whole(text: str) -> int:
    """Read a whole number from 1."""
    if not re.fullmatch(r"[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError("expected a whole number of at least 1")
    return int(text)


def sizes(text: str) -> list[int]:
    """Read different whole numbers from 1, separated by commas."""
    found = [whole(one) for one in text.split(",")]
    if len(set(found)) != len(found):
        raise argparse.ArgumentTypeError("a number is given twice")
    return found


def server_set(clips: int | str) -> str:
    """Return the name of the set with so many of the server's clips."""
    return f"server{clips}"


def png(text: str) -> Path:
    """Read the name of a picture."""
    if not text.endswith(".png"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .png")
    return Path(text)


def config_for(method: str, classes: int, path: Path | None) -> dict[str, Any]:
    """Return a YAML's options for a method on a task of `classes` classes, {} without a YAML.

    The sections methods.<method> and tasks.<classes>.<method> override its top level, as in the
    experiments of experiments.py.
    """
    sections = [f"methods.{method}?", f"tasks.{classes}.{method}?"]
    return read_config(path, sections, []) if path else {}


def changes_of(changed: str) -> dict[str, str]:
    """Return the changed options of a row, "private_steps=50,adversarial=0.1", by name."""
    pairs = (one.partition("=") for one in changed.split(","))
    return {name: value for name, _, value in pairs if name}


def canonical(value: object) -> str:
    """Return an option's value as text, the same for 0.3 and 0.30."""
    try:
        return f"{float(str(value)):g}"
    except ValueError:
        return str(value).lower()
