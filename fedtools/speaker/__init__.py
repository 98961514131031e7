"""Vectors of speakers: a universal background model, i-vectors, and PLDA to compare vectors."""
