"""Checkpoints in object storage: copied after they are committed, verified, and believed only by their marker."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from storage_faults import flip_bit

from myriad.storage.durable.checkpoint import load, save
from myriad.storage.durable.manifest import (
    COPYING_NAME,
    MARKER_NAME,
    CheckpointCorrupt,
    CheckpointError,
    checkpoint_path,
    commit_marker,
    marker_of,
    prune,
    read_manifest,
    set_under_copy,
    write_manifest,
)
from myriad.storage.durable.remote import Remote
from myriad.storage.objects import Objects, open_store
from objects import BUCKET, Server, moto, moto_server, restricted, s3

__all__ = ["moto", "moto_server", "s3"]

URL = f"s3://{BUCKET}/run"
ROWS = 1000
DEADLINE_S = 30.0


def values(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(ROWS, dtype=torch.float32) * step, "y": torch.full((3,), float(step))}


def checkpoint(directory: Path, step: int, generation: int = 1, committed: bool = True) -> Path:
    save(directory, step, generation, values(step), None, position=step, layout={})
    path = checkpoint_path(directory, step, generation)
    if committed:
        commit_marker(path)
    return path


def loaded(directory: Path, step: int, remote: str | None, generation: int = 1) -> bool:
    """Whether exactly what was saved comes back."""
    into = {name: torch.zeros_like(each) for name, each in values(step).items()}
    load(directory, step, generation, into, remote=remote)
    return all(torch.equal(into[name], each) for name, each in values(step).items())


def damage(name: str, at: int) -> None:
    """One bit of an object is not what it was."""
    content = bytearray(open_store(URL).read(name))
    content[at] ^= 4
    open_store(URL).write(name, bytes(content))


def test_a_copy_replaces_a_directory_that_is_lost_or_damaged(
    moto: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoint(tmp_path / "c", 5)
    Remote(URL).copy_up(path)
    assert {each.name for each in path.iterdir()} == {
        each.rpartition("/")[2] for each in open_store(URL).sizes()
    }
    for harm in (
        lambda: flip_bit(path / "__0_0.distcp", 700),
        lambda: (path / ".metadata").unlink(),
        lambda: (path / "manifest.json").write_text("{"),
        lambda: shutil.rmtree(tmp_path / "c"),
    ):
        harm()
        with pytest.raises(CheckpointError):
            loaded(tmp_path / "c", 5, None)
        assert loaded(tmp_path / "c", 5, URL)
        assert f"reading it from {URL}/step-5.gen-1" in caplog.text
        caplog.clear()


@pytest.mark.parametrize(
    ("name", "sentence"),
    (
        ("__0_0.distcp", f"nor from its copy: {URL}/step-5.gen-1/__0_0.distcp fails its checksum"),
        (".metadata", f"nor from its copy: {URL}/step-5.gen-1/.metadata fails its checksum"),
        ("manifest.json", "is not the one its marker names"),
        (MARKER_NAME, "is not the one its marker names"),
    ),
)
def test_a_flipped_byte_of_the_copy_is_refused(
    moto: Server, tmp_path: Path, name: str, sentence: str
) -> None:
    Remote(URL).copy_up(checkpoint(tmp_path / "c", 5))
    damage(f"step-5.gen-1/{name}", 30)
    with pytest.raises(CheckpointError, match=sentence):
        loaded(tmp_path / "lost", 5, URL)
    if name not in ("manifest.json", MARKER_NAME):
        assert Remote(URL).damage("step-5.gen-1") == (f"{name} fails its checksum",)


def test_a_copy_without_its_marker_is_none(moto: Server, tmp_path: Path) -> None:
    Remote(URL).copy_up(checkpoint(tmp_path / "c", 5))
    open_store(URL).delete([f"step-5.gen-1/{MARKER_NAME}"])
    assert [each.committed for each in Remote(URL).list_checkpoints()] == [False]
    with pytest.raises(CheckpointError, match=f"there is no object {URL}/step-5.gen-1/{MARKER_NAME}"):
        loaded(tmp_path / "lost", 5, URL)


def test_a_manifest_from_the_future_is_refused(moto: Server, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c", 5)
    write_manifest(path, msgspec.structs.replace(read_manifest(path), format=99))
    content = (path / "manifest.json").read_bytes()
    open_store(URL).write(f"{path.name}/manifest.json", content)
    open_store(URL).write(f"{path.name}/{MARKER_NAME}", marker_of(content))
    with pytest.raises(CheckpointError, match="has format 99 and this version reads up to 1"):
        Remote(URL).read_manifest(path.name)


def test_no_right_to_list_is_not_no_checkpoint(
    moto: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path / "c", 5)
    Remote(URL).copy_up(path)
    assert [(e.step, e.generation, e.committed) for e in Remote(URL).list_checkpoints()] == [(5, 1, True)]
    for name, value in restricted(moto, ["s3:GetObject"]).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match="does not let these credentials list"):
        Remote(URL).list_checkpoints()
    assert loaded(tmp_path / "lost", 5, URL)  # reading needs no list
    with pytest.raises(CheckpointError, match="does not let these credentials"):
        Remote(URL).copy_up(checkpoint(tmp_path / "c", 6))


def test_what_bears_a_marker_is_never_overwritten(moto: Server, tmp_path: Path) -> None:
    """Another job with the same prefix, and an older generation that still writes."""
    Remote(URL).copy_up(checkpoint(tmp_path / "one", 5))
    save(tmp_path / "two", 5, 1, values(7), None, position=5, layout={})
    commit_marker(other := checkpoint_path(tmp_path / "two", 5, 1))
    with pytest.raises(
        CheckpointError, match="already holds another step-5.gen-1, of another job: give this"
    ):
        Remote(URL).copy_up(other)
    Remote(URL).copy_up(checkpoint(tmp_path / "one", 3, generation=2))
    Remote(URL).copy_up(checkpoint(tmp_path / "one", 9, generation=1))  # the fenced writer's, late
    assert [each.path.name for each in Remote(URL).prunable(1)] == ["step-9.gen-1", "step-5.gen-1"]
    assert loaded(tmp_path / "lost", 5, URL) and loaded(tmp_path / "lost", 3, URL, generation=2)


def test_what_has_arrived_is_not_sent_again(moto: Server, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c", 5)
    sizes = {each.name: each.stat().st_size for each in path.iterdir()}
    Remote(URL).copy_up(path)
    for left, again in (
        ({"manifest.json", MARKER_NAME}, 0),
        ({MARKER_NAME}, 0),
        ({MARKER_NAME, "manifest.json", ".metadata"}, sizes[".metadata"]),
        (set(sizes), sizes[".metadata"] + sizes["__0_0.distcp"]),
    ):
        open_store(URL).delete([f"{path.name}/{name}" for name in left])
        remote = Remote(URL)
        remote.copy_up(path)
        assert remote.sent_bytes == again, left
    open_store(URL).delete([f"{path.name}/{MARKER_NAME}"])
    damage(f"{path.name}/__0_0.distcp", 700)  # of the right size, and yet not what was sent
    remote = Remote(URL)
    remote.copy_up(path)
    assert remote.sent_bytes == sizes["__0_0.distcp"] and loaded(tmp_path / "lost", 5, URL)


def test_a_damaged_local_file_gets_no_verified_copy(moto: Server, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c", 5)
    flip_bit(path / "__0_0.distcp", 700)
    with pytest.raises(
        CheckpointCorrupt, match=f"{path}/__0_0.distcp fails its checksum, so the checkpoint has"
    ):
        Remote(URL).copy_up(path)
    assert f"{path.name}/{MARKER_NAME}" not in open_store(URL).sizes()


def test_pruning_spares_what_is_being_copied(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        checkpoint(tmp_path, step)
    set_under_copy(tmp_path, "step-2.gen-1")
    assert [each.step for each in prune(tmp_path, 1)] == [3, 1]
    set_under_copy(tmp_path, None)
    assert [each.step for each in prune(tmp_path, 1)] == [2]


class Killed(BaseException):
    """Nothing is cleaned up after a kill; neither is anything on the way of this one."""


def _called(self: Objects, counted: Callable[..., Any], request: Callable[..., Any], *args: Any) -> Any:
    return counted(request, self, *args)


def before_call(number: int, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """``act`` before the ``number``-th request to the store from now on."""
    calls = iter(range(1000))
    for name in ("sizes", "chunks", "read", "write"):

        def counted(request: Callable[..., Any], *args: Any, **keys: Any) -> Any:
            if next(calls) == number:
                act()
            return request(*args, **keys)

        monkeypatch.setattr(Objects, name, functools.partialmethod(_called, counted, getattr(Objects, name)))


def test_a_kill_before_any_request_leaves_no_half_copy(
    moto: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next one sends only what has not arrived."""
    path = checkpoint(tmp_path / "c", 5)
    whole = sum(each.size for each in read_manifest(path).files)

    def killed() -> None:
        raise Killed

    committed = False
    for number in range(1000):
        first, second = Remote(f"{URL}/{number}"), Remote(f"{URL}/{number}")
        with monkeypatch.context() as patched:
            before_call(number, killed, patched)
            try:
                first.copy_up(path)
                break
            except Killed:
                pass
        committed |= first.is_committed(path.name)
        assert not committed or number > 7, number
        second.copy_up(path)
        assert first.sent_bytes + second.sent_bytes == whole, number
        assert second.is_committed(path.name) and second.damage(path.name) == ()
    assert number >= 9 and committed, "each file is sent and read, the manifest and the marker too"


