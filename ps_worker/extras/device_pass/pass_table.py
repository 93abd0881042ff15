"""Tables and the dense block of a pass on a device, trained there by formulas of PyTorch.

    gradients of a batch's keys --add--> of its rows --gather, update, scatter--> rows of the pass

For each of ps_server/optimizers, which has the source of its formula, these are the same operations on
float32 in the same order: element-wise ones give the same bits. Sums over a row (`adagrad_row`, `adam_row`)
are in an order of the device's own.

    weights float32[N, D], state float32[N, K], grad float32[N, D]     changed in place, but for grad

Numbers stand in `masked_fill`: `torch.where` copies them to a GPU, which waits for it.

A dense block of P elements is one row: N = 1, D = P.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.spec import DenseSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import BlockState
from ctr_ps.ps_server.optimizers.registry import Tuning, optimizer_of

Update = Callable[[Any, Tensor, Tensor, Tensor, np.float32], None]
"""Applies the mean gradient `grad * scale`, under hyper-parameters, to weights and state in place."""

_ONE = np.float32(1.0)
_TINY = float(np.finfo(np.float32).tiny)
_FADED = 1e-30


def update_of(spec: OptimizerSpec) -> Callable[[Tensor, Tensor, Tensor, float, int], None]:
    """Returns the update of weights and state by a gradient that is summed over a number of examples.

    Its last argument is the step of the schedule.
    """
    tuning = Tuning(spec)
    update = UPDATES.get(spec.name)
    if update is None:
        raise UsageError(
            f'optimizer {spec.name!r} does not run on a device: device.tables = "pass" needs one of '
            f"{', '.join(UPDATES)}"
        )

    def apply(weights: Tensor, state: Tensor, grad: Tensor, examples: float, step: int) -> None:
        hyper, decay = tuning.at(step)
        if decay:
            _flush(weights.sub_(weights * float(decay)))
        update(hyper, weights, state, grad, np.float32(1.0 / examples))

    return apply


def _sgd(hyper: Any, weights: Tensor, state: Tensor, grad: Tensor, scale: np.float32) -> None:
    """See ps_server/optimizers/sgd.py: w -= learning_rate * g."""
    weights -= grad * float(hyper.learning_rate * scale)


def _sum(hyper: Any, weights: Tensor, state: Tensor, grad: Tensor, scale: np.float32) -> None:
    """See ps_server/optimizers/sgd.py: w += g."""
    weights += grad * float(scale)


def _momentum(hyper: Any, weights: Tensor, state: Tensor, grad: Tensor, scale: np.float32) -> None:
    """See ps_server/optimizers/sgd.py: v = momentum * v + g."""
    g = grad * float(scale)
    velocity = _flush(state * float(hyper.momentum) + g, _FADED)
    state.copy_(velocity)
    step = g + velocity * float(hyper.momentum) if hyper.nesterov else velocity
    weights -= step * float(hyper.learning_rate)


def _adagrad(hyper: Any, weights: Tensor, state: Tensor, grad: Tensor, scale: np.float32) -> None:
    """See ps_server/optimizers/adagrad.py: n += g^2."""
    g = grad * float(scale)
    state += g * g
    weights -= g * float(hyper.learning_rate) / (_root(state) + float(hyper.epsilon))


def _adagrad_row(
    hyper: Any, weights: Tensor, state: Tensor, grad: Tensor, scale: np.float32
) -> None:
    """See ps_server/optimizers/adagrad.py: one accumulator for a row."""
    g, g0 = grad * float(scale), float(hyper.initial_g2sum)
    rate = _root(_quotient(g0, state + g0)) * float(hyper.learning_rate)  # [N, 1]
    weights -= rate * g
    state += (g * g).sum(1, keepdim=True) / weights.shape[1]


def _adam(hyper: Any, weights: Tensor, state: Tensor, grad: Tensor, scale: np.float32) -> None:
    """See ps_server/optimizers/adam.py. State: m[D], v[D], beta1^t, beta2^t."""
    dim, g = weights.shape[1], grad * float(scale)
    first, second, powers = state[:, :dim], state[:, dim : 2 * dim], state[:, 2 * dim :]
    rate, correction = _advanced(hyper, powers)
    first.mul_(float(hyper.beta1)).add_(g * float(_ONE - hyper.beta1))
    second.mul_(float(hyper.beta2)).add_(g * float(_ONE - hyper.beta2) * g)
    _flush(first, _FADED)
    _flush(state[:, dim:])
    weights -= rate * first / (_root(second * _quotient(1.0, correction)) + float(hyper.epsilon))


def _adam_row(hyper: Any, weights: Tensor, state: Tensor, grad: Tensor, scale: np.float32) -> None:
    """See ps_server/optimizers/adam.py. State: m[D], v, beta1^t, beta2^t."""
    dim, g = weights.shape[1], grad * float(scale)
    first, second, powers = state[:, :dim], state[:, dim : dim + 1], state[:, dim + 1 :]
    first.mul_(float(hyper.beta1)).add_(g * float(_ONE - hyper.beta1))
    squares = (g * g).sum(1, keepdim=True)
    second.mul_(float(hyper.beta2)).add_(squares * float(_ONE - hyper.beta2) / dim)
    rate, correction = _advanced(hyper, powers)
    _flush(first, _FADED)
    _flush(state[:, dim:])
    weights -= rate / (_root(second / correction) + float(hyper.epsilon)) * first


def _advanced(hyper: Any, powers: Tensor) -> tuple[Tensor, Tensor]:
    """Moves beta1^t and beta2^t, float32[N, 2], on; returns the rate and what corrects v, float32[N, 1]."""
    powers[:, 0] *= float(hyper.beta1)
    powers[:, 1] *= float(hyper.beta2)
    remaining = 1.0 - powers
    return _quotient(float(hyper.learning_rate), remaining[:, :1]), remaining[:, 1:]


def _flush(values: Tensor, limit: float = _TINY) -> Tensor:
    """See `normal` and `faded` of ps_server/optimizers/row_update.py; in place."""
    return values.masked_fill_(values.abs() < limit, 0.0)


def _quotient(number: float, values: Tensor) -> Tensor:
    """Returns number / values, rounded once: PyTorch's own multiplies by the reciprocal."""
    return torch.full_like(values, number) / values


