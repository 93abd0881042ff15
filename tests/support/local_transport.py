"""A transport to stores of this process: the client without a network, through a server's handlers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ctr_ps.protos.errors import CtrPsError
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.wire.calls import Call, Codec
from ctr_ps.ps_server.rpc.handlers import Handlers, answer_of_parts
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.cluster.client import ClusterClient
from tests.support.stores import INCARNATION, joined

T = TypeVar("T")
Q = TypeVar("Q")
A = TypeVar("A")


class Answer(Generic[T]):
    """A future that is computed at the first request of its result."""

    def __init__(self, compute: Callable[[], T], sent: Callable[[], Any] = lambda: None) -> None:
        self._compute = compute
        self.sent = sent  # returns the argument of the call
        self._outcome: Callable[[], T] | None = None

    def result(self) -> T:
        if self._outcome is None:
            self._outcome = _outcome_of(self._compute)
        return self._outcome()

    def wait(self, seconds: float) -> bool:
        return True

    def when_failed(self, tell: Callable[[Exception], None]) -> None:
        """No-op: nothing fails before it is requested."""

    def fail(self, error: Exception) -> None:
        self._outcome = self._outcome or _raising(error)


def _outcome_of(compute: Callable[[], T]) -> Callable[[], T]:
    try:
        value = compute()
    except Exception as error:
        return _raising(error)
    return lambda: value


def _raising(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


def through(codec: Codec[T], value: T) -> T:
    return codec.decode(codec.encode(value))


@dataclass
class LocalTransport:
    """Calls stores, through messages.

    Attributes:
        stores: Of each server.
        answers: By name of a call: given the server, replaces its answer.
        calls: All calls, as (server, name, argument).
        servers_recover: The client's view of the servers.
        joins: Whether all workers have joined from the start.
    """

    stores: list[ParameterStore]
    answers: dict[str, Callable[[int], Any]] = field(default_factory=dict)
    calls: list[tuple[int, str, Any]] = field(default_factory=list)
    is_closed: bool = False
    servers_recover: bool = False
    retries: int = 0
    joins: bool = True

    def __post_init__(self) -> None:
        size = len(self.stores)
        self.shard_map = ShardMap.of(size, [f"ps-{server}:1" for server in range(size)])
        if self.joins:
            for store in self.stores:
                joined(store)
        self._handlers = [Handlers(store.engine) for store in self.stores]

    def call(
        self, server: int, call: Call[Q, A], argument: Q, *, ready_s: float | None = None
    ) -> Answer[A]:
        self.calls.append((server, call.name, argument))
        if call.name in self.answers:
            return Answer(lambda: self.answers[call.name](server))
        handlers = self._handlers[server]
        message = call.request.encode(argument)
        try:
            first, *others = handlers.parts_of(call, call.request.decode(message))
            future = handlers.start(*first)
        except CtrPsError as error:
            return Answer(_raising(error))

        def answer() -> A:
            answers = [future.result(), *(handlers.start(*each).result() for each in others)]
            return through(call.answer, answer_of_parts(answers))

        return Answer(answer, lambda: call.request.decode(message))

    def use(self, shard_map: ShardMap) -> None:
        self.shard_map = shard_map

    def close(self) -> None:
        self.is_closed = True


def joined_client(transport: LocalTransport, **settings: int) -> ClusterClient:
    """Returns a client that has joined as each worker, before the first of `transport.calls`."""
    client = ClusterClient(transport, **settings)
    for worker in range(transport.stores[0].engine.members.total):
        client.join(worker, INCARNATION, terms={}).result()
    transport.calls.clear()
    return client
