"""A lost node's state comes back from another node's memory: no durable checkpoint exists yet, and no bit differs."""

from __future__ import annotations

import os
import random
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
    spec["checkpoint"] = {"every_steps": steps, "peer_every_steps": 2}  # the first durable one is the last
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
    story(tmp_path, TWO_REPLICAS, 250, [SEED % 2], SEED)


@pytest.mark.slow
def test_three_dimensions(tmp_path: Path) -> None:
    story(tmp_path, THREE_DIMENSIONS, 20, [0, 1 + SEED % 3], SEED)
