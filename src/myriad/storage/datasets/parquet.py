"""Documents out of the row groups of a Parquet file: one text column, a row a document.

Method: pyarrow streams the pages of that one column in batches of about ``BATCH_BYTES``, checks the page
checksums where the writer made some, and hands out bytes, so that text which is not UTF-8 is found by its
row. A span has the row groups whose column begins in its bytes. Trade-off: after a damaged page the rest
of its row group is lost, and the report says at which row. Memory: a page and a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from myriad.storage.datasets.documents import LINE_LIMIT_BYTES, Document, Left, Meter, judged
from myriad.storage.datasets.index import DatasetError
from myriad.storage.datasets.sources import Span

BATCH_BYTES = 4 << 20
BATCH_ROWS_MAX = 1024


def rows(span: Span, key: str, meter: Meter) -> Iterator[Document | Left]:
    """All rows of the span's row groups; what concerns the file as a whole is told by its first span."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DatasetError("reading Parquet needs pyarrow: install myriad-cluster[data]") from None
    damage = (pyarrow.ArrowException, OSError)
    try:
        file = pyarrow.parquet.ParquetFile(
            span.path, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True
        )
    except damage:
        if span.start == 0:
            yield Left(None, "empty" if span.size == 0 else "not Parquet, or cut short")
        return
    with file:
        if defect := _defect(file, key):
            if span.start == 0:
                yield Left(None, defect)
            return
        row = 0
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            column = _column(file.metadata.row_group(group), key)
            if span.start <= (column.dictionary_page_offset or column.data_page_offset) < span.end:
                size = max(1, column.total_uncompressed_size)
                batch_rows = max(1, min(BATCH_ROWS_MAX, BATCH_BYTES * count // size))
                try:
                    for batch in file.iter_batches(
                        batch_rows, row_groups=[group], columns=[key], use_threads=False
                    ):
                        meter.add(column.total_compressed_size * len(batch) // count)
                        yield from _documents(batch.column(0), row, key)
                        row, count = row + len(batch), count - len(batch)
                except damage:
                    yield Left(row + 1, "damaged Parquet data, up to the end of its row group")
            row += count


def _defect(file: Any, key: str) -> str | None:
    import pyarrow

    if key not in file.schema_arrow.names:
        return f"without the column {key!r}"
    kind = file.schema_arrow.field(key).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        return f"no text in the column {key!r}"
    return None if file.metadata.num_rows else "empty"


def _column(facts: Any, key: str) -> Any:
    """The metadata of the text column in one row group."""
    columns = (facts.column(i) for i in range(facts.num_columns))
    return next(each for each in columns if each.path_in_schema == key)


def _documents(column: Any, row: int, key: str) -> Iterator[Document | Left]:
    """The documents of one batch, whose first row follows row number ``row``."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    for number, value in enumerate(column.cast(pyarrow.large_binary()), row + 1):
        yield _row(value.as_py(), number, key)


def _row(data: bytes | None, row: int, key: str) -> Document | Left:
    if data is None:
        return Left(row, f"no text under the key {key!r}")
    if len(data) > LINE_LIMIT_BYTES:
        return Left(row, f"longer than {LINE_LIMIT_BYTES >> 20} MiB")
    try:
        data.decode()
    except UnicodeDecodeError:
        return Left(row, "not UTF-8")
    return judged(data, row)
