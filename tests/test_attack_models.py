"""Attacks on client updates, on federations of simulated speakers."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import simulated
import torch
from conftest import inside
from safetensors.numpy import load_file, save_file
from simulated import one_speaker_each

from fedtools.attack.speakers.a2 import A2Setup, Side
from fedtools.attack.speakers.footprint_files import (
    FootprintSetup,
    Prints,
    read_footprints,
    write_footprints,
)
from fedtools.attack.speakers.verify import COLUMNS as VERIFIED
from fedtools.attack.speakers.verify import decide, known_speakers, make_trials, read_models
from fedtools.attack.victims import find_victims, sound_victims
from fedtools.core.errors import UserError
from fedtools.core.tables import read_tsv
from fedtools.data.ark import FeatureReader
from fedtools.data.datadir import DataDir, write_table
from fedtools.exchange.messages import COLUMNS
from fedtools.federation.federation import Federation
from fedtools.models.acoustic.asr import build_model
from fedtools.score.verification import equal_error_rate

SPEAKERS = ("ann", "bob", "cat", "dan")
# Two models of each speaker, from different utterances.
CLIENTS = [f"{speaker}-m{number}" for speaker in SPEAKERS for number in (1, 2)]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("world")
    one_speaker_each(simulated.data_dir(root / "train", CLIENTS, 3))
    simulated.data_dir(root / "indicator", ["xen", "yan"], 4, seed=5)
    inside("train-tokens", root / "train" / "text", root / "tokens", "--token-type", "char").ok()
    encoder = {"output_size": 12, "contexts": [1, 1, 3, 3]}
    model = {"input_size": simulated.BINS, "encoder": "tdnn", "encoder_conf": encoder}
    simulated.config_file(root / "c.yaml", model=model)
    path = root / "exp"
    inside(
        *("init", path, "--config", root / "c.yaml", "--method", "fedavg", "--set", "rounds=2"),
        *("--data", f"train={root / 'train'}", "--asset", f"tokens={root / 'tokens'}"),
    ).ok()
    inside("rounds", path, "--nj", "2").ok()
    return root


def by_hand(world: Path, number: int, client: str, layer: int, part: str) -> np.ndarray:
    """Return mean and deviation of the differences, from the files of the experiment."""
    folder = world / "exp" / f"round_{number:04d}"
    for table in sorted(folder.glob("update.*.tsv")):
        clients = [row["client"] for row in read_tsv(table, COLUMNS)]
        if client in clients:
            stacked = load_file(table.with_suffix(".safetensors"))
            sent = {name: value[clients.index(client)] for name, value in stacked.items()}
    begun = load_file(world / "exp" / "init.safetensors")
    tokens = (world / "tokens" / "tokens.txt").read_text().split()
    config = {"output_size": 12, "contexts": [1, 1, 3, 3]}
    model = build_model(
        {"input_size": simulated.BINS, "encoder": "tdnn", "encoder_conf": config}, tokens
    ).eval()
    found = {}
    for name, state in (("global", load_file(folder / "global.safetensors")), ("own", sent)):
        whole = {**begun, **state}
        model.load_state_dict({key: torch.as_tensor(value) for key, value in whole.items()})
        kept = []
        hook = getattr(model.encoder.layers[layer], part).register_forward_hook(
            lambda _, __, out, kept=kept: kept.append(out[0].T)
        )
        data = DataDir.read(world / "indicator")
        for utterance in data.utterances:
            speech = torch.from_numpy(FeatureReader(data.feats_scp).read(utterance))[None]
            with torch.no_grad():
                model.encode(speech, torch.tensor([speech.shape[1]]))
        hook.remove()
        found[name] = torch.cat(kept).double().numpy()
    apart = found["own"] - found["global"]
    return np.stack([apart.mean(0), apart.std(0)])


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("part", ["relu", "norm"])
def test_footprints_of_an_experiment(world, tmp_path, jobs, part):
    federation = Federation(world / "exp")
    for job in range(1, jobs + 1):
        setup = FootprintSetup([1, 2], part, held=3)
        write_footprints(federation, world / "indicator", tmp_path, setup, job, jobs)
    prints = read_footprints(tmp_path)
    assert prints.models == sorted(f"{one}-r000{n}" for one in CLIENTS for n in (1, 2))
    assert prints.speakers == [name[:3] for name in prints.models]
    assert list(prints.layers) == ["tdnn1", "tdnn2", "tdnn3", "tdnn4"]
    for number, client, layer in ((1, "ann-m2", 0), (2, "dan-m1", 3), (2, "bob-m1", 1)):
        at = prints.models.index(f"{client}-r{number:04d}")
        expected = by_hand(world, number, client, layer, part)
        found = prints.layers[f"tdnn{layer + 1}"][at]
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_what_is_there_is_not_made_again(world, tmp_path):
    federation = Federation(world / "exp")
    table = write_footprints(federation, world / "indicator", tmp_path, FootprintSetup([1]))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    write_footprints(federation, world / "indicator", tmp_path, FootprintSetup([1]))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    # A missing layer is reported, and made again.
    (gone,) = tmp_path.glob("footprints.1.03-*.scp")
    gone.unlink()
    with pytest.raises(UserError, match=r"03-tdnn3\.scp: missing; run fedtools attack footprints"):
        read_footprints(tmp_path)
    write_footprints(federation, world / "indicator", tmp_path, FootprintSetup([1]))
    assert len(read_footprints(tmp_path).layers) == 4
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    # Other options replace it, and no earlier file stays.
    write_footprints(federation, world / "indicator", tmp_path, FootprintSetup([1], highest=2))
    assert list(read_footprints(tmp_path).layers) == ["tdnn1", "tdnn2"]
    assert table.stat().st_mtime_ns != before[table]


def test_a_model_that_is_not_finite_or_was_not_sent_is_named(world, tmp_path, capsys):
    path = shutil.copytree(world / "exp", tmp_path / "exp")
    update = path / "round_0001" / "update.1.safetensors"
    stacked = load_file(update)
    stacked["ctc.ctc_lo.bias"][0, 1] = np.nan
    save_file(stacked, update)
    bad = read_tsv(update.with_suffix(".tsv"), COLUMNS)[0]["client"]
    table = path / "round_0001" / "update.2.tsv"
    lines = table.read_text().splitlines(keepends=True)
    gone = lines[1].split("\t")[0]
    table.write_text(
        lines[0] + lines[1].replace("\tok\n", "\tdiverged: loss nan\n") + "".join(lines[2:])
    )
    write_footprints(Federation(path), world / "indicator", tmp_path / "out", FootprintSetup([1]))
    said = capsys.readouterr().err
    assert f"{bad}: refused: NaN or Inf in tensor 'ctc.ctc_lo.bias'" in said
    assert f"{gone}: refused: left out by its job: diverged: loss nan" in said
    assert read_footprints(tmp_path / "out").models == sorted({*CLIENTS} - {bad, gone})


def test_a_model_whose_activations_are_not_finite_is_named(world, tmp_path, capsys):
    path = shutil.copytree(world / "exp", tmp_path / "exp")
    update = path / "round_0001" / "update.1.safetensors"
    stacked = load_file(update)
    (name,) = [key for key in stacked if key.endswith("layers.1.norm.running_var")]
    stacked[name][0] = -1
    save_file(stacked, update)
    bad = read_tsv(update.with_suffix(".tsv"), COLUMNS)[0]["client"]
    out, setup = tmp_path / "out", FootprintSetup([1])
    write_footprints(Federation(path), world / "indicator", out, setup)
    told = capsys.readouterr().err
    assert f"{bad}: refused: activations of layer tdnn3 are not finite" in told
    assert read_footprints(out).models == sorted({*CLIENTS} - {bad})
    before = {one.name: one.read_bytes() for one in out.iterdir()}
    with pytest.raises(UserError, match="is a speaker of the training data and of the Indicator"):
        write_footprints(Federation(path), world / "train", out, setup)
    assert {one.name: one.read_bytes() for one in out.iterdir()} == before


def test_mistakes_are_told(world, tmp_path):
    federation = Federation(world / "exp")
    with pytest.raises(UserError, match="'ann' is a speaker of the training data and of the Ind"):
        write_footprints(federation, world / "train", tmp_path / "a", FootprintSetup([1]))
    with pytest.raises(UserError, match="layer 5: there are 4, tdnn1 to tdnn4; take 1 to 4"):
        write_footprints(
            federation, world / "indicator", tmp_path / "a", FootprintSetup([1], highest=5)
        )
    with pytest.raises(UserError, match="round 3 is not complete"):
        find_victims(federation, [3])
    with pytest.raises(UserError, match="no footprints here"):
        read_footprints(tmp_path)
    write_footprints(federation, world / "indicator", tmp_path / "b", FootprintSetup([1]), 1, 2)
    with pytest.raises(UserError, match=r"models\.2\.tsv: missing.*--job 2"):
        read_footprints(tmp_path / "b")
    path = shutil.copytree(world / "exp", tmp_path / "exp")
    for one in path.glob("round_0001/update.*"):
        one.unlink()
    with pytest.raises(UserError, match=r"client updates are missing.*keep_updates: true"):
        find_victims(Federation(path), [1])


def test_persons_of_the_indicator_are_in_no_training(world, tmp_path, monkeypatch):
    """Where speakers are talks, a person may have several."""
    for name in ("train", "indicator"):
        shutil.copytree(world / name, tmp_path / name)
    add_persons(tmp_path / "train", {"ann": "Eve"})
    federation, indicator = Federation(world / "exp"), tmp_path / "indicator"
    monkeypatch.setattr(federation.task, "data_path", lambda split, *_: tmp_path / split)
    write_footprints(federation, indicator, tmp_path / "unknown", FootprintSetup([1]))
    add_persons(indicator, {"xen": "Xenia"})
    write_footprints(federation, indicator, tmp_path / "apart", FootprintSetup([1]))
    add_persons(indicator, {"xen": "Eve"})
    with pytest.raises(UserError, match=r"indicator/utt2person: 'Eve' is also in .*train/utt2pers"):
        write_footprints(federation, indicator, tmp_path / "out", FootprintSetup([1]))


def add_persons(path: Path, persons: dict[str, str]) -> None:
    """Write utt2person from prefixes of utterance names, some of which belong to another person."""
    names = {utt: utt[:3] for utt in DataDir.read(path).utterances}
    table = {utt: persons.get(name, name) for utt, name in names.items()}
    write_table(path / "utt2person", table)


def test_fewer_jobs_leave_nothing_of_more(world, tmp_path):
    federation = Federation(world / "exp")
    for jobs in (3, 2):
        for job in range(1, jobs + 1):
            write_footprints(
                federation, world / "indicator", tmp_path, FootprintSetup([1]), job, jobs
            )
        assert read_footprints(tmp_path).models == CLIENTS
        assert len(list(tmp_path.glob("models.*.tsv"))) == jobs
    assert not list(tmp_path.glob("footprints.3.*"))


# --- attack A1


@pytest.fixture(scope="module")
def looked(world, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("prints")
    options = ("--indicator", world / "indicator", "--round", "1", "--round", "2")
    inside("attack", "footprints", world / "exp", out, *options).ok()
    return out


def test_a1_decides_trials_by_distance(looked, world, tmp_path):
    out = shutil.copytree(looked, tmp_path / "out")
    done = inside("attack", "a1", out, out, "--resamples", "50").ok()
    assert "tdnn4" in done.out
    rows = read_tsv(out / "a1.tsv", VERIFIED)
    assert {row["Cllr"] for row in rows} == {"-"}
    assert [(row["layer"], row["scores"]) for row in rows] == [
        (f"tdnn{n}", name) for n in (1, 2, 3, 4) for name in ("both", "means", "deviations")
    ]
    # Four speakers with four models each, over two rounds: 6 pairs each.
    assert {(row["targets"], row["others"]) for row in rows} == {("24", "96")}
    prints = read_footprints(out)
    trials = [line.split() for line in (out / "trials.easy").read_text().splitlines()]
    scores = [line.split() for line in (out / "a1.tdnn2.easy").read_text().splitlines()]
    assert [one[:2] for one in trials] == [one[:2] for one in scores]
    norm, values = np.linalg.norm, prints.layers["tdnn2"].astype(np.float64)
    for (one, other, kind), (*_, score) in zip(trials, scores, strict=True):
        assert (kind == "target") == (one[:3] == other[:3])
        a, b = (values[prints.models.index(name)] for name in (one, other))
        expected = sum(
            weight * norm(a[row] - b[row]) / (norm(a[row]) * norm(b[row]))
            for row, weight in ((0, 1), (1, 10))
        )
        assert float(score) == pytest.approx(-expected, rel=1e-5)
    found = {row["layer"]: row for row in rows if row["scores"] == "both"}
    both = np.array([float(score) for *_, score in scores])
    kinds = np.array([kind == "target" for *_, kind in trials])
    assert float(found["tdnn2"]["EER%"]) == pytest.approx(equal_error_rate(both, kinds), abs=0.01)
    # Another weight gives another score; the same options give the same files.
    before = (out / "a1.tsv").read_bytes()
    inside("attack", "a1", out, out, "--resamples", "50", "--set", "a1.alpha=[1, 0]").ok()
    rows = {(row["layer"], row["scores"]): row for row in read_tsv(out / "a1.tsv", VERIFIED)}
    assert rows["tdnn1", "both"]["EER%"] == rows["tdnn1", "means"]["EER%"]
    inside("attack", "a1", out, out, "--resamples", "50").ok()
    assert (out / "a1.tsv").read_bytes() == before


DIFFERENT = {
    "part of the layers": ("--part", "norm"),
    "highest layer": ("--highest", "4"),
    "defence": ("--defence", "bits=8"),
    "global model": ("--round", "2"),
    "Indicator": ("--indicator", "other"),
    "kind of network": (),
}


@pytest.fixture(scope="module")
def two(world, known, tmp_path_factory) -> tuple[Path, Path]:
    """Make comparable footprints of two experiments."""
    found = []
    for name in ("exp", "known"):
        out = tmp_path_factory.mktemp(name)
        options = ("--indicator", world / "indicator", "--round", "1")
        inside("attack", "footprints", world / name, out, *options).ok()
        found.append(out)
    inside("attack", "a1", *found, tmp_path_factory.mktemp("a1"), "--resamples", "20").ok()
    return found[0], found[1]


@pytest.mark.parametrize("what", DIFFERENT)
def test_footprints_of_other_kinds_are_not_compared(world, two, tmp_path, what):
    known, out = two[1], tmp_path / "out"
    options = {"--indicator": world / "indicator", "--round": "1"}
    options |= dict(zip(DIFFERENT[what][::2], DIFFERENT[what][1::2], strict=True))
    if what == "Indicator":
        # The same utterances at the same places, with other audio.
        simulated.data_dir(tmp_path / "other", ["xen", "yan"], 4, seed=6)
        options["--indicator"] = tmp_path / "other"
    if what == "kind of network":
        shutil.copytree(two[0], out)
        text = (out / "footprints.1.yaml").read_text()
        assert "encoder: tdnn" in text
        (out / "footprints.1.yaml").write_text(text.replace("encoder: tdnn", "encoder: other"))
    else:
        words = [word for pair in options.items() for word in pair]
        inside("attack", "footprints", world / "exp", out, *words).ok()
    done = inside("attack", "a1", known, out, tmp_path / "a1")
    done.fails(1, f"out: the {what} differs from that of {known}")


def test_jobs_with_other_options_are_told(world, tmp_path):
    federation = Federation(world / "exp")
    for job, part in ((1, "relu"), (2, "norm")):
        write_footprints(
            federation, world / "indicator", tmp_path, FootprintSetup([1], part), job, 2
        )
    with pytest.raises(UserError, match=r"2\.yaml: the part of the layers differs from that of"):
        read_footprints(tmp_path)


def test_trials_by_recording(looked, world, tmp_path):
    out = shutil.copytree(looked, tmp_path / "out")
    table = tmp_path / "models.tsv"
    lines = ["model\tspeaker\tgender\ttalks\tseconds\n"]
    for name in read_footprints(out).models:
        # All of Bob's models are of one talk, the other speakers' of two; Dan's talks are unknown.
        talk = f"{name[:3]}-{'t' if name.startswith('bob') else name[5]}"
        talk = "" if name.startswith("dan") else f"{talk},{talk}-more"
        lines.append(f"{name}\t{name[:3]}\tf\t{talk}\t1.0\n")
    table.write_text("".join(lines))
    options = ("--resamples", "50", "--others", "60", "--seed", "4")
    inside("attack", "a1", out, out, *options).ok()
    before = [(out / name).read_bytes() for name in ("trials.easy", "a1.tdnn2.easy")]
    alone = read_tsv(out / "a1.tsv", VERIFIED)
    done = inside("attack", "a1", out, out, *options, "--models", table).ok()
    told = [kind for kind in ("easy", "same", "other") if f"a1, {kind} trials: fewer" in done.err]
    assert told == ["same", "other"]
    assert [(out / name).read_bytes() for name in ("trials.easy", "a1.tdnn2.easy")] == before
    rows = read_tsv(out / "a1.tsv", VERIFIED)
    assert [row for row in rows if row["trials"] == "easy"] == alone
    pairs = {
        kind: [tuple(line.split()) for line in (out / f"trials.{kind}").read_text().splitlines()]
        for kind in ("easy", "same", "other")
    }
    targets = {kind: {row for row in own if row[2] == "target"} for kind, own in pairs.items()}
    for kind, own in targets.items():
        # Two models of each of the two talks of Ann and Cat, and four of Bob's one.
        assert len(own) == {"easy": 24, "same": 2 * 2 + 6 + 0, "other": 2 * 4}[kind]
        assert {row["targets"] for row in rows if row["trials"] == kind} == {str(len(own))}
        for one, other, _ in own:
            if kind != "easy":
                share = one.startswith("bob") or one[5] == other[5]
                assert not one.startswith("dan") and share == (kind == "same")
        assert [row for row in pairs[kind] if row not in own] == [
            row for row in pairs["easy"] if row[2] == "nontarget"
        ]
    # Where a speaker is a talk, no target pair is of two talks.
    talks = [line.split("\t") for line in lines[1:]]
    same = ["\t".join([*line[:3], line[1], line[4]]) for line in talks]
    table.write_text("".join([lines[0], *same]))
    inside("attack", "a1", out, out, *options, "--models", table).ok()
    assert {row["trials"] for row in read_tsv(out / "a1.tsv", VERIFIED)} == {"easy", "same"}
    assert (out / "trials.same").exists() and not list(out.glob("*.other*"))
    inside("attack", "a1", out, out, "--models", tmp_path / "gone.tsv").fails(1, "gone.tsv")
    table.write_text("".join(lines).replace("\tdan\t", "\teve\t"))
    done = inside("attack", "a1", out, out, "--models", table)
    done.fails(1, "the table does not list 'dan-m1-r0001' with speaker 'dan'")


def test_two_talks_of_a_person_are_in_no_trial(tmp_path):
    """Where speakers are talks, two talks of a person are neither target nor non-target."""
    table, lines = tmp_path / "models.tsv", ["model\tspeaker\tgender\tperson\ttalks\n"]
    for talk in ("ann1", "ann2", "bob1"):
        lines += [f"{talk}-m{n}\t{talk}\tf\t{talk[:3]}\t{talk}\n" for n in (1, 2)]
    table.write_text("".join(lines))
    models = read_models(table)
    trials = make_trials(models, others=0)["easy"]
    pairs = list(zip(trials.enrolled, trials.test, trials.targets, strict=True))
    assert [pair[:2] for pair in pairs if pair[2]] == [
        (f"{talk}-m1", f"{talk}-m2") for talk in ("ann1", "ann2", "bob1")
    ]
    rest = [{one[:3], other[:3]} for one, other, target in pairs if not target]
    assert rest == [{"ann", "bob"}] * 8
    # Without that column, persons are unknown.
    unknown = {name: replace(model, person="") for name, model in models.items()}
    assert sum(~make_trials(unknown, others=0)["easy"].targets) == 12
    # A person found only by the other talk's name is reported.
    names = sorted(models)
    people = np.array([models[name].person for name in names])
    scores = (people[:, None] == people) + 0.1 * np.array([
        [one.startswith("ann1") != other.startswith("ann1") for one in names] for other in names
    ])  # fmt: skip
    chosen = {"others": 0, "resamples": 20, "seed": 0}
    linked = [
        decide(
            tmp_path, "a1", known, names, [("-", "h1", "both", scores)], {"both": "a1"}, **chosen
        )[0]
        for known in (models, unknown)
    ]
    assert [row["linked%"] for row in linked] == ["100.0", "33.3"]


def test_few_target_trials_are_warned_of(world, tmp_path):
    options = ("--indicator", world / "indicator", "--round", "1", "--highest", "1")
    inside("attack", "footprints", world / "exp", tmp_path, *options).ok()
    done = inside("attack", "a1", tmp_path, tmp_path, "--resamples", "50", "--others", "7").ok()
    assert "fewer than 20 target trials" in done.err
    rows = read_tsv(tmp_path / "a1.tsv", VERIFIED)
    assert {(row["EER%"], row["targets"], row["others"]) for row in rows} == {("-", "4", "7")}
    assert all(0 <= float(row["low"]) <= float(row["high"]) <= 100 for row in rows)


def test_clients_that_are_no_single_speaker_are_in_no_trial(world, tmp_path):
    prints = Prints(["a", "b", "c"], ["x", "", "x"], {})
    assert known_speakers(prints.models, prints.speakers, None).keys() == {"a", "c"}
    with pytest.raises(UserError, match="no pair of models of two speakers"):
        make_trials(known_speakers(prints.models, prints.speakers, None))
    inside("attack", "a1", tmp_path, tmp_path, "--set", "a1.alpha=[1]").fails(1, "alpha")
    inside("attack", "a1", tmp_path, tmp_path).fails(1, "no footprints here")


# --- attack A2


KNOWN = ("kim", "lou", "mia", "ned", "oda", "pia", "rob", "sue")


@pytest.fixture(scope="module")
def known(world) -> Path:
    """Train models of other people, from the same initial model."""
    people = [f"{one}-m{number}" for one in KNOWN for number in (1, 2)]
    one_speaker_each(simulated.data_dir(world / "known_train", people, 3, seed=3))
    path = world / "known"
    inside(
        *("init", path, "--config", world / "c.yaml", "--method", "fedavg", "--set", "rounds=1"),
        *("--data", f"train={world / 'known_train'}", "--asset", f"tokens={world / 'tokens'}"),
        *("--start", world / "exp" / "init.safetensors"),
    ).ok()
    inside("rounds", path).ok()
    return path


A2 = ("--layer", "2", "--set", "a2.width=16", "--set", "a2.epochs=2", "--resamples", "50")
# Eight known people.
A2 += ("--set", "a2.network=0.25")


def test_a2_from_models_to_figures(world, known, tmp_path):
    options = (*A2, "--indicator", world / "indicator")
    for name, held in (("one", "16"), ("other", "3")):
        out = tmp_path / name
        inside("attack", "a2", known, world / "exp", out, *options, "--set", f"a2.held={held}").ok()
    assert (out / "trials.easy").read_bytes() == (tmp_path / "one/trials.easy").read_bytes()
    out = tmp_path / "one"
    rows = read_tsv(out / "a2.h2.tsv", VERIFIED)
    ways = ["PLDA", "PLDA, cohort", "cosine", "cosine, cohort"]
    assert [row["scores"] for row in rows] == ways
    assert {(row["layer"], row["targets"], row["others"]) for row in rows} == {("h2", "4", "24")}
    assert {(row["defence"], row["attacker"]) for row in rows} == {("none", "-")}
    # Cllr of the ratios as written; other scores have none.
    scored = [line.split() for line in (out / "a2.h2.easy").read_text().splitlines()]
    costs = {True: [], False: []}
    for one, other, ratio in scored:
        same = one[:3] == other[:3]
        costs[same].append(np.logaddexp(0, -float(ratio) if same else float(ratio)) / np.log(2))
    expected = (np.mean(costs[True]) + np.mean(costs[False])) / 2
    assert float(rows[0]["Cllr"]) == pytest.approx(expected, rel=1e-4, abs=1e-3)
    assert float(rows[0]["minCllr"]) <= expected + 1e-3
    assert [row["Cllr"] == "-" for row in rows] == [False, False, True, True]
    # The other two known people have trained the network.
    scp = [line.split()[0] for line in (out / "a2.h2.scp").read_text().splitlines()]
    assert [one for one in scp if one[:3] in SPEAKERS] == CLIENTS
    left = [one for one in scp if one[:3] in KNOWN]
    assert len(left) == 12 and len({one[:3] for one in left}) == 6
    trials = (out / "trials.easy").read_text().splitlines()
    scores = (out / "a2.h2.easy").read_text().splitlines()
    assert [one.split()[:2] for one in trials] == [one.split()[:2] for one in scores]
    # The same command writes the same bytes.
    again = tmp_path / "again"
    inside("attack", "a2", known, world / "exp", again, *options).ok()
    assert (again / "a2.h2.easy").read_bytes() == (out / "a2.h2.easy").read_bytes()


def test_models_of_a_round_differ_from_what_that_round_began_with(world):
    """Equation 1 uses the global model that a client was sent, in later rounds, too."""
    federation = Federation(world / "exp")
    own, setup = sound_victims(federation, [1, 2]), A2Setup([1, 2])
    side = Side.open(federation, own, world / "indicator", setup, 2)
    views = list(side.views("", 0))
    begun = []
    for number, view in enumerate(views, 1):
        assert set(view.speakers) == {f"{client}-r000{number}" for client in CLIENTS}
        begun.append(load_file(world / f"exp/round_000{number}/global.safetensors"))
        state = view.probe.models[0].state_dict()
        for name, value in begun[-1].items():
            assert np.array_equal(state[name].numpy(), value), (number, name)
    assert len(views) == 2
    assert any(not np.array_equal(value, begun[1][name]) for name, value in begun[0].items())


def test_a2_wants_disjoint_people_and_one_beginning(world, known, tmp_path):
    options = (*A2, "--indicator", world / "indicator")
    done = inside("attack", "a2", world / "exp", world / "exp", tmp_path, *options)
    done.fails(1, "'ann' is in two of the experiments and the Indicator")
    options = (*A2, "--indicator", world / "known_train")
    inside("attack", "a2", known, world / "exp", tmp_path, *options).fails(
        1, "'kim' is a speaker of the training data"
    )
    options = (*A2, "--indicator", world / "indicator", "--layer", "99")
    done = inside("attack", "a2", known, world / "exp", tmp_path, *options)
    done.fails(1, "layer 99: there are 4, tdnn1 to tdnn4; take 1 to 4")
    options = (*A2, "--indicator", world / "indicator", "--round", "2")
    inside("rounds", known, "--to", "2").ok()
    done = inside("attack", "a2", known, world / "exp", tmp_path, *options)
    done.fails(1, "round 2 did not begin with the same model as in")
    few = {"0.2": ("is trained on 1 people", 2), "0.5": ("is not trained on 4 people", 6)}
    for share, (what, least) in few.items():
        options = (*A2, "--indicator", world / "indicator", "--set", f"a2.network={share}")
        done = inside("attack", "a2", known, world / "exp", tmp_path / "x", *options)
        done.fails(1, f"the network {what} with two models of a speaker; {least} are needed")
        assert not (tmp_path / "x").exists()
    options = (*A2, "--indicator", world / "indicator", "--defence", "noise")
    done = inside("attack", "a2", known, world / "exp", tmp_path / "x", *options)
    done.fails(1, "invalid defence 'noise' in 'noise'")
    # Before any training.
    (tmp_path / "models.tsv").write_text("model\tspeaker\tgender\ttalks\nann-m1\tbob\tf\t\n")
    options = (*A2, "--indicator", world / "indicator", "--models", tmp_path / "models.tsv")
    done = inside("attack", "a2", known, world / "exp", tmp_path / "x", *options)
    done.fails(1, "models.tsv: the table does not list 'ann-m1' with speaker 'ann'")


def test_a1_on_two_experiments_together(world, known, looked, tmp_path):
    options = ("--indicator", world / "indicator", "--round", "1")
    parts = [tmp_path / "known", tmp_path / "exp"]
    for part in parts:
        inside("attack", "footprints", world / part.name, part, *options).ok()
    inside("attack", "a1", *parts, tmp_path / "both", "--resamples", "50").ok()
    rows = read_tsv(tmp_path / "both" / "a1.tsv", VERIFIED)
    # Twelve speakers with two models each.
    assert {(row["targets"], row["others"]) for row in rows} == {("12", "264")}
    done = inside("attack", "a1", parts[0], parts[0], tmp_path / "both")
    done.fails(1, "'kim-m1' is also in another folder")
    inside("attack", "a1", parts[0]).fails(2, "at least one folder and OUT")


def test_a1_behind_a_defence_wants_footprints_without_it(world, known, tmp_path):
    """Footprints of attacked models and of a cohort are needed; all attackers have the score."""
    options = ("--indicator", world / "indicator", "--round", "1", "--highest", "2")
    for name in ("exp", "known"):
        for folder, more in ((name, ()), (f"{name}.bits", ("--defence", "bits=4"))):
            inside("attack", "footprints", world / name, tmp_path / folder, *options, *more).ok()
    command = ("attack", "a1", tmp_path / "exp.bits", tmp_path / "out")
    cohort = ("--cohort", tmp_path / "known.bits", "--set", "a1.scores=[literal,cohort]")
    plain = [word for name in ("exp", "known") for word in ("--undefended", tmp_path / name)]
    inside(*command, *cohort).fails(1, "the footprints are behind bits=4", "give --undefended")
    inside(*command, *cohort, *plain[:2]).fails(1, "exp: no footprint of 'kim-m1'")
    wrong = ("--undefended", tmp_path / "exp.bits")
    inside(*command, *wrong).fails(1, "exp.bits: made behind bits=4")
    inside(*command[:2], tmp_path / "exp", tmp_path / "out", *plain).fails(1, "behind no defence")
    inside(*command, *cohort, *plain, "--resamples", "50").ok()
    found: dict[str, list[str]] = {}
    for row in read_tsv(tmp_path / "out" / "a1.tsv", VERIFIED):
        assert row["defence"] == "bits=4" and row["targets"] == "4"
        found.setdefault(row["scores"], []).append(row["attacker"])
    attackers = ["ignorant", "lazy-informed", "semi-informed"]
    assert found["both"] == attackers[:2] * 2 and found["both, cohort"] == attackers * 2
