"""What was measured of the machine a plan is for. The measuring is done elsewhere; here it is a value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Probe:
    """Rates of one machine. None: not measured, and what needs it is not predicted.

    ``gemm_flops_per_s`` is one worker's matrix product on one core (or accelerator) in float32,
    ``loopback_*`` one stream socket between two processes (latency: one way), ``storage_write_bytes_per_s`` everything written at once through
    fsync, ``memory_copy_bytes_per_s`` one worker's copy, ``fork_s`` one worker from request to its first
    line, ``template_s`` the template's imports (0 where it is warm). ``cores`` are those the probed machine
    lends to all workers together; with ``emulated`` every node of the cluster lives on that machine.
    """

    gemm_flops_per_s: float
    loopback_bytes_per_s: float
    loopback_latency_s: float
    cores: int
    emulated: bool
    storage_write_bytes_per_s: float | None = None
    memory_copy_bytes_per_s: float | None = None
    fork_s: float | None = None
    template_s: float = 0.0

    def __post_init__(self) -> None:
        rates = (
            self.gemm_flops_per_s,
            self.loopback_bytes_per_s,
            self.storage_write_bytes_per_s,
            self.memory_copy_bytes_per_s,
        )
        assert all(rate is None or rate > 0 for rate in rates) and self.cores >= 1
