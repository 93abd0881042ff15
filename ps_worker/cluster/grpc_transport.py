"""Calls to servers over gRPC: the only place on the worker's side that knows it.

Every call has a deadline. One whose server is unavailable is sent again (retry.py), by the thread that waits
for the answer.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.errors import CtrPsError, OverloadedError, RecoveringError, UnknownCallerError
from protos.futures import Future
from protos.wire.calls import CALLS, Call, Deadline
from protos.wire.grpc_status import error_of
from protos.wire.security.credentials import Credentials, Metadata, WatchedFiles, open_channel
from ps_worker.cluster import call_log
from ps_worker.cluster.call_log import Awaited, CallLog, awaited
from ps_worker.cluster.chaos import disturbed
from ps_worker.cluster.retry import BUDGET_S, BUDGET_WITH_LOG_S, Retry

logger = logging.getLogger(__name__)

_GONE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
"""A server that is told to end cancels the calls that come meanwhile, or outlast its grace."""

AT_ONCE_S = 1.0
"""For a call that waits for no server: to connect, or be refused."""

Q = TypeVar("Q")
A = TypeVar("A")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long calls may take, in seconds.

    Attributes:
        rpc_s: An ordinary call.
        wait_s: What a call may take longer if it waits for other workers. A server has such a limit of
            its own (`ps-server --wait-limit`), whose error names who is missing: let it come first.
        checkpoint_s: Saving, loading, hashing or shrinking one server's part.
    """

    rpc_s: float = 60.0
    wait_s: float = 600.0
    checkpoint_s: float = 3600.0

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
    """An answer on its way: `result` waits for it, and sends the call again if that may help."""

    def __init__(self, transport: "GrpcTransport", server: int, call: Call[Any, A], sent: "_Sent"):
        self._transport = transport
        self._server = server
        self._call = call
        self._sent = sent

    def result(self) -> A:
        """Returns the answer, or raises what the server raised, or TransportError."""
        sent = self._sent
        while True:
            try:
                message = self._transport.wait_for(sent)
            except grpc.RpcError as failure:
                self._transport.try_again(self._server, self._call, sent, failure)
            else:
                return self._call.answer.decode(message)


class _OpenCall:
    """A call that stays open, so that the thread which takes a channel's answers stays, too. Thread-safe.

    gRPC starts that thread with a channel's first call and ends it with the last one on its way: where calls
    follow one another, a thread a call. It costs 0.15 ms, and an answer of 1.7 MB 2 ms, as a new thread's
    memory is fresh from the system. Any call would do; a watch of the server's health is standard, and needs
    no access. Nobody reads what it is told.
    """

    def __init__(self, channel: grpc.Channel) -> None:
        """Is not open yet."""
        self._watch = health_pb2_grpc.HealthStub(channel).Watch
        self._call: Any = None

    def keep_open(self) -> None:
        """Opens it, again if it was lost with its server; one that the server refused stays ended."""
        call = self._call
        if call is None or (call.done() and call.code() in _GONE):
            self._call = self._watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)


@dataclass(frozen=True, slots=True)
class _Connection:
    """Channels to all servers, made with the same credentials: methods by name, and the metadata of calls."""

    channels: Sequence[Any]
    open_calls: Sequence[_OpenCall]
    methods: Sequence[Mapping[str, Any]]
    metadata: Metadata

    def send(
        self, server: int, call: str, request: bytes, timeout_s: float, *, wait_for_ready: bool
    ) -> Any:
        self.open_calls[server].keep_open()
        return self.methods[server][call].future(
            request, timeout=timeout_s, metadata=self.metadata, wait_for_ready=wait_for_ready
        )

    def close(self) -> None:
        for channel in self.channels:
            channel.close()


@dataclass(slots=True)
class _Sent:
    """A call that was sent, and may be sent again: its argument may have been reused since, its bytes not.

    gRPC keeps these bytes until the answer comes, so they take no memory; a message would, as much again.
    """

    request: bytes
    timeout_s: float
    connection: _Connection
    rpc: Any
    retry: Retry
    awaited: Awaited | None


