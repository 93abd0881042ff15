"""Inference checkpoints, from a store or from another checkpoint."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.protos.gradients import DenseGrad, Gradients, SparseGrad
from ctr_ps.protos.spec import OptimizerSpec, StatisticsSpec
from ctr_ps.protos.store import InferenceSettings, Missing, SaveRequest, Store
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.rewrite import export_inference
from ctr_ps.ps_server.checkpoint.saved_model import SavedModel
from ctr_ps.ps_server.store import ParameterStore
from tests.support.local_transport import LocalTransport, joined_client
from tests.support.stores import DEEP, KEYS, TOWER, push_id

COUNTING = replace(DEEP, statistics=StatisticsSpec(nonclk_coeff=0.5, click_coeff=1.0))
HALF = InferenceSettings(dtype="float16")
Export = Callable[[Store, Path, InferenceSettings], None]


def trained(num_servers: int = 1, spec=COUNTING) -> Store:
    """Key `i` of KEYS has shows `1 + i % 4`, one of them clicked if `i` is odd."""
    if num_servers == 1:
        store: Store = ParameterStore()
    else:
        stores = [
            ParameterStore(server_index=i, num_servers=num_servers) for i in range(num_servers)
        ]
        store = joined_client(LocalTransport(stores))
    store.create_table(spec)
    store.create_dense(TOWER)
    random = np.random.default_rng(1)
    number = np.arange(KEYS.size)
    counts = np.stack([1 + number % 4, number % 2], axis=1).astype(np.uint32)
    values = random.normal(size=(KEYS.size, DEEP.dim)).astype(np.float32)
    grad = SparseGrad(KEYS, values, 1, counts if spec.statistics else None)
    dense = DenseGrad(random.normal(size=TOWER.length).astype(np.float32), 1)
    store.push_grad(Gradients({"deep": grad}, {"tower": dense}), push_id()).result()
    return store


def from_store(store: Store, target: Path, settings: InferenceSettings) -> None:
    store.save(SaveRequest(url=str(target), attachments={"job.json": b"{}"}, inference=settings))


def from_checkpoint(store: Store, target: Path, settings: InferenceSettings) -> None:
    source = target.with_name("source")
    store.save(SaveRequest(url=str(source), attachments={"job.json": b"{}"}))
    export_inference(Checkpoint.open(source), target, settings)


@pytest.fixture(params=[from_store, from_checkpoint], ids=["store", "checkpoint"])
def export(request: pytest.FixtureRequest) -> Export:
    return request.param


@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_predictions_find_all_rows_and_blocks(
    export: Export, num_servers: int, dtype: str, tmp_path: Path
) -> None:
    store = trained(num_servers)

    export(store, tmp_path / "export", replace(HALF, dtype=dtype))

    saved = SavedModel.open(tmp_path / "export")
    rows = store.pull_sparse({"deep": KEYS}, missing=Missing.ZEROS).result().rows["deep"]
    np.testing.assert_array_equal(saved.read("deep", KEYS), rows.astype(dtype).astype(np.float32))
    tower = np.empty(TOWER.length, np.float32)
    store.pull_dense({"tower": tower}).result()
    np.testing.assert_array_equal(saved.dense["tower"], tower)
    assert saved.checkpoint.attachment("job.json") == b"{}"
    saved.checkpoint.verify()


def test_it_has_weights_and_nothing_else(export: Export, tmp_path: Path) -> None:
    store = trained()
    store.save(SaveRequest(url=str(tmp_path / "full")))

    export(store, tmp_path / "export", HALF)

    manifest = Checkpoint.open(tmp_path / "export").manifest
    [table] = manifest.files_of_table("deep")
    assert (table.state_width, table.statistics_width, table.dtype) == (0, 0, "float16")
    assert [entry.num_states for entry in manifest.files_of_block("tower")] == [0]
    [full] = Checkpoint.open(tmp_path / "full").manifest.files_of_table("deep")
    assert sum(batch.rows for batch in table.batches) == KEYS.size
    assert table.size_bytes < 0.8 * full.size_bytes


def test_rows_of_a_low_score_are_left_out(export: Export, tmp_path: Path) -> None:
    store = trained()

    export(store, tmp_path / "export", InferenceSettings(min_score=1.5))

    number = np.arange(KEYS.size)
    shows, clicks = 1 + number % 4, number % 2
    is_kept = 0.5 * (shows - clicks) + clicks >= 1.5
    read = SavedModel.open(tmp_path / "export").read("deep", KEYS)
    np.testing.assert_array_equal(np.any(read != 0, axis=1), is_kept)
    assert 0 < is_kept.sum() < KEYS.size


def test_rows_written_and_left_out_are_counted(tmp_path: Path) -> None:
    trained().save(SaveRequest(url=str(tmp_path / "full")))
    source = Checkpoint.open(tmp_path / "full")

    some = export_inference(source, tmp_path / "some", InferenceSettings(min_score=1.5))
    everything = export_inference(source, tmp_path / "all", InferenceSettings())

    written = SavedModel.open(tmp_path / "some").read("deep", KEYS).any(axis=1).sum()
    assert some == (written, KEYS.size - written)
    assert everything == (KEYS.size, 0)


def test_rows_without_statistics_have_no_score(export: Export, tmp_path: Path) -> None:
    store = trained(spec=DEEP)

    with pytest.raises(CheckpointError, match=r"min_score is 0.5, but .*min_score = 0"):
        export(store, tmp_path / "export", InferenceSettings(min_score=0.5))

    assert not (tmp_path / "export").exists()
    export(store, tmp_path / "export", HALF)


def test_weights_that_float16_does_not_hold_are_refused(export: Export, tmp_path: Path) -> None:
    store = trained(spec=replace(DEEP, optimizer=OptimizerSpec(name="sum")))
    large = SparseGrad(KEYS[:1], np.full((1, DEEP.dim), 1e6, np.float32), 1)
    store.push_grad(Gradients({"deep": large}), push_id(sequence=1)).result()

    with pytest.raises(CheckpointError, match=r"weight of 1e\+06, out of the range of float16"):
        export(store, tmp_path / "export", HALF)


def test_it_cannot_be_loaded_for_training(tmp_path: Path) -> None:
    store = trained()
    from_store(store, tmp_path / "export", HALF)
    url = str(tmp_path / "export")

    for loading in (trained(), trained(num_servers=2)):
        before = loading.digest()
        with pytest.raises(CheckpointError, match="is for inference: it has no optimizer state"):
            loading.load(url)
        assert loading.digest() == before
    with pytest.raises(CheckpointError, match="is for inference"):
        store.save(SaveRequest(url=str(tmp_path / "delta"), base=url))
    with pytest.raises(CheckpointError, match="is for inference"):
        export_inference(Checkpoint.open(url), tmp_path / "again", HALF)


def test_it_does_not_replace_the_checkpoint_that_it_is_made_of(tmp_path: Path) -> None:
    digest = trained().save(SaveRequest(url=str(tmp_path / "full")))

    with pytest.raises(
        CheckpointError, match="/full is a checkpoint of kind 'full', so an inference checkpoint"
    ):
        export_inference(Checkpoint.open(tmp_path / "full"), tmp_path / "full", HALF)

    checkpoint = Checkpoint.open(tmp_path / "full")
    checkpoint.verify()
    assert checkpoint.model_digest == digest
