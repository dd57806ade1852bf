"""The eight ranks of ``benchmarks.checkpoint``: one training loop, saved in turn by each of the ways compared.

The model, its state, the batches and the step are the same objects for every way; before each way begins the initial
state is put back, so the losses must agree bit for bit. Each way is a class with ``after_step`` (what the loop calls
at the end of a step), ``before_update`` (called before the optimizer changes anything) and ``end`` (waits for what is
still being written). torch's ways wait for the save before, as its tutorials do, and use what its documentation
offers to be fast: cached plans, a stager kept from save to save, a process group of its own.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from myriad.spec.job import JobSpec
from myriad.spec.messages import ToWorker
from myriad.storage.datasets.loader import Batch
from myriad.storage.durable.checkpoint import load, save
from myriad.storage.memory.buffers import Buffers
from myriad.storage.memory.channel import Channel
from myriad.storage.memory.snapshot import open_snapshot, take_snapshot, verify
from myriad.training.device import pick_device
from myriad.training.durable import Policy
from myriad.training.mesh import Mesh, build_mesh
from myriad.training.optimizer import ShardedAdamW
from myriad.training.parallelize import build_model
from myriad.training.session import Session, connect
from myriad.training.shards import local
from myriad.training.state import State, copy_from_snapshot, raw, snapshot_entries, trainer_state
from myriad.training.step import Stepper

FIRST, STEPS, EVERY = (
    6,
    50,
    10,
)  # steps 6 to 55, saved at 10, 20, ... 50: no way gets its last save for nothing
SAVES = STEPS // EVERY
REPEATS = 5  # of each copy and each restore; the median counts
NEVER = 10**9
COMMIT_DEADLINE_S = 60.0


class Never:
    """No saves: the time all others are compared with."""

    def after_step(self, step: int) -> None:
        pass

    def before_update(self) -> None:
        pass

    def end(self) -> None:
        pass


class Ours(Never):
    """Myriad's session, as every loop uses it; the parent process plays the agent at the channel's other end."""

    def __init__(self, session: Session, place: Path, every: int, snapshot_every: int) -> None:
        self._session = session
        session.follow(Policy(place, fixed={"memory": snapshot_every, "peer": 0, "durable": every}))

    def after_step(self, step: int) -> None:
        with self._session.step(step):
            pass

    def end(self) -> None:
        """As ``finish``, without its save of the last step: written, committed and marked."""
        session, durable = self._session, self._session._durable
        session._tell(durable.settle())
        deadline = time.monotonic() + COMMIT_DEADLINE_S
        while durable.committed_step != durable.saved_step:
            assert time.monotonic() < deadline, "the parent did not commit"
            session._take_committed()
            time.sleep(0.001)
        session._tell(durable.mark_last())


class Torch(Never):
    """torch.distributed.checkpoint: ``save``."""

    def __init__(self, state: State, place: Path, group: dist.ProcessGroup) -> None:
        self._state, self._place, self._group = state, place, group

    def after_step(self, step: int) -> None:
        if step % EVERY == 0:
            self.save(step)

    def save(self, step: int) -> None:
        state_dict_saver.save(self._state, **self._how(step))

    def _how(self, step: int) -> dict[str, Any]:
        path = self._place / f"step-{step}"
        return {
            "storage_writer": filesystem.FileSystemWriter(path, sync_files=True),
            "planner": DefaultSavePlanner(enable_plan_caching=True),
            "process_group": self._group,
        }


class TorchThread(Torch):
    """``async_save`` in a thread, the state copied to kept buffers first."""

    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )

    def __init__(self, state: State, place: Path, group: dist.ProcessGroup) -> None:
        super().__init__(state, place, group)
        self._stager = DefaultStager(self.options)
        self._flying: Any = None

    def save(self, step: int) -> None:
        self._wait()
        self._flying = state_dict_saver.async_save(self._state, async_stager=self._stager, **self._how(step))

    def end(self) -> None:
        self._wait()
        self._stager.close()

    def _wait(self) -> None:
        if self._flying is not None:
            getattr(self._flying, "upload_completion", self._flying).result()


class TorchStaged(TorchThread):
    """``async_save`` whose copy overlaps the next step's forward and backward as well."""

    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=False
    )

    def before_update(self) -> None:
        if self._flying is not None:
            self._flying.staging_completion.result()


