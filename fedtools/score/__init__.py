"""Error rates as sclite counts them, their intervals, and the test between two systems."""
