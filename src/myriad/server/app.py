"""The HTTP API of one state directory.

Method: a request opens the controller's database read-only, makes its view, and closes it; endpoints are plain
functions that FastAPI runs on its threads, so a slow disk holds up one request and not the others. What changes
something goes to the controller over its Unix socket and is answered once it is journaled. Every request carries
the bearer token of ``server.json``. Followed streams (logs, events) poll and hold no thread while they wait.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from myriad.control.records import JobRecord, NodeRecord
from myriad.runtime.admin import AdminClient, AdminRefused, ControllerUnreachable
from myriad.runtime.paths import StateDir
from myriad.runtime.store import StateReader
from myriad.server import logs, timeline, views
from myriad.server.errors import ApiError, from_admin
from myriad.server.report_source import job_report
from myriad.server.why import WhyView, why

PING_DEADLINE_S = 2.0  # a view does without what only the controller knows, rather than wait longer
MAX_TAIL_LINES = 1_000_000  # of each rank: more is the whole file


class Body(BaseModel):
    """Base of request bodies; an unknown key is refused."""

    model_config = ConfigDict(extra="forbid")


class SubmitBody(Body):
    """``request`` is the client's idempotency key; ``spec`` is ``JobSpec.model_dump(mode="json")``."""

    request: str
    spec: dict[str, Any]


class DrainBody(Body):
    reason: str = ""


class InjectBody(Body):
    kind: str
    target: str


class DownBody(Body):
    cancel_jobs: bool = False


class Api:
    """The endpoints of one state directory."""

    def __init__(self, state: StateDir) -> None:
        self.state = state

    @contextmanager
    def reading(self) -> Iterator[StateReader]:
        """A look at the records, for this thread only."""
        if not (self.state.journal.exists() and self.state.reports.exists()):
            raise ApiError(
                "unreachable", f"the controller of state {self.state.root} has not started yet; try again"
            )
        with StateReader(self.state) as reader:
            yield reader

    @contextmanager
    def moment(self) -> Iterator[views.Moment]:
        with self.reading() as reader:
            yield views.Moment(reader, time.time())

    def admin(self, op: str, **arguments: Any) -> dict[str, Any]:
        try:
            return AdminClient(self.state).call(op, **arguments)
        except (AdminRefused, ControllerUnreachable) as error:
            raise from_admin(error, self.state.root) from None

    def ping(self) -> dict[str, Any] | None:
        """The controller's answer, or None when it is not there."""
        try:
            return AdminClient(self.state, deadline_s=PING_DEADLINE_S).call("ping")
        except (AdminRefused, ControllerUnreachable):
            return None

    # ------------------------------------------------------------ reading

    def cluster(self) -> views.ClusterView:
        answer = self.ping()
        with self.moment() as at:
            return views.cluster_view(at, controller=answer is not None)

    def nodes(self) -> dict[str, list[views.NodeView]]:
        answer = self.ping() or {}
        silent_s = {name: float(node["silent_s"]) for name, node in answer.get("nodes", {}).items()}
        with self.moment() as at:
            return {"nodes": views.node_views(at, silent_s)}

    def jobs(self, ended: bool = True) -> dict[str, list[views.JobSummary]]:
        with self.moment() as at:
            return {"jobs": views.job_summaries(at, with_ended=ended)}

    def job(self, ref: str) -> views.JobView:
        with self.moment() as at:
            return views.job_view(at, find_job(at.reader, ref))

    def why(self, ref: str) -> WhyView:
        with self.reading() as reader:
            return why(reader, find_job(reader, ref))

    def report(self, ref: str, reference: str | None = None) -> dict[str, Any]:
        with self.moment() as at:
            beside = None if reference is None else find_job(at.reader, reference)
            return job_report(self.state, at, find_job(at.reader, ref), beside)

    def logs(
        self,
        ref: str,
        rank: Annotated[int | None, Query(ge=0)] = None,
        tail: Annotated[int | None, Query(ge=0, le=MAX_TAIL_LINES)] = None,
        follow: bool = False,
    ) -> StreamingResponse:
        with self.reading() as reader:
            job = find_job(reader, ref)
        if rank is not None and job.world_size and rank >= job.world_size:
            raise ApiError(
                "not_found", f"{job.id} has ranks 0 to {job.world_size - 1}; there is no rank {rank}"
            )
        folder = self.state.job_dir(job.id) / "logs"
        content = logs.stream(logs.JobLogs(folder, rank, tail, follow), lambda: self.is_final(job.id), follow)
        return StreamingResponse(content, media_type="text/plain; charset=utf-8")

    def events(
        self,
        job: str | None = None,
        node: str | None = None,
        after: Annotated[int, Query(ge=0)] = 0,
        follow: bool = False,
    ) -> Any:
        with self.reading() as reader:
            job_id = find_job(reader, job).id if job is not None else None
            if node is not None and reader.record(NodeRecord, node) is None:
                raise no_such_node(node)
            if not follow:
                return {"events": list(timeline.Timeline(job_id, node, after).read(reader))}
        lines = timeline.stream(timeline.Timeline(job_id, node, after), self.reading)
        return StreamingResponse(lines, media_type="application/x-ndjson")

    def is_final(self, job: str) -> bool:
        with self.reading() as reader:
            record = reader.record(JobRecord, job)
            return record is not None and record.status.final

    # ------------------------------------------------------------ changing

    def submit(self, body: SubmitBody) -> dict[str, Any]:
        return self.admin("submit", request=body.request, spec=body.spec)

    def cancel(self, ref: str) -> dict[str, Any]:
        with self.reading() as reader:
            job = find_job(reader, ref).id
        return self.admin("cancel", job=job)

    def drain(self, name: str, body: DrainBody) -> dict[str, Any]:
        return self.admin("drain", node=name, reason=body.reason)

    def undrain(self, name: str) -> dict[str, Any]:
        return self.admin("undrain", node=name)

    def inject(self, body: InjectBody) -> dict[str, Any]:
        return self.admin("inject", kind=body.kind, target=body.target)

    def down(self, body: DownBody) -> dict[str, Any]:
        return self.admin("down", cancel_jobs=body.cancel_jobs)


