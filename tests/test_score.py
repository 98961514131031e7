"""Scoring: sclite and sc_stats are the oracles; simulated speakers for the intervals."""

from __future__ import annotations

import math
import random
import re
import string
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from conftest import run
from hypothesis import given, settings
from hypothesis import strategies as st
from scored import SCTK, needs_sclite, write_data

from fedtools.core.tables import read_tsv
from fedtools.data.trn import characters, trn_ids, words
from fedtools.score.align import Counts, align, count_errors
from fedtools.score.bootstrap import interval, resample
from fedtools.score.compare import COLUMNS as COMPARE_COLUMNS
from fedtools.score.mapsswe import mapsswe, segment_errors
from fedtools.score.wer import COLUMNS

sentences = st.lists(st.sampled_from("abc"), max_size=8)


def corrupt(draw: random.Random, sentence: list[str], vocabulary: str, rate: float) -> list[str]:
    """Return words with all three kinds of errors, equally frequent."""
    out = []
    for word in sentence:
        u = draw.random()
        if u >= rate / 3:
            out.append(draw.choice(vocabulary) if u < 2 * rate / 3 else word)
        if draw.random() < rate / 3:
            out.append(draw.choice(vocabulary))
    return out


def random_pairs(count: int, seed: int) -> list[tuple[list[str], list[str]]]:
    """Return pairs of few different words, with many equal-cost alignments; half are unrelated."""
    draw = random.Random(seed)
    pairs = []
    for _ in range(count):
        vocabulary = "abcdefgh"[: draw.choice([2, 3, 8])]
        ref = [draw.choice(vocabulary) for _ in range(draw.randint(0, draw.choice([3, 12, 25])))]
        hyp = [draw.choice(vocabulary) for _ in range(draw.randint(0, 15))]
        related = draw.random() < 0.5
        pairs.append((ref, corrupt(draw, ref, vocabulary, 0.5) if related else hyp))
    return pairs


def small_rows() -> list[tuple[str, str, str, str, str]]:
    return [
        ("s1-a", "s1", "north", "the cat sat", "the cat sat"),
        ("s1-b", "s1", "north", "on a mat", "on mat"),
        ("s2-a", "s2", "north", "it was warm", "it was very warm"),
        ("s3-a", "s3", "south", "rain fell", ""),
        ("s4-a", "s4", "south", "so we left", "so he left"),
    ]


def sgml_paths(folder: Path) -> dict[str, str]:
    """Return the letters of sclite's alignments of ref.trn and hyp.trn."""
    files = ("-r", "ref.trn", "trn", "-h", "hyp.trn", "trn")
    run(SCTK / "sclite", *files, "-i", "rm", "-o", "sgml", cwd=folder).ok()
    found = re.findall(
        r'<PATH id="\((.*?)\)"[^>]*>\n(.*?)\n</PATH>',
        (folder / "hyp.trn.sgml").read_text(encoding="utf-8"),
        re.S,
    )
    return {name: "".join(re.findall(r"(?:^|:)([CSDI]),", steps)) for name, steps in found}


def table_rows(text: str) -> dict[str, list[str]]:
    """Return speaker -> the eight figures of sclite's summary, or of ours."""
    rows = {}
    for line in text.splitlines():
        cells = line.replace("|", " ").split()
        if line.lstrip().startswith("|") and len(cells) == 9 and cells[1][0].isdigit():
            rows[cells[0].lower().replace("-", "_")] = cells[1:]
    return {name: cells for name, cells in rows.items() if name not in ("mean", "s.d.", "median")}


@needs_sclite
def test_alignment_is_that_of_sclite_ties_included(tmp_path):
    pairs = random_pairs(5000, seed=1)
    for side, name in enumerate(("ref.trn", "hyp.trn")):
        lines = (f"{' '.join(pair[side])} (s-{i})\n" for i, pair in enumerate(pairs))
        (tmp_path / name).write_text("".join(lines))
    expected = sgml_paths(tmp_path)
    assert len(expected) == len(pairs)
    wrong = {i: pair for i, pair in enumerate(pairs) if align(*pair) != expected[f"s-{i}"]}
    assert not wrong


