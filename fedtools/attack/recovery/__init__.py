"""Recovery of inputs and labels from what a client's training changed.

`features.inversion` recovers inputs from features, which needs no gradients.
"""
