"""Decoding, and each client's model on each client's data."""
