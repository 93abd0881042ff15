"""ORC reader. A split is a range of stripes, an offset a row number in the file, from 0."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from pyarrow import orc

from ctr_ps.ps_worker.data.columnar.column_matching import check_types, match_columns
from ctr_ps.ps_worker.data.columnar.open_file import open_columnar, require_valid
from ctr_ps.ps_worker.data.columnar.record_batches import (
    ColumnReader,
    Columns,
    Decoder,
)
from ctr_ps.ps_worker.data.files.file_split import FileSplit, split_evenly


class OrcReader(ColumnReader):
    """Reads the columns of a schema by name. Thread-safe."""

    def splits(self, path: str, num_splits: int) -> list[FileSplit]:
        with open_columnar(path, "ORC") as source:
            num_stripes = orc.ORCFile(source).nstripes
        return [
            FileSplit(path, start, stop)
            for start, stop in split_evenly([1] * num_stripes, num_splits)
        ]

    def columns(self, split: FileSplit, offset: int | None = None) -> Iterator[Columns]:
        with open_columnar(split.path, "ORC") as source:
            file = orc.ORCFile(source)
            columns = match_columns(split.path, file.schema, self._schema)
            check_types(split.path, file.schema, self._schema, columns)
            decoder = Decoder(split.path, self._schema, columns, self._bad_rows)
            for row, batch in _rows(file, split, offset or 0, columns.names):
                for start in range(0, len(batch), columns.read_rows):
                    rows = batch.slice(start, columns.read_rows)
                    yield decoder.decode(rows, np.arange(row + start, row + start + len(rows)))


def _rows(
    file: orc.ORCFile, split: FileSplit, offset: int, names: list[str]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yields the rows of a split from `offset` on by stripe, each with the number of its first row."""
    last = file.nstripes if split.stop is None else min(split.stop, file.nstripes)
    stop = 0
    for stripe in range(last):
        # Arrow reveals the number of rows of a stripe only when a column of it is read.
        is_known_early = stripe < split.start or stop < offset
        if is_known_early:
            num_rows = len(file.read_stripe(stripe, columns=names[:1]))
            if stripe < split.start or stop + num_rows <= offset:
                stop += num_rows
                continue
        batch = file.read_stripe(stripe, columns=names)
        require_valid(batch)
        skipped = max(offset - stop, 0)
        yield stop + skipped, batch.slice(skipped)
        stop += len(batch)
