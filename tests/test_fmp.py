"""FMP against a word-by-word algorithm 1, on files, and the information it must not use."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import kaldiio
import numpy as np
import pytest
import yaml
from conftest import ROOT, inside
from fmp_world import SPAN, T, begin, best_text, by_hand, counts_after, sent, simulated
from rescored_world import CLIENTS, WORDS, make_stream
from safetensors.numpy import load_file, save_file

from fedtools.core.tables import read_tsv
from fedtools.federation.fmp.simulation import simulate, simulate_draws
from fedtools.federation.fmp.sweep import FIGURES
from fedtools.lm.reweighting import Lists, ListWeights
from fedtools.lm.stream import groups_of, open_stream
from fedtools.methods.fmp import FMP
from fedtools.privacy.key import NoiseKey
from fedtools.privacy.releases import Releases


@pytest.fixture(scope="module")
def stream(tmp_path_factory) -> Path:
    return make_stream(tmp_path_factory.mktemp("world") / "stream")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"alpha": 0.0, "beta": 0.75, "scale": 1.0},
        {"alpha": 0.75, "beta": 0.0, "sigma": 1.0},
        {"continuous": True, "scale": 1.5, "lm_weight": 2.0, "word_score": -1.0},
        {"nnlm": 1.0, "smoothing": 0.5, "sigma": 0.3},
    ],
)
def test_algorithm_1(stream, options):
    expected = by_hand(stream, **options)
    assert simulated(stream, **options) == expected
    # The options matter on these data; otherwise the test would show nothing.
    plain = {key: value for key, value in options.items() if key in ListWeights.__annotations__}
    assert by_hand(stream, **{**plain, "scale": 0.0}) != expected


@pytest.mark.parametrize("sends", ["cumulative", "increments"])
def test_the_federation_on_disk(stream, tmp_path, sends):
    """The files of a federation equal the algorithm's; increments add up to the same."""
    path = begin(stream, tmp_path / "exp", sends=sends, scale=0.8)
    assert best_text(path) == by_hand(stream, scale=0.8)
    marginals = kaldiio.load_scp(str(path / "best" / "marginals.scp"))
    assert set(marginals) == {"-", *CLIENTS}
    for name in marginals:
        assert marginals[name].shape == (2 + len(WORDS),)
        assert marginals[name].sum() == pytest.approx(1, abs=1e-5)
    counts = load_file(path / f"round_{T + 1:04d}" / "global.safetensors")["counts"]
    unigram = [int(row["count"]) + 1 for row in read_tsv(stream / "unigram.tsv", None)]
    unigram[0] = 0  # `</s>`
    expected = 0.9 * counts / counts.sum() + 0.1 * np.array(unigram) / sum(unigram)
    assert marginals["-"] == pytest.approx(expected, abs=1e-5)
    # Only counts of words are sent, and none of the last group.
    state = load_file(path / f"round_{T + 1:04d}" / "global.safetensors")
    assert state.keys() == {"counts"} and state["counts"].shape == (2 + len(WORDS),)
    assert (path / f"round_{T:04d}" / ".done").exists()
    assert not (path / f"round_{T + 1:04d}" / ".done").exists()
    rows = read_tsv(path / "ledger.tsv", None) if (path / "ledger.tsv").exists() else []
    rows = rows or read_tsv(path / "round_0001" / "ledger.tsv", None)
    assert int(rows[0]["bytes_up"]) == 8 * len(state["counts"])


def test_sampled_clients(stream, tmp_path):
    """Of clients outside a round the server has nothing, or their earlier updates."""
    path = begin(stream, tmp_path / "exp", "--set", "clients_per_round=2", scale=1.0)
    sampled = {
        number: (path / f"round_{number:04d}" / "clients").read_text().split()
        for number in range(1, T + 1)
    }
    assert any(set(some) != set(sampled[1]) for some in sampled.values())
    assert best_text(path) == by_hand(stream, scale=1.0, taking_part=sampled)
    # Increments: words up to a client's last round are counted once.
    path = begin(
        *(stream, tmp_path / "other", "--set", "clients_per_round=2"), sends="increments", sigma=0.0
    )
    counts = load_file(path / f"round_{T + 1:04d}" / "global.safetensors")["counts"]
    opened = open_stream(stream)
    rescored, runs = opened.rescored, opened.runs
    expected = np.zeros_like(counts)
    for client, run in runs.items():
        last = max((n for n in sampled if client in sampled[n]), default=0)
        for group in groups_of(run, T)[:last]:
            for utterance in range(group.start, group.stop):
                first = rescored.first_hypothesis[utterance]
                at, to = rescored.first_word[first : first + 2]
                np.add.at(expected, rescored.word_ids[at : to - 1], 1)
    assert counts.tolist() == expected.tolist()


