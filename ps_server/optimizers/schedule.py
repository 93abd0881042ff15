"""Schedules: the factor of a learning rate at each step.

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

from ctr_ps.protos.errors import SpecError
from ctr_ps.protos.spec import ScheduleSpec

SETTINGS: dict[str, tuple[str, ...]] = {
    "constant": (),
    "linear": ("total_steps", "end_factor"),
    "cosine": ("total_steps", "end_factor"),
    "step": ("step_size", "gamma"),
}
"""The settings that each kind has a use for, besides `warmup_steps`."""


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
            f"total_steps {named} {spec.total_steps}, expected more than the {spec.warmup_steps} of "
            f"warmup_steps: the batches of all workers that the job trains, all epochs together"
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
