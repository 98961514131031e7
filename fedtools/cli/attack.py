"""Commands that attack client updates and features: fedtools attack ..."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import typer

from fedtools.attack.options import A1, A2, Part, SentFeatures
from fedtools.cli.app import app, command, make_group, section_option
from fedtools.cli.federation import EXPERIMENT, NGPU, open_experiment
from fedtools.cli.score import RESAMPLES

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from fedtools.attack.speakers.footprint_files import Prints
    from fedtools.attack.speakers.verify import Model

Section = TypeVar("Section", bound="DataclassInstance")

attack = make_group("Attack client messages: what do they reveal about speakers?")
app.add_typer(attack, name="attack")
JOB = typer.Option(1, "--job", min=1, help="Number of this job, from 1.")
NJ = typer.Option(1, "--nj", min=1, help="Number of jobs that share the models.")
UNITS = (
    "clip=1 clips to the median norm of the round's updates. noise=z adds noise of standard "
    "deviation z * B / sqrt(n) to each of the update's n values; B is the bound of clip or, "
    "without clip, the update's norm. keep=A,B does not send the tensors that match A or B. "
    "BatchNorm statistics are clipped and noised separately, each tensor by its own norm."
)
SET = typer.Option(
    [],
    "--set",
    help="Override an option of the section: SECTION.OPTION=VALUE, such as a2.width=64.",
)
# The sections of all attacks on pairs of models have this option with the same default.
OTHERS = section_option(
    A1,
    "others",
    default=None,
    help="Number of different-speaker trials; 0: all. Default: from the YAML file.",
)
PART = typer.Option(
    "relu",
    help="Output of a TDNN layer to compare: relu (after ReLU) or norm (after BatchNorm).",
)
DEFENCE = typer.Option(
    "",
    help="Defence of the clients: clip=1+noise=0.5, bits=8, keep=A,B, mean=4. " + UNITS,
)
UNDEFENDED = typer.Option(
    [],
    metavar="DIR",
    help="If DIR... are of defended models: footprints of the same models without the defence, for "
    "an attacker who does not know of it; may be given several times.",
)


def show(columns: Sequence[str], rows: Iterable[Mapping[str, object]], left: str) -> None:
    """Print a table with its first columns aligned as in `left`, and all others to the right."""
    from fedtools.core.tables import format_table

    cells = [[row[name] for name in columns] for row in rows]
    print(format_table(columns, cells, left + "r" * (len(columns) - len(left))), end="")


def given_by(section: Section, **given: object) -> Section:
    """Return a section of options, overridden by those given on the command line."""
    return replace(section, **{name: one for name, one in given.items() if one is not None})


def rounds_of(given: list[int]) -> list[int]:
    if len(set(given)) < len(given):
        raise typer.BadParameter("a round is duplicated", param_hint="--round")
    return sorted(given)


class Read(NamedTuple):
    """The footprints and the output folder that DIR... OUT names.

    Attributes:
        prints: the footprints in all folders, those of a cohort last.
        undefended: the footprints of the same models without the defence, or None.
        attacked, cohort: the known facts about the models, by name.
        out: the last folder.
    """

    prints: Prints
    undefended: Prints | None
    attacked: dict[str, Model]
    cohort: dict[str, Model]
    out: Path


def read_prints(
    folders: list[Path],
    models: Path | None,
    cohort: Sequence[Path] = (),
    plain: Sequence[Path] = (),
) -> Read:
    """Read the footprints in DIR..., in a cohort's folders, and in those without the defence."""
    from fedtools.attack.speakers.footprint_files import join, read_footprints, undefended
    from fedtools.attack.speakers.verify import known_speakers

    if len(folders) < 2:
        raise typer.BadParameter("at least one folder and OUT", param_hint="DIR... OUT")
    *folders, out = folders
    every = [*folders, *cohort]
    read = [read_footprints(folder) for folder in every]
    prints = join(read, every)
    before = undefended(prints, [read_footprints(folder) for folder in plain], plain)
    known = known_speakers(prints.models, prints.speakers, models)
    given = {name for one in read[len(folders) :] for name in one.models}
    attacked = {name: model for name, model in known.items() if name not in given}
    others = {name: known[name] for name in known if name in given}
    return Read(prints, before, attacked, others, out)


