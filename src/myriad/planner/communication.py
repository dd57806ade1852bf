"""The time of a step's communication, of which nothing is assumed to be hidden.

Method: the volumes of reference planner.md 4.5 as the trainer really sends them, each at the alpha-beta cost
of a ring on the nodes of its slowest group, added up for the slowest stage. Emulated nodes talk through one
machine's loopback: a message occupies a core at each end, so all ranks share ``cores / 2`` times the rate
of one pair, and a message waits until its receiver gets a core. Trade-off: an upper bound where backward
passes overlap with collectives (gradient all-reduce; on CPU FSDP2 hides nothing). Against gloo on 2 cores:
all-reduce of 256 B on 8 ranks 26 ms (measured 24), of 4 MiB 54 ms (43), on 2 ranks 5.0 ms (5.9).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from myriad.fabric import Fabric, Level, Link
from myriad.fabric.collectives import all_gather_s, all_reduce_s, point_to_point_s, reduce_scatter_s
from myriad.planner.subject import Subject
from myriad.spec.arithmetic import COMPUTE_BYTES, STATE_BYTES, rank_parameters

Cost = Callable[[Fabric, Sequence[str], float], float]

# What a message costs in gloo more than in a socket: its two threads per process hand it on through wake-ups.
# 2 processes, torch 2.13: a ring step of 256 B takes 470 us where a socket's one way takes 27 us.
GLOO_WAKE_UPS = 17

_SUMS_BYTES = 24  # one all-reduce of the world per step: loss sum, tokens, squared gradient norm


def communication_s(subject: Subject, fabric: Fabric) -> float:
    """Seconds a rank spends in communication in one step. The subject must have nodes."""
    assert subject.nodes, "communication needs to know the nodes"
    links = link_of(subject, fabric)
    microbatches = subject.layout.microbatches
    stages = [
        microbatches * _tensor_parallel_s(subject, links, stage) + _data_parallel_s(subject, links, stage)
        for stage in range(subject.layout.pp)
    ]
    everyone = [subject.node_of(rank) for rank in range(subject.world)]
    return max(stages) + _pipeline_s(subject, links) + all_reduce_s(links, everyone, _SUMS_BYTES)


def link_of(subject: Subject, fabric: Fabric) -> Fabric:
    """The fabric as the workers feel it: itself, or the shared loopback of an emulated cluster."""
    probe = subject.probe
    if not probe.emulated:
        return fabric
    share = min(1.0, probe.cores / (2 * subject.world))
    turns = max(1.0, subject.world / probe.cores)
    latency_s = probe.loopback_latency_s * GLOO_WAKE_UPS * turns
    link = Link(probe.loopback_bytes_per_s * share, latency_s)
    return Fabric(fabric.cluster, fabric.leaf_of, dict.fromkeys(Level, link))


def _tensor_parallel_s(subject: Subject, links: Fabric, stage: int) -> float:
    """One microbatch, forward and backward: the residual stream is split by sequence between the matrices.

    Attention and feed-forward each gather their input and scatter their output, backward the reverse: four
    all-gathers and four reduce-scatters a layer. The embedding adds one of each, the head two and one, of
    which one all-gather is of the logits.
    """
    model, layout = subject.model, subject.layout
    if layout.tp == 1:
        return 0.0
    stream = float(subject.microbatch_tokens * model.dim * STATE_BYTES[model.dtype])
    first, last = stage == 0, stage == layout.pp - 1
    pairs = 4 * (model.layers // layout.pp) + first + last
    groups = set(subject.ranks(stage, "tp"))
    total_s = pairs * (
        _slowest(all_gather_s, links, groups, stream) + _scatter_s(subject, links, groups, stream)
    )
    if last:
        logits = subject.microbatch_tokens * model.vocab_size * COMPUTE_BYTES[model.dtype]
        total_s += _slowest(all_gather_s, links, groups, logits)
    return total_s


def _data_parallel_s(subject: Subject, links: Fabric, stage: int) -> float:
    """One step. Sharded: gather every block's parameters, scatter its gradients. Replicated: sum gradients.

    Without a pipeline each microbatch gathers twice (forward, backward); in a pipeline the parameters stay
    gathered for the step. Gradients travel once a step.
    """
    model, layout = subject.model, subject.layout
    blocks = model.layers // layout.pp + 1
    block = rank_parameters(model, layout, stage) * STATE_BYTES[model.dtype] / blocks
    total_s = 0.0
    if layout.dp_shard > 1:
        groups = set(subject.ranks(stage, "dp_shard"))
        gathers = 1 if layout.pp > 1 else 2 * layout.microbatches
        total_s += blocks * gathers * _slowest(all_gather_s, links, groups, block)
        total_s += blocks * _scatter_s(subject, links, groups, block)
    if layout.dp_replicate > 1:
        groups = set(subject.ranks(stage, "dp_replicate"))
        total_s += blocks * _slowest(all_reduce_s, links, groups, block / layout.dp_shard)
    return total_s


def _pipeline_s(subject: Subject, links: Fabric) -> float:
    """Messages on the critical path: the fill, one each way per further microbatch, the drain."""
    model, layout = subject.model, subject.layout
    if layout.pp == 1:
        return 0.0
    size = subject.microbatch_tokens * model.dim * STATE_BYTES[model.dtype] / layout.tp
    per_stage = layout.dp * layout.tp
    hops = {
        (subject.node_of(rank), subject.node_of(rank + per_stage))
        for rank in range(subject.world - per_stage)
    }
    slowest_s = max(point_to_point_s(links, source, target, size) for source, target in hops)
    return 2 * (layout.microbatches + layout.pp - 2) * slowest_s


def _slowest(cost: Cost, links: Fabric, groups: Iterable[Sequence[str]], size_bytes: float) -> float:
    return max(cost(links, group, size_bytes) for group in groups)


def _scatter_s(subject: Subject, links: Fabric, groups: Iterable[Sequence[str]], size_bytes: float) -> float:
    """A reduce-scatter. On CPUs gloo runs it as an all-reduce, which is twice the traffic (torch 2.13)."""
    return _slowest(all_reduce_s if subject.on_cpu else reduce_scatter_s, links, groups, size_bytes)
