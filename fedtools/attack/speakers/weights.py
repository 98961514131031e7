"""Attack on updates: verify speakers by cosines of updates, for each part and all parts together.

No speech is needed, and no model is run. The updates of two models are centred on those of a cohort
of other people (see `cohort`); a logistic regression on all parts' cosines, trained on
pairs of the cohort, combines them into one log-likelihood ratio. In addition, if the first layer
has a bias, constant values of a client's input are read out (see `readout`).

Behind a defence there are rows for each attacker of `fedtools.attack.knowledge`.

OUT/weights.tsv           figures, as for the other attacks on models
OUT/weights.<part>.<kind> a score for each trial, and its DET curve; behind a defence
                          weights.<part>.<attacker>.<kind>; see the option weights.scores
OUT/parts.tsv             each part of the models: its tensors, and why it has no figures
OUT/readout.tsv           cosine of each model's read-out with the truth
OUT/weights.png           equal error rates by part
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedtools.attack.defences import Defence
from fedtools.attack.knowledge import ANY, NO_DEFENCE, SEMI, Attacker, Block, Versions, attackers
from fedtools.attack.options import WeightsAttack
from fedtools.attack.speakers.cohort import blocks, combine, cosines, score_pairs
from fedtools.attack.speakers.compared_updates import (
    ALL,
    NOT_APPLICABLE,
    OK,
    Models,
    PartStatus,
    find_models,
    products_of,
)
from fedtools.attack.speakers.readout_results import CONSTANT, INPUT, read_inputs
from fedtools.attack.speakers.verify import COLUMNS, decide, draw_rates
from fedtools.attack.updates import NotApplicable, Updates, behind_defence, find_updates, join
from fedtools.core.atomic import scratch_dir
from fedtools.core.errors import UserError
from fedtools.core.recipe_sections import Bootstrap
from fedtools.core.tables import write_tsv
from fedtools.federation.federation import Federation

PARTS = ("part", "tensors", "values", "status")
# In addition to parts and read-outs: the regression on all of them.
TOGETHER = "together"
# Layers that are not a single part.
WHOLE = ALL, INPUT, CONSTANT, TOGETHER


@dataclass(frozen=True)
class WeightsSetup:
    """Rounds, defence, resamples and seed of the attack.

    Attributes:
        rounds: rounds in which models were sent.
        defence: defence that clients applied to them, see `fedtools.attack.defences`.
        resamples: number of bootstrap resamples for intervals.
        seed: random seed.
    """

    rounds: Sequence[int]
    defence: str = ""
    resamples: int = Bootstrap.resamples
    seed: int = 0

    @property
    def defended(self) -> bool:
        """Return whether clients applied a defence."""
        return self.defence not in ("", NO_DEFENCE)


def attack(
    attacked: Sequence[Federation],
    cohort: Sequence[Federation],
    table: Path | None,
    out: Path,
    options: WeightsAttack,
    setup: WeightsSetup,
) -> list[Mapping[str, object]]:
    """Decide trials of models by their updates; write the files above.

    Args:
        attacked: experiments whose models are compared.
        cohort: experiments of other people; without one, cohorts are made of the attacked models.
        table: what is known of the models, including the cohort's, see `verify.read_models`; None:
            their speakers.

    Returns:
        the rows of OUT/weights.tsv; none if clients send no tensors.

    Raises:
        UserError: if no models are left to compare.
    """
    Defence.parse(setup.defence)
    out.mkdir(parents=True, exist_ok=True)
    for path in out.glob("weights.*"):
        # An earlier run may have had other parts.
        path.unlink()
    federations = [*attacked, *cohort]
    with scratch_dir(out) as scratch, ExitStack() as settings:
        for federation in federations:
            settings.enter_context(federation.settings())
        try:
            plain = [find_updates(one, setup.rounds, setup.defended) for one in federations]
        except NotApplicable as error:
            _write_parts(out, [PartStatus(ALL, [], 0, f"{NOT_APPLICABLE}: {error}")])
            write_tsv(out / "weights.tsv", COLUMNS, [])
            return []
        found = _defended(federations, plain, setup, scratch) if setup.defended else plain
        where = [one.experiment.path for one in federations]
        joined = join(found, where)
        before = join(plain, where) if setup.defended else None
        models = find_models(joined, before, found, table, len(attacked))
        products, models, described = products_of(models, joined, options, scratch)
        vectors, more = read_inputs(federations, joined, models, options, out)
        described += more
        some = blocks(models.people, models.given, setup.seed)
        layers = _Layers(products, vectors, joined.groups)
        rows = _decide(models, some, layers, described, out, options, setup)
    _write_parts(out, described)
    best = [row for row in rows if row["attacker"] in (ANY, SEMI)]
    title = "Attack on updates, by part of the model"
    draw_rates(out / "weights.png", best, title if not setup.defended else f"{title}, {SEMI}")
    return rows


def _defended(
    federations: Sequence[Federation], plain: Sequence[Updates], setup: WeightsSetup, scratch: Path
) -> list[Updates]:
    """Return the updates of each experiment as they are seen behind the defence."""
    return [
        behind_defence(
            federation,
            updates,
            setup.rounds,
            setup.defence,
            setup.seed,
            scratch / f"{number}.safetensors",
        )
        for number, (federation, updates) in enumerate(zip(federations, plain, strict=True))
    ]


@dataclass(frozen=True)
class _Layers:
    """Products and vectors by which models are compared, in all versions.

    Attributes:
        products: part -> products.
        vectors: name -> read-out.
        groups: for each model that is a mean, the models in the mean.
    """

    products: Mapping[str, np.ndarray]
    vectors: Mapping[str, np.ndarray]
    groups: Mapping[str, Sequence[str]]


def _decide(
    models: Models,
    some: Sequence[Block],
    layers: _Layers,
    described: list[PartStatus],
    out: Path,
    options: WeightsAttack,
    setup: WeightsSetup,
) -> list[Mapping[str, object]]:
    """Return the figures of each part, and of all parts together."""
    names = list(models.updates)
    attacked = {
        name: models.known[name] for name, one in zip(names, models.given, strict=True) if not one
    }
    chosen = {"others": options.others, "seed": setup.seed}
    products = dict(layers.products)
    for name, vectors in layers.vectors.items():
        rows = vectors - vectors.mean(0)
        products[name] = rows @ rows.T
    together = [values for part, values in products.items() if part != ALL]
    statuses = dict[str, None]()
    versions = Versions(names, models.defended, layers.groups)
    people = models.people * (len(models.versions) // len(names))

    def of(attacker: Attacker) -> Iterator[tuple[str, str, np.ndarray]]:
        own = versions.blocks(some, attacker)
        for part, values in products.items():
            yield part, "cosine", score_pairs(values, own, cosines)
        try:
            ratios, _ = combine(together, people, own, shared=versions.shared, **chosen)
        except UserError as error:
            statuses[f"{NOT_APPLICABLE}: {error}"] = None
            return
        statuses[OK] = None
        yield TOGETHER, "regression", ratios

    def matrices() -> Iterator[tuple[str, str, str, np.ndarray]]:
        for attacker in attackers(models.defended):
            for part, way, scores in of(attacker):
                yield attacker.name, part, way, versions.seen(scores, attacker)

    files = {"cosine": "weights", "regression": "weights"}
    rows = decide(
        out,
        "weights",
        attacked,
        names,
        matrices(),
        files,
        kept=lambda part: options.scores == "parts" or part in WHOLE,
        defence=setup.defence if models.defended else NO_DEFENCE,
        resamples=setup.resamples,
        **chosen,
    )
    described += [PartStatus(TOGETHER, [], 0, status) for status in statuses]
    return rows


def _write_parts(out: Path, described: Sequence[PartStatus]) -> None:
    """Write OUT/parts.tsv; report parts without figures on stderr."""
    rows = []
    for one in described:
        cells = {"part": one.part, "tensors": len(one.tensors), "values": one.values}
        rows.append({**cells, "status": one.status})
        if one.status != OK:
            print(f"{one.part}: {one.status}", file=sys.stderr)
    write_tsv(out / "parts.tsv", PARTS, rows)
