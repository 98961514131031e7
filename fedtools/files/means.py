"""What a job keeps of a round when not every client's update is wanted: its stacks' means.

    members.<job>.tsv          one row for each client: its stack, weight and counts, and whether
                               its training failed
    update.<job>.safetensors   as in `fedtools.files.updates`, with a row for each stack: the
    update.<job>.tsv           weighted mean of what its clients would have sent

Stacks depend on the round's clients alone and are summed in their order, so the bytes of the next
model do not depend on the number of jobs. Memory and disk are those of the stacks, not the clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedtools.files.datadir import check_id
from fedtools.files.errors import UserError
from fedtools.files.states import Spec, as_array
from fedtools.files.tables import count, read_tsv, write_tsv
from fedtools.files.updates import Refusal, Update, UpdateWriter, job_complete, read_updates

if TYPE_CHECKING:
    import torch

COLUMNS = ("stack", "client", "utterances", "steps", "loss", "weight", "status")

_LARGEST_WEIGHT = 1e12


class Member(NamedTuple):
    """A client of a round, as the ledger will know it; `weight` is its share of the mean."""

    client: str
    utterances: int
    steps: int
    loss: float
    weight: float


def member_of(update: Update, weigh: Callable[[int], float]) -> Member:
    """The client of an update that was kept."""
    weight = weigh(update.utterances)
    return Member(update.client, update.utterances, update.steps, update.loss, weight)


def stack_name(index: int) -> str:
    """The name of a round's stack, counted from 1."""
    return f"stack-{index:05d}"


class MeanWriter:
    """Write the files of one job, adding up one stack at a time; as `UpdateWriter` otherwise.

    Args:
        stacks: name -> clients, for the stacks of this job in the order of their rows.
        weigh: a client's weight by its number of utterances.
    """

    def __init__(
        self,
        round_dir: str | Path,
        job: int | str,
        stacks: Mapping[str, Sequence[str]],
        spec: Spec,
        base_sha256: str,
        weigh: Callable[[int], float],
    ):
        self._writer = UpdateWriter(round_dir, job, list(stacks), spec, base_sha256)
        self._table = _members_path(Path(round_dir), job)
        self._table.unlink(missing_ok=True)
        self._spec = spec
        self._weigh = weigh
        self._stack = {client: name for name, clients in stacks.items() for client in clients}
        self._waiting = {name: list(clients) for name, clients in stacks.items()}
        self._rows: dict[str, list[dict[str, object]]] = {name: [] for name in stacks}
        self._sums: dict[str, dict[str, np.ndarray]] = {}

    def add(
        self,
        client: str,
        tensors: Mapping[str, np.ndarray | torch.Tensor],
        utterances: int,
        steps: int,
        loss: float,
    ) -> None:
        """Add one client's tensors to its stack's sum; the last one of a stack writes its row."""
        member = Member(client, utterances, steps, loss, self._weigh(utterances))
        sums = self._sums.setdefault(self._stack[client], {})
        for name in self._spec:
            array = as_array(name, tensors[name]).astype(np.float64) * member.weight
            sums[name] = sums[name] + array if name in sums else array
        self._done(client, member, "ok")

    def leave_out(self, client: str, reason: str) -> None:
        """Count the client's training as failed."""
        reason = " ".join(reason.split())[:200].strip() or "training failed"
        self._done(client, Member(client, 0, 0, 0.0, 0.0), reason)

    def _done(self, client: str, member: Member, status: str) -> None:
        stack = self._stack[client]
        self._waiting[stack].remove(client)
        numbers = {"loss": repr(float(member.loss)), "weight": repr(float(member.weight))}
        row = {"stack": stack, **member._asdict(), **numbers, "status": status}
        self._rows[stack].append(row)
        if not self._waiting[stack]:
            self._close_stack(stack)

    def _close_stack(self, stack: str) -> None:
        rows = [row for row in self._rows[stack] if row["status"] == "ok"]
        weight = sum(float(row["weight"]) for row in rows)
        sums = self._sums.pop(stack, {})
        if not weight:
            self._writer.leave_out(stack, "none of its clients can be used")
            return
        means = {name: (sums[name] / weight).astype(kind) for name, (_, kind) in self._spec.items()}
        utterances, steps = (sum(int(row[key]) for row in rows) for key in ("utterances", "steps"))
        loss = sum(float(row["loss"]) * float(row["weight"]) for row in rows) / weight
        self._writer.add(stack, means, utterances, steps, loss)

    def __enter__(self) -> MeanWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            # Before the update's table, which marks the job as complete.
            write_tsv(self._table, COLUMNS, [row for rows in self._rows.values() for row in rows])
        self._writer.__exit__(kind, error, trace)


