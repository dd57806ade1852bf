"""What a worker says when a job cannot run, and how the template keeps its children."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from training_harness import Cluster, template_process, tiny_job, write_dataset

from myriad.spec.messages import ChildExited, Forked, ForkStore, ForkWorker
from myriad.storage.datasets.index import DatasetError
from myriad.storage.memory.channel import Channel, ChannelClosed
from myriad.training.rendezvous import peer_lost
from myriad.training.step import EmptyBatch
from myriad.training.worker import first_line, unwrapped


def start_failing(cluster: Cluster, data: Path, error_class: str) -> str:
    """The message of a one-rank job that ends with ``error_class`` and a traceback in its log."""
    run = cluster.start(tiny_job(data, steps=3)).wait()
    assert run.codes() == [1]
    failure = run.workers[0].failure
    assert failure is not None and failure.error_class == error_class, failure
    assert f"{error_class}: {failure.message}" in cluster.log(0).read_text()
    return failure.message


def test_missing_dataset(cluster: Cluster, tmp_path: Path) -> None:
    message = start_failing(cluster, tmp_path / "nothing", "DatasetError")
    assert "there is no data set at" in message and "myriad data build" in message


def test_truncated_dataset(cluster: Cluster, data: Path) -> None:
    os.truncate(f"{data}.bin", 1000)
    assert "truncated" in start_failing(cluster, data, "DatasetError")


def test_vocabulary_that_does_not_fit(cluster: Cluster, data: Path) -> None:
    Path(f"{data}.json").write_text(
        '{"documents": 1, "tokens": 20000, "vocab_size": 300, "end_of_document": 299, "tokenizer": "bytes",'
        ' "dtype": "uint16", "bin_sha256": "", "idx_sha256": ""}'
    )
    assert "set model.vocab_size to at least 300" in start_failing(cluster, data, "DatasetError")


def test_checkpoint_directory_that_is_a_file(cluster: Cluster, data: Path) -> None:
    (cluster.job_dir / "checkpoints").write_text("in the way")
    message = start_failing(cluster, data, "CheckpointError")
    assert str(cluster.job_dir / "checkpoints") in message


def test_survivors_say_that_they_are_not_the_cause(cluster: Cluster, data: Path) -> None:
    run = cluster.start(tiny_job(data, steps=500, dp_replicate=2, snapshot_every_steps=100))
    while len(run.workers[0].reports) < 3:
        run.poll(1.0)
    killed_s = time.monotonic()
    run.kill(1)
    run.wait()
    assert time.monotonic() - killed_s < 5
    assert run.codes() == [1, -9]
    failure = run.workers[0].failure
    assert failure is not None and failure.error_class == "PeerLost" and failure.step is not None


def test_peer_lost_looks_behind_the_exception() -> None:
    try:
        try:
            raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1234.")
        except RuntimeError as error:
            raise ValueError("could not save") from error
    except ValueError as error:
        assert peer_lost(error) is not None
    assert peer_lost(ValueError("no loss")) is None


def test_the_cause_inside_a_bare_wrapper_is_reported() -> None:
    inner, wrapper = EmptyBatch("every label is masked"), RuntimeError("Failed to run stage backward:")
    wrapper.__cause__ = inner
    assert unwrapped(wrapper) is inner
    named = DatasetError("there is no data set")
    named.__cause__ = OSError("no such file")
    assert unwrapped(named) is named
    assert first_line(RuntimeError("\n  no room  \nframe #1: native code")) == "no room"


def test_a_lost_agent_takes_every_child_along(tmp_path: Path) -> None:
    """The template dies with its agent's end of the socket, and so do stores and workers."""
    with template_process() as (channel, process):
        tasks = os.listdir(f"/proc/{process.pid}/task")
        assert len(tasks) == 1, "a template that forks must have one thread"
        channel.send(ForkStore(key="store", host="127.0.0.1", world_size=1))
        forked, _ = channel.recv(20)
        assert isinstance(forked, Forked) and forked.port > 0
        worker_end: Channel[Forked]
        worker_end, theirs = Channel.pair(Forked)
        channel.send(
            ForkWorker(key="worker", env={}, log_path=str(tmp_path / "log"), spec={}), (theirs.fileno(),)
        )
        theirs.close()
        worker, _ = channel.recv(20)
        assert isinstance(worker, Forked)
        pids = [forked.pid, worker.pid]
        assert all(os.getpgid(pid) == pid for pid in pids)
        channel.close()
        process.wait(5)
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        with pytest.raises(ChannelClosed):
            worker_end.recv(1)
        worker_end.close()


def test_a_killed_template_takes_its_children_along() -> None:
    with template_process() as (channel, process):
        channel.send(ForkStore(key="store", host="127.0.0.1", world_size=1))
        forked, _ = channel.recv(20)
        assert isinstance(forked, Forked)
        process.kill()
        deadline = time.monotonic() + 2
        while Path(f"/proc/{forked.pid}").exists() and not _is_zombie(forked.pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def _is_zombie(pid: int) -> bool:
    """Dead, and only waiting for whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_exits_are_reported_with_their_signal() -> None:
    with template_process() as (channel, _):
        channel.send(ForkStore(key="store", host="127.0.0.1", world_size=1))
        forked, _ = channel.recv(20)
        assert isinstance(forked, Forked)
        os.kill(forked.pid, signal.SIGTERM)
        exited, _ = channel.recv(5)
        assert exited == ChildExited(key="store", pid=forked.pid, code=-signal.SIGTERM)
        channel.send(ForkStore(key="other", host="127.0.0.1", world_size=1))
        again, _ = channel.recv(20)
        assert isinstance(again, Forked) and again.key == "other", "it goes on serving"


def test_result_and_progress_are_written(cluster: Cluster, tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data" / "random")
    cluster.run(tiny_job(data, steps=3))
    assert "step 3 of 3: loss 5." in cluster.log(0).read_text()
