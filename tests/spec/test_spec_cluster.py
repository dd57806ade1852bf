"""Clusters: names that stand for many nodes, what is checked, and admission of jobs."""

from __future__ import annotations

import json

import pytest

from myriad.spec.admission import check, fitting_types
from myriad.spec.cluster import ClusterSpec, cluster_from_yaml, expand
from myriad.spec.errors import SpecError
from myriad.spec.job import job_from_yaml

CLUSTER = """
name: demo
node_types:
  emulated: {accelerators: 2, cpus: 2, memory: 4GiB, nics: [{rail: 0, bandwidth: 10Gbit/s}]}
  big: {accelerators: 8, accelerator: h200, cpus: 128, memory: 2TiB, nvme: 30TB, peak_flops: 989e12}
nodes:
  - {name: "n[0-2]", type: emulated, rack: r0, power_feed: a, leaf: l0}
  - {name: "n[3-4]", type: emulated, rack: r1, power_feed: b, leaf: l1}
  - {name: big, type: big, rack: r1, power_feed: b, leaf: l1}
fabric:
  node: {bandwidth: 20GB/s, latency: 10us}
  leaf: {bandwidth: 10Gbit/s, latency: 20us}
  core: {bandwidth: 5Gbit/s, latency: 50us}
"""

NOT_A_NAME = 'cannot be used as a name; use 1 to 63 of the characters A-Z a-z 0-9 "." "_" "-"'


def test_a_cluster_is_read_as_meant() -> None:
    cluster = cluster_from_yaml(CLUSTER, "cluster.yaml")
    assert [node.name for node in cluster.nodes] == ["n0", "n1", "n2", "n3", "n4", "big"]
    assert [node.leaf for node in cluster.nodes] == ["l0", "l0", "l0", "l1", "l1", "l1"]
    emulated = cluster.type_of(cluster.nodes[0])
    assert (emulated.memory, emulated.nvme, emulated.accelerator) == (4 * 2**30, 0, "cpu")
    assert emulated.nics[0].bandwidth == 1.25e9
    assert cluster.fabric.core.latency == 5e-5
    assert (cluster.engine.kind, cluster.heartbeat) == ("local", 0.5)
    assert ClusterSpec.model_validate(json.loads(cluster.model_dump_json())) == cluster


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("n1", ["n1"]),
        ("n[0-3]", ["n0", "n1", "n2", "n3"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("n[00-01].rack", ["n00.rack", "n01.rack"]),
        ("r[0-1]n[0-1]", ["r0n0", "r0n1", "r1n0", "r1n1"]),
        ("n[7-7]", ["n7"]),
    ],
)
def test_ranges(name: str, names: list[str]) -> None:
    assert expand(name) == names


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"n[3-4]"', '"n[2-4]"', '2 nodes have the name "n2"; give each its own'),
        ('"n[3-4]"', '"n[4-3]"', 'nodes: the range [4-3] in "n[4-3]" runs backwards; write [3-4]'),
        (
            '"n[3-4]"',
            '"n[0-999999999]"',
            'nodes: "n[0-999999999]" stands for more than 1,000,000 nodes; shorten the range',
        ),
        ('"n[3-4]"', '"n 3/4"', f'nodes[1].name: "n 3/4" {NOT_A_NAME}'),
        ('"n[3-4]"', '"n[3,4]"', f'nodes[1].name: "n[3,4]" {NOT_A_NAME}'),
        ("type: big,", "type: bigg,", 'node "big" has the unknown node type "bigg"; did you mean "big"?'),
        (
            "type: big,",
            "type: tpu,",
            'node "big" has the unknown node type "tpu"; this cluster has emulated or big',
        ),
        (
            "name: big, type: big, rack: r1, power_feed: b",
            "name: big, type: big, rack: r1, power_feed: a",
            'rack "r1" hangs on two power feeds, "b" and "a"; a rack has one',
        ),
        ("cpus: 128", "cpu: 128", 'unknown key "cpu" in node_types.big; did you mean "cpus"?'),
        ("rail: 0", "rails: 0", 'unknown key "rails" in node_types.emulated.nics[0]; did you mean "rail"?'),
        ("power_feed: a, ", "", 'nodes[0] lacks the key "power_feed"; add it'),
        (
            "memory: 4GiB",
            "memory: 4Gi",
            (
                'node_types.emulated.memory: "4Gi" has the unknown unit "Gi"; write a number of bytes or a '
                'size such as "1.5GB" (10^9) or "4GiB" (2^30)'
            ),
        ),
        ("name: demo", "name: demo\nheartbeat: 0", "heartbeat is 0, but it must be at least 0.01"),
        ("name: demo", "name: demo\nengine: {kind: slurm}", 'engine.kind is "slurm", but it must be "local"'),
    ],
)
def test_refusals(old: str, new: str, sentence: str) -> None:
    assert old in CLUSTER
    with pytest.raises(SpecError) as refused:
        cluster_from_yaml(CLUSTER.replace(old, new, 1), "cluster.yaml")
    assert str(refused.value) == f"cluster.yaml: {sentence}"


