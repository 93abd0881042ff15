"""The merged order of partitions: by time, whatever the pieces in which messages arrive."""

import math
from collections.abc import Collection, Mapping, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.streams import merging
from ctr_ps.ps_worker.data.streams.merging import Merger
from ctr_ps.ps_worker.data.streams.source import Message
from tests.support.streams import MemorySource, Messages

TIMES = st.dictionaries(
    st.sampled_from("abc"), st.lists(st.integers(0, 9), max_size=30), min_size=1
)


def of_times(times: Mapping[str, list[int]]) -> Messages:
    return {name: [(at, b"%d" % at) for at in each] for name, each in sorted(times.items())}


def merger_of(source: MemorySource, **settings: object) -> Merger:
    return Merger(source, dict.fromkeys(source.partitions(), ""), stall_limit_s=5.0, **settings)  # type: ignore[arg-type]


def all_of(merger: Merger, before_ms: float = float("inf")) -> list[Message]:
    found = []
    while messages := merger.take(before_ms, 0.0):
        found += messages
    return found


def by_heads(messages: Messages) -> list[tuple[str, str]]:
    """The rule, message by message: the oldest head comes next, of equal ones that of the first partition."""
    left, found = {name: list(enumerate(each)) for name, each in messages.items()}, []
    while any(left.values()):
        name = min((name for name in left if left[name]), key=lambda name: left[name][0][1][0])
        offset, _ = left[name].pop(0)
        found.append((name, str(offset)))
    return found


@given(times=TIMES, seed=st.integers(0, 2**32))
def test_messages_come_in_the_order_of_the_oldest_heads(
    times: Mapping[str, list[int]], seed: int
) -> None:
    messages = of_times(times)

    found = all_of(merger_of(MemorySource(messages, Random(seed))))

    assert [(each.partition, each.offset) for each in found] == by_heads(messages)


@given(times=TIMES, seed=st.integers(0, 2**32), before=st.integers(0, 10))
def test_messages_up_to_a_time_are_those_before_the_first_head_of_that_time(
    times: Mapping[str, list[int]], seed: int, before: int
) -> None:
    messages = of_times(times)
    merger = merger_of(MemorySource(messages, Random(seed)))

    first, rest = all_of(merger, before), all_of(merger)

    assert [(each.partition, each.offset) for each in first + rest] == by_heads(messages)
    assert all(each.time_ms < before for each in first)
    assert not rest or rest[0].time_ms >= before


def test_messages_up_to_the_last_offsets_are_read_and_none_after_them() -> None:
    source = MemorySource(of_times({"a": [1, 2, 9], "b": [3]}))
    merger = merger_of(source, ends={"a": "1", "b": ""})

    found = all_of(merger)

    assert [(each.partition, each.offset) for each in found] == [("a", "0"), ("a", "1")]
    assert merger.is_over


def test_messages_before_a_time_to_end_at_are_read() -> None:
    merger = merger_of(MemorySource(of_times({"a": [1, 2, 9], "b": [8, 3]})), end_ms=5)

    assert [each.time_ms for each in all_of(merger)] == [1, 2, 3]
    assert merger.is_over


def test_a_partition_ends_at_a_message_long_after_the_time_to_end_at() -> None:
    source = MemorySource(of_times({"a": [1, 600_005, 2]}))
    merger = merger_of(source, end_ms=5)

    assert [each.time_ms for each in all_of(merger)] == [1]
    assert merger.is_over


def test_a_message_of_the_future_takes_the_time_of_the_one_before() -> None:
    """Else nothing behind it would be read before its time comes."""
    merger = merger_of(MemorySource(of_times({"a": [1, 10**15, 2], "b": [3]})))

    assert [(each.partition, each.time_ms) for each in all_of(merger)] == [
        ("a", 1),
        ("a", 1),
        ("a", 2),
        ("b", 3),
    ]
    assert merger.num_future == 1


def test_a_message_without_the_column_of_times_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    values = [b'{"ts": 5}', b'{"tss": 6}', b'{"ts": "soon"}']
    source = MemorySource({"a": [(at, value) for at, value in enumerate(values)]})
    merger = merger_of(source, time_column="ts")

    assert sorted(each.time_ms for each in all_of(merger)) == [1, 2, 5_000]
    assert caplog.messages == [
        "a message has no time in column ts, and keeps its own: partition=a offset=1"
    ]


def test_what_waits_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "MOST_QUEUED_BYTES", 100)
    messages = {name: [(k, b"x" * 30) for k in range(50)] for name in "ab"}
    source = MemorySource(messages)
    merger = merger_of(source)

    found = []
    while taken := merger.take(float("inf"), 0.0):
        found += taken
        assert merger._bytes <= 100 + 2 * 7 * 30, "beside what one poll brings"

    assert len(found) == 100
    assert merger._bytes == 0


def test_a_partition_that_is_full_is_not_polled_while_another_is_waited_for() -> None:
    class Slow(MemorySource):
        def poll(self, wanted: Collection[str], timeout_s: float) -> Sequence[Message]:
            self.is_full = self.is_full or set(wanted) == {"b"}
            return super().poll({*wanted} if self.is_full else {*wanted} - {"b"}, timeout_s)

        is_full = False

    source = Slow(of_times({"a": list(range(9000)), "b": [0]}))
    merger = merger_of(source)

    first = merger.take(float("inf"), 0.0)

    assert source.is_full, "`a` was polled all the time"
    assert {each.partition for each in first[:2]} == {"a", "b"}


class Silent(MemorySource):
    def poll(self, wanted: Collection[str], timeout_s: float) -> Sequence[Message]:
        return []


@pytest.mark.timeout(10)
def test_a_process_that_is_told_to_end_waits_for_no_broker() -> None:
    told = iter([False] * 3 + [True] * 9)
    merger = Merger(
        Silent(of_times({"a": [1]})),
        {"a": ""},
        stall_limit_s=600.0,
        is_told_to_end=lambda: next(told),
    )

    assert merger.take(float("inf"), 0.0) == []
    assert math.isnan(merger.next_ms())
    assert not merger.is_over


def test_a_partition_whose_messages_never_come_is_named() -> None:
    merger = Merger(Silent(of_times({"a": [1]})), {"a": ""}, stall_limit_s=0.1)

    with pytest.raises(DataError, match=r"partition a has messages, but none came for 0\.1 s"):
        merger.take(float("inf"), 0.0)
