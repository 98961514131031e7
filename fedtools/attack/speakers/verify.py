"""Speaker verification trials of personalised models, and figures of how scores decide them.

Tomashenko et al. (ICASSP 2022), section 4.3: target trials are all pairs of models of one speaker,
non-target trials are drawn at random. Two models of one recording also share its channel, so that
an attack may recognise the channel and not the speaker. Therefore targets are also split by whether
they share a recording.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from fedtools.attack.knowledge import ANY, NO_DEFENCE
from fedtools.attack.options import A1
from fedtools.core.atomic import write_text
from fedtools.core.errors import UserError
from fedtools.core.seeds import generator
from fedtools.core.tables import read_tsv, write_tsv
from fedtools.data.datadir import write_table
from fedtools.score.calibration import cllr, linkability, min_cllr, min_dcf
from fedtools.score.legal import Risk, risk
from fedtools.score.trials import Trials
from fedtools.score.verification import (
    MIN_TARGETS,
    det_curve,
    estimate_error_rate,
    true_positive_rate,
)

COLUMNS = (
    "attack", "defence", "attacker", "layer", "scores", "trials", "EER%", "low", "high", "minDCF",
    "Cllr", "minCllr", "Dsys", "TPR@0.1%", "TPR@1%", "targets", "others", "linked%", "singled%",
    "speakers",
)  # fmt: skip
# The columns of a table of models that trials depend on, as local/tedlium3/prepare.py writes it.
MODEL_COLUMNS = ("model", "speaker", "gender", "talks")
# Kinds of trials, which differ by the targets: all pairs of models of one speaker, those that share
# a recording, and those that share none.
KINDS = EASY, SAME, OTHER = "easy", "same", "other"
# Scores that are log-likelihood ratios. Those of A1 are distances, which have no Cllr.
RATIOS = ("PLDA", "PLDA, cohort", "regression")
# Number of points of a DET curve, enough for a plot.
_POINTS = 1000


@dataclass(frozen=True)
class Model:
    """Properties of a model that trials depend on; "" and no talks where they are unknown.

    A speaker may stand for a talk; then several speakers may be one person.
    """

    speaker: str
    gender: str = ""
    talks: frozenset[str] = frozenset()
    person: str = ""


def read_models(path: str | Path) -> dict[str, Model]:
    """Read a table of models; it may have `person` and others in addition to `MODEL_COLUMNS`."""
    rows = read_tsv(path, None)
    if not rows or not set(MODEL_COLUMNS) <= rows[0].keys():
        raise UserError(f"expected the columns {', '.join(MODEL_COLUMNS)}", path=path, line=1)
    found = {}
    for line, row in enumerate(rows, 2):
        if row["model"] in found:
            raise UserError(f"{row['model']!r} is duplicated", path=path, line=line)
        gender = row["gender"] if row["gender"] in ("m", "f") else ""
        talks = frozenset(row["talks"].split(",")) - {""}
        found[row["model"]] = Model(row["speaker"], gender, talks, row.get("person", ""))
    return found


def make_trials(
    models: Mapping[str, Model], *, others: int = A1.others, seed: int = 0
) -> dict[str, Trials]:
    """Return pairs of models, by `KINDS`; a kind without a target trial is left out.

    All kinds have the same trials of two speakers, so that differences of their error rates are due
    to the targets. Models without known recordings are targets of kind `easy` alone.

    Args:
        models: models by name; the only model of a speaker is in no target trial. Two models of one
            person with two speakers are not a trial.
        others: number of trials of two speakers, drawn at random; all if there are no more, or with
            0.
        seed: random seed of the draw.

    Raises:
        UserError: if no trial of one speaker, or of two, is left.
    """
    targets: dict[str, list[tuple[str, str]]] = {kind: [] for kind in KINDS}
    rest = []
    for one, other in combinations(sorted(models), 2):
        a, b = models[one], models[other]
        if a.speaker == b.speaker:
            targets[EASY].append((one, other))
            if a.talks and b.talks:
                targets[SAME if a.talks & b.talks else OTHER].append((one, other))
        elif not a.person or a.person != b.person:
            rest.append((one, other))
    if others and others < len(rest):
        drawn = generator(seed, "trials", 0).choice(len(rest), others, replace=False)
        rest = [rest[index] for index in np.sort(drawn)]
    if not targets[EASY] or not rest:
        kind = "two speakers" if targets[EASY] else "one speaker"
        remedy = "give more models: of each speaker two, trained on less speech or in two rounds"
        if targets[EASY]:
            remedy = "give the models of several people"
        raise UserError(f"no pair of models of {kind}", remedy=remedy)
    return {kind: _trials(own, rest) for kind, own in targets.items() if own}


def _trials(targets: Sequence[tuple[str, str]], others: Sequence[tuple[str, str]]) -> Trials:
    pairs = sorted([(*pair, True) for pair in targets] + [(*pair, False) for pair in others])
    enrolled, test, same = zip(*pairs, strict=True)
    return Trials(enrolled, test, np.array(same))


def write_trials(
    out: Path, models: Mapping[str, Model], others: int, seed: int
) -> dict[str, Trials]:
    """Make trials and write OUT/trials.<kind> and model2speaker; delete files of old kinds."""
    trials = make_trials(models, others=others, seed=seed)
    write_table(out / "model2speaker", {name: one.speaker for name, one in models.items()})
    for kind in KINDS:
        path = out / f"trials.{kind}"
        if kind in trials:
            trials[kind].write(path)
        elif path.exists():
            for old in (*out.glob(f"*.{kind}"), *out.glob(f"*.{kind}.det.tsv")):
                old.unlink()
    return trials


def judge(
    scores: np.ndarray,
    trials: Trials,
    speakers: Mapping[str, str],
    *,
    resamples: int,
    seed: int,
    ratios: bool = False,
) -> dict[str, object]:
    """Return the figures of some trials, as text.

    Args:
        scores: (trials,), large where the speakers seem the same.
        speakers: model -> speaker.
        resamples, seed: number and random seed of resamples for the interval of the error rate.
        ratios: whether scores are natural log-likelihood ratios; other scores have no Cllr.
    """
    rate = estimate_error_rate(
        scores, trials.targets, trials.speakers(speakers), resamples=resamples, seed=seed
    )
    few = rate.targets < MIN_TARGETS
    return {
        # With few trials, only the interval is reported.
        "EER%": "-" if few else f"{rate.value:.2f}",
        "low": f"{rate.low:.2f}",
        "high": f"{rate.high:.2f}",
        "minDCF": f"{min_dcf(scores, trials.targets):.3f}",
        "Cllr": f"{cllr(scores, trials.targets):.3f}" if ratios else "-",
        "minCllr": f"{min_cllr(scores, trials.targets):.3f}",
        "Dsys": _known(linkability(_finite(scores), trials.targets), 3),
        "TPR@0.1%": _known(true_positive_rate(scores, trials.targets, 0.001), 1),
        "TPR@1%": _known(true_positive_rate(scores, trials.targets, 0.01), 1),
        "targets": rate.targets,
        "others": rate.others,
    }


def decide(
    out: Path,
    attack: str,
    models: Mapping[str, Model],
    names: Sequence[str],
    matrices: Iterable[tuple[str, str, str, np.ndarray]],
    main: Mapping[str, str],
    *,
    kept: Callable[[str], bool] = lambda _: True,
    defence: str = NO_DEFENCE,
    others: int,
    resamples: int,
    seed: int,
) -> list[Mapping[str, object]]:
    """Decide trials of models by scores of all pairs; write trials, scores and OUT/<attack>.tsv.

    Args:
        attack: name of the attack, for files and tables.
        models: models with a known speaker.
        names: names of the matrices' rows and columns.
        matrices: an attacker of `fedtools.attack.knowledge`, or "-" without a defence; a layer, the
            kind of scores, and scores, (models, models), large where the speakers seem the same.
            Rows are enrolled. A pair whose score is NaN is not a trial.
        main: kinds of scores that are also written for each trial -> prefix of their files.
        kept: returns whether the scores of a layer are written for each trial.
        defence: defence of the clients, see `fedtools.attack.defences`.
        others, resamples, seed: see `make_trials` and `judge`.
    """
    trials = write_trials(out, models, others, seed)
    speakers = {name: model.speaker for name, model in models.items()}
    rows = []
    alone = _one_of_each_person(models)
    place = [index for index, name in enumerate(names) if speakers.get(name) in alone]
    owners = [speakers[names[index]] for index in place]
    missing = dict[tuple[str, str], None]()
    for attacker, layer, way, matrix in matrices:
        # All models count, whatever recordings they share, but each person only once.
        pairs = matrix[np.ix_(place, place)]
        known = not np.isnan(pairs).any()
        legal = _legal(risk(pairs, owners) if known else Risk(np.nan, np.nan, len(alone)))
        for kind, every in trials.items():
            some, scores = _scored(every, every.scores(matrix, names, names))
            if not some.targets.any() or some.targets.all():
                missing[kind, attacker] = None
                continue
            figures = judge(
                scores, some, speakers, resamples=resamples, seed=seed, ratios=way in RATIOS
            )
            figures |= legal if kind == EASY else dict.fromkeys(legal, "-")
            about = {"defence": defence, "attacker": attacker, "layer": layer, "scores": way}
            rows.append({**about, "trials": kind, **figures})
            if way in main and kept(layer):
                who = "" if attacker == ANY else f".{attacker}"
                write_scores(out / f"{main[way]}.{layer}{who}.{kind}", some, scores)
    _report_missing(missing, attack)
    return write_figures(out, attack, rows)


def _report_missing(missing: Iterable[tuple[str, str]], attack: str) -> None:
    """Report on stderr which trials of which attacker have no figures."""
    for kind, attacker in missing:
        who = f"{attacker} attacker" if attacker != ANY else "any attacker"
        problem = "no figures: all pairs of one speaker, or all of two, share an update"
        print(f"{attack}, {kind} trials, {who}: {problem}", file=sys.stderr)


def _scored(trials: Trials, scores: np.ndarray) -> tuple[Trials, np.ndarray]:
    """Return the trials that have a score, and their scores."""
    if not (missing := np.isnan(scores)).any():
        return trials, scores
    place = np.flatnonzero(~missing)
    sides = ([side[index] for index in place] for side in (trials.enrolled, trials.test))
    return Trials(*sides, trials.targets[place]), scores[place]


def _one_of_each_person(models: Mapping[str, Model]) -> set[str]:
    """Return one speaker per person: the first talk, since the others would be close to it."""
    first: dict[str, str] = {}
    for model in sorted(models.values(), key=lambda one: one.speaker):
        first.setdefault(model.person or model.speaker, model.speaker)
    return set(first.values())


def write_figures(
    out: Path, attack: str, rows: Iterable[Mapping[str, object]]
) -> list[Mapping[str, object]]:
    """Write OUT/<attack>.tsv; warn where there are few target trials."""
    rows = [{"attack": attack, "defence": NO_DEFENCE, "attacker": ANY, **row} for row in rows]
    write_tsv(out / f"{attack}.tsv", COLUMNS, rows)
    for kind in sorted({row["trials"] for row in rows if int(row["targets"]) < MIN_TARGETS}):
        print(
            f"{attack}, {kind} trials: fewer than {MIN_TARGETS} target trials, so that only "
            "intervals of the error rate are reported",
            file=sys.stderr,
        )
    return rows


def draw_rates(path: Path, rows: Sequence[Mapping[str, object]], title: str) -> None:
    """Draw equal error rates by layer, on trials of any two speakers, with their intervals.

    Args:
        path: the PNG file.
        rows: rows from `decide`, with one kind of scores per layer.
    """
    from fedtools.core.drawing import COLOURS, drawing

    own = [row for row in rows if row["trials"] == EASY]
    low, high = (np.array([float(str(row[name])) for row in own]) for name in ("low", "high"))
    # With few trials there is no rate: the middle of the interval is drawn.
    rates = [str(row["EER%"]) for row in own]
    middle = [
        (one + other) / 2 if rate == "-" else float(rate)
        for one, other, rate in zip(low, high, rates, strict=True)
    ]
    with drawing(path, (5.4, 0.9 + 0.18 * len(own))) as figure:
        axes = figure.subplots()
        places = np.arange(len(own))
        axes.errorbar(middle, places, xerr=[middle - low, high - middle], fmt="o", color=COLOURS[0])
        axes.axvline(50, color="0.6", linewidth=0.8, linestyle="--")
        axes.set_yticks(places, [str(row["layer"]) for row in own], fontsize=7)
        axes.invert_yaxis()
        axes.grid(axis="x", color="0.9")
        axes.set_xlim(0, None)
        axes.set_xlabel("EER (%), with 95 % intervals; 50 is chance")
        axes.set_title(title, loc="left", fontsize=10)


def write_scores(path: Path, trials: Trials, scores: np.ndarray) -> None:
    """Write each trial's score, `<model> <model> <score>`, and the DET curve next to it."""
    lines = zip(trials.enrolled, trials.test, scores, strict=True)
    write_text(path, "".join(f"{one} {other} {score:.9g}\n" for one, other, score in lines))
    curve = det_curve(scores, trials.targets)
    some = np.unique(np.linspace(0, len(curve.thresholds) - 1, _POINTS).astype(int))
    columns = ("threshold", "false_rejects", "false_accepts")
    points = zip(*(values[some] for values in curve), strict=True)
    rows = [
        dict(zip(columns, (f"{value:.9g}" for value in point), strict=True)) for point in points
    ]
    write_tsv(path.with_name(f"{path.name}.det.tsv"), columns, rows)


