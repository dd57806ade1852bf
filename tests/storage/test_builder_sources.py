"""What a data set is built from: every kind of source, every kind of damage by its line, tokenizers, the split."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from myriad.storage.datasets import documents as reading
from myriad.storage.datasets import sources
from myriad.storage.datasets.builder import build
from myriad.storage.datasets.index import DatasetError, open_index, read_sidecar, verify

GOOD = [json.dumps({"id": i, "text": f"document {i} \u4e07"}).encode() for i in range(3)]


def documents(prefix: Path) -> list[list[int]]:
    index = open_index(prefix)
    tokens = np.fromfile(index.bin_path, index.dtype)
    first = index.pointers() // index.dtype.itemsize
    return [tokens[at : at + length].tolist() for at, length in zip(first, index.lengths(), strict=True)]


def texts(prefix: Path) -> list[str]:
    return [bytes(each[:-1]).decode() for each in documents(prefix)]


def parquet(path: Path, rows: list[Any], kind: Any = None, **options: Any) -> None:
    table = pyarrow.table({"id": range(len(rows)), "text": pyarrow.array(rows, kind)})
    pyarrow.parquet.write_table(table, path, **options)


def lines(*rows: bytes) -> bytes:
    return b"".join(row + b"\n" for row in rows)


WAYS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("a.jsonl", lambda data: data),
    ("a.jsonl.gz", gzip.compress),
    ("two members.jsonl.gz", lambda data: gzip.compress(data[:20]) + gzip.compress(data[20:]) + b"\0" * 9),
    ("a.jsonl.zst", zstandard.compress),
    ("two frames.jsonl.zst", lambda data: zstandard.compress(data[:20]) + zstandard.compress(data[20:])),
    ("no last newline.jsonl", lambda data: data[:-1]),
]


@pytest.mark.parametrize(("name", "pack"), WAYS, ids=[each[0] for each in WAYS])
def test_jsonl(name: str, pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(pack(lines(*GOOD)))
    result = build([tmp_path], tmp_path / "set")
    assert texts(tmp_path / "set") == [f"document {i} \u4e07" for i in range(3)]
    assert result.left_out == ()


DICTIONARY = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), DICTIONARY], ids=str)
def test_parquet(kind: Any, tmp_path: Path) -> None:
    rows = [f"row {i} \u4e07" for i in range(2500)]
    parquet(tmp_path / "a.parquet", rows, kind, row_group_size=999)
    build([tmp_path / "a.parquet"], tmp_path / "set")
    assert texts(tmp_path / "set") == rows


DAMAGE: list[tuple[str, bytes, str | None, str]] = [
    ("bad UTF-8.jsonl", lines(GOOD[0], b'{"text": "\xff"}', GOOD[1]), "2", "not UTF-8"),
    ("bad JSON.jsonl", lines(GOOD[0], GOOD[1], b'{"text": "a'), "3", "not JSON"),
    ("trailing.jsonl", lines(GOOD[0], b'{"text": "a"} b', GOOD[1]), "2", "not JSON"),
    ("no object.jsonl", lines(b'["text"]', *GOOD[:2]), "1", "no JSON object"),
    ("missing key.jsonl", lines(b'{"txt": "a"}', *GOOD[:2]), "1", "without the key 'text'"),
    ("number.jsonl", lines(GOOD[0], b'{"text": 3}', GOOD[1]), "2", "no text under the key 'text'"),
    ("null.jsonl", lines(GOOD[0], b'{"text": null}', GOOD[1]), "2", "no text under the key 'text'"),
    ("empty document.jsonl", lines(GOOD[0], b'{"text": ""}', GOOD[1]), "2", "an empty document"),
    ("empty line.jsonl", lines(GOOD[0], b"", GOOD[1]), "2", "an empty line"),
    ("deep.jsonl", lines(GOOD[0], b'{"text":' + b"[" * 100_000, GOOD[1]), "2", "nested too deeply"),
    ("cut.jsonl.gz", gzip.compress(lines(*GOOD[:2]))[:-8], "3", "compressed data that ends too early"),
    ("cut.jsonl.zst", zstandard.compress(lines(*GOOD[:2]) * 1)[:-1], None, "compressed data"),
    ("no gzip.jsonl.gz", lines(*GOOD), "1", "damaged gzip data"),
    ("no zstd.jsonl.zst", lines(*GOOD), "1", "damaged zstd data"),
    ("empty.jsonl", b"", None, "empty"),
    ("empty.jsonl.gz", gzip.compress(b""), None, "empty"),
    ("bad.txt", b"one\ntwo\nthr\xffee\n", "3", "not UTF-8"),
    ("late.txt", b"a\n" * 600_000 + b"\xff", "600001", "not UTF-8"),
    ("text.gz", gzip.compress(b"text"), "1", "compressed, but not named .jsonl.gz or .jsonl.zst"),
    ("no.parquet", b"PAR1 and no more", None, "not Parquet, or cut short"),
    ("empty.parquet", b"", None, "empty"),
]


@pytest.mark.parametrize(("name", "data", "line", "reason"), DAMAGE, ids=[each[0] for each in DAMAGE])
def test_damage_is_told_by_file_and_line(
    name: str, data: bytes, line: str | None, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(data)
    (tmp_path / "good.txt").write_text("good")
    result = build([file, tmp_path / "good.txt"], tmp_path / "set")
    assert len(result.left_out) == 1 and list(result.left_out_by_reason.values()) == [1], result
    if line is None:
        assert result.left_out[0].startswith(str(file)) and f": {reason}" in result.left_out[0]
    else:
        assert result.left_out[0].startswith(f"{file}:{line}: {reason}"), result.left_out
    with pytest.raises(DatasetError, match="mend or remove it") as refused:
        build([file, tmp_path / "good.txt"], tmp_path / "strict", strict=True)
    assert str(refused.value).startswith(result.left_out[0])
    assert not list(tmp_path.glob("strict*"))


def test_the_documents_before_a_cut_are_kept(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"{i} {random.Random(i).random()}"}).encode() for i in range(20_000)]
    for name, pack in (("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstandard.compress)):
        packed = pack(lines(*rows))
        (tmp_path / name).write_bytes(packed[: len(packed) // 2])
        result = build([tmp_path / name], tmp_path / "set")
        kept = texts(tmp_path / "set")
        assert 2000 < len(kept) < 18_000
        assert kept == [json.loads(row)["text"] for row in rows[: len(kept)]]
        cut = f"{tmp_path / name}:{len(kept) + 1}: compressed data that ends too early"
        assert result.left_out == (cut,)


def test_damage_in_parquet_is_told_by_row(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    good = [f"row {i} {'x' * 50}" for i in range(100)]
    parquet(file, [*good[:3], None, *good[4:7], "", *good[8:]])
    assert build([file], tmp_path / "set").left_out == (
        f"{file}:4: no text under the key 'text'",
        f"{file}:8: an empty document",
    )
    parquet(file, [b"good", b"\xff", b"good"], pyarrow.binary())
    table = pyarrow.parquet.read_table(file)
    unchecked = pyarrow.StringArray.from_buffers(3, *table["text"].chunk(0).buffers()[1:])
    pyarrow.parquet.write_table(pyarrow.table({"text": unchecked}), file)
    assert build([file], tmp_path / "set").left_out == (f"{file}:2: not UTF-8",)
    parquet(file, [1, 2])
    (tmp_path / "good.txt").write_text("good")
    result = build([file, tmp_path / "good.txt"], tmp_path / "set")
    assert result.left_out == (f"{file}: no text in the column 'text'",)
    rows = [f"{random.Random(i).random()}" for i in range(3000)]
    options: dict[str, Any] = {"use_dictionary": False, "compression": None, "write_page_checksum": True}
    parquet(file, rows, row_group_size=1000, **options)
    data = bytearray(file.read_bytes())
    data[data.index(rows[1500].encode())] ^= 1
    file.write_bytes(data)
    result = build([file], tmp_path / "set")
    assert result.left_out == (f"{file}:1001: damaged Parquet data, up to the end of its row group",)
    assert texts(tmp_path / "set") == rows[:1000] + rows[2000:]


def test_a_file_cut_into_pieces_keeps_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every size of a piece the same documents, each once, and the same numbers of lines."""
    rows = [json.dumps({"text": "x" * (i * 7 % 40) + str(i)}).encode() for i in range(60)]
    rows[20], rows[47] = b"", b"{"
    (tmp_path / "a.jsonl").write_bytes(lines(*rows))
    want = [json.loads(row)["text"] for row in rows if len(row) > 1]
    monkeypatch.setattr(reading, "CHUNK_BYTES", 17)
    monkeypatch.setattr(sources, "FILE_COST_BYTES", 0)
    for size in (1, 7, 50, 333, 10_000):
        monkeypatch.setattr(sources, "PIECE_BYTES_MIN", size)
        monkeypatch.setattr(sources, "PIECES_MAX", 500)
        result = build([tmp_path / "a.jsonl"], tmp_path / f"set{size}")
        assert texts(tmp_path / f"set{size}") == want
        assert [each.split(":", 1)[1] for each in result.left_out] == ["21: an empty line", "48: not JSON"]


