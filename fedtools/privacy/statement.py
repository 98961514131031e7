"""The statement of a published model: what is protected, from whom, and by how much."""

from __future__ import annotations

from collections.abc import Mapping

from fedtools.privacy.banded import norm_of
from fedtools.privacy.options import CLIENTS
from fedtools.privacy.user_plan import UserPlan

_TEXT = """# A model with user-level differential privacy

What this folder, and anything computed from it, can tell about one {unit} of the federation is
bounded: with D and D' two federations that differ only in that one {unit}'s data are empty in D',
and for every set S of folders,

    P(folder of D in S) <= exp(epsilon) P(folder of D' in S) + delta, and the same with D and D'
    exchanged. {meaning}

| | |
|---|---|
| epsilon | {spent} |
| delta | {delta:g} |
| epsilon for who knows which clients took part in each round | {spent_inside} |
| epsilon of a person who is two of the clients | {spent_by_two} |
| releases | {releases} sums of clients' changes, those drawn again included, of {rounds} rounds |
| clients | {clients:,}, {list} |
| who takes part in a round | {who} |
| bound on a client's change, C | norm {clip:g}, over all tensors together |
| noise on a sum of changes | {noise} |
| accountant | {accountant} |

It rests on this:

- The list of clients, C, the number of rounds, and all options were chosen without the clients'
  data, or on data of other people. Trials of options on the same clients' data, and other models of
  them, are further releases: `fedtools privacy EXP EXP ...` adds them up.
- {trusted}
- The start of the model, its frozen layers, labels and tokens come from other data than the
  clients'. What a pretrained model's own training data were is outside of epsilon.
- The noise is pseudorandom, by SHAKE-256 under a key that BLAKE2b derives from a secret random one:
  telling it from random bits is as hard as breaking one of these.

`config.yaml` has the options, `model.safetensors` the model, `round_0001.safetensors` and so on
the states that the server sent to the clients, and last the one that it computed from the last sum.
"""


# Above it, whether a client had data may be told from the model with near certainty.
_LARGE = 10.0
_WEAK = "An epsilon as large as this one bounds little."
_SERVER = """\
The server, which saw each client's clipped change, is trusted, and so is who holds the noise key;
  nothing else of the experiment's folder was given away."""
_CLIENTS = """\
The server saw no client's change, but their sum, with the noise of each. It need not be trusted, as
  long as no more clients worked with it, or were lost, than the options say; and, unless
  `sums_conf.graph` is "complete", as long as it did not choose who was lost."""
_FROM_DATA = "those who had data: no list was given, and who had any is taken as public"


def statement(plan: UserPlan, total: Mapping[str, str], draws: int) -> str:
    """Return the statement as Markdown.

    Args:
        plan: the plan of the experiment.
        total: the last row of its ledger, see `fedtools.privacy.user_ledger`.
        draws: the number of releases, those drawn again included.
    """
    who = "all clients in every round"
    noise, trusted = f"Gaussian, standard deviation {plan.noise:.6g} C in each value", _SERVER
    if plan.trust == CLIENTS:
        noise = f"of each client, discrete Gaussian of {plan.own_deviation:.6g} steps of C / 2^20; "
        noise += f"of the fewest honest ones together {plan.noise:.6g} C"
        trusted = _CLIENTS
    if plan.share < 1:
        who = f"a secret Poisson sample, each client with probability {plan.share:g}"
    if plan.cohorts:
        bands, norm = len(plan.coefficients), norm_of(plan.coefficients)
        who = f"one of {plan.cohorts} cohorts in turn, each client's by a hash of its name"
        noise = (
            f"Gaussian, correlated over {bands} rounds, of {plan.noise * norm:.6g} C before it is"
        )
    return _TEXT.format(
        unit=total["unit"],
        spent=total["spent"],
        spent_inside=total["spent_inside"],
        spent_by_two=total["spent_by_two"],
        delta=plan.delta,
        releases=draws,
        list="in a public list" if plan.listed else _FROM_DATA,
        meaning=_WEAK if float(total["spent"]) > _LARGE else "",
        rounds=plan.rounds,
        clients=plan.clients,
        who=who,
        clip=plan.clip,
        noise=noise,
        trusted=trusted,
        accountant=plan.accountant,
    )
