"""A site's part of a round: to check a request, to do what it asks for, and to answer.

CAPSULE/                of `fedtools.federation.capsule`; beside what the server has written:
  admitted              that nothing else was there at first: `fedtools.federation.admission`
  local.yaml            paths of the site's data and model, and sums of what it has not told the
                        server, as they were at first
  round_0007/attempt    of the last request; its clients, state and messages are kept, too
ANSWER/                 update.<job>.*, and features, for the round's folder at the server;
                        among them what the site states: `fedtools.exchange.answers`
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedtools.core.atomic import atomic_path, check_new, new_folder, remove, sha256, write_text
from fedtools.core.config import read_yaml, write_yaml
from fedtools.core.errors import UserError
from fedtools.core.locks import lock
from fedtools.core.provenance import computing
from fedtools.core.text_files import read_text
from fedtools.core.untrusted import open_received, received_lines, sum_of
from fedtools.data.datadir import byte_order
from fedtools.exchange.answers import evaluation_path, mismatch, other_computing
from fedtools.exchange.experiment import (
    ATTEMPT,
    LOCAL,
    Experiment,
    record_sums,
)
from fedtools.exchange.ledger import LedgerRow, read_round, read_rows, write_ledger
from fedtools.exchange.messages import (
    COUNTED,
    FORMAT,
    answer_path,
    find_messages,
    remove_messages,
)
from fedtools.exchange.private import make_private
from fedtools.exchange.signed import SERVER, read_statement, write_statement
from fedtools.exchange.states import check_spec, layout_of
from fedtools.federation.admission import admit, check_there
from fedtools.federation.bounds import Bounds, check_bounds, check_code_allowed, check_experiment
from fedtools.federation.capsule import REQUEST, Request
from fedtools.federation.federation import Federation
from fedtools.federation.secure_round import SecureRound
from fedtools.federation.site_evaluation import measure
from fedtools.federation.site_facts import check_told
from fedtools.federation.site_step import check_step, receive_step
from fedtools.federation.steps import train_local
from fedtools.federation.units import unit_trainer
from fedtools.privacy.secagg.holder import Holder
from fedtools.privacy.secagg.signed import Step
from fedtools.tasks import facts_of
from fedtools.tasks.facts import check_folders, check_identity, identities, known_sums

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

# The most files that a request names.
_FILES = 8


def answer(
    capsule: Path,
    data: Mapping[str, str],
    model: str,
    request: Path,
    out: Path,
    device: str,
    jobs: int,
    key_path: Path | None,
    bounds: Bounds,
) -> Path:
    """Do what a request asks a site for, and write what it sends.

    Args:
        capsule: of `fedtools.federation.capsule.write_capsule`.
        data: split -> folder of the site's data.
        model: folder of the pretrained model, or "".
        request: of `fedtools.federation.capsule.write_request`; not trusted.
        out: the folder of the answer; the same request gives the same answer.
        device: "cpu" or "cuda".
        jobs: the number of processes that train clients; it does not change results.
        key_path: the site's private key, if the experiment has a roster.
        bounds: what the site allows any request to make it do.

    Returns:
        the path of what the site states.

    Raises:
        UserError: if the request is not for this capsule, not one that can follow the last, or asks
            for more than the site allows.
    """
    check_new(out)
    check_there(capsule)
    with lock(capsule, "rounds"):
        experiment, key = admit(capsule, key_path)
        check_experiment(experiment, bounds)
        roster = experiment.roster
        asked = read_statement(Request, request / REQUEST, SERVER, roster, _FILES)
        clients = _check_request(experiment, asked, request)
        if (wanted := asked.split or "train") not in data:
            remedy = f"give --data {wanted}=FOLDER"
            raise UserError(f"asks for {wanted} data", path=request / REQUEST, remedy=remedy)
        _settle(capsule, data, model)
        federation = Federation(capsule, device)
        check_code_allowed(federation, bounds)
        if asked.split:
            _accept(federation, asked, request, clients)
            sums = measure(federation, asked.round - 1, asked.split, bounds.least_evaluated)
            path = evaluation_path(out, asked.split, asked.job)
            stated, files = {"split": asked.split, **sums}, set[Path]()
        else:
            check_bounds(federation, clients, asked.round, bounds)
            check_step(federation, asked, request, _last_asked(experiment))
            if asked.step and key_path:
                federation.holder = Holder.of_site(key_path)
            files = _train(federation, asked, request, clients, jobs, device, bounds)
            path, stated = answer_path(out, asked.job), {}
        _write(out, asked, path.name, stated, files, key)
    return path


def _write(
    out: Path,
    asked: Request,
    name: str,
    stated: Mapping[str, object],
    files: set[Path],
    key: Ed25519PrivateKey | None,
) -> None:
    """Write the folder of an answer: files, and a statement of some name on them and the rest."""
    said = {
        one: getattr(asked, one)
        for one in ("experiment", "site", "job", "round", "attempt", "base")
    }
    said |= {"format": FORMAT, "software": dict(computing()), **stated}
    with new_folder(out) as made:
        make_private(made)
        for file in files:
            own = re.sub(r"^(update|secure\.\w+)\.1\b", rf"\1.{asked.job}", file.name)
            shutil.copyfile(file, made / own)
        write_statement(made / name, said, made.iterdir(), key)


def _train(
    federation: Federation,
    asked: Request,
    request: Path,
    clients: Sequence[str],
    jobs: int,
    device: str,
    bounds: Bounds,
) -> set[Path]:
    """Train the clients that a request names, and return the files of their messages."""
    experiment = federation.experiment
    if "data.yaml" in experiment.sums and not asked.last_round:
        federation.task.check_site_data()
    _accept(federation, asked, request, clients)
    if asked.step:
        receive_step(federation, asked, request, bounds)
    with unit_trainer(experiment.path, jobs, device) as train:
        train_local(federation, asked.round, 1, train)
    _check_kept(experiment, clients, asked.round)
    if asked.step:
        return {SecureRound(federation, asked.round).sent(Step[asked.step.upper()], 1)}
    # The tables come twice.
    return {*find_messages(experiment.round(asked.round).path)}


def _check_kept(capsule: Experiment, clients: Sequence[str], number: int) -> None:
    """Raise a `UserError` if a client has kept something for which an earlier round is missing.

    Without this, what it has trained in the rounds before would begin anew, unseen.
    """
    own = {client: capsule.own(client, number) for client in clients}
    earlier = range(1, number)
    new = [one for one, kept in own.items() if kept.keeps([number]) and not kept.keeps(earlier)]
    # Most rounds have no new client, and read no earlier ledger.
    for at in range(number - 1, 0, -1) if new else ():
        trained = {
            row.client
            for row in read_round(capsule, at)
            if row.client_epochs > 0 and row.status in COUNTED
        }
        if client := next((one for one in new if one in trained), ""):
            for one in new:
                own[one].remove()
            remove_messages(capsule.round(number).path)
            problem = f"what {client} kept in round {at} is not here"
            remedy = "go on with the site's first capsule, or ask the server to reset round 1"
            raise UserError(problem, path=capsule.client_dir(client), remedy=remedy)


def _settle(capsule: Path, data: Mapping[str, str], model: str) -> None:
    """Keep the paths of the site's data and model, and the sums of data that it has not told."""
    path, folders = capsule / LOCAL, {split: Path(one) for split, one in data.items()}
    check_folders(folders)
    sums = read_yaml(path).get("sums", {}) if path.exists() else {}
    if not isinstance(sums, dict):
        raise UserError("sums: not those of data", path=path, remedy="remove it")
    own = {"data": {split: str(folder.absolute()) for split, folder in folders.items()}}
    if model:
        own["model"] = {"path": str(Path(model).absolute())}
    write_yaml(path, own | {"sums": sums})
    experiment = Experiment(capsule)
    facts = facts_of(experiment.options.task, capsule / "config.yaml")
    new = {one: folder for one, folder in folders.items() if not known_sums(experiment, one)}
    for split in folders.keys() - new.keys():
        check_identity(experiment, split, folders[split])
    if new:
        sums = sums | identities(facts, experiment.options.training, new)
        write_yaml(path, own | {"sums": sums})
    if "train" in folders:
        check_told(experiment, facts, folders["train"])


