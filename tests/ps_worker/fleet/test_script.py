"""Scripts in one process: what they train, save and load, and what they are told."""

import json
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.ctr_model.metrics import ClickMetrics
from ctr_ps.ctr_model.models.ctr_dnn import CtrDnn
from ctr_ps.ctr_model.models.model import Model, origin_of
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import CheckpointError, DataError, JobError, UsageError
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_worker import fleet
from ctr_ps.ps_worker.data.blocks import DataPosition
from ctr_ps.ps_worker.extras.data_tools.generate import generate
from ctr_ps.ps_worker.fleet.words.settings import as_calls
from ctr_ps.ps_worker.job.model import DENSE_BLOCK
from ctr_ps.ps_worker.predict.inference import infer
from ctr_ps.ps_worker.predict.predictor import Predictor
from ctr_ps.ps_worker.training.evaluation.base_rate import rates_of
from tests.support.training import NUM_DENSE, NUM_SLOTS, random_batches, small_model

BATCHES = random_batches(6, 8, seed=1)
SGD = fleet.optimizer.SGD(learning_rate=0.1)


@pytest.fixture(autouse=True)
def _run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TRAINING_ROLE", raising=False)
    fleet.init()
    yield
    fleet.running.FLEET.abandon()


def executor_of(
    *, optimizer=SGD, dense=None, model=None, settings=None, **strategy
) -> fleet.Executor:
    modes = fleet.DistributedStrategy(**strategy)
    distributed = fleet.distributed_optimizer(optimizer, modes, dense=dense)
    executor = distributed.minimize(model or small_model(), **settings or {})
    fleet.init_worker()
    return executor


def vector_of(metrics: ClickMetrics) -> bytes:
    return metrics.to_vector(metrics.bounds()).tobytes()


def log_loss(executor: fleet.Executor) -> float:
    return executor.infer_from_dataset(BATCHES).log_loss()


@pytest.mark.parametrize("mode", ["sync", "half_async", "async", "geo", "bounded_staleness"])
def test_every_mode_learns(mode: str) -> None:
    executor = executor_of(mode=mode)
    before = log_loss(executor)

    for _ in range(20):
        executor.train_from_dataset(BATCHES)
    fleet.barrier_worker()

    assert log_loss(executor) < before - 0.05
    fleet.stop_worker()


def test_one_process_sends_nothing_in_the_background() -> None:
    executor_of(mode="async").train_from_dataset(BATCHES)

    assert not [thread for thread in threading.enumerate() if "communicator" in thread.name]


def test_steps_tell_the_loss_of_each_batch() -> None:
    executor = executor_of(mode="sync")

    steps = [(step.step, step.examples) for step in executor.steps(BATCHES)]
    losses = [step.loss for _ in range(20) for step in executor.steps(BATCHES)]

    assert steps == [(number, 8) for number in range(1, 7)]
    assert np.mean(losses[-6:]) < np.mean(losses[:6]) - 0.05


def test_steps_start_at_the_rate_of_their_batches() -> None:
    executor = executor_of(mode="sync")
    [rate] = rates_of(BATCHES, ())
    dense = np.empty(small_model().num_params, np.float32)

    executor.steps(BATCHES)

    fleet.running.FLEET._run.store.pull_dense({DENSE_BLOCK: dense}).result()
    assert dense[-1] == pytest.approx(math.log(rate / (1 - rate)))
    assert rate != 0.5


def test_dense_parameters_may_have_an_optimizer_of_their_own() -> None:
    adam = fleet.optimizer.Adam(learning_rate=0.01)
    executor_of(optimizer=fleet.optimizer.AdagradRow(), dense=adam)

    section = fleet.running.FLEET._task.job.optimizer
    assert (section.sparse.spec().name, section.dense.spec().name) == ("adagrad_row", "adam")


def test_hyper_parameter_out_of_range_is_refused_by_name() -> None:
    with pytest.raises(
        UsageError,
        match=r"this script: learning_rate of the optimizer: .* of optimizer 'sgd' is -1",
    ):
        executor_of(optimizer=fleet.optimizer.SGD(learning_rate=-1.0))


def test_setting_out_of_range_is_refused_by_its_key() -> None:
    with pytest.raises(JobError, match=r"this script: strategy\.async_\.send_queue_size is 0: "):
        executor_of(mode="sync", async_={"send_queue_size": 0})


def test_advice_names_the_calls_of_a_script(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"log_every_s": 1e-6}
    executor = executor_of(optimizer=fleet.optimizer.SGD(learning_rate=4.0), settings=settings)
    for _ in range(10):
        executor.train_from_dataset(BATCHES)

    (advice,) = {each.split(": try ")[1] for each in caplog.messages if ": try " in each}
    assert advice.startswith(
        "learning_rate of the optimizer below 4, or the optimizer's default, learning_rate of the dense "
        "optimizer below 4, or the optimizer's default, a larger dataset.init(batch_size=); check"
    )


