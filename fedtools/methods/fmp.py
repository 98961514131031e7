"""FMP: clients send word counts, which adapt a language model by its marginals, without training.

Z. Liu, F. Peng: Federated marginal personalization for ASR rescoring, ICASSP 2022. A round is one
group of utterances of the paper: clients rescore the group with the current distributions, then
count its words. T rounds use T + 1 groups; the last group is rescored, and its counts are not sent.

`fedtools.federation.fmp.simulation` runs algorithm 1 in memory. A federation on disk runs the same
steps over files: the client update is `FMP.count_words`, on a `ClientState` that has replayed the
earlier groups, and the server update is `FMP.release` and `FMP.aggregate`. As in the paper, u is
the background distribution of words, q a client's distribution and q_bar that of all clients, each
(V,). Clients send counts c_i q_i, (V,), before the smoothing of equation 4. Smoothing is linear, so
smoothing the sum of counts equals the mean in equation 6 of smoothed client distributions.

Words are indices into the public vocabulary of the language model, and words outside it map to its
unknown word. `</s>` is in the vocabulary, but is never said and is in no distribution of words.

Sums are in float64 and in a fixed order, so that memory and disk, and any number of jobs, give the
same bits. A client starts at zero and adds its words in the order of groups, utterances and
hypotheses. With privacy it adds up each word within an utterance, then utterances, then the counts
taken in each round. The server starts at zero and adds clients in the C order of their names
(`fedtools.server.aggregate.combine`); released increments are added to the last counts it sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np

from fedtools.client.unit import Trained
from fedtools.core.config import AboveZero, NonNegative, Section, from_mapping
from fedtools.lm.reweighting import ListWeights
from fedtools.methods import METHODS
from fedtools.methods.base import COUNTS, Method, Phase, TaskPart
from fedtools.privacy.bounds import Utterances
from fedtools.privacy.marginals import project
from fedtools.privacy.options import (
    CLIENT,
    CUMULATIVE,
    INCREMENTS,
    LAPLACE,
    NONE,
    PAPER,
    SERVER,
    Privacy,
)
from fedtools.privacy.plan import Plan

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from fedtools.lm.reweighting import Lists
    from fedtools.privacy.releases import Releases
    from fedtools.server.server import Server

# (utterances, factors they were rescored with) -> the words to count, and their weights.
Evidence = Callable[[slice, "np.ndarray | None"], tuple[np.ndarray, np.ndarray]]
Part = TypeVar("Part", bound="DataclassInstance")


@dataclass(frozen=True)
class Adaptation:
    """The options used at a client, with equations 1 to 4.

    Attributes:
        alpha, beta: weights of the global and of the client's own distribution in equation 2; the
            background has the remaining weight.
        scale: lambda of equation 1.
        sigma: sigma of equation 3; 0 counts only the best hypothesis.
        smoothing: weight of the background in both distributions, equation 4.
        normalise: whether to divide by a Z, see `factors`; the paper does not.
        continuous: whether a client's own distribution is updated after each utterance instead of
            after each round.
    """

    alpha: NonNegative = 0.5
    beta: NonNegative = 0.25
    scale: NonNegative = 0.5
    sigma: NonNegative = 5.0
    smoothing: NonNegative = 0.1
    normalise: bool = False
    continuous: bool = False

    def factors(self, u: np.ndarray, q_bar: np.ndarray, q: np.ndarray) -> np.ndarray | None:
        """Compute what equations 1 and 2 add to the log-probability of each word, in nats.

        With `normalise` the Z of equation 1 is the mean of the factors under u and does not depend
        on the history; the exact Z needs the probability of every word after every history.

        Returns:
            (V,), 0 for `</s>`, whose probability is unchanged; None if no probability changes.
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
        """Compute equation 3: the weights of hypotheses by rank, counted from 1."""
        if self.sigma == 0:
            best: np.ndarray = ranks == 1
            return best.astype(float)
        return np.exp(-((ranks - 1.0) ** 2) / (2 * self.sigma**2))

    def smoothed(self, counts: np.ndarray, u: np.ndarray) -> np.ndarray:
        """Compute equation 4: the relative counts, interpolated with the background.

        Args:
            counts: (V,), not negative; if all are zero, u is returned.
            u: the background distribution, (V,).
        """
        total = counts.sum()
        if total <= 0:
            return u
        mixed: np.ndarray = (1 - self.smoothing) * counts / total + self.smoothing * u
        return mixed


