"""The queue of files: which of a pass are free, and which worker has taken which.

    free --take--> taken --finish--> trained
      ^              |
      `--give_back---'  its worker left; the next one begins where the pushes of that one ended

Files are numbered in the order of the pass. The queue has no positions in them: pushes report these. A call
that comes again, and a process in a lost one's place, count the files that they have received, and so get
the same ones.

Sans-IO: calls in, answers out; no clock, no locks.
"""

from bisect import insort

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.role import Members
from ctr_ps.protos.store import TakenFile
from ctr_ps.ps_server.coordination.job_state import FileQueueState


class FileQueue:
    """The files of the newest pass, shared by all workers. Not thread-safe."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self.pass_number = 0  # 0: no file was asked for
        self._num_files = 0
        self._num_taken = 0  # files from this one on were never taken
        self._given_back: list[int] = []  # ascending
        self._taken: dict[int, list[int]] = {}  # by worker, in the order of taking
        self._trained: dict[int, int] = {}  # of the files that it took first

    def take(self, worker: int, pass_number: int, num_files: int, received: int) -> TakenFile:
        """Returns the file after those that a worker has `received` in a pass, which may be a new one.

        Raises ProtocolError, and changes nothing, if workers disagree on the files, or a pass would end
        before its files are trained.
        """
        if pass_number < self.pass_number:
            return TakenFile(is_over=True)
        is_new = pass_number > self.pass_number
        taken = [] if is_new else self._taken.get(worker, [])
        if received > len(taken) or not (is_new or num_files == self._num_files):
            raise ProtocolError(
                f"{self._members.name(worker)} has {received} of {num_files} files of pass {pass_number}, "
                f"but was dealt {len(taken)} of {self._num_files}: do all workers see the same files?"
            )
        is_early = pass_number > self.pass_number + 1 or not self.is_over(self.pass_number)
        if is_new and self.pass_number and is_early:
            raise ProtocolError(
                f"{self._members.name(worker)} asks for pass {pass_number}, but the workers are in pass "
                f"{self.pass_number}"
            )
        if is_new:
            self.restore(FileQueueState(pass_number=pass_number, num_files=num_files))
        if received < len(taken):
            return TakenFile(file=taken[received], was_taken=True)
        if was_taken := bool(self._given_back):
            file = self._given_back.pop(0)
        elif self._num_taken < num_files:
            file = self._num_taken
            self._num_taken += 1
        else:
            return TakenFile(is_over=self.is_over(pass_number))
        self._taken[worker] = [*taken, file]
        return TakenFile(file=file, was_taken=was_taken)

    def finish(self, worker: int, pass_number: int, received: int) -> None:
        """The servers have all gradients of the files that a worker has `received` in a pass."""
        if pass_number > self.pass_number:
            raise ProtocolError(
                f"{self._members.name(worker)} waits in pass {pass_number}, before it began"
            )
        if pass_number == self.pass_number:
            most = min(received, len(self._taken.get(worker, ())))
            self._trained[worker] = max(most, self._trained.get(worker, 0))

    def give_back(self, worker: int) -> None:
        """A worker leaves: others may take the files that it has not finished."""
        for file in self._taken.pop(worker, [])[self._trained.pop(worker, 0) :]:
            insort(self._given_back, file)

    @property
    def has_free(self) -> bool:
        """Whether a worker could take a file."""
        return bool(self._given_back) or self._num_taken < self._num_files

    def awaited(self) -> list[int]:
        """Returns the workers that have not finished their files, ascending."""
        return [k for k in sorted(self._taken) if self._trained.get(k, 0) < len(self._taken[k])]

    def is_over(self, pass_number: int) -> bool:
        """Whether all files of a pass are trained."""
        return pass_number < self.pass_number or not (self.has_free or self.awaited())

    def state(self) -> FileQueueState:
        """Returns what `restore` needs."""
        return FileQueueState(
            pass_number=self.pass_number,
            num_files=self._num_files,
            num_taken=self._num_taken,
            given_back=list(self._given_back),
            taken={worker: list(files) for worker, files in self._taken.items()},
            trained=dict(self._trained),
        )

    def restore(self, state: FileQueueState) -> None:
        """Takes over what `state` returned."""
        self.pass_number, self._num_files = state.pass_number, state.num_files
        self._num_taken, self._given_back = state.num_taken, list(state.given_back)
        self._taken = {worker: list(files) for worker, files in state.taken.items()}
        self._trained = dict(state.trained)
