"""A site's half: the files of a request, `fedtools site-round`, and the files of its answer.

Each message starts a new process, and what is kept lies on the site's disk. The site's
configuration, $FEDTOOLS_FLOWER, has

    site = "east"                             its name
    capsule = "capsule"                       the folder of `fedtools site`
    site-round = ["--data", "train=clips"]    more words for `fedtools site-round`
    max-bytes = 4294967296                    the most of one request, and of one answer
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from .folder import Problem, fedtools, read_folder, settings, words, write_folder

app = ClientApp()


@app.query()
def hello(message: Message, context: Context) -> Message:
    """Say the site's name."""
    try:
        said = {"site": settings("site")["site"]}
    except Problem as problem:
        said = {"error": str(problem)}
    return Message(RecordDict({"hello": ConfigRecord(said)}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Answer a request, or say in one line why not."""
    try:
        return Message(answer(message), reply_to=message)
    except Problem as problem:
        said = str(problem)
    except OSError as error:
        said = f"{error.strerror}: {error.filename}"
    return Message(RecordDict({"error": ConfigRecord({"line": said})}), reply_to=message)


def answer(message: Message) -> RecordDict:
    """Return the files that `fedtools site-round` writes for a request."""
    if "request" not in message.content:
        raise Problem("not a request")
    own = settings("site", "capsule")
    most = int(own.get("max-bytes", 2**32))
    with scratch(own["folder"] / "work") as folder:
        (folder / "request").mkdir()
        write_folder(message.content["request"], folder / "request", most)
        # Paths in the configuration are relative to its folder.
        arguments = ["site-round", own["capsule"], folder / "request", folder / "answer"]
        fedtools([*arguments, *words(own, "site-round")], own["folder"])
        return RecordDict({"answer": read_folder(folder / "answer", most)})


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """Yield an empty folder on the site's disk, and remove what it holds in the end.

    Raises:
        Problem: if another process of the site is using it.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    with open(folder / ".lock", "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Problem("the site is still at work on another request") from None
        place = folder / "now"
        # A killed process leaves it.
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(mode=0o700)
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)
