"""The neural language model: ESPnet's own forward pass and sums over the vocabulary as oracles."""

from __future__ import annotations

import itertools
import math
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from commands import is_locked, wait_until
from conftest import inside, start
from hypothesis import given, settings
from hypothesis import strategies as st
from nnlm_world import OPTIONS, SMALL, alone, command, ids, network, sentences, write_texts
from safetensors.numpy import load_file

from fedtools.core.errors import UserError
from fedtools.lm.nnlm import Nnlm
from fedtools.lm.nnlm_network import NnlmOptions, build_nnlm, losses, pad
from fedtools.lm.nnlm_training import _batches, perplexity
from fedtools.lm.vocabulary import Vocabulary, make_vocabulary, read_unigram, write_unigram


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Make a folder with the texts and a model in `m`."""
    folder = tmp_path_factory.mktemp("nnlm")
    write_texts(folder)
    inside(*command(folder, folder / "m")).ok()
    return folder


@settings(max_examples=25)
@given(batch=st.lists(ids, min_size=1, max_size=5), pos_enc=st.sampled_from([None, "sinusoidal"]))
def test_losses_are_espnets_whatever_is_in_the_batch(batch, pos_enc):
    model = network(pos_enc)
    with torch.no_grad():
        found = losses(model, *pad(batch, 9)).tolist()
    expected = [-value for one in batch for value in alone(model, one)]
    assert found == pytest.approx(expected, abs=1e-5)


@settings(max_examples=25)
@given(batch=st.lists(ids, min_size=1, max_size=5), first=st.integers(2, 7))
def test_a_sample_of_all_rare_words_is_no_estimate(batch, first):
    """Fewer words give estimated sums whose mean is the exact sum."""
    model, inputs = network(), pad(batch, 9)
    with torch.no_grad():
        exact = losses(model, *inputs)
        whole = losses(model, *inputs, torch.tensor([first, *range(first, 9)]))
        some = [
            losses(model, *inputs, torch.tensor([first, *drawn]))
            for drawn in itertools.combinations(range(first, 9), 2)
        ]
    assert whole.tolist() == pytest.approx(exact.tolist(), abs=1e-5)
    targets = inputs[1][inputs[1] >= 0]
    frequent = targets < first
    # exp(loss) is the sum over exp(logit of the target), which no sample changes.
    mean = torch.stack([one.exp() for one in some]).mean(0)
    assert mean[frequent].tolist() == pytest.approx(exact.exp()[frequent].tolist(), rel=1e-4)


def test_the_papers_network_is_the_default():
    model = build_nnlm(NnlmOptions(), 50)
    assert model.embed.weight.shape == (51, 256)
    assert len(model.encoder.encoders) == 3
    block = model.encoder.encoders[0]
    assert block.self_attn.h == 4 and block.feed_forward.w_1.weight.shape == (1024, 256)
    rates = {one.p for one in model.modules() if isinstance(one, torch.nn.Dropout)}
    assert rates == {0.1}


def test_perplexity_is_that_of_every_word_one_by_one():
    model, lines = network(), [[1, 2, 0], [0], [3, 3, 3, 4, 0], [8, 0]]
    scores = [value for line in lines for value in alone(model, line)]
    expected = math.exp(-sum(scores) / len(scores))
    for batch_words in (1, 4, 100):
        assert perplexity(model, lines, batch_words) == pytest.approx(expected, rel=1e-5)


# The vocabulary


def test_the_vocabulary_is_by_count_then_in_c_order(tmp_path):
    lines = [line.split() for line in ("b é a", "b a Z z", "b <unk> c c", "zz")]
    vocabulary, counts, unknown = make_vocabulary(lines)
    assert unknown == 1
    assert vocabulary.words == ["</s>", "<unk>", "b", "a", "c", "Z", "z", "zz", "é"]
    assert counts.tolist() == [4, 1, 3, 2, 2, 1, 1, 1, 1]
    assert vocabulary.encode("a nothing b") == [3, 1, 2, 0]
    assert vocabulary.encode("") == [0]
    for size, least, kept in ((5, 1, "b a c"), (9, 2, "b a c"), (4, 2, "b a"), (None, 4, "")):
        smaller, some, different = make_vocabulary(lines, size, least)
        assert smaller.words[2:] == kept.split()
        # Sorted from b, a, c, Z, z, zz, é, and `<unk>` in the text itself.
        assert different == 7 - len(kept.split()) + 1
        # No word is lost: rare ones are <unk>.
        assert some.sum() == counts.sum()
    vocabulary.write(tmp_path)
    write_unigram(tmp_path, vocabulary, counts, 17)
    again = Vocabulary.read(tmp_path)
    assert again.words == vocabulary.words
    read, unknown = read_unigram(tmp_path, again)
    assert read.tolist() == counts.tolist() and unknown == 17


HEAD = "word\tcount\twords\n</s>\t1\t1\n"


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("words.txt", "<unk>\n</s>\na\n", "words.txt:1: '</s>' belongs there"),
        ("words.txt", "</s>\na\n", "words.txt:2: '<unk>' belongs there"),
        ("words.txt", "</s>\n<unk>\na\na\n", "words.txt:4: 'a' is duplicated"),
        ("words.txt", "</s>\n<unk>\n<s>\n", "words.txt:3: '<s>' is not a word"),
        ("words.txt", "", "words.txt: empty"),
        ("unigram.tsv", f"{HEAD}<unk>\t1\t1\n", "unigram.tsv: 2 words"),
        ("unigram.tsv", f"{HEAD}<unk>\t1\t1\nb\t1\t1\n", "unigram.tsv:4: 'b' where 'a'"),
        ("unigram.tsv", f"{HEAD}<unk>\t-1\t1\na\t1\t1\n", "unigram.tsv:3: count is '-1'"),
        ("unigram.tsv", f"{HEAD}<unk>\t1\t-1\na\t1\t1\n", "unigram.tsv:3: words is '-1'"),
    ],
)
def test_a_damaged_vocabulary_is_named(tmp_path, name, content, said):
    (tmp_path / "words.txt").write_text("</s>\n<unk>\na\n")
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as error:
        read_unigram(tmp_path, Vocabulary.read(tmp_path))
    assert said in str(error.value)


# Training


def test_what_training_leaves(trained):
    out, lines = trained / "m", sentences(120, 0)
    counts = Counter(word for line in lines for word in line.split())
    words = sorted(counts, key=lambda word: (-counts[word], word))
    assert (out / "words.txt").read_text().split() == ["</s>", "<unk>", *words]
    rows = [row.split("\t") for row in (out / "unigram.tsv").read_text().splitlines()[1:]]
    found = {word: (int(number), int(different)) for word, number, different in rows}
    assert found == {w: (n, 1) for w, n in {"</s>": 120, "<unk>": 1, **counts}.items()}
    assert sorted(path.name for path in out.iterdir() if path.name[0] != ".") == [
        "config.yaml", "model.safetensors", "perplexity.tsv", "unigram.tsv", "words.txt"
    ]  # fmt: skip


def test_it_learns_and_the_best_epoch_is_kept(trained):
    nnlm = Nnlm.open(trained / "m")
    valid = [nnlm.vocabulary.encode(line) for line in sentences(30, 1)]
    rows = (trained / "m" / "perplexity.tsv").read_text().splitlines()
    assert rows[0] == "epoch\ttrain\tvalid" and len(rows) == 5
    reported = [float(row.split("\t")[2]) for row in rows[1:]]
    scores = [value for line in valid for value in alone(nnlm.network, line)]
    assert math.exp(-np.mean(scores)) == pytest.approx(min(reported), rel=1e-4)
    # A unigram of the training text cannot predict the next word.
    share = nnlm.unigram / nnlm.unigram.sum()
    unigram = math.exp(-np.mean([math.log(share[word]) for line in valid for word in line]))
    assert min(reported) < 0.6 * unigram


def test_a_worse_epoch_is_not_kept(cli, tmp_path):
    """A dozen sentences are soon memorised."""
    write_texts(tmp_path)
    (tmp_path / "plain").write_text("".join(f"{words}\n" for words in sentences(12, 0)))
    config = {"lm_conf": {**SMALL, "dropout_rate": 0.0}, "epochs": 40, "optim_conf": {"lr": 0.03}}
    (tmp_path / "nnlm.yaml").write_text(yaml.safe_dump({"nnlm": config}))
    words = command(tmp_path, tmp_path / "m")
    cli(words[0], *words[2:]).ok()
    rows = (tmp_path / "m" / "perplexity.tsv").read_text().splitlines()[1:]
    reported = [float(row.split("\t")[2]) for row in rows]
    assert min(reported) < 0.99 * reported[-1]
    nnlm = Nnlm.open(tmp_path / "m")
    valid = [nnlm.vocabulary.encode(line) for line in sentences(30, 1)]
    assert perplexity(nnlm.network, valid, 50) == pytest.approx(min(reported), rel=1e-4)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_dropout_is_there_in_every_epoch_of_training_and_nowhere_else(cli, tmp_path, rate):
    """With a step size of 0, perplexities of the same text differ only by dropout."""
    write_texts(tmp_path)
    conf = {"lm_conf": {**SMALL, "dropout_rate": rate}, "epochs": 2, "optim_conf": {"lr": 1e-20}}
    (tmp_path / "nnlm.yaml").write_text(yaml.safe_dump({"nnlm": conf}))
    words = ("--valid", tmp_path / "text", "--config", tmp_path / "nnlm.yaml")
    cli("train-nnlm", tmp_path / "text", tmp_path / "m", *words).ok()
    rows = (tmp_path / "m" / "perplexity.tsv").read_text().splitlines()[1:]
    (_, first, without), (_, second, again) = (map(float, row.split("\t")) for row in rows)
    assert without == pytest.approx(again, rel=1e-5)
    if rate:
        assert len({f"{value:.1f}" for value in (first, second, without)}) == 3
    else:
        assert [first, second] == pytest.approx([without, without], rel=1e-5)


def test_a_killed_training_ends_as_if_it_had_not_been(trained, tmp_path):
    write_texts(tmp_path)
    words = [sys.executable, "-m", "fedtools", *map(str, command(tmp_path, tmp_path / "m"))]
    process = start(*words, stdout=subprocess.DEVNULL)
    while not (tmp_path / "m" / "state.safetensors").exists():
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    # A fork is killed with its client, but the kernel may still be about to close its files.
    wait_until(lambda: not is_locked(tmp_path))
    assert not (tmp_path / "m" / "model.safetensors").exists()
    state = load_file(tmp_path / "m" / "state.safetensors")
    assert 1 <= len(state["history"]) < 4
    inside("rescore", tmp_path, tmp_path / "m", tmp_path / "r").fails(1, "not trained yet")
    done = inside(*command(tmp_path, tmp_path / "m")).ok()
    assert "epoch 1/4" not in done.err and "epoch 4/4" in done.err
    for name in ("model.safetensors", "perplexity.tsv", "config.yaml", "words.txt", "unigram.tsv"):
        assert (tmp_path / "m" / name).read_bytes() == (trained / "m" / name).read_bytes(), name
    assert not (tmp_path / "m" / "state.safetensors").exists()


@given(lengths=st.lists(st.integers(1, 12), max_size=20), words=st.integers(1, 40))
def test_an_epoch_sees_every_sentence_once(lengths, words):
    found = _batches(lengths, words)
    assert sorted(index for one in found for index in one) == list(range(len(lengths)))
    for one in found:
        assert len(one) * max(lengths[index] for index in one) <= words or len(one) == 1


def test_again_and_with_another_seed(trained, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in (trained / "m").glob("*.*")}
    done = inside(*command(trained, trained / "m")).ok()
    assert "perplexity" in done.out
    after = {path: path.stat().st_mtime_ns for path in (trained / "m").glob("model.*")}
    assert after.items() <= before.items()
    inside(*command(trained, trained / "m", "--seed", "1")).fails(1, "seed: 0 -> 1")
    inside(*command(trained, tmp_path / "m", "--seed", "1")).ok()
    model = "m/model.safetensors"
    assert (tmp_path / model).read_bytes() != (trained / model).read_bytes()


def test_other_options_or_text_are_refused_in_a_folder_that_has_a_model(cli, trained, tmp_path):
    cli(*command(trained, trained / "m", "--section", "other")).fails(1, "other options", "epochs")
    write_texts(tmp_path)
    (tmp_path / "plain").write_text("w1 w2\n")
    cli(*command(tmp_path, trained / "m")).fails(1, "other text", "plain")


@pytest.mark.parametrize(
    "options, said",
    [
        ({"epoch": 3}, "did you mean 'epochs'?"),
        ({"lm_conf": {"att_unit": 10, "head": 4}}, "att_unit is 10, not a multiple of 4"),
        ({"lm_conf": {"layers": 1}}, "did you mean 'layer'?"),
        ({"lm_conf": {"pos_enc": "rotary"}}, "pos_enc"),
        ({"lm_conf": {"dropout_rate": 1.0}}, "dropout_rate"),
        ({"vocab_size": 2}, "no room for a word"),
        ({"epochs": 0}, "option 'epochs' is 0"),
        ({"save_interval_steps": 5}, "only after each epoch"),
        ({"optim_conf": {"rate": 1}}, "optim_conf"),
        ({"optim": "sgd", "optim_conf": {"lr": 1e30}, "grad_clip": 0.0}, "the training diverged"),
    ],
)
def test_wrong_options_are_told(cli, tmp_path, options, said):
    write_texts(tmp_path)
    (tmp_path / "nnlm.yaml").write_text(yaml.safe_dump({"nnlm": {"lm_conf": SMALL, **options}}))
    cli(*command(tmp_path, tmp_path / "m")).fails(1, said)
    assert not (tmp_path / "m" / "model.safetensors").exists()


def test_wrong_text_is_told(cli, tmp_path):
    write_texts(tmp_path)
    (tmp_path / "valid").write_text("v1\nv2\n")
    cli(*command(tmp_path, tmp_path / "m")).fails(1, "valid: no words in the text")
    write_texts(tmp_path)
    (tmp_path / "plain").write_text("a b\na </s>\n")
    cli(*command(tmp_path, tmp_path / "m2")).fails(1, "plain:2: ", "</s>")
    (tmp_path / "nnlm.yaml").write_text("nnlm: 3\n")
    cli(*command(tmp_path, tmp_path / "m3")).fails(1, "must be a mapping")
    cli(*command(tmp_path, tmp_path / "m3", "--section", "lm")).fails(1, "no section 'lm'")
    cli("train-nnlm", tmp_path / "m", "--valid", tmp_path / "valid").fails(2, "no text")
    cli("train-nnlm", tmp_path / "text", tmp_path / "m").fails(2, "--valid")


def test_what_failed_can_be_run_again_with_the_mistake_mended(cli, tmp_path):
    """A text without words, then a rate at which it diverges, at once and after an epoch."""
    write_texts(tmp_path)
    good = (tmp_path / "valid").read_text()
    (tmp_path / "valid").write_text("v1\nv2\n")
    cli(*command(tmp_path, tmp_path / "m")).fails(1, "no words in the text")
    (tmp_path / "valid").write_text(good)
    # A rate that grows by 1 per step is too large from the second epoch on.
    late = {"scheduler": "warmuplr", "scheduler_conf": {"warmup_steps": 1e6}}
    for epoch, rate, more in ((1, 1e30, {}), (2, 1e6, late)):
        section = {**OPTIONS, "lm_conf": SMALL, "optim": "sgd", "grad_clip": 0.0}
        section |= {"scheduler": None, "scheduler_conf": {}, **more, "optim_conf": {"lr": rate}}
        (tmp_path / "nnlm.yaml").write_text(yaml.safe_dump({"nnlm": section}))
        done = cli(*command(tmp_path, tmp_path / "m"))
        assert done.code == 1 and f"epoch {epoch}: the training diverged" in done.err
    write_texts(tmp_path)
    cli(*command(tmp_path, tmp_path / "m")).ok()
    cli(*command(tmp_path, tmp_path / "m", "--seed", "1")).fails(1, "seed: 0 -> 1")
    # Another program's file of the same name is kept.
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "config.yaml").write_text("method: fedavg\n")
    cli(*command(tmp_path, tmp_path / "exp")).fails(1, "config.yaml: made with")
    assert (tmp_path / "exp" / "config.yaml").read_text() == "method: fedavg\n"


def test_damaged_models_are_refused(trained, tmp_path):
    import shutil

    for name, change, said in (
        ("model.safetensors", lambda raw: raw[:-4], "bytes long"),
        ("words.txt", lambda raw: raw + b"more\n", "expected float32 of shape"),
        ("config.yaml", lambda raw: raw.replace(b"layer: 2", b"layer: 3"), "is missing"),
        ("unigram.tsv", lambda raw: raw[:-5], "the last line has no end"),
    ):
        folder = tmp_path / name
        shutil.copytree(trained / "m", folder)
        (folder / name).write_bytes(change((folder / name).read_bytes()))
        with pytest.raises(UserError, match=said):
            Nnlm.open(folder)


def test_every_history_has_a_distribution_over_the_words():
    """It covers the end and <unk> too, and nothing else: the start has no probability."""
    model = network(words=5)
    for history in itertools.product(range(1, 5), repeat=2):
        with torch.no_grad():
            batch = [[*history, word, 0] for word in range(1, 5)] + [[*history, 0]]
            found = losses(model, *pad(batch, 5)).tolist()
        after = [math.exp(-found[4 * number + 2]) for number in range(5)]
        assert sum(after) == pytest.approx(1, abs=1e-5)


def test_a_sampled_sum_learns_what_the_whole_one_does(trained, tmp_path, cli):
    """It samples a few rare words at a time; validation perplexity is over all words."""
    options = {**OPTIONS, "sampled": 6, "frequent": 4}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"nnlm": options}))
    begin = ("train-nnlm", trained / "text", tmp_path / "m", "--plain", trained / "plain")
    begin += ("--valid", trained / "valid", "--config", tmp_path / "c.yaml")
    cli(*begin).ok()
    whole, some = (
        float((folder / "m" / "perplexity.tsv").read_text().splitlines()[-1].split("\t")[2])
        for folder in (trained, tmp_path)
    )
    assert some < 1.2 * whole < 9
    config = yaml.safe_load((tmp_path / "m" / "config.yaml").read_text())
    assert (config["sampled"], config["frequent"]) == (6, 4)
    # Without sampling, config.yaml is as before there was the option.
    plain = yaml.safe_load((trained / "m" / "config.yaml").read_text())
    assert not plain.keys() & {"sampled", "frequent"}
    model, lines = Nnlm.open(tmp_path / "m"), [[2, 3, 0], [4, 1, 5, 0]]
    scores = [value for line in lines for value in alone(model.network, line)]
    expected = math.exp(-sum(scores) / len(scores))
    assert perplexity(model.network, lines, 100) == pytest.approx(expected, rel=1e-5)
