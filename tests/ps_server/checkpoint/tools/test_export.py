"""Export: every row, with the same values, in files that other programs read."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.rewrite import export_table
from ctr_ps.ps_server.checkpoint.storage.folders import LocalFolder
from tests.support.checkpoints import FakeModel, fake_counting_model, fake_table

MODEL = fake_counting_model(1)


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
    file = export_table(
        checkpoint, "exact", LocalFolder(tmp_path), "parquet", with_state=with_state
    )

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


def test_text_is_read_as_the_same_numbers(tmp_path: Path) -> None:
    table = fake_table("t", dim=3, state_width=0, num_shards=2)
    FakeModel({"t": table}, {}).save(tmp_path / "saved")

    file = export_table(
        Checkpoint.open(tmp_path / "saved"), "t", LocalFolder(tmp_path), "text", with_state=True
    )

    header, *lines = (tmp_path / file).read_text().splitlines()
    assert (file, header) == ("t.tsv", "key\tweights")
    found = {int(key): weights for key, weights in (line.split("\t") for line in lines)}
    rows = [rows for rows in table.rows.values() if rows.keys.size]
    assert found.keys() == {int(key) for each in rows for key in each.keys}
    for each in rows:
        for key, weights in zip(each.keys, each.weights, strict=True):
            read = np.array(found[int(key)].split(), np.float32)
            assert read.tobytes() == weights.tobytes()
            assert max(map(len, found[int(key)].split())) < 16  # and no more digits than needed


def test_file_that_is_there_is_not_replaced(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "exact.parquet").write_text("irreplaceable")

    with pytest.raises(UsageError, match=r"exact\.parquet exists"):
        export_table(checkpoint, "exact", LocalFolder(tmp_path), "parquet", with_state=False)

    assert (tmp_path / "exact.parquet").read_text() == "irreplaceable"
