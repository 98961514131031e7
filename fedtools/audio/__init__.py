"""Reading audio, and computing features from it."""
