"""Training at one site: a client on its private data, or the server on its own data."""
