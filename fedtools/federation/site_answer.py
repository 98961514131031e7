"""The server's half of an answer: to take from a site what is its own, and nothing else.

Whoever copied the files of an answer into a round's folder by hand would let a site replace the
round's state, its list of clients, or another site's answer.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from fedtools.core.atomic import atomic_path, remove
from fedtools.core.errors import UserError, printable
from fedtools.core.locks import lock
from fedtools.core.untrusted import open_received
from fedtools.exchange.answers import evaluation_path
from fedtools.exchange.experiment import Experiment
from fedtools.exchange.messages import answer_path, paths_of
from fedtools.exchange.sent_features import feature_paths
from fedtools.exchange.signed import signature_of
from fedtools.exchange.sites import by_site, names_of
from fedtools.federation.capsule import clients_of
from fedtools.federation.federation import Federation
from fedtools.federation.secure_round import SecureRound


def take_answer(experiment: Experiment, number: int, site: str, answer: Path) -> list[Path]:
    """Copy the files of a site's answer into a round's folder; `aggregate` checks what they hold.

    Args:
        experiment: the experiment.
        number: the round that the request was about.
        site: the site that the answer is from.
        answer: the folder that it sent; not trusted.

    Returns:
        the paths of the copies.

    Raises:
        UserError: if the round is closed, or the answer has a file that is not this site's, or no
            regular file.
    """
    clients_of(experiment, site)
    folder = experiment.round(number)
    folder.require_begun("take answers")
    if not answer.is_dir():
        raise UserError("no such folder", path=answer, remedy="name what the site has sent")
    names = sorted(one.name for one in answer.iterdir())
    if not names:
        raise UserError("an empty answer", path=answer, remedy="ask the site for it again")
    own = {path.name: path for path in _own(experiment, number, site, names)}
    for name in names:
        if name not in own:
            problem = f"{printable(name[:80], '')!r} is no file that {site} sends in round {number}"
            raise UserError(problem, path=answer, remedy="ask the site for the answer alone")
        # All of them, before any is taken.
        open_received(answer / name).close()
    trained = any(not name.startswith("evaluation.") for name in names)
    if trained and folder.is_done():
        raise UserError(f"round {number} is closed", path=folder.path)
    with lock(experiment.path, f"answer-{number}-{site}"):
        if trained:
            # What is left of an earlier answer would be taken for a part of this one.
            there = [one.name for one in folder.path.iterdir()]
            for path in _own(experiment, number, site, there):
                if not path.name.startswith("evaluation."):
                    remove(path)
        for name in names:
            with (
                open_received(answer / name) as file,
                atomic_path(own[name]) as temporary,
                open(temporary, "wb") as copy,
            ):
                shutil.copyfileobj(file, copy)
    return [own[name] for name in names]


def _own(experiment: Experiment, number: int, site: str, names: list[str]) -> Iterator[Path]:
    """Yield the places of the files, among some names, that a site may send in a round."""
    folder, job = experiment.round(number), names_of(experiment.sites).index(site) + 1
    statement = answer_path(folder.path, job)
    known = {*paths_of(folder.path, job), statement, signature_of(statement)}
    sampled = folder.sampled() if folder.is_sampled() else []
    for client in by_site(experiment.sites, sampled).get(site, []):
        known |= {*feature_paths(folder.path, client)}
    if experiment.client_keys and sampled:
        round = SecureRound(Federation(experiment.path), number)
        known = {statement, signature_of(statement), round.sent(round.due(job), job)}
    for split in {name.split(".")[1] for name in names if name.startswith("evaluation.")}:
        evaluation = evaluation_path(folder.path, split, job)
        known |= {evaluation, signature_of(evaluation)}
    yield from (path for path in known if path.name in names)
