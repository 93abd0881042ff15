"""Dense table: a server's piece of a dense block, updated as one long row."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ctr_ps.protos.errors import CheckpointError, GradientError
from ctr_ps.protos.gradients import DenseGrad, Values, require_examples
from ctr_ps.protos.placement import ONE_SERVER, ShardMap
from ctr_ps.protos.runtime.jit import kernel, read_only
from ctr_ps.protos.spec import DenseSegment, DenseSpec
from ctr_ps.protos.store import BlockState
from ctr_ps.ps_server.optimizers.registry import Tuning, initial_state, optimizer_of
from ctr_ps.ps_server.optimizers.row_update import decay_row, update_row
from ctr_ps.ps_server.table.contents import DensePiece
from ctr_ps.ps_server.table.rows.initializers import build_initializer, initialize_elements
from ctr_ps.ps_server.table.spec_checks import check_dense_spec


@kernel
def _apply(
    hyper: Any,
    decay: np.float32,
    weights: Values,
    state: Values,
    grad: Values,
    scale: np.float32,
) -> None:
    decay_row(weights, decay)
    update_row(hyper, weights, state, grad, scale)


class DenseTable:
    """One server's piece of a dense block. Thread-safe.

    `given` float32[p] are the initial values of a spec with a digest of them; without these the piece has
    zeros, to be overwritten before a read. Raises SpecError if the spec is invalid.
    """

    def __init__(
        self,
        spec: DenseSpec,
        given: Values | None = None,
        *,
        server_index: int = 0,
        shard_map: ShardMap = ONE_SERVER,
    ) -> None:
        self._lock = threading.Lock()
        self.declare(spec, given)
        self.piece = shard_map.piece_of(server_index, spec.length)
        self._weights = np.zeros(self.piece.stop - self.piece.start, np.float32)
        self._state = initial_state(spec.optimizer, self._weights.size)
        if given is not None:
            self._weights[:] = given
        position = 0
        for segment in spec.segments:
            if segment.values or not spec.values_digest:
                self._initialize(position, segment)
            position += segment.length

    def declare(self, spec: DenseSpec, given: Values | None = None) -> None:
        """Changes the spec but keeps the values, as when a job declares a loaded block; raises SpecError."""
        check_dense_spec(spec)
        self._tuning = Tuning(spec.optimizer)
        self.spec = spec
        self.given = None if given is None else read_only(given.copy())

    @property
    def length(self) -> int:
        """Elements of this piece."""
        return self._weights.size

    @property
    def state_shapes(self) -> tuple[tuple[int, int], tuple[int]]:
        """Shapes of `DensePiece.element_state` and `DensePiece.scalars`."""
        slots = optimizer_of(self.spec.optimizer).num_slots
        return (slots, self.length), (self._state.size - slots * self.length,)

    def check(self, grad: DenseGrad) -> None:
        """Raises GradientError if `push` cannot apply this gradient."""
        if grad.values.shape != self._weights.shape:
            raise GradientError(
                f"push to dense block {self.spec.name!r} has {grad.values.size} values, expected "
                f"{self.length}: elements {self.piece.start} to {self.piece.stop} of the block"
            )
        if grad.values.dtype != np.float32:
            raise GradientError(
                f"push to dense block {self.spec.name!r} has values of {grad.values.dtype}, "
                f"expected float32"
            )
        require_examples(f"dense block {self.spec.name!r}", grad.examples)

    def pull(self, out: Values) -> None:
        """Copies the weights to `out` float32[p]."""
        with self._lock:
            out[:] = self._weights

    @contextmanager
    def lend(self) -> Iterator[Values]:
        """Lends the weights without a copy, for reading; pushes wait until the context ends."""
        with self._lock:
            yield self._weights

    def push(self, grad: DenseGrad, *, step: int = 0, staleness: int = 0) -> None:
        """Applies the mean of a gradient that `check` accepted, at `step` of the optimizer's schedule."""
        values, scale = read_only(grad.values), np.float32(1.0 / grad.examples)
        hyper, decay = self._tuning.at(step, staleness)
        with self._lock:
            _apply(hyper, decay, self._weights, self._state, values, scale)

    def add(self, values: Values) -> None:
        """Adds float32[p] to the weights; keeps the optimizer state."""
        with self._lock:
            self._weights += values

    def export(self, start: int = 0, stop: int | None = None) -> DensePiece:
        """Returns a copy of weights and optimizer state of the elements from `start` to `stop`, exclusive."""
        slots, where = optimizer_of(self.spec.optimizer).num_slots, slice(start, stop)
        with self._lock:
            element_state = self._state[: slots * self.length].reshape(slots, self.length)
            return DensePiece(
                start=self.piece.start + start,
                weights=self._weights[where].copy(),
                element_state=element_state[:, where].copy(),
                scalars=self._state[slots * self.length :].copy(),
            )

    def restore(self, piece: DensePiece | BlockState) -> None:
        """Overwrites weights and optimizer state; raises CheckpointError before that for other shapes."""
        found = (piece.weights.shape, piece.element_state.shape, piece.scalars.shape)
        expected = ((self.length,), *self.state_shapes)
        if found != expected:
            raise CheckpointError(
                f"saved dense block {self.spec.name!r} has weights, states and scalars of shapes {found}, "
                f"expected {expected}: it has another optimizer, or was altered"
            )
        with self._lock:
            self._weights[:] = piece.weights
            self._state[:] = np.concatenate([piece.element_state.reshape(-1), piece.scalars])

    def _initialize(self, start: int, segment: DenseSegment) -> None:
        first = max(start, self.piece.start)
        last = min(start + segment.length, self.piece.stop)
        if first >= last:
            return
        out = self._weights[first - self.piece.start : last - self.piece.start]
        if segment.values:
            out[:] = segment.values[first - start : last - start]
            return
        initializer = build_initializer(segment.initializer, self.spec.seed, self.spec.name)
        initialize_elements(initializer, first, out)
