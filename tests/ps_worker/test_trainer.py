"""Training from Python without a job file, and the page that says how."""

import gc
import json
import re
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ctr_ps import Predictor, Trainer
from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.features import key_of
from ctr_ps.ctr_model.models.summed import DeepFm
from ctr_ps.ctr_model.registry import MODELS
from ctr_ps.ctr_model.schema import Schema, SchemaError, criteo_schema
from ctr_ps.protos.errors import CheckpointError, DataError, JobError, UsageError
from ctr_ps.ps_server.optimizers.registry import OPTIMIZERS
from ctr_ps.ps_worker.data.in_memory_dataset import InMemoryDataset
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from ctr_ps.ps_worker.data.text.multislot import MultiSlotReader
from ctr_ps.ps_worker.data.user_code.data_generator import MultiSlotDataGenerator
from ctr_ps.ps_worker.data.user_code.samples import SampleLoader
from ctr_ps.ps_worker.extras.data_tools.generate import generate
from ctr_ps.ps_worker.job.strategy import Mode
from tests.support.address_space import address_space
from tests.support.commands import ROOT, clean_environment, printed_by

PAGE = (ROOT / "docs/python.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

SMALL = {"dim": 4, "hidden": [8]}
SETTINGS: dict[str, Any] = {
    "train": {"batch_size": 64},
    "optimizer": {"sparse": {"name": "adagrad", "learning_rate": 0.05}, "dense": {"name": "adam"}},
}


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    generate(folder / "clicks", rows=4000, test_rows=1000, files=2, test_files=1, seed=1)
    return folder / "clicks"


def trainer_of(model: str = "deepfm", **changes: Any) -> Trainer:
    options = {} if model == "lr" else SMALL
    return Trainer(model, options, **{**SETTINGS, **changes})


def test_the_pages_code_runs_as_it_is_twice(clicks: Path, tmp_path: Path) -> None:
    (code,) = CODE
    assert len(code.strip().splitlines()) < 25
    (tmp_path / "data").symlink_to(clicks.parent)
    cells = "for _ in range(2):\n" + "".join(f"    {line}\n" for line in code.splitlines())

    printed = printed_by(cells, cwd=tmp_path, environment=clean_environment()).splitlines()

    first, second = printed[:3], printed[3:]
    assert first[1:] == second[1:]  # the same figures from the beginning; it took another time
    assert "'auc': 0." in first[1]


def test_a_second_call_trains_on_and_epochs_are_calls(clicks: Path) -> None:
    once, twice = trainer_of(), trainer_of()
    files = f"{clicks}/train/part-*"

    both = once.train(files, epochs=2)
    first, second = twice.train(files), twice.train(files)

    assert (first.examples, second.examples, both.examples) == (4000, 4000, 8000)
    assert second.loss < first.loss
    assert both.loss == pytest.approx((first.loss + second.loss) / 2)
    test = f"{clicks}/test/part-*"
    assert once.evaluate(test) == twice.evaluate(test)


def test_trainers_know_nothing_of_each_other(clicks: Path) -> None:
    files = [f"{clicks}/train/part-*"]
    alone = trainer_of()
    alone.train(files)
    expected = alone.predict(clicks / "test/part-000.tsv")

    one, other = trainer_of(), trainer_of("lr")
    other.train(files)
    one.train(files)

    assert one.predict(clicks / "test/part-000.tsv").tobytes() == expected.tobytes()


@pytest.fixture
def own_threads(monkeypatch: pytest.MonkeyPatch) -> set[threading.Thread]:
    """Collects the threads that a test starts, and those that these start.

    Not all that begin meanwhile: what other tests have left in this process, as a channel that is not closed
    yet, starts threads of its own.
    """
    own = {threading.current_thread()}
    start = threading.Thread.start

    def collect(thread: threading.Thread) -> None:
        if threading.current_thread() in own:
            own.add(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", collect)
    return own


def test_nothing_is_left_of_a_trainer_that_is_deleted(
    clicks: Path, own_threads: set[threading.Thread]
) -> None:
    for mode in get_args(Mode):
        trainer = trainer_of(strategy={"mode": mode})
        trainer.train(f"{clicks}/test/part-*")
        assert trainer.evaluate(f"{clicks}/test/part-*")["auc"] > 0.5

    del trainer
    gc.collect()

    assert {"communicator-exchanger", "communicator-sender"} <= {each.name for each in own_threads}
    assert {each for each in own_threads if each.is_alive()} == {threading.current_thread()}


@pytest.mark.parametrize("mode", get_args(Mode))
def test_tables_are_freed_with_the_trainer(mode: str, clicks: Path, tmp_path: Path) -> None:
    """A cell that is run again makes another: the garbage collector does not see how large they are."""
    gc.collect()
    gc.disable()
    try:
        before = address_space()
        trainer = trainer_of(strategy={"mode": mode})
        trainer.train(f"{clicks}/test/part-*")
        trainer.evaluate(f"{clicks}/test/part-*")
        trainer.save(tmp_path / "model")
        reserved = address_space() - before

        del trainer

        assert address_space() - before < reserved / 100
    finally:
        gc.enable()


@pytest.mark.parametrize("mode", get_args(Mode))
def test_closed_trainer_says_that_it_is_closed(mode: str, clicks: Path, tmp_path: Path) -> None:
    files = f"{clicks}/test/part-*"
    with trainer_of(strategy={"mode": mode}) as trainer:
        trainer.train(files)

    for use in (trainer.train, trainer.evaluate, trainer.predict):
        with pytest.raises(UsageError, match="this Trainer is closed"):
            use(files)
    for use in (trainer.save, trainer.load):
        with pytest.raises(UsageError, match="this Trainer is closed"):
            use(tmp_path / "model")


@pytest.mark.parametrize("mode", ["async", "bounded_staleness"])
def test_log_says_that_nothing_is_sent_in_process(
    mode: str, clicks: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(strategy={"mode": mode, mode: {"wire_dtype": "bfloat16"}})

    trainer.train(f"{clicks}/test/part-*")

    assert f"strategy.{mode}.wire_dtype has no effect" in caplog.text


def test_what_is_saved_predicts_and_trains_on_as_the_trainer(clicks: Path, tmp_path: Path) -> None:
    trainer = trainer_of()
    trainer.train(f"{clicks}/train/part-*")
    trainer.save(tmp_path / "model")
    assert trainer.save(tmp_path / "model") == str(tmp_path / "model")

    again = trainer_of()
    again.load(tmp_path / "model")
    samples = [(None, [float(n)] * 13, [f"v{n}"] * 26) for n in range(5)]
    predicted = trainer.predict(samples)

    assert again.predict(samples).tobytes() == predicted.tobytes()
    served = Predictor.load(tmp_path / "model").predict_samples(samples)
    np.testing.assert_allclose(served, predicted, rtol=1e-6)
    for each in (again, trainer):
        each.train(f"{clicks}/test/part-*")
    assert again.predict(samples).tobytes() == trainer.predict(samples).tobytes()
    with pytest.raises(UsageError, match="training has begun"):
        again.load(tmp_path / "model")


def test_a_model_that_is_made_is_saved_like_one_that_is_named(clicks: Path, tmp_path: Path) -> None:
    trainer = Trainer(DeepFm(criteo_schema(), **SMALL), **SETTINGS)
    trainer.train(f"{clicks}/test/part-*")
    trainer.save(tmp_path / "model")

    again = trainer_of()
    again.load(tmp_path / "model")

    test = f"{clicks}/test/part-*"
    assert again.evaluate(test) == trainer.evaluate(test)


def test_data_may_be_files_samples_batches_or_a_dataset(clicks: Path) -> None:
    files = [clicks / "test/part-000.tsv"]
    dataset = InMemoryDataset(criteo_schema(), 64)
    dataset.set_filelist(files)
    dataset.load_into_memory()
    texts = [line.split("\t") for line in files[0].read_text().splitlines()]
    samples = [
        (int(label), [float(n) if n else None for n in rest[:13]], rest[13:])
        for label, *rest in texts
    ]
    expected = trainer_of().train(files)

    for data in (dataset, list(dataset), samples):
        trained = trainer_of().train(data)
        assert (trained.examples, trained.loss) == (expected.examples, expected.loss)


PRINTED = "tail -n +2 | sed -E 's/(.+),(.)/1 \\1 1 \\2/'"  # lines of CSV as multi-slot text


class WholeNumbers(MultiSlotDataGenerator):
    """Users as keys, from lines of CSV."""

    def generate_sample(self, line):
        def samples():
            user, click = line.strip().split(",")
            if click in "01":
                yield [("user", [int(user)]), ("click", [int(click)])]

        return samples


@pytest.mark.parametrize(
    ("source", "kinds", "same"),
    [
        ("parquet", ["integers"], "7"),
        ("dataset of parquet", ["integers"], "7"),
        ("samples", ["keys"], None),
        ("loader", ["keys"], None),
        ("generator", ["keys", "lists"], None),
        ("command", ["keys", "lists"], None),
        ("reader", ["keys", "lists"], None),
        ("csv", ["text"], ""),
        ("samples of text", ["text"], ""),
        ("samples of both", ["keys", "text"], None),
    ],
)
def test_whole_numbers_to_predict_mean_what_they_meant_in_training(
    source: str, kinds: list[str], same: str | None, tmp_path: Path
) -> None:
    """The same by the trainer and by what it saves: digits, keys, or refused."""
    schema = Schema(dense=(), slots=("user",), label="click")
    users = [7, 8, 9, 7] * 32
    clicks = [int(user == 7) for user in users]
    numbers = [(click, [], [user]) for user, click in zip(users, clicks, strict=True)]
    texts = [(click, [], [str(user)]) for user, click in zip(users, clicks, strict=True)]
    file = (
        tmp_path
        / f"clicks.{'csv' if source in ('csv', 'generator', 'command', 'reader') else 'parquet'}"
    )
    if file.suffix == ".csv":
        file.write_text(
            "\n".join(["user,click", *(f"{u},{c}" for u, c in zip(users, clicks, strict=True))])
        )
    else:
        pq.write_table(pa.table({"user": users, "click": clicks}), file)
    dataset = QueueDataset(schema, 32)
    dataset.set_filelist([file])
    if source == "generator":
        dataset.set_generator(WholeNumbers())
    if source == "command":
        dataset.set_pipe_command(PRINTED, columns=["user", "click"])
    if source == "reader":
        file.write_text("".join(f"1 {u} 1 {c}\n" for u, c in zip(users, clicks, strict=True)))
        dataset = QueueDataset(
            schema, 32, format=partial(MultiSlotReader, columns=["user", "click"])
        )
        dataset.set_filelist([file])
    data = {
        "samples": numbers,
        "loader": SampleLoader(numbers, schema, batch_size=32),
        "samples of text": texts,
        "samples of both": numbers + texts,
        "generator": dataset,
        "command": dataset,
        "reader": dataset,
        "dataset of parquet": dataset,
    }.get(source, str(file))
    trainer = Trainer("lr", schema=schema, **SETTINGS)
    trainer.train(data)
    trainer.save(tmp_path / "model")

    predictor = Predictor.load(tmp_path / "model")

    assert json.loads(predictor.slot_values.to_json()) == {"user": kinds}
    asked = [(None, [], [7]), (None, [], [np.int64(7)])]
    if same == "":
        for predict in (trainer.predict, predictor.predict_samples):
            with pytest.raises(DataError, match="has 7, but the model was trained on text"):
                predict(asked)
        return
    keys = np.uint64([7 if same is None else key_of(1, same)])
    batch = Batch(
        dense=np.empty((1, 0), np.float32), keys=keys, offsets=np.int32([0, 1]), num_slots=1
    )
    expected = predictor.predict(batch)[0]
    unknown = predictor.predict(replace(batch, keys=np.uint64([1])))[0]
    assert expected > unknown + 0.01
    loader = SampleLoader(asked, schema, batch_size=2)
    np.testing.assert_allclose(trainer.predict(asked), expected, rtol=1e-6)
    np.testing.assert_allclose(trainer.predict(loader), expected, rtol=1e-6)
    np.testing.assert_allclose(predictor.predict_samples(asked), expected, rtol=1e-6)
    if kinds[0] == "keys" and "text" not in kinds:
        with pytest.raises(DataError, match="has '7', but the model was trained on keys"):
            predictor.predict_samples([(None, [], ["7"])])


def test_data_that_can_be_gone_through_once_do_not_tell_where_to_start(clicks: Path) -> None:
    files = [clicks / "test/part-000.tsv"]
    dataset = InMemoryDataset(criteo_schema(), 64)
    dataset.set_filelist(files)
    dataset.load_into_memory()

    trained = trainer_of().train(iter(dataset))

    expected = trainer_of(train={**SETTINGS["train"], "base_rate": 0.5}).train(files)
    assert (trained.examples, trained.loss) == (expected.examples, expected.loss)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": "deepfn"}, JobError, "Trainer().*unknown model 'deepfn', did you mean 'deepfm'"),
        ({"options": {"dims": 4}}, JobError, "unknown option of model 'ctr_dnn': 'dims', did"),
        ({"schema": "criteos"}, SchemaError, "no schema 'criteos'"),
        (
            {"checkpoint": {}},
            UsageError,
            "Trainer has no argument .checkpoint.: it has data, train",
        ),
        ({"train": {"batchsize": 4}}, JobError, "Trainer.*train.*batchsize.*batch_size"),
        (
            {"data": {"train": "x"}},
            JobError,
            "data.train is not a setting of a Trainer: give files to",
        ),
        (
            {"data": {"schema": "my.toml"}},
            JobError,
            r"data.schema is not a setting of a Trainer: give it as Trainer\(schema=",
        ),
        ({"options": {"name": "fm"}}, UsageError, "options name the model 'fm', but .* 'ctr_dnn'"),
        ({"optimizer": {"sparse": "adagard"}}, JobError, "adagard"),
    ],
)
def test_what_is_wrong_is_named(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Trainer(**{"model": "ctr_dnn", **arguments})


def test_a_model_brings_its_own_schema() -> None:
    model = DeepFm(criteo_schema(), **SMALL)

    with pytest.raises(UsageError, match="differs from the schema of the model"):
        Trainer(model, schema=Schema.numbered(1, 1))
    with pytest.raises(
        UsageError, match=r"options are \{'dim': 4\}, but an instance of a model already has"
    ):
        Trainer(model, {"dim": 4})


def test_data_that_cannot_be_trained_on_are_refused(clicks: Path, tmp_path: Path) -> None:
    trainer = trainer_of()
    with pytest.raises(DataError, match="no file matches"):
        trainer.train(tmp_path / "nothing-*")
    with pytest.raises(UsageError, match="iterated only once, but epochs is 2"):
        trainer.train(iter([]), epochs=2)
    with pytest.raises(UsageError, match="epochs is 0"):
        trainer.train(f"{clicks}/test/part-*", epochs=0)
    with pytest.raises(DataError, match=r"train\(\): data is empty: \[\]"):
        trainer.train([])
    with pytest.raises(DataError, match=r"train\(\): data has no rows to train on"):
        trainer.train(iter([]))
    with pytest.raises(
        UsageError, match="data is of type ndarray and has a ndarray, expected files"
    ):
        trainer.train(np.zeros((3, 3)))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="data is 5, expected files, a DataFrame"):
        trainer.evaluate(5)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no row has one: use predict"):
        trainer.evaluate([(None, [1.0] * 13, ["a"] * 26)])
    with pytest.raises(CheckpointError):
        trainer.load(tmp_path)
    assert trainer.predict([]).shape == (0,)
    assert trainer.train(f"{clicks}/test/part-*").examples == 1000


@pytest.mark.parametrize("correction", ["logit", "weight"])
def test_rows_that_no_reader_chooses_are_refused_with_a_rate(clicks: Path, correction: str) -> None:
    trainer = trainer_of(data={"negative_rate": 0.5, "negative_correction": correction})
    with pytest.raises(JobError, match=r"data.negative_rate is 0.5, .* train\(\) was given list"):
        trainer.train([(1, [1.0] * 13, ["a"] * 26)])
    assert trainer.train(f"{clicks}/test/part-*").examples < 1000


def test_samples_without_weights_are_refused_where_the_schema_has_some() -> None:
    schema = Schema(dense=(), slots=("item",), label="label", weight="weight")
    trainer, samples = Trainer("lr", schema=schema), [(1, [], ["a"]), (0, [], ["b"])]

    for call in (trainer.train, trainer.evaluate):
        with pytest.raises(
            UsageError, match="names 'weight' as the column of weights, but samples"
        ):
            call(samples)
    assert trainer.predict(samples).shape == (2,)


def test_the_page_lists_all_names() -> None:
    rows = dict(
        re.findall(r"^\| (models|`optimizer\.sparse`|`strategy\.mode`).*?\| (.*) \|$", PAGE, re.M)
    )
    classes = {name: cls.__name__ for name, cls in MODELS.items()}

    assert re.findall(r"`(\w+)` `(\w+)`", rows["models"]) == list(classes.items())
    assert set(re.findall(r"`(\w+)`", rows["`optimizer.sparse`"])) == set(OPTIMIZERS)
    assert set(re.findall(r"`(\w+)`", rows["`strategy.mode`"])) == set(get_args(Mode))
