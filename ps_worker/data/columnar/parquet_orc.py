"""Readers of Parquet, ORC and Arrow's files (Feather), with checks of what is read.

Offsets are row numbers in the file, from 0.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import orc

from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.columnar.column_values import flat, is_text_type
from ctr_ps.ps_worker.data.columnar.record_batches import ColumnReader, Columns, Decoder
from ctr_ps.ps_worker.data.files.file_split import FileSplit, split_evenly
from ctr_ps.ps_worker.data.files.listing import is_url, open_file

# A text column with fewer bytes a value repeats its values so often that reading it as a dictionary is up to
# 5 times faster; without repetition it is up to 4 times slower.
_DICTIONARY_BYTES = 6

_BYTES = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}
_LISTS = {
    pa.lib.Type_LIST: pa.list_,
    pa.lib.Type_LARGE_LIST: pa.large_list,
    pa.lib.Type_LIST_VIEW: pa.list_view,
    pa.lib.Type_LARGE_LIST_VIEW: pa.large_list_view,
}


class _OrcFile:
    """A file of ORC, whose groups of rows are stripes."""

    def __init__(self, source: pa.NativeFile) -> None:
        self._file = orc.ORCFile(source)
        self.schema, self.num_rows = self._file.schema, self._file.nrows
        self.sizes = [1] * self._file.nstripes  # of groups, in proportion

    def rows_of(self, group: int, columns: Sequence[str]) -> int:
        """Returns the number of rows of a group, which Arrow reveals when a column is read."""
        return len(self._read(group, columns[:1]))

    def batches(
        self, groups: Sequence[int], max_rows: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yields the rows of groups, checked by `require_valid`; `columns` None: all."""
        for group in groups:
            rows = self._read(group, columns)
            require_valid(rows)
            for start in range(0, len(rows), max_rows):
                yield rows.slice(start, max_rows)

    def read_dictionaries(self, decoder: Decoder) -> None:
        """From now on, text that repeats is read as a dictionary, if the format can."""

    def _read(self, group: int, columns: Sequence[str] | None) -> pa.RecordBatch:
        return self._file.read_stripe(group, columns=columns)


class _ArrowFile(_OrcFile):
    """A file of Arrow's IPC format, whose groups of rows are record batches."""

    def __init__(self, source: pa.NativeFile) -> None:
        self._source = source
        file = pa.ipc.open_file(source)
        self.schema, self.sizes = file.schema, [1] * file.num_record_batches

    @property
    def num_rows(self) -> int:
        names = self.schema.names
        return sum(self.rows_of(group, names) for group in range(len(self.sizes)))

    def _read(self, group: int, columns: Sequence[str] | None) -> pa.RecordBatch:
        wanted = None
        if columns is not None:
            ends = [f"{each}." for each in columns]  # of `device.os` the column is `device`
            names = enumerate(self.schema.names)
            wanted = [i for i, name in names if any(e.startswith(f"{name}.") for e in ends)]
        options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
        return pa.ipc.open_file(self._source, options=options).get_batch(group)


class _ParquetFile:
    """A file of Parquet, with the names of `_OrcFile`; groups are row groups."""

    def __init__(self, source: pa.NativeFile) -> None:
        self._source = source
        self._file = pq.ParquetFile(source)
        self._metadata = metadata = self._file.metadata
        self.schema, self.num_rows = self._file.schema_arrow, metadata.num_rows
        groups = map(metadata.row_group, range(metadata.num_row_groups))
        self.sizes = [group.total_byte_size for group in groups]

    def rows_of(self, group: int, columns: Sequence[str]) -> int:
        num_rows: int = self._metadata.row_group(group).num_rows
        return num_rows

    def batches(
        self, groups: Sequence[int], max_rows: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        missing = sum(self.rows_of(group, ()) for group in groups)
        for rows in self._file.iter_batches(
            max_rows, row_groups=list(groups), columns=columns, use_threads=False
        ):
            require_valid(rows)
            missing -= len(rows)
            yield rows
        if missing:
            raise pa.ArrowInvalid(f"{missing} rows of {groups} are missing, as its metadata says")

    def read_dictionaries(self, decoder: Decoder) -> None:
        self._file = pq.ParquetFile(
            self._source,
            metadata=self._metadata,
            read_dictionary=_dictionary_columns(self._file, decoder),
            pre_buffer=False,  # True reads all row groups ahead
            page_checksum_verification=True,
        )


class ColumnarReader(ColumnReader):
    """Reads the columns of a schema by name; a split is a range of groups of rows. Thread-safe."""

    name: ClassVar[str]
    opened: ClassVar[Any]

    @classmethod
    @contextmanager
    def open(cls, path: str) -> Iterator[Any]:
        """Opens a file; errors of Arrow inside the `with` block become a DataError, too."""
        with open_columnar(path, cls.name) as source:
            yield cls.opened(source)

    def fields(self, path: str) -> pa.Schema:
        with self.open(path) as file:
            return flat(file.schema)

    def splits(self, path: str, num_splits: int) -> list[FileSplit]:
        with self.open(path) as file:
            ranges = split_evenly(file.sizes, num_splits)
        return [FileSplit(path, start, stop) for start, stop in ranges]

    def columns(self, split: FileSplit, offset: int | None = None) -> Iterator[Columns]:
        with self.open(split.path) as file:
            decoder = Decoder(split.path, file.schema, self._schema, self._bad_rows)
            file.read_dictionaries(decoder)
            stored, size = decoder.columns.stored, decoder.columns.read_rows
            row, offset = 0, offset or 0
            for group in range(len(file.sizes))[: split.stop]:
                if group < split.start or row < offset:
                    stop = row + file.rows_of(group, stored)
                    if group < split.start or stop <= offset:
                        row = stop
                        continue
                for batch in file.batches([group], size, stored):
                    places = np.arange(row, row + len(batch))
                    row += len(batch)
                    if row > offset:
                        yield decoder.decode(batch[-(row - offset) :], places[-(row - offset) :])


class ParquetReader(ColumnarReader):
    """A reader of Parquet."""

    name, opened = "Parquet", _ParquetFile


class OrcReader(ColumnarReader):
    """A reader of ORC."""

    name, opened = "ORC", _OrcFile


class ArrowReader(ColumnarReader):
    """A reader of Arrow's files."""

    name, opened = "Arrow", _ArrowFile


COLUMNAR = {"parquet": ParquetReader, "orc": OrcReader, "arrow": ArrowReader}
"""Readers of these formats, by name."""


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
            array.view(_as_bytes(array.type)).validate(full=True)
        except pa.ArrowInvalid as error:
            raise pa.ArrowInvalid(f"column {name!r}: {error}") from error


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


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    """Returns a type with bytes in the place of text, which need not be UTF-8."""
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _as_bytes(kind.value_type), kind.ordered)
    if pa.types.is_map(kind):
        return pa.map_(_as_bytes(kind.key_type), _as_bytes(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_bytes(field.type)) for field in kind])
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_as_bytes(kind.value_type), kind.list_size)
    make = _LISTS.get(kind.id)
    return make(_as_bytes(kind.value_type)) if make else _BYTES.get(kind, kind)
