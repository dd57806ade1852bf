"""What controller, agents and workers say to each other.

Every message is a frozen msgspec struct with a ``type`` tag, so one line of JSON (controller and
agent) or one packet (agent and worker) decodes to exactly one class. Both directions are
level-triggered: an agent sends the *whole* status of a member whenever it changes and again after
each reconnect, and every command is named by (kind, job, generation), so loss of a connection,
repetition and reordering across connections change nothing.

Clocks: ``*_s`` durations are measured on the sender's monotonic clock; no timestamp of one host is
ever compared with another's.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

PROTOCOL_VERSION = 5

# The phases a generation's worker passes, in order.
Phase = Literal["fork", "rendezvous", "restore", "first_step"]
PHASES: tuple[Phase, ...] = ("fork", "rendezvous", "restore", "first_step")

Tier = Literal["none", "memory", "peer", "durable"]


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """Base of all messages."""


# ---------------------------------------------------------------- facts inside messages


class FileSum(msgspec.Struct, frozen=True, array_like=True):
    """One file of a durable checkpoint: path below the checkpoint directory, bytes, checksum."""

    path: str
    size: int
    crc32: int


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """A verified memory snapshot an agent holds: the rank, the step it was taken after, its bytes."""

    rank: int
    step: int
    size: int


class Intervals(msgspec.Struct, frozen=True, array_like=True):
    """Steps from one save to the next, by tier; ``peer`` 0: no copies."""

    memory: int
    peer: int
    durable: int


class SaveCosts(msgspec.Struct, frozen=True, array_like=True):
    """What a rank has measured since its last durable checkpoint: seconds that its training stood still for each
    kind of save (0: there was none), and those of a step without saves; the intervals it goes by, of which the
    program itself has set those of the tiers in ``fixed``."""

    step_s: float
    memory_s: float
    peer_s: float
    durable_s: float
    intervals: Intervals
    fixed: tuple[str, ...] = ()


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """Where another node's agent gives and takes copies of snapshots."""

    node: str
    host: str
    port: int


class WorkerExit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a worker ended by itself (deaths caused by a fence are not reported as exits).

    ``code`` is the exit code, negative for a signal as in :mod:`subprocess`. ``at_s`` is seconds
    since this agent received the generation's StartWorkers.
    """

    rank: int
    pid: int
    code: int
    at_s: float
    step: int | None = None
    error_class: str = ""
    message: str = ""


class ShardSet(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank has written and synced its part of the durable checkpoint of a step."""

    rank: int
    step: int
    seconds: float
    files: tuple[FileSum, ...]
    costs: SaveCosts | None = None


class StepReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank's account of one optimizer step; the parts sum to at most ``wall_s``.

    ``wall_s`` runs from the end of the previous step (or of the start-up) to the end of this one,
    so the reports of a generation tile its running time without gaps.
    """

    job: str
    generation: int
    rank: int
    step: int  # 1 is the first step; equal to the number of finished optimizer steps
    wall_s: float
    compute_s: float = 0.0
    communication_s: float = 0.0  # blocked in collectives or point-to-point, whoever was late
    data_s: float = 0.0
    checkpoint_s: float = 0.0
    evaluation_s: float = 0.0
    loss: float | None = None  # only ranks that hold it
    grad_norm: float | None = None
    tokens: int = 0  # tokens of the whole global batch; only rank reporting the loss
    flops: float = 0.0  # model FLOPs of the whole global batch, same rank
    samples: tuple[int, ...] = ()  # sample ids consumed; only one rank per data-parallel group


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All an agent knows of one job's generation on its node. ``version`` grows with each change.

    ``state``: ``prepared`` (template warm), ``store`` (this generation's rendezvous store runs),
    ``started`` (workers forked), ``exited`` (every worker ended by itself), ``stopped`` (fenced:
    no process of this or an older generation is left; ``holdings`` are final).
    """

    job: str
    generation: int
    version: int
    state: Literal["preparing", "prepared", "store", "started", "exited", "stopped"]
    store_port: int = 0
    pids: dict[int, int] = {}  # rank -> pid
    phases: dict[str, float] = {}  # phase -> seconds until *all* ranks here had passed it
    step: int = 0  # last step finished by every rank here in this generation (0: none)
    exits: tuple[WorkerExit, ...] = ()
    shards: tuple[ShardSet, ...] = ()  # of the newest durable step not known to be committed
    holdings: tuple[Holding, ...] = ()
    error: str = ""  # why the agent itself could not do what was asked (one sentence)
    copy_error: str = ""  # why the last snapshot was not copied to a peer
    save_error: str = ""  # why the last durable checkpoint was not written; training goes on


# ---------------------------------------------------------------- agent -> controller


class Hello(Message, frozen=True):
    """First line on a connection. ``incarnation`` names one life of an agent process."""

    node: str
    incarnation: str
    token: str
    pid: int
    host: str = "127.0.0.1"  # address of the node on the job network
    peer_port: int = 0  # where its agent gives and takes copies of snapshots; 0: nowhere
    version: int = PROTOCOL_VERSION


class Heartbeat(Message, frozen=True):
    """One per interval for all ranks of a node. ``seq`` is acknowledged once reports are stored."""

    seq: int
    reports: tuple[StepReport, ...] = ()


class Members(Message, frozen=True):
    """Once per connection, after every report that is still to be delivered: all that runs on the node."""

    members: tuple[MemberStatus, ...] = ()


class MemberUpdate(Message, frozen=True):
    """The new status of one member."""

    member: MemberStatus


