"""Speakers as vectors: a universal background model, i-vectors, and PLDA to compare vectors."""
