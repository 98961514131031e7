"""A federation from its first file to its last: what the commands call."""
