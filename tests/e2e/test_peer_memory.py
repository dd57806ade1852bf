"""A lost node's state comes back from another node's memory: no durable checkpoint exists yet, and no bit differs."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest
from commandline import cluster_up

from live import cluster_of
from recovery import Site, assert_unbroken, dataset, drawn, tiny_job

SEED = int(os.environ.get("MYRIAD_SEED", "1"))
TWO_REPLICAS: dict[str, int] = {"dp_replicate": 2}
THREE_DIMENSIONS = {"dp_shard": 2, "tp": 2, "pp": 2, "microbatches": 2}


def story(folder: Path, layout: dict[str, int], steps: int, victims: list[int], seed: int) -> None:
    """One unbroken run; then, for each victim, a run that loses that node of its placement."""
    mesh = layout == THREE_DIMENSIONS
    accelerators, nodes = (2, 4) if mesh else (1, 2)
    spec = tiny_job(dataset(folder), nodes, layout, steps)
    draw = random.Random(seed)
    faults = [drawn(draw, spec, "kill-node", node=victim) for victim in victims]
    spec["checkpoint"] |= {"every_steps": steps, "peer_every_steps": 2}  # the first durable one is the last
    world = nodes * accelerators
    with cluster_up(folder, cluster_of(nodes=nodes + 1, accelerators=accelerators, leaves=2)) as state:
        site = Site(folder, state)
        reference = site.submit(spec)
        assert site.until_end(reference).status == "SUCCEEDED", site.job(reference)
        for fault in faults:
            job = site.submit(spec)
            site.harm(job, fault)
            (recovery,) = assert_unbroken(site, job, reference, fault)["recoveries"]
            assert recovery["tier_counts"] == {"memory": world - accelerators, "peer": accelerators}, recovery
            assert fault.step - 5 <= recovery["restore_step"], recovery
            site.repair()


def test_two_replicas(tmp_path: Path) -> None:
    story(tmp_path, TWO_REPLICAS, 800, [SEED % 2], SEED)


@pytest.mark.slow
def test_three_dimensions(tmp_path: Path) -> None:
    story(tmp_path, THREE_DIMENSIONS, 20, [0, 1 + SEED % 3], SEED)


@pytest.mark.slow
def test_a_node_and_its_holder(tmp_path: Path) -> None:
    """Both at once: nobody has the state in memory, and the job goes back to the durable checkpoint by itself."""
    spec = tiny_job(dataset(tmp_path), 2, TWO_REPLICAS, 800, spares=2)
    spec["checkpoint"]["peer_every_steps"] = 2
    fault = drawn(random.Random(SEED), spec, "kill-node", node=0)
    with cluster_up(tmp_path, cluster_of(nodes=4, accelerators=1, leaves=2)) as state:
        site = Site(tmp_path, state)
        reference = site.submit(spec)
        assert site.until_end(reference).status == "SUCCEEDED", site.job(reference)
        job = site.submit(spec)
        site.until_step(job, fault.step)
        victims = json.loads(site.run("show", job, "--json"))["members"]
        agents = [json.loads((state / "nodes" / each["node"] / "agent.json").read_text()) for each in victims]
        for agent in agents:
            os.kill(agent["pid"], signal.SIGKILL)  # its guard ends the workers
        assert site.until_end(job).status == "SUCCEEDED", site.job(job)
        found = site.report(job, reference)
        assert found["losses"] == found["reference_losses"], fault
        assert site.result(job)["final_sha256"] == site.result(reference)["final_sha256"], fault
        last = found["recoveries"][-1]
        assert last["restore_step"] % spec["checkpoint"]["every_steps"] == 0, last
        assert "peer" not in last["tier_counts"] and last["tier_counts"]["durable"] >= 1, last
