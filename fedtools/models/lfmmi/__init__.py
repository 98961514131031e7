"""Lattice-free MMI without alignments: graphs, forward-backward sums over them, and the loss."""
