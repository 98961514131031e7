#!/usr/bin/env python3
"""Write the Chit Chat Challenge dataset as text for language models, one sentence a line.

    chat.py DATASET.json OUT.txt

Messages are divided after full stops, question marks and exclamation marks; sentences of meetings
are divided after the first two. Words are normalised as in meetings (see words.py), so that only
the spelling of typed text differs. Sentences without a word are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from words import words_of

from fedtools.cli.app import script
from fedtools.core.atomic import write_text
from fedtools.core.errors import UserError
from fedtools.core.text_files import read_bytes

# Largest file that is read, in bytes; the dataset has 40 MB.
MOST = 1 << 28


def sentences(dataset: Any, path: Path) -> Iterator[str]:
    """Yield the sentences of all messages, in order; raise `UserError` for another dataset."""
    try:
        messages = [
            message["text"]
            for conversation in dataset.values()
            for turn in conversation["messages"]
            for message in turn
        ]
        parts = [part for text in messages for part in re.split(r"(?<=[.?!])\s+", text)]
    except (AttributeError, KeyError, TypeError):
        problem = "not conversations of messages with a text"
        raise UserError(problem, path=path, remedy="give chitchat-dataset's dataset.json") from None
    for part in parts:
        if words := words_of(part):
            yield words


def main(
    dataset: Path = typer.Argument(..., metavar="DATASET.json"),
    out: Path = typer.Argument(..., metavar="OUT.txt"),
) -> None:
    try:
        conversations = json.loads(read_bytes(dataset, MOST, "run chat.sh"))
    except ValueError as error:
        raise UserError(f"not JSON: {error}", path=dataset, remedy="run chat.sh") from None
    lines = list(sentences(conversations, dataset))
    if not lines:
        raise UserError("no words", path=dataset)
    write_text(out, "".join(f"{line}\n" for line in lines))
    words = sum(len(line.split()) for line in lines)
    print(f"{out}: {len(lines):,} sentences, {words:,} words")


if __name__ == "__main__":
    script(main, "chat.py", __doc__)