def _root(values: Tensor) -> Tensor:
    """Returns the square root, rounded to the nearest float32, as PyTorch's on the CPU is not always."""
    return values.double().sqrt().float() if values.device.type == "cpu" else values.sqrt()


def _ftrl(hyper: Any, weights: Tensor, state: Tensor, grad: Tensor, scale: np.float32) -> None:
    """See ps_server/optimizers/ftrl.py. State: learning_rate * z [D], n[D]."""
    dim, g = weights.shape[1], grad * float(scale)
    rate_z, n = state[:, :dim], state[:, dim:]
    is_new = (rate_z == 0) & (n == 0)
    rate_z[:] = torch.where(is_new, -weights * float(hyper.beta), rate_z)
    new_n = n + g * g
    # The roots are nearly equal: their difference in float32 would be noise.
    s = (new_n.double().sqrt() - n.double().sqrt()).float()
    rate_z += g * float(hyper.gradient_weight * hyper.learning_rate) - s * weights
    n.copy_(new_n)
    excess = rate_z.abs() - float(hyper.learning_rate * hyper.l1)
    curvature = _root(new_n) + float(hyper.beta) + float(hyper.learning_rate * hyper.l2)
    weights.copy_((-excess.copysign(rate_z) / curvature).masked_fill(excess <= 0, 0.0))


UPDATES: Mapping[str, Update] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adagrad": _adagrad,
    "adagrad_row": _adagrad_row,
    "adam": _adam,
    "adam_row": _adam_row,
    "ftrl": _ftrl,
    "sum": _sum,
}


