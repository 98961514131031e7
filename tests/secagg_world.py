"""Rounds of secure sums in memory, in which messages can be lost or changed on their way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from scipy import stats

from fedtools.core.errors import UserError
from fedtools.privacy.secagg.collector import Collector
from fedtools.privacy.secagg.participant import Participant
from fedtools.privacy.secagg.plan import Plan
from fedtools.privacy.secagg.promises import Promises
from fedtools.privacy.secagg.session import Session

MOST = 1 << 20
# Of 20 clients 10 neighbours, any 5 of whom recover a secret; 14 survivors, 12 signatures.
SPARSE = Plan(clients=20, lost=6, colluding=2, neighbours=10, threshold=5)
COMPLETE = Plan(clients=8, lost=2, colluding=1, neighbours=7, threshold=4)
TINY = Plan(clients=5, lost=1, colluding=1, neighbours=4, threshold=3)
STEPS = ("keys", "shares", "masked", "survivors", "unmask")

Change = Callable[[str, str, bytes], bytes | None]


@lru_cache(maxsize=2048)
def key_of(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


def public_of(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


def session_of(plan: Plan = SPARSE, size: int = 50, most: int = MOST, **more) -> Session:
    names = [f"c{number:04d}" for number in range(plan.clients)]
    roster = {name: public_of(key_of(name)) for name in names}
    given = {"label": "exp", "round": 3, "attempt": 1, "basis": "sums", **more}
    return Session(roster=roster, plan=plan, size=size, most=most, **given)


def vectors(session: Session, seed: int = 1) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    most, size = session.most, session.size
    return {name: random.integers(-most, most, size, endpoint=True) for name in session.names}


@dataclass
class World:
    """Clients and a server in an attempt.

    Attributes:
        change: (step, client, message) -> what arrives at the server, or None if it is lost; a
            client of which a message is lost sends no more.
        sent: step -> client -> message, as they arrived.
        given: step -> what the server sent.
        failed: client -> its error.
    """

    session: Session
    values: Mapping[str, np.ndarray] = field(default_factory=dict)
    change: Change = lambda step, name, message: message
    promises: dict[str, Promises] = field(default_factory=dict)
    sent: dict[str, dict[str, bytes]] = field(default_factory=dict)
    given: dict[str, object] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.values = self.values or vectors(self.session)
        self.server = Collector(self.session)
        self.clients: dict[str, Participant] = {}
        for name in self.session.names:
            promises = self.promises.setdefault(name, Promises())
            self.clients[name] = Participant(self.session, name, key_of(name), promises)

    def step(self, step: str, arguments: Callable[[str], tuple] = lambda name: ()) -> None:
        """Let each client that is left do a step, and the server its own."""
        found = {}
        for name in list(self.clients):
            try:
                message = getattr(self.clients[name], step)(*arguments(name))
            except UserError as error:
                self.failed[name] = str(error)
                message = None
            arrived = message if message is None else self.change(step, name, message)
            if arrived is None:
                del self.clients[name]
            else:
                found[name] = arrived
        self.sent[step] = found
        take = found.items() if step == "masked" else found
        self.given[step] = getattr(self.server, step)(take)
        for name in self.server.refused:
            self.clients.pop(name, None)

    def until(self, last: str) -> World:
        """Do the steps up to one."""
        every: dict[str, Callable[[str], tuple]] = {
            "keys": lambda name: (),
            "shares": lambda name: (self.given["keys"][name],),
            "masked": lambda name: (self.given["shares"][name], self.values[name]),
            "survivors": lambda name: (self.given["masked"],),
            "unmask": lambda name: (self.given["survivors"],),
        }
        for step, arguments in every.items():
            if step not in self.sent:
                self.step(step, arguments)
            if step == last:
                break
        return self

    def total(self) -> np.ndarray:
        """Do all steps that are left, and return the sum."""
        return self.until("unmask").given["unmask"]

    def expected(self) -> np.ndarray:
        """Return the plain sum of those whose masked vectors were taken."""
        taken = self.sent["masked"].keys() - self.refused_before()
        return sum(self.values[name].astype(np.int64) for name in taken)

    def refused_before(self) -> set[str]:
        """Return whose masked vectors were refused."""
        listed = self.server._listed.survivors
        return {name for name in self.session.names if self.session.numbers[name] not in listed}


def one_line(call: Callable, *words) -> str:
    """Return the message of a `UserError`."""
    with pytest.raises(UserError) as found:
        call(*words)
    assert "\n" not in str(found.value) and len(str(found.value)) < 300
    return str(found.value)


def uniform(content: bytes) -> bool:
    """Say whether bytes pass a test of uniformity."""
    counts = np.bincount(np.frombuffer(content, np.uint8), minlength=256)
    return bool(stats.chisquare(counts).pvalue > 1e-6)


def again(session: Session) -> Session:
    """Return the next attempt."""
    return replace(session, attempt=session.attempt + 1)


def losing(lost: Mapping[str, str]) -> Change:
    """Return a change that loses each client at a step."""
    return lambda step, name, message: None if lost.get(name) == step else message
