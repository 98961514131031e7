"""Attack A2: speaker embeddings of personalised models, compared by PLDA.

Tomashenko et al. (ICASSP 2022), section 3.2.2. The network, LDA and PLDA are trained on some
people's models (Part-1), and decide trials of other people's (Part-2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from fedtools.attack.knowledge import ANY
from fedtools.attack.verify import Model, decide, known_speakers
from fedtools.attack.victims import Victims, make_probe, sound_victims
from fedtools.attack.xvectors import Training, View, embeddings, train_xvectors
from fedtools.federation.federation import Federation
from fedtools.files.ark import write_ark
from fedtools.files.config import write_yaml
from fedtools.files.datadir import write_table
from fedtools.files.errors import UserError
from fedtools.files.sections import Bootstrap
from fedtools.speaker.plda import length_normalise, train_lda, train_plda
from fedtools.tasks.base import as_configured


@as_configured
def attack(
    known: Federation,
    attacked: Federation,
    indicator: Path,
    table: Path | None,
    out: Path,
    training: Training,
    rounds: Sequence[int] = (1,),
    resamples: int = Bootstrap.resamples,
) -> list[Mapping[str, object]]:
    """Train on one experiment's models, decide trials of another's; write OUT/a2.<layer>.tsv.

    Args:
        known: people's models that the attacker knows the speakers of.
        attacked: models of others. In the first of the rounds they began with the same global
            model; in later ones differences are to each experiment's own.
        indicator: speech of neither.
        table: what is known of the attacked models, see `verify.read_models`; None: their speakers.
        out: gets also embeddings, trials and scores.
        rounds: in which models were sent, of both experiments.
        resamples: as of attack A1.

    Raises:
        UserError: if the two began with different models, share a speaker with each other or the
            Indicator, or one has no speaker of two models.
    """
    first, options = rounds[0], training.options
    if known.experiment.round(first).base() != attacked.experiment.round(first).base():
        problem = f"round {first} began with another model than in {known.experiment.path}"
        raise UserError(problem, path=attacked.experiment.path)
    ours, theirs = (sound_victims(one, rounds) for one in (known, attacked))
    for federation, one in ((known, ours), (attacked, theirs)):
        sent = [one.speakers[name] for name in one.messages if name in one.speakers]
        if len(sent) == len(set(sent)):
            remedy = "give a second --round, of which each client has a model, too"
            raise UserError("no speaker has two models", path=federation.where, remedy=remedy)
    views = list(_views(known, ours, theirs, indicator, rounds, options.held))
    network = train_xvectors(views, training)
    found = [
        {key: row for view in some for key, row in embeddings(view, network, training).items()}
        for some in (views, _views(attacked, theirs, ours, indicator, rounds, options.held))
    ]
    name = f"a2.h{training.layer}"
    write_yaml(out / f"{name}.yaml", _chosen(training, rounds, resamples))
    vectors = {key: row for part in found for key, row in part.items()}
    matrices = ((key, vectors[key][None]) for key in sorted(vectors))
    write_table(out / f"{name}.scp", write_ark(out / f"{name}.ark", matrices))
    models = known_speakers(list(found[1]), [theirs.speakers[key] for key in found[1]], table)
    return _decide(found[0], ours.speakers, found[1], models, out, name, training, resamples)


def _chosen(training: Training, rounds: Sequence[int], resamples: int) -> dict[str, object]:
    """What the result depends on, by name."""
    options = asdict(training.options)
    network = {name: options[name] for name in ("width", "epochs", "utterances", "frames", "rate")}
    decision = {name: options[name] for name in ("held", "dimension", "others")}
    place = {"layer": training.layer, "part": training.part}
    drawn = {"seed": training.seed, "rounds": list(rounds)}
    return {**place, **network, **drawn, **decision, "resamples": resamples}


def _views(
    federation: Federation,
    own: Victims,
    others: Victims,
    indicator: Path,
    rounds: Sequence[int],
    held: int,
) -> Iterator[View]:
    """The models of each round that were sent and have a speaker."""
    for number in rounds:
        # An embedding is of one utterance: of clips, too.
        probe = make_probe(federation, number, indicator, held, clips_at_once=1)
        if shared := set(own.speakers.values()) & set(others.speakers.values()):
            problem = f"{min(shared)!r} is in two of the experiments and the Indicator"
            raise UserError(problem, path=indicator, remedy="give disjoint speakers")
        folder = federation.experiment.round(number).path
        speakers = {
            name: own.speakers[name]
            for name, message in own.messages.items()
            if name in own.speakers and message.path.parent == folder
        }
        yield View(probe, own.states, speakers)


def _decide(
    ours: Mapping[str, np.ndarray],
    speakers: Mapping[str, str],
    theirs: Mapping[str, np.ndarray],
    models: Mapping[str, Model],
    out: Path,
    name: str,
    training: Training,
    resamples: int,
) -> list[Mapping[str, object]]:
    """Scores by PLDA, and by the cosine, and their figures."""
    names, labels = list(theirs), np.array([speakers[key] for key in ours])
    trained, tested = np.stack(list(ours.values())), np.stack(list(theirs.values()))
    free = len(labels) - len(set(labels))
    dimension = min(
        training.options.dimension, trained.shape[1], len(set(labels)) - 1, max(1, free)
    )
    lda = train_lda(trained, labels, dimension)
    trained_low, tested_low = (length_normalise(lda(one)) for one in (trained, tested))
    plda, _ = train_plda(trained_low, labels)
    centred = length_normalise(tested - trained.mean(0))
    matrices = {
        "PLDA": plda.scores(tested_low, tested_low),
        "cosine": centred @ centred.T / centred.shape[1],
    }
    layer = name.partition(".")[2]
    chosen = {"others": training.options.others, "resamples": resamples, "seed": training.seed}
    of_layer = ((ANY, layer, way, matrix) for way, matrix in matrices.items())
    return decide(out, name, models, names, of_layer, {"PLDA": "a2"}, **chosen)
