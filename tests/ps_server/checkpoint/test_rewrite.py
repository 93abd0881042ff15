"""Checkpoints made of one: compacted, with one file a table; and its tables, bit for bit, as Parquet."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from ctr_ps.protos.errors import CheckpointError, UsageError
from ctr_ps.protos.store import WorkerProgress
from ctr_ps.ps_server.checkpoint.files.manifest import manifest_to_json
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.rewrite import compact, export_table
from ctr_ps.ps_server.checkpoint.storage.folders import LocalFolder
from tests.support.checkpoints import fake_counting_model

MODEL = fake_counting_model(1)
WORKERS = {0: WorkerProgress(incarnation=2**63, sequence=7, step=9, position="here")}


def data_of(checkpoint: Checkpoint) -> dict[str, bytes]:
    folder = Path(checkpoint.url) / checkpoint.manifest.data_folder
    return {path.name: path.read_bytes() for path in folder.glob("*.arrow")}


@pytest.mark.parametrize("num_servers", [1, 3])
def test_files_are_those_that_one_server_would_have_written(
    tmp_path: Path, num_servers: int
) -> None:
    MODEL.save(tmp_path / "saved", num_servers)
    MODEL.save(tmp_path / "expected")

    compact(Checkpoint.open(tmp_path / "saved"), tmp_path / "compacted")

    found, expected = (Checkpoint.open(tmp_path / name) for name in ("compacted", "expected"))
    found.verify()
    assert data_of(found) == data_of(expected)
    assert found.manifest.entries == expected.manifest.entries
    assert found.model_digest == expected.model_digest


def test_all_else_stays_as_it_was(tmp_path: Path) -> None:
    MODEL.save(tmp_path / "saved")
    saved = Checkpoint.open(tmp_path / "saved").manifest
    saved = replace(saved, version=7, workers=WORKERS, created=1.5e9)
    (tmp_path / "saved" / "MANIFEST.json").write_text(manifest_to_json(saved))

    compact(Checkpoint.open(tmp_path / "saved"), tmp_path / "compacted")

    found = Checkpoint.open(tmp_path / "compacted").manifest
    unlike = {"entries": saved.entries, "data_folder": saved.data_folder}
    assert replace(found, **unlike) == saved


def test_checkpoint_can_be_compacted_where_it_is(tmp_path: Path) -> None:
    digest = MODEL.save(tmp_path / "saved", 3)

    compact(Checkpoint.open(tmp_path / "saved"), tmp_path / "saved")

    checkpoint = Checkpoint.open(tmp_path / "saved")
    checkpoint.verify()
    assert checkpoint.model_digest == digest
    assert {".".join(name.split(".")[2:]) for name in data_of(checkpoint)} == {"server-0.arrow"}


def test_altered_file_is_not_copied(tmp_path: Path) -> None:
    MODEL.save(tmp_path / "saved")
    table = next((tmp_path / "saved").glob("data-*/table.exact.*"))
    content = table.read_bytes()
    weights = max(MODEL.tables["exact"].rows.values(), key=lambda rows: rows.keys.size).weights
    table.write_bytes(content.replace(weights.tobytes(), (-weights).tobytes()))

    with pytest.raises(CheckpointError, match=r"table\.exact\.server-0\.arrow was altered"):
        compact(Checkpoint.open(tmp_path / "saved"), tmp_path / "compacted")

    assert not (tmp_path / "compacted").exists()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    MODEL.save(tmp_path / "saved", 2)
    return Checkpoint.open(tmp_path / "saved")


def mapped_rows(name: str) -> dict[int, tuple[np.ndarray, ...]]:
    return {
        int(key): (rows.weights[i], rows.state[i], rows.statistics[i])
        for rows in MODEL.tables[name].rows.values()
        for i, key in enumerate(rows.keys)
    }


@pytest.mark.parametrize("with_state", [False, True])
def test_parquet_has_every_row_bit_for_bit(
    checkpoint: Checkpoint, tmp_path: Path, with_state: bool
) -> None:
    file = export_table(checkpoint, "exact", LocalFolder(tmp_path), with_state=with_state)

    table = pq.read_table(tmp_path / file)
    assert file == "exact.parquet"
    names = ["show", "click", "unseen", "last_seen"]
    assert table.column_names == ["key", "weights", *["state"] * with_state, *names]
    expected = mapped_rows("exact")
    assert sorted(table["key"].to_pylist()) == sorted(expected)
    columns = {name: table[name].to_numpy() for name in names}
    assert columns["last_seen"].dtype == np.uint32
    for i, key in enumerate(table["key"].to_pylist()):
        weights, state, statistics = expected[key]
        assert np.float32(table["weights"][i].as_py()).tobytes() == weights.tobytes()
        if with_state:
            assert np.float32(table["state"][i].as_py()).tobytes() == state.tobytes()
        found = b"".join(columns[name][i].tobytes() for name in names)
        assert found == statistics.tobytes()


def test_file_that_is_there_is_not_replaced(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "exact.parquet").write_text("irreplaceable")

    with pytest.raises(UsageError, match=r"exact\.parquet exists"):
        export_table(checkpoint, "exact", LocalFolder(tmp_path), with_state=False)

    assert (tmp_path / "exact.parquet").read_text() == "irreplaceable"
