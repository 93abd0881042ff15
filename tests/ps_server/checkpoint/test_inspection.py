"""Figures of checkpoints."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.spec import StatisticsSpec
from ctr_ps.ps_server.checkpoint.inspection import (
    TopKey,
    inspect_block,
    inspect_table,
)
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.table.contents import Rows
from tests.support.checkpoints import (
    FakeModel,
    FakeTable,
    fake_block,
    fake_counting_model,
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
    rows = empty.rows[0]
    none = Rows(rows.keys[:0], rows.weights[:0], rows.state[:0], rows.statistics[:0])
    FakeModel({"t": replace(empty, rows={0: none})}, {}).save(tmp_path / "saved")

    report = inspect_table(Checkpoint.open(tmp_path / "saved"), "t", 3)

    assert (report.rows, report.norms, report.show, report.top) == (0, (), (), ())


def test_block_has_its_norm(tmp_path: Path) -> None:
    block = fake_block("mlp", length=7)
    FakeModel({}, {"mlp": block}).save(tmp_path / "saved", 2)

    report = inspect_block(Checkpoint.open(tmp_path / "saved"), "mlp")

    assert (report.block, report.length) == ("mlp", 7)
    assert report.norm == pytest.approx(float(np.sqrt((block.piece.weights**2).sum())))
