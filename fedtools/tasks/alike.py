"""Checks that an experiment's splits, and the model that it starts from, are of one kind.

Features of another kind, tokens, classes and words can have the same number: shapes fit, and what
is trained has no meaning.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path

from fedtools.audio.feature_kinds import check_same
from fedtools.core.atomic import sha256
from fedtools.core.config import read_yaml
from fedtools.core.errors import UserError, some
from fedtools.data.symbols import BPE_MODEL, TOKENS
from fedtools.exchange.experiment import Experiment
from fedtools.tasks.identity import KIND

# Files that say what the outputs of a model are, next to the model and in a new experiment.
_OUTPUTS = (TOKENS, BPE_MODEL, "classes.txt", "words.txt")
# A client's model, and the state of a round, lie in folders of their experiment.
_DEPTH = 3


def check_splits(sums: Mapping[str, Mapping[str, str]], folders: Mapping[str, Path]) -> None:
    """Raise a `UserError` if the features of two splits are of different kinds.

    Splits whose kind is not known fit any other; if there are other splits, a warning names them.

    Args:
        sums: `Facts.identity` by split.
        folders: data directories by split.
    """
    known = {split: one[KIND] for split, one in sums.items() if KIND in one}
    for split, kind in known.items():
        first = next(iter(known))
        check_same(kind, known[first], str(folders[first]), folders[split] / "feats.scp")
    if known and (others := [split for split in sums if split not in known]):
        files = "no feats.*.yaml beside its archives, so that the kind of features is not compared"
        print(f"warning: {some(others)}: {files}", file=sys.stderr)


def check_start(
    start: Path,
    kind: str | None,
    files: Mapping[str, Path],
    train: Path,
    texts: Mapping[str, str],
) -> None:
    """Raise a `UserError` if a model was trained on other features or for other outputs.

    What is not known of the model is not compared: its folder may have any name, and need not be
    that of an experiment.

    Args:
        start: file of the model's state.
        kind: the kind of the training data's features, if it is known.
        files: files of the new experiment by name.
        train: folder of its training data, or of what a site told of them.
        texts: other files by name, which are not there yet, and their contents.
    """
    folders = [*start.absolute().parents][:_DEPTH]
    home = next((one for one in folders if (one / "data.yaml").is_file()), start.parent)
    check_same(kind, _trained_on(home), f"the training data of {start}", train / "feats.scp")
    for name in _OUTPUTS:
        own = files.get(name, train / name)
        if name in texts:
            found = hashlib.sha256(texts[name].encode()).hexdigest()
        elif own.is_file():
            found = sha256(own)
        else:
            continue
        if (home / name).is_file() and found != sha256(home / name):
            problem = f"not the {name} of the model to start from, {home / name}"
            remedy = "begin with the model's own, or without --start"
            raise UserError(problem, path=own, remedy=remedy)


def check_kind_of(found: object, experiment: Experiment, folder: Path) -> None:
    """Raise a `UserError` if features are not of the kind that an experiment is trained on.

    Args:
        found: their kind, or None if it is not known.
        folder: their data directory.
    """
    what = f"the training data of {experiment.path}"
    wanted = _trained_on(experiment.path)
    check_same(found and str(found), wanted, what, folder / "feats.scp")


def _trained_on(folder: Path) -> str | None:
    """Return the kind of features that an experiment is trained on, if it is known."""
    path = folder / "data.yaml"
    begun = read_yaml(path).get("train") if path.is_file() else None
    return begun.get(KIND) if isinstance(begun, Mapping) else None
