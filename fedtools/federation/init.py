"""Initialisation of an experiment: fixed configuration and first round's shared tensors."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedtools.core.atomic import atomic_path, remove, sha256, write_text
from fedtools.core.config import (
    fix,
    from_mapping,
    merge,
    option_error,
    override,
    read_yaml,
    unknown,
)
from fedtools.core.errors import UserError, some
from fedtools.core.locks import lock
from fedtools.core.provenance import record
from fedtools.core.recipe_sections import SECTIONS
from fedtools.core.seeds import seed64
from fedtools.core.tables import size_text
from fedtools.core.text_files import read_words
from fedtools.data.datadir import byte_order, check_id
from fedtools.exchange.client_keys import FILE as CLIENT_KEYS
from fedtools.exchange.client_keys import read_client_keys, write_client_keys
from fedtools.exchange.commands import begin_commands
from fedtools.exchange.experiment import ATTACKERS, Experiment, write_clients, write_sums
from fedtools.exchange.options import NAMES, Options, written
from fedtools.exchange.private import make_private
from fedtools.exchange.signed import FILE as ROSTER
from fedtools.exchange.signed import SERVER, read_roster, write_roster
from fedtools.exchange.sites import FILE as SITES
from fedtools.exchange.sites import names_of, read_sites, write_sites
from fedtools.exchange.states import row_bytes, save_state, spec_of
from fedtools.federation.attackers import attackers_of
from fedtools.federation.code import CODE, defaults_of, kinds_of, own_files, write_code
from fedtools.federation.secure_round import check_sums
from fedtools.federation.site_facts import check_possible, read_told, sums_by_site, sums_of_sites
from fedtools.federation.user_privacy import (
    begin_protection,
    noise_key_of,
    noise_of_clients,
    plan_of,
)
from fedtools.methods import make_method
from fedtools.methods.base import SHARED, Changes, Method
from fedtools.models.adapt.adaptation import BASE, has_base
from fedtools.privacy.record import note_replaced
from fedtools.privacy.secagg.plan import plan
from fedtools.privacy.user_plan import UserPlan
from fedtools.server.sample import draw
from fedtools.tasks import facts_of
from fedtools.tasks.alike import check_splits, check_start
from fedtools.tasks.base import NewExperiment, State, task_of
from fedtools.tasks.client_facts import FILE as FACTS
from fedtools.tasks.client_facts import ClientFacts
from fedtools.tasks.facts import Facts, check_folders, identities
from fedtools.tasks.identity import KIND
from fedtools.tasks.site_facts import merged

# The state at the start of round 1.
FIRST = "round_0001/global.safetensors"
# Options that are set by the command line or the data.
_NOT_IN_CONFIG = ("method", "seed", "start", "data", "clients", "defaults")
# Other sections of recipe files: variants of the options, and options of other commands.
_SECTIONS = ("networks", "methods", "variants", "tasks", "baseline", *SECTIONS)
_SECTIONS += ("decode", "a1", "a2", "weights", "updates", "features", "inversion")
_SECTIONS += ("nnlm", "tuning", "sweeps", "grid")


def init(
    path: str | Path,
    *,
    method: str,
    config: Mapping[str, Any],
    where: str | Path,
    data: Mapping[str, str],
    assets: Mapping[str, str] | None = None,
    start: str | Path | None = None,
    seed: int = 0,
    listed: Path | None = None,
    sites: Path | None = None,
    roster: Path | None = None,
    client_keys: Path | None = None,
    told: Sequence[Path] = (),
) -> str:
    """Create an experiment: fix its configuration and write the first round's shared tensors.

    Args:
        path: the folder of the experiment.
        method: a name in `fedtools.methods.METHODS`.
        config: the other `fedtools.exchange.options.Options`.
        where: the source of `config`, for messages.
        data: split -> data directory, for keyword spotting a folder of `fedtools pack-clips`;
            "train" defines the clients.
        assets: name -> folder; for "asr", "tokens" is a folder of `fedtools train-tokens`.
        start: a full initial model; None draws one from `seed`.
        seed: the random seed of the experiment.
        listed: a list of all clients, also of those without data, for methods with user-level
            privacy; by default the clients are those of the data.
        sites: a table of all clients and their sites, if the federation has sites.
        roster: a table of public keys of the server and the sites, if messages are signed.
        client_keys: a table of clients' public keys, for secure sums without sites.
        told: folders of `fedtools site-facts`, in place of `data["train"]`.

    Returns:
        a line on its size, or "" if it had begun already.

    Raises:
        UserError: for bad options, or if the folder was created with other ones.
    """
    path = Path(path)
    folders = {split: Path(folder) for split, folder in data.items()}
    others = {name: Path(folder) for name, folder in (assets or {}).items()}
    _check_source(path, folders, told, sites)
    _check_folders(folders, others)
    options = read_options(config, where, method, seed, start, data)
    facts = facts_of(options.task, where)
    files = {file.name: file for file in facts.files(folders, others, where)}
    sent = read_told(told, facts, options.task) if told else {}
    known = merged(sent) if sent else None
    texts = known.texts if known else {}
    if has_base(options.model) and start:
        files.setdefault(BASE, Path(start))
    elif BASE in files and not has_base(options.model):
        raise UserError("asset base needs a model with adapt", path=where)
    made = make_method(method, options.method_conf, where)
    train = told[0] if told else folders["train"]
    named = known.clients.clients if known else facts.clients(train)
    clients = _clients_of(named, train, made, listed)
    located = _sites_of(sites, clients, method)
    keys = _keys_of(roster, located)
    own_keys = _client_keys_of(client_keys, clients, made, located, keys)
    fixed: dict[str, Any] = {"clients": len(clients), "rounds": made.rounds or options.rounds}
    fixed["model"] = facts.fixed_model(options.model)
    fixed["training"] = facts.fixed_training(options.model, options.training, where)
    options = from_mapping(Options, vars(options) | fixed, where)
    # Frozen separately from the options, since data of the same path can be replaced.
    sums = identities(facts, options.training, folders)
    if known:
        check_possible(made, options, where)
        by_site = sums_by_site(sent, located, sites or path)
        sums = {"train": sums_of_sites(by_site, known.kind)} | sums
    check_splits(sums, {"train": train} | folders)
    if start:
        check_start(Path(start), sums["train"].get(KIND), files, train, texts)
    try:
        made.check(options.task, facts.parts, options.model)
    except ValueError as error:
        raise UserError(str(error), path=where) from None
    check_sums(made, options, clients, where)
    _check_root(made, folders, where)
    attackers = attackers_of(options, made, where, clients, located)
    plan = plan_of(made, options, facts, folders, where, listed is not None, clients)
    begun = (path / FIRST).exists() and (path / "sha256sums").exists()
    states: tuple[State, State] = ({}, {})
    own: dict[str, Path] = {}
    if located and not known and not begun and facts.of_site:
        known = facts.of_site(train)
    begin = Path(start) if start else None
    new = NewExperiment(options, made, folders, others, begin, where, known)
    client_facts = task_of(facts).client_facts_of(new) if known else None
    if not begun:
        # Before anything is fixed, so that a failure to create the model leaves no files.
        states = _begin(facts, new, seed)
        if attackers and not states[1]:
            problem = f"attackers: clients of {made.title} send nothing that could be attacked"
            raise UserError(problem, path=where)
        kinds = kinds_of(options, made, task_of(facts))
        own = own_files(kinds.values(), task_of(facts))
        options = replace(options, defaults=defaults_of(options, kinds))
    # What clients send, and what is measured on their data, is nobody else's to read.
    make_private(path)
    with lock(path, "rounds"):
        _fix_options(path / "config.yaml", options, begun)
        _fix_data(path / "data.yaml", sums)
        if not begun:
            _write(path, files, texts, clients, located, keys, states)
            if own_keys:
                write_client_keys(path / CLIENT_KEYS, own_keys)
            if client_facts:
                client_facts.write(path / FACTS)
            if options.attackers:
                write_clients(path / ATTACKERS, attackers)
            else:
                remove(path / ATTACKERS)
            record(path, own.values())
            write_code(path, own)
            more = [FACTS] * bool(client_facts) + [ATTACKERS] * bool(options.attackers)
            more += [CLIENT_KEYS] * bool(own_keys)
            _close(path, [*texts, *files, *more], facts, made, plan)
        experiment = Experiment(path)
        experiment.check_fixed()
        for differs, what, source in (
            (listed and experiment.clients != clients, "clients", listed),
            (experiment.sites != located, "sites", sites),
            (experiment.roster != keys, "keys", roster),
            (experiment.client_keys != own_keys, "keys of clients", client_keys),
            (client_facts and not _is_in(path, client_facts), "facts of clients", train),
        ):
            if differs:
                problem = f"not the {what} that {path} began with"
                raise UserError(problem, path=source or path, remedy="begin another experiment")
    return "" if begun else _size_of(Experiment(path), made, *states)


def _size_of(experiment: Experiment, method: Method, whole: State, sent: State) -> str:
    """Return the clients, values and bytes of a new experiment's first round, on one line."""
    phase, size = method.phase(1), row_bytes(spec_of(sent))
    values, shared = (
        sum(math.prod(one.shape) for one in state.values()) for state in (whole, sent)
    )
    found = [f"a model of {values:,} values, of which the server sends {shared:,}"]
    if total := experiment.options.clients:
        taken = len(draw(experiment, 1, phase))
        attack = experiment.options.attackers
        ours = f", {len(experiment.attackers)} attack by {attack['kind']}" if attack else ""
        found.insert(0, f"{total} clients{ours}, {taken} in round 1")
        alike = phase.sends == SHARED or isinstance(phase.sends, Changes)
        back = ", and as much comes back" * alike
        if method.secure_sums:
            found.append(f"secure sums: {plan(method.secure_sums, taken)}")
            found += noise_of_clients(experiment.path, taken)
        if experiment.roster:
            fingerprint = experiment.sums[ROSTER]
            found.insert(0, f"a roster of {len(experiment.roster)} keys, fingerprint {fingerprint}")
        found.append(
            f"{size_text(size)} to each client, {size_text(taken * size)} in a round{back}"
        )
    return f"{experiment.path}: {'; '.join(found)}"


