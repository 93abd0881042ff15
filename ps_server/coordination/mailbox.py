"""Parcels between workers: what was posted and not yet taken, and who may post more.

Sans-IO: parcels, takings and departures in; what can be answered out. No clock, no locks.

    post --> | taken, and known to have arrived | sent, perhaps on their way | room | over the limit |
             forgotten                            <------- held: at most the limit ------> one a sender

A parcel is kept when it comes, and its post answered once the receiver's inbox holds no more than the limit
up to its end. A sender waits for that answer before it posts the next, so an inbox never holds more than the
limit and one parcel of each sender. What was sent is kept until the receiver says that it has it: a lost
answer is sent again.
"""

import itertools
from collections import deque
from dataclasses import dataclass, field

from protos.errors import ProtocolError
from protos.store import Parcel

INBOX_BYTES = 64 * 2**20
"""Limit of what waits for one receiver: some seconds of rows, so that nobody waits for a short pause."""


@dataclass(slots=True)
class _Sender:
    """What one sender has posted to an inbox: its next number, and where its last parcel begins and ends."""

    sequence: int = 0
    start: int = 0
    end: int = 0
    has_ended: bool = False


@dataclass(slots=True)
class _Inbox:
    """What one receiver has got in one box; `posted` and `taken` count bytes from the beginning."""

    senders: dict[int, _Sender] = field(default_factory=dict)
    parcels: deque[Parcel] = field(default_factory=deque)
    received: int = 0
    posted: int = 0
    taken: int = 0

    @property
    def num_posted(self) -> int:
        return self.received + len(self.parcels)

    def has_room_for(self, sender: _Sender, limit: int) -> bool:
        """Whether the inbox is within the limit up to the sender's last parcel, or has nothing before it.

        That there is no more takes no room.
        """
        is_within = sender.end - self.taken <= limit or sender.start <= self.taken
        return is_within or sender.has_ended