def _legal(found: Risk) -> dict[str, object]:
    rates = {"linked%": found.linked, "singled%": found.singled}
    cells = {name: _known(100 * value, 1) for name, value in rates.items()}
    return {**cells, "speakers": found.speakers}


def _finite(scores: np.ndarray) -> np.ndarray:
    """Clip infinite scores, of models that did not change at all, for the sake of histograms."""
    finite = scores[np.isfinite(scores)]
    return scores.clip(finite.min(), finite.max()) if len(finite) else np.zeros_like(scores)


def _known(value: float, digits: int) -> str:
    return "-" if np.isnan(value) else f"{value:.{digits}f}"


def known_speakers(
    models: Sequence[str], speakers: Sequence[str], table: Path | None
) -> dict[str, Model]:
    """Return the properties of models that have a speaker, from a table if there is one.

    Raises:
        UserError: if the table lacks a model, or has another speaker for it.
    """
    known = {one: Model(who) for one, who in zip(models, speakers, strict=True) if who}
    if table is None:
        return known
    listed = read_models(table)
    for name, model in known.items():
        if name not in listed or listed[name].speaker != model.speaker:
            problem = f"the table does not list {name!r} with speaker {model.speaker!r}"
            raise UserError(problem, path=table)
        known[name] = listed[name]
    return known
