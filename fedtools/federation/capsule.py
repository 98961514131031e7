"""What a server gives to sites that share no folder with it: capsules and requests.

    CAPSULE/                an experiment of the site's own clients, made once: `write_capsule`
      origin                the label of the whole experiment, which messages carry
      facts.tsv             what is known of the site's clients, if the task has such facts
      data.yaml             sums of the site's training data, if it told the server
      sha256sums.sig        the server's signature, if the experiment has a roster of keys
    REQUEST/                what the server asks for in a round: `write_request`
      request.yaml          the fields of `Request`; signed with a roster: request.yaml.sig
      clients               the site's clients that take part
      ledger.tsv            the last earlier row of each of these
      global.safetensors    the state that they start from
      secure.*              of a step of a secure sum: the server's replies, which after the first
                            step come without ledger and state

A capsule has no path, no key and no nonce of the server's, and no other site's clients; for secure
sums, it has the names and public keys of all.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fedtools.core.atomic import check_new, new_folder, write_text
from fedtools.core.config import Natural, write_yaml
from fedtools.core.errors import UserError, some
from fedtools.core.provenance import computing
from fedtools.data.datadir import check_id
from fedtools.exchange.experiment import ORIGIN, Experiment, write_clients, write_sums
from fedtools.exchange.ledger import LedgerRow, read_round, write_ledger
from fedtools.exchange.messages import FORMAT
from fedtools.exchange.options import Rounds, written
from fedtools.exchange.private import make_private
from fedtools.exchange.signed import SERVER, key_for, sign, write_statement
from fedtools.exchange.sites import FILE as SITES
from fedtools.exchange.sites import by_site, names_of, write_sites
from fedtools.federation.federation import Federation
from fedtools.federation.secure_round import FIRST_STEP, SecureRound, reply_names
from fedtools.federation.site_facts import sums_of_site
from fedtools.privacy.key import RECORD as NOISE_KEY
from fedtools.privacy.record import NONCE
from fedtools.tasks.client_facts import FILE as FACTS

REQUEST = "request.yaml"
# Of the server alone, or made anew for the site.
_SERVERS = (NONCE, NOISE_KEY, "data.yaml", "config.yaml", "clients.txt", SITES, FACTS)


@dataclass(frozen=True)
class Request:
    """What the server asks a site for.

    Attributes:
        experiment: the label of the experiment.
        site: the site's name.
        job: the number of its job, in the names of its answer's files.
        round: the number of the round.
        split: data on which the state that the round starts from is to be evaluated; "" if the
            clients are to train.
        attempt: how often the experiment was begun or reset.
        step: of a secure sum, such as "shares"; "" otherwise.
        base: SHA-256 of the state to start from.
        last_round, last_base: the same of the last earlier round with any of the site's clients;
            0 and "" if there is none.
        format: `fedtools.exchange.messages.FORMAT` at the server.
        software: as `fedtools.core.provenance.computing` returns it, at the server.
        files: name -> SHA-256 of the other files of the request.
    """

    experiment: str
    site: str
    job: Natural
    round: Rounds
    split: str
    attempt: Natural
    step: str
    base: str
    last_round: Natural
    last_base: str
    format: Natural
    software: dict[str, str]
    files: dict[str, str]


def clients_of(experiment: Experiment, site: str) -> list[str]:
    """Return a site's clients; raise a `UserError` if there is no such site."""
    found = by_site(experiment.sites, experiment.sites).get(site)
    if found is None:
        known = names_of(experiment.sites)
        remedy = f"there are {some(known)}" if known else "begin an experiment with --sites"
        raise UserError(f"no site {site!r}", path=experiment.path, remedy=remedy)
    return found


