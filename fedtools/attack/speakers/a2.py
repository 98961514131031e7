"""Attack A2: speaker embeddings of personalised models, compared by PLDA and by the cosine.

Tomashenko et al. (ICASSP 2022), section 3.2.2. Everything is learnt from some people's models
(Part-1), and decides trials of other people's models (Part-2). The people of Part-1 are split in
two: the network is trained on one half, and LDA, PLDA, cohort and calibration are learnt from the
other. The network has never seen the people of the second half, as it has never seen those under
attack; embeddings of people it was trained on would lie further apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fedtools.attack.defences import Defence, defended, groups_of
from fedtools.attack.knowledge import ANY, NO_DEFENCE, Versions, attackers
from fedtools.attack.speakers.backend import PLDA, Calibrated, Learnt, deal
from fedtools.attack.speakers.verify import decide, known_speakers, read_models
from fedtools.attack.speakers.xvectors import Training, View, XVectors, embeddings, train_xvectors
from fedtools.attack.victims import Probe, State, Victims, make_probe, sound_victims
from fedtools.core.config import write_yaml
from fedtools.core.errors import UserError
from fedtools.core.recipe_sections import Bootstrap
from fedtools.core.seeds import seed64
from fedtools.data.ark import write_ark
from fedtools.data.datadir import write_table
from fedtools.federation.federation import Federation
from fedtools.tasks.base import as_configured

# The least number of people with two models of one speaker, whom the network "is", or "is not",
# trained on. Of six people, scores of two are calibrated with PLDA of the other four: PLDA of two
# would have a single dimension, in which vectors of one length carry no information.
_LEAST = {"is": 2, "is not": 6}


@dataclass(frozen=True)
class A2Setup:
    """Rounds, defence and resamples of an attack.

    Attributes:
        rounds: rounds of both experiments in which models were sent.
        defence: defence of the clients under attack, see `fedtools.attack.defences`.
        resamples: as in attack A1.
    """

    rounds: Sequence[int] = (1,)
    defence: str = ""
    resamples: int = Bootstrap.resamples


@dataclass(frozen=True)
class Side:
    """Models of one experiment.

    Attributes:
        federation: the experiment.
        victims: models that its clients sent.
        probes: round -> probe of its models.
    """

    federation: Federation
    victims: Victims
    probes: Mapping[int, Probe]

    @classmethod
    def open(
        cls, federation: Federation, victims: Victims, indicator: Path, setup: A2Setup, held: int
    ) -> Side:
        """Open an experiment's models with one probe per round.

        Raises:
            UserError: if a speaker of the Indicator is in the training data.
        """
        # An embedding belongs to one utterance, so clips are not batched.
        probes = {
            number: make_probe(federation, number, indicator, held, clips_at_once=1)
            for number in setup.rounds
        }
        return cls(federation, victims, probes)

    def of(self, speakers: set[str]) -> Side:
        """Return the models of some speakers alone."""
        own = self.victims
        kept = {
            name: one for name, one in own.messages.items() if own.speakers.get(name) in speakers
        }
        return Side(self.federation, Victims(kept, own.refused, own.speakers), self.probes)

    def views(
        self, defence: str, seed: int, within: Mapping[str, object] | None = None
    ) -> Iterator[View]:
        """Yield the models of each round that have a speaker, behind a defence.

        Args:
            seed: random seed of the defence's noise and groups, which are of these models alone.
            within: see `fedtools.attack.defences.Defended`.
        """
        own = self.victims
        for number, probe in self.probes.items():
            folder = self.federation.experiment.round(number).path
            speakers = {
                name: own.speakers[name]
                for name, message in own.messages.items()
                if name in own.speakers and message.path.parent == folder
            }
            states: Callable[[Sequence[str]], Iterator[tuple[str, State]]] = own.states
            if defence:
                states = defended(self.federation, own, number, defence, seed, within).states
            yield View(probe, states, speakers)


@dataclass(frozen=True)
class Attacker:
    """Embeddings and scorer of one attacker.

    Attributes:
        name: see `fedtools.attack.knowledge`.
        learnt: name -> embedding of each model it has learnt from, a mean over utterances.
        enrolled, tested: likewise for the models under attack, as the attacker enrols them, and as
            clients sent them.
        scorer: compares embeddings.
    """

    name: str
    learnt: Mapping[str, np.ndarray]
    enrolled: Mapping[str, np.ndarray]
    tested: Mapping[str, np.ndarray]
    scorer: Calibrated


@as_configured
def attack(
    known: Federation,
    attacked: Federation,
    indicator: Path,
    table: Path | None,
    out: Path,
    training: Training,
    setup: A2Setup = A2Setup(),
) -> list[Mapping[str, object]]:
    """Learn from one experiment's models, decide trials of another's; write OUT/a2.<layer>.tsv.

    Args:
        known: experiment whose speakers the attacker knows.
        attacked: experiment of other people. In the first of the rounds both began with the same
            global model; in later rounds, differences are to each experiment's own global model.
        indicator: speech of people in neither experiment.
        table: what is known of the attacked models, and optionally of the known ones, see
            `verify.read_models`; None: their speakers.
        out: directory that also gets embeddings, trials and scores.

    Raises:
        UserError: if the experiments began with different models, share a speaker with each other
            or with the Indicator, or too few speakers have two models.
    """
    Defence.parse(setup.defence)
    first = setup.rounds[0]
    if known.experiment.round(first).start_sum() != attacked.experiment.round(first).start_sum():
        problem = f"round {first} did not begin with the same model as in {known.experiment.path}"
        raise UserError(problem, path=attacked.experiment.path)
    ours, theirs = (sound_victims(one, setup.rounds) for one in (known, attacked))
    _check_apart(known, ours, attacked, theirs, indicator)
    people = _people(ours, table)
    trained, left = _part(ours, people, training, known.where)
    sent = [name for name in theirs.messages if name in theirs.speakers]
    described = known_speakers(sent, [theirs.speakers[name] for name in sent], table)
    held = training.options.held
    side = Side.open(known, ours, indicator, setup, held)
    under_attack = Side.open(attacked, theirs, indicator, setup, held)
    found = list(_attackers(side.of(trained), side.of(left), under_attack, people, training, setup))
    names = sorted(set.intersection(*(one.tested.keys() & one.enrolled.keys() for one in found)))
    models = {one: described[one] for one in names}
    name = f"a2.h{training.layer}"
    for path in out.glob(f"{name}.*"):
        # An earlier run may have written files of attackers that this run does not have.
        path.unlink()
    write_yaml(out / f"{name}.yaml", _chosen(training, setup))
    groups = groups_of(attacked, theirs, setup.rounds, setup.defence, training.seed)
    versions = Versions(names, bool(_defence(setup)), groups)
    for one in found:
        _write_embeddings(out / (name if one.name == ANY else f"{name}.{one.name}"), one)
    return decide(
        *(out, name, models, names, _scored(found, versions, training), {PLDA: "a2"}),
        defence=setup.defence or NO_DEFENCE,
        others=training.options.others,
        resamples=setup.resamples,
        seed=training.seed,
    )


def _check_apart(
    known: Federation, ours: Victims, attacked: Federation, theirs: Victims, indicator: Path
) -> None:
    """Raise a `UserError` if both share a speaker, or one has no speaker with two models."""
    for federation, one in ((known, ours), (attacked, theirs)):
        sent = _speakers(one)
        if len(sent) == len(set(sent)):
            remedy = "give a second --round, so that each client has two models"
            raise UserError("no speaker has two models", path=federation.where, remedy=remedy)
    if shared := set(ours.speakers.values()) & set(theirs.speakers.values()):
        problem = f"{min(shared)!r} is in two of the experiments and the Indicator"
        raise UserError(problem, path=indicator, remedy="give disjoint speakers")
    if duplicates := ours.messages.keys() & theirs.messages.keys():
        raise UserError(f"{min(duplicates)!r} is also in another experiment", path=attacked.where)


def _speakers(victims: Victims) -> list[str]:
    """Return the speaker of each model that has one."""
    return [victims.speakers[name] for name in victims.messages if name in victims.speakers]


def _people(victims: Victims, table: Path | None) -> dict[str, str]:
    """Return speaker -> person; the speaker's own name where the table has no person."""
    known = read_models(table) if table else {}
    found = {speaker: speaker for speaker in victims.speakers.values()}
    for name, speaker in victims.speakers.items():
        if name in known and known[name].speaker == speaker and known[name].person:
            found[speaker] = known[name].person
    return found


