"""Partitioning of a data directory into clients: IID, skewed by label or size, or by a map.

    iid        every client gets an equal number of random utterances
    dirichlet  the utterances of each label are divided by proportions drawn from a symmetric
               Dirichlet(alpha) (Yurochkin et al., "Bayesian nonparametric federated learning of
               neural networks", ICML 2019; Li et al., "Federated learning on non-IID data silos:
               an experimental study", ICDE 2022): small alpha gives few labels per client
    quantity   all utterances are divided by such proportions, whatever their labels (Li et al.):
               small alpha gives few large clients and many small ones
    map        an utt2* table, such as utt2spk, gives the client of each utterance

Extract features after partitioning: the ark would otherwise be in the order of the old clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedtools.core.errors import UserError
from fedtools.core.seeds import generator
from fedtools.data.datadir import DataDir, check_id, invert, read_table

_REMEDY = "ask for fewer clients or a smaller --min-utterances"


@dataclass(frozen=True)
class PartitionConfig:
    """The options that determine a partition.

    Args:
        scheme: "iid", "dirichlet", "quantity" or "map".
        clients: the number of clients (not for "map").
        alpha: the Dirichlet's parameter, above 0 (for "dirichlet" and "quantity").
        by: the table of labels (for "dirichlet") or of clients (for "map").
        seed: the random seed; draws also depend on all other options.
        min_utterances: the minimum of a client; if a draw leaves a client with fewer, random
            utterances of the largest client move to it ("map" moves none, and fails).
        keep_speakers: divide speakers instead of utterances, so that none is split.
    """

    scheme: str
    clients: int = 0
    alpha: float = 0.0
    by: str = ""
    seed: int = 0
    min_utterances: int = 1
    keep_speakers: bool = False


@dataclass(frozen=True)
class Partition:
    """The client of every utterance, and the number of utterances moved to reach the minimum."""

    utt2client: dict[str, str]
    moved: int

    def sizes(self) -> list[int]:
        """Return the clients' numbers of utterances, in ascending order."""
        return sorted(map(len, invert(self.utt2client).values()))


def partition_data_dir(
    data_dir: str | Path, out_dir: str | Path, config: PartitionConfig
) -> Partition:
    """Write `data_dir` to `out_dir`, partitioned into clients; errors as in `partition`."""
    data = DataDir.read(data_dir)
    result = partition(data, config)
    replace(data, path=Path(out_dir), utt2client=result.utt2client).write(remove_others=True)
    return result


def partition(data: DataDir, config: PartitionConfig) -> Partition:
    """Partition the utterances of a data directory; only its tables and `config` matter.

    Raises:
        UserError: if the minimum cannot be reached, the table of labels does not have exactly the
            utterances, a label is no client id (for "map"), or a speaker that must not be split has
            several labels.
    """
    if not data.utt2spk:
        remedy = "write a line for each utterance: <utterance> <speaker>"
        raise UserError("not there", path=data.path / "utt2spk", remedy=remedy)
    if config.scheme == "map":
        return _by_map(data, config)
    units = [[utt] for utt in data.utterances]
    if config.keep_speakers:
        units = list(invert(data.utt2spk).values())
    labels = ["" for _ in units]
    if config.scheme == "dirichlet":
        labels = _unit_labels(data, units, config)
    _check_enough(data, units, config)
    purpose = ("partition", config.scheme, config.clients, repr(config.alpha), config.by)
    random = generator(config.seed, *purpose)
    owners = np.empty(len(units), dtype=np.int64)
    for label in sorted(set(labels)):
        # Units of one label, in random order, are cut by the clients' proportions.
        members = random.permutation([i for i, name in enumerate(labels) if name == label])
        if config.scheme == "iid":
            bounds = np.arange(1, config.clients) * len(members) // config.clients
        else:
            proportions = random.dirichlet(np.full(config.clients, config.alpha))
            bounds = np.rint(np.cumsum(proportions)[:-1] * len(members)).astype(np.int64)
        owners[members] = np.searchsorted(bounds, np.arange(len(members)), side="right")
    moved = _fill_up(data, units, owners, config, random)
    width = len(str(config.clients))
    utt2client = {
        utt: f"client{owner + 1:0{width}d}"
        for unit, owner in zip(units, owners.tolist(), strict=True)
        for utt in unit
    }
    return Partition({utt: utt2client[utt] for utt in data.utterances}, moved)


def _fill_up(
    data: DataDir,
    units: Sequence[list[str]],
    owners: np.ndarray,
    config: PartitionConfig,
    random: np.random.Generator,
) -> int:
    """Move random units of the largest clients, in place, to clients below the minimum."""
    sizes = np.zeros(config.clients, dtype=np.int64)
    held: list[list[int]] = [[] for _ in sizes]
    for i in random.permutation(len(units)).tolist():
        sizes[owners[i]] += len(units[i])
        held[owners[i]].append(i)
    moved = 0
    for client in range(config.clients):
        while sizes[client] < config.min_utterances:
            giver = int(sizes.argmax())
            unit = held[giver].pop()
            size = len(units[unit])
            if giver == client or sizes[giver] - size < config.min_utterances:
                wanted = f"{config.min_utterances} utterances for each of {config.clients} clients"
                raise UserError(f"no partition found with {wanted}", path=data.path, remedy=_REMEDY)
            owners[unit] = client
            held[client].append(unit)
            sizes[[giver, client]] += (-size, size)
            moved += size
    return moved


def _check_enough(data: DataDir, units: Sequence[list[str]], config: PartitionConfig) -> None:
    what = "speakers" if config.keep_speakers else "utterances"
    needed = config.clients * max(1, config.min_utterances)
    if len(units) < config.clients or len(data.utterances) < needed:
        wanted = f"{config.clients} clients of at least {config.min_utterances} utterances"
        problem = f"{len(units)} {what} are too few for {wanted}"
        raise UserError(problem, path=data.path, remedy=_REMEDY)


def _read_labels(data: DataDir, name: str) -> dict[str, str]:
    path = data.path / name
    labels = read_table(path)
    for line, utt in enumerate(labels, 1):
        if utt not in data.utt2spk:
            raise UserError(f"{utt!r} is not in utt2spk", path=path, line=line)
    if missing := next((utt for utt in data.utterances if utt not in labels), None):
        raise UserError(f"{missing!r} is missing, though in utt2spk", path=path)
    return labels


def _unit_labels(data: DataDir, units: Sequence[list[str]], config: PartitionConfig) -> list[str]:
    labels = _read_labels(data, config.by)
    for unit in units:
        if len(names := {labels[utt] for utt in unit}) > 1:
            raise UserError(
                f"speaker {data.utt2spk[unit[0]]!r} has several labels: {', '.join(sorted(names))}",
                path=data.path / config.by,
                remedy="leave --keep-speakers out",
            )
    return [labels[unit[0]] for unit in units]


def _by_map(data: DataDir, config: PartitionConfig) -> Partition:
    path = data.path / config.by
    labels = _read_labels(data, config.by)
    for line, client in enumerate(labels.values(), 1):
        check_id(client, "client", path, line)
    for client, utts in invert(labels).items():
        if len(utts) < config.min_utterances:
            problem = f"{client!r} has {len(utts)} utterances, {config.min_utterances} are required"
            remedy = "remove it with subset-data, or ask for a smaller --min-utterances"
            raise UserError(problem, path=path, remedy=remedy)
    return Partition(labels, 0)
