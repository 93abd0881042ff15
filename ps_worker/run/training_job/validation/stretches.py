"""The stretches of a pass from one validation to the next."""

from collections.abc import Iterator
from itertools import chain, islice

import numpy as np

from protos.store import ReduceOp
from ps_worker.run.plan import Plan
from ps_worker.run.run import Run
from ps_worker.run.training_job.passes import Positioned


class Stretches:
    """Batches in their order, a number of them at a time. For one thread; a stretch's may be any."""

    def __init__(self, batches: Iterator[Positioned]) -> None:
        self._batches = batches
        self._ahead: list[Positioned] = []  # a batch that was read to find out whether there is one

    @property
    def has_more(self) -> bool:
        """Whether there is another batch; reads it."""
        if not self._ahead:
            self._ahead = list(islice(self._batches, 1))
        return bool(self._ahead)

    def take(self, number: int) -> Iterator[Positioned]:
        """Returns the next `number` batches, or those left; to be gone through before the next call."""
        ahead, self._ahead = (self._ahead, []) if number > 0 else ([], self._ahead)
        return chain(ahead, islice(self._batches, max(number - len(ahead), 0)))


class StepsToValidation:
    """Counts the steps of a worker from one validation within a pass to the next. For one thread."""

    def __init__(self, plan: Plan, run: Run) -> None:
        """Has counted none yet."""
        self._run = run
        self._threads = plan.job.train.thread_num
        # Threads in lockstep take their steps together.
        every_steps = -(-plan.job.valid.every_steps // self._threads) * self._threads
        self._every_steps = every_steps if plan.valid_files else 0
        self._carried_steps = 0  # of an earlier run, since its last validation
        self._stretch_start = 0

    @property
    def is_on(self) -> bool:
        """Whether validations are due by steps."""
        return self._every_steps > 0

    @property
    def left(self) -> int:
        """Steps of this worker up to the next validation in its pass."""
        before = self._carried_steps + self._run.steps_since_barrier * self._threads
        return max(self._every_steps - before, 0)

    @property
    def since(self) -> int:
        """Steps of this worker since the last validation in its pass, a resumed run's included."""
        return self._run.progress.steps - self._stretch_start if self.is_on else 0

    def resume(self, since: int) -> None:
        """Goes on from the steps of worker 0 in a resumed run since its last validation."""
        self._carried_steps = since

    def begin_pass(self) -> None:
        """Counts from the start of a pass, or where a resumed run was in it."""
        self._begin_stretch()

    def goes_on(self, name: str, stretches: Stretches) -> bool:
        """Waits for all workers at the end of a stretch; returns whether any has more of the pass to train.

        The store has the gradients of all then.
        """
        has_more = np.array([float(stretches.has_more)])
        goes_on = bool(self._run.all_reduce(has_more, ReduceOp.MAX, name)[0])
        self._carried_steps = 0
        self._begin_stretch()
        return goes_on

    def _begin_stretch(self) -> None:
        """Counts from here, or from where the lost process before this one was in the stretch."""
        before = self._carried_steps + self._run.steps_since_barrier * self._threads
        self._stretch_start = self._run.progress.steps - before
