"""The folder of a federation: paths of all files, and the progress of its rounds.

EXP/config.yaml                     fixed at the start, like all files up to sha256sums
EXP/data.yaml                       fingerprints of the data
EXP/clients.txt                     all clients, one per line, in C order
EXP/sites.tsv                       with sites: see `fedtools.exchange.sites`
EXP/roster.tsv                      with keys of sites: see `fedtools.exchange.signed`
EXP/client_keys.tsv                 with secure sums: see `fedtools.exchange.client_keys`
EXP/attackers.txt                   with the section attackers: the clients that attack
EXP/facts.tsv                       with sites: what is known of each client's data
EXP/tokens.txt [bpe.model|token_type]  the model's output units
EXP/base.safetensors                the base model, if only a part of it is trained
EXP/projection.{safetensors,yaml}   the normalisation of a head's input, if it was fitted
EXP/init.safetensors                the initial model
EXP/{nonce,noise_key}               with privacy: see `fedtools.privacy.record`
EXP/sha256sums                      sums of the files above, and of round_0001/global.safetensors
EXP/software.yaml                   commit and versions at the start
EXP/{origin,local.yaml,admitted}    of a site's capsule: see `fedtools.federation.site`
EXP/commands.sh                     the commands that made it: `fedtools.exchange.commands`
EXP/round_0007/global.safetensors   the state that the server sends in round 7: shared tensors only
EXP/round_0007/{clients,jobs}       the sampled clients; the number of jobs they are split into
EXP/round_0007/update.<job>.*       the clients' messages, see `fedtools.exchange.messages`
EXP/round_0007/ledger.tsv           bytes, epochs and seconds by client
EXP/round_0007/.done                written last: sums of the ledger, of the messages that are
                                    kept, and of the next global state
EXP/clients/<client>/               the client's private files; no server command opens it
EXP/server/                         the server's own optimiser, for methods that train there
EXP/releases.tsv                    with privacy: all that the server has released
EXP/attempt                         with sites or secure sums, after a reset: 1, and one more for
                                    each reset
EXP/resetting                       the round that an unfinished reset goes back to
EXP/averaged.tsv                    the rounds whose models were averaged, by client
EXP/evaluate_<split>.tsv            figures of the models by round and client

With cache_frozen, outputs of frozen layers lie beside the data: `fedtools.exchange.layer_cache`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from fedtools.core.atomic import sha256, write_text
from fedtools.core.config import read_yaml
from fedtools.core.errors import UserError
from fedtools.core.text_files import read_lines
from fedtools.exchange.client_keys import FILE as CLIENT_KEYS
from fedtools.exchange.client_keys import read_client_keys
from fedtools.exchange.options import Options, read_fixed
from fedtools.exchange.origin import Origin
from fedtools.exchange.private import Private
from fedtools.exchange.signed import FILE as ROSTER
from fedtools.exchange.signed import read_roster
from fedtools.exchange.sites import FILE as SITES
from fedtools.exchange.sites import read_sites
from fedtools.exchange.states import Spec, load_state

# In the capsule of a site: the label of the whole experiment; the site's own paths.
ORIGIN, LOCAL = "origin", "local.yaml"
# Clients that attack, one per line.
ATTACKERS = "attackers.txt"
# With sites, how often the experiment was begun or reset.
ATTEMPT = "attempt"
_BEGIN_ANEW = "put the original back, or begin another experiment"


class Experiment:
    """Paths in an experiment's folder; opening one reads its fixed configuration.

    Raises:
        UserError: if the folder holds no experiment, or its configuration was changed.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        where = self.path / "config.yaml"
        if not where.is_file() or not (self.path / "sha256sums").is_file():
            raise UserError("no experiment here", path=self.path, remedy="run fedtools init")
        self.check_fixed("config.yaml")
        self.options = read_fixed(where)
        if ORIGIN in self.sums:
            self.options = with_local(self.options, self.path / LOCAL)
        self.seed = self.options.seed

    @cached_property
    def clients(self) -> list[str]:
        """Return all clients, in C order; `fedtools init` has checked their names."""
        self.check_fixed("clients.txt")
        return read_lines(self.path / "clients.txt")

    @cached_property
    def sites(self) -> dict[str, str]:
        """Return client -> site; {} if the experiment has no sites."""
        if SITES not in self.sums:
            return {}
        self.check_fixed(SITES)
        return read_sites(self.path / SITES, self.clients)

    @cached_property
    def attackers(self) -> list[str]:
        """Return the clients that attack, in C order; [] if none does."""
        if ATTACKERS not in self.sums:
            return []
        self.check_fixed(ATTACKERS)
        return read_lines(self.path / ATTACKERS)

    @cached_property
    def roster(self) -> dict[str, str]:
        """Return the public keys of the server and of all sites; {} if nothing is signed."""
        if ROSTER not in self.sums:
            return {}
        self.check_fixed(ROSTER)
        return read_roster(self.path / ROSTER)

    @cached_property
    def client_keys(self) -> dict[str, str]:
        """Return the public key of each client, also of other sites; {} without secure sums."""
        if CLIENT_KEYS not in self.sums:
            return {}
        self.check_fixed(CLIENT_KEYS)
        return read_client_keys(self.path / CLIENT_KEYS)

    @property
    def attempt(self) -> int:
        """Return 1, and one more for each reset of an experiment with sites or secure sums."""
        path = self.path / ATTEMPT
        return _read_number(path, "an attempt") if path.exists() else 1

    def knows(self, client: str) -> bool:
        """Return whether a name is that of a client of the experiment."""
        place = bisect_left(self.clients, client)
        return place < len(self.clients) and self.clients[place] == client

    @cached_property
    def sums(self) -> dict[str, str]:
        """Return name -> SHA-256 of the files that the experiment began with."""
        return read_sums(self.path / "sha256sums")

    @cached_property
    def label(self) -> str:
        """Return the SHA-256 of the sums of all that the experiment began with.

        That of a site's capsule is the label of the experiment that it is a part of.
        """
        if ORIGIN in self.sums:
            self.check_fixed(ORIGIN)
            label = "".join(read_lines(self.path / ORIGIN))
            if not re.fullmatch("[0-9a-f]{64}", label):
                problem = "not the label of an experiment, 64 hexadecimal digits"
                raise UserError(problem, path=self.path / ORIGIN)
            return label
        return sha256(self.path / "sha256sums")

    def check_fixed(self, *names: str) -> None:
        """Check that fixed files, by default all, are as they were when the experiment began.

        Raises:
            UserError: naming the first file that is missing or was changed.
        """
        for name in names or [name for name in self.sums if "/" not in name]:
            path = self.path / name
            if name not in self.sums or not path.is_file() or sha256(path) != self.sums[name]:
                problem = "changed since the experiment began" if path.exists() else "missing"
                raise UserError(problem, path=path, remedy=_BEGIN_ANEW)

    @property
    def title(self) -> str:
        """Return the experiment's title: its path below the last folder `exp`, or as given."""
        # Links are not resolved: `exp` may be one, to a larger disk.
        _, exp, below = str(self.path.absolute()).rpartition("/exp/")
        return below if exp else str(self.path)

    @property
    def init(self) -> Path:
        """Return the path of the full initial model."""
        return self.path / "init.safetensors"

    def evaluation(self, split: str) -> Path:
        """Return the path of the table of loss and rate by round and client on a split."""
        return self.path / f"evaluate_{split}.tsv"

    @property
    def averaged(self) -> Path:
        """Return the path of the table of averaged rounds, by client."""
        return self.path / "averaged.tsv"

    @property
    def tensorboard(self) -> Path:
        """Return the folder of the scalars by round; see `fedtools.core.events`."""
        return self.path / "tensorboard"

    def round(self, number: int) -> RoundFolder:
        """Return the folder of a round, counted from 1; round 0 is the start."""
        return RoundFolder(self, number)

    def own(self, client: str, number: int) -> Private:
        """Return a client's private files, seen from a round; raise a `UserError` if unknown."""
        return Private(self.client_dir(client), number)

    def client_dir(self, client: str) -> Path:
        """Return a client's private folder; raise a `UserError` if there is no such client."""
        if not self.knows(client):
            raise UserError(f"{client!r} is no client of this experiment", path=self.path)
        return self.path / "clients" / client

    def at_server(self, number: int) -> Private:
        """Return the server's private files, seen from a round."""
        return Private(self.path / "server", number)

    def is_measured(self, number: int) -> bool:
        """Return whether models are evaluated after a round: at intervals, and after the last."""
        rounds, every = self.options.rounds, self.options.evaluate_every
        return number % every == 0 or number == rounds

    def last_round(self) -> int:
        """Return the last complete round, or 0."""
        number = 0
        while self.round(number + 1).is_done():
            number += 1
        return number

    def result_round(self) -> int:
        """Return the round whose models are the result: the last configured, or last complete."""
        return min(self.last_round(), self.options.rounds)