@pytest.mark.parametrize(
    ("key", "call"),
    [
        ("train.non_finite is 'x'", "minimize(non_finite=) is 'x'"),
        ("set train.batch_size.", "set dataset.init(batch_size=)."),
        ("life.tables.a.max_unseen: it", "tables.a.max_unseen in minimize(life=): it"),
        ("cluster.wait_timeout_s", "fleet.init(wait_timeout_s=)"),
        ("data.train.x and strategy.async_x", "data.train.x and strategy.async_x"),
    ],
)
def test_keys_of_a_job_are_calls_in_messages(key: str, call: str) -> None:
    assert as_calls(key) == call


def test_dataset_says_how_many_threads_train(tmp_path: Path) -> None:
    schema = Schema.numbered(1, 2)
    (tmp_path / "rows").write_text("".join(f"{n % 2}\t1\ta{n % 2}\tb\n" for n in range(100)))
    dataset = fleet.QueueDataset(schema, batch_size=10, thread_num=2)
    dataset.set_filelist(fleet.split_files([tmp_path / "rows"]))
    executor = executor_of(model=CtrDnn(schema, dim=2, hidden=[4]))
    threads = set()

    def take() -> Iterator[None]:
        for batch in dataset:
            threads.add(threading.current_thread())
            yield batch

    class Watched:
        thread_num = dataset.thread_num
        __iter__ = staticmethod(take)

    executor.train_from_dataset(dataset)
    executor.train_from_dataset(Watched())

    assert threading.main_thread() not in threads
    assert executor.infer_from_dataset(dataset).examples == 100


def test_error_of_training_ends_the_readers(tmp_path: Path) -> None:
    schema = Schema.numbered(1, 2)
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_text("1\ta\tb\n" * 100)  # without labels
    dataset = fleet.QueueDataset(schema, batch_size=1, reader_num=2)
    dataset.set_filelist(files)
    executor = executor_of(model=CtrDnn(schema, dim=2, hidden=[4]))

    with pytest.raises(DataError, match="rows without labels") as caught:
        executor.train_from_dataset(dataset)

    assert caught.tb is not None  # it holds on to all that was under way
    assert not [each for each in threading.enumerate() if each.name.startswith("reader-")]


def test_handler_hears_how_training_goes() -> None:
    told: list[fleet.Fetched] = []

    executor_of(mode="async").train_from_dataset(
        BATCHES, fetch_handler=told.append, fetch_period=3600
    )

    assert [fetched.examples for fetched in told] == [48]
    assert told[0].staleness.batches == 6
    assert math.isfinite(told[0].loss)


def test_samples_are_trained_on_through_a_loader() -> None:
    executor = executor_of(mode="sync")
    schema = Schema.numbered(NUM_DENSE, NUM_SLOTS)
    sample = (1, [0.0] * NUM_DENSE, ["x"] * NUM_SLOTS)
    loader = fleet.SampleLoader([sample] * 10, schema, batch_size=4)

    assert [step.examples for step in executor.steps(loader)] == [4, 4, 2]
    with pytest.raises(UsageError, match=r"yields tuple, expected Batch: .*SampleLoader"):
        executor.train_from_dataset([sample])


def test_model_to_predict_with_is_read_without_servers_and_not_trained_on(tmp_path: Path) -> None:
    executor = executor_of(mode="sync")
    executor.train_from_dataset(BATCHES)
    fleet.save_inference_model(tmp_path / "export")
    expected = executor.infer_from_dataset(BATCHES)
    fleet.stop_worker()

    predictor, found = Predictor.load(tmp_path / "export"), ClickMetrics()
    for batch in BATCHES:
        found.add(batch.labels, predictor.predict(batch))
    assert vector_of(found) == vector_of(expected)
    fleet.init()
    executor_of(mode="sync")
    with pytest.raises(CheckpointError, match="is for inference"):
        fleet.load_model(tmp_path / "export")


def test_checkpoint_says_what_the_values_of_slots_were(tmp_path: Path) -> None:
    """Also one that another script loads and saves again; of batches nothing is known."""
    values = [["a"], *([i] for i in range(NUM_SLOTS - 1))]
    samples = [(i % 2, [0.5] * NUM_DENSE, values) for i in range(16)]
    expected = {"text", "lists"}, {"keys", "lists"}
    executor = executor_of(mode="sync")
    schema = origin_of(small_model()).schema
    executor.train_from_dataset(BATCHES)
    for _ in executor.steps(fleet.SampleLoader(samples, schema, batch_size=8)):
        pass
    fleet.save_persistables(tmp_path / "model")
    fleet.stop_worker()
    fleet.init()
    executor_of(mode="sync")
    fleet.load_model(tmp_path / "model")
    fleet.save_inference_model(tmp_path / "export")
    fleet.stop_worker()

    for name in ("model", "export"):
        found = json.loads(Predictor.load(tmp_path / name).slot_values.to_json())
        assert {slot: set(kinds) for slot, kinds in found.items()} == {
            slot: expected[i > 0] for i, slot in enumerate(schema.slots)
        }


