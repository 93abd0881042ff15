"""The same rows in every format, and the expected arrays."""

import csv
import io
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather, orc

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ps_worker.data.blocks import joined
from ctr_ps.ps_worker.data.files.content import CODECS
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.formats import Format
from ctr_ps.ps_worker.data.in_memory_dataset import InMemoryDataset
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from ctr_ps.ps_worker.data.text.multislot import MultiSlotReader
from ctr_ps.ps_worker.data.user_code.data_generator import MultiSlotStringDataGenerator
from ctr_ps.ps_worker.data.user_code.generator_reader import generated
from ctr_ps.ps_worker.data.user_code.pipe import piped
from ctr_ps.ps_worker.extras.data_tools.convert import convert
from tests.reference.features import key_of

NUM_DENSE = 2

# Rows of a row group or stripe: few, so that small files have several.
GROUP_ROWS = 5


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the schema `Schema.numbered(NUM_DENSE, len(values))`; None and "" are missing.

    A label other than 0 and 1 is malformed.
    """

    label: int
    numbers: tuple[int | None, ...]
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FileFormat:
    """How rows are written and read again.

    Attributes:
        suffix: Of a file's name.
        write: Makes a file of rows.
        reader: As a dataset takes it; None: by the suffix.
        cannot_write: Pattern of impossible values.
        skips_bad_rows: Whether malformed rows are counted; else they end a pass, or cannot be written.
    """

    suffix: str
    write: Callable[[Path, Sequence[Row], Schema], None]
    reader: Format | None = None
    cannot_write: str = r"[\t\r\n]"
    skips_bad_rows: bool = True

    def writable(self, rows: Sequence[Row]) -> list[Row]:
        return [row for row in rows if not any(re.search(self.cannot_write, v) for v in row.values)]


def schema_of(rows: Sequence[Row]) -> Schema:
    return Schema.numbered(NUM_DENSE, len(rows[0].values))


def batch_of(rows: Sequence[Row]) -> Batch:
    """Returns good rows as every reader must."""
    schema = schema_of(rows)
    numbers = np.array([row.numbers for row in rows], np.float64)  # None is nan
    keys = [
        key_of(slot, value.encode()) for row in rows for slot, value in enumerate(row.values, 1)
    ]
    return Batch(
        labels=np.array([row.label for row in rows], np.float32),
        dense=schema.scale_dense(numbers.reshape(-1, NUM_DENSE)),
        keys=np.array(keys, np.uint64),
        offsets=np.arange(len(keys) + 1, dtype=np.int32),
        num_slots=len(schema.slots),
    )


def write_text(path: Path, content: bytes) -> None:
    codec = CODECS.get(path.suffix)
    with pa.OSFile(str(path), "wb") as file:
        if codec is None:
            file.write(content)
        else:
            with pa.CompressedOutputStream(file, codec) as stream:
                stream.write(content)


def _text(number: int | None, missing: str = "") -> str:
    return missing if number is None else str(number)


def _write_criteo(path: Path, rows: Sequence[Row], _: Schema) -> None:
    lines = ("\t".join([str(r.label), *map(_text, r.numbers), *r.values]) + "\n" for r in rows)
    write_text(path, "".join(lines).encode())


def _write_csv(path: Path, rows: Sequence[Row], schema: Schema) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_columns(rows, schema))
    writer.writerows([r.label, *map(_text, r.numbers), *r.values] for r in rows)
    write_text(path, text.getvalue().encode())


def _write_libffm(path: Path, rows: Sequence[Row], _: Schema) -> None:
    def words(row: Row) -> Iterator[str]:
        yield str(row.label)
        for field, number in enumerate(row.numbers):
            if number is not None:
                yield f"{field}:0:{number}"
        for field, value in enumerate(row.values, NUM_DENSE):
            if value:
                yield f"{field}:{value}:1"

    write_text(path, "".join(" ".join(words(row)) + "\n" for row in rows).encode())


def _write_multislot(path: Path, rows: Sequence[Row], _: Schema) -> None:
    def words(row: Row) -> Iterator[str]:
        yield str(len(row.numbers))
        yield from (_text(number, "nan") for number in row.numbers)
        yield from (f"1 {value}" for value in row.values)
        yield f"1 {row.label}"

    write_text(path, "".join(" ".join(words(row)) + "\n" for row in rows).encode())


def _write_paddlerec(path: Path, rows: Sequence[Row], schema: Schema) -> None:
    def words(row: Row) -> Iterator[str]:
        yield from (f"{name}:{value}" for name, value in zip(schema.slots, row.values, strict=True))
        yield f"label:{row.label}"
        for dense, number in zip(schema.dense, row.numbers, strict=True):
            yield f"{dense.name}:{_text(number, 'nan')}"

    write_text(path, "".join(" ".join(words(row)) + "\n" for row in rows).encode())


def _columns(rows: Sequence[Row], schema: Schema) -> dict[str, pa.Array]:
    columns = {"label": pa.array([row.label for row in rows], pa.int8())}
    for index, dense in enumerate(schema.dense):
        columns[dense.name] = pa.array([row.numbers[index] for row in rows], pa.int64())
    for index, slot in enumerate(schema.slots):
        columns[slot] = pa.array([row.values[index] or None for row in rows], pa.string())
    return columns


def _write_parquet(path: Path, rows: Sequence[Row], schema: Schema) -> None:
    pq.write_table(pa.table(_columns(rows, schema)), path, row_group_size=GROUP_ROWS)


def _write_keys(path: Path, rows: Sequence[Row], schema: Schema) -> None:
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "rows.tsv"
        filler = Row(0, (0,) * NUM_DENSE, ("",) * len(schema.slots))
        _write_criteo(text, [*rows, filler], schema)  # without any row nothing is converted
        (written,) = convert([str(text)], Path(folder), schema, keys=True).files
        pq.write_table(pq.read_table(written)[: len(rows)], path, row_group_size=GROUP_ROWS)


def _write_orc(path: Path, rows: Sequence[Row], schema: Schema) -> None:
    table = pa.table(_columns(rows, schema))
    with orc.ORCWriter(str(path), stripe_size=1, batch_size=GROUP_ROWS) as writer:
        for start in range(0, max(len(table), 1), GROUP_ROWS):
            writer.write(table[start : start + GROUP_ROWS])


def _write_arrow(path: Path, rows: Sequence[Row], schema: Schema) -> None:
    feather.write_feather(pa.table(_columns(rows, schema)), path, chunksize=GROUP_ROWS)


def _write_json(path: Path, rows: Sequence[Row], schema: Schema) -> None:
    def line(row: Row) -> str:
        numbers = dict(zip((each.name for each in schema.dense), row.numbers, strict=True))
        values = dict(zip(schema.slots, row.values, strict=True))
        given = {name: number for name, number in numbers.items() if number is not None}
        return json.dumps({"label": row.label, **given, **values}, ensure_ascii=False)

    write_text(path, "".join(line(row) + "\n" for row in rows).encode())


class CriteoGenerator(MultiSlotStringDataGenerator):
    def generate_sample(self, line: str | None) -> Callable[[], Iterator[Any]]:
        def samples() -> Iterator[Any]:
            label, *fields = (line or "").removesuffix("\n").split("\t")
            numbers = [number or "nan" for number in fields[:NUM_DENSE]]
            slots = enumerate(fields[NUM_DENSE:], 1)
            yield [
                ("click", [label]),
                ("dense_input", numbers),
                *((f"C{slot}", [value]) for slot, value in slots),
            ]

        return samples


# Criteo's layout as multi-slot text.
CRITEO_COMMAND = rf"""LC_ALL=C awk -F'\t' '{{
    printf "{NUM_DENSE}"
    for (i = 2; i <= {NUM_DENSE} + 1; i++) printf " %s", $i == "" ? "nan" : $i
    for (; i <= NF; i++) printf " 1 %s", $i
    print " 1 " $1
}}'"""

