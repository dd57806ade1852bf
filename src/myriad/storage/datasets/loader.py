"""Batches of token sequences, in an order that depends on nothing but (seed, position).

Sample i is tokens [i*S, i*S + S + 1) of the concatenated token stream (S = sequence length): S inputs
and, shifted by one, S labels. ``position`` counts samples consumed since the beginning of the run, over
all ranks, so a changed batch size, number of ranks or restart moves nothing: whoever knows the position
knows all that follows. Each data-parallel rank reads only its own contiguous slots of a batch.

Method: one ``pread`` a sample, into one reused buffer (of an object behind a URL, all samples of a batch are
asked for together before); a file cut short below us is a DatasetError and not the SIGBUS a mapping would raise. Trade-off: a system call a sample (1 to 2 us) instead of none; at
S = 2048 one core still reads more than 100 million tokens/s from the page cache.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from myriad.storage.datasets.files import Prefix, Range, fetch_all, is_remote, open_file
from myriad.storage.datasets.index import DatasetError, Sidecar, file_sha256, open_index, read_sidecar
from myriad.storage.datasets.mixture import MixtureOrder

if TYPE_CHECKING:
    from myriad.storage.datasets.cache import BlockCache


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch of which it holds ``local`` sequences of S tokens.

    ``position`` is the position of the global batch's first sample; ``sample_ids`` are this rank's,
    numbered through all sources: those of the second follow the last of the first.
    """

    tokens: NDArray[np.int64]  # [local, S]
    labels: NDArray[np.int64]  # [local, S]
    sample_ids: tuple[int, ...]  # [local]
    position: int


class TokenDataset:
    """The token stream of ``<prefix>.bin`` cut into samples of ``sequence_length`` + 1 tokens.

    ``size`` samples; ``vocab_size`` is None where no sidecar says it. Of a URL, blocks are kept in ``cache``.
    Raises DatasetError.
    """

    def __init__(self, prefix: Prefix, sequence_length: int, cache: BlockCache | None = None) -> None:
        assert sequence_length > 0, sequence_length
        self.index = open_index(prefix)
        sidecar = read_sidecar(prefix)
        self.vocab_size = None if sidecar is None else sidecar.vocab_size
        self.vocabulary = (
            None if sidecar is None else (sidecar.tokenizer, sidecar.vocab_size, _model_hash(prefix, sidecar))
        )
        self.sequence_length = sequence_length
        self.size = max(0, (self.index.tokens - 1) // sequence_length)
        if self.size == 0:
            raise DatasetError(
                f"{self.index.bin_path} has {self.index.tokens} tokens, too few for one sample of "
                f"{sequence_length} + 1; add text or lower data.sequence_length"
            )
        self._row = np.empty(sequence_length + 1, self.index.dtype)
        self.file = open_file(self.index.bin_path, cache)

    def read(self, sample_id: int) -> NDArray[Any]:
        """Tokens of one sample, [S + 1] in the file's dtype, in a buffer that the next read overwrites."""
        assert 0 <= sample_id < self.size, (sample_id, self.size)
        self.file.read_into(self._row.view(np.uint8).data, self.span(sample_id)[0])
        return self._row

    def span(self, sample_id: int) -> Range:
        """The bytes of ``.bin`` that hold the sample."""
        first = sample_id * self.sequence_length * self.index.dtype.itemsize
        return first, first + self._row.nbytes

    def close(self) -> None:
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
        assert all(each.sequence_length == self.sequence_length for each in datasets)
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

    def numbered(self, sources: NDArray[np.int64], ids: NDArray[np.int64]) -> list[int]:
        """Sample ids numbered through all sources: those of the second follow the last of the first."""
        numbers = ids + np.array(self.first_ids, np.int64)[sources]
        return [int(number) for number in numbers]

    def close(self) -> None:
        for each in self.datasets:
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_mixture(
    parts: Sequence[tuple[Prefix, float]], sequence_length: int, cache: BlockCache | None = None
) -> Mixture:
    """The data sets with these prefixes and weights, read as one. Raises DatasetError."""
    with ExitStack() as stack:
        datasets = [stack.enter_context(TokenDataset(prefix, sequence_length, cache)) for prefix, _ in parts]
        if cache is not None:
            cache.expect(sum(each.file.size for each in datasets if is_remote(each.file.name)))
        mixture = Mixture(datasets, [weight for _, weight in parts])
        mixture.order(0)  # refuses weights that come to nothing
        stack.pop_all()
        return mixture


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
        self._skipped = sorted(skipped)
        assert all(0 <= first <= end for first, end in self._skipped), self._skipped
        if on_end == "refuse":
            self._refuse_beyond_end(global_batch)

    def next(self) -> Batch:
        """Read this rank's part of the next global batch and move ``position`` behind that batch."""
        positions = self._positions()
        end = int(positions[-1]) + 1
        if self.on_end == "refuse":
            self._refuse_beyond_end(end)
        mine = positions[self._first_slot : self._first_slot + self.local]
        sources, ids = self.order.samples_at(mine)
        tokens = np.empty((self.local, self.mixture.sequence_length), np.int64)
        labels = np.empty_like(tokens)
        self.mixture.fetch(sources.tolist(), ids.tolist())
        for slot, (source, sample_id) in enumerate(zip(sources, ids, strict=True)):
            row = self.mixture.datasets[source].read(int(sample_id))
            tokens[slot] = row[:-1]
            labels[slot] = row[1:]
        self.position = end
        numbers = self.mixture.numbered(sources, ids)
        return Batch(tokens, labels, tuple(numbers), int(positions[0]))

    def _positions(self) -> NDArray[np.int64]:
        """The next ``global_batch`` positions outside the skipped ranges, int64 [global_batch]."""
        parts, needed, at = [], self.global_batch, self.position
        for first, end in self._skipped:
            take = min(needed, max(0, first - at))
            if take:
                parts.append(np.arange(at, at + take, dtype=np.int64))
                needed, at = needed - take, at + take
            if not needed:
                break
            if first <= at < end:
                at = end
        if needed:
            parts.append(np.arange(at, at + needed, dtype=np.int64))
        return np.concatenate(parts)

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
