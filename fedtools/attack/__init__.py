"""Attacks on what the clients of a federation send."""
