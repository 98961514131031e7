"""The clients' steps of a secure sum, for the clients of one job.

Each call does the step that is due, if it has not been done. Before messages are in place, the sum
of what they answer to, and of masked vectors their own, is kept: a server that gave a client other
keys or shares in the next step, or asked twice for a vector that does not repeat to the last bit,
would learn more than the sum.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedtools.core.atomic import atomic_path, sha256
from fedtools.core.errors import UserError
from fedtools.core.untrusted import open_received
from fedtools.exchange.states import Spec
from fedtools.federation.secure_round import ALL, EACH, SecureRound
from fedtools.privacy.discrete_gaussian import discrete_gaussian
from fedtools.privacy.key import NoiseKey
from fedtools.privacy.secagg.boxes import BoxWriter, box_bytes, parse_box, write_box
from fedtools.privacy.secagg.holder import Holder
from fedtools.privacy.secagg.keys import KEYS_BYTES
from fedtools.privacy.secagg.participant import Participant
from fedtools.privacy.secagg.shares import ROW_BYTES
from fedtools.privacy.secagg.signed import Step
from fedtools.privacy.secagg.survivors import most_certificate_bytes, read_list

if TYPE_CHECKING:
    from fedtools.federation.federation import Federation, Sent

# Pairs of neighbours that a process keeps in memory from step to step: some hundred megabytes.
_EDGES = 1 << 18
# Yields what the units of a job have sent, in their order.
Train = Callable[[], Iterator["Sent"]]


def do_step(
    federation: Federation, number: int, job: int, clients: Sequence[str], train: Train
) -> bool:
    """Do the step of a secure sum that is due for the clients of a job.

    Args:
        clients: of the job.
        train: trains them, if their vectors are due.

    Returns:
        whether the clients were trained.

    Raises:
        UserError: if the keys of the clients are not here, or the server's reply does not fit what
            was answered before.
    """
    round = SecureRound(federation, number)
    step = round.due(job)
    out = round.sent(step, job)
    if out.exists() and step is Step.UNMASK and federation.holder:
        # A killed command may have left them.
        federation.holder.forget(round.session, job)
    if out.exists() or not clients:
        return False
    holder = _holder_of(federation)
    with holder.at_work(round.session, job):
        steps = _Job(round, job, clients, holder)
        if step is Step.MASKED:
            steps.masked(out, train)
        else:
            steps.send(step, out)
    return step is Step.MASKED


def _holder_of(federation: Federation) -> Holder:
    if federation.holder is None:
        problem = "the experiment has secure sums, for which each client needs its key"
        remedy = "give --keys, a folder of fedtools client-keys"
        raise UserError(problem, path=federation.where, remedy=remedy)
    return federation.holder


class _Job:
    """The steps of a job's clients in an attempt."""

    def __init__(self, round: SecureRound, job: int, clients: Sequence[str], holder: Holder):
        self._round, self._job, self._clients = round, job, clients
        self._holder, self._session = holder, round.session
        self._numbers = {self._session.number(client): client for client in clients}
        kept = holder.attempt(self._session, job, clients)
        if kept is None and round.due(job) is not Step.KEYS:
            holder.promises.check(self._session)
            problem = "what the clients kept of this attempt is not here, or was removed"
            remedy = "they are lost in this round: fedtools aggregate --without"
            raise UserError(problem, path=round.sent(round.due(job), job), remedy=remedy)
        self._kept = kept or holder.begin(self._session, job, clients)

    def send(self, step: Step, out: Path) -> None:
        """Write the messages of a step that needs no training."""
        if step is Step.KEYS:
            there = self._all(self._numbers)
            found = {number: one.keys() for number, one in there.items()}
        else:
            replies = self._replies(step.before)
            given = replies.pop(step.before)
            act, there = step.name.lower(), self._resumed(replies, given)
            found = {}
            for number, one in there.items():
                try:
                    found[number] = getattr(one, act)(given[number])
                except UserError as error:
                    if not found and number == max(there):
                        # None of them: nothing is kept, so that a right reply can follow.
                        raise
                    self._say(number, error)
        self._holder.keep(self._session, self._job, self._kept)
        write_box(out, found)
        if step is Step.UNMASK:
            self._holder.forget(self._session, self._job)
        else:
            self._stay({number: one for number, one in there.items() if number in found})

    def masked(self, out: Path, train: Train) -> None:
        """Train the clients, and write their masked vectors."""
        replies = self._replies(Step.SHARES)
        given = replies.pop(Step.SHARES)
        there, numbers = self._resumed(replies, given), self._session.numbers
        # Before anything is computed with them: another process must use the same.
        self._holder.keep(self._session, self._job, self._kept)
        sending = dict[int, Participant]()
        with atomic_path(out) as temporary:
            with open(temporary, "wb") as file:
                box = BoxWriter(file)
                for sent in train():
                    for client, values in vectors_of(sent, self._round.spec):
                        if (number := numbers[client]) not in there:
                            continue
                        try:
                            values += self._noise(client)
                            message = there[number].masked(given[number], values)
                        except UserError as error:
                            self._say(number, error)
                            continue
                        box.put(number, message)
                        sending[number] = there[number]
            self._round.check_start()
            self._kept.bind("sent", Step.MASKED.name.lower(), sha256(temporary))
            self._holder.keep(self._session, self._job, self._kept)
        self._stay(sending)

    def _noise(self, client: str) -> np.ndarray | int:
        """Return the noise that a client adds to its change, the same in an attempt."""
        deviation, size = self._round.own_deviation, self._session.size
        if not deviation:
            return 0
        key = NoiseKey(self._kept.secrets_of(client).noise)
        stream = key.stream("share", self._kept.session, client, deviation.hex())
        return discrete_gaussian(stream, deviation, size)

    def _stay(self, there: dict[int, Participant]) -> None:
        """Keep participants for the next step in this process, instead of resuming them then."""
        if len(there) * self._session.plan.neighbours <= _EDGES:
            self._holder.working[self._session.digest, self._job] = there

    def _all(self, numbers: Mapping[int, str]) -> dict[int, Participant]:
        """Return participants in their first step."""
        return {
            number: Participant(
                self._session,
                client,
                self._holder.key(client),
                self._holder.promises,
                self._kept.secrets_of(client),
            )
            for number, client in numbers.items()
        }

    def _resumed(
        self, replies: Mapping[Step, Mapping[int, bytes]], given: Mapping[int, bytes]
    ) -> dict[int, Participant]:
        """Return the participants that the last reply is for, at the step that answers it."""
        # Who was lost in an earlier step has no reply.
        left = self._numbers.keys() & given.keys()
        for reply in replies.values():
            left &= reply.keys()
        known = self._holder.working.pop((self._session.digest, self._job), {})
        found = {number: known[number] for number in sorted(left & known.keys())}
        there = self._all({one: self._numbers[one] for one in sorted(left - known.keys())})
        for number, one in there.items():
            try:
                one.resume(*(reply[number] for reply in replies.values()))
            except UserError as error:
                self._say(number, error)
                continue
            found[number] = one
        return found

    def _replies(self, last: Step) -> dict[Step, Mapping[int, bytes]]:
        """Return what the server has for each client, up to a step, and keep sums of the files."""
        found: dict[Step, Mapping[int, bytes]] = {}
        for step in (*EACH, *ALL):
            path = self._round.reply(step, self._job)
            if step in EACH:
                row = KEYS_BYTES if step is Step.KEYS else ROW_BYTES
                most = row * self._session.plan.neighbours
                content = _received(path, box_bytes(len(self._numbers), most))
                found[step] = parse_box(content, path, self._numbers, most)
            else:
                content = _received(path, most_certificate_bytes(self._session))
                found[step] = dict.fromkeys(self._numbers, content)
                if step is Step.MASKED:
                    survivors = read_list(self._session, content).survivors
                    found[step] = dict.fromkeys(survivors & self._numbers.keys(), content)
            self._kept.bind("given", step.name.lower(), hashlib.sha256(content).hexdigest())
            if step is last:
                break
        return found

    def _say(self, number: int, error: Exception) -> None:
        name, at = self._session.names[number], self._session.round
        print(f"round {at}, {name}: lost: {error}", file=sys.stderr)


def _received(path: Path, most: int) -> bytes:
    with open_received(path, most) as file:
        return file.read()


def vectors_of(sent: Sent, spec: Spec) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each client of a unit, and its change: int64 (values,), tensor by tensor.

    Who has nothing to send has a change of 0, like who has learnt nothing.

    Args:
        spec: the tensors of a client, in their order.
    """
    tensors = sent.tensors or {}
    for row, report in enumerate(sent.reports):
        parts = [
            np.zeros(math.prod(shape)) if report.reason else np.asarray(tensors[name][row]).ravel()
            for name, (shape, _) in spec.items()
        ]
        yield report.client, np.concatenate(parts).astype(np.int64)