def test_dtype_that_is_none_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    executor_of(mode="sync")

    with pytest.raises(UsageError, match="dtype is 'float8', expected one of float32, float16"):
        fleet.save_inference_model(tmp_path / "export", dtype="float8")  # type: ignore[arg-type]
    assert not (tmp_path / "export").exists()


def test_saved_model_is_what_another_run_goes_on_from(tmp_path: Path) -> None:
    executor = executor_of(mode="sync")
    executor.train_from_dataset(BATCHES)
    fleet.save_persistables(tmp_path / "model")
    figures = vector_of(executor.infer_from_dataset(BATCHES))
    executor.train_from_dataset(BATCHES)
    trained_on = vector_of(executor.infer_from_dataset(BATCHES))
    fleet.stop_worker()

    fleet.init()
    executor = executor_of(mode="sync")
    assert vector_of(executor.infer_from_dataset(BATCHES)) != figures
    fleet.load_model(tmp_path / "model")
    assert vector_of(executor.infer_from_dataset(BATCHES)) == figures
    executor.train_from_dataset(BATCHES)

    assert vector_of(executor.infer_from_dataset(BATCHES)) == trained_on


def built_in_model(schema: Schema) -> Model:
    return CtrDnn(schema, dim=2, hidden=(4,))


def model_of_pytorch(schema: Schema) -> Model:
    pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")
    from ctr_ps.ctr_model.torch import TorchModel
    from tests.support.torch_models import WideDeep

    return TorchModel(schema, WideDeep, {"dim": 2, "hidden": [4]}, seed=1)


@pytest.mark.parametrize("build", [built_in_model, model_of_pytorch])
def test_saved_model_is_what_ps_worker_infers_with(
    build: Callable[[Schema], Model], tmp_path: Path
) -> None:
    schema = Schema.numbered(1, 2)
    rows = tmp_path / "rows"
    rows.write_text("".join(f"{n % 2}\t{n % 7}\ta{n % 2}\tb{n % 3}\n" for n in range(100)))
    dataset = fleet.QueueDataset(schema, batch_size=10)
    dataset.set_filelist([rows])
    executor = executor_of(model=build(schema))
    executor.train_from_dataset(dataset)
    fleet.save_persistables(tmp_path / "model")

    inferred = infer(str(tmp_path / "model"), [str(rows)], allow_code=True)

    expected = executor.infer_from_dataset(dataset)
    assert inferred["auc"] == expected.auc()
    assert inferred["log_loss"] == pytest.approx(expected.log_loss(), rel=1e-6)  # other batches
    predictor = Predictor.load(tmp_path / "model", allow_code=True)
    metrics = ClickMetrics()
    for batch in dataset:
        metrics.add(batch.labels, predictor.predict(batch))
    assert metrics.auc() == expected.auc()


def test_model_of_an_unknown_class_is_saved_for_scripts_alone(tmp_path: Path) -> None:
    class Own(CtrDnn):
        pass

    own = Own(Schema.numbered(NUM_DENSE, NUM_SLOTS), dim=2, hidden=(4,))
    executor_of(model=own).train_from_dataset(BATCHES)
    fleet.save_persistables(tmp_path / "model")

    assert Checkpoint.open(tmp_path / "model").attachments == []


def test_model_is_not_loaded_under_training(tmp_path: Path) -> None:
    executor = executor_of(mode="async")
    with pytest.raises(CheckpointError):
        fleet.load_model(tmp_path)
    fleet.save_persistables(tmp_path / "model")
    executor.train_from_dataset(BATCHES)

    with pytest.raises(UsageError, match=r"model cannot be loaded.* before the first pass"):
        fleet.load_model(tmp_path / "model")


def test_shrink_removes_rows_of_small_weights() -> None:
    executor_of(mode="async").train_from_dataset(BATCHES)

    kept = fleet.shrink(0.0)["embedding"]
    removed = fleet.shrink(1e6)["embedding"]

    assert (kept.rows, removed.rows > 0) == (0, True)


def test_rows_of_a_script_expire_when_it_ends_its_passes() -> None:
    life = {"max_unseen": 1, "tables": {"embedding": {"decay": 0.5}}}
    executor_of(settings={"life": life}).train_from_dataset(BATCHES)

    kept = fleet.shrink()["embedding"]
    said = fleet.shrink(dry_run=True)["embedding"]
    removed = fleet.shrink()["embedding"]

    assert kept.rows == 0
    assert said == removed
    assert removed.rows > 0
    fleet.stop_worker()


