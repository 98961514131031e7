"""Differential privacy of what a federation releases: word counts, and models; without torch.

Of both:

    key         the secret key: created once, outside the experiment, readable by its owner only
    record      the nonce of an experiment, and the record of its releases
    options     user options: mechanism, epsilon, unit, bounds, who is trusted

Of models, see README.md:

    clipping    clients' changes, clipped to a norm, in whole steps
    gaussian    rounded Gaussian noise from a stream of the key
    discrete_gaussian  discrete Gaussian noise from a stream, whose sums are nearly the same
    accountant  epsilon of Gaussian noise, over rounds and experiments
    distributed  epsilon of noise that clients add themselves, before a secure sum
    user_plan   noise and accounting of an experiment, fixed before the first round
    model_releases  the noisy mean change of each round, and secret samples
    user_ledger, statement  what was spent, and what is promised

Of sums that hide each client from the server, see its own page:

    secagg/     secure aggregation in memory

Of word counts, which `fmp` federations send:

    bounds      bounds on what one word, utterance or user adds to a vector of counts
    plan        sensitivity and scale of the noise, fixed before the first round; the release
    noise       exact discrete Laplace noise from a stream of a secret key
    marginals   noisy counts -> a distribution; the paper's equations 8 and 9
    ledger      epsilon per release, in total, and over experiments, for words, utterances and users

Order of use for counts: create a `Plan` once. In every round each client calls `Plan.bound` on its
new utterances, the party that adds noise (`Privacy.trust`) calls `Plan.release`, and the receiver
computes a distribution from the noisy counts. Post-processing of noisy counts costs no privacy, so
a client's total c_i is computed as the sum of its noisy counts and never sent separately.

The guarantee for counts requires that a federation

- lets only noisy counts leave the trusted parties: number of utterances, loss and seconds in a
  message also depend on the data;
- passes an utterance to `Plan.bound` once, in the first round that its client takes part in after
  the utterance;
- chooses participants and the number of releases independently of the data;
- with unit "user", keeps what a client has spent, counting complete rounds only, so that a repeated
  round gives the same counts.
"""