def _is_in(path: Path, facts: ClientFacts) -> bool:
    """Return whether an experiment has these facts of its clients."""
    table = path / FACTS
    return table.exists() and ClientFacts.read(table).same(facts)


def _check_folders(folders: Mapping[str, Path], assets: Mapping[str, Path]) -> None:
    """Raise a `UserError` if a folder of data or of an asset is not there."""
    for split in folders:
        check_id(split, "split")
    check_folders(folders)
    for name, folder in assets.items():
        if not folder.is_dir():
            remedy = f"check --asset {name}=FOLDER"
            raise UserError("no such folder", path=folder, remedy=remedy)


def _check_source(
    path: Path, folders: Mapping[str, Path], told: Sequence[Path], sites: Path | None
) -> None:
    """Raise a `UserError` unless the training data are at hand, or told of by sites."""
    if told and "train" in folders:
        remedy = "give --data train=FOLDER, or --facts FOLDER of each site"
        raise UserError("facts of sites, and training data", path=folders["train"], remedy=remedy)
    if told and sites is None:
        remedy = "give --sites FILE"
        raise UserError("facts of sites, but no table of sites", path=told[0], remedy=remedy)
    if not told and "train" not in folders:
        remedy = "give --data train=FOLDER, or with --sites the --facts of each site"
        raise UserError("no training data", path=path, remedy=remedy)


