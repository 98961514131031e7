"""What a site tells the server of its clients' data, once, before a federation begins.

    FACTS/facts.yaml     task; a sum that identifies the data; what all of the data have in common
    FACTS/clients.tsv    client; size, in clips or utterances; entropy of the labels, for clips
    FACTS/classes.txt    for clips: the classes, in the order of their indices

Nothing else of the data leaves a site before training: no name of an utterance, no transcript, no
path. At the server the folder is somebody else's, so that every value is checked, and sizes are
bounded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import numpy as np

from fedtools.core.atomic import write_lines
from fedtools.core.config import from_mapping, parse_yaml, write_yaml
from fedtools.core.errors import UserError
from fedtools.core.ranges import Natural
from fedtools.core.tables import count, number, read_tsv, write_tsv
from fedtools.core.text_files import decode, lines_of
from fedtools.core.untrusted import open_received
from fedtools.data.clips import CLIP_SAMPLES, LENGTH, MOST_SAMPLES
from fedtools.data.datadir import byte_order, check_id, check_label
from fedtools.exchange.messages import MOST_UTTERANCES
from fedtools.tasks.client_facts import ClientFacts

GENERAL, CLIENTS, CLASSES = "facts.yaml", "clients.tsv", "classes.txt"
# A row has a client of at most 200 characters and two numbers, and a site at most a million rows.
_MOST_CLIENTS, _ROW_BYTES = 10**6, 256
_GENERAL_BYTES, _CLASSES_BYTES = 2**12, 2**20
_MOST_CLASSES, _MOST_VALUES = 10**4, 10**5
# A kind of features, see `fedtools.audio.feature_kinds`.
_KIND = re.compile(r"[A-Za-z0-9_.,=+ -]{1,200}")


@dataclass(frozen=True)
class SiteFacts:
    """What is known of the training data of a site, or of all sites.

    Attributes:
        clients: the clients, with their sizes and, for clips, entropies.
        sums: of each site's data, see `fedtools.tasks.identity.combined`.
        kind: of features, "" if it is not known.
        samples: of a clip; 0 without clips.
        values: in a frame of features; 0 with clips.
        classes: of clips.
    """

    clients: ClientFacts
    sums: tuple[str, ...] = ()
    kind: str = ""
    samples: int = 0
    values: int = 0
    classes: tuple[str, ...] = ()

    @property
    def texts(self) -> dict[str, str]:
        """Return the files that an experiment otherwise copies from the clips: name -> content."""
        found = {CLASSES: "".join(f"{one}\n" for one in self.classes)} if self.classes else {}
        length = self.samples if self.samples != CLIP_SAMPLES else 0
        return found | ({LENGTH: f"{length}\n"} if length else {})


@dataclass(frozen=True)
class _General:
    """The content of `GENERAL`."""

    task: str
    sum: str
    features: str = ""
    samples: Natural = 0
    values: Natural = 0


def write_site_facts(out: Path, task: str, facts: SiteFacts) -> None:
    """Write what a site tells into a folder that exists."""
    (own,) = facts.sums
    general = _General(task, own, facts.kind, facts.samples, facts.values)
    # What the task does not have is left out.
    write_yaml(out / GENERAL, {name: one for name, one in vars(general).items() if one})
    if facts.classes:
        write_lines(out / CLASSES, facts.classes)
    rows = (
        {"client": client, **{name: one[at].item() for name, one in facts.clients.values.items()}}
        for at, client in enumerate(facts.clients.clients)
    )
    write_tsv(out / CLIENTS, ("client", *facts.clients.values), rows)


def read_site_facts(folder: Path, task: str) -> SiteFacts:
    """Read what a site sent; nothing in it is trusted.

    Args:
        folder: of `write_site_facts`.
        task: the name of the task.

    Raises:
        UserError: naming the first file, and line, that is missing or has what it cannot have.
    """
    if not folder.is_dir():
        raise UserError("no such folder", path=folder, remedy="check --facts FOLDER")
    path = folder / GENERAL
    general = from_mapping(_General, parse_yaml(_received(path, _GENERAL_BYTES), path), path)
    if general.task != task:
        raise UserError(f"facts for task {general.task[:80]!r}, not {task!r}", path=path)
    if not re.fullmatch("[0-9a-f]{64}", general.sum):
        raise UserError("sum: not a SHA-256 in hexadecimal", path=path)
    if general.features and not _KIND.fullmatch(general.features):
        raise UserError("features: not a kind of features", path=path)
    clips = (folder / CLASSES).exists()
    for name, wanted, most in (
        ("samples", clips, MOST_SAMPLES),
        ("values", not clips, _MOST_VALUES),
    ):
        found = getattr(general, name)
        if not wanted <= found <= most * wanted:
            expected = f"1 to {most}" if wanted else "none"
            raise UserError(f"{name}: {found}, expected {expected}", path=path)
    classes = _read_classes(folder / CLASSES) if clips else ()
    own = _read_clients(folder / CLIENTS, ("size", "entropy") if clips else ("size",))
    return SiteFacts(
        own, (general.sum,), general.features, general.samples, general.values, classes
    )


def _received(path: Path, most: int) -> str:
    """Read a small text of somebody else; errors as in `open_received` and `decode`."""
    with open_received(path, most) as file:
        return decode(file.read(most), path)


def _lines(path: Path, most: int) -> list[str]:
    """Read the lines of a file of somebody else, of at most `most` bytes."""
    with open_received(path, most) as file:
        return list(lines_of(BytesIO(file.read(most)), path))


def _read_classes(path: Path) -> tuple[str, ...]:
    found: dict[str, int] = {}
    for line, label in enumerate(_lines(path, _CLASSES_BYTES), 1):
        check_label(label, "class", path, line)
        if found.setdefault(label, line) != line:
            raise UserError(f"{label!r} is duplicated", path=path, line=line)
    if not 0 < len(found) <= _MOST_CLASSES:
        raise UserError(f"{len(found)} classes, expected 1 to {_MOST_CLASSES}", path=path)
    return tuple(found)


def _read_clients(path: Path, names: Sequence[str]) -> ClientFacts:
    lines = _lines(path, _ROW_BYTES * _MOST_CLIENTS)
    rows = read_tsv(path, ("client", *names), lines=lines)
    if not 0 < len(rows) <= _MOST_CLIENTS:
        raise UserError(f"{len(rows)} clients, expected 1 to {_MOST_CLIENTS}", path=path)
    clients = [check_id(row["client"], "client", path, at) for at, row in enumerate(rows, 2)]
    for line, (before, client) in enumerate(pairwise(clients), 3):
        # Ids are ASCII, so that this is the C locale's order.
        if before >= client:
            problem = "came before" if before == client else "is not in order"
            raise UserError(f"{client} {problem}", path=path, line=line)
    columns = {"size": _sizes, "entropy": _entropies}
    return ClientFacts(clients, {name: columns[name](rows, path) for name in names})


def _sizes(rows: Sequence[Mapping[str, str]], path: Path) -> np.ndarray:
    found = [count(row, "size", path, line) for line, row in enumerate(rows, 2)]
    for line, size in enumerate(found, 2):
        if not 0 < size <= MOST_UTTERANCES:
            problem = f"size is {size}, expected 1 to {MOST_UTTERANCES}"
            raise UserError(problem, path=path, line=line)
    return np.array(found, np.int64)


def _entropies(rows: Sequence[Mapping[str, str]], path: Path) -> np.ndarray:
    found = [number(row, "entropy", path, line) for line, row in enumerate(rows, 2)]
    for line, entropy in enumerate(found, 2):
        # An even distribution may be rounded to slightly more than 1.
        if entropy > 1 + 1e-9:
            raise UserError(f"entropy is {entropy}, more than 1", path=path, line=line)
    return np.array(found, np.float64)


def merged(sites: Mapping[Path, SiteFacts]) -> SiteFacts:
    """Return what is known of the data of several sites, from the folders that they sent.

    Raises:
        UserError: if a client is in two of them, or the data are of different kinds.
    """
    (first, wanted), *others = sites.items()
    owner: dict[str, Path] = {}
    for path, one in sites.items():
        for client in one.clients.clients:
            if owner.setdefault(client, path) != path:
                problem = f"client {client} is also in {owner[client]}"
                raise UserError(problem, path=path / CLIENTS)
    for path, one in others:
        for name, file in (("classes", CLASSES), ("samples", GENERAL), ("values", GENERAL)):
            if getattr(one, name) != getattr(wanted, name):
                problem = f"not the {name} of {first}"
                remedy = "make the data of all sites with the same options"
                raise UserError(problem, path=path / file, remedy=remedy)
    kinds = {one.kind: path for path, one in sites.items() if one.kind}
    if len(kinds) > 1:
        (kind, known), (other, path) = [*kinds.items()][:2]
        problem = f"features of another kind: {other}; {known} has {kind}"
        raise UserError(problem, path=path / GENERAL, remedy="extract them with the same options")
    clients = byte_order(owner)
    values = {
        name: np.concatenate([one.clients.values[name] for one in sites.values()])
        for name in wanted.clients.values
    }
    names = [name for one in sites.values() for name in one.clients.clients]
    order = sorted(range(len(names)), key=names.__getitem__)
    return SiteFacts(
        ClientFacts(clients, {name: one[order] for name, one in values.items()}),
        tuple(one.sums[0] for one in sites.values()),
        next(iter(kinds), ""),
        wanted.samples,
        wanted.values,
        wanted.classes,
    )
