"""Layer 3: who is linked to whom, at what latency and bandwidth; what `price` needs for seconds.

The numbers that networks have by default are round and illustrative: measure your own.
"""

from roundelay.networks._base import Graph, Maker
from roundelay.networks._clusters import (
    Cluster,
    cluster_called,
    cluster_names,
    load_cluster,
    save_cluster,
)
from roundelay.networks._file import load_network
from roundelay.registry import Family

__all__ = [
    "Cluster",
    "Graph",
    "Maker",
    "cluster_called",
    "cluster_names",
    "load_cluster",
    "load_network",
    "networks",
    "save_cluster",
]

networks: Family[Maker] = Family(__name__)