def _clients_of(
    named: Iterable[str], train: Path, method: Method, listed: Path | None
) -> list[str]:
    """Return the clients, in C order; raise a `UserError` if the method needs some.

    Args:
        named: the clients of the data, which are read for every method, since this also checks the
            data.
        train: where they are from, for messages.
    """
    if listed and method.user_privacy is None:
        remedy = "leave --clients out: without user-level privacy, clients are those of the data"
        raise UserError("a list of clients is not used", path=listed, remedy=remedy)
    clients = byte_order(check_id(name, "client", train) for name in named)
    if not method.federated:
        return []
    if not clients:
        remedy = "add utt2client to it, or take --method centralized"
        raise UserError("the data have no clients", path=train, remedy=remedy)
    return _read_list(listed, clients) if listed else clients


def _sites_of(path: Path | None, clients: Sequence[str], method: str) -> dict[str, str]:
    """Return client -> site; {} without sites."""
    if path is None:
        return {}
    if not clients:
        raise UserError(f"{method} has no clients", path=path, remedy="leave --sites out")
    return read_sites(path, clients)


def _keys_of(path: Path | None, sites: Mapping[str, str]) -> dict[str, str]:
    """Return site -> public key, and that of the server; {} without a roster."""
    if path is None:
        return {}
    if not sites:
        raise UserError("a roster of keys without sites", path=path, remedy="give --sites, too")
    names = names_of(sites)
    if SERVER in names:
        raise UserError(f"a site of a roster cannot be called {SERVER}", path=path)
    return read_roster(path, names)


