"""What sites tell of their clients: at a site, where an experiment begins, and in a capsule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedtools.core.atomic import check_new, new_folder
from fedtools.core.config import read_yaml
from fedtools.core.errors import UserError, some
from fedtools.core.tables import format_table
from fedtools.data.clips import RATE
from fedtools.exchange.experiment import Experiment
from fedtools.exchange.options import Options
from fedtools.exchange.private import make_private
from fedtools.exchange.sites import names_of
from fedtools.methods.base import Method
from fedtools.tasks import facts_of
from fedtools.tasks.client_facts import FILE, ClientFacts
from fedtools.tasks.facts import Facts, facts_at
from fedtools.tasks.identity import KIND, SUM
from fedtools.tasks.site_facts import (
    CLASSES,
    CLIENTS,
    GENERAL,
    SiteFacts,
    merged,
    read_site_facts,
    write_site_facts,
)

# Rounding differs between types of processors.
_CLOSE = 1e-9


def tell(data: Path, out: Path, task: str) -> str:
    """Write what the server may know of a site's clients.

    Args:
        data: the site's data directory, or folder of packed clips.
        out: the folder to write.
        task: the name of the task.

    Returns:
        all of it in words, as a table.

    Raises:
        UserError: if the task tells nothing, the data are unusable, or `out` exists.
    """
    check_new(out)
    facts = facts_of(task, "--task")
    if not data.is_dir():
        raise UserError("no such data directory", path=data)
    told = facts_at(facts, data, task)
    with new_folder(out) as folder:
        make_private(folder)
        write_site_facts(folder, task, told)
        # What is sent is what the server would accept.
        read_site_facts(folder, task)
    sizes = told.clients.values["size"]
    unit, count = facts.columns[0], len(sizes)
    rows = [(GENERAL, "task", task)]
    if told.samples:
        rows.append((GENERAL, "length of a clip", f"{told.samples / RATE:g} s"))
    if told.values:
        rows.append((GENERAL, "values in a frame", str(told.values)))
    if told.kind:
        rows.append((GENERAL, "features", told.kind))
    rows += [(GENERAL, "sum of the data", told.sums[0])]
    if told.classes:
        rows.append((CLASSES, "classes", str(len(told.classes))))
    rows += [(CLIENTS, "names of clients", str(count))]
    rows += [
        (CLIENTS, f"{unit} by client", f"{sizes.min()} to {sizes.max()}, {sizes.sum()} in all")
    ]
    if (entropies := told.clients.values.get("entropy")) is not None:
        spread = f"{entropies.min():.3f} to {entropies.max():.3f}"
        rows.append((CLIENTS, "entropy of labels", spread))
    return format_table(("file", "what leaves the site", "value"), rows, "lll")


def read_told(folders: Sequence[Path], facts: Facts, task: str) -> dict[Path, SiteFacts]:
    """Read what sites sent; raise a `UserError` that names the first folder that is unusable."""
    if facts.of_site is None:
        remedy = "give --data train=FOLDER"
        raise UserError(f"task {task} needs everybody's data at the server", remedy=remedy)
    if len({*folders}) < len(folders):
        raise UserError("a folder of --facts is given twice")
    found = {folder: read_site_facts(folder, task) for folder in folders}
    # Raises an error if they do not belong together.
    merged(found)
    return found


def sums_by_site(
    told: Mapping[Path, SiteFacts], sites: Mapping[str, str], table: Path
) -> dict[str, str]:
    """Return the sum of each site's data, by the site.

    Args:
        told: folder -> what a site sent.
        sites: client -> site.
        table: of the sites, for messages.

    Raises:
        UserError: if the clients of a folder are not of one site, or a site sent several or none.
    """
    found: dict[str, str] = {}
    folder_of: dict[str, Path] = {}
    for folder, one in told.items():
        site = sites[one.clients.clients[0]]
        for client in one.clients.clients:
            if sites[client] != site:
                problem = f"{client} is of site {sites[client]}, and {one.clients.clients[0]}"
                raise UserError(f"{problem} of {site} by {table}", path=folder / CLIENTS)
        if folder_of.setdefault(site, folder) != folder:
            problem = f"facts of site {site}, and so are {folder_of[site]}"
            raise UserError(problem, path=folder, remedy="give one folder for each site")
        found[site] = one.sums[0]
    for site in names_of(sites):
        if site not in found:
            raise UserError(f"no facts of site {site}", path=table, remedy="give its --facts")
    return found


def sums_of_sites(by_site: Mapping[str, str], kind: str) -> dict[str, str]:
    """Return what data.yaml has of training data at sites: a sum for each, and their `KIND`."""
    named = {f"{site}/{SUM}": one for site, one in sorted(by_site.items())}
    return ({KIND: kind} if kind else {}) | named


def sums_of_site(experiment: Experiment, site: str) -> dict[str, str]:
    """Return the same for a site's capsule; {} if the server had the data."""
    known = read_yaml(experiment.path / "data.yaml").get("train", {})
    own = known.get(f"{site}/{SUM}")
    if own is None:
        return {}
    return {SUM: own} | ({KIND: known[KIND]} if KIND in known else {})


def check_possible(method: Method, options: Options, where: str | Path) -> None:
    """Raise a `UserError` if a method's server trains on data that sites keep."""
    for number in range(1, (method.rounds or options.rounds) + 1):
        phase = method.phase(number)
        on_theirs = phase.server_data == "train" and not phase.on_features
        if phase.jointly or (phase.server_trains and on_theirs):
            problem = f"the server of {options.method} trains on the clients' data"
            raise UserError(problem, path=where, remedy="give --data train=FOLDER, not --facts")


def check_told(capsule: Experiment, facts: Facts, data: Path) -> None:
    """Raise a `UserError` unless the facts in a capsule are those of the site's data."""
    if facts.of_site is None or FILE not in capsule.sums:
        return
    path = capsule.path / FILE
    known, found = ClientFacts.read(path), facts.of_site(data).clients
    if missing := sorted({*known.clients} - {*found.clients}):
        raise UserError(f"no data of {some(missing)}", path=data, remedy="give all that they have")
    here = found.select(known.clients)
    for name in found.values:
        wrong = ~np.isclose(here[name], known.values[name], rtol=0, atol=_CLOSE)
        if wrong.any():
            at = int(wrong.argmax())
            own, there = here[name][at], known.values[name][at]
            problem = f"{name} of client {known.clients[at]} is {there:g}, and {own:g} in {data}"
            remedy = "ask the server, or give the data of fedtools site-facts"
            raise UserError(problem, path=path, remedy=remedy)
