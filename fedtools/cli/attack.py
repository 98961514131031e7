"""The commands that attack what clients send: fedtools attack ..."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import typer

from fedtools.attack.options import A1, A2, Part, SentFeatures
from fedtools.cli.app import app, command, make_group, section_option
from fedtools.cli.federation import EXPERIMENT, NGPU, open_experiment
from fedtools.cli.report import RESAMPLES

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from fedtools.attack.footprint_files import Prints
    from fedtools.attack.verify import Model

Section = TypeVar("Section", bound="DataclassInstance")

attack = make_group("Attack what clients send: what it gives away of speakers.")
app.add_typer(attack, name="attack")
JOB = typer.Option(1, "--job", min=1, help="Which share of the models, from 1.")
NJ = typer.Option(1, "--nj", min=1, help="Into how many shares they are cut.")
UNITS = (
    "clip=1 is the median norm of the round's updates; noise=z has a standard deviation of "
    "z * bound / sqrt(n), n being the update's number of values, and without clip of z times its "
    "own root mean square. BatchNorm statistics are clipped and noised each by a norm of its own."
)
SET = typer.Option([], "--set", help="Change an option of the YAML: a2.width=64.")
# Of either attack.
OTHERS = section_option(
    A1, "others", default=None, help="Trials of two speakers; 0: all. Default: the YAML's."
)
PART = typer.Option(
    "relu",
    help="Of a TDNN's layers: affine, relu, what follows it, or norm, BatchNorm behind that.",
)
DEFENCE = typer.Option(
    "",
    help="What clients do to updates first: clip=1+noise=0.5, bits=8, keep=A,B, mean=4. " + UNITS,
)
UNDEFENDED = typer.Option(
    [],
    metavar="DIR",
    help="Where DIR... are behind a defence: footprints of the same models without it, which an "
    "attacker has who does not know the defence; may come several times.",
)


def show(columns: Sequence[str], rows: Iterable[Mapping[str, object]], left: str) -> None:
    """Print a table whose first columns are aligned as `left` says, and all others to the right."""
    from fedtools.files.tables import format_table

    cells = [[row[name] for name in columns] for row in rows]
    print(format_table(columns, cells, left + "r" * (len(columns) - len(left))), end="")


def given_by(section: Section, **given: object) -> Section:
    """A section of options with those that the command line gives."""
    return replace(section, **{name: one for name, one in given.items() if one is not None})


def rounds_of(given: list[int]) -> list[int]:
    if len(set(given)) < len(given):
        raise typer.BadParameter("a round comes twice", param_hint="--round")
    return sorted(given)


class Read(NamedTuple):
    """The footprints of DIR... OUT, and OUT.

    Attributes:
        prints: in all folders, those of a cohort last.
        undefended: of the same models without the defence; None where there is none.
        attacked, cohort: what is known of the models.
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
    """Read DIR... OUT, the folders of a cohort, and those of footprints without the defence."""
    from fedtools.attack.footprint_files import join, read_footprints, undefended
    from fedtools.attack.verify import known_speakers

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
    clients: str = typer.Option(None, metavar="A,B,...", help="Whose features; all by default."),
    server_data: Path = typer.Option(
        None, metavar="DIR", help="The server's own speech, with feats.scp, for attack IV."
    ),
    text: Path = typer.Option(
        None, metavar="FILE", help="What clients said, if the train data have other labels."
    ),
    config: Path = typer.Option(None, help="YAML with a section features: utterances, epochs."),
    utterances: int = section_option(
        SentFeatures, "utterances", default=None, help="Of a client, at most; default: the YAML's."
    ),
    epochs: int = section_option(
        SentFeatures, "epochs", default=None, help="Of attack IV's decoder; default: the YAML's."
    ),
    resamples: int = RESAMPLES,
    seed: int = typer.Option(0, min=0, help="Of everything random."),
    decoders: Path = typer.Option(
        None, metavar="DIR", help="Keeps decoders, for experiments of the same baseline."
    ),
    ngpu: int = NGPU,
) -> None:
    """Attack the features that DecoupleFL's clients sent.

    How much they give away, by client. I: find the features of a speaker by other audio of the
    speaker. II: sort them by speaker. III: transcribe them with the server's classifier. IV: make
    filterbanks of them again. Intervals are 95 %, over speakers, where there are 10 or more; the
    last rows are means over clients.

    Reads: EXP/round_<number>/features.<client>.ark and .scp; EXP's training data; --server-data;
    --text; section features of the YAML of --config.

    Writes: OUT/attacks.tsv and tsne.<client>.png; the folder of --decoders.

    Example in egs/commonvoice/asr1: fedtools attack features exp/mini/decouplefl/seed0 \
        exp/mini/decouplefl/seed0/attacks --server-data data/mini/server_train --text \
        data/mini/train/text
    """
    from fedtools.attack.figures import COLUMNS
    from fedtools.attack.run import Options
    from fedtools.attack.run import attack_features as run
    from fedtools.files.config import read_section

    chosen = [name for name in clients.split(",") if name] if clients is not None else []
    if clients is not None and not chosen:
        raise typer.BadParameter("no client", param_hint="--clients")
    section = read_section(SentFeatures, config, "features")
    section = given_by(section, utterances=utterances, epochs=epochs)
    options = Options(chosen, server_data, text, section, resamples, seed, decoders)
    rows = run(open_experiment(experiment, ngpu), out, options)
    show(COLUMNS, rows, "lll")


