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
    chunks = []
    for server, pushes in parts.items():
        for push in pushes:
            chunk = push.chunk
            sparse = [(table, grad) for table, grad in chunk.sparse if grad.keys.size]
            dense = [
                (block, start + routing.piece(block, server).start, grad)
                for block, start, grad in chunk.dense
            ]
            chunks.append(replace(chunk, sparse=sparse, dense=dense))
    return join_push(chunks)


def state_of(routing: Routing, parts: Parts) -> ModelState:
    """Returns the state of the parts of a push that was placed by `routing`."""
    chunks = []
    for server, pushes in parts.items():
        for push in pushes:
            chunk = push.chunk
            rows = [(table, each) for table, each in chunk.rows if each.keys.size]
            blocks = [
                (block, start + routing.piece(block, server).start, each)
                for block, start, each in chunk.blocks
            ]
            chunks.append(replace(chunk, rows=rows, blocks=blocks))
    return join_state(chunks)