def _part(
    victims: Victims, people: Mapping[str, str], training: Training, where: Path
) -> tuple[set[str], set[str]]:
    """Split speakers into those that the network is trained on, and those that it never sees.

    People are split by the seed; those with two models of a speaker are split in the same
    proportion.

    Raises:
        UserError: if either part has too few people with two models of a speaker.
    """
    sent = _speakers(victims)
    most = _most(sent, people)
    order = sorted(most, key=lambda one: (most[one] < 2, seed64(training.seed, "a2", one), one))
    share = training.options.network
    trained = {one for at, one in enumerate(order) if int((at + 1) * share) > int(at * share)}
    seen = {speaker for speaker in sent if people[speaker] in trained}
    left = set(sent) - seen
    _need([one for one in sent if one in seen], people, "is", where)
    _need([one for one in sent if one in left], people, "is not", where)
    return seen, left


def _most(sent: Sequence[str], people: Mapping[str, str]) -> dict[str, int]:
    """Return person -> the largest number of models that one of the person's speakers has.

    Args:
        sent: the speaker of each model.
    """
    found = dict[str, int]()
    for speaker, count in Counter(sent).items():
        found[people[speaker]] = max(count, found.get(people[speaker], 0))
    return found


def _need(sent: Sequence[str], people: Mapping[str, str], kind: str, where: Path) -> None:
    """Raise a `UserError` if too few people have two models of a speaker.

    Args:
        sent: the speaker of each model.
        people: speaker -> person.
        kind: whether the network "is", or "is not", trained on these models.
        where: the experiment, for the message.
    """
    count = sum(many > 1 for many in _most(sent, people).values())
    if count < _LEAST[kind]:
        problem = f"the network {kind} trained on {count} people with two models of a speaker"
        remedy = f"{_LEAST[kind]} are needed: give models of more people, or change a2.network"
        raise UserError(problem, path=where, remedy=remedy)


