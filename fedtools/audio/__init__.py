"""Audio files to samples, samples to features."""
