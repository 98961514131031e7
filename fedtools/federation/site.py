"""A site's part of a federation, for sites that share no folder with the server.

    CAPSULE/                an experiment of the site's own clients, made once: `write_capsule`
      origin                the label of the whole experiment, which messages carry
      facts.tsv             what is known of the site's clients, if the task has such facts
      local.yaml            paths of the site's data and model, given at the site
      data.yaml             sums of the site's data, as it told the server, or as they were at first
    REQUEST/                what the server asks for in a round: `write_request`
      request.yaml          the fields of `Request`
      clients               the site's clients that take part
      ledger.tsv            the last earlier row of each of these
      global.safetensors    the state that they start from
    ANSWER/                 update.<job>.*, and features, for the round's folder: `answer`

A capsule has no path, no key and no nonce of the server's, and no other site's clients.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fedtools.core.atomic import atomic_path, check_new, new_folder, remove, sha256, write_text
from fedtools.core.config import Natural, fix, from_mapping, read_yaml, write_yaml
from fedtools.core.errors import UserError, some
from fedtools.core.locks import lock
from fedtools.core.untrusted import open_received, received_lines
from fedtools.data.datadir import byte_order
from fedtools.exchange.experiment import (
    LOCAL,
    ORIGIN,
    Experiment,
    record_sums,
    write_clients,
    write_sums,
)
from fedtools.exchange.ledger import LedgerRow, read_round, read_rows, write_ledger
from fedtools.exchange.messages import find_messages, paths_of, remove_messages
from fedtools.exchange.options import Rounds
from fedtools.exchange.private import make_private
from fedtools.exchange.sites import FILE as SITES
from fedtools.exchange.sites import by_site, names_of, write_sites
from fedtools.federation.federation import Federation
from fedtools.federation.site_facts import check_told, sums_of_site
from fedtools.federation.steps import train_local
from fedtools.federation.units import unit_trainer
from fedtools.tasks import facts_of
from fedtools.tasks.client_facts import FILE as FACTS
from fedtools.tasks.facts import check_folders, check_identity, identities

REQUEST = "request.yaml"
# Of the server alone: randomness, and what the noise of its releases follows from.
_SERVERS = ("nonce", "noise_key", "data.yaml", "config.yaml", "clients.txt", SITES, FACTS)


@dataclass(frozen=True)
class Request:
    """What the server asks a site for.

    Attributes:
        experiment: the label of the experiment.
        site: the site's name.
        job: the number of its job, in the names of its answer's files.
        round: the number of the round.
        base: SHA-256 of the state to start from.
        last_round, last_base: the same of the last earlier round with any of the site's clients;
            0 and "" if there is none.
    """

    experiment: str
    site: str
    job: Natural
    round: Rounds
    base: str
    last_round: Natural
    last_base: str


def clients_of(experiment: Experiment, site: str) -> list[str]:
    """Return a site's clients; raise a `UserError` if there is no such site."""
    found = by_site(experiment.sites, experiment.sites).get(site)
    if found is None:
        known = names_of(experiment.sites)
        remedy = f"there are {some(known)}" if known else "begin an experiment with --sites"
        raise UserError(f"no site {site!r}", path=experiment.path, remedy=remedy)
    return found


def write_capsule(path: Path, site: str, out: Path) -> None:
    """Write what a site needs to take part.

    Raises:
        UserError: if there is no such site, `out` exists, or a method does what a site cannot do.
    """
    federation = Federation(path)
    experiment, clients = federation.experiment, clients_of(federation.experiment, site)
    _check_possible(federation)
    check_new(out)
    options = experiment.options
    model = {name: value for name, value in options.model.items() if name != "path"}
    # Of the data, the names of the splits alone.
    data = dict.fromkeys(("train",), "train")
    method = {name: one for name, one in options.method_conf.items() if name != "noise_key"}
    own = replace(options, data=data, model=model, method_conf=method)
    with new_folder(out) as folder:
        make_private(folder)
        names = [name for name in experiment.sums if name not in _SERVERS]
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path / name, folder / name)
        write_yaml(folder / "config.yaml", vars(own))
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


