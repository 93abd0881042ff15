"""What waits for whom, who may post more, and what is forgotten when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.errors import ProtocolError
from protos.store import Parcel
from ps_server.coordination.mailbox import Mailbox

MANY = 2**30


def parcel(sequence: int, content: bytes | None = b"rows", sender: int = 0) -> Parcel:
    """Returns a parcel to worker 1."""
    return Parcel(sender=sender, receiver=1, sequence=sequence, content=content)


def taken(mailbox: Mailbox, received: int = 0, max_bytes: int = MANY) -> list[bytes] | None:
    """Returns what worker 1 takes when it has `received` already."""
    mailbox.acknowledge("box", 1, received)
    parcels = mailbox.take("box", 1, max_bytes)
    return None if parcels is None else [each.content or b"" for each in parcels]


def test_parcels_come_in_the_order_in_which_they_were_posted() -> None:
    mailbox = Mailbox(2)
    assert taken(mailbox) is None

    mailbox.post("box", parcel(0, b"a"))
    mailbox.post("box", parcel(0, b"b", sender=1))
    mailbox.post("box", parcel(1, b"c"))

    assert taken(mailbox) == [b"a", b"b", b"c"]


def test_what_was_not_acknowledged_comes_again_and_what_was_is_forgotten() -> None:
    mailbox = Mailbox(2)
    for sequence, content in enumerate([b"a", b"bb", b"ccc"]):
        mailbox.post("box", parcel(sequence, content))

    assert taken(mailbox, max_bytes=3) == [b"a", b"bb"]
    assert taken(mailbox, max_bytes=3) == [b"a", b"bb"]
    assert taken(mailbox, received=1) == [b"bb", b"ccc"]
    assert mailbox.held_bytes == 5
    assert taken(mailbox, received=3) is None
    assert mailbox.held_bytes == 0


def test_one_parcel_comes_however_large_it_is() -> None:
    mailbox = Mailbox(2)
    mailbox.post("box", parcel(0, b"large"))

    assert taken(mailbox, max_bytes=1) == [b"large"]


def test_the_end_is_when_all_workers_have_posted_their_last_and_all_is_taken() -> None:
    mailbox = Mailbox(2)
    mailbox.post("box", parcel(0))
    mailbox.post("box", parcel(1, None))
    assert mailbox.missing("box", 1) == [1]
    assert taken(mailbox, received=1) is None

    mailbox.post("box", parcel(0, None, sender=1))

    assert taken(mailbox, received=1) == []
    assert taken(mailbox, received=1) == []


def test_what_is_posted_again_does_not_count_again() -> None:
    mailbox = Mailbox(2)
    for sequence, content in [(0, b"a"), (0, b"a"), (1, None), (1, None), (0, b"a")]:
        mailbox.post("box", parcel(sequence, content))
    mailbox.post("box", parcel(0, None, sender=1))

    assert taken(mailbox) == [b"a"]
    assert taken(mailbox, received=1) == []
    mailbox.post("box", parcel(1, None))  # its answer was lost, and the receiver has gone on
    assert mailbox.is_accepted("box", parcel(1, None))
    assert taken(mailbox, received=1) == []


def test_parcel_is_accepted_once_it_fits() -> None:
    mailbox = Mailbox(2, inbox_bytes=10)
    mailbox.post("box", parcel(0, b"x" * 6))
    mailbox.post("box", parcel(0, b"y" * 5, sender=1))
    assert mailbox.is_accepted("box", parcel(0))
    assert not mailbox.is_accepted("box", parcel(0, sender=1))

    mailbox.acknowledge("box", 1, 1)

    assert mailbox.is_accepted("box", parcel(0, sender=1))


def test_parcel_over_the_limit_is_accepted_when_nothing_is_before_it() -> None:
    mailbox = Mailbox(2, inbox_bytes=10)
    mailbox.post("box", parcel(0, b"x" * 11))

    assert mailbox.is_accepted("box", parcel(0))


def test_last_of_a_sender_needs_no_room() -> None:
    mailbox = Mailbox(2, inbox_bytes=10)
    mailbox.post("box", parcel(0, b"x" * 11))
    mailbox.post("box", parcel(0, None, sender=1))

    assert mailbox.is_accepted("box", parcel(0, None, sender=1))


def test_sender_that_does_not_wait_for_an_answer_is_refused() -> None:
    mailbox = Mailbox(2, inbox_bytes=10)
    mailbox.post("box", parcel(0, b"x" * 8))
    mailbox.post("box", parcel(1, b"x" * 8))

    with pytest.raises(
        ProtocolError, match=r"parcel 2 from worker 0 to 1 .* before the one before"
    ):
        mailbox.post("box", parcel(2))

    assert taken(mailbox) == [b"x" * 8] * 2


def test_parcel_that_leaves_a_number_out_or_comes_after_the_last_is_refused() -> None:
    mailbox = Mailbox(2)
    with pytest.raises(
        ProtocolError, match=r"parcel 1 from worker 0 .* expected 0: was this server"
    ):
        mailbox.post("box", parcel(1))
    mailbox.post("box", parcel(0, None))

    with pytest.raises(ProtocolError, match=r"parcel 1 from worker 0 .* after the last one"):
        mailbox.post("box", parcel(1))

    assert taken(mailbox) is None


@pytest.mark.parametrize("received", [0, 3])
def test_receiver_that_has_what_the_server_has_not_is_refused(received: int) -> None:
    mailbox = Mailbox(2)
    mailbox.post("box", parcel(0))
    mailbox.post("box", parcel(1))
    mailbox.acknowledge("box", 1, 1)

    with pytest.raises(
        ProtocolError, match=rf"worker 1 .* has {received} parcels .* its 2 parcels 1"
    ):
        mailbox.acknowledge("box", 1, received)

    assert taken(mailbox, received=1) == [b"rows"]


@pytest.mark.parametrize("worker", [0, 2, -1])
def test_who_is_done_or_unknown_is_refused(worker: int) -> None:
    mailbox = Mailbox(2)
    mailbox.leave(0)

    for attempt in (
        lambda: mailbox.post("box", parcel(0, sender=worker)),
        lambda: mailbox.post("box", Parcel(sender=1, receiver=worker, sequence=0, content=b"")),
        lambda: mailbox.acknowledge("box", worker, 0),
    ):
        with pytest.raises(
            ProtocolError, match=rf"worker {worker} has no part in box 'box'.*\[1\]"
        ):
            attempt()

    assert mailbox.held_bytes == 0


def test_who_waits_for_one_that_left_is_told_so() -> None:
    mailbox = Mailbox(3, inbox_bytes=1)
    mailbox.post("box", parcel(0, None, sender=1))
    mailbox.post("box", Parcel(sender=1, receiver=0, sequence=0, content=b"a"))
    unanswered = Parcel(sender=1, receiver=0, sequence=1, content=b"b")
    mailbox.post("box", unanswered)
    assert mailbox.fault_of_take("box", 1) is None
    assert mailbox.fault_of_post("box", unanswered) is None

    mailbox.leave(0)

    assert "workers [0] are done" in str(mailbox.fault_of_take("box", 1))
    assert "worker 0 is done" in str(mailbox.fault_of_post("box", unanswered))
    assert mailbox.held_bytes == 0


def test_next_box_makes_the_one_before_forgotten() -> None:
    mailbox = Mailbox(2, inbox_bytes=5)
    mailbox.post("box", parcel(0))
    mailbox.post("next", parcel(0, b"new"))
    mailbox.post("box", parcel(1))
    assert taken(mailbox) == [b"rows"] * 2

    mailbox.acknowledge("next", 1, 0)

    assert mailbox.held_bytes == 3
    assert "takes from another box" in str(mailbox.fault_of_post("box", parcel(1)))
    assert not mailbox.is_accepted("box", parcel(1))


def test_box_that_its_receiver_never_took_from_is_forgotten_with_the_next() -> None:
    mailbox = Mailbox(2)
    mailbox.post("box", parcel(0))
    mailbox.post("next", parcel(0, b"new"))
    mailbox.post("after", parcel(0, b"newest"))

    mailbox.acknowledge("next", 1, 0)

    assert mailbox.held_bytes == len(b"new") + len(b"newest")


@given(
    posts=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), max_size=40),
    takes=st.lists(st.booleans()),
    max_bytes=st.integers(0, 60),
)
def test_every_parcel_comes_once_and_the_inbox_stays_within_its_bound(
    posts: list[tuple[int, int]], takes: list[bool], max_bytes: int
) -> None:
    """Three senders post in any order, each as soon as its parcel before is accepted."""
    mailbox = Mailbox(3, inbox_bytes=50)
    sequences = [0, 0, 0]
    received: list[Parcel] = []
    may_take = iter(takes)
    contents = [(sender, bytes([sender]) * size) for sender, size in posts]
    for sender, content in [*contents, (0, None), (1, None), (2, None)]:
        last = parcel(sequences[sender] - 1, sender=sender)
        while sequences[sender] and not mailbox.is_accepted("box", last):
            received += taken_parcels(mailbox, len(received), max_bytes)
        mailbox.post("box", parcel(sequences[sender], content, sender=sender))
        sequences[sender] += 1
        assert mailbox.held_bytes <= 50 + 3 * 40
        if next(may_take, False):
            received += taken_parcels(mailbox, len(received), max_bytes)

    while parcels := taken_parcels(mailbox, len(received), max_bytes):
        received += parcels

    assert mailbox.missing("box", 1) == []
    assert mailbox.held_bytes == 0
    for sender in range(3):
        sent = [content for each, content in contents if each == sender]
        assert sent == [each.content for each in received if each.sender == sender]


def taken_parcels(mailbox: Mailbox, received: int, max_bytes: int) -> list[Parcel]:
    mailbox.acknowledge("box", 1, received)
    return mailbox.take("box", 1, max_bytes) or []
