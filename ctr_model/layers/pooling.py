"""Pooled slots, each with its own pooling and width: the input X of a network, and its embedding tables.

    X = [ dense | pooled embedding of slot 1 | ... | of slot S ]     [B, num_dense + D_1 + ... + D_S]

    sum    v_1 + ... + v_n     for the rows v_1, ..., v_n of the slot's n keys, in order
    mean   (v_1 + ... + v_n) / n
    max    of each column; its gradient goes to the first of the rows that have the maximum

A key that occurs twice counts twice. A slot without keys is zeros. A table has one width, so each width other
than the model's has a table of its own.

Sums of slots of one width have kernels of their own:

    X[b, num_dense + s * D + d] = sum of rows[inverse[i], d] over i from offsets[b * S + s]
                                  to offsets[b * S + s + 1], exclusive

Indices are unsigned in the kernels, because for signed ones numba checks for negative indices, which makes
kernels half as fast.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.jit import kernel
from ctr_ps.ctr_model.parameters import EmbeddingTable, Floats, Lookup, Lookups, SparseGrads
from ctr_ps.ctr_model.schema import Schema


def pool_slots(dense: Floats, lookup: Lookup, out: Floats) -> None:
    """Overwrites `out` float32[B, num_dense + S * D] with X, for `dense` float32[B, num_dense]."""
    first_column = dense.shape[1]
    out[:, :first_column] = dense
    _sum(lookup, first_column, out)


def scatter_slots(grad: Floats, lookup: Lookup, out: Floats) -> None:
    """Overwrites `out` float32[N, D], the gradient of the rows; `grad` is that of `pool_slots`' output."""
    first_column = grad.shape[1] - lookup.num_slots * out.shape[1]
    _scatter_sum(grad, lookup, first_column, out)


@kernel
def _sum(lookup: Lookup, first_column: int, out: Floats) -> None:
    """Overwrites the columns of `out` from `first_column` on with pooled embeddings."""
    rows, offsets, num_slots = lookup.rows, lookup.offsets, lookup.num_slots
    dim = np.uintp(rows.shape[1])
    out[:, first_column:] = np.float32(0.0)
    for b in range(out.shape[0]):
        for s in range(num_slots):
            column = np.uintp(first_column) + np.uintp(s) * dim
            for i in range(offsets[b * num_slots + s], offsets[b * num_slots + s + 1]):
                row = np.uintp(lookup.inverse[i])
                for d in range(dim):
                    out[b, column + d] += rows[row, d]


@kernel
def _scatter_sum(grad: Floats, lookup: Lookup, first_column: int, out: Floats) -> None:
    """Overwrites `out` with the gradient of the rows; `grad` has pooled embeddings from `first_column` on."""
    dim, offsets, num_slots = np.uintp(out.shape[1]), lookup.offsets, lookup.num_slots
    out[:] = np.float32(0.0)
    for b in range(grad.shape[0]):
        for s in range(num_slots):
            column = np.uintp(first_column) + np.uintp(s) * dim
            for i in range(offsets[b * num_slots + s], offsets[b * num_slots + s + 1]):
                row = np.uintp(lookup.inverse[i])
                for d in range(dim):
                    out[row, d] += grad[b, column + d]


Pooling = Literal["sum", "mean", "max"]

SlotOptions = Mapping[str, int | str]
"""Overrides of the model's `dim` and `pooling` for a slot."""

_SUM, _MEAN, _MAX = range(3)
_CODES = {"sum": _SUM, "mean": _MEAN, "max": _MAX}


def require_widths(**widths: int | Sequence[int]) -> None:
    """Raises ValueError unless each option is a width of at least 1, or a list of them."""
    for name, width in widths.items():
        values = [width] if isinstance(width, int) else list(width)
        if not values or min(values) < 1:
            raise ValueError(f"{name} is {width!r}, expected widths of at least 1")


def require_range(init_range: float) -> None:
    """Raises ValueError unless `init_range` is a number of at least 0."""
    if not init_range >= 0:
        raise ValueError(f"init_range is {init_range!r}, expected a number >= 0")


