"""The shared storage: who has written which part of which checkpoint, and which ones bear the marker."""

from __future__ import annotations


class SharedStorage:
    """Checkpoints by (job, step, generation). Outside ``fails_until`` and ``slow_until`` it works at once."""

    def __init__(self) -> None:
        self.fails_until = 0.0
        self.slow_until = 0.0
        self._ranks: dict[tuple[str, int, int], set[int]] = {}
        self.markers: set[tuple[str, int, int]] = set()

    def write(self, job: str, step: int, generation: int, rank: int) -> None:
        self._ranks.setdefault((job, step, generation), set()).add(rank)

    def ranks(self, job: str, step: int, generation: int) -> set[int]:
        """Those that have written their part."""
        return self._ranks.get((job, step, generation), set())

    def mark(self, job: str, step: int, generation: int) -> None:
        self.markers.add((job, step, generation))
