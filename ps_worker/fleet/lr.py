"""Schedules of learning rates under the names that they have in Paddle; `[optimizer] schedule` of a job.

    fleet.optimizer.Adam(fleet.optimizer.lr.CosineAnnealingDecay(0.01, T_max=20_000))

A step is a batch of any worker: servers count them, and nobody calls `step()`.
"""

from typing import TYPE_CHECKING, Any, NoReturn

from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.fleet.words.unknown import unknown_name

Settings = dict[str, Any]


class LRScheduler:
    """A learning rate and its schedule, with Paddle's arguments; they count batches of all workers."""

    def __init__(self, learning_rate: float, schedule: Settings) -> None:
        # the learning rate that the schedule multiplies
        self.base_lr = _number("learning_rate", learning_rate)
        self.schedule = schedule  # as a job's `schedule`

    def step(self, *_: object, **__: object) -> None:
        """Raises UsageError: servers count the steps."""
        raise UsageError(
            f"remove the call of {type(self).__name__}.step(): servers count the batches of all workers as "
            "its steps"
        )


class StepDecay(LRScheduler):
    """Times `gamma` every `step_size` steps."""

    def __init__(self, learning_rate: float, step_size: int, gamma: float = 0.1) -> None:
        super().__init__(learning_rate, {"kind": "step", "step_size": step_size, "gamma": gamma})


class CosineAnnealingDecay(LRScheduler):
    """Down to `eta_min` along a cosine, in `T_max` steps; there it stays."""

    def __init__(self, learning_rate: float, T_max: int, eta_min: float = 0.0) -> None:  # noqa: N803
        end_factor = _ratio("eta_min", eta_min, learning_rate)
        super().__init__(
            learning_rate, {"kind": "cosine", "total_steps": T_max, "end_factor": end_factor}
        )


class PolynomialDecay(LRScheduler):
    """Down to `end_lr` in equal amounts, in `decay_steps` steps; there it stays.

    Raises UsageError if it is not linear, or begins again.
    """

    def __init__(
        self,
        learning_rate: float,
        decay_steps: int,
        end_lr: float = 0.0001,
        power: float = 1.0,
        cycle: bool = False,
    ) -> None:
        if power != 1.0 or cycle:
            raise UsageError(
                f"PolynomialDecay has power={power!r}, cycle={cycle!r}, but here it is linear and runs "
                "once: leave both out, or use CosineAnnealingDecay"
            )
        end_factor = _ratio("end_lr", end_lr, learning_rate)
        super().__init__(
            learning_rate, {"kind": "linear", "total_steps": decay_steps, "end_factor": end_factor}
        )


class LinearWarmup(LRScheduler):
    """Up from nothing in `warmup_steps` equal amounts, then as `learning_rate`, a schedule or not, says.

    It begins with 1 / warmup_steps. Raises UsageError if the warm-up begins or ends elsewhere.
    """

    def __init__(
        self,
        learning_rate: "float | LRScheduler",
        warmup_steps: int,
        start_lr: float = 0.0,
        end_lr: float | None = None,
    ) -> None:
        after = (
            learning_rate
            if isinstance(learning_rate, LRScheduler)
            else LRScheduler(learning_rate, {})
        )
        if start_lr != 0 or end_lr not in (None, after.base_lr):
            raise UsageError(
                f"LinearWarmup has start_lr={start_lr!r} and end_lr={end_lr!r}, but here it always goes from "
                f"0 to the learning rate, {after.base_lr!r}: leave both out"
            )
        if "warmup_steps" in after.schedule:
            raise UsageError("a LinearWarmup is inside a LinearWarmup: use only one")
        schedule = {**after.schedule, "warmup_steps": warmup_steps}
        if "total_steps" in schedule:
            schedule["total_steps"] += warmup_steps
        super().__init__(after.base_lr, schedule)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{name} is {value!r}, expected a number")
    return float(value)


def _ratio(name: str, value: float, learning_rate: float) -> float:
    rate = _number("learning_rate", learning_rate)
    if not rate > 0 or not 0 <= _number(name, value) <= rate:
        raise UsageError(f"{name} is {value!r}, expected 0 to the learning rate, {learning_rate!r}")
    return value / rate


if not TYPE_CHECKING:  # a type checker knows the names

    def __getattr__(name: str) -> NoReturn:
        names = [each.__name__ for each in LRScheduler.__subclasses__()]
        raise unknown_name("fleet.optimizer.lr", name, names)
