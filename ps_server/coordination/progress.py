"""Progress of each worker's training: the last push up to which all of its pushes are applied.

    pushes applied   0 1 2 . 4        a push may overtake another on its way through threads
    whole up to          ^            progress is what push id 2 says, until push 3 is applied, too

The step and position of a push id hold once its push and all before it are applied, so a worker that resumes
from its progress leaves out nothing. It repeats what was applied beyond.

Sans-IO: applied pushes in, progress out; no clock, no locks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from protos.errors import ProtocolError
from protos.store import PushId, WorkerProgress

MAX_VERSION = 2**53
"""A run does not resume at a later one."""

MAX_POSITION = 4096
"""Characters of a position, which status and checkpoints carry."""

_MOST = {
    "incarnation": 2**64 - 1,
    "sequence": MAX_VERSION,
    "step": MAX_VERSION,
    "examples": 2**32,
    "batches": 2**24,
    "pulled": MAX_VERSION,
}
"""Far above what any worker sends; after 2**32 such pushes a sum of examples would leave a uint64."""


def require_plausible(worker: int, numbers: PushId | WorkerProgress) -> None:
    """Raises ProtocolError if a number is out of its range, or the position too long."""
    for name, most in _MOST.items():
        if not 0 <= (value := getattr(numbers, name, 0)) <= most:
            raise ProtocolError(
                f"worker {worker} is said to have {name} = {value}, expected 0 to {most}"
            )
    if len(numbers.position) > MAX_POSITION:
        raise ProtocolError(
            f"worker {worker} is said to have a position of {len(numbers.position)} characters, expected up "
            f"to {MAX_POSITION}"
        )


@dataclass(slots=True)
class _Incarnation:
    """One run of a worker: its number, the next push to be whole, and those applied beyond."""

    number: int
    next_sequence: int = 0
    ahead: dict[int, PushId] = field(default_factory=dict)


class ProgressTracker:
    """The progress of all workers. Not thread-safe."""

    def __init__(self) -> None:
        self._incarnations: dict[int, _Incarnation] = {}
        self._progress: dict[int, WorkerProgress] = {}

    def note(self, push_id: PushId) -> None:
        """Records that a push was applied."""
        run = self._incarnations.get(push_id.worker)
        if run is None or run.number != push_id.incarnation:
            run = self._incarnations[push_id.worker] = _Incarnation(push_id.incarnation)
        run.ahead[push_id.sequence] = push_id
        while (whole := run.ahead.pop(run.next_sequence, None)) is not None:
            run.next_sequence += 1
            self._progress[push_id.worker] = progress_of(whole)

    def restore(self, progress: Mapping[int, WorkerProgress]) -> None:
        """Starts with the progress of an earlier run, which holds until a worker's first push."""
        self._incarnations.clear()
        self._progress = dict(progress)

    def progress(self) -> dict[int, WorkerProgress]:
        """Returns the progress by worker; a worker that has pushed nothing is missing."""
        return dict(self._progress)


def progress_of(push_id: PushId) -> WorkerProgress:
    """Returns a worker's progress once this push and all before it are applied."""
    return WorkerProgress(
        incarnation=push_id.incarnation,
        sequence=push_id.sequence,
        step=push_id.step,
        position=push_id.position,
    )
