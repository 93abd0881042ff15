"""SIGTERM of a cluster's worker: it ends itself, never in the middle of a call, and the job if that needs it.

    SIGTERM --handler--> a flag --> the job needs the worker: abort --> its calls fail --> it unwinds --> 143
                            |-----> else: the batch that it is in --> its place is given up ------------> 143
                            |-----> worker 0 that saves: its batch --> a checkpoint --> either of these > 143
                            `-----> it does not end within the grace -----------------------------------> 143

Until worker 0 has saved, the others of such a job go on: a synchronous step needs all of them.
An exception raised by a handler could leave a lock of gRPC's taken, and the process waiting for it.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Self

from ctr_ps.protos.errors import AbortedError, CtrPsError, TransportError
from ctr_ps.protos.store import Coordination

logger = logging.getLogger(__name__)

EXIT_CODE = 128 + signal.SIGTERM
GRACE_S = 8.0
"""Less than the 10 s that `ps-launch` and Docker give before SIGKILL; Kubernetes gives 30."""
GIVE_UP_S = 1.0  # after the grace, for servers to hear that the worker's place is free
SAVE_S = 6.0
"""How long worker 0 may take to save before others end the job; `ps-launch` ends servers after 7.5 s."""
STEP_S = 2.0
"""How long a worker whose place is taken again goes on, for worker 0 to end its synchronous step."""


Place = tuple[Coordination, int]
"""A store, and the worker that takes part in its job."""


class Termination:
    """Handles SIGTERM while its `with` block lasts. For the main thread.

    Before `abort_at` or `end_after_batch` a signal ends the process at once: there is nothing to tell
    anybody. A call that fails after the signal is its consequence, and becomes SystemExit(143).
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        """Ends the process `grace_s` seconds after a signal if it has not ended by then."""
        self._grace_s = grace_s
        self.was_asked = False  # whether there was a signal
        self._wake: SimpleQueue[None] = SimpleQueue()  # a handler may put while another one does
        self._is_over = threading.Event()
        self._asked_s = 0.0
        self._wait_s: Callable[[], float] = float  # before it ends by itself
        self._place: Callable[[], Place | None] = lambda: None
        self._ends_after_batch = False
        self._give_up: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._watch, name="termination", daemon=True)

    def abort_at(
        self,
        place: Callable[[], Place | None],
        *,
        wait_s: Callable[[], float] = float,
        ends_after_batch: bool = False,
    ) -> None:
        """From now on, a signal aborts the job of the worker in `place`, or without one ends the process.

        But only if it has not ended after `wait_s` seconds. With `ends_after_batch` it is told to end, too.
        """
        self._place, self._wait_s, self._ends_after_batch = place, wait_s, ends_after_batch

    def end_after_batch(
        self, give_up: Callable[[], None], *, wait_s: Callable[[], float] = float
    ) -> None:
        """From now on, a signal only makes `is_told_to_end` true, after `wait_s` seconds.

        `give_up` is called after the grace, or if it has waited, soon after that.
        """
        self._give_up, self._wait_s = give_up, wait_s

    @property
    def is_told_to_end(self) -> bool:
        """Whether the worker is to end by itself, after the batch that it is in."""
        if self._give_up is None:
            return self.was_asked and self._ends_after_batch
        return self.was_asked and time.monotonic() >= self._asked_s + self._wait_s()

    def start(self) -> None:
        """Handles signals to the end of the process."""
        self._thread.start()
        self._previous = signal.signal(signal.SIGTERM, lambda *_: self._ask())

    def __enter__(self) -> Self:
        self.start()
        return self

    def _ask(self) -> None:
        self._asked_s = self._asked_s or time.monotonic()
        self.was_asked = True
        self._wake.put(None)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        signal.signal(signal.SIGTERM, self._previous)
        self._is_over.set()
        self._wake.put(None)
        self._thread.join()
        if self.was_asked and isinstance(error, AbortedError | TransportError):
            logger.info("ended by SIGTERM: %s", error)
            raise SystemExit(EXIT_CODE) from error

    def _watch(self) -> None:
        self._wake.get()
        if self._is_over.is_set():
            return
        if wait_s := self._wait_s():
            logger.warning("SIGTERM: this worker ends once worker 0 has saved, or in %g s", wait_s)
            if self._is_over.wait(wait_s):
                return
        grace_s = self._grace_s - wait_s
        if (place := self._place()) is not None:
            logger.warning("SIGTERM: this worker ends, and with it the job")
            # In a thread of its own: a server that does not answer must not use up the grace.
            threading.Thread(target=abort, args=place, daemon=True).start()
        elif self._give_up is not None:
            grace_s = min(grace_s, GIVE_UP_S) if wait_s else grace_s
            logger.warning("SIGTERM: this worker ends after its batch")
        else:
            os._exit(EXIT_CODE)
        if self._is_over.wait(grace_s):
            return
        logger.error("not ended within %g s after SIGTERM", wait_s + grace_s)
        if self._give_up is not None:
            giving_up = threading.Thread(target=self._give_up, daemon=True)
            giving_up.start()
            giving_up.join(GIVE_UP_S)
        os._exit(EXIT_CODE)


def abort(store: Coordination, worker: int) -> None:
    """Ends the job of a worker that was told to end, as far as servers can be reached."""
    try:
        store.abort(worker, "it was told to stop (SIGTERM)")
    except CtrPsError as failure:
        logger.warning("could not tell other workers of the end: %s", failure)
