"""Secure sums: processor seconds and bytes of a client and of the server, step by step.

    python tests/bench/bench_secagg.py [--clients 100] [--size 1000000] [--complete] [--spread]

30 % of the clients are lost: all of them before step `masked`, which makes the server's work the
most; or with --spread a third before each of the steps `shares`, `masked` and `unmask`. All run in
one process with one thread, one after the other. Seconds and bytes of clients are means over those
that did a step.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedtools.core.tables import format_table
from fedtools.privacy.secagg.collector import Collector
from fedtools.privacy.secagg.participant import Participant
from fedtools.privacy.secagg.plan import COMPLETE, SPARSE, Options, plan
from fedtools.privacy.secagg.promises import Promises
from fedtools.privacy.secagg.session import Session

MOST = 1 << 20
STEPS = ("keys", "shares", "masked", "survivors", "unmask")


class Measured:
    """An attempt, with seconds and bytes of each step.

    Attributes:
        spent: (who, step) -> processor seconds of all.
        done, up, down: step -> clients that did it, bytes that they sent and received.
    """

    def __init__(self, session: Session, keys: dict[str, Ed25519PrivateKey]):
        self.session, self.server = session, Collector(session)
        self.clients = {
            name: Participant(session, name, key, Promises()) for name, key in keys.items()
        }
        self.spent: dict[tuple[str, str], float] = Counter()
        self.done, self.up, self.down = Counter[str](), Counter[str](), Counter[str]()
        self.plain = np.zeros(session.size, np.int64)
        # The server may read one message at a time, and the clients' seconds are not its own.
        self._begun = 0.0

    def values(self, name: str) -> np.ndarray:
        """Return a client's vector."""
        random = np.random.default_rng(self.session.numbers[name])
        return random.integers(-MOST, MOST, self.session.size, np.int32, endpoint=True)

    def messages(self, step: str, given: dict[str, tuple]) -> Iterator[tuple[str, bytes]]:
        """Let clients do a step, and yield their messages to the server, whose clock stands."""
        for name, words in given.items():
            self.spent["server", step] += time.process_time() - self._begun
            values = self.values(name) if step == "masked" else None
            if values is not None:
                self.plain += values
                words = (*words, values)
            begun = time.process_time()
            message = getattr(self.clients[name], step)(*words)
            self.spent["client", step] += time.process_time() - begun
            self.done[step] += 1
            self.up[step] += len(message)
            self.down[step] += sum(len(one) for one in words if isinstance(one, bytes))
            self._begun = time.process_time()
            yield name, message

    def step(self, step: str, given: dict[str, tuple]) -> object:
        """Do a step."""
        self._begun = time.process_time()
        found = self.messages(step, given)
        answer = getattr(self.server, step)(found if step == "masked" else dict(found))
        self.spent["server", step] += time.process_time() - self._begun
        return answer


def attempt(clients: int, size: int, graph: str, spread: bool = False) -> Measured:
    """Run an attempt to its end, and compare the sum with that of the plain vectors."""
    made = {f"c{number:05d}": Ed25519PrivateKey.generate() for number in range(clients)}
    roster = {name: key.public_key().public_bytes_raw().hex() for name, key in made.items()}
    session = Session("bench", 1, 1, roster, plan(Options(graph=graph), clients), size, MOST)
    print(session.plan)
    run = Measured(session, made)
    lost, names = session.plan.lost, list(session.names)
    third = lost // 3 if spread else 0
    keys = run.step("keys", dict.fromkeys(names, ()))
    names = names[third:]
    shares = run.step("shares", {name: (keys[name],) for name in names})
    names = names[third if spread else lost :]
    listed = run.step("masked", {name: (shares[name],) for name in names})
    signed = run.step("survivors", dict.fromkeys(names, (listed,)))
    total = run.step("unmask", dict.fromkeys(names[lost - 2 * third if spread else 0 :], (signed,)))
    if not np.array_equal(total, run.plain) or run.server.refused:
        raise SystemExit("the sum is not that of the plain vectors")
    return run


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--size", type=int, default=1000000)
    parser.add_argument("--complete", action="store_true")
    parser.add_argument("--spread", action="store_true")
    options = parser.parse_args()
    # Imports are not measured.
    attempt(5, 100, COMPLETE)
    graph = COMPLETE if options.complete else SPARSE
    run = attempt(options.clients, options.size, graph, options.spread)
    found, sums = {}, np.zeros(4)
    for step in STEPS:
        clients = np.array([run.spent["client", step], run.up[step], run.down[step]])
        found[step] = np.append(clients / run.done[step], run.spent["server", step])
        sums += found[step]
    found["all"] = sums
    rows = [
        (step, f"{one[0]:.4f}", f"{one[1]:.0f}", f"{one[2]:.0f}", f"{one[3]:.2f}")
        for step, one in found.items()
    ]
    header = ("step", "s a client", "bytes sent", "bytes received", "s of the server")
    print(format_table(header, rows), end="")
    plain = options.size * run.session.bits // 8
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{sums[1] - plain:.0f} bytes more than a plain vector; {peak:.0f} MiB at most")


if __name__ == "__main__":
    main()
