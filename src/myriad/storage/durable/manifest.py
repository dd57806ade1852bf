"""What a durable checkpoint consists of, whether it is committed, and which ones there are.

A checkpoint is the directory ``<directory>/step-<N>.gen-<G>`` with the files of PyTorch DCP,
``manifest.json`` (its own SHA-256 inside) and, once the controller has journaled the commit,
``COMMITTED`` holding the manifest's SHA-256. Every file is written under another name, synced, renamed,
and its directory synced, so each either is there whole or is not there.

The controller's journal is the truth on what is committed; the marker tells people and tools without a
journal. A checkpoint that is journaled but lost its writer before the marker can therefore be loaded.
Order is (generation, step): after a restart from an earlier step, what an abandoned generation wrote
beyond that step is older than all that follows. Torch-free; an operation costs two fsyncs, 1 to 20 ms.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from isal.isal_zlib import crc32

from myriad.spec.messages import FileSum

FORMAT = 1
MANIFEST_NAME = "manifest.json"
MARKER_NAME = "COMMITTED"
COPYING_NAME = ".copying"  # in the checkpoint directory: the name of the one checkpoint that is being copied
# Of a manifest's meta, in checkpoints of ``model:`` jobs: what one must know to use the weights elsewhere.
MODEL_KEY, SEQUENCE_LENGTH_KEY = "model", "sequence_length"
CHECKSUM_CHUNK_BYTES = 1 << 20
_NAME = re.compile(r"step-(\d+)\.gen-(\d+)")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or found; the sentence says what to do."""


class CheckpointCorrupt(CheckpointError):
    """A file of a checkpoint is not what was written; use another tier or an older checkpoint."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All one needs to know to trust and use the files of one checkpoint."""

    format: int = FORMAT
    step: int  # finished optimizer steps
    generation: int
    position: int  # samples consumed
    world_size: int
    layout: dict[str, Any]
    versions: dict[str, str]
    files: tuple[FileSum, ...]
    meta: dict[str, Any] = {}

    def file(self, name: str) -> FileSum | None:
        return next((each for each in self.files if each.path == name), None)


class _Envelope(msgspec.Struct, frozen=True):
    """What ``manifest.json`` holds: the manifest's exact bytes, and their hash."""

    sha256: str
    manifest: msgspec.Raw


class _Format(msgspec.Struct, frozen=True):
    format: int


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint directory that exists, whole or not."""

    path: Path
    step: int
    generation: int
    committed: bool


def checkpoint_path(directory: str | os.PathLike[str], step: int, generation: int) -> Path:
    return Path(directory) / f"step-{step}.gen-{generation}"


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` into the checkpoint directory ``path``, whole and synced. CheckpointError."""
    body = msgspec.json.encode(manifest)
    envelope = _Envelope(hashlib.sha256(body).hexdigest(), msgspec.Raw(body))
    _write_synced(path / MANIFEST_NAME, msgspec.json.encode(envelope))


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint directory ``path``. Raises CheckpointError or CheckpointCorrupt."""
    file = path / MANIFEST_NAME
    try:
        return decode_manifest(file.read_bytes(), str(file))
    except FileNotFoundError:
        raise CheckpointError(
            f"there is no finished checkpoint at {path}: {MANIFEST_NAME} is missing; resume from another one"
        ) from None
    except OSError as error:
        raise storage_error(path, error, "read") from error


def decode_manifest(content: bytes, file: str) -> Manifest:
    """The manifest in the bytes of ``file``. Raises CheckpointError or CheckpointCorrupt."""
    try:
        envelope = msgspec.json.decode(content, type=_Envelope)
        if hashlib.sha256(envelope.manifest).hexdigest() != envelope.sha256:
            raise CheckpointCorrupt(f"{file} fails its own checksum; resume from another checkpoint")
        format_ = msgspec.json.decode(envelope.manifest, type=_Format).format
        if format_ > FORMAT:
            raise CheckpointError(
                f"{file} has format {format_} and this version reads up to {FORMAT}: "
                "use the version of myriad that wrote it, or a newer one"
            )
        return msgspec.json.decode(envelope.manifest, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointCorrupt(f"{file} is no manifest ({error}); resume from another checkpoint") from None


def marker_of(manifest: bytes) -> bytes:
    """What the marker beside a manifest of these bytes holds."""
    return hashlib.sha256(manifest).hexdigest().encode() + b"\n"


def commit_marker(path: Path) -> None:
    """Mark the checkpoint directory ``path`` as committed; only after the controller journaled it.

    May be repeated. Raises CheckpointError when the manifest is missing or the storage refuses.
    """
    read_manifest(path)
    _write_synced(path / MARKER_NAME, marker_of((path / MANIFEST_NAME).read_bytes()))


def is_committed(path: Path) -> bool:
    """Whether the marker is there and names this very manifest. Raises CheckpointError if unreadable."""
    try:
        return (path / MARKER_NAME).read_bytes().strip() == marker_of(
            (path / MANIFEST_NAME).read_bytes()
        ).strip()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise storage_error(path, error, "read") from error


def list_checkpoints(directory: str | os.PathLike[str]) -> tuple[Checkpoint, ...]:
    """All checkpoints below ``directory``, newest first; none where the directory does not exist.

    Raises CheckpointError where it exists and cannot be listed: that is not "no checkpoint".
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise storage_error(directory, error, "list") from error
    found = []
    for name in names:
        if (parsed := step_and_generation(name)) is not None:
            path = Path(directory) / name
            found.append(Checkpoint(path, *parsed, is_committed(path)))
    return newest_first(found)