def _attackers(
    trained: Side,
    left: Side,
    attacked: Side,
    people: Mapping[str, str],
    training: Training,
    setup: A2Setup,
) -> Iterator[Attacker]:
    """Yield all attackers of a defence, or the only attacker if there is no defence.

    Args:
        trained: models of the people that the network is trained on.
        left: models of the people that everything else is learnt from.
        attacked: models under attack.
        people: the person of each speaker in `trained` and `left`.
    """
    defence = _defence(setup)
    everybody = attackers(bool(defence))
    # The attacker does not know the random numbers of the clients under attack.
    guessed = seed64(training.seed, "defence of those known")
    # Its own means are of people of one part, so that no back end that calibrates scores has learnt
    # from an update that they contain.
    own = left.victims.speakers
    least = Defence.parse(defence).mean
    parts = deal([people[own[name]] for name in left.victims.messages], training.seed, least)
    within = {name: parts[people[own[name]]] for name in left.victims.messages}
    for learns in (False, True):
        some = [one for one in everybody if one.learns == learns]
        if not some:
            continue
        of_known = (defence if learns else "", guessed)
        network = train_xvectors(list(trained.views(*of_known)), training)
        embedded = dict(_embedded(left.views(*of_known, within), network, training))
        about = left.federation, left.victims, setup.rounds, *of_known, within
        learnt = _learnt(left, embedded, people, within, groups_of(*about))
        scorer = Calibrated.learn(learnt, training.options.dimension, training.seed)
        means = {name: rows.mean(0, dtype=np.float64) for name, rows in embedded.items()}
        del embedded, learnt

        def averaged(defence: str, network: XVectors = network) -> dict[str, np.ndarray]:
            some = _embedded(attacked.views(defence, training.seed), network, training)
            return {name: rows.mean(0, dtype=np.float64) for name, rows in some}

        tested = averaged(defence)
        for one in some:
            enrolled = tested if one.enrols else averaged("")
            yield Attacker(one.name, means, enrolled, tested, scorer)


def _learnt(
    left: Side,
    embedded: Mapping[str, np.ndarray],
    people: Mapping[str, str],
    parts: Mapping[str, int],
    groups: Mapping[str, Sequence[str]],
) -> Learnt:
    """Return embeddings of models that everything but the network is learnt from.

    Raises:
        UserError: if too few are left, since some models may have been refused.
    """
    names = list(embedded)
    speakers = [left.victims.speakers[name] for name in names]
    _need(speakers, people, "is not", left.federation.where)
    return Learnt(
        np.stack(list(embedded.values())),
        np.array(speakers),
        np.array([people[one] for one in speakers]),
        np.array([parts[name] for name in names]),
        Versions(names, False, groups).shared,
    )


def _defence(setup: A2Setup) -> str:
    """Return the defence; "" for none."""
    return "" if setup.defence == NO_DEFENCE else setup.defence


def _embedded(
    views: Iterator[View], network: XVectors, training: Training
) -> Iterator[tuple[str, np.ndarray]]:
    for view in views:
        yield from embeddings(view, network, training)


def _scored(
    found: Sequence[Attacker], versions: Versions, training: Training
) -> Iterator[tuple[str, str, str, np.ndarray]]:
    """Yield attacker, layer, kind of score, and scores of all pairs, as `decide` takes them."""
    for one, known in zip(found, attackers(versions.defended), strict=True):
        sides = (
            np.stack([side[name] for name in versions.names]) for side in (one.enrolled, one.tested)
        )
        for way, matrix in one.scorer.scores(*sides).items():
            yield one.name, f"h{training.layer}", way, versions.seen(matrix, known)


def _write_embeddings(path: Path, one: Attacker) -> None:
    """Write the embeddings that an attacker has learnt from and enrolled."""
    vectors = {**one.learnt, **one.enrolled}
    matrices = ((name, vectors[name][None]) for name in sorted(vectors))
    places = write_ark(path.with_name(f"{path.name}.ark"), matrices)
    write_table(path.with_name(f"{path.name}.scp"), places)


def _chosen(training: Training, setup: A2Setup) -> dict[str, object]:
    """Return the options that the result depends on, by name."""
    options = asdict(training.options)
    network = {name: options[name] for name in ("width", "epochs", "utterances", "frames", "rate")}
    decision = {name: options[name] for name in ("network", "held", "dimension", "others")}
    place = {"layer": training.layer, "part": training.part, "defence": setup.defence or NO_DEFENCE}
    drawn = {"seed": training.seed, "rounds": list(setup.rounds)}
    return {**place, **network, **drawn, **decision, "resamples": setup.resamples}
