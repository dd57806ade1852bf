"""What a cluster is made of: node types, nodes with their rack, power feed and leaf, and a two-level fabric.

``name: n[0-3]`` stands for four nodes alike, ``n[00-15]`` keeps the zeros, and several ranges multiply. A
cluster is written once and read often, so expansion happens here and everybody else sees plain nodes: 100,000
of them are read in half a second.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from myriad.spec.errors import SpecError, nearest, one_of, quoted
from myriad.spec.fields import Count, CountOrZero, Positive, Spec, Text, spec_from_yaml
from myriad.spec.units import Bytes, BytesPerSecond, Seconds

MAX_CLUSTER_NODES = 1_000_000  # a slip of the hand in a range must not fill the memory

_NAME = re.compile(r"[A-Za-z0-9._-]{1,63}")
_RANGE = re.compile(r"\[(\d{1,9})-(\d{1,9})\]")


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise SpecError(
            f'{quoted(name)} cannot be used as a name; use 1 to 63 of the characters A-Z a-z 0-9 "." "_" "-"'
        )
    return name


Name = Annotated[Text, AfterValidator(_check_name)]


class NicSpec(Spec):
    """One network port of a node. NICs of the same rail meet in the same switches."""

    rail: CountOrZero
    bandwidth: BytesPerSecond


class NodeType(Spec):
    """What all nodes of a type have. ``peak_flops`` is per accelerator and second (None: measured)."""

    accelerators: Count
    accelerator: Text = "cpu"
    cpus: Count
    memory: Bytes
    nvme: Bytes = 0
    nics: list[NicSpec] = Field(default_factory=list)
    peak_flops: Positive | None = None


class NodeSpec(Spec):
    """One node: its type and the domains it fails and communicates with."""

    name: Name
    type: Text
    rack: Name
    power_feed: Name
    leaf: Name


class LinkSpec(Spec):
    """The path between two accelerators: bandwidth of one of them, one-way latency."""

    bandwidth: BytesPerSecond
    latency: Seconds = 0.0


class FabricSpec(Spec):
    """Pairs in the same node, in the same leaf, and in different leaves (through the core)."""

    node: LinkSpec
    leaf: LinkSpec
    core: LinkSpec


class EngineSpec(Spec):
    """Where the nodes come from: ``local`` emulates them with processes on this machine."""

    kind: Literal["local"] = "local"


def expand(name: str) -> list[str]:
    """``n[08-10]`` as n08, n09, n10; a name without a range as itself; SpecError for a backward range."""
    parts: list[list[str]] = []
    end, count = 0, 1
    for found in _RANGE.finditer(name):
        first, last = found.groups()
        if int(first) > int(last):
            raise SpecError(f"the range {found[0]} in {quoted(name)} runs backwards; write [{last}-{first}]")
        count *= int(last) - int(first) + 1
        if count > MAX_CLUSTER_NODES:
            raise SpecError(
                f"{quoted(name)} stands for more than {MAX_CLUSTER_NODES:,} nodes; shorten the range"
            )
        width = len(first) if first.startswith("0") else 0
        parts += [
            [name[end : found.start()]],
            [str(i).zfill(width) for i in range(int(first), int(last) + 1)],
        ]
        end = found.end()
    parts.append([name[end:]])
    return ["".join(pieces) for pieces in itertools.product(*parts)]


def _expand_nodes(entries: Any, validate: ValidatorFunctionWrapHandler) -> list[NodeSpec]:
    """Validates the entries as written, so that a refusal names the user's position, then expands them."""
    names: list[list[str] | None] = []
    total = 0
    written = entries if isinstance(entries, list) else []
    for entry in written:
        ranged = isinstance(entry, dict) and isinstance(entry.get("name"), str) and "[" in entry["name"]
        some = expand(entry["name"]) if ranged else None
        names.append(some)
        total += len(some) if some else 1
        if total > MAX_CLUSTER_NODES:
            raise SpecError(f"the ranges stand for more than {MAX_CLUSTER_NODES:,} nodes; shorten them")
    firsts = [
        {**entry, "name": some[0]} if some else entry for entry, some in zip(written, names, strict=True)
    ]
    nodes: list[NodeSpec] = validate(firsts if isinstance(entries, list) else entries)
    expanded: list[NodeSpec] = []
    for node, some in zip(nodes, names, strict=True):
        expanded += [node.model_copy(update={"name": _check_name(name)}) for name in some] if some else [node]
    return expanded


class ClusterSpec(Spec):
    """The cluster a controller owns. ``heartbeat`` is the time between two messages of an agent."""

    name: Name
    node_types: Annotated[dict[Name, NodeType], Field(min_length=1)]
    nodes: Annotated[list[NodeSpec], WrapValidator(_expand_nodes), Field(min_length=1)]
    fabric: FabricSpec
    engine: EngineSpec = EngineSpec()
    heartbeat: Annotated[Seconds, Field(ge=0.01, le=60)] = 0.5

    @model_validator(mode="after")
    def _check(self) -> ClusterSpec:
        name, times = Counter(node.name for node in self.nodes).most_common(1)[0]
        if times > 1:
            raise SpecError(f'{times} nodes have the name "{name}"; give each its own')
        for node in self.nodes:
            if node.type not in self.node_types:
                raise SpecError(f'node "{node.name}" has the unknown {self.unknown_type(node.type)}')
        racks: dict[str, str] = {}
        for node in self.nodes:
            if racks.setdefault(node.rack, node.power_feed) != node.power_feed:
                raise SpecError(
                    f'rack "{node.rack}" hangs on two power feeds, "{racks[node.rack]}" and '
                    f'"{node.power_feed}"; a rack has one'
                )
        return self

    def type_of(self, node: NodeSpec) -> NodeType:
        """The type of one of this cluster's nodes."""
        return self.node_types[node.type]

    def unknown_type(self, name: str) -> str:
        """The end of a sentence about a node type that is not there."""
        close = nearest(name, self.node_types)
        known = f'did you mean "{close}"?' if close else f"this cluster has {one_of(self.node_types)}"
        return f"node type {quoted(name)}; {known}"


def cluster_from_yaml(text: str, source: str) -> ClusterSpec:
    """Read a cluster; ``source`` is the file's name as the user knows it. SpecError with one sentence."""
    return spec_from_yaml(ClusterSpec, text, source)
