"""FedKWS-UI: clients avoid overfitting user-specific information.

X.-C. Li, J.-L. Tang, S. Song, B. Li, Y. Li, Y. Shao, L. Gan, D.-C. Zhan: Avoid overfitting user
specific information in federated keyword spotting, Interspeech 2022. It combines two methods, which
are also available separately:

    ALO  adversarial learning against overfitted models: a private model overfits the client's
         clips, and the shared model is pushed away from its predictions (equations 1 to 3)
    ALT  adaptive local training: clients with more clips and more even labels take more steps

The authors' public code differs from the paper: `conf/speechcommands/released.yaml` lists the
differences, and the options that only that file uses are marked "released" below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np

from fedtools.core.config import Natural, NonNegative, Share
from fedtools.methods import METHODS
from fedtools.methods.base import LABELS, MODEL, TaskPart
from fedtools.methods.fedavg import FedAvg

if TYPE_CHECKING:
    from torch import Tensor

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
        private: "model", a whole private model that the client keeps between rounds, or "head", a
            second head on the shared encoder that is averaged too (released).
        private_steps: gradient steps of the private model per round; 0 means `local_steps` or,
            if that is 0 too, the client's number of steps on the shared model.
        adaptive: whether steps are allotted by utility (ALT).
        base_ratio: r0; 0 computes it so that all clients together do as much work as without ALT.
        conserve: unit of that work: "steps", as in the paper, or "clips". They differ because
            clients with many clips have larger batches, hence more clips per step.
        full_size: number of clips that counts as 1 in the utility; 0 means the largest client's.
        truncate: whether steps are rounded down instead of to the nearest integer (released).
        smooth_by_utility: whether to use mu (1 - r) instead of mu (released).
    """

    title: ClassVar[str] = "FedKWS-UI"
    rank: ClassVar[int] = 7
    needs: ClassVar[tuple[TaskPart, ...]] = (MODEL, LABELS)

    local_steps: Natural = 50
    smoothing: Share = 0.2
    adversarial: NonNegative = 0.001
    private: Literal["model", "head"] = "model"
    private_steps: Natural = 0
    adaptive: bool = True
    base_ratio: NonNegative = 0.0
    conserve: Literal["steps", "clips"] = "steps"
    full_size: Natural = 0
    truncate: bool = False
    smooth_by_utility: bool = False

    def __post_init__(self) -> None:
        if self.conserve == "clips" and self.base_ratio:
            raise ValueError("conserve: clips computes r0, so base_ratio must be 0")

    def check(self, task: str, parts: Sequence[TaskPart], model: Mapping[str, Any]) -> None:
        super().check(task, parts, model)
        sizes = model.get("network_conf")
        if self.private == "head" and not (isinstance(sizes, Mapping) and sizes.get("head_share")):
            raise ValueError("private: head needs a model with network_conf.head_share")

    def prepare(
        self, sizes: np.ndarray, entropies: np.ndarray, batch_size: int
    ) -> dict[str, np.ndarray]:
        """Compute each client's steps for ALT (section 4): r0 x r_k x E for client k.

        Raises:
            ValueError: if every client's utility is 0, so that no r0 conserves the work.
        """
        facts = super().prepare(sizes, entropies, batch_size)
        amount = np.minimum(sizes / (self.full_size or sizes.max()), 1.0)
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
            steps = ratio * work if self.truncate else np.rint(ratio * work)
            # A client with a single label has utility 0, but a sampled client takes a step.
            facts["steps"] = np.maximum(steps.astype(np.int64), 1)
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

        utility = torch.from_numpy(client.facts["utility"]).float()
        smoothing = self.smoothing * (1 - utility if self.smooth_by_utility else 0 * utility + 1)
        predict = self._overfit(client)

        def loss(network: Network, batch: ClipBatch) -> Tensor:
            features = network.features(batch.mfcc, batch.valid)
            log_probs = network.head(features).log_softmax(-1)
            smooth = label_smoothing(log_probs, batch, smoothing.to(log_probs.device))
            if predict is None:
                return smooth
            overfitted = predict(network, batch, features)
            against = batch.mean((overfitted * log_probs).sum(-1))
            return smooth + self.adversarial * against

        # The models of a task with labels are keyword networks.
        return client.objective.replaced(cast("Loss", loss))

    def _overfit(self, client: Client) -> Callable[[Network, ClipBatch, Tensor], Tensor] | None:
        """Train the private models, and return a function of their predictions, (K, B, classes)."""
        if not self.adversarial:
            return None
        steps = self._fixed_private_steps or None
        if self.private == "head":
            client.train(
                client.objective.replaced(cast("Loss", private_cross_entropy)),
                steps=steps,
                only=lambda name: name.startswith("private_head."),
                purpose="private",
            )
            return lambda network, batch, features: (
                network.private(features.detach()).detach().softmax(-1)
            )
        private = client.copy()
        client.recall("private", private)
        client.train(steps=steps, model=private, purpose="private")
        client.keep("private", private)
        private.eval().requires_grad_(False)
        return lambda network, batch, features: private(batch.mfcc).softmax(-1)


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
        smoothing: mu for each client, of length K or more.
    """
    own = smoothing[: len(log_probs), None]
    right = log_probs.gather(2, batch.labels[..., None])[..., 0]
    return -batch.mean((1 - own) * right + own * log_probs.mean(-1))


def private_cross_entropy(network: Network, batch: ClipBatch) -> Tensor:
    """Compute the private head's mean cross-entropy on detached features, (K,).

    The encoder is in training mode, so BatchNorm's running statistics are updated, as in the public
    code.
    """
    features = network.features(batch.mfcc, batch.valid).detach()
    log_probs = network.private(features).log_softmax(-1)
    return batch.mean(-log_probs.gather(2, batch.labels[..., None])[..., 0])