def test_a_name_that_grows_too_long_in_its_range_is_refused() -> None:
    with pytest.raises(SpecError, match="cannot be used as a name"):
        cluster_from_yaml(CLUSTER.replace("n[3-4]", "x" * 62 + "[9-10]"), "cluster.yaml")


MODEL = """
name: tiny
nodes: 4
model: {layers: 4, dim: 64, heads: 8, kv_heads: 8, ffn_dim: 128, vocab_size: 256}
data: {path: text, sequence_length: 64, global_batch: 8}
optimizer: {steps: 10, learning_rate: 3e-4}
"""
CACHED = MODEL.replace("path: text", "path: s3://b/text, cache: {directory: /nvme, size: 31TB}")


@pytest.mark.parametrize(
    ("extra", "types"),
    [
        ("layout: {pp: 2, dp_shard: 2, tp: 2, microbatches: 2}", ["emulated"]),
        ("layout: {pp: 4, tp: 8, microbatches: 4}", ["big"]),
        ("layout: {dp_shard: 4}\nworkers_per_node: 1", ["emulated", "big"]),
    ],
)
def test_a_model_job_fits_the_types_its_layout_covers(extra: str, types: list[str]) -> None:
    cluster, job = cluster_from_yaml(CLUSTER, "cluster.yaml"), job_from_yaml(MODEL + extra, "job.yaml")
    check(job, cluster)
    assert fitting_types(job, cluster) == types


@pytest.mark.parametrize(
    "text",
    [
        "name: a\nnodes: 1000\ncommand: x",  # more than there are: it waits
        "name: a\nnodes: 1\nspares: 1000\ncommand: x",
        "name: a\nnodes: 1\nworkers_per_node: 64\ncommand: x",  # a command may share accelerators
        MODEL.replace("nodes: 4", "nodes: 8") + "layout: {dp_shard: 8}\nworkers_per_node: 1",
        CACHED + "node_type: emulated\nlayout: {dp_shard: 8}",  # how much NVMe it has is not said
    ],
)
def test_admission_accepts_what_may_run_one_day(text: str) -> None:
    check(job_from_yaml(text, "job.yaml"), cluster_from_yaml(CLUSTER, "cluster.yaml"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "name: a\nnodes: 1\nnode_type: emulate\ncommand: x",
            'job "a" asks for the unknown node type "emulate"; did you mean "emulated"?',
        ),
        (
            MODEL + "layout: {dp_shard: 2}",
            (
                'job "tiny" has the layout dp_shard 2 = 2 ranks, but 4 nodes x 2 workers (node type '
                '"emulated") are 8; change the layout or nodes'
            ),
        ),
        (
            MODEL + "node_type: big",
            (
                'job "tiny" has the layout one rank = 1 ranks, but 4 nodes x 8 workers (node type "big") '
                "are 32; change the layout or nodes"
            ),
        ),
        (
            MODEL + "node_type: emulated\nworkers_per_node: 4",
            (
                'job "tiny" wants 4 workers on a node, but node type "emulated" has 2 accelerators and a '
                "model's worker needs one; lower workers_per_node"
            ),
        ),
        (
            CACHED + "node_type: big\nlayout: {dp_shard: 4}\nworkers_per_node: 1",
            (
                'job "tiny" wants a cache of 31 TB, but a node of type "big" has 30 TB of NVMe; lower '
                "data.cache.size"
            ),
        ),
    ],
)
def test_admission_refuses_what_never_can(text: str, sentence: str) -> None:
    with pytest.raises(SpecError) as refused:
        check(job_from_yaml(text, "job.yaml"), cluster_from_yaml(CLUSTER, "cluster.yaml"))
    assert str(refused.value) == sentence
