"""Steps: which synchronous ones are complete, in what order their parts are added, and the version.

Sans-IO: parts in, complete steps out; no clock, no locks, no tables.

A worker takes part in every step, with empty gradients if need be, until it says from which step on it
does not (it waits in a barrier, or is done). So a step is complete when each worker has either sent its
part or left before it: by number, never by time.

Batches that are pushed to be applied on arrival are steps of their own. Both kinds move the one version on,
never at the same time.
"""

from protos.errors import ProtocolError
from protos.gradients import Gradients


class StepAggregator:
    """Collects the workers' parts of synchronous steps, and counts steps. Not thread-safe.

    Attributes:
        version: Steps completed, which is also the number of the synchronous step now being collected.
    """

    def __init__(self, num_workers: int) -> None:
        self.version = 0
        self._next_step = dict.fromkeys(range(num_workers), 0)
        self._absent_from: dict[int, int] = {}
        self._parts: dict[int, dict[int, Gradients]] = {}
        self._num_arriving = 0

    def require_member(self, worker: int) -> None:
        """Raises ProtocolError unless the job has this worker."""
        if worker not in self._next_step:
            raise ProtocolError(
                f"worker {worker} called, but this job has {len(self._next_step)} workers, from 0: "
                f"PADDLE_TRAINERS_NUM must be the same everywhere"
            )

    def resume(self, version: int) -> None:
        """Goes on at the version of an earlier run.

        Raises:
            ProtocolError: If this one has begun.
        """
        if self.version or self._parts or self._num_arriving:
            raise ProtocolError(
                f"a run cannot go on at version {version} on servers that were trained on, up to version "
                f"{self.version}: start the servers anew"
            )
        self.version = version
        self._next_step = dict.fromkeys(self._next_step, version)

    def check(self, worker: int, step: int) -> None:
        """Raises ProtocolError unless `step` is the worker's next one."""
        self.require_member(worker)
        if step >= self._absent_from.get(worker, step + 1):
            raise ProtocolError(f"worker {worker} pushed step {step} after it had left the steps")
        if self._num_arriving:
            raise ProtocolError(
                f"worker {worker} pushed step {step} while another push is applied on arrival: all workers "
                f"must train in the same mode"
            )
        expected = self._next_step[worker]
        # A worker that is one step ahead has pulled from other servers what this one is about to apply.
        if step != expected or step > self.version + 1:
            raise ProtocolError(
                f"worker {worker} pushed step {step}, expected {expected}, at version {self.version}: "
                f"a restarted worker cannot join a synchronous run in its middle"
            )

    def add(self, worker: int, step: int, gradients: Gradients) -> None:
        """Takes a worker's part of a step; raises as `check` does."""
        self.check(worker, step)
        self._parts.setdefault(step, {})[worker] = gradients
        self._next_step[worker] = step + 1

    def begin_arrival(self, worker: int) -> None:
        """A push begins to be applied on arrival: until its `end_arrival` no synchronous step begins.

        Raises:
            ProtocolError: If a synchronous step waits for parts, or the worker is not of this job.
        """
        self.require_member(worker)
        if self._parts:
            raise ProtocolError(
                f"worker {worker} pushed to be applied on arrival, but others have pushed steps "
                f"{sorted(self._parts)}: all workers must train in the same mode"
            )
        self._num_arriving += 1

    def end_arrival(self, batches: int) -> int:
        """A push was applied: its batches move on each worker's next step and the version, which returns."""
        self._num_arriving -= 1
        self.version += batches
        self._next_step = dict.fromkeys(self._next_step, self.version)
        return self.version

    def leave(self, worker: int, step: int) -> None:
        """Leaves the steps from `step` on to the others."""
        self._absent_from[worker] = step

    def rejoin(self, worker: int) -> None:
        """Takes part again, from the current version on."""
        self._absent_from.pop(worker, None)
        self._next_step[worker] = self.version

    def behind(self, step: int) -> list[int]:
        """Returns the workers whose part of `step` is missing, ascending."""
        return [
            worker
            for worker in self._next_step
            if worker not in self._parts.get(step, {})
            and not self._absent_from.get(worker, step + 1) <= step
        ]

    def take_complete_step(self) -> list[Gradients] | None:
        """Returns the parts of the current step in worker order and goes on to the next.

        None if parts are missing, or nobody took part.
        """
        parts = self._parts.get(self.version)
        if not parts or self.behind(self.version):
            return None
        del self._parts[self.version]
        self.version += 1
        return [parts[worker] for worker in sorted(parts)]
