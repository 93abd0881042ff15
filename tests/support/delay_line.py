"""A line between two TUN devices on which every packet takes a while: a process of its own.

    device --read--> queue, for the delay --write--> the other device      and so the other way

    python delay_line.py FD FD SECONDS

The order is kept and nothing is dropped: a line that falls behind is a longer one. What is on its way is
bounded by the windows of the connections that use it.
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
    """Packets from one device to the other one."""

    def __init__(self, source: int, target: int, delay_s: float) -> None:
        self.source = source
        self._target = target
        self._delay_s = delay_s
        self._on_the_way: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        """Reads the packets that are there."""
        for _ in range(MOST_READS):
            try:
                packet = os.read(self.source, PACKET_BYTES)
            except BlockingIOError:
                return
            self._on_the_way.append((time.monotonic() + self._delay_s, packet))

    def deliver(self) -> None:
        """Writes the packets that are due."""
        while self._on_the_way and self._on_the_way[0][0] <= time.monotonic():
            _, packet = self._on_the_way.popleft()
            os.write(self._target, packet)

    @property
    def due(self) -> float:
        """When the next packet is to be delivered."""
        return self._on_the_way[0][0] if self._on_the_way else float("inf")


def join(one: int, other: int, delay_s: float) -> None:
    """Carries packets between two devices, which do not block, for ever."""
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
