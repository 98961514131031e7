"""Training at one site: a client on its private data, or the server on its own data.

It has the training loop, its objectives and its checkpoints, and knows no folder but its unit's
own. What a method does with it is in `methods`, batches and losses are a task's.
"""
