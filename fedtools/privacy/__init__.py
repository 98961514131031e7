"""Differential privacy of word counts, as `fmp` federations send them; no torch here.

    options     what a user chooses: mechanism, epsilon, unit, cap, what is released, who is trusted
    bounds      what one utterance, word or user can add to a vector of counts, at most
    plan        sensitivity and scale of the noise, fixed before the first round; the release itself
    noise       exact discrete Laplace noise from a stream of a secret key
    key         the secret key: made once, outside the experiment, for its owner alone
    record      the nonce of an experiment; each release is made once, and counted
    marginals   noisy counts -> a distribution; the paper's own equations 8 and 9
    ledger      epsilon by release and in total, for words, utterances and users, and of experiments

The order of use: `Plan` once; in every round each client calls `Plan.bound` on its new utterances,
and whoever is to add noise (`Privacy.trust`) calls `Plan.release`; the receiver makes a
distribution of the noisy counts. Whatever is computed from noisy counts alone costs nothing more:
totals too, so a client's total c_i is the sum of its noisy counts and is never sent by itself.

What a federation owes: nothing but noisy counts leaves those who are trusted (a message's number of
utterances, loss or seconds are of the data, too); an utterance is given to `Plan.bound` once, in
the first round that its client takes part in after it; who takes part, and how many releases there
are, does not depend on the data; and with unit "user" a client keeps what it has spent, of complete
rounds only, so that a round that is repeated gives the same counts.
"""
