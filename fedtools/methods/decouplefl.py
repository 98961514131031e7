"""DecoupleFL: clients train the bottom of the model, the server the rest on features they send.

H. Zhu et al.: Decoupled federated learning for ASR with non-IID data, Interspeech 2022, section
2.2. Begins with a model that is trained already (`fedtools init --start`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Gt, Le

from fedtools.files.config import Natural, NonNegative, Positive
from fedtools.files.messages import Payload
from fedtools.methods import METHODS
from fedtools.methods.base import FEATURES, MODEL, PERSONAL, Extracted, Method, Phase, TaskPart

if TYPE_CHECKING:
    from fedtools.client.client import Client
    from fedtools.client.unit import Trained
    from fedtools.server.server import Server


@METHODS.register("decouplefl")
@dataclass(frozen=True)
class DecoupleFL(Method):
    """The personal parameters are the extractor, all others the classifier, which is shared.

    Rounds 1 to `stage1` train the extractors, each at its client, below the classifier as it is.
    In the next round clients send the features of their utterances, once. In `stage2` more the
    server trains the classifier on these, on labels of a teacher of its own, since transcripts do
    not leave a client. In the last round the classifier goes back. A client that is gone after
    stage 1 is left out of what follows.

    Attributes:
        stage1: rounds, each one of `local_epochs`, of the extractors; 0 for none (an ablation).
        stage2: epochs of the classifier; 0 for none (an ablation), and then no features are sent.
        bits: of a value that is sent: 32, or 16 or 8 in Kaldi's compressed matrices.
        max_hours: of speech, with all of its speeds, of which a client may send features; nothing
            is taken of one that sends more.
        speaker_invariance: lambda of equation 3, of a speaker's loss that is summed over frames of
            features as CTC's is; 0 trains without speaker classifiers.
        speaker_units: width of the hidden layer of a speaker classifier.
    """

    title: ClassVar[str] = "DecoupleFL"
    rank: ClassVar[int] = 6
    needs: ClassVar[tuple[TaskPart, ...]] = (MODEL, FEATURES)

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
            raise ValueError("personal names no parameters, which would be the extractor")
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
        """1 while extractors are trained, and until the classifier is."""
        return 1 if number <= self.stage1 + 1 else 2

    def train_extractor(self, client: Client) -> list[Trained]:
        """Stage 1, section 2.2.1: the classifier is fixed, the optimiser lives on."""
        if not self.speaker_invariance:
            return client.train(only=self._is_extractor, fix_statistics=True, keep_optimizer=True)
        from fedtools.client.invariance import speaker_invariant

        weight = partial(self.weight_of_speakers, client.unit.number)
        return speaker_invariant(client, self._is_extractor, weight, self.speaker_units)

    def weight_of_speakers(self, number: int, done: float) -> float:
        """Lambda of equation 3, which grows from 0 with the steps of stage 1.

        The warm-up is Ganin and Lempitsky's, the paper's [27]: half of lambda after a ninth of
        the steps, and nearly all of it after half of them.

        Args:
            number: the round.
            done: the share of its steps that are taken.
        """
        progress = (number - 1 + done) / self.stage1
        return self.speaker_invariance * (2 / (1 + math.exp(-10 * progress)) - 1)

    def send_features(self, client: Client) -> list[Trained]:
        """What the server needs for stage 2, section 2.2.2."""
        return client.send_features()

    def train_classifier(self, server: Server) -> None:
        """Stage 2, equation 4: the classifier alone, on features."""
        server.train(epochs=1, only=lambda name: not self._is_extractor(name))

    def receive(self, client: Client) -> list[Trained]:
        """The new classifier goes back: all that there is to do."""
        return client.rest()

    def keep(self, server: Server) -> None:
        """Nothing at the server changes."""
        server.keep()

    def _is_extractor(self, name: str) -> bool:
        return self.parameter_kind(name) == PERSONAL
