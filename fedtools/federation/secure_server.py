"""The server's steps of a secure sum.

Each call takes the messages of the step that is due, keeps those that it has taken in its own
folder, and replies; what arrives later does not count. A process that goes on from there takes the
kept messages again. The last step returns the sum, and nothing of one client.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedtools.core.atomic import remove, write_bytes
from fedtools.core.errors import UserError
from fedtools.exchange.messages import Message, Refusal
from fedtools.exchange.private import make_private
from fedtools.federation.secure_round import EACH, SecureRound
from fedtools.privacy.secagg.boxes import open_box, read_box, write_box
from fedtools.privacy.secagg.collector import Collector
from fedtools.privacy.secagg.keys import KEYS_BYTES
from fedtools.privacy.secagg.session import DIGEST_BYTES
from fedtools.privacy.secagg.shamir import SECRET_BYTES, SHARE_BYTES
from fedtools.privacy.secagg.shares import ROW_BYTES
from fedtools.privacy.secagg.signed import HEADER_BYTES, SIGNATURE_BYTES, Step

if TYPE_CHECKING:
    from fedtools.federation.federation import Federation


@dataclass(frozen=True)
class Secured:
    """The outcome of a secure sum.

    Attributes:
        total: int64 (values,), the sum of the survivors' changes, in steps of the grid.
        survivors: the clients in the sum, in C order.
        lost: the others, with reasons.
        received, sent: client -> bytes of all its messages, and of all replies to it.
    """

    total: np.ndarray
    survivors: tuple[str, ...]
    lost: Mapping[str, str]
    received: Mapping[str, int]
    sent: Mapping[str, int]


def advance(
    federation: Federation, number: int, jobs: Sequence[Sequence[str]], left_out: Sequence[int] = ()
) -> Secured | None:
    """Do the server's next step of a secure sum.

    Args:
        jobs: the clients of each job.
        left_out: the numbers of jobs whose clients are lost from here on.

    Returns:
        the sum, after the last step; None after an earlier one.

    Raises:
        UserError: if messages of a job are missing, or too few clients are left.
    """
    return _Attempt(SecureRound(federation, number), jobs).advance({*left_out})


class _Attempt:
    """The server in an attempt."""

    def __init__(self, round: SecureRound, jobs: Sequence[Sequence[str]]):
        self._round, self._session = round, round.session
        self._collector = Collector(self._session)
        self._jobs = [[self._session.number(name) for name in clients] for clients in jobs]

    def advance(self, left_out: set[int]) -> Secured | None:
        """Take again what was taken before, and do the next step."""
        for step in list(Step)[:-1]:
            if not self._round.taken(step).exists():
                return self._take(step, left_out)
            reply = self._retake(step)
            if not self._is_replied(step):
                # A kill came between the two; what was taken then counts.
                self._reply(step, reply)
                return None
        return self._take(Step.UNMASK, left_out)

    def _retake(self, step: Step) -> Any:
        """Take the messages of a step that were taken before, and return the reply."""
        path = self._round.taken(step)
        if step is Step.MASKED:
            return self._collector.restore(path.read_bytes())
        every = range(self._session.plan.clients)
        return self._act(step, self._named(read_box(path, every, self._most(step))))

    def _take(self, step: Step, left_out: set[int]) -> Secured | None:
        """Take the messages of a step, and reply."""
        paths = self._come(step, left_out)
        make_private(self._round.taken(step).parent)
        if step is Step.MASKED:
            reply: Any = self._collector.masked(self._streamed(step, paths))
            write_bytes(self._round.taken(step), self._collector.snapshot())
        else:
            messages = dict(self._streamed(step, paths))
            reply = self._act(step, messages)
        for name, why in self._collector.refused.items():
            print(f"round {self._round.number}, {name}: lost: {why}", file=sys.stderr)
        if step is Step.UNMASK:
            return self._outcome(reply, messages)
        if step is not Step.MASKED:
            numbers, taken = self._session.numbers, self._collector.taken(step)
            known = {numbers[name]: one for name, one in messages.items()}
            usable = {number: one for number, one in known.items() if number in taken}
            write_box(self._round.taken(step), usable)
        self._reply(step, reply)
        return None

    def _reply(self, step: Step, reply: Any) -> None:
        if step in EACH:
            self._reply_each(step, reply)
        else:
            write_bytes(self._round.reply(step, 1), reply)

    def _act(self, step: Step, messages: Mapping[str, bytes]) -> Any:
        return getattr(self._collector, step.name.lower())(messages)

    def _named(self, messages: Mapping[int, bytes]) -> dict[str, bytes]:
        return {self._session.names[number]: content for number, content in messages.items()}

    def _is_replied(self, step: Step) -> bool:
        if step in EACH:
            jobs = [job for job, clients in enumerate(self._jobs, 1) if clients]
            return all(self._round.reply(step, job).exists() for job in jobs)
        return self._round.reply(step, 1).exists()

    def _come(self, step: Step, left_out: set[int]) -> dict[int, Path]:
        """Return job -> the messages of its clients; raise a `UserError` if they have not come."""
        left = {*range(self._session.plan.clients)}
        if step is not Step.KEYS:
            left = {*self._collector.taken(step.before)}
        paths = {}
        for job, numbers in enumerate(self._jobs, 1):
            path = self._round.sent(step, job)
            # A dangling link counts as present; its clients are refused when it is read.
            if job in left_out or not numbers:
                continue
            if os.path.lexists(path):
                paths[job] = path
            elif left & {*numbers}:
                remedy = f"run fedtools train-local --job {job}"
                raise UserError("missing", path=path, remedy=remedy)
        return paths

    def _streamed(self, step: Step, paths: Mapping[int, Path]) -> Iterator[tuple[str, bytes]]:
        """Yield clients' messages; a file that cannot be read costs its job's clients alone."""
        for job, path in paths.items():
            try:
                for number, content in open_box(path, self._jobs[job - 1], self._most(step)):
                    yield self._session.names[number], content
            except UserError as error:
                print(f"round {self._round.number}, job {job}: lost: {error}", file=sys.stderr)

    def _most(self, step: Step) -> int:
        """Return the largest size of a client's message, in bytes."""
        session, edges = self._session, self._session.plan.neighbours
        body = {
            Step.KEYS: KEYS_BYTES - HEADER_BYTES - SIGNATURE_BYTES,
            Step.SHARES: edges * ROW_BYTES,
            Step.MASKED: session.size * session.bits // 8,
            Step.SURVIVORS: DIGEST_BYTES,
            Step.UNMASK: SECRET_BYTES + edges * SHARE_BYTES,
        }[step]
        return HEADER_BYTES + body + SIGNATURE_BYTES

    def _reply_each(self, step: Step, replies: Mapping[str, bytes]) -> None:
        numbers = self._session.numbers
        known = {numbers[name]: content for name, content in replies.items()}
        for job, clients in enumerate(self._jobs, 1):
            own = {number: known[number] for number in clients if number in known}
            write_box(self._round.reply(step, job), own)

    def _outcome(self, total: np.ndarray, unmasked: Mapping[str, bytes]) -> Secured:
        """Return the sum, and what it has cost each client."""
        session, round, lost = self._session, self._round, dict[str, str]()
        received, sent = Counter[str](), Counter[str]()
        for step in list(Step)[:-1]:
            there = {session.names[number] for number in self._collector.taken(step)}
            if step is Step.MASKED:
                received.update(dict.fromkeys(there, self._most(step)))
            else:
                every = range(session.plan.clients)
                sizes = self._named(read_box(round.taken(step), every, self._most(step)))
                received.update({name: len(one) for name, one in sizes.items()})
            if step is not Step.SURVIVORS:
                why = f"is not in the secure sum: lost in step '{step.name.lower()}'"
                lost |= {name: why for name in session.names if name not in there | lost.keys()}
            if step in EACH:
                for job, clients in enumerate(self._jobs, 1):
                    replies = read_box(round.reply(step, job), clients, 1 << 40)
                    sent.update({name: len(one) for name, one in self._named(replies).items()})
            else:
                size = round.reply(step, 1).stat().st_size
                sent.update(dict.fromkeys(set(session.names) - lost.keys(), size))
        received.update({name: len(one) for name, one in unmasked.items()})
        survivors = tuple(name for name in session.names if name not in lost)
        return Secured(total, survivors, lost, received, sent)


def summed(secured: Secured) -> tuple[list[Message], list[Refusal]]:
    """Return the clients in a sum, of whom no more is known, and refusals of the others."""
    received = secured.received
    return (
        [
            Message(name, 0, 0, 0.0, 0.0, received[name], Path(), None, 0)
            for name in secured.survivors
        ],
        [Refusal(name, why, received.get(name, 0)) for name, why in secured.lost.items()],
    )


def forget(federation: Federation) -> None:
    """Remove what the server has kept of a secure sum, once its round is closed or reset."""
    for path in (federation.experiment.path / "server").glob("secure.*"):
        remove(path)
