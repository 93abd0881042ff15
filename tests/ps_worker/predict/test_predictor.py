"""Online prediction from a saved model, beside what the trainer's own evaluation says."""

import os
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import BadRowError, CheckpointError, DataError, UsageError
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.checkpoints import attachments
from ctr_ps.ps_worker.checkpoints.attachments import schema_of_checkpoint
from ctr_ps.ps_worker.extras.data_tools.generate import generate
from ctr_ps.ps_worker.job import Job, override_job
from ctr_ps.ps_worker.job.datasets import streamed
from ctr_ps.ps_worker.predict import predictor as predictor_module
from ctr_ps.ps_worker.predict.predictor import Predictor
from ctr_ps.ps_worker.run.plan import plan_of
from ctr_ps.ps_worker.trainer import Trainer
from ctr_ps.ps_worker.training.evaluation.evaluator import evaluate
from tests.ps_worker.conftest import OfParquet
from tests.support.training import train_alone

pytestmark = pytest.mark.usefixtures("data")

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    generate(folder, rows=300, test_rows=100, files=1, test_files=1, seed=1)
    return folder


def job_of(data: Path, folder: Path, *settings: str) -> Job:
    return override_job(
        {},
        [
            f"data.train={data}/train/*",
            f"data.test={data}/test/*",
            f"checkpoint.dir={folder}",
            "model.hidden=[4]",
            "train.batch_size=16",
            "strategy.mode=sync",
            *settings,
        ],
        source="test",
    )


@pytest.fixture(scope="module")
def checkpoints(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    train_alone(job_of(data, folder, "train.epochs=2"))
    return folder


def trainer_says(job: Job, url: Path) -> tuple[list[Batch], np.ndarray]:
    """Returns the test rows as batches, and what evaluation with a store predicts of them."""
    plan = plan_of(job)
    dataset = streamed(job, plan.schema)
    dataset.set_filelist(plan.test_files)
    batches = list(dataset)
    store = ParameterStore()
    store.load(str(url))
    found: list[np.ndarray] = []
    evaluate(
        store,
        plan.model,
        batches,
        batch_size=16,
        on_predictions=lambda predictions: found.append(predictions.copy()),
    )
    return batches, np.concatenate(found)


@pytest.mark.parametrize("model", ["ctr_dnn", "wide_deep", "deepfm"])
def test_predicts_what_the_trainer_predicts(model: str, data: Path, tmp_path: Path) -> None:
    job = job_of(data, tmp_path, f"model.name={model}")
    train_alone(job)
    batches, expected = trainer_says(job, tmp_path / "epoch-1")

    predictor = Predictor.load(tmp_path, verify=True)
    found = np.concatenate([predictor.predict(batch) for batch in batches])

    assert predictor.url == str(tmp_path / "epoch-1")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)
    assert np.ptp(expected) > 0.01  # rows count for something


def test_answers_from_a_chain_of_deltas(data: Path, tmp_path: Path) -> None:
    settings = ("train.epochs=3", "checkpoint.mode=delta")
    job = job_of(data, tmp_path, *settings)
    train_alone(job)
    batches, expected = trainer_says(job, tmp_path / "epoch-3")

    predictor = Predictor.load(tmp_path, verify=True)
    found = np.concatenate([predictor.predict(batch) for batch in batches])

    assert Checkpoint.open(tmp_path).manifest.base == "epoch-2"
    np.testing.assert_array_equal(found, expected)
    full = tmp_path / "full"
    train_alone(job_of(data, full, "train.epochs=3"))
    _, of_full = trainer_says(job, full / "epoch-3")
    np.testing.assert_array_equal(expected, of_full)


def test_samples_are_hashed_and_scaled_as_rows_of_files(checkpoints: Path, data: Path) -> None:
    (path,) = (data / "test").iterdir()
    samples = []
    for line in path.read_text().splitlines():
        _, *columns = line.split("\t")
        dense = [float(column) if column else None for column in columns[:13]]
        samples.append((None, dense, columns[13:]))  # a missing value is a value, too
    predictor = Predictor.load(checkpoints / "epoch-2")
    _, expected = trainer_says(job_of(data, checkpoints), checkpoints / "epoch-2")

    # Another batch size, so other roundings.
    np.testing.assert_allclose(predictor.predict_samples(samples), expected, rtol=1e-5)
    assert predictor.predict_samples([]).shape == (0,)
    with pytest.raises(DataError, match="sample 2: "):
        predictor.predict_samples([samples[0], (None, [], [])])


