"""Networks built from configurations, without any knowledge of the federation.

Here is what kinds of networks share: stacks of clients' layers, criteria, optimizers, files of
torch. Training is in `client`; batches and losses of a task are in `tasks`.
"""
