"""The private door to the controller: one JSON line each way over a Unix socket in the state folder.

Only processes of the same user may open it (mode 0600 and peer credentials). Every request is answered
after the journal's commit, so an answer is a promise.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from myriad.runtime.paths import StateDir

# A commit takes milliseconds; a controller that does not answer in this time is in trouble.
ANSWER_DEADLINE_S = 30.0
# One request or answer; a job specification is a few kilobytes.
LINE_MAX_BYTES = 4 * 1024 * 1024

WENT_AWAY = "the controller went away before it answered; ask again"


class ControllerUnreachable(Exception):
    """Nobody answers on the control socket."""


class AdminRefused(Exception):
    """The controller's refusal: ``code`` is invalid, not_found or refused; ``message`` one sentence."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """An address for ``path`` that fits the 108 bytes of a Unix socket address."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


class AdminClient:
    """Blocking client; one connection per call."""

    def __init__(self, state_dir: StateDir, deadline_s: float = ANSWER_DEADLINE_S) -> None:
        self._path = state_dir.control_socket
        self._deadline_s = deadline_s

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        """The controller's answer. Raises ControllerUnreachable or AdminRefused."""
        request = json.dumps({"op": op, **arguments}).encode() + b"\n"
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
                link.settimeout(self._deadline_s)
                with socket_address(self._path) as address:
                    link.connect(address)
                link.sendall(request)
                with link.makefile("rb") as lines:
                    line = lines.readline(LINE_MAX_BYTES)
        except TimeoutError as error:
            raise ControllerUnreachable(
                f"the controller did not answer within {self._deadline_s:g} s; see {self._path.parent}/controller.log"
            ) from error
        except (ConnectionResetError, BrokenPipeError) as error:
            raise ControllerUnreachable(WENT_AWAY) from error
        except OSError as error:
            raise ControllerUnreachable(f"no controller is running for state {self._path.parent}") from error
        if not line.endswith(b"\n"):
            raise ControllerUnreachable(WENT_AWAY)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise AdminRefused(answer["error"]["code"], answer["error"]["message"])
        return answer
