"""Assembly of pushes that arrive in chunks.

    incomplete --last chunk--> complete --> entered, as applied on arrival or as part of a step
                                   `------> refused

Sans-IO: chunks in, complete pushes out; no clock, no locks. Nothing is kept for ever: another process in a
worker's place, or `WINDOW` newer pushes, drop a push that is incomplete. Chunks of it that come later are
refused, so that no push is lost without an error; and so are those of a push that was refused.
"""

import copy
from dataclasses import dataclass, field

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.limits import CHUNK_BYTES, MAX_CHUNKS
from ctr_ps.protos.role import Members
from ctr_ps.protos.store import Member, PushId
from ctr_ps.ps_server.coordination.job_state import Chunk, WaitingChunk

WINDOW = 32
"""A worker keeps fewer pushes than this in flight to one server."""

MAX_INCOMPLETE_VALUES = MAX_CHUNKS * CHUNK_BYTES // 4
"""Of all pushes of a worker that lack a chunk: as many numbers as the largest push has."""


@dataclass(slots=True)
class _Inbox:
    """The pushes of one process that are not entered, by sequence; of incomplete ones, chunks by number."""

    incarnation: int
    newest: int = 0
    """The largest sequence that came."""
    pushes: dict[int, dict[int, Chunk]] = field(default_factory=dict)
    ids: dict[int, PushId] = field(default_factory=dict)
    complete: set[int] = field(default_factory=set)
    """Neither entered nor refused yet."""
    refused: dict[int, Exception] = field(default_factory=dict)

    def forget(self, sequence: int) -> None:
        """A push is complete, refused or too old."""
        self.pushes.pop(sequence, None)
        self.ids.pop(sequence, None)
        self.complete.discard(sequence)


class PushAssembler:
    """Collects the chunks of pushes. Not thread-safe."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._inboxes: dict[int, _Inbox] = {}

    def check(self, push_id: PushId, part: Chunk) -> None:
        """Raises ProtocolError if a chunk is none of those that it says there are, or these are too many."""
        if not part.chunk < part.num_chunks <= MAX_CHUNKS:
            raise ProtocolError(
                f"{self._name(push_id)} has chunk {part.chunk} of {part.num_chunks}, expected up to "
                f"{MAX_CHUNKS} chunks, numbered from 0"
            )

    def add(self, push_id: PushId, part: Chunk) -> list[Chunk] | None:
        """Takes a chunk; returns all chunks of its push, in order, if all have come: then it is complete.

        A chunk that comes again replaces the first. Raises ProtocolError if it contradicts other chunks of
        the push, comes too late, or is too much; of a push that was refused, the error of that.
        """
        self.check(push_id, part)
        inbox = self._opened_inbox(push_id)
        if (refusal := self.refusal(push_id)) is not None:
            raise refusal
        parts = inbox.pushes.setdefault(push_id.sequence, {})
        first = next(iter(parts.values()), part)
        if part.num_chunks != (num_chunks := first.num_chunks):
            raise ProtocolError(
                f"{self._name(push_id)} has chunk {part.chunk} of {part.num_chunks}, but earlier "
                f"chunks {sorted(parts)} are of {num_chunks}"
            )
        if type(part) is not type(first):
            raise ProtocolError(
                f"{self._name(push_id)} mixes chunks of gradients and chunks of state"
            )
        inbox.ids[push_id.sequence] = push_id
        parts[part.chunk] = part
        if len(parts) == part.num_chunks:
            inbox.forget(push_id.sequence)
            inbox.complete.add(push_id.sequence)
            return [parts[index] for index in range(part.num_chunks)]
        incomplete = (each for chunks in inbox.pushes.values() for each in chunks.values())
        if (num_values := sum(each.num_values for each in incomplete)) > MAX_INCOMPLETE_VALUES:
            error = ProtocolError(
                f"{self._name(push_id)} is refused: incomplete pushes have {num_values} numbers in all, "
                f"expected up to {MAX_INCOMPLETE_VALUES}"
            )
            self.refuse(push_id, error)
            raise error
        return None

    def num_seen(self, member: Member) -> int:
        """Returns how many pushes have come, to the last that is not one chunk."""
        inbox = self._inboxes.get(member.worker)
        return inbox.newest + 1 if inbox and inbox.incarnation == member.incarnation else 0

    def is_complete(self, push_id: PushId) -> bool:
        """Whether all chunks of a push have come, and it is neither entered nor refused yet."""
        inbox = self._inbox_of(push_id)
        return inbox is not None and push_id.sequence in inbox.complete

    def enter(self, push_id: PushId) -> None:
        """A push is entered: others know from now on that it came."""
        if (inbox := self._inbox_of(push_id)) is not None:
            inbox.complete.discard(push_id.sequence)

    def refusal(self, push_id: PushId) -> Exception | None:
        """Returns why a push was refused; None: it was not."""
        inbox = self._inbox_of(push_id)
        error = None if inbox is None else inbox.refused.get(push_id.sequence)
        return copy.copy(error)

    def refuse(self, push_id: PushId, error: Exception) -> None:
        """A push was refused: a chunk that comes again, since its answer was lost, is refused alike.

        Of one before the window nothing is kept: chunks of it are refused anyway.
        """
        if (inbox := self._inbox_of(push_id)) is None:
            return
        inbox.forget(push_id.sequence)
        if push_id.sequence > inbox.newest - WINDOW:
            inbox.refused[push_id.sequence] = copy.copy(error)  # without the frames that it passed

    def waiting(self) -> list[WaitingChunk]:
        """Returns the chunks of incomplete pushes."""
        return [
            WaitingChunk(push_id=inbox.ids[sequence], chunk=part)
            for inbox in self._inboxes.values()
            for sequence, parts in inbox.pushes.items()
            for part in parts.values()
        ]

    def _inbox_of(self, push_id: PushId) -> _Inbox | None:
        """Returns the inbox of the process that pushes; None: it has none, or was replaced."""
        inbox = self._inboxes.get(push_id.worker)
        return inbox if inbox is not None and inbox.incarnation == push_id.incarnation else None

    def _opened_inbox(self, push_id: PushId) -> _Inbox:
        """Returns the inbox of the process that pushes, without pushes that are too old."""
        inbox = self._inbox_of(push_id)
        if inbox is None:
            inbox = self._inboxes[push_id.worker] = _Inbox(push_id.incarnation)
        if push_id.sequence <= inbox.newest - WINDOW:
            raise ProtocolError(
                f"{self._name(push_id)} is incomplete, but push {inbox.newest} has begun: keep fewer than "
                f"{WINDOW} pushes in flight"
            )
        inbox.newest = max(inbox.newest, push_id.sequence)
        for sequence in [old for old in inbox.pushes if old <= inbox.newest - WINDOW]:
            inbox.forget(sequence)
        for sequence in [old for old in inbox.refused if old <= inbox.newest - WINDOW]:
            del inbox.refused[sequence]
        return inbox

    def _name(self, push_id: PushId) -> str:
        return f"push {push_id.sequence} of {self._members.name(push_id.worker)}"
