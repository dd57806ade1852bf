"""The interconnect as a value, and the cost of a collective on it."""

from myriad.fabric.fabric import Fabric, Level, Link

__all__ = ["Fabric", "Level", "Link"]
