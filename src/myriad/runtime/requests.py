"""The control socket: requests of the API server, checked here, answered once they are journaled."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import ValidationError

from myriad.control.events import (
    AnyEvent,
    CancelRequested,
    DownRequested,
    DrainRequested,
    InjectRequested,
    JobSubmitted,
    UndrainRequested,
)
from myriad.control.records import ClusterRecord, JobRecord, NodeRecord
from myriad.control.state import State
from myriad.runtime.admin import LINE_MAX_BYTES, AdminRefused, socket_address
from myriad.runtime.engine import Engine
from myriad.runtime.paths import StateDir
from myriad.spec import admission
from myriad.spec.cluster import ClusterSpec
from myriad.spec.errors import SpecError, sentence
from myriad.spec.job import JobSpec

log = logging.getLogger("myriad.requests")

# How long a leaving controller waits for its last answers to be read.
ANSWER_FLUSH_S = 2.0

INJECTIONS = ("kill-node", "kill-worker", "kill-agent", "stop")


class Requests:
    """Serves the control socket. ``commit`` handles an event and returns after the journal's commit."""

    def __init__(
        self,
        state: Callable[[], State],
        engine: Engine,
        commit: Callable[[AnyEvent], Awaitable[None]],
        status: Callable[[], dict[str, Any]],
    ) -> None:
        self._state = state
        self._engine = engine
        self._commit = commit
        self._status = status
        self._server: asyncio.Server | None = None
        self._answering: set[asyncio.Task[Any]] = set()

    async def listen(self, state_dir: StateDir) -> None:
        path = state_dir.control_socket
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with socket_address(path) as address:
            listener.bind(address)
        os.chmod(path, 0o600)
        self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=LINE_MAX_BYTES)

    async def close(self) -> None:
        """Stop listening; requests that were journaled still get their answer."""
        if self._server is not None:
            self._server.close()
        if self._answering:
            await asyncio.wait(self._answering, timeout=ANSWER_FLUSH_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            if _peer_uid(writer) != os.getuid():
                return
            line = await reader.readline()
            if not line:
                return
            try:
                request = json.loads(line)
                if not isinstance(request, dict):
                    raise AdminRefused("invalid", "a request is a JSON object with the key op")
                answer = await self._answer(request)
            except KeyError as error:
                answer = {"error": {"code": "invalid", "message": f"the request lacks the key {error}"}}
            except AdminRefused as refusal:
                answer = {"error": {"code": refusal.code, "message": refusal.message}}
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        except (OSError, ValueError) as error:
            log.warning("a request failed: %s", error)
        finally:
            self._answering.discard(task)
            writer.close()

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        state = self._state()
        match request.get("op"):
            case "ping":
                return self._status()
            case "submit":
                return await self._submit(state, str(request["request"]), request["spec"])
            case "cancel":
                job = str(request["job"])
                if state.get(JobRecord, job) is None:
                    raise AdminRefused("not_found", f"there is no job {job}")
                await self._commit(CancelRequested(job=job))
            case "drain":
                node = self._node(state, request["node"])
                await self._commit(DrainRequested(node=node, reason=str(request.get("reason") or "")))
            case "undrain":
                await self._commit(UndrainRequested(node=self._node(state, request["node"])))
            case "inject":
                await self._inject(request["kind"], str(request["target"]))
            case "down":
                await self._commit(DownRequested(cancel_jobs=bool(request.get("cancel_jobs"))))
            case other:
                raise AdminRefused("invalid", f"the controller knows no request {other!r}")
        return {"ok": True}

    def _node(self, state: State, name: Any) -> str:
        if state.get(NodeRecord, str(name)) is None:
            raise AdminRefused("not_found", f"the cluster has no node {name}; see: myriad nodes")
        return str(name)

    async def _submit(self, state: State, request: str, raw: Any) -> dict[str, Any]:
        cluster = state.get(ClusterRecord, "cluster")
        assert cluster is not None
        try:
            spec = JobSpec.model_validate(raw)
            admission.check(spec, ClusterSpec.model_validate(cluster.spec))
        except SpecError as error:
            raise AdminRefused("invalid", str(error)) from error
        except ValidationError as error:
            raise AdminRefused("invalid", sentence(error, JobSpec, "job")) from error
        await self._commit(JobSubmitted(request=request, spec=spec.model_dump(mode="json")))
        return {"job": state.requests[request]}

    async def _inject(self, kind: Any, target: str) -> None:
        if kind not in INJECTIONS:
            raise AdminRefused("invalid", f"{kind!r} is no fault; use one of {', '.join(INJECTIONS)}")
        refusal = self._engine.check_inject(kind, target)
        if refusal is not None:
            raise AdminRefused("not_found", refusal)
        await self._commit(InjectRequested(kind=kind, target=target))


def _peer_uid(writer: asyncio.StreamWriter) -> int:
    link: socket.socket = writer.get_extra_info("socket")
    packed = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", packed)[1])
