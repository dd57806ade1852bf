"""Building a data set: what goes in comes out, what is damaged is named, and half a set never appears."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from storage_faults import mounted_tmpfs

from myriad.storage.datasets import documents as reading
from myriad.storage.datasets import parts, tokenizers
from myriad.storage.datasets.builder import Progress, build
from myriad.storage.datasets.index import DatasetError, open_index, read_sidecar, verify


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "a.py").write_text("print('a')\n")
    (folder / "b.txt").write_text("\u4e07 is ten thousand\n")
    (folder / "deep" / "er" / "c.md").write_text("# c")
    return folder


def documents(prefix: Path) -> list[list[int]]:
    """Token lists by document, read through the index tables."""
    index = open_index(prefix)
    tokens = np.fromfile(index.bin_path, index.dtype)
    first = index.pointers() // index.dtype.itemsize
    return [tokens[at : at + length].tolist() for at, length in zip(first, index.lengths(), strict=True)]


def test_bytes_come_out_as_they_went_in(text: Path, tmp_path: Path) -> None:
    calls: list[Progress] = []
    (output,) = build([text], tmp_path / "o" / "set", progress=calls.append).outputs
    want = [*(text / "a.py").read_bytes(), 256], [*(text / "b.txt").read_bytes(), 256], [35, 32, 99, 256]
    assert documents(tmp_path / "o" / "set") == list(want)
    assert (output.documents, output.tokens) == (3, sum(map(len, want)))
    size = sum(len(each) - 1 for each in want[:2]) + 3
    assert calls[-1] == Progress(size, size, 3, output.tokens)
    sidecar = verify(tmp_path / "o" / "set")
    assert (sidecar.bin_sha256, sidecar.end_of_document, sidecar.dtype) == (output.sha256, 256, "uint16")
    assert sorted(os.listdir(tmp_path / "o")) == ["set.bin", "set.idx", "set.json"]


def test_the_same_text_gives_the_same_files(text: Path, tmp_path: Path) -> None:
    first, second = build([text], tmp_path / "1"), build([text], tmp_path / "2")
    assert first.outputs[0].sha256 == second.outputs[0].sha256
    assert Path(tmp_path / "1.idx").read_bytes() == Path(tmp_path / "2.idx").read_bytes()


def test_damaged_and_foreign_files_are_left_out_by_name(text: Path, tmp_path: Path) -> None:
    (text / "bad.txt").write_bytes(b"good start " * 200_000 + b"\xff\xfe")  # damaged beyond the first chunk
    (text / "cut.txt").write_bytes("\u4e07".encode()[:2])
    (text / "empty.py").write_bytes(b"")
    (text / "gone.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(text / "pipe.txt")
    (text / "image.png").write_bytes(b"\x89PNG")  # not text by its name: passed over in silence
    (text / ".hidden").mkdir()
    (text / ".hidden" / "h.py").write_text("h")
    result = build([text], tmp_path / "set")
    assert result.outputs[0].documents == 3
    assert result.left_out == (
        f"{text / 'bad.txt'}:1: not UTF-8",
        f"{text / 'cut.txt'}:1: not UTF-8",
        f"{text / 'empty.py'}: empty",
        f"{text / 'gone.txt'}: not a regular file",
        f"{text / 'pipe.txt'}: not a regular file",
    )
    assert result.left_out_by_reason == {"not UTF-8": 2, "empty": 1, "not a regular file": 2}


def test_names_are_bounded_and_counts_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for i in range(parts.NAMED_LIMIT + 7):
        (folder / f"{i}.txt").touch()
    (folder / "one.txt").write_text("x")
    result = build([folder], tmp_path / "set")
    assert len(result.left_out) == parts.NAMED_LIMIT
    assert result.left_out_by_reason == {"empty": parts.NAMED_LIMIT + 7}


def test_a_named_file_needs_no_ending(text: Path, tmp_path: Path) -> None:
    (text / "LICENSE").write_text("free")
    result = build([text / "LICENSE", text], tmp_path / "set")
    assert result.outputs[0].documents == 4 and documents(tmp_path / "set")[0] == [*b"free", 256]


def test_a_document_larger_than_a_chunk(tmp_path: Path) -> None:
    data = ("\u4e07" * 700_000).encode()  # 2.1 MB without a newline; chunks cut characters
    (tmp_path / "big.txt").write_bytes(data)
    result = build([tmp_path / "big.txt"], tmp_path / "set")
    assert documents(tmp_path / "set") == [[*data, 256]]
    assert result.outputs[0].tokens == len(data) + 1


def bpe_text(prefix: Path, ids: list[int]) -> str:
    from tokenizers import Tokenizer

    return str(Tokenizer.from_file(f"{prefix}.tokenizer.json").decode(ids))


@pytest.mark.parametrize(("vocab_size", "dtype"), [(300, "uint16"), (66_000, "int32")])
def test_bpe_decodes_to_the_text(
    text: Path, tmp_path: Path, vocab_size: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if vocab_size > 1 << 16:  # as many different words as it takes
        rng = np.random.default_rng(0)
        words = ("".join(map(chr, row)) for row in rng.integers(97, 123, (13_000, 14)))
        (text / "z.txt").write_text("\n".join(words))
    (text / "b.txt").write_text("\n".join(f"line {i} of ten thousand \u4e07" for i in range(3000)))
    for module in (reading, tokenizers):
        monkeypatch.setattr(module, "CHUNK_BYTES", 10_007)  # pieces end inside lines and characters
    result = build([text], tmp_path / "set", "bpe", vocab_size)
    sidecar = read_sidecar(tmp_path / "set")
    assert sidecar is not None and (sidecar.tokenizer, sidecar.dtype) == ("bpe", dtype)
    assert result.vocab_size == sidecar.vocab_size <= vocab_size
    found = documents(tmp_path / "set")
    assert all(each[-1] == sidecar.end_of_document for each in found)
    assert sidecar.end_of_document not in found[1][:-1]
    assert bpe_text(tmp_path / "set", found[1]) == (text / "b.txt").read_text()
    assert max(map(max, found)) < result.vocab_size
    if vocab_size > 1 << 16:
        assert max(map(max, found)) >= 1 << 16  # ids above 65,535 are kept whole


REFUSALS = [
    ("missing path", {"paths": ["nowhere"]}, "nowhere does not exist; give files or folders of text"),
    ("vocabulary for bytes", {"vocab_size": 300}, "the bytes tokenizer has 257 tokens, not 300"),
    ("tiny bpe", {"tokenizer": "bpe", "vocab_size": 100}, "has at least 257 tokens, not 100"),
    (
        "nothing readable",
        {"paths": ["bad"]},
        r"there is no readable text in the given paths; left out: 1 \(not UTF-8\); give files or folders of UTF-8",
    ),
]


@pytest.mark.parametrize(("name", "arguments", "sentence"), REFUSALS, ids=[each[0] for each in REFUSALS])
def test_refusals(
    text: Path,
    tmp_path: Path,
    name: str,
    arguments: dict[str, object],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad").write_bytes(b"\xff")
    before = set(os.listdir(tmp_path))
    with pytest.raises(DatasetError, match=sentence):
        build(**{"paths": [text], "out_prefix": tmp_path / "set", **arguments})  # type: ignore[arg-type]
    assert set(os.listdir(tmp_path)) == before


def test_bpe_without_its_package_is_a_sentence(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DatasetError, match=r"install myriad-cluster\[data\], or choose the bytes tokenizer"):
        build([text], tmp_path / "set", "bpe")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_tmpfs(tmp_path / "disk", "size=256k") as folder:
        yield folder


def test_a_full_disk_leaves_nothing_behind(text: Path, small_disk: Path) -> None:
    result = build([text], small_disk / "set")
    (text / "big.txt").write_text("x" * 300_000)
    with pytest.raises(
        DatasetError, match="could not be written: No space left on device .*; free space there"
    ):
        build([text], small_disk / "set")
    assert sorted(os.listdir(small_disk)) == ["set.bin", "set.idx", "set.json"]
    assert verify(small_disk / "set").bin_sha256 == result.outputs[0].sha256  # the former set is untouched


def test_a_build_killed_in_the_middle_leaves_no_data_set(text: Path, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from myriad.storage.datasets.builder import build\n"
        "build([sys.argv[1]], sys.argv[2], progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(text), str(tmp_path / "set")], check=False)
    assert done.returncode == -9 and not (tmp_path / "set.idx").exists()
    with pytest.raises(DatasetError, match="there is no data set"):
        open_index(tmp_path / "set")


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from myriad.storage.datasets.builder import build\n"
        "def peak(): return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "before = peak()\n"
        "build([sys.argv[1]], sys.argv[2])\n"
        "print(peak() - before)\n"
    )
    (tmp_path / "big.txt").write_bytes(b"0123456789abcde\n" * (4 << 20))  # 64 MiB
    command = [sys.executable, "-c", program, str(tmp_path / "big.txt"), str(tmp_path / "set")]
    grown_kib = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown_kib < 32 << 10, f"{grown_kib} KiB"


def test_the_sidecar_is_plain_json(text: Path, tmp_path: Path) -> None:
    build([text], tmp_path / "set")
    assert json.loads((tmp_path / "set.json").read_text())["documents"] == 3
