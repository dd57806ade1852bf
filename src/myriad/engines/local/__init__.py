"""Emulated nodes: one agent process per node on this machine."""
