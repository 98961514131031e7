"""Recovery of inputs and labels from what a client's training changed.

Inputs are recovered from features, without gradients, in `features.reconstruction`.
"""
