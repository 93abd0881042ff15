"""Checks of the inputs of models, because kernels do not check bounds."""

from collections.abc import Mapping, Sequence

from ctr_model.batch import Batch
from ctr_model.lookup import Lookup
from ctr_model.models.model import EmbeddingTable, Workspace
from ctr_model.parameters import Floats, ModelInputError
from ctr_model.schema import Schema


def require_widths(**widths: int | Sequence[int]) -> None:
    """Raises ValueError unless each option is a width of at least 1, or a list of them."""
    for name, width in widths.items():
        values = [width] if isinstance(width, int) else list(width)
        if not values or min(values) < 1:
            raise ValueError(f"{name} is {width!r}, expected widths of at least 1")


def require_range(**ranges: float) -> None:
    """Raises ValueError unless each option is a number of at least 0."""
    for name, value in ranges.items():
        if not value >= 0:
            raise ValueError(f"{name} is {value!r}, expected a number >= 0")


def require_batch(
    schema: Schema,
    tables: Sequence[EmbeddingTable],
    batch: Batch,
    lookups: Mapping[str, Lookup],
    workspace: Workspace,
) -> None:
    """Raises ModelInputError unless batch, lookups and workspace match the model."""
    _require_equal("number of dense columns", batch.dense.shape[1], schema.num_dense)
    _require_equal("number of slots", batch.num_slots, len(schema.slots))
    for table in tables:
        _require_lookup(schema, table, batch, lookups[table.name])
    if batch.size > workspace.max_batch_size:
        raise ModelInputError(
            f"the batch has {batch.size} examples, the workspace holds {workspace.max_batch_size}"
        )


def _require_lookup(schema: Schema, table: EmbeddingTable, batch: Batch, lookup: Lookup) -> None:
    num_slots = table.num_slots(len(schema.slots))
    _require_equal(f"number of slots of table {table.name!r}", lookup.num_slots, num_slots)
    _require_equal("length of offsets", lookup.offsets.size, batch.size * num_slots + 1)
    _require_equal("length of inverse", lookup.inverse.size, int(lookup.offsets[-1]))
    _require_equal(f"width of the rows of table {table.name!r}", lookup.rows.shape[1], table.dim)


def labels_of(batch: Batch) -> Floats:
    """Returns the labels float32[B]; raises ModelInputError if they are missing or too few."""
    if batch.labels is None:
        raise ModelInputError("a gradient needs labels, and this batch has none")
    _require_equal("number of labels", batch.labels.size, batch.size)
    return batch.labels


def require_grads(lookups: Mapping[str, Lookup], sparse_grads: Mapping[str, Floats]) -> None:
    """Raises ModelInputError unless each table's gradient has the shape of its rows."""
    for name, lookup in lookups.items():
        _require_equal(
            f"shape of the gradient of table {name!r}", sparse_grads[name].shape, lookup.rows.shape
        )


def _require_equal(name: str, actual: object, expected: object) -> None:
    """Raises ModelInputError unless `actual` equals `expected`."""
    if actual != expected:
        raise ModelInputError(f"{name} is {actual!r}, the model expects {expected!r}")
