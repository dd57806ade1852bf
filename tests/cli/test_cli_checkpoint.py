"""``myriad checkpoint ls`` and ``verify``: what is told of checkpoints that are whole, damaged, unfinished or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from myriad.cli.main import main
from myriad.storage.durable.manifest import (
    Manifest,
    checkpoint_path,
    commit_marker,
    file_sum,
    write_manifest,
)


def checkpoint(directory: Path, step: int, generation: int = 1, committed: bool = True) -> Path:
    """A checkpoint of two ranks with a kilobyte each."""
    path = checkpoint_path(directory, step, generation)
    path.mkdir(parents=True)
    for rank in (0, 1):
        (path / f"__{rank}_0.distcp").write_bytes(bytes([rank, step]) * 512)
    files = tuple(file_sum(file) for file in sorted(path.iterdir()))
    manifest = Manifest(
        step=step,
        generation=generation,
        position=8 * step,
        world_size=2,
        layout={"tp": 2},
        versions={"torch": "2.13.0"},
        files=files,
    )
    write_manifest(path, manifest)
    if committed:
        commit_marker(path)
    return path


def test_checkpoints_are_listed_newest_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 20)
    checkpoint(tmp_path, 15, generation=2, committed=False)
    checkpoint_path(tmp_path, 30, 2).mkdir()  # a save that has just begun
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    head, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head == ["step", "generation", "committed", "ranks", "position", "files", "size"]
    assert [row[:3] for row in rows] == [
        ["30", "2", "no"],
        ["15", "2", "no"],
        ["20", "1", "yes"],
        ["10", "1", "yes"],
    ]
    assert rows[0][3:] == ["-"] * 4 and rows[2][3:] == ["2", "160", "2", "2", "KiB"]
    assert main(["checkpoint", "ls", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found[3]["layout"] == {"tp": 2} and found[3]["size"] == 2048 and found[0]["ranks"] is None


def flip(path: Path) -> None:
    file = path / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[700] ^= 4
    file.write_bytes(data)


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("a flipped bit", flip, "__1_0.distcp fails its checksum"),
    (
        "cut short",
        lambda path: os.truncate(path / "__0_0.distcp", 1000),
        "__0_0.distcp has 1000 of 1024 bytes",
    ),
    ("a lost file", lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    (
        "a damaged manifest",
        lambda path: (path / "manifest.json").write_text("{"),
        "is no manifest (",
    ),
]


@pytest.mark.parametrize(("name", "harm", "want"), DAMAGES, ids=[name for name, _, _ in DAMAGES])
def test_damage_is_named_and_fails_the_command(
    name: str, harm: Callable[[Path], object], want: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = checkpoint(tmp_path, 10), checkpoint(tmp_path, 20)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("(committed): as written") == 2
    harm(bad)
    marked = name != "a damaged manifest"  # a marker names its very manifest
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{bad.name} ({'committed' if marked else 'not committed'}): ") and want in first
    assert second == f"{good.name} (committed): as written"
    main(["checkpoint", "verify", str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert want in found[0]["damage"][0] and found[1]["damage"] == []


def test_what_is_damaged_and_was_never_committed_fails_nothing(tmp_path: Path) -> None:
    flip(checkpoint(tmp_path, 20, committed=False))
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0


def test_nothing_there_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("ls", "verify"):
        assert main(["checkpoint", command, str(tmp_path / "nowhere")]) == 3
        assert capsys.readouterr().err == f"there is no directory {tmp_path / 'nowhere'}\n"
        assert main(["checkpoint", command, str(tmp_path)]) == 3
        assert "has no checkpoints; give the directory in which step-N.gen-G lie" in capsys.readouterr().err
