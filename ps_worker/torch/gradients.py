"""Gradients of rows between backward() and step(), added by key over all lookups.

PyTorch first adds the gradients of a weight that is used several times in a backward(), and then their sum
to the weight's `.grad`; floats are added in the same order here. So a table's gradient is that of a dense
weight to the last bit, unless several backward() calls follow one forward pass without a shared lookup.

    backward of lookups 3, 2, 1 --> one group --.
    backward of lookups 5, 4    --> the next  ---+--> sum of the sums
"""

import logging
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.gradients import Counts, SparseGrad, sum_sparse
from ctr_ps.protos.keys import Keys

logger = logging.getLogger(__name__)

_MANY_BACKWARDS = 20
"""Backward passes without step() or zero_grad() after which a warning is logged."""

_EXAMPLES = 1  # divisor of the gradients at the server: 1, as the user's loss is already a mean


class _TableGradients:
    def __init__(self) -> None:
        self._groups: list[list[SparseGrad]] = []
        self._sources: set[int] = set()  # lookups in the last group
        self._is_closed = True

    @property
    def num_bytes(self) -> int:
        return sum(part.keys.nbytes + part.values.nbytes for each in self._groups for part in each)

    def close_group(self) -> None:
        """Starts the group of another backward()."""
        self._is_closed = True

    def add(self, lookup: int, part: SparseGrad) -> None:
        """Takes the gradient of a lookup, by its number; a repeated number is of another backward()."""
        if self._is_closed or lookup in self._sources:
            self._groups.append([])
            self._sources.clear()
            self._is_closed = False
        self._groups[-1].append(part)
        self._sources.add(lookup)

    def merge(self) -> SparseGrad:
        """Returns the sum, and keeps it instead of its parts."""
        total = sum_sparse([sum_sparse(group) for group in self._groups])
        total = replace(total, examples=_EXAMPLES)
        self._groups = [[total]]
        self.close_group()
        return total


class PendingGradients:
    """Gradients that wait to be pushed. For one thread.

    A lookup without a backward() leaves nothing here. Without step() calls memory is bounded: above the limit
    gradients of equal keys are merged, and a larger size then is an error.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._tables: dict[str, _TableGradients] = {}
        self._num_lookups = 0
        self._num_backwards = 0
        self._is_backward_new = True
        self._counted: list[tuple[list[Counts], Counts]] = []  # by the gradients that wait
        self.num_bytes = 0  # size of the gradients

    def watch(
        self,
        table: str,
        keys: Keys,
        rows: Tensor,
        counts: Counts | None,
        kept: slice | NDArray[np.bool_],
    ) -> None:
        """Collects the gradients of a lookup's rows, a leaf float32[N, D], in backward().

        `keys` are those of the rows that are `kept`, and `counts` theirs, for a table with statistics;
        several backward() count once. Raises UsageError above the limit.
        """
        if self.num_bytes > self._limit_bytes:
            self.merged()
        if self.num_bytes > self._limit_bytes:
            raise UsageError(
                f"{self.num_bytes / 2**20:.0f} MB of gradients wait to be pushed, more than max_pending_mb "
                f"= {self._limit_bytes / 2**20:.0f}: call PushOptimizer.step() or zero_grad() after "
                "backward()"
            )
        for gradients in self._tables.values():
            gradients.close_group()
        self._is_backward_new = True
        self._num_lookups += 1
        number = self._num_lookups
        uncounted = [] if counts is None else [counts]

        def take(leaf: Tensor) -> None:
            grad, leaf.grad = leaf.grad, None
            if grad is not None:
                values = np.ascontiguousarray(grad.detach().cpu().numpy()[kept])
                pending = self._tables.setdefault(table, _TableGradients())
                own = counts if counts is None or uncounted else np.zeros_like(counts)
                if uncounted:
                    self._counted.append((uncounted, uncounted.pop()))
                pending.add(number, SparseGrad(keys, values, _EXAMPLES, own))
                self.num_bytes += keys.nbytes + values.nbytes
                self._count_backward()

        rows.register_post_accumulate_grad_hook(take)

    def _count_backward(self) -> None:
        self._num_backwards += self._is_backward_new
        if self._is_backward_new and self._num_backwards == _MANY_BACKWARDS:
            logger.warning(
                "%d backward passes without PushOptimizer.step() or zero_grad(): their rows are not trained",
                _MANY_BACKWARDS,
            )
        self._is_backward_new = False

    def merged(self) -> Mapping[str, SparseGrad]:
        """Returns the sum over all lookups, by table; writing to its values changes the push."""
        totals = {table: gradients.merge() for table, gradients in self._tables.items()}
        self.num_bytes = sum(each.num_bytes for each in self._tables.values())
        return totals

    def clear(self, *, are_pushed: bool = False) -> None:
        """Drops all gradients; unless they `are_pushed`, another backward() of their lookups counts."""
        for uncounted, counts in () if are_pushed else self._counted:
            uncounted.append(counts)
        self._counted.clear()
        self._tables.clear()
        self._num_backwards = 0
        self.num_bytes = 0
