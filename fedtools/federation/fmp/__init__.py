"""Simulation of FMP on stored scores: rows, sweeps, and what all of them spend."""
