"""Sums and best paths over graphs, in log space, for batches, with the same operations on a GPU.

Either all utterances share one graph (the denominator), and states have a column for each
utterance; or each has its own (numerators), and these are joined to one large graph. Sums are over
runs of neighbouring arcs, always in the same order, so that results are reproducible bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedtools.models.lfmmi.graph import Graph

# Loss and gradient are small differences between large sums of scores over hundreds of frames.
_FLOAT = torch.float64


@dataclass(frozen=True)
class Runs:
    """Arcs, ordered so that arcs summed together are neighbours (a run).

    `run` is the run number of each arc, `lengths` are the lengths of all runs.
    """

    source: Tensor
    target: Tensor
    pdf: Tensor
    weight: Tensor
    run: Tensor
    lengths: Tensor

    def sum(self, values: Tensor) -> Tensor:
        """Return the logarithm of each run's sum from log terms; -inf for an empty run."""
        return _log_sums(values, self.run, self.lengths)[0]

    def max(self, values: Tensor) -> Tensor:
        """Return the largest value of each run; -inf for an empty run."""
        return _reduce("max", values, self.lengths)


def _log_sums(values: Tensor, run: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `Runs.sum`, each run's largest value, and the terms divided by its exponential."""
    largest = _reduce("max", values, lengths)
    # -inf minus -inf would be NaN.
    base = largest.clamp(min=torch.finfo(values.dtype).min)
    terms = (values - base.index_select(0, run)).exp_()
    return _reduce("sum", terms, lengths).log_().add_(base), largest, terms


def _reduce(kind: str, values: Tensor, lengths: Tensor) -> Tensor:
    # Atomic additions, as in scatter_add on a GPU, would have no fixed order.
    return torch.segment_reduce(values, kind, lengths=lengths, axis=0, unsafe=True)


@dataclass(frozen=True)
class Packed:
    """Graphs as tensors on a device; see `pack`.

    Attributes:
        graphs: number of graphs, if each utterance has its own; 0 for one graph of all utterances.
        stations: number of states that are not targets of epsilon arcs; they come first.
        forward, backward: emitting arcs by target and by source. With several graphs, an arc's pdf
            is `pdf * graphs + graph`.
        by_pdf, pdf_counts: the order of `backward` by pdf, and the number of arcs of each pdf.
        into, out: epsilon arcs by target; and by source, with one from each station to itself.
        initial, final: natural logarithms, (states,), or (states, 1) for one graph.
        graph, states: the graph of each state, (states,); the number of states of each graph.
    """

    graphs: int
    stations: int
    forward: Runs
    backward: Runs
    by_pdf: Tensor
    pdf_counts: Tensor
    into: Runs
    out: Runs
    initial: Tensor
    final: Tensor
    graph: Tensor
    states: Tensor

    def of_states(self, values: Tensor) -> Tensor:
        """Return values of utterances, (B,), in a shape that broadcasts with values of states."""
        return values[self.graph] if self.graphs else values[None]


def pack(graphs: Graph | Sequence[Graph], device: torch.device | str = "cpu") -> Packed:
    """Convert one graph for all utterances, or one for each, to tensors.

    Raises:
        ValueError: for several graphs with epsilon arcs, which numerators do not have.
    """
    own = not isinstance(graphs, Graph)
    graph = _join(graphs) if own else graphs
    sizes = [len(one.final) for one in graphs] if own else [len(graph.final)]

    def tensor(values: np.ndarray) -> Tensor:
        values = torch.as_tensor(values, device=device)
        return values[:, None] if values.is_floating_point() and not own else values

    def runs(chosen: np.ndarray, end: np.ndarray, first: int, count: int) -> Runs:
        """Return arcs sorted by the state at one end, `end`, in runs numbered from `first`."""
        chosen = chosen[np.argsort(end[chosen], kind="stable")]
        run = end[chosen] - first
        chosen_arcs = (field[chosen] for field in arcs)
        return Runs(*map(tensor, (*chosen_arcs, run, np.bincount(run, minlength=count))))

    states, stations, itself = len(graph.final), graph.stations, np.arange(graph.stations)
    source, target = (np.append(end, itself) for end in (graph.source, graph.target))
    pdf = np.append(graph.pdf, np.full(stations, -1))
    arcs = source, target, pdf, np.append(graph.weight, np.zeros(stations))
    emitting, others = np.flatnonzero(pdf >= 0), np.flatnonzero(pdf < 0)
    backward = runs(emitting, source, 0, states)
    return Packed(
        graphs=len(sizes) if own else 0,
        stations=stations,
        forward=runs(emitting, target, 0, stations),
        backward=backward,
        by_pdf=torch.argsort(backward.pdf, stable=True),
        pdf_counts=torch.bincount(backward.pdf),
        into=runs(others[target[others] >= stations], target, stations, states - stations),
        out=runs(others, source, 0, stations),
        initial=tensor(graph.initial),
        final=tensor(graph.final),
        graph=tensor(np.repeat(np.arange(len(sizes)), sizes)),
        states=tensor(np.array(sizes)),
    )


def _join(graphs: Sequence[Graph]) -> Graph:
    """Join several graphs to one graph in which they are not connected."""
    if any((graph.pdf < 0).any() for graph in graphs):
        raise ValueError("only a graph for all utterances may have epsilon arcs")
    first, counts = np.cumsum([0, *(len(g.final) for g in graphs)]), [len(g.pdf) for g in graphs]
    offset = np.repeat(first[:-1], counts)
    source, target, pdf, weight, initial, final = (
        np.concatenate([getattr(graph, field.name) for graph in graphs]) for field in fields(Graph)
    )
    pdf = pdf * len(graphs) + np.repeat(np.arange(len(graphs)), counts)
    return Graph(source + offset, target + offset, pdf, weight, initial, final)


def log_totals(scores: Tensor, lengths: Tensor, packed: Packed) -> Tensor:
    """Sum the exponentials of all paths' scores; the gradient is the posteriors of pdfs.

    Args:
        scores: natural logarithms, not normalised, (B, T, pdfs); padded frames may be anything.
        lengths: frames of each utterance, (B,), at most T.
        packed: one graph, or B graphs.

    Returns:
        natural logarithm of each utterance's sum, float64, (B,); -inf, with gradient 0, where no
        path has that many frames.
    """
    return _LogTotals.apply(scores, lengths, packed)


class _LogTotals(torch.autograd.Function):
    """The forward-backward algorithm as one function, which also computes its own gradient."""

    @staticmethod
    def forward(ctx, scores: Tensor, lengths: Tensor, packed: Packed) -> Tensor:
        totals, found = _forward_backward(scores, lengths, packed, ctx.needs_input_grad[0])
        ctx.save_for_backward(found)
        return totals

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        (found,) = ctx.saved_tensors
        return found * gradient.to(found.dtype)[:, None, None], None, None


def posteriors(scores: Tensor, lengths: Tensor, packed: Packed) -> Tensor:
    """Return the probability of each pdf at each frame, (B, T, pdfs); 0 where there is no path.

    Arguments are those of `log_totals`.
    """
    return _forward_backward(scores.detach(), lengths, packed, True)[1]


def _forward_backward(
    scores: Tensor, lengths: Tensor, packed: Packed, both: bool
) -> tuple[Tensor, Tensor | None]:
    """Return totals, (B,), and if `both`, posteriors of pdfs in the shape of the scores."""
    lengths = lengths.to(scores.device)
    frames = _frames(scores, lengths, packed)
    table = _table(frames, packed, Runs.sum)
    last = packed.of_states(lengths).expand(table.shape[1:])
    ends = table.gather(0, last[None])[0] + packed.final
    totals = _log_sums(ends, packed.graph, packed.states)[0].flatten()
    if not both:
        return totals, None
    found = scores.new_zeros(frames.shape[0], scores.shape[2], scores.shape[0])
    _occupy(found, table, frames, packed, last, totals)
    return totals, found.permute(2, 0, 1)


def _frames(scores: Tensor, lengths: Tensor, packed: Packed) -> Tensor:
    """Return scores as (T, pdfs, B), or (T, pdfs * B) for several graphs; 0 in padded frames."""
    batch, _, pdfs = scores.shape
    if packed.graphs not in (0, batch):
        raise ValueError(f"{packed.graphs} graphs for {batch} utterances")
    if len(packed.pdf_counts) > pdfs * max(1, packed.graphs):
        raise ValueError(f"the graphs have more pdfs than a frame has scores, {pdfs}")
    padded = torch.arange(scores.shape[1], device=scores.device) >= lengths[:, None]
    scores = scores.to(_FLOAT).masked_fill(padded[..., None], 0.0)
    frames = scores.permute(1, 2, 0).contiguous()
    return frames.flatten(1) if packed.graphs else frames


def _table(frames: Tensor, packed: Packed, combine: Callable[[Runs, Tensor], Tensor]) -> Tensor:
    """Return sums (or maxima) over partial paths to each state: (T + 1, states[, B]).

    The last dimension exists for one graph of all utterances.
    """
    forward, into, stations = packed.forward, packed.into, packed.stations
    table = frames.new_empty(len(frames) + 1, len(packed.initial), *frames.shape[2:])
    table[0] = packed.initial
    for time, now in enumerate(table):
        if time:
            values = table[time - 1].index_select(0, forward.source).add_(forward.weight)
            values.add_(frames[time - 1].index_select(0, forward.pdf))
            now[:stations] = combine(forward, values)
        if len(into.run):
            values = now.index_select(0, into.source).add_(into.weight)
            now[stations:] = combine(into, values)
    return table


def _occupy(
    found: Tensor, table: Tensor, frames: Tensor, packed: Packed, last: Tensor, totals: Tensor
) -> None:
    """Fill in posteriors, (T, pdfs, B), from the last frame to the first."""
    backward, out = packed.backward, packed.out
    # Without any path all terms are -inf; subtracting 0 gives probabilities of 0.
    totals = packed.of_states(totals.masked_fill(totals == -torch.inf, 0.0))
    ends, never = set(last.unique().tolist()), frames.new_tensor(-torch.inf)
    # Sums over all path endings: from states (`endings`), and with epsilon arcs first (`after`).
    endings = torch.where(last == len(frames), packed.final, never)
    for time in reversed(range(len(frames))):
        after = endings
        if len(packed.into.run):
            after = out.sum(endings.index_select(0, out.target).add_(out.weight))
        values = after.index_select(0, backward.target).add_(backward.weight)
        values.add_(frames[time].index_select(0, backward.pdf))
        endings, largest, terms = _log_sums(values, backward.run, backward.lengths)
        # Both factors are at most 1.
        shares = largest.add_(table[time]).sub_(totals).exp_()
        terms.mul_(shares.index_select(0, backward.source))
        occupied = _reduce("sum", terms.index_select(0, packed.by_pdf), packed.pdf_counts)
        found[time].view(frames[time].shape)[: len(occupied)] = occupied
        if time in ends:
            endings = torch.where(last == time, packed.final, endings)


def best_paths(scores: Tensor, lengths: Tensor, packed: Packed) -> list[list[int]]:
    """Return the pdfs of each utterance's best path, one per frame; none where there is no path.

    With numerators this is a forced alignment. Arguments are those of `log_totals`.
    """
    frames = _frames(scores.detach(), lengths.to(scores.device), packed)
    table = _table(frames, packed, Runs.max)
    table, frames = (one.reshape(*one.shape[:2], -1).cpu().numpy() for one in (table, frames))
    final, graph = packed.final.cpu().numpy().ravel(), packed.graph.cpu().numpy()
    forward, into, paths = _incoming(packed.forward), _incoming(packed.into), []
    for number, length in enumerate(lengths.tolist()):
        column, own = (0, number) if packed.graphs else (number, 0)
        ends = np.where(graph == own, table[length, :, column] + final, -np.inf)
        state, path = int(ends.argmax()), []
        for time in reversed(range(length if ends[state] > -np.inf else 0)):
            if state >= packed.stations:
                source, _, weight = into(state - packed.stations)
                state = int(source[(table[time + 1, source, column] + weight).argmax()])
            source, pdf, weight = forward(state)
            best = (table[time, source, column] + weight + frames[time, pdf, column]).argmax()
            state = int(source[best])
            path.append(int(pdf[best]) // max(1, packed.graphs))
        paths.append(path[::-1])
    return paths


def _incoming(runs: Runs) -> Callable[[int], tuple[np.ndarray, ...]]:
    """Return a function from a run's number to the sources, pdfs and weights of its arcs."""
    arcs = [field.cpu().numpy().ravel() for field in (runs.source, runs.pdf, runs.weight)]
    bounds = np.append(0, np.cumsum(runs.lengths.cpu().numpy()))
    return lambda run: tuple(field[bounds[run] : bounds[run + 1]] for field in arcs)
