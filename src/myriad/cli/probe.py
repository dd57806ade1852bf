"""What this machine can do, measured in at most 2 s: the planner's figures and the peak in MFU.

Method: each figure is taken in a forked child (numpy's threads and a socket's peer stay out of this process) as the
best of several rounds, because other processes only ever slow a round down. The import of torch, which is what a
template's start costs, runs beside them and is cut off at the limit: its figure is then a lower bound, as the
planner's start-up time is. Trade-off: a probe this short is good to about 10 %, and takes about 1 s without torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from myriad.planner import Probe

LIMIT_S = 2.0  # of the whole probe
ROUNDS_S = 0.15  # of the rounds of one figure
GEMM_SIZE = 512  # square, float32: large enough for full speed, 5 ms a round at 50 GFLOP/s
COPY_BYTES = 16 * 2**20
LINK_BYTES = 8 * 2**20
WRITE_BYTES = 8 * 2**20
WRITE_ROUNDS = 3
PINGS = 100
FORKS = 5


def probe(folder: Path) -> Probe:
    """Measure; ``folder`` is where durable data will be written."""
    begun = time.monotonic()
    template = _start_torch_import()
    try:
        link = _in_child(_loopback)
        figures = Probe(
            gemm_flops_per_s=_in_child(_gemm_flops_per_s),
            loopback_bytes_per_s=link["bytes_per_s"],
            loopback_latency_s=link["latency_s"],
            cores=len(os.sched_getaffinity(0)),
            emulated=True,  # the local engine is the only one: every node is this machine
            storage_write_bytes_per_s=_write_bytes_per_s(folder),
            memory_copy_bytes_per_s=_in_child(_copy_bytes_per_s),
            fork_s=min(_fork_s() for _ in range(FORKS)),
            template_s=_torch_import_s(template, begun),
        )
    finally:
        if template is not None:
            template.kill()
            template.wait()
    return figures


def _in_child(measure: Callable[[], Any]) -> Any:
    """The result of ``measure`` in a forked child that holds one core."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
            os.write(writing, json.dumps(measure()).encode())
            os._exit(0)
        finally:
            os._exit(1)  # a child must never return into its parent's code
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    assert answer, f"the measurement {measure.__name__} failed"
    return json.loads(answer)


def _best_s(one_round: Callable[[], object]) -> float:
    """Seconds of the fastest round within ROUNDS_S; one round at least."""
    until, best_s = time.perf_counter() + ROUNDS_S, float("inf")
    while True:
        begun = time.perf_counter()
        one_round()
        ended = time.perf_counter()
        best_s = min(best_s, ended - begun)
        if ended >= until:
            return best_s


def _gemm_flops_per_s() -> float:
    import numpy as np

    a = np.ones((GEMM_SIZE, GEMM_SIZE), np.float32)
    product = np.empty_like(a)
    return 2 * GEMM_SIZE**3 / _best_s(lambda: np.matmul(a, a, out=product))


def _copy_bytes_per_s() -> float:
    source, target = bytearray(COPY_BYTES), memoryview(bytearray(COPY_BYTES))

    def copy() -> None:
        target[:] = source

    return COPY_BYTES / _best_s(copy)


def _loopback() -> dict[str, float]:
    """One stream socket between two processes: bytes a second, and seconds one way."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pid = os.fork()
        if pid == 0:
            try:
                _echo(listener.getsockname()[1])
            finally:
                os._exit(0)
        link, _ = listener.accept()
    with link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        latency_s = min(_round_trip_s(link, b"x") for _ in range(PINGS)) / 2
        block = bytes(LINK_BYTES)
        bytes_per_s = LINK_BYTES / _best_s(lambda: _send_block(link, block))
    os.waitpid(pid, 0)
    return {"bytes_per_s": bytes_per_s, "latency_s": latency_s}


def _echo(port: int) -> None:
    """The peer: every ping is answered, and every block by one byte at its end."""
    os.sched_setaffinity(0, {max(_all_cores())})
    buffer = memoryview(bytearray(2**20))
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PINGS):
            link.recv(1)
            link.sendall(b"x")
        got = 0
        while count := link.recv_into(buffer):
            got += count
            if got % LINK_BYTES == 0:
                link.sendall(b"x")


def _all_cores() -> set[int]:
    """The cores of the probing process, of which its child holds only the first."""
    return os.sched_getaffinity(os.getppid()) | os.sched_getaffinity(0)


def _round_trip_s(link: socket.socket, ping: bytes) -> float:
    begun = time.perf_counter()
    link.sendall(ping)
    link.recv(1)
    return time.perf_counter() - begun


def _send_block(link: socket.socket, block: bytes) -> None:
    link.sendall(block)
    link.recv(1)


def _write_bytes_per_s(folder: Path) -> float:
    """Written through fsync where the state lives; the file has no name and leaves nothing behind."""
    block = bytes(WRITE_BYTES)
    best_s = float("inf")
    for _ in range(WRITE_ROUNDS):
        file = folder / f".probe.{os.getpid()}"
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            file.unlink()
            begun = time.perf_counter()
            os.write(descriptor, block)
            os.fsync(descriptor)
            best_s = min(best_s, time.perf_counter() - begun)
        finally:
            os.close(descriptor)
    return WRITE_BYTES / best_s


def _fork_s() -> float:
    """From the request to a child's first line."""
    reading, writing = os.pipe()
    begun = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        os.write(writing, b"x")
        os._exit(0)
    os.read(reading, 1)
    seconds = time.perf_counter() - begun
    os.close(reading)
    os.close(writing)
    os.waitpid(pid, 0)
    return seconds


def _start_torch_import() -> subprocess.Popen[bytes] | None:
    """None where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        return None
    command = [sys.executable, "-c", "import torch"]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def _torch_import_s(template: subprocess.Popen[bytes] | None, begun: float) -> float:
    """Seconds the import took, or has taken at the limit."""
    if template is None:
        return 0.0
    try:
        template.wait(timeout=max(0.0, begun + LIMIT_S - time.monotonic()))
    except subprocess.TimeoutExpired:
        return LIMIT_S
    return time.monotonic() - begun
