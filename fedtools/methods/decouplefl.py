"""DecoupleFL: clients train feature extractors, the server trains the classifier on features.

H. Zhu et al.: Decoupled federated learning for ASR with non-IID data, Interspeech 2022, section
2.2. It starts from a trained model (`fedtools init --start`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Gt, Le

from fedtools.core.config import Natural, NonNegative, Positive
from fedtools.exchange.messages import Payload
from fedtools.methods import METHODS
from fedtools.methods.base import FEATURES, MODEL, PERSONAL, Extracted, Method, Phase, TaskPart

if TYPE_CHECKING:
    from fedtools.client.client import Client
    from fedtools.client.unit import Trained
    from fedtools.server.server import Server


@METHODS.register("decouplefl")
@dataclass(frozen=True)
class DecoupleFL(Method):
    """Decoupled training: the personal parameters are the extractor, all others the classifier.

    In rounds 1 to `stage1` each client trains its extractor below the fixed classifier. In the next
    round clients send the features of their utterances, once. In the next `stage2` rounds the
    server trains the classifier on these features, with labels from its own teacher, since
    transcripts do not leave a client. In the last round clients receive the classifier. A client
    whose data or extractor is missing after stage 1 is left out of later rounds.

    Attributes:
        stage1: rounds of extractor training, of `local_epochs` each; 0 for none (an ablation).
        stage2: epochs of classifier training; 0 for none and no features sent (an ablation).
        bits: bits per value that is sent: 32, or 16 or 8 in Kaldi's compressed matrices.
        max_hours: the most hours of speech, all speeds included, of which a client may send
            features; a client that sends more is refused.
        speaker_invariance: lambda of equation 3, for a speaker loss that is summed over feature
            frames as the CTC loss is; 0 trains without speaker classifiers.
        speaker_units: width of the hidden layer of a speaker classifier.
    """

    title: ClassVar[str] = "DecoupleFL"
    rank: ClassVar[int] = 6
    needs: ClassVar[tuple[TaskPart, ...]] = (MODEL, FEATURES)
    no_rule: ClassVar[str] = "clients send features, and the server trains on them"

    personal: tuple[str, ...] = ("encoder.embed.*", "encoder.encoders.[0-6].*")
    stage1: Natural = 50
    stage2: Natural = 50
    bits: Literal[32, 16, 8] = 16
    max_hours: Annotated[float, Gt(0), Le(1e6)] = 1000.0
    speaker_invariance: NonNegative = 0.0
    speaker_units: Positive = 128

    def check(self, task: str, parts: Sequence[TaskPart], model: Mapping[str, Any]) -> None:
        super().check(task, parts, model)
        if not self.personal:
            raise ValueError("personal is empty; it must name the parameters of the extractor")
        if not self.rounds:
            raise ValueError("stage1 and stage2 are both 0")

    @property
    def rounds(self) -> int:
        return self.stage1 + (self.stage2 + 2 if self.stage2 else 0)

    def phase(self, number: int) -> Phase:
        sending = self.stage1 + 1
        nothing = Payload()
        if number <= self.stage1:
            return Phase(self.train_extractor, self.keep, sends=nothing)
        if number == sending:
            sends = Extracted(self.bits, self.max_hours)
            return Phase(
                self.send_features,
                self.keep,
                sends,
                everybody=True,
                keep=True,
                trains=False,
                may_lack=True,
            )
        if number <= sending + self.stage2:
            return Phase(None, self.train_classifier, server_trains=True, on_features=sending)
        return Phase(
            self.receive, self.keep, sends=nothing, everybody=True, trains=False, may_lack=True
        )

    def stage(self, number: int) -> int:
        """Return 1 until clients have sent features, and 2 once the classifier is trained."""
        return 1 if number <= self.stage1 + 1 else 2

    def train_extractor(self, client: Client) -> list[Trained]:
        """Train the extractor (stage 1, section 2.2.1) with a fixed classifier.

        The optimiser state is kept between rounds.
        """
        if not self.speaker_invariance:
            return client.train(only=self._is_extractor, fix_statistics=True, keep_optimizer=True)
        from fedtools.client.invariance import speaker_invariant

        weight = partial(self.weight_of_speakers, client.unit.number)
        return speaker_invariant(client, self._is_extractor, weight, self.speaker_units)

    def weight_of_speakers(self, number: int, done: float) -> float:
        """Compute lambda of equation 3, which grows from 0 over the steps of stage 1.

        The warm-up is that of Ganin and Lempitsky, the paper's [27]: half of lambda after a ninth
        of the steps, and nearly all of it after half of them.

        Args:
            number: the round.
            done: the share of the round's steps taken so far.
        """
        progress = (number - 1 + done) / self.stage1
        return self.speaker_invariance * (2 / (1 + math.exp(-10 * progress)) - 1)

    def send_features(self, client: Client) -> list[Trained]:
        """Send the features that the server needs for stage 2 (section 2.2.2)."""
        return client.send_features()

    def train_classifier(self, server: Server) -> None:
        """Train only the classifier, on features (stage 2, equation 4)."""
        server.train(epochs=1, only=lambda name: not self._is_extractor(name))

    def receive(self, client: Client) -> list[Trained]:
        """Receive the trained classifier; the client does not train."""
        return client.rest()

    def keep(self, server: Server) -> None:
        """Keep the server's state unchanged."""
        server.keep()

    def _is_extractor(self, name: str) -> bool:
        return self.parameter_kind(name) == PERSONAL
