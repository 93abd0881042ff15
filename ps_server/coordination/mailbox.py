"""Messages between workers: those posted and not yet taken, and who may post more.

Sans-IO: posts, takes and departures in; the calls that can be answered out. No clock, no locks.

    post --> | taken, and known to have arrived | sent, perhaps on their way | room | over the limit |
             forgotten                            <------- held: at most the limit ------> one a sender

A message is kept when it comes, and its post answered once the receiver's inbox holds no more than the limit
up to its end. A sender waits for that answer before it posts the next, so an inbox never holds more than the
limit and one message of each sender. A message that was sent is kept until the receiver acknowledges it: a
lost answer is sent again.
"""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.limits import MAX_EXCHANGES, MAX_MESSAGES
from ctr_ps.protos.store import Message
from ctr_ps.ps_server.coordination.job_state import InboxState, PostedBy, WaitingMessage
from ctr_ps.ps_server.coordination.membership import Membership

INBOX_BYTES = 64 * 2**20
"""Limit of the messages for one receiver: some seconds of rows, so that a short pause delays no sender."""


@dataclass(slots=True)
class _Inbox:
    """One receiver's messages of one exchange; `posted` and `taken` count bytes from the beginning."""

    senders: dict[int, PostedBy] = field(default_factory=dict)
    messages: deque[Message] = field(default_factory=deque)
    received: int = 0
    posted: int = 0
    taken: int = 0

    @property
    def num_posted(self) -> int:
        return self.received + len(self.messages)

    def has_room_for(self, sender: PostedBy, limit: int) -> bool:
        """Whether the inbox is within the limit up to the sender's last message, or has nothing before it.

        The end of a sender's messages takes no room.
        """
        is_within = sender.end - self.taken <= limit or sender.start <= self.taken
        return is_within or sender.has_ended


