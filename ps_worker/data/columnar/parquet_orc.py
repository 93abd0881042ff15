"""Readers of Parquet, ORC and Arrow's files (Feather), with checks of what is read.

Offsets are row numbers in the file, from 0.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import orc

from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.columnar.column_values import (
    buffer_view,
    flat,
    is_list_type,
    is_text_type,
)
from ctr_ps.ps_worker.data.columnar.record_batches import ColumnReader, Columns, Decoder
from ctr_ps.ps_worker.data.files.file_split import FileSplit, split_evenly
from ctr_ps.ps_worker.data.files.listing import is_url, open_file

# A text column with fewer bytes a value repeats its values so often that reading it as a dictionary is up to
# 5 times faster; without repetition it is up to 4 times slower.
_DICTIONARY_BYTES = 6

_Integers = NDArray[np.integer[Any]]

_BOUNDS: dict[pa.DataType, np.dtype[Any]] = {
    pa.string(): np.dtype(np.int32),
    pa.binary(): np.dtype(np.int32),
    pa.large_string(): np.dtype(np.int64),
    pa.large_binary(): np.dtype(np.int64),
}
"""Types of text, by that of the bounds of their values."""


class ParquetReader(ColumnReader):
    """Reads the columns of a schema by name; a split is a range of row groups. Thread-safe."""

    def fields(self, path: str) -> pa.Schema:
        with open_columnar(path, "Parquet") as source:
            return flat(pq.ParquetFile(source).schema_arrow)

    def splits(self, path: str, num_splits: int) -> list[FileSplit]:
        with open_columnar(path, "Parquet") as source:
            metadata = pq.ParquetFile(source).metadata
            sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
        ranges = split_evenly(sizes, num_splits)
        return [FileSplit(path, start, stop) for start, stop in ranges]

    def columns(self, split: FileSplit, offset: int | None = None) -> Iterator[Columns]:
        with open_columnar(split.path, "Parquet") as source:
            plain = pq.ParquetFile(source)
            decoder = Decoder(split.path, plain.schema_arrow, self._schema, self._bad_rows)
            file = pq.ParquetFile(
                source,
                metadata=plain.metadata,
                read_dictionary=_dictionary_columns(plain, decoder),
                pre_buffer=False,  # True reads all row groups ahead
                page_checksum_verification=True,
            )
            yield from _decoded(file, split, offset or 0, decoder)


class OrcReader(ColumnReader):
    """Reads the columns of a schema by name; a split is a range of stripes. Thread-safe."""

    name: ClassVar[str] = "ORC"
    opened: ClassVar[Any] = orc.ORCFile

    def fields(self, path: str) -> pa.Schema:
        with self.open(path) as file:
            return flat(file.schema)

    @classmethod
    @contextmanager
    def open(cls, path: str) -> Iterator[Any]:
        """Opens a file as an `orc.ORCFile` or alike; errors as those of `open_columnar`."""
        with open_columnar(path, cls.name) as source:
            yield cls.opened(source)

    def splits(self, path: str, num_splits: int) -> list[FileSplit]:
        with self.open(path) as file:
            num_stripes = file.nstripes
        ranges = split_evenly([1] * num_stripes, num_splits)
        return [FileSplit(path, start, stop) for start, stop in ranges]

    def columns(self, split: FileSplit, offset: int | None = None) -> Iterator[Columns]:
        with self.open(split.path) as file:
            decoder = Decoder(split.path, file.schema, self._schema, self._bad_rows)
            columns = decoder.columns
            offset = offset or 0
            stop = 0
            for stripe in range(file.nstripes)[: split.stop]:
                if stripe < split.start or stop < offset:
                    # Arrow reveals the number of rows of a stripe only when a column of it is read.
                    num_rows = len(file.read_stripe(stripe, columns=columns.stored[:1]))
                    if stripe < split.start or stop + num_rows <= offset:
                        stop += num_rows
                        continue
                batch = file.read_stripe(stripe, columns=columns.stored)
                require_valid(batch)
                for skipped in range(max(offset - stop, 0), len(batch), columns.read_rows):
                    rows = batch.slice(skipped, columns.read_rows)
                    row = stop + skipped
                    yield decoder.decode(rows, np.arange(row, row + len(rows)))
                stop += len(batch)


class _ArrowFile:
    """A file of Arrow's IPC format, with the names of an `orc.ORCFile`: a record batch is a stripe."""

    def __init__(self, source: pa.NativeFile) -> None:
        self._source = source
        file = pa.ipc.open_file(source)
        self.schema, self.nstripes = file.schema, file.num_record_batches

    @property
    def nrows(self) -> int:
        return sum(len(self.read_stripe(i, self.schema.names[:1])) for i in range(self.nstripes))

    def read_stripe(self, stripe: int, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        wanted = None
        if columns is not None:
            ends = [f"{each}." for each in columns]  # of `device.os` the column is `device`
            names = enumerate(self.schema.names)
            wanted = [i for i, name in names if any(e.startswith(f"{name}.") for e in ends)]
        options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
        return pa.ipc.open_file(self._source, options=options).get_batch(stripe)


class ArrowReader(OrcReader):
    """Reads the columns of a schema by name; a split is a range of record batches. Thread-safe."""

    name = "Arrow"
    opened = _ArrowFile


@contextmanager
def open_columnar(path: str, format_name: str) -> Iterator[pa.NativeFile]:
    """Opens a file for random access; errors of Arrow inside the `with` block become a DataError, too."""
    try:
        with pa.PythonFile(open_file(path), "r") if is_url(path) else pa.OSFile(path) as file:
            yield file
    except FileNotFoundError as error:
        raise DataError(f"cannot read {path!r}: No such file or directory") from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last one of a name
        raise DataError(
            f"{path}: not a valid {format_name} file: copy or write it again ({error})"
        ) from error


def require_valid(rows: pa.RecordBatch) -> None:
    """Checks that indices of dictionaries and bounds of lists and text are within their values.

    Neither Arrow's readers nor its functions check them. Raises a pa.ArrowInvalid that names the column.
    """
    for name, array in zip(rows.schema.names, rows.columns, strict=True):
        try:
            _require_valid(array)
        except pa.ArrowInvalid as error:
            raise pa.ArrowInvalid(f"column {name!r}: {error}") from error


def _decoded(
    file: pq.ParquetFile, split: FileSplit, offset: int, decoder: Decoder
) -> Iterator[Columns]:
    columns, stop = decoder.columns, 0
    for group in range(file.metadata.num_row_groups)[: split.stop]:
        row, stop = stop, stop + file.metadata.row_group(group).num_rows
        if group < split.start or stop <= offset:
            continue
        for batch in file.iter_batches(
            columns.read_rows, row_groups=[group], columns=columns.stored, use_threads=False
        ):
            require_valid(batch)
            skipped = min(max(offset - row, 0), len(batch))
            row += len(batch)
            if skipped < len(batch):
                rows = np.arange(row - len(batch) + skipped, row)
                yield decoder.decode(batch.slice(skipped), rows)
        if row != stop:
            raise DataError(
                f"{split.path}: row group {group} ends at row {row}, but its metadata says {stop}: the file "
                "is damaged, copy or write it again"
            )


def _dictionary_columns(file: pq.ParquetFile, decoder: Decoder) -> list[str]:
    """Returns the text columns to read as dictionaries, judging by the first row group."""
    if not file.metadata.num_row_groups:
        return []
    # Only of the columns to read: pyarrow ends the process on a chunk with damaged metadata.
    names, fields = decoder.columns.names, decoder.fields
    texts = {name for name in names if is_text_type(fields.field(name).type)}
    leaves = {file.schema.column(i).path: i for i in range(len(file.schema))}
    group = file.metadata.row_group(0)
    chunks = {name: group.column(leaves[name]) for name in texts if name in leaves}
    return [
        name
        for name, chunk in chunks.items()
        if chunk.has_dictionary_page
        and chunk.total_uncompressed_size <= _DICTIONARY_BYTES * chunk.num_values
    ]


def _require_valid(array: pa.Array) -> None:
    kind = array.type
    array.validate()  # sizes of buffers, the first and the last bound
    if pa.types.is_dictionary(kind):
        _require_indices(array)
        _require_valid(array.dictionary)
    elif is_list_type(kind) or pa.types.is_map(kind):
        if hasattr(array, "sizes"):  # a view
            starts = array.offsets.to_numpy().astype(np.int64)
            _require_bounds(starts, starts + array.sizes.to_numpy(), len(array.values))
        elif not pa.types.is_fixed_size_list(kind):
            bounds = array.offsets.to_numpy()
            _require_bounds(bounds[:-1], bounds[1:], len(array.values))
        _require_valid(array.values)
    elif pa.types.is_struct(kind):
        for index in range(kind.num_fields):
            _require_valid(array.field(index))
    elif kind in _BOUNDS and len(array):
        _, memory, data = array.buffers()
        bounds = buffer_view(memory, _BOUNDS[kind], array.offset, len(array) + 1)
        _require_bounds(bounds[:-1], bounds[1:], 0 if data is None else data.size)


def _require_indices(array: pa.DictionaryArray) -> None:
    indices, size = array.indices, len(array.dictionary)
    kind = np.dtype(indices.type.to_pandas_dtype())
    numbers = buffer_view(indices.buffers()[1], kind, indices.offset, len(indices))
    # Negative ones are large without a sign. Those of nulls may be anything, and are 0 mostly.
    if numbers.view(f"u{kind.itemsize}").max(initial=0) < size:
        return
    low, high = pc.min_max(indices).as_py().values()  # but of nulls
    if high is not None and not 0 <= low <= high < size:
        wrong = low if low < 0 else high
        raise pa.ArrowInvalid(f"index {wrong} into a dictionary of {size} values")


def _require_bounds(starts: _Integers, stops: _Integers, size: int) -> None:
    ascending = bool((starts <= stops).all())
    if not ascending or starts.min(initial=0) < 0 or stops.max(initial=0) > size:
        raise pa.ArrowInvalid(f"offsets of values are not ascending from 0 to at most {size}")
