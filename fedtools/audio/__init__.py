"""Reading audio of any format, and computing and augmenting features, as Kaldi and in batches.

Archives of features and what a data directory says of audio are in `data`; embeddings of speakers
are in `speaker`.
"""
