"""Statuses of several servers, merged, and histograms of staleness against the list of what was counted."""

from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.store import (
    FILE,
    SaveStatus,
    Shrunk,
    Staleness,
    StoreStatus,
    TableStatus,
    WorkerProgress,
    merge_progress,
    merge_status,
    sum_by_name,
)


def progress(step: int, incarnation: int = 1) -> WorkerProgress:
    return WorkerProgress(incarnation=incarnation, sequence=0, step=step, position=f"after {step}")


def test_worker_goes_on_where_the_server_with_the_least_is() -> None:
    parts = [{0: progress(7), 1: progress(3)}, {0: progress(6), 1: progress(4)}]

    assert merge_progress(parts) == {0: progress(6), 1: progress(3)}


def test_steps_compare_over_incarnations() -> None:
    parts = [{0: progress(8, incarnation=2)}, {0: progress(7, incarnation=9)}]

    assert merge_progress(parts) == {0: progress(7, incarnation=9)}


def test_no_servers_know_nothing() -> None:
    assert merge_progress([]) == {}


def test_what_was_removed_from_servers_adds_up() -> None:
    first = {"wide": Shrunk(rows=1, size_bytes=10), "deep": Shrunk(rows=5, size_bytes=6)}
    second = {"wide": Shrunk(rows=2, size_bytes=20)}

    assert sum_by_name([first, second]) == {
        "deep": Shrunk(rows=5, size_bytes=6),
        "wide": Shrunk(rows=3, size_bytes=30),
    }


def test_merged_status_adds_sizes_and_keeps_what_all_have_seen() -> None:
    first = StoreStatus(
        version=4,
        tables={
            "wide": TableStatus(
                rows=1, size_bytes=10, shards=2, smallest_shard=0, largest_shard=1, index_slots=4
            ),
            "deep": TableStatus(rows=5, size_bytes=6),
        },
        examples={0: 100, 1: 50},
        left=frozenset({0, 1}),
        staleness=Staleness().add(0, 6).add(3),
        progress={0: progress(7), 1: progress(4)},
        last_save=SaveStatus(pause_s=0.5, duration_s=1.0, is_over=True, number=3),
        silent_s={0: 0.5, 1: 2.0},
        lease_s=30.0,
        duplicates=2,
        batches=9,
        lost=frozenset({2}),
    )
    second = StoreStatus(
        version=3,
        tables={
            "wide": TableStatus(
                rows=7, size_bytes=20, shards=2, smallest_shard=3, largest_shard=4, index_slots=12
            )
        },
        silent_s={1: 0.25},
        lease_s=30.0,
        duplicates=1,
        batches=8,
        examples={0: 90},
        left=frozenset({1}),
        staleness=Staleness().add(0, 4).add(5, 3),
        progress={0: progress(6)},
        last_save=SaveStatus(pause_s=0.25, duration_s=2.0, is_over=False),
    )

    merged = merge_status([first, second])

    assert merged == StoreStatus(
        version=3,
        tables={
            "wide": TableStatus(
                rows=8, size_bytes=30, shards=4, smallest_shard=0, largest_shard=4, index_slots=16
            ),
            "deep": TableStatus(rows=5, size_bytes=6),
        },
        examples={0: 100, 1: 50},
        left=frozenset({1}),
        staleness=Staleness().add(0, 10).add(3).add(5, 3),
        progress={0: progress(6)},
        last_save=SaveStatus(pause_s=0.5, duration_s=2.0, is_over=False, number=3),
        lease_s=30.0,
        lost=frozenset({2}),
        duplicates=3,
        batches=8,
    )
    assert merged.silent_s == {1: 0.25}


def test_imbalance_and_load_are_of_all_shards() -> None:
    table = TableStatus(
        rows=8, size_bytes=0, shards=4, smallest_shard=1, largest_shard=4, index_slots=16
    )

    assert table.imbalance == 1.5  # (4 - 1) / 2
    assert table.load_factor == 0.5


def test_table_without_rows_is_balanced() -> None:
    table = TableStatus(rows=0, size_bytes=0)

    assert (table.imbalance, table.load_factor) == (0.0, 0.0)


def test_workers_have_a_state_and_are_behind_the_first() -> None:
    status = StoreStatus(
        version=1,
        tables={},
        examples={0: 3, 1: 4},
        left=frozenset({1, 2}),
        staleness=Staleness(),
        progress={0: progress(7), 1: progress(4)},
        lost=frozenset({2, 3}),
        silent_s={0: 0.0, 3: 9.0},
    )

    assert [str(status.state_of(worker)) for worker in range(5)] == [
        "present",
        "has left",
        "has left",
        "lost",
        "has not joined",
    ]
    assert status.steps_behind() == {0: 0, 1: 3}
    assert status.num_examples == 7