class ClientState:
    """Private state of a client: the running "cache" of section 2.2, and the part already sent.

    A client processes its groups in order: it may `rescore` the next group, must `count` it, and
    may then `take` the counts to send.

    Args:
        name: the name of the client.
        lists: the N-best lists of all clients.
        groups: the client's utterances, one group per round and one more.
        method: the method and its options.
        releases: bounds and noise, or None.
        evidence: what to count instead of equation 3, for utterances that were rescored before;
            never with `releases`.

    Attributes:
        number: the number of groups counted, which is the round of the last one, from 1.
        counts: (V,), the weighted counts of equation 4 over these groups; they add up to c_i.
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
        # The first utterance not taken yet, the bounded counts taken so far, and how much of its
        # bound the client has spent on them.
        self._first, self._taken, self._spent = groups[0].start, np.zeros_like(self.counts), 0

    @property
    def group(self) -> slice:
        """Return the next group of utterances."""
        return self._groups[self.number]

    def rescore(self, q_bar: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
        """Rescore the next group by equations 1 and 2.

        An utterance is never part of the counts that it is rescored with.

        Args:
            q_bar: the distribution of all clients, (V,).
            counts: (V,), counts of another client to use instead of the client's own.

        Returns:
            the best hypothesis of each utterance, by its index among all hypotheses.
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
        """Return the counts that were not taken yet, by utterance."""
        words, ranks, owner = self._lists.words(self._untaken)
        weights, size = self._method.kernel(ranks), self._untaken.stop - self._untaken.start
        return Utterances.entries(owner, words, weights, size, len(self.counts))

    def take(self) -> np.ndarray:
        """Return all counts, or with increments the new ones, (V,); with privacy they are bounded.

        Noise is not added yet.
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
        # Word by word: adding sums of parts would round differently.
        np.add.at(counts, words, weights)


@METHODS.register("fmp")
@dataclass(frozen=True)
class FMP(Method, Adaptation, ListWeights):
    """Algorithm 1, with the options of `Adaptation` and `fedtools.lm.reweighting.ListWeights`, and:

    Attributes:
        sends: "cumulative", all counts of a client so far, as in equation 6; "increments", the
            counts since its last participation, which the server adds up; or "auto": increments
            with the mechanism laplace, where they cost least, otherwise cumulative.
        groups: "even", groups of equally many utterances, as in section 3.2; or "clock", equal
            parts of `span`, so that no utterance affects the round of another.
        span: seconds of a recording that T + 1 groups divide, for `groups: clock`; utterances that
            begin later are in the last group. It must be public, such as the booked length of
            meetings, and not derived from the protected data.
        privacy: options of `fedtools.privacy.options.Privacy` except `release`, set by `sends`.
        doubt: with the mechanism laplace, clients ignore released counts below `doubt` times those
            expected from noise alone; 0 ignores none. See `FMP.believes`.
        noise_key: path of the noise key, see `fedtools.privacy.key`.
        max_words: the most words, each counted in every hypothesis, that a client's counts may
            amount to; larger counts are refused. The default is more than three hours of speech.
        max_weight_ratio: the largest ratio of the sum of a client's counts to that of the median
            client; larger ones are scaled down. The most talkative of AMI's 687 speakers in a
            meeting says 7.6 times as many words as the median one. If the server adds the noise of
            the mechanism laplace, only `max_words` and the cap of a user apply, since a bound by
            other clients' counts would let one utterance change how all are counted.
    """

    title: ClassVar[str] = "FMP"
    rank: ClassVar[int] = 20
    needs: ClassVar[tuple[TaskPart, ...]] = (COUNTS,)
    no_rule: ClassVar[str] = "clients send counts, which the server adds up"
    sections: ClassVar[Mapping[str, type]] = {"privacy": Privacy}

    sends: Literal["auto", "cumulative", "increments"] = "auto"
    groups: Literal["even", "clock"] = "even"
    span: AboveZero | None = None
    privacy: Section = field(default_factory=dict)
    doubt: NonNegative = 0.0
    noise_key: str | None = None
    max_words: AboveZero = 30_000.0
    max_weight_ratio: NonNegative = 8.0

    def __post_init__(self) -> None:
        # Checks the privacy options here, where an error can name the file they were read from.
        _ = self.protection

    def check(self, task: str, parts: Sequence[TaskPart], model: Mapping[str, Any]) -> None:
        super().check(task, parts, model)
        for name in ("smoothing", "nnlm"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} is over 1")
        if self.sigma and not 1e-3 <= self.sigma <= 1e6:
            raise ValueError("sigma is neither 0 nor between 0.001 and a million")
        if self.alpha + self.beta > 1:
            raise ValueError("alpha + beta is over 1")
        if self.alpha + self.beta == 1 and not self.smoothing:
            # A word that no client has said would have probability 0.
            raise ValueError("smoothing must be above 0 where alpha + beta is 1")
        if self.groups == "clock" and self.span is None:
            raise ValueError("groups: clock needs span, a public number of seconds, such as 3600")
        if "release" in self.privacy:
            raise ValueError("privacy: release is set by the option sends")
        if self.protection.mechanism == LAPLACE and not self.smoothing:
            raise ValueError("privacy: smoothing must be above 0: noise can cancel a word's counts")
        if self.doubt and self.protection.mechanism != LAPLACE:
            raise ValueError("doubt needs privacy with the mechanism laplace, whose scale is known")
        if self.protection.mechanism == PAPER and self.adds_up:
            raise ValueError("privacy: the mechanism paper needs cumulative counts")
        if self.protection.mechanism == PAPER and self.alpha == 1:
            # Its noise is added after smoothing, and can give a word probability 0.
            raise ValueError("with the mechanism paper alpha must be below 1")

    @cached_property
    def protection(self) -> Privacy:
        """Return the options of differential privacy.

        Raises:
            UserError: for an unknown option.
        """
        release = self.sends
        if release == "auto":
            release = INCREMENTS if self.privacy.get("mechanism") == LAPLACE else CUMULATIVE
        return from_mapping(Privacy, {**self.privacy, "release": release}, "privacy")

    @property
    def adds_up(self) -> bool:
        """Return whether clients send increments, which the server adds up."""
        return self.protection.release == INCREMENTS

    @property
    def clock(self) -> float | None:
        """Return the seconds that groups divide equally; None for groups of equal size."""
        return self.span if self.groups == "clock" else None

    def plan(self, rounds: int) -> Plan:
        """Return the noise plan of the privacy options; raise a ValueError if it is impossible."""
        return Plan(self.protection, rounds, self.clock is None)

    def part(self, kind: type[Part]) -> Part:
        """Return the options that belong to `kind`, `Adaptation` or `ListWeights`."""
        return kind(**{one.name: getattr(self, one.name) for one in fields(kind)})

    def phase(self, number: int) -> Phase:
        return Phase(self.client, self.server, COUNTS, trains=False, untimed=self.hidden)

    @property
    def hidden(self) -> bool:
        """Return whether clients send the server nothing but noisy counts."""
        return self.protection.mechanism != NONE and self.protection.trust == CLIENT

    def client(self, client: ClientState) -> list[Trained]:
        """Run the client update on files: `count_words`, with the number of utterances."""
        size = 0 if self.hidden else client.group.stop - client.group.start
        return [Trained(0, 0.0, size, tensors={"counts": self.count_words(client)})]

    def count_words(self, client: ClientState) -> np.ndarray:
        """Count the words of a client's next group (equation 5), and return the counts to send."""
        client.count()
        return self.sent(client.take(), client, client.releases)

    def sent(
        self, counts: np.ndarray, client: ClientState, releases: Releases | None
    ) -> np.ndarray:
        """Return the counts that a client sends; with `trust: client` they are noisy."""
        if releases is None:
            return counts
        return releases.by_client(counts, client.number, client.name)

    def server(self, server: Server) -> None:
        """Run the server update on files: the sum of equation 6, `release` and `aggregate`."""
        server.sum(self.aggregate, relative=self.bounds_sums)

    @property
    def bounds_sums(self) -> bool:
        """Return whether the median client's counts bound the others'; see `max_weight_ratio`."""
        return self.protection.mechanism != LAPLACE or self.protection.trust != SERVER

    def release(
        self, total: np.ndarray, number: int, u: np.ndarray, releases: Releases | None
    ) -> np.ndarray:
        """Return what the server publishes of the sum of a round's counts, (V,).

        With the mechanism paper it is the noisy distribution of equation 8 instead of counts.
        """
        if releases is None:
            return total
        if self.protection.mechanism == PAPER:
            return releases.marginal(self.smoothed(total, u), total.sum(), number, u)
        return releases.by_server(total, number)

    def aggregate(self, counts: np.ndarray, released: np.ndarray) -> np.ndarray:
        """Return what the server sends in the next round, (V,).

        Args:
            counts: what the server sent in this round.
            released: see `release`.
        """
        return counts + released if self.adds_up else released

    def believes(self, counts: np.ndarray, deviation: float) -> bool:
        """Return whether clients use the counts that the server has sent, or ignore them as noise.

        The sum of the released noisy counts is compared with `doubt` times the noise's deviation
        summed over all words. Both are public, so the rule costs no privacy, and any client can
        apply it.

        Args:
            counts: noisy counts of words, without `</s>`, (words,).
            deviation: standard deviation of the noise on each count; see
                `fedtools.privacy.plan.Plan.deviation`.
        """
        return bool(counts.sum() >= self.doubt * deviation * len(counts))

    def global_distribution(
        self, counts: np.ndarray, u: np.ndarray, deviation: float = 0.0
    ) -> np.ndarray:
        """Compute q_bar of equation 6, (V,), from what the server has sent.

        Noise may make counts negative, and is also added to the count of `</s>`, known to be 0.
        Correcting this uses only public values and costs no privacy. With smoothing above 0 each
        word has a positive probability.
        """
        if self.protection.mechanism == PAPER:
            # These are already a distribution, once a client has counted a word.
            return counts if counts.any() else u
        words, mended = u > 0, np.zeros(len(u))
        if self.doubt and not self.believes(counts[words], deviation):
            return u
        mended[words] = project(counts[words])
        return self.smoothed(mended, u)
