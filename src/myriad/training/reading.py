"""How a rank of the built-in trainer gets its batches: by itself, or from a reader that is ahead of it.

One policy: what is in reach of a file system is read in the step, because a batch from the page cache costs less
than its handing over (docs/decisions/0011-reading.md); what has to be waited for is read ahead. ``data.prefetch``
says otherwise. Either way the batches are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from myriad.spec.job import JobSpec
from myriad.storage.datasets.ahead import ReadAhead
from myriad.storage.datasets.loader import Loader, Mixture
from myriad.storage.datasets.reader import Setup
from myriad.training.mesh import Mesh


@contextmanager
def batches(job: JobSpec, data: Mixture, mesh: Mesh, position: int) -> Iterator[Loader | ReadAhead]:
    """This rank's batches from ``position`` on. Raises DatasetError."""
    spec = job.data
    assert spec is not None
    if spec.batches_ahead == 0:
        yield Loader(
            data, job.seed, spec.global_batch, mesh.dp_rank, mesh.dp_size, position, on_end=spec.on_end
        )
        return
    setup = Setup(
        parts=tuple((part.path, part.weight) for part in spec.parts),
        sequence_length=spec.sequence_length,
        seed=job.seed,
        global_batch=spec.global_batch,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        position=position,
        on_end=spec.on_end,
        depth=spec.batches_ahead,
        cache=None if spec.cache is None else (spec.cache.directory, spec.cache.size),
    )
    with ReadAhead(setup) as ahead:
        yield ahead
