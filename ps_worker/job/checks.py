"""Checks of a job against its model, before anything runs: optimizers, the life of rows, the device.

Faults are JobErrors that name the key of the job.
"""

from collections.abc import Iterable, Iterator

from ctr_ps.ctr_model.models.model import Model, module_class_of
from ctr_ps.protos.errors import SpecError
from ctr_ps.protos.role import Members
from ctr_ps.protos.spec import OptimizerSpec
from ctr_ps.ps_server.optimizers.registry import WEIGHT_DECAY, Tuning, optimizer_of
from ctr_ps.ps_server.table.feature_life.admission import check_score_source
from ctr_ps.ps_server.table.feature_life.removal import max_rows_of_shard
from ctr_ps.ps_server.table.spec_checks import check_table_spec
from ctr_ps.ps_worker.job.job import Job
from ctr_ps.ps_worker.job.life import EXPIRY_RULES, TableLife
from ctr_ps.ps_worker.job.model import (
    DELTA_OPTIMIZER,
    ModelSpecs,
    asked_optimizer,
    num_biases,
    optimizer_of_dense,
    optimizer_of_table,
)
from ctr_ps.ps_worker.job.optimizers import ScheduleSection
from ctr_ps.ps_worker.job.reading import first_named


def require_optimizers(job: Job, model: Model) -> None:
    """Refuses unknown optimizers, and those that do not fit their use."""
    tables = {table.name: asked_optimizer(table, job) for table in model.tables}
    used = {table.name: optimizer_of_table(table, job) for table in model.tables}
    _require_tables(job, model, "optimizer.tables", job.optimizer.tables)
    for name, asked in tables.items():
        key = job.optimizer.key_of_table(name, asked)
        if asked is None or name in job.optimizer.tables:
            _check_optimizer(job, key, used[name])
        elif error := _optimizer_fault(job, asked):
            raise job.error(
                "model.name",
                f"the optimizer that the model requests for its table {name!r} is not possible: {error} "
                f"({key} overrides it)",
            )
        elif error := _optimizer_fault(job, used[name]):  # with what the job adds to it
            setting = first_named(ScheduleSection.model_fields, error)
            added = f"optimizer.schedule.{setting}" if setting else "train.weight_decay"
            raise job.error(added, str(error)) from error
    _check_optimizer(job, "optimizer.sparse", job.optimizer.sparse.spec(job.optimizer.schedule))
    dense = optimizer_of_dense(job)
    _check_optimizer(job, "optimizer.dense", dense)
    if not optimizer_of(dense).is_elementwise:
        raise job.error("optimizer.dense", f"{dense.name!r} is for rows only")
    if job.train.weight_decay and not any(
        WEIGHT_DECAY in spec.params for spec in (*used.values(), dense)
    ):
        raise job.error(
            "train.weight_decay",
            "has no effect, as all optimizers are 'ftrl', which has its own penalties: set l1 or l2 of "
            "ftrl, or remove this",
        )


def _require_tables(job: Job, model: Model, key: str, names: Iterable[str]) -> None:
    tables = [table.name for table in model.tables]
    for name in names:
        if name not in tables:
            fault = f"model {job.model.name!r} has no table {name!r}, only {', '.join(tables)}"
            raise job.error(f"{key}.{name}", fault)


def _check_optimizer(job: Job, key: str, spec: OptimizerSpec) -> None:
    if fault := _optimizer_fault(job, spec):
        raise job.error(_faulty_key(job, key, spec, fault), str(fault)) from fault


def _faulty_key(job: Job, key: str, spec: OptimizerSpec, fault: SpecError) -> str:
    """Returns the key of a wrong setting of the optimizer at a key such as "optimizer.tables.wide"."""
    parameter = first_named(spec.params, fault)
    _, part, *table = key.split(".", 2)
    choice = job.optimizer.tables[table[0]] if table else getattr(job.optimizer, part)
    if parameter == WEIGHT_DECAY and WEIGHT_DECAY not in (choice.model_extra or {}):
        return "train.weight_decay"
    if parameter:
        return f"{key}.{parameter}"
    if setting := first_named(ScheduleSection.model_fields, fault):
        owner = "optimizer" if choice.schedule is None else key
        return f"{owner}.schedule.{setting}"
    return key


def _optimizer_fault(job: Job, spec: OptimizerSpec) -> SpecError | None:
    try:
        Tuning(spec)
        if spec.name == DELTA_OPTIMIZER.name:
            raise SpecError("'sum' adds gradients unchanged: it is for servers in GEO training")
        if job.strategy.mode == "geo" and not optimizer_of(spec).is_movable:
            raise SpecError(
                f'{spec.name!r} computes weights only from its state, so mode "geo" would lose the '
                'updates of other workers: use another optimizer, such as "adagrad", or another mode'
            )
    except SpecError as error:
        return error
    return None