def test_life_that_cannot_be_is_refused() -> None:
    fleet.init()
    optimizer = fleet.distributed_optimizer(SGD, fleet.DistributedStrategy(mode="geo"))

    with pytest.raises(UsageError, match=r'max_unseen in minimize.life=.: workers in mode "geo"'):
        optimizer.minimize(small_model(), life={"max_unseen": 1})


def test_batches_that_are_not_finite_are_skipped_if_the_script_says_so() -> None:
    bad = replace(BATCHES[0], dense=np.full_like(BATCHES[0].dense, np.inf))
    executor = executor_of(settings={"non_finite": "skip"})

    executor.train_from_dataset([bad, *BATCHES])

    assert np.isfinite(log_loss(executor))
    fleet.stop_worker()


def test_script_may_train_in_bfloat16() -> None:
    pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")
    figures = []
    for compute in ("float32", "bfloat16"):
        fleet.init()
        executor = executor_of(settings={"compute": compute})
        executor.train_from_dataset(BATCHES)
        figures.append(log_loss(executor))
        fleet.stop_worker()

    assert figures[0] != figures[1] == pytest.approx(figures[0], rel=0.01)


def test_same_seed_is_the_same_model() -> None:
    figures = []
    for seed in (1, 1, 2):
        fleet.init()
        executor = executor_of(settings={"seed": seed})
        executor.train_from_dataset(BATCHES)
        figures.append(log_loss(executor))
        fleet.stop_worker()

    assert figures[0] == figures[1] != figures[2]


def test_predictions_are_had_batch_by_batch() -> None:
    executor = executor_of(mode="async")
    sizes = []

    executor.infer_from_dataset(BATCHES, on_predictions=lambda each: sizes.append(each.size))

    assert sizes == [8] * 6


def test_one_worker_meets_itself() -> None:
    executor = executor_of(mode="async")

    for _ in range(2):
        fleet.barrier_worker()
        assert fleet.util.all_reduce([1, 2], "max").tolist() == [1.0, 2.0]
        metrics = executor.infer_from_dataset(BATCHES)
        assert fleet.metrics.auc(metrics) == metrics.auc()
        executor.train_from_dataset(BATCHES)


def test_rank_0_prints_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    fleet.util.print_on_rank("mine", 0)
    fleet.util.print_on_rank("theirs", 1)

    assert capsys.readouterr().out == "mine\n"


def test_fit_refuses_what_it_cannot_go_through_again() -> None:
    model = small_model()
    executor = fleet.distributed_optimizer(SGD).minimize(model)

    with pytest.raises(UsageError, match="only once, but epoch is 2"):
        executor.fit(model, iter(BATCHES), epoch=2)
    with pytest.raises(UsageError, match="with the same model"):
        executor.fit(small_model(), BATCHES)


@pytest.mark.parametrize("saved_after", [3, 5], ids=["in the middle", "at the end"])
def test_script_goes_on_where_it_was_killed(saved_after: int, tmp_path: Path) -> None:
    generate(tmp_path, rows=80, test_rows=100, files=2, test_files=1, seed=1)
    schema = Schema.load("criteo")

    def begin() -> tuple[fleet.Executor, fleet.QueueDataset]:
        fleet.running.FLEET.abandon()
        fleet.init()
        executor = executor_of(model=CtrDnn(schema, dim=2, hidden=[4]))
        dataset = fleet.QueueDataset(schema, 16, shuffle_files=True, seed=3)
        dataset.set_filelist(sorted((tmp_path / "train").iterdir()))
        return executor, dataset

    def digest() -> str:
        fleet.save_persistables(tmp_path / "end")
        return Checkpoint.open(tmp_path / "end").model_digest

    executor, dataset = begin()
    assert fleet.data_position() is None
    for _ in range(2):
        executor.train_from_dataset(dataset)
    expected = digest()

    executor, dataset = begin()
    for step in executor.steps(dataset.positioned()):
        if step.step == saved_after:
            fleet.save_persistables(tmp_path / "saved")
            break
    executor, dataset = begin()
    fleet.load_model(tmp_path / "saved", resume=True)
    start = fleet.data_position()
    assert start is not None
    assert start.epoch == 1
    executor.train_from_dataset(dataset, start=start)
    executor.train_from_dataset(dataset)

    assert digest() == expected


def test_data_without_an_order_has_nowhere_to_go_on() -> None:
    executor = executor_of()

    with pytest.raises(UsageError, match="has no order"):
        executor.train_from_dataset(BATCHES, start=DataPosition())