def write_request(experiment: Experiment, number: int, site: str, out: Path) -> None:
    """Write what the server asks a site for in a sampled round.

    Raises:
        UserError: if the round is not sampled, no client of the site takes part, or `out` exists.
    """
    everybody, folder = clients_of(experiment, site), experiment.round(number)
    clients = by_site(experiment.sites, folder.sampled()).get(site, [])
    if not clients:
        raise UserError(f"no client of site {site} is in round {number}", path=folder.path)
    check_new(out)
    job, label = names_of(experiment.sites).index(site) + 1, experiment.label
    rows, last, last_base = _last_rows(experiment, number, {*everybody}), 0, ""
    if rows:
        last = rows[-1].round
        last_base = experiment.round(last).recorded_start_sum()
    request = Request(label, site, job, number, folder.start_sum(), last, last_base)
    with new_folder(out) as made:
        make_private(made)
        shutil.copyfile(folder.global_state, made / folder.global_state.name)
        write_clients(made / "clients", clients)
        write_ledger(made / "ledger.tsv", rows)
        write_yaml(made / REQUEST, asdict(request))


def _last_rows(experiment: Experiment, number: int, clients: set[str]) -> list[LedgerRow]:
    """Return the last row of each client from before a round, in the order of rounds."""
    found: dict[str, LedgerRow] = {}
    for at in range(1, number):
        found |= {row.client: row for row in read_round(experiment, at) if row.client in clients}
    return sorted(found.values(), key=lambda row: (row.round, row.client))


def answer(
    capsule: Path,
    data: Mapping[str, str],
    model: str,
    request: Path,
    out: Path,
    device: str,
    jobs: int = 1,
) -> Path:
    """Train a site's clients as a request asks for, and write what they send.

    Args:
        capsule: of `write_capsule`.
        data: split -> folder of the site's data.
        model: folder of the pretrained model, or "".
        request: of `write_request`; not trusted.
        out: the folder of the answer; the same request gives the same answer.
        device: "cpu" or "cuda".
        jobs: the number of processes that train clients; it does not change results.

    Raises:
        UserError: if the request is not for this capsule, or not one that can follow the last.
    """
    check_new(out)
    with lock(capsule, "rounds"):
        asked = _accept(Experiment(capsule), request)
        _settle(capsule, data, model)
        federation = Federation(capsule, device)
        if "data.yaml" in federation.experiment.sums and not asked.last_round:
            federation.task.check_site_data()
        with unit_trainer(capsule, jobs, device) as train:
            train_local(federation, asked.round, 1, train)
        folder = federation.experiment.round(asked.round).path
        with new_folder(out) as made:
            make_private(made)
            # The tables come twice.
            for path in {*find_messages(folder)}:
                name = re.sub(r"^update\.1\.", f"update.{asked.job}.", path.name)
                shutil.copyfile(path, made / name)
    return paths_of(out, asked.job)[1]


def _settle(capsule: Path, data: Mapping[str, str], model: str) -> None:
    """Keep the paths of the site's data and model; fix the sums of the data unless it told them."""
    own = {"data": {split: str(Path(folder).absolute()) for split, folder in data.items()}}
    if model:
        own["model"] = {"path": str(Path(model).absolute())}
    write_yaml(capsule / LOCAL, own)
    experiment, folders = Experiment(capsule), {split: Path(one) for split, one in data.items()}
    options = experiment.options
    facts = facts_of(options.task, capsule / "config.yaml")
    check_folders(folders)
    if "data.yaml" in experiment.sums:
        for split, folder in folders.items():
            check_identity(experiment, split, folder)
    else:
        sums = identities(facts, options.training, folders)
        fix(capsule / "data.yaml", sums, "other data")
    if "train" in folders:
        check_told(experiment, facts, folders["train"])


