"""Keys that are pulled most often, and the share of pulls that have them: candidates are followed.

A worker pulls a key once for a batch, so the share of pulls that have it says how hot it is. Now and
then a pull is looked at as a whole: candidates that are in it are counted, and some of its keys, at random,
become candidates. A hot one is among them sooner or later, and stays; those that do not come again make room.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.keys import Keys

EVERY = 64  # pulls from one that is looked at to the next, at least

KEYS_A_PULL = 2_000
"""A look takes 20 ns a key: after one at more keys than this, as many more pulls are not looked at."""

NOMINATED = 64
MOST_CANDIDATES = 1024
LEAST_SEEN = 3
"""Times that a candidate must have been seen to be shown: one that came twice says little."""


_NOBODY = (np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64))


Candidates = tuple[Keys, NDArray[np.int64], NDArray[np.int64]]
"""Of a table: keys, how many looks have seen them, how many there were since they are candidates."""


def _look(candidates: Candidates, pulled: Keys, random: np.random.Generator) -> Candidates:
    keys, seen, looks = candidates
    seen, looks = seen + np.isin(keys, pulled, assume_unique=True), looks + 1
    new = random.choice(pulled, min(NOMINATED, pulled.size), replace=False)
    new = new[~np.isin(new, keys, assume_unique=True)]
    keys = np.concatenate([keys, new])
    seen = np.concatenate([seen, np.ones(new.size, np.int64)])
    looks = np.concatenate([looks, np.ones(new.size, np.int64)])
    if keys.size <= MOST_CANDIDATES:
        return keys, seen, looks
    # As if each had been looked for three times more, in vain: a new one is worth less than a proven one,
    # and more than one that did not come again.
    kept = np.argsort(seen / (looks + 3))[-(MOST_CANDIDATES // 2) :]
    return keys[kept], seen[kept], looks[kept]


class HotKeys:
    """Follows the keys of pulls. One thread adds, any may look."""

    def __init__(self) -> None:
        """Has seen nothing."""
        self._tables: dict[str, Candidates] = {}
        self._until_next = 0
        self._random = np.random.default_rng(0)  # chooses candidates

    def pulled(self, keys: Mapping[str, Keys]) -> None:
        """A pull came, of keys by table, none of them twice."""
        if self._until_next:
            self._until_next -= 1
            return
        num_keys = sum(each.size for each in keys.values())
        self._until_next = EVERY * max(1, num_keys // KEYS_A_PULL) - 1
        for name, pulled in keys.items():
            if pulled.size:
                found = self._tables.get(name, _NOBODY)
                self._tables[name] = _look(found, pulled, self._random)  # another thread may look

    def hottest(self, number: int) -> list[tuple[str, int, float]]:
        """Returns the tables and keys in the largest shares of pulls, and these shares, about."""
        found = []
        for name, (keys, seen, looks) in list(self._tables.items()):
            shares = np.where(seen >= LEAST_SEEN, seen / looks, 0.0)
            for place in np.argsort(shares)[::-1][:number]:
                if shares[place]:
                    found.append((name, int(keys[place]), float(shares[place])))
        return sorted(found, key=lambda each: each[2], reverse=True)[:number]
