"""Push ids of one worker: its batches numbered as they are taken, its pushes as they are sent.

    batches taken    1 2 3 4 5      threads may finish them in another order
    whole in pushes  * * . *        of batch 3 a gradient waits to be merged, or is being computed
    push id            step = 2, position = after batch 2

So the step and position of a push id never leave out a batch.
"""

import threading
from collections.abc import Iterable

from ctr_ps.protos.store import FILE, Member, PushId, Version, WorkerProgress
from ctr_ps.ps_worker.data.blocks import Position

UNNUMBERED = 0
"""Number of a batch whose position is not recorded."""


class PushIds:
    """Makes the push ids of one run of one worker. Thread-safe."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._sequence = 0
        self._taken = 0
        self._positions: dict[int, Position | None] = {}  # after batches that are not whole yet
        self._ahead: set[int] = set()  # whole, but one before them is not
        self._step = 0
        self._position = ""
        self._partitions: dict[str, str] = {}  # positions that no push has told yet
        self._lock = threading.Lock()

    def resume(self, progress: WorkerProgress) -> None:
        """Continues the numbers of an earlier run of the worker, before the first batch."""
        with self._lock:
            self._taken = self._step = progress.step
            self._position = progress.position
            self._partitions = {
                name: at for name, at in progress.partitions.items() if not name.startswith(FILE)
            }

    def take(self, position: Position | None) -> int:
        """Returns the number of the next batch; `position` is that in the data after it, if any."""
        with self._lock:
            self._taken += 1
            self._positions[self._taken] = position
            return self._taken

    def next(
        self,
        *,
        examples: int,
        batches: int,
        pulled: Version,
        whole: Iterable[int],
        weight: float | None = None,
    ) -> PushId:
        """Returns the id of the next push; `whole` are the batches whose last gradients are in it."""
        with self._lock:
            self._ahead.update(number for number in whole if number != UNNUMBERED)
            while self._step + 1 in self._ahead:
                self._step += 1
                self._ahead.remove(self._step)
                position = self._positions.pop(self._step)
                self._position = "" if position is None else position.to_json()
                self._partitions.update({} if position is None else position.partitions)
            sequence = self._sequence
            self._sequence += 1
            partitions, self._partitions = self._partitions, {}
            return PushId(
                worker=self._member.worker,
                incarnation=self._member.incarnation,
                sequence=sequence,
                step=self._step,
                examples=examples,
                batches=batches,
                pulled=pulled,
                position=self._position,
                weight=weight,
                partitions=partitions,
            )
