"""Lattice-free MMI: sums, posteriors and best paths against enumeration of all paths."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtools.lm.tokens import Tokenizer
from fedtools.models.lfmmi import graph as ngrams
from fedtools.models.lfmmi.forward_backward import (
    best_paths,
    log_totals,
    pack,
    posteriors,
)
from fedtools.models.lfmmi.graph import (
    END,
    START,
    Graph,
    Ngram,
    begun,
    denominator,
    numerator,
    word_starts,
)
from fedtools.models.lfmmi.loss import OUTPUT_L2, lfmmi_losses

SPACE = 1
LINES = [[2, 3, SPACE, 3], [3, 3], [2, SPACE, 2, SPACE, 3, 2], [], [4, 2, 3]]
UNITS = 6  # 5 is in no line

seeds = st.integers(0, 2**32 - 1)


def estimate(lines, units: int, order: int = 3, max_histories: int = 2000) -> Ngram:
    return ngrams.estimate(lines, units, order, max_histories)


def made(order: int = 3, silence: float = 0.5, lines=LINES, units: int = UNITS, **more) -> Graph:
    return denominator(estimate(lines, units, order, **more), {SPACE}, silence)


def random_scores(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def random_graph(seed: int, pdfs: int = 4, epsilons: bool = True) -> Graph:
    """Make arbitrary arcs, including parallel ones and dead ends."""
    random = np.random.default_rng(seed)
    first, more = random.integers(1, 4), random.integers(0, 3) if epsilons else 0
    emitting, epsilon = random.integers(1, 8), random.integers(more, 2 * more + 1)
    # Every later state is the end of an epsilon arc.
    ends = np.r_[:more, random.integers(0, max(1, more), epsilon - more)] + first
    weights = random.normal(size=(2, first + more))
    weights[random.random(weights.shape) < 0.4] = -np.inf
    weights[0, first:] = -np.inf
    return Graph(
        source=np.r_[
            random.integers(0, first + more, emitting), random.integers(0, first, epsilon)
        ],
        target=np.r_[random.integers(0, first, emitting), ends],
        pdf=np.r_[random.integers(0, pdfs, emitting), np.full(epsilon, -1)],
        weight=random.normal(size=emitting + epsilon),
        initial=weights[0],
        final=weights[1],
    )


def all_paths(graph: Graph, frames: int) -> list[tuple[tuple[int, ...], float]]:
    """Return the pdfs and weight of each path of `frames` frames, arc by arc."""
    arcs = list(zip(graph.source, graph.target, graph.pdf, graph.weight, strict=True))
    found = []

    def walk(state: int, pdfs: tuple[int, ...], weight: float) -> None:
        if len(pdfs) == frames and graph.final[state] > -np.inf:
            found.append((pdfs, weight + graph.final[state]))
        for source, target, pdf, more in arcs:
            if source == state and pdf < 0:
                walk(target, pdfs, weight + more)
            elif source == state and len(pdfs) < frames:
                walk(target, (*pdfs, int(pdf)), weight + more)

    for state in np.flatnonzero(graph.initial > -np.inf):
        walk(state, (), graph.initial[state])
    return found


def counted(paths, scores: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the log of the sum over paths, and the probability of each pdf at each frame."""
    posterior = np.zeros_like(scores)
    if not paths:
        return -math.inf, posterior
    times = np.arange(len(scores))
    totals = np.array([weight + scores[times, list(pdfs)].sum() for pdfs, weight in paths])
    total = np.logaddexp.reduce(totals)
    for (pdfs, _), share in zip(paths, np.exp(totals - total), strict=True):
        posterior[times, list(pdfs)] += share
    return total, posterior


def naive_total(graph: Graph, scores: torch.Tensor) -> torch.Tensor:
    """Compute the textbook recursion state by state, for autograd."""
    never = scores.new_tensor(-torch.inf)
    arcs = list(zip(graph.source, graph.target, graph.pdf, graph.weight, strict=True))

    def step(alpha: list, add, wanted) -> list:
        into = [[] for _ in alpha]
        for source, target, pdf, weight in arcs:
            if wanted(pdf) and alpha[source] > -torch.inf:
                into[target].append(alpha[source] + weight + add(pdf))
        return [torch.stack(terms).logsumexp(0) if terms else never for terms in into]

    def closed(alpha: list) -> list:
        after = step(alpha, lambda pdf: 0.0, lambda pdf: pdf < 0)
        return [b if b > -torch.inf else a for a, b in zip(alpha, after, strict=True)]

    alpha = closed([scores.new_tensor(weight) for weight in graph.initial])
    for frame in scores:
        alpha = closed(step(alpha, lambda pdf, frame=frame: frame[pdf], lambda pdf: pdf >= 0))
    ends = [a + f for a, f in zip(alpha, graph.final, strict=True) if a + f > -torch.inf]
    return torch.stack(ends).logsumexp(0) if ends else never


