"""A checkpoint, a delta of it, and a model to predict with; what they hold, as JSON has it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ctr_ps import Predictor, Trainer
from ctr_ps.ctr_model.schema import DenseColumn, Schema
from ctr_ps.protos.gradients import DenseGrad, Gradients, SparseGrad
from ctr_ps.protos.spec import (
    AdmissionSpec,
    DenseSegment,
    DenseSpec,
    ExpirySpec,
    InitializerSpec,
    OptimizerSpec,
    StatisticsSpec,
    TableSpec,
)
from ctr_ps.protos.store import Missing, PushId, SaveRequest
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.store import ParameterStore

KEYS = np.array([1, 2, 3, 2**40, 2**63, 2**64 - 1, 99, 0], np.uint64)


def _table(name: str, optimizer: str, **settings: Any) -> TableSpec:
    return TableSpec(
        name=name,
        dim=settings.pop("dim", 2),
        initializer=InitializerSpec(kind="uniform", scale=0.5),
        optimizer=OptimizerSpec(name=optimizer, params={"learning_rate": 0.25}),
        seed=7,
        num_shards=4,
        **settings,
    )


TABLES = (
    _table("deep", "adagrad"),
    _table("wide", "ftrl", dim=1),
    _table("half", "adam", is_bfloat16=True),
    _table(
        "exact",
        "adagrad_row",
        statistics=StatisticsSpec(decay=0.5),
        admission=AdmissionSpec(policy="count", threshold=3, counter="exact"),
        expiry=ExpirySpec(max_unseen=1),
    ),
    _table(
        "bloom",
        "sgd",
        statistics=StatisticsSpec(decay=0.5),
        admission=AdmissionSpec(
            policy="count", threshold=3, counter="bloom", expected_keys=20, false_positive_rate=0.1
        ),
    ),
)
TOWER = DenseSpec(
    name="tower",
    segments=(
        DenseSegment(length=4, initializer=InitializerSpec(kind="uniform", scale=0.5)),
        DenseSegment(length=2, initializer=InitializerSpec(), values=(0.5, -1.0)),
    ),
    optimizer=OptimizerSpec(name="adam", params={"learning_rate": 0.25}),
    seed=9,
)


GIVEN = replace(TOWER, name="given", values_digest=5)
GIVEN_VALUES = np.arange(GIVEN.length, dtype=np.float32)


def gradient(table: TableSpec, keys: Sequence[int], number: int) -> SparseGrad:
    """Returns the gradient of some of KEYS in push `number`; each was shown once, and clicked at times."""
    of = np.arange(len(keys) * table.dim, dtype=np.float32).reshape(-1, table.dim)
    counts = np.array([[1, (number + key) % 2] for key in keys], np.uint32)
    values = (of - number) / 8
    return SparseGrad(KEYS[list(keys)], values, 4, counts if table.statistics else None)


def gradients(number: int, keys: Sequence[int] = range(6)) -> Gradients:
    """Returns the gradients of push `number` for all tables and the dense block."""
    tower = np.arange(TOWER.length, dtype=np.float32) / 4 - number
    sparse = {table.name: gradient(table, keys, number) for table in TABLES}
    return Gradients(sparse, {"tower": DenseGrad(tower, 4)})


def push_id(number: int) -> PushId:
    return PushId(
        worker=0,
        incarnation=7,
        sequence=number,
        step=number + 1,
        examples=4,
        batches=1,
        pulled=0,
        position=f"at {number}",
    )


def declare(store: ParameterStore) -> None:
    for table in TABLES:
        store.create_table(table)
    store.create_dense(TOWER)
    store.create_dense(GIVEN, GIVEN_VALUES)


def train(store: ParameterStore, numbers: Sequence[int], keys: Sequence[int] = range(6)) -> None:
    for number in numbers:
        store.push_grad(gradients(number, keys), push_id(number)).result()


def save_chain(folder: Path) -> None:
    """Saves a full checkpoint, and a delta with new, changed and removed rows, and with candidates."""
    store = ParameterStore()
    declare(store)
    train(store, range(4))
    store.save(SaveRequest(url=f"{folder}/full", attachments={"note": b"full"}))
    store.shrink()
    train(store, [4, 5], [1, 2, 6])
    store.shrink()
    store.save(
        SaveRequest(url=f"{folder}/delta", attachments={"note": b"delta"}, base=f"{folder}/full")
    )


def content(store: ParameterStore) -> dict[str, Any]:
    """Returns what a store holds, as JSON has it: rows of KEYS, dense blocks, sizes, progress."""
    rows = (
        store.pull_sparse({table.name: KEYS for table in TABLES}, missing=Missing.ZEROS)
        .result()
        .rows
    )
    dense = {block.name: np.empty(block.length, np.float32) for block in (TOWER, GIVEN)}
    store.pull_dense(dense).result()
    status = store.status()
    return {
        "rows": {name: values.tolist() for name, values in rows.items()},
        "dense": {name: values.tolist() for name, values in dense.items()},
        "sizes": {name: [of.rows, of.candidates] for name, of in status.tables.items()},
        "version": status.version,
        "examples": {str(worker): number for worker, number in status.examples.items()},
        "progress": {str(worker): of.step for worker, of in status.progress.items()},
    }


def of_checkpoint(folder: Path, name: str) -> dict[str, Any]:
    """Returns what a checkpoint has, after one more push, too, which admits candidates."""
    store = ParameterStore()
    declare(store)
    store.load(str(folder / name))
    found = {"loaded": content(store), "digest": store.digest()}
    checkpoint = Checkpoint.open(folder / name)
    found["applied"] = {str(of): each.position for of, each in checkpoint.manifest.workers.items()}
    assert checkpoint.attachment("note") == name.encode()
    train(store, [9], [1, 6])
    return {**found, "trained": content(store)}


SCHEMA = Schema(
    dense=(DenseColumn(name="age"),), slots=("user", "item"), split={"item": " "}, label="click"
)
SAMPLES = [
    (float(user % 2), [float(user)], [f"u{user}", f"i{user % 3} i{user % 5}"]) for user in range(12)
]
UNSEEN = (0.0, [3.0], ["u3", "never seen"])


def save_model(folder: Path) -> None:
    """Saves a trained model with all that its predictions need."""
    with Trainer(
        "wide_deep",
        {"dim": 2, "hidden": [4]},
        schema=SCHEMA,
        train={"batch_size": 4},
        optimizer={"sparse": {"name": "adagrad"}, "dense": {"name": "adam"}},
    ) as trainer:
        trainer.train(SAMPLES, epochs=3)
        trainer.save(str(folder / "predicts"))


def of_model(folder: Path) -> list[float]:
    """Returns the predictions of a model."""
    found: list[float] = (
        Predictor.load(folder / "predicts").predict_samples([*SAMPLES, UNSEEN]).tolist()
    )
    return found
