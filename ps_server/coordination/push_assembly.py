"""Assembly of pushes that arrive in chunks.

Sans-IO: chunks in, complete pushes out; no clock, no locks. Nothing is kept for ever: a new incarnation of
a worker, or `WINDOW` newer pushes, drop a push that is incomplete. Chunks of it that come later are refused,
so that no push is lost without an error.
"""

from dataclasses import dataclass, field

from protos.chunking import PushChunk
from protos.errors import ProtocolError
from protos.limits import MAX_CHUNKS
from protos.store import PushId

WINDOW = 32
"""A worker keeps fewer pushes than this in flight to one server."""


@dataclass(slots=True)
class _Inbox:
    """The incomplete pushes of one incarnation of a worker: chunks by sequence and number."""

    incarnation: int
    newest: int = 0
    pushes: dict[int, dict[int, PushChunk]] = field(default_factory=dict)


class PushAssembler:
    """Collects the chunks of pushes. Not thread-safe."""

    def __init__(self) -> None:
        self._inboxes: dict[int, _Inbox] = {}
        self._replaced: set[tuple[int, int]] = set()  # workers and their earlier incarnations

    def add(self, push_id: PushId, part: PushChunk) -> list[PushChunk] | None:
        """Takes a chunk; returns all chunks of its push, in order, if it was the last to come.

        Raises:
            ProtocolError: If it contradicts other chunks of the push, or comes too late.
        """
        if not part.chunk < part.num_chunks <= MAX_CHUNKS:
            raise ProtocolError(
                f"{_name(push_id)} has chunk {part.chunk} of {part.num_chunks}, expected up to {MAX_CHUNKS} "
                f"chunks, numbered from 0"
            )
        if part.num_chunks == 1:
            return [part]
        inbox = self._inbox(push_id)
        parts = inbox.pushes.setdefault(push_id.sequence, {})
        num_chunks = next(iter(parts.values()), part).num_chunks
        if part.chunk in parts or part.num_chunks != num_chunks:
            raise ProtocolError(
                f"{_name(push_id)} has chunk {part.chunk} of {part.num_chunks} beside chunks "
                f"{sorted(parts)} of {num_chunks}"
            )
        parts[part.chunk] = part
        if len(parts) < part.num_chunks:
            return None
        del inbox.pushes[push_id.sequence]
        return [parts[index] for index in range(part.num_chunks)]

    @property
    def num_incomplete(self) -> int:
        """Pushes of which some chunks have come, but not all."""
        return sum(len(inbox.pushes) for inbox in self._inboxes.values())

    def _inbox(self, push_id: PushId) -> _Inbox:
        """Returns the inbox of the push id's incarnation, without pushes that are too old."""
        inbox = self._inboxes.get(push_id.worker)
        if inbox is None or inbox.incarnation != push_id.incarnation:
            if (push_id.worker, push_id.incarnation) in self._replaced:
                raise ProtocolError(f"{_name(push_id)} is from before the worker was restarted")
            if inbox is not None:
                self._replaced.add((push_id.worker, inbox.incarnation))
            inbox = self._inboxes[push_id.worker] = _Inbox(push_id.incarnation)
        if push_id.sequence <= inbox.newest - WINDOW:
            raise ProtocolError(
                f"{_name(push_id)} comes in parts too slowly: push {inbox.newest} began already; keep "
                f"fewer than {WINDOW} pushes in flight"
            )
        inbox.newest = max(inbox.newest, push_id.sequence)
        for sequence in [old for old in inbox.pushes if old <= inbox.newest - WINDOW]:
            del inbox.pushes[sequence]
        return inbox


def _name(push_id: PushId) -> str:
    return f"push {push_id.sequence} of worker {push_id.worker}"
