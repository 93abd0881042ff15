"""Faults of a worker's calls, for tests of a cluster: lost requests, lost replies, duplicates, delays.

CTR_PS_CHAOS --> Fates --fate of each call--> disturbed channel --> channel
                                                   `--> journal: a line "fault call server" for each fault

`ps-launch --chaos` sets the variable, a JSON object:

{"seed": "7", "journal": "log/chaos/trainer.0", "faults": [["drop", "pushes", 0.05], ["delay", "calls", 0.1]]}
"""

import contextlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import grpc

from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.wire.calls import CALLS, Moves
from ctr_ps.protos.wire.stream import FailedCallError, Failure
from ctr_ps.ps_worker.cluster.grpc_transport import Disturb
from ctr_ps.ps_worker.cluster.slow_calls import Delays
from ctr_ps.ps_worker.extras.chaos import CHAOS

_CALLS: Mapping[str, frozenset[str]] = {
    "pushes": frozenset(name for name, call in CALLS.items() if Moves.TO_SERVER in call.moves),
    "pulls": frozenset(name for name, call in CALLS.items() if Moves.FROM_SERVER in call.moves),
    "calls": frozenset(CALLS),
}
_KINDS = ("drop", "duplicate", "delay")


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to calls."""

    kind: str  # "drop", "duplicate" or "delay"
    calls: str  # "pushes", "pulls", or "calls": all
    amount: float  # share of the calls, from 0 to 1; of a delay the seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What happens to one call."""

    is_request_lost: bool = False
    is_reply_lost: bool = False
    is_duplicated: bool = False
    delay_s: float = 0.0

    @property
    def faults(self) -> list[str]:
        """Their names in the journal."""
        if self.is_request_lost:
            return ["request_lost"]
        happens = {
            "reply_lost": self.is_reply_lost,
            "duplicated": self.is_duplicated,
            "delayed": self.delay_s > 0,
        }
        return [name for name in happens if happens[name]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos:
    """Faults of a worker's calls."""

    seed: str  # of the choice of calls
    faults: Sequence[Fault]  # each is chosen by itself; all that are chosen for a call happen to it
    journal: str = ""  # file to which "fault call server" is appended for each; empty: none

    @classmethod
    def from_json(cls, text: str) -> "Chaos":
        """Returns what `CTR_PS_CHAOS` says; raises UsageError if it cannot be read."""
        try:
            value = json.loads(text)
            faults = [Fault(str(kind), str(calls), float(n)) for kind, calls, n in value["faults"]]
            chaos = cls(seed=str(value["seed"]), journal=value.get("journal", ""), faults=faults)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(
                f"{CHAOS} is {text!r}, which is not a valid fault: {error!r}"
            ) from error
        for fault in faults:
            if fault.kind not in _KINDS or fault.calls not in _CALLS:
                raise UsageError(
                    f"{CHAOS}: unknown {fault.kind} {fault.calls}: kinds are {', '.join(_KINDS)}, calls are "
                    f"{', '.join(_CALLS)}"
                )
        return chaos


class Fates:
    """Fates of the calls to one server: without gRPC. Thread-safe.

    The n-th call of a name to a server has the same fate in every run of the same seed, whatever runs beside
    it.
    """

    def __init__(self, chaos: Chaos, server: int) -> None:
        self.chaos = chaos
        self.server = server
        self._random: dict[str, Random] = {}
        self._lock = threading.Lock()

    def next(self, call: str) -> Fate:
        """Returns what happens to the next call of this name."""
        happens: set[str] = set()
        delay_s = 0.0
        with self._lock:
            random = self._random.setdefault(
                call, Random(f"{self.chaos.seed}/{self.server}/{call}")
            )
            for fault in self.chaos.faults:
                if call not in _CALLS[fault.calls]:
                    continue
                if fault.kind == "delay":
                    delay_s += fault.amount
                    continue
                is_chosen, is_reply = random.random() < fault.amount, random.random() < 0.5
                if is_chosen:
                    lost = "is_reply_lost" if is_reply else "is_request_lost"
                    happens.add(lost if fault.kind == "drop" else "is_duplicated")
        return Fate(**dict.fromkeys(happens, True), delay_s=delay_s)


Send = Callable[..., Any]
"""Sends a request; returns the call, a grpc.Future."""


def disturb_by(text: str) -> Disturb:
    """Returns what puts the faults of `CTR_PS_CHAOS` into calls.

    Raises UsageError if the variable cannot be read, or the journal cannot be written.
    """
    chaos, delays = Chaos.from_json(text), Delays("chaos-delays")
    _note(chaos.journal, [])

    def disturb(channels: Sequence[grpc.Channel]) -> list[_DisturbedChannel]:
        return [
            _DisturbedChannel(channel, Fates(chaos, server), delays)
            for server, channel in enumerate(channels)
        ]

    return disturb


def _note(journal: str, lines: Sequence[str]) -> None:
    """Adds lines to the journal, if there is one; raises UsageError if that fails.

    At once and in one piece, since processes are killed in the tests that this is for.
    """
    if not journal:
        return
    try:
        with Path(journal).open("ab", buffering=0) as file:
            file.write("".join(f"{line}\n" for line in lines).encode())
    except OSError as error:
        raise UsageError(
            f"{CHAOS}: cannot write the journal {journal!r}: {error.strerror}"
        ) from error


class _DisturbedChannel:
    """A channel whose calls have faults. Thread-safe.

    No interceptor of gRPC's: that looks a call's method up again when it sends a request, and on a channel
    that was closed during a delay the look-up crashes the process (grpcio 1.85).
    """

    def __init__(self, channel: grpc.Channel, fates: Fates, delays: Delays) -> None:
        self._channel = channel
        self._fates = fates
        self._delays = delays

    def unary_unary(self, method: str, **options: Any) -> "_DisturbedMethod":
        name = method.rpartition("/")[2]
        send = self._channel.unary_unary(method, **options).future
        return _DisturbedMethod(name, send, self._fates, self._delays)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


class _DisturbedMethod:
    """Sends requests of one method, as their fates say. Thread-safe."""

    def __init__(self, name: str, send: Send, fates: Fates, delays: Delays) -> None:
        self._name = name
        self._send = send
        self._fates = fates
        self._delays = delays

    def future(self, request: Any, timeout: float | None = None, **options: Any) -> Any:
        """See grpc.UnaryUnaryMultiCallable; never waits."""
        fate = self._fates.next(self._name)
        if not fate.faults:
            return self._send(request, timeout=timeout, **options)
        lines = [f"{fault} {self._name} {self._fates.server}" for fault in fate.faults]
        _note(self._fates.chaos.journal, lines)
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


class _DisturbedCall(futures.Future[Any]):
    """A call on its way, or soon to be, with what is used of a grpc.Future. Thread-safe.

    It is done with the first answer to one of its copies; the others go on, and their answers are dropped.
    """

    def __init__(self, fate: Fate, send: Send) -> None:
        super().__init__()
        self._fate = fate
        self._send = send
        self._copies: list[Any] = []
        self._is_cancelled = False

    def send(self) -> None:
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
        self.fail(grpc.StatusCode.DEADLINE_EXCEEDED, "chaos: the delay exceeds the deadline")

    def fail(self, code: grpc.StatusCode, details: str) -> None:
        self._end(FailedCallError(Failure(code, details)), None)

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
                self.set_result(answer)
            else:
                self.set_exception(error)

    def cancel(self) -> bool:
        self._is_cancelled = True
        for copy in list(self._copies):
            copy.cancel()
        self.fail(grpc.StatusCode.CANCELLED, "cancelled")
        return True