def find_job(reader: StateReader, ref: str) -> JobRecord:
    """The job with that id, else the newest of that name."""
    if (exact := reader.record(JobRecord, ref)) is not None:
        return exact
    named = [job for job in reader.records(JobRecord).values() if job.name == ref]
    if not named:
        raise ApiError("not_found", f'there is no job "{ref}"; "myriad ps -a" lists all jobs')
    return max(named, key=views.number_of)


def no_such_node(name: str) -> ApiError:
    return ApiError("not_found", f'there is no node "{name}"; "myriad nodes" lists all nodes')


def create_app(state_dir: StateDir, token: str) -> FastAPI:
    """The application; ``token`` is what every request must bear."""
    expected = f"Bearer {token}".encode()

    def authorised(request: Request) -> None:
        given = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
        if not secrets.compare_digest(given, expected):
            raise ApiError(
                "unauthorized", "the token is missing or wrong; use the one in the state's server.json"
            )

    app = FastAPI(title="Myriad", openapi_url=None, docs_url=None, redoc_url=None)
    app.include_router(_router(Api(state_dir)), prefix="/api/v1", dependencies=[Depends(authorised)])
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(HTTPException, _answer_http_error)
    return app


def _router(api: Api) -> APIRouter:
    router = APIRouter()
    # A job's name may hold slashes, hence ref:path; the routes with something after it come first.
    for path, endpoint in (
        ("/cluster", api.cluster),
        ("/nodes", api.nodes),
        ("/events", api.events),
        ("/jobs", api.jobs),
        ("/jobs/{ref:path}/why", api.why),
        ("/jobs/{ref:path}/logs", api.logs),
        ("/jobs/{ref:path}/report", api.report),
        ("/jobs/{ref:path}", api.job),
    ):
        router.add_api_route(path, endpoint, methods=["GET"], response_model=None)
    for path, action in (
        ("/jobs", api.submit),
        ("/jobs/{ref:path}/cancel", api.cancel),
        ("/nodes/{name}/drain", api.drain),
        ("/nodes/{name}/undrain", api.undrain),
        ("/inject", api.inject),
        ("/down", api.down),
    ):
        router.add_api_route(path, action, methods=["POST"], response_model=None)
    return router


def _error(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "message": message}}, status_code=status)


async def _answer_api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return _error(error.status, error.code, error.message)


async def _answer_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return _error(400, "invalid", f"the request's {where} cannot be used: {first['msg']}")


async def _answer_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = "not_found" if error.status_code == 404 else "invalid"
    return _error(error.status_code, code, f"{request.method} {request.url.path}: {error.detail}")