COUNTED = st.lists(st.tuples(st.integers(0, 2**40) | st.integers(0, 20), st.integers(0, 5)))


def histogram(counted: list[tuple[int, int]]) -> Staleness:
    staleness = Staleness()
    for value, batches in counted:
        staleness = staleness.add(value, batches)
    return staleness


@given(counted=COUNTED)
def test_mean_and_largest_are_exact(counted: list[tuple[int, int]]) -> None:
    each = [value for value, batches in counted for _ in range(batches)]

    found = histogram(counted)

    assert found.batches == len(each)
    assert found.total == sum(each)
    assert found.mean == (sum(each) / len(each) if each else 0.0)
    assert found.largest == max(each, default=0)


@given(counted=COUNTED, share=st.floats(0, 1))
def test_quantile_is_a_bound_within_a_factor_of_two(
    counted: list[tuple[int, int]], share: float
) -> None:
    each = [value for value, batches in counted for _ in range(batches)]

    bound = histogram(counted).quantile(share)

    if each:
        exact = int(np.quantile(each, share, method="inverted_cdf"))
        assert exact <= bound <= 2 * exact
    else:
        assert bound == 0


@pytest.mark.parametrize(("share", "bound"), [(0.0, 1), (0.5, 1), (0.51, 4), (0.75, 4), (1.0, 11)])
def test_quantile_is_the_end_of_a_bucket_or_the_largest(share: float, bound: int) -> None:
    """Of 1, 1, 3 and 11."""
    assert histogram([(1, 2), (3, 1), (11, 1)]).quantile(share) == bound


@given(parts=st.lists(COUNTED, max_size=4))
def test_merging_is_counting_together(parts: list[list[tuple[int, int]]]) -> None:
    merged = reduce(Staleness.merge, map(histogram, parts), Staleness())

    assert merged == histogram([one for part in parts for one in part])


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (0, "0"),
        (1, "1"),
        (2, "2"),
        (3, "3-4"),
        (4, "3-4"),
        (5, "5-8"),
        (8, "5-8"),
        (9, "9-16"),
        (1000, "513-1024"),
    ],
)
def test_bucket_is_named_by_its_range(value: int, name: str) -> None:
    assert Staleness().add(value, 3).as_dict() == {
        "batches": 3,
        "mean": value,
        "largest": value,
        "counts": {name: 3},
    }


def in_stream(step: int, partitions: dict[str, str], **sent: Any) -> WorkerProgress:
    return WorkerProgress(
        incarnation=3, sequence=step, step=step, position=f"p{step}", partitions=partitions, **sent
    )


def test_what_a_server_has_beyond_the_others_of_a_stream_is_known() -> None:
    least = in_stream(4, {"a": "4", "b": "9"})
    for most in (
        in_stream(5, {"a": "6", "b": "9"}),  # it applied the step
        in_stream(4, {"a": "4", "b": "9"}, sent=1, sent_partitions={"a": "6"}),  # its part waits
    ):
        for parts in ([least, most], [most, least]):
            merged = merge_progress([{0: each} for each in parts])

            assert merged == {0: replace(least, sent=1, sent_partitions={"a": "6"})}


def test_a_first_part_that_only_one_server_has_is_known() -> None:
    sent = in_stream(0, {}, sent=1, sent_partitions={"a": "6"})

    (merged,) = merge_progress([{0: sent}, {}]).values()

    assert (merged.step, merged.sent, merged.partitions) == (0, 1, {})
    assert merged.sent_partitions == {"a": "6"}


def test_progress_in_files_says_nothing_of_parts() -> None:
    parts = [in_stream(4, {}), in_stream(6, {})]

    assert merge_progress([{0: each} for each in parts]) == {0: parts[0]}


def test_of_each_file_of_a_queue_servers_have_what_the_least_of_them_has() -> None:
    """Another process in the place has counted on from fewer batches, and trained another file."""
    first = in_stream(11, {f"{FILE}0": "1 05", f"{FILE}1": "1 09", f"{FILE}2": "1 01"})
    second = in_stream(12, {f"{FILE}0": "1 07", f"{FILE}1": "1 02"})

    for parts in ([first, second], [second, first]):
        (merged,) = merge_progress([{0: each} for each in parts]).values()
        assert merged.partitions == {f"{FILE}0": "1 05", f"{FILE}1": "1 02"}
