"""The index, the samples and the loader: every token where the layout says, every sample exactly once."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from myriad.storage.datasets.builder import build
from myriad.storage.datasets.index import DatasetError, open_index, read_sidecar, verify
from myriad.storage.datasets.loader import Batch, Loader, TokenDataset
from myriad.storage.datasets.order import samples

S = 8


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of 3 documents with 4 + 501 + 301 tokens: 100 samples of 8."""
    folder = tmp_path_factory.mktemp("text")
    for name, data in {"a.txt": b"abc", "b.py": bytes(range(97, 122)) * 20, "c.md": b"xyz" * 100}.items():
        (folder / name).write_bytes(data)
    build([folder], folder / "out" / "set")
    return folder / "out" / "set"


def stream(prefix: Path) -> Any:
    return np.fromfile(f"{prefix}.bin", np.uint16).astype(np.int64)


def run(
    dataset: TokenDataset, dp_size: int, batch: int, steps: int, start: int = 0, **more: Any
) -> list[Batch]:
    """All ranks' batches of some steps, in (step, rank) order."""
    loaders = [Loader(dataset, 5, batch, rank, dp_size, start, **more) for rank in range(dp_size)]
    out = [loader.next() for _ in range(steps) for loader in loaders]
    assert len({loader.position for loader in loaders}) == 1
    return out


def ids(batches: list[Batch]) -> list[int]:
    return [each for batch in batches for each in batch.sample_ids]


def test_samples_are_windows_of_the_stream_and_labels_are_shifted_by_one(prefix: Path) -> None:
    tokens = stream(prefix)
    with TokenDataset(prefix, S) as dataset:
        assert (dataset.size, dataset.vocab_size) == (100, 257)
        for batch in run(dataset, dp_size=2, batch=4, steps=5):
            assert batch.tokens.shape == batch.labels.shape == (2, S)
            assert batch.tokens.dtype == batch.labels.dtype == np.int64
            for slot, sample_id in enumerate(batch.sample_ids):
                first = sample_id * S
                assert batch.tokens[slot].tolist() == tokens[first : first + S].tolist()
                assert batch.labels[slot].tolist() == tokens[first + 1 : first + S + 1].tolist()


def test_ranks_take_contiguous_slots_of_one_order(prefix: Path) -> None:
    with TokenDataset(prefix, S) as dataset:
        batches = run(dataset, dp_size=4, batch=8, steps=3)
        assert [each.position for each in batches] == [0] * 4 + [8] * 4 + [16] * 4
        assert ids(batches) == samples(5, 0, 24, 100).tolist()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_batch_world_and_restart_change_nothing(prefix: Path, data: st.DataObject) -> None:
    """Segments with any batch and world, one after the other, read the order of an unbroken run."""
    with TokenDataset(prefix, S) as dataset:
        position, consumed = 0, []
        for _ in range(data.draw(st.integers(1, 4))):
            dp_size = data.draw(st.sampled_from([1, 2, 3, 4]))
            batch = dp_size * data.draw(st.integers(1, 5))
            steps = data.draw(st.integers(1, 5))
            consumed += ids(run(dataset, dp_size, batch, steps, position))
            position += batch * steps
        assert consumed == samples(5, 0, position, dataset.size).tolist()


def test_one_skipped_sample_shows(prefix: Path) -> None:
    """Negative control: an epoch is each sample once, and a run that passes one over is not."""
    with TokenDataset(prefix, S) as dataset:
        assert sorted(ids(run(dataset, 2, 10, 10))) == list(range(dataset.size))
        skipping = ids(run(dataset, 2, 10, 10, skipped=[(33, 34)]))
        assert sorted(skipping) != list(range(dataset.size))
        assert set(range(dataset.size)) - set(skipping) == {int(samples(5, 33, 1, dataset.size)[0])}


def test_skipped_ranges_are_passed_over_and_move_nothing_behind_them(prefix: Path) -> None:
    order = samples(5, 0, 200, 100).tolist()
    with TokenDataset(prefix, S) as dataset:
        stories: list[tuple[list[tuple[int, int]], int, list[int]]] = [
            ([], 0, order[0:12]),
            ([(0, 4)], 0, order[4:16]),
            ([(6, 9)], 0, order[0:6] + order[9:15]),
            ([(6, 9), (2, 3), (8, 10)], 0, order[0:2] + order[3:6] + order[10:17]),
            ([(5, 5), (40, 50)], 0, order[0:12]),
            ([(0, 4)], 8, order[8:20]),
            ([(7, 30)], 10, order[30:42]),
            ([(95, 105)], 90, order[90:95] + order[105:112]),
        ]
        for skipped, start, want in stories:
            assert ids(run(dataset, 2, 4, 3, start, skipped=skipped)) == want, (skipped, start)


def test_the_end_of_the_data_repeats_in_another_order_or_is_refused(prefix: Path) -> None:
    with TokenDataset(prefix, S) as dataset:
        batches = run(dataset, 1, 30, 10, on_end="repeat")
        assert sorted(ids(batches)) == sorted(list(range(100)) * 3)
        assert ids(run(dataset, 1, 250, 1)) == samples(5, 0, 250, 100).tolist()  # a batch above the data set
        loader = Loader(dataset, 5, 30, 0, 1, on_end="refuse")
        for _ in range(3):
            loader.next()
        with pytest.raises(DatasetError, match="has 100 samples of 8 tokens, and this batch needs 120"):
            loader.next()
        with pytest.raises(DatasetError, match="set data.on_end to repeat"):
            Loader(dataset, 5, 101, 0, 1, on_end="refuse")


