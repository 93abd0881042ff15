"""How much of each worker's training has been applied, as its stamps say.

    pushes applied   0 1 2 . 4        a push may overtake another on its way through threads
    whole up to          ^            progress is what stamp 2 says, until push 3 is applied, too

What a stamp says of step and position holds once its push and all before it are applied, so a worker that
goes on from its progress leaves out nothing. It repeats what was applied beyond.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from protos.store import Stamp, WorkerProgress


@dataclass(slots=True)
class _Incarnation:
    """One run of a worker: its number, the next push to be whole, and those applied beyond."""

    number: int
    next_sequence: int = 0
    ahead: dict[int, Stamp] = field(default_factory=dict)


class ProgressBook:
    """The progress of all workers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._incarnations: dict[int, _Incarnation] = {}
        self._progress: dict[int, WorkerProgress] = {}

    def note(self, stamp: Stamp) -> None:
        """A push was applied."""
        with self._lock:
            run = self._incarnations.get(stamp.worker)
            if run is None or run.number != stamp.incarnation:
                run = self._incarnations[stamp.worker] = _Incarnation(stamp.incarnation)
            run.ahead[stamp.sequence] = stamp
            while (whole := run.ahead.pop(run.next_sequence, None)) is not None:
                run.next_sequence += 1
                self._progress[stamp.worker] = progress_of(whole)

    def restore(self, progress: Mapping[int, WorkerProgress]) -> None:
        """Begins with the progress of an earlier run, which holds until a worker's first push."""
        with self._lock:
            self._incarnations.clear()
            self._progress = dict(progress)

    def progress(self) -> dict[int, WorkerProgress]:
        """Returns the progress by worker; one that has pushed nothing has none."""
        with self._lock:
            return dict(self._progress)


def progress_of(stamp: Stamp) -> WorkerProgress:
    """Returns the progress that a push brings."""
    return WorkerProgress(
        incarnation=stamp.incarnation,
        sequence=stamp.sequence,
        step=stamp.step,
        position=stamp.position,
    )
