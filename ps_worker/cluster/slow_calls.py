"""Calls that take long: when they are sent again, where they wait until then, and what the log says of them.

    failure --server unreachable--> pause --> again
       |    --server overloaded---> the pause that it asks for --> again
       |    --server recovers-----> pause --> again; while it makes progress, no time is used up
       `--anything else, or no time left--> the error

Every call is idempotent (protos/wire/calls.py), so it may be carried out already when it is sent again.
However many calls there are, the log has one line a minute for a server, and one every half minute for what
is waited for.
"""

import logging
import math
import random
import sched
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ctr_ps.protos.wire.calls import Awaited

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.5

FORGET_S = 90.0
"""A try that lasted so long waited at a server: its failure is the first of another outage.

A machine that is gone is noticed sooner (protos/wire/channel.py)."""

BUDGET_S = 30.0
"""As long as the default lease: within it neither side gives the other up."""

BUDGET_WITH_LOG_S = 120.0
"""A server that is restarted has to read its log first."""


FIRST_WAIT_S = 5.0
"""Of a wait before it is told, and between looks at whether it is to be told again."""
NEXT_WAIT_S = 30.0
SENT_AGAIN_S = 60.0


@dataclass(slots=True)
class Retry:
    """The tries of one call: failures in, pauses out; the clock and the pauses are the caller's."""

    # seconds from the first failure after which no new try begins, but for one after the pause that
    # an overloaded server asked for before
    budget_s: float
    tries: int = 1
    since: float | None = None  # time of the first failure, in seconds; None: it has not failed
    last: float = 0.0
    # how far a server that recovers had come, at most; -1: it was not there, or did not say so
    progress: int = -1

    def pause_after(
        self, now: float, *, asked_s: float | None = None, progress: int | None = None
    ) -> float | None:
        """The call failed at time `now`; returns the seconds until it is sent again, None: never.

        An overloaded server asks for a pause of `asked_s`; one that recovers says how far it has come.
        """
        if self.since is None or now - self.last >= FORGET_S:
            self.since, self.progress = now, -1
        if progress is not None and progress > self.progress:
            self.since, self.progress = now, progress
        self.last = now
        if now - self.since >= self.budget_s:
            return None
        longest = min(FIRST_PAUSE_S * 2 ** min(self.tries - 1, 10), LONGEST_PAUSE_S)
        self.tries += 1
        # Half of it at random, so that workers do not come back all at once.
        pause_s = random.uniform(longest / 2, longest)
        left_s = self.budget_s - (now - self.since)
        return max(min(pause_s, left_s), asked_s or 0.0)


class Delays:
    """Does things later, in a thread that lives as long as there are some. Thread-safe."""

    def __init__(self, name: str) -> None:
        """Has nothing to do; `name` is that of the thread."""
        self._name = name
        self._is_closed = False
        self._due = sched.scheduler(self._now, self._sleep)
        self._is_changed = threading.Event()  # something may be due sooner
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def _now(self) -> float:
        return math.inf if self._is_closed else time.monotonic()

    def _sleep(self, seconds: float) -> None:
        self._is_changed.wait(seconds)
        self._is_changed.clear()

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Calls `do`, which raises nothing, after this time."""
        with self._lock:
            self._due.enter(seconds, 0, do)
            self._is_changed.set()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while True:
            self._due.run()
            with self._lock:
                if self._due.empty():
                    self._thread = None
                    return

    def close(self) -> None:
        """Does at once what is left, now and from now on, and waits for it."""
        with self._lock:
            self._is_closed = True
            self._is_changed.set()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()


class CallLog:
    """Logs calls that take long, few lines for many calls. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Has told nothing yet; `clock` is in seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._told_at: dict[str, float] = {}
        self._sent_again: dict[str, int] = {}  # calls by server, since its last line

    def sends_again(self, server: str, call: str, cause: str) -> None:
        """A call to a server is sent again for the first time; `cause` is a gRPC status."""
        with self._lock:
            calls = self._sent_again.get(server, 0) + 1
            is_told = self._is_due(server, SENT_AGAIN_S)
            self._sent_again[server] = 0 if is_told else calls
        if is_told:
            logger.warning(
                "retrying server=%s call=%s cause=%s calls=%d", server, call, cause, calls
            )

    def waits(self, wait: Awaited, waited_s: float) -> None:
        """A call has waited for `waited_s` seconds, and goes on waiting."""
        with self._lock:
            is_told = self._is_due(wait.kind, NEXT_WAIT_S)
        if is_told:
            logger.info(
                "waiting for workers %sat=%s waited_s=%d", wait.workers, wait.place, waited_s
            )

    def _is_due(self, what: str, pause_s: float) -> bool:
        """Whether nothing was told of this for `pause_s` seconds; then it is told now. Needs the lock."""
        now = self._clock()
        if what in self._told_at and now - self._told_at[what] < pause_s:
            return False
        self._told_at[what] = now
        return True
