"""Optimizers by name, and hyper-parameters from a spec."""

import difflib
from typing import Any

import numpy as np

from protos.errors import SpecError
from protos.spec import OptimizerSpec
from ps_server.optimizers.adagrad import ADAGRAD
from ps_server.optimizers.adagrad_row import ADAGRAD_ROW
from ps_server.optimizers.adam import ADAM
from ps_server.optimizers.adam_row import ADAM_ROW
from ps_server.optimizers.ftrl import FTRL
from ps_server.optimizers.momentum import MOMENTUM
from ps_server.optimizers.row_update import Optimizer
from ps_server.optimizers.sgd import SGD
from ps_server.optimizers.sum import SUM

OPTIMIZERS = {
    optimizer.name: optimizer
    for optimizer in (SGD, MOMENTUM, ADAGRAD, ADAGRAD_ROW, ADAM, ADAM_ROW, FTRL, SUM)
}


def _unknown(what: str, name: str, known: list[str]) -> SpecError:
    nearest = difflib.get_close_matches(name, known, 1, cutoff=0.0)[0]
    return SpecError(
        f"unknown {what} {name!r}, did you mean {nearest!r}? known: {', '.join(known)}"
    )


def optimizer_of(spec: OptimizerSpec) -> Optimizer:
    """Returns the optimizer that a spec names.

    Raises:
        SpecError: If no optimizer has that name.
    """
    if spec.name not in OPTIMIZERS:
        raise _unknown("optimizer", spec.name, list(OPTIMIZERS))
    return OPTIMIZERS[spec.name]


def hyper_of(spec: OptimizerSpec) -> Any:
    """Returns the named tuple of hyper-parameters, as float32, with defaults.

    Raises:
        SpecError: If a parameter is unknown, out of range, or required and missing.
    """
    optimizer = optimizer_of(spec)
    for name, value in spec.params.items():
        if not optimizer.ranges:
            raise SpecError(
                f"optimizer {spec.name!r} has no parameters, but is given {name!r}: remove it"
            )
        if name not in optimizer.ranges:
            what = f"parameter of optimizer {spec.name!r}:"
            raise _unknown(what, name, list(optimizer.ranges))
        low, high = optimizer.ranges[name]
        if not low <= value <= high:  # also refuses NaN
            raise SpecError(
                f"{name} of optimizer {spec.name!r} is {value!r}, expected {low:g} to {high:g}"
            )
        if name in optimizer.switches and value not in (0, 1):
            raise SpecError(f"{name} of optimizer {spec.name!r} is {value!r}, expected 0 or 1")
    for name in optimizer.required:
        if name not in spec.params:
            raise SpecError(
                f"optimizer {spec.name!r} needs {name}, which has no default: write "
                f'{{ name = "{spec.name}", {name} = 0.1 }}'
            )
    values = optimizer.hyper(**spec.params)
    return optimizer.hyper(*(np.float32(value) for value in values))


def initial_state(spec: OptimizerSpec, dim: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns the state of a new row of `dim` weights, float32[state_width]."""
    optimizer = optimizer_of(spec)
    state = np.zeros(optimizer.state_width(dim), np.float32)
    slots = optimizer.num_slots * dim
    if optimizer.initial_slot is not None:
        state[:slots] = getattr(hyper_of(spec), optimizer.initial_slot)
    state[slots:] = optimizer.initial_scalars
    return state
