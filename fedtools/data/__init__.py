"""What a data directory holds, and packed clips and N-best lists: formats, checks, and languages.

It knows no federation. Features are computed in `audio`; scoring of texts is in `score`.
"""
