"""Specs of a model's tables and dense block, which a run declares to its store.

In GEO training workers hold the optimizers and servers add up deltas, so the declared specs differ from
those of the replicas.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import xxhash

from ctr_model.models.model import EmbeddingTable, Model, initial_values_of
from protos.spec import DenseSegment, DenseSpec, InitializerSpec, OptimizerSpec, TableSpec
from protos.store import Parameters
from ps_worker.job.job import Job
from ps_worker.job.model import DENSE_BLOCK

DELTA_OPTIMIZER = OptimizerSpec(name="sum")
"""The optimizer of servers in GEO training: it adds deltas."""


def table_specs(model: Model, job: Job) -> list[TableSpec]:
    """Returns the model's tables, with the optimizers that train their rows and the life that these have.

    A table by whose score another one admits keys comes before that one, and counts.
    """
    return specs_of_tables(model.tables, job)


def specs_of_tables(tables: Sequence[EmbeddingTable], job: Job) -> list[TableSpec]:
    """Returns the specs of tables, as `table_specs` does of a model's."""
    scoring = job.life.scoring_tables(table.name for table in tables)
    specs = [_table_spec(table, job, table.name in scoring) for table in tables]
    return sorted(specs, key=lambda spec: spec.admission is not None and spec.admission.table != "")


def _table_spec(table: EmbeddingTable, job: Job, is_scoring: bool) -> TableSpec:
    life = job.life.of_table(table.name)
    if is_scoring:
        life = life.model_copy(update={"statistics": True})
    return TableSpec(
        name=table.name,
        dim=table.dim,
        initializer=InitializerSpec(kind="uniform", scale=table.init_range),
        optimizer=job.optimizer.of_table(table.name, asked_optimizer(table)),
        seed=job.train.seed,
        statistics=life.statistics_spec(),
        admission=life.admission.spec(),
        expiry=life.expiry_spec(),
    )


def counting_tables(model: Model, job: Job) -> frozenset[str]:
    """Returns the names of the tables whose rows count shows and clicks."""
    return frozenset(spec.name for spec in table_specs(model, job) if spec.statistics is not None)


def asked_optimizer(table: EmbeddingTable) -> OptimizerSpec | None:
    """Returns the optimizer that the model asks for; None: it leaves that to the job."""
    if table.optimizer is None:
        return None
    params = {key: float(value) for key, value in table.optimizer.items() if key != "name"}
    return OptimizerSpec(name=str(table.optimizer["name"]), params=params)


def dense_spec(model: Model, job: Job) -> DenseSpec:
    """Returns the model's dense parameters as one block, with the optimizer that trains them."""
    values = initial_values_of(model)
    return DenseSpec(
        name=DENSE_BLOCK,
        segments=tuple(
            DenseSegment(
                length=math.prod(segment.shape),
                initializer=InitializerSpec(kind="normal", scale=segment.init_std),
                name=segment.name,
                shape=segment.shape,
            )
            for segment in model.segments
        ),
        optimizer=job.optimizer.dense.spec(),
        seed=job.train.seed,
        values_digest=0 if values is None else xxhash.xxh3_64_intdigest(values.tobytes()) or 1,
    )


def declare(store: Parameters, model: Model, job: Job) -> None:
    """Declares the model's tables and its dense block."""
    tables, dense = table_specs(model, job), dense_spec(model, job)
    if job.strategy.mode == "geo":
        tables = [replace(spec, optimizer=DELTA_OPTIMIZER, records_changes=True) for spec in tables]
        dense = replace(dense, optimizer=DELTA_OPTIMIZER)
    for spec in tables:
        store.create_table(spec)
    store.create_dense(dense, initial_values_of(model))