# --- sums and posteriors


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(0, 4))
def test_one_graph_for_all_utterances_is_as_counted(seed, frames):
    graph, scores = random_graph(seed), random_scores(seed, 3, 4, 5)
    lengths = torch.tensor([frames, 4, 1])
    totals = log_totals(scores, lengths, pack(graph))
    found = posteriors(scores, lengths, pack(graph))
    for number, length in enumerate(lengths.tolist()):
        total, posterior = counted(all_paths(graph, length), scores[number, :length].numpy())
        np.testing.assert_allclose(totals[number], total, rtol=1e-12)
        np.testing.assert_allclose(found[number, :length], posterior, atol=1e-12)
        assert (found[number, length:] == 0).all()


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(0, 4))
def test_a_graph_for_each_utterance_is_as_counted(seed, frames):
    graphs = [random_graph(seed + i, epsilons=False) for i in range(3)]
    scores, lengths = random_scores(seed, 3, 4, 5), torch.tensor([frames, 4, 1])
    totals = log_totals(scores, lengths, pack(graphs))
    found = posteriors(scores, lengths, pack(graphs))
    for number, length in enumerate(lengths.tolist()):
        paths = all_paths(graphs[number], length)
        total, posterior = counted(paths, scores[number, :length].numpy())
        np.testing.assert_allclose(totals[number], total, rtol=1e-12)
        np.testing.assert_allclose(found[number, :length], posterior, atol=1e-12)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_totals_and_gradients_are_those_of_autograd(order):
    graph = made(order)
    transcripts = [LINES[0], LINES[4]]
    scores = random_scores(order, 2, 7, 2 * UNITS).requires_grad_()
    lengths = torch.tensor([7, 5])
    weights = torch.tensor([1.0, -2.5], dtype=torch.float64)
    for packed, graphs in (
        (pack(graph), [graph, graph]),
        (pack(own := [numerator(graph, line) for line in transcripts]), own),
    ):
        totals = log_totals(scores, lengths, packed)
        pairs = zip(graphs, scores, lengths.tolist(), strict=True)
        naive = torch.stack([naive_total(one, row[:length]) for one, row, length in pairs])
        torch.testing.assert_close(totals, naive, rtol=1e-12, atol=1e-12)
        (found,) = torch.autograd.grad(totals @ weights, scores)
        (wanted,) = torch.autograd.grad(naive @ weights, scores)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_gradcheck_of_the_loss():
    graph = made()
    numerators = pack([numerator(graph, line) for line in LINES[:2]])
    scores = random_scores(1, 2, 5, 2 * UNITS).requires_grad_()
    lengths, packed = torch.tensor([5, 4]), pack(graph)
    assert torch.autograd.gradcheck(
        lambda scores: lfmmi_losses(scores, lengths, packed, numerators, 0.1)[0], scores
    )