@command("features", "Attacks", to=attack)
def attack_features(
    experiment: Path = EXPERIMENT,
    out: Path = typer.Argument(..., metavar="OUT", help="Gets attacks.tsv, tsne.<client>.png."),
    clients: str = typer.Option(None, metavar="A,B,...", help="Clients to attack; default: all."),
    server_data: Path = typer.Option(
        None, metavar="DIR", help="The server's own speech, with feats.scp, for attack IV."
    ),
    text: Path = typer.Option(
        None, metavar="FILE", help="True transcripts, if the training data have other labels."
    ),
    config: Path = typer.Option(None, help="YAML with a section features: utterances, epochs."),
    utterances: int = section_option(
        SentFeatures,
        "utterances",
        default=None,
        help="Maximum number of utterances of a client. Default: from the YAML file.",
    ),
    epochs: int = section_option(
        SentFeatures,
        "epochs",
        default=None,
        help="Training epochs of attack IV's decoder. Default: from the YAML file.",
    ),
    resamples: int = RESAMPLES,
    seed: int = typer.Option(0, min=0, help="Random seed."),
    decoders: Path = typer.Option(
        None, metavar="DIR", help="Keep decoders there, for experiments with the same baseline."
    ),
    ngpu: int = NGPU,
) -> None:
    """Attack the features sent by DecoupleFL's clients.

    Four attacks and a probe measure, by client, how much the features reveal. I: find the features
    of a speaker, given the same or other audio of that speaker. II: cluster the features by
    speaker. III: transcribe them with the server's classifier. IV: reconstruct filterbanks from
    them. Probe: name the speaker, with a classifier trained on other utterances. Intervals are
    95 %, over speakers, where there are 10 or more. From 2 to 9 speakers, EER and shares of
    utterances have the exact binomial interval of as many trials, and other measures none. The last
    rows are means over clients; for such an interval, all count as if as small as the smallest.

    Reads: EXP/round_<number>/features.<client>.ark and .scp; EXP's training data; --server-data;
    --text; section features of the YAML of --config.

    Writes: OUT/attacks.tsv and tsne.<client>.png; the folder of --decoders.

    Example in egs/commonvoice/asr1: fedtools attack features exp/mini/decouplefl/seed0 \
        exp/mini/decouplefl/seed0/attacks --server-data data/mini/server_train --text \
        data/mini/train/text
    """
    from fedtools.attack.features.attack import Options
    from fedtools.attack.features.attack import attack_features as run
    from fedtools.attack.features.figures import COLUMNS
    from fedtools.core.config import read_section

    chosen = [name for name in clients.split(",") if name] if clients is not None else []
    if clients is not None and not chosen:
        raise typer.BadParameter("names no client", param_hint="--clients")
    section = read_section(SentFeatures, config, "features")
    section = given_by(section, utterances=utterances, epochs=epochs)
    options = Options(chosen, server_data, text, section, resamples, seed, decoders)
    rows = run(open_experiment(experiment, ngpu), out, options)
    show(COLUMNS, rows, "lll")


@command("merge", "Attacks", to=attack)
def merge_attacks(
    out: Path = typer.Argument(..., metavar="TABLE", help="The TSV to write."),
    tables: list[str] = typer.Argument(
        ..., metavar="NAME=ATTACKS.tsv...", help="Tables with the same name are seeds."
    ),
) -> None:
    """Merge attack tables of several experiments into one.

    The table has means over clients, with 95 % intervals over speakers, and over seeds where there
    are several.

    Reads: every ATTACKS.tsv, written by fedtools attack features.

    Writes: TABLE.

    Example in egs/commonvoice/asr1: fedtools attack merge exp/mini/attacks.tsv \
        DecoupleFL=exp/mini/decouplefl/seed0/attacks/attacks.tsv
    """
    from fedtools.cli.app import pair
    from fedtools.report.attacks import merge_attacks as merge

    form = "NAME=ATTACKS.tsv"
    merge([(n, Path(path)) for n, path in (pair(text, "TABLE", form) for text in tables)], out)
    print(out)


