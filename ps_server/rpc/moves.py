"""Moves of shards, as a server takes part in them; docs/moves.md says how one goes.

    begin --> (take | put) ... --> hold, drain, close --> (take | put) ... --> prepare --> end
      `-- silent driver: ended by the old map; but not after `prepare`, except on the first server

While a move is held, calls wait here before they are carried out: they go on by the old map, or are refused
by the new one, and their client asks for it. Pushes in the cut do not wait. What changes a server is logged
as calls, so a recovery puts rows and ends moves once more.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ctr_ps.protos.errors import MovingError, ProtocolError, WaitTimeoutError
from ctr_ps.protos.futures import Answered, Future, WaitingFuture
from ctr_ps.protos.limits import CHUNK_BYTES
from ctr_ps.protos.placement import NO_SERVER, ShardMap
from ctr_ps.protos.store.moves import Cut, LogRecord, MapState, Phase, Taken
from ctr_ps.protos.wire import calls, requests
from ctr_ps.protos.wire.calls import Call
from ctr_ps.ps_server.coordination.job_state import WaitingArrival
from ctr_ps.ps_server.durability.segments import Record
from ctr_ps.ps_server.engine.engine import Engine
from ctr_ps.ps_server.rpc.journal import STATE_JSON, CompletedState, require_head, state_records

logger = logging.getLogger(__name__)

T = TypeVar("T")

SILENT_S = 30.0
"""A move whose driver is silent for so long is ended."""

HELD_S = 10.0
"""And one that has been held for so long."""

WAIT_S = 2.0
"""A call waits for a move; longer ones ask how it ended."""

_HELD = {calls.SNAPSHOT.name, calls.SHRINK.name, calls.LOAD.name}
"""Calls for which a move waits before it holds any, and that wait for its end from then on.

