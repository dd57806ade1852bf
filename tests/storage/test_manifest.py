"""Manifest, commit marker, listing and pruning, and what refuses storage says."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from storage_faults import as_nobody, flip_bit, mounted_tmpfs

from myriad.spec.messages import FileSum
from myriad.storage.durable import manifest as manifest_module
from myriad.storage.durable.manifest import (
    MANIFEST_NAME,
    MARKER_NAME,
    CheckpointCorrupt,
    CheckpointError,
    Manifest,
    checkpoint_path,
    commit_marker,
    file_sum,
    is_committed,
    list_checkpoints,
    prune,
    read_manifest,
    storage_error,
    sync_directory,
    write_manifest,
)


def manifest(step: int = 4, generation: int = 1) -> Manifest:
    return Manifest(
        step=step,
        generation=generation,
        position=32,
        world_size=2,
        layout={"tp": 2},
        versions={"torch": "2"},
        files=(FileSum("__0_0.distcp", 10, 123),),
        meta={"skipped": [[1, 2]]},
    )


def place(directory: Path, step: int, generation: int, committed: bool = True) -> Path:
    path = checkpoint_path(directory, step, generation)
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"data")
    write_manifest(path, manifest(step, generation))
    if committed:
        commit_marker(path)
    return path


def names(directory: Path) -> list[str]:
    return [each.path.name + ("" if each.committed else "?") for each in list_checkpoints(directory)]


def test_a_manifest_returns_as_written_and_is_plain_json(tmp_path: Path) -> None:
    write_manifest(tmp_path, manifest())
    assert read_manifest(tmp_path) == manifest()
    assert json.loads((tmp_path / MANIFEST_NAME).read_text())["manifest"]["position"] == 32
    assert os.listdir(tmp_path) == [MANIFEST_NAME]


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path: Path) -> None:
    write_manifest(tmp_path, manifest())
    good = (tmp_path / MANIFEST_NAME).read_bytes()
    for at in range(len(good)):
        (tmp_path / MANIFEST_NAME).write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(CheckpointCorrupt, match=r"manifest\.json .* resume from another checkpoint"):
            read_manifest(tmp_path)
    (tmp_path / MANIFEST_NAME).write_bytes(good[: len(good) // 2])
    with pytest.raises(CheckpointCorrupt):
        read_manifest(tmp_path)


def test_a_manifest_from_the_future_is_refused(tmp_path: Path) -> None:
    import msgspec

    write_manifest(tmp_path, msgspec.structs.replace(manifest(), format=2))
    with pytest.raises(CheckpointError, match="has format 2 and this version reads up to 1: use the version"):
        read_manifest(tmp_path)


def test_the_marker_needs_the_manifest_and_names_it(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"there is no finished checkpoint at .* manifest.json is missing"
    ):
        commit_marker(tmp_path)
    assert not is_committed(tmp_path) and not is_committed(tmp_path / "nowhere")
    write_manifest(tmp_path, manifest())
    assert not is_committed(tmp_path)
    commit_marker(tmp_path)
    commit_marker(tmp_path)
    assert is_committed(tmp_path)
    write_manifest(tmp_path, manifest(step=5))  # another manifest: the marker does not speak for it
    assert not is_committed(tmp_path)


def test_newest_first_by_generation_then_step(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "nowhere") == ()
    for step, generation in [(10, 1), (30, 1), (20, 2), (100, 2), (9, 1)]:
        place(tmp_path, step, generation)
    (tmp_path / "step-x.gen-1").mkdir()
    (tmp_path / "notes.txt").touch()
    want = ["step-100.gen-2", "step-20.gen-2", "step-30.gen-1", "step-10.gen-1", "step-9.gen-1"]
    assert names(tmp_path) == want


PRUNE: list[tuple[str, list[tuple[int, int, bool]], int, list[str]]] = [
    ("nothing there", [], 1, []),
    ("fewer than kept", [(1, 1, True)], 2, ["step-1.gen-1"]),
    ("oldest go", [(1, 1, True), (2, 1, True), (3, 1, True)], 2, ["step-3.gen-1", "step-2.gen-1"]),
    ("none committed: all stay", [(1, 1, False), (2, 1, False)], 1, ["step-2.gen-1?", "step-1.gen-1?"]),
    ("a save under way stays", [(1, 1, True), (2, 1, False)], 1, ["step-2.gen-1?", "step-1.gen-1"]),
    (
        "stale of an older generation goes",
        [(1, 1, True), (2, 1, False), (2, 2, True)],
        2,
        ["step-2.gen-2", "step-1.gen-1"],
    ),
    (
        "an abandoned timeline is older",
        [(9, 1, True), (5, 2, True), (6, 2, True)],
        2,
        ["step-6.gen-2", "step-5.gen-2"],
    ),
    (
        "a newer generation's save stays",
        [(1, 1, True), (2, 1, False), (2, 2, False)],
        1,
        ["step-2.gen-2?", "step-2.gen-1?", "step-1.gen-1"],
    ),
]


@pytest.mark.parametrize(("name", "there", "keep", "left"), PRUNE, ids=[each[0] for each in PRUNE])
def test_prune(
    tmp_path: Path, name: str, there: list[tuple[int, int, bool]], keep: int, left: list[str]
) -> None:
    for step, generation, committed in there:
        place(tmp_path, step, generation, committed)
    removed = prune(tmp_path, keep)
    assert names(tmp_path) == left
    assert len(removed) == len(there) - len(left)
    assert prune(tmp_path, keep) == ()


@pytest.mark.parametrize("calls", range(8))
def test_a_removal_that_dies_leaves_nothing_that_looks_whole(
    calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after so many of the calls that change the directory; the next pruning finishes the work."""
    old = place(tmp_path, 1, 1)
    place(tmp_path, 2, 1)
    left = calls

    def mortal(call: Callable[..., None]) -> Callable[..., None]:
        def dies(*arguments: object, **how: object) -> None:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            call(*arguments, **how)

        return dies

    with monkeypatch.context() as patched:
        for name in ("unlink", "rmdir"):
            patched.setattr(Path, name, mortal(getattr(Path, name)))
        patched.setattr(manifest_module, "sync_directory", mortal(sync_directory))
        with contextlib.suppress(KeyboardInterrupt):
            prune(tmp_path, 1)
    assert old.exists() == (calls < 6), "six calls change the directory"
    assert is_committed(old) == (calls == 0)
    assert (old / "__0_0.distcp").exists() or not (old / MANIFEST_NAME).exists()
    prune(tmp_path, 1)
    assert names(tmp_path) == ["step-2.gen-1"]


