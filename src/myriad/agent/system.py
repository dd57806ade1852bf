"""Linux process primitives: fork and exec with a parent-death signal, groups, zombies.

Forking is done by the agent's only thread. A child dies with the agent (PR_SET_PDEATHSIG), leads a process
group of its own, and reports a failed exec through a pipe, so that "command not found" is a sentence and
not an exit code to be guessed at.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

# What a shell answers for these, so that scripts which look at exit codes keep working.
CODE_NOT_FOUND = 127
CODE_NOT_EXECUTABLE = 126


@dataclass(frozen=True, slots=True)
class Spawned:
    """``error`` says why the program could not be executed; the child then exits with ``code``."""

    pid: int
    error: str = ""
    code: int = 0


def become_subreaper() -> None:
    """Orphans of our workers become our children, so that they can be reaped and seen."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def spawn(
    argv: Sequence[str],
    env: Mapping[str, str],
    keep_fd: int,
    output: str | None,
    directory: str | None = None,
) -> Spawned:
    """Fork and exec ``argv`` as the leader of a new group, with ``keep_fd`` inherited.

    ``output``: file that standard output and error are appended to (None: ours). Raises OSError when
    the output file cannot be opened or the fork fails.
    """
    out = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) if output is not None else None
    reading, writing = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _exec(argv, env, keep_fd, out, directory, parent, writing)
    os.close(writing)
    if out is not None:
        os.close(out)
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)
    with os.fdopen(reading, "rb") as pipe:
        failure = pipe.read()
    if not failure:
        return Spawned(pid)
    number, _, what = failure.decode(errors="replace").partition(" ")
    return Spawned(pid, *_explain(int(number), what, argv[0]))


def _explain(number: int, what: str, program: str) -> tuple[str, int]:
    if what == "directory":
        return f"the working directory does not exist or cannot be entered: {os.strerror(number)}", 1
    if number in (errno.ENOENT, errno.ENOTDIR):
        return f"command not found: {program}; check its name and PATH on the nodes", CODE_NOT_FOUND
    return f"cannot execute {program}: {os.strerror(number)}", CODE_NOT_EXECUTABLE


def _exec(
    argv: Sequence[str],
    env: Mapping[str, str],
    keep_fd: int,
    out: int | None,
    directory: str | None,
    parent: int,
    writing: int,
) -> None:
    """The child's side; never returns."""
    what = "directory"
    try:
        os.setpgid(0, 0)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        if out is not None:
            os.dup2(out, 1)
            os.dup2(out, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.set_inheritable(keep_fd, True)
        for number in (signal.SIGPIPE, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        if directory:
            os.chdir(directory)
        what = "program"
        os.execvpe(argv[0], list(argv), dict(env))
    except OSError as error:
        os.write(writing, f"{error.errno} {what}".encode())
        code = CODE_NOT_FOUND if error.errno in (errno.ENOENT, errno.ENOTDIR) else CODE_NOT_EXECUTABLE
        os._exit(1 if what == "directory" else code)
    finally:
        os._exit(1)


def kill_group(leader: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Signal a process group, if there is anything left of it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def start_ticks(pid: int) -> int:
    """Clock ticks after boot at which the process started: with the pid, its identity."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def is_zombie_or_gone(pid: int) -> bool:
    """True when the process has ended by itself, whether or not it was waited for."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True


def living_groups() -> set[int]:
    """Process groups that have a member which is not a zombie, or a thread of one that has not ended yet.

    A thread in the kernel (in an fsync, say) ends only when that is done, and until then holds the process's memory.
    """
    found: set[int] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] not in (b"Z", b"X") or int(fields[17]) > 1:
            found.add(int(fields[2]))
    return found
