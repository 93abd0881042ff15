"""Keys that are pulled most often, estimated from a few keys of a few pulls.

A worker pulls a key once for a batch, so the share of pulls that have it says how hot it is. One pull of
`EVERY` is looked at, and of its keys a stretch of `STRETCH` at a random place. Counts are halved when there
are too many keys, so that those which are no longer hot are forgotten.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from protos.keys import Keys

EVERY = 16
STRETCH = 64
MOST_KEYS = 4096
"""Counted of a table. Beside keys that come once, thousands of which are seen in between, hot ones stay."""


@dataclass(slots=True)
class _Counts:
    """What was seen of a table.

    Attributes:
        pulls: Looked at.
        pulls_with: Of them, about how many had a key.
    """

    pulls: float = 0.0
    pulls_with: dict[int, float] = field(default_factory=dict)

    def add(self, keys: list[int], weight: float) -> None:
        self.pulls += 1
        pulls_with = self.pulls_with
        for key in keys:
            pulls_with[key] = pulls_with.get(key, 0.0) + weight
        if len(pulls_with) > MOST_KEYS:
            self.pulls /= 2
            # Those seen once since the last time go.
            self.pulls_with = {
                key: count / 2 for key, count in pulls_with.items() if count > 1.5 * weight
            }


class HotKeys:
    """Counts the keys of pulls. One thread adds, any may look."""

    def __init__(self, seed: int = 0) -> None:
        """Has seen nothing; `seed` is for the choice of stretches."""
        self._tables: dict[str, _Counts] = {}
        self._until_next = 0
        self._random = random.Random(seed)

    def pulled(self, keys: Mapping[str, Keys]) -> None:
        """A pull came, of keys by table."""
        if self._until_next:
            self._until_next -= 1
            return
        self._until_next = EVERY - 1
        for table, all_keys in keys.items():
            if not all_keys.size:
                continue
            start = self._random.randrange(max(1, all_keys.size - STRETCH + 1))
            stretch = all_keys[start : start + STRETCH].tolist()
            counts = self._tables.setdefault(table, _Counts())
            counts.add(stretch, all_keys.size / len(stretch))

    def hottest(self, number: int) -> list[tuple[str, int, float]]:
        """Returns the tables and keys in the largest shares of pulls, and these shares, about."""
        shares = [
            (table, key, min(1.0, pulls_with / counts.pulls))
            for table, counts in list(self._tables.items())
            for key, pulls_with in list(counts.pulls_with.items())
        ]
        return sorted(shares, key=lambda each: each[2], reverse=True)[:number]
