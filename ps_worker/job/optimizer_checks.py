"""Whether the optimizers of a job exist, fit their hyper-parameters, and fit the model's tables."""

from ctr_model.models.model import Model
from protos.errors import SpecConflictError
from protos.spec import OptimizerSpec
from ps_server.optimizers.registry import hyper_of, optimizer_of
from ps_worker.communicators.replica import DELTA_OPTIMIZER
from ps_worker.job import Job
from ps_worker.job.faults import first_named
from ps_worker.job.specs import asked_optimizer


def require_optimizers(job: Job, model: Model) -> None:
    """Refuses optimizers that there are not, or not for what they are asked for.

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
        raise job.error("optimizer.dense", f"optimizer.dense: {dense.name!r} is for rows only")


def _check_optimizer(job: Job, key: str, spec: OptimizerSpec) -> None:
    try:
        hyper_of(spec)
        if spec == DELTA_OPTIMIZER:
            raise SpecConflictError("'sum' adds gradients: it is what servers do in GEO training")
        if job.strategy.mode == "geo" and not optimizer_of(spec).is_movable:
            raise SpecConflictError(
                f"{spec.name!r} computes weights from its state alone, so what other workers learnt would "
                f'be lost in mode "geo": take another optimizer, as "adagrad", or another mode'
            )
    except SpecConflictError as error:
        parameter = first_named(spec.params, error)
        place = f"{key}.{parameter}" if parameter else key
        raise job.error(place, f"{key}: {error}") from error
