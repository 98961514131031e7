"""Rows of FMP and its controls against algorithm 1, written out word by word for each."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import kaldiio
import pytest
import yaml
from conftest import inside
from fmp_world import T
from rescored_world import CLIENTS, make_stream

from fedtools.core.tables import read_tsv
from fedtools.data.datadir import read_table, write_table

PERSONS = {"ann": "FEE001", "bob": "MEE002", "cat": "FEE003"}
# Ann and Cat are in one series of meetings, so that Bob stands in for either.
MEETINGS = {"ann": "ES2004a", "bob": "IS1009a", "cat": "ES2004b"}
ALPHA, BETA, SIGMA, SCALE, SMOOTHING = 0.5, 0.25, 5.0, 2.0, 0.1


@pytest.fixture(scope="module")
def stream(tmp_path_factory) -> Path:
    folder = make_stream(tmp_path_factory.mktemp("rows") / "stream")
    owner = read_table(folder / "utt2client")
    data = folder.parent / "data"
    data.mkdir()
    for name, of in (("utt2person", PERSONS), ("utt2meeting", MEETINGS)):
        write_table(data / name, {one: of[client] for one, client in owner.items()})
    return folder


class ByHand:
    """Algorithm 1 with dictionaries; a row may count differently, or use other clients' counts."""

    def __init__(self, folder: Path):
        self.lists: dict[str, list[list[str]]] = {}
        for line in (folder / "nbest.tsv").read_text().splitlines():
            fields = line.split("\t")
            self.lists.setdefault(fields[0], []).append(fields)
        self.scores = kaldiio.load_scp(str(folder / "nnlm.scp"))
        self.text = read_table(folder / "text")
        rows = [line.split("\t") for line in (folder / "unigram.tsv").read_text().splitlines()[2:]]
        total = sum(int(count) + 1 for _, count, _ in rows)
        self.u = {word: (int(count) + 1) / total for word, count, _ in rows}
        self.share = {word: math.log(int(words) or 1) for word, _, words in rows}
        owner = read_table(folder / "utt2client")
        begin = {
            name: float(value.split()[1]) for name, value in read_table(folder / "segments").items()
        }
        self.said = {
            client: sorted((one for one in owner if owner[one] == client), key=begin.get)
            for client in CLIENTS
        }

    def known(self, word: str) -> str:
        return word if word in self.u else "<unk>"

    def distribution(self, counts: Counter) -> dict[str, float]:
        mass = sum(counts.values())
        return {
            word: (1 - SMOOTHING) * counts[word] / mass + SMOOTHING * p if mass else p
            for word, p in self.u.items()
        }

    def scored(self, name: str, q_bar: dict, q: dict, alpha: float, beta: float) -> list[float]:
        at, found = 0, []
        for _, _, acoustic, lm, words in self.lists[name]:
            split = words.split()
            neural = float(self.scores[name][at : at + len(split) + 1].sum())
            at += len(split) + 1
            for word in map(self.known, split):
                g = (1 - alpha - beta) * self.u[word] + alpha * q_bar[word] + beta * q[word]
                neural += SCALE * math.log(g / self.u[word]) - self.share[word]
            found.append(float(acoustic) + 0.5 * float(lm) + 0.5 * neural)
        return found

    def counted(self, name: str, kind: str, scores: list[float]) -> Counter:
        found: Counter = Counter()
        weights = [math.exp(-(rank**2) / (2 * SIGMA**2)) for rank in range(len(scores))]
        if kind == "adapted":
            weights = [float(one == scores.index(max(scores))) for one in range(len(scores))]
        if kind == "posterior":
            likely = [math.exp(one - max(scores)) for one in scores]
            weights = [one / sum(likely) for one in likely]
        hypotheses = [line[4] for line in self.lists[name]]
        if kind == "reference":
            weights, hypotheses = [1.0], [self.text[name]]
        for weight, words in zip(weights, hypotheses, strict=True):
            for word in map(self.known, words.split()):
                found[word] += weight
        return found

    def errors(
        self,
        alpha: float = ALPHA,
        beta: float = BETA,
        kind: str = "kernel",
        others: dict[str, str] | None = None,
        static: Counter | None = None,
        without: tuple[str, ...] = (),
    ) -> dict[str, tuple[int, int]]:
        """Return person -> words and errors; hypotheses are at most as long as references."""
        own: dict[str, Counter] = {client: Counter() for client in CLIENTS}
        everybody, best = Counter(), {}
        for number in range(T + 1):
            before = {client: Counter(counts) for client, counts in own.items()}
            q_bar = self.distribution(everybody if static is None else static)
            for client in CLIENTS:
                size, more = divmod(len(self.said[client]), T + 1)
                first = number * size + min(number, more)
                q = self.distribution(before[others[client] if others else client])
                for name in self.said[client][first : first + size + (number < more)]:
                    scores = self.scored(name, q_bar, q, alpha, beta)
                    best[name] = self.lists[name][scores.index(max(scores))][4]
                    own[client] += self.counted(name, kind, scores)
            everybody = sum(own.values(), Counter())
        return {PERSONS[one]: self._counts(one, best, without) for one in CLIENTS}

    def _counts(self, client: str, best: dict[str, str], without: tuple[str, ...]):
        from jiwer import process_words

        words = errors = 0
        for name in self.said[client]:
            said, heard = (
                [word for word in text.split() if word not in without]
                for text in (self.text[name], best[name])
            )
            words += len(said)
            if said and heard:
                found = process_words(" ".join(said), " ".join(heard))
                errors += found.substitutions + found.deletions + found.insertions
            else:
                errors += max(len(said), len(heard))
        return words, errors


