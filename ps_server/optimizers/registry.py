"""Optimizers by name, and the hyper-parameters of a spec at each step of its schedule.

A schedule is the factor of a learning rate:

    s                        batches of all workers that were applied before
    w                        warmup_steps
    p = (s - w) / (total_steps - w), at most 1

    (s + 1) / w                                            s < w
    1                                                      constant
    end_factor + (1 - end_factor) * (1 - p)                linear
    end_factor + (1 - end_factor) * (1 + cos(pi * p)) / 2  cosine
    gamma ^ floor((s - w) / step_size)                     step

Warm-up: Goyal et al., "Accurate, large minibatch SGD", 2017. Cosine: Loshchilov, Hutter, "SGDR: stochastic
gradient descent with warm restarts", ICLR 2017, without restarts.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from ctr_ps.protos.errors import SpecError, did_you_mean
from ctr_ps.protos.spec import OptimizerSpec, ScheduleSpec
from ctr_ps.ps_server.optimizers.adagrad import ADAGRAD, ADAGRAD_ROW
from ctr_ps.ps_server.optimizers.adam import ADAM, ADAM_ROW
from ctr_ps.ps_server.optimizers.ftrl import FTRL
from ctr_ps.ps_server.optimizers.row_update import Optimizer
from ctr_ps.ps_server.optimizers.sgd import MOMENTUM, SGD, SUM

OPTIMIZERS = {
    optimizer.name: optimizer
    for optimizer in (SGD, MOMENTUM, ADAGRAD, ADAGRAD_ROW, ADAM, ADAM_ROW, FTRL, SUM)
}

MAX_STALENESS = 15
"""Staleness up to which an optimizer makes a difference: a worker that stood still for hours is no older."""

WEIGHT_DECAY = "weight_decay"
"""Parameter of a spec that optimizers with `decays` have in common."""

SETTINGS: dict[str, tuple[str, ...]] = {
    "constant": (),
    "linear": ("total_steps", "end_factor"),
    "cosine": ("total_steps", "end_factor"),
    "step": ("step_size", "gamma"),
}
"""The settings that each kind of schedule has a use for, besides `warmup_steps`."""


def _unknown(what: str, name: str, known: list[str]) -> SpecError:
    hint = did_you_mean(name, known, likeness=0)
    return SpecError(f"unknown {what} {name!r}{hint} known: {', '.join(known)}")


def optimizer_of(spec: OptimizerSpec) -> Optimizer:
    """Returns the optimizer of a spec; raises SpecError if there is none of that name."""
    if spec.name not in OPTIMIZERS:
        raise _unknown("optimizer", spec.name, list(OPTIMIZERS))
    return OPTIMIZERS[spec.name]


def hyper_of(spec: OptimizerSpec) -> Any:
    """Returns the named tuple of hyper-parameters, as float32, with defaults and without a schedule.

    Raises SpecError if a parameter is unknown, out of range, or required and missing.
    """
    optimizer = optimizer_of(spec)
    own = {name: value for name, value in spec.params.items() if name != WEIGHT_DECAY}
    for name, value in own.items():
        if not optimizer.ranges:
            raise SpecError(
                f"optimizer {spec.name!r} has no parameters, but is given {name!r}: remove it"
            )
        if name not in optimizer.ranges:
            what = f"parameter of optimizer {spec.name!r}:"
            common = [WEIGHT_DECAY] if optimizer.decays else []
            raise _unknown(what, name, [*optimizer.ranges, *common])
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
                f"optimizer {spec.name!r} needs {name}, which has no default: for example {{ name = "
                f'"{spec.name}", {name} = 0.1 }}'
            )
    values = optimizer.hyper(**own)
    return optimizer.hyper(*(np.float32(value) for value in values))


class AtStep(NamedTuple):
    """An update's hyper-parameters, whose type selects the row function, and its weight decay."""

    hyper: Any
    decay: np.float32  # share of the weights that is removed before the update


