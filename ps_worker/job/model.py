"""The model of a job, and the specs of its tables and dense block, which a run declares to its store.

In GEO training workers hold the optimizers and servers add up deltas, so the declared specs differ from those
of the replicas.
"""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from ctr_ps.ctr_model.models.model import Model, initial_biases_of, initial_values_of, tasks_of
from ctr_ps.ctr_model.parameters import EmbeddingTable, ModelInputError
from ctr_ps.ctr_model.registry import (
    build_model,
    with_compute,
    with_delay,
    with_dropout,
    with_logit_offset,
)
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import JobError
from ctr_ps.protos.spec import DenseSegment, DenseSpec, InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import Parameters
from ctr_ps.ps_server.optimizers.adagrad import ADAGRAD
from ctr_ps.ps_server.optimizers.registry import OPTIMIZERS, WEIGHT_DECAY
from ctr_ps.ps_worker.job.job import Job
from ctr_ps.ps_worker.job.optimizers import OptimizerChoice
from ctr_ps.ps_worker.job.reading import first_named

DENSE_BLOCK = "dense"
"""The one dense block of a model: all its dense parameters in one flat vector."""


def model_of(job: Job, schema: Schema) -> Model:
    """Returns the model of a job for a schema; raises JobError if the model or an option is wrong."""
    try:
        model = build_model(job.model.name, schema, job.model.options, seed=job.train.seed)
    except ValueError as error:
        raise _error_of_options(job, error) from error
    return corrected(job, model)


def corrected(job: Job, model: Model) -> Model:
    """Returns a model with the job's correction for delayed clicks; raises JobError without the log loss."""
    with job.errors("train.delay", ValueError):
        return with_delay(model, job.train.delay)


def _error_of_options(job: Job, error: ValueError) -> JobError:
    """Returns the error of the option, or the key in it, that a message begins with or names."""
    fault = str(error)
    named = re.match(r"\w+(\.\w+)*", fault)
    if named and named[0].partition(".")[0] in job.model.options:
        return job.error(f"model.{named[0]}", f"model.{fault}")
    return job.error(f"model.{first_named(job.model.options, error) or 'name'}", fault)


def trained_model(job: Job, model: Model, *, worker: int = 0) -> Model:
    """Returns the model that computes a worker's gradients; `model` predicts.

    They differ in the precision, in dropout, and in the logit's offset where negatives are left out. Raises
    JobError if that needs PyTorch, which is not installed, or the model has its own arithmetic or loss, or no
    layers for the job's dropout.
    """
    with job.errors("train.compute", ValueError):
        trained = with_compute(model, job.train.compute)
    # Workers number their batches alike, and so draw by different seeds.
    seed = xxhash.xxh3_64_intdigest(f"{job.train.seed} {worker}".encode())
    with job.errors("train.dropout", ValueError):
        trained = with_dropout(trained, job.train.dropout, seed)
    with job.errors("data.negative_correction", ValueError):
        return with_logit_offset(trained, job.data.logit_offset)


@contextmanager
def errors_of_model(job: Job, name: str | None = None) -> Iterator[None]:
    """Turns a ModelInputError about a model's input or output into a JobError with the model's name.

    `name` is that of a model that the job does not name.
    """
    try:
        yield
    except ModelInputError as error:
        raise job.error("model.name", f"model {name or job.model.name!r}: {error}") from error


def own_model_file(job: Job) -> Path | None:
    """Returns the file of a user's own model; None for a model of this package."""
    path, _, _ = job.model.name.rpartition(":")
    return Path(path) if path.endswith(".py") else None


def names_of(model: Model) -> list[str]:
    """Returns the names of a model's tables and dense block, sorted."""
    return sorted([*(table.name for table in model.tables), DENSE_BLOCK])


DELTA_OPTIMIZER = OptimizerSpec(name="sum")
"""The optimizer of servers in GEO training: it adds deltas."""

INITIAL_ACCUMULATOR = 2.0
"""Where Adagrad's sum of squares starts for rows, by examples of a batch, squared.

A gradient is a mean over a batch, of about 1 / B from an example with a click and 0.03 / B from one without:
so a row's first click makes more than half a step, and the first of thirty other examples hardly moves it
(docs/decisions/0020-safe-defaults.md).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpecs:
    """A model and its specs, as a job trains it."""

    model: Model
    job: Job
    tables: Sequence[TableSpec]  # see `table_specs`
    dense: DenseSpec  # see `dense_spec`; its biases are as its segments say

    @property
    def counting_tables(self) -> frozenset[str]:
        """Names of the tables whose rows count shows and clicks."""
        return frozenset(spec.name for spec in self.tables if spec.statistics is not None)

    @property
    def optimizers(self) -> dict[str, OptimizerSpec]:
        """The optimizers that train the model, by table, in its order, and dense block."""
        tables = {spec.name: spec.optimizer for spec in self.tables}
        own = {table.name: tables[table.name] for table in self.model.tables}
        return {**own, DENSE_BLOCK: self.dense.optimizer}


def specs_of(model: Model, job: Job) -> ModelSpecs:
    """Returns a model with its specs."""
    return ModelSpecs(
        model=model, job=job, tables=table_specs(model, job), dense=dense_spec(model, job)
    )


def table_specs(model: Model, job: Job) -> list[TableSpec]:
    """Returns the specs of a model's tables, with optimizers and life.

    A table whose score admits keys of another one precedes it, and counts.
    """
    return [_with_start(spec, job.train.batch_size) for spec in specs_of_tables(model.tables, job)]


def _with_start(spec: TableSpec, batch_size: int) -> TableSpec:
    """Sets Adagrad's initial accumulator by batch size, unless the job or the model sets it."""
    optimizer = spec.optimizer
    if optimizer.name != ADAGRAD.name or "initial_accumulator" in optimizer.params:
        return spec
    params = {**optimizer.params, "initial_accumulator": INITIAL_ACCUMULATOR / batch_size**2}
    return replace(spec, optimizer=replace(optimizer, params=params))


