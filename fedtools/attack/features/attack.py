"""`fedtools attack features`: all attacks on the features that clients sent."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fedtools.attack.features import reconstruction
from fedtools.attack.features.clustering import sort_speakers
from fedtools.attack.features.figures import COLUMNS, Figure, Speakers, over_clients
from fedtools.attack.features.picture import draw_speakers
from fedtools.attack.features.probe import probe_speakers
from fedtools.attack.features.retrieval import find_speakers
from fedtools.attack.features.sent import (
    Victim,
    as_sent,
    open_victim,
    require_sent,
    statuses,
    unadapted,
    vectors,
)
from fedtools.attack.features.transcripts import read_transcripts
from fedtools.attack.options import SentFeatures
from fedtools.core.errors import UserError
from fedtools.core.recipe_sections import Bootstrap
from fedtools.core.tables import write_tsv
from fedtools.exchange.ledger import SERVER_ROW
from fedtools.federation.federation import Federation
from fedtools.score.bootstrap import AVERAGE
from fedtools.tasks.base import as_configured


@dataclass(frozen=True)
class Options:
    """Options of an attack on an experiment.

    Attributes:
        clients: clients to attack; all if empty.
        server_data: a data directory of the server's own speech; None leaves out the inversion.
        text: transcripts of clients' utterances; by default those of the train data.
        section: numbers of utterances and epochs.
        resamples: draws of the bootstrap.
        seed: random seed.
        decoders: a directory of trained decoders, for other experiments of the same baseline.
    """

    clients: Sequence[str] = ()
    server_data: Path | None = None
    text: Path | None = None
    section: SentFeatures = field(default_factory=SentFeatures)
    resamples: int = Bootstrap.resamples
    seed: int = 0
    decoders: Path | None = None


@as_configured
def attack_features(federation: Federation, out: Path, options: Options) -> list[dict[str, object]]:
    """Attack features that clients sent; write OUT/attacks.tsv and OUT/tsne.<client>.png.

    Returns:
        the rows of the table, see `fedtools.attack.features.figures.COLUMNS`, with numbers as text.

    Raises:
        UserError: if no features were sent in this experiment, or by none of the clients.
    """
    federation, number = require_sent(federation)
    senders = []
    for client, problem in statuses(federation, number, options.clients).items():
        if problem:
            _note(client, f"not attacked: {problem}")
        else:
            senders.append(client)
    if not senders:
        where = federation.experiment.round(number).path
        raise UserError("no client has features to attack", path=where)
    rows, inverter = [], None
    if options.server_data:
        # The server has no audio of any client, whether it is attacked or not.
        clients = federation.experiment.clients
        train, held, numbers = reconstruction.read_server_data(
            federation, options.server_data, clients, options.seed
        )
        inverter = reconstruction.open_inverter(
            federation,
            train,
            options.server_data,
            options.section.epochs,
            options.seed,
            options.decoders,
        )
        speakers = Speakers(numbers, options.resamples, options.seed, SERVER_ROW)
        for figure in reconstruction.held_out(federation, inverter, held, speakers):
            rows.append(figure.row(SERVER_ROW))
    found: list[Figure] = []
    for client in senders:
        victim = open_victim(federation, number, client, options.section.utterances, options.text)
        figures = list(attack_client(federation, number, victim, inverter, out, options))
        rows += [figure.row(client) for figure in figures]
        found += figures
    rows += [figure.row(AVERAGE) for figure in over_clients(found, options.seed)]
    write_tsv(out / "attacks.tsv", COLUMNS, rows)
    return rows


def attack_client(
    federation: Federation,
    number: int,
    victim: Victim,
    inverter: reconstruction.Inverter | None,
    out: Path,
    options: Options,
) -> Iterator[Figure]:
    """Yield the figures of all attacks on one client, and draw its picture.

    Args:
        number: the round in which features were sent.
    """
    speakers = Speakers(victim.speakers, options.resamples, options.seed, victim.client)
    if speakers.count > 1:
        count = len(victim.speakers)
        kinds: dict[str, np.ndarray] = {
            "unadapted": vectors(unadapted(federation, victim.audio), count),
            "personalised": vectors(as_sent(federation, victim.sent), count),
        }
        yield from attack_speakers(victim, kinds, out, options)
    else:
        _note(victim.client, "a single speaker, known from the client's name: no attacks I and II")
    if victim.texts is None:
        _note(victim.client, "the train data have no text, so no word error rates")
    else:
        yield from read_transcripts(federation, number, victim, speakers)
    if inverter:
        yield from reconstruction.invert(federation, inverter, victim, speakers)


def attack_speakers(
    victim: Victim, kinds: Mapping[str, np.ndarray], out: Path, options: Options
) -> Iterator[Figure]:
    """Yield the figures of attacks I and II, and draw the picture of speakers.

    One utterance is taken of each recording that was sent at several speeds: the others do not
    count as other audio of its speaker.

    Args:
        kinds: "unadapted" and "personalised" vectors of all of the victim's utterances.
    """
    own = victim.recorded
    victim = replace(victim, speakers=victim.speakers[own])
    kinds = {kind: kinds[kind][own] for kind in ("unadapted", "personalised")}
    speakers = Speakers(victim.speakers, options.resamples, options.seed, victim.client)
    yield from find_speakers(*kinds.values(), speakers)
    # Both use the same random numbers, since they are compared.
    key = options.seed, "attack", victim.client
    for kind in ("personalised", "unadapted"):
        yield from sort_speakers(f"II, {kind}", kinds[kind], speakers, key)
    for kind in ("personalised", "unadapted"):
        yield from probe_speakers(f"probe, {kind}", kinds[kind], speakers, key)
    draw_speakers(out / f"tsne.{victim.client}.png", victim, **kinds, seed=options.seed)


def _note(client: str, what: str) -> None:
    print(f"{client}: {what}", file=sys.stderr)
