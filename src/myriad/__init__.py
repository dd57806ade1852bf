"""Myriad: a training cluster of thousands of accelerators, driven as one machine."""

__version__ = "0.1.0"