def test_no_utterance_is_in_its_own_cache(stream, tmp_path):
    """Later utterances change no earlier hypothesis, and neither do an utterance's own words."""
    other = tmp_path / "other"
    shutil.copytree(stream, other)
    segments = [line.split() for line in (stream / "segments").read_text().splitlines()]
    begins = {name: float(time) for name, _, time, _ in segments}
    late = {name for name in begins if begins[name] >= 4 * 6}
    lines = [line.split("\t") for line in (other / "nbest.tsv").read_text().splitlines()]
    for line in lines:
        if line[0] in late:
            line[4] = " ".join(WORDS[7] for _ in line[4].split())
    (other / "nbest.tsv").write_text("".join("\t".join(line) + "\n" for line in lines))
    for options in ({"scale": 1.0}, {"scale": 1.0, "continuous": True}):
        one, two = (simulated(folder, **options) for folder in (stream, other))
        assert {name: one[name] for name in one if name not in late} == {
            name: two[name] for name in two if name not in late
        }
        assert one != two


def test_rounds_in_which_a_client_says_nothing(stream, tmp_path):
    """With more groups than utterances, each is still rescored once, after all earlier ones."""
    config = {"task": "rescore", "rounds": 20, "method_conf": {"scale": 1.0, "sends": "increments"}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    path = tmp_path / "exp"
    arguments = ("--config", tmp_path / "c.yaml", "--method", "fmp", "--data", f"train={stream}")
    inside("init", path, *arguments).ok()
    inside("rounds", path, "--evaluate", "train").ok()
    opened = open_stream(stream)
    groups = {client: opened.groups(client, 20) for client in CLIENTS}
    assert any(part.start == part.stop for part in groups["ann"])
    best, _ = simulate(FMP(scale=1.0), Lists(opened.rescored, ListWeights()), groups)
    expected = [opened.rescored.hypotheses[one] for one in best]
    assert best_text(path) == dict(zip(opened.rescored.utterances, expected, strict=True))


def test_no_round_beyond_those_that_were_planned(stream, tmp_path):
    path = begin(stream, tmp_path / "exp")
    inside("rounds", path, "--to", T + 1).fails(1, f"round {T + 1}", "more rounds")
    assert best_text(path) == by_hand(stream)


def test_transcripts_are_for_scoring_alone(stream, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(stream, other)
    (other / "text").unlink()
    one, two = (begin(folder, tmp_path / name) for folder, name in ((stream, "a"), (other, "b")))
    assert best_text(one) == best_text(two)
    for number in range(1, T + 2):
        name = f"round_{number:04d}/global.safetensors"
        assert (one / name).read_bytes() == (two / name).read_bytes()
    inside("evaluate", two, "--split", "train").fails(1, "text")
    lines = (stream / "text").read_text().splitlines(keepends=True)
    (other / "text").write_text("".join(lines[1:]))
    lacking = lines[0].split()[0]
    inside("evaluate", two, "--split", "train").fails(1, f"no entry of utterance '{lacking}'")
    inside(
        *("init", tmp_path / "c", "--config", tmp_path / "a.yaml", "--method", "fmp"),
        *("--data", f"train={stream}", "--data", f"valid={stream}"),
    ).ok()
    inside("rounds", tmp_path / "c", "--evaluate", "valid").fails(1, "'valid' is not a stream")


def test_evaluation_is_of_the_next_group(stream, tmp_path):
    path = begin(stream, tmp_path / "exp", scale=1.0)
    inside("evaluate", path, "--split", "train").ok()
    rows = read_tsv(path / "evaluate_train.tsv", None)
    assert len(rows) == (T + 1) * len(CLIENTS)
    inside("rescore-best", path, path / "best").ok()
    inside("score", stream, path / "best" / "text", path / "best").ok()
    scored = read_tsv(path / "best" / "wer.tsv", None)
    (total,) = (row for row in scored if row["client"] == "all")
    errors, words = (sum(int(row[name]) for row in rows) for name in ("errors", "words"))
    assert f"{100 * errors / words:.2f}" == total["wer"]
    state = path / "round_0002" / "global.safetensors"
    counts = load_file(state)["counts"]
    save_file({"counts": counts[::-1].copy()}, state)
    (path / "evaluate_train.tsv").unlink()
    for command in (("evaluate", path, "--split", "train"), ("rescore-best", path, path / "b")):
        inside(*command).fails(
            1, "round_0002/global.safetensors: changed since the server wrote it"
        )


def test_sweeps_and_tuning(stream, tmp_path, cli):
    out = tmp_path / "sweep.tsv"
    vary = ("--vary", "alpha=0,0.75", "--vary", "sigma=0,5")
    cli("rescore-sweep", stream, out, *vary, "--set", f"rounds={T}", "--set", "scale=1").ok()
    rows = read_tsv(out, ["alpha", "sigma", *FIGURES])
    truth = dict(line.split(" ", 1) for line in (stream / "text").read_text().splitlines())

    def errors(found: dict[str, str]) -> int:
        # The hypotheses have as many words as the reference, or fewer.
        from jiwer import process_words

        names = [name for name in truth if found[name]]
        result = process_words([truth[n] for n in names], [found[n] for n in names])
        empty = sum(len(truth[n].split()) for n in truth if not found[n])
        return result.substitutions + result.deletions + result.insertions + empty

    base = errors(by_hand(stream, scale=0.0))
    for row in rows:
        options = {"alpha": float(row["alpha"]), "sigma": float(row["sigma"]) or 0.01}
        own = errors(by_hand(stream, scale=1.0, **options))
        assert int(row["errors"]) == own
        assert float(row["relative"]) == pytest.approx(100 * (own / base - 1), abs=0.006)
        # Three clients are too few for an interval.
        assert row["low"] == "-"
    (tmp_path / "g.yaml").write_text("grids: {first: {alpha: [0, 0.75], sigma: [0, 5]}}\n")
    of_file = ("--config", tmp_path / "g.yaml", "--section", "grids.first")
    same = tmp_path / "same.tsv"
    cli("rescore-sweep", stream, same, *of_file, "--set", f"rounds={T}", "--set", "scale=1").ok()
    assert same.read_bytes() == out.read_bytes()
    yaml_path = tmp_path / "best.yaml"
    result = cli(
        *("rescore-tune", stream, yaml_path, "--set", f"rounds={T}"),
        *("--vary", "lm_weight=0.5,1,2", "--vary", "scale=0,0.5,4"),
    ).ok()
    best = yaml.safe_load(yaml_path.read_text())
    grid = {
        (weight, scale): errors(by_hand(stream, lm_weight=weight, scale=scale))
        for weight in (0.5, 1.0, 2.0)
        for scale in (0.0, 0.5, 4.0)
    }
    assert grid[best["lm_weight"], best["scale"]] == min(grid.values())
    if best["lm_weight"] in (0.5, 2.0):
        assert "lm_weight" in result.err and "edge" in result.err
    cli("rescore-sweep", stream, out, "--vary", "alpa=1").fails(2, "alpa=1", "alpha")
    cli("rescore-sweep", stream, out, "--vary", "alpha=-1").fails(1, "alpha")
    cli("rescore-sweep", stream, out, "--vary", "groups=even,clock").fails(1, "clock needs span")


# --- differential privacy -------------------------------------------------------------------------


def bounded_by_hand(stream: Path, client: str, group: slice, sigma: float, cap: float):
    """Return a group's counts, each utterance scaled to an L1 norm of `cap` at most."""
    opened = open_stream(stream)
    rescored = opened.rescored
    total = np.zeros(len(rescored.vocabulary))
    for utterance in range(group.start, group.stop):
        own = np.zeros_like(total)
        first, last = rescored.first_hypothesis[utterance : utterance + 2]
        for rank, hypothesis in enumerate(range(first, last)):
            at, to = rescored.first_word[hypothesis : hypothesis + 2]
            weight = math.exp(-(rank**2) / (2 * sigma**2))
            np.add.at(own, rescored.word_ids[at : to - 1], weight)
        total += own * min(1.0, cap / max(own.sum(), 1e-9))
    return total


@pytest.mark.parametrize("sends", ["increments", "cumulative"])
@pytest.mark.parametrize("trust", ["server", "client"])
def test_noise_is_where_it_belongs(stream, tmp_path, key, sends, trust):
    privacy = {"mechanism": "laplace", "epsilon": 2.0, "cap": 4.0, "trust": trust}
    path = begin(
        stream, tmp_path / "exp", sends=sends, privacy=privacy, groups="clock", span=SPAN, sigma=1.0
    )
    assert key.exists() and key.stat().st_mode & 0o077 == 0
    opened = open_stream(stream)
    releases = T if sends == "cumulative" else 1
    noises = []
    for number in range(1, T + 1):
        messages = sent(path, number)
        rows = read_tsv(path / f"round_{number:04d}" / "update.1.tsv", None)
        known = {(row["utterances"], row["seconds"]) for row in rows}
        assert (known == {("0", "0")}) == (trust == "client")
        for client, counts in messages.items():
            groups = opened.groups(client, T, SPAN)
            of = range(number) if sends == "cumulative" else [number - 1]
            own = sum(bounded_by_hand(stream, client, groups[at], 1.0, 4.0) for at in of)
            if trust == "server":
                assert counts == pytest.approx(own, abs=1e-3)
            else:
                noises.append(counts - own)
        total = sum(messages.values())
        before = counts_after(path, number - 1) if sends == "increments" else 0.0
        if trust == "server":
            noises.append(counts_after(path, number) - before - total)
        else:
            assert counts_after(path, number) == pytest.approx(before + total, abs=1e-6)
    # Laplace noise of scale cap x releases / epsilon has this mean absolute value.
    noise = np.concatenate(noises)
    expected = 4.0 * releases / 2.0
    error = expected / math.sqrt(len(noise))
    assert np.abs(noise).mean() == pytest.approx(expected, abs=5 * error)
    assert noise.mean() == pytest.approx(0, abs=5 * error * math.sqrt(2))


def test_much_epsilon_is_no_noise(stream, tmp_path, key):
    privacy = {"mechanism": "laplace", "epsilon": 1e6, "cap": 100.0}
    assert best_text(begin(stream, tmp_path / "exp", privacy=privacy)) == by_hand(stream)
    privacy = {"mechanism": "paper", "epsilon": 1e6}
    assert best_text(begin(stream, tmp_path / "two", privacy=privacy)) == by_hand(stream)
    privacy = {"mechanism": "laplace", "epsilon": 0.01}
    assert best_text(begin(stream, tmp_path / "three", privacy=privacy)) != by_hand(stream)


def test_what_privacy_costs(stream, tmp_path, key, cli):
    privacy = {"mechanism": "laplace", "epsilon": 1.0}
    totals = {}
    for name, more in {
        "even": {"sends": "increments"},
        "clock": {"sends": "increments", "groups": "clock", "span": SPAN},
        "paper": {"privacy": {"mechanism": "paper", "epsilon": 1.0}},
    }.items():
        path = begin(stream, tmp_path / name, **{"privacy": privacy, **more})
        cli("privacy", path).ok()
        rows = read_tsv(path / "dp.tsv", None)
        assert len(rows) == T + 1
        totals[name] = {
            level: float(rows[-1][f"epsilon_{level}"]) for level in ("utterance", "user")
        }
    # An utterance costs the promised epsilon; the groups' borders are covered only by more noise.
    assert totals["even"]["utterance"] == totals["clock"]["utterance"] == 1.0
    noise = [
        float(read_tsv(tmp_path / name / "dp.tsv", None)[-1]["scale"]) for name in ("even", "clock")
    ]
    assert noise[0] > noise[1]
    # The paper's accounting underestimates the cost.
    assert totals["paper"]["utterance"] > 3
    assert all(one["user"] > one["utterance"] for one in totals.values())
    config = (tmp_path / "paper.yaml", "--method", "fmp", "--data", f"train={stream}")
    told = cli("init", tmp_path / "again", "--config", *config).ok().err
    assert "a larger epsilon protects less" in told
    plain = begin(stream, tmp_path / "plain")
    cli("privacy", plain).fails(1, "no differential privacy", "privacy")


def test_sweeps_have_noise_too(stream, tmp_path, cli, set_key, monkeypatch):
    monkeypatch.setenv("FEDTOOLS_NONCE", 32 * "0")
    out = tmp_path / "sweep.tsv"
    options = (
        "--set",
        f"rounds={T}",
        "--set",
        "scale=1",
        "--vary",
        "epsilon=1000000,0.01,0.02,0.05",
    )
    for mechanism in ("laplace", "paper"):
        more = ("--set", f"mechanism={mechanism}", "--set", "cap=100")
        cli("rescore-sweep", stream, out, *options, *more).ok()
        few, *many = read_tsv(out, None)
        cli("rescore-sweep", stream, tmp_path / "plain.tsv", "--vary", "scale=1",
            "--set", f"rounds={T}").ok()  # fmt: skip
        (plain,) = read_tsv(tmp_path / "plain.tsv", None)
        assert few["errors"] == plain["errors"]
        assert any(row["errors"] != plain["errors"] for row in many)
    cli("rescore-sweep", stream, out, "--vary", "mechanism=gauss").fails(1, "gauss")


def test_sweeps_check_options_as_experiments_do(stream, tmp_path, cli):
    """All combinations are checked before any is run."""
    out = tmp_path / "sweep.tsv"
    for options, told in (
        (("--set", "alpha=0.9", "--vary", "beta=0.05,0.2"), "alpha + beta is over 1"),
        (("--vary", "smoothing=0.5,2"), "smoothing"),
        (("--vary", "span=0", "--set", "groups=clock"), "span"),
        (("--vary", "epsilon=1e-9", "--set", "mechanism=laplace"), "epsilon"),
        (("--vary", "release=increments", "--set", "mechanism=paper"), "paper"),
        (("--vary", "unit=meeting"), "meeting"),
    ):
        for command in ("rescore-sweep", "rescore-tune"):
            cli(command, stream, out, *options).fails(1, told)
        assert not out.exists()
    cli("rescore-sweep", stream, out, "--vary", "rounds=0,1").fails(1, "'rounds' is 0")
    cli("rescore-sweep", stream, out, "--vary", "scale=[").fails(1, "scale=[", "YAML")
    cli("rescore-tune", stream, out, "--set", "rounds=0", "--vary", "scale=1").fails(1, "rounds")
    cli("rescore-sweep", stream, out).fails(2, "nothing to vary")
    (tmp_path / "g.yaml").write_text("a:\n  b:\n    sigm: [5]\n")
    of_file = ("--config", tmp_path / "g.yaml", "--section", "a.b")
    cli("rescore-sweep", stream, out, *of_file).fails(1, "g.yaml:3: a.b: ", "mean 'sigma'")
    (tmp_path / "g.yaml").write_text("a:\n  b:\n    sigma: 5\n")
    cli("rescore-sweep", stream, out, *of_file).fails(1, "g.yaml:3: a.b: ", "write a list")
    (tmp_path / "g.yaml").write_text("a:\n  b:\n    sigma: [5, x]\n")
    cli("rescore-sweep", stream, out, *of_file).fails(1, "g.yaml", "'sigma' is 'x'")
    assert not out.exists()
    # A default does not change fixed options: the baseline has no beta at all.
    cli("rescore-sweep", stream, out, "--set", "alpha=0.9", "--vary", "beta=0.05,0.1").ok()


def test_sweeps_of_the_papers_mechanism(stream, tmp_path, cli, set_key, monkeypatch):
    """They use cumulative counts, as in the paper's rounds, and warn once."""
    monkeypatch.setenv("FEDTOOLS_NONCE", 32 * "0")
    rows = {}
    for mechanism in ("paper", "laplace"):
        for release in ("cumulative", "increments", None):
            if (mechanism, release) == ("paper", "increments"):
                continue
            out = tmp_path / f"{mechanism}-{release}"
            options = ("--set", f"release={release}") if release else ()
            options += ("--set", f"mechanism={mechanism}", "--set", f"rounds={T}")
            result = cli("rescore-sweep", stream, out, *options, "--vary", "epsilon=0.5,1,20").ok()
            assert result.err.count("larger epsilon protects less") == (mechanism == "paper")
            rows[mechanism, release] = read_tsv(out, None)
    assert rows["paper", None] == rows["paper", "cumulative"]
    assert rows["laplace", None] == rows["laplace", "increments"]
    assert rows["laplace", None] != rows["laplace", "cumulative"]


def test_draws_of_noise(stream, tmp_path, cli, set_key, monkeypatch):
    """All draws differ, the first is that of a sweep without draws; without noise there is one."""
    monkeypatch.setenv("FEDTOOLS_NONCE", 32 * "0")
    options = ("--set", f"rounds={T}", "--set", "mechanism=laplace", "--set", "cap=6")
    options += ("--set", "scale=2", "--vary", "epsilon=0.2,1e9")
    tables = {}
    for draws in (1, 4):
        # One nonce for both.
        out = tmp_path / "sweep"
        cli("rescore-sweep", stream, out, *options, "--draws", draws).ok()
        tables[draws] = read_tsv(out, None)
    assert [row["draw"] for row in tables[4]] == ["1", "2", "3", "4"] * 2
    rows = [{name: row[name] for name in row if name != "draw"} for row in tables[4]]
    assert [rows[0], rows[4]] == tables[1]
    assert len({row["errors"] for row in rows[:4]}) > 1 and rows[4:] == [rows[4]] * 4
    vary = ("--vary", "mechanism=none", "--draws", "4", "--set", f"rounds={T}")
    cli("rescore-sweep", stream, tmp_path / "none", *vary).ok()
    assert [row["draw"] for row in read_tsv(tmp_path / "none", None)] == ["1"]


def test_many_draws_at_once_are_those_one_by_one(stream):
    """This includes clients that add their noise to counts made once."""
    opened = open_stream(stream)
    groups = {client: opened.groups(client, T, SPAN) for client in CLIENTS}
    for trust in ("server", "client"):
        privacy = {"mechanism": "laplace", "epsilon": 1.0, "cap": 6.0, "trust": trust}
        method = FMP(privacy=privacy, scale=2.0, groups="clock", span=SPAN)
        lists, plan = Lists(opened.rescored, method.part(ListWeights)), method.plan(T)
        key = NoiseKey(bytes(range(32)))
        draws = [Releases(plan, key, "a test", draw) for draw in (1, 2, 3)]
        best, counts = simulate_draws(method, lists, groups, draws)
        for number, releases in enumerate(draws):
            alone = simulate(method, lists, groups, releases)
            assert (best[number] == alone[0]).all() and (counts[number] == alone[1]).all()
        assert (counts[0] != counts[1]).any() and (counts[1] != counts[2]).any()


@pytest.mark.parametrize("trust", ["server", "client"])
def test_doubt(stream, tmp_path, key, trust):
    """Rejecting all releases leaves only own counts, on files and in memory."""
    alone = by_hand(stream, alpha=0.0, scale=2.0)
    privacy = {"mechanism": "laplace", "epsilon": 1e6, "cap": 100.0, "trust": trust}
    options = {"privacy": privacy, "scale": 2.0, "sends": "increments"}
    assert best_text(begin(stream, tmp_path / "all", doubt=1e9, **options)) == alone
    believer = begin(stream, tmp_path / "none", doubt=0.3, **options)
    assert best_text(believer) == by_hand(stream, scale=2.0) != alone
    # The rule compares the words of a release with the measured deviation of its noise.
    method = FMP(doubt=0.3, **options)
    plan = method.plan(T)
    for releases in (1, T):
        key_of = NoiseKey(bytes(range(32)))
        senders = CLIENTS if trust == "client" else [""]
        noise = sum(
            plan.release(np.zeros(20_000), key_of, experiment="x", number=number, sender=sender)
            for number in range(releases)
            for sender in senders
        )
        deviation = plan.deviation(releases, len(CLIENTS))
        assert noise.std() == pytest.approx(deviation, rel=0.03)
        words = np.full(50, 0.3 * deviation)
        assert method.believes(words * 1.01, deviation)
        assert not method.believes(words * 0.99, deviation)
    u = np.array([0.0, 0.5, 0.5])
    counts = np.array([1e6, 40.0, 10.0])
    # `</s>`, which has noise too, is not a word.
    assert (method.global_distribution(counts, u, 100.0) == u).all()
    assert method.global_distribution(counts, u, 10.0)[1] == pytest.approx(0.9 * 0.8 + 0.05)


def test_tuning_over_settings_and_draws(stream, tmp_path, key, cli):
    """Settings are chosen by mean errors over epsilons and draws, as in individual sweeps."""
    options = ("--set", f"rounds={T}", "--set", "mechanism=laplace", "--set", "cap=6")
    options += ("--set", "scale=3", "--draws", "3")
    path = tmp_path / "doubt.yaml"
    over = ("--vary", "doubt=0,0.2,1e9", "--over", "epsilon=0.2,5")
    cli("rescore-tune", stream, path, *options, *over).ok()
    # Under the nonce used for the noise.
    shutil.copy(f"{path}.nonce", tmp_path / "sweep.nonce")
    vary = ("--vary", "doubt=0,0.2,1e9", "--vary", "epsilon=0.2,5")
    cli("rescore-sweep", stream, tmp_path / "sweep", *options, *vary).ok()
    errors: dict[float, int] = {}
    for row in read_tsv(tmp_path / "sweep", None):
        errors[float(row["doubt"])] = errors.get(float(row["doubt"]), 0) + int(row["errors"])
    assert len(errors) == 3 and len(set(errors.values())) > 1
    assert errors[yaml.safe_load(path.read_text())["doubt"]] == min(errors.values())
    vary = ("--vary", "doubt=0", "--over", "x=1")
    cli("rescore-tune", stream, path, *options, *vary).fails(2, "x=1")


def test_sweeps_without_words_or_without_errors(stream, tmp_path, cli):
    """No rate is divided by zero: without words there is no rate, without errors no change."""
    folder, out = tmp_path / "stream", tmp_path / "out"
    shutil.copytree(stream, folder)
    best: dict[str, tuple[float, str]] = {}
    for line in (folder / "nbest.tsv").read_text().splitlines():
        name, _, acoustic, _, words = line.split("\t")
        best[name] = max(best.get(name, (-math.inf, "")), (float(acoustic), words))
    # Only the acoustic score counts, whose best hypotheses are the references.
    only = [f"--set={option}=0" for option in ("lm_weight", "nnlm", "word_score", "scale")]
    text = folder / "text"
    text.write_text("".join(f"{name}\n" for name in sorted(best)))
    for command in ("rescore-sweep", "rescore-tune"):
        cli(command, folder, out, "--vary", "sigma=5").fails(1, f"{text}: no words in the")
    text.write_text("".join(f"{name} {best[name][1]}".rstrip() + "\n" for name in sorted(best)))
    assert cli("rescore-sweep", folder, out, *only, "--vary", f"rounds={T}").ok().err == ""
    (row,) = read_tsv(out, None)
    figures = ("errors", "wer", "relative", "low", "high")
    assert [row[name] for name in figures] == ["0", "0.00", "-", "-", "-"]


def test_tuning_of_what_is_no_number(stream, tmp_path, cli):
    vary = ("--vary", "groups=even,clock", "--vary", "continuous=true,false")
    vary += ("--vary", "unit=word,user,utterance")
    options = ("--set", f"span={SPAN}", "--set", f"rounds={T}")
    result = cli("rescore-tune", stream, tmp_path / "best.yaml", *vary, *options).ok()
    best = yaml.safe_load((tmp_path / "best.yaml").read_text())
    assert best["groups"] in ("even", "clock") and best["groups"] in result.out
    assert "warning" not in result.err


def test_what_is_sent_by_default(stream, tmp_path, key):
    """Increments with noise, which cost less; otherwise cumulative counts, as in the paper."""
    for mechanism, adds_up in (("laplace", True), ("paper", False), ("none", False)):
        privacy = {"mechanism": mechanism, "epsilon": 1e6, "cap": 100.0}
        path = begin(stream, tmp_path / mechanism, privacy=privacy, sigma=1.0)
        first, last = (sum(sent(path, number).values()).sum() for number in (1, T))
        assert last == pytest.approx(first if adds_up else T * first, rel=0.3)


def test_the_example_of_the_readme(stream, tmp_path, key, cli):
    """The command is accepted, and the noise of all clients is as the text says."""
    text = (ROOT / "egs/ami/rescore1/README.md").read_text().partition("## Privacy")[2]
    example = yaml.safe_load(text.split("```yaml")[1].split("```")[0])
    noise = {}
    for name, more in {"": "", "groups": "even", "sends": "cumulative"}.items():
        options = example["method_conf"] | ({name: more} if name else {})
        config = {"task": "rescore", "rounds": 10, "method_conf": options}
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
        path = tmp_path / f"exp{name}"
        arguments = ("--config", tmp_path / "c.yaml", "--method", "fmp", "--data")
        inside("init", path, *arguments, f"train={stream}").ok()
        inside("rounds", path).ok()
        cli("privacy", path).ok()
        noise[name] = read_tsv(path / "dp.tsv", None)[-1]["scale"]
    told = " ".join(text.split("## ")[0].split())
    assert f"the scale of noise is {noise['']} words" in told
    assert f"With `groups: even` it is {noise['groups']}, for both values of `sends`" in told
    assert f"cumulative counts need {noise['sends']}" in told


def test_bad_options(stream, tmp_path, cli):
    for options, told in (
        ({"alpha": 0.9, "beta": 0.2}, "over 1"),
        ({"alpha": 0.5, "beta": 0.5, "smoothing": 0.0}, "smoothing"),
        ({"sigma": -1.0}, "sigma"),
        ({"sigma": 1e-300}, "sigma"),
        ({"sigma": 1e200}, "sigma"),
        ({"privacy": {"mechanism": "laplace"}, "smoothing": 0.0}, "smoothing must be above 0"),
        ({"privacy": {"mechanism": "laplace", "epsilon": 0}}, "epsilon"),
        ({"privacy": {"mechanism": "laplace", "epsilon": -1.0}}, "epsilon"),
        ({"privacy": {"mechanism": "gauss"}}, "gauss"),
        ({"privacy": {"release": "increments"}}, "sends"),
        ({"doubt": 0.5}, "doubt needs privacy"),
        ({"doubt": 0.5, "privacy": {"mechanism": "paper"}}, "doubt needs privacy"),
        ({"groups": "clock"}, "span"),
        ({"groups": "clock", "span": 0}, "span"),
        ({"privacy": {"mechanism": "paper"}, "sends": "increments"}, "paper"),
        ({"privacy": {"mechanism": "paper"}, "alpha": 1.0, "beta": 0.0}, "alpha"),
    ):
        config = {"task": "rescore", "rounds": T, "method_conf": options}
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
        arguments = ("--config", tmp_path / "c.yaml", "--method", "fmp")
        cli("init", tmp_path / "exp", *arguments, "--data", f"train={stream}").fails(1, told)
        assert not (tmp_path / "exp").exists()
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"task": "rescore"}))
    arguments = ("--config", tmp_path / "c.yaml", "--method", "fedavg")
    cli("init", tmp_path / "exp", *arguments, "--data", f"train={stream}").fails(1, "rescore")


