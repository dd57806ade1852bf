"""Data sets behind a URL: the same samples in few requests, and each trouble as one sentence."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_server import ObjectServer, object_server

from myriad.storage.datasets import remote
from myriad.storage.datasets.builder import build
from myriad.storage.datasets.index import DatasetError, open_index, read_sidecar, verify
from myriad.storage.datasets.loader import Batch, Loader, open_mixture

S = 8


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """With the data sets ``bucket/a`` and ``bucket/b`` of 1,000 and 250 samples."""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    for name, size in {"a": 8000, "b": 2000}.items():
        text = tmp_path / f"{name}.txt"
        text.write_bytes(bytes(97 + (7 * i * i + i) % 26 for i in range(size)))
        build([text], bucket / name)
    with object_server(tmp_path) as served:
        for key, value in served.environment.items():
            monkeypatch.setenv(key, value)
        yield served


def batches(parts: list[tuple[str, float]], steps: int = 5, batch: int = 16) -> list[Batch]:
    with open_mixture(parts, S) as mixture:
        loader = Loader(mixture, 5, batch, 0, 1, 32)
        return [loader.next() for _ in range(steps)]


def texts(found: list[Batch]) -> list[object]:
    return [(each.tokens.tolist(), each.labels.tolist(), each.sample_ids, each.position) for each in found]


def test_a_remote_mixture_is_the_local_one(server: ObjectServer, tmp_path: Path) -> None:
    there = batches([("s3://bucket/a", 3), ("s3://bucket/b", 1)])
    here = batches([(str(tmp_path / "bucket/a"), 3), (str(tmp_path / "bucket/b"), 1)])
    mixed = batches([(str(tmp_path / "bucket/a"), 3), ("s3://bucket/b", 1)])
    assert texts(there) == texts(here) == texts(mixed)
    assert texts(there) != texts(batches([("s3://bucket/b", 3), ("s3://bucket/a", 1)])), "a control"


def test_opening_reads_headers_and_ends_only(server: ObjectServer, tmp_path: Path) -> None:
    assert open_index("s3://bucket/a").tokens == open_index(tmp_path / "bucket/a").tokens
    assert server.bytes_asked() < 64 and len(server.requests) <= 5, server.requests
    assert read_sidecar("s3://bucket/a") == read_sidecar(tmp_path / "bucket/a")
    assert read_sidecar("s3://bucket/none") is None


def test_samples_that_lie_close_together_are_one_request(server: ObjectServer) -> None:
    with open_mixture([("s3://bucket/a", 1)], S) as mixture:
        server.requests.clear()
        Loader(mixture, 5, 64, 0, 1).next()
    assert len(server.requests) == 1, "all of a small file lies within the gap"


def test_samples_far_apart_are_asked_for_at_the_same_time(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "GROUP_GAP_BYTES", 0)
    with open_mixture([("s3://bucket/a", 1)], S) as mixture:
        server.requests.clear()
        most, busy, lock = 0, 0, threading.Lock()
        get = remote._get

        async def counted(request: remote._Request) -> memoryview:
            nonlocal most, busy
            with lock:
                busy += 1
                most = max(most, busy)
            try:
                return await get(request)
            finally:
                with lock:
                    busy -= 1

        monkeypatch.setattr(remote, "_get", counted)
        server.latency_s = 0.05
        loader = Loader(mixture, 5, 100, 0, 1)
        loader.next()
    assert len(server.requests) > 60
    assert most == remote.REQUESTS, "many at a time, and no more than the limit"


def test_what_has_to_be_asked_for_twice_arrives(server: ObjectServer) -> None:
    with open_mixture([("s3://bucket/a", 1)], S) as mixture:
        want = texts([Loader(mixture, 5, 16, 0, 1).next()])
        server.fail_next = 9  # more than obstore itself tries
        assert texts([Loader(mixture, 5, 16, 0, 1).next()]) == want


def test_verify_reads_it_all(server: ObjectServer, tmp_path: Path) -> None:
    assert verify("s3://bucket/a").tokens == open_index(tmp_path / "bucket/a").tokens
    damaged = bytearray((tmp_path / "bucket/a.bin").read_bytes())
    damaged[777] ^= 1
    (tmp_path / "bucket/a.bin").write_bytes(damaged)
    with pytest.raises(DatasetError, match=r"^s3://bucket/a.bin is not what was built: its hash differs"):
        verify("s3://bucket/a")


OPENING = [
    (
        "missing",
        200,
        "s3://bucket/none",
        r"^there is no data set at s3://bucket/none: s3://bucket/none.idx is",
    ),
    (
        "forbidden",
        403,
        "s3://bucket/a",
        r"^s3://bucket/a.idx does not let these credentials read \(403\): change",
    ),
    (
        "away",
        503,
        "s3://bucket/a",
        r"^s3://bucket/a.idx cannot be reached to read at .*\(status 503\): check the server",
    ),
]


@pytest.mark.parametrize(("name", "status", "url", "sentence"), OPENING, ids=[each[0] for each in OPENING])
def test_opening_is_refused_in_one_sentence(
    server: ObjectServer, name: str, status: int, url: str, sentence: str
) -> None:
    server.status = status
    with pytest.raises(DatasetError, match=sentence) as refused:
        batches([(url, 1)])
    assert "\n" not in str(refused.value)


def test_nobody_listens(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(
        DatasetError, match=r"^s3://bucket/a.idx cannot be reached to read at http://127.0.0.1:9"
    ):
        batches([("s3://bucket/a", 1)])


READING = [
    ("removed", "remove", r"^s3://bucket/a.bin was removed while in use; restore it"),
    ("replaced", "replace", r"^s3://bucket/a.bin was replaced while in use; give each version"),
    ("away", "away", r"^s3://bucket/a.bin cannot be reached to read"),
]


@pytest.mark.parametrize(("name", "harm", "sentence"), READING, ids=[each[0] for each in READING])
def test_reading_fails_in_one_sentence(
    server: ObjectServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    harm: str,
    sentence: str,
) -> None:
    monkeypatch.setattr(remote, "READ_RETRY_S", 0.5)
    with open_mixture([("s3://bucket/a", 1)], S) as mixture:
        loader = Loader(mixture, 5, 16, 0, 1)
        loader.next()
        if harm == "remove":
            (tmp_path / "bucket/a.bin").unlink()
        elif harm == "replace":
            shutil.copy(tmp_path / "bucket/b.bin", tmp_path / "bucket/a.bin")
        else:
            server.status = 503
        with pytest.raises(DatasetError, match=sentence):
            for _ in range(3):
                loader.next()
        assert loader.position == 16, "nothing was consumed"