def _check_request(capsule: Experiment, asked: Request, folder: Path) -> list[str]:
    """Return the clients of a request.

    Raises:
        UserError: unless it is for this capsule, and can follow the last.
    """
    path, known = folder / REQUEST, len(capsule.clients)
    site = capsule.sites[capsule.clients[0]]
    if (asked.experiment, asked.site) != (capsule.label, site):
        raise UserError("not a request for this site and experiment", path=path)
    if problem := mismatch(asked.format, asked.software):
        remedy = "install the same minor version at the server and at all sites"
        raise UserError(problem, path=path, remedy=remedy)
    if other := other_computing(asked.software):
        problem = f"the server has {other}: the same training may differ by rounding"
        print(f"{path}: {problem}", file=sys.stderr)
    clients, seal = received_lines(folder / "clients", known)
    if asked.files.get("clients") != sum_of(folder / "clients", seal):
        raise UserError("not what the request states", path=folder / "clients")
    if unknown := [one for one in clients if not capsule.knows(one)]:
        raise UserError(f"{unknown[0]!r} is no client of this site", path=folder / "clients")
    if clients != byte_order({*clients}):
        raise UserError("not in order, or not each once", path=folder / "clients")
    if problem := _contradiction(capsule, asked, clients):
        remedy = "ask the server; if it was reset, go on with a new capsule"
        raise UserError(problem, path=path, remedy=remedy)
    return clients


