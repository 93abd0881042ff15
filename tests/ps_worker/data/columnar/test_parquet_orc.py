"""What holds for Parquet or ORC alone: dictionaries, files of keys, stripes, damage."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import orc

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.columnar.parquet_orc import OrcReader, ParquetReader, require_valid
from ctr_ps.ps_worker.data.distinct_values import DistinctValues
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.extras.data_tools.convert import convert
from ctr_ps.ps_worker.extras.data_tools.row_split import split_rows
from ctr_ps.ps_worker.extras.data_tools.samples import sample_of
from tests.reference.features import key_of

SCHEMA = Schema(dense=(), slots=("user", "item"))
USER = Schema(dense=(), slots=("user",))
KEYS_OF_FILE = {"ctr_ps.hash_version": "1", "ctr_ps.slots": json.dumps(["user", "item"])}


def read_keys(path: Path, schema: Schema = SCHEMA) -> list[list[int]]:
    reader = ParquetReader(schema, BadRows())
    rows: list[list[int]] = []
    for block in reader.blocks(FileSplit(str(path))):
        rows += block.rows.keys.reshape(-1, len(schema.slots)).tolist()
    return rows


def write_keys(path: Path, metadata: dict[str, str], kind: pa.DataType | None = None) -> Path:
    keys = pa.array([2**64 - 1, None, 5], pa.uint64())
    table = pa.table({"item": keys, "user": pa.array([1, 2, 3], kind or pa.uint64())})
    pq.write_table(table.replace_schema_metadata(metadata), path)
    return path


@pytest.mark.parametrize("num_values", [3, 5000])
@pytest.mark.parametrize("dictionary_bytes", [1, 1 << 20])
@pytest.mark.parametrize("row_group_size", [10_000, 777])
def test_values_are_the_same_with_and_without_dictionaries(
    tmp_path: Path, num_values: int, dictionary_bytes: int, row_group_size: int
) -> None:
    texts = [f"value {row % num_values}" for row in range(6000)]
    pq.write_table(
        pa.table({"user": texts, "item": [None if row % 5 else "x" for row in range(6000)]}),
        tmp_path / "a.parquet",
        dictionary_pagesize_limit=dictionary_bytes,
        data_page_size=4096,
        row_group_size=row_group_size,
    )

    keys = read_keys(tmp_path / "a.parquet")

    item, missing = key_of(2, b"x"), key_of(2, b"")
    by_text = {text: key_of(1, text.encode()) for text in set(texts)}
    assert keys == [[by_text[text], missing if row % 5 else item] for row, text in enumerate(texts)]


def test_numbers_in_metadata_do_not_make_keys_of_whole_numbers(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "a.parquet", {})

    assert read_keys(path)[0] == [key_of(1, b"1"), key_of(2, b"18446744073709551615")]


def test_file_of_keys_is_taken_as_it_is(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "a.parquet", KEYS_OF_FILE)

    assert read_keys(path) == [[1, 2**64 - 1], [2, key_of(2, b"")], [3, 5]]


@pytest.mark.parametrize(
    ("metadata", "kind", "message"),
    [
        ({"ctr_ps.hash_version": "2"}, pa.uint64(), "hash version '2', but the schema has 1: convert"),
        (
            {"ctr_ps.slots": '["item", "user"]'},
            pa.uint64(),
            "'user' is slot 1 of the schema, but keys were hashed with .*'item'",
        ),
        ({}, pa.int64(), "'user' is of type int64, expected keys as uint64"),
        ({}, pa.list_(pa.int64()), "'user' is of type list<.*int64>, expected keys as uint64"),
    ],
    ids=["version", "order", "type", "list"],
)  # fmt: skip
def test_keys_that_are_not_those_of_the_schema_are_refused(
    tmp_path: Path, metadata: dict[str, str], kind: pa.DataType, message: str
) -> None:
    path = tmp_path / "a.parquet"
    user = pa.array([[1], [2], [3]] if pa.types.is_list(kind) else [1, 2, 3], kind)
    table = pa.table({"item": pa.array([1, 2, 3], pa.uint64()), "user": user})
    pq.write_table(table.replace_schema_metadata(KEYS_OF_FILE | metadata), path)

    with pytest.raises(DataError, match=rf"a\.parquet: .*{message}"):
        read_keys(path)


@pytest.mark.parametrize("slot", SCHEMA.slots)
def test_keys_cannot_name_predictions(tmp_path: Path, slot: str) -> None:
    path = write_keys(tmp_path / "a.parquet", KEYS_OF_FILE)

    with pytest.raises(
        DataError, match=rf"a\.parquet: column '{slot}' holds keys, .* cannot be the id"
    ):
        read_keys(path, replace(SCHEMA, id=slot, is_for_prediction=True))


def test_schema_may_have_fewer_slots_than_the_keys_were_made_for(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "a.parquet", KEYS_OF_FILE)

    assert read_keys(path, USER) == [[1], [2], [3]]


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    table = pa.table(
        {name: [f"{x:08x}" for x in rng.integers(0, 2**32, 500)] for name in SCHEMA.slots}
    )
    path = tmp_path / "sound.parquet"
    pq.write_table(table, path, row_group_size=100, write_page_checksum=True, compression="zstd")
    return path


@pytest.mark.parametrize("kept", [0, 3, 100, 0.5, -1])
def test_truncated_file_is_refused(sound: Path, kept: float) -> None:
    content = sound.read_bytes()
    path = sound.with_name("cut.parquet")
    path.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])

    with pytest.raises(
        DataError, match=r"cut\.parquet: not a valid Parquet file.*copy or write it again"
    ):
        read_keys(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.data())
def test_damaged_page_is_refused_or_harmless(sound: Path, data: st.DataObject) -> None:
    content = bytearray(sound.read_bytes())
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    position = data.draw(st.integers(4, footer - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    path = sound.with_name("damaged.parquet")
    path.write_bytes(content)

    try:
        found = read_keys(path)
    except DataError as error:
        assert "damaged.parquet" in str(error)  # noqa: PT017 (either is right)
    else:
        assert found == read_keys(sound)


def wild_values(rows: int) -> pa.DictionaryArray:
    """Returns values of which the last one is number 7 of a dictionary of 5."""
    indices = pa.array([*(row % 5 for row in range(rows - 1)), 7], pa.int32())
    values = pa.array([f"value {number}" for number in range(5)])
    return pa.DictionaryArray.from_arrays(indices, values, safe=False)


def write_wild(path: Path, values: pa.Array, *, store_schema: bool = True) -> str:
    table = pa.table({"click": [row % 2 for row in range(len(values))], "user": values})
    pq.write_table(table, path, write_statistics=False, store_schema=store_schema)
    return str(path)


READERS = {
    "read": lambda path, out: list(ParquetReader(USER, BadRows()).blocks(FileSplit(path))),
    "label": lambda path, out: list(
        ParquetReader(Schema(dense=(), slots=("click",), label="user"), BadRows()).blocks(
            FileSplit(path)
        )
    ),
    "sample": lambda path, out: sample_of([path]),
    "split": lambda path, out: split_rows([path], out, ratio=(1, 1), seed=1),
    "convert": lambda path, out: convert([path], out, USER),
    "values": lambda path, out: list(DistinctValues([path], USER, "user", bad_rows=BadRows())),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("has_lists", [False, True])
def test_index_beyond_a_dictionary_is_refused_before_its_use(
    tmp_path: Path, reader: str, has_lists: bool
) -> None:
    values = wild_values(20)
    if has_lists:
        values = pa.ListArray.from_arrays(pa.array([*range(0, 20, 2), 20], pa.int32()), values)
    path = write_wild(tmp_path / "wild.parquet", values)

    fault = "column 'user': .*out of bounds: 7"
    if has_lists and reader == "label":
        fault = "column 'user' is of type list"
    with pytest.raises(DataError, match=rf"wild\.parquet: .*{fault}"):
        READERS[reader](path, tmp_path / "out")


def test_index_beyond_a_dictionary_that_the_reader_asks_for_is_refused(tmp_path: Path) -> None:
    path = write_wild(tmp_path / "wild.parquet", wild_values(2000), store_schema=False)

    with pytest.raises(DataError, match=r"wild\.parquet: .*'user': .*out of bounds: 7"):
        READERS["read"](path, tmp_path)


def write_orc(path: Path, num_rows: int, rows_per_stripe: int) -> str:
    with orc.ORCWriter(str(path), stripe_size=1, batch_size=rows_per_stripe) as writer:
        for start in range(0, num_rows, rows_per_stripe):
            stop = min(start + rows_per_stripe, num_rows)
            writer.write(pa.table({"user": [f"u{row}" for row in range(start, stop)]}))
    return str(path)


def test_split_of_orc_is_a_range_of_stripes(tmp_path: Path) -> None:
    path = write_orc(tmp_path / "a.orc", 50, 10)
    reader = OrcReader(USER, BadRows())

    assert reader.splits(path, 2) == [FileSplit(path, 0, 2), FileSplit(path, 2, 5)]
    assert [block.offset for block in reader.blocks(FileSplit(path, 3, 5))] == [30, 40]
    assert [block.offset for block in reader.blocks(FileSplit(path, 3, 5), 45)] == [45]


@pytest.mark.parametrize("kept", [0, 3, 200, -1])
def test_truncated_orc_file_is_refused(tmp_path: Path, kept: int) -> None:
    path = Path(write_orc(tmp_path / "a.orc", 50, 10))
    path.write_bytes(path.read_bytes()[:kept])

    with pytest.raises(DataError, match=r"a\.orc: not a valid ORC file.*copy or write it again"):
        list(OrcReader(USER, BadRows()).blocks(FileSplit(str(path))))


def batch(array: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([array], names=["x"])


STRING = pa.string()


def text(bounds: list[int], kind: pa.DataType = STRING) -> pa.Array:
    dtype = np.int64 if kind in (pa.large_string(), pa.large_binary()) else np.int32
    buffers = [None, pa.py_buffer(np.array(bounds, dtype)), pa.py_buffer(b"abcdef")]
    return pa.Array.from_buffers(kind, len(bounds) - 1, buffers)


def lists(bounds: list[int], values: pa.Array, kind: type[pa.Array] = pa.ListArray) -> pa.Array:
    large = kind is pa.LargeListArray
    own = pa.large_list(values.type) if large else pa.list_(values.type)
    offsets = np.array(bounds, np.int64 if large else np.int32)
    buffers = [None, pa.py_buffer(offsets)]
    return pa.Array.from_buffers(own, len(bounds) - 1, buffers, children=[values])


def choices(indices: list[int | None], values: pa.Array, kind: pa.DataType) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(indices, kind), values, safe=False)


NUMBERS = pa.array(range(6))
TEXT = pa.array(["a", "b"])


@pytest.mark.parametrize(
    "array",
    [
        text([0, 2, 2, 6]),
        text([0, 2, 2, 6])[1:],
        text([1, 6], pa.large_string()),
        text([0, 6], pa.large_binary()),
        pa.array([b"\xff\xfe", None], pa.binary()).view(pa.string()),
        lists([0, 0, 6], NUMBERS),
        lists([2, 4], NUMBERS, pa.LargeListArray),
        pa.ListViewArray.from_arrays([3, 0], [3, 6], NUMBERS),
        pa.array([[1, 2], None], pa.list_(pa.int64(), 2)),
        choices([0, 1, None], TEXT, pa.int8()),
        choices([0, 9], TEXT, pa.int8())[:1],
        choices([None], pa.array([], pa.string()), pa.int32()),
        pa.array([], pa.list_(pa.string())),
        pa.array([], pa.dictionary(pa.int32(), pa.string())),
        pa.array([{"a": "x"}, None]),
        pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
        pa.array(["a", None], pa.string_view()),
        pa.array([None, None]),
    ],
    ids=lambda array: str(array.type),
)
def test_what_lies_within_its_values_is_valid(array: pa.Array) -> None:
    require_valid(batch(array))


@pytest.mark.parametrize(
    "array",
    [
        text([0, 4, 2, 6]),
        text([0, 9, 6], pa.large_binary()),
        lists([0, 8, 6], NUMBERS),
        lists([0, 4, 2, 6], NUMBERS, pa.LargeListArray),
        lists([0, 2], text([0, 9, 6])),
        pa.Array.from_buffers(
            pa.struct([("a", pa.string())]), 2, [None], children=[text([0, 9, 6])]
        ),
        choices([0, 2], TEXT, pa.int8()),
        choices([-1, 0], TEXT, pa.int64()),
        choices([2**32 - 1], TEXT, pa.uint32()),
        choices([0], text([0, 9, 6]), pa.int8()),
        lists([0, 2], choices([0, 7], TEXT, pa.int32())),
        pa.ListViewArray.from_arrays([3, 0], [4, 6], NUMBERS),
        pa.LargeListViewArray.from_arrays([0, -1], [6, 2], NUMBERS),
        pa.MapArray.from_arrays([0, 2], text([0, 9, 6]), NUMBERS[:2]),
    ],
    ids=lambda array: str(array.type),
)
def test_what_does_not_is_refused_with_its_column(array: pa.Array) -> None:
    with pytest.raises(pa.ArrowInvalid, match="column 'x': "):
        require_valid(batch(array))


def test_slice_is_judged_by_its_own_rows() -> None:
    """Bounds and indices of a slice begin behind those of the rows before it."""
    require_valid(batch(text([0, 4, 2, 3, 6])[2:]))
    require_valid(batch(choices([9, 0, 1], TEXT, pa.int8())[1:]))

    for array in (text([0, 1, 2, 4, 3, 6])[2:], choices([0, 1, 9], TEXT, pa.int8())[2:]):
        with pytest.raises(pa.ArrowInvalid, match="column 'x': "):
            require_valid(batch(array))
