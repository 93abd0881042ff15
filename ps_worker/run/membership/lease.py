"""A worker's lease: a thread tells the servers that it is alive, also while it computes or waits for long."""

import logging
import threading
import time
from collections.abc import Callable

from ctr_ps.protos.errors import CtrPsError
from ctr_ps.protos.store import Coordination, Lease

logger = logging.getLogger(__name__)


class LeaseRenewal:
    """Renews the lease of a worker until it is closed, or a server refuses it or is gone.

    Attributes:
        refusal: Why it ended: this process has no place in the job, or there is no job, and its calls fail.
    """

    def __init__(
        self,
        store: Coordination,
        worker: int,
        lease: Lease,
        *,
        on_refusal: Callable[[CtrPsError], None] = lambda _: None,
    ) -> None:
        """Starts the thread.

        Args:
            store: Where the lease is.
            worker: Whose it is.
            lease: How long it lasts.
            on_refusal: Called by the thread with the refusal, while the store can still be called.
        """
        self.refusal: CtrPsError | None = None
        self._on_refusal = on_refusal
        self._store = store
        self._worker = worker
        self._pause_s = lease.renewal_s
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
            except CtrPsError as error:
                if self._is_over.is_set():
                    break
                logger.warning("lease refused: %s", error)
                self.refusal = error
                self._on_refusal(error)
                self._store.disconnect()
                return
            # It waits for a pause's time where a server is away: no other one is to wait for two.
            pause_s = max(began + self._pause_s - time.monotonic(), 0.0)
        if self._is_given_up:
            self._give_up()

    def _give_up(self) -> None:
        try:
            self._store.renew(self._worker, is_last=True)
        except CtrPsError as error:
            logger.warning("lease not given up, it runs out: %s", error)

    def give_up(self) -> None:
        """Ends the thread, and the lease: whoever waits for this worker to be lost need not wait longer."""
        self._is_given_up = True
        self._is_over.set()
        self._thread.join()

    def close(self) -> None:
        """Ends the thread, after the call that it is in."""
        self._is_over.set()
