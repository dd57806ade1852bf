"""From the exits of a generation to what failed first, and whether trying again makes sense.

The first failure is chosen after the fence, when every node has answered or is known to be gone: a lost
node explains everything after it; a signal explains the exceptions of the peers it left hanging; among
exceptions one that is not itself a broken connection wins, and then the earliest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from myriad.control.records import FailureSignature
from myriad.spec.messages import WorkerExit

# The same error at the same step this often, the last time on other hardware, is the user's bug.
REPEATS_BEFORE_MOVING = 2
# Restarts of one job without a new best step, whatever the causes; a job that only burns nodes stops.
FRUITLESS_RESTARTS_MAX = 10

# Exceptions that mean "a peer is gone"; their owner is a victim, not a culprit.
PEER_LOSS_CLASSES = frozenset({"PeerLost", "DistNetworkError", "DistBackendError"})


class Kind(StrEnum):
    NODE = "node"
    SIGNAL = "signal"
    ERROR = "error"
    START = "start"


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of a generation. ``step`` is the last finished step of its rank, if known."""

    kind: Kind
    node: str
    rank: int | None
    code: int | None
    error_class: str
    message: str
    step: int | None

    @property
    def sentence(self) -> str:
        match self.kind:
            case Kind.NODE:
                return (
                    f"node {self.node} was lost ({self.message})"
                    if self.message
                    else f"node {self.node} was lost"
                )
            case Kind.SIGNAL:
                return f"rank {self.rank} on {self.node} was killed by {signal_name(-(self.code or 0))}"
            case Kind.START:
                return self.message
            case Kind.ERROR:
                what = f": {self.error_class}: {self.message}" if self.error_class else ""
                return f"rank {self.rank} on {self.node} exited with code {self.code}{what}"


def first_failure(lost: Sequence[tuple[str, str]], exits: Iterable[tuple[str, WorkerExit]]) -> Failure | None:
    """``lost`` are (node, reason) in order of loss, ``exits`` (node, exit) in order of arrival."""
    if lost:
        node, reason = lost[0]
        return Failure(Kind.NODE, node, None, None, "node_lost", reason, None)
    bad = [(node, e) for node, e in exits if e.code != 0]
    if not bad:
        return None

    def severity(item: tuple[str, WorkerExit]) -> int:
        if item[1].code < 0:
            return 0
        return 2 if item[1].error_class in PEER_LOSS_CLASSES else 1

    node, worst = min(bad, key=severity)  # min keeps the earliest among equals
    if worst.code < 0:
        name = signal_name(-worst.code)
        return Failure(Kind.SIGNAL, node, worst.rank, worst.code, name, worst.message, worst.step)
    error_class = worst.error_class or f"exit {worst.code}"
    return Failure(Kind.ERROR, node, worst.rank, worst.code, error_class, worst.message, worst.step)


def extend_signature(
    previous: FailureSignature | None, failure: Failure, progress: bool = False
) -> FailureSignature:
    """Count how often the job has failed in the same way since it last made ``progress``, and on which nodes.

    A signal at an unknown step never equals another: only a known step makes it the same failure.
    """
    same = (
        not progress
        and previous is not None
        and previous.error_class == failure.error_class
        and previous.step == failure.step
        and (failure.step is not None or failure.kind is not Kind.SIGNAL)
        and failure.kind is not Kind.NODE
    )
    alike = failures_alike(previous, failure)
    if not same or previous is None:
        return FailureSignature(
            error_class=failure.error_class, step=failure.step, nodes=(failure.node,), alike=alike
        )
    nodes = previous.nodes if failure.node in previous.nodes else (*previous.nodes, failure.node)
    return FailureSignature(
        error_class=failure.error_class, step=failure.step, count=previous.count + 1, nodes=nodes, alike=alike
    )


def failures_alike(previous: FailureSignature | None, failure: Failure) -> int:
    """How many failures in a row before this one were of its class; a lost node is never the job's doing."""
    if previous is None or failure.kind is Kind.NODE or previous.error_class != failure.error_class:
        return 0
    return previous.alike + 1


def signal_name(number: int) -> str:
    return SIGNALS.get(number, f"signal {number}")


# Names of Linux signals that end processes (spelled out: the pure rooms import no OS module).
SIGNALS = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    11: "SIGSEGV",
    13: "SIGPIPE",
    15: "SIGTERM",
    24: "SIGXCPU",
    25: "SIGXFSZ",
    31: "SIGSYS",
}