@lru_cache(None)
def least_cost(ref: tuple[str, ...], hyp: tuple[str, ...]) -> int:
    if not ref or not hyp:
        return 3 * (len(ref) + len(hyp))
    return min(
        least_cost(ref[1:], hyp[1:]) + 4 * (ref[0] != hyp[0]),
        least_cost(ref[1:], hyp) + 3,
        least_cost(ref, hyp[1:]) + 3,
    )


@given(sentences, sentences)
@settings(max_examples=300, deadline=None)
def test_alignment_explains_both_sides_at_the_least_cost(ref, hyp):
    letters = align(ref, hyp)
    counts = Counts.of(letters)
    assert counts.tokens == len(ref)
    assert counts.correct + counts.substitutions + counts.insertions == len(hyp)
    cost = 4 * counts.substitutions + 3 * (counts.deletions + counts.insertions)
    assert cost == least_cost(tuple(ref), tuple(hyp))
    left, right = iter(ref), iter(hyp)
    for letter in letters:
        one = next(left) if letter != "I" else None
        two = next(right) if letter != "D" else None
        if letter in "CS":
            assert (one == two) == (letter == "C")


def test_case_of_ascii_alone_is_ignored():
    assert count_errors(["The", "É"], ["tHE", "é"]) == Counts(1, 1, 0, 0)


def test_characters_have_blanks_as_espnet_has():
    assert characters("ab c") == ["a", "b", "<space>", "c"]
    assert characters("") == []


@needs_sclite
def test_sclite_agrees_on_every_table(cli, tmp_path):
    """This includes sclite's markup, Unicode blanks, speakers with '-', and either case."""
    draw = random.Random(2)
    alphabet = [*string.punctuation, *"abAB01", "é", "É", "ß", "\u00a0", "語", "a-", "<unk>"]
    rows = []
    for number in range(600):
        speaker = draw.choice(["a-b", "a-c", "a_d", "A.e", "f+g"])
        # A no-break space at an end would be trailing whitespace to the reader of tables.
        ref, hyp = (
            " ".join(
                f"x{''.join(draw.choices(alphabet, k=draw.randint(0, 2)))}y"
                if draw.random() < 0.3
                else draw.choice([c for c in alphabet if c.strip()])
                for _ in range(draw.randint(1, 6))
            )
            for _ in range(2)
        )
        hyp = draw.choice([hyp, ref, ref.lower(), ""])
        rows.append((f"{speaker}-{number:03d}", speaker, "c", ref, hyp))
    rows.append(("z-empty", "z", "c", "", "a b"))
    data, hyp = write_data(tmp_path / "data", rows)
    cli("score", data, hyp, tmp_path / "out").ok()
    for rate in ("wer", "cer"):
        folder = tmp_path / "out" / f"score_{rate}"
        files = ("-r", "ref.trn", "trn", "-h", "hyp.trn", "trn")
        command = (SCTK / "sclite", *files, "-i", "rm", "-o", "sum", "stdout")
        theirs = table_rows(run(*command, cwd=folder).ok().out)
        text = (folder / "result.txt").read_text(encoding="utf-8")
        assert table_rows(text) == theirs
        assert len(theirs) == 7
        # The alignments below the table are sclite's too.
        scores = re.findall(r"id: \((.*)\)\nScores: \(#C #S #D #I\) (.*)\n", text)
        paths = sgml_paths(folder)
        assert {name.lower(): score for name, score in scores} == {
            name: " ".join(str(letters.count(x)) for x in "CSDI") for name, letters in paths.items()
        }


def test_trn_ids_keep_speakers_apart():
    ids = trn_ids({"a-b-1": "a-b", "a_b-1": "a_b", "A_b-1": "A_b"})
    speakers = [name.split("-")[0].lower() for name in ids.values()]
    assert len(set(speakers)) == 3
    assert len({name.lower() for name in trn_ids({"s-x": "s", "s-X": "s"}).values()}) == 2


