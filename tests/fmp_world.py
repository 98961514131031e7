"""FMP on simulated speech and a reference implementation, shared by several test files."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import kaldiio
import numpy as np
import yaml
from conftest import inside
from rescored_world import CLIENTS
from safetensors.numpy import load_file

from fedtools.core.tables import read_tsv
from fedtools.federation.fmp.simulation import simulate
from fedtools.lm.reweighting import Lists, ListWeights
from fedtools.lm.stream import open_stream
from fedtools.methods.fmp import FMP

T = 3
# Seconds; recordings of `make_stream` fill all but the last.
SPAN = 48.0


def by_hand(
    folder: Path,
    *,
    alpha: float = 0.5,
    beta: float = 0.25,
    scale: float = 0.5,
    sigma: float = 5.0,
    smoothing: float = 0.1,
    lm_weight: float = 1.0,
    word_score: float = 0.0,
    nnlm: float = 0.5,
    continuous: bool = False,
    taking_part: dict[int, list[str]] | None = None,
) -> dict[str, str]:
    """Run algorithm 1: utterance -> words; files are read line by line, words are strings."""
    lines = [line.split("\t") for line in (folder / "nbest.tsv").read_text().splitlines()]
    lists: dict[str, list[list[str]]] = {}
    for line in lines:
        lists.setdefault(line[0], []).append(line)
    scores = kaldiio.load_scp(str(folder / "nnlm.scp"))
    rows = [line.split("\t") for line in (folder / "unigram.tsv").read_text().splitlines()[1:]]
    rows = [row for row in rows if row[0] != "</s>"]
    total = sum(int(count) + 1 for _, count, _ in rows)
    u = {word: (int(count) + 1) / total for word, count, _ in rows}
    # `<unk>` is shared by this many words, possibly zero.
    share = {word: math.log(int(words) or 1) for word, _, words in rows}
    known = lambda word: word if word in u else "<unk>"  # noqa: E731
    owner = dict(line.split() for line in (folder / "utt2client").read_text().splitlines())
    segments = [line.split() for line in (folder / "segments").read_text().splitlines()]
    begin = {name: float(time) for name, _, time, _ in segments}
    said = {
        client: sorted((name for name in owner if owner[name] == client), key=begin.get)
        for client in CLIENTS
    }
    caches = {client: Counter() for client in CLIENTS}

    def distribution(counts):
        mass = sum(counts.values())
        return {
            word: (1 - smoothing) * counts[word] / mass + smoothing * p if mass else p
            for word, p in u.items()
        }

    best, everybody = {}, Counter()
    for number in range(T + 1):
        q_bar = distribution(everybody)
        for client in CLIENTS:
            size, more = divmod(len(said[client]), T + 1)
            first = number * size + min(number, more)
            group = said[client][first : first + size + (number < more)]
            before = Counter(caches[client])
            for name in group:
                q = distribution(caches[client] if continuous else before)
                at, found = 0, []
                for _, _, acoustic, lm, words in lists[name]:
                    split = words.split()
                    nnlm_score = float(scores[name][at : at + len(split) + 1].sum())
                    at += len(split) + 1
                    for word in map(known, split):
                        nnlm_score -= share[word]
                        g = (1 - alpha - beta) * u[word] + alpha * q_bar[word] + beta * q[word]
                        nnlm_score += scale * math.log(g / u[word])
                    score = (1 - nnlm) * float(lm) + nnlm * nnlm_score
                    found.append(float(acoustic) + lm_weight * score + word_score * len(split))
                best[name] = lists[name][found.index(max(found))][4]
                for rank, line in enumerate(lists[name]):
                    weight = math.exp(-(rank**2) / (2 * sigma**2))
                    for word in map(known, line[4].split()):
                        caches[client][word] += weight
        sent = taking_part[number + 1] if taking_part and number < T else CLIENTS
        everybody = sum((caches[client] for client in sent), Counter())
    return best


def simulated(folder: Path, **options) -> dict[str, str]:
    stream = open_stream(folder)
    groups = {client: stream.groups(client, T) for client in stream.runs}
    method, rescored = FMP(**options), stream.rescored
    best, _ = simulate(method, Lists(rescored, method.part(ListWeights)), groups)
    return dict(zip(rescored.utterances, (rescored.hypotheses[one] for one in best), strict=True))


def begin(stream: Path, path: Path, *more: str, **options) -> Path:
    config = {"task": "rescore", "rounds": T, "method_conf": options}
    path.with_suffix(".yaml").write_text(yaml.safe_dump(config))
    arguments = ("--config", path.with_suffix(".yaml"), "--method", "fmp", *more)
    inside("init", path, *arguments, "--data", f"train={stream}").ok()
    inside("rounds", path).ok()
    return path


def best_text(path: Path) -> dict[str, str]:
    inside("rescore-best", path, path / "best").ok()
    lines = (path / "best" / "text").read_text().splitlines()
    return {line.split(" ")[0]: line.partition(" ")[2] for line in lines}


def sent(path: Path, number: int) -> dict[str, np.ndarray]:
    """Return the updates of each client in a round."""
    found = {}
    for table in (path / f"round_{number:04d}").glob("update.*.tsv"):
        counts = load_file(table.with_suffix(".safetensors"))["counts"]
        rows = read_tsv(table, None)
        found |= {row["client"]: one for row, one in zip(rows, counts, strict=True)}
    return found


def counts_after(path: Path, number: int) -> np.ndarray:
    return load_file(path / f"round_{number + 1:04d}" / "global.safetensors")["counts"]
