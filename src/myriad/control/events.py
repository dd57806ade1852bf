"""What can happen to the controller. Small frozen structs: each is journaled and can be replayed."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from myriad.spec.messages import MemberStatus


class Event(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """Base of all events."""


class ClusterConfigured(Event, frozen=True):
    """First event of a state: the cluster's specification (ClusterSpec.model_dump(mode="json"))."""

    spec: dict[str, Any]
    jobs_dir: str


class ControllerStarted(Event, frozen=True):
    """A controller process has loaded this state; agents may or may not still be there."""


class AgentConnected(Event, frozen=True):
    """An agent has joined or reconnected: all it runs rides along, after every report it still had."""

    node: str
    incarnation: str
    host: str = "127.0.0.1"
    peer_port: int = 0
    members: tuple[MemberStatus, ...] = ()


class AgentDisconnected(Event, frozen=True):
    """The connection closed: a suspicion, not a proof."""

    node: str
    incarnation: str


class AgentExited(Event, frozen=True):
    """The engine has proof that the agent's process is gone."""

    node: str
    incarnation: str
    silent_s: float = 0.0  # since its last message arrived


class NodeSilent(Event, frozen=True):
    """No message for ``beats`` heartbeat intervals."""

    node: str
    incarnation: str
    beats: int
    silent_s: float


class MemberReported(Event, frozen=True):
    """The status of one member changed."""

    node: str
    incarnation: str
    member: MemberStatus


class JobSubmitted(Event, frozen=True):
    """``request`` makes a repeated submit a no-op. ``spec`` is JobSpec.model_dump(mode="json")."""

    request: str
    spec: dict[str, Any]


class CancelRequested(Event, frozen=True):
    job: str


class DrainRequested(Event, frozen=True):
    node: str
    reason: str = ""


class UndrainRequested(Event, frozen=True):
    node: str


class InjectRequested(Event, frozen=True):
    """A fault asked for by a person or a test; emulated engines only."""

    kind: Literal["kill-node", "kill-worker", "kill-agent", "stop"]
    target: str


class DownRequested(Event, frozen=True):
    """The controller will leave; jobs keep running unless they are cancelled."""

    cancel_jobs: bool = False


class TimerFired(Event, frozen=True):
    """At least one deadline of :meth:`Controller.next_deadline` has passed."""


AnyEvent = (
    ClusterConfigured
    | ControllerStarted
    | AgentConnected
    | AgentDisconnected
    | AgentExited
    | NodeSilent
    | MemberReported
    | JobSubmitted
    | CancelRequested
    | DrainRequested
    | UndrainRequested
    | InjectRequested
    | DownRequested
    | TimerFired
)
