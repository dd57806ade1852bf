"""What is predicted of a job: figures worked out by hand, and sentences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from myriad.planner import Plan, Probe, plan
from myriad.planner.communication import GLOO_WAKE_UPS
from myriad.planner.compute import compute_time, stage_flops
from myriad.planner.memory import WORKER_BYTES
from myriad.planner.subject import subject_of
from myriad.spec.arithmetic import checkpoint_bytes, parameters, rank_bytes, step_flops
from myriad.spec.causes import Cause
from myriad.spec.cluster import ClusterSpec
from myriad.spec.errors import SpecError
from myriad.spec.job import JobSpec

PREDICTED = {
    Cause.COMPUTE,
    Cause.PIPELINE_BUBBLE,
    Cause.EXPOSED_COMMUNICATION,
    Cause.CHECKPOINT_WAIT,
    Cause.STARTUP,
}
MODEL = {
    "layers": 4,
    "dim": 64,
    "heads": 4,
    "kv_heads": 2,
    "ffn_dim": 128,
    "vocab_size": 256,
}
PROBE = Probe(
    gemm_flops_per_s=1e11,
    loopback_bytes_per_s=1e9,
    loopback_latency_s=5e-5,
    cores=2,
    emulated=True,
    storage_write_bytes_per_s=1e8,
    memory_copy_bytes_per_s=1e9,
    fork_s=0.05,
)
REAL = replace(PROBE, emulated=False)


def cluster_of(
    nodes: int = 5, accelerator: str = "cpu", memory: str = "4GiB", **node_type: Any
) -> ClusterSpec:
    kind = {"accelerators": 2, "cpus": 2, "memory": memory, "accelerator": accelerator, **node_type}
    return ClusterSpec.model_validate(
        {
            "name": "laptop",
            "node_types": {"small": kind},
            "nodes": [
                {
                    "name": f"n{i}",
                    "type": "small",
                    "rack": f"r{i // 3}",
                    "power_feed": "p",
                    "leaf": f"l{i // 3}",
                }
                for i in range(nodes)
            ],
            "fabric": {
                "node": {"bandwidth": "100GB/s", "latency": "1us"},
                "leaf": {"bandwidth": "10GB/s", "latency": "5us"},
                "core": {"bandwidth": "1GB/s", "latency": "20us"},
            },
        }
    )


def job_of(nodes: int = 4, model: dict[str, Any] | None = None, **changes: Any) -> JobSpec:
    layout = changes.pop("layout", {"pp": 2, "dp_shard": 2, "tp": 2, "microbatches": 2})
    return JobSpec.model_validate(
        {
            "name": "demo",
            "nodes": nodes,
            "model": MODEL | (model or {}),
            "layout": layout,
            "data": {"path": "tokens", "sequence_length": 128, "global_batch": 8},
            "optimizer": {"steps": 100, "learning_rate": 1e-3},
            "checkpoint": {"every_steps": 30, "snapshot_every_steps": 1},
            **changes,
        }
    )


def test_the_figures_of_the_model() -> None:
    job = job_of()
    assert job.model is not None and job.data is not None
    found = plan(job, cluster_of(), PROBE)
    assert found.world == 8
    assert found.parameters == parameters(job.model)
    assert found.tokens_per_step == 1024
    assert found.flops_per_step["causal"] == step_flops(job.model, job.data, "causal")
    assert found.flops_per_step["full"] > found.flops_per_step["causal"]
    assert found.mfu_bound["full"] > found.mfu_bound["causal"]
    assert found.refusals == ()


def test_exactly_the_promised_lines_are_predicted() -> None:
    ledger = plan(job_of(), cluster_of(), PROBE).ledger
    assert set(ledger) == set(Cause)
    assert {cause for cause, seconds in ledger.items() if seconds is not None} == PREDICTED


def test_the_ledger_adds_up_to_the_wall_time() -> None:
    found = plan(job_of(), cluster_of(), PROBE)
    total = sum(seconds for seconds in found.ledger.values() if seconds is not None)
    assert total == pytest.approx(found.wall_time_s * found.world)


# ---------------------------------------------------------------- compute and bubble


def test_emulated_ranks_share_the_cores() -> None:
    job = job_of(layout={"dp_shard": 8})
    found = plan(job, cluster_of(), PROBE)
    assert found.step.compute_s == pytest.approx(found.flops_per_step["causal"] / (1e11 * 2))
    assert found.step.pipeline_bubble_s == 0.0
    alone = plan(job, cluster_of(), REAL)
    assert alone.step.compute_s == pytest.approx(found.flops_per_step["causal"] / (1e11 * 8))


def test_a_cluster_smaller_than_the_machine_is_not_slowed_down() -> None:
    job = job_of(layout={"dp_shard": 8})
    assert plan(job, cluster_of(), replace(PROBE, cores=64)).step == replace(
        plan(job, cluster_of(), REAL).step,
        exposed_communication_s=plan(
            job, cluster_of(), replace(PROBE, cores=64)
        ).step.exposed_communication_s,
    )


def test_the_stages_share_out_the_flops() -> None:
    job = job_of()
    assert job.model is not None and job.data is not None
    subject = subject_of(job, cluster_of(), PROBE)
    stages = [stage_flops(subject, stage) for stage in range(2)]
    assert sum(stages) == step_flops(job.model, job.data, "causal")
    assert stages[1] - stages[0] == 6 * 1024 * 256 * 64, "the head is on the last stage"


@pytest.mark.parametrize(("microbatches", "share"), [(2, 1 / 3), (4, 1 / 5), (8, 1 / 9)])
def test_the_bubble_of_even_stages(microbatches: int, share: float) -> None:
    """(p - 1) / (m + p - 1) of a step; the head's matrix is made negligible."""
    layout = {"pp": 2, "tp": 2, "dp_shard": 2, "microbatches": microbatches}
    data = {"path": "tokens", "sequence_length": 128, "global_batch": 16}
    job = job_of(model={"vocab_size": 2, "ffn_dim": 65536}, layout=layout, data=data)
    for probe in (REAL, PROBE):
        found = compute_time(subject_of(job, cluster_of(), probe))
        total_s = found.compute_s + found.pipeline_bubble_s
        assert found.pipeline_bubble_s / total_s == pytest.approx(share, rel=1e-3)


