"""A framed tensor is byte for byte what ``torch.save`` writes, whatever its kind and size."""

from __future__ import annotations

import io

import pytest
import torch

from myriad.storage.durable.framing import frame
from myriad.storage.durable.writing import local_bytes

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (3, 5), (64,), (7, 0, 2), (257, 33))


def saved(tensor: torch.Tensor) -> bytes:
    """By torch, without its own checksums."""
    stream = io.BytesIO()
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensor, stream)
    finally:
        torch.serialization.set_crc32_options(before)
    return stream.getvalue()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_what_torch_writes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    tensor = (torch.randn(shape, generator=generator) * 100).to(dtype)
    head, tail = frame(dtype, shape)
    framed = head + bytes(local_bytes(tensor)) + tail
    assert framed == saved(tensor)
    loaded = torch.load(io.BytesIO(framed), weights_only=True)
    assert loaded.dtype == dtype and torch.equal(loaded, tensor)


def test_the_frame_of_another_shape_does_not_fit() -> None:
    """The control: the head says how many bytes follow."""
    tensor = torch.ones(8)
    head, tail = frame(torch.float32, (4,))
    assert head + bytes(local_bytes(tensor)) + tail != saved(tensor)


def test_the_options_of_the_process_stay() -> None:
    before = torch.serialization.get_crc32_options()
    frame.cache_clear()
    frame(torch.float32, (12345,))
    assert torch.serialization.get_crc32_options() == before
