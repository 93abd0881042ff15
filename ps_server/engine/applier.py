"""Applies to the parameters what a coordinator has decided: pushes on arrival, and complete steps in order.

    push on arrival --begin_arrival--> applied here, counted --> answered
    complete step --------------------> summed, applied here, counted --> the next one

Both happen outside the coordinator's lock, within `Snapshots.changing`.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager

from ctr_ps.protos.futures import Answered
from ctr_ps.protos.role import Members
from ctr_ps.protos.store import Future, PushId, Version
from ctr_ps.ps_server.coordination.arrivals import Answer
from ctr_ps.ps_server.coordination.coordinator import Coordinator
from ctr_ps.ps_server.coordination.pending_calls import answer_all
from ctr_ps.ps_server.coordination.steps import CompleteStep
from ctr_ps.ps_server.parameters import Parameters
from ctr_ps.ps_server.snapshot.before_step import BeforeStep
from ctr_ps.ps_server.snapshot.snapshots import Snapshots
from ctr_ps.ps_server.table.changes import NOBODY

logger = logging.getLogger(__name__)


class Applier:
    """Changes the parameters of one process. Thread-safe."""

    def __init__(self, members: Members, parameters: Parameters, snapshots: Snapshots) -> None:
        """Applies each step by the call that completes it."""
        self._members = members
        self._parameters = parameters
        self._snapshots = snapshots
        self._executor: Executor | None = None
        self._inline_values = 0
        # values that the last synchronous step changed, for a worker that repeats its part
        self.before_step: BeforeStep | None = None

    def use_executor(self, executor: Executor, *, inline_values: int) -> None:
        """Has an executor apply the steps of more than `inline_values` gradient values from now on.

        But not those that a departure completes: it returns after them.
        """
        self._executor, self._inline_values = executor, inline_values

    @contextmanager
    def inline(self) -> Iterator[None]:
        """Each step is applied by the call that completes it, within the block."""
        executor, self._executor = self._executor, None
        try:
            yield
        finally:
            self._executor = executor

    def apply_arrival(
        self, job: Coordinator, push_id: PushId, apply: Callable[[], None]
    ) -> Future[Version]:
        """Applies a push that was checked by `apply`, unless it was applied before."""
        pushes = job.pushes
        if not pushes.begin_arrival(push_id):
            return pushes.when_pushed(push_id, None)
        is_applied = False
        try:
            with self._snapshots.changing():
                apply()
                is_applied = True
                answers = pushes.arrival_applied(push_id)
        except BaseException:
            if not is_applied:
                name = self._members.name(push_id.worker)
                logger.exception("push of %s not applied push=%d", name, push_id.sequence)
                pushes.abandon_arrival(push_id)
            raise
        answer_all(answers)
        job.require_no_failure()
        return Answered(pushes.version)

    def apply_steps(
        self,
        job: Coordinator,
        step: CompleteStep | None,
        answers: Sequence[Answer] = (),
        *,
        by_caller: bool = False,
    ) -> None:
        """Gives answers, and applies a step that was taken, and those complete after it.

        Large ones are applied in the executor, unless `by_caller`.
        """
        _answer(job, answers, step)
        while step is not None:
            if not by_caller and self._executor and step.num_values > self._inline_values:
                try:
                    self._executor.submit(self.apply_steps, job, step, by_caller=True)
                except BaseException as error:  # as when the system has no thread left
                    job.step_failed(step, error)
                    raise
                return
            step = self._apply_step(job, step)

    def _apply_step(self, job: Coordinator, step: CompleteStep) -> CompleteStep | None:
        """Applies a step; returns the next one, if it is complete."""
        try:
            gradients = step.sum()
            with self._snapshots.changing():
                if job.waits_for_lost:
                    self.before_step = self._parameters.before(gradients, step.step)
                batches = job.pushes.batches
                self._parameters.apply(gradients, NOBODY, step=batches, draw=batches)
                applied = job.pushes.step_applied(step)
        except BaseException as error:
            logger.exception("step not applied step=%d", step.step)
            job.step_failed(step, error)
            raise
        _answer(job, applied.answers, applied.complete)
        return applied.complete


def _answer(job: Coordinator, answers: Sequence[Answer], taken: CompleteStep | None) -> None:
    """Answers calls; ends the job if that fails and a step was taken, which nobody would apply then."""
    try:
        answer_all(answers)
    except BaseException as error:
        if taken is not None:
            job.step_failed(taken, error)
        raise
