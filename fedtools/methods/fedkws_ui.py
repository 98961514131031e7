"""FedKWS-UI: clients avoid overfitting user-specific information.

X.-C. Li, J.-L. Tang, S. Song, B. Li, Y. Li, Y. Shao, L. Gan, D.-C. Zhan: Avoid overfitting user
specific information in federated keyword spotting, Interspeech 2022. It combines two methods, which
are also available separately:

    ALO  adversarial learning against overfitted models: a private model overfits the client's
         clips, and the shared model is pushed away from its predictions (equations 1 to 3)
    ALT  adaptive local training: clients with more clips and more even labels take more steps

The authors' public code differs from the paper, which is followed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import numpy as np

from fedtools.core.config import Natural, NonNegative, Share
from fedtools.methods import METHODS
from fedtools.methods.base import LABELS, MODEL, TaskPart
from fedtools.methods.fedavg import FedAvg

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from fedtools.client.client import Client
    from fedtools.client.objective import Loss, Objective
    from fedtools.models.keywords.base import Network
    from fedtools.models.keywords.clip_batch import ClipBatch


@METHODS.register("fedkws_ui")
@dataclass(frozen=True)
class FedKwsUi(FedAvg):
    """FedAvg with ALO and ALT.

    Attributes:
        smoothing: mu of equation 1.
        adversarial: lambda of equation 3; 0 trains no private model.
        private_steps: gradient steps of the private model per round; 0 means `local_steps` or,
            if that is 0 too, the client's number of steps on the shared model.
        adaptive: whether steps are allotted by utility (ALT).
        base_ratio: r0; 0 computes it so that all clients together do as much work as without ALT.
        conserve: unit of that work: "steps", as in the paper, or "clips". They differ because
            clients with many clips have larger batches, hence more clips per step.
    """

    title: ClassVar[str] = "FedKWS-UI"
    rank: ClassVar[int] = 7
    needs: ClassVar[tuple[TaskPart, ...]] = (MODEL, LABELS)

    local_steps: Natural = 50
    smoothing: Share = 0.2
    adversarial: NonNegative = 0.001
    private_steps: Natural = 0
    adaptive: bool = True
    base_ratio: NonNegative = 0.0
    conserve: Literal["steps", "clips"] = "steps"

    def __post_init__(self) -> None:
        if self.conserve == "clips" and self.base_ratio:
            raise ValueError("conserve: clips computes r0, so base_ratio must be 0")

    def prepare(
        self, sizes: np.ndarray, entropies: np.ndarray, batch_size: int
    ) -> dict[str, np.ndarray]:
        """Compute each client's steps for ALT (section 4): r0 x r_k x E for client k.

        Raises:
            ValueError: if every client's utility is 0, so that no r0 conserves the work.
        """
        facts = super().prepare(sizes, entropies, batch_size)
        amount = sizes / sizes.max()
        both = amount + entropies
        utility = np.divide(2 * amount * entropies, both, out=np.zeros_like(both), where=both > 0)
        work = utility * facts["steps"]
        one = np.minimum(sizes, batch_size) if self.conserve == "clips" else np.ones_like(sizes)
        ratio = self.base_ratio or (facts["steps"] * one).sum() / max((work * one).sum(), 1e-12)
        if self.adaptive:
            if not (self.base_ratio or work.any()):
                raise ValueError(
                    "no client has clips of two labels, so adaptive steps cannot be allotted: "
                    "choose a method without them, such as alo, or set method_conf.base_ratio"
                )
            # A client with a single label has utility 0, but a sampled client takes a step.
            facts["steps"] = np.maximum(np.rint(ratio * work).astype(np.int64), 1)
        return {**facts, "utility": utility, "ratio": ratio * utility}

    def private_training(self, steps: int) -> int:
        return (self._fixed_private_steps or steps) if self.adversarial else 0

    @property
    def _fixed_private_steps(self) -> int:
        """Return the private steps of every client, or 0 for as many as on the shared model."""
        return self.private_steps or self.local_steps

    def objective(self, client: Client) -> Objective:
        """Train the private models, and return equation 3 as the objective of the shared one."""
        import torch

        # A tensor, so that 1 - mu is rounded in single precision.
        smoothing = torch.tensor(self.smoothing)
        private = self._overfit(client)

        def loss(network: Network, batch: ClipBatch) -> Tensor:
            log_probs = network.head(network.features(batch.mfcc, batch.valid)).log_softmax(-1)
            smooth = label_smoothing(log_probs, batch, smoothing)
            if private is None:
                return smooth
            overfitted = private(batch.mfcc).softmax(-1)
            against = batch.mean((overfitted * log_probs).sum(-1))
            return smooth + self.adversarial * against

        # The models of a task with labels are keyword networks.
        return client.objective.replaced(cast("Loss", loss))

    def _overfit(self, client: Client) -> Module | None:
        """Train the private models, and return their stack; None if there are none."""
        if not self.adversarial:
            return None
        steps = self._fixed_private_steps or None
        private = client.copy()
        client.recall("private", private)
        client.train(steps=steps, model=private, purpose="private")
        client.keep("private", private)
        return private.eval().requires_grad_(False)


@METHODS.register("alo")
@dataclass(frozen=True)
class Alo(FedKwsUi):
    """ALO alone: adversarial learning against overfitted models; all clients take equal steps."""

    title: ClassVar[str] = "ALO"
    rank: ClassVar[int] = 8

    adaptive: bool = False


@METHODS.register("alt")
@dataclass(frozen=True)
class Alt(FedKwsUi):
    """ALT alone: adaptive local training, with mu = lambda = 0 as in the paper's ablation."""

    title: ClassVar[str] = "ALT"
    rank: ClassVar[int] = 9

    smoothing: float = 0.0
    adversarial: float = 0.0


def label_smoothing(log_probs: Tensor, batch: ClipBatch, smoothing: Tensor) -> Tensor:
    """Compute equation 1 for each client, (K,): cross-entropy with (1 - mu) label + mu / C.

    Args:
        log_probs: (K, B, C).
        smoothing: mu, a scalar.
    """
    right = log_probs.gather(2, batch.labels[..., None])[..., 0]
    return -batch.mean((1 - smoothing) * right + smoothing * log_probs.mean(-1))
