"""Gradients as they are pushed: sums over examples, with the number of examples.

The server divides a gradient by the number of examples, once, when it is applied. So batches, threads and
workers are merged by adding, and the mean over all their examples is applied: merging never multiplies a
step (it does in systems that add up means). An example counts as its weight: what is applied is the
weighted mean, sum(w_i g_i) / sum(w_i). The occurrences of keys (counts) are added likewise.

Float addition is not associative: `sum_sparse` and `sum_dense` add in the order given, which is worker
order on a server and thread order in a worker. That order is part of the contract of sync training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.errors import GradientError, counted
from ctr_ps.protos.keys import Keys, unique_keys
from ctr_ps.protos.runtime.jit import kernel

Values = NDArray[np.float32]
Counts = NDArray[np.uint32]

MIN_EXAMPLES = 2.0**-100
"""The least number of examples, where they have weights: its reciprocal is a float32."""

MAX_EXAMPLES = 2.0**53  # the most: beyond it a float64 does not count one more

NUM_COUNTS = 2
"""Columns of counts: occurrences, and those that were clicked."""


@dataclass(frozen=True, slots=True)
class SparseGrad:
    """Gradients of rows of one table."""

    keys: Keys  # uint64[N], unique
    values: Values  # float32[N, D], summed over the examples
    examples: float  # sum of the weights of all examples, with and without these keys
    # uint32[N, 2], occurrences and clicked occurrences; None: the table keeps no statistics
    counts: Counts | None = None

    def take(self, positions: NDArray[np.int32]) -> "SparseGrad":
        """Returns a copy of the rows at `positions` int32[n]."""
        counts = None if self.counts is None else self.counts.take(positions, axis=0)
        return SparseGrad(
            self.keys.take(positions), self.values.take(positions, axis=0), self.examples, counts
        )

    def stretch(self, rows: slice) -> "SparseGrad":
        """Returns a view of a slice of rows."""
        counts = None if self.counts is None else self.counts[rows]
        return SparseGrad(self.keys[rows], self.values[rows], self.examples, counts)


@dataclass(frozen=True, slots=True)
class DenseGrad:
    """Gradient float32[P] of a dense block or a piece of one, summed over `examples` (their weights)."""

    values: Values
    examples: float


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of one push, by table and by dense block."""

    sparse: Mapping[str, SparseGrad] = field(default_factory=dict)
    dense: Mapping[str, DenseGrad] = field(default_factory=dict)


@kernel
def _add_rows(inverse: NDArray[np.int32], values: NDArray[Any], out: NDArray[Any]) -> None:
    for i in range(inverse.size):
        row = inverse[i]
        for j in range(values.shape[1]):
            out[row, j] += values[i, j]


def sum_sparse(grads: Sequence[SparseGrad]) -> SparseGrad:
    """Returns the sum, each key's values added in the order of `grads` (one table, one dim).

    A part without keys, which has no dim when decoded from a message, adds only its examples.
    """
    examples = sum(grad.examples for grad in grads)
    parts = [grad for grad in grads if grad.keys.size] or grads[:1]
    if len(parts) == 1:
        return replace(parts[0], examples=examples)
    keys, inverse = unique_keys(np.concatenate([part.keys for part in parts]))
    values = np.zeros((keys.size, parts[0].values.shape[1]), np.float32)
    counts = None if parts[0].counts is None else np.zeros((keys.size, NUM_COUNTS), np.uint32)
    start = 0
    for part in parts:
        stop = start + part.keys.size
        _add_rows(inverse[start:stop], part.values, values)
        if counts is not None and part.counts is not None:
            _add_rows(inverse[start:stop], part.counts, counts)
        start = stop
    return SparseGrad(keys, values, examples, counts)


def sum_dense(grads: Sequence[DenseGrad]) -> DenseGrad:
    """Returns the sum, element by element in the order of `grads`."""
    if len(grads) == 1:
        return grads[0]
    values = grads[0].values + grads[1].values
    for grad in grads[2:]:
        values += grad.values
    return DenseGrad(values, sum(grad.examples for grad in grads))


