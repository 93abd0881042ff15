"""Figures of checkpoints, and differences between two."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.spec import StatisticsSpec
from ctr_ps.ps_server.checkpoint.inspection import (
    Difference,
    TopKey,
    compare,
    inspect_block,
    inspect_table,
)
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.table.contents import Rows
from tests.support.checkpoints import (
    FakeBlock,
    FakeModel,
    FakeTable,
    fake_block,
    fake_counting_model,
    fake_model,
    fake_table,
)


def rows_of(keys: list[int], weights: list[list[float]], shows: list[float]) -> Rows:
    show = np.array(shows, np.float32)
    statistics = np.stack([show, show / 4, 0 * show, 0 * show], axis=1)
    values = np.array(weights, np.float32).reshape(len(keys), -1)
    return Rows(np.array(keys, np.uint64), values, values[:, :0], statistics)


@pytest.fixture
def counted(tmp_path: Path) -> Checkpoint:
    """Rows with norms 0 to 10 and shows 0, 10, ... 100."""
    template = fake_table("t", dim=2, state_width=0, num_shards=2).spec
    spec = replace(template, statistics=StatisticsSpec(nonclk_coeff=0.5, click_coeff=2.0))
    shards: dict[int, Rows] = {}
    keys = np.arange(90, 101, dtype=np.uint64)
    for shard, places in enumerate(ShardMap.of(2).route(keys, 2)):
        own = keys[places].tolist()
        numbers = [100 - key for key in own]
        weights = [[0.6 * number, -0.8 * number] for number in numbers]
        shards[shard] = rows_of(own, weights, [10.0 * number for number in numbers])
    FakeModel({"t": FakeTable(spec, 0, shards, 4)}, {}).save(tmp_path / "saved", 2)
    return Checkpoint.open(tmp_path / "saved")


def test_figures_of_a_table_are_those_of_its_rows(counted: Checkpoint) -> None:
    report = inspect_table(counted, "t", 2)

    assert (report.table, report.dim, report.state_width, report.rows) == ("t", 2, 0, 11)
    np.testing.assert_allclose(report.norms, [5, 9, 9.9, 10], rtol=1e-6)
    np.testing.assert_allclose(report.show, [50, 90, 99, 100], rtol=1e-6)
    np.testing.assert_allclose(report.click, [12.5, 22.5, 24.75, 25], rtol=1e-6)
    assert report.top == (
        TopKey(key=90, show=100.0, click=25.0, score=0.5 * 75 + 2 * 25),
        TopKey(key=91, show=90.0, click=22.5, score=0.5 * 67.5 + 2 * 22.5),
    )
    data = Path(counted.url) / counted.manifest.data_folder
    assert report.size_bytes == sum(path.stat().st_size for path in data.glob("table.t.*"))


def test_candidates_and_counters_are_counted(tmp_path: Path) -> None:
    model = fake_counting_model(1)
    model.save(tmp_path / "saved")
    checkpoint = Checkpoint.open(tmp_path / "saved")

    exact, bloom = (inspect_table(checkpoint, name, 1) for name in ("exact", "bloom"))

    candidates = model.candidates["exact"].rows.values()
    assert exact.candidates == sum(rows.keys.size for rows in candidates) > 0
    assert bloom.candidates == 0
    data = Path(checkpoint.url) / checkpoint.manifest.data_folder
    for report in (exact, bloom):
        files = data.glob(f"*.{report.table}.*.arrow")
        assert report.size_bytes == sum(path.stat().st_size for path in files)


def test_table_without_rows_or_statistics_has_no_quantiles(tmp_path: Path) -> None:
    empty = fake_table("t", dim=1, state_width=0, num_shards=1)
    none = Rows(*(array[:0] for array in _arrays(empty.rows[0])))
    FakeModel({"t": replace(empty, rows={0: none})}, {}).save(tmp_path / "saved")

    report = inspect_table(Checkpoint.open(tmp_path / "saved"), "t", 3)

    assert (report.rows, report.norms, report.show, report.top) == (0, (), (), ())


def _arrays(rows: Rows) -> tuple[np.ndarray, ...]:
    return rows.keys, rows.weights, rows.state, rows.statistics


def test_block_has_its_norm(tmp_path: Path) -> None:
    block = fake_block("mlp", length=7)
    FakeModel({}, {"mlp": block}).save(tmp_path / "saved", 2)

    report = inspect_block(Checkpoint.open(tmp_path / "saved"), "mlp")

    assert (report.block, report.length) == ("mlp", 7)
    assert report.norm == pytest.approx(float(np.sqrt((block.piece.weights**2).sum())))


def test_checkpoint_does_not_differ_from_itself_on_other_servers(tmp_path: Path) -> None:
    model = fake_model(1)
    model.save(tmp_path / "one")
    model.save(tmp_path / "other", 3)

    differences = compare(Checkpoint.open(tmp_path / "one"), Checkpoint.open(tmp_path / "other"))

    num_rows = {
        name: sum(rows.keys.size for rows in table.rows.values())
        for name, table in model.tables.items()
    }
    lengths = {name: block.spec.length for name, block in model.blocks.items()}
    expected = sorted({**num_rows, **lengths}.items())
    assert differences == [Difference(name=name, same=number) for name, number in expected]


def test_differences_are_counted(tmp_path: Path) -> None:
    spec = fake_table("t", dim=1, state_width=0, statistics_width=4, num_shards=1).spec
    first = rows_of([1, 2, 3, 5], [[1], [2], [3], [np.nan]], [0] * 4)
    second = rows_of([2, 3, 4, 5], [[2], [3.5], [4], [np.nan]], [7] * 4)
    block = fake_block("mlp", length=3)
    moved = replace(block.piece, weights=block.piece.weights + np.array([0, 0.25, 0], np.float32))
    for name, rows, piece in (("one", first, block.piece), ("other", second, moved)):
        model = FakeModel(
            {"t": FakeTable(spec, 0, {0: rows}, 4)}, {"mlp": FakeBlock(block.spec, piece)}
        )
        model.save(tmp_path / name)

    dense, table = compare(Checkpoint.open(tmp_path / "one"), Checkpoint.open(tmp_path / "other"))

    assert table == Difference(
        name="t", only_first=1, only_second=1, changed=1, same=2, largest=0.5
    )
    assert (dense.changed, dense.same) == (1, 2)
    assert dense.largest == pytest.approx(0.25)


def test_state_that_differs_is_a_change(tmp_path: Path) -> None:
    table = fake_table("t", num_shards=1)
    rows = table.rows[0]
    changed = replace(table, rows={0: replace(rows, state=rows.state + 1)})
    FakeModel({"t": table}, {}).save(tmp_path / "one")
    FakeModel({"t": changed}, {}).save(tmp_path / "other")

    (found,) = compare(Checkpoint.open(tmp_path / "one"), Checkpoint.open(tmp_path / "other"))

    assert found == Difference(name="t", changed=rows.keys.size)


def test_models_of_other_shapes_are_not_compared(tmp_path: Path) -> None:
    fake_model().save(tmp_path / "one")
    FakeModel({"t": fake_table("t")}, {}).save(tmp_path / "other")

    with pytest.raises(CheckpointError, match=r"one and .*other have models of different shapes"):
        compare(Checkpoint.open(tmp_path / "one"), Checkpoint.open(tmp_path / "other"))