ROWS = {
    "plain": {},
    "beta": {"alpha": 0, "beta": 0.75},
    "another": {"alpha": 0, "beta": 0.75, "clients": "another"},
    "static": {"alpha": 0.75, "beta": 0, "everybody": "static"},
    "adapted": {"counts": "adapted"},
    "posterior": {"counts": "posterior"},
    "reference": {"counts": "reference"},
}


def compare(stream: Path, folder: Path, rows: dict, *more: str):
    (folder / "rows.yaml").write_text(yaml.safe_dump({"sweeps": {"rows": rows}}))
    options = ("--config", folder / "rows.yaml", "--set", f"scale={SCALE}", "--set", f"rounds={T}")
    return inside("rescore-rows", stream, stream.parent / "data", folder / "out", *options, *more)


def test_rows_by_hand(stream, tmp_path):
    (tmp_path / "static").write_text("x w29 w28 w29 w27 nothing\ny w05 w05\n")
    (tmp_path / "fillers").write_text("w29\nw05\n")
    more = ("--static", tmp_path / "static", "--without", tmp_path / "fillers")
    done = compare(stream, tmp_path, ROWS, *more).ok()
    found = read_tsv(tmp_path / "out", ["row", "scored", "person", "words", "errors"])
    hand, static = ByHand(stream), Counter({"w29": 2, "w28": 1, "w27": 1, "w05": 2, "<unk>": 1})
    # Bob may get either of the others, depending on the seed.
    drawn = [{"ann": "bob", "bob": bob, "cat": "bob"} for bob in ("ann", "cat")]
    different = set()
    for name, options in ROWS.items():
        for scored, without in (("all", ()), ("without", ("w29", "w05"))):
            own = [row for row in found if (row["row"], row["scored"]) == (name, scored)]
            errors = {row["person"]: (int(row["words"]), int(row["errors"])) for row in own}
            weights = {key: options[key] for key in ("alpha", "beta") if key in options}
            others = drawn if name == "another" else [None]
            expected = [
                hand.errors(
                    **weights,
                    kind=options.get("counts", "kernel"),
                    others=one,
                    static=static if name == "static" else None,
                    without=without,
                )
                for one in others
            ]
            assert errors in expected, (name, scored)
            different.add((scored, *(errors[person][1] for person in sorted(errors))))
            if scored == "all":
                total = [sum(column) for column in zip(*errors.values(), strict=True)]
                assert f"{name}: WER {100 * total[1] / total[0]:.2f} %" in done.out
    # The controls matter on these data; otherwise the test would show nothing.
    assert len(different) > len(ROWS)


def test_who_stands_in(stream, tmp_path):
    """The same seed draws the same client, and none from the same series."""
    rows = {"another": ROWS["another"]}
    tables = []
    for seed in (0, 0, 1, 2, 3):
        compare(stream, tmp_path, rows, "--seed", str(seed)).ok()
        tables.append((tmp_path / "out").read_text())
    assert tables[0] == tables[1] and len(set(tables)) == 2
    alone = tmp_path / "alone"
    make_stream(alone / "stream")
    owner = read_table(alone / "stream" / "utt2client")
    (alone / "data").mkdir()
    for name, value in (
        ("utt2person", PERSONS),
        ("utt2meeting", dict.fromkeys(CLIENTS, "EN2001a")),
    ):
        write_table(alone / "data" / name, {one: value[own] for one, own in owner.items()})
    compare(alone / "stream", tmp_path, rows).fails(1, "no client in another series", "'ann'")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"alpa": 1}, "alpa"),
        ({"counts": "best"}, "'best'"),
        ("kernel", "row 'x': must be a mapping"),
        ({"everybody": "static"}, "--static"),
        ({"counts": "adapted", "mechanism": "laplace"}, "row 'x': counts with privacy"),
        ({"counts": "posterior", "continuous": True}, "row 'x': counts with continuous"),
    ],
)
def test_rows_that_cannot_be(stream, tmp_path, row, told):
    compare(stream, tmp_path, {"x": row}).fails(1, told)
    assert not (tmp_path / "out").exists()


def test_missing_tables_are_told(stream, tmp_path):
    copy = tmp_path / "copy"
    make_stream(copy / "stream")
    compare(copy / "stream", tmp_path, {"x": {}}).fails(1, "utt2person")