def test_whole_numbers_and_booleans_mean_what_they_meant_in_the_data(
    of_parquet: OfParquet,
) -> None:
    predictor = Predictor.load(of_parquet.model)

    of_file = predictor.predict(of_parquet.data)

    np.testing.assert_allclose(predictor.predict_samples(of_parquet.samples), of_file, rtol=1e-6)
    (_, mobile, (user, tags)), *_ = of_parquet.samples
    as_text = (None, [float(mobile[0])], [str(user), tags])
    assert predictor.predict_samples([as_text])[0] == pytest.approx(of_file[0], rel=1e-6)
    assert len(set(of_file.tolist())) > 40
    with pytest.raises(
        DataError, match=r"slot 2 \('tags'\) has 7, but the model was trained on te"
    ):
        predictor.predict_samples([(None, [0], [user, ["a", 7]])])
    with pytest.raises(DataError, match="has True, expected text, bytes or a whole number"):
        predictor.predict_samples([(None, [0], [True, []])])


@pytest.mark.parametrize("is_old", [True, False], ids=["of an older release", "of batches"])
def test_whole_numbers_are_refused_where_the_checkpoint_does_not_say_what_they_were(
    is_old: bool, of_parquet: OfParquet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, schema = str(of_parquet.data), of_parquet.schema
    with Trainer("lr", schema=schema) as trainer:
        batches = streamed(trainer.job, trainer.schema)
        batches.set_filelist([data])
        trainer.train(data if is_old else list(batches))
        if is_old:
            monkeypatch.setattr(attachments, "VALUES_ATTACHMENT", "later.json")
        trainer.save(tmp_path / "model")
    monkeypatch.undo()

    predictor = Predictor.load(tmp_path / "model")

    user = of_parquet.samples[0][2][0]
    assert predictor.predict_samples([(None, [0], [str(user), ["a"]])]).size == 1
    with pytest.raises(DataError, match="the checkpoint does not tell how whole numbers"):
        predictor.predict_samples([(None, [0], [user, ["a"]])])


def test_files_are_predicted_as_the_trainer_does(
    checkpoints: Path, data: Path, tmp_path: Path
) -> None:
    _, expected = trainer_says(job_of(data, checkpoints), checkpoints / "epoch-2")
    predictor = Predictor.load(checkpoints / "epoch-2")

    np.testing.assert_array_equal(predictor.predict(f"{data}/test/*"), expected)
    np.testing.assert_array_equal(predictor.predict(list((data / "test").iterdir())), expected)
    with pytest.raises(DataError, match=r"no file matches 'none\.csv'"):
        predictor.predict("none.csv")
    with pytest.raises(
        UsageError, match=r"given list, expected a Batch, files or a table; predict_samples"
    ):
        predictor.predict([(None, [0], ["a"])])  # type: ignore[list-item]
    (tmp_path / "bad.tsv").write_text("1\tshort\n")
    with pytest.raises(BadRowError, match="bad_row_limit is 0"):
        predictor.predict(tmp_path / "bad.tsv")


def test_batches_may_be_of_any_size_one_after_another(checkpoints: Path, data: Path) -> None:
    batches, _ = trainer_says(job_of(data, checkpoints), checkpoints / "epoch-2")
    predictor = Predictor.load(checkpoints / "epoch-2")
    whole = batches[0]

    def first(size: int) -> Batch:
        stop = int(whole.offsets[size * whole.num_slots])
        return Batch(
            labels=None,
            dense=whole.dense[:size],
            keys=whole.keys[:stop],
            offsets=whole.offsets[: size * whole.num_slots + 1],
            num_slots=whole.num_slots,
        )

    found = {size: predictor.predict(first(size)) for size in (3, 1, 16, 2)}

    for size, predictions in found.items():
        expected = Predictor.load(checkpoints / "epoch-2").predict(first(size))
        np.testing.assert_array_equal(predictions, expected)


def test_switches_and_goes_back(checkpoints: Path, data: Path) -> None:
    job = job_of(data, checkpoints)
    batches, first = trainer_says(job, checkpoints / "epoch-1")
    _, second = trainer_says(job, checkpoints / "epoch-2")
    predictor = Predictor.load(checkpoints / "epoch-1")

    def says() -> np.ndarray:
        return np.concatenate([predictor.predict(batch) for batch in batches])

    predictor.switch_to(checkpoints)
    assert predictor.url.endswith("epoch-2")
    np.testing.assert_array_equal(says(), second)

    with pytest.raises(CheckpointError, match="no checkpoint"):
        predictor.switch_to(checkpoints / "epoch-3")
    np.testing.assert_array_equal(says(), second)

    predictor.roll_back()
    np.testing.assert_array_equal(says(), first)
    with pytest.raises(
        UsageError, match=r"no model from before .*epoch-1 is left: only the last 2"
    ):
        predictor.roll_back()
    assert not np.array_equal(first, second)


def test_goes_back_as_far_as_models_are_kept(checkpoints: Path) -> None:
    predictor = Predictor.load(checkpoints / "epoch-1")
    for epoch in (2, 1, 2):
        predictor.switch_to(checkpoints / f"epoch-{epoch}")

    urls = []
    for _ in range(2):
        predictor.roll_back()
        urls.append(Path(predictor.url).name)

    assert urls == ["epoch-1", "epoch-2"]
    with pytest.raises(UsageError, match=r"no model from before .*epoch-2 is left"):
        predictor.roll_back()


def test_each_batch_is_predicted_by_one_model_while_others_switch(
    checkpoints: Path, data: Path
) -> None:
    job = job_of(data, checkpoints)
    batches, _ = trainer_says(job, checkpoints / "epoch-1")
    predictor = Predictor.load(checkpoints / "epoch-1")
    known = {predictor.predict(batches[0]).tobytes()}
    predictor.switch_to(checkpoints / "epoch-2")
    known.add(predictor.predict(batches[0]).tobytes())
    stop = threading.Event()
    found: set[bytes] = set()

    def ask() -> None:
        while not stop.is_set():
            found.add(predictor.predict(batches[0]).tobytes())

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        predictor.roll_back()
        predictor.switch_to(checkpoints / "epoch-2")
    stop.set()
    for thread in threads:
        thread.join(LIMIT_S)

    assert found <= known
    assert len(known) == 2


def test_model_of_another_schema_is_refused(checkpoints: Path, data: Path, tmp_path: Path) -> None:
    settings = ["data.schema=criteo_min_max"]
    train_alone(job_of(data, tmp_path, *settings))
    predictor = Predictor.load(checkpoints)

    with pytest.raises(UsageError, match="another schema"):
        predictor.switch_to(tmp_path)
    assert predictor.url.endswith("epoch-2")


def file_of_rows(checkpoint: Path) -> Path:
    (path,) = checkpoint.glob("data-*/table.*.arrow")
    return path


def alter_a_weight(checkpoint: Path) -> None:
    """Changes one bit, which only checksums tell."""
    saved = Checkpoint.open(checkpoint)
    rows = next(rows for _, rows in saved.read_shards("embedding", range(64)) if rows.keys.size)
    table = file_of_rows(checkpoint)
    content = bytearray(table.read_bytes())
    content[content.index(rows.weights[0].tobytes())] ^= 1
    table.write_bytes(content)


@pytest.mark.parametrize("at_load", [False, True])
def test_switch_verifies_as_the_load_did(at_load: bool, data: Path, tmp_path: Path) -> None:
    train_alone(job_of(data, tmp_path, "train.epochs=2"))
    alter_a_weight(tmp_path / "epoch-2")
    predictor = Predictor.load(tmp_path / "epoch-1", verify=at_load)

    def switches(**settings: bool) -> bool:
        try:
            predictor.switch_to(tmp_path / "epoch-2", **settings)
        except CheckpointError:
            return False
        return True

    assert switches() is not at_load
    assert not switches(verify=True)
    assert switches(verify=False)


def test_damage_is_found_where_it_was_asked_for(data: Path, tmp_path: Path) -> None:
    train_alone(job_of(data, tmp_path))
    alter_a_weight(tmp_path / "epoch-1")

    for maps in (False, True):
        with pytest.raises(CheckpointError, match="was altered"):
            Predictor.load(tmp_path, verify=True, map=maps)
        Predictor.load(tmp_path, map=maps)  # compares no checksums, and so does not see it

    table = file_of_rows(tmp_path / "epoch-1")
    table.write_bytes(table.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="was it truncated"):
        Predictor.load(tmp_path)


def overwrite(checkpoint: Path) -> None:
    """Zeroes the middle of the rows in place, as by a copy over them that is under way."""
    table = file_of_rows(checkpoint)
    size = table.stat().st_size
    with table.open("r+b") as file:
        file.seek(size // 10)
        file.write(bytes(size * 8 // 10))


def cut(checkpoint: Path) -> None:
    os.truncate(file_of_rows(checkpoint), 100)


def remove(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)


@pytest.mark.parametrize(
    ("change", "maps"), [(overwrite, False), (cut, False), (remove, False), (remove, True)]
)
def test_answers_stay_when_the_files_do_not(
    change: Callable[[Path], None], maps: bool, checkpoints: Path, data: Path, tmp_path: Path
) -> None:
    batches, _ = trainer_says(job_of(data, checkpoints), checkpoints / "epoch-1")
    shutil.copytree(checkpoints / "epoch-1", tmp_path / "epoch-1")
    predictor = Predictor.load(tmp_path / "epoch-1", map=maps)
    before = [predictor.predict(batch) for batch in batches]

    change(tmp_path / "epoch-1")

    for batch, expected in zip(batches, before, strict=True):
        np.testing.assert_array_equal(predictor.predict(batch), expected)


def test_the_next_checkpoint_is_loaded_if_the_newest_one_is_removed_meanwhile(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("epoch-1", "epoch-2"):
        shutil.copytree(checkpoints / name, tmp_path / name)
    (tmp_path / "LATEST").write_text("epoch-1")

    def removed_after(checkpoint: Checkpoint) -> Schema:
        if (tmp_path / "epoch-1").exists():
            remove(tmp_path / "epoch-1")
            (tmp_path / "LATEST").write_text("epoch-2")
        return schema_of_checkpoint(checkpoint)

    monkeypatch.setattr(predictor_module, "schema_of_checkpoint", removed_after)

    assert Predictor.load(tmp_path).url == str(tmp_path / "epoch-2")


def test_one_that_is_removed_without_a_newer_one_is_named(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(checkpoints / "epoch-1", tmp_path / "epoch-1")
    (tmp_path / "LATEST").write_text("epoch-1")

    def damaged(checkpoint: Checkpoint) -> Schema:
        cut(tmp_path / "epoch-1")
        return schema_of_checkpoint(checkpoint)

    monkeypatch.setattr(predictor_module, "schema_of_checkpoint", damaged)

    with pytest.raises(CheckpointError, match="epoch-1"):
        Predictor.load(tmp_path)


@pytest.mark.parametrize("change", [overwrite, cut])
def test_mapped_files_that_change_are_told_instead_of_answers(
    change: Callable[[Path], None], checkpoints: Path, data: Path, tmp_path: Path
) -> None:
    batches, _ = trainer_says(job_of(data, checkpoints), checkpoints / "epoch-1")
    shutil.copytree(checkpoints / "epoch-1", tmp_path / "epoch-1")
    copied, mapped = (Predictor.load(tmp_path / "epoch-1", map=maps) for maps in (False, True))
    np.testing.assert_array_equal(mapped.predict(batches[0]), copied.predict(batches[0]))

    change(tmp_path / "epoch-1")

    with pytest.raises(
        CheckpointError, match=r"table\.embedding.* was changed while it was mapped"
    ):
        mapped.predict(batches[0])


def test_pickled_predictor_loads_its_checkpoint_again(checkpoints: Path, data: Path) -> None:
    predictor = Predictor.load(checkpoints, map=True)

    found = pickle.loads(pickle.dumps(predictor))

    assert (found.url, found.model_digest) == (predictor.url, predictor.model_digest)
    files = f"{data}/test/*"
    np.testing.assert_array_equal(found.predict(files), predictor.predict(files))


def test_mapped_files_take_no_descriptors(checkpoints: Path) -> None:
    """A model of many tables, servers and deltas has more files than a process may open."""
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))

    predictor = Predictor.load(checkpoints / "epoch-1", map=True)

    assert len(list(descriptors.iterdir())) == before
    assert predictor.model_digest
