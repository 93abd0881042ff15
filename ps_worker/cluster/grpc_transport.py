"""Calls to servers over gRPC: the only place on the worker's side that knows it.

Every call has a deadline. One whose server is unavailable is sent again when its time has come
(slow_calls.py), whoever waits for which answer.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ctr_ps.protos.errors import (
    CtrPsError,
    OverloadedError,
    RecoveringError,
    TransportError,
    UnknownCallerError,
    WrongServerError,
)
from ctr_ps.protos.futures import Answer
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.wire.calls import CALLS, Call, Deadline
from ctr_ps.protos.wire.grpc_status import error_of
from ctr_ps.protos.wire.security.credentials import (
    Credentials,
    Metadata,
    WatchedFiles,
    open_channel,
)
from ctr_ps.ps_worker.cluster import slow_calls
from ctr_ps.ps_worker.cluster.slow_calls import (
    BUDGET_S,
    BUDGET_WITH_LOG_S,
    CallLog,
    Delays,
    Retry,
)
from ctr_ps.ps_worker.cluster.stream import StreamChannel

logger = logging.getLogger(__name__)

_DELIVERY_S = 0.5
_GONE_S = 30.0

_GONE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
"""A server that is told to end cancels the calls that come meanwhile, or outlast its grace."""

ASLEEP_S = 5.0
"""A deadline that is told later than this was slept through: this process or its machine was stopped."""

SENDS_AGAIN = "sends-again"
"""Name of the thread, which is there while calls wait for that."""

_TIME_IS_UP = (grpc.FutureTimeoutError, TimeoutError)  # the second by calls on a stream
_HAS_FAILED = (grpc.RpcError, grpc.FutureCancelledError)

AT_ONCE_S = 1.0
"""For a call that waits for no server: to connect, or be refused."""

Q = TypeVar("Q")
A = TypeVar("A")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long calls may take, in seconds."""

    rpc_s: float = 60.0  # an ordinary call
    # what a call may take longer if it waits for other workers. A server has such a limit of its own
    # (`ps-server --wait-limit`), whose error names who is missing: let it come first
    wait_s: float = 600.0
    checkpoint_s: float = 3600.0  # saving, loading, hashing or shrinking one server's part

    def of(self, call: Call[Q, Any], argument: Q) -> float:
        """Returns how long a call may take."""
        match call.deadline:
            case Deadline.PLAIN:
                return self.rpc_s
            case Deadline.VERSION if getattr(argument, "at") is None:  # noqa: B009 - typed by its row
                return self.rpc_s
            case Deadline.VERSION | Deadline.WORKERS | Deadline.KERNELS:
                return self.rpc_s + self.wait_s
            case Deadline.CHECKPOINT:
                return self.rpc_s + self.checkpoint_s