class RoundFolder:
    """The files of one round of an experiment.

    Attributes:
        number: the round; 0 is the start, which has no folder.
        path: the folder.
        global_state: the shared tensors that the server sends in the round.
        ledger: the table of the round's costs.
        done: a file that exists once the round is complete.
    """

    def __init__(self, experiment: Experiment, number: int):
        self.number, self._experiment = number, experiment
        self.path = experiment.path / f"round_{number:04d}"
        self.global_state = self.path / "global.safetensors"
        self.ledger, self.done = self.path / "ledger.tsv", self.path / ".done"
        self._clients, self._jobs = self.path / "clients", self.path / "jobs"
        # Exists while rounds are being removed, when private files may be inconsistent.
        self._resetting = experiment.path / "resetting"

    def start_sum(self) -> str:
        """Return the SHA-256 of `global_state`, after checking it against the recorded one.

        Raises:
            UserError: if the file is missing or was changed.
        """
        path, known, before = self.global_state, self.recorded_start_sum(), self.number - 1
        if not path.is_file() or sha256(path) != known:
            problem = "changed since the server wrote it" if path.exists() else "missing"
            remedy = f"run fedtools reset --round {before}" if before else _BEGIN_ANEW
            raise UserError(problem, path=path, remedy=remedy)
        return known

    def recorded_start_sum(self) -> str:
        """Return the SHA-256 of `global_state` as it was written, without reading the file."""
        name = str(self.global_state.relative_to(self._experiment.path))
        if self.number == 1:
            return self._experiment.sums.get(name, "")
        return self._experiment.round(self.number - 1).sums().get(f"../{name}", "")

    def origin(self) -> Origin:
        """Return what messages of the round are an answer to; errors as in `start_sum`."""
        return Origin(self._experiment.label, self.number, self.start_sum())

    def shared_state(self, spec: Spec | None = None) -> dict[str, np.ndarray]:
        """Read the state that the server sends; errors as in `start_sum` and `load_state`."""
        self.start_sum()
        return load_state(self.global_state, spec)

    def write_sample(self, clients: Sequence[str], jobs: int) -> None:
        """Write the sampled clients, and then the number of jobs, which completes the sample."""
        write_clients(self._clients, clients)
        write_text(self._jobs, f"{jobs}\n")

    def is_sampled(self) -> bool:
        """Return whether the clients are sampled and split into jobs."""
        return self._jobs.exists()

    def sampled(self) -> list[str]:
        """Read the sampled clients."""
        path = _sampled(self._clients)
        names = read_lines(path)
        for line, name in enumerate(names, 1):
            if not self._experiment.knows(name):
                raise UserError(f"{name!r} is no client of this experiment", path=path, line=line)
        return names

    def jobs(self) -> int:
        """Read the number of jobs that the clients are split into."""
        return _read_number(_sampled(self._jobs), "jobs")

    def attempt(self) -> int:
        """Return the attempt at the round: at a site that of the request, else the experiment's."""
        asked = self.path / ATTEMPT
        return _read_number(asked, "an attempt") if asked.exists() else self._experiment.attempt

    def sampled_at(self) -> float:
        """Return the time at which the clients were sampled, in seconds since the epoch."""
        return self._jobs.stat().st_mtime

    def require_begun(self, what: str) -> None:
        """Raise a `UserError` if the round before is not complete, or a reset is unfinished."""
        if self._resetting.exists():
            again = _read_number(self._resetting, "a round")
            remedy = f"run fedtools reset --round {again} again"
            raise UserError("a reset was interrupted", path=self._experiment.path, remedy=remedy)
        before = self.number - 1
        if not self._experiment.round(before).is_done():
            problem = f"round {self.number} cannot {what}: round {before} is not complete"
            raise UserError(problem, path=self._experiment.path)

    def is_done(self) -> bool:
        """Return whether the round is complete; round 0, the start, always is."""
        return self.number == 0 or self.done.exists()

    def close(self, received: Mapping[str, str] | None = None) -> None:
        """Mark the round as complete, with the sums of its files.

        Args:
            received: name -> SHA-256 of messages that are kept, as they were checked.
        """
        following = self._experiment.round(self.number + 1).global_state
        sums = {"ledger.tsv": sha256(self.ledger), **(received or {})}
        sums[f"../{following.relative_to(self._experiment.path)}"] = sha256(following)
        record_sums(self.done, sums)

    def sums(self) -> dict[str, str]:
        """Read name -> SHA-256 of the complete round's files, as they were when it was closed."""
        return read_sums(self.done)

    def check_ledger(self) -> None:
        """Check that the ledger of the complete round is as it was when it was closed."""
        path, sums = self.ledger, self.sums()
        if not path.is_file() or sums.get(path.name) != sha256(path):
            problem = "changed since it was written" if path.exists() else "missing"
            remedy = f"run fedtools reset --round {self.number}"
            raise UserError(problem, path=path, remedy=remedy)

    def begin_reset(self) -> None:
        """Begin to reset to this round; raise a `UserError` if another reset goes further back."""
        if self._resetting.exists() and self.number > _read_number(self._resetting, "a round"):
            self.require_begun("be reset")
        write_text(self._resetting, f"{self.number}\n")

    def end_reset(self) -> None:
        """Mark the reset as finished, after the files of this and later rounds were removed."""
        experiment = self._experiment
        if experiment.sites or experiment.client_keys:
            # What sites were asked for before, they must not be asked for as if it were new.
            write_text(experiment.path / ATTEMPT, f"{experiment.attempt + 1}\n")
        self._resetting.unlink()


