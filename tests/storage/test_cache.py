"""The cache of blocks: within its limit, whoever writes; never a wrong byte; nothing of others is touched."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import leaks
from myriad.storage.datasets.cache import CHUNK_BYTES, BlockCache, CachedObject, file_bytes

BLOCK = 3 * CHUNK_BYTES
FILE = file_bytes(BLOCK)


def content(url: str, size: int) -> bytes:
    return random.Random(url).randbytes(size)


def part(url: str, size: int, span: tuple[int, int]) -> memoryview:
    return memoryview(content(url, size)[span[0] : span[1]])


def cache_in(folder: Path, blocks: float, touch_s: float = 0.0) -> BlockCache:
    return BlockCache(folder, int(blocks * FILE), BLOCK, touch_s)


def filled(cache: BlockCache, url: str = "s3://b/x", blocks: int = 4) -> CachedObject:
    size = blocks * BLOCK - 5
    found = cache.of(url, '"1"', size)
    for block in range(blocks):
        found.put(block, part(url, size, found.span(block)))
    return found


def hits(found: CachedObject, url: str = "s3://b/x") -> list[int]:
    """The blocks that are there, each read whole and compared."""
    there = []
    for block in range(-(-found.size // found.cache.block_bytes)):
        start, end = found.span(block)
        room = bytearray(end - start)
        if found.read(start, memoryview(room)):
            assert room == part(url, found.size, (start, end))
            there.append(block)
    return there


def disk_bytes(cache: BlockCache) -> int:
    return sum(file.stat().st_size for file in cache.folder.iterdir() if file.name != "lock")


def test_what_was_put_is_read_in_any_part(tmp_path: Path) -> None:
    found = filled(cache_in(tmp_path, 10))
    whole = content("s3://b/x", found.size)
    draw = random.Random(1)
    for _ in range(200):
        block = draw.randrange(4)
        first, last = found.span(block)
        start = draw.randrange(first, last)
        end = draw.randrange(start, last) + 1
        room = bytearray(end - start)
        assert found.read(start, memoryview(room)) and room == whole[start:end]


def test_another_version_is_another_object(tmp_path: Path) -> None:
    found = filled(cache_in(tmp_path, 10))
    assert hits(found.cache.of("s3://b/x", '"2"', found.size)) == []
    assert hits(found.cache.of("s3://b/y", '"1"', found.size)) == []


def test_what_was_not_read_for_the_longest_goes(tmp_path: Path) -> None:
    cache = cache_in(tmp_path, 4.5)
    found = filled(cache)
    for block in range(4):
        os.utime(cache.folder / found._name(block), ns=(0, block))
    room = bytearray(10)
    assert found.read(0, memoryview(room)), "block 0 was the oldest, and is used now"
    other = cache.of("s3://b/y", '"1"', BLOCK)
    other.put(0, part("s3://b/y", BLOCK, (0, BLOCK)))
    assert hits(found) == [0, 2, 3] and hits(other, "s3://b/y") == [0]
    assert disk_bytes(cache) <= cache.size


def test_the_limit_holds_after_every_put(tmp_path: Path) -> None:
    for blocks in (1, 1.5, 2, 3.7):
        cache = cache_in(tmp_path / str(blocks), blocks)
        found = cache.of("s3://b/x", '"1"', 20 * BLOCK)
        for block in range(20):
            found.put(block, part("s3://b/x", found.size, found.span(block)))
            assert 0 < disk_bytes(cache) <= cache.size
            assert block in hits(found), "the newest is there"


def test_a_job_larger_than_the_cache_keeps_a_share_of_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = cache_in(tmp_path, 10)
    cache.expect(40 * BLOCK)
    x, y = cache.of("s3://b/x", '"1"', 30 * BLOCK), cache.of("s3://b/y", '"1"', 10 * BLOCK)
    assert (x.kept, y.kept) == (7, 2)
    assert x.block_to_fill(6 * BLOCK) == 6 and x.block_to_fill(7 * BLOCK) is None
    assert "holds 24% of the data sets, which have 1,966,080 bytes; the rest" in caplog.text


DAMAGES: list[tuple[str, Callable[[bytearray], object]]] = [
    ("a bit of the data", lambda data: data.__setitem__(-7, data[-7] ^ 1)),
    ("a bit of the checksums", lambda data: data.__setitem__(18, data[18] ^ 1)),
    ("a bit of the header", lambda data: data.__setitem__(9, data[9] ^ 1)),
    ("torn", lambda data: data.__delitem__(slice(len(data) // 2, None))),
    ("empty", lambda data: data.clear()),
    ("all zeros", lambda data: data.__setitem__(slice(None), bytes(len(data)))),
]


@pytest.mark.parametrize(("name", "harm"), DAMAGES, ids=[each[0] for each in DAMAGES])
def test_a_damaged_block_is_missing_and_can_be_put_again(
    tmp_path: Path, name: str, harm: Callable[[bytearray], object]
) -> None:
    cache = cache_in(tmp_path, 10)
    found = filled(cache)
    path = cache.folder / found._name(2)
    data = bytearray(path.read_bytes())
    harm(data)
    path.write_bytes(data)
    assert hits(found) == [0, 1, 3]
    found.put(2, part("s3://b/x", found.size, found.span(2)))
    assert hits(found) == [0, 1, 2, 3]


def test_files_of_others_are_never_touched(tmp_path: Path) -> None:
    """Not beside the blocks, not among them, whatever the pressure."""
    cache = cache_in(tmp_path, 2)
    foreign = [tmp_path / "data.bin", tmp_path / ("0" * 32 + "-0000000000")]
    foreign += [cache.folder / "notes.txt", cache.folder / "data.bin.tmp", cache.folder / ("0" * 32 + "-1")]
    foreign.append(cache.folder / ("2" * 32 + "-0000000002"))  # named as a block is, and none
    (cache.folder / "folder").mkdir()
    linked = tmp_path / "only-copy"
    linked.write_bytes(b"precious")
    (cache.folder / ("1" * 32 + "-0000000001")).symlink_to(linked)
    for file in foreign:
        file.write_bytes(b"precious")
    filled(cache, blocks=9)
    assert [file.read_bytes() for file in [*foreign, linked]] == [b"precious"] * 7
    assert (cache.folder / "folder").is_dir()


def test_what_a_killed_writer_left_is_found(tmp_path: Path) -> None:
    """Its temporary file goes, and the sum of bytes is counted anew."""
    cache = cache_in(tmp_path, 3.5)
    found = filled(cache, blocks=3)
    left = cache.folder / (found._name(1) + ".tmp")
    left.write_bytes(bytes(FILE))
    lock = cache.folder / "lock"
    lock.write_bytes((0).to_bytes(8, "little") + b"\1")  # it was at work, and what it says is not so
    other = filled(cache, "s3://b/y", 1)
    assert not left.exists() and disk_bytes(cache) <= cache.size
    assert hits(other, "s3://b/y") == [0] and len(hits(found)) == 2


WRITER = """
import random, sys
from pathlib import Path
from myriad.storage.datasets.cache import BlockCache
folder, size, block, seed = sys.argv[1], *map(int, sys.argv[2:])
cache = BlockCache(Path(folder), size, block, 0.0)
draw = random.Random(seed)
whole = random.Random("s3://b/x").randbytes(12 * block - 5)
found = cache.of("s3://b/x", '"1"', len(whole))
seen = 0
for _ in range(150):
    number = draw.randrange(12)
    start, end = found.span(number)
    room = bytearray(end - start)
    if found.read(start, memoryview(room)):
        assert room == whole[start:end], number
        seen += 1
    else:
        found.put(number, memoryview(whole[start:end]))
    used = 0
    for file in cache.folder.iterdir():
        if file.name != "lock":
            try:
                used += file.stat().st_size
            except FileNotFoundError:
                pass
    assert used <= size + block, used  # a listing is not one moment: a file may be counted with its successor