class Rank:
    """Model, optimizer and state of one rank, and the figures it has measured."""

    def __init__(self, rank: int, rendezvous: Path, place: Path, job: JobSpec, channel_fd: int) -> None:
        assert job.model is not None and job.optimizer is not None and job.data is not None
        torch.set_num_threads(1)
        torch.manual_seed(job.seed)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=job.layout.world,
            timeout=timedelta(seconds=120),
        )
        channel: Channel[ToWorker] = Channel.from_fd(channel_fd, ToWorker)
        self.rank, self.place, self.job = rank, place, job
        self.session = connect(channel)
        device = pick_device(rank)
        self.mesh: Mesh = build_mesh(job.layout, rank, device.type)
        model = build_model(job.model, self.mesh, device, job.seed)
        self.optimizer = ShardedAdamW(list(model.named_parameters()), job.optimizer)
        self.stepper = Stepper(job, model, self.optimizer, self.mesh, device)
        self.state = trainer_state(model, self.optimizer)
        self.session.restore_state(lambda: self.state)
        self.group: dist.ProcessGroup = dist.new_group(backend="gloo")
        self._way: Never = Never()
        update = self.optimizer.step

        def step(*given: Any) -> None:
            self._way.before_update()
            update(*given)

        self.optimizer.step = step  # type: ignore[method-assign]
        self.initial, self.bytes = self._sealed()

    def _sealed(self) -> tuple[int, int]:
        """A snapshot as an agent holds it once its worker is gone: (fd, bytes)."""
        buffers = Buffers()
        taken = take_snapshot(snapshot_entries(self.state), 0, {}, buffers, "bench")
        fd = os.dup(taken.buffer.fd)
        buffers.close()
        assert verify(fd, taken.size, taken.crc32)
        return fd, taken.size

    def batch(self, step: int) -> Batch:
        assert self.job.data is not None and self.job.model is not None
        rng = np.random.default_rng((step, self.mesh.dp_rank))
        shape = (self.job.data.global_batch // self.mesh.dp_size, self.job.data.sequence_length + 1)
        tokens = rng.integers(0, self.job.model.vocab_size, shape)
        return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), (), 0)

    def reset(self) -> None:
        with open_snapshot(self.initial) as snapshot:
            copy_from_snapshot(snapshot, self.state)
        self.optimizer.restored(0)

    def run(self, way: Never) -> dict[str, Any]:
        """FIRST .. FIRST + STEPS - 1 from the initial state: seconds until all is written, and the losses."""
        self.reset()
        self._way = way
        losses, steps_s = [], []
        dist.barrier()
        began = last = time.perf_counter()
        for step in range(FIRST, FIRST + STEPS):
            losses.append(self.stepper.run(step, self.batch(step)).loss.hex())
            way.after_step(step)
            now = time.perf_counter()
            steps_s.append(now - last)
            last = now
        way.end()
        dist.barrier()
        return {"seconds": time.perf_counter() - began, "losses": losses, "steps_s": steps_s}

    def run_way(self, name: str, turn: int) -> dict[str, Any]:
        """One of the ways by its name; its files are gone afterwards."""
        place = self.place / f"{name}-{turn}"
        ways: dict[str, Callable[[], Never]] = {
            "none": Never,
            "myriad": lambda: Ours(self.session, place, EVERY, NEVER),
            "snapshot": lambda: Ours(self.session, place, NEVER, EVERY),
            "dcp save": lambda: Torch(self.state, place, self.group),
            "dcp async_save, thread": lambda: TorchThread(self.state, place, self.group),
            "dcp async_save, staged": lambda: TorchStaged(self.state, place, self.group),
        }
        found = self.run(ways[name]())
        if self.rank == 0:
            shutil.rmtree(place, ignore_errors=True)
            os.sync()  # what one way has left to write is not the next one's
        dist.barrier()
        return found

    def copies(self) -> dict[str, Any]:
        """Bytes of this rank's state, and seconds of a snapshot, the first one, a copy to memory in use and one to new.

        Alone on the machine: the other ranks wait meanwhile.
        """
        parts = [raw(local(each)) for each in self.state.values()]
        kept = [np.empty_like(part) for part in parts]

        buffers = Buffers()

        def snapshot() -> None:
            taken = take_snapshot(snapshot_entries(self.state), 1, {}, buffers, "bench")
            buffers.release(taken.buffer.number, "bench")

        def first() -> None:
            fresh = Buffers()
            take_snapshot(snapshot_entries(self.state), 1, {}, fresh, "bench")
            fresh.close()

        def copy() -> None:
            for to, part in zip(kept, parts, strict=True):
                np.copyto(to, part)

        def new() -> None:
            _ = [local(each).clone() for each in self.state.values()]

        return {
            "bytes": sum(part.nbytes for part in parts),
            **{each.__name__: median_s(each) for each in (snapshot, first, copy, new)},
        }

    def restores(self) -> dict[str, float]:
        """Seconds until every rank has its state back, from its snapshot and from a checkpoint of the same bytes."""
        place = self.place / "restore"
        save(place, 1, 1, self.state, self.group, position=0, layout={})

        def memory() -> None:
            with open_snapshot(self.initial) as snapshot:
                copy_from_snapshot(snapshot, self.state)
            dist.barrier()

        def durable() -> None:
            load(place, 1, 1, self.state, process_group=self.group)
            dist.barrier()

        return {each.__name__: median_s(each) for each in (memory, durable)}


def median_s(do: Callable[[], None]) -> float:
    """Of REPEATS calls after one that does not count."""
    taken = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        do()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])
