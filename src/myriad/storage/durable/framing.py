"""Tensors in the bytes that ``torch.save`` would write, without a call of it for each.

What DCP keeps of a tensor is a small zip archive: a head, the raw bytes, a tail. Head and tail depend on dtype and
shape alone (torch's own checksums are left out, ours are of the whole file), so they are made once, by torch itself,
and the raw bytes go between them straight from memory. ``torch.save`` copies them through Python objects while it
holds the interpreter's lock: 1.1 GB/s, and training stands still meanwhile; this writes 1.5 GB/s beside it.
"""

from __future__ import annotations

import functools
import io
import threading
import zipfile

import torch

_RECORD = "archive/data/0"  # where torch puts the bytes of a single tensor
_LOCAL_HEADER_BYTES = 30  # of a zip entry, before its name and its padding
_lock = threading.Lock()


@functools.lru_cache(maxsize=4096)
def frame(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """(head, tail) of a contiguous CPU tensor that has its storage for itself."""
    sample = torch.empty(shape, dtype=dtype)
    archive = _saved(sample)
    with zipfile.ZipFile(io.BytesIO(archive)) as found:
        at = found.getinfo(_RECORD).header_offset
    name, padding = (int.from_bytes(archive[at + i : at + i + 2], "little") for i in (26, 28))
    begin = at + _LOCAL_HEADER_BYTES + name + padding
    return archive[:begin], archive[begin + sample.nbytes :]


def _saved(tensor: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    with _lock:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(tensor, stream)
        finally:
            torch.serialization.set_crc32_options(before)
    return stream.getvalue()