def test_score_writes_counts_rates_and_totals(cli, tmp_path):
    data, hyp = write_data(tmp_path / "data", small_rows())
    out = cli("score", data, hyp, tmp_path / "out").ok().out
    rows = {row["client"]: row for row in read_tsv(tmp_path / "out" / "wer.tsv", COLUMNS)}
    assert list(rows) == ["north", "south", "average", "all"]
    counts = ("utterances", "words", "substitutions", "deletions", "insertions", "wer")
    assert [rows["north"][c] for c in counts] == ["3", "9", "0", "1", "1", "22.22"]
    assert [rows["south"][c] for c in counts] == ["2", "5", "1", "2", "0", "60.00"]
    assert [rows["average"][c] for c in counts] == ["5", "14", "1", "3", "1", "41.11"]
    assert [rows["all"][c] for c in counts] == ["5", "14", "1", "3", "1", "35.71"]
    assert "41.11" in out
    assert len({len(line) for line in out.splitlines()}) == 1
    trn = (tmp_path / "out" / "score_wer" / "hyp.trn").read_text()
    assert trn.splitlines()[3] == "(s3-s3-a)"
    assert "so we left (s4-s4-a)" in (tmp_path / "out" / "score_wer" / "ref.trn").read_text()
    cer = (tmp_path / "out" / "score_cer" / "ref.trn").read_text().splitlines()[-1]
    assert cer == "s o <space> w e <space> l e f t (s4-s4-a)"


def test_score_is_the_same_bytes_again_and_changes_with_the_seed(cli, tmp_path):
    data, hyp = write_data(tmp_path / "data", many_speakers(north=12, south=15))
    texts = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        cli("score", data, hyp, tmp_path / name, "--seed", seed, "--resamples", 50).ok()
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        assert len(files) == 8
        texts.append([path.read_bytes() for path in files])
    assert texts[0] == texts[1] != texts[2]


def test_score_without_clients_has_one_group(cli, tmp_path):
    data, hyp = write_data(tmp_path / "data", small_rows(), clients=False)
    cli("score", data, hyp, tmp_path / "out").ok()
    rows = read_tsv(tmp_path / "out" / "wer.tsv", COLUMNS)
    assert [row["client"] for row in rows] == ["average", "all"]
    assert {row["wer"] for row in rows} == {"35.71"}


def damaged(cli, tmp_path, name: str, change, *said: str) -> None:
    data, hyp = write_data(tmp_path / "data", small_rows())
    path = data / name
    text = change(path.read_text())
    path.unlink() if text is None else path.write_text(text)
    cli("score", data, hyp, tmp_path / "out").fails(1, f"data/{name}", *said)
    cli("compare", data, hyp, hyp, "--out", tmp_path / "c.tsv").fails(1, f"data/{name}", *said)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "c.tsv").exists()


@pytest.mark.parametrize("name", ["hyp", "utt2spk", "utt2client"])
def test_other_utterances_are_refused(cli, tmp_path, name):
    damaged(
        cli,
        tmp_path,
        name,
        lambda text: "".join(text.splitlines(True)[2:]),
        "2 utterances missing",
        "s1-a",
    )
    damaged(cli, tmp_path, name, lambda text: text + "z z\n", "1 utterances too many", "'z'")


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("utt2spk", " s3", " s/3", "speaker 's/3'"),
        ("utt2client", " south", " all", "'all'"),
        ("utt2client", " south", " average", "'average'"),
        ("utt2client", " south", " ../x", "'../x'"),
        ("text", "rain fell", "", "trailing whitespace"),
        ("text", "rain", " rain", "doubled"),
        ("hyp", "s3-a\n", "s1-a\n", "is duplicated"),
        ("hyp", "s3-a\n", "s0-a\n", "not in order"),
    ],
)
def test_bad_tables_are_refused(cli, tmp_path, name, old, new, said):
    damaged(cli, tmp_path, name, lambda text: text.replace(old, new), said)