class Mailbox:
    """All exchanges of a job. Not thread-safe."""

    def __init__(self, members: Membership, *, inbox_bytes: int = INBOX_BYTES) -> None:
        """Has no messages; an inbox is over its limit with more than `inbox_bytes`."""
        self._members = members
        self._inbox_bytes = inbox_bytes
        # Of a receiver, in the order of exchanges.
        self._inboxes: dict[tuple[str, int], _Inbox] = {}

    def state(self) -> list[InboxState]:
        """Returns what `restore` needs, besides the messages of `waiting`."""
        return [
            InboxState(
                exchange=exchange,
                receiver=receiver,
                senders=dict(inbox.senders),
                received=inbox.received,
                taken=inbox.taken,
            )
            for (exchange, receiver), inbox in self._inboxes.items()
        ]

    @property
    def is_busy(self) -> bool:
        """Whether an exchange has begun and not ended."""
        return any(
            inbox.messages or self.missing(exchange, receiver)
            for (exchange, receiver), inbox in self._inboxes.items()
        )

    def waiting(self) -> list[WaitingMessage]:
        """Returns the messages that are held, those of an inbox in its order."""
        return [
            WaitingMessage(exchange=exchange, message=message)
            for (exchange, _), inbox in self._inboxes.items()
            for message in inbox.messages
        ]

    def restore(self, inboxes: Sequence[InboxState]) -> None:
        """Takes over what `state` returned; `hold` takes over the messages."""
        self._inboxes = {
            (inbox.exchange, inbox.receiver): _Inbox(
                senders=dict(inbox.senders),
                received=inbox.received,
                posted=inbox.taken,
                taken=inbox.taken,
            )
            for inbox in inboxes
        }

    def hold(self, waiting: WaitingMessage) -> None:
        """Holds a message that was held when the state was taken."""
        inbox = self._inboxes[waiting.exchange, waiting.message.receiver]
        inbox.messages.append(waiting.message)
        inbox.posted += len(waiting.message.content or b"")

    def post(self, exchange: str, message: Message) -> None:
        """Keeps a message, unless it was posted before.

        Raises ProtocolError if it is not the next from its sender, one of the two workers has left or is not
        of this job, or too many messages or exchanges wait for the receiver.
        """
        self._require_present(exchange, message.sender)
        self._require_present(exchange, message.receiver)
        exchanges = [each for each, of in self._inboxes if of == message.receiver]
        if exchange not in exchanges and len(exchanges) >= MAX_EXCHANGES:
            raise ProtocolError(
                f"worker {message.receiver} was sent a message of exchange {exchange!r}, but has taken "
                f"nothing from {len(exchanges)} earlier ones, such as {exchanges[0]!r}: all workers must "
                "take part in the same exchanges in the same order"
            )
        inbox = self._inbox(exchange, message.receiver)
        sender = inbox.senders.get(message.sender, PostedBy())
        if message.sequence < sender.sequence:
            return
        self._require_next(exchange, message, inbox, sender)
        size = len(message.content or b"")
        inbox.senders[message.sender] = PostedBy(
            sequence=sender.sequence + 1,
            start=inbox.posted,
            end=inbox.posted + size,
            has_ended=message.content is None,
        )
        inbox.posted += size
        if message.content is not None:
            inbox.messages.append(message)
        self._inboxes[exchange, message.receiver] = inbox

    def is_accepted(self, exchange: str, message: Message) -> bool:
        """Whether the post of a message can be answered: it fits."""
        inbox = self._inbox(exchange, message.receiver)
        sender = inbox.senders.get(message.sender)
        return sender is not None and inbox.has_room_for(sender, self._inbox_bytes)

    def fault_of_post(self, exchange: str, message: Message) -> str | None:
        """Returns why a message that was posted will never be taken; None while it may be."""
        if message.receiver in self._members.left:
            return f"worker {message.receiver} left before it took all messages of exchange {exchange!r}"
        if message.sender not in self._inbox(exchange, message.receiver).senders:
            return (
                f"worker {message.receiver} takes from another exchange before it took all messages of "
                f"exchange {exchange!r}"
            )
        return None

    def acknowledge(self, exchange: str, receiver: int, received: int) -> None:
        """Forgets the first `received` messages of an exchange, and earlier exchanges of this receiver.

        A sender posts to an exchange only after its last to the one before, so the older one has come first.
        Raises ProtocolError if fewer were posted, or more are forgotten, or the receiver has left.
        """
        self._require_present(exchange, receiver)
        inbox = self._inbox(exchange, receiver)
        if not inbox.received <= received <= inbox.num_posted:
            raise ProtocolError(
                f"worker {receiver} acknowledged {received} messages of exchange {exchange!r}, expected "
                f"{inbox.received} to {inbox.num_posted}: was this server restarted?"
            )
        exchanges = [each for each, of in self._inboxes if of == receiver]
        for each in itertools.takewhile(lambda each: each != exchange, exchanges):
            del self._inboxes[each, receiver]
        self._inboxes[exchange, receiver] = inbox
        while inbox.received < received:
            inbox.taken += len(inbox.messages.popleft().content or b"")
            inbox.received += 1

    def take(self, exchange: str, receiver: int, max_bytes: int) -> list[Message] | None:
        """Returns the messages after those acknowledged, at least one, and more up to `max_bytes` together.

        None if there are none yet; an empty list if there will be no more.
        """
        inbox = self._inbox(exchange, receiver)
        messages: list[Message] = []
        size = 0
        for message in inbox.messages:
            size += len(message.content or b"")
            if messages and size > max_bytes:
                break
            messages.append(message)
        return messages or (None if self.missing(exchange, receiver) else [])

    def missing(self, exchange: str, receiver: int) -> list[int]:
        """Returns the workers that have not posted their last to this receiver, ascending."""
        inbox = self._inbox(exchange, receiver)
        return [
            worker
            for worker in range(self._members.all.total)
            if worker not in inbox.senders or not inbox.senders[worker].has_ended
        ]

    def fault_of_take(self, exchange: str, receiver: int) -> str | None:
        """Returns why a receiver waits for ever; None while a message may come."""
        left = self._members.left.intersection(self.missing(exchange, receiver))
        if not left:
            return None
        return (
            f"{self._members.names(sorted(left))} left before they posted their last message of exchange "
            f"{exchange!r}"
        )

    def leave(self, worker: int) -> None:
        """Forgets the messages for a worker that has left."""
        self._inboxes = {
            place: inbox for place, inbox in self._inboxes.items() if place[1] != worker
        }

    def _inbox(self, exchange: str, receiver: int) -> _Inbox:
        return self._inboxes.get((exchange, receiver)) or _Inbox()

    def _require_present(self, exchange: str, worker: int) -> None:
        if not self._members.is_present(worker):
            raise ProtocolError(
                f"{self._members.name(worker)} has no part in exchange {exchange!r}: it left or is not in "
                f"this job (members: {self._members.names(self._members.present)}); all workers must take "
                "part in an exchange"
            )

    def _require_next(
        self, exchange: str, message: Message, inbox: _Inbox, sender: PostedBy
    ) -> None:
        what = (
            f"message {message.sequence} from worker {message.sender} to {message.receiver} of exchange "
            f"{exchange!r}"
        )
        if message.sequence > sender.sequence:
            raise ProtocolError(
                f"{what} arrived, expected message {sender.sequence}: was this server restarted, or did the "
                "receiver begin another exchange?"
            )
        if sender.has_ended:
            raise ProtocolError(f"{what} arrived after the last message of the exchange")
        if not inbox.has_room_for(sender, self._inbox_bytes):
            raise ProtocolError(f"{what} arrived before the previous message was answered")
        if len(inbox.messages) >= MAX_MESSAGES and message.content is not None:
            raise ProtocolError(
                f"{what} is refused, as {len(inbox.messages)} messages already wait for the receiver: post "
                "fewer, larger messages"
            )