def _check_root(method: Method, folders: Mapping[str, Path], where: str | Path) -> None:
    """Raise a `UserError` if the server is to train on data of its own that were not given."""
    split = method.phase(1).server_data
    if split not in {"train", *folders}:
        problem = f"the rule {method.robust['rule']} needs labelled data of the server's own"
        raise UserError(problem, path=where, remedy=f"give --data {split}=FOLDER")


def _client_keys_of(
    path: Path | None,
    clients: Sequence[str],
    method: Method,
    sites: Mapping[str, str],
    roster: Mapping[str, str],
) -> dict[str, str]:
    """Return client -> public key, of its own or its site's; {} without secure sums."""
    if method.secure_sums is None:
        if path is not None:
            remedy = "leave --client-keys out, or set method_conf.sums: secure"
            raise UserError("keys of clients are for secure sums alone", path=path, remedy=remedy)
        return {}
    if sites:
        if path is not None:
            remedy = "leave --client-keys out"
            raise UserError(
                "with sites, clients have the keys of --roster", path=path, remedy=remedy
            )
        if not roster:
            raise UserError("secure sums need keys of all sites", remedy="give --roster")
        return {client: roster[sites[client]] for client in clients}
    if path is None:
        remedy = "give --client-keys, a table that fedtools client-keys prints"
        raise UserError("secure sums need keys of all clients", remedy=remedy)
    return read_client_keys(path, clients)


def _read_list(path: Path, clients: Sequence[str]) -> list[str]:
    """Read a list of clients, in any order; raise a `UserError` if it lacks one that has data."""
    found = [
        check_id(name, "client", path, line)
        for line, name in enumerate(read_words(path, "write one client on each line"), 1)
    ]
    known = set(found)
    if missing := [name for name in clients if name not in known]:
        problem = f"{some(missing)} {'has' if len(missing) == 1 else 'have'} data, and no line here"
        raise UserError(problem, path=path, remedy="add a line, or leave the data out")
    return byte_order(found)


def _begin(facts: Facts, new: NewExperiment[Method], seed: int) -> tuple[State, State]:
    """Return the states that the experiment begins with."""
    if task_of(facts).needs_torch:
        import torch

        torch.manual_seed(seed64(seed, "init"))
    return task_of(facts).begin(new)


def _fix_data(path: Path, sums: Mapping[str, Mapping[str, str]]) -> None:
    """Fix the sums of the data, and the kind of features where it was known at first."""
    begun = read_yaml(path) if path.exists() else {}
    old = {split for split, one in begun.items() if KIND not in one}
    kept = {
        split: {name: one for name, one in found.items() if name != KIND or split not in old}
        for split, found in sums.items()
    }
    fix(path, kept, "other data")