_BLANKS = r"[\0-\x20]"
_NOTHING = r"(?!)"

FILE_FORMATS = {
    "criteo": FileFormat(".tsv", _write_criteo),
    "gzip": FileFormat(".tsv.gz", _write_criteo),
    "zstd": FileFormat(".tsv.zst", _write_criteo),
    "csv": FileFormat(".csv", _write_csv, cannot_write=r"[\r\n]"),
    "libffm": FileFormat(".ffm", _write_libffm, cannot_write=rf"{_BLANKS}|:"),
    "multislot": FileFormat(
        ".multislot", _write_multislot, partial(MultiSlotReader, values="text"), _BLANKS
    ),
    "paddlerec": FileFormat(".paddlerec", _write_paddlerec, cannot_write=_BLANKS),
    "parquet": FileFormat(".parquet", _write_parquet, cannot_write=_NOTHING),
    "keys": FileFormat(".parquet", _write_keys, skips_bad_rows=False),
    "orc": FileFormat(".orc", _write_orc, cannot_write=_NOTHING),
    "arrow": FileFormat(".feather", _write_arrow, cannot_write=_NOTHING),
    "json": FileFormat(".jsonl", _write_json, cannot_write=_NOTHING),
    "generator": FileFormat(
        ".tsv", _write_criteo, generated(CriteoGenerator()), _BLANKS, skips_bad_rows=False
    ),
    "pipe": FileFormat(
        ".tsv", _write_criteo, piped(CRITEO_COMMAND, values="text"), _BLANKS, skips_bad_rows=False
    ),
}


formats = pytest.mark.parametrize("name", FILE_FORMATS)
kinds = pytest.mark.parametrize("kind", [QueueDataset, InMemoryDataset])

Kind = type[QueueDataset] | type[InMemoryDataset]

# What files and readers stumble over; not every format can write each of them.
ROWS = [
    Row(1, (1, None), ("", "a", "café")),
    Row(0, (None, -5), ("68fd1e64", "a-longer-value-of-24-chars", "日本語テキスト")),
    Row(0, (7, 3), ("a b", "", "x")),
    Row(1, (7, 3), ("a:b", "", "x")),
    Row(1, (2**31, 0), ('a,"b"', '"q"', "NULL")),
    Row(0, (None, None), ("", "", "")),
]
SCHEMA = schema_of(ROWS)

AnyDataset = TypeVar("AnyDataset", bound=QueueDataset | InMemoryDataset)


def write(
    folder: Path, name: str, rows: Sequence[Row], stem: str = "part", schema: Schema = SCHEMA
) -> Path:
    """Writes a file of the format called `name`; returns its path."""
    path = folder / f"{stem}{FILE_FORMATS[name].suffix}"
    FILE_FORMATS[name].write(path, rows, schema)
    return path


def dataset_of(
    kind: type[AnyDataset],
    name: str,
    files: Sequence[Path | FileSplit],
    batch_size: int = 4,
    schema: Schema = SCHEMA,
    **options: Any,
) -> AnyDataset:
    """Returns a dataset of files of the format called `name`."""
    dataset = kind(schema, batch_size, format=FILE_FORMATS[name].reader, **options)
    dataset.set_filelist(files)
    return dataset


def rows_of(dataset: QueueDataset | InMemoryDataset) -> Batch:
    if isinstance(dataset, InMemoryDataset):
        dataset.load_into_memory()
    return joined(list(dataset))