@command("footprints", "Attacks", to=attack)
def footprints(
    experiment: Path = EXPERIMENT,
    out: Path = typer.Argument(..., metavar="OUT", help="Gets footprints.*, models.<job>.tsv."),
    indicator: Path = typer.Option(
        ..., metavar="DIR", help="Speech of people who have no model: features, or clips."
    ),
    round_: list[int] = typer.Option(
        ..., "--round", min=1, help="Round of the models to attack; may be given several times."
    ),
    part: Part = PART,
    highest: int = typer.Option(0, min=0, help="The last layer to compare, from 1; 0: all layers."),
    models: int = typer.Option(16, min=1, help="Number of models in memory at a time."),
    defence: str = DEFENCE,
    seed: int = typer.Option(0, min=0, help="Random seed of a defence's noise and groups."),
    job: int = JOB,
    nj: int = NJ,
    ngpu: int = NGPU,
) -> None:
    """Compare clients' models with the global model.

    A footprint holds, layer by layer, the mean and the standard deviation of the differences
    between the activations of the two models on an Indicator, speech of people who have no model.

    Reads: EXP/round_<number>/update.<job>.* and global.safetensors; the folder of --indicator.

    Writes: OUT/footprints.<job>.* and models.<job>.tsv.

    Example in egs/tedlium3/attack1: fedtools attack footprints exp/mini/part2 \
        exp/mini/part2/footprints.relu --indicator data/mini/indicator_iv --round 1
    """
    from fedtools.attack.speakers.footprint_files import FootprintSetup, write_footprints

    if job > nj:
        raise typer.BadParameter(f"--job {job} of --nj {nj}")
    setup = FootprintSetup(rounds_of(round_), part, highest, models, defence, seed)
    federation = open_experiment(experiment, ngpu)
    print(write_footprints(federation, indicator, out, setup, job, nj))


@command("a1", "Attacks", to=attack)
def a1(
    folders: list[Path] = typer.Argument(
        ...,
        metavar="DIR... OUT",
        help="Folders written by attack footprints; the folder that gets a1.tsv.",
    ),
    models: Path = typer.Option(
        None,
        metavar="TSV",
        help="Columns model, speaker, gender, talks: also report trials by recording.",
    ),
    cohort: list[Path] = typer.Option(
        [],
        metavar="DIR",
        help="Footprints of other people, for the score cohort; may be given several times. "
        "Default: the speakers in DIR... are split into five parts, and a trial is scored with the "
        "parts that have neither of its two.",
    ),
    undefended: list[Path] = UNDEFENDED,
    config: Path = typer.Option(None, help="YAML with a section a1: alpha, scores, others."),
    set_: list[str] = SET,
    others: int = OTHERS,
    resamples: int = RESAMPLES,
    seed: int = typer.Option(0, min=0, help="Random seed."),
) -> None:
    """Test whether two models share a speaker, by distance.

    The score is the distance of the two footprints, either exactly as in equation 4 of the paper
    (literal) or between vectors of unit length (unit), or their cosine, centred on models of other
    people and normalised by the scores against these models (cohort). With --models, target trials
    within one recording and across recordings have separate rows. Intervals are 95 %.

    With a defence, there are rows for three attackers. The ignorant one enrols with, and has learnt
    from, undefended models. The lazy-informed one enrols with defended models. The semi-informed
    one has also learnt from defended models; of the scores, only cohort learns from models.

    Reads: footprints.<job>.* and models.<job>.tsv in each DIR and in the folders of --cohort and
    --undefended; the TSV of --models; section a1 of the YAML of --config.

    Writes: OUT/a1.tsv, and next to it a score for each trial, and DET curves.

    Example in egs/tedlium3/attack1: fedtools attack a1 exp/mini/part2/footprints.relu \
        exp/mini/a1.relu.part2 --models data/mini/models.tsv
    """
    from fedtools.attack.speakers.a1 import attack as run
    from fedtools.attack.speakers.verify import COLUMNS
    from fedtools.core.config import read_section

    options = given_by(read_section(A1, config, "a1", set_), others=others)
    read = read_prints(folders, models, cohort, undefended)
    rows = run(
        read.prints,
        read.attacked,
        read.out,
        options,
        cohort=read.cohort,
        undefended=read.undefended,
        resamples=resamples,
        seed=seed,
    )
    show(COLUMNS, rows, "llllll")


