"""Handlers: how a server answers each call of protos/wire/calls.py, without gRPC.

    request --> admitted --> written to the journal --> carried out by the engine --> answer

A call without a handler here is the method of the same name of the engine, or of its job's rendezvous.
"""

import logging
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any, TypeVar

from ctr_ps.protos.chunking import KEY_BYTES, VALUE_BYTES, PushChunk, require_piece_fits
from ctr_ps.protos.errors import ProtocolError, RecoveringError
from ctr_ps.protos.format import require_format
from ctr_ps.protos.futures import Answered, Future, WaitingFuture
from ctr_ps.protos.limits import MAX_NUMBERS_BYTES
from ctr_ps.protos.placement import NO_SERVER, STARTED_EMPTY
from ctr_ps.protos.spec import DenseSpec
from ctr_ps.protos.store import (
    Changed,
    Joined,
    Member,
    Pulled,
    PulledPieces,
    PushedPulled,
    ServerStatus,
    Shrunk,
    StateChunk,
    StreamOffer,
    Version,
)
from ctr_ps.protos.wire import requests
from ctr_ps.protos.wire.calls import (
    CALLS,
    END_MOVE,
    PULL_DENSE,
    PULL_SPARSE,
    PUSH_GRAD,
    PUSH_PULL,
    Call,
)
from ctr_ps.ps_server.checkpoint.files.manifest import share_to_json
from ctr_ps.ps_server.durability.segments import Record
from ctr_ps.ps_server.engine.engine import Engine
from ctr_ps.ps_server.precompile import Kernels
from ctr_ps.ps_server.rpc.completed_calls import CompletedCalls
from ctr_ps.ps_server.rpc.journal import CompletedState
from ctr_ps.ps_server.rpc.moves import IN_ORDER, Moves
from ctr_ps.ps_server.rpc.recovery import replay_record

logger = logging.getLogger(__name__)

Q = TypeVar("Q")
A = TypeVar("A")
P = TypeVar("P", Pulled, PulledPieces)

_REMEMBERED_SHRINKS = 4096
_REMEMBERED_LOADS = 64

_VALUES_A_SEGMENT = 3000  # its checks take 10 µs and more
_VALUES_A_KEY = 10  # a guess at the dim: a pull's keys do not say what they will read


def method_name(call: str) -> str:
    """Returns the name of the method that answers a call: get_status for GetStatus."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", call).lower()


def answer_of_parts(answers: Sequence[Any]) -> Any:
    """Returns the answer of a call, of those of its parts."""
    return PushedPulled(*answers) if len(answers) > 1 else answers[0]


def _member_of(request: Any) -> Member | None:
    """Returns the process that a request comes from, which has to have joined; None: anybody may ask."""
    if isinstance(request, requests.Join):
        return None
    if isinstance(request, requests.PushGrad | requests.PushState):
        return Member(request.push_id.worker, request.push_id.incarnation)
    member: Member | None = getattr(request, "member", None)
    return member


def _require_answer_fits(num_bytes: int, what: str) -> None:
    """Raises ProtocolError if an answer of `num_bytes` fits no message; before memory is taken for it."""
    if num_bytes > MAX_NUMBERS_BYTES:
        raise ProtocolError(
            f"the answer to {what} would have {num_bytes} bytes, more than the limit of "
            f"{MAX_NUMBERS_BYTES}: ask for less in one call"
        )


def _require_exact_steps(
    sent: requests.PullSparse | requests.PullDense | PushChunk, at: Version | None
) -> None:
    """Raises ProtocolError if numbers of a synchronous step would be rounded."""
    if sent.bfloat16 and at is not None:
        raise ProtocolError(
            f"step {at} sends bfloat16, but synchronous steps need float32: bfloat16 is for calls without a "
            "version, as in asynchronous training"
        )


def _sent_as_asked(
    pulled: Future[P], request: requests.PullSparse | requests.PullDense
) -> Future[P]:
    """Returns the answer, marked if bfloat16 is asked for; then it waits for no version, so it is there."""
    return Answered(replace(pulled.result(), bfloat16=True)) if request.bfloat16 else pulled


_PLACED = (
    requests.PullSparse,
    requests.PullDense,
    requests.PullChanged,
    requests.PullState,
    requests.PushGrad,
    requests.PushState,
)
"""Requests that the client's shard map has routed here; they say its epoch."""