def specs_of_tables(tables: Sequence[EmbeddingTable], job: Job) -> list[TableSpec]:
    """Returns the specs of tables for pushes of any size, otherwise as `table_specs`."""
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
        optimizer=optimizer_of_table(table, job),
        is_bfloat16=job.train.has_bfloat16_rows(table.name),
        seed=job.train.seed,
        statistics=life.statistics_spec(),
        admission=life.admission.spec(),
        expiry=life.expiry_spec(),
    )


def asked_optimizer(table: EmbeddingTable, job: Job) -> OptimizerSpec | None:
    """Returns the optimizer that the model asks for; None: the job decides.

    A model's choice is a default: in GEO training, one that replicas cannot use gives way to the job's.
    """
    if table.optimizer is None:
        return None
    name = str(table.optimizer["name"])
    if job.strategy.mode == "geo" and name in OPTIMIZERS and not OPTIMIZERS[name].is_movable:
        return None
    params = {key: float(value) for key, value in table.optimizer.items() if key != "name"}
    return OptimizerSpec(name=name, params=params)


def with_rates_of_tables(job: Job, model: Model) -> Job:
    """Adds the learning rates of the model's tables to the job, unless that chooses an optimizer for rows.

    They become settings of the job: workers must agree on them, and they are saved with it.
    """
    if "sparse" in job.optimizer.model_fields_set:
        return job
    sparse = job.optimizer.sparse.name
    rates = {
        table.name: OptimizerChoice.model_validate(
            {"name": sparse, "learning_rate": table.learning_rate}
        )
        for table in model.tables
        if table.learning_rate is not None and table.optimizer is None
    }
    tables = {**rates, **job.optimizer.tables}
    optimizer = job.optimizer.model_copy(update={"tables": tables})
    return job.model_copy(update={"optimizer": optimizer}) if rates else job


def optimizer_of_table(table: EmbeddingTable, job: Job) -> OptimizerSpec:
    """Returns the optimizer of a table's rows, with the job's weight decay."""
    return _decaying(job.optimizer.of_table(table.name, asked_optimizer(table, job)), job)


def optimizer_of_dense(job: Job) -> OptimizerSpec:
    """Returns the optimizer of the dense parameters, with the job's weight decay."""
    return _decaying(job.optimizer.of_dense(), job)


def _decaying(spec: OptimizerSpec, job: Job) -> OptimizerSpec:
    known = OPTIMIZERS.get(spec.name)
    if not job.train.weight_decay or known is None or not known.decays:
        return spec
    params = {WEIGHT_DECAY: job.train.weight_decay, **spec.params}
    return replace(spec, params=params)


def dense_spec(model: Model, job: Job, rates: Sequence[float] = ()) -> DenseSpec:
    """Returns the model's dense parameters as one block, with their optimizer.

    `rates` of the tasks are the initial predictions; empty: the segments determine the biases of its logits.
    """
    values = initial_values_of(model)
    biases = initial_biases_of(model, rates)
    return DenseSpec(
        name=DENSE_BLOCK,
        segments=tuple(
            DenseSegment(
                length=math.prod(segment.shape),
                initializer=InitializerSpec(kind="normal", scale=segment.init_std),
                name=segment.name,
                shape=segment.shape,
                values=tuple(biases.get(segment.name, ())),
            )
            for segment in model.segments
        ),
        optimizer=optimizer_of_dense(job),
        seed=job.train.seed,
        values_digest=0 if values is None else xxhash.xxh3_64_intdigest(values.tobytes()) or 1,
    )


def num_rates(model: Model) -> int:
    """Returns the number of initial rates of a model: one for each task, or that of clicks."""
    return len(tasks_of(model)) or 1


def num_biases(model: Model) -> int:
    """Returns the number of logits whose biases can start at a rate."""
    return len(initial_biases_of(model, (0.5,) * num_rates(model)))


def declare(store: Parameters, specs: ModelSpecs, rates: Sequence[float] = ()) -> None:
    """Declares the model's tables and its dense block; `rates` are as for `dense_spec`."""
    model, job, tables = specs.model, specs.job, specs.tables
    dense = dense_spec(model, job, rates) if rates else specs.dense
    if job.strategy.mode == "geo":
        tables = [replace(spec, optimizer=DELTA_OPTIMIZER, records_changes=True) for spec in tables]
        dense = replace(dense, optimizer=DELTA_OPTIMIZER)
    for spec in tables:
        store.create_table(spec)
    store.create_dense(dense, initial_values_of(model))
