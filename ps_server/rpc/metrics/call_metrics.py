"""Counts of calls: how many, how long, how much waiting, how many bytes and keys.

They are written by the event loop of the service alone, with no lock, and read by the thread that answers a
scrape: a number that is read meanwhile is that of a moment before or after. Objects of prometheus_client lock
for each number, which takes more of a small call than the whole of this.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from ctr_ps.protos.wire.requests import PullSparse, PushGrad

BOUNDS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0
)  # fmt: skip
"""Upper bounds of buckets, in seconds: a pull of a few keys takes 0.3 ms, a save minutes."""


@dataclass(slots=True)
class Histogram:
    """Observations in each bucket of `BOUNDS_S`, the last of those above all bounds, and their sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Counts one observation."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds


@dataclass(slots=True)
class CallCounts:
    """What was measured of the calls of one RPC."""

    # by the name of the status that they ended with, from the request's arrival on
    durations: dict[str, Histogram] = field(default_factory=dict)
    # for other workers, or for the update log; of the calls that had to. A part of the durations
    waits: Histogram = field(default_factory=Histogram)
    received_bytes: int = 0
    sent_bytes: int = 0
    keys: dict[str, int] = field(default_factory=dict)  # by table, that were pulled or pushed

    def touched(self, argument: Any) -> None:
        """A request was decoded: counts its keys, if it pulls or pushes rows."""
        if isinstance(argument, PullSparse):
            for table, keys in argument.keys.items():
                self.keys[table] = self.keys.get(table, 0) + keys.size
        elif isinstance(argument, PushGrad):
            for table, grad in argument.chunk.sparse:
                self.keys[table] = self.keys.get(table, 0) + grad.keys.size

    def ended(self, status: str, seconds: float) -> None:
        """A call ended with a status."""
        durations = self.durations.get(status)
        if durations is None:
            durations = self.durations[status] = Histogram()
        durations.add(seconds)
