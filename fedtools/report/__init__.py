"""Reports of measurements for readers: tables, RESULTS.md and its plots, the leakage card.

Nothing is measured here: rates and intervals come from `score`, leaks from `attack`.
"""
