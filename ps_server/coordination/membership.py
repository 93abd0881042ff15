"""The workers of a job: how many there are, and which have left.

Sans-IO, as every rule in this package: events in, answers out; no clock, no locks.
"""

from protos.errors import ProtocolError


class Membership:
    """Workers 0 to `num_workers` - 1, each present until it leaves. Not thread-safe.

    Attributes:
        num_workers: Workers of the job, including those that have left.
        left: Workers that have left.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.left: set[int] = set()

    @property
    def present(self) -> list[int]:
        """Workers that have not left, ascending."""
        return [worker for worker in range(self.num_workers) if worker not in self.left]

    @property
    def all_left(self) -> bool:
        """Whether every worker has left."""
        return len(self.left) == self.num_workers

    def is_present(self, worker: int) -> bool:
        """Whether the job has this worker and it has not left."""
        return 0 <= worker < self.num_workers and worker not in self.left

    def require(self, worker: int) -> None:
        """Raises ProtocolError unless the job has this worker, present or not."""
        if not 0 <= worker < self.num_workers:
            raise ProtocolError(
                f"worker {worker} called, but this job has {self.num_workers} workers, from 0: "
                f"PADDLE_TRAINERS_NUM must be the same everywhere"
            )

    def leave(self, worker: int) -> None:
        """Removes a worker for good.

        Raises:
            ProtocolError: If the job does not have it.
        """
        self.require(worker)
        self.left.add(worker)
