"""Inversion of updates: recover inputs by gradient matching, and tokens from output layers.

`matching` recovers inputs: from one step on one item, which the attacker computes as the client
would (the best case, which papers report), and from what the client really sent, after all of its
steps. Labels and lengths are known to the attacker, except for the label of a single clip, which is
read from the output layer. `bag_of_words` recovers tokens.
(`fedtools.attack.features.reconstruction` is a different attack, on features that clients sent.)

OUT/inversion.tsv        figures, see `fedtools.attack.recovery.recovered`
OUT/inversion_parts.tsv  status of each attack: ok, or why it is not applicable
OUT/inversion.png        some spectra: true, recovered, another speaker's
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedtools.attack.defences import Defence
from fedtools.attack.options import Inversion
from fedtools.attack.recovery.bag_of_words import bags, count_tokens, output_layer, scores_of
from fedtools.attack.recovery.inputs import MATCHING, VOICES, Recovery
from fedtools.attack.recovery.inverted_round import REAL, InversionSetup, World
from fedtools.attack.recovery.recovered import COLUMNS, FREQUENCY, Measure, draw
from fedtools.attack.updates import NotApplicable
from fedtools.core.tables import write_tsv
from fedtools.federation.federation import Federation
from fedtools.speaker.resemblyzer import VoiceEncoder
from fedtools.tasks.base import as_configured

PARTS = ("part", "status")
BAG = "bag of tokens"
# Iterations of the searches that are timed for an estimate.
_TRIED = (8, 24)
OK, NOT_APPLICABLE = "ok", "not applicable"


@as_configured
def attack(
    federation: Federation, out: Path, options: Inversion, setup: InversionSetup
) -> list[dict[str, object]]:
    """Attack what clients sent in a round; write the files above.

    Returns:
        the rows of OUT/inversion.tsv.

    Raises:
        UserError: if the round is not complete, or its updates are missing.
    """
    for defence in setup.defences:
        Defence.parse(defence)
    encoder = VoiceEncoder() if setup.voices else None
    rows, statuses = list[dict[str, object]](), dict[str, str]()
    out.mkdir(parents=True, exist_ok=True)
    (out / "inversion.png").unlink(missing_ok=True)
    try:
        world = World(federation, options, setup)
    except NotApplicable as error:
        statuses = dict.fromkeys((MATCHING, BAG), f"{NOT_APPLICABLE}: {error}")
    else:
        recovery = Recovery(world, encoder)
        for part, found in ((MATCHING, recovery.rows()), (BAG, bag_rows(world))):
            try:
                rows += list(found)
                statuses[part] = OK
            except NotApplicable as error:
                statuses[part] = f"{NOT_APPLICABLE}: {error}"
        if recovery.silent:
            statuses[VOICES] = f"{NOT_APPLICABLE}: {recovery.silent}"
        if recovery.drawn:
            draw(out / "inversion.png", recovery.drawn)
    for part, status in statuses.items():
        if status != OK:
            print(f"{part}: {status}", file=sys.stderr)
    parts = [{"part": part, "status": status} for part, status in statuses.items()]
    write_tsv(out / "inversion_parts.tsv", PARTS, parts)
    write_tsv(out / "inversion.tsv", COLUMNS, rows)
    return rows


def estimate(federation: Federation, options: Inversion, setup: InversionSetup) -> float:
    """Return about how many seconds an attack will take, from two short ones on a single client.

    Writes nothing. Arguments and errors are those of `attack`.
    """
    taken = []
    for iterations in _TRIED:
        short = replace(options, each=1, iterations=iterations, restarts=1)
        with tempfile.TemporaryDirectory() as out, redirect_stderr(io.StringIO()):
            begun = time.monotonic()
            attack(federation, Path(out), short, replace(setup, defences=[]))
            taken.append(time.monotonic() - begun)
    few, many = _TRIED
    each = max(0.0, taken[1] - taken[0]) / (many - few)
    clients = min(options.each, len(federation.experiment.round(setup.number).sampled()))
    searches = clients * (1 + len(setup.defences)) * options.restarts
    return taken[0] + searches * options.iterations * each


def bag_rows(world: World) -> Iterator[dict[str, object]]:
    """Yield rows of recovered tokens, from the change of output layers in all real steps."""
    output = output_layer(world.federation, world.federation.states.shared_spec)
    names = sorted(world.victims.messages)
    counts = {
        client: count_tokens(list(map(world.items.labels, world.people.own(client))), output)
        for client in names
    }
    for defence in ("", *world.setup.defences):
        states = world.seen(world.victims, defence).states(names)
        scores = {name: scores_of(output, sent, world.start) for name, sent in states}
        found: dict[str, list[tuple[str, float, float, float]]] = {}
        for client, kind, ours, theirs in bags(counts, scores):
            for name, true in (("area", 100.0), ("precision", 100.0), ("counts", 1.0)):
                measure = {"area": "AUC%", "precision": "AP%", "counts": "counts"}[name]
                values = getattr(ours, name), getattr(theirs, name), true
                if not np.isnan(values).any():
                    found.setdefault(f"{kind} {measure}", []).append((client, *values))
        if not found and not defence:
            raise NotApplicable("no client says some tokens more often than others")
        for measure, values in found.items():
            clients = [client for client, *_ in values]
            sums = np.array([one for _, *one in values])
            one = Measure(measure, FREQUENCY, clients, sums, np.ones(len(sums)))
            yield world.row(BAG, defence, REAL, one)
