"""What waits for whom, who may post more, and what is forgotten when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.limits import MAX_EXCHANGES
from ctr_ps.protos.role import Members
from ctr_ps.protos.store import Message
from ctr_ps.ps_server.coordination.mailbox import Mailbox
from ctr_ps.ps_server.coordination.membership import Membership

MANY = 2**30


def message(sequence: int, content: bytes | None = b"rows", sender: int = 0) -> Message:
    return Message(sender=sender, receiver=1, sequence=sequence, content=content)


def leave(mailbox: Mailbox, worker: int) -> None:
    mailbox._members.leave(worker)
    mailbox.leave(worker)


def held_bytes(mailbox: Mailbox) -> int:
    return sum(len(each.message.content or b"") for each in mailbox.waiting())


def taken_of(mailbox: Mailbox, exchange: str) -> list[bytes]:
    """Returns what worker 1 takes from an exchange of which it has nothing."""
    mailbox.acknowledge(exchange, 1, 0)
    return [each.content or b"" for each in mailbox.take(exchange, 1, MANY) or []]


def taken(mailbox: Mailbox, received: int = 0, max_bytes: int = MANY) -> list[bytes] | None:
    """Returns what worker 1 takes when it has `received` already."""
    mailbox.acknowledge("exchange", 1, received)
    messages = mailbox.take("exchange", 1, max_bytes)
    return None if messages is None else [each.content or b"" for each in messages]


def test_what_was_not_acknowledged_comes_again_and_what_was_is_forgotten() -> None:
    mailbox = Mailbox(Membership(Members(2)))
    for sequence, content in enumerate([b"a", b"bb", b"ccc"]):
        mailbox.post("exchange", message(sequence, content))

    assert taken(mailbox, max_bytes=3) == [b"a", b"bb"]
    assert taken(mailbox, max_bytes=3) == [b"a", b"bb"]
    assert taken(mailbox, received=1) == [b"bb", b"ccc"]
    assert held_bytes(mailbox) == 5
    assert taken(mailbox, received=3) is None
    assert held_bytes(mailbox) == 0


def test_the_end_is_when_all_workers_have_posted_their_last_and_all_is_taken() -> None:
    mailbox = Mailbox(Membership(Members(2)))
    mailbox.post("exchange", message(0))
    mailbox.post("exchange", message(1, None))
    assert mailbox.missing("exchange", 1) == [1]
    assert taken(mailbox, received=1) is None

    mailbox.post("exchange", message(0, None, sender=1))

    assert taken(mailbox, received=1) == []
    assert taken(mailbox, received=1) == []


def test_what_is_posted_again_does_not_count_again() -> None:
    mailbox = Mailbox(Membership(Members(2)))
    for sequence, content in [(0, b"a"), (0, b"a"), (1, None), (1, None), (0, b"a")]:
        mailbox.post("exchange", message(sequence, content))
    mailbox.post("exchange", message(0, None, sender=1))

    assert taken(mailbox) == [b"a"]
    assert taken(mailbox, received=1) == []
    mailbox.post("exchange", message(1, None))  # its answer was lost, and the receiver has gone on
    assert mailbox.is_accepted("exchange", message(1, None))
    assert taken(mailbox, received=1) == []


def test_message_is_accepted_once_it_fits() -> None:
    mailbox = Mailbox(Membership(Members(2)), inbox_bytes=10)
    mailbox.post("exchange", message(0, b"x" * 6))
    mailbox.post("exchange", message(0, b"y" * 5, sender=1))
    assert mailbox.is_accepted("exchange", message(0))
    assert not mailbox.is_accepted("exchange", message(0, sender=1))

    mailbox.acknowledge("exchange", 1, 1)

    assert mailbox.is_accepted("exchange", message(0, sender=1))


@pytest.mark.parametrize("is_restored", [False, True])
def test_room_is_what_the_receiver_has_taken_before_a_restart_too(is_restored: bool) -> None:
    mailbox = Mailbox(Membership(Members(2)), inbox_bytes=10)
    for sequence in range(2):
        mailbox.post("exchange", message(sequence, b"8 bytes."))
        mailbox.acknowledge("exchange", 1, sequence)
    if is_restored:
        state, waiting = mailbox.state(), mailbox.waiting()
        mailbox = Mailbox(Membership(Members(2)), inbox_bytes=10)
        mailbox.restore(state)
        for each in waiting:
            mailbox.hold(each)

    mailbox.post("exchange", message(0, b"8 more..", sender=1))

    assert not mailbox.is_accepted("exchange", message(0, sender=1))
    mailbox.acknowledge("exchange", 1, 2)
    assert mailbox.is_accepted("exchange", message(0, sender=1))


def test_message_over_the_limit_is_accepted_when_nothing_is_before_it() -> None:
    mailbox = Mailbox(Membership(Members(2)), inbox_bytes=10)
    mailbox.post("exchange", message(0, b"x" * 11))

    assert mailbox.is_accepted("exchange", message(0))


def test_last_of_a_sender_needs_no_room() -> None:
    mailbox = Mailbox(Membership(Members(2)), inbox_bytes=10)
    mailbox.post("exchange", message(0, b"x" * 11))
    mailbox.post("exchange", message(0, None, sender=1))

    assert mailbox.is_accepted("exchange", message(0, None, sender=1))


def test_sender_that_does_not_wait_for_an_answer_is_refused() -> None:
    mailbox = Mailbox(Membership(Members(2)), inbox_bytes=10)
    mailbox.post("exchange", message(0, b"x" * 8))
    mailbox.post("exchange", message(1, b"x" * 8))

    with pytest.raises(
        ProtocolError, match=r"message 2 from worker 0 to 1 .* before the previous message"
    ):
        mailbox.post("exchange", message(2))

    assert taken(mailbox) == [b"x" * 8] * 2


def test_message_that_leaves_a_number_out_or_comes_after_the_last_is_refused() -> None:
    mailbox = Mailbox(Membership(Members(2)))
    with pytest.raises(
        ProtocolError, match=r"message 1 from worker 0 .* expected message 0: was this server"
    ):
        mailbox.post("exchange", message(1))
    mailbox.post("exchange", message(0, None))

    with pytest.raises(
        ProtocolError, match=r"message 1 from worker 0 .* after the last message of the exchange"
    ):
        mailbox.post("exchange", message(1))

    assert taken(mailbox) is None


@pytest.mark.parametrize("received", [0, 3])
def test_receiver_that_has_what_the_server_has_not_is_refused(received: int) -> None:
    mailbox = Mailbox(Membership(Members(2)))
    mailbox.post("exchange", message(0))
    mailbox.post("exchange", message(1))
    mailbox.acknowledge("exchange", 1, 1)

    with pytest.raises(
        ProtocolError, match=rf"worker 1 acknowledged {received} messages .* expected 1 to 2"
    ):
        mailbox.acknowledge("exchange", 1, received)

    assert taken(mailbox, received=1) == [b"rows"]


@pytest.mark.parametrize("worker", [0, 2, -1])
def test_who_is_done_or_unknown_is_refused(worker: int) -> None:
    mailbox = Mailbox(Membership(Members(2)))
    leave(mailbox, 0)

    for attempt in (
        lambda: mailbox.post("exchange", message(0, sender=worker)),
        lambda: mailbox.post(
            "exchange", Message(sender=1, receiver=worker, sequence=0, content=b"")
        ),
        lambda: mailbox.acknowledge("exchange", worker, 0),
    ):
        with pytest.raises(
            ProtocolError, match=rf"worker {worker} has no part in exchange 'exchange'.*\[1\]"
        ):
            attempt()

    assert held_bytes(mailbox) == 0


def test_who_waits_for_one_that_left_is_told_so() -> None:
    mailbox = Mailbox(Membership(Members(3)), inbox_bytes=1)
    mailbox.post("exchange", message(0, None, sender=1))
    mailbox.post("exchange", Message(sender=1, receiver=0, sequence=0, content=b"a"))
    unanswered = Message(sender=1, receiver=0, sequence=1, content=b"b")
    mailbox.post("exchange", unanswered)
    assert mailbox.fault_of_take("exchange", 1) is None
    assert mailbox.fault_of_post("exchange", unanswered) is None

    leave(mailbox, 0)

    assert "workers [0] left" in str(mailbox.fault_of_take("exchange", 1))
    assert "worker 0 left" in str(mailbox.fault_of_post("exchange", unanswered))
    assert held_bytes(mailbox) == 0


def test_next_exchange_makes_the_one_before_forgotten() -> None:
    mailbox = Mailbox(Membership(Members(2)), inbox_bytes=5)
    mailbox.post("exchange", message(0))
    mailbox.post("next", message(0, b"new"))
    mailbox.post("exchange", message(1))
    assert taken(mailbox) == [b"rows"] * 2

    mailbox.acknowledge("next", 1, 0)

    assert held_bytes(mailbox) == 3
    assert "takes from another exchange" in str(mailbox.fault_of_post("exchange", message(1)))
    assert not mailbox.is_accepted("exchange", message(1))


def test_exchange_that_its_receiver_never_took_from_is_forgotten_with_the_next() -> None:
    mailbox = Mailbox(Membership(Members(2)))
    mailbox.post("exchange", message(0))
    mailbox.post("next", message(0, b"new"))
    mailbox.post("after", message(0, b"newest"))

    mailbox.acknowledge("next", 1, 0)

    assert held_bytes(mailbox) == len(b"new") + len(b"newest")


def test_message_in_one_more_exchange_than_a_receiver_may_have_is_refused() -> None:
    mailbox = Mailbox(Membership(Members(2)))
    for number in range(MAX_EXCHANGES):
        mailbox.post(f"exchange-{number}", message(0))

    with pytest.raises(ProtocolError, match="from 4 earlier ones, such as 'exchange-0'"):
        mailbox.post("one-more", message(0))

    mailbox.post("exchange-0", message(1))
    mailbox.post("one-more", Message(sender=0, receiver=0, sequence=0, content=b"to another"))
    assert taken_of(mailbox, "exchange-0") == [b"rows"] * 2
    assert taken_of(mailbox, "exchange-1") == [b"rows"]
    mailbox.post("one-more", message(0))
    assert taken_of(mailbox, "one-more") == [b"rows"]


def test_empty_messages_are_bounded_by_their_number(monkeypatch) -> None:
    monkeypatch.setattr("ctr_ps.ps_server.coordination.mailbox.MAX_MESSAGES", 3)
    mailbox = Mailbox(Membership(Members(2)))
    for sequence in range(3):
        mailbox.post("exchange", message(sequence, b""))

    with pytest.raises(
        ProtocolError, match=r"message 3 .* as 3 messages already wait for the receiver"
    ):
        mailbox.post("exchange", message(3, b""))

    mailbox.post("exchange", message(3, None))
    assert taken(mailbox) == [b""] * 3


@given(
    posts=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), max_size=40),
    takes=st.lists(st.booleans()),
    restarts=st.lists(st.booleans()),
    max_bytes=st.integers(0, 60),
)
def test_every_message_comes_once_and_the_inbox_stays_within_its_bound(
    posts: list[tuple[int, int]], takes: list[bool], restarts: list[bool], max_bytes: int
) -> None:
    """Three senders post in any order, each as soon as its message before is accepted.

    Now and then another mailbox takes over the state.
    """
    mailbox = Mailbox(Membership(Members(3)), inbox_bytes=50)
    sequences = [0, 0, 0]
    received: list[Message] = []
    may_take, may_restart = iter(takes), iter(restarts)
    contents = [(sender, bytes([sender]) * size) for sender, size in posts]
    for sender, content in [*contents, (0, None), (1, None), (2, None)]:
        last = message(sequences[sender] - 1, sender=sender)
        while sequences[sender] and not mailbox.is_accepted("exchange", last):
            received += taken_messages(mailbox, len(received), max_bytes)
        mailbox.post("exchange", message(sequences[sender], content, sender=sender))
        sequences[sender] += 1
        if next(may_restart, False):
            mailbox = restarted(mailbox)
        assert held_bytes(mailbox) <= 50 + 3 * 40
        if next(may_take, False):
            received += taken_messages(mailbox, len(received), max_bytes)

    while messages := taken_messages(mailbox, len(received), max_bytes):
        received += messages

    assert mailbox.missing("exchange", 1) == []
    assert held_bytes(mailbox) == 0
    for sender in range(3):
        sent = [content for each, content in contents if each == sender]
        assert sent == [each.content for each in received if each.sender == sender]


def restarted(mailbox: Mailbox) -> Mailbox:
    other = Mailbox(mailbox._members, inbox_bytes=50)
    other.restore(mailbox.state())
    for waiting in mailbox.waiting():
        other.hold(waiting)
    assert other.state() == mailbox.state()
    assert held_bytes(other) == held_bytes(mailbox)
    return other


def taken_messages(mailbox: Mailbox, received: int, max_bytes: int) -> list[Message]:
    mailbox.acknowledge("exchange", 1, received)
    return mailbox.take("exchange", 1, max_bytes) or []