def test_missing_and_empty_files_are_refused(cli, tmp_path):
    damaged(cli, tmp_path, "hyp", lambda text: None, "cannot be read")
    damaged(cli, tmp_path, "utt2spk", lambda text: None)
    damaged(cli, tmp_path, "text", lambda text: "", "empty")
    cli("score", tmp_path / "none", tmp_path / "hyp", tmp_path / "out").fails(1, "none")


def test_a_client_without_a_word_is_refused(cli, tmp_path):
    rows = [(*row[:3], "" if row[2] == "south" else row[3], row[4]) for row in small_rows()]
    data, hyp = write_data(tmp_path / "data", rows)
    cli("score", data, hyp, tmp_path / "out").fails(1, "'south'", "no word")


def test_usage_errors(cli, tmp_path):
    data, hyp = write_data(tmp_path / "data", small_rows())
    cli("score", data, hyp).fails(2)
    cli("score", data, hyp, tmp_path / "out", "--resamples", 0).fails(2)
    cli("compare", data, hyp).fails(2)


# --- the bootstrap


def simulated(draw: np.random.Generator, speakers: int, deviation: float) -> tuple:
    """Return errors and words of speakers with normal error rates around 0.3; 400 words each."""
    rates = draw.normal(0.3, deviation, (speakers, 1))
    return 400 * rates, np.full((speakers, 1), 400)


def test_intervals_have_the_width_of_the_known_variance():
    draw = np.random.default_rng(0)
    groups = {name: simulated(draw, 80, sd) for name, sd in (("one", 0.05), ("two", 0.1))}
    # The variance of these very speakers: the bootstrap does not know the simulation's.
    sd = {name: 100 * np.std(e / w) / np.sqrt(80) for name, (e, w) in groups.items()}
    sd["average"] = sd["all"] = np.hypot(sd["one"], sd["two"]) / 2
    rates = resample(
        {k: v[0] for k, v in groups.items()}, {k: v[1] for k, v in groups.items()}, 4000, 0
    )
    for name, deviation in sd.items():
        low, high = interval(rates[name][:, 0])
        assert high - low == pytest.approx(2 * 1.96 * deviation, rel=0.06)


def test_95_of_100_intervals_hold_the_truth():
    draw = np.random.default_rng(1)
    held = 0
    for trial in range(400):
        errors, tokens = simulated(draw, 40, 0.08)
        rates = resample({"c": errors}, {"c": tokens}, 400, trial)
        low, high = interval(rates["all"][:, 0])
        held += low <= 30 <= high
    assert 0.90 <= held / 400 <= 0.98


def test_clients_of_one_speaker_are_drawn_from_each_other():
    draw = np.random.default_rng(2)
    users = {f"u{i}": simulated(draw, 1, 0.1) for i in range(60)}
    errors, tokens = ({k: v[side] for k, v in users.items()} for side in (0, 1))
    rates = resample(errors, tokens, 4000, 0)
    assert np.isnan(interval(rates["u3"][:, 0])).all()
    low, high = interval(rates["average"][:, 0])
    truth = 100 * np.std([e[0, 0] / 400 for e in errors.values()]) / np.sqrt(60)
    assert high - low == pytest.approx(2 * 1.96 * truth, rel=0.06)


def many_speakers(**clients: int) -> list[tuple]:
    """Return rows of `write_data`: client -> speakers, every second one with an error."""
    return [
        (f"{client}{number:02d}-a", f"{client}{number:02d}", client, "a b", "a b" if odd else "a")
        for client, count in clients.items()
        for number in range(count)
        for odd in [number % 2]
    ]