def test_padding_and_other_utterances_change_nothing():
    graph = made()
    packed, scores = pack(graph), random_scores(2, 3, 9, 2 * UNITS)
    graphs = [numerator(graph, line) for line in LINES[:3]]
    lengths = torch.tensor([9, 4, 7])
    padded = scores.masked_fill((torch.arange(9) >= lengths[:, None])[..., None], torch.nan)
    padded = torch.cat([padded, torch.full((3, 2, 2 * UNITS), torch.inf)], 1).requires_grad_()
    losses, usable = lfmmi_losses(padded, lengths, packed, graphs, 0.1)
    losses.sum().backward()
    assert usable.all()
    for i, length in enumerate(lengths.tolist()):
        alone = scores[i : i + 1, :length].clone().requires_grad_()
        loss, _ = lfmmi_losses(alone, lengths[i : i + 1], packed, graphs[i : i + 1], 0.1)
        loss.sum().backward()
        torch.testing.assert_close(losses[i : i + 1], loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(padded.grad[i, :length], alone.grad[0], rtol=1e-10, atol=1e-12)
        assert (padded.grad[i, length:] == 0).all()


def test_the_same_again_bit_for_bit():
    graph = made()
    scores, lengths = random_scores(3, 2, 8, 2 * UNITS).float(), torch.tensor([8, 6])
    graphs = [numerator(graph, line) for line in LINES[:2]]
    results = []
    for _ in range(2):
        leaf = scores.clone().requires_grad_()
        losses, _ = lfmmi_losses(leaf, lengths, pack(graph), graphs)
        losses.sum().backward()
        results.append((losses.detach(), leaf.grad))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert results[0][0].dtype == results[0][1].dtype == torch.float32


def test_what_does_not_fit_together_is_refused():
    graph = made()
    scores, lengths = random_scores(0, 2, 3, 2 * UNITS), torch.tensor([3, 3])
    with pytest.raises(ValueError, match="1 graphs for 2 utterances"):
        log_totals(scores, lengths, pack([numerator(graph, [2])]))
    with pytest.raises(ValueError, match="more pdfs"):
        log_totals(scores[..., :-1], lengths, pack(graph))
    with pytest.raises(ValueError, match="epsilon"):
        pack([graph, graph])


# --- the n-gram and the denominator


@given(
    st.lists(st.lists(st.integers(1, 4), max_size=6), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(0, 5),
)
def test_probabilities_of_an_ngram_sum_to_one(lines, order, most):
    ngram = estimate(lines, 5, order, most)
    histories = itertools.product([(), (START,)], itertools.product(range(1, 5), repeat=2))
    for start, units in histories:
        for history in (start, start + units[:1], start + units):
            every = [ngram.probability({unit}, history) for unit in (END, 1, 2, 3, 4)]
            assert min(every) > 0
            assert math.fsum(every) == pytest.approx(1, abs=1e-12)


def test_ngram_by_hand():
    """By Witten-Bell: "a" twice after the start, once at the end, and the end once after "a b"."""
    ngram = estimate([[1, 2], [1]], 3, order=2)
    nothing = {1: 2 / 8 + 1 / 8, 2: 1 / 8 + 1 / 8, END: 2 / 8 + 1 / 8}
    for unit, count in ((1, 0), (2, 1), (END, 1)):
        wanted = count / 4 + 2 / 4 * nothing[unit]
        assert ngram.probability({unit}, (2, 1)) == pytest.approx(wanted)
    assert ngram.probability({1}, (START,)) == pytest.approx(2 / 3 + 1 / 3 * nothing[1])


def test_only_so_many_histories_are_kept():
    assert max(map(len, estimate(LINES, UNITS, 4).seen)) == 3
    few = estimate(LINES, UNITS, 4, max_histories=2)
    assert {history for history in few.seen if len(history) > 1} == {(START, 2), (SPACE, 3)}
    assert max(map(len, estimate(LINES, UNITS, 4, max_histories=0).seen)) == 1


@pytest.mark.parametrize("silence", [0.0, 0.3])
@pytest.mark.parametrize("most", [3, 2000])
@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_the_denominator_is_a_distribution(order, most, silence):
    """The probabilities of all paths of any number of frames sum to one."""
    packed = pack(made(order, silence, max_histories=most))
    frames = 250
    nothing = torch.zeros(1, frames, 2 * UNITS).expand(frames + 1, -1, -1)
    totals = log_totals(nothing, torch.arange(frames + 1), packed).exp()
    assert totals.sum().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("silence", [0.0, 0.3])
@pytest.mark.parametrize("line", [*LINES, [5, SPACE, 4]])
def test_a_transcript_has_its_probability_by_the_ngram(line, silence):
    """With bigrams, neither backing off nor a pause loses the context."""
    ngram = estimate(LINES, UNITS, 2)
    packed = pack(numerator(denominator(ngram, {SPACE}, silence), line))
    frames = 100
    nothing = torch.zeros(1, frames, 2 * UNITS).expand(frames + 1, -1, -1)
    total = log_totals(nothing, torch.arange(frames + 1), packed).exp().sum().item()
    pairs = itertools.pairwise([START, *line, END])
    # A pause is followed by what may follow pauses, independently of earlier words.
    wanted = math.prod(ngram.probability({after}, (before,)) for before, after in pairs)
    assert total == pytest.approx(wanted, rel=1e-6)


def test_where_silence_may_be():
    graph = made(silence=0.5)
    words = numerator(graph, [2, SPACE, 3, 4])
    seen = {pdfs for pdfs, _ in all_paths(words, 5)}
    assert (4, 0, 2, 6, 8) in seen and (0, 4, 2, 6, 8) in seen and (4, 2, 6, 8, 0) in seen
    assert (4, 2, 0, 6, 8) not in seen and (4, 2, 6, 0, 8) not in seen
    assert (4, 5, 2, 6, 8) in seen and (5, 4, 2, 6, 8) not in seen
    going_on = set(np.flatnonzero(words.final > -np.inf))
    for _ in words.final:
        going_on |= {
            int(s) for s, t in zip(words.source, words.target, strict=True) if t in going_on
        }
    assert len(going_on) == len(words.final)
    assert all(min(pdfs) > 1 for pdfs, _ in all_paths(numerator(made(silence=0.0), [2, 3]), 4))


def test_units_are_a_tokenizers_tokens():
    tokenizer = Tokenizer(["<blank>", "<unk>", "<space>", "a", "b", "<sos/eos>"])
    assert word_starts(tokenizer.tokens) == {2}
    assert word_starts(["<blank>", "▁a", "b", "▁"]) == {1, 3}
    lines = [tokenizer.encode(words) for words in ("a ba", "ab", "c a")]
    graph = denominator(estimate(lines, len(tokenizer) - 1), word_starts(tokenizer.tokens))
    assert {begun(pdf) for pdf in graph.pdf} == {0, 1, 2, 3, 4}
    for line in lines:
        assert numerator(graph, line).final.max() > -np.inf


@pytest.mark.parametrize("line", [[0], [UNITS], [-1]])
def test_what_is_no_unit_is_refused(line):
    with pytest.raises(ValueError, match="not one of the tokens"):
        estimate([line], UNITS)
    with pytest.raises(ValueError, match="not one of the tokens"):
        numerator(made(), line)
    with pytest.raises(ValueError, match="no transcripts"):
        estimate([], UNITS)


# --- numerators


def said(pdfs) -> list[int]:
    return [begun(pdf) for pdf in pdfs if begun(pdf)]


@settings(max_examples=20, deadline=None)
@given(seeds, st.integers(1, 3), st.lists(st.integers(1, 2), max_size=3), st.booleans())
def test_a_numerator_has_the_denominators_paths_of_its_transcript(seed, order, line, pauses):
    lines = [[2, 2], [1, 2], [2, 1]]
    graph = made(order, silence=0.5 if pauses else 0.0, lines=lines, units=3)
    scores, frames = random_scores(seed, 1, 4, 6), torch.tensor([4])
    own = [(pdfs, weight) for pdfs, weight in all_paths(graph, 4) if said(pdfs) == line]
    total, posterior = counted(own, scores[0].numpy())
    packed = pack([numerator(graph, line)])
    np.testing.assert_allclose(log_totals(scores, frames, packed)[0], total, rtol=1e-12)
    np.testing.assert_allclose(posteriors(scores, frames, packed)[0], posterior, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(seeds, st.sampled_from([2, 3, 4]), st.sampled_from([0.1, 1.0, 100.0]))
def test_a_numerator_is_never_more_than_the_denominator(seed, order, scale):
    graph = made(order)
    # This includes unseen words.
    lines = [*LINES, [5, 5, SPACE, 4, 2]]
    scores = random_scores(seed, len(lines), 10, 2 * UNITS, scale=scale)
    lengths = torch.randint(6, 11, (len(lines),), generator=torch.Generator().manual_seed(seed))
    numerators = [numerator(graph, line) for line in lines]
    losses, usable = lfmmi_losses(scores, lengths, pack(graph), numerators)
    assert usable.all()
    assert (losses >= -1e-9 * scale).all()


def test_an_utterance_that_is_too_short_has_no_loss():
    graph, lengths = made(), torch.tensor([3, 8, 0, 0])
    graphs = [numerator(graph, line) for line in (LINES[0], LINES[0], [], [2])]
    scores = random_scores(4, 4, 8, 2 * UNITS).requires_grad_()
    losses, usable = lfmmi_losses(scores, lengths, pack(graph), graphs, OUTPUT_L2)
    losses.sum().backward()
    assert usable.tolist() == [False, True, True, False]
    assert losses[0] == 0 and losses[1] > 0 and losses[3] == 0
    # An empty transcript in no frames is the only possibility.
    assert losses[2].item() == pytest.approx(0, abs=1e-12)
    assert (scores.grad[0] == 0).all() and scores.grad[1].abs().sum() > 0
    alone = scores[1:2].detach()
    loss, _ = lfmmi_losses(alone, lengths[1:2], pack(graph), graphs[1:2], OUTPUT_L2)
    torch.testing.assert_close(losses[1:2].detach(), loss)


@settings(max_examples=20, deadline=None)
@given(seeds, st.sampled_from([torch.float32, torch.float64]))
def test_huge_scores_give_no_nan(seed, dtype):
    graph = made()
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (2, 12, 2 * UNITS), generator=generator) * 2 - 1
    scores = (1e4 * signs).to(dtype).requires_grad_()
    graphs = [numerator(graph, line) for line in (LINES[0], LINES[2])]
    losses, usable = lfmmi_losses(scores, torch.tensor([12, 9]), pack(graph), graphs)
    losses.sum().backward()
    assert usable.all() and losses.isfinite().all() and scores.grad.isfinite().all()
    assert (losses > -1e-6).all()
    # Posteriors of either sum to one.
    torch.testing.assert_close(
        scores.grad.sum(2), torch.zeros(2, 12, dtype=dtype), rtol=0, atol=1e-5
    )


def test_scores_that_are_no_numbers_are_not_hidden():
    graph = made()
    scores = random_scores(0, 1, 6, 2 * UNITS)
    scores[0, 2] = torch.nan
    losses, usable = lfmmi_losses(scores, torch.tensor([6]), pack(graph), [numerator(graph, [2])])
    assert losses.isnan().all() and usable.all()


def test_squares_of_scores_are_added():
    graph = made()
    scores, lengths = random_scores(5, 1, 6, 2 * UNITS), torch.tensor([4])
    plain, squared = (
        lfmmi_losses(scores, lengths, pack(graph), [numerator(graph, [2, 3])], l2)[0]
        for l2 in (0.0, 0.2)
    )
    torch.testing.assert_close(squared - plain, 0.1 * scores[:, :4].square().sum()[None])


# --- best paths


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_best_paths_are_the_best_of_all(seed):
    scores, lengths = random_scores(seed, 3, 4, 4), torch.tensor([4, 2, 3])
    one = random_graph(seed)
    own = [random_graph(seed + i, epsilons=False) for i in range(3)]
    for packed, graphs in ((pack(one), [one] * 3), (pack(own), own)):
        found = best_paths(scores, lengths, packed)
        for graph, path, row, length in zip(graphs, found, scores, lengths.tolist(), strict=True):
            values = {
                pdfs: weight + sum(row[i, pdf].item() for i, pdf in enumerate(pdfs))
                for pdfs, weight in sorted(all_paths(graph, length), key=lambda pair: pair[1])
            }
            if not values:
                assert path == []
            else:
                assert values[tuple(path)] == pytest.approx(max(values.values()))


def test_training_makes_viterbi_find_the_transcripts():
    graph = made()
    packed, lines = pack(graph), [*LINES[:3], [4, 5, SPACE, 2]]
    numerators = pack([numerator(graph, line) for line in lines])
    scores = random_scores(6, len(lines), 15, 2 * UNITS).float().requires_grad_()
    lengths = torch.tensor([15, 12, 9, 14])

    def found() -> list[list[int]]:
        """Return the units of each utterance's best path, without silence."""
        paths = best_paths(scores, lengths, packed)
        return [[begun(pdf) for pdf in path if begun(pdf)] for path in paths]

    assert found() != lines
    optimizer = torch.optim.Adam([scores], 0.3)
    for _ in range(30):
        optimizer.zero_grad()
        losses, _ = lfmmi_losses(scores, lengths, packed, numerators, OUTPUT_L2)
        losses.sum().backward()
        optimizer.step()
    assert (losses < 0.5).all()
    assert found() == lines
    aligned = best_paths(scores, lengths, numerators)
    assert [len(path) for path in aligned] == lengths.tolist()
    assert [said(path) for path in aligned] == lines
