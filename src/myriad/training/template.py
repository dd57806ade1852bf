"""The process that has already imported PyTorch and forks a worker in milliseconds.

    python -m myriad.training.template        # MYRIAD_TEMPLATE_FD: the agent's end of a packet socket

Method: importing torch and what a first step drags in takes about 3 s and a fork 5 ms, so the agent keeps
one such process and asks it for workers and rendezvous stores. It stays single-threaded, because a child
of a threaded process may find a lock held by a thread it does not have: that is asserted before every fork.
It never initialises an accelerator. Children share its memory until they write (70 of 290 MB are a worker's own).

When the agent's end closes, however it died, every child's process group is killed; when the template
itself dies, the kernel kills its children (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from myriad.spec.messages import ChildExited, Forked, ForkStore, ForkWorker, TemplateReady, ToTemplate
from myriad.storage.memory.channel import Channel, ChannelClosed

TEMPLATE_VARIABLE = "MYRIAD_TEMPLATE_FD"
OPEN_FILES_LIMIT = 1 << 16  # file numbers above it are not looked for: the template has a few dozen
STORE_START_TIMEOUT_MS = 10_000  # a store listens within milliseconds
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Child:
    """One forked process; ``pidfd`` becomes readable when it has ended."""

    key: str
    pid: int
    pidfd: int


class Template:
    """Forks on request until the agent's end of ``channel`` closes."""

    def __init__(self, channel: Channel[ToTemplate]) -> None:
        self._channel = channel
        self._children: dict[int, Child] = {}  # by pidfd
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)

    def serve(self) -> None:
        """Handle requests and report exits; returns once the agent is gone and the children are dead."""
        try:
            while True:
                for fd, _ in self._poll.poll():
                    if fd in self._children:
                        self._reap(self._children[fd])
                    else:
                        self._handle()
        except ChannelClosed:
            self._kill_all()

    def _handle(self) -> None:
        received = self._channel.recv_nowait()
        if received is None:
            return
        request, fds = received
        if isinstance(request, ForkWorker):
            (channel_fd,) = fds
            pid = self._fork(request.key, lambda: _worker(request, channel_fd), keep=channel_fd)
            os.close(channel_fd)
            self._channel.send(Forked(key=request.key, pid=pid))
        else:
            self._start_store(request)

    def _start_store(self, request: ForkStore) -> None:
        reading, writing = os.pipe()
        pid = self._fork(request.key, lambda: _store(request, writing), keep=writing)
        os.close(writing)
        try:
            poll = select.poll()
            poll.register(reading, select.POLLIN)
            port = os.read(reading, 16) if poll.poll(STORE_START_TIMEOUT_MS) else b""
        finally:
            os.close(reading)
        if port:
            self._channel.send(Forked(key=request.key, pid=pid, port=int(port)))
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # its exit is reported instead

    def _fork(self, key: str, body: Callable[[], int], keep: int) -> int:
        """Fork a child that runs ``body`` with no file of ours open but ``keep``, and exits with its result."""
        assert len(os.listdir("/proc/self/task")) == 1, "the template must have one thread when it forks"
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_child(parent, keep)
            _run_and_exit(body)
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # both sides do it: whoever comes first
        child = Child(key, pid, os.pidfd_open(pid))
        self._children[child.pidfd] = child
        self._poll.register(child.pidfd, select.POLLIN)
        return pid

    def _reap(self, child: Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        self._poll.unregister(child.pidfd)
        os.close(child.pidfd)
        del self._children[child.pidfd]
        code = os.waitstatus_to_exitcode(status)
        self._channel.send(ChildExited(key=child.key, pid=child.pid, code=code))

    def _kill_all(self) -> None:
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        for child in self._children.values():
            os.waitpid(child.pid, 0)


def _become_child(parent: int, keep: int) -> None:
    os.setpgid(0, 0)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above: no signal will come
        os._exit(1)
    os.closerange(3, keep)
    os.closerange(keep + 1, max(keep + 1, OPEN_FILES_LIMIT))


def _run_and_exit(body: Callable[[], int]) -> NoReturn:
    """Leave without the parent's exit handlers, whatever ``body`` does."""
    code = 1
    try:
        code = body()
    except BaseException:  # noqa: BLE001  the last one there is
        traceback.print_exc(file=sys.stderr)
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _worker(request: ForkWorker, channel_fd: int) -> int:
    log = os.open(request.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.environ.update(request.env)
    from myriad.training.worker import main

    return main(request.spec, channel_fd)


def _store(request: ForkStore, port_fd: int) -> int:
    """Serve one generation's rendezvous on a port of ``request.host`` alone, until killed."""
    from torch._C._distributed_c10d import TCPStore

    listening = socket.create_server((request.host, 0))
    port = listening.getsockname()[1]
    store = TCPStore(
        request.host,
        port,
        world_size=None,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    os.write(port_fd, str(port).encode())
    os.close(port_fd)
    while store is not None:
        signal.pause()
    return 0


def main() -> int:
    """Import everything, say so, and serve."""
    began = time.monotonic()
    # Their thread pools would start at import and break the rule of one thread.
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    channel: Channel[ToTemplate] = Channel.from_fd(int(os.environ.pop(TEMPLATE_VARIABLE)), ToTemplate)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C on a terminal is the agent's business
    from myriad.training import warm

    warm.up()
    gc.collect()
    gc.freeze()  # children that never free the template's objects never copy their pages
    channel.send(TemplateReady(import_s=time.monotonic() - began))
    Template(channel).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
