"""The global shuffle: every row once, evenly distributed, determined by the seed; rows as bytes."""

import struct
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.errors import DataError, ProtocolError, WaitTimeoutError
from ctr_ps.protos.store import Future, Message, Store
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.data.global_shuffle import pack_rows, shuffle_globally, unpack_rows
from ctr_ps.ps_worker.data.rows_in_memory import RowsInMemory
from tests.support.cluster import cluster
from tests.support.peers import StoreFleet, fleets_of, on_each
from tests.support.rows import (
    NUM_DENSE,
    NUM_SLOTS,
    assert_same_rows,
    numbered_lists,
    numbered_rows,
    numbers_of,
    resident_bytes,
)

Shares = Sequence[range]


def one_store(num_workers: int, **settings: float) -> list[Store]:
    return [ParameterStore(num_workers=num_workers, **settings)] * num_workers


def shuffle(
    fleets: Sequence[StoreFleet],
    shares: Shares,
    *,
    kind=numbered_rows,
    seed: int = 0,
    message_bytes: int = 2_000,
) -> list[np.ndarray]:
    """Returns the numbers of each worker's rows after a shuffle."""

    def work(fleet: StoreFleet) -> np.ndarray:
        rows = RowsInMemory(NUM_DENSE, NUM_SLOTS)
        if len(shares[fleet.worker]):
            rows.extend(kind(shares[fleet.worker]), source=0)
        random = np.random.default_rng([seed, fleet.worker])
        dealt = shuffle_globally(rows, fleet.peers(), random, message_bytes=message_bytes)
        return numbers_of(dealt.gather(dealt.in_order()))

    return on_each(work, fleets)


def assert_each_row_once(shares: Shares, dealt: Sequence[np.ndarray], within: float) -> None:
    """Compares all rows, and the workers' numbers of rows with an even share."""
    expected = np.sort(np.concatenate([np.asarray(share) for share in shares]))
    np.testing.assert_array_equal(expected, np.sort(np.concatenate(dealt)))
    even = expected.size / len(shares)
    for numbers in dealt:
        assert abs(numbers.size - even) <= within * even


@pytest.mark.parametrize("kind", [numbered_rows, numbered_lists])
@pytest.mark.parametrize(
    "shares",
    [
        pytest.param([range(10_000), range(10_000, 20_000)], id="even"),
        pytest.param([range(20_000), range(0)], id="second-has-none"),
        pytest.param([range(0), range(20_000)], id="first-has-none"),
        pytest.param([range(9_000), range(9_000, 9_500), range(9_500, 30_000)], id="three"),
    ],
)
def test_each_row_is_on_one_worker_and_all_have_about_as_many(shares, kind) -> None:
    dealt = shuffle(fleets_of(one_store(len(shares))), shares, kind=kind)

    assert_each_row_once(shares, dealt, within=0.03)
    for worker, numbers in enumerate(dealt):
        own = np.isin(numbers, shares[worker]).mean()
        assert own == pytest.approx(len(shares[worker]) / sum(map(len, shares)), abs=0.02)


def test_rows_go_through_real_servers_which_keep_nothing() -> None:
    shares = [range(10_000), range(10_000, 20_000)]
    with cluster(num_servers=2, num_workers=2) as servers:
        fleets = fleets_of([servers.client() for _ in shares])

        dealt = shuffle(fleets, shares)

        assert_each_row_once(shares, dealt, within=0.02)
        assert [store.engine.job.waiting() for store in servers.stores] == [[], []]


def test_same_seed_deals_alike_and_another_otherwise() -> None:
    shares = [range(300), range(300, 800), range(800, 1_500)]

    def dealt(seed: int) -> list[list[int]]:
        fleets = fleets_of(one_store(3))
        return [
            numbers.tolist() for numbers in shuffle(fleets, shares, seed=seed, message_bytes=500)
        ]

    assert dealt(1) == dealt(1)
    assert dealt(1) != dealt(2)


