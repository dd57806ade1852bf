"""Small files written whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any


def write_atomic(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace ``path`` by ``data``: a reader sees the old or the new content, also after a crash."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_json(path: Path, value: Any, mode: int = 0o600) -> None:
    write_atomic(path, json.dumps(value).encode(), mode)


def read_json(path: Path) -> dict[str, Any] | None:
    """The document, or None when there is none."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    assert isinstance(found, dict), path
    return found


def secret(path: Path) -> str:
    """The secret in ``path`` (mode 0600), made at the first call."""
    if not path.exists():
        write_atomic(path, secrets.token_hex(32).encode())
    return path.read_text()
