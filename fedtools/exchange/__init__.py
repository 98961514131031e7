"""What an experiment's folder holds: states, messages, the ledger, and what clients keep.

These are formats with their checks. What a round does with them is in `federation`, `client` and
`server`.
"""