def with_local(options: Options, path: Path) -> Options:
    """Return options with the paths of data and model of the site where they are used.

    Paths that the server has put there do not count: they would be of the site's other data.
    """
    local = read_yaml(path) if path.exists() else {}
    data, own = local.get("data"), local.get("model")
    model = {name: value for name, value in options.model.items() if name != "path"}
    return replace(
        options,
        data=data if isinstance(data, dict) else {},
        model={**model, **(own if isinstance(own, dict) else {})},
    )


def _sampled(path: Path) -> Path:
    """Return the path of a sample's file; raise a `UserError` if it is missing."""
    if not path.exists():
        raise UserError("missing", path=path, remedy="run fedtools sample")
    return path


def _read_number(path: Path, what: str) -> int:
    text = "".join(read_lines(path))
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        remedy = "remove it, and run the same command again"
        raise UserError(f"{text!r} is not a valid number of {what}", path=path, remedy=remedy)
    return int(text)


def write_sums(path: Path, files: Mapping[str, Path]) -> None:
    """Write the SHA-256 of files by name, in the format of sha256sum -c."""
    record_sums(path, {name: sha256(file) for name, file in files.items()})


def record_sums(path: Path, sums: Mapping[str, str]) -> None:
    """Write sums that are known already, as `write_sums` does."""
    write_text(path, "".join(f"{digest}  {name}\n" for name, digest in sums.items()))


def read_sums(path: Path) -> dict[str, str]:
    """Read name -> SHA-256 from a file of `write_sums`."""
    found = {}
    for line, text in enumerate(read_lines(path), 1):
        match = re.fullmatch(r"([0-9a-f]{64})  (\S+)", text)
        if not match:
            raise UserError("not a sum and a name", path=path, line=line, remedy=_BEGIN_ANEW)
        found[match[2]] = match[1]
    return found


def write_clients(path: Path, clients: Iterable[str]) -> None:
    """Write the list of an experiment's clients."""
    write_text(path, "".join(f"{client}\n" for client in clients))
