"""The server side of a round: sampling, aggregation and the ledger."""
