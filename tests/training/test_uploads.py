"""Rank 0's end of the uploader: what it says, its death, and the end of a job."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch

from myriad.storage.durable.checkpoint import save
from myriad.storage.durable.manifest import checkpoint_path, commit_marker
from myriad.storage.durable.remote import Remote
from myriad.training import uploads
from objects import BUCKET, Server, moto, moto_server

__all__ = ["moto", "moto_server"]

URL = f"s3://{BUCKET}/run"
DEADLINE_S = 30.0


def checkpoint(directory: Path, step: int) -> None:
    save(directory, step, 1, {"x": torch.ones(3)}, None, position=step, layout={})
    commit_marker(checkpoint_path(directory, step, 1))


def test_it_is_started_again_after_a_kill(
    moto: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "RESTART_S", 0.1)
    said: list[str] = []
    running = uploads.Uploads(tmp_path, URL, 2, said.append)
    first = running._process
    first.send_signal(signal.SIGKILL)
    checkpoint(tmp_path, 1)
    deadline = time.monotonic() + DEADLINE_S
    while not Remote(URL).is_committed("step-1.gen-1"):
        running.hear(0.1)
        assert time.monotonic() < deadline, said
    assert running._process is not first
    assert said == ["copying checkpoints to object storage has ended with exit code -9"]
    checkpoint(tmp_path, 2)
    running.finish()
    assert [each.step for each in Remote(URL).list_checkpoints()] == [2, 1]
    assert running._process.returncode == 0


def test_a_death_before_the_end_costs_no_copy(moto: Server, tmp_path: Path) -> None:
    said: list[str] = []
    running = uploads.Uploads(tmp_path, URL, 2, said.append)
    running._process.kill()
    while running.hear(1.0):
        pass
    checkpoint(tmp_path, 1)
    running.finish()
    assert Remote(URL).is_committed("step-1.gen-1")
