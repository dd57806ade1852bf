"""How a command ends when it cannot do what was asked: one sentence on stderr and an exit code with a meaning."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes; commands that wait for a job return the job's own code besides."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    REFUSED = 4
    UNREACHABLE = 5
    TIMED_OUT = 124
    INTERRUPTED = 130
    TERMINATED = 143


# The API's codes as exit codes.
EXIT_OF_CODE = {
    "invalid": Exit.USAGE,
    "not_found": Exit.NOT_FOUND,
    "refused": Exit.REFUSED,
    "unauthorized": Exit.REFUSED,
    "unreachable": Exit.UNREACHABLE,
}


class CommandError(Exception):
    """Ends a command: ``str(error)`` is the sentence, ``code`` the exit code."""

    def __init__(self, message: str, code: int = Exit.FAILED) -> None:
        super().__init__(message)
        self.code = int(code)


class Terminated(BaseException):
    """SIGTERM, raised where Ctrl-C would raise KeyboardInterrupt, so that both clean up alike."""
