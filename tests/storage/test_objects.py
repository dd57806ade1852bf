"""Objects by their names, and every refusal of a server as one sentence."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from myriad.storage.objects import CHUNK_BYTES, ObjectError, ObjectMissing, check_url, is_url, open_store
from objects import BUCKET, SECRET_KEY, Server, free_port, moto, moto_server, restricted

__all__ = ["moto", "moto_server"]

URL = f"s3://{BUCKET}/run/one"


@pytest.mark.parametrize("size", (0, 1, CHUNK_BYTES + 1), ids=("empty", "a byte", "two chunks"))
def test_what_was_written_is_read(moto: Server, tmp_path: Path, size: int) -> None:
    content = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    (tmp_path / "file").write_bytes(content)
    objects = open_store(URL)
    objects.write("a/file", tmp_path / "file")
    objects.write("a/bytes", content)
    assert objects.size("a/file") == size
    assert objects.sizes() == {"a/bytes": size, "a/file": size} and objects.sizes("b") == {}
    assert objects.read("a/file") == objects.read("a/bytes") == content
    objects.delete(["a/file", "a/never"])
    assert objects.sizes("a") == {"a/bytes": size}


def test_a_folder_serves_as_well(tmp_path: Path) -> None:
    objects = open_store(f"file://{tmp_path}/new/place")
    objects.write("a/b", b"content")
    assert objects.sizes("a") == {"a/b": 7} and objects.read("a/b") == b"content"
    with pytest.raises(ObjectMissing, match="there is no object file://.*/new/place/c"):
        objects.read("c")


@pytest.mark.parametrize(
    ("url", "sentence"),
    (
        ("s3://", "s3:// must be s3://BUCKET/PREFIX, with credentials in the environment"),
        ("s3://key:secret@bucket/x", "s3://bucket/x must be s3://BUCKET/PREFIX, with credentials in the env"),
        ("s3://bucket/x?secret=1", "s3://bucket/x must be a plain prefix: remove what follows ? or #"),
        ("ftp://host/x", "ftp:// is no object storage known here; use s3, gs, az, file"),
    ),
)
def test_a_url_that_cannot_be_meant(url: str, sentence: str) -> None:
    assert is_url(url)
    with pytest.raises(ObjectError, match=re.escape(sentence)) as said:
        check_url(url)
    assert "secret=" not in str(said.value) and "key:" not in str(said.value)


def test_refusals(moto: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """No such bucket, no object, no right to list, no right to write, nobody there."""
    open_store(URL).write("there", b"x")
    elsewhere = open_store("s3://nowhere/run")
    for refused in (
        lambda: elsewhere.write("x", b"x"),
        elsewhere.sizes,
        lambda: elsewhere.read_range("x", 0, 1),
    ):
        with pytest.raises(
            ObjectError, match="there is no bucket nowhere to .*: create it, or correct the URL"
        ):
            refused()
    with pytest.raises(ObjectMissing, match=f"there is no object {URL}/never"):
        open_store(URL).read("never")
    assert open_store("s3://bucket/empty").sizes() == {}
    for name, value in restricted(moto, ["s3:GetObject"]).items():
        monkeypatch.setenv(name, value)
    reader = open_store(URL)
    assert reader.read("there") == b"x"
    with pytest.raises(ObjectError, match=r"does not let these credentials list \(AccessDenied\): change"):
        reader.sizes()
    with pytest.raises(ObjectError, match=r"does not let these credentials write \(AccessDenied\): change"):
        reader.write("more", b"x")


def test_a_part_of_an_object(moto: Server) -> None:
    objects = open_store(URL)
    objects.write("digits", b"0123456789")
    assert objects.read_range("digits", 3, 4) == b"3456" and objects.size("digits") == 10


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ENDPOINT_URL": f"http://127.0.0.1:{free_port()}", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    began = time.monotonic()
    with pytest.raises(ObjectError, match=f"{URL} cannot be reached to list at http://127.0.0.1") as said:
        open_store(URL).sizes()
    assert SECRET_KEY not in str(said.value) and time.monotonic() - began < 10
