"""Scores of N-best lists: against each hypothesis alone, whatever is shared, batched or split."""

from __future__ import annotations

import itertools
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import kaldiio
import numpy as np
import pytest
import torch
from conftest import inside
from hypothesis import given, settings
from hypothesis import strategies as st
from nnlm_world import SMALL, alone, command, network, sentences, write_texts
from safetensors.numpy import load_file, save_file

from fedtools.core.errors import UserError
from fedtools.data.nbest import Hypothesis, read_nbest, write_nbest
from fedtools.lm.nbest_scoring import batches
from fedtools.lm.nnlm import Nnlm
from fedtools.lm.nnlm_network import NnlmOptions, build_nnlm
from fedtools.lm.prefixes import make_tree, score_tree
from fedtools.lm.word_scores import open_rescored

FILES = ["nbest.tsv", "nnlm.ark", "nnlm.scp", "nnlm.yaml", "unigram.tsv", "words.txt"]

# Few words, so that much is shared: repeated sentences, and sentences that are prefixes of others.
sentence = st.lists(st.integers(1, 3), max_size=5).map(lambda words: [*words, 0])
batch = st.lists(sentence, min_size=1, max_size=8)


# Trees of prefixes


@given(lines=batch)
def test_each_distinct_prefix_is_there_once(lines):
    tree = make_tree(lines, 9)
    prefixes = {tuple(line[:n]) for line in lines for n in range(len(line))}
    assert len(tree.words) == len(tree.places) == len(prefixes)
    followed = {tuple(line[: n + 1]) for line in lines for n in range(len(line))}
    assert len(tree.pair_nodes) == len(tree.pair_words) == len(followed)
    # Every path spells prefixes, and every node has the reported position.
    spelled = {}
    flat = tree.paths.reshape(-1)
    for node, place in enumerate(tree.places):
        assert flat[place] == node
        row, depth = divmod(int(place), tree.paths.shape[1])
        assert tree.depths[node] == depth
        spelled[node] = tuple(tree.words[tree.paths[row, 1 : depth + 1]].tolist())
    assert sorted(spelled.values()) == sorted(prefixes)
    assert (np.diff(tree.pair_nodes) >= 0).all()
    ends = itertools.accumulate(map(len, lines))
    for line, end in zip(lines, ends, strict=True):
        for n, pair in enumerate(tree.pairs[end - len(line) : end]):
            assert spelled[int(tree.pair_nodes[pair])] == tuple(line[:n])
            assert tree.pair_words[pair] == line[n]


@settings(max_examples=40)
@given(lines=batch, pos_enc=st.sampled_from([None, "sinusoidal"]))
def test_shared_prefixes_give_the_scores_of_each_sentence_alone(lines, pos_enc):
    model = network(pos_enc)
    found = score_tree(model, make_tree(lines, 9))
    expected = [score for line in lines for score in alone(model, line)]
    assert found == pytest.approx(expected, abs=1e-5)


def test_at_the_papers_size_and_length():
    torch.manual_seed(0)
    model = build_nnlm(NnlmOptions(), 300).eval()
    rng = np.random.default_rng(0)
    best = rng.integers(1, 300, 40).tolist()
    lines = []
    for _ in range(6):
        other = list(best)
        for at in rng.choice(40, 2):
            other[at : at + 1] = rng.integers(1, 300, rng.integers(0, 3)).tolist()
        lines.append([*other, 0])
    found = score_tree(model, make_tree(lines, 300))
    expected = [score for line in lines for score in alone(model, line)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_scores_are_causal_and_sum_to_one():
    model = network()
    for later in ([0], [4, 0], [8, 8, 8, 0]):
        lines = [[2, 5, word, *(later if word else [])] for word in range(9)]
        found = score_tree(model, make_tree(lines, 9))
        begins = np.cumsum([0, *map(len, lines[:-1])])
        expected = alone(model, [2, 5, 0])[:2]
        for begin in begins:
            assert found[begin : begin + 2] == pytest.approx(expected, abs=1e-6)
        assert np.exp(found[begins + 2].astype(float)).sum() == pytest.approx(1, abs=1e-5)


@given(
    sizes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), max_size=9),
    bins=st.integers(1, 60),
)
def test_batches_hold_each_utterance_once_and_are_not_too_large(sizes, bins):
    found = list(batches(sizes, bins))
    assert sorted(index for one in found for index in one) == list(range(len(sizes)))
    for one in found:
        padded = sum(len(sizes[i]) for i in one) * max(max(sizes[i]) for i in one)
        assert padded <= bins or len(one) == 1


