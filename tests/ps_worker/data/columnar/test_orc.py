"""What holds for ORC alone: damage, stripes."""

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import orc

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.columnar.parquet_orc import OrcReader
from ctr_ps.ps_worker.data.files.file_split import FileSplit

SCHEMA = Schema(dense=(), slots=("user",))


def write(path: Path, num_rows: int, rows_per_stripe: int) -> str:
    with orc.ORCWriter(str(path), stripe_size=1, batch_size=rows_per_stripe) as writer:
        for start in range(0, num_rows, rows_per_stripe):
            stop = min(start + rows_per_stripe, num_rows)
            writer.write(pa.table({"user": [f"u{row}" for row in range(start, stop)]}))
    return str(path)


def test_split_is_a_range_of_stripes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.orc", 50, 10)
    reader = OrcReader(SCHEMA, BadRows())

    assert reader.splits(path, 2) == [FileSplit(path, 0, 2), FileSplit(path, 2, 5)]
    assert [block.offset for block in reader.blocks(FileSplit(path, 3, 5))] == [30, 40]
    assert [block.offset for block in reader.blocks(FileSplit(path, 3, 5), 45)] == [45]


@pytest.mark.parametrize("kept", [0, 3, 200, -1])
def test_truncated_file_is_refused(tmp_path: Path, kept: int) -> None:
    path = Path(write(tmp_path / "a.orc", 50, 10))
    path.write_bytes(path.read_bytes()[:kept])

    with pytest.raises(DataError, match=r"a\.orc: not a valid ORC file.*copy or write it again"):
        list(OrcReader(SCHEMA, BadRows()).blocks(FileSplit(str(path))))
