"""Data sets on real S3 servers: what they say to ranges, conditions and rights, and the commands on their URLs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_remote_data import S, batches, texts

from myriad.cli.main import main
from myriad.storage.datasets.builder import build
from myriad.storage.datasets.index import DatasetError
from myriad.storage.objects import open_store
from objects import Server, moto, moto_server, restricted, s3

__all__ = ["moto", "moto_server", "s3"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_bytes(bytes(97 + (7 * i * i + i) % 26 for i in range(8000)))
    build([tmp_path / "a.txt"], tmp_path / "a")
    return tmp_path / "a"


def upload(text: Path) -> None:
    store = open_store("s3://bucket")
    for suffix in (".bin", ".idx", ".json"):
        store.write(f"text/a{suffix}", text.with_suffix(suffix))


def test_the_commands(moto: Server, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    upload(text)
    assert S == 8 and texts(batches([("s3://bucket/text/a", 1)])) == texts(batches([(str(text), 1)]))
    assert main(["data", "show", "s3://bucket/text/a", "--json"]) == 0
    there = json.loads(capsys.readouterr().out)
    assert main(["data", "show", str(text), "--json"]) == 0
    assert there == json.loads(capsys.readouterr().out) | {"prefix": "s3://bucket/text/a"}
    assert main(["data", "verify", "s3://bucket/text/a"]) == 0
    assert capsys.readouterr().out.startswith("s3://bucket/text/a: as built, 1 documents, 8,001 tokens")
    open_store("s3://bucket").write("text/a.bin", bytes(16002))
    assert main(["data", "verify", "s3://bucket/text/a"]) == 2
    assert "s3://bucket/text/a.bin is not what was built: its hash differs" in capsys.readouterr().err
    assert main(["data", "show", "s3://bucket/text/b"]) == 2
    assert (
        "there is no data set at s3://bucket/text/b: s3://bucket/text/b.idx is mis" in capsys.readouterr().err
    )


def test_a_server_that_knows_no_ranges(s3: Server, text: Path) -> None:
    """rclone sends the right bytes with the wrong status, so nobody can be sure."""
    upload(text)
    with pytest.raises(
        DatasetError, match=r"the server of s3://bucket/text/a.idx does not answer requests for"
    ):
        batches([("s3://bucket/text/a", 1)])


def test_rights(moto: Server, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upload(text)
    want = texts(batches([(str(text), 1)]))
    assert texts(batches([("s3://bucket/text/a", 1)])) == want
    for key, value in restricted(moto, ["s3:ListBucket"]).items():
        monkeypatch.setenv(key, value)
    with pytest.raises(DatasetError, match=r"^s3://bucket/text/a.idx does not let these credentials read"):
        batches([("s3://bucket/text/a", 1)])
