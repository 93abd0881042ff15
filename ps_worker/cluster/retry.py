"""When a call that failed is sent again: with growing pauses, until a budget of time is used up.

    failure --server unreachable--> pause --> again
       |    --server overloaded---> the pause that it asks for --> again
       |    --server recovers-----> pause --> again; while it makes progress, no time is used up
       `--anything else, or no time left--> the error

Every call is idempotent (protos/wire/calls.py), so it may be carried out already when it is sent again.

Sans-IO: failures in, pauses out; the clock and the pauses are the caller's.
"""

import random
from dataclasses import dataclass

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.5

FORGET_S = 90.0
"""A try that lasted so long waited at a server: its failure is the first of another outage.

A machine that is gone is noticed sooner (protos/wire/channel.py)."""

BUDGET_S = 30.0
"""As long as the default lease: within it neither side gives the other up."""

BUDGET_WITH_LOG_S = 120.0
"""A server that is restarted has to read its log first."""


@dataclass(slots=True)
class Retry:
    """The tries of one call.

    Attributes:
        budget_s: Seconds from the first failure after which no new try begins, but for one after the pause
            that an overloaded server asked for before.
        tries: How often the call was sent.
        since: Time of the first failure, in seconds; None: it has not failed.
        last: Time of the last one.
        progress: How far a server that recovers had come, at most; -1: it was not there, or did not say so.
    """

    budget_s: float
    tries: int = 1
    since: float | None = None
    last: float = 0.0
    progress: int = -1

    def pause_after(
        self, now: float, *, asked_s: float | None = None, progress: int | None = None
    ) -> float | None:
        """The call failed at time `now`; returns the seconds until it is sent again, None: never.

        Args:
            now: In seconds.
            asked_s: The pause that an overloaded server asks for.
            progress: How far a server has come that recovers.
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
