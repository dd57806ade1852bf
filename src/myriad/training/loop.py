"""The built-in trainer: from a job to its last step.

Method: everything that can be refused is refused before any rank waits for another (data set, vocabulary);
then mesh, model, restore, and one plain loop. Saving, timing and reporting are the session's, the same one
that any other loop uses. At the end the hash of all parameters and moments goes into ``result.json``, so two
runs can be compared by one line.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from myriad.spec import arithmetic
from myriad.spec.job import JobSpec
from myriad.storage.datasets.cache import BlockCache
from myriad.storage.datasets.index import DatasetError
from myriad.storage.datasets.loader import Mixture, open_mixture
from myriad.storage.durable.manifest import MODEL_KEY, SEQUENCE_LENGTH_KEY
from myriad.training.device import pick_device
from myriad.training.durable import Policy
from myriad.training.mesh import Mesh, axis_sizes, build_mesh
from myriad.training.optimizer import ShardedAdamW
from myriad.training.parallelize import build_model
from myriad.training.reading import batches
from myriad.training.rendezvous import join
from myriad.training.session import Session, Step
from myriad.training.state import mesh_sha256, trainer_state
from myriad.training.step import Stepper, StepResult


def train(job: JobSpec, session: Session) -> None:
    """Run ``job`` from where ``session`` says to its last step. All ranks of the job call it."""
    assert job.model is not None and job.optimizer is not None and job.data is not None
    welcome = session.welcome
    with ExitStack() as stack:
        data = stack.enter_context(open_data(job))
        device = pick_device(welcome.local_rank)
        torch.manual_seed(job.seed)
        join(welcome.rank, welcome.world_size, welcome.generation, device)
        mesh = build_mesh(job.layout, welcome.rank, device.type)
        model = build_model(job.model, mesh, device, job.seed)
        optimizer = ShardedAdamW(list(model.named_parameters()), job.optimizer)
        stepper = Stepper(job, model, optimizer, mesh, device)
        state = trainer_state(model, optimizer)
        session.follow(policy(job, welcome.job_dir))
        session.phase("rendezvous")
        start = session.restore_state(lambda: state)
        optimizer.restored(start)
        loader = stack.enter_context(batches(job, data, mesh, session.position))
        for number in range(start + 1, job.optimizer.steps + 1):
            with session.step(number) as step:
                with step.data():
                    batch = loader.next()
                result = stepper.run(number, batch)
                first_holder = mesh.first_stage and mesh.is_first("tp")
                step.consumed(batch.sample_ids if first_holder else (), loader.position)
                report(job, mesh, step, result)
            write_log(job, step, session.last_step_s)
        with session.saving():
            write_result(Path(welcome.job_dir), job, mesh_sha256(state), welcome.rank)
        session.finish()
    dist.destroy_process_group()


def open_data(job: JobSpec) -> Mixture:
    """The job's data set, or the mixture of several. Raises DatasetError, before any rank has waited for another."""
    assert job.model is not None and job.data is not None
    parts = [(part.path, part.weight) for part in job.data.parts]
    cache = job.data.cache if job.data.batches_ahead == 0 else None  # else it is the reader's
    kept = None if cache is None else BlockCache(Path(cache.directory), cache.size)
    mixture = open_mixture(parts, job.data.sequence_length, job.data.packing == "documents", kept)
    for dataset in mixture.datasets:
        if dataset.vocab_size is not None and dataset.vocab_size > job.model.vocab_size:
            mixture.close()
            raise DatasetError(
                f"the data set {dataset.index.prefix} has token ids up to {dataset.vocab_size - 1}, and "
                f"model.vocab_size is {job.model.vocab_size}: set model.vocab_size to at least {dataset.vocab_size}"
            )
    return mixture


def policy(job: JobSpec, job_dir: str) -> Policy:
    """When and where this job saves."""
    assert job.model is not None and job.optimizer is not None and job.data is not None
    checkpoint = job.checkpoint
    return Policy(
        directory=Path(checkpoint.directory) if checkpoint.directory else Path(job_dir) / "checkpoints",
        keep=checkpoint.keep,
        remote=checkpoint.remote,
        last_step=job.optimizer.steps,
        layout=axis_sizes(job.layout),
        meta={MODEL_KEY: job.model.model_dump(mode="json"), SEQUENCE_LENGTH_KEY: job.data.sequence_length},
    )


def report(job: JobSpec, mesh: Mesh, step: Step, result: StepResult) -> None:
    """The global figures, from exactly one rank: last stage, tp 0, first data-parallel rank."""
    if not (mesh.last_stage and mesh.is_first("tp", "dp_replicate", "dp_shard")):
        return
    assert job.model is not None and job.data is not None
    step.report(
        loss=result.loss,
        tokens=result.tokens,
        flops=float(arithmetic.step_flops(job.model, job.data, "causal")),
        grad_norm=result.grad_norm,
    )


def write_log(job: JobSpec, step: Step, seconds: float) -> None:
    """One line a step in the log of the rank that knows the loss."""
    reported = step.reported
    if "loss" in reported and job.optimizer is not None:
        print(
            f"step {step.number} of {job.optimizer.steps}: loss {reported['loss']:.4f}, "
            f"gradient norm {reported['grad_norm']:.4f}, {reported['tokens'] / seconds:.0f} tokens/s",
            flush=True,
        )


def write_result(job_dir: Path, job: JobSpec, sha256: str, rank: int) -> None:
    """Rank 0 writes ``result.json``, whole or not at all."""
    if rank != 0:
        return
    assert job.optimizer is not None
    result: dict[str, Any] = {
        "final_sha256": sha256,
        "steps": job.optimizer.steps,
        "mesh": axis_sizes(job.layout),
    }
    temporary = job_dir / ".result.json.tmp"
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    os.replace(temporary, job_dir / "result.json")
