"""One suite for every store: parcels from worker to worker."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from protos.errors import ProtocolError, WaitTimeoutError
from protos.store import Parcel, Store
from tests.support.stores import OpenJob

LIMIT_S = 20.0


def post(
    store: Store, sender: int, receiver: int, contents: Sequence[bytes | None], box: str = "box"
) -> None:
    """Posts one parcel after the other, each when the one before was accepted."""
    for sequence, content in enumerate(contents):
        parcel = Parcel(sender=sender, receiver=receiver, sequence=sequence, content=content)
        store.post_parcel(box, parcel).result()


def take_all(store: Store, worker: int, box: str = "box") -> list[Parcel]:
    """Takes until the end."""
    taken: list[Parcel] = []
    while parcels := store.take_parcels(box, worker, received=len(taken)).result():
        taken += parcels
    return taken


def contents(parcels: Sequence[Parcel], sender: int) -> list[bytes | None]:
    return [parcel.content for parcel in parcels if parcel.sender == sender]


def test_each_worker_gets_what_was_posted_to_it(open_job: OpenJob) -> None:
    stores = open_job(num_workers=3)
    for sender, store in enumerate(stores):
        for receiver in range(3):
            own = [f"{sender}>{receiver}.{number}".encode() for number in range(sender)]
            post(store, sender, receiver, [*own, None])

    for receiver, store in enumerate(stores):
        parcels = take_all(store, receiver)
        assert {parcel.receiver for parcel in parcels} <= {receiver}
        assert contents(parcels, 0) == []
        assert contents(parcels, 1) == [f"1>{receiver}.0".encode()]
        assert contents(parcels, 2) == [f"2>{receiver}.{number}".encode() for number in range(2)]
        assert [parcel.sequence for parcel in parcels if parcel.sender == 2] == [0, 1]


def test_empty_content_is_a_parcel_and_not_the_end(open_job: OpenJob) -> None:
    (store,) = open_job()

    post(store, 0, 0, [b"", b"a", None])

    assert contents(take_all(store, 0), 0) == [b"", b"a"]


def test_worker_alone_has_its_end_at_once(open_job: OpenJob) -> None:
    (store,) = open_job()
    post(store, 0, 0, [None])

    assert take_all(store, 0) == []


def test_receiver_waits_until_something_comes(open_job: OpenJob) -> None:
    first, second = open_job(num_workers=2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(take_all, second, 1)

        post(first, 0, 1, [b"a", b"b", None])
        post(second, 1, 1, [None])

        assert contents(waiting.result(LIMIT_S), 0) == [b"a", b"b"]


def test_sender_waits_until_the_receiver_has_taken(open_job: OpenJob) -> None:
    """Ten parcels of which two fit at once."""
    first, second = open_job(num_workers=2, inbox_bytes=2_000)
    sent = [bytes([number]) * 1_000 for number in range(10)]
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(post, first, 0, 1, [*sent, None])
        post(second, 1, 1, [None])

        taken = take_all(second, 1)

        sending.result(LIMIT_S)
    assert contents(taken, 0) == sent


def test_lost_answers_lose_and_double_nothing(open_job: OpenJob) -> None:
    (store,) = open_job()
    for _ in range(2):
        post(store, 0, 0, [b"a", b"b", None])
        assert [each.content for each in store.take_parcels("box", 0, received=0).result()] == [
            b"a",
            b"b",
        ]

    for _ in range(2):
        assert not store.take_parcels("box", 0, received=2).result()


def test_boxes_do_not_mix(open_job: OpenJob) -> None:
    (store,) = open_job()
    post(store, 0, 0, [b"a", None], box="first")
    post(store, 0, 0, [b"b", None], box="second")

    assert contents(take_all(store, 0, box="first"), 0) == [b"a"]
    assert contents(take_all(store, 0, box="second"), 0) == [b"b"]


def test_sender_that_does_not_end_is_named(open_job: OpenJob) -> None:
    stores = open_job(num_workers=3, wait_limit_s=0.1)
    post(stores[0], 0, 0, [None])
    post(stores[2], 2, 0, [b"a"])
    stores[0].take_parcels("box", 0, received=0).result()

    with pytest.raises(WaitTimeoutError, match=r"box 'box': nothing came for worker 0 .* \[1, 2\]"):
        stores[0].take_parcels("box", 0, received=1).result()


def test_receiver_that_takes_nothing_is_named(open_job: OpenJob) -> None:
    first, *_ = open_job(num_workers=2, wait_limit_s=0.1, inbox_bytes=10)

    with pytest.raises(WaitTimeoutError, match=r"box 'box': worker 1 took no parcels within 0.1 s"):
        post(first, 0, 1, [b"x" * 8, b"y" * 8])


def test_those_who_wait_for_one_that_leaves_are_told_at_once(open_job: OpenJob) -> None:
    first, second = open_job(num_workers=2, inbox_bytes=10)
    post(first, 0, 1, [b"x" * 8])
    posting = first.post_parcel("box", Parcel(sender=0, receiver=1, sequence=1, content=b"y" * 8))
    taking = first.take_parcels("box", 0, received=0)

    second.done(1, step=0)

    # Over the wire the post may come after the departure; then worker 1 has no part any more.
    with pytest.raises(ProtocolError, match=r"worker 1 (is done|has no part)"):
        posting.result()
    with pytest.raises(ProtocolError, match=r"workers \[1\] are done"):
        taking.result()


def test_parcel_that_is_not_the_next_is_refused(open_job: OpenJob) -> None:
    (store,) = open_job()

    with pytest.raises(ProtocolError, match="parcel 3 from worker 0 to 0 of box 'box' came"):
        store.post_parcel("box", Parcel(sender=0, receiver=0, sequence=3, content=b"a")).result()
    with pytest.raises(ProtocolError, match="has 1 parcels of box 'box'"):
        store.take_parcels("box", 0, received=1).result()
