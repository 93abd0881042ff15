"""Models of histories: which slots are histories of which, and checkpoints of DIN when it was in numpy."""

import tarfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from ctr_ps.ctr_model.registry import build_model
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.job import load_job
from ctr_ps.ps_worker.predict.inference import infer
from ctr_ps.ps_worker.run.plan import plan_of
from ctr_ps.ps_worker.run.training_job.train_job import train_job
from tests.reference import models as oracle
from tests.support.model_cases import (
    ModelCase,
    Oracle,
    assert_gradients_agree,
    assert_predictions_agree,
)

# C3 and C4 are histories of C1.
SCHEMA = replace(Schema.numbered(num_dense=2, num_slots=4), shares={"C3": "C1", "C4": "C1"})
DATA = Path(__file__).parent / "data"


def din_case(schema: Schema = SCHEMA, **options: Any) -> ModelCase:
    small = {"dim": 2, "hidden": [6], "attention_hidden": [4, 3], **options}
    return ModelCase(build_model("din", schema, small), schema, seed=1)


@pytest.mark.parametrize("max_length", [1, 2, 50])
def test_several_histories_may_have_one_target(max_length: int) -> None:
    case = din_case(max_length=max_length)
    of_example = partial(oracle.din, histories={2: 0, 3: 0}, max_length=max_length)

    assert_gradients_agree(case, of_example)
    assert_predictions_agree(case, of_example)


def test_histories_may_be_fewer_than_slots_that_share_keys() -> None:
    case = din_case(histories={"C4": "C1"})

    assert_predictions_agree(case, partial(oracle.din, histories={3: 0}, max_length=50))
    assert {segment.name.split(".")[1] for segment in case.model.segments[4:]} == {"C4"}


def test_slots_that_share_keys_may_be_histories_of_each_other() -> None:
    """The target needs no keys of its own, only the same."""
    case = din_case(histories={"C4": "C3"})

    assert_gradients_agree(case, partial(oracle.din, histories={3: 2}, max_length=50))


def test_a_history_and_its_target_may_have_a_dim_and_pooling_of_their_own() -> None:
    slots = {"C1": {"dim": 3, "pooling": "max"}, "C3": {"dim": 3}, "C2": {"pooling": "mean"}}
    case = din_case(slots=slots, histories={"C3": "C1"})
    tables = {table.name: (table.dim, table.slots) for table in case.model.tables}
    assert tables == {"embedding": (2, (1, 3)), "embedding_3": (3, (0, 2))}

    def of_example(dense: Any, slots: Mapping[str, Any], tensors: Any) -> float:
        (largest, history), (mean, other) = slots["embedding_3"], slots["embedding"]
        largest = largest.max(axis=0, initial=-np.inf, keepdims=True)
        largest = np.where(np.isinf(largest), 0.0, largest)
        mean = mean.sum(axis=0, keepdims=True) / max(len(mean), 1)
        rows = {"embedding": [largest, mean, history, other]}
        return oracle.din(dense, rows, tensors, histories={2: 0}, max_length=50)

    checked: Oracle = of_example
    assert_predictions_agree(case, checked)
    assert_gradients_agree(case, checked)


@pytest.mark.parametrize("history", ["items", "type", "a.b", "keys"])
def test_a_history_may_have_any_name(history: str) -> None:
    schema = Schema(dense=(), slots=("item", history), shares={history: "item"})
    case = din_case(schema)

    def of_example(dense: Any, slots: Any, tensors: Mapping[str, Any]) -> float:
        renamed = {name.replace(f".{history}.", ".C2."): each for name, each in tensors.items()}
        return oracle.din(dense, slots, renamed, histories={1: 0}, max_length=50)

    assert_predictions_agree(case, of_example)


def test_a_batch_without_any_history_will_do() -> None:
    case = din_case()
    nothing = np.zeros_like(case.batch.offsets)
    case.batch = replace(case.batch, keys=case.batch.keys[:0], offsets=nothing)
    rows, inverse = np.empty((0, 2), np.float32), np.empty(0, np.int32)
    case.change_lookup("embedding", rows=rows, inverse=inverse, offsets=nothing)

    gradients = case.gradient()

    assert np.isfinite(gradients.dense).all()
    of_attention = sum(np.prod(segment.shape) for segment in case.model.segments[4:])
    assert not gradients.dense[-of_attention:].any()


@pytest.mark.parametrize("name", ["din", "bst"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"histories": {}}, "histories is empty, and no slots of the schema share keys"),
        (
            {"histories": {"C2": "C1"}},
            "histories.C2 is 'C1', but equal values of the two slots have different keys",
        ),
        ({"histories": {"C9": "C1"}}, "no slot 'C9', did you mean"),
        (
            {"histories": {"C3": "C4", "C4": "C1"}},
            "histories.C3 is 'C4', which is itself a history",
        ),
        ({"histories": {"C3": "C3"}}, "histories.C3 is 'C3', which is itself a history"),
        (
            {"slots": {"C3": {"pooling": "max"}}},
            "slots.C3.pooling: 'C3' is a history, pooled by at",
        ),
        ({"slots": {"C1": {"dim": 4}}}, "slots.C3.dim: the history 'C3' and its target 'C1' have"),
        ({"max_length": 0}, "max_length is 0, expected"),
        ({"hidden": []}, "hidden is .*, expected"),
    ],
)
def test_what_is_wrong_is_named(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(name, SCHEMA, options)


def test_a_schema_without_histories_is_refused() -> None:
    with pytest.raises(ValueError, match=r'such as shares = { history = "item" }'):
        build_model("din", Schema.numbered(num_dense=0, num_slots=2), {})


@pytest.fixture
def in_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job, its checkpoint after an epoch, and predictions, all of DIN in numpy."""
    with tarfile.open(DATA / "din_in_numpy.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)


def predictions(path: str) -> Any:
    return np.loadtxt(path)


@pytest.mark.usefixtures("in_numpy")
def test_a_checkpoint_of_din_in_numpy_predicts_the_same() -> None:
    infer("checkpoints", ["test/part-*"], output=Path("found.txt"))

    expected = predictions("expected.txt")
    assert np.ptp(expected) > 0.05
    np.testing.assert_allclose(predictions("found.txt"), expected, rtol=1e-5)


@pytest.mark.usefixtures("in_numpy")
def test_training_goes_on_from_a_checkpoint_of_din_in_numpy() -> None:
    job = load_job(Path("job.toml"), ["train.epochs=5", "checkpoint.resume=true"])

    train_job(plan_of(job), ParameterStore())

    infer("checkpoints", ["test/part-*"], output=Path("found.txt"))
    expected = predictions("expected_resumed.txt")
    assert np.abs(expected - predictions("expected.txt")).max() > 0.1
    np.testing.assert_allclose(predictions("found.txt"), expected, rtol=1e-3)
