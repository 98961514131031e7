"""Language models and what they count: tokens, n-grams, a neural model, scores of N-best lists.

Word counts with privacy are made here, and protected by `privacy`; the network itself is in
`models.nnlm`, and FMP's algorithm in `methods.fmp`.
"""
