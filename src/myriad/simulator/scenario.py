"""A scenario: a small cluster, its jobs, and all that goes wrong, as a value that prints and replays.

``seed`` only draws what a scenario does not list (delays, and which of several equals is hit), each kind from a
stream of its own, so that leaving out one fault does not change what the others do.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Kind(StrEnum):
    """What can go wrong, and what people do at bad moments. ``index`` chooses among those it can hit."""

    # the controller
    CRASH_CONTROLLER = "crash-controller"  # at once; back after `seconds`
    CRASH_IN_WRITE = "crash-in-write"  # in its next commit: the journal's tail is torn
    CRASH_AFTER_WRITE = "crash-after-write"  # its next commit is safe, no command has left
    CRASH_IN_COMMANDS = "crash-in-commands"  # some commands of its next commit have left
    PAUSE_CONTROLLER = "pause-controller"
    JOURNAL_ERROR = "journal-error"  # its disk refuses the next commit
    CLOCK_JUMP = "clock-jump"  # its host's wall clock, by `seconds`, forth or back
    # nodes and what runs there
    KILL_NODE = "kill-node"  # agent and workers at once; `seconds` without power
    KILL_AGENT = "kill-agent"
    PAUSE_AGENT = "pause-agent"
    PAUSE_NODE = "pause-node"
    KILL_WORKER = "kill-worker"
    FAIL_WORKER = "fail-worker"  # it raises an exception
    PAUSE_WORKER = "pause-worker"
    KILL_STORE = "kill-store"
    KILL_TEMPLATE = "kill-template"  # and all that was forked from it
    # links
    CUT = "cut"  # one connection breaks
    PARTITION = "partition"  # nothing passes for `seconds`
    LOSE = "lose"  # what is under way now is lost, and the connection with it, after `seconds`
    SLOW_LINK = "slow-link"  # every message takes up to a second more
    # shared storage
    STORAGE_ERROR = "storage-error"  # every write fails
    STORAGE_SLOW = "storage-slow"
    # people
    DRAIN = "drain"
    UNDRAIN = "undrain"
    CANCEL = "cancel"
    DOWN = "down"  # jobs keep running; up again after `seconds`
    DOWN_CANCEL = "down-cancel"
    RESUBMIT = "resubmit"  # a client that did not hear the answer asks again
    INJECT = "inject"  # a fault asked for through the controller


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that happens at ``at`` seconds."""

    at: float
    kind: Kind
    index: int = 0
    seconds: float = 0.0

    def line(self) -> str:
        for_s = f" for {self.seconds:g} s" if self.seconds else ""
        return f"at {self.at:g} s: {self.kind} #{self.index}{for_s}"


class JobPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """A job and how its program behaves. ``fails_at``: the program's own bug, a step it never survives;
    ``fails_with``: its exit code there, or the signal that kills it. ``snapshot_every``, ``save_every`` and
    ``peer_every`` None: the controller chooses."""

    at: float
    nodes: int
    spares: int = 0
    torch: bool = True
    steps: int = 10
    step_s: float = 0.5
    snapshot_every: int | None = 1
    save_every: int | None = 5
    peer_every: int | None = 0
    snapshot_s: float = 0.0
    save_s: float = 0.05
    time_limit_s: float | None = None
    fails_at: int | None = None
    fails_with: int = 3

    def line(self) -> str:
        what = "model" if self.torch else "command"
        text = f"at {self.at:g} s: a {what} job on {self.nodes}+{self.spares} nodes, {self.steps} x {self.step_s:g} s"
        if self.time_limit_s is not None:
            text += f", limit {self.time_limit_s:g} s"
        return text + (
            "" if self.fails_at is None else f", ends with {self.fails_with} at step {self.fails_at}"
        )


class Network(msgspec.Struct, frozen=True, omit_defaults=True):
    """How messages travel. Chances are per message; a connection keeps its order unless they say otherwise."""

    delay_s: float = 0.001
    jitter_s: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0


class Scenario(msgspec.Struct, frozen=True, omit_defaults=True):
    """See the module. ``proof``: the engine notices the death of an agent (emulated nodes), or only silence."""

    seed: int
    nodes: int
    accelerators: int = 2
    leaves: int = 1
    proof: bool = True
    skew: float = 0.0  # how far the nodes' clocks drift from the controller's, as a share
    network: Network = Network()
    jobs: tuple[JobPlan, ...] = ()
    faults: tuple[Fault, ...] = ()
    quiet_at: float = 60.0  # faults have stopped, everything is mended

    def lines(self) -> list[str]:
        """The scenario as a person reads it."""
        dies = "the engine sees agents die" if self.proof else "only silence tells that an agent died"
        first = f"{self.nodes} nodes x {self.accelerators} accelerators in {self.leaves} leaves; {dies}"
        travel = msgspec.structs.asdict(self.network)
        odd = ", ".join(f"{name} {value:g}" for name, value in travel.items() if value)
        happenings = [(job.at, job.line()) for job in self.jobs]
        happenings += [(fault.at, fault.line()) for fault in self.faults]
        return [first, f"messages: {odd or 'at once'}", *(line for _, line in sorted(happenings))]


class Found(msgspec.Struct, frozen=True):
    """A scenario as it is kept: what it once broke, at which commit of the code."""

    broken: str
    commit: str
    scenario: Scenario


def write_found(found: Found) -> bytes:
    return msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"


def read_found(text: bytes) -> Found:
    """Raises msgspec.MsgspecError for anything else."""
    return msgspec.json.decode(text, type=Found)
