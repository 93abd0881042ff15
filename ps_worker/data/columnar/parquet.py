"""Parquet reader. A split is a range of row groups, an offset a row number in the file, from 0."""

from collections.abc import Iterator

import numpy as np
import pyarrow.parquet as pq

from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.columnar.column_matching import FileColumns, check_types, match_columns
from ctr_ps.ps_worker.data.columnar.column_values import is_text_type
from ctr_ps.ps_worker.data.columnar.open_file import open_columnar, require_valid
from ctr_ps.ps_worker.data.columnar.record_batches import (
    ColumnReader,
    Columns,
    Decoder,
)
from ctr_ps.ps_worker.data.files.file_split import FileSplit, split_evenly

# A text column with fewer bytes a value repeats its values so often that reading it as a dictionary is up to
# 5 times faster; without repetition it is up to 4 times slower.
_DICTIONARY_BYTES = 6


class ParquetReader(ColumnReader):
    """Reads the columns of a schema by name. Thread-safe."""

    def splits(self, path: str, num_splits: int) -> list[FileSplit]:
        with open_columnar(path, "Parquet") as source:
            metadata = pq.ParquetFile(source).metadata
            sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
        ranges = split_evenly(sizes, num_splits)
        return [FileSplit(path, start, stop) for start, stop in ranges]

    def columns(self, split: FileSplit, offset: int | None = None) -> Iterator[Columns]:
        with open_columnar(split.path, "Parquet") as source:
            plain = pq.ParquetFile(source)
            fields = plain.schema_arrow
            columns = match_columns(split.path, fields, self._schema)
            check_types(split.path, fields, self._schema, columns)
            file = pq.ParquetFile(
                source,
                metadata=plain.metadata,
                read_dictionary=_dictionary_columns(plain, columns),
                pre_buffer=False,  # True reads all row groups ahead
                page_checksum_verification=True,
            )
            decoder = Decoder(split.path, self._schema, columns, self._bad_rows)
            yield from _decoded(file, split, offset or 0, columns, decoder)


def _decoded(
    file: pq.ParquetFile, split: FileSplit, offset: int, columns: FileColumns, decoder: Decoder
) -> Iterator[Columns]:
    num_groups = file.metadata.num_row_groups
    last = num_groups if split.stop is None else min(split.stop, num_groups)
    stop = 0
    for group in range(last):
        row, stop = stop, stop + file.metadata.row_group(group).num_rows
        if group < split.start or stop <= offset:
            continue
        for batch in file.iter_batches(
            columns.read_rows, row_groups=[group], columns=columns.names, use_threads=False
        ):
            require_valid(batch)
            skipped = min(max(offset - row, 0), len(batch))
            row += len(batch)
            if skipped < len(batch):
                rows = np.arange(row - len(batch) + skipped, row)
                yield decoder.decode(batch.slice(skipped), rows)
        if row != stop:
            raise DataError(
                f"{split.path}: row group {group} ends at row {row}, its metadata says {stop}: the file is "
                f"damaged, copy or write it again"
            )


def _dictionary_columns(file: pq.ParquetFile, columns: FileColumns) -> list[str]:
    """Returns the text columns to read as dictionaries, judging by the first row group."""
    if not file.metadata.num_row_groups:
        return []
    # Only of the columns to read: pyarrow ends the process on a chunk with damaged metadata.
    texts = {name for name in columns.names if is_text_type(file.schema_arrow.field(name).type)}
    leaves = {file.schema.column(i).path: i for i in range(len(file.schema))}
    group = file.metadata.row_group(0)
    chunks = {name: group.column(leaves[name]) for name in texts if name in leaves}
    return [
        name
        for name, chunk in chunks.items()
        if chunk.has_dictionary_page
        and chunk.total_uncompressed_size <= _DICTIONARY_BYTES * chunk.num_values
    ]
