"""The HTTP client of a state's API: short deadlines, one retry policy, and errors as sentences.

A request is tried again only when that changes nothing: reads, and changes that carry an idempotency key or are
level-triggered (cancel, drain, down). The address and the token are read anew for each try, so that a server
that was restarted in between is found.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from myriad.cli.errors import EXIT_OF_CODE, CommandError, Exit
from myriad.runtime.paths import StateDir
from myriad.server.errors import no_cluster

if TYPE_CHECKING:
    import httpx2

CONNECT_S = 2.0  # the server is on this machine
ANSWER_S = 15.0  # the slowest answer waits for the controller's journal
TRIES = 3
PAUSE_S = 0.3  # before the second try; doubled before the third


class Unreachable(CommandError):
    """No server answers for a state."""

    def __init__(self, state: Path) -> None:
        super().__init__(no_cluster(state), Exit.UNREACHABLE)


class Client:
    """Requests to the API of one state."""

    def __init__(self, state: Path) -> None:
        self._state = state

    def get(self, path: str, **parameters: Any) -> dict[str, Any]:
        return self._send("GET", path, parameters, None, tries=TRIES)

    def post(self, path: str, body: dict[str, Any] | None = None, repeatable: bool = True) -> dict[str, Any]:
        return self._send("POST", path, {}, body or {}, tries=TRIES if repeatable else 1)

    def stream(self, path: str, **parameters: Any) -> Iterator[bytes]:
        """The pieces of a streamed answer as they come; CommandError when it breaks off."""
        import httpx2

        with self._open(endless=True) as client:
            try:
                with client.stream("GET", path, params=_present(parameters)) as response:
                    if response.status_code != 200:
                        response.read()
                        raise self._refusal(response)
                    yield from response.iter_bytes()
            except httpx2.ConnectError:
                raise Unreachable(self._state) from None
            except httpx2.TransportError:
                raise CommandError(
                    "the connection to the cluster broke off; run the command again", Exit.UNREACHABLE
                ) from None

    def _send(
        self, method: str, path: str, parameters: dict[str, Any], body: dict[str, Any] | None, tries: int
    ) -> dict[str, Any]:
        import httpx2

        for number in range(1, tries + 1):
            try:
                with self._open() as client:
                    response = client.request(method, path, params=_present(parameters), json=body)
                break
            except httpx2.TransportError as error:
                if number == tries:
                    raise self._gone(error) from None
                time.sleep(PAUSE_S * 2 ** (number - 1))
        if response.status_code != 200:
            raise self._refusal(response)
        answer: dict[str, Any] = response.json()
        return answer

    def _open(self, endless: bool = False) -> httpx2.Client:
        """``verify`` and ``trust_env`` are off because the address is http on the loopback: no TLS, no proxy."""
        import httpx2

        entry = server_entry(self._state)
        if entry is None:
            raise Unreachable(self._state)
        return httpx2.Client(
            base_url=f"{entry['url']}/api/v1",
            headers={"Authorization": f"Bearer {entry['token']}"},
            timeout=httpx2.Timeout(ANSWER_S, connect=CONNECT_S, read=None if endless else ANSWER_S),
            verify=False,
            trust_env=False,
        )

    def _gone(self, error: Exception) -> CommandError:
        import httpx2

        if isinstance(error, httpx2.ReadTimeout):
            return CommandError(
                f"the cluster of state {self._state} did not answer in {ANSWER_S:.0f} s; see its server.log",
                Exit.UNREACHABLE,
            )
        return Unreachable(self._state)

    def _refusal(self, response: httpx2.Response) -> CommandError:
        try:
            error = response.json()["error"]
            code, message = str(error["code"]), str(error["message"])
        except (ValueError, KeyError, TypeError):
            code = message = ""
        if not code and response.status_code >= 500:
            return CommandError(
                f"the server of state {self._state} failed ({response.status_code}); see its server.log"
            )
        if not code or code == "unauthorized":
            # Something else listens there now: the file was left behind by a server that was killed.
            return Unreachable(self._state)
        return CommandError(message, EXIT_OF_CODE.get(code, Exit.FAILED))


def server_entry(state: Path) -> dict[str, Any] | None:
    """What server.json says; None without one."""
    try:
        entry: dict[str, Any] = json.loads(StateDir(state).server_file.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError):
        return None
    return entry


def job_path(ref: str, action: str = "") -> str:
    """The path of a job, whose name may hold anything; slashes stay, since the API takes them in a name.

    Dots are quoted too: clients resolve ``..`` in an address as in a file's path.
    """
    return f"/jobs/{quote(ref).replace('.', '%2E')}{action}"


def node_path(name: str, action: str) -> str:
    return f"/nodes/{quote(name, safe='')}{action}"


def _present(parameters: dict[str, Any]) -> dict[str, Any]:
    """Without those that are None; booleans as JSON writes them."""
    return {
        key: str(value).lower() if isinstance(value, bool) else value
        for key, value in parameters.items()
        if value is not None
    }