class Mailbox:
    """All boxes of a job. Not thread-safe."""

    def __init__(self, num_workers: int, *, inbox_bytes: int = INBOX_BYTES) -> None:
        """Has no parcels; an inbox is over its limit with more than `inbox_bytes`."""
        self._workers = range(num_workers)
        self._inbox_bytes = inbox_bytes
        self._left: set[int] = set()
        self._inboxes: dict[tuple[str, int], _Inbox] = {}  # of a receiver, in the order of boxes

    @property
    def held_bytes(self) -> int:
        """Bytes of all parcels that are held."""
        return sum(inbox.posted - inbox.taken for inbox in self._inboxes.values())

    def post(self, box: str, parcel: Parcel) -> None:
        """Keeps a parcel, unless it was posted before.

        Raises:
            ProtocolError: If it is not the next from its sender, or one of the two is done or not of this
                job.
        """
        self._require_present(box, parcel.sender)
        self._require_present(box, parcel.receiver)
        inbox = self._inbox(box, parcel.receiver)
        sender = inbox.senders.get(parcel.sender, _Sender())
        if parcel.sequence < sender.sequence:
            return
        self._require_next(box, parcel, inbox, sender)
        size = len(parcel.content or b"")
        sender.sequence += 1
        sender.start, sender.end = inbox.posted, inbox.posted + size
        inbox.posted += size
        if parcel.content is None:
            sender.has_ended = True
        else:
            inbox.parcels.append(parcel)
        inbox.senders[parcel.sender] = sender
        self._inboxes[box, parcel.receiver] = inbox

    def is_accepted(self, box: str, parcel: Parcel) -> bool:
        """Whether the post of a parcel can be answered: it fits."""
        inbox = self._inbox(box, parcel.receiver)
        sender = inbox.senders.get(parcel.sender)
        return sender is not None and inbox.has_room_for(sender, self._inbox_bytes)

    def fault_of_post(self, box: str, parcel: Parcel) -> str | None:
        """Returns why a parcel that was posted will never be taken; None as long as it may be."""
        if parcel.receiver in self._left:
            return f"worker {parcel.receiver} is done, but has not taken all its parcels of box {box!r}"
        if parcel.sender not in self._inbox(box, parcel.receiver).senders:
            return (
                f"worker {parcel.receiver} takes from another box, but had not all of box {box!r}"
            )
        return None

    def acknowledge(self, box: str, receiver: int, received: int) -> None:
        """Forgets the first `received` parcels of a box, and all of the boxes before it for this receiver.

        A sender posts to a box only after its last to the one before, so the older one has come first.

        Raises:
            ProtocolError: If there were not so many, or more are forgotten, or the receiver is done.
        """
        self._require_present(box, receiver)
        inbox = self._inbox(box, receiver)
        if not inbox.received <= received <= inbox.num_posted:
            raise ProtocolError(
                f"worker {receiver} says that it has {received} parcels of box {box!r}, but of its "
                f"{inbox.num_posted} parcels {inbox.received} are forgotten: was this server restarted?"
            )
        boxes = [each for each, of in self._inboxes if of == receiver]
        for each in itertools.takewhile(lambda each: each != box, boxes):
            del self._inboxes[each, receiver]
        self._inboxes[box, receiver] = inbox
        while inbox.received < received:
            inbox.taken += len(inbox.parcels.popleft().content or b"")
            inbox.received += 1

    def take(self, box: str, receiver: int, max_bytes: int) -> list[Parcel] | None:
        """Returns the parcels after those acknowledged, at least one, and more up to `max_bytes` together.

        None if there are none yet; an empty list if there will be no more.
        """
        inbox = self._inbox(box, receiver)
        parcels: list[Parcel] = []
        size = 0
        for parcel in inbox.parcels:
            size += len(parcel.content or b"")
            if parcels and size > max_bytes:
                break
            parcels.append(parcel)
        return parcels or (None if self.missing(box, receiver) else [])

    def missing(self, box: str, receiver: int) -> list[int]:
        """Returns the workers that have not posted their last to this receiver, ascending."""
        inbox = self._inbox(box, receiver)
        return [
            worker
            for worker in self._workers
            if worker not in inbox.senders or not inbox.senders[worker].has_ended
        ]

    def fault_of_take(self, box: str, receiver: int) -> str | None:
        """Returns why a receiver waits for what will never come; None as long as it may come."""
        left = [worker for worker in self.missing(box, receiver) if worker in self._left]
        if not left:
            return None
        return f"workers {left} are done, but have not posted their last parcel of box {box!r}"

    def leave(self, worker: int) -> None:
        """A worker is done: what waits for it is forgotten."""
        self._left.add(worker)
        self._inboxes = {
            place: inbox for place, inbox in self._inboxes.items() if place[1] != worker
        }

    def _inbox(self, box: str, receiver: int) -> _Inbox:
        """Returns an inbox; one that is not there yet is empty."""
        return self._inboxes.get((box, receiver)) or _Inbox()

    def _require_present(self, box: str, worker: int) -> None:
        if worker not in self._workers or worker in self._left:
            present = [each for each in self._workers if each not in self._left]
            raise ProtocolError(
                f"worker {worker} has no part in box {box!r}: it is done or not of this job (there are: "
                f"{present}); all workers must take part in an exchange"
            )

    def _require_next(self, box: str, parcel: Parcel, inbox: _Inbox, sender: _Sender) -> None:
        what = f"parcel {parcel.sequence} from worker {parcel.sender} to {parcel.receiver} of box {box!r}"
        if parcel.sequence > sender.sequence:
            raise ProtocolError(
                f"{what} came, expected {sender.sequence}: was this server restarted, or did the receiver "
                f"go on to another box?"
            )
        if sender.has_ended:
            raise ProtocolError(f"{what} came after the last one")
        if not inbox.has_room_for(sender, self._inbox_bytes):
            raise ProtocolError(f"{what} came before the one before it was answered")