@command("a2", "Attacks", to=attack)
def a2(
    known: Path = typer.Argument(..., metavar="KNOWN", help="Experiment whose speakers are known."),
    attacked: Path = typer.Argument(..., metavar="EXP", help="Experiment to attack."),
    out: Path = typer.Argument(..., metavar="OUT", help="Gets a2.h<layer>.tsv, and embeddings."),
    indicator: Path = typer.Option(
        ..., metavar="DIR", help="Speech of people who have no model: features, or clips."
    ),
    round_: list[int] = typer.Option(
        [1], "--round", min=1, help="Round of the models to attack; may be given several times."
    ),
    layer: int = typer.Option(..., min=1, help="Number h of the hidden layer to attack."),
    part: Part = PART,
    defence: str = DEFENCE,
    config: Path = typer.Option(None, help="YAML with a section a2: network, width, ..."),
    set_: list[str] = SET,
    models: Path = typer.Option(
        None,
        metavar="TSV",
        help="Columns model, speaker, gender, talks: also report trials by recording.",
    ),
    others: int = OTHERS,
    resamples: int = RESAMPLES,
    seed: int = typer.Option(0, min=0, help="Random seed."),
    ngpu: int = NGPU,
) -> None:
    """Test whether two models share a speaker, by embeddings.

    The attack learns from the models of KNOWN, whose speakers are known and not in EXP. The models
    of some speakers (a fraction, a2.network) train a network that computes embeddings; those of the
    others train LDA, PLDA, cohort and calibration. A speaker needs two models, from two clients or
    two rounds. Both experiments must have had the same global model at the start of the first
    --round. With a defence, there are rows for three attackers: ignorant, lazy-informed (enrols
    with defended models) and semi-informed (also learns from defended models).

    Reads: update.<job>.* and global.safetensors of KNOWN/round_<number>/ and EXP/round_<number>/;
    the folder of --indicator; the TSV of --models; section a2 of the YAML of --config.

    Writes: OUT/a2.h<layer>.tsv and .yaml; embeddings in .ark and .scp (with a defence, one pair for
    each attacker); a score for each trial, and DET curves.

    Example in egs/tedlium3/attack1: fedtools attack a2 exp/mini/part1 exp/mini/part2 exp/mini/a2 \
        --indicator data/mini/indicator_iv --layer 1 --models data/mini/models.tsv \
        --config conf/mini.yaml
    """
    from fedtools.attack.speakers.a2 import A2Setup
    from fedtools.attack.speakers.a2 import attack as run
    from fedtools.attack.speakers.verify import COLUMNS
    from fedtools.attack.speakers.xvectors import Training
    from fedtools.core.config import read_section

    options = given_by(read_section(A2, config, "a2", set_), others=others)
    training, setup = (
        Training(layer, options, part, seed),
        A2Setup(rounds_of(round_), defence, resamples),
    )
    one, other = (open_experiment(path, ngpu) for path in (known, attacked))
    rows = run(one, other, indicator, models, out, training, setup)
    show(COLUMNS, rows, "llllll")
