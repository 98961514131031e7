"""Federated experiments from initialisation to evaluation, as the commands run them.

Here experiment, method and task are joined. What only one task needs is in `asr`, `kws` or `fmp`;
formats of files are in `exchange`, the server's arithmetic is in `server`.
"""
