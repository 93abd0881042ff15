"""Faults of a worker's calls, for tests of a cluster: lost requests, lost replies, duplicates, delays.

CTR_PS_CHAOS --> Fates --fate of each call--> disturbed channel --> channel
                                                   `--> journal: a line "fault call server" for each fault

`ps-launch --chaos` sets the variable, a JSON object:

{"seed": "7", "journal": "log/chaos/trainer.0", "faults": [["drop", "pushes", 0.05], ["delay", "calls", 0.1]]}
"""

import contextlib
from collections.abc import Callable, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.cluster.grpc_transport import Disturb
from ctr_ps.ps_worker.cluster.slow_calls import Delays
from ctr_ps.ps_worker.extras.chaos import CHAOS
from ctr_ps.ps_worker.extras.chaos.fates import Chaos, Fate, Fates

Send = Callable[..., Any]
"""Sends a request; returns the call, a grpc.Future."""


def disturb_by(text: str) -> Disturb:
    """Returns what puts the faults of `CTR_PS_CHAOS` into calls.

    Raises:
        UsageError: If the variable cannot be read, or the journal cannot be written.
    """
    chaos = Chaos.from_json(text)
    journal, delays = _Journal(chaos.journal), Delays("chaos-delays")

    def disturb(channels: Sequence[grpc.Channel]) -> list[_DisturbedChannel]:
        return [
            _DisturbedChannel(channel, Fates(chaos, server), journal, delays)
            for server, channel in enumerate(channels)
        ]

    return disturb


