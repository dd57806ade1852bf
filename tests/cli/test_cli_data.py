"""``myriad data show`` and ``verify``: what is told of a dataset that is whole, damaged, foreign or not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from myriad.cli.main import main


@pytest.fixture
def built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name}, and so on\n" * 20)
    prefix = tmp_path / "set"
    texts = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    assert main(["data", "build", *texts, "--out", str(prefix)]) == 0
    capsys.readouterr()
    return prefix


def test_a_dataset_says_what_it_has(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", str(built), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["documents"], facts["tokenizer"]) == (2, "bytes")
    assert facts["bytes"] == (built.parent / "set.bin").stat().st_size
    assert main(["data", "show", str(built)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{built}: 2 documents, {facts['tokens']:,} tokens of {facts['dtype']} (")
    assert f"tokenizer bytes, a vocabulary of {facts['vocab_size']}, sha256 {facts['sha256'][:16]}" in shown


def test_a_dataset_made_elsewhere_has_no_hashes(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (built.parent / "set.json").unlink()
    assert main(["data", "show", str(built)]) == 0
    assert "made elsewhere: no counts, vocabulary or hashes beside it" in capsys.readouterr().out
    assert main(["data", "verify", str(built)]) == 2
    assert "set.json is missing, so there is no hash to compare with" in capsys.readouterr().err


def test_a_flipped_bit_is_found_by_reading_all(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "verify", str(built)]) == 0
    assert capsys.readouterr().out.startswith(f"{built}: as built, 2 documents, ")
    file = built.parent / "set.bin"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    assert main(["data", "show", str(built)]) == 0
    capsys.readouterr()
    assert main(["data", "verify", str(built)]) == 2
    assert (
        "set.bin is not what was built: its hash differs; copy or build it again" in capsys.readouterr().err
    )


def test_no_dataset_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("show", "verify"):
        assert main(["data", command, str(tmp_path / "none")]) == 2
        assert f"there is no data set at {tmp_path / 'none'}: " in capsys.readouterr().err
