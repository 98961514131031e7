"""A site's part in a step of a secure sum: what a request for it must be, and brings."""

from __future__ import annotations

import shutil
from pathlib import Path

from fedtools.core.atomic import atomic_path, sha256
from fedtools.core.errors import UserError
from fedtools.core.untrusted import open_received
from fedtools.federation.bounds import Bounds, check_least_summed
from fedtools.federation.capsule import REQUEST, Request
from fedtools.federation.federation import Federation
from fedtools.federation.secure_round import FIRST_STEP, SecureRound, reply_names
from fedtools.privacy.secagg.signed import Step

# Of a reply: the shares of all neighbours of all clients of a site.
_REPLY_BYTES = 1 << 34


def check_step(federation: Federation, asked: Request, request: Path, last: int) -> None:
    """Raise a `UserError` unless a request asks for a step that the method has, and can follow.

    Args:
        last: the last round that the site was asked for.
    """
    steps = [step.name.lower() for step in Step] if federation.method.secure_sums else [""]
    problem = ""
    if asked.step not in steps:
        wanted = "a step of a secure sum" if steps[0] else "no secure sum"
        problem = f"asks for step {asked.step[:20]!r}, and the method has {wanted}"
    elif asked.step not in ("", FIRST_STEP) and asked.round != last:
        problem = f"asks for step '{asked.step}' of round {asked.round}, which has not begun here"
    if problem:
        raise UserError(problem, path=request / REQUEST)


def receive_step(federation: Federation, asked: Request, request: Path, bounds: Bounds) -> None:
    """Put what a request brings for a step into the capsule.

    Raises:
        UserError: if a file is not what the request states, or the sum is of fewer clients than the
            site allows.
    """
    round = SecureRound(federation, asked.round)
    check_least_summed(federation.experiment, round.session.plan.least, bounds)
    for step, name in reply_names(1).items():
        if name in asked.files:
            _receive(request / name, asked.files[name], round.reply(step, 1))


def _receive(source: Path, digest: str, out: Path) -> None:
    """Copy a file of a request; raise a `UserError` if it is not what the request states.

    Whether another one was used before, is asked of what the site's clients have kept.
    """
    if out.exists() and sha256(out) == digest:
        return
    with atomic_path(out) as temporary:
        with open_received(source, _REPLY_BYTES) as file, open(temporary, "wb") as copy:
            shutil.copyfileobj(file, copy)
        if sha256(temporary) != digest:
            raise UserError("not what the request states", path=source, remedy="send it again")