def test_emulated_cores_are_never_idle_in_a_bubble() -> None:
    """While one stage waits the other's ranks have the cores, so the step is total work over cores."""
    found = plan(job_of(), cluster_of(), PROBE)
    total_s = found.step.compute_s + found.step.pipeline_bubble_s
    assert total_s == pytest.approx(found.flops_per_step["causal"] / (1e11 * 2))


def test_the_peak_is_the_catalogues_for_real_accelerators() -> None:
    cluster = cluster_of(peak_flops=1e15, accelerator="h100")
    assert plan(job_of(), cluster, REAL).peak_flops_per_s == 1e15
    assert plan(job_of(), cluster, PROBE).peak_flops_per_s == 1e11


# ---------------------------------------------------------------- communication


def exposed_s(found: Plan) -> float:
    assert found.step.exposed_communication_s is not None
    return found.step.exposed_communication_s


def ring_s(members: int, size: float, bandwidth: float, latency: float) -> float:
    return (members - 1) / members * size / bandwidth + (members - 1) * latency


def test_replicas_sum_their_gradients_once_a_step() -> None:
    """Two one-accelerator nodes in one leaf: an all-reduce of each block, and one of three sums."""
    cluster = cluster_of(nodes=2, accelerators=1, accelerator="h100")
    job = job_of(nodes=2, layout={"dp_replicate": 2, "microbatches": 4})
    blocks, leaf = 5, (10e9, 5e-6)
    size = parameters_of(job) * 4 / blocks
    want = blocks * 2 * ring_s(2, size, *leaf) + 2 * ring_s(2, 24, *leaf)
    assert exposed_s(plan(job, cluster, REAL)) == pytest.approx(want)


