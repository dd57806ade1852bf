"""Batches of token sequences, in an order that depends on nothing but (seed, position).

Sample i is tokens [i*S, i*S + S + 1) of the concatenated token stream (S = sequence length): S inputs
and, shifted by one, S labels. ``position`` counts samples consumed since the beginning of the run, over
all ranks, so a changed batch size, number of ranks or restart moves nothing: whoever knows the position
knows all that follows. Each data-parallel rank reads only its own contiguous slots of a batch.

Method: all samples of a batch are asked for together, then one ``pread`` a sample into one reused buffer; a file cut
short below us is a DatasetError and not the SIGBUS a mapping would raise. Trade-off: a system call a sample (1 to 2 us) instead of none; at
S = 2048 one core still reads more than 100 million tokens/s from the page cache.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from myriad.storage.datasets.files import Prefix, Range, fetch_all, is_remote, open_file
from myriad.storage.datasets.index import DatasetError, Sidecar, file_sha256, open_index, read_sidecar
from myriad.storage.datasets.mixture import BLOCK, MixtureOrder
from myriad.storage.datasets.packed import PackingIndex
from myriad.storage.datasets.skipped import SkippedRanges

if TYPE_CHECKING:
    from myriad.storage.datasets.cache import BlockCache

# Samples of a rank whose place is computed at once: below 0.4 us each then (three sources: 0.7 us), where batches of 8
# alone would pay 5 to 13 us. They lie within so many positions of the whole job, since the patterns of a mixture cost
# 0.1 ms a block: no batch waits for more than 4 ms.
LOOK_AHEAD, LOOK_AHEAD_SPAN = 4096, 16 * BLOCK
MASKED = -100  # the label of a token that does not count
PADDING = -1  # the document of padding


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch of which it holds ``local`` sequences of S tokens.

    ``position`` is the position of the global batch's first sample; ``sample_ids`` are this rank's,
    numbered through all sources: those of the second follow the last of the first. ``documents`` is None where
    sequences are not packed; else it numbers the documents of each sequence, padding being one of its own.
    """

    tokens: NDArray[np.int64]  # [local, S]
    labels: NDArray[np.int64]  # [local, S]
    sample_ids: tuple[int, ...]  # [local]
    position: int
    documents: NDArray[np.int64] | None = None  # [local, S]


