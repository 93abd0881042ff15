"""A driver of a move during which a process is killed, right before or after a call of its."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.store.moves import Phase
from ctr_ps.protos.wire import calls
from ctr_ps.protos.wire.requests import HoldMove
from ctr_ps.ps_worker.cluster.grpc_transport import GrpcTransport
from ctr_ps.ps_worker.extras.moves.move import Move, connected, states_of, weights_of

RETRY_S = 60.0

Plan = Callable[..., ShardMap]  # of a map and `rows`, as those of plan.py

Step = Callable[
    [int, str, Any], bool
]  # whether a call, of a server, name and argument, is this step


def _of(*names: str) -> Step:
    return lambda server, call, argument: call in names


def _of_phase(phase: Phase) -> Step:
    return lambda server, call, argument: isinstance(argument, HoldMove) and argument.phase is phase


STEPS: dict[str, Step] = {
    "begin": _of(calls.BEGIN_MOVE.name),
    "take": _of(calls.TAKE_MOVED.name),
    "put": _of(calls.PUT_MOVED.name),
    "hold": _of_phase(Phase.HOLD),
    "drain": _of_phase(Phase.DRAIN),
    "close": _of_phase(Phase.CLOSE),
    "job state": _of(calls.GET_JOB_STATE.name),
    "prepare": _of(calls.PREPARE_MOVE.name),
    "end by server 0": lambda server, call, _: call == calls.END_MOVE.name and server == 0,
    "end by others": lambda server, call, _: call == calls.END_MOVE.name and server != 0,
}
"""Of the calls of a step, the first one is meant."""


class DriverKilledError(BaseException):
    """The driver is gone: nothing of it goes on."""


@dataclass
class Crash:
    """That a process is killed at a step."""

    step: str
    is_after: bool
    kill: Callable[[], None] = lambda: None
    has_happened: bool = False

    def is_at(self, server: int, call: str, argument: Any) -> bool:
        return not self.has_happened and STEPS[self.step](server, call, argument)

    def happens(self) -> None:
        self.has_happened = True
        self.kill()


class CrashingTransport:
    """A transport during whose calls a process is killed; it may be its own, the driver's."""

    def __init__(self, transport: GrpcTransport, crash: Crash) -> None:
        self._transport, self._crash = transport, crash
        self._is_dead = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def call(self, server: int, call: calls.Call[Any, Any], argument: Any, **options: Any) -> Any:
        if self._is_dead:
            raise DriverKilledError
        is_now = self._crash.is_at(server, call.name, argument)
        if is_now and not self._crash.is_after:
            self._crash.happens()
        answer = self._transport.call(server, call, argument, **options)
        if is_now and self._crash.is_after:
            answer.result()
            self._crash.happens()
        return answer

    def dies(self) -> None:
        """Kills the driver: its connections end, and nothing more is sent."""
        self._is_dead = True
        self._transport.close()
        raise DriverKilledError


def transport_by(shard_map: ShardMap) -> GrpcTransport:
    """Returns one to the servers of a map."""
    transport = GrpcTransport(shard_map.endpoints, stream=False, retry_s=RETRY_S)
    transport.use(shard_map)
    return transport


def move(transport: Any, plan: Plan, epoch: int) -> ShardMap:
    """Moves shards unless the map is of a later epoch than `epoch`; returns the map then."""
    before = connected(transport)
    if before.epoch == epoch:
        states = states_of(transport)
        Move(transport, states, plan(before, rows=weights_of(states))).run()
    found: ShardMap = transport.shard_map
    return found