def test_shards_gather_twice_a_microbatch_and_scatter_once_a_step() -> None:
    cluster = cluster_of(nodes=2, accelerators=1, accelerator="h100")
    job = job_of(nodes=2, layout={"dp_shard": 2, "microbatches": 4})
    blocks, leaf = 5, (10e9, 5e-6)
    size = parameters_of(job) * 4 / blocks
    want = (8 + 1) * blocks * ring_s(2, size, *leaf) + 2 * ring_s(2, 24, *leaf)
    assert exposed_s(plan(job, cluster, REAL)) == pytest.approx(want)
    on_cpu = cluster_of(nodes=2, accelerators=1)
    want = (8 + 2) * blocks * ring_s(2, size, *leaf) + 2 * ring_s(2, 24, *leaf)
    assert exposed_s(plan(job, on_cpu, REAL)) == pytest.approx(want), "gloo scatters by an all-reduce"


def test_tensor_parallel_ranks_gather_and_scatter_the_stream() -> None:
    cluster = cluster_of(nodes=1, accelerator="h100")
    job = job_of(nodes=1, layout={"tp": 2, "microbatches": 2})
    tokens, node = 8 * 128 / 2, (100e9, 1e-6)
    stream = ring_s(2, tokens * 64 * 4, *node)
    logits = ring_s(2, tokens * 256 * 4, *node)
    want = 2 * ((4 * 4 + 2) * 2 * stream + logits) + 2 * ring_s(2, 24, *node)
    assert exposed_s(plan(job, cluster, REAL)) == pytest.approx(want)


def test_stages_pass_activations_across_leaves() -> None:
    """n2 and n3 are in different leaves: the message of each microbatch crosses the core."""
    cluster = cluster_of(nodes=5, accelerators=1, accelerator="h100")
    job = job_of(nodes=2, layout={"pp": 2, "microbatches": 4})
    size = 8 * 128 / 4 * 64 * 4
    want = 2 * (4 + 2 - 2) * (20e-6 + size / 1e9) + 2 * ring_s(2, 24, 1e9, 20e-6)
    assert exposed_s(plan(job, cluster, REAL, nodes=["n2", "n3"])) == pytest.approx(want)
    assert exposed_s(plan(job, cluster, REAL)) < want, "left to itself the plan stays in one leaf"


def test_emulated_ranks_share_the_loopback() -> None:
    """8 ranks on 2 cores: an eighth of the pair's rate each, and a message waits for four turns of gloo."""
    job = job_of(layout={"dp_replicate": 8})
    size = parameters_of(job) * 4 / 5
    link = (1e9 / 8, 4 * GLOO_WAKE_UPS * 5e-5)
    want = 5 * 2 * ring_s(8, size, *link) + 2 * ring_s(8, 24, *link)
    assert exposed_s(plan(job, cluster_of(), PROBE)) == pytest.approx(want)


def test_too_few_nodes_leave_communication_out() -> None:
    found = plan(job_of(), cluster_of(nodes=3), PROBE)
    assert found.step.exposed_communication_s is None
    assert found.ledger[Cause.EXPOSED_COMMUNICATION] is None
    assert found.ledger[Cause.COMPUTE] is not None
    assert "communication is not predicted: the cluster has fewer than 4 nodes of type small" in found.notes


def parameters_of(job: JobSpec) -> int:
    assert job.model is not None
    return parameters(job.model)


# ---------------------------------------------------------------- checkpoints, start-up


