"""Which sample stands at a position: a keyed permutation, computed and never stored.

Method: a balanced Feistel network over the smallest even number of bits that holds ``size``, walked
along its cycle until the value falls below ``size`` (Black and Rogaway, "Ciphers with arbitrary finite
domains", 2002, section 4). A Feistel network is a bijection whatever its round function, and cycle
walking keeps it one, so every epoch visits each sample exactly once. Round keys come from BLAKE2b of
(seed, epoch): each epoch has an order of its own.

Trade-off: on average less than four walks of six rounds a sample instead of a stored shuffle; in
return a seek to any position costs the same, 2 to 6 us alone and 0.1 to 1 us inside a vector (less the
nearer the size is below a power of 4), and a corpus of any size needs no memory. This is a shuffle, not cryptography.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6  # four suffice in theory for a random round function; two more for small domains
_MASK = (1 << 64) - 1
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64's finaliser (Steele et al., 2014)
_MIXING = ((np.uint64(30), np.uint64(_MIX_1)), (np.uint64(27), np.uint64(_MIX_2)))
_LAST_SHIFT = np.uint64(31)
FEW = 24  # values: below, numpy's 50 calls of 0.5 us each cost more than plain integers


def sample(seed: int, position: int, size: int) -> int:
    """The sample id in [0, size) at ``position`` >= 0; the epoch is ``position // size``. Pure, O(1)."""
    assert size > 0 and position >= 0, (position, size)
    epoch, value = divmod(position, size)
    keys, half = _round_keys(seed, epoch), _half_bits(size)
    value = _permute(value, keys, half)
    while value >= size:
        value = _permute(value, keys, half)
    return value


def samples(seed: int, start: int, count: int, size: int) -> NDArray[np.int64]:
    """The ids at positions [start, start + count), as int64 [count]; equal to :func:`sample` of each."""
    assert size > 0 and start >= 0 and count >= 0, (start, count, size)
    return samples_at(seed, np.arange(start, start + count, dtype=np.int64), size)


def samples_at(seed: int, positions: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The ids at any positions, as int64 of the same shape [n]."""
    epochs, offsets = np.divmod(positions, size)
    ids = np.empty(len(positions), dtype=np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        ids[here] = _walk(offsets[here].astype(np.uint64), _round_keys(seed, int(epoch)), size)
    return ids


def _half_bits(size: int) -> int:
    return max(1, ((size - 1).bit_length() + 1) // 2)


@functools.lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, 8 * ROUNDS, 8))


def _permute(value: int, keys: tuple[int, ...], half: int) -> int:
    low = (1 << half) - 1
    left, right = value >> half, value & low
    for key in keys:
        mixed = (right + key) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * _MIX_1) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * _MIX_2) & _MASK
        left, right = right, left ^ ((mixed ^ (mixed >> 31)) & low)
    return (left << half) | right


def _permute_all(values: NDArray[np.uint64], keys: tuple[int, ...], half: int) -> NDArray[np.uint64]:
    """:func:`_permute` of each value; uint64 arithmetic wraps as the mask does there."""
    shift, low = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & low
    mixed, shifted = np.empty_like(values), np.empty_like(values)
    for key in np.array(keys, np.uint64):
        np.add(right, key, out=mixed)
        for distance, factor in _MIXING:
            np.right_shift(mixed, distance, out=shifted)
            np.bitwise_xor(mixed, shifted, out=mixed)
            np.multiply(mixed, factor, out=mixed)
        np.right_shift(mixed, _LAST_SHIFT, out=shifted)
        np.bitwise_xor(mixed, shifted, out=mixed)
        np.bitwise_and(mixed, low, out=mixed)
        np.bitwise_xor(mixed, left, out=mixed)
        left, right, mixed = right, mixed, left
    return (left << shift) | right


def _walk(values: NDArray[np.uint64], keys: tuple[int, ...], size: int) -> NDArray[np.int64]:
    half = _half_bits(size)
    if len(values) > FEW:
        values = _permute_all(values, keys, half)
    else:
        values = np.array([_permute(value, keys, half) for value in values.tolist()], np.uint64)
    outside = np.flatnonzero(values >= size)
    while len(outside) > FEW:
        values[outside] = _permute_all(values[outside], keys, half)
        outside = outside[values[outside] >= size]
    for index in outside.tolist():
        value = int(values[index])
        while value >= size:
            value = _permute(value, keys, half)
        values[index] = value
    return values.astype(np.int64)