@command("merge", "Attacks", to=attack)
def merge_attacks(
    out: Path = typer.Argument(..., metavar="TABLE", help="A TSV to be written."),
    tables: list[str] = typer.Argument(
        ..., metavar="NAME=ATTACKS.tsv...", help="Those of one name are seeds."
    ),
) -> None:
    """Put attacks on several experiments side by side.

    The table has means over clients, with 95 % intervals.

    Reads: every ATTACKS.tsv, made by fedtools attack features.

    Writes: TABLE.

    Example in egs/commonvoice/asr1: fedtools attack merge exp/mini/attacks.tsv \
        DecoupleFL=exp/mini/decouplefl/seed0/attacks/attacks.tsv
    """
    from fedtools.cli.report import pair
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
        ..., "--round", min=1, help="In which models were sent; may come several times."
    ),
    part: Part = PART,
    highest: int = typer.Option(0, min=0, help="The last layer, from 1; 0: all of them."),
    models: int = typer.Option(16, min=1, help="In memory at a time."),
    defence: str = DEFENCE,
    seed: int = typer.Option(0, min=0, help="Of a defence's noise and groups."),
    job: int = JOB,
    nj: int = NJ,
    ngpu: int = NGPU,
) -> None:
    """Compare models that clients sent with the global one.

    Layer by layer: mean and deviation of the differences of activations on an Indicator, speech of
    anybody.

    Reads: EXP/round_<number>/update.<job>.* and global.safetensors; the folder of --indicator.

    Writes: OUT/footprints.<job>.* and models.<job>.tsv.

    Example in egs/tedlium3/attack1: fedtools attack footprints exp/mini/part2 \
        exp/mini/part2/footprints.relu --indicator data/mini/indicator_iv --round 1
    """
    from fedtools.attack.footprint_files import Look, write_footprints

    if job > nj:
        raise typer.BadParameter(f"--job {job} of --nj {nj}")
    look = Look(rounds_of(round_), part, highest, models, defence, seed)
    federation = open_experiment(experiment, ngpu)
    print(write_footprints(federation, indicator, out, look, job, nj))


