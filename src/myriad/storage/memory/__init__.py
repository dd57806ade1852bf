"""Packets with file descriptors, sealed memory snapshots, and the agent's holder of both."""
