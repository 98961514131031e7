"""Classes of speakers for the attack on attributes, from the utt2X and spk2X of data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from fedtools.core.errors import UserError
from fedtools.data.datadir import read_table


def read_attribute(path: Path, speakers: Collection[str]) -> tuple[str, dict[str, str]]:
    """Read the classes of speakers from a table.

    Args:
        path: spk2X; or utt2X, with utt2spk next to it. A speaker whose utterances have several
            classes is left out.
        speakers: speakers to look up.

    Returns:
        X, and speaker -> class.

    Raises:
        UserError: if the table has another name, does not match utt2spk, or has none of the
            speakers.
    """
    kind, mark, attribute = path.name.partition("2")
    if kind not in ("utt", "spk") or not mark or not attribute or attribute in ("utt", "spk"):
        raise UserError("not a table of an attribute", path=path, remedy="give a utt2X or a spk2X")
    found = read_table(path)
    if kind == "utt":
        found = _of_speakers(found, path)
    known = {speaker: found[speaker] for speaker in speakers if speaker in found}
    if not known:
        problem = f"it has none of the models' speakers, such as {min(speakers, default='')!r}"
        raise UserError(problem, path=path, remedy="give the table of the models' training data")
    return attribute, known


def _of_speakers(table: Mapping[str, str], path: Path) -> dict[str, str]:
    """Return speaker -> class from utterance -> class."""
    where = path.with_name("utt2spk")
    owners = read_table(where)
    classes: dict[str, set[str]] = {}
    for line, (utt, name) in enumerate(table.items(), 1):
        if utt not in owners:
            raise UserError(f"{utt!r} is not in {where}", path=path, line=line)
        classes.setdefault(owners[utt], set()).add(name)
    return {speaker: min(names) for speaker, names in classes.items() if len(names) == 1}


def binned(classes: Mapping[str, str], edges: Sequence[float]) -> dict[str, str] | None:
    """Sort numbers, such as ages, into classes; return None if one of them is not a number.

    Args:
        classes: speaker -> number, as text.
        edges: ascending; each is the lower bound of its class.
    """
    try:
        numbers = {speaker: float(text) for speaker, text in classes.items()}
    except ValueError:
        return None
    texts = [f"{edge:g}" for edge in edges]
    inner = [f"{low}-{high}" for low, high in pairwise(texts)]
    names = [f"<{texts[0]}", *inner, f">={texts[-1]}"]
    return {
        speaker: names[sum(number >= edge for edge in edges)] for speaker, number in numbers.items()
    }


def read_attributes(
    paths: Sequence[Path], speakers: Mapping[str, str], edges: Sequence[float] = ()
) -> dict[str, dict[str, str]]:
    """Read attributes: name -> model -> class.

    Args:
        paths: tables, see `read_attribute`.
        speakers: model -> speaker.
        edges: lower bounds of classes for tables that have only numbers; without edges, each number
            is a class.

    Raises:
        UserError: as in `read_attribute`; if two tables have the same attribute, or there are edges
            but no table of numbers.
    """
    found: dict[str, dict[str, str]] = {}
    numbers = False
    for path in paths:
        attribute, classes = read_attribute(path, set(speakers.values()))
        if attribute in found:
            raise UserError(f"a second table of {attribute!r}", path=path, remedy="give one")
        if edges and (sorted_in := binned(classes, edges)) is not None:
            classes, numbers = sorted_in, True
        found[attribute] = {
            model: classes[speaker] for model, speaker in speakers.items() if speaker in classes
        }
    if edges and not numbers:
        raise UserError("no table has only numbers", path=paths[0], remedy="leave out --bins")
    return found
