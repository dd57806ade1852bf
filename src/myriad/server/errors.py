"""What the API answers when it cannot do what was asked: a status, a code, and one sentence."""

from __future__ import annotations

from pathlib import Path

from myriad.runtime.admin import AdminRefused, ControllerUnreachable

# The HTTP status of each code; the command line maps the codes to exit codes.
STATUS_OF_CODE = {"invalid": 400, "unauthorized": 401, "refused": 403, "not_found": 404, "unreachable": 503}


class ApiError(Exception):
    """Ends a request with ``{"error": {"code", "message"}}``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @property
    def status(self) -> int:
        return STATUS_OF_CODE.get(self.code, 500)


def no_cluster(state: Path) -> str:
    """The sentence for a state without a running controller or server."""
    return f'no cluster is running for state {state}; start one with "myriad up --cluster cluster.yaml"'


def from_admin(error: AdminRefused | ControllerUnreachable, state: Path) -> ApiError:
    """The controller's refusal, or its absence, as an answer."""
    if isinstance(error, AdminRefused):
        return ApiError(error.code, error.message)
    absent = isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, TimeoutError)
    return ApiError("unreachable", no_cluster(state) if absent else str(error))
