"""What a job says of its data."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ps_worker.data.columnar.column_matching import HASH_VERSION_KEY
from ctr_ps.ps_worker.job import override_job
from ctr_ps.ps_worker.job.datasets import digest_of_files, values_of_job

TEXT, KEYS = '"s": ["text"]', '"s": ["keys", "lists"]'
TEXTS = '"s": ["lists", "text"]'
COLUMNS = {
    "ints": pa.array([1, None], pa.int64()),
    "texts": pa.array(["1", "2"]).dictionary_encode(),
    "lists": pa.array([[1], []], pa.list_(pa.int32())),
    "nulls": pa.nulls(2),
    "keys": pa.array([1, 2], pa.uint64()),
}


@pytest.mark.parametrize(
    ("settings", "files", "expected"),
    [
        ([], ["part-0", "part-1.csv.gz"], TEXT),
        ([], ["part-0.ffm"], TEXT),
        ([], ["part-0.svm"], TEXTS),
        ([], ["part-0.multislot"], KEYS),
        ([], ["part-0.multislot", "part-1.csv"], '"s": ["keys", "lists", "text"]'),
        ([], ["none.parquet"], ""),
        ([], [], ""),
        (["data.format=csv"], ["part-0"], TEXT),
        (["data.format=multislot"], ["part-0"], KEYS),
        (["data.format=multislot", "data.values=text"], ["part-0"], TEXTS),
        (["data.pipe_command=cat"], ["part-0"], KEYS),
        (["data.pipe_command=cat", "data.values=text"], ["part-0"], TEXTS),
    ],
)
def test_values_of_slots_are_known_by_the_format(
    settings: list[str], files: list[str], expected: str
) -> None:
    job = override_job({}, settings, source="test")

    found = values_of_job(job, Schema(dense=(), slots=("s",)), files)

    assert found.to_json() == f"{{{expected}}}"


@pytest.mark.parametrize("format", ["parquet", "orc"])
@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("ints", '{"s": ["integers"]}'),
        ("texts", '{"s": ["text"]}'),
        ("lists", '{"s": ["integers", "lists"]}'),
        ("nulls", "{}"),
        ("keys", '{"s": ["keys", "text"]}'),
    ],
)
def test_values_of_columns_are_known_by_the_first_file(
    format: str, column: str, expected: str, tmp_path: Path
) -> None:
    if format == "orc" and column in ("nulls", "keys"):
        pytest.skip("ORC has neither columns of nothing nor metadata of Arrow")
    path, array = tmp_path / f"a.{format}", COLUMNS[column]
    metadata = {HASH_VERSION_KEY: b"1"} if column == "keys" else None
    table = pa.table({"s": array}).replace_schema_metadata(metadata)
    if format == "parquet":
        pq.write_table(table, path)
    else:
        orc.write_table(
            pa.table({"s": array if column != "texts" else array.cast(pa.string())}), path
        )

    job = override_job({}, [], source="test")
    found = values_of_job(job, Schema(dense=(), slots=("s",)), [str(path)])

    assert found.to_json() == expected


def test_digest_of_files_is_of_their_order() -> None:
    digests = {digest_of_files(files) for files in (["a", "b"], ["b", "a"], ["a"])}

    assert len(digests) == 3
    assert digest_of_files(("a", "b")) == digest_of_files(["a", "b"])