print(seen)
"""


def test_many_processes_share_one_cache(tmp_path: Path) -> None:
    cache = cache_in(tmp_path, 6.5)
    words = [str(tmp_path), str(cache.size), str(BLOCK)]
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, *words, str(seed)], stdout=subprocess.PIPE)
        for seed in range(4)
    ]
    killed = subprocess.Popen([sys.executable, "-c", WRITER, *words, "9"], stdout=subprocess.DEVNULL)
    leaks.wait_until(lambda: len(list(cache.folder.iterdir())) > 3, 30.0)
    killed.kill()
    outs = [writer.communicate(timeout=60)[0] for writer in [*writers, killed]][:4]
    assert [writer.returncode for writer in writers] == [0] * 4
    assert all(int(out) > 20 for out in outs), outs
    filled(cache, "s3://b/last", 1)  # whatever the killed one left behind is put right by the next
    assert disk_bytes(cache) <= cache.size
    said = (cache.folder / "lock").read_bytes()
    assert said == disk_bytes(cache).to_bytes(8, "little") + b"\0", "the sum is exact, not an estimate"


def test_a_directory_that_cannot_be_written_is_no_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    found = filled(cache_in(tmp_path / "file", 10))
    assert hits(found) == []
    said = caplog.messages
    assert said == [
        f"the cache in {tmp_path}/file cannot be written (Not a directory); going on without adding to it"
    ]


def test_a_full_disk_is_no_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full in the middle of a block: /dev/full answers each write with ENOSPC, as a full file system does."""
    cache = cache_in(tmp_path, 10)
    found = filled(cache, blocks=1)
    second = cache.of("s3://b/x", '"1"', found.size * 9)
    (cache.folder / (second._name(3) + ".tmp")).symlink_to("/dev/full")
    second.put(3, part("s3://b/x", second.size, second.span(3)))
    assert "cannot be written (No space left on device); going on" in caplog.text
    caplog.clear()
    assert hits(found) == [0], "what is there is still read"
    second.put(4, part("s3://b/x", second.size, second.span(4)))
    assert caplog.text == ""
    assert second.block_to_fill(0) is None, "no block is fetched whole for nothing"