def test_speakers_are_drawn_whole_whatever_they_said(cli, tmp_path):
    """Utterances are not drawn: their errors are dependent, and that interval is far narrower.

    Of 40 speakers with ten utterances each, half lose every second word and half lose none: a draw
    with k of the former has an error rate of k / 40 of 50 %, and k is binomial.
    """
    rows = [
        (f"s{number:02d}-{utterance}", f"s{number:02d}", "c", "a b", "a b" if number % 2 else "a")
        for number in range(40)
        for utterance in range(10)
    ]
    data, hyp = write_data(tmp_path / "data", rows)
    below = np.cumsum([math.comb(40, k) / 2**40 for k in range(41)])
    expected = [f"{50 * np.searchsorted(below, share) / 40:.2f}" for share in (0.025, 0.975)]
    assert expected == ["17.50", "32.50"]
    cli("score", data, hyp, tmp_path / "out", "--resamples", 4000).ok()
    options = ("--out", tmp_path / "c.tsv", "--resamples", 4000)
    cli("compare", data, hyp, data / "text", *options).ok()
    for path, name in ((tmp_path / "out/wer.tsv", "wer"), (tmp_path / "c.tsv", "difference")):
        for row in read_tsv(path, None):
            assert [row[f"{name}_low"], row[f"{name}_high"]] == expected, row["client"]


def test_fewer_than_ten_speakers_have_no_interval(cli, tmp_path):
    data, hyp = write_data(tmp_path / "data", many_speakers(nine=9, ten=10))
    out = cli("score", data, hyp, tmp_path / "out").ok().out
    rows = {row["client"]: row for row in read_tsv(tmp_path / "out" / "wer.tsv", COLUMNS)}
    assert [rows[name]["speakers"] for name in rows] == ["9", "10", "19", "19"]
    assert [rows["nine"][name] for name in ("wer", "wer_low", "wer_high")] == ["27.78", "-", "-"]
    assert float(rows["ten"]["wer_low"]) < 25 < float(rows["ten"]["wer_high"])
    # If one of the clients has no interval, their mean has none either.
    assert {rows[name]["cer_low"] for name in ("average", "all")} == {"-"}
    nine = next(line for line in out.splitlines() if line.startswith("nine"))
    assert "[" not in nine
    difference = cli("compare", data, hyp, hyp, "--out", tmp_path / "c.tsv").ok().out
    assert "0.00  [0.00, 0.00]" in difference
    low = {row["client"]: row["difference_low"] for row in read_tsv(tmp_path / "c.tsv", None)}
    assert low == {"nine": "-", "ten": "0.00", "average": "-", "all": "-"}


# --- the test between two systems


