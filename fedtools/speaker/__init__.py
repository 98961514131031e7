"""Vectors of speakers: a universal background model, i-vectors, and PLDA to compare vectors.

It needs no federation. Attacks that use these vectors are in `attack.speakers`.
"""
