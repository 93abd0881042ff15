"""The service: a gRPC method for each call of protos/wire/calls.py. Decode, call the handler, encode.

It runs on one event loop. A call that waits for other workers is a suspended coroutine, so it takes no
thread that the pushes it waits for would need; calls with much work are handed to threads. A call that the
backlog refuses is not decoded.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from ctr_ps.protos.errors import CtrPsError, LogError, NoMemoryError, OverloadedError
from ctr_ps.protos.futures import Future, WaitingFuture
from ctr_ps.protos.runtime.environment import memory_error_of
from ctr_ps.protos.wire.calls import CALLS, LEAVE, SERVICE, Call
from ctr_ps.protos.wire.grpc_status import details_of, metadata_of, status_of
from ctr_ps.ps_server.rpc.backlog import Backlog
from ctr_ps.ps_server.rpc.handlers import Handlers, answer_of_parts
from ctr_ps.ps_server.rpc.metrics.call_metrics import CallCounts

logger = logging.getLogger(__name__)

Q = TypeVar("Q")
T = TypeVar("T")

INLINE_VALUES = 300_000
"""Calls that touch more numbers than this run in a thread, so that they do not hold the loop.

A thread costs more than its hop of 45 µs: it competes with the loop for the interpreter. With it, a pull of
1,800 keys of dim 10 took 1.13 ms of processor time instead of 0.67, one of 20,000 keys 3.2 instead of 2.9,
a push of 20,000 keys 4.5 instead of 3.7. This many numbers hold the loop for 2 or 3 ms.
"""

INLINE_PARTS = 2
"""A synchronous step with the gradient values of more than so many calls runs in a thread.

