"""What an asynchronous worker has ready to send: gradients merged over batches, and since when they wait.

Sans-IO: gradients in, merged gradients out; the time is passed in.

Merging adds sums over examples, so what a server applies is the average over the merged batches. Sparse and
dense gradients are merged over different numbers of batches: a dense push moves all parameters, a sparse one
only what a batch touched.
"""

from dataclasses import dataclass, field

import numpy as np

from protos.gradients import DenseGrad, Gradients, SparseGrad, Values, sum_sparse
from protos.store import Version


@dataclass(frozen=True, slots=True)
class MergedPush:
    """One push to send.

    Attributes:
        sparse: By table, the gradients of the batches to merge.
        dense: By block, the merged gradient.
        examples: Examples that it completes: those of its sparse part, which every batch has.
        batches: Batches that it completes, in the same sense.
        dense_batches: Batches of its dense part.
        pulled: The oldest version that any of its gradients was computed from.
    """

    sparse: dict[str, list[SparseGrad]]
    dense: dict[str, DenseGrad]
    examples: int
    batches: int
    dense_batches: int
    pulled: Version

    def gradients(self) -> Gradients:
        """Returns what to send: the sum over the batches."""
        sparse = {table: sum_sparse(grads) for table, grads in self.sparse.items()}
        return Gradients(sparse, self.dense)


@dataclass(slots=True)
class _Pending:
    batches: int = 0
    examples: int = 0
    since: float = 0.0
    pulled: Version = 0

    def add(self, examples: int, now: float, pulled: Version, batches: int) -> None:
        if not self.batches:
            self.since, self.pulled = now, pulled
        self.batches += batches
        self.examples += examples
        self.pulled = min(self.pulled, pulled)


@dataclass(slots=True)
class GradientMerger:
    """Merges the gradients of one worker. Not thread-safe.

    Attributes:
        sparse_batches: Batches to merge before a sparse push.
        dense_batches: Batches to merge before a dense push.
        max_delay_s: Longest that a gradient waits, full or not.
    """

    sparse_batches: int
    dense_batches: int
    max_delay_s: float
    _sparse: _Pending = field(default_factory=_Pending)
    _dense: _Pending = field(default_factory=_Pending)
    _sparse_grads: dict[str, list[SparseGrad]] = field(default_factory=dict)
    _dense_sums: dict[str, Values] = field(default_factory=dict)
    _spare_sums: dict[str, Values] = field(default_factory=dict)

    @property
    def pending_batches(self) -> int:
        """Batches whose sparse gradients have not been taken."""
        return self._sparse.batches

    def add(
        self,
        gradients: Gradients,
        examples: int,
        now: float,
        *,
        pulled: Version,
        batches: int = 1,
    ) -> None:
        """Takes a step's gradients at time `now`, in seconds; dense arrays may be reused afterwards."""
        for pending in (self._sparse, self._dense):
            pending.add(examples, now, pulled, batches)
        for table, grad in gradients.sparse.items():
            self._sparse_grads.setdefault(table, []).append(grad)
        for block, dense in gradients.dense.items():
            total = self._dense_sums.get(block)
            if total is None:
                total = self._spare_sums.pop(block, None)
                self._dense_sums[block] = total = (
                    np.empty_like(dense.values) if total is None else total
                )
                total[:] = dense.values
            else:
                total += dense.values

    def due(self) -> float | None:
        """Returns the time at which the oldest gradient must leave; None if there is none."""
        waits = [pending.since for pending in (self._sparse, self._dense) if pending.batches]
        return min(waits) + self.max_delay_s if waits else None

    def take(self, now: float, *, everything: bool = False) -> MergedPush | None:
        """Returns what is full or due at time `now`, and forgets it; None if nothing is."""
        sparse = self._is_ready(self._sparse, self.sparse_batches, now, everything)
        dense = self._is_ready(self._dense, self.dense_batches, now, everything)
        if not sparse and not dense:
            return None
        push = MergedPush(
            sparse=self._sparse_grads if sparse else {},
            dense={
                block: DenseGrad(total, self._dense.examples)
                for block, total in self._dense_sums.items()
                if dense
            },
            examples=self._sparse.examples if sparse else 0,
            batches=self._sparse.batches if sparse else 0,
            dense_batches=self._dense.batches if dense else 0,
            pulled=min(
                pending.pulled
                for pending, is_taken in ((self._sparse, sparse), (self._dense, dense))
                if is_taken
            ),
        )
        if sparse:
            self._sparse, self._sparse_grads = _Pending(), {}
        if dense:
            self._dense, self._dense_sums = _Pending(), {}
        return push

    def give_back(self, push: MergedPush) -> None:
        """Takes the dense arrays of a push that was sent, to sum the next ones in."""
        for block, grad in push.dense.items():
            self._spare_sums[block] = grad.values

    def _is_ready(self, pending: _Pending, batches: int, now: float, everything: bool) -> bool:
        if not pending.batches:
            return False
        is_due = now >= pending.since + self.max_delay_s
        return everything or is_due or pending.batches >= batches
