"""The server's side of a round: sampling, aggregation, the ledger."""