class TokenDataset:
    """The token stream of ``<prefix>.bin`` cut into samples of ``sequence_length`` + 1 tokens, or with ``packed``
    the sequences of its packing index.

    ``size`` samples; ``vocab_size`` is None where no sidecar says it. Of a URL, blocks are kept in ``cache``.
    Raises DatasetError.
    """

    def __init__(
        self, prefix: Prefix, sequence_length: int, packed: bool = False, cache: BlockCache | None = None
    ) -> None:
        assert sequence_length > 0, sequence_length
        self.index = open_index(prefix)
        sidecar = read_sidecar(prefix)
        self.vocab_size = None if sidecar is None else sidecar.vocab_size
        self.vocabulary = (
            None if sidecar is None else (sidecar.tokenizer, sidecar.vocab_size, _model_hash(prefix, sidecar))
        )
        self.sequence_length = sequence_length
        self.size = max(0, (self.index.tokens - 1) // sequence_length)
        if self.size == 0 and not packed:
            raise DatasetError(
                f"{self.index.bin_path} has {self.index.tokens} tokens, too few for one sample of "
                f"{sequence_length} + 1; add text or lower data.sequence_length"
            )
        self.packing: PackingIndex | None = None
        if packed:
            self.packing = PackingIndex(self.index, sequence_length)
            self.size = self.packing.sequences
            self._padding = 0 if sidecar is None else sidecar.end_of_document
        self._row = np.empty(sequence_length + 1, self.index.dtype)
        self._bytes = self._row.view(np.uint8).data
        self.file = open_file(self.index.bin_path, cache)

    def read(self, sample_id: int) -> NDArray[Any]:
        """Tokens of one sample, [S + 1] in the file's dtype, in a buffer that the next read overwrites."""
        assert self.packing is None and 0 <= sample_id < self.size, (sample_id, self.size)
        return self._read_at(sample_id * self.sequence_length, self.sequence_length + 1)

    def read_packed(
        self,
        sample_id: int,
        tokens: NDArray[np.int64],
        labels: NDArray[np.int64],
        documents: NDArray[np.int64],
    ) -> None:
        """Fill one sequence's inputs, labels and document numbers, each [S].

        A label is the token that follows in the same document. Padding is at the end: the end-of-document token
        with labels that do not count.
        """
        assert self.packing is not None
        done = 0
        for number, (first, places) in enumerate(self.packing.pieces(sample_id)):
            here = slice(done, done + places)
            if (done := here.stop) > self.sequence_length:
                raise DatasetError(f"{self.packing.path} is damaged; build the data set again")
            row = self._read_at(first, places + 1)
            tokens[here], labels[here], documents[here] = row[:-1], row[1:], number
        tokens[done:], labels[done:], documents[done:] = self._padding, MASKED, PADDING

    def _read_at(self, first: int, count: int) -> NDArray[Any]:
        """``count`` tokens from ``first`` on, in the buffer."""
        itemsize = self.index.dtype.itemsize
        self.file.read_into(self._bytes[: count * itemsize], first * itemsize)
        return self._row[:count]

    def span(self, sample_id: int) -> Range:
        """The bytes of ``.bin`` that hold the sample, which is not a packed one."""
        first = sample_id * self.sequence_length * self.index.dtype.itemsize
        return first, first + self._row.nbytes

    def close(self) -> None:
        if self.packing is not None:
            self.packing.close()
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Mixture:
    """Data sets read as one, each with a share of the samples by its weight. Raises DatasetError."""

    def __init__(self, datasets: Sequence[TokenDataset], weights: Sequence[float]) -> None:
        assert len(datasets) == len(weights) > 0, (len(datasets), len(weights))
        self.datasets, self.weights = tuple(datasets), tuple(weights)
        self.sequence_length = datasets[0].sequence_length
        self.packed = datasets[0].packing is not None
        assert all(each.sequence_length == self.sequence_length for each in datasets)
        assert all((each.packing is not None) == self.packed for each in datasets)
        self.first_ids = tuple(itertools.accumulate((each.size for each in datasets[:-1]), initial=0))
        for other in datasets[1:]:
            if other.vocabulary != datasets[0].vocabulary:
                raise DatasetError(
                    f"{datasets[0].index.prefix} and {other.index.prefix} are not of one tokenizer and "
                    "vocabulary, so their token ids mean different text: build both with the same tokenizer"
                )

    def fetch(self, sources: Iterable[int], ids: Iterable[int]) -> None:
        """Have these samples at hand, for the reads that follow. Raises DatasetError."""
        spans: dict[int, list[Range]] = {}
        for source, number in zip(sources, ids, strict=True):
            spans.setdefault(source, []).append(self.datasets[source].span(number))
        fetch_all((self.datasets[source].file, ranges) for source, ranges in spans.items())

    def order(self, seed: int) -> MixtureOrder:
        return MixtureOrder(seed, [each.size for each in self.datasets], self.weights)

    def numbered(self, sources: Iterable[int], ids: Iterable[int]) -> list[int]:
        """Sample ids numbered through all sources: those of the second follow the last of the first."""
        return [self.first_ids[source] + int(each) for source, each in zip(sources, ids, strict=True)]

    def close(self) -> None:
        for each in self.datasets:
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_mixture(
    parts: Sequence[tuple[Prefix, float]],
    sequence_length: int,
    packed: bool = False,
    cache: BlockCache | None = None,
) -> Mixture:
    """The data sets with these prefixes and weights, read as one. Raises DatasetError."""
    with ExitStack() as stack:
        datasets = [
            stack.enter_context(TokenDataset(prefix, sequence_length, packed, cache)) for prefix, _ in parts
        ]
        if cache is not None:
            cache.expect(sum(each.file.size for each in datasets if is_remote(each.file.name)))
        mixture = Mixture(datasets, [weight for _, weight in parts])
        mixture.order(0)  # refuses weights that come to nothing
        stack.pop_all()
        return mixture


class _Slots(NamedTuple):
    """What one batch reads: its position, the position behind it, and this rank's samples [local]."""

    position: int
    end: int
    sources: list[int]
    ids: list[int]


class Loader:
    """The batches of one data-parallel rank, from ``start_position`` on.

    ``position`` (to be saved with a checkpoint) is the next sample not consumed. ``skipped`` are ranges
    [first, end) of positions to be passed over; nothing after a range changes by skipping it.

    ``on_end`` says what follows the data set's last sample. ``repeat``: the next epoch, in another order;
    a batch may span two epochs, and where the data set is smaller than a batch it holds samples twice.
    ``refuse``: each sample at most once, and a batch that would need more raises DatasetError.
    """

    def __init__(
        self,
        data: TokenDataset | Mixture,
        seed: int,
        global_batch: int,
        dp_rank: int,
        dp_size: int,
        start_position: int = 0,
        skipped: Iterable[tuple[int, int]] = (),
        on_end: Literal["repeat", "refuse"] = "repeat",
    ) -> None:
        assert 0 <= dp_rank < dp_size and global_batch > 0 and global_batch % dp_size == 0, (
            global_batch,
            dp_rank,
            dp_size,
        )
        assert start_position >= 0, start_position
        self.mixture = data if isinstance(data, Mixture) else Mixture([data], [1])
        self.order, self.global_batch, self.on_end = self.mixture.order(seed), global_batch, on_end
        self.local = global_batch // dp_size
        self.position = start_position
        self._first_slot = dp_rank * self.local
        self._skipped = SkippedRanges(skipped)
        self._number = self._skipped.number(start_position)  # samples the run reads before the next batch
        self._ahead: deque[_Slots] = deque()
        self._batches_ahead = (
            1  # doubled each time, so that the first batch of a resumed run is there at once
        )
        if on_end == "refuse":
            self._refuse_beyond_end(global_batch)

    def next(self) -> Batch:
        """Read this rank's part of the next global batch and move ``position`` behind that batch."""
        if not self._ahead:
            self._look_ahead()
        slots = self._ahead[0]
        if self.on_end == "refuse":
            self._refuse_beyond_end(slots.end)
        batch = self._read_packed(slots) if self.mixture.packed else self._read(slots)
        self._ahead.popleft()
        self.position = slots.end
        return batch

    def _read(self, slots: _Slots) -> Batch:
        """Tokens and labels are views of the same rows: half the memory to be filled."""
        self.mixture.fetch(slots.sources, slots.ids)
        rows = np.empty((self.local, self.mixture.sequence_length + 1), np.int64)
        for slot, (source, sample_id) in enumerate(zip(slots.sources, slots.ids, strict=True)):
            rows[slot] = self.mixture.datasets[source].read(sample_id)
        numbers = tuple(self.mixture.numbered(slots.sources, slots.ids))
        return Batch(rows[:, :-1], rows[:, 1:], numbers, slots.position)

    def _read_packed(self, slots: _Slots) -> Batch:
        tokens = np.empty((self.local, self.mixture.sequence_length), np.int64)
        labels, documents = np.empty_like(tokens), np.empty_like(tokens)
        for slot, (source, sample_id) in enumerate(zip(slots.sources, slots.ids, strict=True)):
            dataset = self.mixture.datasets[source]
            dataset.read_packed(sample_id, tokens[slot], labels[slot], documents[slot])
        numbers = tuple(self.mixture.numbered(slots.sources, slots.ids))
        return Batch(tokens, labels, numbers, slots.position, documents)

    def _look_ahead(self) -> None:
        """Compute this rank's slots of the next batches, so many at once that each sample costs little."""
        batches = self._batches_ahead
        most = min(LOOK_AHEAD // self.local, LOOK_AHEAD_SPAN // self.global_batch)
        self._batches_ahead = max(1, min(2 * batches, most))
        firsts = self._number + self.global_batch * np.arange(batches, dtype=np.int64)
        self._number += self.global_batch * batches
        mine = firsts[:, None] + np.arange(self._first_slot, self._first_slot + self.local)
        sources, ids = self.order.samples_at(self._skipped.positions(mine.ravel()))
        begins = self._skipped.positions(firsts)
        ends = self._skipped.positions(firsts + self.global_batch - 1) + 1
        for row in range(batches):
            at = slice(row * self.local, (row + 1) * self.local)
            slots = _Slots(int(begins[row]), int(ends[row]), sources[at].tolist(), ids[at].tolist())
            self._ahead.append(slots)

    def _refuse_beyond_end(self, end: int) -> None:
        for dataset, need in zip(self.mixture.datasets, self.order.consumed(end), strict=True):
            if need > dataset.size:
                raise DatasetError(
                    f"{dataset.index.bin_path} has {dataset.size} samples of "
                    f"{dataset.sequence_length} tokens, and this batch needs {need}: add text, lower "
                    "data.global_batch or optimizer.steps, or set data.on_end to repeat"
                )


def _model_hash(prefix: Prefix, sidecar: Sidecar) -> str | None:
    """What tells two trained tokenizers of equal size apart; None for one that has no file."""
    if sidecar.tokenizer == "bytes" or sidecar.tokenizer_sha256 is not None:
        return sidecar.tokenizer_sha256
    try:  # built by version 0.1, which wrote no hash of it
        return file_sha256(f"{os.fspath(prefix)}.tokenizer.json")
    except FileNotFoundError:
        return None
