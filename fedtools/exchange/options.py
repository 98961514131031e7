"""The options of an experiment in its config.yaml: their types, ranges and defaults."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from fedtools.core.config import Natural, Section, from_mapping, read_yaml
from fedtools.core.errors import UserError

# Every round is a folder, and a group of utterances: a larger number can only be a typing error.
MOST_ROUNDS = 1_000_000
Rounds = Annotated[int, Ge(1), Le(MOST_ROUNDS)]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of an experiment, in the order of config.yaml.

    These options are checked by `fedtools init`, and by `read_fixed` when an experiment is opened.
    Their owners check the sections at the same times: `make_method` checks `method_conf`; the task
    checks `training`, in `begin` or its constructor; the builder of the model checks `model`, for
    speech recognition ESPnet's classes; `fedtools.client.attackers` checks `attackers`. A checked
    section is an object from there on. Sections of other commands are in
    `fedtools.core.recipe_sections` and `fedtools.attack.options`.

    Attributes:
        method: a name in `fedtools.methods.METHODS`.
        task: asr, kws, lm, rescore, or one in $FEDTOOLS_PATH.
        method_conf: options of the method.
        clients_per_round: a number, a share such as 0.1, or null for all.
        sampling: "fixed", this number of clients in each round; or "poisson", each client takes
            part by a draw of its own, so that the number varies.
        rounds: default number of rounds.
        average: number of best rounds whose models are averaged.
        evaluate_every: interval, in rounds, between evaluations.
        keep_updates: whether to keep updates after a round is complete.
        model, training: options of the task's model, and of its training.
        attackers: options of clients that attack; without the section, none does.
        start: the SHA-256 of the initial model; None draws one from `seed`.
        data: split -> data directory.
        defaults: the options that were not given, see `fedtools.federation.code`.
        clients: number of clients; 0 without a federation.
    """

    method: str
    task: str = "asr"
    method_conf: Section = field(default_factory=dict)
    clients_per_round: int | float | None = None
    sampling: Literal["fixed", "poisson"] = "fixed"
    rounds: Rounds = 1
    average: Rounds = 1
    evaluate_every: Rounds = 1
    keep_updates: bool = True
    model: Section = field(default_factory=dict)
    training: Section = field(default_factory=dict)
    attackers: Section = field(default_factory=dict)
    seed: int = 0
    start: str | None = None
    data: dict[str, str]
    clients: Natural = 0
    defaults: Section = field(default_factory=dict)

    def __post_init__(self) -> None:
        value, total = self.clients_per_round, self.clients
        share = isinstance(value, float) and 0 < value <= 1
        # Without clients nothing is sampled, and the number is irrelevant.
        count = isinstance(value, int) and 0 < value <= (total or value)
        if value is not None and not share and not count:
            population = f"{total} clients" if total else "the clients"
            problem = f"option 'clients_per_round' is {value!r}, no number or share of {population}"
            most = f"a number from 1 to {total}" if total else "a number, such as 10,"
            raise ValueError(f"{problem}; give {most} or a share, such as 0.1")


NAMES = tuple(field.name for field in fields(Options))
# A configuration need not have these: what is empty, or was not there when it was written.
_MAY_LACK = ("attackers", "start", "defaults")


def written(options: Options) -> dict[str, Any]:
    """Return options as they are written to config.yaml: no section `attackers` if none attack."""
    found = dict(vars(options))
    if not options.attackers:
        del found["attackers"]
    return found


def read_fixed(path: Path) -> Options:
    """Read the options that `fedtools init` has fixed; all must be there.

    Raises:
        UserError: if an option is missing, unknown or of the wrong type.
    """
    found = read_yaml(path)
    options = from_mapping(Options, found, path)
    for name in NAMES:
        if name not in found and name not in _MAY_LACK:
            raise UserError(f"option {name!r} is missing", path=path)
    return options
