"""Row updates: one row function for each optimizer, one batch loop for all.

An optimizer is a named tuple of hyper-parameters and a function that updates one row. Kernels call
`update_row(hyper, ...)`; the type of `hyper` selects the function when the kernel is compiled, so each
optimizer gets its own machine code of the same loop. A dense block is updated as one long row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload

from ctr_ps.protos.gradients import Values
from ctr_ps.protos.runtime.jit import inlined_kernel

RowFunction = Callable[[Any, Values, Values, Values, np.float32], None]

_ROW_FUNCTIONS: dict[type[NamedTuple], RowFunction] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """An optimizer. The state of a row is first the slots, each as wide as the weights, then the scalars."""

    name: str  # name in jobs and specs
    hyper: type[Any]  # named tuple of hyper-parameters; those without a default are required
    # closed interval of each hyper-parameter that a spec may set
    ranges: dict[str, tuple[float, float]]
    scheduled: str = "learning_rate"  # hyper-parameter that a schedule multiplies; empty: none
    decays: bool = True  # whether it takes a `weight_decay`, applied before each update
    switches: frozenset[str] = frozenset()  # hyper-parameters that are 0 or 1
    num_slots: int  # states of each weight
    initial_slot: str | None = None  # hyper-parameter with the slots' initial value; None: 0
    initial_scalars: tuple[float, ...] = ()  # initial values of the states of a whole row
    # whether an update keeps an external change of weights, as by merging replicas. False if it
    # computes weights from the state alone
    is_movable: bool = True
    # whether each weight is updated by its own gradient and state alone. Required for dense blocks,
    # whose values must not depend on the number of servers
    is_elementwise: bool = True

    def state_width(self, dim: int) -> int:
        """Returns the columns of state of a row with `dim` weights."""
        return self.num_slots * dim + len(self.initial_scalars)

    @property
    def required(self) -> tuple[str, ...]:
        """Hyper-parameters without a default."""
        return tuple(name for name in self.ranges if name not in self.hyper._field_defaults)


def row_function(hyper: type[Any]) -> Callable[[RowFunction], RowFunction]:
    """Registers the function that updates one row, for hyper-parameters of type `hyper`."""

    def register(function: RowFunction) -> RowFunction:
        _ROW_FUNCTIONS[hyper] = function
        return function

    return register


_TINY = np.finfo(np.float32).tiny
_FADED = np.float32(1e-30)


@inlined_kernel
def normal(value: np.float32) -> np.float32:
    """Returns the value, or zero where it is subnormal.

    What is multiplied by .9 in each step ends there, and stays: the product with the smallest number is
    rounded to that number. Processors take a hundred times as long for it.
    """
    return np.float32(0.0) if abs(value) < _TINY else value


@inlined_kernel
def faded(value: np.float32) -> np.float32:
    """Returns a first moment, or zero below 1e-30: soon its product with a rate would be subnormal."""
    return np.float32(0.0) if abs(value) < _FADED else value


@inlined_kernel
def decay_row(weights: Values, decay: np.float32) -> None:
    """Removes the share `decay` of the weights of a row, float32[D], in place.

    Decoupled weight decay: Loshchilov, Hutter, "Decoupled weight decay regularization", ICLR 2019.
    """
    if decay != np.float32(0.0):
        for j in range(weights.size):
            weights[j] = normal(weights[j] - decay * weights[j])


def update_row(hyper: Any, weights: Values, state: Values, grad: Values, scale: np.float32) -> None:
    """Updates one row in place, weights float32[D] and state float32[state_width(D)].

    `grad` float32[D] is a sum over examples, and `scale` one over their number. `hyper` is float32.
    """
    _ROW_FUNCTIONS[type(hyper)](hyper, weights, state, grad, scale)


# Not strict: numba would compare annotations too.
@overload(update_row, strict=False)
def _select_row_function(
    hyper: Any, weights: Any, state: Any, grad: Any, scale: Any
) -> RowFunction:
    return _ROW_FUNCTIONS[hyper.instance_class]