def test_file_sums_read_all(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"123456789")
    assert file_sum(tmp_path / "f") == FileSum("f", 9, 0xCBF43926)  # CRC-32's check value


SENTENCES = [
    (errno.ENOSPC, "is full: free space there"),
    (errno.EDQUOT, "is full: free space there"),
    (errno.EROFS, "is read-only: mount it writable"),
    (errno.EACCES, "does not let this user write: change its permissions"),
    (errno.EIO, r"could not be used to write \(Input/output error\): check the storage below it"),
]


@pytest.mark.parametrize(("code", "sentence"), SENTENCES)
def test_storage_errors_are_sentences(code: int, sentence: str) -> None:
    error = storage_error("/runs/ckpt", OSError(code, os.strerror(code)), "write")
    with pytest.raises(CheckpointError, match=f"the checkpoint directory /runs/ckpt {sentence}"):
        raise error


def test_read_only_storage(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "disk", "size=1m") as disk:
        for step in (1, 2):
            path = place(disk, step, 1, committed=False)
        commit_marker(checkpoint_path(disk, 1, 1))
        (path / MARKER_NAME).write_bytes((checkpoint_path(disk, 1, 1) / MARKER_NAME).read_bytes())
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(CheckpointError, match="is read-only"):
            write_manifest(path, manifest())
        with pytest.raises(CheckpointError, match="is read-only"):
            commit_marker(path)
        assert names(disk) == ["step-2.gen-1?", "step-1.gen-1"]


