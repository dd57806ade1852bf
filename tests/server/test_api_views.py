"""What the API says of a state's jobs, nodes and timeline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_world import World
from starlette.testclient import TestClient

from myriad.control import events as ev
from myriad.server.app import create_app

TOKEN = "the token of these tests"


@pytest.fixture
def world(state_root: Path) -> Iterator[World]:
    with World(state_root) as world:
        yield world


@pytest.fixture
def api(world: World) -> Iterator[TestClient]:
    headers = {"authorization": f"Bearer {TOKEN}"}
    with TestClient(
        create_app(world.state_dir, TOKEN), base_url="http://myriad/api/v1", headers=headers
    ) as api:
        yield api


def texts(api: TestClient, **parameters: Any) -> list[str]:
    return [event["text"] for event in api.get("events", params=parameters).json()["events"]]


def test_a_recovered_job_shows_its_nodes_processes_and_progress(world: World, api: TestClient) -> None:
    job = world.train_and_lose_a_node()
    view = api.get(f"jobs/{job}").json()
    expected = {
        "id": "j1",
        "name": "llama",
        "status": "RUNNING",
        "reason": "progress",
        "generation": 2,
        "restarts": 1,
        "nodes": ["n0", "n2"],
        "lost": ["n1"],
        "spares": [],
        "durable_step": 2,
        "submitted": "2023-11-14T22:13:26.000Z",
        "waited_s": 0.0,
    }
    assert {key: view[key] for key in expected} == expected
    assert view["progress"] == {"step": 4, "steps": 6, "loss": 4.6, "tokens_per_s": 32.0}
    assert [(m["node"], m["node_rank"], m["pids"]) for m in view["members"]] == [
        ("n0", 0, {"0": 5000}),
        ("n2", 1, {"1": 5001}),
    ]
    first, second = view["generations"]
    assert (first["cause"], first["replacement"]) == ("node n1 was lost (its agent died)", {"n1": "n2"})
    assert (second["restore_step"], second["tiers"], second["start_s"]) == (
        2,
        {"memory": 1, "durable": 1},
        4.0,
    )


def test_the_timeline_tells_the_failure_as_sentences(world: World, api: TestClient) -> None:
    world.train_and_lose_a_node()
    assert texts(api, job="llama") == [
        "j1: llama submitted",
        "j1: granted nodes n0, n1 with spare n2",
        "j1: generation 1 finished its first step after 3 s (store 1 s, start 2 s)",
        "j1: RUNNING (progress): running on 2 nodes, 2 workers",
        "j1: checkpoint of step 2 committed",
        "j1: node n1 was lost (its agent died); fencing generation 1",
        "j1: n2 takes over from n1; all ranks restart from step 2 (1 from memory, 1 from durable)",
        "j1: generation 2 finished its first step after 4 s (fence 1 s, store 1 s, start 2 s)",
        "j1: RUNNING (progress): running on 2 nodes, 2 workers",
    ]
    assert texts(api, node="n1") == [
        "n1: down (its agent has not joined yet)",
        "n1: agent connected",
        "n1: free",
        "n1: the agent's process is gone",
        "n1: down (its agent died)",
    ]


def test_the_timeline_can_be_read_from_any_row(world: World, api: TestClient) -> None:
    world.train_and_lose_a_node()
    events = api.get("events").json()["events"]
    for after in {event["seq"] for event in events}:
        rest = api.get("events", params={"after": after}).json()["events"]
        assert rest == [event for event in events if event["seq"] > after]


OPERATOR_STORIES = [
    (
        ev.DrainRequested(node="n1", reason="cabling"),
        ["n1: drain requested (cabling)", "n1: drained (cabling)"],
    ),
    (
        ev.NodeSilent(node="n1", incarnation="n1-1", beats=9, silent_s=4.5),
        ["n1: silent for 4.5 s (9 heartbeats)", "n1: down (no heartbeat for 4.5 s)"],
    ),
    (ev.AgentDisconnected(node="n1", incarnation="n1-1"), ["n1: the agent's connection closed"]),
    (ev.InjectRequested(kind="kill-node", target="n1"), ["fault injected: kill-node n1"]),
    (ev.DownRequested(), ["the cluster goes down; jobs keep running"]),
    (ev.TimerFired(), []),
]


@pytest.mark.parametrize(
    ("event", "want"), OPERATOR_STORIES, ids=[type(e).__name__ for e, _ in OPERATOR_STORIES]
)
def test_what_operators_and_agents_do_is_told(
    world: World, api: TestClient, event: ev.AnyEvent, want: list[str]
) -> None:
    before = len(texts(api))
    world.happen(event)
    assert texts(api)[before:] == want


WHY_STORIES = [
    ("more than there is", {"nodes": 9}, "limit",
     'j2 is PENDING (resources, blocked by a limit): needs 9 nodes but cluster "test" has 3; 6 more are needed'),
    ("held by another", {"nodes": 3}, "turn",
     ("j2 is PENDING (resources, waiting its turn): needs 3 nodes but only 2 of 3 are free (1 busy); "
      "1 more node needed")),
]  # fmt: skip


@pytest.mark.parametrize(("case", "spec", "tier", "sentence"), WHY_STORIES, ids=[s[0] for s in WHY_STORIES])
def test_why_a_job_is_pending(
    world: World, api: TestClient, case: str, spec: dict[str, Any], tier: str, sentence: str
) -> None:
    world.run_command({"name": "first", "nodes": 1, "command": "true"})
    job = world.submit({"name": "second", "command": "true", **spec})
    answer = api.get(f"jobs/{job}/why").json()
    assert (answer["tier"], answer["sentence"]) == (tier, sentence)


def test_why_a_job_runs_has_no_tier(world: World, api: TestClient) -> None:
    job = world.run_command({"name": "first", "nodes": 1, "command": "true"})
    answer = api.get(f"jobs/{job}/why").json()
    assert (answer["tier"], answer["tier_text"]) == (None, None)
    assert answer["sentence"] == "j1 is RUNNING (progress): running on 1 node, 1 worker"


def test_a_name_means_its_newest_job_and_may_hold_anything(world: World, api: TestClient) -> None:
    name = "a b/c ä?why"
    for _ in range(11):
        newest = world.submit({"name": name, "nodes": 9, "command": "true"})
    path = "jobs/a%20b/c%20%C3%A4%3Fwhy"
    assert api.get(path).json()["id"] == newest == "j11"
    assert api.get(f"{path}/why").json()["job"] == newest
    assert [job["id"] for job in api.get("jobs").json()["jobs"]] == [f"j{i}" for i in range(1, 12)]


def test_ended_jobs_can_be_left_out(world: World, api: TestClient) -> None:
    world.finish(world.run_command({"name": "done", "nodes": 1, "command": "true"}))
    open_job = world.submit({"name": "open", "nodes": 9, "command": "true"})
    assert [job["id"] for job in api.get("jobs", params={"ended": False}).json()["jobs"]] == [open_job]
    done = api.get("jobs/done").json()
    assert (done["status"], done["exit_code"], done["run_s"], done["nodes"]) == ("SUCCEEDED", 0, 4.0, [])


def test_nodes_and_cluster_without_a_controller(world: World, api: TestClient) -> None:
    world.train_and_lose_a_node()
    cluster = api.get("cluster").json()
    assert cluster["nodes_by_state"] == {"busy": 2, "down": 1} and cluster["controller"] is False
    nodes = {node["name"]: node for node in api.get("nodes").json()["nodes"]}
    assert list(nodes) == ["n0", "n1", "n2"]
    assert (nodes["n1"]["state"], nodes["n1"]["connected"], nodes["n1"]["expected"]) == ("down", False, False)
    assert (nodes["n2"]["job"], nodes["n2"]["silent_s"]) == ("j1", None)


def test_the_report_accounts_for_the_job_beside_a_reference(world: World, api: TestClient) -> None:
    world.train_and_lose_a_node()
    report = api.get("jobs/j1/report", params={"reference": "j1"}).json()
    assert report["losses"] == [(5.0 - step / 10).hex() for step in (1, 2, 3, 4)]
    assert report["losses_equal_reference"] is True and report["redone_steps"] == 2
    assert report["recoveries"][0]["replacement"] == {"n1": "n2"}


REFUSALS = [
    ("GET", "jobs/none", 404, "not_found", 'there is no job "none"; "myriad ps -a" lists all jobs'),
    ("GET", "events?node=n9", 404, "not_found", 'there is no node "n9"; "myriad nodes" lists all nodes'),
    ("GET", "jobs/j1/logs?rank=1", 404, "not_found", "j1 has ranks 0 to 0; there is no rank 1"),
    ("GET", "jobs/j1/logs?tail=-1", 400, "invalid", "the request's query.tail cannot be used: "),
    ("GET", "nothing", 404, "not_found", "GET /api/v1/nothing: Not Found"),
    ("POST", "jobs", 400, "invalid", "the request's body cannot be used: "),
    ("POST", "jobs/j1/cancel", 503, "unreachable", "no cluster is running for state "),
]


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "message"), REFUSALS, ids=[r[1] for r in REFUSALS]
)
def test_refusals_are_sentences(
    world: World, api: TestClient, method: str, path: str, status: int, code: str, message: str
) -> None:
    world.run_command({"name": "first", "nodes": 1, "command": "true"})
    answer = api.request(method, path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == code and error["message"].startswith(message)


@pytest.mark.parametrize(
    "given", [None, "", TOKEN, "Bearer", "Bearer wrong", f"bearer {TOKEN}", "Bearer \xe4"]
)
def test_every_request_needs_the_token(world: World, given: str | None) -> None:
    with TestClient(create_app(world.state_dir, TOKEN), base_url="http://myriad/api/v1") as api:
        headers = {} if given is None else {"authorization": given.encode("latin-1")}
        for path in ("cluster", "jobs", "events?follow=true"):
            answer = api.get(path, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "unauthorized"


def test_a_state_without_a_journal_is_not_there_yet(tmp_path: Path) -> None:
    from myriad.runtime.paths import StateDir

    headers = {"authorization": f"Bearer {TOKEN}"}
    with TestClient(create_app(StateDir(tmp_path), TOKEN), headers=headers) as api:
        answer = api.get("/api/v1/jobs")
    assert answer.status_code == 503 and "has not started yet" in answer.json()["error"]["message"]
