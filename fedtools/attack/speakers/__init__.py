"""Attacks that compare models: whose is it, and of what sex, age or accent is its speaker?

A1 and A2, cosines of updates, read-out of i-vectors, and what they share: footprints, cohorts,
trials.
"""
