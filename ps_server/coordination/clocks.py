"""The pace of workers that train each for itself, but within a bound of the slowest.

Sans-IO: clocks in, who is behind out; no time, no locks. A worker's clock is the number of steps that it has
finished since it last left a barrier. One that waits in a barrier or is done has none: nobody waits for it.

The stale synchronous parallel model of Ho et al., "More effective distributed ML via a stale synchronous
parallel parameter server", NIPS 2013.
"""

from protos.errors import ProtocolError


class Clocks:
    """The clocks of a job's workers. Not thread-safe."""

    def __init__(self, num_workers: int) -> None:
        self._members = set(range(num_workers))
        self._clocks = dict.fromkeys(range(num_workers), 0)

    def advance(self, worker: int, clock: int, at_least: int) -> None:
        """A worker has finished `clock` steps, and asks whether all have finished `at_least`.

        Its calls may come late: a clock never goes back, and that of one who waits in a barrier is of no use.

        Raises:
            ProtocolError: If it is not a member, or would wait for itself.
        """
        if worker not in self._members:
            raise ProtocolError(
                f"worker {worker} has finished {clock} steps, but has left or is not of this job "
                f"(members: {sorted(self._members)})"
            )
        if at_least > clock:
            raise ProtocolError(
                f"worker {worker} has finished {clock} steps, and waits until all have finished {at_least}: "
                f"it would wait for itself"
            )
        if worker in self._clocks:
            self._clocks[worker] = max(clock, self._clocks[worker])

    def pause(self, worker: int) -> None:
        """A worker waits in a barrier."""
        self._clocks.pop(worker, None)

    def restart(self, worker: int) -> None:
        """A worker leaves a barrier, and counts its steps from there."""
        self._clocks[worker] = 0

    def leave(self, worker: int) -> None:
        """A worker is done."""
        self._members.discard(worker)
        self.pause(worker)

    def behind(self, at_least: int) -> dict[int, int]:
        """Returns the clocks of those that train and have not finished `at_least` steps, by worker."""
        return {worker: clock for worker, clock in sorted(self._clocks.items()) if clock < at_least}

    def slowest(self) -> int | None:
        """Returns the smallest clock; None if nobody trains."""
        return min(self._clocks.values(), default=None)