def _accept(capsule: Experiment, folder: Path) -> Request:
    """Check a request, and put what it brings into the capsule."""
    path, known = folder / REQUEST, len(capsule.clients)
    asked = from_mapping(Request, read_yaml(path), path)
    (site,) = names_of(capsule.sites)
    if (asked.experiment, asked.site) != (capsule.label, site):
        raise UserError("not a request for this site and experiment", path=path)
    clients = received_lines(folder / "clients", known)[0]
    if unknown := [one for one in clients if not capsule.knows(one)]:
        raise UserError(f"{unknown[0]!r} is no client of this site", path=folder / "clients")
    if clients != byte_order({*clients}):
        raise UserError("not in order, or not each once", path=folder / "clients")
    last = _last_asked(capsule)
    if problem := _contradiction(capsule, asked, clients, last):
        remedy = "ask the server; if it was reset, go on with a new capsule"
        raise UserError(problem, path=path, remedy=remedy)
    if asked.round > last:
        lines = received_lines(folder / "ledger.tsv", known)[0]
        _receive(capsule, asked, folder / "global.safetensors")
        _go_to(capsule, asked, list(read_rows(folder / "ledger.tsv", lines)))
        _forget(capsule, last)
        capsule.round(asked.round).write_sample(clients, 1)
    return asked


def _contradiction(capsule: Experiment, asked: Request, clients: list[str], last: int) -> str:
    """Return why a request cannot follow the last one of a site, or repeat it; "" if it can."""
    if asked.round > capsule.options.rounds:
        return f"asks for round {asked.round}, and there are {capsule.options.rounds}"
    if asked.round < last:
        return f"asks for round {asked.round}, and one of round {last} was answered"
    if not last:
        return ""
    here = capsule.round(last)
    base = here.recorded_start_sum()
    if asked.round == last:
        same = (base, here.sampled()) == (asked.base, clients)
        return "" if same else f"differs from the request of round {last} that was answered"
    if asked.last_round < last or (asked.last_round == last and asked.last_base != base):
        return f"does not know of round {last}, which was answered"
    return ""


def _receive(capsule: Experiment, asked: Request, state: Path) -> None:
    """Copy the state of a request, checking that it is what the request says."""
    here = capsule.round(asked.round)
    most = 2 * (capsule.init.stat().st_size + 2**20)
    here.path.mkdir(exist_ok=True)
    with atomic_path(here.global_state) as temporary:
        with open_received(state, most) as file, open(temporary, "wb") as copy:
            shutil.copyfileobj(file, copy)
        if sha256(temporary) != asked.base:
            raise UserError("not the state of this request", path=state, remedy="send it again")


def _forget(capsule: Experiment, last: int) -> None:
    """Remove what was kept of the last request in case it would be repeated."""
    if last > 1:
        remove(capsule.round(last).global_state)
    if last:
        remove_messages(capsule.round(last).path)
        for client in capsule.clients:
            capsule.own(client, last).drop_old(keep=1)


def _last_asked(capsule: Experiment) -> int:
    """Return the last round that was asked for, or 0."""
    rounds = (int(one.name[6:]) for one in capsule.path.glob("round_[0-9]*"))
    return max((number for number in rounds if capsule.round(number).is_sampled()), default=0)


def _go_to(capsule: Experiment, asked: Request, rows: list[LedgerRow]) -> None:
    """Complete the rounds before, with what the server's ledger has of this site's clients."""
    found: dict[int, dict[str, LedgerRow]] = {at: {} for at in range(1, asked.round)}
    for at in found:
        if capsule.round(at).is_done():
            found[at] = {row.client: row for row in read_round(capsule, at)}
    for row in rows:
        if not capsule.knows(row.client) or row.round not in found:
            problem = f"the ledger has {row.client!r} in round {row.round}"
            raise UserError(problem, path=capsule.path)
        found[row.round].setdefault(row.client, row)
    for at, own in found.items():
        here, following = capsule.round(at), capsule.round(at + 1).global_state
        here.path.mkdir(exist_ok=True)
        write_ledger(here.ledger, list(own.values()))
        sums = {"ledger.tsv": sha256(here.ledger)}
        if at + 1 == asked.round:
            sums[f"../{following.relative_to(capsule.path)}"] = asked.base
        record_sums(here.done, sums)
