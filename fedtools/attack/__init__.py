"""Attacks on what clients of a federation send."""