def means_complete(
    round_dir: str | Path,
    job: int | str,
    stacks: Mapping[str, Sequence[str]],
    spec: Spec,
    base_sha256: str,
) -> bool:
    """Whether this job's files are all there; see `fedtools.files.updates.job_complete`."""
    path = _members_path(Path(round_dir), job)
    if not path.exists() or not job_complete(round_dir, job, list(stacks), spec, base_sha256):
        return False
    try:
        found = sorted((row["stack"], row["client"]) for row in read_tsv(path, COLUMNS))
    except UserError:
        return False
    return found == sorted((name, client) for name, them in stacks.items() for client in them)


def read_means(
    round_dir: str | Path, sampled: Sequence[str], spec: Spec, base_sha256: str
) -> tuple[list[Update], list[float], dict[str, list[Member]], list[Refusal]]:
    """Find every stack of a round and check it, as `read_updates` does.

    Returns:
        The stacks' updates in their order and their weights, stack -> the clients in it, and one
        refusal for each other client.

    Raises:
        UserError: naming file and line, if a table is malformed, or a client is in two stacks.
    """
    round_dir = Path(round_dir)
    stacks: dict[str, list[Member]] = {}
    refusals: list[Refusal] = []
    left = dict.fromkeys(sampled)
    for path in sorted(round_dir.glob("members.*.tsv")):
        for line, row in enumerate(read_tsv(path, COLUMNS), 2):
            stack = check_id(row["stack"], "stack", path, line)
            client = check_id(row["client"], "client", path, line)
            if client not in left:
                problem = f"client {client!r} was not sampled or comes twice"
                raise UserError(problem, path=path, line=line, remedy="train this job again")
            del left[client]
            if row["status"] == "ok":
                stacks.setdefault(stack, []).append(_member(row, path, line))
            else:
                reason = "".join(c if c.isprintable() else "?" for c in row["status"][:300])
                refusals.append(Refusal(client, f"left out by its job: {reason}"))
    names = sorted(stacks)
    updates, refused = read_updates(round_dir, names, spec, base_sha256)
    for refusal in refused:
        members = stacks.pop(refusal.client, [])
        refusals += [Refusal(member.client, refusal.reason) for member in members]
    refusals += [Refusal(client, "is in no stack that could be read") for client in left]
    weights = [math.fsum(member.weight for member in stacks[update.client]) for update in updates]
    return (
        updates,
        weights,
        {update.client: stacks[update.client] for update in updates},
        refusals,
    )


def _member(row: Mapping[str, str], path: Path, line: int) -> Member:
    utterances, steps = (count(row, key, path, line) for key in ("utterances", "steps"))
    try:
        loss, weight = float(row["loss"]), float(row["weight"])
    except ValueError:
        loss = weight = math.nan
    if not (math.isfinite(loss) and 0 <= weight <= _LARGEST_WEIGHT):
        raise UserError(
            f"loss {row['loss'][:40]!r} and weight {row['weight'][:40]!r} cannot be",
            path=path,
            line=line,
            remedy="train this job again",
        )
    return Member(row["client"], utterances, steps, loss, weight)


def _members_path(round_dir: Path, job: int | str) -> Path:
    return round_dir / f"members.{check_id(str(job), 'job')}.tsv"
