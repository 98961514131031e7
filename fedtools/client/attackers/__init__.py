"""Clients that attack the model: who they are, what they train on, and what they send instead.

`options` has the section `attackers` of an experiment, and draws its attackers; `updates`, `minmax`
and `adaptive` craft what they send, each after its paper. What they train on, if it is not their
own data, is of the task: see `fedtools.tasks.kws.poisoned`. The rule that `adaptive` simulates is
`fedtools.server.simulated_rule`. The page is README.md beside this file.
"""
