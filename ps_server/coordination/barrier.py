"""Barriers: who has come, who is missing, which are complete.

Sans-IO: arrivals and departures in, releases out; no clock, no locks. A barrier waits for every worker that
has not left.
"""

from protos.errors import ProtocolError
from protos.limits import MAX_BARRIERS
from ps_server.coordination.membership import Membership
from ps_server.coordination.names import require_name


class Barriers:
    """All barriers of a job. Not thread-safe."""

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._waiting: dict[str, set[int]] = {}

    def arrive(self, name: str, worker: int) -> None:
        """A worker comes to the barrier `name`; to come again changes nothing.

        Raises:
            ProtocolError: If it has left or is not of this job, waits at too many others, or the name is too
                long.
        """
        require_name("barrier", name)
        if not self._members.is_present(worker):
            raise ProtocolError(
                f"worker {worker} came to barrier {name!r}, but has left or is not of this job "
                f"(members: {self._members.present}); after a job that failed, restart the servers that "
                f"stayed"
            )
        others = [place for place, at in self._waiting.items() if worker in at and place != name]
        if len(others) >= MAX_BARRIERS:
            raise ProtocolError(
                f"worker {worker} came to barrier {name!r} while it waits at {len(others)} others, as "
                f"{others[0]!r}: a worker waits at one barrier at a time"
            )
        self._waiting.setdefault(name, set()).add(worker)

    def give_up(self, name: str, worker: int) -> None:
        """A worker stops waiting."""
        self._waiting.get(name, set()).discard(worker)
        self._forget_empty()

    def leave(self, worker: int) -> None:
        """Forgets where a worker waited that has left."""
        for waiting in self._waiting.values():
            waiting.discard(worker)
        self._forget_empty()

    def _forget_empty(self) -> None:
        self._waiting = {name: waiting for name, waiting in self._waiting.items() if waiting}

    def missing(self, name: str) -> list[int]:
        """Returns the workers that have neither left nor come to `name`, ascending."""
        waiting = self._waiting.get(name, set())
        return [worker for worker in self._members.present if worker not in waiting]

    def place_of(self, worker: int) -> str | None:
        """Returns the barrier at which a worker waits; None if it waits nowhere."""
        return next((name for name, waiting in self._waiting.items() if worker in waiting), None)

    def take_stuck(self) -> dict[str, list[int]]:
        """Returns, and forgets, the workers by barrier if all wait for each other for ever; else nothing.

        That is when every worker waits, but not at the same barrier; to be called after `take_released`.
        """
        waiting = {name: sorted(workers) for name, workers in self._waiting.items() if workers}
        if not waiting or set(self._members.present) - set().union(*waiting.values()):
            return {}
        self._waiting.clear()
        return waiting

    def take_released(self) -> dict[str, list[int]]:
        """Returns, and forgets, the barriers to which all have come, with their workers."""
        released = {
            name: sorted(waiting)
            for name, waiting in self._waiting.items()
            if waiting and not self.missing(name)
        }
        for name in released:
            del self._waiting[name]
        return released