def test_checkpoints_and_snapshots_are_waited_for() -> None:
    job = job_of(layout={"dp_shard": 8})
    assert job.model is not None and job.data is not None
    durable_s = 4 * checkpoint_bytes(job.model) / 1e8  # steps 30, 60, 90 and the last
    need = rank_bytes(job.model, job.layout, job.data, 0)
    snapshots_s = 100 * 4 * (need.parameters + need.optimizer) / 1e9
    assert plan(job, cluster_of(), PROBE).checkpoint_wait_s == pytest.approx(durable_s + snapshots_s)
    blind = plan(job, cluster_of(), replace(PROBE, memory_copy_bytes_per_s=None))
    assert blind.checkpoint_wait_s == pytest.approx(durable_s)
    assert any("leaves out snapshots" in note for note in blind.notes)


def test_what_was_not_measured_is_not_predicted() -> None:
    blind = replace(PROBE, storage_write_bytes_per_s=None, fork_s=None)
    ledger = plan(job_of(), cluster_of(), blind).ledger
    assert ledger[Cause.CHECKPOINT_WAIT] is None
    assert ledger[Cause.STARTUP] is None


def test_startup_is_the_forks_one_after_the_other() -> None:
    assert plan(job_of(), cluster_of(), REAL).startup_s == pytest.approx(2 * 0.05)
    assert plan(job_of(), cluster_of(), PROBE).startup_s == pytest.approx(2 * 2 * 0.05)
    cold = replace(PROBE, template_s=3.0)
    assert plan(job_of(), cluster_of(), cold).startup_s == pytest.approx(2 * (3 + 2 * 0.05))


# ---------------------------------------------------------------- memory


def test_memory_counts_the_hungriest_stage_and_the_snapshots() -> None:
    job = job_of()
    assert job.model is not None and job.data is not None
    found = plan(job, cluster_of(), PROBE).memory
    needs = [rank_bytes(job.model, job.layout, job.data, stage) for stage in range(2)]
    assert found.model == needs[found.stage]
    assert found.model.total == max(need.total for need in needs)
    state = found.model.parameters + found.model.optimizer
    assert found.in_host_memory == found.model.total + 4 * state + WORKER_BYTES
    assert found.host_share == 2 * 2**30


def test_a_real_accelerator_has_its_own_memory() -> None:
    found = plan(job_of(), cluster_of(accelerator="h100"), REAL).memory
    assert found.in_host_memory == 4 * (found.model.parameters + found.model.optimizer) + WORKER_BYTES


def test_a_rank_that_does_not_fit_is_refused_with_the_remedy() -> None:
    data = {"path": "tokens", "sequence_length": 2, "global_batch": 8}
    (sentence,) = plan(job_of(model={"ffn_dim": 2**18}, data=data), cluster_of(memory="1GiB"), PROBE).refusals
    assert sentence.startswith("a rank of stage 0 needs 1.7")
    assert "(parameters 100.7 MB, gradients 100.7 MB, optimizer 201.4 MB, activations " in sentence
    assert "but its share of a node of type small is 512 MiB (1 GiB over 2 workers)" in sentence
    assert sentence.endswith("; raise layout.dp_shard, tp or pp")


def test_activations_that_do_not_fit_have_another_remedy() -> None:
    data = {"path": "tokens", "sequence_length": 4096, "global_batch": 64}
    (sentence,) = plan(job_of(data=data), cluster_of(memory="1GiB"), PROBE).refusals
    assert sentence.endswith("; raise layout.microbatches or lower data.global_batch")


# ---------------------------------------------------------------- what cannot be planned


def test_a_command_is_not_planned() -> None:
    job = JobSpec.model_validate({"name": "any", "nodes": 1, "command": "true"})
    with pytest.raises(SpecError, match='job "any" runs a command, and only a model can be planned'):
        plan(job, cluster_of(), PROBE)


def test_a_layout_that_does_not_cover_the_workers_is_not_planned() -> None:
    with pytest.raises(SpecError, match="ranks"):
        plan(job_of(nodes=3), cluster_of(), PROBE)


def test_oversubscription_is_said() -> None:
    assert any(
        "8 emulated accelerators share 2 cores" in note for note in plan(job_of(), cluster_of(), PROBE).notes
    )
    assert not any("share" in note for note in plan(job_of(), cluster_of(), REAL).notes)
