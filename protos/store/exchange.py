"""Exchange: messages from worker to worker through servers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ctr_ps.protos.futures import Future


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Bytes from one worker to another, opaque to stores.

    Attributes:
        sender: Index of the worker that posts it.
        receiver: Index of the worker that takes it.
        sequence: Number of the message among those from this sender to this receiver in one exchange: from 0,
            without gaps.
        content: None: the sender has no more for this receiver.
    """

    sender: int
    receiver: int
    sequence: int
    content: bytes | None


class Exchange(Protocol):
    """Mailboxes of the workers of a job."""

    def post(self, exchange: str, message: Message) -> Future[None]:
        """Hands over a message; done once it fits into the receiver's mailbox.

        A sender waits for each answer before it posts the next to the same receiver, and so is never further
        ahead of it than the bound. Posting a message again is no error and changes nothing.

        Args:
            exchange: Name of an exchange between all workers of the job, unique to it. Each worker posts to
                others and takes its own messages at the same time.
            message: The next to this receiver. The last has no content.

        Raises:
            ProtocolError: If it is not the next, or sender or receiver has left or is not of this job.
            WaitTimeoutError: If the receiver takes nothing; names it.
        """
        ...

    def take(self, exchange: str, worker: int, *, received: int) -> Future[Sequence[Message]]:
        """Waits for messages to a worker, in the order of arrival; those of one sender in its order.

        Taking from the next exchange drops what the one before still holds for this worker.

        Args:
            exchange: See `post`.
            worker: The receiver.
            received: Number of messages of this exchange that it has: these are dropped, the next ones come.

        Returns:
            Some messages; none if all workers have posted their last, this one to itself included.

        Raises:
            ProtocolError: If fewer were sent, or a sender has left without having posted its last.
            WaitTimeoutError: If none comes; names the workers that have not posted their last.
        """
        ...