@pytest.mark.parametrize("number", (2, 5, 8), ids=("before the first file", "at a file", "at the manifest"))
def test_a_server_gone_in_mid_upload(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = checkpoint(tmp_path / "c", 5)
    with monkeypatch.context() as patched:
        before_call(number, s3.stop, patched)
        with pytest.raises(CheckpointError, match="cannot be reached to (list|read|write)"):
            Remote(URL).copy_up(path)
    s3.start()
    assert not Remote(URL).is_committed(path.name)
    Remote(URL).copy_up(path)
    assert loaded(tmp_path / "lost", 5, URL)


def test_volume(s3: Server, tmp_path: Path) -> None:
    """96 MB, in parts; what comes back is what was saved."""
    big = {"x": torch.arange(24_000_000, dtype=torch.float32)}
    save(tmp_path / "c", 5, 1, big, None, position=5, layout={})
    commit_marker(path := checkpoint_path(tmp_path / "c", 5, 1))
    Remote(URL).copy_up(path)
    into = {"x": torch.zeros_like(big["x"])}
    load(tmp_path / "lost", 5, 1, into, remote=URL)
    assert torch.equal(into["x"], big["x"])


# ---------------------------------------------------------------- the program


@contextmanager
def uploading(directory: Path, keep: int = 2) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "myriad.storage.durable.uploader", str(directory), URL, str(keep)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def finish(process: subprocess.Popen[str]) -> list[dict[str, object]]:
    """Tell it to end; what it had said."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("end\n")
    process.stdin.flush()
    lines = process.stdout.readlines()
    assert process.wait(DEADLINE_S) == 0
    return [said for line in lines if (said := json.loads(line))]


def test_it_copies_the_newest_and_keeps_as_many_as_asked(moto: Server, tmp_path: Path) -> None:
    """What is not committed is not copied, what was overtaken is skipped, and old copies go."""
    for step in (1, 2):
        Remote(URL).copy_up(checkpoint(tmp_path, step))
    for step in (3, 4, 5):
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 6, committed=False)
    set_under_copy(tmp_path, "step-3.gen-1")  # of one that was killed
    with uploading(tmp_path) as process:
        assert finish(process) == [{"copied": 5}]
    assert [(e.step, e.committed) for e in Remote(URL).list_checkpoints()] == [(5, True), (2, True)]
    assert not (tmp_path / COPYING_NAME).exists() and loaded(tmp_path / "lost", 5, URL)


def test_it_dies_with_its_parent(moto: Server, tmp_path: Path) -> None:
    with uploading(tmp_path) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(DEADLINE_S) == 1
        process.stdin = None


def test_a_server_that_comes_back(s3: Server, tmp_path: Path) -> None:
    """Away when the copy is due: it says so, tries again, and the copy is made."""
    s3.stop()
    checkpoint(tmp_path, 1)
    with uploading(tmp_path) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        assert f"the checkpoint step-1.gen-1 was not copied: {URL}" in said["error"], said
        assert "cannot be reached" in said["error"], said
        s3.start()
        assert {"copied": 1} in finish(process)
    assert loaded(tmp_path / "lost", 1, URL)
