"""From CTC posteriors to words: greedy search, beam search with an n-gram, N-best rescoring."""
