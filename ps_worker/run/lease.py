"""A worker's lease: a thread tells the servers that it is alive, also while it computes or waits for long."""

import logging
import threading
import time

from protos.errors import CtrPsError, LostPushesError, TransportError
from protos.store import Coordination

logger = logging.getLogger(__name__)

RENEWALS = 3
"""In the time of a lease: one that is late, or lost, does no harm."""


class LeaseRenewal:
    """Renews the lease of a worker until it is closed, or the servers refuse it.

    Attributes:
        refusal: Why the servers refused it: this process has no place in the job, and its calls fail.
    """

    def __init__(self, store: Coordination, worker: int, lease_s: float) -> None:
        """Starts the thread; it renews a lease of `lease_s` seconds."""
        self.refusal: CtrPsError | None = None
        self._store = store
        self._worker = worker
        self._pause_s = lease_s / RENEWALS
        self._is_over = threading.Event()
        self._is_given_up = False
        self._thread = threading.Thread(target=self._renew_forever, name="lease", daemon=True)
        self._thread.start()

    def _renew_forever(self) -> None:
        pause_s = self._pause_s
        while not self._is_over.wait(pause_s):
            began = time.monotonic()
            try:
                self._store.renew(self._worker)
            except TransportError as error:
                logger.warning("lease not renewed worker=%d: %s", self._worker, error)
            except CtrPsError as error:
                logger.warning("lease refused worker=%d: %s", self._worker, error)
                self.refusal = error
                if isinstance(error, LostPushesError):
                    self._tell(error)
                self._store.disconnect()
                return
            # One that is lost fails after a pause's time: another pause on top would let the lease run out.
            pause_s = max(began + self._pause_s - time.monotonic(), 0.0)
        if self._is_given_up:
            self._give_up()

    def _tell(self, error: LostPushesError) -> None:
        """Ends the job for the others, too, who may wait for what is lost."""
        try:
            self._store.abort(self._worker, str(error))
        except CtrPsError as failure:
            logger.warning("not all others could be told of the error: %s", failure)

    def _give_up(self) -> None:
        try:
            self._store.renew(self._worker, is_last=True)
        except CtrPsError as error:
            logger.warning("lease not given up, it runs out worker=%d: %s", self._worker, error)

    def give_up(self) -> None:
        """Ends the thread, and the lease: whoever waits for this worker to be lost need not wait longer."""
        self._is_given_up = True
        self._is_over.set()
        self._thread.join()

    def close(self) -> None:
        """Ends the thread, after the call that it is in."""
        self._is_over.set()
