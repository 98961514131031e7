"""The four keyword networks of the paper's table 2, each for K clients at once."""

from fedtools.models.keywords.networks import NETWORKS, Network, build_network

__all__ = ["NETWORKS", "Network", "build_network"]
