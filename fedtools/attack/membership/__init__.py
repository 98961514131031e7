"""Was an utterance in a client's training data? Trials, evidence, shadow models, and scores."""