def test_a_full_disk_at_manifest_or_marker_leaves_neither(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "disk", "size=64k") as disk:
        path = place(disk, 1, 1, committed=False)
        with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(b"x" * 4096)
        with pytest.raises(CheckpointError, match="is full: free space there"):
            commit_marker(path)
        assert not is_committed(path)
        (path / MANIFEST_NAME).unlink()
        with (disk / "filler2").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(b"x" * 4096)
        with pytest.raises(CheckpointError, match="is full: free space there"):
            write_manifest(path, manifest())
        assert sorted(os.listdir(path)) == ["__0_0.distcp"]


LISTER = """
from myriad.cli.main import main
from myriad.storage.durable.manifest import list_checkpoints
main(["checkpoint", "ls", sys.argv[1]])  # as root, to import what the command needs
become_nobody()
print("nobody:")
try: print("found", *(each.path for each in list_checkpoints(sys.argv[1])))
except Exception as error: print(type(error).__name__, error)
sys.stderr = sys.stdout
print("exit", main(["checkpoint", "ls", sys.argv[1]]))
"""


@pytest.mark.parametrize("closed", ["c", "c/step-1.gen-1", "."])
def test_no_right_to_list_is_not_no_checkpoint(closed: str, tmp_path: Path) -> None:
    """The directory, the checkpoint in it, or the folder above is closed to this user."""
    place(tmp_path / "outer" / "c", 1, 1)
    for folder in (tmp_path / "outer", tmp_path / "outer" / "c", tmp_path / "outer" / "c" / "step-1.gen-1"):
        folder.chmod(0o755)
    assert "nobody:\nfound c/step-1.gen-1\n" in as_nobody(tmp_path / "outer", LISTER, "c")
    (tmp_path / "outer" / closed).chmod(0o700)
    said = as_nobody(tmp_path / "outer", LISTER, "c").partition("nobody:")[2]
    api, command, code = said.splitlines()[1:]
    assert api.startswith("CheckpointError the checkpoint directory c") and "does not let this user" in api
    assert code in ("exit 1", "exit 2") and ("does not let this user" in command or "not readable" in command)


def test_a_damaged_marker_commits_nothing(tmp_path: Path) -> None:
    path = place(tmp_path, 1, 1)
    size = (path / MARKER_NAME).stat().st_size
    for at in range(size):
        flip_bit(path / MARKER_NAME, at)
        assert not is_committed(path)
        flip_bit(path / MARKER_NAME, at)
    assert is_committed(path)
    os.truncate(path / MARKER_NAME, size // 2)
    assert not is_committed(path)


def test_an_older_generation_that_still_writes_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker stopped in mid-save wakes after the recovery: its files are another folder's, and go with it."""
    current, stale = place(tmp_path, 5, 2), place(tmp_path, 9, 1, committed=False)
    before = {file.name: file.read_bytes() for file in current.iterdir()}
    assert names(tmp_path) == ["step-5.gen-2", "step-9.gen-1?"]
    iterdir = Path.iterdir

    def with_a_late_file(path: Path) -> list[Path]:
        files = list(iterdir(path))
        if path == stale:
            (stale / "__1_0.distcp").write_bytes(b"late")
        return files

    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", with_a_late_file)
        prune(tmp_path, 1)
    assert os.listdir(stale) == ["__1_0.distcp"], "one that writes while it is removed stops nobody"
    prune(tmp_path, 1)
    assert names(tmp_path) == ["step-5.gen-2"]
    with pytest.raises(CheckpointError):
        write_manifest(stale, manifest(9, 1))
    assert names(tmp_path) == ["step-5.gen-2"]
    assert {file.name: file.read_bytes() for file in current.iterdir()} == before


def test_only_the_checkpoint_module_imports_torch() -> None:
    modules = "memory.channel memory.keeper memory.snapshot datasets.builder datasets.index datasets.loader"
    names = ", ".join(f"myriad.storage.{name}" for name in [*modules.split(), "durable.manifest"])
    program = f"import sys, {names}; sys.exit('torch' in sys.modules or 'tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
