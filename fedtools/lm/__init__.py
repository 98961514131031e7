"""Language models and what they count: tokens, n-grams, a neural model, scores of N-best lists.

Word counts are made here, and protected by `privacy`; FMP's algorithm is in `methods.fmp`.
Acoustic models are in `models`, the search that uses both in `decode`.
"""
