"""Was an utterance in a client's training data?

Candidates, evidence, shadow models and scores. Whose a model is, is asked in `speakers`.
"""