Its parts are added first, and then applied once, so two usual parts are less work than two pushes. With 2
workers and batches of 100, sync training had 0.96 of an earlier version's speed with such steps in a thread,
and 1.04 to 1.11 of it without.
"""

Method = Callable[[bytes, grpc.aio.ServicerContext], Awaitable[bytes]]


async def abort_with(context: grpc.aio.ServicerContext, call: str, error: Exception) -> None:
    """Ends a call with an error: ours as they are, any other logged and kept from the client."""
    if isinstance(error, CtrPsError):
        await context.abort(status_of(error), details_of(error), metadata_of(error))
    logger.error("call failed call=%s", call, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"the server failed in {call}: see its log")


async def in_task() -> None:
    """Awaited before the first thing that a call waits for: up to here, a stream runs it without a task."""
    if asyncio.current_task() is None:
        await asyncio.sleep(0)


class _Answering:
    """One call: a sign of life while it lasts, and counted; an error that ends it becomes a status."""

    def __init__(self, service: "Service", context: grpc.aio.ServicerContext, call: str) -> None:
        self._service = service
        self._context = context
        self._call = call
        self._waited_s = 0.0

    async def __aenter__(self) -> Self:
        self._start_s = time.perf_counter()
        self._service.num_in_flight += 1
        return self

    async def settled(self, future: Future[T], *, is_shared: bool = False) -> T:
        """Returns the answer; one that is not there yet is awaited for as long as it says.

        A call whose client is gone is cancelled, and the future with it, unless other calls wait for it, too.
        """
        if not isinstance(future, WaitingFuture) or future.done():
            return future.result()
        start_s = time.perf_counter()
        try:
            await in_task()
            waiting: asyncio.Future[T] = asyncio.wrap_future(future)
            waiting = asyncio.shield(waiting) if is_shared else waiting
            return await asyncio.wait_for(waiting, future.limit_s)
        except TimeoutError:
            error = future.give_up()
        except asyncio.CancelledError:
            if not is_shared:
                future.cancel()
            raise
        finally:
            self._waited_s += time.perf_counter() - start_s
        raise error

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        service = self._service
        service.num_in_flight -= 1
        service.restart_idle_time()
        error = error and (memory_error_of(error) or error)
        counts = service.counts[self._call]
        counts.ended(_status_name(error), time.perf_counter() - self._start_s)
        if self._waited_s:
            counts.waits.add(self._waited_s)
        if isinstance(error, LogError | NoMemoryError):
            service.end(error)
            if service.engine.keeps_log:
                # To the caller this server is away: one that is started again carries the call out.
                await self._context.abort(grpc.StatusCode.UNAVAILABLE, f"the server ends: {error}")
        if isinstance(error, Exception):
            await abort_with(self._context, self._call, error)


def _status_name(error: BaseException | None) -> str:
    """Returns the name of the status that a call ends with."""
    match error:
        case None:
            return "OK"
        case LogError():
            return "UNAVAILABLE"
        case CtrPsError():
            return str(status_of(error).name)
        case asyncio.CancelledError():
            return "CANCELLED"
    return "INTERNAL"


class Service:
    """The methods of protos/v1/parameter_server.proto, over the handlers of an engine."""

    def __init__(
        self,
        handlers: Handlers,
        *,
        # counts the calls in threads, and refuses more; None: one with the usual limits
        backlog: Backlog | None = None,
        # returns the error with which each call is refused; None: it is answered
        why_not: Callable[[], CtrPsError | None] = lambda: None,
        # called when the server has to end: the update log cannot be written, or memory is short
        on_end: Callable[[Exception], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,  # for the time without calls, in seconds
    ) -> None:
        """Answers calls by `handlers`."""
        self._on_end = on_end
        self._ends_by: Exception | None = None
        self._handlers = handlers
        self.engine = handlers.engine
        self.counts = {name: CallCounts() for name in CALLS}  # of the calls, by name
        self._backlog = backlog or Backlog()
        self._why_not = why_not
        self._clock = clock
        self.num_in_flight = 0  # calls that are not answered yet
        self.restart_idle_time()
        self._step_executor = ThreadPoolExecutor(1, "steps")
        self.engine.applier.use_executor(
            self._step_executor, inline_values=INLINE_PARTS * INLINE_VALUES
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        """Has a server answer the calls."""
        methods = {
            name: grpc.unary_unary_rpc_method_handler(self.method(call))
            for name, call in CALLS.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))

    @property
    def idle_s(self) -> float:
        """Seconds without a call; 0 while one is in flight, as those that wait for other workers are."""
        return 0.0 if self.num_in_flight else self._clock() - self._idle_since

    def restart_idle_time(self) -> None:
        """Counts the time without a call from now on."""
        self._idle_since = self._clock()

    def overload(self, call: Call[Any, Any]) -> CtrPsError | None:
        """Returns why a call is refused before its request is read; None: there is room."""
        try:
            self._backlog.require_room(call)
        except OverloadedError as error:
            self.counts[call.name].ended(_status_name(error), 0.0)
            return error
        return None

    def end(self, error: Exception) -> None:
        """Answers no more calls: what the error has ended may be done in part."""
        self._ends_by = error
        self._on_end(error)

    def close(self) -> None:
        """Ends the thread that applies steps, after the one that it applies now."""
        self._step_executor.shutdown(wait=False)

    def method(self, call: Call[Any, Any]) -> Method:
        """Returns the method of a call: the bytes of a message in, those of a message out."""
        counts = self.counts[call.name]

        async def method(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
            async with _Answering(self, context, call.name) as answering:
                if self._ends_by is not None:
                    raise self._ends_by  # it may be done in part, what went wrong
                counts.received_bytes += len(request)
                if (refusal := self._why_not()) is not None:
                    raise refusal
                self._backlog.require_room(call)
                parts = self._handlers.parts_of(call, call.request.decode(request))
                # A part has no bytes of its own: a log that needs them encodes it again.
                payload = request if len(parts) == 1 else None
                answers = [
                    await self._answer(part, argument, payload, len(request), answering)
                    for part, argument in parts
                ]
                if call.name == LEAVE.name:
                    self._handlers.end_if_all_left()
                answer = call.answer.encode(answer_of_parts(answers))
                counts.sent_bytes += len(answer)
                return answer

        return method

    async def _answer(
        self,
        call: Call[Q, T],
        argument: Q,
        payload: bytes | None,
        num_bytes: int,
        answering: _Answering,
    ) -> T:
        """Carries out a call, in a thread if it has much to do; what it changes is durable then."""
        self.counts[call.name].touched(argument)
        is_large = self._handlers.work(call, argument) > INLINE_VALUES
        if is_large:
            await in_task()
        while (held := self._handlers.moves.enter(call, argument)) is not None:
            await answering.settled(held)
        if is_large:
            loop = asyncio.get_running_loop()
            with self._backlog.holding(num_bytes):
                # Shielded: a thread goes on if its client is gone, and a move waits for its end.
                started = loop.run_in_executor(None, self._start, call, argument, payload)
                answer = await asyncio.shield(started)
        else:
            answer = self._start(call, argument, payload)
        answered = await answering.settled(answer)
        if call.is_logged or call.is_durable:
            await answering.settled(self.engine.journal.durable(), is_shared=True)
        return answered

    def _start(self, call: Call[Q, T], argument: Q, payload: bytes | None) -> Future[T]:
        try:
            return self._handlers.start(call, argument, payload)
        finally:
            self._handlers.moves.left(call)
