"""The server side of a round: sampling, checks of values, and aggregation.

It reads messages through `exchange` and never opens what clients keep; the order of a round's steps
is in `federation`.
"""