def test_who_is_drawn_must_not_depend_on_who_is_there(stream, tmp_path, key, cli):
    """Sampling is refused with privacy, since the sample depends on which clients exist."""
    privacy = {"mechanism": "laplace", "cap": 30.0}
    for number, (sampled, unit) in enumerate(
        [(2, "user"), (1, "utterance"), (0.5, "word"), (None, "user"), (1.0, "utterance")]
    ):
        options = {"privacy": {**privacy, "unit": unit}}
        config = {"task": "rescore", "method_conf": options, "clients_per_round": sampled}
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
        arguments = ("--config", tmp_path / "c.yaml", "--method", "fmp")
        path = tmp_path / str(number)
        result = cli("init", path, *arguments, "--data", f"train={stream}")
        if number < 3:
            result.fails(1, "laplace", f"clients_per_round: {sampled}")
            assert not path.exists()
        else:
            result.ok()
    for number in (3, 4):
        inside("rounds", tmp_path / str(number)).ok()
        cli("privacy", tmp_path / str(number)).ok()
        rows = read_tsv(tmp_path / str(number) / "dp.tsv", None)
        for unit in ("user", "utterance"):
            assert all(math.isfinite(float(row[f"epsilon_{unit}"])) for row in rows)


def test_rescored_lists_and_who_said_them(stream, tmp_path, cli):
    data, rescored = tmp_path / "data", tmp_path / "rescored"
    for folder, names in (
        (data, ("utt2client", "text", "utt2spk", "segments")),
        (rescored, ("nbest.tsv", "nnlm.scp", "words.txt", "unigram.tsv")),
    ):
        folder.mkdir()
        for name in names:
            shutil.copy(stream / name, folder)
    cli("rescore-stream", data, rescored, tmp_path / "out").ok()
    assert simulated(tmp_path / "out") == simulated(stream)
    # Tables missing from the folders would be of other data.
    for name in ("segments", "text"):
        (data / name).rename(tmp_path / name)
    cli("rescore-stream", data, rescored, tmp_path / "out").ok()
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {
        "nbest.tsv", "nnlm.scp", "unigram.tsv", "utt2client", "utt2spk", "words.txt",
    }  # fmt: skip
    lines = (data / "utt2client").read_text().splitlines(keepends=True)
    (data / "utt2client").write_text("".join(lines[1:]))
    cli("rescore-stream", data, rescored, tmp_path / "two").fails(1, lines[0].split()[0])
    assert not (tmp_path / "two").exists()