def test_workers_that_have_nothing_have_nothing_afterwards() -> None:
    dealt = shuffle(fleets_of(one_store(2)), [range(0), range(0)])

    assert [numbers.size for numbers in dealt] == [0, 0]


def test_small_exchanges_do_not_block() -> None:
    """All workers fill all exchanges at once."""
    shares = [range(start, start + 3_000) for start in (0, 3_000, 6_000)]

    dealt = shuffle(fleets_of(one_store(3, inbox_bytes=1_000, wait_limit_s=20.0)), shares)

    assert_each_row_once(shares, dealt, within=0.1)


def test_two_shuffles_in_a_row_do_not_mix() -> None:
    fleets = fleets_of(one_store(2))
    for start in (0, 1_000):
        shares = [range(start, start + 500), range(start + 500, start + 1_000)]
        assert_each_row_once(shares, shuffle(fleets, shares), within=0.2)


def test_worker_alone_keeps_its_rows() -> None:
    (numbers,) = shuffle(fleets_of(one_store(1)), [range(100)])

    assert numbers.tolist() == list(range(100))


class LossyStore:
    """A store whose messages of one worker arrive without their rows."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.all_reduce = store.all_reduce
        self.take = store.take

    def post(self, exchange: str, message: Message) -> Future[None]:
        content = None if message.content is None else pack_rows(numbered_rows(range(0)))
        return self._store.post(exchange, replace(message, content=content))


def test_rows_that_are_lost_are_an_error_for_all() -> None:
    store, *_ = one_store(2)
    fleets = fleets_of([store, LossyStore(store)])
    shares = [range(1_000), range(1_000, 2_000)]

    for first_asked in (fleets, fleets[::-1]):
        with pytest.raises(ProtocolError, match="had 2000 rows before the shuffle, but have 1"):
            shuffle(first_asked, shares)


def test_rows_that_were_sent_take_no_memory() -> None:
    """A million rows of 36 bytes in one process; those before the shuffle are still referred to."""
    shuffle(fleets_of(one_store(2)), [range(1_000), range(1_000, 2_000)])  # loads and compiles
    old = [RowsInMemory(NUM_DENSE, NUM_SLOTS) for _ in range(2)]
    for rows in old:
        rows.extend(numbered_rows(range(500_000)), source=0)
    before = resident_bytes()

    def work(fleet: StoreFleet) -> RowsInMemory:
        random = np.random.default_rng(fleet.worker)
        return shuffle_globally(old[fleet.worker], fleet.peers(), random, message_bytes=2**16)

    new = on_each(work, fleets_of(one_store(2, inbox_bytes=2**20)))

    assert resident_bytes() - before < 0.3 * sum(rows.size_bytes for rows in new)


class DyingStore:
    """A store that carries some messages of a worker, and then loses it."""

    def __init__(self, store: Store, num_messages: int) -> None:
        self._store = store
        self._num_left = num_messages
        self.all_reduce = store.all_reduce
        self.take = store.take

    def post(self, exchange: str, message: Message) -> Future[None]:
        self._num_left -= 1
        if self._num_left < 0:
            raise ConnectionError("the worker is no more")
        return self._store.post(exchange, message)


def test_worker_that_dies_is_named_to_the_others() -> None:
    store, *_ = one_store(3, wait_limit_s=0.5)
    fleets = fleets_of([store, store, DyingStore(store, num_messages=3)])
    shares = [range(start, start + 1_000) for start in (0, 1_000, 2_000)]

    with pytest.raises(WaitTimeoutError, match=r"workers \[2\] have not posted their last message"):
        shuffle(fleets, shares)


def test_rows_with_and_without_labels_are_an_error_for_all() -> None:
    def work(fleet: StoreFleet) -> None:
        rows = RowsInMemory(NUM_DENSE, NUM_SLOTS)
        rows.extend(numbered_rows(range(10), labels=fleet.worker == 0), source=0)
        with pytest.raises(
            DataError, match="rows of 1 worker have labels, but rows of 1 have none"
        ):
            shuffle_globally(rows, fleet.peers(), np.random.default_rng(0))
        assert rows.size == 10

    on_each(work, fleets_of(one_store(2)))


def test_rows_of_another_schema_name_the_worker() -> None:
    def work(fleet: StoreFleet) -> None:
        rows = RowsInMemory(NUM_DENSE, NUM_SLOTS if fleet.worker == 0 else NUM_SLOTS + 1)
        if fleet.worker == 0:
            rows.extend(numbered_rows(range(1_000)), source=0)
        shuffle_globally(rows, fleet.peers(), np.random.default_rng(0))

    fleets = fleets_of(one_store(2, wait_limit_s=0.5))
    with pytest.raises(
        ProtocolError, match="from worker 0: received rows of 2 numbers and 3 slots"
    ):
        on_each(work, fleets[::-1])


WIDTHS = {"num_dense": NUM_DENSE, "num_slots": NUM_SLOTS}


@given(numbers=st.lists(st.integers(0, 10**6)), labels=st.booleans(), weights=st.booleans())
def test_rows_survive_the_way(numbers, labels, weights) -> None:
    for rows in (
        numbered_rows(numbers, labels=labels, weights=weights),
        numbered_lists(numbers),
    ):
        assert_same_rows(rows, unpack_rows(pack_rows(rows), **WIDTHS))


@pytest.mark.parametrize("num_others", [1, 3])
def test_other_labels_survive_the_way(num_others) -> None:
    others = np.arange(7 * num_others, dtype=np.float32).reshape(7, num_others) % 2
    rows = replace(numbered_rows(range(7), weights=True), other_labels=others)

    found = unpack_rows(pack_rows(rows), **WIDTHS)

    assert_same_rows(rows, found)
    np.testing.assert_array_equal(found.other_labels, others)


def test_columns_are_aligned() -> None:
    rows = unpack_rows(pack_rows(numbered_lists(range(7))), **WIDTHS)

    assert rows.labels is not None
    for column in (rows.keys, rows.dense, rows.labels):
        assert column.flags.aligned


@pytest.mark.parametrize(("num_dense", "num_slots"), [(NUM_DENSE + 1, NUM_SLOTS), (NUM_DENSE, 1)])
def test_rows_of_another_schema_are_refused(num_dense, num_slots) -> None:
    with pytest.raises(
        ProtocolError, match=f"received rows of 2 numbers and 3 slots, .* {num_dense} and"
    ):
        unpack_rows(pack_rows(numbered_rows(range(3))), num_dense=num_dense, num_slots=num_slots)


@pytest.mark.parametrize("length", [0, 31, 40, -1])
def test_truncated_bytes_are_refused(length) -> None:
    with pytest.raises(ProtocolError, match="bytes"):
        unpack_rows(pack_rows(numbered_rows(range(3)))[:length], **WIDTHS)


def test_counts_that_wrap_around_are_refused() -> None:
    num_rows = 2**32 // (2**16 - 1) + 1
    counts = np.full(num_rows, 2**16 - 1, "<u2")
    num_keys = int(counts.sum(dtype=np.int64)) - 2**32
    header = struct.pack("<QQIIII", num_rows, num_keys, 0, 1, 0, 1)

    with pytest.raises(ProtocolError, match="the counts add up to"):
        unpack_rows(header + bytes(8 * num_keys) + counts.tobytes(), num_dense=0, num_slots=1)


def test_rows_without_bytes_of_their_own_are_no_more_than_their_keys() -> None:
    """Else a message of 32 bytes would be rows by the billion."""
    header = struct.pack("<QQIIII", 2**60, 0, 0, 1, 0, 0)

    with pytest.raises(
        ProtocolError, match=f"received 0 keys, expected {2**60} x 1: one for each row"
    ):
        unpack_rows(header, num_dense=0, num_slots=1)


def test_counts_that_do_not_fit_the_keys_are_refused() -> None:
    data = bytearray(pack_rows(numbered_lists(range(4))))
    data[-2:] = np.uint16(9).tobytes()

    with pytest.raises(ProtocolError, match="the counts add up to"):
        unpack_rows(bytes(data), **WIDTHS)
