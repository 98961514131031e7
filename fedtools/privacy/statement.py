"""The statement of a published model: what is protected, from whom, and by how much."""

from __future__ import annotations

from collections.abc import Mapping

from fedtools.privacy.banded import norm_of
from fedtools.privacy.user_plan import UserPlan

_TEXT = """# A model with user-level differential privacy

Neither this folder nor anything computed from it tells much more about one {unit} of the federation
than it would if that {unit} had had no data: with D and D' two federations that differ only in
that one {unit}'s data are empty in D', and for every set S of folders,

    P(folder of D in S) <= exp(epsilon) P(folder of D' in S) + delta, and the same with D and D'
    exchanged.

| | |
|---|---|
| epsilon | {spent} |
| delta | {delta:g} |
| epsilon for who knows which clients took part in each round | {spent_inside} |
| epsilon of a person who is two of the clients | {spent_by_two} |
| releases | {releases} sums of clients' changes, of {rounds} planned |
| clients | {clients:,}, in a public list |
| who takes part in a round | {who} |
| bound on a client's change, C | norm {clip:g}, over all tensors together |
| noise on a sum of changes | Gaussian, {noise} |
| accountant | {accountant} |

It rests on this:

- The list of clients, C, the number of rounds, and all options were chosen without the clients'
  data, or on data of other people. Trials of options on the same clients' data, and other models of
  them, are further releases: `fedtools privacy EXP EXP ...` adds them up.
- The server, which saw each client's clipped change, is trusted, and so is who holds the noise key;
  nothing else of the experiment's folder was given away.
- The start of the model, its frozen layers, labels and tokens come from other data than the
  clients'. What a pretrained model's own training data were is outside of epsilon.
- The noise is pseudorandom; telling it from random bits is as hard as breaking SHAKE-256.

`config.yaml` has the options, `model.safetensors` the model, `round_0001.safetensors` and so on
the states that the server sent to the clients, and last the one that it computed from the last sum.
"""


def statement(plan: UserPlan, total: Mapping[str, str], rounds: int) -> str:
    """Return the statement as Markdown.

    Args:
        plan: the plan of the experiment.
        total: the last row of its ledger, see `fedtools.privacy.user_ledger`.
        rounds: the number of complete rounds.
    """
    who = "all clients in every round"
    noise = f"standard deviation {plan.noise:.6g} C in each value"
    if plan.share < 1:
        who = f"a secret Poisson sample, each client with probability {plan.share:g}"
    if plan.cohorts:
        bands, norm = len(plan.coefficients), norm_of(plan.coefficients)
        who = f"one of {plan.cohorts} cohorts in turn, each client's by a hash of its name"
        noise = f"correlated over {bands} rounds, of {plan.noise * norm:.6g} C before it is"
    return _TEXT.format(
        unit=total["unit"],
        spent=total["spent"],
        spent_inside=total["spent_inside"],
        spent_by_two=total["spent_by_two"],
        delta=plan.delta,
        releases=rounds,
        rounds=plan.rounds,
        clients=plan.clients,
        who=who,
        clip=plan.clip,
        noise=noise,
        accountant=plan.accountant,
    )
