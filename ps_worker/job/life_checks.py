"""Whether what a job says of the life of rows fits the model's tables and the job's mode."""

from ctr_model.models.model import Model
from protos.errors import SpecConflictError
from ps_server.table.feature_life.admission import check_score_source
from ps_server.table.feature_life.eviction import max_rows_of_shard
from ps_server.table.spec_checks import check_table_spec
from ps_worker.job import Job
from ps_worker.job.faults import first_named
from ps_worker.job.sections.life import EXPIRY_RULES, TableLife
from ps_worker.job.specs import table_specs


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
                f'{key}: in mode "geo" workers train replicas, whose rows count nothing and would not hear '
                f'of removed ones: remove it, or take another mode, as "async"',
            )
        try:
            check_table_spec(spec)
            max_rows_of_shard(spec)
            if spec.admission is not None:
                check_score_source(spec, specs.get(spec.admission.table))
        except SpecConflictError as error:
            setting = first_named(TableLife.model_fields, error) or "statistics"
            raise job.error(job.life.key_of_table(spec.name, setting), str(error)) from error


def _first_set(job: Job, table: str) -> str:
    """Returns a key that has this table keep statistics."""
    life = job.life.of_table(table)
    rules = [rule for rule in EXPIRY_RULES if getattr(life, rule)]
    admits = ["admission"] if life.admission.spec() is not None else []
    setting = next(iter([*rules, *admits]), "statistics")
    return job.life.key_of_table(table, setting)
