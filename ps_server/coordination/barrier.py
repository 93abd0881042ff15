"""Barriers: who has come, who is missing, when all may go on.

Sans-IO: arrivals and departures in, releases out; no clock, no locks. Membership is every worker that has
not left, so a worker that is done is never waited for.
"""

from protos.errors import ProtocolError


class Barriers:
    """All barriers of a job. Not thread-safe."""

    def __init__(self, num_workers: int) -> None:
        self._members = set(range(num_workers))
        self._waiting: dict[str, set[int]] = {}

    def arrive(self, name: str, worker: int) -> None:
        """A worker comes to the barrier `name`; coming again is the same as waiting on.

        Raises:
            ProtocolError: If it is not a member.
        """
        if worker not in self._members:
            raise ProtocolError(
                f"worker {worker} came to barrier {name!r}, but has left or is not of this job "
                f"(members: {sorted(self._members)}); after a job that failed, restart the servers that "
                f"stayed"
            )
        self._waiting.setdefault(name, set()).add(worker)

    def give_up(self, name: str, worker: int) -> None:
        """A worker stops waiting."""
        self._waiting.get(name, set()).discard(worker)

    def leave(self, worker: int) -> None:
        """A worker is done: no barrier waits for it any more."""
        self._members.discard(worker)
        for waiting in self._waiting.values():
            waiting.discard(worker)

    def missing(self, name: str) -> list[int]:
        """Returns the members that have not come to `name`, ascending."""
        return sorted(self._members - self._waiting.get(name, set()))

    def place_of(self, worker: int) -> str | None:
        """Returns the barrier at which a worker waits; None if it waits nowhere."""
        return next((name for name, waiting in self._waiting.items() if worker in waiting), None)

    def take_stuck(self) -> dict[str, list[int]]:
        """Returns who waits where if all wait for each other for ever, and forgets it; else nothing.

        That is when every member waits, but not at the same barrier; after `take_released`.
        """
        waiting = {name: sorted(workers) for name, workers in self._waiting.items() if workers}
        if not waiting or self._members - set().union(*waiting.values()):
            return {}
        self._waiting.clear()
        return waiting

    def take_released(self) -> dict[str, list[int]]:
        """Returns the barriers to which all have come, with their workers, and forgets them."""
        released = {
            name: sorted(waiting)
            for name, waiting in self._waiting.items()
            if waiting and not self.missing(name)
        }
        for name in released:
            del self._waiting[name]
        return released
