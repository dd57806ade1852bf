"""Which job next, on which nodes, in which rank order, and why not."""

from myriad.scheduler.placement import Placement, PlacementRequest, place, replace
from myriad.scheduler.queue import schedule
from myriad.scheduler.refusal import Refusal

__all__ = ["Placement", "PlacementRequest", "Refusal", "place", "replace", "schedule"]
