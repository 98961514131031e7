"""DP-FedAvg: a model that hardly depends on any one client's data.

H. B. McMahan, D. Ramage, K. Talwar, L. Zhang: Learning differentially private recurrent language
models, ICLR 2018, algorithm 1, with flat clipping and the estimator of a fixed denominator. S.
Reddi et al.: Adaptive federated optimization, ICLR 2021, for the server's optimiser.

    for each round t = 1 ... T
        C^t <- all n clients, or a secret sample in which each is with probability q
        for each client k of C^t
            theta_k <- ClientUpdate(k, theta)           any method that sends its shared tensors
            D_k <- (theta_k - theta) min(1, C / |theta_k - theta|)
        D <- (sum_k D_k + N(0, (z C)^2 I)) / (q n)
        theta <- theta + D, or the server optimiser's step along D

D_k is in whole steps of C / 2^20 (`fedtools.privacy.clipping`), so that the server checks its norm
and adds up exactly, and so is the noise (`fedtools.privacy.gaussian`). C, q n and z are public
numbers, fixed before the first round: a client that is refused, or has no data, is a D_k of 0 and
changes nothing else. What is protected, from whom, and why is in `fedtools/privacy/README.md`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import numpy as np

from fedtools.core.config import Natural, NonNegative, Section, Share, from_mapping
from fedtools.exchange.states import Spec
from fedtools.exchange.values import STATISTICS
from fedtools.methods import METHODS, make_method
from fedtools.methods.base import SHARED, Changes, Phase, TaskPart
from fedtools.methods.fedavg import FedAvg
from fedtools.methods.fedopt import FedOpt
from fedtools.privacy.clipping import Grid
from fedtools.privacy.options import CLIENTS, UserPrivacy
from fedtools.privacy.secagg.plan import Options as SecureSums

if TYPE_CHECKING:
    from fedtools.client.client import Client
    from fedtools.client.unit import Trained
    from fedtools.exchange.experiment import Experiment
    from fedtools.server.server import Server


PLAIN: Final = "plain"


@METHODS.register("dpfedavg")
@dataclass(frozen=True)
class DpFedAvg(FedOpt, UserPrivacy):
    """Clients of FedAvg or another method, clipped, with noise on their sum.

    It has the options of `fedtools.privacy.options.UserPrivacy`, those of FedOpt, and:

    Attributes:
        client_method: the method whose ClientUpdate the clients run: fedavg, fedprox, fedmmd,
            fednorm, fedextract, alo, or one of your own that is derived from these.
        client_conf: its own options, such as proximal; those that every method has, such as
            local_epochs and personal, are given beside `client_method`.
        noise_key: path of the noise key, see `fedtools.privacy.key`.
        momentum: beta 1 of the server's optimiser; by default 0, so that with "sgd" and learning
            rate 1 this is FedAvg.
        sums: "plain", the server sees the change of each client; "secure", it learns their sum
            alone, see `fedtools.privacy.secagg`. With `noise: 0` nothing is added, and what is
            protected is who sent what.
        sums_conf: what secure sums tolerate.
    """

    title: ClassVar[str] = "DP-FedAvg"
    rank: ClassVar[int] = 10
    sections: ClassVar[Mapping[str, type]] = {"sums_conf": SecureSums}
    no_rule: ClassVar[str] = "privacy adds noise to a sum, of which clip bounds each term"

    client_method: str = "fedavg"
    client_conf: Section = field(default_factory=dict)
    noise_key: str | None = None
    momentum: Share = 0.0
    sums: Literal["plain", "secure"] = PLAIN
    sums_conf: Section = field(default_factory=dict)
    # Nothing may stop, fail or scale by who takes part, or by what others send.
    min_clients: Natural = 0
    max_norm_ratio: NonNegative = 0.0
    max_weight_ratio: NonNegative = 0.0

    def __post_init__(self) -> None:
        # Checked here, where an error can name the file that options were read from.
        _ = self.user_privacy, self.client_half, self.secure_sums

    @cached_property
    def user_privacy(self) -> UserPrivacy:
        """Return the options of privacy; raise a ValueError if one is out of range."""
        return UserPrivacy(**{one.name: getattr(self, one.name) for one in fields(UserPrivacy)})

    @cached_property
    def secure_sums(self) -> SecureSums | None:
        """Return what secure sums tolerate; raise a ValueError if an option is out of range."""
        if self.sums == PLAIN:
            if self.sums_conf:
                raise ValueError("sums_conf: is used with sums: secure alone")
            if self.trust == CLIENTS:
                raise ValueError("trust: noise of clients is hidden by sums: secure alone")
            return None
        return from_mapping(SecureSums, self.sums_conf, "sums_conf")

    @cached_property
    def client_half(self) -> FedAvg:
        """Return the method whose ClientUpdate the clients run.

        Raises:
            ValueError: if its clients do not send all that they learnt by their shared tensors, or
                depend on one another.
        """
        common = {one.name for one in fields(FedAvg)}
        for name in common & self.client_conf.keys():
            raise ValueError(f"client_conf: give {name} beside client_method, not below it")
        given = {name: getattr(self, name) for name in common if _is_given(self, name)}
        for name in ("min_clients", "max_norm_ratio", "max_weight_ratio"):
            given.pop(name, None)
        kind = METHODS.get(self.client_method, "client_method")
        if not issubclass(kind, FedAvg) or issubclass(kind, FedOpt):
            problem = "has other messages than the shared tensors, or a server of its own"
            raise ValueError(f"client_method: {self.client_method} {problem}")
        made = make_method(self.client_method, {**given, **self.client_conf}, "client_method")
        assert isinstance(made, FedAvg)
        if getattr(made, "adaptive", False):
            problem = "allots a client's steps by what data others have"
            raise ValueError(f"client_method: {self.client_method} {problem}: use alo, or fedavg")
        return made

    def check(self, task: str, parts: Sequence[TaskPart], model: Mapping[str, Any]) -> None:
        super().check(task, parts, model)
        self.client_half.check(task, parts, model)
        if self.weighting != "uniform":
            raise ValueError("privacy excludes weights by utterances: set weighting: uniform")
        for name, why in (
            ("min_clients", "stops a round by who sent something"),
            ("max_norm_ratio", "refuses a client by what others send; clip bounds it"),
            ("max_weight_ratio", "weighs a client by what others have"),
        ):
            if getattr(self, name):
                raise ValueError(f"{name}: privacy excludes what {why}: leave it at 0")

    def phase(self, number: int) -> Phase:
        sends = Changes(Grid(self.user_privacy.clip))
        return Phase(self.client, self.server, sends, sample=self.sample)

    def sample(self, experiment: Experiment, number: int) -> list[str]:
        """Return C^t: all clients, or a sample that only who has the noise key can draw."""
        from fedtools.privacy.model_releases import ModelReleases

        return ModelReleases(experiment, self.noise_key).sample(number)

    def client(self, client: Client) -> list[Trained]:
        """Run ClientUpdate of `client_method`; who has no data sends nothing."""
        return [
            replace(one, reason=one.reason or ("" if one.utterances else "has no data"))
            for one in self.client_half.client(client)
        ]

    def server(self, server: Server) -> None:
        """Add the noisy mean change, and let the server's optimiser make its step of it."""
        server.add_mean_change()
        if self.optimizer != "sgd" or self.learning_rate != 1 or self.momentum:
            server.step(self.step, self.slots)

    def kinds(self, parameters: set[str], spec: Spec) -> dict[str, str]:
        """Map each tensor to its kind, as the clients' method does.

        Raises:
            ValueError: if clients would send nothing, or statistics of BatchNorm, which no norm
                bounds.
        """
        found = self.client_half.kinds(parameters, spec)
        if SHARED not in found.values():
            raise ValueError("personal: matches all parameters, so that clients send nothing")
        for name, kind in found.items():
            if kind == SHARED and name.endswith(STATISTICS):
                raise ValueError(
                    f"personal: privacy excludes sending statistics of BatchNorm, such as {name}: "
                    "keep them by personal, such as '*norm*', or use a network without"
                )
        return found

    def prepare(
        self, sizes: np.ndarray, entropies: np.ndarray, batch_size: int
    ) -> dict[str, np.ndarray]:
        return self.client_half.prepare(sizes, entropies, batch_size)

    def most_steps(self, utterances: int) -> int:
        return self.client_half.most_steps(utterances)

    def private_training(self, steps: int) -> int:
        return self.client_half.private_training(steps)


def _is_given(method: DpFedAvg, name: str) -> bool:
    """Return whether an option differs from its default."""
    default = DpFedAvg.__dataclass_fields__[name].default
    return default is MISSING or getattr(method, name) != default