def step_and_generation(name: str) -> tuple[int, int] | None:
    """What a checkpoint's name says; None for any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]))


def newest_first(found: Iterable[Checkpoint]) -> tuple[Checkpoint, ...]:
    return tuple(sorted(found, key=lambda each: (each.generation, each.step), reverse=True))


def prunable(directory: str | os.PathLike[str], keep: int) -> tuple[Checkpoint, ...]:
    """What :func:`prune` would remove now, newest first."""
    copying = under_copy(directory)
    return tuple(each for each in superfluous(list_checkpoints(directory), keep) if each.path.name != copying)


def superfluous(checkpoints: tuple[Checkpoint, ...], keep: int) -> tuple[Checkpoint, ...]:
    """Of ``checkpoints``, newest first, those that are not worth their room."""
    assert keep >= 1, keep
    committed = [each for each in checkpoints if each.committed]
    if not committed:
        return ()
    older = checkpoints[checkpoints.index(committed[0]) + 1 :]
    return tuple(each for each in older if each not in committed[:keep])


def prune(directory: str | os.PathLike[str], keep: int) -> tuple[Checkpoint, ...]:
    """Remove all but the ``keep`` newest committed checkpoints, and return what was removed.

    Uncommitted ones older than the newest committed one go too: their writers are fenced or have moved
    on. Newer ones stay, since somebody may be writing them, and so does everything while none is committed; so
    does the one that is being copied to object storage, one at a time.
    """
    removed = prunable(directory, keep)
    for each in reversed(removed):  # oldest first: what an interruption leaves is the newer part
        _remove(each.path)
    return removed


def set_under_copy(directory: str | os.PathLike[str], name: str | None) -> None:
    """From now on :func:`prune` spares the checkpoint ``name``, or none. Raises CheckpointError."""
    file = Path(directory) / COPYING_NAME
    if name is not None:
        _write_synced(file, name.encode())
        return
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(directory, error, "write") from error


def under_copy(directory: str | os.PathLike[str]) -> str | None:
    """The name of the checkpoint that is being copied. Raises CheckpointError."""
    try:
        return (Path(directory) / COPYING_NAME).read_text(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise storage_error(directory, error, "read") from error


def stored_bytes(path: Path) -> int:
    """The bytes of all files of the checkpoint directory ``path``, whole or not. Raises CheckpointError."""
    try:
        return sum(file.stat().st_size for file in path.iterdir())
    except FileNotFoundError:  # the job itself prunes as well
        return 0
    except OSError as error:
        raise storage_error(path.parent, error, "list") from error


def file_sum(path: Path) -> FileSum:
    """Size and CRC-32 of one file, named by its last part. About 1 s a GB."""
    crc, size, buffer = 0, 0, memoryview(bytearray(CHECKSUM_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc, size = crc32(buffer[:count], crc), size + count
    return FileSum(path.name, size, crc)


def read_summed(path: Path) -> tuple[FileSum, io.BytesIO]:
    """A file's sum as :func:`file_sum` gives it, and the very bytes that were summed, read once."""
    with path.open("rb", buffering=0) as file:
        stream = io.BytesIO(bytes(os.fstat(file.fileno()).st_size))
        crc, size = 0, 0
        with stream.getbuffer() as whole:
            while size < len(whole) and (count := file.readinto(whole[size : size + CHECKSUM_CHUNK_BYTES])):
                crc, size = crc32(whole[size : size + count], crc), size + count
    return FileSum(path.name, size, crc), stream


def damage(path: Path) -> tuple[str, ...]:
    """What of the checkpoint directory ``path`` is not as it was written, in sentences; reads every byte."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return (str(error),)
    found = []
    for want in manifest.files:
        try:
            got = file_sum(path / want.path)
        except FileNotFoundError:
            found.append(f"{want.path} is missing")
            continue
        except OSError as error:
            found.append(f"{want.path} cannot be read ({error.strerror})")
            continue
        if got.size != want.size:
            found.append(f"{want.path} has {got.size} of {want.size} bytes")
        elif got.crc32 != want.crc32:
            found.append(f"{want.path} fails its checksum")
    return tuple(found)


def sync_directory(path: Path) -> None:
    """Make the names in ``path`` durable; file contents are synced by their writers."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def storage_error(directory: str | os.PathLike[str], error: OSError, doing: str) -> CheckpointError:
    """The one sentence for what the storage below ``directory`` refused; ``doing`` is a verb."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            why = "is full: free space there or set checkpoint.directory to a larger file system"
        case errno.EROFS:
            why = "is read-only: mount it writable or set checkpoint.directory to another one"
        case errno.EACCES | errno.EPERM:
            why = f"does not let this user {doing}: change its permissions or set checkpoint.directory"
        case _:
            why = f"could not be used to {doing} ({error.strerror or error}): check the storage below it"
    return CheckpointError(f"the checkpoint directory {os.fspath(directory)} {why}")


def _write_synced(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        sync_directory(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True) if error.errno != errno.EROFS else None
        raise storage_error(path.parent, error, "write") from error


def _remove(path: Path) -> None:
    """Delete one checkpoint: marker, then manifest, then data; whatever a crash leaves does not look whole."""
    try:
        for name in (MARKER_NAME, MANIFEST_NAME):
            (path / name).unlink(missing_ok=True)
            sync_directory(path)
        for file in path.iterdir():
            file.unlink(missing_ok=True)
        path.rmdir()
    except OSError as error:
        # Another one was faster, or a writer of an old generation has just added a file: the next time takes it.
        if error.errno in (errno.ENOENT, errno.ENOTEMPTY):
            return
        raise storage_error(path.parent, error, "delete old checkpoints") from error
