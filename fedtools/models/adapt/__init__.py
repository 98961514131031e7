"""Adaptation of large models: which part is trained, and what clients share."""