class _Answer(Generic[A]):
    """The answer to a call, which is sent again when that may help, whoever waits for it. Thread-safe.

        gRPC's answer --> the waiting thread, which decodes it
        a failure --> gRPC's thread, which has the call sent again by `Delays`, or ends it with an error

    So calls to several servers come through in any order, and one that is answered costs no detour.
    """

    __slots__ = (
        "_awaited",
        "_call",
        "_connection",
        "_error",
        "_has_ended",
        "_on_failure",
        "_request",
        "_retry",
        "_rpc",
        "_sent_at",
        "_server",
        "_timeout_s",
        "_transport",
    )

    def __init__(
        self,
        transport: "GrpcTransport",
        server: int,
        call: Call[Q, A],
        argument: Q,
        *,
        timeout_s: float,
        budget_s: float,
    ) -> None:
        """Is not sent yet."""
        self._transport = transport
        self._server = server
        self._call = call
        # The argument may be reused, these bytes not. gRPC keeps them until the answer comes, so they take no
        # memory; a message would, as much again.
        self._request = call.request.encode(argument)
        self._timeout_s = timeout_s
        self._retry = Retry(budget_s)
        self._awaited = None if call.awaits is None else call.awaits(argument)
        # The transport's lock is held to change these, but at the end by an answer.
        self._rpc: Any = None  # of the last try
        self._has_ended = False
        self._error: Exception | None = None
        self._on_failure: list[Callable[[Exception], None]] = []

    def send(self, *, wait_for_ready: bool = False, after: CtrPsError | None = None) -> None:
        """Sends it; `after` is the failure of the try before."""
        self._connection, self._sent_at = self._transport.connection, self._transport.clock()
        try:
            rpc = self._connection.send(
                self._server,
                self._call.name,
                self._request,
                self._timeout_s,
                wait_for_ready=wait_for_ready,
            )
        except ValueError:  # of a channel that is closed
            if not self._transport.is_closed:
                self.fail(WrongServerError(f"server {self._server} has left the cluster"))
                return
            endpoint = self._transport.shard_map.endpoint_of(self._server)
            self.fail(
                after
                or TransportError(f"{self._call.name} to server {endpoint}: this client is closed")
            )
            return
        if after is None:
            self._rpc = rpc  # nobody else has this answer yet
        else:
            with self._transport.changed:
                self._rpc = rpc
                is_failed = self._has_ended
                self._transport.changed.notify_all()
            if is_failed:  # meanwhile, by another server's error
                rpc.cancel()
        rpc.add_done_callback(self._answered)

    def _answered(self, rpc: Any) -> None:
        try:
            failure = rpc.exception()
            if failure is None:
                # Without the lock, which all answers share: where another server's error comes meanwhile,
                # either may be first, and nobody has to be told of this one.
                self._has_ended, self._on_failure = True, []
            else:
                self._failed(failure)
        except Exception as error:  # carried to the waiting thread, as an executor does
            self.fail(error)

    def _failed(self, failure: grpc.RpcError) -> None:
        """Has the call sent again after a pause, or ends it."""
        transport, retry = self._transport, self._retry
        endpoint = transport.shard_map.endpoint_of(self._server)
        error = error_of(failure, endpoint, self._call.name)
        error.__cause__ = failure
        if transport.is_closed or self._has_ended:
            self.fail(error)
            return
        if isinstance(error, UnknownCallerError):
            transport.later.after(0.0, partial(self._send_again, error))
            return
        asked_s = error.retry_after_s if isinstance(error, OverloadedError) else None
        late_s = transport.clock() - self._sent_at - self._timeout_s
        was_asleep = failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED and late_s > ASLEEP_S
        if failure.code() not in _GONE and asked_s is None and not was_asleep:
            self.fail(error)
            return
        progress = error.progress if isinstance(error, RecoveringError) else None
        pause_s = retry.pause_after(transport.clock(), asked_s=asked_s, progress=progress)
        if pause_s is None:
            if retry.tries > 1:
                tried = f"(tried {retry.tries} times in {retry.budget_s:g} s, cluster.retry_s)"
                error = type(error)(f"{error} {tried}")
                error.__cause__ = failure
            self.fail(error)
            return
        if retry.tries == 2:
            transport.log.sends_again(endpoint, self._call.name, failure.code().name)
        transport.later.after(pause_s, partial(self._send_again, error))

    def _send_again(self, error: CtrPsError) -> None:
        try:
            has_newer = self._transport.has_newer(self._connection)
            # An unknown caller's call did nothing, so any may be sent again: with newer credentials.
            is_over = isinstance(error, UnknownCallerError) and not has_newer
            if is_over or self._transport.is_closed:
                self.fail(error)
            elif not self._has_ended:
                self._transport.retries += 1
                # A try fails at once while the server is not there, so it is waited for within the budget;
                # one that is there, within the deadline: other workers may take longer than the budget.
                self.send(after=error)
        except Exception as unforeseen:  # carried to the waiting thread, as above
            self.fail(unforeseen)

    def fail(self, error: Exception) -> None:
        with self._transport.changed:
            if self._has_ended:
                return
            self._has_ended, self._error = True, error
            told, self._on_failure = self._on_failure, []
            rpc = self._rpc
            self._transport.changed.notify_all()
        for tell in told:
            tell(error)
        if rpc is not None and not rpc.done():
            # By another server's error. Its end wakes who waits for it, but it reaches its server first: a
            # worker's coming that is lost there alone would be missed by the others.
            self._transport.later.after(_DELIVERY_S, rpc.cancel)

    def when_failed(self, tell: Callable[[Exception], None]) -> None:
        with self._transport.changed:
            self._on_failure.append(tell)
            if not self._has_ended:
                return
            self._on_failure = []
        if self._error is not None:
            tell(self._error)

    def wait(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while True:
            rpc = self._rpc
            try:
                if rpc is not None:
                    rpc.result(timeout=max(until - time.monotonic(), 0.0))
                    return True
            except _TIME_IS_UP:
                return False
            except _HAS_FAILED as failure:
                failure.with_traceback(None)  # it holds this frame, and gRPC the failure
            if not self._is_settled(rpc, max(until - time.monotonic(), 0.0)):
                return False
            if self._error is not None:
                return True

    def _is_settled(self, rpc: Any, seconds: float | None = None) -> bool:
        """Waits until it is known what follows from the failure of a try: another one, or an error."""
        with self._transport.changed:
            return self._transport.changed.wait_for(
                lambda: self._error is not None or self._rpc is not rpc, seconds
            )

    def sent(self) -> Any:
        """Returns the argument, as it was when the call was started."""
        return self._call.request.decode(self._request)

    def result(self) -> A:
        """Returns the answer, or raises what the server raised, or TransportError."""
        began = None if self._awaited is None else self._transport.clock()
        while True:
            rpc = self._rpc
            try:
                if rpc is not None:
                    limit_s = None if began is None else slow_calls.FIRST_WAIT_S
                    return self._call.answer.decode(rpc.result(timeout=limit_s))
            except _TIME_IS_UP:
                if began is not None and self._awaited is not None:
                    self._transport.log.waits(self._awaited, self._transport.clock() - began)
                continue
            except _HAS_FAILED as failure:
                failure.with_traceback(None)  # it holds this frame, and gRPC the failure
            self._is_settled(rpc)
            if self._error is not None:
                raise self._error


class _OpenCall:
    """A call that stays open, so that the thread which takes a channel's answers stays, too. Thread-safe.

    gRPC starts that thread with a channel's first call and ends it with the last one on its way: where calls
    follow one another, a thread a call. It costs 0.15 ms, and an answer of 1.7 MB 2 ms, as a new thread's
    memory is fresh from the system. Any call would do; a watch of the server's health is standard, and needs
    no access: a token is shown as an address has few watches without one. Nobody reads what it is told.
    """

    def __init__(self, channel: grpc.Channel, metadata: Metadata) -> None:
        """Is not open yet."""
        self._watch = health_pb2_grpc.HealthStub(channel).Watch
        self._metadata = metadata
        self._call: Any = None

    def keep_open(self) -> None:
        """Opens it, again if it was lost with its server; one that the server refused stays ended."""
        call = self._call
        if call is None or (call.done() and call.code() in _GONE):
            self._call = self._watch(
                health_pb2.HealthCheckRequest(), metadata=self._metadata, wait_for_ready=True
            )


@dataclass(frozen=True, slots=True)
class _Server:
    """A channel to one server, with its methods by name."""

    endpoint: str
    channel: Any
    open_call: _OpenCall
    methods: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Connection:
    """Channels to all servers, made with the same credentials, by index, and the metadata of calls."""

    servers: Mapping[int, _Server]
    metadata: Metadata

    def send(
        self, server: int, call: str, request: bytes, timeout_s: float, *, wait_for_ready: bool
    ) -> Any:
        if server not in self.servers:
            raise ValueError("the server is in the shard map no more")
        to = self.servers[server]
        to.open_call.keep_open()
        return to.methods[call].future(
            request, timeout=timeout_s, metadata=self.metadata, wait_for_ready=wait_for_ready
        )

    def close(self) -> None:
        for server in self.servers.values():
            server.channel.close()


class GrpcTransport:
    """Channels to all servers: a `ps_worker.cluster.transport.Transport`. Thread-safe."""

    def __init__(
        self,
        endpoints: Sequence[str],  # host:port of every server of the first map
        deadlines: Deadlines | None = None,  # how long calls may take
        *,
        # for how long a call is sent again whose server is unavailable, in seconds; None: for as long as a
        # restart takes where servers keep an update log, else for a moment
        retry_s: float | None = None,
        calls: Mapping[str, Call[Any, Any]] = CALLS,  # that servers of this kind answer, by name
        # None: those of this process's environment; a file that cannot be used is a UsageError
        credentials: Credentials | None = None,
        stream: bool = True,  # whether calls that move data use the streams that servers offer
        clock: Callable[[], float] = time.monotonic,  # in seconds
    ) -> None:
        """Opens a channel to each server; whether they answer shows at the first call."""
        self.servers_recover = False
        self._retry_s = retry_s
        self.retries = 0
        self.clock = clock
        self.log = CallLog(clock)
        self.later = Delays(SENDS_AGAIN)  # where calls wait that are sent again
        # held while an answer changes; notified when a failed call is sent again, or ends
        self.changed = threading.Condition(threading.Lock())
        self.is_closed = False  # nothing is sent any more
        self.shard_map = ShardMap.of(len(endpoints), endpoints)
        self._deadlines = deadlines or Deadlines()
        self._calls = calls
        self._credentials = credentials or Credentials.from_environment()
        # Heter trainers have calls of their own, and none.
        self._has_streams = stream and calls is CALLS
        self._watched = WatchedFiles(self._credentials.files())
        self._connecting = threading.Lock()
        self._old: _Connection | None = None  # with calls that may not be answered yet
        self.connection = self._connect()  # by which calls are sent

    def _connect(self, before: _Connection | None = None) -> _Connection:
        """Returns a connection to all servers; `before` is one with channels that it takes over."""
        metadata = self._credentials.metadata() if before is None else before.metadata
        servers = {}
        for server in self.shard_map.servers:
            endpoint = self.shard_map.endpoint_of(server)
            known = None if before is None else before.servers.get(server)
            if known is not None and known.endpoint == endpoint:
                servers[server] = known
            else:
                servers[server] = self._open(endpoint, metadata)
        return _Connection(servers, metadata)

    def _open(self, endpoint: str, metadata: Metadata) -> _Server:
        opened = open_channel(endpoint, self._credentials)
        channel: Any = opened
        if self._has_streams:
            channel = StreamChannel(opened, endpoint, metadata, self._credentials)
        methods = {
            call.name: channel.unary_unary(
                call.path,
                _registered_method=True,  # as generated stubs have it: less work a call
            )
            for call in self._calls.values()
        }
        return _Server(endpoint, channel, _OpenCall(opened, metadata), methods)

    def use(self, shard_map: ShardMap) -> None:
        """See `Transport`."""
        with self._connecting:
            before, self.shard_map = self.connection, shard_map
            self.connection = self._connect(before)
            if self.is_closed:
                self.connection.close()
        kept = {id(each) for each in self.connection.servers.values()}
        # Later: calls to them are on their way, which other servers' answers end.
        for server in before.servers.values():
            if id(server) not in kept:
                self.later.after(_GONE_S, server.channel.close)

    def has_newer(self, connection: _Connection) -> bool:
        """Whether there is a newer connection: one is made if the credentials' files have changed."""
        with self._connecting:
            if not self.is_closed and connection is self.connection:
                newer = self._watched.read_again("credentials", self._connect)
                if newer is not None:
                    if self._old is not None:
                        self._old.close()
                    self._old, self.connection = self.connection, newer
            return connection is not self.connection

    def call(
        self, server: int, call: Call[Q, A], argument: Q, *, ready_s: float | None = None
    ) -> Answer[A]:
        """See `Transport`."""
        timeout_s = self._deadlines.of(call, argument)
        budget_s = BUDGET_WITH_LOG_S if self.servers_recover else BUDGET_S
        if self._retry_s is not None:
            budget_s = self._retry_s
        if ready_s is not None:
            timeout_s, budget_s = ready_s or AT_ONCE_S, 0.0
        answer = _Answer(self, server, call, argument, timeout_s=timeout_s, budget_s=budget_s)
        answer.send(wait_for_ready=bool(ready_s))
        return answer

    def close(self) -> None:
        """See `Transport`."""
        self.is_closed = True
        with self._connecting:
            self.connection.close()
            if self._old is not None:
                self._old.close()
        self.later.close()
