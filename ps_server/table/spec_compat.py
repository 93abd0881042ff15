"""Compatibility of a declared spec with another worker's, or with a checkpoint's.

dim, shards, optimizer, length    rows and blocks would not fit: an error
names and shapes of tensors       values would become the parameters of other layers: an error
statistics, admission             settings of a job, not of a model: a warning names the data lost
initial values of a tensor        settings of one job's data: another job's are ignored
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ctr_ps.protos.errors import CheckpointError, SpecConflictError
from ctr_ps.protos.spec import DenseSpec, TableSpec
from ctr_ps.ps_server.optimizers.sgd import SUM
from ctr_ps.ps_server.table.sparse_table import SparseTable

logger = logging.getLogger(__name__)


def require_equal_spec(existing: TableSpec | DenseSpec, spec: TableSpec | DenseSpec) -> None:
    """Raises SpecConflictError, with the fields that differ, unless a worker declares the existing spec.

    Initial values do not count: they are of the data of the job that declared the block first.
    """
    existing, spec = _without_values(existing), _without_values(spec)
    if existing != spec:
        different = list(_different(existing, spec))
        if [field for field, _, _ in different] == ["values_digest"]:
            raise SpecConflictError(
                f"{spec.name!r} exists with other initial values: all workers of a job must compute "
                "equal ones, with the same code, library versions, options and seed"
            )
        difference = _layout_difference(existing, spec) or ", ".join(
            f"{field} is {first!r}, not {second!r}" for field, first, second in different
        )
        raise SpecConflictError(
            f"{spec.name!r} exists with another spec: {difference}; all workers of a job must declare "
            "the same spec"
        )


def require_loadable(
    saved: TableSpec | DenseSpec, spec: TableSpec | DenseSpec, checkpoint: str
) -> None:
    """Raises CheckpointError if a table or block of a checkpoint does not fit the declared spec."""
    if misfit := _misfit(saved, spec):
        raise CheckpointError(f"checkpoint {checkpoint} does not fit: {misfit}")


def require_claimable(
    loaded: TableSpec | DenseSpec, spec: TableSpec | DenseSpec, checkpoint: str
) -> None:
    """Raises SpecConflictError if a declared spec does not fit a table or block that was loaded earlier."""
    if misfit := _misfit(loaded, spec):
        raise SpecConflictError(f"the loaded checkpoint {checkpoint} does not fit: {misfit}")


def log_changes(saved: TableSpec, table: SparseTable) -> None:
    """Warns of data that a table loses because its spec differs from the saved one."""
    spec, rows = table.spec, table.status.rows
    if saved.statistics is not None and spec.statistics is None and rows:
        logger.warning(
            "statistics of the checkpoint are dropped, as this job keeps none; to keep them, set "
            "[life] statistics = true (table=%s rows=%d)",
            spec.name,
            rows,
        )
    if saved.statistics is None and spec.statistics is not None and rows:
        logger.warning(
            "statistics start at zero, as the checkpoint has none: leave out delete_threshold for the "
            "first passes, or the first shrink removes all rows not shown since (table=%s rows=%d)",
            spec.name,
            rows,
        )
    counted, counting = saved.admission, spec.admission
    if counted is None or counted.table or counting is None or table.counts_as(saved):
        return
    difference = ", ".join(
        f"admission.{field} was {before!r} and is {now!r}"
        for field, before, now in _different(counted, counting)
    )
    logger.warning(
        "counts of keys without a row start at 0, because %s: table=%s", difference, spec.name
    )


def _without_values(spec: TableSpec | DenseSpec) -> TableSpec | DenseSpec:
    if isinstance(spec, TableSpec):
        return spec
    return replace(spec, segments=tuple(replace(each, values=()) for each in spec.segments))


def _different(first: Any, second: Any) -> Iterator[tuple[str, object, object]]:
    for field in first.__dataclass_fields__:
        values = getattr(first, field), getattr(second, field)
        if values[0] != values[1]:
            yield field, *values


def _misfit(saved: TableSpec | DenseSpec, spec: TableSpec | DenseSpec) -> str:
    """Returns why saved parameters do not fit a spec; empty: they do."""
    has, wants = _shape(saved), _shape(spec)
    fields = [field for field in has.keys() & wants.keys() if has[field] != wants[field]]
    if not fields:
        difference = _layout_difference(saved, spec)
        return difference and (
            f"{spec.name!r} was saved with {difference}; values are saved in the order of the model's "
            "layers: keep the layers, their names and their order"
        )
    of_saved, of_job = (
        ", ".join(f"{field} {shape[field]!r}" for field in sorted(fields)) for shape in (has, wants)
    )
    advice = "declare it as it was saved"
    if SUM.name in (has["optimizer"], wants["optimizer"]) and "optimizer" in fields:
        advice = (
            f'{SUM.name!r} is the optimizer of mode "geo": train in that mode both times, '
            "or neither time"
        )
    return (
        f"{spec.name!r} was saved with {of_saved}, but the job declares {of_job}; {advice}, or load "
        "other parts of the model only, with checkpoint.load and checkpoint.only"
    )


def _layout_difference(first: TableSpec | DenseSpec, second: TableSpec | DenseSpec) -> str:
    if isinstance(first, DenseSpec) and isinstance(second, DenseSpec):
        return first.layout_difference(second)
    return ""


def _shape(spec: TableSpec | DenseSpec) -> dict[str, object]:
    fields = ("dim", "num_shards") if isinstance(spec, TableSpec) else ("length",)
    return {**{name: getattr(spec, name) for name in fields}, "optimizer": spec.optimizer.name}