def two_systems(count: int, seed: int, rates: tuple[float, float]) -> list[tuple]:
    """Return two systems' words; each sentence ends in two words that both have right."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        ref = [draw.choice("abcdefg") for _ in range(draw.randint(1, 20))]
        systems = [[*corrupt(draw, ref, "abcdefg", rate), "y", "z"] for rate in rates]
        rows.append((number, [*ref, "y", "z"], *systems))
    return rows


@needs_sclite
@pytest.mark.parametrize("rates", [(0.2, 0.25), (0.5, 0.5), (0.05, 0.1)])
def test_mapsswe_is_that_of_sc_stats(tmp_path, rates):
    rows = two_systems(150, 3, rates)
    alignments = []
    for column, name in ((2, "a"), (3, "b")):
        folder = tmp_path / name
        folder.mkdir()
        for side, trn in ((1, "ref.trn"), (column, "hyp.trn")):
            lines = (f"{' '.join(row[side])} (s{row[0] % 9}-{row[0]})\n" for row in rows)
            (folder / trn).write_text("".join(lines))
        sgml_paths(folder)
        alignments.append((folder / "hyp.trn.sgml").read_text().replace("hyp.trn", name))
    (tmp_path / "both").write_text("".join(alignments))
    stats = f"{SCTK}/sc_stats -p -t mapsswe -v -n x < both && grep -a MTCH_PR x.stats.mapsswe"
    out = run("sh", "-c", stats, cwd=tmp_path).ok().out
    said = re.search(r"# segs: (\d+)\).*mean: +(\S+)\).*Z Stat: +(\S+)\)", out)
    result = mapsswe([(align(row[1], row[2]), align(row[1], row[3])) for row in rows])
    assert result.segments == int(said[1]) > 50
    assert result.difference == pytest.approx(float(said[2]), abs=6e-4)
    assert result.z == pytest.approx(float(said[3]), abs=6e-4)


def test_segments_are_parted_by_two_words_correct_in_both():
    assert segment_errors("SCCS", "CCCS") == [(1, 0), (1, 1)]
    assert segment_errors("SCS", "CCS") == [(2, 1)]
    assert segment_errors("SCICS", "CCCC") == [(3, 0)]  # an insertion separates the correct words
    assert segment_errors("CC", "CCI") == [(0, 1)]
    assert segment_errors("", "II") == [(0, 2)]
    assert segment_errors("CCC", "CCC") == []


@given(sentences, sentences, sentences)
@settings(max_examples=200, deadline=None)
def test_mapsswe_is_symmetric_and_loses_no_error(ref, one, two):
    a, b = align(ref, one), align(ref, two)
    segments = segment_errors(a, b)
    assert segment_errors(b, a) == [(y, x) for x, y in segments]
    totals = [sum(errors[side] for errors in segments) for side in (0, 1)]
    assert totals == [Counts.of(a).errors, Counts.of(b).errors]
    assert (0, 0) not in segments


def test_mapsswe_of_equal_systems_has_uniform_p():
    draw = np.random.default_rng(4)
    values = []
    for _ in range(500):
        wrong = draw.random((2, 400)) < 0.2
        a, b = ("".join("S" if w else "C" for w in row) for row in wrong)
        values.append(mapsswe([(a[i : i + 10], b[i : i + 10]) for i in range(0, 400, 10)]).p)
    # Kolmogorov and Smirnov's distance; 1.63 / sqrt(n) is exceeded once in a hundred.
    ordered = np.sort(values)
    distance = np.abs(ordered - (np.arange(500) + 0.5) / 500).max()
    assert distance < 1.63 / np.sqrt(500)
    assert np.mean(ordered < 0.05) == pytest.approx(0.05, abs=0.025)


def test_compare_says_who_wins(cli, tmp_path):
    rows = two_systems(300, 5, (0.1, 0.3))
    ids = [(f"s{row[0] % 20:02d}-{row[0]:03d}", f"s{row[0] % 20:02d}") for row in rows]
    clients = ["even", "odd"]
    for name, column in (("a", 2), ("b", 3)):
        write_data(
            tmp_path / name,
            [
                (*key, clients[int(key[1][1:]) % 2], " ".join(row[1]), " ".join(row[column]))
                for key, row in zip(ids, rows, strict=True)
            ],
        )
    a, b = tmp_path / "a" / "hyp", tmp_path / "b" / "hyp"
    out = cli("compare", tmp_path / "a", a, b, "--out", tmp_path / "out.tsv").ok().out
    found = {row["client"]: row for row in read_tsv(tmp_path / "out.tsv", COMPARE_COLUMNS)}
    assert list(found) == ["even", "odd", "average", "all"]
    everything = found["all"]
    assert float(everything["difference_high"]) < 0
    assert float(everything["p"]) < 1e-6
    assert everything["difference"] in out
    assert found["average"]["p"] == "-"
    # The intervals of a difference are paired: narrower than those of either system.
    cli("score", tmp_path / "a", a, tmp_path / "scored").ok()
    alone = read_tsv(tmp_path / "scored" / "wer.tsv", COLUMNS)[-1]
    assert alone["wer"] == everything["wer_a"]
    same = cli("compare", tmp_path / "a", a, a).ok().out.splitlines()[-1].split()
    assert same[3:] == ["0.00", "[0.00,", "0.00]", same[6], "0.000", "1"]


def test_words_split_at_ascii_blanks_alone():
    assert words("a\u00a0b c") == ["a\u00a0b", "c"]
    assert words("a;b {c}") == ["a；b", "｛c｝"]
