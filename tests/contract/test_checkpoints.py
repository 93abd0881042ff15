"""One suite for every store: saving, loading, resuming."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.protos.errors import CheckpointError, ProtocolError, UnknownChangesError
from ctr_ps.protos.gradients import DenseGrad, Gradients
from ctr_ps.protos.store import InferenceSettings, Missing, SaveRequest, WorkerProgress
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.saved_model import SavedModel
from ctr_ps.ps_server.store import ParameterStore
from tests.support.stores import (
    DEEP,
    KEYS,
    TOWER,
    assert_same_parameters,
    in_process,
    pull,
    push_id,
    random_gradients,
)


def test_saved_model_is_loaded_anywhere(store, tmp_path):
    for sequence in range(2):
        store.push_grad(random_gradients(sequence), push_id(sequence=sequence)).result()

    digest = store.save(
        SaveRequest(url=str(tmp_path / "model"), attachments={"job.toml": b"[model]"})
    )
    loaded = in_process()
    loaded.load(str(tmp_path / "model"))

    assert digest == store.digest() == loaded.digest()
    for each in (store, loaded):
        current = push_id(sequence=2, pulled=each.status().version)
        each.push_grad(random_gradients(2), current).result()
    assert_same_parameters(loaded, store)


def test_checkpoint_is_of_the_moment_that_its_save_tells(store, tmp_path):
    for sequence in range(2):
        stamped = replace(push_id(sequence=sequence), position=f"after {sequence}")
        store.push_grad(random_gradients(sequence), stamped).result()
    before, snapshots = store.digest(), []

    def push_on() -> None:
        snapshots.append(store.push_grad(random_gradients(2), push_id(sequence=2)).result())

    digest = store.save(SaveRequest(url=str(tmp_path / "model"), on_snapshot=push_on))

    manifest = Checkpoint.open(tmp_path / "model").manifest
    assert (digest, snapshots) == (before, [3])
    assert store.digest() != digest
    assert (manifest.version, manifest.workers[0].position) == (2, "after 1")


def test_load_of_no_checkpoint_changes_nothing(store, tmp_path):
    store.push_grad(random_gradients(0), push_id()).result()
    before = store.digest()

    with pytest.raises(CheckpointError, match="nowhere"):
        store.load(str(tmp_path / "nowhere"))

    assert store.digest() == before


def test_checkpoint_without_a_declared_table_is_refused(store, tmp_path):
    other = ParameterStore()
    other.create_table(DEEP)
    other.create_dense(TOWER)
    other.push_grad(Gradients({"deep": random_gradients(0).sparse["deep"]}), push_id()).result()
    other.save(SaveRequest(url=str(tmp_path / "other")))
    before = store.digest()

    with pytest.raises(CheckpointError, match="has no wide, only deep, tower"):
        store.load(str(tmp_path / "other"))

    assert store.digest() == before


def test_finding_out_whether_checkpoints_can_be_saved_leaves_nothing(store, tmp_path):
    (tmp_path / "file").touch()

    store.require_writable(str(tmp_path / "checkpoints"))

    assert not list((tmp_path / "checkpoints").iterdir())
    with pytest.raises(CheckpointError, match=r"file/probe"):
        store.require_writable(str(tmp_path / "file"))


def progress_of(step: int, position: str) -> WorkerProgress:
    return WorkerProgress(incarnation=1, sequence=8, step=step, position=position)


def test_run_goes_on_at_its_version_with_its_progress(open_job):
    first, second = open_job(num_workers=2)
    progress = {0: progress_of(5, "there"), 1: progress_of(4, "here")}

    first.resume(5, progress, batches=9)

    assert (first.status().version, first.status().progress) == (5, progress)
    assert first.status().batches == 9
    together = [
        store.barrier("start", worker, step=0) for worker, store in enumerate([first, second])
    ]
    assert [each.result() for each in together] == [5, 5]
    first.push_grad(random_gradients(0), push_id(0, 0, pulled=5), at=5).result()
    assert first.status().progress == progress
    second.push_grad(random_gradients(1), push_id(1, 0, pulled=5), at=5).result()
    assert (first.status().version, first.status().batches) == (6, 11)
    assert first.status().staleness.largest == 0
    assert {each.position for each in first.status().progress.values()} == {""}


def test_worker_that_was_not_in_the_run_is_refused(open_job):
    (store,) = open_job(num_workers=1)

    with pytest.raises(ProtocolError, match="worker 1"):
        store.resume(5, {1: progress_of(5, "")})

    assert (store.status().version, store.status().progress) == (0, {})


def test_run_that_has_begun_does_not_go_on_with_another(open_job):
    (store,) = open_job(num_workers=1)
    store.push_grad(random_gradients(0), push_id(0)).result()

    with pytest.raises(ProtocolError, match="restart the servers"):
        store.resume(5, {})

    assert store.status().version == 1


def test_delta_is_loaded_anywhere(store, tmp_path: Path) -> None:
    store.push_grad(random_gradients(0), push_id()).result()
    store.save(SaveRequest(url=str(tmp_path / "full")))
    store.push_grad(random_gradients(1), push_id(sequence=1)).result()

    digest = store.save(SaveRequest(url=str(tmp_path / "delta"), base=str(tmp_path / "full")))

    loaded = in_process()
    loaded.load(str(tmp_path / "delta"))
    assert digest == ""
    assert Checkpoint.open(tmp_path / "delta").manifest.kind == "delta"
    assert_same_parameters(store, loaded)


def test_delta_of_what_was_not_saved_last_is_refused(store, tmp_path: Path) -> None:
    store.save(SaveRequest(url=str(tmp_path / "first")))
    store.save(SaveRequest(url=str(tmp_path / "last")))

    with pytest.raises(UnknownChangesError, match="save a full checkpoint"):
        store.save(SaveRequest(url=str(tmp_path / "delta"), base=str(tmp_path / "first")))

    assert not (tmp_path / "delta").exists()
    store.save(SaveRequest(url=str(tmp_path / "delta"), base=str(tmp_path / "last")))


def test_model_to_predict_with_is_saved_while_deltas_go_on(store, tmp_path: Path) -> None:
    store.save(SaveRequest(url=str(tmp_path / "full")))
    store.push_grad(random_gradients(0), push_id()).result()
    rows = pull(store, Missing.ZEROS)["deep"]

    store.save(
        SaveRequest(url=str(tmp_path / "half"), inference=InferenceSettings(dtype="float16"))
    )

    read = SavedModel.open(tmp_path / "half").read("deep", KEYS)
    np.testing.assert_array_equal(read, rows.astype(np.float16).astype(np.float32))
    with pytest.raises(CheckpointError, match="is for inference"):
        store.load(str(tmp_path / "half"))
    store.save(SaveRequest(url=str(tmp_path / "delta"), base=str(tmp_path / "full")))
    assert Checkpoint.open(tmp_path / "delta").digest_of_files() == store.digest()


def test_model_to_predict_with_and_one_to_train_on_do_not_replace_each_other(
    store, tmp_path: Path
) -> None:
    full, delta, half = (str(tmp_path / name) for name in ("full", "delta", "half"))
    digest = store.save(SaveRequest(url=full))
    store.push_grad(random_gradients(0), push_id()).result()
    store.save(SaveRequest(url=delta, base=full))
    store.save(SaveRequest(url=half, inference=InferenceSettings(dtype="float16")))

    for url, kind in ((full, "full"), (delta, "delta")):
        with pytest.raises(
            CheckpointError, match=rf"of kind '{kind}', so an inference checkpoint cannot"
        ):
            store.save(SaveRequest(url=url, inference=InferenceSettings()))
    for base in ("", delta):
        with pytest.raises(
            CheckpointError, match="of kind 'inference', so a checkpoint for training cannot"
        ):
            store.save(SaveRequest(url=half, base=base))

    assert Checkpoint.open(full).model_digest == digest
    assert Checkpoint.open(delta).digest_of_files() == store.digest()
    assert SavedModel.open(half).checkpoint.manifest.kind == "inference"
    store.save(SaveRequest(url=half, inference=InferenceSettings()))
    store.save(SaveRequest(url=full))


def test_part_of_a_model_is_loaded_and_the_rest_begins_afresh(store, tmp_path: Path) -> None:
    saved, fresh = in_process(), pull(in_process())
    saved.push_grad(random_gradients(0), push_id()).result()
    saved.save(SaveRequest(url=str(tmp_path / "model")))
    store.push_grad(random_gradients(1), push_id()).result()

    store.load(str(tmp_path / "model"), only=["wide"])

    found = pull(store)
    np.testing.assert_array_equal(found["wide"], pull(saved)["wide"])
    for name in ("deep", "tower"):
        np.testing.assert_array_equal(found[name], fresh[name])
    tables = store.status().tables
    assert (tables["deep"].rows, tables["wide"].rows) == (0, 60)
    with pytest.raises(UnknownChangesError):
        store.save(SaveRequest(url=str(tmp_path / "delta"), base=str(tmp_path / "model")))


@pytest.mark.parametrize("was_loaded", [False, True])
def test_dense_block_begins_afresh_with_the_values_that_were_given(
    store, was_loaded: bool, tmp_path: Path
) -> None:
    spec = replace(TOWER, name="given", values_digest=5)
    values = np.arange(spec.length, dtype=np.float32)
    in_process().save(SaveRequest(url=str(tmp_path / "model")))
    store.create_dense(spec, values)
    if was_loaded:
        store.save(SaveRequest(url=str(tmp_path / "own")))
        store.load(str(tmp_path / "own"))
    grad = DenseGrad(np.ones(spec.length, np.float32), 1)
    store.push_grad(Gradients(dense={"given": grad}), push_id()).result()

    store.load(str(tmp_path / "model"), only=["wide"])

    out = np.empty(spec.length, np.float32)
    store.pull_dense({"given": out}).result()
    np.testing.assert_array_equal(out, values)


def test_tables_that_the_job_does_not_declare_are_not_saved_again(store, tmp_path: Path) -> None:
    """A job that drops a table of the model from which it goes on can save."""
    saved = in_process()
    saved.create_table(replace(DEEP, name="dropped"))
    saved.push_grad(random_gradients(0), push_id()).result()
    saved.save(SaveRequest(url=str(tmp_path / "model")))
    store.load(str(tmp_path / "model"))

    digest = store.save(SaveRequest(url=str(tmp_path / "next")))

    assert Checkpoint.open(tmp_path / "next").tables.keys() == {"deep", "wide"}
    assert digest == store.digest()
    loaded = in_process()
    loaded.load(str(tmp_path / "next"))
    assert_same_parameters(store, loaded)


def test_part_that_is_not_there_is_refused(store, tmp_path: Path) -> None:
    saved = ParameterStore()
    saved.create_table(DEEP)
    saved.create_table(replace(DEEP, name="other"))
    saved.save(SaveRequest(url=str(tmp_path / "model")))
    store.push_grad(random_gradients(1), push_id()).result()
    before = store.digest()

    with pytest.raises(CheckpointError, match="has no wide, only deep, other"):
        store.load(str(tmp_path / "model"), only=["deep", "wide"])
    with pytest.raises(
        CheckpointError, match=r"other cannot be loaded from .* only deep, tower, wide"
    ):
        store.load(str(tmp_path / "model"), only=["other"])

    assert store.digest() == before
