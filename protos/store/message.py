"""What workers send each other through servers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Bytes from one worker to another, which no store looks at.

    Attributes:
        sender: Index of the worker that posts it.
        receiver: Index of the worker that takes it.
        sequence: Number of the message among those from this sender to this receiver in one exchange: from 0,
            without gaps.
        content: What is inside; None: the sender has no more for this receiver.
    """

    sender: int
    receiver: int
    sequence: int
    content: bytes | None
