"""Deadlines and budgets of the controller, each with its reason.

Every wait has one of these; when it expires the sentence names the nodes that were missing.
"""

from __future__ import annotations

# Killing processes takes milliseconds and checking a held snapshot about 1 s per GB; a node that cannot
# confirm in this time is taken out.
FENCE_DEADLINE_S = 20.0
# A SIGTERM's grace for cancelled and timed-out jobs, before SIGKILL.
STOP_GRACE_S = 5.0
# Template import (seconds when warm in the page cache, a minute on a loaded file system) plus a store.
STORE_DEADLINE_S = 180.0
# From forking the workers to the first finished step: model build, restore and warm-up included.
START_DEADLINE_S = 600.0
# What each stage of a job may take, by the stage's name; "" is a stop.
STAGE_DEADLINES_S = {
    "fence": FENCE_DEADLINE_S,
    "store": STORE_DEADLINE_S,
    "workers": START_DEADLINE_S,
    "": STOP_GRACE_S + FENCE_DEADLINE_S,
}
# A job without step reports that has run this long has made progress.
PROGRESS_RUN_S = 60.0
# Each failure like the one before doubles that, up to 17 hours: a crash every other minute ends some day.
PROGRESS_DOUBLINGS_MAX = 10
# Missed heartbeats: suspicion while the connection is open, a verdict when it is closed too.
SUSPECT_BEATS = 3
# Missed heartbeats that are a verdict by themselves: an agent this late cannot have been scheduled out.
DEAD_BEATS = 8
