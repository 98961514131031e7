"""The folder of a federation: where everything lies, and how far it has come.

EXP/config.yaml                  frozen at the start
EXP/software.yaml                commit and versions at the start
EXP/tokens.txt [bpe.model]       the model's output units
EXP/init.safetensors             the model everybody begins with
EXP/round_0007/global.safetensors   what the server sends in round 7: shared tensors only
EXP/round_0007/{clients,jobs}       who was sampled; into how many jobs they are cut
EXP/round_0007/update.<job>.*       what clients send
EXP/round_0007/.done                written last
EXP/clients/<client>/            what never leaves the client; no server command opens it
EXP/server/                      the server's own optimiser, for methods that train there
EXP/evaluate_<role>.tsv          how good the models are, by round and client
EXP/ledger.tsv                   bytes, epochs and seconds by round and client
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedtools.files.atomic import write_text
from fedtools.files.config import read_yaml
from fedtools.files.datadir import check_id
from fedtools.files.errors import UserError
from fedtools.files.lines import read_lines

# What `fedtools init` freezes, and of which kind; `start` and others may be missing.
_OPTIONS: dict[str, type | tuple[type, ...]] = {
    "method": str,
    "task": str,
    "method_conf": dict,
    "clients_per_round": (int, float, type(None)),
    "rounds": int,
    "average": int,
    "evaluate_every": int,
    "keep_updates": bool,
    "model": dict,
    "training": dict,
    "seed": int,
    "data": dict,
    "clients": list,
}


class Experiment:
    """Paths in an experiment's folder; opening one reads its frozen configuration.

    Raises:
        UserError: if the folder holds no experiment.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not (self.path / "config.yaml").is_file():
            raise UserError("no experiment here", path=self.path, remedy="run fedtools init")
        where = self.path / "config.yaml"
        self.config: Mapping[str, Any] = read_yaml(where)
        for name, kinds in _OPTIONS.items():
            if name not in self.config:
                raise UserError(f"no option {name!r}", path=where, remedy="run fedtools init")
            if not isinstance(self.config[name], kinds):
                problem = f"option {name!r} cannot be {self.config[name]!r}"
                raise UserError(problem, path=where, remedy="run fedtools init in another folder")
        self.seed: int = self.config["seed"]
        self.clients: list[str] = [
            check_id(name, "client", where) for name in map(str, self.config["clients"])
        ]
        self._known = frozenset(self.clients)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Work on the experiment as the only one who runs its rounds; a lock that no kill leaves.

        Raises:
            UserError: if somebody does.
        """
        path = self.path / "config.yaml"
        # Opened for writing, without which NFS locks no file; nothing is written.
        with open(path, "r+b" if os.access(path, os.W_OK) else "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                problem = "another process is running its rounds"
                raise UserError(problem, path=self.path, remedy="wait for it, or end it") from None
            except OSError as error:
                # A file system without locks is no reason not to work.
                print(f"{self.path}: not locked: {error.strerror}", file=sys.stderr)
            yield

    @property
    def init(self) -> Path:
        """The full model that everybody begins with."""
        return self.path / "init.safetensors"

    @property
    def ledger(self) -> Path:
        """Bytes, epochs and seconds by round and client."""
        return self.path / "ledger.tsv"

    def evaluation(self, role: str) -> Path:
        """Loss and rate of models by round and client, on the data of a role."""
        return self.path / f"evaluate_{role}.tsv"

    @property
    def tensorboard(self) -> Path:
        """Scalars by round; see `fedtools.files.events`."""
        return self.path / "tensorboard"

    def round_dir(self, number: int) -> Path:
        """The folder of a round, counted from 1."""
        return self.path / f"round_{number:04d}"

    def global_state(self, number: int) -> Path:
        """The shared tensors that the server sends in round `number`."""
        return self.round_dir(number) / "global.safetensors"

    def client_dir(self, client: str) -> Path:
        """What never leaves the client; refuses a name that is not a client's."""
        if client not in self._known:
            raise UserError(f"{client!r} is no client of this experiment", path=self.path)
        return self.path / "clients" / client

    def server_dir(self) -> Path:
        """What the server keeps for itself."""
        return self.path / "server"

    def is_measured(self, number: int) -> bool:
        """Whether the models after round `number` are measured on the way: every so many rounds',
        and the last configured one's."""
        rounds, every = self.config["rounds"], self.config["evaluate_every"]
        return number % every == 0 or number == rounds

    def is_done(self, number: int) -> bool:
        """Whether round `number` is complete (round 0, the start, is)."""
        return number == 0 or (self.round_dir(number) / ".done").exists()

    def last_round(self) -> int:
        """The last complete round, 0 before the first."""
        number = 0
        while self.is_done(number + 1):
            number += 1
        return number

    def result_round(self) -> int:
        """The round whose models are the result: the last configured one, if it is complete."""
        return min(self.last_round(), self.config["rounds"])

    def require_begun(self, number: int, what: str) -> None:
        """Insist that round `number` is the next one, and has been prepared that far."""
        if not self.is_done(number - 1):
            raise UserError(
                f"round {number} cannot {what}: round {number - 1} is not complete", path=self.path
            )
        if not self.global_state(number).exists():
            raise UserError("missing", path=self.global_state(number), remedy="run fedtools init")

    def sampled(self, number: int) -> list[str]:
        """The clients of a round."""
        path = self.round_dir(number) / "clients"
        if not path.exists():
            raise UserError("missing", path=path, remedy="run fedtools sample")
        names = read_lines(path)
        for line, name in enumerate(names, 1):
            if name not in self._known:
                raise UserError(f"{name!r} is no client of this experiment", path=path, line=line)
        return names

    def jobs(self, number: int) -> int:
        """Into how many jobs the clients of a round are cut."""
        path = self.round_dir(number) / "jobs"
        if not path.exists():
            raise UserError("missing", path=path, remedy="run fedtools sample")
        text = "".join(read_lines(path))
        if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
            remedy = "remove it, and run fedtools sample again"
            raise UserError(f"{text!r} is no number of jobs", path=path, remedy=remedy)
        return int(text)

    def write_sample(self, number: int, clients: Sequence[str], jobs: int) -> None:
        """Write who takes part, and drop updates that were cut into another number of jobs."""
        folder = self.round_dir(number)
        if not (folder / "jobs").exists() or self.jobs(number) != jobs:
            for pattern in ("update.*", "members.*", "log/seconds.*"):
                for path in folder.glob(pattern):
                    path.unlink()
        write_text(folder / "jobs", f"{jobs}\n")
        write_text(folder / "clients", "".join(f"{client}\n" for client in clients))

    def personal_dir(self, owner: Path, number: int) -> Path:
        """Where the place `owner` (a client's folder or the server's) keeps its part of a round."""
        return owner / f"round_{number:04d}"

    def drop_old_rounds(self, owner: Path, keep: int) -> None:
        """Remove what the place `owner` kept of all but its last `keep` rounds.

        In an open round it must be two: a round that is killed is repeated from the last but one.
        """
        for number in self.personal_rounds(owner)[:-keep]:
            old = self.personal_dir(owner, number)
            for path in old.iterdir():
                path.unlink()
            old.rmdir()

    def last_personal(self, owner: Path, before: int, name: str) -> Path | None:
        """The newest file `name` that `owner` kept in a round before `before`, or None."""
        for number in reversed(self.personal_rounds(owner)):
            path = self.personal_dir(owner, number) / name
            if number < before and path.exists():
                return path
        return None

    def personal_files(self, owner: Path, name: str) -> list[Path]:
        """All files `name` that `owner` kept, the newest last."""
        paths = (self.personal_dir(owner, number) / name for number in self.personal_rounds(owner))
        return [path for path in paths if path.exists()]

    def personal_rounds(self, owner: Path) -> list[int]:
        """The rounds of which `owner` kept something, as numbers: 10000 comes after 9999."""
        found = (re.fullmatch(r"round_(\d+)", folder.name) for folder in owner.glob("round_*"))
        return sorted(int(match.group(1)) for match in found if match)
