"""Merging of gradients over batches before an asynchronous worker sends them.

Sans-IO: gradients in, merged gradients out; the time is passed in.

Merging adds sums over examples, so a server applies the average over the merged batches. Sparse and dense
gradients are merged over different numbers of batches: a dense push moves all parameters, a sparse one only
the rows of a batch.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ctr_ps.protos.gradients import DenseGrad, Gradients, SparseGrad, Values, sum_sparse
from ctr_ps.protos.store import Version
from ctr_ps.ps_worker.communicators.push_ids import UNNUMBERED


@dataclass(frozen=True, slots=True)
class MergedPush:
    """One push to send."""

    sparse: dict[str, list[SparseGrad]]  # by table, the gradients of the batches to merge
    dense: dict[str, DenseGrad]  # by block, the merged gradient
    examples: int  # examples that it completes: those of its sparse part, which every batch has
    batches: int  # batches that it completes, in the same sense
    dense_batches: int  # batches of its dense part
    # the oldest version that its sparse part was computed from, or without one its dense part
    pulled: Version
    whole: list[int]  # numbers of the batches whose last part this is

    def gradients(self) -> Gradients:
        """Returns the sum over the batches."""
        sparse = {table: sum_sparse(grads) for table, grads in self.sparse.items()}
        return Gradients(sparse, self.dense)


@dataclass(slots=True)
class _Group:
    """Gradients of batches to send together; those of rows as they are, dense ones summed."""

    since: float
    pulled: Version
    numbers: list[int] = field(default_factory=list)
    examples: int = 0
    sparse: dict[str, list[SparseGrad]] = field(default_factory=dict)
    dense: dict[str, Values] = field(default_factory=dict)
    dense_examples: dict[str, float] = field(default_factory=dict)  # each counted as its weight

    @property
    def batches(self) -> int:
        return len(self.numbers)

    def count(self, numbers: Sequence[int], examples: int, pulled: Version) -> None:
        self.numbers += numbers
        self.examples += examples
        self.pulled = min(self.pulled, pulled)


@dataclass(slots=True)
class GradientMerger:
    """Merges the gradients of one worker. Not thread-safe."""

    # most batches of a sparse push; both limits may change while gradients wait
    sparse_batches: int
    dense_batches: int  # most batches of a dense push
    max_delay_s: float  # longest that a gradient waits to be merged
    _sparse: deque[_Group] = field(default_factory=deque)
    _dense: deque[_Group] = field(default_factory=deque)
    _half_taken: set[int] = field(default_factory=set)
    _spare_sums: dict[str, list[Values]] = field(default_factory=dict)

    @property
    def pending_batches(self) -> int:
        """Batches with untaken sparse gradients."""
        return sum(group.batches for group in self._sparse)

    @property
    def is_full(self) -> bool:
        """Whether a full group waits."""
        return _is_full(self._sparse, self.sparse_batches) or _is_full(
            self._dense, self.dense_batches
        )

    def add(
        self,
        gradients: Gradients,
        examples: int,
        now: float,
        *,
        pulled: Version,
        numbers: Sequence[int] = (UNNUMBERED,),
    ) -> None:
        """Takes the gradients of the batches `numbers` at time `now`, in seconds; copies dense arrays."""
        sparse = _open_group(self._sparse, self.sparse_batches, now, pulled)
        sparse.count(numbers, examples, pulled)
        for table, grad in gradients.sparse.items():
            sparse.sparse.setdefault(table, []).append(grad)
        dense = _open_group(self._dense, self.dense_batches, now, pulled)
        dense.count(numbers, examples, pulled)
        for block, part in gradients.dense.items():
            if block in dense.dense:
                dense.dense[block] += part.values
                dense.dense_examples[block] += part.examples
            else:
                spare = self._spare_sums.get(block)
                total = spare.pop() if spare else np.empty_like(part.values)
                total[:] = part.values
                dense.dense[block] = total
                dense.dense_examples[block] = part.examples

    def due(self) -> float | None:
        """Returns the time at which the oldest gradient must be sent; None: no gradient waits."""
        waits = [groups[0].since for groups in (self._sparse, self._dense) if groups]
        return min(waits) + self.max_delay_s if waits else None

    def take(self, now: float, *, everything: bool = False) -> MergedPush | None:
        """Removes and returns the gradients that are full or due at time `now`; None without any."""
        sparse = self._take_group(self._sparse, self.sparse_batches, now, everything)
        dense = self._take_group(self._dense, self.dense_batches, now, everything)
        taken = [group for group in (sparse, dense) if group is not None]
        if not taken:
            return None
        numbers = [number for group in taken for number in group.numbers]
        sparse, dense = sparse or _Group(now, pulled=0), dense or _Group(now, pulled=0)
        return MergedPush(
            sparse=sparse.sparse,
            dense={
                block: DenseGrad(total, dense.dense_examples[block])
                for block, total in dense.dense.items()
            },
            examples=sparse.examples,
            batches=sparse.batches,
            dense_batches=dense.batches,
            pulled=taken[0].pulled,
            whole=[number for number in numbers if self._is_second_half(number)],
        )

    def _is_second_half(self, number: int) -> bool:
        """Records that the sparse or dense part of a batch is sent; whether the other was sent before."""
        if number in self._half_taken:
            self._half_taken.remove(number)
            return True
        self._half_taken.add(number)
        return False

    def give_back(self, push: MergedPush) -> None:
        """Returns the dense arrays of a push that was sent, for reuse."""
        for block, grad in push.dense.items():
            self._spare_sums.setdefault(block, []).append(grad.values)

    def _take_group(
        self, groups: deque[_Group], batches: int, now: float, everything: bool
    ) -> _Group | None:
        if not groups:
            return None
        is_due = now >= groups[0].since + self.max_delay_s
        return groups.popleft() if everything or is_due or _is_full(groups, batches) else None


def _is_full(groups: deque[_Group], batches: int) -> bool:
    """Whether the first group is closed: others follow it, or it has all its batches."""
    return len(groups) > 1 or (bool(groups) and groups[0].batches >= batches)


def _open_group(groups: deque[_Group], batches: int, now: float, pulled: Version) -> _Group:
    if not groups or groups[-1].batches >= batches:
        groups.append(_Group(since=now, pulled=pulled))
    return groups[-1]
