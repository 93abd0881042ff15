"""Checks of a job against its model, before anything runs: optimizers and the life of rows."""

from ctr_model.models.model import Model
from protos.errors import SpecError
from protos.spec import OptimizerSpec
from ps_server.optimizers.registry import hyper_of, optimizer_of
from ps_server.table.feature_life.admission import check_score_source
from ps_server.table.feature_life.eviction import max_rows_of_shard
from ps_server.table.spec_checks import check_table_spec
from ps_worker.job.faults import first_named
from ps_worker.job.job import Job
from ps_worker.job.sections.life import EXPIRY_RULES, TableLife
from ps_worker.job.specs import DELTA_OPTIMIZER, asked_optimizer, table_specs


def require_optimizers(job: Job, model: Model) -> None:
    """Refuses optimizers that do not exist, or do not fit their use.

    Raises:
        JobError: Names the key of the job.
    """
    tables = {table.name: asked_optimizer(table) for table in model.tables}
    for name in job.optimizer.tables:
        if name not in tables:
            fault = f"model {job.model.name!r} has no table {name!r}, only {', '.join(tables)}"
            raise job.error(f"optimizer.tables.{name}", fault)
    for name, asked in tables.items():
        key = job.optimizer.key_of_table(name, asked)
        _check_optimizer(job, key, job.optimizer.of_table(name, asked))
    _check_optimizer(job, "optimizer.sparse", job.optimizer.sparse.spec())
    dense = job.optimizer.dense.spec()
    _check_optimizer(job, "optimizer.dense", dense)
    if not optimizer_of(dense).is_elementwise:
        raise job.error("optimizer.dense", f"{dense.name!r} is for rows only")


def _check_optimizer(job: Job, key: str, spec: OptimizerSpec) -> None:
    try:
        hyper_of(spec)
        if spec == DELTA_OPTIMIZER:
            raise SpecError("'sum' adds gradients: it is what servers do in GEO training")
        if job.strategy.mode == "geo" and not optimizer_of(spec).is_movable:
            raise SpecError(
                f"{spec.name!r} computes weights from its state alone, so what other workers learnt would "
                f'be lost in mode "geo": take another optimizer, as "adagrad", or another mode'
            )
    except SpecError as error:
        parameter = first_named(spec.params, error)
        place = f"{key}.{parameter}" if parameter else key
        raise job.error(place, str(error)) from error


def require_life(job: Job, model: Model) -> None:
    """Refuses settings of `[life]` that no server would take.

    Raises:
        JobError: Names the key of the job.
    """
    names = [table.name for table in model.tables]
    for name in job.life.tables:
        if name not in names:
            fault = f"model {job.model.name!r} has no table {name!r}, only {', '.join(names)}"
            raise job.error(f"life.tables.{name}", fault)
    specs = {spec.name: spec for spec in table_specs(model, job)}
    for spec in specs.values():
        own_statistics = job.life.of_table(spec.name).statistics_spec()
        if own_statistics is not None and job.strategy.mode == "geo":
            key = _first_set(job, spec.name)
            raise job.error(
                key,
                'in mode "geo" workers train replicas, whose rows count nothing and would not hear '
                'of removed ones: remove it, or take another mode, as "async"',
            )
        try:
            check_table_spec(spec)
            max_rows_of_shard(spec)
            if spec.admission is not None:
                check_score_source(spec, specs.get(spec.admission.table))
        except SpecError as error:
            setting = first_named(TableLife.model_fields, error) or "statistics"
            raise job.error(job.life.key_of_table(spec.name, setting), str(error)) from error


def _first_set(job: Job, table: str) -> str:
    """Returns a key that has this table keep statistics."""
    life = job.life.of_table(table)
    rules = [rule for rule in EXPIRY_RULES if getattr(life, rule)]
    admits = ["admission"] if life.admission.spec() is not None else []
    setting = next(iter([*rules, *admits]), "statistics")
    return job.life.key_of_table(table, setting)