def _accept(federation: Federation, asked: Request, folder: Path, clients: Sequence[str]) -> None:
    """Put what a checked request brings into the capsule, unless it was there before."""
    capsule = federation.experiment
    last, ledger = _last_asked(capsule), folder / "ledger.tsv"
    if asked.round == last:
        return
    lines, seal = received_lines(ledger, len(capsule.clients))
    if asked.files.get("ledger.tsv") != sum_of(ledger, seal):
        raise UserError("not what the request states", path=ledger)
    _receive(federation, asked, folder / "global.safetensors")
    _go_to(capsule, asked, list(read_rows(ledger, lines)), ledger)
    if asked.split:
        return
    _forget(capsule, last)
    here = capsule.round(asked.round)
    write_text(here.path / ATTEMPT, f"{asked.attempt}\n")
    here.write_sample(clients, 1)


def _contradiction(capsule: Experiment, asked: Request, clients: Sequence[str]) -> str:
    """Return why a request cannot follow the last one of a site, or repeat it; "" if it can."""
    last = _last_asked(capsule)
    # What the last round has made can be evaluated, too.
    if asked.round > capsule.options.rounds + bool(asked.split):
        return f"asks for round {asked.round}, and there are {capsule.options.rounds}"
    if asked.round < last:
        return f"asks for round {asked.round}, and one of round {last} was answered"
    if asked.round == 1 and asked.base != capsule.round(1).recorded_start_sum():
        return "starts from another state than the capsule has for round 1"
    if not last:
        return ""
    here = capsule.round(last)
    base, attempt = here.recorded_start_sum(), int(read_text(here.path / ATTEMPT))
    if asked.attempt < attempt:
        return f"is of attempt {asked.attempt}, and one of attempt {attempt} was answered"
    if asked.attempt > attempt and asked.round == last:
        return f"asks for round {last} again after a reset, and it was answered before"
    if asked.round == last and asked.split:
        same = base == asked.base
        return "" if same else f"starts from another state than that of round {last} here"
    if asked.round == last:
        same = (base, here.sampled()) == (asked.base, clients)
        return "" if same else f"differs from the request of round {last} that was answered"
    if asked.last_round < last or (asked.last_round == last and asked.last_base != base):
        return f"does not know of round {last}, which was answered"
    return ""


def _receive(federation: Federation, asked: Request, state: Path) -> None:
    """Copy the state of a request, checking that it is what the request says, and of the model."""
    here, spec = federation.experiment.round(asked.round), federation.states.sent_spec
    most = 2 * (federation.experiment.init.stat().st_size + 2**20)
    here.path.mkdir(exist_ok=True)
    with atomic_path(here.global_state) as temporary:
        with open_received(state, most) as file, open(temporary, "wb") as copy:
            shutil.copyfileobj(file, copy)
        if sha256(temporary) != asked.base:
            raise UserError("not the state of this request", path=state, remedy="send it again")
        # What is accepted can only be repeated, so that it must be usable.
        with open(temporary, "rb") as file:
            check_spec(layout_of(file, state).spec, spec, state)


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


def _go_to(capsule: Experiment, asked: Request, rows: list[LedgerRow], ledger: Path) -> None:
    """Complete the rounds before, with the server's rows of this site's clients, from `ledger`."""
    found: dict[int, list[LedgerRow]] = {at: [] for at in range(1, asked.round)}
    for line, row in enumerate(rows, 2):
        if not capsule.knows(row.client) or row.round not in found:
            problem = f"the ledger has {row.client!r} in round {row.round}"
            raise UserError(problem, path=ledger, line=line)
        found[row.round].append(row)
    for at, own in found.items():
        here, following = capsule.round(at), capsule.round(at + 1).global_state
        # What is known of a round stays, since a kill between its two files would leave neither.
        sums = dict(here.sums()) if here.is_done() else {}
        if not sums:
            here.path.mkdir(exist_ok=True)
            write_ledger(here.ledger, own)
            sums[here.ledger.name] = sha256(here.ledger)
        if at + 1 == asked.round:
            sums[f"../{following.relative_to(capsule.path)}"] = asked.base
        if not here.is_done() or sums != here.sums():
            record_sums(here.done, sums)
