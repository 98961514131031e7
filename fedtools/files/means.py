"""What a job keeps of a round when not every client's update is wanted: its stacks' means.

    members.<job>.tsv          one row for each client: its stack, weight and counts, and whether
                               its training failed
    update.<job>.safetensors   as in `fedtools.files.updates`, with a row for each stack: the
    update.<job>.tsv           weighted mean of what its clients would have sent

Stacks depend on the round's clients alone and are summed in their order, so the bytes of the next
model do not depend on the number of jobs. Memory and disk are those of the stacks, not the clients.

No member is believed either. What one of them did cannot be taken out of the mean again: a row
that cannot be right loses its whole stack, a table that cannot be read all stacks of its job.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedtools.files.datadir import check_id
from fedtools.files.errors import UserError
from fedtools.files.states import Spec, as_array
from fedtools.files.tables import read_tsv, write_tsv
from fedtools.files.updates import (
    Refusal,
    Update,
    UpdateWriter,
    check_size,
    job_complete,
    left_out_by_job,
    read_counts,
    read_float,
    read_updates,
    reason_of,
    sent_nothing,
)

if TYPE_CHECKING:
    import torch

COLUMNS = ("stack", "client", "utterances", "steps", "loss", "weight", "status")

# A job computes the same weights by the same rule; no more than the last digits can differ.
_ROUNDING = 1e-9


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


class _Row(NamedTuple):
    """A client that a job's table has in a stack; `job` is the file of that job's tensors.

    `member` is None where the row has a `problem`.
    """

    place: str
    job: Path
    stack: str
    client: str
    member: Member | None = None
    problem: str = ""


def read_means(
    round_dir: str | Path,
    sampled: Sequence[str],
    spec: Spec,
    base_sha256: str,
    weigh: Callable[[int], float],
) -> tuple[list[Update], list[float], dict[str, list[Member]], list[Refusal]]:
    """Find every stack of a round and check it, as `read_updates` does with clients.

    A stack is refused, and all of its clients with it, if its update is, if the row of one of them
    has nonsense or another weight than the server's, if one was not sampled or comes twice, or if
    the update counts other utterances or steps than the rows. A job whose table cannot be read
    loses all of its stacks.

    Args:
        round_dir: the round's directory.
        sampled: the clients of the round.
        spec: the shared tensors, as one client has them.
        base_sha256: hash of the round's global.safetensors.
        weigh: a client's weight by its number of utterances.

    Returns:
        The stacks' updates in their order and their weights, stack -> the clients in it, and one
        refusal for each other client of `sampled`, in that order, followed by those who were not
        sampled.
    """
    round_dir = Path(round_dir)
    rows: list[_Row] = []
    left_out: dict[str, str] = {}
    unreadable: list[str] = []
    # As for `read_updates`, a job is there if the table of its update is.
    for table in sorted(round_dir.glob("update.*.tsv")):
        try:
            rows += _read_members(table, len(sampled), weigh, left_out)
        except UserError as error:
            unreadable.append(reason_of(error, round_dir))
    names = sorted({row.stack for row in rows})
    updates, refused = read_updates(round_dir, names, spec, base_sha256)
    groups, lost = _groups(rows, set(sampled), updates, refused)
    updates = [update for update in updates if update.client in groups]
    groups = {update.client: groups[update.client] for update in updates}
    weights = [math.fsum(member.weight for member in group) for group in groups.values()]
    kept = {member.client for group in groups.values() for member in group}
    refusals = [
        Refusal(client, lost.get(client) or left_out.get(client) or sent_nothing(unreadable))
        for client in sampled
        if client not in kept
    ]
    strangers = sorted(lost.keys() - set(sampled))
    refusals += [Refusal(client, "was not sampled") for client in strangers]
    return updates, weights, groups, refusals


def _groups(
    rows: Sequence[_Row],
    sampled: Collection[str],
    updates: Sequence[Update],
    refused: Sequence[Refusal],
) -> tuple[dict[str, list[Member]], dict[str, str]]:
    """The clients in each stack that can be believed; why the clients in the others cannot."""
    found = {(update.path, update.client): update for update in updates}
    reasons = {refusal.client: f"{refusal.client}: {refusal.reason}" for refusal in refused}
    times = Counter(row.client for row in rows)
    stacks: dict[tuple[Path, str], list[_Row]] = {}
    for row in rows:
        stacks.setdefault((row.job, row.stack), []).append(row)
    groups: dict[str, list[Member]] = {}
    lost: dict[str, str] = {}
    for (job, stack), those in stacks.items():
        members = [row.member for row in those if row.member is not None]
        problems = (_problem(row, sampled, times[row.client]) for row in those)
        problem = next(filter(None, problems), "") or reasons.get(stack, "")
        problem = problem or _misfit(found.get((job, stack)), members, those[0])
        if problem:
            lost |= {row.client: problem for row in those}
        else:
            groups[stack] = members
    return groups, lost


def _problem(row: _Row, sampled: Collection[str], times: int) -> str:
    if row.problem:
        return row.problem
    if row.client not in sampled:
        return f"{row.place}: {row.client} was not sampled"
    return f"{row.place}: {row.client} came {times} times" if times > 1 else ""


def _misfit(update: Update | None, members: Sequence[Member], first: _Row) -> str:
    """What is wrong between a stack's rows and its update, which another job may have sent."""
    table = first.job.with_suffix(".tsv").name
    if update is None:
        return f"{first.place}: {first.stack} is not in {table}"
    theirs = update.utterances, update.steps
    ours = sum(m.utterances for m in members), sum(m.steps for m in members)
    if theirs == ours:
        return ""
    return (
        f"{first.place}: {first.stack} has {ours[0]} utterances and {ours[1]} steps, "
        f"{theirs[0]} and {theirs[1]} in {table}"
    )


def _read_members(
    update_table: Path, sampled: int, weigh: Callable[[int], float], left_out: dict[str, str]
) -> list[_Row]:
    """The clients of a job that are in a stack; to `left_out` go the others, with the reason."""
    folder, job = update_table.parent, update_table.name[len("update.") : -len(".tsv")]
    path = _members_path(folder, job)
    check_size(path, sampled)
    rows = []
    for line, row in enumerate(read_tsv(path, COLUMNS), 2):
        stack = check_id(row["stack"], "stack", path, line)
        client = check_id(row["client"], "client", path, line)
        if row["status"] != "ok":
            left_out[client] = left_out_by_job(row["status"])
            continue
        found = _Row(f"{path.name}:{line}", update_table.with_suffix(".safetensors"), stack, client)
        try:
            found = found._replace(member=_member(row, path, line, weigh))
        except UserError as error:
            found = found._replace(problem=reason_of(error, folder))
        rows.append(found)
    return rows


def _member(row: Mapping[str, str], path: Path, line: int, weigh: Callable[[int], float]) -> Member:
    """The client of a row; its weight is the server's, and so must be what its job gave it."""
    utterances, steps, loss = read_counts(row, path, line)
    theirs, ours = read_float(row, "weight", path, line), float(weigh(utterances))
    if not math.isclose(theirs, ours, rel_tol=_ROUNDING):
        problem = f"the weight of {utterances} utterances is {theirs:g}, expected {ours:g}"
        raise UserError(problem, path=path, line=line)
    return Member(row["client"], utterances, steps, loss, ours)


def _members_path(round_dir: Path, job: int | str) -> Path:
    return round_dir / f"members.{check_id(str(job), 'job')}.tsv"
