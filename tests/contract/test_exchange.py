"""One suite for every store: messages from worker to worker."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from ctr_ps.protos.errors import ProtocolError, WaitTimeoutError
from ctr_ps.protos.store import Message, Store
from tests.support.stores import OpenJob

LIMIT_S = 20.0


def post(
    store: Store,
    sender: int,
    receiver: int,
    contents: Sequence[bytes | None],
    exchange: str = "exchange",
) -> None:
    """Posts one message after the other, each when the one before was accepted."""
    for sequence, content in enumerate(contents):
        message = Message(sender=sender, receiver=receiver, sequence=sequence, content=content)
        store.post(exchange, message).result()


def take_all(store: Store, worker: int, exchange: str = "exchange") -> list[Message]:
    taken: list[Message] = []
    while messages := store.take(exchange, worker, received=len(taken)).result():
        taken += messages
    return taken


def contents(messages: Sequence[Message], sender: int) -> list[bytes | None]:
    return [message.content for message in messages if message.sender == sender]


def test_each_worker_gets_what_was_posted_to_it(open_job: OpenJob) -> None:
    stores = open_job(num_workers=3)
    for sender, store in enumerate(stores):
        for receiver in range(3):
            own = [f"{sender}>{receiver}.{number}".encode() for number in range(sender)]
            post(store, sender, receiver, [*own, None])

    for receiver, store in enumerate(stores):
        messages = take_all(store, receiver)
        assert {message.receiver for message in messages} <= {receiver}
        assert contents(messages, 0) == []
        assert contents(messages, 1) == [f"1>{receiver}.0".encode()]
        assert contents(messages, 2) == [f"2>{receiver}.{number}".encode() for number in range(2)]
        assert [message.sequence for message in messages if message.sender == 2] == [0, 1]


def test_empty_content_is_a_message_and_not_the_end(open_job: OpenJob) -> None:
    (store,) = open_job()

    post(store, 0, 0, [b"", b"a", None])

    assert contents(take_all(store, 0), 0) == [b"", b"a"]


def test_receiver_waits_until_something_comes(open_job: OpenJob) -> None:
    first, second = open_job(num_workers=2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(take_all, second, 1)

        post(first, 0, 1, [b"a", b"b", None])
        post(second, 1, 1, [None])

        assert contents(waiting.result(LIMIT_S), 0) == [b"a", b"b"]


def test_sender_waits_until_the_receiver_has_taken(open_job: OpenJob) -> None:
    """Ten messages of which two fit at once."""
    first, second = open_job(num_workers=2, inbox_bytes=2_000)
    sent = [bytes([number]) * 1_000 for number in range(10)]
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(post, first, 0, 1, [*sent, None])
        post(second, 1, 1, [None])

        taken = take_all(second, 1)

        sending.result(LIMIT_S)
    assert contents(taken, 0) == sent


def test_sender_that_does_not_end_is_named(open_job: OpenJob) -> None:
    stores = open_job(num_workers=3, wait_limit_s=0.1)
    post(stores[0], 0, 0, [None])
    post(stores[2], 2, 0, [b"a"])
    stores[0].take("exchange", 0, received=0).result()

    with pytest.raises(
        WaitTimeoutError, match=r"exchange 'exchange': no message for worker 0 .* \[1, 2\]"
    ):
        stores[0].take("exchange", 0, received=1).result()


def test_receiver_that_takes_nothing_is_named(open_job: OpenJob) -> None:
    first, *_ = open_job(num_workers=2, wait_limit_s=0.1, inbox_bytes=10)

    with pytest.raises(
        WaitTimeoutError, match=r"exchange 'exchange': worker 1 took no messages within 0.1 s"
    ):
        post(first, 0, 1, [b"x" * 8, b"y" * 8])


def test_those_who_wait_for_one_that_leaves_are_told_at_once(open_job: OpenJob) -> None:
    first, second = open_job(num_workers=2, inbox_bytes=10)
    post(first, 0, 1, [b"x" * 8])
    posting = first.post("exchange", Message(sender=0, receiver=1, sequence=1, content=b"y" * 8))
    taking = first.take("exchange", 0, received=0)

    second.leave(1, step=0)

    # Over the wire the post may come after the departure; then worker 1 has no part any more.
    with pytest.raises(ProtocolError, match=r"worker 1 (left|has no part)"):
        posting.result()
    with pytest.raises(ProtocolError, match=r"workers \[1\] left"):
        taking.result()
