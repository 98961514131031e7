"""The folder of a federation: where everything lies, and how far it has come.

EXP/config.yaml                     frozen at the start, as all named here up to sha256sums
EXP/data.yaml                       what tells the data from others of the same name
EXP/clients.txt                     every client, one per line, in C order
EXP/tokens.txt [bpe.model|token_type]  the model's output units
EXP/base.safetensors                the model that is adapted, where a part of it is trained
EXP/init.safetensors                the model everybody begins with
EXP/{nonce,noise_key}               with privacy: see `fedtools.privacy.record`
EXP/sha256sums                      of all these, and of round_0001/global.safetensors
EXP/software.yaml                   commit and versions at the start
EXP/round_0007/global.safetensors   what the server sends in round 7: shared tensors only
EXP/round_0007/{clients,jobs}       who was sampled; into how many jobs they are cut
EXP/round_0007/update.<job>.*       what clients send, see `fedtools.files.messages`
EXP/round_0007/ledger.tsv           bytes, epochs and seconds by client
EXP/round_0007/.done                written last: sums of the ledger, of what clients sent and is
                                    kept, and of the next global state
EXP/clients/<client>/               what never leaves the client; no server command opens it
EXP/clients/<client>/frozen/        with cache_frozen: what frozen layers make of its data, see
                                    `fedtools.files.frozen`; that of others lies in EXP/frozen/
EXP/server/                         the server's own optimiser, for methods that train there
EXP/releases.tsv                    with privacy: all that the server has released
EXP/resetting                       the round that a reset goes back to, until it is there
EXP/averaged.tsv                    the rounds whose models were averaged, by client
EXP/evaluate_<split>.tsv            how good the models are, by round and client
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from fedtools.files.atomic import sha256, write_text
from fedtools.files.errors import UserError
from fedtools.files.options import read_frozen
from fedtools.files.private import Private
from fedtools.files.states import Spec, load_state
from fedtools.files.text_files import read_lines

_BEGIN_ANEW = "put the original back, or begin another experiment"


class Experiment:
    """Paths in an experiment's folder; opening one reads its frozen configuration.

    Raises:
        UserError: if the folder holds no experiment, or its configuration was changed.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        where = self.path / "config.yaml"
        if not where.is_file() or not (self.path / "sha256sums").is_file():
            raise UserError("no experiment here", path=self.path, remedy="run fedtools init")
        self.check_frozen("config.yaml")
        self.options = read_frozen(where)
        self.seed = self.options.seed

    @cached_property
    def clients(self) -> list[str]:
        """Every client, in C order; `fedtools init` has checked their names."""
        self.check_frozen("clients.txt")
        return read_lines(self.path / "clients.txt")

    def knows(self, client: str) -> bool:
        """Whether this is a client of the experiment."""
        place = bisect_left(self.clients, client)
        return place < len(self.clients) and self.clients[place] == client

    @cached_property
    def sums(self) -> dict[str, str]:
        """name -> SHA-256 of the files that it began with."""
        return read_sums(self.path / "sha256sums")

    def check_frozen(self, *names: str) -> None:
        """Insist that files that the experiment began with, by default all, are as they were.

        Raises:
            UserError: naming the first file that is missing or was changed.
        """
        for name in names or [name for name in self.sums if "/" not in name]:
            path = self.path / name
            if name not in self.sums or not path.is_file() or sha256(path) != self.sums[name]:
                problem = "not as the experiment began with" if path.exists() else "missing"
                raise UserError(problem, path=path, remedy=_BEGIN_ANEW)

    @property
    def title(self) -> str:
        """What it is called: its path below the last folder `exp`, or else as it was given."""
        # Links are left alone: `exp` may be one, to a larger disk.
        _, exp, below = str(self.path.absolute()).rpartition("/exp/")
        return below if exp else str(self.path)

    @property
    def init(self) -> Path:
        """The full model that everybody begins with."""
        return self.path / "init.safetensors"

    def evaluation(self, split: str) -> Path:
        """Loss and rate of models by round and client, on the data of a split."""
        return self.path / f"evaluate_{split}.tsv"

    @property
    def averaged(self) -> Path:
        """The rounds whose models were averaged, by client."""
        return self.path / "averaged.tsv"

    @property
    def tensorboard(self) -> Path:
        """Scalars by round; see `fedtools.files.events`."""
        return self.path / "tensorboard"

    def round(self, number: int) -> RoundFolder:
        """What belongs to a round, counted from 1; round 0 is the start."""
        return RoundFolder(self, number)

    def own(self, client: str, number: int) -> Private:
        """What a client keeps, seen from a round; refuses a name that is not a client's."""
        return Private(self.client_dir(client), number)

    def client_dir(self, client: str) -> Path:
        """What never leaves the client; refuses a name that is not a client's."""
        if not self.knows(client):
            raise UserError(f"{client!r} is no client of this experiment", path=self.path)
        return self.path / "clients" / client

    def at_server(self, number: int) -> Private:
        """What the server keeps for itself, seen from a round."""
        return Private(self.path / "server", number)

    def is_measured(self, number: int) -> bool:
        """Whether the models after round `number` are measured on the way: every so many rounds',
        and the last configured one's."""
        rounds, every = self.options.rounds, self.options.evaluate_every
        return number % every == 0 or number == rounds

    def last_round(self) -> int:
        """The last complete round, 0 before the first."""
        number = 0
        while self.round(number + 1).is_done():
            number += 1
        return number

    def result_round(self) -> int:
        """The round whose models are the result: the last configured one, if it is complete."""
        return min(self.last_round(), self.options.rounds)


