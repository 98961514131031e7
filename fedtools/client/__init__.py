"""Training at one place: a client with its private data, or the server with its own."""