@command("a1", "Attacks", to=attack)
def a1(
    folders: list[Path] = typer.Argument(
        ..., metavar="DIR... OUT", help="What attack footprints has written; gets a1.tsv."
    ),
    models: Path = typer.Option(
        None, metavar="TSV", help="model, speaker, gender, talks: trials by recording, too."
    ),
    cohort: list[Path] = typer.Option(
        [],
        metavar="DIR",
        help="Footprints of other people, for the score cohort; may come several times. Default: "
        "of each trial, those in DIR... of neither of its two.",
    ),
    undefended: list[Path] = UNDEFENDED,
    config: Path = typer.Option(None, help="YAML with a section a1: alpha, scores, others."),
    set_: list[str] = SET,
    others: int = OTHERS,
    resamples: int = RESAMPLES,
    seed: int = typer.Option(0, min=0, help="Of everything random."),
) -> None:
    """Tell whether two models are of one speaker, by distance.

    The distance is that of their footprints: as equation 4 of the paper is written (literal), or of
    vectors of unit length (unit); or it is their cosine, centred on models of other people and
    normed by their scores (cohort). With --models, targets of the same recording and of other
    recordings have rows of their own. Intervals are 95 %.

    Behind a defence there are rows of three attackers. ignorant: enrols, and has learnt from,
    undefended models; lazy-informed: enrols defended ones; semi-informed: has learnt from them,
    too, which the score cohort alone does.

    Reads: DIR/footprints.<job>.* and models.<job>.tsv, those of --cohort and --undefended, too; the
    TSV of --models; section a1 of the YAML of --config.

    Writes: OUT/a1.tsv; a score for each trial, and DET curves, beside it.

    Example in egs/tedlium3/attack1: fedtools attack a1 exp/mini/part2/footprints.relu \
        exp/mini/a1.relu.part2 --models data/mini/models.tsv
    """
    from fedtools.attack.a1 import attack as run
    from fedtools.attack.verify import COLUMNS
    from fedtools.files.config import read_section

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
    known: Path = typer.Argument(..., metavar="KNOWN", help="Models of speakers that one knows."),
    attacked: Path = typer.Argument(..., metavar="EXP", help="Models of others, to be attacked."),
    out: Path = typer.Argument(
        ..., metavar="OUT", help="Gets a2.h<layer>.tsv, and what led to it."
    ),
    indicator: Path = typer.Option(
        ..., metavar="DIR", help="Speech of people who have no model: features, or clips."
    ),
    round_: list[int] = typer.Option(
        [1], "--round", min=1, help="In which models were sent; may come several times."
    ),
    layer: int = typer.Option(..., min=1, help="h, the hidden layer that is looked at."),
    part: Part = PART,
    defence: str = DEFENCE,
    config: Path = typer.Option(None, help="YAML with a section a2: network, width, ..."),
    set_: list[str] = SET,
    models: Path = typer.Option(
        None, metavar="TSV", help="model, speaker, gender, talks: trials by recording, too."
    ),
    others: int = OTHERS,
    resamples: int = RESAMPLES,
    seed: int = typer.Option(0, min=0, help="Of everything random."),
    ngpu: int = NGPU,
) -> None:
    """Tell whether two models are of one speaker, by embeddings.

    All is learnt from the models of KNOWN, whose speakers are others than those of EXP: a network
    that makes embeddings from some people's, and LDA, PLDA, cohort and calibration from those of
    the others (a2.network). Speakers need two models: of two clients, or of two rounds. The first
    round began with one global model. Behind a defence there are rows for three attackers:
    ignorant, lazy-informed (enrols defended models) and semi-informed (learns from them, too).

    Reads: update.<job>.* and global.safetensors of KNOWN/round_<number>/ and EXP/round_<number>/;
    the folder of --indicator; the TSV of --models; section a2 of the YAML of --config.

    Writes: OUT/a2.h<layer>.tsv, .yaml, and embeddings in .ark and .scp, with a defence by attacker;
    a score for each trial, and DET curves.

    Example in egs/tedlium3/attack1: fedtools attack a2 exp/mini/part1 exp/mini/part2 exp/mini/a2 \
        --indicator data/mini/indicator_iv --layer 1 --models data/mini/models.tsv \
        --config conf/mini.yaml
    """
    from fedtools.attack.a2 import Look
    from fedtools.attack.a2 import attack as run
    from fedtools.attack.verify import COLUMNS
    from fedtools.attack.xvectors import Training
    from fedtools.files.config import read_section

    options = given_by(read_section(A2, config, "a2", set_), others=others)
    training, look = (
        Training(layer, options, part, seed),
        Look(rounds_of(round_), defence, resamples),
    )
    one, other = (open_experiment(path, ngpu) for path in (known, attacked))
    rows = run(one, other, indicator, models, out, training, look)
    show(COLUMNS, rows, "llllll")
