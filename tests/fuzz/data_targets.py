"""What reads data: columnar files, text, and rows that another worker sends."""

import io
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import orc

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import DenseColumn, Schema
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.blocks import joined
from ctr_ps.ps_worker.data.columnar.parquet_orc import OrcReader, ParquetReader
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.global_shuffle import pack_rows, unpack_rows
from ctr_ps.ps_worker.data.text.criteo import CriteoReader
from ctr_ps.ps_worker.data.text.csv_text import CsvReader
from ctr_ps.ps_worker.data.text.multislot import MultiSlotReader
from ctr_ps.ps_worker.data.text.slot_text import SlotTextReader
from ctr_ps.ps_worker.data.text.svm import LibffmReader, LibsvmReader
from tests.fuzz.driver import Target
from tests.fuzz.mutations import mutated
from tests.reference.features import key_of
from tests.support.rows import NUM_DENSE, NUM_SLOTS, assert_same_rows, numbered_lists, numbered_rows

NUM_ROWS = 24
COLUMNS = Schema(dense=(DenseColumn(name="a"),), slots=("x", "y", "z"))
TABLE = pa.table(
    {
        "unread": pa.array(["q", None] * (NUM_ROWS // 2)),
        "label": pa.array([0, 1] * (NUM_ROWS // 2), pa.int8()),
        "a": pa.array([1, None, 3, -4] * (NUM_ROWS // 4), pa.int64()),
        "x": pa.array(["u", "vv", None, ""] * (NUM_ROWS // 4)),
        "y": pa.array([["p", "q"], [], None, ["r"]] * (NUM_ROWS // 4)),
        "z": pa.array([[1, 2], [3], [], None] * (NUM_ROWS // 4), pa.list_(pa.int64())),
    }
)


def written(write: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    write(TABLE, file, **options)
    return file.getvalue()


def columns(folder: Path) -> Target:
    """Returns the readers of Parquet and ORC: keys are those of what Arrow reads without a dictionary."""
    seeds = [
        written(pq.write_table, compression="none"),
        written(pq.write_table, compression="none", row_group_size=7, data_page_size=10),
        written(pq.write_table, compression="none", use_dictionary=False, data_page_version="2.0"),
        written(pq.write_table, compression="snappy", store_schema=False),
        written(orc.write_table),
        written(orc.write_table, compression="zlib", dictionary_key_size_threshold=1.0),
    ]

    def make(rng: random.Random) -> bytes:
        return mutated(rng.choice(seeds), rng)

    def check(data: bytes) -> bytes:
        path = folder / "file"
        path.write_bytes(data)
        kind = OrcReader if data.startswith(b"ORC") else ParquetReader
        reader = kind(COLUMNS, BadRows())
        splits = reader.splits(str(path), 2)
        blocks = [block.rows for split in splits for block in reader.blocks(split)]
        seen = require_rows(blocks, len(COLUMNS.slots))
        require_same_keys(path, data.startswith(b"ORC"), blocks)
        return seen

    return Target(seeds, make, check)


def require_rows(blocks: Sequence[Batch], num_slots: int) -> bytes:
    """Returns the bytes of rows, whose columns have to fit each other."""
    seen = []
    for rows in blocks:
        assert rows.offsets.size == rows.size * num_slots + 1
        assert rows.offsets[0] == 0
        assert rows.offsets[-1] == rows.keys.size
        assert (np.diff(rows.offsets) >= 0).all()
        assert rows.dense.shape[0] == rows.size
        assert rows.labels is None or np.isin(rows.labels, [0, 1]).all()
        arrays = (rows.labels, rows.dense, rows.keys, rows.offsets)
        seen += [each.tobytes() for each in arrays if each is not None]
    return b"".join(seen)


def require_same_keys(path: Path, is_orc: bool, blocks: Sequence[Batch]) -> None:
    """Compares keys with values as Arrow reads them, where columns have the types that were written."""
    with pa.OSFile(str(path)) as file:
        slots = list(COLUMNS.slots)
        if is_orc:
            table = orc.ORCFile(file).read(columns=slots)
        else:
            # Where a damaged file is wrong about the values of a row group, Arrow reads other rows of the
            # whole file than of each group.
            groups = pq.ParquetFile(file)
            table = pa.concat_tables(
                groups.read_row_group(each, columns=slots) for each in range(groups.num_row_groups)
            )
        if any(table.column_names.count(slot) != 1 for slot in COLUMNS.slots):
            return
        types = [table.schema.field(slot).type for slot in COLUMNS.slots]
    if not (
        pa.types.is_string(types[0])
        and all(map(pa.types.is_list, types[1:]))
        and pa.types.is_string(types[1].value_type)
        and types[2].value_type == pa.int64()
    ):
        return
    table = pa.table(
        {
            slot: table[slot].cast(kind)
            for slot, kind in zip(
                COLUMNS.slots,
                (pa.binary(), pa.list_(pa.binary()), pa.list_(pa.int64())),
                strict=True,
            )
        }
    )
    rows = joined(list(blocks)) if blocks else None
    values = [table[slot].to_pylist() for slot in COLUMNS.slots]
    expected = [
        [key_of(slot, bytes_of(each)) for each in listed(column[row])]
        for row in range(len(table))
        for slot, column in enumerate(values, 1)
    ]
    keys = [] if rows is None else rows.keys.tolist()
    assert keys == [key for each in expected for key in each]
    if rows is not None:
        assert np.diff(rows.offsets).tolist() == [len(each) for each in expected]


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def bytes_of(value: bytes | int | None) -> bytes:
    return str(value).encode() if isinstance(value, int) else value or b""


PLAIN = Schema(dense=(DenseColumn(name="a"), DenseColumn(name="b")), slots=("x", "y"))
SPARSE = Schema(dense=(DenseColumn(name="3"), DenseColumn(name="17")), slots=("s",))

READERS = [
    ("criteo", partial(CriteoReader, PLAIN), b"1\t5\t\tab\tcd\n0\t-2\t7\t\t\r\n"),
    ("criteo", partial(CriteoReader, PLAIN), b"5\t-9223372036854775808\tab\tcdefghijk\n"),
    ("csv", partial(CsvReader, PLAIN), b'label,y,a,x,b\n1,"p,""q",5,ab,\n0,,,x"y,2\r\n'),
    ("libffm", partial(LibffmReader, PLAIN), b"1 0:0:0.5 2:u7:1 3:a:1 3:b:1\n-1 2:7:1 # x\r\n"),
    (
        "paddlerec",
        partial(SlotTextReader, PLAIN),
        b"label:1 a:0.5 b:3 x:u7 y:a y:b\nx:a:b label:0\r\n",
    ),
    ("libsvm", partial(LibsvmReader, SPARSE), b"+1 3:0.5 17:1 204:1\n-1 9:1 3:3e-5\n"),
    (
        "multislot",
        partial(MultiSlotReader, PLAIN),
        b"2 0.5 nan 2 1926 8 1 1 1 1\n2 1 2 0 1 3 1 0\n",
    ),
    (
        "multislot",
        partial(MultiSlotReader, PLAIN, values="text"),
        b"2 0.5 1 2 ab c 1  1 1\n2 3 1e2 2   x 1 y 1 0\r\n",
    ),
]
"""Readers, and lines in order; a first byte of an input says which one."""

WORDS = [
    *(b"\n", b"\r", b"\r\n", b"\t", b" ", b"  ", b":", b"::", b",", b'"', b'""', b"#", b"\0"),
    *(b"\x1f", b"\x7f", b"\xff", b"e", b"e-", b"1e", b".", b"-", b"+", b"nan", b"NaN", b"inf"),
    *(b"0", b"1"),
    *(b"9" * 19, b"9" * 20, b"9" * 21, b"18446744073709551615", b"18446744073709551616"),
    *(b"2147483648", b"4294967296", b"1e999999999999", b"0." + b"0" * 400 + b"1", b"1" * 400),
    *(b"0:0:", b":1", b"1:1:1", b"2:q:1", b"3:q:1", b"label,"),
]


def text(folder: Path) -> Target:
    """Returns the readers of text: all lines are rows or counted as malformed."""
    seeds = [bytes([number]) + lines for number, (_, _, lines) in enumerate(READERS)]

    def make(rng: random.Random) -> bytes:
        seed = rng.choice(seeds)
        return seed[:1] + mutated(seed[1:] * rng.choice([1, 1, 1, 3]), rng, WORDS)

    def check(data: bytes) -> bytes:
        name, make_reader, _ = READERS[data[0]]
        path = folder / "file"
        path.write_bytes(data[1:])
        bad_rows = BadRows(limit=10**6)
        reader = make_reader(bad_rows=bad_rows)
        blocks = [block.rows for block in reader.blocks(FileSplit(str(path)))]
        lines = data[1:].count(b"\n") + bool(data[1:] and not data.endswith(b"\n"))
        num_rows = sum(block.size for block in blocks)
        if name == "csv":
            lines = max(lines - 1, 0)
        assert num_rows + bad_rows.total == lines
        num_slots = len((SPARSE if name == "libsvm" else PLAIN).slots)
        return require_rows(blocks, num_slots) + b"%d" % bad_rows.total

    return Target(seeds, make, check)


def rows(_: Path) -> Target:
    """Returns rows of the global shuffle: what is taken packs to the same rows."""
    numbers = range(5)
    seeds = [
        pack_rows(each)
        for each in (
            numbered_rows(numbers),
            numbered_rows(numbers, labels=False, weights=True),
            numbered_lists(numbers),
            numbered_rows(range(0)),
        )
    ]

    def make(rng: random.Random) -> bytes:
        data = mutated(rng.choice(seeds), rng)
        if rng.random() < 0.3:  # the numbers of the header
            data = mutated(data[:32], rng) + data[32:]
        return data

    def check(data: bytes) -> bytes:
        found = unpack_rows(data, num_dense=NUM_DENSE, num_slots=NUM_SLOTS)
        assert_same_rows(
            found, unpack_rows(pack_rows(found), num_dense=NUM_DENSE, num_slots=NUM_SLOTS)
        )
        assert found.offsets[-1] == found.keys.size
        return found.keys.tobytes()

    return Target(seeds, make, check)
