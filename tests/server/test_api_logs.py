"""Logs as a stream: nothing lost, nothing twice, whatever the files do meanwhile."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from api_world import World
from starlette.testclient import TestClient

from myriad.server import logs
from myriad.server.app import create_app
from myriad.server.logs import JobLogs, log_name, tail_offset

COMMAND = {"name": "job", "nodes": 1, "command": "true"}


def write(folder: Path, rank: int, text: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / log_name(rank)).open("ab") as file:
        file.write(text)


def everything(job_logs: JobLogs) -> bytes:
    pieces = []
    while piece := job_logs.read():
        pieces.append(piece)
    return b"".join([*pieces, job_logs.rest()])


TAIL_STORIES = [
    (b"", 3, b""),
    (b"a\nb\nc\n", 0, b""),
    (b"a\nb\nc\n", 1, b"c\n"),
    (b"a\nb\nc\n", 2, b"b\nc\n"),
    (b"a\nb\nc\n", 3, b"a\nb\nc\n"),
    (b"a\nb\nc\n", 9, b"a\nb\nc\n"),
    (b"a\nb\nc", 1, b"c"),
    (b"a\n\n\n", 2, b"\n\n"),
    (b"x" * 50 + b"\ny", 1, b"y"),
]


@pytest.mark.parametrize("block", [1, 3, 1 << 20])
@pytest.mark.parametrize(("content", "lines", "want"), TAIL_STORIES)
def test_tail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, lines: int, want: bytes, block: int
) -> None:
    monkeypatch.setattr(logs, "READ_BYTES", block)
    file = tmp_path / "log"
    file.write_bytes(content)
    assert content[tail_offset(file, lines) :] == want


def test_one_rank_is_given_out_byte_by_byte(tmp_path: Path) -> None:
    content = b"\x00\xff no line end \r progress" * 1000
    write(tmp_path, 3, content)
    assert everything(JobLogs(tmp_path, rank=3, tail=None, follow=False)) == content


def test_all_ranks_are_prefixed_in_whole_lines(tmp_path: Path) -> None:
    write(tmp_path, 0, b"one\ntwo")
    write(tmp_path, 11, b"three\n")
    want = b"[rank 0] one\n[rank 11] three\n[rank 0] two\n"
    assert everything(JobLogs(tmp_path, rank=None, tail=None, follow=False)) == want


@pytest.mark.parametrize("block", [1, 7, 1 << 18])
def test_a_growing_file_is_told_once_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(logs, "READ_BYTES", block)
    job_logs = JobLogs(tmp_path, rank=None, tail=None, follow=True)
    assert job_logs.read() == b""
    told = b""
    for number in range(20):
        write(tmp_path, number % 2, b"%d begins, " % number)
        told += everything_now(job_logs)
        write(tmp_path, number % 2, b"%d ends\n" % number)
        told += everything_now(job_logs)
    want = b"".join(b"[rank %d] %d begins, %d ends\n" % (n % 2, n, n) for n in range(20))
    assert told == want and job_logs.rest() == b""


def everything_now(job_logs: JobLogs) -> bytes:
    told = b""
    while piece := job_logs.read():
        told += piece
    return told


def test_without_follow_the_end_is_where_it_was_when_asked(tmp_path: Path) -> None:
    write(tmp_path, 0, b"before\n")
    job_logs = JobLogs(tmp_path, rank=None, tail=None, follow=False)
    write(tmp_path, 0, b"after\n")
    assert everything(job_logs) == b"[rank 0] before\n"


def test_a_line_without_end_is_passed_on_in_pieces(tmp_path: Path) -> None:
    write(tmp_path, 0, b"x" * (3 * logs.MAX_LINE_BYTES))
    told = everything(JobLogs(tmp_path, rank=None, tail=None, follow=False))
    assert told.replace(b"[rank 0] ", b"").replace(b"\n", b"") == b"x" * (3 * logs.MAX_LINE_BYTES)


def fetch(world: World, path: str) -> tuple[threading.Thread, list[str]]:
    """Ask in a thread, so that the job can go on meanwhile; the answer's text comes into the list."""
    answer: list[str] = []

    def ask() -> None:
        with TestClient(create_app(world.state_dir, "t"), headers={"authorization": "Bearer t"}) as api:
            answer.append(api.get(f"/api/v1/{path}").text)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, answer


@pytest.mark.parametrize("query", ["follow=true", "follow=true&tail=1", "follow=true&rank=0"])
def test_following_from_pending_to_the_end_loses_neither_head_nor_tail(state_root: Path, query: str) -> None:
    with World(state_root) as world:
        job = world.submit({**COMMAND, "nodes": 3})
        folder = world.state_dir.job_dir(job) / "logs"
        thread, answer = fetch(world, f"jobs/{job}/logs?{query}")
        time.sleep(2 * logs.POLL_S)  # it is following by now, and there is no file yet
        write(folder, 0, b"head\n")
        for number in range(100):
            write(folder, 0, b"line %d\n" % number)
        assert thread.is_alive()
        write(folder, 0, b"tail without end")
        world.happen_cancel(job)
        thread.join(10)
    lines = [line.removeprefix("[rank 0] ") for line in answer[0].splitlines()]
    assert lines == ["head", *(f"line {number}" for number in range(100)), "tail without end"]


def test_following_events_ends_with_the_job(state_root: Path) -> None:
    with World(state_root) as world:
        job = world.run_command(COMMAND)
        thread, answer = fetch(world, f"events?job={job}&follow=true")
        time.sleep(2 * logs.POLL_S)
        world.finish(job)
        thread.join(10)
        assert not thread.is_alive()
    assert (
        answer[0]
        .splitlines()[-1]
        .endswith('"text": "j1: SUCCEEDED (completed, exit code 0): every worker has finished"}')
    )
