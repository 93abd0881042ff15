"""Row statistics and eviction as dicts, in float64."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.spec import ExpirySpec, StatisticsSpec


@dataclass
class Life:
    show: float = 0.0
    click: float = 0.0
    unseen: int = 0
    last_seen: int = 0

    def score(self, spec: StatisticsSpec) -> float:
        return spec.nonclk_coeff * (self.show - self.click) + spec.click_coeff * self.click


class ReferenceLives:
    """The keys of one table that have rows, without their training."""

    def __init__(self, statistics: StatisticsSpec, expiry: ExpirySpec | None = None) -> None:
        self.statistics = statistics
        self.expiry = expiry or ExpirySpec()
        self.lives: dict[int, Life] = {}

    def push(self, counts: Iterable[tuple[int, int, int]], now: int) -> None:
        for key, occurrences, clicks in counts:
            life = self.lives.setdefault(key, Life())
            life.show += occurrences
            life.click += clicks
            life.unseen = 0
            life.last_seen = now

    def shrink(self, now: int, small: Iterable[int] = (), *, dry_run: bool = False) -> set[int]:
        """Returns the removed keys, `small` ones among them."""
        aged = {
            key: Life(
                life.show * self.statistics.decay,
                life.click * self.statistics.decay,
                life.unseen + 1,
                life.last_seen,
            )
            for key, life in self.lives.items()
        }
        gone = {key for key, life in aged.items() if self.expires(life, now)}
        gone |= self.lives.keys() & set(small)
        if not dry_run:
            self.lives = {key: life for key, life in aged.items() if key not in gone}
        return gone

    def expires(self, life: Life, now: int) -> bool:
        rules = self.expiry
        return (
            (rules.delete_threshold > 0 and life.score(self.statistics) < rules.delete_threshold)
            or (rules.max_unseen > 0 and life.unseen > rules.max_unseen)
            or (rules.ttl_s > 0 and now - life.last_seen > rules.ttl_s)
        )


def occurrences_of(
    keys: NDArray[np.uint64], offsets: NDArray[np.int32], num_slots: int, labels: Iterable[float]
) -> dict[int, tuple[int, int]]:
    """Returns the occurrences of each key of a batch, and those in clicked examples."""
    found: dict[int, tuple[int, int]] = {}
    for b, label in enumerate(labels):
        for key in keys[offsets[b * num_slots] : offsets[(b + 1) * num_slots]].tolist():
            shows, clicks = found.get(key, (0, 0))
            found[key] = (shows + 1, clicks + (label == 1))
    return found