def write_capsule(path: Path, site: str, out: Path, key_path: Path | None = None) -> None:
    """Write what a site needs to take part.

    Args:
        path: the experiment.
        site: the name of the site.
        out: the folder of the capsule.
        key_path: the server's private key, if the experiment has a roster.

    Raises:
        UserError: if there is no such site, `out` exists, the key is not the server's, or a method
            does what a site cannot do.
    """
    federation = Federation(path)
    experiment, clients = federation.experiment, clients_of(federation.experiment, site)
    _check_possible(federation)
    check_new(out)
    key = key_for(key_path, experiment.roster, SERVER)
    options = experiment.options
    model = {name: value for name, value in options.model.items() if name != "path"}
    method = {name: one for name, one in options.method_conf.items() if name != "noise_key"}
    own = replace(options, data={}, model=model, method_conf=method)
    with new_folder(out) as folder:
        make_private(folder)
        names = [name for name in experiment.sums if name not in _SERVERS]
        # Its sum is stated anew, and requests state the old one.
        experiment.round(1).start_sum()
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path / name, folder / name)
        write_yaml(folder / "config.yaml", written(own))
        write_clients(folder / "clients.txt", clients)
        write_sites(folder / SITES, dict.fromkeys(clients, site))
        write_text(folder / ORIGIN, f"{experiment.label}\n")
        names += ["config.yaml", "clients.txt", SITES, ORIGIN]
        if facts := federation.task.frozen_facts:
            facts.write(folder / FACTS, clients)
            names.append(FACTS)
        if told := sums_of_site(experiment, site):
            write_yaml(folder / "data.yaml", {"train": told})
            names.append("data.yaml")
        write_sums(folder / "sha256sums", {name: folder / name for name in names})
        sign(folder / "sha256sums", key)


def _check_possible(federation: Federation) -> None:
    """Raise a `UserError` if a phase of the method needs more than a site can answer."""
    method, rounds = federation.method, federation.experiment.options.rounds
    phases = [method.phase(number) for number in range(1, rounds + 1)]
    for wrong, what in (
        (any(phase.jointly for phase in phases), "trains a personal part of each client's"),
        (federation.method.user_privacy is None and federation.protection, "draws noise by client"),
    ):
        if wrong:
            problem = (
                f"method {federation.experiment.options.method} {what}, which sites cannot yet"
            )
            raise UserError(problem, path=federation.where)


def write_request(
    experiment: Experiment,
    number: int,
    site: str,
    out: Path,
    key_path: Path | None = None,
    split: str = "",
) -> None:
    """Write what the server asks a site for in a sampled round; arguments as in `write_capsule`.

    Args:
        split: data on which the state that the round starts from is to be evaluated, by all clients
            of the site; the round need not be sampled. "" asks to train.

    Raises:
        UserError: if the round is not sampled, no client of the site takes part, `out` exists, or
            the key is not the server's.
    """
    everybody, folder = clients_of(experiment, site), experiment.round(number)
    if split:
        check_id(split, "split")
        folder.require_begun("be evaluated before")
        clients = everybody
    else:
        clients = by_site(experiment.sites, folder.sampled()).get(site, [])
    if not clients:
        raise UserError(f"no client of site {site} is in round {number}", path=folder.path)
    check_new(out)
    job, label = names_of(experiment.sites).index(site) + 1, experiment.label
    rows, last, last_base = _last_rows(experiment, number, {*everybody}), 0, ""
    if rows:
        last = rows[-1].round
        last_base = experiment.round(last).recorded_start_sum()
    key = key_for(key_path, experiment.roster, SERVER)
    step, replies = _secure_step(experiment, number, job) if not split else ("", {})
    origin = (
        label,
        site,
        job,
        number,
        split,
        experiment.attempt,
        step,
        folder.start_sum(),
        last,
        last_base,
    )
    request = Request(*origin, FORMAT, dict(computing()), {})
    with new_folder(out) as made:
        make_private(made)
        write_clients(made / "clients", clients)
        if step in ("", FIRST_STEP):
            shutil.copyfile(folder.global_state, made / folder.global_state.name)
            write_ledger(made / "ledger.tsv", rows)
        for name, path in replies.items():
            shutil.copyfile(path, made / name)
        write_statement(made / REQUEST, asdict(request), made.iterdir(), key)


def _secure_step(experiment: Experiment, number: int, job: int) -> tuple[str, dict[str, Path]]:
    """Return the step of a secure sum that a site has to do, and the server's replies before it.

    The step is "" without secure sums; replies are by the names that they have in a request.
    """
    if not experiment.client_keys:
        return "", {}
    round = SecureRound(Federation(experiment.path), number)
    names = reply_names(1).items()
    there = {name: path for one, name in names if (path := round.reply(one, job)).exists()}
    return round.due(job).name.lower(), there


def _last_rows(experiment: Experiment, number: int, clients: set[str]) -> list[LedgerRow]:
    """Return the last row of each client from before a round, in the order of rounds."""
    found: dict[str, LedgerRow] = {}
    # Backwards, so that a round reads no more ledgers than it takes to meet all clients.
    for at in range(number - 1, 0, -1):
        if len(found) == len(clients):
            break
        rows = (row for row in read_round(experiment, at) if row.client in clients)
        found = {row.client: row for row in rows} | found
    return sorted(found.values(), key=lambda row: (row.round, row.client))
