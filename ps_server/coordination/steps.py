"""Synchronous steps: collected from workers, summed in worker order, applied one after another.

    parts of workers --add--> collected --take_complete_step--> being applied --step_applied--> version + 1

Sans-IO: parts in, complete steps out; no clock, no locks, no tables.

A worker takes part in every step, with empty gradients if need be, until it says from which step on it
does not (it waits in a barrier, or has left). So a step is complete when each worker has either sent its
part or left before it: by number, never by time. One step at a time is applied, in the order of their
numbers; the parts of later steps are collected meanwhile.

A batch that is pushed to be applied on arrival is a step of its own. Both kinds count into the one version,
never at the same time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.gradients import Gradients, sum_gradients
from ctr_ps.protos.store import PushId, Version
from ctr_ps.ps_server.coordination.job_state import JobState, WaitingPart
from ctr_ps.ps_server.coordination.membership import Membership
from ctr_ps.ps_server.coordination.push_ledger import lost_pushes


@dataclass(frozen=True, slots=True)
class CompleteStep:
    """A synchronous step whose parts have all come, to be applied as a whole to the version of its number.

    `parts` and `push_ids` are those of the workers that took part, in worker order.
    """

    step: Version
    parts: Sequence[Gradients]
    push_ids: Sequence[PushId]

    @property
    def num_values(self) -> int:
        """Gradient values in all parts."""
        sparse = (grad.values.size for part in self.parts for grad in part.sparse.values())
        dense = (grad.values.size for part in self.parts for grad in part.dense.values())
        return sum(sparse) + sum(dense)

    def sum(self) -> Gradients:
        """Returns the sum of the parts, added in worker order, over the examples of all push ids.

        An example counts as its weight. A worker without gradients has examples, too. A heter trainer has
        none of its own, since those that it trains on are others': where one takes part, dense gradients are
        over the examples that they say.
        """
        examples = sum(push_id.divisor for push_id in self.push_ids)
        total = sum_gradients(self.parts)
        has_heter = any(
            part.dense and not push_id.examples
            for part, push_id in zip(self.parts, self.push_ids, strict=True)
        )
        sparse = {name: replace(grad, examples=examples) for name, grad in total.sparse.items()}
        if has_heter:
            return Gradients(sparse, total.dense)
        dense = {name: replace(grad, examples=examples) for name, grad in total.dense.items()}
        return Gradients(sparse, dense)


class StepAggregator:
    """Collects the workers' parts of synchronous steps, and counts steps. Not thread-safe."""

    def __init__(self, members: Membership) -> None:
        self.version: Version = 0  # steps applied
        self.batches = 0  # batches applied, those of the runs that this one resumes included
        # steps that are complete, applied or not; also the number of the step collected now
        self.num_complete: Version = 0
        self._members = members
        self._next_step = dict.fromkeys(range(members.all.total), 0)
        # by worker, the step at which it last left a barrier
        self.since = dict.fromkeys(range(members.all.total), 0)
        # by worker that has left or came to a barrier, the first step in which it takes no part
        self.absent_from: dict[int, Version] = dict.fromkeys(members.left, 0)
        self._parts: dict[int, dict[int, tuple[Gradients, PushId]]] = {}  # until they are applied
        self._is_applying = False
        self._num_arriving = 0
        # the last push was a part of a step: servers that have the same parts have the same version
        self.in_steps = False

    def resume(self, version: Version, batches: int) -> None:
        """Resumes at the version of an earlier run; raises ProtocolError if this one has begun."""
        if version == self.version and not (self._parts or self._num_arriving):
            return  # the same once more, since its answer was lost
        if self.version or self._parts or self._num_arriving:
            raise ProtocolError(
                f"a run cannot resume at version {version}, as these servers already trained to version "
                f"{self.version}: restart the servers"
            )
        self.version = self.num_complete = version
        self.batches = batches
        self._next_step = dict.fromkeys(self._next_step, version)
        self.since = dict(self._next_step)

    def next_steps_without_waiting(self) -> dict[int, Version]:
        """Returns, by worker, the first step of which its part is neither applied nor waits."""
        waiting = {
            worker: min(step for step, parts in self._parts.items() if worker in parts)
            for parts in self._parts.values()
            for worker in parts
        }
        return {**self._next_step, **waiting}

    def waiting(self) -> list[WaitingPart]:
        """Returns the parts of steps that are not applied yet, in the order of steps."""
        return [
            WaitingPart(push_id=push_id, step=step, gradients=gradients)
            for step, parts in sorted(self._parts.items())
            for _, (gradients, push_id) in sorted(parts.items())
        ]

    def waiting_ids(self) -> list[PushId]:
        """Returns the push ids of `waiting`."""
        return [
            push_id for _, parts in sorted(self._parts.items()) for _, push_id in parts.values()
        ]

    def restore(self, state: JobState) -> None:
        """Takes over an earlier state; parts that waited are added afterwards."""
        self.version = self.num_complete = state.version
        self.batches = state.batches
        self._next_step, self.since = dict(state.next_step), dict(state.since)
        self.absent_from = dict(state.absent_from)
        self.in_steps = state.in_steps

    @property
    def num_begun(self) -> Version:
        """Steps of which a part has come, applied or not."""
        return max([self.version, *(step + 1 for step in self._parts)])

    def has_part(self, worker: int, step: Version) -> bool:
        """Whether the worker's part of `step` has come already: of the steps since its last barrier."""
        return self.since.get(worker, 0) <= step < self._next_step.get(worker, 0)

    def next_step(self, worker: int) -> Version:
        """Returns the first step of which the worker's part has not come."""
        return self._next_step[worker]

    def check(self, worker: int, step: Version) -> None:
        """Raises ProtocolError unless `step` is the worker's next one.

        A worker pushes a step after the one before it was acknowledged, so a server that has not that one has
        lost it: LostPushesError.
        """
        self._members.require(worker)
        if step >= self.absent_from.get(worker, step + 1):
            raise ProtocolError(
                f"{self._members.name(worker)} pushed step {step} after it had left synchronous training"
            )
        if self._num_arriving:
            raise ProtocolError(
                f"{self._members.name(worker)} pushed synchronous step {step} during an asynchronous push: "
                "all workers must train in the same mode"
            )
        expected = self._next_step[worker]
        if step > expected:
            raise lost_pushes(
                self._members.name(worker),
                f"it pushed step {step}, expected {expected}, at version {self.version}",
            )
        # A worker that is one step ahead has pulled from other servers what this one is about to apply.
        if step != expected or step > self.num_complete + 1:
            raise ProtocolError(
                f"{self._members.name(worker)} pushed step {step}, expected {expected}, at version "
                f"{self.version}: a worker pushes every step, in order"
            )

    def add(self, push_id: PushId, step: Version, gradients: Gradients) -> None:
        """Takes a worker's part of a step; raises as `check` does."""
        self.check(push_id.worker, step)
        self.in_steps = True
        self._parts.setdefault(step, {})[push_id.worker] = gradients, push_id
        self._next_step[push_id.worker] = step + 1
        self._count_complete()

    def begin_arrival(self, worker: int) -> None:
        """A push begins to be applied on arrival: until its `end_arrival` no synchronous step begins.

        Raises ProtocolError if one waits for parts or is being applied, or the job has no such worker.
        """
        self._members.require(worker)
        if self._parts:
            raise ProtocolError(
                f"{self._members.name(worker)} pushed asynchronously, but other workers pushed synchronous "
                f"steps {sorted(self._parts)}: all workers must train in the same mode"
            )
        self._num_arriving += 1

    def end_arrival(self, batches: int) -> None:
        """Counts the batches of a push that was applied: every worker's next step is the version then."""
        self._num_arriving -= 1
        self.version += batches
        self.batches += batches
        self.in_steps = self.in_steps and not batches
        self.num_complete = self.version
        self._next_step = dict.fromkeys(self._next_step, self.version)
        self.since = dict(self._next_step)

    def leave(self, worker: int, step: Version) -> None:
        """Leaves the steps from `step` on to the others; one that has left them already, no more."""
        self.absent_from.setdefault(worker, step)
        self._count_complete()

    def rejoin(self, worker: int) -> None:
        """Takes part again, from the current version on."""
        self.absent_from.pop(worker, None)
        self._next_step[worker] = self.since[worker] = self.version

    def behind(self, step: Version) -> list[int]:
        """Returns the workers whose part of `step` is missing, ascending."""
        return [
            worker
            for worker in self._next_step
            if worker not in self._parts.get(step, {})
            and not self.absent_from.get(worker, step + 1) <= step
        ]

    def missing(self) -> list[int]:
        """Returns the workers that others wait for, ascending: they have pushed to the step already."""
        return self.behind(self.num_complete) if self.num_complete in self._parts else []

    def _count_complete(self) -> None:
        # Counted first: to look for each worker's part at each part would take the square of their number.
        least = max(1, len(self._next_step) - len(self.absent_from))
        while len(self._parts.get(self.num_complete, ())) >= least and not self.behind(
            self.num_complete
        ):
            self.num_complete += 1

    def take_complete_step(self) -> CompleteStep | None:
        """Returns the next step to apply, which ends with `step_applied`.

        None if parts are missing, no worker took part, or the step before is still being applied.
        """
        if self._is_applying or self.num_complete == self.version:
            return None
        self._is_applying = True
        parts = [part for _, part in sorted(self._parts[self.version].items())]
        return CompleteStep(self.version, [part for part, _ in parts], [each for _, each in parts])

    def step_applied(self, batches: int) -> None:
        """Counts the step that was taken, and the batches in it."""
        del self._parts[self.version]
        self.version += 1
        self.batches += batches
        self._is_applying = False