class _Journal:
    """Lines of what was done. Thread-safe.

    Each is written as it happens, in one piece, since processes are killed in the tests that this is for.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.write([], "", 0)

    def write(self, faults: Sequence[str], call: str, server: int) -> None:
        """Adds a line for each of a call's faults.

        Raises:
            UsageError: If that fails.
        """
        if not self._path:
            return
        try:
            with Path(self._path).open("ab", buffering=0) as file:
                file.write("".join(f"{fault} {call} {server}\n" for fault in faults).encode())
        except OSError as error:
            raise UsageError(
                f"{CHAOS}: cannot write the journal {self._path!r}: {error.strerror}"
            ) from error


class _DisturbedChannel:
    """A channel whose calls have faults. Thread-safe.

    No interceptor of gRPC's: that looks a call's method up again when it sends a request, and on a channel
    that was closed during a delay the look-up crashes the process (grpcio 1.85).
    """

    def __init__(
        self, channel: grpc.Channel, fates: Fates, journal: _Journal, delays: Delays
    ) -> None:
        self._channel = channel
        self._fates = fates
        self._journal = journal
        self._delays = delays

    def unary_unary(self, method: str, **options: Any) -> "_DisturbedMethod":
        """See grpc.Channel."""
        name = method.rpartition("/")[2]
        send = self._channel.unary_unary(method, **options).future
        return _DisturbedMethod(name, send, self._fates, self._journal, self._delays)

    def subscribe(self, callback: Callable[..., None], try_to_connect: bool = False) -> None:
        """See grpc.Channel; `grpc.channel_ready_future` needs it."""
        self._channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[..., None]) -> None:
        """See grpc.Channel."""
        self._channel.unsubscribe(callback)

    def close(self) -> None:
        """See grpc.Channel."""
        self._channel.close()


class _DisturbedMethod:
    """Sends requests of one method, as their fates say. Thread-safe."""

    def __init__(
        self, name: str, send: Send, fates: Fates, journal: _Journal, delays: Delays
    ) -> None:
        self._name = name
        self._send = send
        self._fates = fates
        self._journal = journal
        self._delays = delays

    def future(self, request: Any, timeout: float | None = None, **options: Any) -> Any:
        """See grpc.UnaryUnaryMultiCallable; never waits."""
        fate = self._fates.next(self._name)
        if not fate.faults:
            return self._send(request, timeout=timeout, **options)
        self._journal.write(fate.faults, self._name, self._fates.server)
        left_s = None if timeout is None else timeout - fate.delay_s
        call = _DisturbedCall(fate, lambda: self._send(request, timeout=left_s, **options))
        if fate.is_request_lost:
            call.fail(grpc.StatusCode.UNAVAILABLE, "chaos: the request was lost")
        elif timeout is not None and timeout <= fate.delay_s:
            self._delays.after(timeout, call.expire)
        elif fate.delay_s:
            self._delays.after(fate.delay_s, call.send)
        else:
            call.send()
        return call


class _DisturbedCall(grpc.Future):  # type: ignore[misc]  # grpc has no types
    """A call on its way, or soon to be. Thread-safe.

    It is done with the first answer to one of its copies; the others go on, and their answers are dropped.
    """

    def __init__(self, fate: Fate, send: Send) -> None:
        self._fate = fate
        self._send = send
        self._answer: futures.Future[Any] = futures.Future()
        self._copies: list[Any] = []
        self._is_cancelled = False

    def send(self) -> None:
        """Sends the request, or both copies of it."""
        try:
            for _ in range(2 if self._fate.is_duplicated else 1):
                self._copies.append(self._send())
        except ValueError as error:  # the channel was closed during the delay
            self.fail(grpc.StatusCode.CANCELLED, str(error))
        for copy in self._copies:
            copy.add_done_callback(self._answered)
        if self._is_cancelled:  # before or meanwhile
            self.cancel()

    def expire(self) -> None:
        """Ends the call at its deadline."""
        self.fail(grpc.StatusCode.DEADLINE_EXCEEDED, "chaos: delayed for longer than its deadline")

    def fail(self, code: grpc.StatusCode, details: str) -> None:
        """Ends the call with an error."""
        self._end(_FailedError(code, details), None)

    def _answered(self, copy: Any) -> None:
        if self._fate.is_reply_lost:
            self.fail(grpc.StatusCode.UNAVAILABLE, "chaos: the reply was lost")
        elif copy.cancelled():
            self.fail(grpc.StatusCode.CANCELLED, "cancelled")
        elif (error := copy.exception()) is not None:
            self._end(error, None)
        else:
            self._end(None, copy.result())

    def _end(self, error: BaseException | None, answer: Any) -> None:
        with contextlib.suppress(futures.InvalidStateError):  # it has ended before
            if error is None:
                self._answer.set_result(answer)
            else:
                self._answer.set_exception(error)

    def result(self, timeout: float | None = None) -> Any:
        """See grpc.Future."""
        return self._answer.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See grpc.Future."""
        return self._answer.exception(timeout)

    def traceback(self, timeout: float | None = None) -> Any:
        """See grpc.Future."""
        error = self._answer.exception(timeout)
        return None if error is None else error.__traceback__

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        """See grpc.Future."""
        self._answer.add_done_callback(lambda _: fn(self))

    def cancel(self) -> bool:
        """See grpc.Future."""
        self._is_cancelled = True
        for copy in list(self._copies):
            copy.cancel()
        self.fail(grpc.StatusCode.CANCELLED, "cancelled")
        return True

    def cancelled(self) -> bool:
        """See grpc.Future."""
        return self._is_cancelled

    def done(self) -> bool:
        """See grpc.Future."""
        return self._answer.done()

    def running(self) -> bool:
        """See grpc.Future."""
        return not self._answer.done()


class _FailedError(grpc.RpcError):  # type: ignore[misc]  # grpc has no types
    """Error of a call that chaos ended, with what is read of gRPC's own."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._code = code
        self._details = details

    def code(self) -> grpc.StatusCode:
        """See grpc.Call."""
        return self._code

    def details(self) -> str:
        """See grpc.Call."""
        return self._details

    def trailing_metadata(self) -> tuple[()]:
        """See grpc.Call."""
        return ()