class GrpcTransport:
    """Channels to all servers: a `ps_worker.cluster.transport.Transport`. Thread-safe.

    Attributes:
        servers_recover: See `Transport`.
        retries: How often calls were sent again.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        deadlines: Deadlines | None = None,
        *,
        retry_s: float | None = None,
        calls: Mapping[str, Call[Any, Any]] = CALLS,
        credentials: Credentials | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens a channel to each server; whether they answer shows at the first call.

        Args:
            endpoints: host:port of every server.
            deadlines: How long calls may take.
            retry_s: For how long a call is sent again whose server is unavailable, in seconds; None: for as
                long as a restart takes where servers keep an update log, else for a moment.
            calls: Those that servers of this kind answer, by name.
            credentials: Of this process; None: those of its environment.
            clock: In seconds.

        Raises:
            UsageError: If a file of the credentials cannot be used.
        """
        self.servers_recover = False
        self._retry_s = retry_s
        self.retries = 0
        self._clock = clock
        self._log = CallLog(clock)
        self._closed = threading.Event()
        self.endpoints: Sequence[str] = tuple(endpoints)
        self._deadlines = deadlines or Deadlines()
        self._calls = calls
        self._credentials = credentials or Credentials.from_environment()
        self._watched = WatchedFiles(self._credentials.files())
        self._connecting = threading.Lock()
        self._old: _Connection | None = None  # with calls that may not be answered yet
        self._connection = self._connect()

    def _connect(self) -> _Connection:
        metadata = self._credentials.metadata()
        opened = [open_channel(endpoint, self._credentials) for endpoint in self.endpoints]
        channels = disturbed(opened, os.environ)
        methods = [
            {
                call.name: channel.unary_unary(
                    call.path,
                    _registered_method=True,  # as generated stubs have it: less work a call
                )
                for call in self._calls.values()
            }
            for channel in channels
        ]
        return _Connection(channels, [_OpenCall(each) for each in opened], methods, metadata)

    def _has_newer(self, connection: _Connection) -> bool:
        """Whether there is a newer connection: one is made if the credentials' files have changed."""
        with self._connecting:
            if not self._closed.is_set() and connection is self._connection:
                newer = self._watched.read_again("credentials", self._connect)
                if newer is not None:
                    if self._old is not None:
                        self._old.close()
                    self._old, self._connection = self._connection, newer
            return connection is not self._connection

    def call(
        self, server: int, call: Call[Q, A], argument: Q, *, ready_s: float | None = None
    ) -> Future[A]:
        """See `Transport`."""
        request = call.request.encode(argument)
        timeout_s = self._deadlines.of(call, argument) if ready_s is None else ready_s or AT_ONCE_S
        connection = self._connection
        rpc = connection.send(server, call.name, request, timeout_s, wait_for_ready=bool(ready_s))
        retry = Retry(self._budget_s if call.retry and ready_s is None else 0.0)
        sent = _Sent(request, timeout_s, connection, rpc, retry, awaited(argument))
        return _Answer(self, server, call, sent)

    @property
    def _budget_s(self) -> float:
        if self._retry_s is not None:
            return self._retry_s
        return BUDGET_WITH_LOG_S if self.servers_recover else BUDGET_S

    def wait_for(self, sent: _Sent) -> Any:
        """Returns the message that answers a call; logs now and then that it waits for other workers.

        Raises:
            grpc.RpcError: If the call failed.
        """
        if sent.awaited is None:
            return sent.rpc.result()
        began = self._clock()
        while True:
            try:
                return sent.rpc.result(timeout=call_log.FIRST_WAIT_S)
            except (grpc.FutureTimeoutError, TimeoutError):  # the second if chaos disturbs the call
                self._log.waits(sent.awaited, self._clock() - began)

    def try_again(
        self, server: int, call: Call[Any, Any], sent: _Sent, failure: grpc.RpcError
    ) -> None:
        """Sends a call again that failed, after a pause.

        Raises:
            CtrPsError: What the server raised, or TransportError, if that cannot help.
        """
        error = error_of(failure, self.endpoints[server], call.name)
        asked_s = error.retry_after_s if isinstance(error, OverloadedError) else None
        if isinstance(error, UnknownCallerError) and self._has_newer(sent.connection):
            self._send_again(server, call, sent, error, failure)  # it did nothing, so any call may
            return
        is_unavailable = failure.code() in _GONE
        if not (is_unavailable or asked_s is not None) or self._closed.is_set():
            raise error from failure
        progress = error.progress if isinstance(error, RecoveringError) else None
        pause_s = sent.retry.pause_after(self._clock(), asked_s=asked_s, progress=progress)
        if pause_s is None:
            if sent.retry.tries == 1:
                raise error from failure
            raise type(error)(
                f"{error} (tried {sent.retry.tries} times in {sent.retry.budget_s:g} s, cluster.retry_s)"
            ) from failure
        if sent.retry.tries == 2:
            self._log.sends_again(self.endpoints[server], call.name, failure.code().name)
        if self._closed.wait(pause_s):
            raise error from failure
        self._has_newer(sent.connection)
        self._send_again(server, call, sent, error, failure)

    def _send_again(
        self,
        server: int,
        call: Call[Any, Any],
        sent: _Sent,
        error: CtrPsError,
        failure: grpc.RpcError,
    ) -> None:
        self.retries += 1
        # A try fails at once while the server is not there, so it is waited for within the budget; one that
        # is there, within the deadline: a call that waits for other workers may take longer than the budget.
        sent.connection = self._connection
        try:
            sent.rpc = sent.connection.send(
                server, call.name, sent.request, sent.timeout_s, wait_for_ready=False
            )
        except ValueError:  # closed since the pause
            raise error from failure

    def close(self) -> None:
        """See `Transport`."""
        self._closed.set()
        with self._connecting:
            self._connection.close()
            if self._old is not None:
                self._old.close()