def require_life(model_specs: ModelSpecs) -> None:
    """Refuses settings of rows that no server accepts."""
    job, model = model_specs.job, model_specs.model
    _require_tables(job, model, "life.tables", job.life.tables)
    if not isinstance(job.train.row_dtype, str):
        _require_tables(job, model, "train.row_dtype", job.train.row_dtype)
    specs = {spec.name: spec for spec in model_specs.tables}
    for spec in specs.values():
        own_statistics = job.life.of_table(spec.name).statistics_spec()
        if own_statistics is not None and job.strategy.mode == "geo":
            key = _first_set(job, spec.name)
            raise job.error(
                key,
                'workers in mode "geo" train replicas, which have no statistics and keep removed rows: '
                'remove it, or use another mode, such as "async"',
            )
        try:
            check_table_spec(spec)
            max_rows_of_shard(spec)
            if spec.admission is not None:
                check_score_source(spec, specs.get(spec.admission.table))
        except SpecError as error:
            setting = first_named(TableLife.model_fields, error) or "statistics"
            raise job.error(job.life.key_of_table(spec.name, setting), str(error)) from error


def require_base_rate(job: Job, model: Model) -> None:
    """Refuses rates that the model cannot start at."""
    rates = job.train.base_rate
    if rates == "data":
        return
    expected = num_biases(model)
    if not expected:
        raise job.error(
            "train.base_rate",
            "the model does not declare the biases of its logits: give them initial values in the model, "
            "and remove train.base_rate",
        )
    if len(rates) != expected:
        raise job.error(
            "train.base_rate",
            f"train.base_rate has {len(rates)} rates, but the model has {expected} logits with a bias",
        )


def require_device(specs: ModelSpecs) -> None:
    """Refuses settings that passes on a device cannot honour, and a missing device."""
    job = specs.job
    if job.device.tables == "host":
        return
    for key, is_right, fault in _conditions_of_passes(job, specs.model):
        if not is_right:
            raise job.error(key, f'{fault} (device.tables is "pass")')
    for spec in specs.tables:
        if spec.statistics is not None:
            raise job.error(
                _first_set(job, spec.name),
                'tables on a device keep no statistics: remove it (device.tables is "pass")',
            )


def _conditions_of_passes(job: Job, model: Model) -> Iterator[tuple[str, bool, str]]:
    """Yields keys of a job, whether their values allow passes on a device, and the fault if not."""
    mode, rows = job.strategy.mode, job.device.pass_rows
    yield (
        "model.name",
        module_class_of(model) is not None,
        f"{job.model.name!r} is not a PyTorch module, but only these train on a device "
        "(docs/models.md#pytorch)",
    )
    yield (
        "data.in_memory",
        job.data.in_memory,
        "is false, but a pass needs its rows in memory: set true",
    )
    threads = job.train.thread_num
    yield (
        "train.thread_num",
        threads == 1,
        f"is {threads}, but a device trains in one thread: set 1",
    )
    yield (
        "strategy.mode",
        mode in ("sync", "half_async", "async"),
        f"is {mode!r}, but the only worker has no others to exchange with: set sync, half_async or async, "
        "which have the same effect here",
    )
    loss = job.cluster.on_worker_loss
    yield (
        "cluster.on_worker_loss",
        loss == "fail",
        f"is {loss!r}, but a lost worker loses its tables on the device: set fail, and resume from a "
        "checkpoint",
    )
    yield (
        "device.pass_rows",
        not rows or rows >= job.train.batch_size,
        f"is {rows}, but a batch has {job.train.batch_size} rows: raise it, or lower train.batch_size",
    )
    fault = missing_gpu(job.device.kind, "worker")
    yield "device.kind", not fault, fault


def missing_gpu(device: str, process: str) -> str:
    """Returns what is wrong with a device for a kind of process, as a missing GPU; else ""."""
    if not device.startswith("cuda"):
        return ""
    import torch  # late: an extra, and no other job needs it

    if torch.cuda.is_available():
        return ""
    return (
        f'is "{device}", but PyTorch finds no GPU on this machine: start the {process} on a machine with '
        "a GPU, or set cpu"
    )


def require_one_worker(job: Job, num_workers: int, num_heter: int = 0) -> None:
    """Refuses tables on a device in a job of several processes, which would not see each other's rows."""
    if job.device.tables == "pass" and num_heter:
        raise job.error(
            "device.tables",
            f'is "pass", so the worker trains the dense part itself, but the job has {num_heter} heter '
            'trainers: start none (ps-launch without --heter-num), or set device.tables = "host"',
        )
    if job.device.tables == "pass" and num_workers > 1:
        raise job.error(
            "device.tables",
            f'is "pass", so one worker trains all rows, but the job has {num_workers}: start one '
            '(ps-launch --worker-num 1), or set device.tables = "host"',
        )


def require_deal(job: Job, members: Members) -> None:
    """Refuses workers that come and go where each has files of its own, and heter trainers beside a queue."""
    is_queue = job.data.deal == "queue"
    if members.is_elastic and not is_queue:
        raise job.error(
            "data.deal",
            f'is "fixed", so each worker trains files of its own, but PADDLE_TRAINERS_NUM allows {members}: '
            'set data.deal = "queue", or PADDLE_TRAINERS_NUM to one number',
        )
    if is_queue and members.num_heter:
        raise job.error(
            "data.deal", 'is "queue", which no job with heter trainers can have: set "fixed"'
        )


def _first_set(job: Job, table: str) -> str:
    life = job.life.of_table(table)
    rules = [rule for rule in EXPIRY_RULES if getattr(life, rule)]
    admits = ["admission"] if life.admission.spec() is not None else []
    setting = next(iter([*rules, *admits]), "statistics")
    return job.life.key_of_table(table, setting)