class PooledSlots:
    """The input X of a network: numbers, then all slots of the schema in order, each with its columns."""

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int,
        init_range: float,
        pooling: Pooling = "sum",
        slots: Mapping[str, SlotOptions] = {},
        table: str = "embedding",
    ) -> None:
        """Takes the options that models have in common; see `CtrDnn`.

        `table` names the table of width `dim`, `table`_D that of width D. Raises ValueError for an unknown
        slot, option or pooling, or a width below 1.
        """
        require_widths(dim=dim)
        require_range(init_range)
        _require_pooling("pooling", pooling)
        dims, poolings = [dim] * len(schema.slots), [_CODES[pooling]] * len(schema.slots)
        for name, options in slots.items():
            slot = schema.slot_index(name, where=f"slots.{name}")
            checked = _checked(name, options)
            dims[slot] = checked.get("dim", dim)
            poolings[slot] = checked.get("pooling", poolings[slot])
        ends = schema.num_dense + np.cumsum([0, *dims])
        self.width = int(ends[-1])
        self.columns = [
            slice(int(end) - width, int(end)) for end, width in zip(ends[1:], dims, strict=True)
        ]
        self.tables = []
        # Of each table: its name, and for its S slots the first column in X and the pooling as a code.
        self._parts: list[tuple[str, NDArray[np.int64], NDArray[np.int64]]] = []
        for width in sorted(set(dims), key=lambda width: (width != dim, width)):
            own = [slot for slot, of_slot in enumerate(dims) if of_slot == width]
            name = table if width == dim else f"{table}_{width}"
            self.tables.append(
                EmbeddingTable(
                    name=name,
                    dim=width,
                    init_range=init_range,
                    slots=None if len(own) == len(dims) else tuple(own),
                )
            )
            places = np.array([self.columns[slot].start for slot in own], np.int64)
            codes = np.array([poolings[slot] for slot in own], np.int64)
            self._parts.append((name, places, codes))
        self._is_sum = len(self._parts) == 1 and set(poolings) == {_SUM}

    def forward(self, dense: Floats, lookups: Lookups, out: Floats) -> None:
        """Overwrites `out` float32[B, width] with X, for `dense` float32[B, num_dense]."""
        if self._is_sum:
            pool_slots(dense, lookups[self.tables[0].name], out)
            return
        out[:, : dense.shape[1]] = dense
        for table, columns, poolings in self._parts:
            _pool(lookups[table], columns, poolings, out)

    def backward(self, grad: Floats, lookups: Lookups, sparse_grads: SparseGrads) -> None:
        """Overwrites the gradients of the rows of its tables; `grad` float32[B, width] is that of X."""
        if self._is_sum:
            table = self.tables[0].name
            scatter_slots(grad, lookups[table], sparse_grads[table])
            return
        for table, columns, poolings in self._parts:
            _scatter(grad, lookups[table], columns, poolings, sparse_grads[table])


def _checked(name: str, options: SlotOptions) -> dict[str, int]:
    checked: dict[str, int] = {}
    for option, value in options.items():
        where = f"slots.{name}.{option}"
        if option == "dim":
            if type(value) is not int or value < 1:  # excludes bool
                raise ValueError(f"{where} is {value!r}, expected a width of at least 1")
            checked[option] = value
        elif option == "pooling":
            checked[option] = _CODES[_require_pooling(where, value)]
        else:
            nearest = difflib.get_close_matches(option, ("dim", "pooling"), 1, cutoff=0.0)[0]
            raise ValueError(f"{where} is unknown, did you mean {nearest!r}? known: dim, pooling")
    return checked


def _require_pooling(where: str, value: object) -> str:
    if value not in get_args(Pooling):
        raise ValueError(f"{where} is {value!r}, expected sum, mean or max")
    return str(value)


@kernel
def _is_above(value: np.float32, top: np.float32) -> bool:
    """Whether `value` is larger; nan is above all numbers, so that training notices it."""
    return bool((not value <= top) & (top == top))  # noqa: PLR0124


@kernel
def _pool(
    lookup: Lookup, columns: NDArray[np.int64], poolings: NDArray[np.int64], out: Floats
) -> None:
    rows, inverse, offsets = lookup.rows, lookup.inverse, lookup.offsets
    dim, num_slots = np.uintp(rows.shape[1]), columns.size
    for b in range(out.shape[0]):
        for s in range(num_slots):
            column = np.uintp(columns[s])
            start, stop = offsets[b * num_slots + s], offsets[b * num_slots + s + 1]
            for d in range(dim):
                out[b, column + d] = (
                    rows[np.uintp(inverse[start]), d] if start < stop else np.float32(0.0)
                )
            for i in range(start + 1, stop):
                row = np.uintp(inverse[i])
                if poolings[s] == _MAX:
                    for d in range(dim):
                        value, top = rows[row, d], out[b, column + d]
                        out[b, column + d] = value if _is_above(value, top) else top
                else:
                    for d in range(dim):
                        out[b, column + d] += rows[row, d]
            if poolings[s] == _MEAN and stop - start > 1:
                for d in range(dim):
                    out[b, column + d] /= np.float32(stop - start)


@kernel
def _scatter(
    grad: Floats,
    lookup: Lookup,
    columns: NDArray[np.int64],
    poolings: NDArray[np.int64],
    out: Floats,
) -> None:
    rows, inverse, offsets = lookup.rows, lookup.inverse, lookup.offsets
    dim, num_slots = np.uintp(rows.shape[1]), columns.size
    tops, best = np.empty(dim, np.float32), np.empty(dim, np.int32)  # of a slot, for each column
    out[:] = np.float32(0.0)
    for b in range(grad.shape[0]):
        for s in range(num_slots):
            start, stop = offsets[b * num_slots + s], offsets[b * num_slots + s + 1]
            if start == stop:
                continue
            column = np.uintp(columns[s])
            if poolings[s] == _MAX:
                tops[:] = rows[np.uintp(inverse[start])]
                best[:] = inverse[start]
                for i in range(start + 1, stop):
                    row = np.uintp(inverse[i])
                    for d in range(
                        dim
                    ):  # selects, not branches: half of them would be mispredicted
                        is_above = _is_above(rows[row, d], tops[d])
                        tops[d] = rows[row, d] if is_above else tops[d]
                        best[d] = inverse[i] if is_above else best[d]
                for d in range(dim):
                    out[np.uintp(best[d]), d] += grad[b, column + d]
            else:
                count = np.float32(stop - start if poolings[s] == _MEAN else 1)
                for i in range(start, stop):
                    row = np.uintp(inverse[i])
                    for d in range(dim):
                        out[row, d] += grad[b, column + d] / count