A save that was begun on one server has to end on all, by one map.
"""

_OF_MOVES = {
    each.name for each in (calls.BEGIN_MOVE, calls.PUT_MOVED, calls.PREPARE_MOVE, calls.END_MOVE)
}

IN_ORDER = {*_OF_MOVES, calls.LOAD.name}
"""Calls that are logged in the order in which they are carried out."""

_NUM_ENDED = 16


@dataclass(slots=True)
class _Move:
    """The move under way."""

    token: str
    next_map: ShardMap
    is_live: bool = True  # changes were recorded without a gap: the server was not restarted since
    phase: Phase | None = None
    num_held: int = 0  # the number of the call that has set it
    cut: Cut | None = None
    disturbed_by: str = ""  # a call that waits, and that pushes in the cut may wait for
    prepared: requests.PrepareMove | None = None
    num_put: int = 0
    last_taken: tuple[int, Taken] | None = None
    silent_s: float = 0.0
    held_s: float = 0.0


class Moves:
    """The part of one server in moves, one at a time. Thread-safe."""

    def __init__(
        self,
        engine: Engine,
        *,
        completed: Callable[[], CompletedState],
        # takes over a job: its completed calls, and the records of a head after the state
        take_over: Callable[[CompletedState, Sequence[Record]], None],
    ) -> None:
        self._engine = engine
        self._completed = completed
        self._take_over = take_over
        self.on_drained: Callable[[], None] = lambda: None  # called when all shards have moved away
        # One call of a move at a time, with its record in the log; taken before `_lock`.
        self.working = threading.RLock()
        self._lock = threading.Lock()  # held for decisions only
        self._move: _Move | None = None
        self._ended: deque[str] = deque(maxlen=_NUM_ENDED)  # their calls may come late
        self._dropping: threading.Thread | None = None  # what has moved away
        self._entering: Counter[str] = Counter()  # calls that are being carried out, by name
        self._waiting: list[WaitingFuture[None]] = []
        self._when_empty: list[Callable[[], None]] = []

    # Calls wait

    def enter(self, call: Call[Any, Any], argument: Any) -> Future[None] | None:
        """A call comes; returns what it waits for before it comes again, None: it may go on, until `left`."""
        if not self._changes_server(call):
            return None
        with self._lock:
            if not self._must_wait(call, argument):
                self._entering[call.name] += 1
                return None
            future: WaitingFuture[None] = WaitingFuture(WAIT_S, self._give_up)
            self._waiting.append(future)
            if self._move is not None and call.name in _HELD:
                self._move.disturbed_by = call.name
        if call.name in _HELD:
            self._engine.job.pushes.look_again()
        return future

    def left(self, call: Call[Any, Any]) -> None:
        """A call that has entered was carried out, or waits for others."""
        if not self._changes_server(call):
            return
        with self._lock:
            self._entering[call.name] -= 1
            told, self._when_empty = (
                ([], self._when_empty) if any(self._entering.values()) else (self._when_empty, [])
            )
        for tell in told:
            tell()

    def _changes_server(self, call: Call[Any, Any]) -> bool:
        # Changed rows count as known once they are taken, so they have to be of one map.
        takes_rows = call.name == calls.PULL_CHANGED.name
        return (call.is_logged or call.name in _HELD or takes_rows) and call.name not in _OF_MOVES

    def _must_wait(self, call: Call[Any, Any], argument: Any) -> bool:
        move = self._move
        if move is None or move.phase is None:
            return False
        if move.phase is Phase.CLOSE or call.name in _HELD:
            return True
        if not isinstance(argument, requests.PushGrad | requests.PushState):
            return False
        step = argument.at if isinstance(argument, requests.PushGrad) else None
        pushes = self._engine.job.pushes
        return move.cut is None or not pushes.is_in(move.cut, argument.push_id, step)

    def _give_up(self, future: WaitingFuture[None]) -> MovingError:
        with self._lock:
            self._waiting = [each for each in self._waiting if each is not future]
        return MovingError("a move of shards is under way: ask the first server how it ends")

    def _release(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for future in waiting:
            future.answer_with(lambda: None)

    def _when_entered(self, answer: Callable[[], T]) -> Future[T]:
        """Answers once no call is being carried out that changes the server."""
        with self._lock:
            if not any(self._entering.values()):
                return Answered(answer())
            future: WaitingFuture[T] = WaitingFuture(
                HELD_S, lambda _: ProtocolError("calls under way do not end")
            )
            self._when_empty.append(lambda: future.answer_with(answer))
            return future

    # What a driver calls

    @property
    def is_under_way(self) -> bool:
        """Whether this server takes part in a move."""
        return self._move is not None

    def require_not_before(self, epoch: int) -> None:
        """Raises MovingError if a call was placed by the map that the move under way leads to.

        The first server has ended it, and nobody has told this one, as it was away: its callers do.
        """
        if (move := self._move) is not None and move.next_map.epoch == epoch:
            raise MovingError(f"this server does not know yet that move {move.token} has ended")

    def before(self, argument: Any) -> requests.EndMove | None:
        """Returns how a move ends before a call is logged, None: it does not; needs `working`.

        Raises ProtocolError for a call that is not to be logged: a replay cannot tell that it is refused.
        """
        if isinstance(argument, requests.Load) and self._move is not None:
            return requests.EndMove(token=self._move.token, is_committed=False)
        if isinstance(argument, requests.PrepareMove):
            self._require_closed(argument)
        return None

    def _require_closed(self, request: requests.PrepareMove) -> None:
        """Raises ProtocolError unless nothing has changed since the last rows were taken."""
        move, index = self._required(request.token), self._engine.owner.server_index
        if index == NO_SERVER:
            if request.server not in move.next_map.servers:
                raise ProtocolError(f"server {request.server} is not in the map of the move")
            require_head(request.records)
        elif request.server != index or request.records:
            raise ProtocolError(
                f"server {request.server} was to prepare a move, but this is server {index}, with its job"
            )
        elif move.prepared is None:
            self._require_live(move)
            if move.phase is not Phase.CLOSE:
                raise ProtocolError("calls went on after the last rows were taken")

    def get_map(self) -> MapState:
        """Returns the map, and the move that this server takes part in."""
        engine, move = self._engine, self._move
        tables, blocks = engine.parameters.declared()
        index = engine.owner.server_index
        rows, row_bytes, accesses = engine.parameters.loads_by_place().tolist()
        return MapState(
            shard_map=engine.shard_map,
            server=None if index == NO_SERVER else index,
            members=str(engine.members),
            move="" if move is None else move.token,
            last_move=engine.last_move,
            tables=tables,
            blocks=[spec for spec, _ in blocks],
            rows=rows,
            row_bytes=row_bytes,
            accesses=accesses,
            has_update_log=engine.keeps_log,
        )

    def begin_move(self, request: requests.BeginMove) -> None:
        """A move begins; see the .proto file for this and the other calls of moves."""
        with self.working:
            if self._move is not None and self._move.token == request.token:
                return
            if self._move is not None:
                raise ProtocolError(f"move {self._move.token} is under way")
            if request.token == self._engine.last_move or request.token in self._ended:
                raise ProtocolError(f"move {request.token} has ended")
            engine = self._engine
            engine.job.require_no_failure()
            is_spare = engine.owner.server_index == NO_SERVER
            if not is_spare and request.shard_map.epoch != engine.shard_map.epoch + 1:
                raise ProtocolError(
                    f"a move leads to epoch {request.shard_map.epoch}, but the map of server "
                    f"{engine.owner.server_index} is of epoch {engine.shard_map.epoch}"
                )
            request.shard_map.require_valid()
            if self._dropping is not None:
                self._dropping.join()
            engine.parameters.begin_move(request.shard_map)
            engine.moves_shards = True
            self._move = _Move(request.token, request.shard_map)

    def take_moved(self, request: requests.TakeMoved) -> Taken:
        """Returns what has changed of the shards that leave."""
        with self.working:
            move = self._required(request.token)
            self._require_live(move)
            if move.last_taken is not None and move.last_taken[0] == request.number:
                return move.last_taken[1]
            with_counts = request.with_counts and move.phase is Phase.CLOSE
            taken = self._engine.parameters.take_moved(
                request.server, min(request.max_bytes, CHUNK_BYTES), with_counts=with_counts
            )
            move.last_taken = request.number, taken
            return taken

    def put_moved(self, request: requests.PutMoved) -> None:
        """Takes over what another server had."""
        with self.working:
            move = self._required(request.token)
            if request.number > move.num_put + 1:
                raise ProtocolError(
                    f"part {request.number} of a move came, expected {move.num_put + 1}"
                )
            if request.number == move.num_put + 1:
                self._engine.parameters.put_moved(request.moved)
                move.num_put = request.number
            # Afterwards: a recovery has to put it as well, whatever its limit.
            self._engine.parameters.require_room_for_moved(request.moved)

    def hold_move(self, request: requests.HoldMove) -> Future[Cut]:
        """Calls wait from now on; returns what has come before."""
        pushes = self._engine.job.pushes
        with self._lock:
            move = self._required(request.token)
            if move.prepared is not None:
                raise ProtocolError(f"move {request.token} is prepared")
            if request.number < move.num_held:
                raise ProtocolError("a call of a move came late, after others")
            move.num_held = request.number
            if request.phase is Phase.RELEASE:
                move.phase = move.cut = None
                move.held_s = 0.0
            else:
                self._require_live(move)
                if move.phase is None:
                    self._require_none_held()
                move.phase = request.phase
            if request.phase is Phase.HOLD:
                move.disturbed_by = ""
            if request.phase is Phase.DRAIN:
                move.cut = request.cut
        match request.phase:
            case Phase.HOLD:
                return self._when_entered(
                    lambda: replace(pushes.seen(), completed=self._completed().digest())
                )
            case Phase.DRAIN:
                self._release()  # those in the cut go on
                return pushes.when_drained(request.cut, lambda: move.disturbed_by)
            case Phase.CLOSE:
                return self._when_entered(self._closed)
            case Phase.RELEASE:
                self._release()
                return Answered(Cut())

    def _require_none_held(self) -> None:
        """Raises WaitTimeoutError if one of `_HELD` has come, or a snapshot waits to be saved."""
        for name in _HELD:
            if self._entering[name]:
                raise WaitTimeoutError(f"a {name.lower()} is under way")
        self._engine.snapshots.require_none()

    def _closed(self) -> Cut:
        if self._engine.job.rendezvous.mailbox.is_busy:
            raise ProtocolError("an exchange of messages is under way")
        return Cut()

    def get_job_state(self, request: requests.GetJobState) -> Sequence[LogRecord]:
        """Returns the head of a log, for a server that is added."""
        with self.working:
            move = self._required(request.token)
            if move.phase is not Phase.CLOSE:
                raise ProtocolError("the job still changes: close it first")
            state = self._engine.state()
            # The first server alone reduces numbers, to others these are barriers.
            passed = [replace(each, values=None, remember=True) for each in state.job.passed]
            added = replace(
                state,
                job=replace(state.job, inboxes=(), passed=passed),
                # Its pieces are put there; incomplete pushes are of processes that are gone.
                blocks=[(spec, None) for spec, _ in state.blocks],
                waiting=[
                    replace(each, values=None, op=None)
                    for each in state.waiting
                    if isinstance(each, WaitingArrival)
                ],
            )
            head = state_records(added, self._completed(), base="")
            return [LogRecord(kind=each.kind, payload=bytes(each.payload)) for each in head]

    def prepare_move(self, request: requests.PrepareMove) -> None:
        """The move may be ended by the new map."""
        with self.working:
            move = self._required(request.token)
            records = [Record(each.kind, each.payload) for each in request.records]
            # While no piece has elements: those of the new map are put here.
            self._take_over(CompletedState(), [each for each in records if each.kind in _DECLARES])
            self._engine.parameters.moved_blocks(move.next_map, request.server)
            with self._lock:
                move.prepared, move.phase = request, Phase.CLOSE

    def end_move(self, request: requests.EndMove) -> None:
        """The move ends, by the new map or the old one."""
        with self.working:
            request = replace(request, token=request.token or self._past(request.epoch))
            if request.token == self._engine.last_move:
                if not request.is_committed:
                    raise ProtocolError(f"move {request.token} has ended by the new map")
                return
            is_known = self._move is not None and self._move.token == request.token
            if not (is_known or request.is_committed):
                return
            move = self._required(request.token)
            if request.is_committed:
                if move.prepared is None:
                    raise ProtocolError(f"move {request.token} is not prepared")
                self._commit(move, move.prepared)
                self._engine.last_move = move.token
            else:
                self._engine.parameters.place(
                    self._engine.shard_map, self._engine.owner.server_index
                )
            self._ended.append(move.token)
            with self._lock:
                self._move, self._engine.moves_shards = None, False
                move.disturbed_by = "a move that was ended"
            # Later: calls wait for the end of the move.
            drops = threading.Thread(target=self._engine.parameters.drop_others, name="drops")
            self._dropping = drops
            drops.start()
        index, servers = self._engine.owner.server_index, self._engine.shard_map.servers
        has_left = request.is_committed and index not in servers
        if has_left:
            self._engine.job.move_away()
        self._release()
        self._engine.job.pushes.look_again()
        logger.info(
            "move ended token=%s committed=%s epoch=%d",
            request.token,
            request.is_committed,
            self._engine.shard_map.epoch,
        )
        if has_left:
            self.on_drained()

    def _past(self, epoch: int) -> str:
        """Returns the token of the move under way if the first server's map of this epoch tells its end.

        No map of a server's cluster could follow without the end of its move. Else that of the last move.
        """
        move, is_spare = self._move, self._engine.owner.server_index == NO_SERVER
        is_past = move is not None and not is_spare and move.next_map.epoch <= epoch
        return move.token if move is not None and is_past else self._engine.last_move

    def _commit(self, move: _Move, prepared: requests.PrepareMove) -> None:
        engine = self._engine
        blocks = engine.parameters.moved_blocks(move.next_map, prepared.server)
        engine.place(move.next_map, prepared.server, blocks)
        if prepared.records:
            state = STATE_JSON.validate_json(bytes(prepared.records[0].payload))
            engine.restore(state.jobs_before, state.job)
            records = [Record(each.kind, each.payload) for each in prepared.records[1:]]
            waiting = [each for each in records if each.kind not in _DECLARES]
            self._take_over(state.completed, waiting)
        engine.job.pushes.lower(prepared.progress)

    def _required(self, token: str) -> _Move:
        if (move := self._move) is None or move.token != token:
            raise ProtocolError(f"move {token} is not under way: it was ended")
        move.silent_s = 0.0
        return move

    def _require_live(self, move: _Move) -> None:
        """Refuses a server that was restarted: nothing waits there, so it may have more than the cut."""
        if not move.is_live and self._engine.owner.server_index != NO_SERVER:
            raise ProtocolError("the server was restarted since the move began: begin another")

    # Time, and a recovery

    def pass_time(self, seconds: float, *, is_silent: bool) -> None:
        """Time passes for the move under way; `is_silent`: no call of its driver is being carried out."""
        with self._lock:
            if (move := self._move) is None:
                return
            move.silent_s += seconds if is_silent else 0.0
            # While parts of a step are awaited, nobody waits for the move.
            is_held = move.phase is Phase.CLOSE or not self._engine.job.pushes.in_steps
            move.held_s += seconds if move.phase is not None and is_held else 0.0

    def overdue(self) -> requests.EndMove | None:
        """Returns how the move is to be ended now, None: it is not; needs `working`."""
        with self._lock:
            if (move := self._move) is None:
                return None
            if move.prepared is not None and self._engine.owner.server_index != 0:
                self._say_that_it_waits(move)
                return None
            if move.silent_s < SILENT_S and move.held_s < HELD_S:
                return None
            logger.warning(
                "move ended, as its driver was silent for too long: token=%s", move.token
            )
            return requests.EndMove(token=move.token, is_committed=False)

    def _say_that_it_waits(self, move: _Move) -> None:
        """Now and then: one that was away at the end, and is in no map since, has no callers to tell it."""
        if move.silent_s >= SILENT_S:
            move.silent_s = 0.0
            index, shard_map = self._engine.owner.server_index, self._engine.shard_map
            own = shard_map.endpoint_of(max(index, 0))  # the map of one to be added has it alone
            logger.warning(
                "prepared to end a move, but not told how: ps-cluster %s status tells it token=%s",
                f"{move.next_map.endpoint_of(0)},{own}",
                move.token,
            )

    def recovered(self) -> None:
        """The log was carried out again: a move that is not prepared lacks what was removed meanwhile."""
        with self._lock:
            if self._move is not None:
                self._move.is_live = False


_DECLARES = {calls.CREATE_TABLE.name, calls.CREATE_DENSE.name}
