"""The main job: every node in turn is lost, and a worker, and every loss stays the same bit for bit."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from commandline import cluster_up

from live import cluster_of
from recovery import Site, assert_unbroken, dataset, drawn, tiny_job

Harm = tuple[str, int]  # kind, and which node of the placement (a worker's rank is drawn)
SEED = int(os.environ.get("MYRIAD_SEED", "1"))


TWO_REPLICAS: dict[str, int] = {"dp_replicate": 2}
THREE_DIMENSIONS = {"dp_shard": 2, "tp": 2, "pp": 2, "microbatches": 2}


def story(folder: Path, layout: dict[str, int], steps: int, harms: list[Harm], seed: int) -> None:
    """One unbroken run, then one run for each harm, on one cluster that is repaired in between."""
    world = (
        layout.get("pp", 1) * layout.get("dp_replicate", 1) * layout.get("dp_shard", 1) * layout.get("tp", 1)
    )
    accelerators = 1 if world == 2 else 2
    nodes = world // accelerators
    spec = tiny_job(dataset(folder), nodes, layout, steps)
    draw = random.Random(seed)
    with cluster_up(folder, cluster_of(nodes=nodes + 1, accelerators=accelerators, leaves=2)) as state:
        site = Site(folder, state)
        reference = site.submit(spec)
        assert site.until_end(reference).status == "SUCCEEDED", site.job(reference)
        for kind, target in harms:
            if kind == "kill-worker":
                fault = drawn(draw, spec, kind, rank=draw.randrange(world))
            else:
                fault = drawn(draw, spec, kind, node=target)
            job = site.submit(spec)
            site.harm(job, fault)
            (recovery,) = assert_unbroken(site, job, reference, fault)["recoveries"]
            if fault.rank is not None:
                assert recovery["culprit_rank"] == fault.rank, recovery
                assert recovery["tier_counts"] == {"memory": world}, recovery
            site.repair()


def test_a_worker_and_the_first_node_of_two_replicas(tmp_path: Path) -> None:
    """The quick one of every `make test`. Rank 0's node holds the rendezvous store."""
    story(tmp_path, TWO_REPLICAS, 800, [("kill-worker", 0), ("kill-node", 0)], SEED)


@pytest.mark.slow
def test_every_node_of_two_replicas(tmp_path: Path) -> None:
    story(tmp_path, TWO_REPLICAS, 800, [("kill-node", 0), ("kill-node", 1), ("kill-agent", 1)], SEED + 1)


@pytest.mark.slow
def test_every_node_of_three_dimensions(tmp_path: Path) -> None:
    harms: list[Harm] = [("kill-node", n) for n in range(4)]
    story(tmp_path, THREE_DIMENSIONS, 20, [*harms, ("kill-worker", 0)], SEED + 2)


@pytest.mark.hours
@pytest.mark.parametrize("seed", range(10, 20))
@pytest.mark.parametrize("layout", (TWO_REPLICAS, THREE_DIMENSIONS), ids=("replicas", "mesh"))
def test_other_seeds(tmp_path: Path, layout: dict[str, int], seed: int) -> None:
    """What fails, where and when comes from the seed: ten more of each layout."""
    draw = random.Random(seed)
    nodes = 2 if layout is TWO_REPLICAS else 4
    harms = [(draw.choice(("kill-node", "kill-agent")), draw.randrange(nodes)), ("kill-worker", 0)]
    story(tmp_path, layout, 800 if layout is TWO_REPLICAS else 20, harms, seed)