_ARRIVALS = ("barrier", "all_reduce")  # at which a worker leaves the steps that follow
_OF_RENDEZVOUS = (*_ARRIVALS, "advance", "take", "take_file")


class Handlers:
    """Answers calls by an engine. Thread-safe."""

    def __init__(
        self,
        engine: Engine,
        on_all_left: Callable[[], None] = lambda: None,
        *,
        kernels: Kernels | None = None,
    ) -> None:
        """Calls `on_all_left` when the last worker has left.

        Of `kernels`, those are compiled that a table needs before it is created; None: as they are first run.
        """
        self.engine = engine
        self.stream: StreamOffer | None = None  # what clients are told of it
        self._kernels = kernels
        self._on_all_left = on_all_left
        self._logged: set[str] = set()
        self._completed = CompletedCalls()
        self.moves = Moves(engine, completed=self.completed, take_over=self._take_over)
        self._handlers: dict[str, Callable[[Any], Any]] = {
            name: self._handler_of(name) for name in CALLS if name != PUSH_PULL.name
        }

    def parts_of(self, call: Call[Any, Any], argument: Any) -> Sequence[tuple[Call[Any, Any], Any]]:
        """Returns the calls that a call consists of, each to be started when the one before is answered.

        Raises ProtocolError if it has a chunk of a push, its answer would fit no message, or a step's numbers
        would be rounded; RecoveringError if this server waits to be added, and the call is for one that was.
        """
        self._require_added(argument.push if isinstance(argument, requests.PushPull) else argument)
        if not isinstance(argument, requests.PushPull):
            return ((call, argument),)
        if argument.push.chunk.num_chunks != 1:
            raise ProtocolError("PushPull has one chunk of a push, expected a whole push")
        blocks = set(argument.dense.blocks)
        size = self._bytes_of_rows(argument.sparse) + self._bytes_of_pieces(blocks)
        _require_answer_fits(size, "a push with pulls")
        _require_exact_steps(argument.push.chunk, argument.push.at)
        for pull in (argument.sparse, argument.dense):
            _require_exact_steps(pull, pull.at)
        return (
            (PUSH_GRAD, argument.push),
            (PULL_SPARSE, argument.sparse),
            (PULL_DENSE, argument.dense),
        )

    def _require_added(self, argument: Any) -> None:
        engine = self.engine
        if (
            engine.owner.server_index == NO_SERVER
            and getattr(argument, "shard_map_epoch", 0) > engine.shard_map.epoch
            and not self.moves.is_under_way
        ):
            why = f"this server {STARTED_EMPTY}"
            self._log_once(f"workers of a cluster call, but {why}", logging.WARNING)
            raise RecoveringError(why)

    def start(self, call: Call[Q, A], argument: Q, payload: bytes | None = None) -> Future[A]:
        """Starts a call, or one of its parts; its answer may wait for other workers.

        `payload` are the bytes of the message that it came as; None: it did not come over the wire.
        """
        epoch = getattr(argument, "shard_map_epoch", 0)
        if epoch or isinstance(argument, _PLACED):
            self._require_epoch(epoch)
        self._prepare(call, argument)
        if call.name not in IN_ORDER:
            return self._start(call, argument, payload)
        with self.moves.working:
            if (end := self.moves.before(argument)) is not None:
                self._carry_out(END_MOVE, end)
            return self._start(call, argument, payload)

    def pass_time(self, seconds: float) -> None:
        """Time passes for a move that is under way; waits for no call, such as a load: leases run on."""
        is_silent = self.moves.working.acquire(blocking=False)
        try:
            self.moves.pass_time(seconds, is_silent=is_silent)
            if is_silent and (end := self.moves.overdue()) is not None:
                self._carry_out(END_MOVE, end)
        finally:
            if is_silent:
                self.moves.working.release()

    def _start(self, call: Call[Q, A], argument: Q, payload: bytes | None) -> Future[A]:
        if isinstance(argument, requests.Join):
            require_format(argument.format, self.engine.members.name(argument.member.worker))
            with self.engine.places:
                return self._carry_out(call, argument, payload)
        if isinstance(argument, requests.Renew) and argument.is_last:
            # No sign of life: another may wait for its place.
            self.engine.job.require_place(argument.member)
        elif (member := _member_of(argument)) is not None:
            with self.engine.calling(member, getattr(argument, "acknowledged", None)):
                is_taken = isinstance(argument, requests.TakeFile)
                is_given_back = isinstance(argument, requests.Leave) and self.engine.job.deals_files
                with self.engine.places if is_taken or is_given_back else nullcontext():
                    return self._carry_out(call, argument, payload)
        return self._carry_out(call, argument, payload)

    def _prepare(self, call: Call[Any, Any], argument: Any) -> None:
        """Compiles what a call declares or loads; before any lock is held."""
        if self._kernels is None:
            return
        if call.declares is not None:
            self._kernels.prepare(call.declares(argument))
        elif isinstance(argument, requests.Load):
            self._kernels.prepare_loading()

    def _carry_out(self, call: Call[Q, A], argument: Q, payload: bytes | None = None) -> Future[A]:
        if isinstance(argument, requests.Load | requests.Shrink):
            # First, as for a snapshot: it has its turn before it has the journal alone.
            with self.engine.snapshots.between_saves(f"a {call.name.lower()}"):
                answer = self._log_and_handle(call, argument, payload)
        else:
            answer = self._log_and_handle(call, argument, payload)
        return answer if isinstance(answer, WaitingFuture | Answered) else Answered(answer)

    def _log_and_handle(self, call: Call[Any, Any], argument: Any, payload: bytes | None) -> Any:
        handler, engine = self._handlers[call.name], self.engine
        is_dry_run = isinstance(argument, requests.Shrink) and argument.dry_run
        if not (call.is_logged and engine.keeps_log) or is_dry_run:
            return handler(argument)
        record = call.request.encode(argument) if payload is None else payload
        with engine.journal.written(call.name, record):
            return handler(argument)

    def replay(self, name: str, request: bytes) -> None:
        """Carries out a logged call once more; nobody waits for its answer.

        It is no sign of life: in the log, these are records of their own.
        """
        call = CALLS[name]
        argument = call.request.decode(request)
        if (member := _member_of(argument)) is not None:
            self.engine.job.require_place(member)
        self._prepare(call, argument)
        self._carry_out(call, argument)

    def _take_over(self, completed: CompletedState, records: Sequence[Record]) -> None:
        self.restore_completed(completed)
        with self.engine.recovering(lambda: None):
            for record in records:
                replay_record(record, self.engine, self.replay)

    def completed(self) -> CompletedState:
        """Returns the calls of this job that are not carried out again."""
        workers = range(self.engine.members.total)
        return CompletedState(
            shrinks={each: self._completed.answers(self._shrinks_of(each)) for each in workers},
            loads={each: [*self._completed.answers(("Load", each))] for each in workers},
        )

    def restore_completed(self, completed: CompletedState) -> None:
        """Takes over what `completed` returned."""
        for worker, by_number in completed.shrinks.items():
            self._completed.restore(self._shrinks_of(worker), by_number)
        for worker, loads in completed.loads.items():
            self._completed.restore(("Load", worker), dict.fromkeys(loads))

    def _shrinks_of(self, worker: int) -> tuple[str, int, int]:
        """By worker, not by process: one that takes another's place comes to the same shrinks again."""
        return "Shrink", worker, self.engine.jobs_before

    def end_if_all_left(self) -> None:
        """Ends the job if all workers have left; to be called on the server's event loop, so once a job."""
        if self.engine.job.all_left():
            self._on_all_left()

    def work(self, call: Call[Q, Any], argument: Q) -> float:
        """Returns about how many numbers a call touches; infinite for long calls."""
        match argument:
            case requests.PullSparse():
                return _VALUES_A_KEY * sum(keys.size for keys in argument.keys.values())
            case requests.PullDense():
                return sum(map(self._piece_length, argument.blocks))
            case requests.PullState():
                return self._values_of(argument)
            case requests.PushGrad() | requests.PushState():
                return argument.chunk.num_chunks * argument.chunk.num_values
        spec = None if call.declares is None else call.declares(argument)
        kernels = self._kernels
        must_compile = spec is not None and kernels is not None and not kernels.are_ready(spec)
        if call.is_long or must_compile:
            return math.inf
        return (
            spec.length + _VALUES_A_SEGMENT * len(spec.segments)
            if isinstance(spec, DenseSpec)
            else 0
        )

    def _handler_of(self, name: str) -> Callable[[Any], Any]:
        method = method_name(name)
        handler: Callable[[Any], Any] | None = getattr(self, f"_{method}", None)
        if handler is not None:
            return handler
        if hasattr(self.moves, method):
            return self._of_moves(getattr(self.moves, method))

        def call_engine(argument: Any) -> Any:
            values = {field.name: getattr(argument, field.name) for field in fields(argument)}
            if (member := values.pop("member", None)) is not None:
                values["worker"] = member.worker
            values.pop("acknowledged", None)
            values.pop("shard_map_epoch", None)
            owner = self.engine.job.rendezvous if method in _OF_RENDEZVOUS else self.engine
            answer = getattr(owner, method)(**values)
            if method in _ARRIVALS:
                self.engine.apply_complete_steps()
            return answer

        return call_engine

    def _of_moves(self, method: Callable[..., Any]) -> Callable[[Any], Any]:
        return lambda request: method() if request is None else method(request)

    def _join(self, request: requests.Join) -> Future[Joined]:
        member = request.member
        joined = self.engine.job.join(
            member,
            request.terms,
            request.lease,
            only_asks=request.only_asks,
            format=request.format,
        )
        name = self.engine.members.name(member.worker)
        if not request.only_asks:
            logger.info("%s joins", name)
        elif isinstance(joined, WaitingFuture):
            logger.info("another process waits to take over as %s", name)
        return joined

    def _create_table(self, request: requests.CreateTable) -> None:
        spec = request.spec
        self.engine.parameters.create_table(spec)
        self._log_once(f"table created table={spec.name} dim={spec.dim}")

    def _create_dense(self, request: requests.CreateDense) -> None:
        spec = request.spec
        require_piece_fits(spec, self.engine.shard_map.num_servers)
        self.engine.parameters.create_dense(spec, request.values)
        self._log_once(f"dense block created block={spec.name} length={spec.length}")

    def _pull_sparse(self, request: requests.PullSparse) -> Future[Pulled]:
        size = self._bytes_of_rows(request)
        _require_answer_fits(size, f"a pull from the tables {sorted(request.keys)}")
        _require_exact_steps(request, request.at)
        pulled = self.engine.pulls.sparse(
            self.engine.job, request.keys, missing=request.missing, at=request.at
        )
        return _sent_as_asked(pulled, request)

    def _bytes_of_rows(self, request: requests.PullSparse) -> int:
        rows = request.keys.items()
        return sum(VALUE_BYTES * self._dim(table) * keys.size for table, keys in rows)

    def _dim(self, table: str) -> int:
        return self.engine.parameters.table(table).spec.dim

    def _piece_length(self, block: str) -> int:
        return self.engine.parameters.block(block).length

    def _bytes_of_pieces(self, blocks: Collection[str]) -> int:
        return VALUE_BYTES * sum(map(self._piece_length, blocks))

    def _pull_state(self, request: requests.PullState) -> Future[StateChunk]:
        for stretch in request.stretches:
            length = self._piece_length(stretch.block)
            if not 0 <= stretch.start <= stretch.stop <= length:
                raise ProtocolError(
                    f"elements {stretch.start} to {stretch.stop} of dense block {stretch.block!r} were "
                    f"requested, but the block has {length} on this server"
                )
        _require_answer_fits(VALUE_BYTES * self._values_of(request), "a pull of rows and state")
        found = self.engine.pulls.state_chunk(self.engine.job, request.keys, request.stretches)
        self._require_epoch(request.shard_map_epoch)  # again, as for dense blocks
        return found

    def _values_of(self, request: requests.PullState) -> int:
        """Returns the float32 numbers of the answer; a key counts as two."""
        parameters = self.engine.parameters
        rows = sum(
            (2 + parameters.row_width(table)) * keys.size for table, keys in request.keys.items()
        )
        return rows + sum(map(parameters.stretch_values, request.stretches))

    def _push_state(self, request: requests.PushState) -> Future[Version]:
        return self.engine.push_chunk(request.chunk, request.push_id)

    def _pull_changed(self, request: requests.PullChanged) -> Changed:
        dims = map(self._dim, request.tables)
        row_bytes = KEY_BYTES + VALUE_BYTES * max(dims, default=0)
        _require_answer_fits(row_bytes * request.max_rows, f"{request.max_rows} changed rows")
        worker, incarnation = request.member.worker, request.member.incarnation
        caller, epoch = ("PullChanged", worker), request.shard_map_epoch

        def take() -> tuple[int, Changed]:
            if any(
                of == incarnation and request.number < number
                for of, number in self._completed.answers(caller)
            ):
                raise ProtocolError(
                    f"PullChanged {request.number} of {self.engine.members.name(worker)} arrived after a "
                    "later one: the answer would be lost, and its rows missing from the replica"
                )
            engine = self.engine
            changed = engine.pulls.changed(
                engine.job, request.tables, worker, max_rows=request.max_rows
            )
            return epoch, changed.result()

        # Rows in an answer count as known to the worker: only the same answer again makes good a lost one.
        taken_in, changed = self._completed.once(
            caller, (incarnation, request.number), take, remembered=1
        )
        return changed if taken_in == epoch else self._still_here(changed)

    def _still_here(self, changed: Changed) -> Changed:
        """Leaves out rows that have moved away since: their new server has them all, and newer ones."""
        rows = {}
        for table, (keys, weights) in changed.rows.items():
            here = self.engine.parameters.table(table).own(keys)
            rows[table] = keys[here], weights[here]
        return replace(changed, rows=rows)

    def _pull_dense(self, request: requests.PullDense) -> Future[PulledPieces]:
        blocks = sorted(set(request.blocks))
        _require_answer_fits(self._bytes_of_pieces(blocks), f"a pull of the dense blocks {blocks}")
        _require_exact_steps(request, request.at)
        pulled = self.engine.pulls.pieces(self.engine.job, request.blocks, at=request.at)
        self._require_epoch(request.shard_map_epoch)  # again: pieces may be of a new map since
        return _sent_as_asked(pulled, request)

    def _push_grad(self, request: requests.PushGrad) -> Future[Version]:
        _require_exact_steps(request.chunk, request.at)
        return self.engine.push_chunk(request.chunk, request.push_id, at=request.at)

    def _post(self, request: requests.Post) -> Future[None]:
        if request.message.sender != request.member.worker:
            raise ProtocolError(
                f"worker {request.member.worker} posted a message in the name of worker "
                f"{request.message.sender}"
            )
        return self.engine.job.rendezvous.post(request.exchange, request.message)

    def _leave(self, request: requests.Leave) -> None:
        worker = request.member.worker
        self.engine.leave(worker, step=request.step)
        logger.info("%s left step=%d", self.engine.members.name(worker), request.step)

    def _snapshot(self, request: requests.Snapshot) -> None:
        self.engine.snapshot(request.token, request.base)

    def _save(self, request: requests.Save) -> str:
        def save() -> str:
            share = self.engine.save_share(request.folder, request.token, request.inference)
            if request.inference is None:
                self.engine.journal.saved(request.token, request.folder)
            logger.info("saved folder=%s files=%d", request.folder, len(share.entries))
            return share_to_json(share)

        return self._completed.once("Save", request.token, save, remembered=1)

    def _load(self, request: requests.Load) -> None:
        def load() -> None:
            self.engine.load(request.url, only=request.only, token=request.token)
            logger.info("loaded folder=%s", request.url)

        # One that comes late, after its answer was lost, would undo the training since.
        member = request.member
        self._completed.once(
            ("Load", member.worker),
            (member.incarnation, request.number),
            load,
            remembered=_REMEMBERED_LOADS,
        )

    def _resume(self, request: requests.Resume) -> None:
        self.engine.job.resume(request.version, request.progress, request.batches)
        logger.info("resumed version=%d batches=%d", request.version, request.batches)

    def _shrink(self, request: requests.Shrink) -> Mapping[str, Shrunk]:
        def shrink() -> Mapping[str, Shrunk]:
            return self.engine.parameters.shrink(max_norm=request.max_norm, dry_run=request.dry_run)

        if request.dry_run:
            return shrink()
        shrunk = self._completed.once(
            self._shrinks_of(request.member.worker),
            request.number,
            shrink,
            remembered=_REMEMBERED_SHRINKS,
        )
        total = sum(shrunk.values(), Shrunk())
        logger.info("shrunk removed_rows=%d left_rows=%d", total.rows, total.left_rows)
        return shrunk

    def _get_digest(self, _: None) -> Mapping[tuple[str, int], bytes]:
        return self.engine.parameters.shard_digests()

    def _get_status(self, _: None) -> ServerStatus:
        owner = self.engine.owner
        return ServerStatus(
            self.engine.status(),
            owner.server_index,
            owner.num_servers,
            self.stream,
            self.engine.shard_map.epoch,
        )

    def _require_epoch(self, epoch: int) -> None:
        self.moves.require_not_before(epoch)
        self.engine.shard_map.require_epoch(epoch, self.engine.owner.server_index)

    def _log_once(self, event: str, level: int = logging.INFO) -> None:
        if event not in self._logged:
            self._logged.add(event)
            logger.log(level, event)
