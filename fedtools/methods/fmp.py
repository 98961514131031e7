"""FMP: clients send how often they say which word; all adapt a language model by that, untrained.

Z. Liu, F. Peng: Federated marginal personalization for ASR rescoring, ICASSP 2022. A round is one
of its groups of utterances: clients rescore them with what they have, and count their words. T
rounds serve T + 1 groups, the last of which is rescored and not sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fedtools.client.unit import Trained
from fedtools.files.config import AboveZero, NonNegative, from_mapping
from fedtools.methods import METHODS
from fedtools.methods.base import COUNTS, Method, Phase
from fedtools.privacy.options import CLIENT, CUMULATIVE, INCREMENTS, LAPLACE, NONE, PAPER, Privacy

if TYPE_CHECKING:
    from fedtools.lm.talk import Talk
    from fedtools.server.server import Server


@METHODS.register("fmp")
@dataclass(frozen=True)
class FMP(Method):
    """Every option but `sends` acts at clients alone.

    Attributes:
        alpha, beta: weights of the global and of the client's own distribution in equation 2; the
            background has the rest.
        scale: lambda of equation 1.
        sigma: of equation 3; 0 counts the best hypothesis alone.
        smoothing: weight of the background in either distribution, equation 4.
        normalise: divide by a Z, see `fedtools.lm.marginals.log_factors`; the paper does not.
        continuous: a client's own distribution is refreshed after each utterance, not each round.
        sends: "cumulative", all that a client has counted so far, as in equation 6; or
            "increments", what it has counted since it took part last, which the server adds up; or
            "auto", increments with the mechanism laplace, as they cost least, otherwise cumulative.
        groups: "even", of as many utterances each, as in section 3.2; or "clock", equal parts of
            `span`, so that no utterance decides another one's round.
        span: seconds of a recording that T + 1 groups share, for `groups: clock`; what begins later
            belongs to the last group. It is public, such as the time that meetings are booked for,
            and must not be taken from the data that privacy is promised to.
        privacy: options of `fedtools.privacy.options.Privacy`, but for `release`, which is `sends`.
        noise_key: where the key of its noise is, see `fedtools.privacy.key`.
        max_words: a client is refused whose counts are more than of so many words, each in every
            hypothesis. The default is more than three hours of speech.
        lm_weight, word_score, nnlm, density, bonus: of scores, see
            `fedtools.lm.reweighting.Weights`.
    """

    title: ClassVar[str] = "FMP"
    rank: ClassVar[int] = 20
    needs: ClassVar[tuple[str, ...]] = ("counts",)

    alpha: NonNegative = 0.5
    beta: NonNegative = 0.25
    scale: NonNegative = 0.5
    sigma: NonNegative = 5.0
    smoothing: NonNegative = 0.1
    normalise: bool = False
    continuous: bool = False
    sends: Literal["auto", "cumulative", "increments"] = "auto"
    groups: Literal["even", "clock"] = "even"
    span: AboveZero | None = None
    privacy: dict = field(default_factory=dict)
    noise_key: str | None = None
    max_words: AboveZero = 30_000.0
    lm_weight: NonNegative = 1.0
    word_score: float = 0.0
    nnlm: NonNegative = 0.5
    density: NonNegative = 0.0
    bonus: NonNegative = 0.0

    def __post_init__(self) -> None:
        # Where it is known which file the options are from, and so can be named.
        _ = self.protection

    def check(self, task: str, parts: Sequence[str], model: Mapping[str, Any]) -> None:
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
        if self.protection.mechanism == PAPER and self.adds_up:
            raise ValueError("privacy: the mechanism paper sends cumulative counts")
        if self.protection.mechanism == PAPER and self.alpha == 1:
            # Its noise gives words the probability 0, after any smoothing.
            raise ValueError("with the mechanism paper alpha must be below 1")

    @property
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

    def phase(self, number: int) -> Phase:
        return Phase(self.client, self.server, COUNTS, trains=False, untimed=self.hidden)

    @property
    def hidden(self) -> bool:
        """Whether the server is told nothing of a client but noisy counts."""
        return self.protection.mechanism != NONE and self.protection.trust == CLIENT

    def client(self, client: Talk) -> list[Trained]:
        """Equation 5 for each word, over what a client has said by the end of the round."""
        counts = client.counts(since_sent=self.adds_up)
        size = 0 if self.hidden else client.group.stop - client.group.start
        return [Trained(0, 0.0, size, tensors={"counts": counts})]

    def server(self, server: Server) -> None:
        """Equation 6, but for the smoothing, which is linear and left to the clients."""
        server.sum(added=self.adds_up)
