"""What a worker finds in its environment: torchrun's variables, and ours beside them."""

from __future__ import annotations

import os
from collections.abc import Mapping

from myriad.spec.messages import RankPlan, StartWorkers


def environment(
    start: StartWorkers, plan: RankPlan, node: str, spec_env: Mapping[str, str]
) -> dict[str, str]:
    """The job's own ``env`` over the agent's, and over both what describes this rank."""
    local = len(start.ranks)
    env = dict(os.environ)
    env.setdefault("OMP_NUM_THREADS", "1")
    env |= spec_env
    env |= {
        "RANK": str(plan.rank),
        "LOCAL_RANK": str(plan.local_rank),
        "WORLD_SIZE": str(start.world_size),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(start.node_rank),
        "GROUP_WORLD_SIZE": str(start.world_size // local),
        "NODE_RANK": str(start.node_rank),
        "ROLE_RANK": str(plan.rank),
        "ROLE_WORLD_SIZE": str(start.world_size),
        "MASTER_ADDR": start.store_host,
        "MASTER_PORT": str(start.store_port),
        "TORCHELASTIC_RESTART_COUNT": str(start.restarts),
        "TORCHELASTIC_RUN_ID": start.job,
        "MYRIAD_JOB_ID": start.job,
        "MYRIAD_JOB_NAME": start.job_name,
        "MYRIAD_GENERATION": str(start.generation),
        "MYRIAD_JOB_DIR": start.job_dir,
        "MYRIAD_NODE": node,
    }
    return env
