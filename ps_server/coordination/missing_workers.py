"""Missing workers: who is waited for, where and how long, to be told now and then.

Sans-IO: time and places in, lines of the log out; no clock, no locks.
"""

from collections.abc import Mapping, Sequence

from ctr_ps.protos.role import Members

FIRST_WAIT_S = 5.0
"""A wait that is shorter is nobody's concern."""
NEXT_WAIT_S = 30.0
"""Between two times that waits are told, however many there are: steps of a slow worker are many."""


class MissingWorkers:
    """How long others have waited for workers, by place. Not thread-safe."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._waited_s: dict[str, float] = {}
        self._quiet_s = 0.0  # until waits may be told again

    def pass_time(self, seconds: float, missing: Mapping[str, Sequence[int]]) -> list[str]:
        """Time passes while some places lack workers; returns what is to be told of it.

        Args:
            seconds: Since the last call.
            missing: Workers that did not come, by the place where others wait for them.
        """
        self._waited_s = {place: self._waited_s.get(place, 0.0) + seconds for place in missing}
        self._quiet_s = max(0.0, self._quiet_s - seconds)
        long = {place: each for place, each in self._waited_s.items() if each >= FIRST_WAIT_S}
        if self._quiet_s or not long:
            return []
        self._quiet_s = NEXT_WAIT_S
        return [
            f"waiting for {self._members.names(missing[place])} at={place} waited_s={waited_s:.0f}"
            for place, waited_s in long.items()
        ]