class Tuning:
    """Hyper-parameters of a spec by step and staleness. Immutable. Raises SpecError if they are invalid."""

    def __init__(self, spec: OptimizerSpec) -> None:
        self._hyper = hyper_of(spec)
        self._scheduled = optimizer_of(spec).scheduled
        self._schedule = spec.schedule
        self._rate = rate = float(getattr(self._hyper, "learning_rate", 0.0))
        decay = spec.params.get(WEIGHT_DECAY, 0.0)
        if decay and not optimizer_of(spec).decays:
            own = ": use its own penalties, l1 and l2" if spec.name == FTRL.name else ""
            raise SpecError(f"optimizer {spec.name!r} has no {WEIGHT_DECAY}{own}")
        if not (decay >= 0 and decay * rate <= 1):  # also refuses NaN
            raise SpecError(
                f"{WEIGHT_DECAY} of optimizer {spec.name!r} is {decay!r}, expected at least 0, and at most "
                f"1 when multiplied by the learning rate {rate:g}"
            )
        self._decay = decay * rate
        if spec.schedule is not None:
            if not self._scheduled:
                raise SpecError(
                    f"optimizer {spec.name!r} has no learning rate, so it takes no schedule"
                )
            require_schedule(spec.schedule)
        hypers = [self._hyper]
        if hasattr(self._hyper, "staleness"):
            hypers = [
                self._hyper._replace(staleness=np.float32(s)) for s in range(MAX_STALENESS + 1)
            ]
        # By staleness.
        self._unscheduled = [AtStep(hyper, np.float32(self._decay)) for hyper in hypers]

    def at(self, step: int, staleness: int = 0) -> AtStep:
        """Returns the parameters of an update after `step` batches of all workers."""
        found = self._unscheduled[min(staleness, len(self._unscheduled) - 1)]
        if self._schedule is None:
            return found
        factor = factor_at(self._schedule, step)
        rate = np.float32(float(getattr(self._hyper, self._scheduled)) * factor)
        return AtStep(
            found.hyper._replace(**{self._scheduled: rate}), np.float32(self._decay * factor)
        )

    def rate_at(self, step: int) -> float:
        """Returns the learning rate after `step` batches; 0 for an optimizer without one."""
        if self._schedule is None:
            return self._rate
        return self._rate * factor_at(self._schedule, step)


def initial_state(spec: OptimizerSpec, dim: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns the state of a new row of `dim` weights, float32[state_width]."""
    optimizer = optimizer_of(spec)
    state = np.zeros(optimizer.state_width(dim), np.float32)
    slots = optimizer.num_slots * dim
    if optimizer.initial_slot is not None:
        state[:slots] = getattr(hyper_of(spec), optimizer.initial_slot)
    state[slots:] = optimizer.initial_scalars
    return state


def require_schedule(spec: ScheduleSpec) -> None:
    """Raises SpecError if a schedule is impossible; names the wrong setting."""
    if spec.kind not in SETTINGS:
        raise SpecError(f"kind of schedule is {spec.kind!r}, expected one of {', '.join(SETTINGS)}")
    named = f"of schedule {spec.kind!r} is"
    if spec.warmup_steps < 0:
        raise SpecError(f"warmup_steps {named} {spec.warmup_steps}, expected at least 0")
    uses = SETTINGS[spec.kind]
    if "total_steps" in uses and spec.total_steps <= spec.warmup_steps:
        raise SpecError(
            f"total_steps {named} {spec.total_steps}, expected more than warmup_steps = "
            f"{spec.warmup_steps}: it is the number of batches of all workers in all epochs"
        )
    if "end_factor" in uses and not 0 <= spec.end_factor <= 1:
        raise SpecError(f"end_factor {named} {spec.end_factor!r}, expected 0 to 1")
    if "step_size" in uses and spec.step_size < 1:
        raise SpecError(f"step_size {named} {spec.step_size}, expected at least 1 step")
    if "gamma" in uses and not 0 < spec.gamma <= 1:
        raise SpecError(f"gamma {named} {spec.gamma!r}, expected above 0, up to 1")


def factor_at(spec: ScheduleSpec, step: int) -> float:
    """Returns the factor of the learning rate after `step` batches."""
    if step < spec.warmup_steps:
        return (step + 1) / spec.warmup_steps
    after = step - spec.warmup_steps
    if spec.kind == "step":
        return float(spec.gamma ** (after // spec.step_size))
    if spec.kind == "constant":
        return 1.0
    part = min(1.0, after / (spec.total_steps - spec.warmup_steps))
    left = 1.0 - part if spec.kind == "linear" else (1.0 + math.cos(math.pi * part)) / 2
    return spec.end_factor + (1.0 - spec.end_factor) * left
