"""Was an utterance in a client's training? By what the client's model does to it, or its update.

Two scores of an utterance and the model that a client sent:

loss      how much lower its loss is than under the global model (Yeom et al., CSF 2018, with the
          global model for the loss that is usual)
gradient  the cosine of the update with the direction that would lower the global model's loss on
          this utterance (Nasr et al., S&P 2019, by its simplest statistic)

Members are of the client's training data. The others are utterances of the same speaker that other
clients have, and where there are none of anybody else; which of the two, the table says: an attack
that only knows voices does well on the latter. The attacker knows the transcripts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from fedtools.attack.options import Updates
from fedtools.attack.victims import sound_victims
from fedtools.federation.federation import Federation
from fedtools.files.errors import UserError
from fedtools.files.sections import Bootstrap
from fedtools.files.seeds import generator
from fedtools.files.tables import write_tsv
from fedtools.models.training import load_model
from fedtools.score.bootstrap import interval, speaker_draws
from fedtools.score.verification import MIN_TARGETS, estimate_error_rate, true_positive_rate
from fedtools.tasks.base import Items, as_configured
from fedtools.tasks.parts import ITEMS, MODELS, SPEAKERS

COLUMNS = (
    "round", "score", "others_of", "AUC%", "low", "high", "EER%", "EER_low", "EER_high", "TPR@0.1%",
    "TPR@1%", "clients", "members", "others",
)  # fmt: skip
SAME, ANYBODY = "same speaker", "anybody"


@dataclass(frozen=True)
class Scored:
    """Trials of one round: (trials,) each."""

    clients: np.ndarray
    members: np.ndarray
    kinds: np.ndarray
    scores: Mapping[str, np.ndarray]


@as_configured
def attack(
    federation: Federation,
    number: int,
    out: Path,
    *,
    each: int = Updates.each,
    resamples: int = Bootstrap.resamples,
    seed: int = 0,
) -> list[dict[str, object]]:
    """Attack what clients sent in a round; write OUT/membership.tsv.

    Args:
        number: the round.
        each: members, and others, of a client at most; drawn at random.
        resamples: draws of clients for intervals; with fewer than ten clients there are none, and
            of the equal error rate the exact binomial one alone.
        seed: of everything random.

    Returns:
        the rows.
    """
    found = score(federation, number, each, seed)
    rows = []
    for kind in (SAME, ANYBODY):
        chosen = found.members | (found.kinds == kind)
        # Members of clients that have others of this kind.
        having = set(found.clients[found.kinds == kind])
        chosen &= np.isin(found.clients, list(having))
        if not having:
            continue
        for name, scores in found.scores.items():
            part = scores[chosen], found.members[chosen], found.clients[chosen]
            row = _judge(*part, resamples, seed)
            rows.append({"round": number, "score": name, "others_of": kind, **row})
    write_tsv(out / "membership.tsv", COLUMNS, rows)
    if any(row["EER%"] == "-" for row in rows):
        print(
            f"membership: fewer than {MIN_TARGETS} members, so that only intervals of the error "
            "rate are told",
            file=sys.stderr,
        )
    return rows


def score(federation: Federation, number: int, each: int, seed: int) -> Scored:
    """Score members and others of every client whose model can be looked at."""
    victims = sound_victims(federation, [number])
    items = federation.task.need(ITEMS)()
    speakers = federation.task.need(SPEAKERS)()
    federation.load_result(None, number - 1)
    models = federation.task.need(MODELS)
    model = models.build().eval()
    start = {name: value.clone() for name, value in models.tensors(model).items()}
    rows: list[tuple[str, bool, str, float, float]] = []
    states = victims.states(sorted(victims.messages))
    bar = tqdm(states, total=len(victims.messages), desc="membership", unit="model", disable=None)
    for client, state in bar:
        trials = list(draw(client, items.owners, speakers, each, seed))
        load_model(models.tensors(model), start)
        begun = _flat(model)
        before = [_loss_and_gradient(items, model, name) for name, *_ in trials]
        load_model(models.tensors(model), state)
        update = _flat(model) - begun
        for (name, member, kind), (loss, gradient) in zip(trials, before, strict=True):
            with torch.no_grad():
                gain = loss - items.loss(model, name).item()
            along = F.cosine_similarity(-gradient, update, dim=0).item()
            rows.append((client, member, kind, gain, along))
    load_model(models.tensors(model), start)
    if not rows:
        raise UserError("no client with members and others", path=federation.experiment.path)
    clients, members, kinds, gains, cosines = (np.array(one) for one in zip(*rows, strict=True))
    return Scored(clients, members, kinds, {"loss": gains, "gradient": cosines})


def draw(
    client: str,
    owners: Mapping[str, str],
    speakers: Mapping[str, str],
    each: int,
    seed: int,
) -> Iterator[tuple[str, bool, str]]:
    """A client's trials: an item, whether the client has it, and of whom it is otherwise."""
    random = generator(seed, "membership", client)
    mine = [item for item, owner in owners.items() if owner == client]
    speaker = speakers.get(client)
    same = {other for other, who in speakers.items() if who == speaker and other != client}
    rest = [item for item, owner in owners.items() if owner in same]
    kind = SAME if rest else ANYBODY
    rest = rest or [item for item, owner in owners.items() if owner != client]
    count = min(each, len(mine), len(rest))
    for items, member in ((mine, True), (rest, False)):
        for index in np.sort(random.choice(len(items), count, replace=False)):
            yield items[index], member, "" if member else kind


def _loss_and_gradient(items: Items, model: nn.Module, name: str) -> tuple[float, Tensor]:
    model.zero_grad(set_to_none=True)
    loss = items.loss(model, name)
    loss.backward()
    parts = [
        torch.zeros_like(value) if value.grad is None else value.grad
        for value in model.parameters()
    ]
    gradient = torch.cat([part.flatten() for part in parts])
    model.zero_grad(set_to_none=True)
    return loss.item(), gradient


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def _judge(
    scores: np.ndarray, members: np.ndarray, clients: np.ndarray, resamples: int, seed: int
) -> dict[str, object]:
    names, owner = np.unique(clients, return_inverse=True)
    draws = speaker_draws(len(names), resamples, seed, "membership")
    low, high = float("nan"), float("nan")
    if not np.isnan(draws).any():
        low, high = interval(np.array([area(scores, members, weights[owner]) for weights in draws]))
    rate = estimate_error_rate(scores, members, clients, resamples=resamples, seed=seed)
    figures = {
        "AUC%": area(scores, members),
        "low": low,
        "high": high,
        # Of few members the interval alone is told.
        "EER%": float("nan") if rate.targets < MIN_TARGETS else rate.value,
        "EER_low": rate.low,
        "EER_high": rate.high,
        "TPR@0.1%": true_positive_rate(scores, members, 0.001),
        "TPR@1%": true_positive_rate(scores, members, 0.01),
    }
    cells = {name: "-" if np.isnan(value) else f"{value:.2f}" for name, value in figures.items()}
    counts = {"clients": len(names), "members": rate.targets, "others": rate.others}
    return {**cells, **counts}


def area(scores: np.ndarray, members: np.ndarray, weights: np.ndarray | None = None) -> float:
    """How often a member scores above another item, ties counting half, in %."""
    weights = np.ones(len(scores)) if weights is None else weights
    values, place = np.unique(scores, return_inverse=True)
    own, other = (
        np.bincount(place[kind], weights[kind], len(values)) for kind in (members, ~members)
    )
    below = np.cumsum(other) - other / 2
    with np.errstate(invalid="ignore"):
        return float(100 * (own @ below) / (own.sum() * other.sum()))
