"""Every occurrence that workers train on is counted once, whatever mode merges on its way."""

from collections import Counter
from collections.abc import Sequence

import pytest

from ctr_ps.ctr_model.batch import Batch
from tests.reference.feature_life import occurrences_of
from tests.support.cluster import cluster
from tests.support.statistics import counted_on
from tests.support.training import job, random_batches, train_workers

MODES = {
    "sync": ["strategy.mode=sync"],
    "sync-threads": ["strategy.mode=sync", "train.thread_num=3"],
    "half_async": ["strategy.mode=half_async", "train.thread_num=2"],
    "async": ["strategy.mode=async"],
    "async-merged": [
        "strategy.mode=async",
        "strategy.async.max_merge_var_num=4",
        "train.thread_num=2",
    ],
    "bounded_staleness": [
        "strategy.mode=bounded_staleness",
        "strategy.bounded_staleness.max_staleness=4",
        "strategy.bounded_staleness.max_merge_var_num=3",
    ],
}


def occurrences(batches: Sequence[Batch]) -> dict[int, tuple[int, int]]:
    shows: Counter[int] = Counter()
    clicks: Counter[int] = Counter()
    for batch in batches:
        assert batch.labels is not None
        found = occurrences_of(batch.keys, batch.offsets, batch.num_slots, batch.labels)
        for key, (show, click) in found.items():
            shows[key] += show
            clicks[key] += click
    return {key: (shows[key], clicks[key]) for key in shows}


@pytest.mark.usefixtures("past_the_first_steps")
@pytest.mark.parametrize("mode", MODES)
def test_rows_have_counted_each_occurrence_once(mode: str) -> None:
    setting, *overrides = MODES[mode]
    settings = job(setting.partition("=")[2], *overrides, "life.statistics=true")
    data = [random_batches(31, 16, seed=1), random_batches(20, 16, seed=2)]

    with cluster(num_servers=2, num_workers=2) as servers:
        clients = [servers.client(joins=False), servers.client(joins=False)]
        train_workers(clients, data, settings)
        counted = counted_on(servers.stores, "embedding")

    expected = occurrences([*data[0], *data[1]])
    assert {key: (row.show, row.click) for key, row in counted.items()} == expected
    assert {row.unseen for row in counted.values()} == {0}