def test_a_set_without_sidecar_as_megatron_writes_it(tmp_path: Path) -> None:
    lengths, tokens = np.array([3, 2], np.int32), np.array([70_000, 1, 2, 3, 4], np.int32)
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 2, 3)
    tables = (
        lengths.tobytes() + np.array([0, 12], np.int64).tobytes() + np.array([0, 1, 2], np.int64).tobytes()
    )
    (tmp_path / "m.v1.idx").write_bytes(header + tables)
    (tmp_path / "m.v1.bin").write_bytes(tokens.tobytes())
    index = open_index(tmp_path / "m.v1")
    assert (index.tokens, index.documents, index.sequences) == (5, 2, 2)
    assert index.lengths().tolist() == [3, 2] and index.pointers().tolist() == [0, 12]
    with TokenDataset(tmp_path / "m.v1", 2) as dataset:
        assert dataset.vocab_size is None and dataset.size == 2
        assert dataset.read(0).tolist() == [70_000, 1, 2]
    with pytest.raises(DatasetError, match="no hash to compare with"):
        verify(tmp_path / "m.v1")


def cut(suffix: str, count: int) -> Callable[[Path], None]:
    return lambda prefix: os.truncate(f"{prefix}{suffix}", os.stat(f"{prefix}{suffix}").st_size - count)


def patch(suffix: str, at: int, data: bytes) -> Callable[[Path], None]:
    def run(prefix: Path) -> None:
        with open(f"{prefix}{suffix}", "r+b") as file:
            file.seek(at)
            file.write(data)

    return run


def remove(suffix: str) -> Callable[[Path], None]:
    return lambda prefix: os.unlink(f"{prefix}{suffix}")


DAMAGE: list[tuple[str, Callable[[Path], None], str]] = [
    ("bin missing", remove(".bin"), r"there is no data set at .*\.bin is missing; build it with"),
    ("idx missing", remove(".idx"), r"there is no data set at .*\.idx is missing; build it with"),
    (
        "bin one byte short",
        cut(".bin", 1),
        r"set\.bin has 1611 bytes where its index says 1612: it is truncated",
    ),
    (
        "idx one byte short",
        cut(".idx", 1),
        r"set\.idx has .* bytes where its header says .*: it is truncated",
    ),
    ("idx without tables", cut(".idx", 68), r"set\.idx has 34 bytes where its header says"),
    ("idx of 20 bytes", lambda p: os.truncate(f"{p}.idx", 20), r"truncated: 20 bytes are no header"),
    ("wrong magic", patch(".idx", 0, b"PARQUET"), "is no Megatron index: it begins with b'PARQUET"),
    ("version from the future", patch(".idx", 9, b"\x02"), "has version 2 and dtype code 8"),
    (
        "unknown dtype",
        patch(".idx", 17, b"\x63"),
        "version 1 and dtype code 99, which this reader does not know",
    ),
    ("absurd count", patch(".idx", 18, b"\xff" * 7), "truncated or damaged"),
    ("negative length", patch(".idx", 34 + 8, b"\xff" * 4), "damaged at its end"),
    ("sidecar damaged", patch(".json", 0, b"}"), r"set\.json cannot be read"),
]


@pytest.fixture
def fresh(prefix: Path, tmp_path: Path) -> Path:
    for suffix in (".bin", ".idx", ".json"):
        (tmp_path / f"set{suffix}").write_bytes(Path(f"{prefix}{suffix}").read_bytes())
    return tmp_path / "set"


@pytest.mark.parametrize(("name", "damage", "sentence"), DAMAGE, ids=[each[0] for each in DAMAGE])
def test_damage_is_refused_by_a_sentence(
    fresh: Path, name: str, damage: Callable[[Path], None], sentence: str
) -> None:
    damage(fresh)
    with pytest.raises(DatasetError, match=sentence):
        TokenDataset(fresh, S)


def test_one_flipped_bit_is_found_by_verify(fresh: Path) -> None:
    assert verify(fresh) == read_sidecar(fresh)
    for suffix, at in ((".bin", 801), (".idx", 40)):
        path = Path(f"{fresh}{suffix}")
        good = path.read_bytes()
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(DatasetError, match=f"set{suffix} is not what was built: its hash differs"):
            verify(fresh)
        path.write_bytes(good)


def test_a_file_cut_short_while_in_use_is_an_error_and_no_crash(fresh: Path) -> None:
    with TokenDataset(fresh, S) as dataset:
        os.truncate(f"{fresh}.bin", 100)
        with pytest.raises(DatasetError, match="was truncated while in use"):
            dataset.read(90)


def test_too_little_text_for_one_sample(fresh: Path) -> None:
    with TokenDataset(fresh, 805) as dataset:
        assert dataset.size == 1
    with pytest.raises(DatasetError, match=r"has 806 tokens, too few for one sample of 806 \+ 1"):
        TokenDataset(fresh, 806)
