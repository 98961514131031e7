"""What a site states about the messages that it sends, and the server's check of it.

    update.<job>.answer        an `Answer`; with a roster signed: update.<job>.answer.sig

A site's statement covers all files of its job. What it does not cover costs the site its own
clients, and nobody else's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedtools import __version__
from fedtools.core.config import Natural
from fedtools.core.errors import UserError, printable
from fedtools.core.provenance import computing
from fedtools.core.untrusted import sum_of
from fedtools.exchange.messages import FORMAT, OK, OTHER, Message, Refusal, answer_path
from fedtools.exchange.options import Rounds
from fedtools.exchange.origin import Origin
from fedtools.exchange.signed import read_statement


@dataclass(frozen=True)
class Answer:
    """What a site states.

    Attributes:
        experiment, round, base: as in `fedtools.exchange.origin.Origin`.
        site: its name.
        job: the number of its job.
        attempt: as in the request.
        format: `fedtools.exchange.messages.FORMAT` of its messages.
        software: as `fedtools.core.provenance.computing` returns it, at the site.
        files: name -> SHA-256 of the files that it sends.
    """

    experiment: str
    site: str
    job: Natural
    round: Rounds
    attempt: Natural
    base: str
    format: Natural
    software: dict[str, str]
    files: dict[str, str]


def mismatch(format_: int, software: Mapping[str, str]) -> str:
    """Return why messages and states cannot be exchanged with another version; "" if they can."""
    ours, theirs = (
        ".".join(one.split(".")[:2]) for one in (__version__, software.get("fedtools", ""))
    )
    if ours != theirs:
        return f"made by fedtools {theirs[:20] or 'of no version'}, and here is {ours}"
    return "" if format_ == FORMAT else f"of message format {format_}, and here is {FORMAT}"


def other_computing(software: Mapping[str, str]) -> str:
    """Return what the bytes of results depend on and is different here; "" if nothing is."""
    here = computing()
    names = (name for name in ("torch", "processor") if software.get(name) != here.get(name))
    found = ((name, software.get(name, "unknown")[:80]) for name in names)
    return ", ".join(f"{name} {printable(value, '')}" for name, value in found)


def evaluation_path(folder: Path, split: str, job: int) -> Path:
    """Return the path of a site's evaluation: see `fedtools.federation.site_evaluation`."""
    return folder / f"evaluation.{split}.{job}.yaml"


def find_evaluations(folder: Path) -> Iterator[Path]:
    """Yield all that sites have sent of the models that a round starts from."""
    yield from folder.glob("evaluation.*")


@dataclass(frozen=True)
class Sites:
    """What the answers of a round's sites must state.

    Attributes:
        names: the sites, in the order of their jobs.
        roster: their public keys; without any, an answer may be missing, and is not signed.
        attempt: of the experiment.
        origin: of the round.
    """

    names: Sequence[str]
    roster: Mapping[str, str]
    attempt: int
    origin: Origin

    def check(
        self, folder: Path, messages: Sequence[Message], clients: Sequence[int]
    ) -> tuple[list[Message], list[Refusal]]:
        """Return the messages that their sites have stated, and a refusal for each other.

        Args:
            folder: the round's folder.
            messages: those that could be read.
            clients: how many were asked for in each job.
        """
        kept, refused = list[Message](), list[Refusal]()
        for job, asked in enumerate(clients, 1):
            table = folder / f"update.{job}.tsv"
            own = [one for one in messages if one.path.with_suffix(".tsv") == table]
            try:
                kept += self._stated(folder, job, asked, own) if own else []
            except UserError as error:
                reason = str(error).replace(f"{folder}/", "")[:300]
                refused += [Refusal(one.client, reason, one.bytes) for one in own]
        return kept, refused

    def _stated(self, folder: Path, job: int, clients: int, own: list[Message]) -> list[Message]:
        path, site = answer_path(folder, job), self.names[job - 1]
        if not self.roster and not path.exists():
            return own
        # Also of clients whose messages were refused.
        answer = read_statement(Answer, path, site, self.roster, 2 + 2 * clients)
        if answer.attempt != self.attempt:
            raise UserError("is of another attempt", path=path)
        if problem := self.problem(answer, job):
            raise UserError(problem, path=path)
        sums = {name: one for message in own for name, one in message.sums.items()}
        seals = {pair for message in own for pair in message.seals.items()}
        sums |= {file.name: sum_of(file, seal) for file, seal in seals}
        for name in sorted(sums):
            if answer.files.get(name) != sums[name]:
                raise UserError(f"not the {name} that came", path=path)
        other = bool(other_computing(answer.software))
        return [replace(one, status=OTHER) if other and one.status == OK else one for one in own]

    def problem(self, answer: Answer, job: int) -> str:
        """Return why a statement is not of a job of this round, and this version; "" if it is."""
        expected = {"site": self.names[job - 1], "job": job, **self.origin._asdict()}
        for name, value in expected.items():
            if getattr(answer, name) != value:
                return f"is of another {name}"
        return mismatch(answer.format, answer.software)
