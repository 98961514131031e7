"""Lists of trials as files: pairs of models, and whether both are of one speaker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedtools.core.atomic import write_text
from fedtools.core.errors import UserError
from fedtools.core.text_files import stream_lines

_KINDS = {"target": True, "nontarget": False}


@dataclass(frozen=True)
class Trials:
    """Trials in Kaldi's form, a line each: `<enrolled> <test> target|nontarget`, in C order.

    Attributes:
        enrolled, test: names of models, (trials,) each; the caller defines what a model is.
        targets: (trials,) bool, whether both are of one speaker.
    """

    enrolled: Sequence[str]
    test: Sequence[str]
    targets: np.ndarray

    def __len__(self) -> int:
        return len(self.enrolled)

    @classmethod
    def read(cls, path: str | Path, speakers: Mapping[str, str] | None = None) -> Trials:
        """Read a list of trials.

        Args:
            path: the list.
            speakers: model -> speaker; if it is given, models must be in it and kinds agree.

        Raises:
            UserError: naming file and line, if a line is malformed, out of order or repeated, a
                model is compared with itself or unknown, or a kind is wrong; or if there is no
                trial.
        """
        rows: list[tuple[str, str, bool]] = []
        for number, line in enumerate(stream_lines(path), 1):
            fields = line.split(" ")
            problem, remedy = "", None
            if len(fields) != 3 or line.split() != fields or fields[2] not in _KINDS:
                problem, remedy = ascii(line)[:100], "expected `<model> <model> target|nontarget`"
            elif rows and rows[-1][:2] >= (pair := (fields[0], fields[1])):
                is_duplicate = rows[-1][:2] == pair
                problem = f"the pair {' '.join(pair)!r} " + (
                    "is duplicated" if is_duplicate else "is not in order"
                )
                remedy = None if is_duplicate else "sort with LC_ALL=C"
            else:
                problem = _problem(*fields, speakers)
            if problem:
                raise UserError(problem, path=path, line=number, remedy=remedy)
            rows.append((fields[0], fields[1], _KINDS[fields[2]]))
        if not rows:
            raise UserError("no trial", path=path)
        enrolled, test, targets = zip(*rows, strict=True)
        return cls(enrolled, test, np.array(targets))

    def write(self, path: str | Path) -> None:
        """Write the list atomically, sorted."""
        kinds = {kind: name for name, kind in _KINDS.items()}
        rows = sorted(zip(self.enrolled, self.test, self.targets, strict=True))
        lines = (f"{one} {other} {kinds[bool(kind)]}\n" for one, other, kind in rows)
        write_text(path, "".join(lines))

    def speakers(self, speakers: Mapping[str, str]) -> np.ndarray:
        """Return the speakers of both sides, (trials, 2), from model -> speaker."""
        sides = (self.enrolled, self.test)
        return np.array([[speakers[model] for model in side] for side in sides]).T

    def scores(
        self, matrix: np.ndarray, enrolled: Sequence[str], test: Sequence[str]
    ) -> np.ndarray:
        """Select the trials' scores, (trials,), from a matrix of all pairs.

        Args:
            matrix: (enrolled, test).
            enrolled, test: the models of its rows and columns.
        """
        rows, columns = ({model: i for i, model in enumerate(side)} for side in (enrolled, test))
        return matrix[[rows[one] for one in self.enrolled], [columns[one] for one in self.test]]


def _problem(one: str, other: str, kind: str, speakers: Mapping[str, str] | None) -> str:
    """Return the error in a trial's models or kind; "" if there is none."""
    if one == other:
        return f"{one!r} is compared with itself"
    if speakers is None:
        return ""
    for model in (one, other):
        if model not in speakers:
            return f"no model {model!r}"
    same = speakers[one] == speakers[other]
    if same != _KINDS[kind]:
        return (
            f"{one!r} and {other!r} are of {'one speaker' if same else 'two speakers'}, not {kind}"
        )
    return ""