def _fix_options(path: Path, options: Options, begun: bool) -> None:
    """Fix the options.

    Args:
        begun: whether the file has the defaults; what they are now is compared when the experiment
            is opened.
    """
    fixed = written(options)
    if begun and path.exists():
        fixed["defaults"] = read_yaml(path).get("defaults")
    fix(path, fixed)


def _write(
    path: Path,
    files: Mapping[str, Path],
    texts: Mapping[str, str],
    clients: Sequence[str],
    sites: Mapping[str, str],
    keys: Mapping[str, str],
    states: tuple[State, State],
) -> None:
    """Write the files that the experiment begins with.

    A file that was removed is written again, and must then be the same.
    """
    for name, file in files.items():
        with atomic_path(path / name) as temporary:
            shutil.copyfile(file, temporary)
    for name, text in texts.items():
        write_text(path / name, text)
    write_clients(path / "clients.txt", clients)
    if sites:
        write_sites(path / SITES, sites)
    else:
        # Of a command that was killed before it had fixed anything.
        remove(path / SITES)
    if keys:
        write_roster(path / ROSTER, keys)
    else:
        remove(path / ROSTER)
    for name, state in zip(("init.safetensors", FIRST), states, strict=True):
        save_state(path / name, state)


def _close(
    path: Path, files: Iterable[str], facts: Facts, made: Method, plan: UserPlan | None
) -> None:
    """Write the SHA-256 sums of the initial files, which mark the experiment as begun.

    Random files, such as a nonce, are drawn only the first time.
    """
    if (path / "sha256sums").exists():
        return
    names = ["config.yaml", "data.yaml", "clients.txt", *files]
    names += [name for name in (SITES, ROSTER, CODE) if (path / name).exists()]
    note_replaced(path, noise_key_of(made))
    names += ["init.safetensors", FIRST, *task_of(facts).keep_own(path, made)]
    names += begin_protection(path, made, plan)
    # Not among the sums, because it grows.
    begin_commands(path)
    write_sums(path / "sha256sums", {name: path / name for name in names})


def read_options(
    config: Mapping[str, Any],
    where: str | Path,
    method: str,
    seed: int,
    start: str | Path | None,
    data: Mapping[str, str],
) -> Options:
    """Read the options, with all checks that need neither data nor model."""
    asked = [name for name in NAMES if name not in _NOT_IN_CONFIG]
    for name in config:
        if name not in asked and name not in _SECTIONS:
            raise option_error(unknown(name, [*asked, *_SECTIONS]), where, name, config[name])
    given = {name: config[name] for name in asked if name in config}
    begun = sha256(start) if start else None
    given |= {"method": method, "seed": seed, "start": begun, "data": dict(data)}
    return from_mapping(Options, given, where)


def _no_section(whole: Mapping[str, Any], section: str) -> str:
    """Return a message about a section that a configuration lacks, and those that it has there."""
    *parents, last = section.split(".")
    place: Any = whole
    for name in parents:
        place = place.get(name) if isinstance(place, dict) else None
    if not isinstance(place, dict):
        return _no_section(whole, ".".join(parents))
    known = [str(name) for name, value in place.items() if isinstance(value, dict)]
    above = f"{'.'.join(parents)}: " if parents else ""
    return f"{above}no{unknown(last, known, 'section').removeprefix('unknown')}"


def read_config(path: Path, sections: Sequence[str], settings: Sequence[str]) -> dict[str, Any]:
    """Read the options of an experiment.

    Args:
        path: a YAML file with `model`, `training`, ...
        sections: mappings in it that override the top level, in this order, such as "baseline" or
            "networks.dscnn"; a section whose name ends in "?" may be missing.
        settings: "a.b=value" changes, applied last.

    Raises:
        UserError: if the file is not YAML, or a section is missing.
    """
    whole = config = read_yaml(path)
    for section in sections:
        found: Any = whole
        for name in section.removesuffix("?").split("."):
            found = found.get(name) if isinstance(found, dict) else None
        if found is None and section.endswith("?"):
            continue
        if not isinstance(found, dict):
            raise UserError(_no_section(whole, section.removesuffix("?")), path=path)
        config = merge(config, found, path)
    return override(config, settings)
