"""From CTC posteriors to words: greedy search, beam search with an n-gram, N-best rescoring.

Whisper's own decoder is in `tasks.asr.search`, the language models are in `lm`, and counting errors
is in `score`.
"""
