"""Pushes that are sent again by another shard map: made whole from the messages that were sent.

The arrays of a push may be reused when it is on its way, so these bytes alone have it still.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from ctr_ps.protos.chunking import join_push
from ctr_ps.protos.futures import Answer
from ctr_ps.protos.gradients import Gradients
from ctr_ps.protos.store import ModelState
from ctr_ps.protos.store.state_transfer import join_state
from ctr_ps.ps_worker.cluster.routing import Routing

W = TypeVar("W")
A = TypeVar("A")

Parts = Mapping[int, Sequence[Any]]
"""Requests of a push, by server."""


class Sent(Generic[W]):
    """A push, whole: what was given until it is sent, afterwards what was sent."""

    def __init__(self, whole: W, join: Callable[[Routing, Parts], W]) -> None:
        self._given: W | None = whole
        self._join = join

    def whole(self) -> W:
        """Returns all of it."""
        if self._given is not None:
            return self._given
        parts = {server: [each.sent() for each in sent] for server, sent in self._sent.items()}
        return self._join(self._routing, parts)

    def started(self, routing: Routing, sent: Mapping[int, Sequence[Answer[A]]]) -> list[Answer[A]]:
        """Notes that it was sent, and returns its calls."""
        self._given, self._routing, self._sent = None, routing, sent
        return [each for answers in sent.values() for each in answers]


def gradients_of(routing: Routing, parts: Parts) -> Gradients:
    """Returns the gradients of the parts of a push that was placed by `routing`."""
    return join_push(_chunks_of(routing, parts, "sparse", "dense"))


def state_of(routing: Routing, parts: Parts) -> ModelState:
    """Returns the state of the parts of a push that was placed by `routing`."""
    return join_state(_chunks_of(routing, parts, "rows", "blocks"))


def _chunks_of(routing: Routing, parts: Parts, rows: str, blocks: str) -> list[Any]:
    """Returns the chunks of all servers, with stretches that begin where they are in the whole block.

    `rows` and `blocks` are the fields of a chunk that have them; tables without rows have no width.
    """
    return [
        replace(
            push.chunk,
            **{
                rows: [(table, of) for table, of in getattr(push.chunk, rows) if of.keys.size],
                blocks: [
                    (block, start + routing.piece(block, server).start, of)
                    for block, start, of in getattr(push.chunk, blocks)
                ],
            },
        )
        for server, pushes in parts.items()
        for push in pushes
    ]
