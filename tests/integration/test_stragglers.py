"""A worker that is ten times slower than the other: who waits for it, and how long.

No clock: the slow worker gets its next batch when the fast one has taken ten more, or as many as its mode
lets it. A mode that held the fast worker back more than it says would never open that gate; one that held it
back less is seen by how far it gets ahead.
"""

import threading
from collections.abc import Iterator

import pytest

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ps_worker.job import Job
from tests.support.cluster import cluster
from tests.support.training import job, random_batches, train_workers

FAST, SLOW = 0, 1
SLOWNESS = 10
NUM_BATCHES = 60
LIMIT_S = 20.0


class Race:
    """Counts the batches that each worker takes, and hands the slow one its batches late."""

    def __init__(self, most_ahead: int | None) -> None:
        """The fast worker may take `most_ahead` batches more than the slow one; None: any number."""
        self._most_ahead = most_ahead
        self._changed = threading.Condition()
        self._taken = {FAST: 0, SLOW: 0}
        self._is_fast_done = False
        self.furthest_ahead = 0
        self.slow_taken_when_fast_was_done = 0

    def fast(self, batches: list[Batch]) -> Iterator[Batch]:
        for batch in batches:
            with self._changed:
                self._taken[FAST] += 1
                # Before the slow worker begins it is one batch more: the first needs no step of others.
                if self._taken[SLOW]:
                    ahead = self._taken[FAST] - self._taken[SLOW]
                    self.furthest_ahead = max(self.furthest_ahead, ahead)
                self._changed.notify_all()
            yield batch
        with self._changed:
            self.slow_taken_when_fast_was_done = self._taken[SLOW]
            self._is_fast_done = True
            self._changed.notify_all()

    def slow(self, batches: list[Batch]) -> Iterator[Batch]:
        for batch in batches:
            with self._changed:
                assert self._changed.wait_for(self._is_slow_next, LIMIT_S), (
                    f"the fast worker stands still {self._taken[FAST] - self._taken[SLOW]} batches ahead"
                )
                self._taken[SLOW] += 1
            yield batch

    def _is_slow_next(self) -> bool:
        wanted = (self._taken[SLOW] + 1) * SLOWNESS
        if self._most_ahead is not None:
            wanted = min(wanted, self._taken[SLOW] + self._most_ahead)
        return self._is_fast_done or self._taken[FAST] >= wanted


def run(settings: Job, most_ahead: int | None) -> Race:
    race = Race(most_ahead)
    batches = random_batches(NUM_BATCHES, 8, seed=3)
    with cluster(num_servers=2, num_workers=2) as servers:
        clients = [servers.client(joins=False), servers.client(joins=False)]
        data = [race.fast(batches), race.slow(batches)]
        train_workers(clients, data, settings)
        examples = clients[FAST].status().examples
    assert examples == {FAST: 8 * NUM_BATCHES, SLOW: 8 * NUM_BATCHES}
    return race


@pytest.mark.parametrize("mode", ["half_async", "async", "geo"])
def test_fast_worker_does_not_wait(mode: str) -> None:
    race = run(job(mode, "strategy.geo.k_steps=5"), None)

    assert race.slow_taken_when_fast_was_done <= NUM_BATCHES // SLOWNESS + 1


def test_sync_goes_at_the_pace_of_the_slow_worker() -> None:
    race = run(job("sync"), 1)

    # When it has pushed its part of a step, it takes the batch of the next one, and waits.
    assert race.furthest_ahead <= 2
    assert race.slow_taken_when_fast_was_done >= NUM_BATCHES - 1


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_bounded_staleness_lets_the_fast_worker_ahead_by_its_bound(max_staleness: int) -> None:
    # When it may begin no other step, it has taken the batch of that step, and waits.
    settings = job("bounded_staleness", f"strategy.bounded_staleness.max_staleness={max_staleness}")
    race = run(settings, max_staleness + 1)

    assert max_staleness + 1 <= race.furthest_ahead <= max_staleness + 2
    assert race.slow_taken_when_fast_was_done >= NUM_BATCHES - max_staleness - 2