class PassTable:
    """The R rows of one table on a device. For one thread.

    A method takes the row of each key of a batch, int64[L] on the device: a row may be there several times,
    and is then computed as often, with the same result. So no step waits to learn which rows differ.
    """

    def __init__(self, spec: TableSpec, num_rows: int, device: torch.device) -> None:
        """Allocates the rows, with undefined values; `fill` sets them."""
        self._spec = spec
        self._update = update_of(spec.optimizer)
        self._last = num_rows  # a row beyond the others takes what a skipped batch writes
        state_width = optimizer_of(spec.optimizer).state_width(spec.dim)
        self._weights = torch.empty((num_rows + 1, spec.dim), device=device)
        self._state = torch.empty((num_rows + 1, state_width), device=device)
        self._sums = torch.zeros((num_rows + 1, spec.dim), device=device)  # zeros between two calls
        self._is_trained = torch.zeros(num_rows + 1, dtype=torch.bool, device=device)

    @property
    def size_bytes(self) -> int:
        """Bytes on the device."""
        columns = (self._weights, self._state, self._sums, self._is_trained)
        return sum(each.nbytes for each in columns)

    def fill(self, rows: Tensor, weights: Tensor, state: Tensor) -> None:
        """Overwrites rows int64[M], each there once, with float32[M, D] and [M, K]."""
        self._weights.index_copy_(0, rows, weights)
        self._state.index_copy_(0, rows, state)

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns copies of rows int64[M]: weights float32[M, D], state [M, K]."""
        return self._weights.index_select(0, rows), self._state.index_select(0, rows)

    def weights(self, rows: Tensor) -> Tensor:
        """Returns copies of the weights of rows int64[L], float32[L, D]."""
        return self._weights.index_select(0, rows)

    def summed(self, rows: Tensor, grads: Tensor | None) -> Tensor:
        """Returns for each of rows int64[L] the sum of `grads` float32[L, D] over its row; None is zeros."""
        if grads is None:
            return self._sums.index_select(0, rows)
        self._sums.index_add_(0, rows, grads)
        sums = self._sums.index_select(0, rows)
        self._sums.index_fill_(0, rows, 0.0)
        return sums

    def update(
        self, rows: Tensor, grads: Tensor, examples: float, step: int, is_wanted: Tensor
    ) -> None:
        """Applies the gradients that `summed` returned, of examples that count as their weights.

        `step` is that of the optimizer's schedule. Nothing changes unless `is_wanted`, a bool scalar on the
        device.
        """
        weights, state = self.take(rows)
        self._update(weights, state, grads, examples, step)
        rows = rows.masked_fill(~is_wanted, self._last)
        self.fill(rows, weights, state)
        self._is_trained.index_fill_(0, rows, True)

    def trained(self) -> Tensor:
        """Returns the rows that were trained, int64[M], ascending."""
        return self._is_trained[:-1].nonzero().squeeze(1)

    def fetch(self, rows: Tensor) -> tuple[Values, Values, bool]:
        """Returns weights float32[M, D] and state [M, K] of rows int64[M], and whether all are finite."""
        weights, state = self.take(rows)
        is_finite = weights.isfinite().all() & state.isfinite().all()
        found = [each.to("cpu", non_blocking=True) for each in (weights, state, is_finite)]
        if weights.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return found[0].numpy(), found[1].numpy(), bool(found[2])


def squares_of(rows: Tensor, sums: Tensor) -> Tensor:
    """Returns the sum of the squares of a batch's gradient, each of rows int64[L] once: float64, a scalar.

    `sums` float32[L, D] are those of `PassTable.summed`: equal for equal rows.
    """
    ordered, order = rows.sort()
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return (sums.index_select(0, order).double().square().sum(1) * is_first).sum()


class PassBlock:
    """The dense block on a device, one long row. For one thread."""

    def __init__(self, spec: DenseSpec, state: BlockState, device: torch.device) -> None:
        self._update = update_of(spec.optimizer)
        self._optimizer = spec.optimizer.name
        self._num_slots, self._length = state.element_state.shape
        row: Values = np.concatenate(
            [state.weights, state.element_state.reshape(-1), state.scalars]
        )
        self._row = torch.tensor(row, device=device).unsqueeze(0)  # [1, P + K]
        self.grad = torch.zeros(self._length, device=device)

    @property
    def weights(self) -> Tensor:
        """The parameters, float32[P], a view."""
        return self._row[0, : self._length]

    @property
    def size_bytes(self) -> int:
        """Bytes on the device, with the gradient."""
        return int(self._row.nbytes + self.grad.nbytes)

    def update(self, examples: float, step: int, is_wanted: Tensor) -> None:
        """Applies `grad`, summed over examples that count as their weights, at a step of the schedule.

        Nothing changes unless `is_wanted`, a bool scalar on the device.
        """
        row = self._row.clone()
        weights, state = row[:, : self._length], row[:, self._length :]
        self._update(weights, state, self.grad.unsqueeze(0), examples, step)
        self._row.copy_(torch.where(is_wanted, row, self._row))

    def fetch(self) -> BlockState:
        """Returns the block as it is now."""
        row: Values = self._row[0].cpu().numpy().copy()
        weights, rest = row[: self._length], row[self._length :]
        slots = self._num_slots * self._length
        return BlockState(
            weights=weights,
            element_state=rest[:slots].reshape(self._num_slots, self._length),
            scalars=rest[slots:],
            optimizer=self._optimizer,
        )