def test_a_line_beyond_the_limit_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LINE_LIMIT_BYTES", 1000)
    (tmp_path / "a.jsonl").write_bytes(lines(GOOD[0], b'{"text": "' + b"x" * 5000 + b'"}', GOOD[1]))
    result = build([tmp_path / "a.jsonl"], tmp_path / "set")
    assert len(texts(tmp_path / "set")) == 2
    assert result.left_out == (f"{tmp_path / 'a.jsonl'}:2: longer than 32 MiB",)


# ---------------------------------------------------------------- tokenizers


def tokenizer_file(path: Path, words: dict[str, int], special: list[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    model = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(special)
    model.enable_truncation(2)
    model.enable_padding(length=7)
    model.save(str(path))


def test_a_tokenizer_file_with_large_ids(tmp_path: Path) -> None:
    words = {f"w{i}": i for i in range(70_000)} | {"[UNK]": 70_000}
    tokenizer_file(tmp_path / "tokenizer.json", words, ["</s>"])
    (tmp_path / "a.txt").write_text("w69999 w1 w65536 </s> w65535")
    build([tmp_path / "a.txt"], tmp_path / "set", str(tmp_path / "tokenizer.json"))
    sidecar = verify(tmp_path / "set")
    # Neither truncated nor padded, and the text's own "</s>" ends nothing.
    assert documents(tmp_path / "set") == [[69_999, 1, 65_536, 70_000, 65_535, 70_001]]
    assert (sidecar.dtype, sidecar.vocab_size, sidecar.end_of_document) == ("int32", 70_002, 70_001)
    kept = tmp_path / "set.tokenizer.json"
    assert kept.read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    kept.write_bytes(kept.read_bytes() + b" ")
    with pytest.raises(DatasetError, match=r"set.tokenizer.json is not what was built"):
        verify(tmp_path / "set")


REFUSED_TOKENIZERS: list[tuple[str, dict[str, Any], str]] = [
    ("no end", {"tokenizer": "t.json"}, "none of the known ends of a document .* with --end-of-document"),
    ("wrong end", {"tokenizer": "t.json", "end_of_document": "<x>"}, "has no token '<x>'; name one"),
    ("its own end", {"tokenizer": "bytes", "end_of_document": "<x>"}, "leave --end-of-document out"),
    ("not there", {"tokenizer": "no.json"}, "cannot be read .No such file.*; give bytes, bpe or the path"),
    ("no tokenizer", {"tokenizer": "a.txt"}, "is no tokenizer.json of Hugging Face"),
    ("size", {"tokenizer": "t.json", "vocab_size": 9}, "has its own vocabulary: leave the vocabulary size"),
]


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"), REFUSED_TOKENIZERS, ids=[each[0] for each in REFUSED_TOKENIZERS]
)
def test_tokenizers_refused(
    name: str, arguments: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a b")
    tokenizer_file(tmp_path / "t.json", {"a": 0, "[UNK]": 1, "stop": 2}, [])
    with pytest.raises(DatasetError, match=sentence):
        build(["a.txt"], "set", **arguments)
    assert not list(tmp_path.glob("set*"))
    build(["a.txt"], "set", "t.json", end_of_document="stop")
    assert documents(tmp_path / "set") == [[0, 1, 2]]


# ---------------------------------------------------------------- the split


def test_the_split_depends_on_the_content_alone(tmp_path: Path) -> None:
    names = [f"text {i % 300}" for i in range(400)]  # a hundred of them twice
    orders = [names, sorted(names), names[::-1]]
    found = []
    for number, order in enumerate(orders):
        (tmp_path / f"{number}.jsonl").write_bytes(lines(*(json.dumps({"text": x}).encode() for x in order)))
        build([tmp_path / f"{number}.jsonl"], tmp_path / f"set{number}", validation=0.2)
        sides = [set(texts(tmp_path / f"set{number}{side}")) for side in ("", ".validation")]
        assert not sides[0] & sides[1] and sides[0] | sides[1] == set(names)
        found.append(sides)
    assert found[0] == found[1] == found[2]
    assert 30 < len(found[0][1]) < 90
    sidecar = read_sidecar(tmp_path / "set0.validation")
    assert sidecar is not None and (sidecar.side, sidecar.validation) == ("validation", 0.2)
    folder = tmp_path / "as files"
    folder.mkdir()
    for each in set(names):
        (folder / f"{each}.txt").write_text(each)
    build([folder], tmp_path / "files", validation=0.2)
    assert set(texts(tmp_path / "files.validation")) == found[0][1]


def test_an_empty_side_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(DatasetError, match="of 1 documents none is on the validation side .* of 1e-09"):
        build([tmp_path / "a.txt"], tmp_path / "set", validation=1e-9)
    assert not list(tmp_path.glob("set*"))


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("name", ["bomb.jsonl.gz", "bomb.jsonl.zst", "long.jsonl"])
def test_memory_is_bounded_whatever_a_line_unpacks_to(name: str, tmp_path: Path) -> None:
    """200 MB in one line, as it is and out of a few KB; the line is never held."""
    line = b'{"text": "' + b"x" * 200_000_000 + b'"}\n' + GOOD[0] + b"\n"
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(pack(line))
    # VmHWM and not ru_maxrss, which a child inherits from the process that starts it.
    program = (
        "import sys, zstandard\n"
        "from myriad.storage.datasets.builder import build\n"
        "def peak(): return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "before = peak()\n"
        "result = build([sys.argv[1]], sys.argv[2])\n"
        "assert 'longer than 32 MiB' in str(result.left_out), result\n"
        "print(peak() - before)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / name), str(tmp_path / "set")]
    grown_kib = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown_kib < 110 << 10, f"{grown_kib} KiB"
