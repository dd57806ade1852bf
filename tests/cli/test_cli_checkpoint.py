"""``myriad checkpoint``: what is told of checkpoints that are whole, damaged, unfinished or not there; prune, export, import."""

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
    for command, *rest in (["ls"], ["verify"], ["prune", "--keep", "1"], ["export", str(tmp_path / "out")]):
        options, out = (rest, []) if command == "prune" else ([], rest)
        assert main(["checkpoint", command, *options, str(tmp_path / "nowhere"), *out]) == 3
        assert capsys.readouterr().err == f"there is no directory {tmp_path / 'nowhere'}\n"
        assert main(["checkpoint", command, *options, str(tmp_path), *out]) == 3
        assert "has no checkpoints; give the directory in which step-N.gen-G lie" in capsys.readouterr().err


def test_prune_says_what_goes_and_then_removes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (10, 20, 30):
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 25, committed=False)
    checkpoint(tmp_path, 40, generation=2, committed=False)
    before = sorted(os.listdir(tmp_path))
    command = ["checkpoint", "prune", str(tmp_path), "--keep", "2"]
    assert main([*command, "--dry-run"]) == 0
    *gone, total = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in gone] == [
        "step-25.gen-1 (not committed)",
        "step-10.gen-1 (committed)",
    ]
    assert total.startswith("would free ") and total.endswith(" kB, 2 checkpoints")
    assert sorted(os.listdir(tmp_path)) == before
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["removed"]) == 2 and found["freed_bytes"] > 4 * 1024 and not found["dry_run"]
    assert sorted(os.listdir(tmp_path)) == ["step-20.gen-1", "step-30.gen-1", "step-40.gen-2"]
    assert main(command) == 0
    assert capsys.readouterr().out == "freed 0 B, 0 checkpoints\n"
    assert main(["checkpoint", "prune", str(tmp_path), "--keep", "0"]) == 2


def test_export_and_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from myriad.spec.job import ModelSpec
    from myriad.storage.durable.checkpoint import save
    from myriad.storage.durable.llama import weights
    from myriad.storage.durable.manifest import MODEL_KEY

    spec = ModelSpec(layers=1, dim=8, heads=2, kv_heads=1, ffn_dim=8, vocab_size=9)
    tensors = {f"model.{each.ours}": torch.ones(each.shape) for each in weights(spec)}
    runs, folder = tmp_path / "runs", tmp_path / "hf"
    for step in (1, 2, 3):
        meta = {MODEL_KEY: spec.model_dump(mode="json")}
        save(runs, step, 1, tensors, None, position=0, layout={}, meta=meta)
        if step < 3:
            commit_marker(checkpoint_path(runs, step, 1))
    assert main(["checkpoint", "export", str(runs), str(folder)]) == 0
    assert capsys.readouterr().out.startswith(f"{folder}: the model of step-2.gen-1, ")
    config = json.loads((folder / "config.json").read_text())
    assert config["num_key_value_heads"] == 1 and config["torch_dtype"] == "float32"
    other = tmp_path / "other"
    assert main(["checkpoint", "export", str(runs), str(other), "--step", "1", "--dtype", "bfloat16"]) == 0
    assert json.loads((other / "config.json").read_text())["torch_dtype"] == "bfloat16"
    capsys.readouterr()
    assert main(["checkpoint", "export", str(runs), str(tmp_path / "x"), "--step", "3"]) == 3
    assert "has no committed checkpoint of step 3; committed steps: 2, 1" in capsys.readouterr().err
    assert main(["checkpoint", "export", str(runs), str(folder)]) == 1
    assert "it exists already; remove it" in capsys.readouterr().err
    assert main(["checkpoint", "import", str(folder), str(tmp_path / "new"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"] == str(tmp_path / "new" / "step-0.gen-0")
    assert main(["checkpoint", "ls", str(tmp_path / "new")]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["0", "0", "yes"]
    (folder / "pytorch_model.bin").touch()
    assert main(["checkpoint", "import", str(folder), str(tmp_path / "newer")]) == 1
    assert "is a pickle, which can run code when it is read" in capsys.readouterr().err