# The command


def hypotheses(*texts: str) -> list[Hypothesis]:
    return [
        Hypothesis(rank, -1.5 * rank, -2.0 - rank / 7, words) for rank, words in enumerate(texts, 1)
    ]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Make lists, a model `m` and the rescored folder `r`."""
    folder = tmp_path_factory.mktemp("rescore")
    write_texts(folder)
    (folder / "nnlm.yaml").write_text(
        f"nnlm: {{lm_conf: {SMALL}, epochs: 1, min_count: 2, optim_conf: {{lr: 0.01}}}}\n"
    )
    inside(*command(folder, folder / "m")).ok()
    lines = sentences(60, 5)
    lists = {f"u{n:02d}": hypotheses(*lines[5 * n : 5 * n + 5]) for n in range(12)}
    lists["empty"] = hypotheses("")
    lists["one"] = hypotheses("w3 w4")
    lists["same"] = hypotheses("w1 w5", "w1 w5", "w1", "w1 w5")
    lists["unknown"] = hypotheses("w1 never rare w5", "<unk> w5", "never")
    write_nbest(folder / "nb" / "nbest.tsv", lists.items())
    assert inside("rescore", folder / "nb", folder / "m", folder / "r").ok().err == ""
    return folder


def rescore(world: Path, out: Path, *more: str | Path):
    return inside("rescore", world / "nb", world / "m", out, *more)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_every_word_has_its_score(world):
    lists, vocabulary = read_nbest(world / "nb" / "nbest.tsv"), (world / "m" / "words.txt")
    places = {word: place for place, word in enumerate(vocabulary.read_text().split())}
    model = Nnlm.open(world / "m").network
    stored = kaldiio.load_scp(str(world / "r" / "nnlm.scp"))
    assert list(stored) == list(lists)
    for utterance, found in lists.items():
        expected = []
        for hypothesis in found:
            ids = [places.get(word, 1) for word in hypothesis.words.split()]
            expected += alone(model, [*ids, 0])
        assert stored[utterance].dtype == np.float32
        np.testing.assert_allclose(stored[utterance][:, 0], expected, rtol=0, atol=1e-4)
    assert names(world / "r") == FILES
    for name, source in (("nbest.tsv", "nb"), ("words.txt", "m"), ("unigram.tsv", "m")):
        assert (world / "r" / name).read_bytes() == (world / source / name).read_bytes()


def test_the_reader_gives_it_all(world, tmp_path):
    found, lists = open_rescored(world / "r"), read_nbest(world / "nb" / "nbest.tsv")
    stored = kaldiio.load_scp(str(world / "r" / "nnlm.scp"))
    words = (world / "r" / "words.txt").read_text().split()
    assert found.vocabulary.words == words and len(found.unigram) == len(words)
    assert found.unigram[1] == 1
    assert found.utterances == list(lists)
    assert [str(one.dtype) for one in (found.word_ids, found.log_probs, found.acoustic)] == [
        "int32", "float32", "float64"
    ]  # fmt: skip
    sums = found.sentence_scores()
    for u, utterance in enumerate(found.utterances):
        begin, end = found.first_hypothesis[u : u + 2]
        assert end - begin == len(lists[utterance])
        first = found.first_word[begin]
        flat = stored[utterance][:, 0]
        assert found.log_probs[first : found.first_word[end]].tolist() == flat.tolist()
        for h, hypothesis in zip(range(begin, end), lists[utterance], strict=True):
            row = slice(found.first_word[h], found.first_word[h + 1])
            ids = [words[index] for index in found.word_ids[row]]
            spoken = hypothesis.words.split()
            assert ids == [*(word if word in words else "<unk>" for word in spoken), "</s>"]
            assert found.num_words[h] == len(spoken)
            assert found.hypotheses[h] == hypothesis.words
            assert (found.acoustic[h], found.lm[h]) == (hypothesis.acoustic, hypothesis.lm)
            assert sums[h] == pytest.approx(found.log_probs[row].astype(float).sum())
    # The words mapped to `<unk>` share its probability.
    other = shutil.copytree(world / "r", tmp_path / "r")
    (other / "nnlm.yaml").unlink()
    unigram = (other / "unigram.tsv").read_text()
    (other / "unigram.tsv").write_text(unigram.replace("<unk>\t1\t1\n", "<unk>\t1\t5\n"))
    shared = open_rescored(other)
    assert shared.unknown == 5 and found.unknown == 1
    assert shared.log_probs.tolist() == found.log_probs.tolist()
    unknown = [sum(word not in words[2:] for word in one.split()) for one in found.hypotheses]
    assert 0 < sum(map(bool, unknown)) < len(unknown)
    assert shared.sentence_scores() == pytest.approx(sums - np.array(unknown) * math.log(5))
    assert found.first_hypothesis[-1] == len(found.hypotheses)
    assert found.first_word[-1] == len(found.word_ids) == len(found.log_probs)


def test_jobs_give_the_same_bytes(world, tmp_path):
    for nj in (3, 40):  # most of 40 jobs have nothing to do
        out = tmp_path / str(nj)
        for job in range(nj, 0, -1):
            rescore(world, out, "--batch-bins", "60", "--job", str(job), "--nj", str(nj)).ok()
        inside("merge-rescored", world / "nb", world / "m", out, "--nj", str(nj)).ok()
        assert names(out) == names(world / "r")
    rescore(world, tmp_path / "1", "--batch-bins", "60").ok()
    for name in ("nnlm.ark", "nbest.tsv", "words.txt", "unigram.tsv", "nnlm.yaml"):
        files = {(tmp_path / nj / name).read_bytes() for nj in ("1", "3", "40")}
        assert len(files) == 1, name


def test_the_size_of_a_batch_does_not_matter(world, tmp_path):
    expected = open_rescored(world / "r").log_probs
    for bins in ("1", "100000"):
        rescore(world, tmp_path / bins, "--batch-bins", bins).ok()
        found = open_rescored(tmp_path / bins).log_probs
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_what_is_there_is_not_made_again(world, tmp_path):
    out = tmp_path / "r"
    rescore(world, out, "--job", "1", "--nj", "2").ok()
    before = (out / "nnlm.1.ark").stat().st_mtime_ns
    rescore(world, out, "--job", "1", "--nj", "2").ok()
    assert (out / "nnlm.1.ark").stat().st_mtime_ns == before
    rescore(world, out, "--job", "2", "--nj", "2").ok()
    merge = ("merge-rescored", world / "nb", world / "m", out, "--nj", "2")
    inside(*merge).ok()
    before = (out / "nnlm.ark").stat().st_mtime_ns
    inside(*merge).ok()
    rescore(world, out).ok()
    rescore(world, out, "--job", "1", "--nj", "2").ok()
    assert (out / "nnlm.ark").stat().st_mtime_ns == before
    assert names(out) == sorted(FILES)
    # With another model, or other lists, it is.
    shutil.copytree(world / "m", tmp_path / "m")
    state = load_file(tmp_path / "m" / "model.safetensors")
    state["decoder.bias"][3] += 1
    save_file(state, tmp_path / "m" / "model.safetensors")
    old = open_rescored(out).log_probs
    inside("rescore", world / "nb", tmp_path / "m", out).ok()
    assert np.abs(open_rescored(out).log_probs - old).max() > 0.1


def test_a_folder_may_move(world, tmp_path):
    shutil.copytree(world / "r", tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    scp = tmp_path / "there" / "nnlm.scp"
    scp.write_text(scp.read_text().replace(str(world), "/nowhere"))
    found, expected = open_rescored(tmp_path / "there"), open_rescored(world / "r")
    assert (found.log_probs == expected.log_probs).all()


def test_parts_that_do_not_belong_together_are_not_joined(world, tmp_path):
    out = tmp_path / "r"
    merge = ("merge-rescored", world / "nb", world / "m", out, "--nj", "2")
    rescore(world, out, "--job", "1", "--nj", "2").ok()
    inside(*merge).fails(1, "nnlm.2.scp: missing", "--job 2 --nj 2")
    rescore(world, out, "--job", "2", "--nj", "3").ok()
    inside(*merge).fails(1, "nnlm.2.scp: the scores of other lists")
    rescore(world, out, "--job", "2", "--nj", "2", "--batch-bins", "7").ok()
    inside(*merge).fails(1, "nnlm.2.scp: the scores of other lists, jobs or batches")
    with pytest.raises(UserError, match="merge-rescored"):
        open_rescored(out)
    rescore(world, out, "--job", "3", "--nj", "2").fails(2, "more than --nj 2")


def test_an_unknown_word_of_an_unk_that_was_never_trained_is_warned_of(world, tmp_path):
    shutil.copytree(world / "m", tmp_path / "m")
    counts = tmp_path / "m" / "unigram.tsv"
    counts.write_text(counts.read_text().replace("<unk>\t1", "<unk>\t0"))
    done = inside("rescore", world / "nb", tmp_path / "m", tmp_path / "r").ok()
    assert (
        "words are <unk>, which the training text lacks; train the model with a larger min_count"
        in done.err
    )


def lists_of(folder: Path, change, share: float = 1.0) -> Path:
    """Make twenty utterances of one hypothesis of five words, some of which are changed."""
    lines = sentences(20, 3)
    lists = {}
    for number, line in enumerate(lines):
        words = [*line.split(), *["w1"] * 5][:5]
        if number < share * len(lines):
            words = list(map(change, words))
        lists[f"u{number:02d}"] = [Hypothesis(1, -1.0, 0.0, " ".join(words))]
    write_nbest(folder / "nbest.tsv", lists.items())
    return folder


def test_many_unknown_words_are_warned_of_by_whoever_maps_words(world, tmp_path):
    """Upper-case lists with a lower-case vocabulary are; below a fifth there is no warning."""
    nbest = lists_of(tmp_path / "upper", str.upper)
    done = inside("rescore", nbest, world / "m", tmp_path / "r").ok()
    said = f"{nbest}/nbest.tsv: 100 of 100 words (100%) are unknown to {world}/m/words.txt"
    assert f"warning: {said}; write both in the same case" in done.err
    few = lists_of(tmp_path / "few", str.upper, share=0.15)
    assert inside("rescore", few, world / "m", tmp_path / "few_r").ok().err == ""
    fifth = lists_of(tmp_path / "fifth", str.upper, share=0.2)
    assert "(2" in inside("rescore", fifth, world / "m", tmp_path / "fifth_r").ok().err


def test_the_importer_can_write_words_as_the_vocabulary_has_them(world, tmp_path):
    nbest = lists_of(tmp_path / "as_it_was", str)
    wanted = (nbest / "nbest.tsv").read_text()
    rows = [line.split("\t") for line in wanted.splitlines()]
    source = tmp_path / "espnet" / "1best_recog"
    source.mkdir(parents=True)
    (source / "text").write_text("".join(f"{row[0]} {row[4].upper()}\n" for row in rows))
    (source / "score").write_text("".join(f"{row[0]} {row[2]}\n" for row in rows))
    words = ("import-nbest", "espnet", tmp_path / "espnet", tmp_path / "out")
    assert inside(*words, "--normalise", "lower").ok().out.count("nnlm: 1") == 1
    assert (tmp_path / "out" / "nbest.tsv").read_text() == wanted
    assert inside("rescore", tmp_path / "out", world / "m", tmp_path / "r").ok().err == ""
    inside(*words, "--normalise", "upper").ok()
    assert (tmp_path / "out" / "nbest.tsv").read_text() == wanted.replace("w", "W")
    inside(*words, "--normalise", "title").fails(2, "title")


@pytest.mark.parametrize(
    "lines, said",
    [
        ("", "nbest.tsv: empty"),
        ("a\t1\t-1\t-2\tw1 </s>\n", "nbest.tsv:1: the word </s> is reserved"),
        ("a\t1\t-1\t-2\tw1\na\t2\t-1\t-2\t<s> w1\n", "nbest.tsv:2: the word <s> is reserved"),
        ("a\t1\t-1\t-2\tw1\na\t1\t-1\t-2\tw2\n", "nbest.tsv:2: rank '1' of 'a' where 2 belongs"),
    ],
)
def test_wrong_lists_are_told(cli, world, tmp_path, lines, said):
    (tmp_path / "nbest.tsv").write_text(lines)
    cli("rescore", tmp_path, world / "m", tmp_path / "r").fails(1, said)
    assert not (tmp_path / "r" / "nnlm.scp").exists()


def test_wrong_folders_are_told(cli, world, tmp_path):
    cli("rescore", tmp_path, world / "m", tmp_path / "r").fails(1, "no nbest.tsv", "import-nbest")
    cli("rescore", world / "nb", world, tmp_path / "r").fails(1, "no model.safetensors")
    cli("merge-rescored", world / "nb", world, tmp_path, "--nj", "1").fails(1, "no model.saf")
    with pytest.raises(UserError, match="nothing was rescored here"):
        open_rescored(tmp_path)


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def store(folder: Path, rows: Sequence[float]) -> None:
    """Replace the scores of the utterance `one`, of three words."""
    scp = str(folder / "nnlm.scp")
    stored = dict(kaldiio.load_scp(scp))
    stored["one"] = np.array(rows, dtype=np.float32)[:, None]
    kaldiio.save_ark(str(folder / "nnlm.ark"), stored, scp=scp)


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda r: change(r / "nbest.tsv", "\tw3 w4", "\tw3"), "nnlm.scp: 'one' has scores of"),
        (lambda r: change(r / "nnlm.scp", "one ", "onf "), "'one' is missing (2 differ)"),
        (lambda r: change(r / "nbest.tsv", "one\t", "onf\t"), "'one' is missing (2 differ)"),
        (lambda r: store(r, [-1, -1]), "'one' has scores of shape [2, 1]"),
        (lambda r: store(r, [-1, math.nan, -1]), "NaN or infinite"),
        (lambda r: store(r, [-1, 0.5, -1]), "of 'one' is above 0"),
        (lambda r: os.truncate(r / "nnlm.ark", 300), "are damaged"),
        (lambda r: change(r / "words.txt", "w1\n", ""), "unigram.tsv: "),
        (lambda r: (r / "unigram.tsv").unlink(), "unigram.tsv: cannot be read"),
    ],
)
def test_damage_is_named(world, tmp_path, damage, said):
    shutil.copytree(world / "r", tmp_path / "r")
    (tmp_path / "r" / "nnlm.yaml").unlink()
    open_rescored(tmp_path / "r")
    damage(tmp_path / "r")
    with pytest.raises(UserError) as error:
        open_rescored(tmp_path / "r")
    assert said in str(error.value) and "\n" not in str(error.value)


def test_other_lists_of_the_same_length_are_not_taken_for_those_that_were_scored(world, tmp_path):
    for name in ("nbest.tsv", "words.txt", "unigram.tsv"):
        folder = tmp_path / name
        shutil.copytree(world / "r", folder)
        old, new = ("\tw3 w4", "\tw3 w7") if name == "nbest.tsv" else ("w1", "w01")
        change(folder / name, old, new)
        with pytest.raises(UserError, match=f"{name}: not the file that nnlm.scp was made from"):
            open_rescored(folder)