class RoundFolder:
    """What belongs to one round of an experiment.

    Attributes:
        number: the round; 0 is the start, which has no folder.
        path: the folder.
        global_state: the shared tensors that the server sends in the round.
        ledger: what it cost.
        done: there once the round is complete.
    """

    def __init__(self, experiment: Experiment, number: int):
        self.number, self._experiment = number, experiment
        self.path = experiment.path / f"round_{number:04d}"
        self.global_state = self.path / "global.safetensors"
        self.ledger, self.done = self.path / "ledger.tsv", self.path / ".done"
        self._clients, self._jobs = self.path / "clients", self.path / "jobs"
        # There while rounds are removed: what clients keep may be of neither past nor future.
        self._resetting = experiment.path / "resetting"

    def base(self) -> str:
        """The SHA-256 of `global_state`, which is what the round before, or the start, made.

        Raises:
            UserError: if the file is missing or was changed.
        """
        path, known, before = self.global_state, self.recorded_base(), self.number - 1
        if not path.is_file() or sha256(path) != known:
            problem = "not as the server wrote it" if path.exists() else "missing"
            remedy = f"run fedtools reset --round {before}" if before else _BEGIN_ANEW
            raise UserError(problem, path=path, remedy=remedy)
        return known

    def recorded_base(self) -> str:
        """The SHA-256 of `global_state` as it was written; the file itself is not looked at."""
        name = str(self.global_state.relative_to(self._experiment.path))
        if self.number == 1:
            return self._experiment.sums.get(name, "")
        return self._experiment.round(self.number - 1).sums().get(f"../{name}", "")

    def shared_state(self, spec: Spec | None = None) -> dict[str, np.ndarray]:
        """What the server sends; errors as of `base` and `load_state`."""
        self.base()
        return load_state(self.global_state, spec)

    def write_sample(self, clients: Sequence[str], jobs: int) -> None:
        """Write who takes part; the number of jobs last, which marks the sample as complete."""
        write_clients(self._clients, clients)
        write_text(self._jobs, f"{jobs}\n")

    def is_sampled(self) -> bool:
        """Whether the clients are chosen, and cut into jobs."""
        return self._jobs.exists()

    def sampled(self) -> list[str]:
        """The clients that take part."""
        path = _sampled(self._clients)
        names = read_lines(path)
        for line, name in enumerate(names, 1):
            if not self._experiment.knows(name):
                raise UserError(f"{name!r} is no client of this experiment", path=path, line=line)
        return names

    def jobs(self) -> int:
        """Into how many jobs the clients are cut."""
        return _read_number(_sampled(self._jobs), "jobs")

    def sampled_at(self) -> float:
        """When the clients were cut into jobs, seconds of the epoch."""
        return self._jobs.stat().st_mtime

    def require_begun(self, what: str) -> None:
        """Insist that the round is the next one, and that no reset was broken off."""
        if self._resetting.exists():
            again = _read_number(self._resetting, "a round")
            remedy = f"run fedtools reset --round {again} again"
            raise UserError("a reset was broken off", path=self._experiment.path, remedy=remedy)
        before = self.number - 1
        if not self._experiment.round(before).is_done():
            problem = f"round {self.number} cannot {what}: round {before} is not complete"
            raise UserError(problem, path=self._experiment.path)

    def is_done(self) -> bool:
        """Whether the round is complete (round 0, the start, is)."""
        return self.number == 0 or self.done.exists()

    def close(self, received: Mapping[str, str] | None = None) -> None:
        """Mark the round as complete, with the sums of what it made.

        Args:
            received: name -> SHA-256 of what clients sent and stays, as it was checked.
        """
        following = self._experiment.round(self.number + 1).global_state
        sums = {"ledger.tsv": sha256(self.ledger), **(received or {})}
        sums[f"../{following.relative_to(self._experiment.path)}"] = sha256(following)
        _write_sums(self.done, sums)

    def sums(self) -> dict[str, str]:
        """name -> SHA-256 of the files of the complete round, as they were when it was closed."""
        return read_sums(self.done)

    def check_ledger(self) -> None:
        """Insist that the ledger of the complete round is as it was when it was closed."""
        path, sums = self.ledger, self.sums()
        if not path.is_file() or sums.get(path.name) != sha256(path):
            problem = "not as it was written" if path.exists() else "missing"
            remedy = f"run fedtools reset --round {self.number}"
            raise UserError(problem, path=path, remedy=remedy)

    def begin_reset(self) -> None:
        """Begin to go back to the round; if that was begun before, to none after it."""
        if self._resetting.exists() and self.number > _read_number(self._resetting, "a round"):
            self.require_begun("be reset")
        write_text(self._resetting, f"{self.number}\n")

    def end_reset(self) -> None:
        """Go on from the round: nothing of it and of later ones is left."""
        self._resetting.unlink()


def _sampled(path: Path) -> Path:
    """Insist that a file of a sample is there."""
    if not path.exists():
        raise UserError("missing", path=path, remedy="run fedtools sample")
    return path


def _read_number(path: Path, what: str) -> int:
    text = "".join(read_lines(path))
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        remedy = "remove it, and run the same command again"
        raise UserError(f"{text!r} is no number of {what}", path=path, remedy=remedy)
    return int(text)


def write_sums(path: Path, files: Mapping[str, Path]) -> None:
    """Write the SHA-256 of files by name, as sha256sum -c reads them."""
    _write_sums(path, {name: sha256(file) for name, file in files.items()})


def _write_sums(path: Path, sums: Mapping[str, str]) -> None:
    write_text(path, "".join(f"{digest}  {name}\n" for name, digest in sums.items()))


def read_sums(path: Path) -> dict[str, str]:
    """name -> SHA-256, as `write_sums` wrote them."""
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
