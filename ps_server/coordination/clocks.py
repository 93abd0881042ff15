"""Clocks of workers that train within a bound of the slowest: stale synchronous parallel (SSP).

Sans-IO: clocks in, slower workers out; no time, no locks. A worker's clock is the number of steps that it has
finished since its last barrier. A worker that waits in a barrier or has left has none, and no other waits
for it.

Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NIPS 2013.
"""

from collections.abc import Mapping

from ctr_ps.protos.errors import ProtocolError, counted
from ctr_ps.ps_server.coordination.membership import Membership


class Clocks:
    """The clocks of a job's workers. Not thread-safe."""

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._clocks = dict.fromkeys(range(members.all.total), 0)

    def advance(self, worker: int, clock: int, at_least: int) -> None:
        """Records that a worker has finished `clock` steps, before it waits until all finish `at_least`.

        Its calls may come late: a clock never decreases, and one that comes while the worker waits in a
        barrier is ignored.

        Raises:
            ProtocolError: If it has left or is not of this job, or would wait for itself.
        """
        if not self._members.is_present(worker):
            raise ProtocolError(
                f"{self._members.name(worker)} has finished {counted(clock, 'step')}, but has left or is "
                f"not of this job (members: {self._members.names(self._members.present)})"
            )
        if at_least > clock:
            raise ProtocolError(
                f"{self._members.name(worker)} has finished {counted(clock, 'step')}, and waits until all "
                f"have finished {at_least}: it would wait for itself"
            )
        if worker in self._clocks:
            self._clocks[worker] = max(clock, self._clocks[worker])

    def pause(self, worker: int) -> None:
        """A worker waits in a barrier, or has left."""
        self._clocks.pop(worker, None)

    def restart(self, worker: int) -> None:
        """A worker comes out of a barrier and counts its steps from there."""
        self._clocks[worker] = 0

    def state(self) -> dict[int, int]:
        """Returns the clocks, by worker that trains."""
        return dict(self._clocks)

    def restore(self, clocks: Mapping[int, int]) -> None:
        """Takes over what `state` returned."""
        self._clocks = dict(clocks)

    def behind(self, at_least: int) -> dict[int, int]:
        """Returns the clocks of those that train and have not finished `at_least` steps, by worker."""
        return {worker: clock for worker, clock in sorted(self._clocks.items()) if clock < at_least}

    def slowest(self) -> int | None:
        """Returns the smallest clock; None if no worker trains."""
        return min(self._clocks.values(), default=None)