AgentMessage = Hello | Heartbeat | Members | MemberUpdate


# ---------------------------------------------------------------- controller -> agent


class Accepted(Message, frozen=True):
    """Answer to Hello."""

    heartbeat_s: float


class Refused(Message, frozen=True):
    """Answer to Hello, or the end of an incarnation: the agent must kill all it has and exit."""

    reason: str


class HeartbeatAck(Message, frozen=True):
    seq: int


class Prepare(Message, frozen=True):
    """Warm up for a job: load the template when ``torch`` is set. Idempotent."""

    job: str
    torch: bool


class StartStore(Message, frozen=True):
    """Start (or, without ``torch``, reserve a port for) the rendezvous store of a generation."""

    job: str
    generation: int
    torch: bool


class RankPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker to start: its ranks and the tier it restores ``restore_step`` from."""

    rank: int
    local_rank: int
    tier: Tier = "none"
    source: Peer | None = None  # who has the copy, for the tier ``peer``


class StartWorkers(Message, frozen=True):
    """Start the workers of one generation on one node. Refused when a newer one is known."""

    job: str
    job_name: str
    generation: int
    restarts: int
    world_size: int
    node_rank: int
    ranks: tuple[RankPlan, ...]
    store_host: str
    store_port: int
    job_dir: str  # on storage shared by the nodes and the server
    spec: dict[str, Any]  # JobSpec.model_dump(mode="json")
    intervals: Intervals
    restore_step: int | None = None
    restore_generation: int = 0  # of the durable checkpoint directory, when any rank reads it
    durable_step: int | None = None  # newest committed durable step (its snapshot is kept)
    durable_generation: int = 0  # of its directory
    holder: Peer | None = None  # who keeps the copies of this node's snapshots
    wards: tuple[int, ...] = ()  # ranks elsewhere whose copies this node keeps


class StopWorkers(Message, frozen=True):
    """Fence: kill every process of the job up to ``generation``; answer with state stopped.

    ``grace_s`` > 0 sends SIGTERM first. ``keep`` keeps the memory snapshots for a restart.
    """

    job: str
    generation: int
    grace_s: float = 0.0
    keep: bool = True


class Commit(Message, frozen=True):
    """The controller has journaled the checkpoint of ``step``: rank 0's worker writes the marker.

    ``intervals`` are to be agreed on at the next durable checkpoint, where all ranks meet.
    """

    job: str
    generation: int
    step: int
    intervals: Intervals


class Forget(Message, frozen=True):
    """The job has ended: drop its snapshots and status."""

    job: str


class Shutdown(Message, frozen=True):
    """The cluster goes down: exit once no job is left here."""


ControllerMessage = (
    Accepted
    | Refused
    | HeartbeatAck
    | Prepare
    | StartStore
    | StartWorkers
    | StopWorkers
    | Commit
    | Forget
    | Shutdown
)


# ---------------------------------------------------------------- agent <-> worker (one packet each)


class WorkerWelcome(Message, frozen=True):
    """First packet to a worker; a memory snapshot's memfd rides along when ``tier`` is memory."""

    job: str
    job_name: str
    generation: int
    rank: int
    local_rank: int
    world_size: int
    job_dir: str
    restore_step: int | None
    restore_generation: int
    tier: Tier
    durable_step: int | None
    intervals: Intervals
    durable_generation: int = 0
    copies: bool = False  # snapshots of peer steps are copied to another node


class Committed(Message, frozen=True):
    """The durable checkpoint of ``step`` is committed; rank 0 now writes its marker."""

    step: int
    intervals: Intervals


class Dropped(Message, frozen=True):
    """The agent no longer holds the snapshot in this buffer of the worker's."""

    buffer: int


class Copied(Message, frozen=True):
    """The snapshot of ``step`` has a copy on another node, or will not get one."""

    step: int


class PhaseDone(Message, frozen=True):
    phase: Phase


class StepDone(Message, frozen=True):
    report: StepReport


class SnapshotTaken(Message, frozen=True):
    """A memory snapshot; its memfd rides along. ``durable`` and ``peer`` keep it beyond newer ones;
    ``peer`` has it copied."""

    step: int
    size: int
    crc32: int
    buffer: int  # of the worker's; to be named when it is no longer held
    durable: bool = False
    peer: bool = False


class ShardsSaved(Message, frozen=True):
    shards: ShardSet


class SaveFailed(Message, frozen=True):
    """The storage did not take a durable checkpoint, on all ranks alike; training goes on without it."""

    error: str


class Failure(Message, frozen=True):
    """The worker is about to exit because of this exception."""

    error_class: str
    message: str
    step: int | None = None


ToWorker = WorkerWelcome | Committed | Copied | Dropped
FromWorker = PhaseDone | StepDone | SnapshotTaken | ShardsSaved | SaveFailed | Failure


# ---------------------------------------------------------------- agent <-> template


class ForkWorker(Message, frozen=True):
    """Fork one worker; the worker's end of its channel rides along as a file descriptor."""

    key: str
    env: dict[str, str]
    log_path: str
    spec: dict[str, Any]


class ForkStore(Message, frozen=True):
    """Fork a rendezvous store listening on ``host``."""

    key: str
    host: str
    world_size: int


class TemplateReady(Message, frozen=True):
    import_s: float


class Forked(Message, frozen=True):
    key: str
    pid: int
    port: int = 0  # of a store


class ChildExited(Message, frozen=True):
    key: str
    pid: int
    code: int


ToTemplate = ForkWorker | ForkStore
FromTemplate = TemplateReady | Forked | ChildExited
