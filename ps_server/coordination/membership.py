"""The workers of a job: how many there are, who has joined on which terms, and who has left.

Sans-IO, as every rule in this package: events in, answers out; no clock, no locks.
"""

from collections.abc import Mapping

from protos.errors import JobError, ProtocolError

MAX_TERMS = 256
MAX_TERM = 2**16
"""Characters of the name of a term, or of its value."""


class Membership:
    """Workers 0 to `num_workers` - 1, each present until it leaves. Not thread-safe.

    A place is taken once: a process that replaces one that died would train from the middle of nowhere.

    Attributes:
        num_workers: Workers of the job, including those that have left.
        left: Workers that have left.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.left: set[int] = set()
        self._incarnations: dict[int, int] = {}
        self._terms = {"PADDLE_TRAINERS_NUM": (str(num_workers), "the server")}

    def join(self, worker: int, incarnation: int, terms: Mapping[str, str]) -> None:
        """A process takes the place of a worker; taking it again is a no-op.

        Args:
            worker: Index of the worker.
            incarnation: Tells processes from each other.
            terms: Settings that all processes have in common, by name.

        Raises:
            ProtocolError: If the job does not have this worker, or another process has its place.
            JobError: If another process has a term that differs.
        """
        if len(terms) > MAX_TERMS or any(
            len(text) > MAX_TERM for text in (*terms, *terms.values())
        ):
            raise ProtocolError(
                f"worker {worker} has {len(terms)} terms, expected up to {MAX_TERMS} of {MAX_TERM} characters"
            )
        if len(self._incarnations) == self.num_workers:
            self.require(worker)  # a stranger's terms do not end a job that runs
        if worker in self._incarnations:
            if self._incarnations[worker] == incarnation:
                return
            raise ProtocolError(
                f"worker {worker} of this job is another process, which joined before. If that one has died, "
                f"this one cannot take its place: end the job, and start it again from its checkpoint. Else "
                f"two processes have PADDLE_TRAINER_ID={worker}"
            )
        for name, value in terms.items():
            expected, holder = self._terms.get(name, (value, ""))
            if value != expected:
                raise JobError(
                    f"worker {worker} has {name} = {value or 'nothing'}, {holder} {expected or 'nothing'}: "
                    f"give all processes of a job the same job, --set and environment"
                )
        self.require(worker)
        self._incarnations[worker] = incarnation
        for name, value in terms.items():
            self._terms.setdefault(name, (value, f"worker {worker}"))

    def require_joined(self, worker: int) -> None:
        """Raises ProtocolError unless a process has taken the place of this worker."""
        if worker not in self._incarnations:
            self.require(worker)
            raise ProtocolError(
                f"worker {worker} has not joined this job: was this server restarted in the middle of it? "
                f"Then start the job again from its checkpoint"
            )

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
