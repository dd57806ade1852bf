"""``myriad data build``: the same bytes by any number of workers and over any kill, and what it says of damage."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from myriad.cli.main import main

LINES = 60_000
BUILD = [sys.executable, "-m", "myriad.cli.main", "data", "build"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 40 MB of all kinds, with one damaged line beyond the first piece of its file."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(4)
    rows = [json.dumps({"text": f"{i} " + "x" * rng.randrange(900)}) for i in range(LINES)]
    rows[50_000] = "{"
    (folder / "a.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(rows[:5000]).encode()))
    table = pyarrow.table({"text": [f"{rng.random()}" * 20 for _ in range(25_000)]})
    pyarrow.parquet.write_table(table, folder / "c.parquet", row_group_size=2000)
    (folder / "d.txt").write_text("one file\n")
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in sorted(folder.iterdir())}


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_bytes(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for workers in ("1", "2", "3"):
        prefix = tmp_path / workers / "set"
        options = ["--workers", workers, "--validation", "0.1"]
        assert main(["data", "build", str(corpus), "--out", str(prefix), *options]) == 0
        captured = capsys.readouterr()
        assert f"left out: {corpus / 'a.jsonl'}:50001: not JSON\n" in captured.err
        assert "left out in all: 1 (not JSON)" in captured.err
        assert [line.split(":")[0] for line in captured.out.splitlines()] == [
            str(prefix),
            f"{prefix}.validation",
        ]
        found.append(files(prefix.parent))
    assert found[0] == found[1] == found[2]
    names = [f"set{side}.{suffix}" for side in ("", ".validation") for suffix in ("bin", "idx", "json")]
    assert list(found[0]) == names
    shown = tmp_path / "1" / "set.validation"
    assert main(["data", "verify", str(shown)]) == 0
    assert main(["data", "show", str(shown)]) == 0
    text = capsys.readouterr().out
    assert "from files: 2 of jsonl, 1 of parquet, 1 of text (" in text
    assert "left out: 1 (not JSON)" in text and "the validation side of a validation share of 0.1" in text


def test_strict_refuses_the_first_damage_and_leaves_nothing(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for workers in ("1", "2"):
        options = ["--workers", workers, "--strict"]
        assert main(["data", "build", str(corpus), "--out", str(tmp_path / "o" / "set"), *options]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith(f"{corpus / 'a.jsonl'}:50001: not JSON; mend or remove it")
        assert list((tmp_path / "o").iterdir()) == []


@pytest.mark.slow
def test_a_second_build_of_the_same_prefix_is_refused(corpus: Path, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "set"), "--workers", "1"]
    first = subprocess.Popen([*BUILD, str(corpus), *out], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        wait_for_parts(tmp_path / "set.parts", 1)
        second = subprocess.run([*BUILD, str(corpus), *out], capture_output=True, text=True, check=False)
    finally:
        first.communicate(timeout=60)
    assert second.returncode == 2 and "another build is writing" in second.stderr
    assert first.returncode == 0


def wait_for_parts(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(list(folder.glob("*.json"))) < count:
        assert time.monotonic() < deadline, f"no {count} parts in {folder}"
        time.sleep(0.005)


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_killed_build_is_finished_by_the_same_command(corpus: Path, tmp_path: Path, seed: int) -> None:
    """The builder on even seeds, one of its workers on odd ones."""
    rng = random.Random(seed)
    subprocess.run([*BUILD, str(corpus), "--out", str(tmp_path / "1" / "set")], check=True)
    command = [*BUILD, str(corpus), "--out", str(tmp_path / "2" / "set"), "--workers", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    parts = tmp_path / "2" / "set.parts"
    wait_for_parts(parts, rng.randrange(1, 3))
    time.sleep(rng.random() / 10)
    victim = rng.choice(children(process.pid)) if seed % 2 else process.pid
    os.kill(victim, signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    if seed % 2:
        assert process.returncode == 2
        assert f"(pid {victim}) was killed by SIGKILL while it read {corpus}" in said, said
    assert not (tmp_path / "2" / "set.idx").exists()
    assert list(parts.glob("*.json"))
    subprocess.run([*command[:-1], "3"], stderr=subprocess.DEVNULL, check=True)
    assert files(tmp_path / "1") == files(tmp_path / "2")


@pytest.mark.slow
def test_a_damaged_part_is_made_again(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "set"
    process = subprocess.Popen([*BUILD, str(corpus), "--out", str(out)], stderr=subprocess.DEVNULL)
    wait_for_parts(tmp_path / "set.parts", 1)
    process.kill()
    process.wait(60)
    whole = next((tmp_path / "set.parts").glob("*.json")).stem
    file = tmp_path / "set.parts" / f"{whole}.train.tokens"
    data = bytearray(file.read_bytes())
    data[1000] ^= 1
    file.write_bytes(data)
    assert main(["data", "build", str(corpus), "--out", str(out)]) == 2
    assert f"{file} is damaged; run the same command again" in capsys.readouterr().err
    assert main(["data", "build", str(corpus), "--out", str(out)]) == 0
    assert main(["data", "verify", str(out)]) == 0
    assert not (tmp_path / "set.parts").exists()
