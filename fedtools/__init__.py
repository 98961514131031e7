"""fedtools: federated learning in speech, from audio to a table."""

__version__ = "0.1.0"
