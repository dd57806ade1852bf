"""Nodes as values, and the counters over them."""

from myriad.cluster.state import ClusterState, Grouping, Node, NodeState, Tally

__all__ = ["ClusterState", "Grouping", "Node", "NodeState", "Tally"]
