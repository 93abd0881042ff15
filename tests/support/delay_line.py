"""A line between two TUN devices that delays every packet: a process of its own.

    device --read--> queue, for the delay --write--> the other device      and so the other way

    python delay_line.py FD FD SECONDS

The order is kept and nothing is dropped. The windows of its connections bound the queue.
"""

import os
import select
import sys
import time
from collections import deque

PACKET_BYTES = 65_535
MOST_READS = 64
"""In a row from one device, so that the other one's packets are not late meanwhile."""


class Direction:
    """Packets from one device to the other."""

    def __init__(self, source: int, target: int, delay_s: float) -> None:
        self.source = source
        self._target = target
        self._delay_s = delay_s
        self._on_the_way: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        for _ in range(MOST_READS):
            try:
                packet = os.read(self.source, PACKET_BYTES)
            except BlockingIOError:
                return
            self._on_the_way.append((time.monotonic() + self._delay_s, packet))

    def deliver(self) -> None:
        while self._on_the_way and self._on_the_way[0][0] <= time.monotonic():
            _, packet = self._on_the_way.popleft()
            os.write(self._target, packet)

    @property
    def due(self) -> float:
        return self._on_the_way[0][0] if self._on_the_way else float("inf")


def join(one: int, other: int, delay_s: float) -> None:
    """Carries packets between two non-blocking devices, for ever."""
    directions = {
        each.source: each
        for each in (Direction(one, other, delay_s), Direction(other, one, delay_s))
    }
    while True:
        due = min(each.due for each in directions.values())
        pause_s = None if due == float("inf") else max(due - time.monotonic(), 0.0)
        readable, _, _ = select.select(directions, [], [], pause_s)
        for each in directions.values():
            each.deliver()
        for source in readable:
            directions[source].take()


if __name__ == "__main__":
    join(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