def sum_gradients(parts: Sequence[Gradients]) -> Gradients:
    """Returns the sum over `parts`, in their order; a name may be missing from some of them."""
    return Gradients(
        sparse={
            name: sum_sparse([part.sparse[name] for part in parts if name in part.sparse])
            for name in dict.fromkeys(name for part in parts for name in part.sparse)
        },
        dense={
            name: sum_dense([part.dense[name] for part in parts if name in part.dense])
            for name in dict.fromkeys(name for part in parts for name in part.dense)
        },
    )


def require_examples(what: str, examples: float) -> None:
    """Raises GradientError if the number of examples makes the mean infinite, or exceeds all counts."""
    if not MIN_EXAMPLES <= examples <= MAX_EXAMPLES:
        raise GradientError(
            f"push to {what} is a sum over {examples:g} examples, expected {MIN_EXAMPLES:g} to "
            f"{MAX_EXAMPLES:g}"
        )


def require_counts(table: str, grad: SparseGrad, *, keeps_statistics: bool) -> None:
    """Raises GradientError unless counts are present where the table keeps statistics, and valid."""
    counts = grad.counts
    if not grad.keys.size:
        return
    if counts is None:
        if keeps_statistics:
            raise GradientError(
                f"push to table {table!r} has no counts, but the table keeps statistics: add the shows and "
                "clicks of each key"
            )
        return
    if not keeps_statistics:
        raise GradientError(
            f"push to table {table!r} has counts, but the table keeps no statistics: declare the table with "
            "statistics, or push no counts"
        )
    expected = (grad.keys.size, NUM_COUNTS)
    if counts.shape != expected or counts.dtype != np.uint32:
        raise GradientError(
            f"push to table {table!r} has counts {counts.dtype}{list(counts.shape)}, expected "
            f"uint32{list(expected)}: shows and clicks of each key"
        )
    if wrong := np.flatnonzero(counts[:, 1] > counts[:, 0])[:1].tolist():
        occurrences, clicks = counts[wrong[0]].tolist()
        raise GradientError(
            f"push to table {table!r} has more clicks than shows of key {int(grad.keys[wrong[0]])}: "
            f"{counted(clicks, 'click')}, {counted(occurrences, 'show')}"
        )


@kernel
def _count_non_finite(bits: NDArray[np.uint32]) -> int:
    # An exponent of all ones is an infinity or a NaN. On integers, the loop is vectorised.
    count = 0
    for i in range(bits.size):
        count += (bits[i] & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
    return count


def faults_of(gradients: Gradients) -> dict[str, str]:
    """Returns the errors of tables and dense blocks with infinite or NaN gradients, by name."""
    faults = {}
    for name, grad in gradients.sparse.items():
        if _count_non_finite(grad.values.reshape(-1).view(np.uint32)):
            row = int(np.flatnonzero(~np.isfinite(grad.values).all(axis=1))[0])
            faults[name] = row_fault(name, int(grad.keys[row]), grad.values[row].tolist())
    for name, dense in gradients.dense.items():
        if _count_non_finite(dense.values.view(np.uint32)):
            position = int(np.flatnonzero(~np.isfinite(dense.values))[0])
            faults[name] = element_fault(name, position, float(dense.values[position]))
    return faults


def row_fault(table: str, key: int, values: Sequence[float]) -> str:
    """Returns the error of a row's gradient, which has an infinite or NaN value."""
    return f"gradient of table {table!r} is not finite: key {key} has {list(values)}"


def element_fault(block: str, position: int, value: float) -> str:
    """Returns the error of an infinite or NaN gradient of a dense block's element."""
    return f"gradient of dense block {block!r} is not finite: element {position} is {value!r}"


def require_finite(gradients: Gradients) -> None:
    """Raises GradientError if a value is infinite or NaN; names the table and a key, or the block."""
    for fault in faults_of(gradients).values():
        raise GradientError(
            f"{fault}; nothing was applied: lower the learning rate, or check the scaling of the input"
        )
