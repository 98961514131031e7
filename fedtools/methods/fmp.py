"""FMP: clients send how often they say which word; all adapt a language model by that, untrained.

Z. Liu, F. Peng: Federated marginal personalization for ASR rescoring, ICASSP 2022. A round is one
of its groups of utterances: clients rescore them with what they have, and count their words. T
rounds serve T + 1 groups, the last of which is rescored and not sent.

`fedtools.federation.simulation` is algorithm 1, in memory. A federation on disk is the same loop
cut into files: what a client does in a round is `FMP.count_words`, with a `ClientState` that has
heard again what came before; what the server does is `FMP.release` and `FMP.aggregate`. As in the
paper, u is the background's distribution of words, q a client's, and q_bar that of all clients,
each (V,). What is sent are counts, (V,), c_i q_i before the smoothing of equation 4: that is
linear, so that to smooth each client's and to take the mean of equation 6 is the same as to smooth
the sum.

Words are numbers of a vocabulary that everybody knows, the language model's; what it lacks is its
unknown word. Nobody says `</s>`: it is in the vocabulary, but in no distribution of words.

Sums are in float64 and have one order, so that both ways, and any number of jobs, give the same
bits. A client begins at zero and adds word after word: group after group, in each utterance after
utterance, hypothesis after hypothesis. With privacy it adds up what each utterance has of a word,
then utterances, then what was new each time that it sent something. The server begins at zero and
adds client after client in the C order of their names (`fedtools.server.aggregate.combine`); it
adds increments, released, to the counts that it sent last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np

from fedtools.client.unit import Trained
from fedtools.files.config import AboveZero, NonNegative, Section, from_mapping
from fedtools.lm.reweighting import Weights
from fedtools.methods import METHODS
from fedtools.methods.base import COUNTS, Method, Phase, TaskPart
from fedtools.privacy.bounds import Utterances
from fedtools.privacy.marginals import project
from fedtools.privacy.options import CLIENT, CUMULATIVE, INCREMENTS, LAPLACE, NONE, PAPER, Privacy
from fedtools.privacy.plan import Plan

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from fedtools.lm.reweighting import Lists
    from fedtools.privacy.releases import Releases
    from fedtools.server.server import Server

# Words, and their weights, of some utterances that were rescored with these factors.
Evidence = Callable[[slice, "np.ndarray | None"], tuple[np.ndarray, np.ndarray]]
Part = TypeVar("Part", bound="DataclassInstance")


@dataclass(frozen=True)
class Adaptation:
    """The options that act at a client, and the equations that they are in.

    Attributes:
        alpha, beta: weights of the global and of the client's own distribution in equation 2; the
            background has the rest.
        scale: lambda of equation 1.
        sigma: of equation 3; 0 counts the best hypothesis alone.
        smoothing: weight of the background in either distribution, equation 4.
        normalise: divide by a Z, see `factors`; the paper does not.
        continuous: a client's own distribution is refreshed after each utterance, not each round.
    """

    alpha: NonNegative = 0.5
    beta: NonNegative = 0.25
    scale: NonNegative = 0.5
    sigma: NonNegative = 5.0
    smoothing: NonNegative = 0.1
    normalise: bool = False
    continuous: bool = False

    def factors(self, u: np.ndarray, q_bar: np.ndarray, q: np.ndarray) -> np.ndarray | None:
        """What equations 1 and 2 add to the log-probability of each word, natural log.

        With `normalise` the Z of equation 1 does not depend on the history, but is the mean of the
        factors under u; the exact one needs every word's probability after every history.

        Returns:
            (V,), 0 for `</s>`, whose probability stays; None if all stay.
        """
        if self.scale == 0 or self.alpha == self.beta == 0:
            return None
        words = u > 0
        g = (1 - self.alpha - self.beta) * u + self.alpha * q_bar + self.beta * q
        factors = np.zeros(len(u))
        factors[words] = self.scale * np.log(g[words] / u[words])
        if self.normalise:
            factors[words] -= np.log(u[words] @ np.exp(factors[words]))
        return factors

    def kernel(self, ranks: np.ndarray) -> np.ndarray:
        """Equation 3: the weights of hypotheses by rank, from 1."""
        if self.sigma == 0:
            best: np.ndarray = ranks == 1
            return best.astype(float)
        return np.exp(-((ranks - 1.0) ** 2) / (2 * self.sigma**2))

    def smoothed(self, counts: np.ndarray, u: np.ndarray) -> np.ndarray:
        """Equation 4: the distribution of counts, interpolated with the background's.

        Args:
            counts: (V,), not negative; if all are zero, u itself comes back.
        """
        total = counts.sum()
        if total <= 0:
            return u
        mixed: np.ndarray = (1 - self.smoothing) * counts / total + self.smoothing * u
        return mixed


class ClientState:
    """What a client keeps to itself: the running "cache" of section 2.2, and what it sent of it.

    It meets its groups of utterances in turn: it can `rescore` the next one, has to `count` it,
    and then may `take` what it is to send.

    Args:
        name: the client's.
        lists: those of all clients.
        groups: the client's utterances, a group for each round and one more.
        method: its options.
        releases: bounds and noise, or None.
        evidence: what is counted in place of equation 3, of utterances that have been rescored
            before; never with `releases`.

    Attributes:
        number: of groups that were counted, and so, from 1, the round of the last one.
        counts: (V,), the sum of equation 4 for each word of these groups; c_i is its sum.
    """

    def __init__(
        self,
        name: str,
        lists: Lists,
        groups: Sequence[slice],
        method: FMP,
        releases: Releases | None = None,
        evidence: Evidence | None = None,
    ):
        self.name, self.number, self.counts = name, 0, np.zeros_like(lists.background)
        self.releases = releases
        self._lists, self._groups, self._method = lists, groups, method
        self._evidence = evidence
        self._factors: np.ndarray | None = None
        # The first utterance that was not taken yet; what was, bounded; and how much of its bound
        # that has cost the client.
        self._first, self._taken, self._spent = groups[0].start, np.zeros_like(self.counts), 0

    @property
    def group(self) -> slice:
        """The utterances that come next."""
        return self._groups[self.number]

    def rescore(self, q_bar: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
        """Equations 1 and 2: the best hypotheses of the next group, by their numbers among all.

        No utterance is in the counts that it is rescored with.

        Args:
            q_bar: (V,).
            counts: (V,), of somebody else, in place of the client's own.
        """
        if counts is not None or not self._method.continuous:
            return self._best(self.group, q_bar, self.counts if counts is None else counts)
        counts, best = self.counts.copy(), np.zeros(0, int)
        for at in range(self.group.start, self.group.stop):
            utterance = slice(at, at + 1)
            best = np.append(best, self._best(utterance, q_bar, counts))
            self._add(utterance, counts)
        return best

    def count(self) -> None:
        """Count the words of the next group, by equations 3 to 5."""
        self._add(self.group, self.counts)
        self.number += 1

    @property
    def new(self) -> Utterances:
        """What was counted and not taken yet, by utterance."""
        words, ranks, owner = self._lists.words(self._untaken)
        weights, size = self._method.kernel(ranks), self._untaken.stop - self._untaken.start
        return Utterances.entries(owner, words, weights, size, len(self.counts))

    def take(self) -> np.ndarray:
        """(V,) of all that was counted, or of increments what is new; with privacy it is bounded.

        There is no noise on it yet.
        """
        if self.releases is None:
            taken = self.counts.copy()
            if self._method.adds_up:
                taken[:] = 0
                self._add(self._untaken, taken)
        else:
            taken, self._spent = self.releases.plan.bound(self.new, self._spent)
            if not self._method.adds_up:
                taken = self._taken = self._taken + taken
        self._first = self._untaken.stop
        return taken

    @property
    def _untaken(self) -> slice:
        return slice(self._first, self._groups[self.number - 1].stop)

    def _best(self, part: slice, q_bar: np.ndarray, counts: np.ndarray) -> np.ndarray:
        u = self._lists.background
        self._factors = self._method.factors(u, q_bar, self._method.smoothed(counts, u))
        return self._lists.best(part, self._factors)

    def _add(self, part: slice, counts: np.ndarray) -> None:
        if self._evidence is not None:
            words, weights = self._evidence(part, self._factors)
        else:
            words, ranks, _ = self._lists.words(part)
            weights = self._method.kernel(ranks)
        # One by one: sums of parts that are added up have other last bits.
        np.add.at(counts, words, weights)


@METHODS.register("fmp")
@dataclass(frozen=True)
class FMP(Method, Adaptation, Weights):
    """Algorithm 1, with the options of `Adaptation` and `fedtools.lm.reweighting.Weights`, and:

    Attributes:
        sends: "cumulative", all that a client has counted so far, as in equation 6; or
            "increments", what it has counted since it took part last, which the server adds up; or
            "auto", increments with the mechanism laplace, as they cost least, otherwise cumulative.
        groups: "even", of as many utterances each, as in section 3.2; or "clock", equal parts of
            `span`, so that no utterance decides another one's round.
        span: seconds of a recording that T + 1 groups share, for `groups: clock`; what begins later
            belongs to the last group. It is public, such as the time that meetings are booked for,
            and must not be taken from the data that privacy is promised to.
        privacy: options of `fedtools.privacy.options.Privacy`, but for `release`, which is `sends`.
        doubt: with the mechanism laplace, clients take no notice of what was released while its
            words are so many times fewer than what noise alone looks like, or more; 0 believes
            everything. See `FMP.believes`.
        noise_key: where the key of its noise is, see `fedtools.privacy.key`.
        max_words: a client is refused whose counts are more than of so many words, each in every
            hypothesis. The default is more than three hours of speech.
    """

    title: ClassVar[str] = "FMP"
    rank: ClassVar[int] = 20
    needs: ClassVar[tuple[TaskPart, ...]] = (COUNTS,)

    sends: Literal["auto", "cumulative", "increments"] = "auto"
    groups: Literal["even", "clock"] = "even"
    span: AboveZero | None = None
    privacy: Section = field(default_factory=dict)
    doubt: NonNegative = 0.0
    noise_key: str | None = None
    max_words: AboveZero = 30_000.0

    def __post_init__(self) -> None:
        # Where it is known which file the options are from, and so can be named.
        _ = self.protection

    def check(self, task: str, parts: Sequence[TaskPart], model: Mapping[str, Any]) -> None:
        super().check(task, parts, model)
        for name in ("smoothing", "nnlm"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} is over 1")
        if self.sigma and not 1e-3 <= self.sigma <= 1e6:
            raise ValueError("sigma is neither 0 nor between 0.001 and a million")
        if self.alpha + self.beta > 1:
            raise ValueError("alpha and beta are over 1 together")
        if self.alpha + self.beta == 1 and not self.smoothing:
            # A word that nobody has said would have the probability 0.
            raise ValueError("without any background smoothing must be above 0")
        if self.groups == "clock" and self.span is None:
            raise ValueError("groups: clock needs span, a public number of seconds, such as 3600")
        if "release" in self.privacy:
            raise ValueError("privacy: release is the option sends")
        if self.protection.mechanism == LAPLACE and not self.smoothing:
            raise ValueError("privacy: smoothing must be above 0: noise takes words' counts away")
        if self.doubt and self.protection.mechanism != LAPLACE:
            raise ValueError("doubt needs privacy with the mechanism laplace, whose scale is known")
        if self.protection.mechanism == PAPER and self.adds_up:
            raise ValueError("privacy: the mechanism paper sends cumulative counts")
        if self.protection.mechanism == PAPER and self.alpha == 1:
            # Its noise gives words the probability 0, after any smoothing.
            raise ValueError("with the mechanism paper alpha must be below 1")

    @cached_property
    def protection(self) -> Privacy:
        """The options of differential privacy.

        Raises:
            UserError: if there is no such option.
        """
        release = self.sends
        if release == "auto":
            release = INCREMENTS if self.privacy.get("mechanism") == LAPLACE else CUMULATIVE
        return from_mapping(Privacy, {**self.privacy, "release": release}, "privacy")

    @property
    def adds_up(self) -> bool:
        """Whether increments are sent, which the server adds up."""
        return self.protection.release == INCREMENTS

    @property
    def clock(self) -> float | None:
        """Seconds whose equal parts are groups; None if those are of equal numbers."""
        return self.span if self.groups == "clock" else None

    def plan(self, rounds: int) -> Plan:
        """What the options of differential privacy mean; a ValueError if they cannot be had."""
        return Plan(self.protection, rounds, self.clock is None)

    def part(self, kind: type[Part]) -> Part:
        """The options that are those of `Adaptation`, or of `Weights`."""
        return kind(**{one.name: getattr(self, one.name) for one in fields(kind)})

    def phase(self, number: int) -> Phase:
        return Phase(self.client, self.server, COUNTS, trains=False, untimed=self.hidden)

    @property
    def hidden(self) -> bool:
        """Whether the server is told nothing of a client but noisy counts."""
        return self.protection.mechanism != NONE and self.protection.trust == CLIENT

    def client(self, client: ClientState) -> list[Trained]:
        """The client's half, on files: `count_words`, and of how many utterances they are."""
        size = 0 if self.hidden else client.group.stop - client.group.start
        return [Trained(0, 0.0, size, tensors={"counts": self.count_words(client)})]

    def count_words(self, client: ClientState) -> np.ndarray:
        """A client counts its next group, equation 5, and sends what it is to send."""
        client.count()
        return self.sent(client.take(), client, client.releases)

    def sent(
        self, counts: np.ndarray, client: ClientState, releases: Releases | None
    ) -> np.ndarray:
        """What a client sends of what it has taken; with `trust: client` there is noise on it."""
        if releases is None:
            return counts
        return releases.by_client(counts, client.number, client.name)

    def server(self, server: Server) -> None:
        """The server's half, on files: the sum of equation 6, `release`, and `aggregate`."""
        server.sum(self.aggregate)

    def release(
        self, total: np.ndarray, number: int, u: np.ndarray, releases: Releases | None
    ) -> np.ndarray:
        """What the server makes known of the sum of a round's counts, (V,).

        Of the mechanism paper that is no counts, but the noisy distribution of equation 8.
        """
        if releases is None:
            return total
        if self.protection.mechanism == PAPER:
            return releases.marginal(self.smoothed(total, u), total.sum(), number, u)
        return releases.by_server(total, number)

    def aggregate(self, counts: np.ndarray, released: np.ndarray) -> np.ndarray:
        """What the server sends next, (V,).

        Args:
            counts: what it sent in this round.
            released: see `release`.
        """
        return counts + released if self.adds_up else released

    def believes(self, counts: np.ndarray, deviation: float) -> bool:
        """Whether clients take notice of what the server has sent: is it more than its noise?

        The words that were released, noise and all, are compared with `doubt` times those that
        noise of this deviation has of either sign. Both are public, so that the rule costs no
        privacy, and any client can apply it for itself.

        Args:
            counts: (words,), of words alone.
            deviation: of the noise on each; see `fedtools.privacy.plan.Plan.deviation`.
        """
        return bool(counts.sum() >= self.doubt * deviation * len(counts))

    def global_distribution(
        self, counts: np.ndarray, u: np.ndarray, deviation: float = 0.0
    ) -> np.ndarray:
        """Equation 6, of what the server has sent: q_bar, (V,).

        Noise may have made counts negative, and is on that of `</s>`, too, which is known to be 0.
        To mend that uses what is public alone, and so costs no privacy; with smoothing above 0 each
        word's probability is positive.
        """
        if self.protection.mechanism == PAPER:
            # A distribution already, once somebody has said a word.
            return counts if counts.any() else u
        words, mended = u > 0, np.zeros(len(u))
        if self.doubt and not self.believes(counts[words], deviation):
            return u
        mended[words] = project(counts[words])
        return self.smoothed(mended, u)
